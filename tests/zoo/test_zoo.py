"""Every model of the zoo: it trains, the same every time, apart from its copies, and has the published size."""

from __future__ import annotations

import importlib
import math
import sys
from functools import cache
from pathlib import Path

import pytest

from foretrace.cost.operators.bench import lacks
from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.hardware.processor import instruction_sets, trains_lstm
from foretrace.training import batches
from foretrace.training.training import Training
from foretrace.zoo import registry
from foretrace.zoo.operators import operators_of
from foretrace.zoo.trial import trial

torch = pytest.importorskip("torch")

DEEPER = ("resnet34", "resnet101", "resnet152", "vgg13", "vgg16", "vgg19", "bert-large")  # code that others run, too
NAMES = tuple(name for name in registry.entries() if name not in DEEPER)
# As published or as other implementations count them, in millions.
PUBLISHED = {
    "resnet18": 11.69,
    "resnet34": 21.80,
    "resnet50": 25.56,
    "resnet101": 44.55,
    "resnet152": 60.19,
    "vgg13": 133.0,
    "vgg16": 138.4,
    "vgg19": 143.7,
    "vit-b-16": 86.57,
    "bert-large": 336.2,
    "inception-v3": 27.16,
    "mobilenet-v2": 3.50,
    "vgg11": 132.9,
    "bert": 110.1,
    "gpt2": 124.4,
    "llama": 1100.0,
    "lstm-lm": 66.0,
    "transformer": 65.0,
    "detector": 41.8,
    "dlrm": 540.7,
    "ncf": 31.8,
    "gan": 6.34,
}


def _training(name: str, size: str = "tiny") -> Training:
    if registry.entry(name).needs:
        pytest.importorskip(registry.entry(name).needs)
    return registry.training(name, size)


@cache
def _made(name: str) -> Training:
    """One for all tests that do not train it; a copy of it for others."""
    return _training(name)


def _losses(training: Training) -> list[float]:
    torch.manual_seed(1)  # dropout and sampling
    return [float(loss) for loss in training.steps(2)]


@pytest.mark.parametrize("name", NAMES)
def test_tiny_trains_the_same_every_time_and_copies_are_independent(name: str) -> None:
    first, second = _training(name), _training(name)
    copied = first.copied()
    before = [parameter.detach().clone() for parameter in first.model.parameters()]
    losses = _losses(first)
    assert all(map(math.isfinite, losses))
    assert _losses(second) == losses
    after = list(first.model.parameters())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    for old, of_copy in zip(before, copied.model.parameters(), strict=True):
        assert torch.equal(old, of_copy)  # training the original left it alone
    assert _losses(copied) == losses
    assert first.name == name


@pytest.mark.parametrize("name", NAMES)
def test_tiny_batches_can_be_cut_and_resized(name: str) -> None:
    training = _made(name)
    batch = next(training.batches())
    assert batches.size(batch) == training.batch_size
    assert training.batch_size % 4 == 0
    half = batches.parts(batch, 2)[1]
    assert batches.size(half) == training.batch_size // 2
    double = next(iter(batches.resized(training.loader, 2 * training.batch_size)))
    assert batches.size(double) == 2 * training.batch_size


@pytest.mark.processor
@pytest.mark.parametrize("name", NAMES)
def test_loss_survives_16_bit_arithmetic(name: str) -> None:
    training = _made(name).copied()
    batch = next(training.batches())
    try:
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.loss(training.model.train(), batch)
    except RuntimeError as error:
        assert trains_lstm(instruction_sets(), "bfloat16") is False and lacks(error).startswith("oneDNN has no LSTM")
        return
    assert loss.dtype == torch.float32
    loss.backward()
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("name", registry.entries())
def test_numbers_of_parameters_are_those_of_the_registry(name: str) -> None:
    entry = registry.entry(name)
    if entry.needs:
        pytest.importorskip(entry.needs)
    module, _, function = entry.home.partition(":")
    make = getattr(importlib.import_module(module), function)
    for size, expected in zip(registry.SIZES, entry.parameters, strict=True):
        with torch.device("meta"):  # shapes only: the full ones would fill the memory
            training = make(size)
        assert sum(each.numel() for each in training.model.parameters()) == pytest.approx(expected, rel=0.005)
        assert len(training) > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_models_have_the_published_size(name: str) -> None:
    assert registry.entry(name).parameters[1] / 1e6 == pytest.approx(PUBLISHED[name], rel=0.05)


def test_seed_changes_weights_and_data() -> None:
    first, other = registry.training("gnn", seed=0), registry.training("gnn", seed=1)
    assert not torch.equal(next(first.batches())[1], next(other.batches())[1])
    weights = [dict(each.model.named_parameters())["readout.0.weight"] for each in (first, other)]
    assert not torch.equal(*weights)


def test_samples_are_the_same_in_any_order_and_end() -> None:
    samples = getattr(registry.training("ncf").loader, "dataset")  # noqa: B009, a DataLoader
    assert samples[5] == samples[5] != samples[6]
    assert samples[len(samples) - 1] != samples[0]
    few = type(samples)(samples.draw, 70)
    few.seed = samples.seed
    assert [*few] == [samples[at] for at in range(70)]  # a loop over them ends
    for each in (samples, few):
        with pytest.raises(IndexError):
            each[len(each)]


def test_gan_trains_both_networks_with_micro_batches_too() -> None:
    from dataclasses import replace

    training = replace(registry.training("gan"), micro_batches=2)
    before = {name: each.detach().clone() for name, each in training.model.named_parameters()}
    assert all(map(math.isfinite, _losses(training)))
    changed = {
        name.partition(".")[0] for name, each in training.model.named_parameters() if (each != before[name]).any()
    }
    assert changed == {"generator", "discriminator"}


def test_cart_pole_falls_without_balance() -> None:
    from foretrace.zoo.reinforcement import moved

    state = torch.zeros(3, 4)
    right, over, ticks = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool), 0
    while not over.any():
        state, over = moved(state, right)
        ticks += 1
    assert 5 < ticks < 15  # pushing to one side always tilts the pole by 12 degrees in about 0.2 s
    assert not state.any()  # begun again


def test_region_features_are_the_average_of_what_lies_under_a_box() -> None:
    from foretrace.zoo.detection import aligned

    rows = torch.arange(16.0)[:, None].expand(16, 16)
    level = torch.stack([rows, rows.T])[None]  # each position holds its row and its column
    coarse = torch.zeros(1, 2, 8, 8)
    found = aligned([level, coarse], (4, 8), torch.tensor([[[8.0, 12.0, 36.0, 40.0]]]))
    assert found.shape == (1, 2, 7, 7)
    centres = torch.arange(7) + 0.5  # a bin is one position wide: 28 pixels in 7 bins of 4
    assert found[0, 0, :, 0] == pytest.approx(12 / 4 + centres - 0.5)
    assert found[0, 1, 0] == pytest.approx(8 / 4 + centres - 0.5)


def test_overlapping_boxes_of_lower_score_are_suppressed() -> None:
    from foretrace.zoo.detection import overlap, unsuppressed

    boxes = torch.tensor([[[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 8.0], [20.0, 20.0, 30.0, 30.0]]])
    assert overlap(boxes, boxes)[0, 0].tolist() == pytest.approx([1.0, 0.8, 0.0])
    kept = unsuppressed(boxes, torch.tensor([[0.9, 0.8, 0.7]]), 0.7)
    assert kept.isfinite().tolist() == [[True, False, True]]


def test_offsets_are_undone_by_moving() -> None:
    from foretrace.zoo.detection import moved, offsets

    boxes, truth = torch.tensor([[4.0, 4.0, 20.0, 12.0]]), torch.tensor([[6.0, 2.0, 30.0, 26.0]])
    assert moved(boxes, offsets(boxes, truth), 64)[0].tolist() == pytest.approx(truth[0].tolist(), abs=1e-4)


def test_detector_step_has_the_same_shapes_whatever_the_data() -> None:
    training = registry.training("detector")
    image, boxes, labels = next(training.batches())
    assert all(map(math.isfinite, _losses(training)))
    nowhere = boxes * 0 + torch.tensor([0.0, 0.0, 1.0, 1.0])  # objects that hardly any anchor meets
    assert math.isfinite(training.loss(training.model, (image, nowhere, labels)).item())


def test_trial_counts_what_it_ran() -> None:
    run = trial(registry.training("gnn"), 3)
    assert len(run.step_s) == len(run.loading_s) == 3
    assert len(run.losses) == 5
    low, median, high = run.quantiles_s()
    assert 0 < low <= median <= high
    assert run.samples_per_s == pytest.approx(32 / median)


def test_trial_refuses_a_loss_that_is_not_finite() -> None:
    training = registry.training("gnn")
    for group in training.optimizers[0].param_groups:
        group["lr"] = math.nan
    with pytest.raises(ForetraceError, match="loss of gnn is nan at step 2"):
        trial(training, 3)


def test_unknown_names_and_sizes_are_refused() -> None:
    with pytest.raises(ForetraceError, match="did you mean resnet50"):
        registry.training("resnet-5")
    with pytest.raises(ForetraceError, match="choose tiny or full"):
        registry.training("resnet50", "huge")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"bert needs transformers.*foretrace\[zoo\]"):
        registry.training("bert")


SCRIPT = """
import torch
from foretrace.training.training import Training

def training():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(name="mine", model=model, optimizers=(optimizer,), loader=[torch.ones(2, 4)],
                    loss=lambda model, batch: model(batch).square().mean())
"""


def test_a_script_is_a_job_like_any_other(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    make = registry.job(str(script), seed=3)
    assert _losses(make()) == _losses(make())
    script.write_text("x = 1")
    with pytest.raises(ForetraceError, match=r"has no function training\(\)"):
        registry.job(str(script))()
    script.write_text("def training(): return 1")
    with pytest.raises(ForetraceError, match="returned int"):
        registry.job(str(script))()
    with pytest.raises(ForetraceError, match="does not exist"):
        registry.job(str(tmp_path / "none.py"))


def test_inception_has_one_classifier_without_gradients() -> None:
    """Its loss, too: the auxiliary one is of training alone."""
    graph = operators_of("inception-v3", batch=1, training=False)
    assert [node.op for node in graph.nodes].count("aten::nll_loss_forward") == 1
