"""Packrat (Bhardwaj et al., arXiv 2311.18174): its published splits of a processor among instances of a model."""
