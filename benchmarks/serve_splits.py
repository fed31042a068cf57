"""Plan splits of models of the zoo over this machine's cores, run them in turns, and write docs/accuracy/splits.md.

    python benchmarks/serve_splits.py [bert/tiny/8 ...] [--seconds S] [--page]

A split is predicted before it is compared: profile, plan and the runs that measure interference come first, then fat,
thin and the best split take turns with processes of their own. Rows are added to benchmarks/data/splits.jsonl.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row, export_lines, import_lines
from foretrace.experiment.statistics import Verdict
from foretrace.files import write_text
from foretrace.report.units import digits, seconds
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.plan import plan_splits, try_plan
from tables import ROOT, load, machine, table, today

ROWS = ROOT / "benchmarks" / "data" / "splits.jsonl"
PAGE = ROOT / "docs" / "accuracy" / "splits.md"
MODELS = ("transformer/tiny/8", "bert/tiny/8", "lstm-lm/tiny/8", "mobilenet-v2/tiny/8", "resnet50/tiny/8",
          "resnet50/full/8")  # fmt: skip
HEAD = """# Batches shared out over instances, on a processor

`foretrace serve plan MODEL --batch N --run`: the latency of the best split over that of *fat*, one instance with all
threads, predicted from a profile and a short run and then measured in turns with fresh processes; *thin* is an instance
per thread. Where fat is best, the runner-up is compared with it. Packrat's gains of 1.4 – 1.8 come from 16 cores; two
have little to share out. A busy machine flatters small instances: threads of one instance wait for the slowest of them
at every operator, instances only at the end of a batch. So a row is `inconclusive` where blocks of an arm spread by
more than 10 %, and its error counts for nothing.

Threads of an instance sleep while they wait for each other, as `serve` sets them: instances that spin while they are
idle would take the cores of all others. By itself on idle cores, with threads that spin as PyTorch's do by default,
fat is quicker, so the gain over a process that has the machine to itself is smaller. *Over PyTorch alone* is the
split's latency over that of such a process (all cores, PyTorch's own settings, no server), in the same turns.
"""


def kept() -> tuple[Row, ...]:
    """All rows, oldest first."""
    return import_lines(ROWS.read_text(encoding="utf-8"), str(ROWS)) if ROWS.exists() else ()


def measured(model: str, size: str, batch: int, run_s: float, profile: Path | None) -> Row:
    """The row of one model."""
    plan = plan_splits(ModelSource(name=model, size=size), batch=batch, profile=profile)
    return try_plan(plan, seconds=run_s)[1]


def line(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    serve = row.arms["serve"]
    ratio, expected = (
        f"{digits(value)} ({digits(low)} – {digits(high)})"
        for value, low, high in (
            (row.measured, row.measured_low, row.measured_high),
            (row.predicted, row.predicted_low, row.predicted_high),
        )
    )
    alone = serve.get("over_alone")
    over = f"{digits(alone['value'])} ({digits(alone['low'])} – {digits(alone['high'])})" if alone else "–"
    return (
        f"{row.model} ({row.size}), batch {row.samples_before}", row.techniques.rpartition("=")[2],
        seconds(row.before_s), seconds(row.after_s), expected, ratio, over, f"{100 * row.error:+.1f} %",
        serve["chosen"], serve["quickest"], row.verdict,
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> str:
    """All rows in a sentence; errors are those of rows that were concluded."""
    best = sum(row.arms["serve"]["chosen"] == row.arms["serve"]["quickest"] for row in rows)
    text = f"{len(rows)} rows; the split that was predicted best was the quickest in {best}."
    errors = [100 * abs(row.error) for row in rows if row.verdict != Verdict.INCONCLUSIVE]
    if not errors:
        return f"{text} None is conclusive: others disturbed all of them."
    covered = sum(row.covered for row in rows if row.verdict != Verdict.INCONCLUSIVE)
    return (
        f"{text} {len(errors)} are conclusive: median error {median(errors):.1f} %, worst {max(errors):.1f} %; the "
        f"range holds the measured ratio in {covered} of them."
    )


def page(rows: Sequence[Row]) -> str:
    """docs/accuracy/splits.md."""
    header = ("model", "split", "fat", "split's latency", "predicted over fat", "measured over fat",
              "over PyTorch alone", "error",
              "predicted best", "quickest", "verdict")  # fmt: skip
    when = f"*{today()}, {machine()}; load averages {load()}.*"
    return f"{HEAD}\n{when}\n\n{table(header, map(line, rows))}\n\n{summary(rows)}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, help="MODEL/SIZE/BATCH")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the arms of a row")
    parser.add_argument(
        "--page", action="store_true", help="measure nothing; write the page from the rows that are kept"
    )
    parser.add_argument("--profile", type=Path, help="where latencies are kept; by default in the cache")
    given = parser.parse_args()
    for each in () if given.page else given.models:
        model, size, batch = each.split("/")
        try:
            row = measured(model, size, int(batch), given.seconds, given.profile)
        except ForetraceError as error:
            print(f"{each}: {error}", flush=True)
            continue
        print(" | ".join(line(row)), flush=True)
        write_text(ROWS, export_lines((*kept(), row)))
    if kept():
        write_text(PAGE, page(kept()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
