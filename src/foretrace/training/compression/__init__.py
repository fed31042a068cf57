"""Real compressors of gradients and activations: codecs, hooks of DistributedDataParallel, modules at boundaries."""
