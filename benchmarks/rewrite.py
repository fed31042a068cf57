"""What graph substitution gains: greedy against relaxed search on Inception-, ResNeXt-, SqueezeNet-, BERT-like graphs.

    python benchmarks/rewrite.py [--json] [--rules graph_subst.pb] [--budget 60] [NAME ...]

Costs are operators timed on this machine with one thread; predictions come from times taken again after the search, and
all models run in turns. The same graphs are searched with the costs of a roofline of an H100, too. Without `--json` the
section of docs/rewrite.md is written anew. alpha = 1.05 is the paper's; nothing was chosen on these models.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretrace.cost.devices.roofline import Roofline
from foretrace.experiment.statistics import paired_ratio
from foretrace.hardware.devices import named
from foretrace.plan.rewrite import catalog, measure, session
from foretrace.plan.rewrite.capture import Model, capture, of_training, settled
from foretrace.plan.rewrite.costs import MeasuredCosts, ModelCosts
from foretrace.plan.rewrite.emit import emit
from foretrace.plan.rewrite.rules import Rule
from foretrace.plan.rewrite.substitute import substitute
from foretrace.zoo.registry import training
from tables import ROOT, load, machine, table, today, update

PAGE = ROOT / "docs" / "rewrite.md"
HEAD = (ROOT / "benchmarks" / "data" / "rewrite_head.md").read_text(encoding="utf-8")
SECTION = "What it gains"
ALPHAS = {"greedy": 1.0, "relaxed": 1.05}
DEVICE = "h100"


class ResNeXtBlock(nn.Module):
    """A bottleneck whose middle convolution has groups (Xie et al., CVPR 2017, figure 3c)."""

    def __init__(self, channels: int, width: int, groups: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layers(x) + x)


class Fire(nn.Module):
    """Squeeze, then 1x1 and 3x3 side by side (Iandola et al., SqueezeNet, 2016, figure 1)."""

    def __init__(self, channels: int, squeezed: int, out: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.one = nn.Conv2d(squeezed, out, 1)
        self.three = nn.Conv2d(squeezed, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.cat([torch.relu(self.one(x)), torch.relu(self.three(x))], 1)


def resnext() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Two stages of two blocks, 32 groups, on 56 x 56 and 28 x 28 positions."""
    return (
        nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=4, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
            ResNeXtBlock(64, 128, 32), ResNeXtBlock(64, 128, 32),
            nn.Conv2d(64, 128, 1, stride=2, bias=False), nn.BatchNorm2d(128), nn.ReLU(),
            ResNeXtBlock(128, 256, 32), ResNeXtBlock(128, 256, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        ),
        (torch.randn(1, 3, 224, 224),),
        {},
    )  # fmt: skip


def squeezenet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The first half of SqueezeNet 1.1 on 224 x 224 pixels."""
    return (
        nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2), Fire(64, 16, 64), Fire(128, 16, 64),
            nn.MaxPool2d(3, 2), Fire(128, 32, 128), Fire(256, 32, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        ),
        (torch.randn(1, 3, 224, 224),),
        {},
    )  # fmt: skip


def zoo(name: str) -> Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """A model of the zoo, tiny, on one sample."""
    return lambda: of_training(training(name, "tiny"), 1)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "inception-v3": zoo("inception-v3"),
    "resnext": resnext,
    "squeezenet": squeezenet,
    "bert": zoo("bert"),
}


def captured(name: str) -> tuple[Model, MeasuredCosts]:
    """One of the models as captured, and the times of its operators."""
    torch.manual_seed(0)
    module, args, kwargs = MODELS[name]()
    settled(module.eval(), args, kwargs)
    model, costs = capture(module, args, kwargs, name=name), MeasuredCosts()
    session.fit(model, costs)
    return model, costs


def row(name: str, rules: tuple[Rule, ...], *, budget: int, rounds: int) -> dict[str, Any]:
    """Everything about one model."""
    model, costs = captured(name)
    found: dict[str, Any] = {"model": name, "operators": len(model.graph.order()), "ways": {}}
    arms = {}
    for way, alpha in ALPHAS.items():
        rewriting = substitute(model.graph, rules, costs, alpha=alpha, budget=budget)
        rewriting, new = session.again(model, rewriting, costs)
        arms[way] = emit(model, rewriting.after, way=new.way)
        check = measure.check(model, rewriting.after, arms[way])
        found["ways"][way] = {
            "predicted": rewriting.before_s / rewriting.after_s, "operators": len(rewriting.after.order()),
            "graphs": rewriting.seen, "steps": rewriting.steps, "equal": check.equal, "float64": check.float64,
            "float32": check.float32, "rules": dict(Counter(rewriting.rules).most_common()),
            f"predicted_{DEVICE}": _roofline(model, rules, alpha, budget),
        }  # fmt: skip
    gain = session.compared(model, arms, rounds=rounds)
    for way, ratio in gain.gains.items():
        found["ways"].setdefault(way, {})["measured"] = [ratio.value, ratio.low, ratio.high]
    direct = paired_ratio(gain.arms["relaxed"].blocks_s, gain.arms["greedy"].blocks_s)
    found["relaxed_over_greedy"] = [direct.value, direct.low, direct.high]
    found["original_s"] = gain.arms["original"].median_s
    return found


def _roofline(model: Model, rules: tuple[Rule, ...], alpha: float, budget: int) -> float:
    found = substitute(model.graph, rules, ModelCosts(Roofline(), named(DEVICE)), alpha=alpha, budget=budget)
    return found.before_s / found.after_s


def page(rows: list[dict[str, Any]], *, budget: int, imported: str) -> str:
    """The section for people."""

    def times(values: list[float]) -> str:
        return f"{values[0]:.2f} ({values[1]:.2f} – {values[2]:.2f})"

    body = []
    for each in rows:
        for way in ALPHAS:
            one = each["ways"][way]
            body.append([
                f"{each['model']}, {way}", f"{each['operators']} → {one['operators']}", f"{one['predicted']:.2f}",
                times(one["measured"]), times(each["ways"]["captured"]["measured"]),
                times(each["relaxed_over_greedy"]) if way == "relaxed" else "–", f"{one[f'predicted_{DEVICE}']:.2f}",
                f"{one['graphs']:,}", f"{one['float64']:.0e}, {one['float32']:.0e}",
            ])  # fmt: skip
    header = (
        "model, search", "operators", "predicted", "measured", "captured alone", "relaxed over greedy",
        f"predicted, {DEVICE.upper()}", "graphs", "differences float64, float32",
    )  # fmt: skip
    return (
        f"*{today()}, {machine()}; one thread; load averages {load()}.*\n\n"
        "Times faster than the original in inference on one sample. *Predicted*: sums of operators timed on this "
        "machine, again after the search. *Measured*: original and rewritten models in turns, median and 80 % "
        "interval, CPU clock. *Captured alone*: the original's operators without its Python code, no merit of rules. "
        f"*{DEVICE.upper()}*: the same search with the costs of a roofline of that device, views free, epilogues "
        "fused. "
        f"alpha 1 (greedy) and 1.05 (relaxed), {budget} graphs per part{imported}. MetaFlow publishes "
        "1.1–1.6 times for relaxed search against TensorFlow, XLA and TensorRT on a V100 (Jia et al., MLSys 2019).\n\n"
        + table(header, body)
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rules", type=Path)
    parser.add_argument("--budget", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rules, _ = catalog.verified(catalog.RULES)
    imported = ""
    if options.rules is not None:
        more = catalog.imported(options.rules)
        rules = (*rules, *more.rules)
        imported = f", with {len(more.rules)} imported rules"
    rows = []
    for name in options.names or list(MODELS):
        rows.append(row(name, rules, budget=options.budget, rounds=options.rounds))
        print(f"{name}: {json.dumps(rows[-1]['ways'])}", file=sys.stderr)
        if not options.json:  # after every model, so that an interrupted run leaves what it has
            update(PAGE, HEAD, {SECTION: page(rows, budget=options.budget, imported=imported)}, (SECTION,))
    if options.json:
        print(json.dumps({"machine": machine(), "alphas": ALPHAS, "budget": options.budget, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
