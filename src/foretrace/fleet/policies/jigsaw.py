"""JigSaw (arXiv 2111.10672) in a cluster: two jobs with partial backpropagation fill each other's gaps on their GPUs.

Which pairs share GPUs is decided as in `packing`; how fast they are says the model
of speed: `JigsawSpeeds` in reproductions/jigsaw plays their iterations.
"""

from __future__ import annotations

from foretrace.fleet.policies.packing import pack
from foretrace.fleet.policy import Policy


def jigsaw(*, threshold: float = 1.0, consolidate: bool = True) -> Policy:
    """In order of submission; where no GPU is free, two jobs of equally many workers interleave their iterations if
    together they do more than `threshold` times what one does alone. It needs a model of speed that knows pairs, such
    as `JigsawSpeeds`. consolidate: wait for the tightest unit that can hold the job.
    """
    return pack("jigsaw", threshold, consolidate)
