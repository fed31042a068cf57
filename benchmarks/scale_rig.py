"""Hold `foretrace scale` against real workers: two are recorded, four are predicted from them, and four are run.

    python benchmarks/scale_rig.py [--link LINK ...] [--page]

Layers sleep, so that two cores suffice; gradients, DistributedDataParallel, gloo and the links of the rig are real. The
links among two and among four are measured first, and the prediction is made before four workers run the training for
the first time. Rows are added to benchmarks/data/scaled.jsonl, the newest of each stand in docs/scale.md. It needs root
(`foretrace rig check`), takes some three minutes a link, and nothing else should use the cores meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

import msgspec
import numpy as np

from foretrace import flow
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row, export_lines, import_lines
from foretrace.experiment.links import netns
from foretrace.experiment.links.arms import make, run_steps
from foretrace.experiment.links.job import LinkJob
from foretrace.experiment.links.measure import Rig, completed, rig_for
from foretrace.experiment.messages import Make, RunSteps, Setup
from foretrace.experiment.trial import figured
from foretrace.files import write_text
from foretrace.simulate.folding import Scaling
from recorded_ranks import RecordRank, record_rank
from tables import ROOT, load, machine, percent, table, today, update

ROWS, PAGE = ROOT / "benchmarks" / "data" / "scaled.jsonl", ROOT / "docs" / "scale.md"
SECTION = "Held against four workers"
WORKS, LINKS = ("12x1mb/20ms/5ms", "24x0.5mb/10ms/3ms", "8x2mb/15ms/5ms"), ("300mbit", "200mbit")
ARM = ("data-parallel bucket_mb=4",)
FEW, MANY, STEPS, ROUNDS, BLOCK_S = 2, 4, 6, 8, 1.5


def job(work: str, link: str, workers: int) -> LinkJob:
    return LinkJob(work=work, link=link, workers=workers, arms=(ARM,))


def setup(work: str, link: str, workers: int) -> Setup:
    return Setup(work=work, techniques=completed(ARM, workers, link))


def rows_of(link: str) -> Iterator[Row]:
    """Record all trainings on two workers, then predict and run four."""
    with tempfile.TemporaryDirectory(prefix="foretrace-scale-") as name:
        folders = {work: Path(name) / work.replace("/", "-") for work in WORKS}
        with rig_for([job(work, link, FEW) for work in WORKS]) as rig:
            few = rig.measured.table
            for work, folder in folders.items():
                request = RecordRank(setup=setup(work, link, FEW), folder=str(folder), steps=STEPS)
                rig.workers.ask(record_rank, request, f"recording {work}", seconds=120.0)
        network = Path(name) / "network.json"
        with rig_for([job(work, link, MANY) for work in WORKS]) as rig:
            both = msgspec.structs.replace(few, series=(*few.series, *rig.measured.table.series))
            both.save(network)
            for work, folder in folders.items():
                predicted = flow.scale(flow.rank_graphs(folder), MANY, network=str(network))
                yield measured(rig, work, link, predicted)


def measured(rig: Rig, work: str, link: str, predicted: Scaling) -> Row:
    """Run a training on the workers of a rig and hold the prediction against it."""
    rig.workers.ask(make, Make(name=work, setup=setup(work, link, MANY)), f"making {work}")
    steps = ceil(BLOCK_S / predicted.predicted_s)
    blocks: list[float] = []
    for number in range(-1, ROUNDS):
        request = RunSteps(name=work, discarded=1, steps=steps, together=True)
        timed = rig.workers.ask(run_steps, request, f"running {work}", seconds=60.0)
        if number >= 0:
            blocks.append(max(each.wall_s for each in timed))
    trial = figured((predicted.predicted_s, predicted.low_s, predicted.high_s), blocks)
    row = trial.row(
        f"scale ranks={MANY}", model=work, size=f"{FEW} of {MANY} workers, {link}",
        parameters={"ranks": MANY, "recorded": FEW, "recorded_s": predicted.recorded_s, "link": link},
        arms={"blocks_s": blocks, "predicted_s": predicted.predicted_s}, notes=(machine(), f"load {load()}"),
    )  # fmt: skip
    print(
        f"{work}, {link}: {1e3 * predicted.recorded_s:.1f} ms on {FEW}; on {MANY} predicted "
        f"{1e3 * predicted.predicted_s:.1f} ({1e3 * predicted.low_s:.1f} - {1e3 * predicted.high_s:.1f}), measured "
        f"{1e3 * row.after_s:.1f} ms, {100 * row.error:+.2f} %, {row.verdict}", flush=True,
    )  # fmt: skip
    return row


def page(rows: Sequence[Row]) -> str:
    """The section."""
    runs: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        runs[row.model, row.size].append(row)
    newest = [row for each in runs.values() for row in each[-2:]]
    off = np.abs([row.error for row in newest])
    lines = [
        (
            f"{row.model}, {row.parameters['scale']['link']}", f"{1e3 * row.parameters['scale']['recorded_s']:.1f}",
            f"{1e3 * row.before_s:.1f}", f"{1e3 * row.predicted_low * row.before_s:.1f} – "
            f"{1e3 * row.predicted_high * row.before_s:.1f}", f"{1e3 * row.after_s:.1f}",
            percent(row.error, signed=True), str(row.verdict),
        )
        for row in newest
    ]  # fmt: skip
    return (
        f"*{today()}, {machine()}.*\n\nTwo workers are recorded on the rig ([rig.md](rig.md)), four are predicted from "
        "them over the links as they were measured, and then four are run (`python benchmarks/scale_rig.py`): the "
        "last two runs of each. Layers sleep; DistributedDataParallel with buckets of 4 MiB, gloo and links are "
        "real. Milliseconds per step, error "
        f"predicted / measured − 1 in %: median of its size {percent(float(np.median(off)))}, worst "
        f"{percent(float(off.max()))}. Buckets that are in flight together share the link, and wait longer for each "
        "other among four ([transfers](#transfers)).\n\n"
        + table(("work, link", "two, recorded", "four, predicted", "80 %", "four, measured", "error", "verdict"), lines)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", nargs="+", default=LINKS, help=", ".join(LINKS))
    parser.add_argument("--page", action="store_true", help="measure nothing; write the section from the rows kept")
    given = parser.parse_args()
    rows = list(import_lines(ROWS.read_text(encoding="utf-8"), str(ROWS))) if ROWS.exists() else []
    # Workers import `recorded_ranks`.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    if not given.page:
        netns.require()
    for link in () if given.page else given.link:
        try:
            for row in rows_of(link):
                rows.append(row)
                write_text(ROWS, export_lines(rows))
        except ForetraceError as error:
            print(f"{link}: {error}", file=sys.stderr)
    if rows:
        update(PAGE, PAGE.read_text(encoding="utf-8").split("\n## ")[0], {SECTION: page(rows)}, [SECTION])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
