"""Every reader of the project, with small samples of what it reads, and ways to damage them."""
