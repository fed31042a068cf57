"""Tiresias' simulator on 500 jobs of Philly: mean and every job's completion time.

python -m reproductions tiresias [--json]
python -m reproductions tiresias play philly_500.csv --policy dlas --cluster 1x32x4
"""

from __future__ import annotations

from collections.abc import Sequence

from reproductions import simulators
from reproductions.simulators import Known
from reproductions.tiresias.simulator import Tiresias

SIMULATOR = Tiresias()
KNOWN = tuple(
    Known(
        trace="repro/philly_ee9e8c_500.csv",
        policy=policy,
        cluster="1x32x4",
        mean_jct_s=mean_jct_s,
        shipped=f"repro/tiresias_n32g4_philly500_{policy}.job.csv",
    )
    for policy, mean_jct_s in (("fifo", 169792.966), ("fjf", 149081.112), ("shortest", 129145.68), ("dlas", 140965.656))
)


def main(given: Sequence[str]) -> int:
    return simulators.main(SIMULATOR, KNOWN, given, about=__doc__ or "")
