"""Dally's claims on jobs like its own: against whom, and where, each published figure is reached.

    python -m reproductions dally [--quick] [--trace philly.csv.gz] [--out FOLDER] [--write README.md] [--json]

Every cell is a file of the folder; a study that is stopped goes on where it was. The whole takes half an hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from foretrace.cli.options import progress
from reproductions import parser_of
from reproductions.dally import study, tables


def main(given: Sequence[str]) -> int:
    parser = parser_of("dally", __doc__)
    parser.add_argument("--out", type=Path, default=Path("dally-cells"), help="where cells are kept")
    parser.add_argument("--seeds", type=int, default=20, help="repetitions behind an interval")
    parser.add_argument("--quick", action="store_true", help="a few cells of each table, in about a minute")
    parser.add_argument("--trace", type=Path, help="a log (Philly) for the sample of real jobs")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the tables into this page, too")
    parser.add_argument("--on", default="here", choices=("here", "ray"), help="where cells are played")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    with progress("playing the Dally study") as tell:
        found = study.run_study(
            folder=options.out, seeds=options.seeds, quick=options.quick, trace=options.trace, on=options.on,
            progress=tell,
        )  # fmt: skip
    if options.write is not None:
        tables.write(found, options.write)
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if options.json else tables.section(found))
    return 0
