"""MariusGNN (Waleffe et al., EuroSys 2023): its orders, memory and quality."""
