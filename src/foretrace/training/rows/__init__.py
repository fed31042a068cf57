"""What a batch reads: rows of embedding tables and of node features, and the neighbours of nodes."""
