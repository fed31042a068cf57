"""Put stalls of known length into three real trainings and hold what `foretrace stash` says against them.

    python benchmarks/stalls.py [mlp cnn lstm] [--case NAME ...] [--note TEXT] [--page]

Cases: a loader that computes (preparation), one whose core others take meanwhile (preparation), a disk of a stated
rate (fetch), a worker that is late (interconnect), a link of a stated rate (network), and pairs. A row is a figure of a
case: what was put in, what the differential runs and the prediction from one recording say beyond the case without
stalls, and the difference as a share of the step. Rows are added to benchmarks/data/stalls.jsonl as each case ends;
docs/accuracy/stalls.md shows the newest of each. As root: the page cache and the link are real. Nothing else
should run meanwhile; what did can be noted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import hypot
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from burner import READY, Board, burnt_s, new_board
from foretrace.cost.network.network import CollectiveKind
from foretrace.errors import ForetraceError
from foretrace.experiment.collectives import calibrate
from foretrace.experiment.differential import DifferentialRequest, differential
from foretrace.experiment.stalls import Stall
from foretrace.files import write_bytes, write_text
from stalled import FILES, NBYTES, training_of
from tables import ROOT, load, machine, table, today

ROWS = ROOT / "benchmarks" / "data" / "stalls.jsonl"
PAGE = ROOT / "docs" / "accuracy" / "stalls.md"
KINDS = ("mlp", "cnn", "lstm")
MBIT = 500.0
WIRE = 1514 / 1448  # bytes of a full Ethernet frame over those of TCP's payload
PREPARE, CONTENDED, DISK, LATE = {"prepare_ms": 20}, {"contended_ms": 12}, {"disk_mb_s": 30}, {"late_ms": 20}
LINK = {"mbit": MBIT}
CASES: dict[str, dict[str, Any]] = {
    "none": {}, "preparing": PREPARE, "contention": CONTENDED, "disk": DISK, "late worker": LATE, "link": LINK,
    "preparing + disk": PREPARE | DISK, "contention + link": CONTENDED | LINK, "disk + late worker": DISK | LATE,
}  # fmt: skip
ASKED, WORKERS = 0.05, 2


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of a case; seconds per step. `reported_s` and `predicted_s` are less those of the case "none"."""

    time: str
    machine: str
    training: str
    case: str
    figure: str
    injected_s: float
    reported_s: float  # by differential runs
    low_s: float
    high_s: float
    predicted_s: float | None  # from one recording; None where it cannot hold it
    step_s: float  # the longest of the case's runs
    note: str = ""  # what else ran

    @property
    def off(self) -> float:
        """Reported less injected, as a share of the step."""
        return (self.reported_s - self.injected_s) / self.step_s

    @property
    def verdict(self) -> str:
        """Whether it is within what was asked; inconclusive where the rounds do not tell."""
        if (self.high_s - self.low_s) / 2 > ASKED * self.step_s:
            return "inconclusive"
        return "met" if abs(self.off) <= ASKED else "missed"


@contextmanager
def files() -> Iterator[Path]:
    """Batches on a disk."""
    with tempfile.TemporaryDirectory(prefix="foretrace-stalls-", dir="/var/tmp") as folder:
        data = Path(folder) / "data"
        data.mkdir()
        for i in range(FILES):
            (data / f"{i:03}").write_bytes(os.urandom(NBYTES))
        yield Path(folder)


def injected(kind: str, case: dict[str, Any], board: Path, near_s: float, nbytes: int) -> dict[str, float]:
    """Seconds per step by figure. Contention is what the burners took beside what the loader used itself.

    Workers wait for the one that loads longest, so that counts of every step. They load in step once they have joined;
    what one of them loaded before that is not of a pair.
    """
    found = {
        "preparation": case.get("prepare_ms", 0) / 1e3,
        "fetch": NBYTES / (1e6 * case["disk_mb_s"]) if "disk_mb_s" in case else 0.0,
        "interconnect": case.get("late_ms", 0) / 1e3,
    }
    if "contended_ms" in case:
        taken = [burnt_s(board, core) for core in sorted(os.sched_getaffinity(0))[:WORKERS]]
        pairs = zip(*(each[-min(map(len, taken)) :] for each in taken), strict=True)
        found["preparation"] += case["contended_ms"] / 1e3 + mean(map(max, pairs))
    if "mbit" in case:
        found["network"] = nbytes * 8 * WIRE / (1e6 * case["mbit"]) - near_s
    return found


def run(kind: str, name: str, folder: Path, near_s: float, nbytes: int, base: dict[str, Row]) -> list[Row]:
    """The rows of a case."""
    case, board = dict(CASES[name]), folder / f"{kind}-{name.replace(' ', '')}.board"
    new_board(board)
    script = folder / "train.py"
    told = {"board": str(board), **case}
    write_text(
        script,
        f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nfrom stalled import training_of\n\n\n"
        f"def training():\n    return training_of({kind!r}, {str(folder / 'data')!r}, {told!r})\n",
    )
    cores = range(os.cpu_count() or 1) if "contended_ms" in case else ()
    command = [sys.executable, str(ROOT / "benchmarks" / "burner.py"), str(board)]
    burners = [subprocess.Popen([*command, str(core)]) for core in cores]
    while not all(Board(str(board)).get(core, READY) for core in cores):
        time.sleep(0.1)
    try:
        wanted = DifferentialRequest(
            work=str(script), workers=WORKERS, link=f"{case['mbit']:g}mbit" if "mbit" in case else "",
            data=(str(folder / "data"),), steps=8 if case else 16,  # what "none" is off by, all the others are
        )  # fmt: skip
        found = differential(wanted, lambda what, share: None)
    finally:
        for each in burners:
            each.terminate()
            each.wait()
    measured = {bar.name: bar for bar in found.measured}
    predicted = {bar.name: bar for bar in found.predicted.bars}
    step_s = max(median(times) for times in found.runs_s.values())
    known = injected(kind, case, board, near_s, nbytes)
    rows = []
    for figure, bar in measured.items():
        less = base.get(figure)
        reported_s = bar.seconds - (less.reported_s if less else 0.0)
        # Both runs have a range: they add as independent errors do.
        below = hypot(bar.seconds - bar.low_s, less.high_s - less.reported_s if less else 0.0)
        above = hypot(bar.high_s - bar.seconds, less.reported_s - less.low_s if less else 0.0)
        rows.append(
            Row(
                time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", machine=machine(), training=kind, case=name,
                figure=figure, injected_s=known.get(figure, 0.0), step_s=step_s, reported_s=reported_s,
                low_s=reported_s - below, high_s=reported_s + above,
                predicted_s=_expected(figure, predicted, less, case),
            )
        )  # fmt: skip
    return rows


def _expected(figure: str, predicted: dict[str, Stall], less: Row | None, case: dict[str, Any]) -> float | None:
    """A late worker is not in the recording of another one."""
    if figure not in predicted or (figure == "interconnect" and "late_ms" in case):
        return None
    return predicted[figure].seconds - ((less.predicted_s or 0.0) if less else 0.0)


def kept() -> list[Row]:
    """All rows, oldest first."""
    return [msgspec.json.decode(each, type=Row) for each in ROWS.read_bytes().splitlines()] if ROWS.exists() else []


def page(rows: Sequence[Row]) -> str:
    """docs/accuracy/stalls.md: the newest row of every figure, where it is beyond the newest run without stalls."""
    newest = {(each.training, each.case, each.figure): each for each in rows}
    begun = {each.training: each.time for each in rows if each.case == "none"}
    shown = [each for each in newest.values() if each.case != "none" and each.time >= begun.get(each.training, "")]
    ran = {(each.training, each.case) for each in shown}
    left = ", ".join(
        f"{kind} with {case}" for kind in KINDS for case in CASES if case != "none" and (kind, case) not in ran
    )
    notes = dict.fromkeys(f"{each.training}: {each.note}." for each in shown if each.note)

    def ms(value: float | None) -> str:
        return "–" if value is None else f"{1e3 * value:.1f}"

    groups = {
        "put in, alone": [each for each in shown if each.injected_s and "+" not in each.case],
        "put in, in a pair": [each for each in shown if each.injected_s and "+" in each.case],
        "not put in": [each for each in shown if not each.injected_s],
    }
    summary = []
    for name, some in groups.items():
        concluded = [each for each in some if each.verdict != "inconclusive"]
        foretold = [
            abs(each.predicted_s - each.injected_s) / each.step_s for each in some if each.predicted_s is not None
        ]
        off = [abs(each.off) for each in concluded]
        summary.append((
            name, str(len(some)), str(len(some) - len(concluded)), f"{sum(e <= ASKED for e in off)} of {len(off)}",
            f"{100 * median(off):.1f}" if off else "–", f"{100 * max(off):.1f}" if off else "–",
            f"{sum(e <= ASKED for e in foretold)} of {len(foretold)}",
            f"{100 * median(foretold):.1f}" if foretold else "–", f"{100 * max(foretold):.1f}" if foretold else "–",
        ))  # fmt: skip
    lines = [
        (
            f"{each.training}, {each.case}: {each.figure}", ms(each.injected_s), ms(each.reported_s),
            f"{ms(each.low_s)} – {ms(each.high_s)}", ms(each.step_s), f"{100 * each.off:+.1f}", each.verdict,
            ms(each.predicted_s),
        )
        for each in shown
    ]  # fmt: skip
    return (
        f"# Stalls of known length\n\n*{today()}, {machine()}; load averages {load()}.*\n\n"
        "`foretrace stash` ([stalls](../stash.md)) on three small real trainings (two workers, files on a disk, "
        "gloo) into which stalls were put (`python benchmarks/stalls.py`): a loader that computes for 20 ms more, one "
        "that computes for 12 ms on a core that another process takes meanwhile (what that one took of the later "
        "worker's was counted), a disk of 30 MB/s behind the real one, a worker that is 20 ms late, a link of "
        f"{MBIT:g} Mbit/s "
        "(frames of one bucket that nothing hides, less what the exchange takes on this machine). Milliseconds per "
        "step, beyond the same training without stalls; *off* is reported less put in as a share of the step, asked "
        f"are {100 * ASKED:.0f} %. *Inconclusive*: the rounds' own range is wider than that. *Predicted* is from the "
        "recording of one worker, which cannot hold that another one is late."
        + "".join(f" {each}" for each in notes)
        + (f" Not run since the last run without stalls: {left}." if left else "")
        + "\n\n"
        + table(("figures", "rows", "inconclusive", "within 5 %", "median off, %", "worst, %", "predicted within 5 %",
                 "median, %", "worst, %"), summary)
        + "\n\n"
        + table(
            ("training, stalls: figure", "put in", "reported", "80 %", "step", "off, %", "verdict", "predicted"), lines
        )
        + "\n"
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainings", nargs="*", default=KINDS, help=", ".join(KINDS))
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--note", default="", help="what else ran, for the page")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page from the rows kept")
    given = parser.parse_args()
    rows = kept()
    with files() as folder:
        for kind in () if given.page else given.trainings:
            model = training_of(kind, str(folder / "data"), {}).model
            nbytes = sum(4 * each.numel() for each in model.parameters())
            near = calibrate(workers=WORKERS, sizes=(nbytes,), kinds=(CollectiveKind.ALL_REDUCE,))
            near_s = near.series[0].seconds[0]
            base = {each.figure: each for each in rows if (each.training, each.case) == (kind, "none")}
            for name in given.case:
                try:
                    new = run(kind, name, folder, near_s, nbytes, {} if name == "none" else base)
                except ForetraceError as error:
                    print(f"{kind}, {name}: {error}", flush=True)
                    continue
                if name == "none":
                    base = {each.figure: each for each in new}
                for each in new:
                    print(
                        f"{kind}, {name}: {each.figure} put in {1e3 * each.injected_s:.1f}, reported "
                        f"{1e3 * each.reported_s:.1f} ({1e3 * each.low_s:.1f} - {1e3 * each.high_s:.1f}), predicted "
                        f"{1e3 * (each.predicted_s if each.predicted_s is not None else float('nan')):.1f}, step "
                        f"{1e3 * each.step_s:.1f} ms, off {100 * each.off:+.1f} %, {each.verdict}", flush=True,
                    )  # fmt: skip
                rows += [msgspec.structs.replace(each, note=given.note) for each in new]
                write_bytes(ROWS, b"".join(msgspec.json.encode(each) + b"\n" for each in rows))
    if rows:
        write_text(PAGE, page(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
