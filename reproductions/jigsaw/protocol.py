"""JigSaw with partial backpropagation: what sharing the GPUs gains, and what partial backpropagation adds.

python -m reproductions jigsaw [--quick] [--recording RUN ...] [--write README.md] [--json]
python -m reproductions jigsaw --switch [--write README.md] [--json]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from foretrace.cli.options import progress
from foretrace.experiment.ledger import export_lines
from foretrace.files import write_text
from reproductions import ROOT, parser_of
from reproductions.jigsaw import section, study, switching

ROWS = ROOT / "benchmarks" / "data" / "job_switches.jsonl"


def main(given: Sequence[str]) -> int:
    parser = parser_of("jigsaw", __doc__)
    parser.add_argument("--seeds", type=int, default=20, help="repetitions behind an interval")
    parser.add_argument("--quick", action="store_true", help="a few cells of each table, in about a minute")
    parser.add_argument("--recording", type=Path, action="append", default=[], help="a recorded job; repeat it")
    parser.add_argument("--switch", action="store_true", help="measure what a switch costs on real processes instead")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the tables into this page, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    found: Any
    with progress("playing the JigSaw study") as tell:
        if options.switch:
            found = switching.measure(switching.PAIRS[: 1 if options.quick else None], tell=tell)
            lines, marks = switching.section(found), switching.MARKS
        else:
            found = study.run_study(
                seeds=options.seeds, quick=options.quick, recordings=options.recording,
                progress=(lambda done, all_: tell(done / all_)) if tell else None,
            )  # fmt: skip
            lines, marks = section.section(found), section.MARKS
    if options.write is not None:
        section.put(lines, options.write, marks)
        if options.switch and not options.quick:
            write_text(ROWS, export_lines([each.row() for each in found]))
    words = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if options.json else ""
    print(words or lines)
    return 0
