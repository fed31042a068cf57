"""The whole story on small modules: captured, rewritten, equal, written, and clear refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from foretrace.cli.app import run
from foretrace.errors import ForetraceError
from foretrace.plan.rewrite.catalog import RULES
from foretrace.plan.rewrite.costs import MeasuredCosts, signature
from foretrace.plan.rewrite.rules import Maker
from foretrace.plan.rewrite.terms import Graph, Terms
from foretrace.report import jsonout
from tests.plan.rewrite.test_search import Stated
from tests.report.test_jsonout import check as conforms

torch = pytest.importorskip("torch")
nn = torch.nn

from foretrace.plan.rewrite import measure, session  # noqa: E402 - after the check for torch
from foretrace.plan.rewrite.capture import capture, of_training, settled  # noqa: E402
from foretrace.plan.rewrite.emit import emit  # noqa: E402


class Small(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    """Branches with batch norm, a residual, and what PyTorch alone knows."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.three = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.mix = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Any, *, scale: Any) -> dict[str, Any]:
        y = torch.cat([self.one(x), self.three(x)], 1)
        y = self.mix(y) + y
        features = self.norm(y.mean((2, 3)))
        return {"scores": torch.softmax(self.out(features) * scale, -1), "features": features, "kind": "small"}


@pytest.fixture(scope="module")
def small() -> Any:
    torch.manual_seed(0)
    module, args = Small().eval(), (torch.randn(2, 3, 9, 9),)
    settled(module, args, {"scale": torch.tensor(1.5)})
    wanted = session.RewriteRequest(alpha=1.5, budget=40, measure=False)
    return session.rewrite(
        module, args, {"scale": torch.tensor(1.5)}, name="small", wanted=wanted, costs=Stated(per_product_s=1e-9)
    )


def test_a_module_is_rewritten_into_an_equal_one(small: Any) -> None:
    assert small.check.equal
    assert small.check.float64 < 1e-9
    assert small.check.response > 1e-3
    assert small.predicted > 1.3
    kinds = [each.op for each in small.rewriting.after.order()]
    assert "batch_norm" not in kinds
    assert len(kinds) <= len(small.rewriting.before.order()) - 4
    graph = small.emitted.module.graph
    assert not [node for node in graph.nodes if "norm" in str(node.target) and "layer" not in str(node.target)]
    x = torch.randn(2, 3, 9, 9)
    want, got = small.model.module(x, scale=torch.tensor(2.0)), small.module(x, scale=torch.tensor(2.0))
    assert list(got) == ["scores", "features", "kind"]
    assert got["kind"] == "small"
    assert torch.allclose(want["scores"], got["scores"], atol=1e-5)


def test_a_check_finds_a_model_that_is_not_equal(small: Any) -> None:
    model = small.model
    term = next(each for each in model.graph.order() if each.op == "relu")
    wrong = model.graph.replaced([(term, model.graph.terms.make("tanh", term.inputs))])
    assert wrong is not None
    assert not measure.check(model, wrong, emit(model, wrong)).equal


def test_a_rewritten_model_is_written_and_read_again(small: Any, tmp_path: Path) -> None:
    flat = small.emitted.flat(small.model.args, small.model.kwargs)
    with torch.no_grad():
        want = small.emitted.module(*flat)
        small.emitted.write(tmp_path / "m.pt2")
        loaded = torch.export.load(tmp_path / "m.pt2").module()(*flat)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(want, loaded, strict=True))


class Branching(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    def forward(self, x: Any) -> Any:
        return x * 2 if x.sum() > 0 else x


class Random(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    def forward(self, x: Any) -> Any:
        return x + torch.rand_like(x)


class Counting(nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.seen.add_(1)
        return x + 1


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Branching(), r"cannot be captured at Branching\.forward, line \d+"),
        (Random(), "draws random numbers"),
        (Counting(), "changes seen"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_in_a_sentence(module: Any, says: str) -> None:
    with pytest.raises(ForetraceError, match=says) as error:
        capture(module, (torch.ones(2, 2),), name="mine")
    assert str(error.value).startswith("mine")
    assert "\n" not in str(error.value)


def test_the_arguments_of_a_loss_are_found() -> None:
    from foretrace.zoo.registry import training

    module, args, kwargs = of_training(training("vgg11"), 2)
    assert args[0].shape[0] == 2
    assert kwargs == {}
    assert not module.training


def test_measured_costs_choose_a_way_and_fit_a_run() -> None:
    m = Maker(Terms(), random.Random(0))
    x = m.terms.leaf("x", (1, 8, 64, 64))
    w = m.terms.leaf("w", (8, 8, 3, 3), constant=True)
    settings: dict[str, Any] = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "bias": False}
    conv = m.terms.make("conv2d", (x, w), **settings, added=False, act="relu")
    part = m.terms.make("slice", (conv,), axis=1, start=2, length=4)
    graph = Graph(m.terms, (m.terms.make("sigmoid", (part,)),))
    costs = MeasuredCosts(target_s=0.001)
    costs.learn([graph])
    assert costs.failed == {}
    assert {signature(each) for each in graph.order()} == set(costs.timed)
    assert costs.timed[signature(conv)].way in ("aten", "onednn")
    assert costs.way(conv) == costs.timed[signature(conv)].way
    far, near = sum(each.far_s for each in costs.timed.values()), sum(each.near_s for each in costs.timed.values())
    assert costs.fit(graph, 10 * far) == (0.0 if far > near else 0.5)  # slower than all data far: none is near
    assert costs.of(graph) == pytest.approx(far)
    again = costs.fresh(graph)
    assert again.of(graph) > 0


def test_one_slow_run_does_not_say_where_data_lies(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([9.0, 2e-3, 3e-3])
    monkeypatch.setattr(measure, "once", lambda run: next(runs))
    costs = MeasuredCosts(target_s=0.001)
    given: list[float] = []
    monkeypatch.setattr(MeasuredCosts, "fit", lambda self, graph, measured_s: given.append(measured_s))
    session.fit(small.model, costs)
    assert given == [2e-3]
    assert {signature(each) for each in small.model.graph.order()} <= {*costs.timed, *costs.priced}


SCRIPT = """
import torch
from torch import nn
from foretrace.training.training import Training

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 8)
    def forward(self, x):
        return self.a(x), torch.relu(self.b(x)), {}self.c(x)

def training():
    model = Net()
    data = [(torch.randn(4, 16), torch.zeros(4))]
    return Training(name="net", model=model, optimizers=(torch.optim.SGD(model.parameters(), 0.1),), loader=data,
                    loss=lambda model, batch: model(batch[0])[0].sum())
"""


def test_the_command_answers_in_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "net.py"
    script.write_text(SCRIPT.replace("{}", ""))
    arguments = ["rewrite", str(script), "--budget", "6", "--no-measure", "--device", "h100"]
    assert run([*arguments, "--out", str(tmp_path / "m.pt2")]) == 0
    text = capsys.readouterr().out
    assert "merge-linear" in text
    assert "equal       yes" in text
    assert (tmp_path / "m.pt2").exists()
    assert run([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rules = jsonout.schema("rewrite")
    assert conforms(answer, rules, rules["$defs"]) == []
    assert answer["rules"]["verified"] == len(RULES)
    assert answer["before_s"] / answer["after_s"] == pytest.approx(answer["predicted"])
    assert answer["costs"].startswith("roofline on H100")
    assert answer["measured"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["nonsense-model"], "the zoo has no model"),
        (["SCRIPT"], "cannot be captured"),
        (["vgg11", "--alpha", "0.5"], "alpha 0.5"),
        (["vgg11", "--budget", "0"], "budget of 0"),
        (["vgg11", "--rules", "nothing.pb"], "cannot read nothing.pb, which does not exist"),
        (["vgg11", "--device", "abacus"], "abacus"),
        (["vgg11", "--out", "model.txt"], "--out model.txt"),
        (["vgg11", "--out", "."], "--out ."),
        (["gan"], "a step of its own"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    script = tmp_path / "net.py"
    script.write_text(SCRIPT.replace("{}", "x if x.sum() > 0 else "))
    given = [str(script) if each == "SCRIPT" else each for each in options]
    assert run(["rewrite", *given, "--no-measure"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert len(err.strip().splitlines()) == 1
