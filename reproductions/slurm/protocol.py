"""The fleet's simulation of Slurm against a real Slurm: 200 jobs and more per workload, job by job.

python -m reproductions slurm [--run] [--rules] [--repeats N] [--together N] [--quick] [--write README.md] [--json]

Without --run the runs that are kept are simulated again, in about a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from foretrace.errors import ForetraceError
from reproductions import parser_of
from reproductions.slurm import rules, runs, section
from reproductions.slurm.cells import cells


def main(given: Sequence[str]) -> int:
    parser = parser_of("slurm", __doc__)
    parser.add_argument("--run", action="store_true", help="play what is not kept yet, in real time (hours)")
    parser.add_argument("--rules", action="store_true", help="with --run: the small workloads of single rules only")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each workload")
    parser.add_argument("--together", type=int, default=4, help="private Slurms at the same time")
    parser.add_argument("--quick", action="store_true", help="the first two workloads only")
    parser.add_argument("--runs", type=Path, default=runs.RUNS, help="where runs are kept")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table into this page, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    asked = list(cells())[: 2 if options.quick else None]
    if options.run and options.rules:
        rules.play_rules(repeats=options.repeats, together=options.together, path=rules.RUNS)
    elif options.run:
        runs.run(asked, repeats=options.repeats, together=options.together, path=options.runs)
    have = [each for each in runs.stored(options.runs) if not options.quick or tuple(each["cell"]) in asked]
    if not have:
        raise ForetraceError(f"no runs are kept in {options.runs}; play some with --run.")
    found, single = runs.rows([] if options.rules else have), rules.rule_rows(runs.stored(rules.RUNS))
    if options.write is not None:
        section.write(found, single, options.write)
    words = msgspec.json.format(msgspec.json.encode([*found, *single]), indent=2).decode() if options.json else ""
    print(words or section.section(found, single))
    return 0
