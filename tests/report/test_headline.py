"""The first sentence names what holds the step back, for every kind of recording."""

from __future__ import annotations

import pytest

from foretrace.report import headline
from foretrace.report.views import PARTS, BreakdownView
from foretrace.simulate.breakdown import bottleneck as part_that_holds
from foretrace.simulate.timeline import BlameRow
from foretrace.techniques.compute.rates import operator_words
from tests.report.report_views import ROWS


def breakdown(**parts: float) -> BreakdownView:
    return BreakdownView(**{name: parts.get(name, 0.0) for name in PARTS})


def row(name: str, kind: str, time_s: float) -> BlameRow:
    return BlameRow(
        name=name, layer="", kind=kind, count=1, time_s=time_s, saved_if_removed_s=time_s, saved_if_10pct_faster_s=0
    )


@pytest.mark.parametrize(
    ("parts", "bottleneck", "sentence"),
    [
        (
            {"compute": 0.112, "data_loading": 0.058, "launch_bound": 0.002, "exposed_copy": 0.002},
            "data_loading",
            "The GPU waits for data: 58.0 of every 174 ms are DataLoader work that nothing overlaps.",
        ),
        (
            {"compute": 0.046, "launch_bound": 0.031},
            "launch_bound",
            "The GPU waits for the host: 31.0 of every 77.0 ms pass before the next kernel is launched.",
        ),
        (
            {"compute": 0.06, "exposed_communication": 0.0175},
            "exposed_communication",
            "Communication is not hidden: 17.5 of every 77.5 ms are collectives beside no compute; "
            "one rank alone cannot tell waiting from transfer.",
        ),
        (
            {"compute": 0.06, "exposed_copy": 0.0175},
            "exposed_copy",
            "Copies are not hidden: 17.5 of every 77.5 ms are memory copies that no compute overlaps.",
        ),
        (
            {"compute": 0.06, "synchronisation": 0.0175},
            "synchronisation",
            "Synchronisation empties the GPU: in 17.5 of every 77.5 ms a blocking call waits while nothing runs.",
        ),
        (
            {"compute": 0.06, "idle": 0.0175},
            "idle",
            "The GPU idles: 17.5 of every 77.5 ms pass without work, and the recording does not say why.",
        ),
        (
            {"compute": 0.095, "idle": 0.005},
            "compute",
            "The GPU computes nearly all the time: 95.0 of every 100 ms are kernels; "
            "volta_scudnn_128x64_relu_interior_nn_v1 alone takes 9.10.",
        ),
    ],
)
def test_gpu(parts: dict[str, float], bottleneck: str, sentence: str) -> None:
    found = breakdown(**parts)
    assert part_that_holds(found.parts()) == bottleneck
    assert headline.show(found, ROWS, platform="cuda", ranks=1, every=True) == sentence


def test_a_short_wait_is_not_what_holds_the_step_back() -> None:
    found = breakdown(compute=0.09, data_loading=0.01)
    assert part_that_holds(found.parts()) == "compute"


def test_a_wait_longer_than_compute_is_named_however_short() -> None:
    found = breakdown(
        compute=0.1, data_loading=0.11, launch_bound=0.11, exposed_copy=0.11, idle=0.12, synchronisation=0.45
    )
    assert part_that_holds(found.parts()) == "synchronisation"


def test_ranks_together_do_tell_waiting_from_transfer() -> None:
    found = breakdown(compute=0.06, exposed_communication=0.02)
    assert "one rank" not in headline.show(found, (), platform="cuda", ranks=8, every=True)


def test_cpu_recordings_name_the_class_of_operators() -> None:
    rows = [
        row("aten::mkldnn_convolution", "operator", 0.04),
        row("aten::convolution_backward", "operator", 0.02),
        row("aten::addmm", "operator", 0.021),
        row("python", "python", 0.5),
    ]
    found = breakdown(compute=0.107)
    assert headline.show(found, rows, platform="cpu", ranks=1, every=True) == (
        "The CPU is the limit: convolutions take 60.0 of every 107 ms, matrix products 21.0."
    )
    assert "on average 60.0 of every 300 ms" in headline.show(
        breakdown(compute=0.05), rows, platform="cpu", ranks=1, every=True, mean=breakdown(compute=0.3)
    )


@pytest.mark.parametrize(
    ("operator", "label"),
    [
        ("aten::mkldnn_convolution", "convolutions"),
        ("ConvolutionBackward0", "convolutions"),
        ("aten::addmm", "matrix products"),
        ("aten::mm", "matrix products"),
        ("aten::native_batch_norm", "normalisation"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::mkldnn_rnn_layer", "recurrent layers"),
        ("Optimizer.step#AdamW.step", "optimizer steps"),
        ("aten::threshold_backward", "pointwise operators"),
        ("MyExtension::op", "other operators"),
    ],
)
def test_operator_classes(operator: str, label: str) -> None:
    assert operator_words(operator) == label


def test_an_empty_recording_still_gets_a_sentence() -> None:
    assert headline.show(breakdown(), (), platform="cuda", ranks=1, every=True).endswith(".")
    assert headline.show(breakdown(compute=1.0), (), platform="cuda", ranks=1, every=False).endswith(".")
    assert headline.show(breakdown(compute=1.0), (), platform="cpu", ranks=1, every=False).endswith(".")


def test_whatif() -> None:
    assert headline.whatif(0.174, 0.092, (0.084, 0.101)) == "1.89× faster: 174 → 92.0 ms per step (84.0 – 101)."
    assert headline.whatif(0.174, 0.172, (0.16, 0.185)) == (
        "1.15 % faster, within the noise: 174 → 172 ms per step (160 – 185)."
    )
    assert headline.whatif(0.1, 0.1, (0.09, 0.11)) == "No change: 100 → 100 ms per step (90.0 – 110)."


def test_compare_names_the_part_that_moved() -> None:
    moved = breakdown(data_loading=-0.05, compute=0.006)
    assert headline.compare(0.174, 0.13, moved, platform="cuda") == (
        "The second is 1.34× faster: 174 → 130 ms per step, most of it data loading (−50.0 ms)."
    )
    assert headline.compare(0.13, 0.174, breakdown(compute=0.044), platform="cuda").endswith(
        "most of it compute (+44.0 ms)."
    )
    assert (
        headline.compare(0.13, 0.13, breakdown(), platform="cuda") == "Both take the same time: 130 → 130 ms per step."
    )


def test_blame_and_simulate() -> None:
    assert headline.blame(ROWS, 0.174, 0.175, every=True) == (
        "DataLoader.__next__ holds the step back most: without it, 57.0 of every 174 ms would be saved, "
        "5.80 ms if it were 10 % faster."
    )
    assert "on average 57.0 of every 300 ms would be saved" in headline.blame(ROWS, 0.05, 0.3, every=True)
    assert headline.blame((), 0.174, 0.174, every=True).startswith("Nothing")
    assert "exactly the recorded 174 ms" in headline.simulate(0.174, 0.174, 0.0)
    assert "174 ms were recorded (1.15 % less)" in headline.simulate(0.172, 0.174, 0.0)
