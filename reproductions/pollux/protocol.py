"""Pollux' simulator on its sixth workload: the published mean completion times of three policies.

python -m reproductions pollux [--quick] [--json]        # --quick leaves out the genetic search
python -m reproductions pollux play workload-6.csv --policy tiresias
"""

from __future__ import annotations

from collections.abc import Sequence

from reproductions import simulators
from reproductions.pollux.simulator import PolluxSimulator
from reproductions.simulators import Known

_TRACE = "pollux/workloads/workload-6.csv"
SIMULATOR = PolluxSimulator()
KNOWN = (
    Known(trace=_TRACE, policy="tiresias", cluster="16x4", mean_jct_s=3469.69375),
    Known(trace=_TRACE, policy="optimus", cluster="16x4", mean_jct_s=5301.875),
    Known(
        trace=_TRACE, policy="pollux", cluster="16x4", mean_jct_s=2446.13125, near="random search, 5 %",
        options={"generations": "30", "population": "50"}, slow=True,
    ),
)  # fmt: skip


def main(given: Sequence[str]) -> int:
    return simulators.main(SIMULATOR, KNOWN, given, about=__doc__ or "")
