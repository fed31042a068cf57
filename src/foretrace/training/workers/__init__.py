"""Who trains what and who agrees when: data parallelism with PyTorch, and policies by which workers agree."""
