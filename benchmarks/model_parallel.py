"""Compressed activations between two workers that share a model, by tensors or as a pipeline, on a shaped link.

    python benchmarks/model_parallel.py [--model NAME ...]

Encoder layers, real processes over gloo, a token bucket on either link (docs/rig.md). The uncompressed run is recorded,
coding is timed alone on both workers at once, `model-parallel-compression` predicts every method from these and the
measured link, and only then the compressed arms run, in turns with the uncompressed one twice. Rows are added to
benchmarks/data/model_parallel.jsonl; `python benchmarks/accuracy.py rig` writes the page. It needs root (`foretrace rig
check`), takes some two minutes a model, and nothing else should use the cores meanwhile.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import msgspec

from foretrace import flow
from foretrace.cost.network.network import CollectiveKind
from foretrace.experiment.ledger import Row, export_lines, import_lines
from foretrace.experiment.links import netns
from foretrace.experiment.links.arms import forget, run_steps
from foretrace.experiment.links.calibrate import LinkCalibration, calibrate, title
from foretrace.experiment.links.judge import summed
from foretrace.experiment.measure import assumed, foretold, parameters_of
from foretrace.experiment.messages import RunSteps, TimedSteps
from foretrace.experiment.processes import Workers
from foretrace.experiment.statistics import Arm
from foretrace.experiment.trial import changed, in_turns
from foretrace.files import write_text
from foretrace.graph import store
from foretrace.hardware.cluster import parse_link
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.distributed.model_parallel_compression import PIPELINE, TENSOR
from foretrace.techniques.whatif import WhatIf, whatif
from model_parallel_ranks import Shape, Share, Time, make_share, record_share, time_codings
from tables import ROOT, load, machine

ROWS = ROOT / "benchmarks" / "data" / "model_parallel.jsonl"
# The second was not run before all of the prediction stood.
MODELS = {
    "encoder 4x256": (Shape(layers=4, hidden=256, samples=8, words=64), "300mbit"),
    "encoder 6x128": (Shape(layers=6, hidden=128, samples=8, words=96), "200mbit"),
}
METHODS = ("topk share=0.1", "quantise", "autoencoder share=0.25", "randomk share=0.1")
PLAIN, AGAIN = "plain", "again"
STEPS, ROUNDS, BLOCK_S = 6, 5, 0.8


def technique(method: str, where: str, shape: Shape, network: str = "") -> str:
    words = f"model-parallel-compression method={method} where={where} workers=2 hidden={shape.hidden}"
    return words + (f" network={network}" if network else "")


def rows_of(name: str) -> Iterator[Row]:
    """Measure the link, then every cut of a model."""
    _, link = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="foretrace-shared-model-") as folder:
        parsed = parse_link(link)
        with netns.made(2, parsed) as net, netns.running(net) as workers:
            kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.SEND)
            table = Path(folder) / "network.json"
            measured = calibrate(workers, parsed, table, name=title(2, link), kinds=kinds, hosts=False)
            for where in (TENSOR, PIPELINE):
                yield from _cut(workers, name, where, measured, Path(folder) / where)


def _cut(workers: Workers, name: str, where: str, measured: LinkCalibration, folder: Path) -> Iterator[Row]:
    shape, _ = MODELS[name]
    plain = technique("none", where, shape)
    recorded = Share(name=PLAIN, shape=shape, technique=plain, folder=str(folder), steps=STEPS)
    file, *_ = workers.ask(record_share, recorded, f"recording {name}, {where}", seconds=120.0)
    graph = flow.read(Path(file)).graph().graph
    kept = folder / "first.graph"
    store.save(graph, kept)
    texts = {method: technique(method, where, shape, str(measured.file)) for method in METHODS}
    workers.ask(time_codings, Time(graph=str(kept), techniques=tuple(texts.values())), "timing coding", seconds=60.0)
    graph = store.load(kept)
    found = {method: whatif(graph, [parse(text)]) for method, text in texts.items()}
    arms = {PLAIN: plain, AGAIN: plain, **texts}
    seconds = {PLAIN: simulate(graph).step_time_s, AGAIN: simulate(graph).step_time_s}
    seconds |= {method: each.after_s for method, each in found.items()}
    for arm, text in arms.items():
        workers.ask(make_share, Share(name=arm, shape=shape, technique=text), f"making {arm}")

    def block(arm: str, number: int) -> list[TimedSteps]:
        steps = ceil(BLOCK_S / seconds[arm])
        request = RunSteps(name=arm, discarded=1 if number >= 0 else 3, steps=steps, together=True)
        return workers.ask(run_steps, request, f"running {arm}", seconds=60.0)

    blocks = in_turns(arms, block, ROUNDS, warm_up=1)
    workers.ask(forget, None, "forgetting the arms")
    before, again = summed(blocks[PLAIN]), summed(blocks[AGAIN])
    for method, predicted in found.items():
        yield _row(name, where, method, predicted, seconds[PLAIN], measured, (before, again, summed(blocks[method])))


def _row(
    name: str,
    where: str,
    method: str,
    predicted: WhatIf,
    baseline_s: float,
    measured: LinkCalibration,
    ran: tuple[Arm, Arm, Arm],
) -> Row:
    shape, link = MODELS[name]
    before, again, after = ran
    trial = changed(foretold(predicted, baseline_s), before, again, after)
    text = technique(method, where, shape, link)
    row = trial.row(
        text, model=name, size=f"{where} cut, 2 workers, {link}", parameters=parameters_of(parse(text)),
        assumptions=tuple(msgspec.to_builtins(each) for each in assumed(predicted)),
        arms={
            "wall": {"before": msgspec.to_builtins(before), "after": msgspec.to_builtins(after),
                     "again": msgspec.to_builtins(again)},
            "predicted_s": predicted.after_s, "recorded_s": baseline_s, "link_mbit_s": measured.mbit_s,
        },
        notes=(machine(), f"load {load()}"),
    )  # fmt: skip
    print(
        f"{name}, {where}, {link}, {method}: plain recorded {1e3 * baseline_s:.1f}, run {1e3 * before.median_s:.1f}; "
        f"predicted {1e3 * predicted.after_s:.1f}, measured {1e3 * after.median_s:.1f}; ratio {row.predicted:.3f} "
        f"({row.predicted_low:.3f} - {row.predicted_high:.3f}) against {row.measured:.3f}, {100 * row.error:+.2f} %, "
        f"{row.verdict}", flush=True,
    )  # fmt: skip
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    given = parser.parse_args()
    netns.require()
    # Workers import `model_parallel_ranks`.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    rows = list(import_lines(ROWS.read_text(encoding="utf-8"), str(ROWS))) if ROWS.exists() else []
    for name in given.model:
        for row in rows_of(name):
            rows.append(row)
            write_text(ROWS, export_lines(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
