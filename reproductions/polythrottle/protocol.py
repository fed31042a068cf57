"""PolyThrottle's search and its admission of fine-tuning, on what is public; written to README.md.

    python -m reproductions polythrottle [--shared-data PATH] [--seeds N] [--print]

PolyThrottle measured Jetson boards and published figures alone. Its search runs here on Zeus' twelve recorded trainings
with batch size and power limit, where enumeration knows the optimum. Fine-tuning beside inference is measured by

    foretrace energy colocate MODEL TUNED --seconds 20 --ledger FILE
    foretrace ledger --ledger FILE --export benchmarks/data/interference.jsonl

whose rows are a table of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from energy_tune import savings_table, trainings
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row, import_lines
from foretrace.experiment.statistics import Verdict
from foretrace.report.units import seconds, span
from foretrace.serving.energy.tune import TunedEnvironment, words
from reproductions import ROOT, parser_of, shared_data
from reproductions.systems import put
from tables import machine, percent, table, today

HERE = Path(__file__).parent
ROWS = ROOT / "benchmarks" / "data" / "interference.jsonl"
SLO = 1.1
HEAD = """# PolyThrottle: less energy within a limit of latency

PolyThrottle sets GPU frequency, memory frequency and batch size of an edge device together, by Bayesian optimisation
under a latency limit; CPU frequency is set apart. It fine-tunes beside inference where a regression predicts that
latency still keeps the limit. Written by `make reproduce NAME=polythrottle`.
"""
CLAIMS = (
    (
        "up to 36 % less energy than the default (EfficientNet, BERT; Jetson TX2 and Orin)",
        "{low} – {high} % less than Zeus' default on twelve recorded trainings; within 1.1 times the fastest time, "
        "{least} – {most} % less than the fastest setting",
        "training on V100 and A40, not inference on Jetson; two knobs, not three; where the default batch size needs "
        "more epochs, most of what is saved is time",
    ),
    (
        "10 – 15 measurements come within a few per cent",
        "[within 2 %, by training](../../docs/accuracy/energy.md)",
        "logarithms, coordinates by ratio, kernels averaged over a prior; 25 to 105 settings, not 1,820 and 5,005",
    ),
    (
        "a regression keeps latency within its limit while fine-tuning",
        "{pairs}",
        "a processor's core in place of a Jetson GPU; `foretrace energy colocate`",
    ),
)


def enumerated(training: TunedEnvironment) -> list[str]:
    """Settings, the least energy, the least time, and the least energy within the limit."""
    limit_s = SLO * training.points[training.fastest].time_s
    least, kept = training.optimum(float("inf")), training.optimum(limit_s)
    assert least is not None and kept is not None
    cells = [str(len(training.points))]
    for at in (least, training.fastest, kept):
        each = training.points[at]
        cells.append(f"{words(training.named(at))}: {each.energy_j:,.0f} J, {each.time_s:,.1f} s")
    return cells


def saved(training: TunedEnvironment) -> tuple[float, float]:
    """Share of energy that the optimum within the limit saves, against the default and against the fastest setting."""
    kept = training.optimum(SLO * training.points[training.fastest].time_s)
    assert kept is not None
    default = training.points[tuple(knob.default for knob in training.knobs)]
    energy_j = training.points[kept].energy_j
    return 1 - energy_j / default.energy_j, 1 - energy_j / training.points[training.fastest].energy_j


def interference() -> list[Row]:
    """Rows of requests beside fine-tuning steps that the law was not fitted to; none where they were not measured."""
    return list(import_lines(ROWS.read_text(encoding="utf-8"), str(ROWS))) if ROWS.exists() else []


def held_pairs(rows: Sequence[Row]) -> str:
    """What the rows come to, in one sentence."""
    if not rows:
        return "no pair was measured"
    errors = [abs(each.error) for each in rows]
    sure = [each for each in rows if each.verdict != Verdict.INCONCLUSIVE]
    return (
        f"latency of {sum(each.covered for each in rows)} of {len(rows)} pairs that the law was not fitted to lies in "
        f"the predicted range, of the {len(sure)} conclusive ones {sum(each.covered for each in sure)}; median error "
        f"{percent(float(np.median(errors)))} %"
    )


def interference_table(rows: Sequence[Row]) -> str:
    """Predicted and measured latency of requests beside fine-tuning steps."""
    cells = []
    for each in rows:
        ((_, pair),) = each.parameters.items()
        cells.append([
            f"{each.model}, {each.size}", f"{pair['tuned']}", f"{pair['request']} + {pair['step']}",
            seconds(each.before_s), span(*(end * each.before_s for end in (each.predicted_low, each.predicted_high))),
            seconds(each.after_s), percent(each.error, signed=True), str(each.verdict),
        ])  # fmt: skip
    header = ["requests of", "fine-tuned beside", "samples", "predicted", "80 %", "measured", "error, %", "verdict"]
    machines = sorted({f"{each.time[:10]}, {each.device}, {each.machine['cores']} cores" for each in rows})
    return f"{table(header, cells)}\n\n*{'; '.join(machines)}.*" if cells else "Not measured."


def page(traces: Path, seeds: int) -> str:
    """What README.md says."""
    them = trainings(traces)
    default, fastest = zip(*map(saved, them.values()), strict=True)
    beside = interference()
    figures = {
        "pairs": held_pairs(beside),
        "low": percent(min(default)), "high": percent(max(default)),
        "least": percent(min(fastest)), "most": percent(max(fastest)),
    }  # fmt: skip
    rows = [[cell.format(**figures) for cell in row] for row in CLAIMS]
    claims = table(["claim of the paper", "here", "why they differ"], rows) + "\n"
    header = ["training", "settings", "least energy", "least time", f"least energy within {SLO} times the least time"]
    return "\n".join([
        HEAD, f"*{today()}, {machine()}.*\n", "## Claims\n", claims, "## Optima by enumeration\n",
        "Time is seconds per epoch times the mean number of epochs of runs that reached the target; energy is that "
        "times the average power.\n",
        table(header, [[f"{name}, {gpu}", *enumerated(each)] for (gpu, name), each in them.items()]),
        f"\n## What 16 measurements save\n\nMedians over every tenth of {seeds} seeds, in %.\n",
        savings_table(them, seeds),
        "\n## Fine-tuning beside inference\n\nA request and a fine-tuning step share one core. The law is fitted to "
        "steps and requests of 1, 4 and 16 samples, and held against 2 and 8 "
        "([rows](../../benchmarks/data/interference.jsonl)); ranges are those predicted when a row was measured.\n",
        interference_table(beside), "",
    ])  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("polythrottle", __doc__)
    default = shared_data()
    parser.add_argument("--shared-data", type=Path, default=default)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--print", action="store_true", help="print instead of writing README.md")
    given = parser.parse_args(arguments)
    traces = given.shared_data / "energy" / "zeus"
    if not traces.is_dir():
        raise ForetraceError(f"{traces} must hold the traces of Zeus; name their folder with --shared-data.")
    if given.print:
        print(page(traces, given.seeds))
    else:
        put(HERE / "README.md", page(traces, given.seeds))
    return 0
