"""PolyThrottle (Yan et al., arXiv 2310.19991): less energy under a latency limit, on recorded trainings."""
