"""Which device keeps which rows of embedding tables (OPER, USENIX ATC 2024)."""
