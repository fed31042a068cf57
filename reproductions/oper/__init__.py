"""OPER: where its published speed-ups of embedding tables are reached, by pooling, skew and locality."""
