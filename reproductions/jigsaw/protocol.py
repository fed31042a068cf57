"""JigSaw with partial backpropagation: what sharing the GPUs gains, and what partial backpropagation adds.

python -m reproductions jigsaw [--quick] [--recording RUN ...] [--write README.md] [--json]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from foretrace.cli.options import progress
from reproductions import parser_of
from reproductions.jigsaw import section, study


def main(given: Sequence[str]) -> int:
    parser = parser_of("jigsaw", __doc__)
    parser.add_argument("--seeds", type=int, default=20, help="repetitions behind an interval")
    parser.add_argument("--quick", action="store_true", help="a few cells of each table, in about a minute")
    parser.add_argument("--recording", type=Path, action="append", default=[], help="a recorded job; repeat it")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the tables into this page, too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    with progress("playing the JigSaw study") as tell:
        found = study.run_study(
            seeds=options.seeds, quick=options.quick, recordings=options.recording,
            progress=(lambda done, all_: tell(done / all_)) if tell else None,
        )  # fmt: skip
    if options.write is not None:
        section.write(found, options.write)
    words = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if options.json else ""
    print(words or section.section(found))
    return 0
