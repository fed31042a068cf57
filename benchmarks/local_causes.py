"""Where the time of steps on this processor is, against what `local.py` predicts: call by call, inside real steps.

    python benchmarks/local_causes.py measure --folder F --seconds 300 [MODEL ...]   # F: of `local.py predict`
    python benchmarks/local_causes.py keep --folder F                               # benchmarks/data/local_causes.json

Of development models alone. A step is timed as it is; with denormal numbers flushed; and with every call that reaches
a kernel timed inside it, by a mode of the dispatcher. Then each of its calls is timed alone. So what is missing in a
prediction is either in what calls take alone, or in what a step does to them, or outside of calls. The mode takes
about a microsecond a call, which counts as the call's, as it does where calls are timed alone; sums of gradients are
made out of place under it.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import local
from foretrace.files import write_bytes
from tables import table

DATA = local.DATA.with_name("local_causes.json")


def measured(case: local.Case, graph: Any) -> dict[str, Any]:
    """Return seconds: of steps, of steps without denormal numbers, of calls inside (per step), of calls alone."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from foretrace.cost.operators.bench import TYPICAL, measure
    from foretrace.cost.operators.operator import Operator

    class Timed(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.ops: list[str] = []
            self.seconds: list[float] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            begin = time.perf_counter()
            out = func(*args, **(kwargs or {}))
            self.seconds.append(time.perf_counter() - begin)
            self.ops.append(func._schema.name)
            return out

    steps = local.made(case).steps()

    def timed(seconds: float) -> list[float]:
        found: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(found) < 5:
            begin = time.process_time()
            next(steps)
            found.append(time.process_time() - begin)
        return found

    timed(0.2)
    gc.collect()
    found: dict[str, Any] = {"steps": timed(1.5)}
    torch.set_flush_denormal(True)
    next(steps)
    found["flushed"] = timed(0.5)
    torch.set_flush_denormal(False)
    next(steps)
    inside: list[list[float]] = []
    end = time.perf_counter() + 1.2
    while time.perf_counter() < end or len(inside) < 4:
        with Timed() as mode:
            next(steps)
        inside.append(mode.seconds)
    found |= {"ops": mode.ops, "inside": np.array([each for each in inside if len(each) == len(mode.ops)])}
    wanted = list(dict.fromkeys(Operator(each.op, each.text) for each in graph.nodes))
    return found | {"alone": measure(wanted, target_s=0.004, percentile=TYPICAL).seconds}


def row(case: local.Case, graph: Any, found: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Return shares of a step: measured, and as predicted."""
    step = float(np.median(found["steps"]))
    inside = np.median(found["inside"], axis=0)
    names = [each.op for each in graph.nodes]
    at = np.full(len(names), -1)
    for a, b, k in difflib.SequenceMatcher(None, names, found["ops"], autojunk=False).get_matching_blocks():
        at[a : a + k] = np.arange(b, b + k)
    place, more = processor._lies(graph)
    parts = processor.local.parts(graph.calls, place)[0]
    turned = processor.effects.turning(graph) * np.nan_to_num(parts)
    far = np.array([found["alone"].get(f"{each.op} {each.text}", np.nan) for each in graph.nodes])
    near = np.array([found["alone"].get(f"near {each.op} {each.text}", np.nan) for each in graph.nodes])
    alone = np.where(np.isnan(near), far, near + place * (far - near))
    called = np.where(at >= 0, inside[at], np.nan)
    both = np.isfinite(alone) & np.isfinite(called) & np.isfinite(parts)
    outside = float(np.nansum(processor._beyond(graph, parts) - turned))
    shares = {
        "alone": alone[both].sum(), "alone, predicted": parts[both].sum(), "inside": (called - alone)[both].sum(),
        "inside, predicted": (more + turned)[both].sum(), "outside": step - inside.sum(),
        "outside, predicted": outside, "predicted": processor.step(graph).seconds,
        "flushed": float(np.median(found["flushed"])),
    }  # fmt: skip
    return {"case": case[0], "step_s": step, **{key: float(value) / step for key, value in shares.items()}}


CAUSES = """Development models with AVX-512, call by call, in % of a real step: what calls take alone, each timed by \
itself, and as predicted from 50 operators and 10 of the model's own; what they take longer inside a step, where a \
mode of the dispatcher times each, and the effects predicted for it; what is outside of calls. The mode adds about \
1 µs to a call, so models of thousands of calls have too much inside and too little outside.

Predictions were 4.3 % low in the middle of 25 cases, transformers of the development half 3 to 14 %. Found in this \
way, and modelled since:

- The middle of a sum is the sum of means, not of middles: sums of a step's calls were 1.6 % larger (middle of 24 \
models; 0.4 to 5.7) than the sum of the calls' middles. The mean of repetitions counts.
- The same for calls that were not measured: measured by predicted time had a deviation of 0.17 (products) to 0.33 \
(elementwise, copies) in logarithms over 5,000 calls, so the mean lies 1.5 to 5 % above the middle. The mean counts.
- Layers with few outputs: `addmm` with a transposed weight took 16 to 26 % longer than alone with 128 to 160 outputs \
and 324 to 720 rows (7 % with 192), 0 to 11 % with 480 and more. Such products are timed in both ways.
- Denormal numbers of softmaxes: exp(-100) is one. A product with such probabilities takes 70 to 100 times as long, so \
`padded` goes from 80 to 31 ms with them flushed. Masks are followed through the capture.
- Memory layout: convolutions were timed on contiguous pictures. Backward by channel, 7 x 7, 32 channels of 16 x 16, \
they take 3.7 ms so and 0.85 ms with channels last, as convnext has them: 12.6 of its 38.5 ms, that it was too slow by.

Left, causes not found: the recurrent layers of full lstm-lm took as long alone (636 ms; a backward pass 163 to 201 ms \
in six rounds) as its whole step (633 ms); steps of small calls (rollout, gnn, separable) come out 10 to 20 % high.

The machine was calibrated half an hour before these steps, which ran some 5 % faster than those beside it.

No causes: garbage collection (steps with and without it took as long), page faults (none in steps where memory is \
kept), calls that a capture lacks (0.1 to 0.5 % of a step: `.item()` and marks of a profiler).

"""


def section() -> str:
    """The page's part, from what was kept."""
    rows = json.loads(DATA.read_text())
    keys = ("alone", "alone, predicted", "inside", "inside, predicted", "outside", "outside, predicted")
    lines = [
        [each["case"], f"{1e3 * each['step_s']:.1f}", *(f"{100 * each[key]:.1f}" for key in keys),
         f"{100 * (each['predicted'] - 1):+.1f}", f"{100 * (each['flushed'] - 1):+.1f}"]
        for each in rows
    ]  # fmt: skip
    middle = ["*median*", "", *(f"{100 * np.median([each[key] for each in rows]):.1f}" for key in keys)]
    middle += [f"{100 * (np.median([each['predicted'] for each in rows]) - 1):+.1f}", ""]
    header = (
        "model", "step ms", "calls alone", "predicted", "longer inside a step", "predicted", "outside of calls",
        "predicted", "step predicted", "denormal numbers flushed",
    )  # fmt: skip
    return CAUSES + table(header, [*lines, middle])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=("measure", "keep"))
    parser.add_argument("models", nargs="*", help="all of the folder without")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    given = parser.parse_intermixed_args(arguments)
    if any(os.environ.get(key) != value for key, value in local.KEEPING.items()):
        os.execve(sys.executable, [sys.executable, str(Path(__file__).resolve()), *arguments],
                  {**os.environ, **local.KEEPING})  # fmt: skip
    import torch

    from foretrace.model.on_processor import Processor
    from foretrace.model.timed_operators import agreed

    torch.set_num_threads(1)
    path, until = given.folder / "causes.pickle", time.perf_counter() + given.seconds
    found = pickle.loads(path.read_bytes()) if path.exists() else {}
    graphs = {
        case[0]: (case, graph) for case, graph in pickle.loads((given.folder / "graphs.pickle").read_bytes()).items()
    }
    if given.part == "measure":
        for name in given.models or graphs:
            if name not in found and time.perf_counter() < until:
                found[name] = measured(*graphs[name])
                write_bytes(path, pickle.dumps(found))
        return 0
    _, calibration, own = pickle.loads((given.folder / "timed.pickle").read_bytes())
    rows = []
    for name, each in found.items():
        case, graph = graphs[name]
        known = local.known_of(agreed(own[case], calibration.usual_s), calibration)
        rows.append(row(case, graph, each, Processor.of(known)))
    write_bytes(DATA, json.dumps(rows, indent=1).encode())
    print(section())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
