"""Gavel's simulator on its own traces, and its generator of jobs.

python -m reproductions gavel [--quick] [--json]         # --quick leaves out the thousand jobs under AlloX
python -m reproductions gavel play jobs.csv --policy allox --cluster 36:36:36 --measure 4000-4999
python -m reproductions gavel generate --throughputs FILE --jobs 5000 --interarrival-s 400 --seed 42 --out jobs.csv
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foretrace.fleet.formats import write_csv
from foretrace.fleet.speeds.throughputs import ThroughputTable
from reproductions import parser_of, simulators
from reproductions.gavel.generator import generate
from reproductions.gavel.simulator import Gavel
from reproductions.simulators import Known

_TRACE = "gavel/physical_cluster/max_min_fairness.trace"
SIMULATOR = Gavel()
KNOWN = (
    Known(
        trace="gavel/generated_seed42_lam9000.csv.gz", policy="allox", cluster="36:36:36", mean_jct_s=59492.106756,
        jobs="4000-4999", slow=True,
    ),
    Known(trace=_TRACE, policy="fifo", cluster="4:4:4", mean_jct_s=99257.864),
    Known(trace=_TRACE, policy="gandiva", cluster="4:4:4", mean_jct_s=63617.345),
    Known(trace=_TRACE, policy="max_min_fairness", cluster="4:4:4", mean_jct_s=66558.675, near="LP, 1 %"),
    Known(trace=_TRACE, policy="max_min_fairness_perf", cluster="4:4:4", mean_jct_s=66166.292, near="LP, 1 %"),
    Known(trace=_TRACE, policy="finish_time_fairness_perf", cluster="4:4:4", mean_jct_s=75286.208, near="LP, 1 %"),
    Known(trace=_TRACE, policy="min_total_duration_perf", cluster="4:4:4", mean_jct_s=145188.631, near="LP, 1 %"),
)  # fmt: skip


def main(given: Sequence[str]) -> int:
    if given[:1] == ["generate"]:
        return _generate(given[1:])
    return simulators.main(SIMULATOR, KNOWN, given, about=__doc__ or "")


def _generate(given: Sequence[str]) -> int:
    """Draw jobs as Gavel's generator does, seed for seed."""
    parser = parser_of("gavel generate", _generate.__doc__)
    parser.add_argument("--throughputs", type=Path, required=True, help="its table of measured speeds")
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--interarrival-s", type=float, default=0.0, help="mean seconds between jobs (its lambda)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.csv")
    options = parser.parse_args(given)
    made = generate(
        ThroughputTable.read(options.throughputs),
        seed=options.seed,
        mean_interarrival_s=options.interarrival_s,
        jobs=options.jobs,
    )
    write_csv(made, options.out)
    print(f"{len(made):,} jobs are in {options.out}")
    return 0
