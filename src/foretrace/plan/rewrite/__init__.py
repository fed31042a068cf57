"""Graph substitution: operator graphs rewritten into equal ones that run faster (MetaFlow, TASO)."""
