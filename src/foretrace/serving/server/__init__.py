"""A server of models on the cores of one machine: how to split them (Packrat), and the server itself."""
