"""Real processes over real links of a stated bandwidth: network namespaces, shaping, distributed arms."""
