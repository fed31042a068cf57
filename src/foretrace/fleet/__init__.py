"""Many jobs on one cluster: workloads, clusters as trees, scheduling policies, and the simulator that plays them."""

from foretrace.lazy import lazily

__getattr__, __dir__, __all__ = lazily(__name__, __file__)
