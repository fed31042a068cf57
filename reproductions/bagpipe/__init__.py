"""Bagpipe (Agarwal et al., arXiv 2202.12429): look-ahead over embedding rows of a server."""
