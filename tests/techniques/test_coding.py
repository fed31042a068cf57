"""What coding gradients takes: passes counted on the real hooks, times between sizes, ranges on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from foretrace.cost.operators.calibration import Calibration
from foretrace.hardware.devices import named
from foretrace.techniques.distributed.coding import SIZES, TIMED, TRAFFIC, by_traffic, timed, traffic_s, work
from foretrace.training.compression.settings import CompressionSettings, kept
from foretrace.training.compression.timing import ALL, ENCODE, hook_operator, prepared_hook

SHAPES = [(512, 1024), (1000,), (256, 128, 3, 3)]
EVERY = [
    CompressionSettings(method="fp16"),
    CompressionSettings(method="powersgd", rank=1),
    CompressionSettings(method="powersgd", rank=4),
    CompressionSettings(method="topk"),
    CompressionSettings(method="randomk"),
    CompressionSettings(method="sign"),
    CompressionSettings(method="dgc", share=0.001),
]
# Operators that are several passes inside; how many is said in `work`.
INSIDE = ("topk", "randperm", "qr", "geqrf")


def counted(settings: CompressionSettings, workers: int, part: str) -> tuple[int, int]:
    """Operators that do work, and bytes that they read and write, of the real hook in its steady state."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found = [0, 0]

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            name = func.__name__
            flat = torch.utils._pytree.tree_leaves(args)
            inputs = [each for each in flat if isinstance(each, torch.Tensor)]
            made = [each for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, torch.Tensor)]
            views = func.is_view or name.startswith(("empty", "detach", "_unsafe_view", "as_strided", "new_empty"))
            if not views and not any(word in name for word in INSIDE):
                read = inputs[1:] if name.startswith("copy_") else [] if name.startswith("new_") else inputs
                moved = [*read, *made]
                if name.startswith("index"):  # of a large tensor only some elements
                    moved = [each for each in moved if each.numel() < max(each.numel() for each in moved)]
                found[0] += 1
                found[1] += sum(each.numel() * each.element_size() for each in moved)
            return out

    call = prepared_hook(hook_operator(settings, SHAPES, workers, part))
    call()
    with Count():  # type: ignore[no-untyped-call]
        call()
    return found[0], found[1]


@pytest.mark.parametrize("settings", EVERY, ids=lambda each: f"{each.method} {each.rank}")
def test_passes_are_those_of_the_real_hook(settings: CompressionSettings) -> None:
    pytest.importorskip("torch")
    workers = 3
    (all_calls, whole), (calls, encoding) = (counted(settings, workers, part) for part in (ALL, ENCODE))
    encode, decode = work(settings, SHAPES, workers)
    n = sum(map(prod, SHAPES))
    k = kept(n, settings.share)
    # What these operators do inside, and the whole sectors that single elements take, no list of operators shows.
    inside = {"topk": 24 * n + 96 * k, "dgc": 24 * n + 160 * k, "randomk": 16 * n + encode.irregular}
    outside = {"topk": 96 * workers * k, "dgc": 96 * workers * k, "randomk": 96 * k}
    assert encode.streamed + encode.irregular - inside.get(settings.method, 0) == pytest.approx(
        encoding, rel=0.05, abs=n
    )
    assert decode.streamed + decode.irregular - outside.get(settings.method, 0) == pytest.approx(
        whole - encoding, rel=0.05, abs=n
    )
    assert 0.5 * calls <= encode.operators <= 2 * calls
    answers = workers * {"topk": 2, "dgc": 2, "sign": 1}.get(settings.method, 0)  # copied by what stands in for others
    assert 0.5 * (all_calls - calls - answers) <= decode.operators <= 2 * (all_calls - calls - answers)


def test_times_between_sizes_follow_a_power_law() -> None:
    settings = EVERY[0]

    def hook(elements: int, part: str, method: CompressionSettings = settings) -> str:
        return hook_operator(method, [(elements,)], 4, part).key

    other = CompressionSettings(method="bf16")
    known = Calibration(
        seconds={hook(n, part): 1e-9 * n * (3 if part == ALL else 1) for n in (1000, 100_000) for part in (ENCODE, ALL)}
        | {hook(10_000, part, other): 7.0 for part in (ENCODE, ALL)}
    )

    def found(elements: int) -> Any:
        coding = timed(known, settings, [[(elements,)]], 4, "cpu")
        return None if coding is None else (coding.how, *coding.seconds[0])

    assert found(1000) == (TIMED, pytest.approx(1e-6), pytest.approx(2e-6))
    assert found(10_000) == (SIZES, pytest.approx(1e-5), pytest.approx(2e-5))
    assert found(1_000_000) == (SIZES, pytest.approx(1e-3), pytest.approx(2e-3))  # in proportion beyond the largest
    assert found(10) == (SIZES, pytest.approx(1e-6), pytest.approx(2e-6))  # never less than the smallest
    assert timed(known, EVERY[3], [[(1000,)]], 4, "cpu") is None
    several = timed(known, settings, [[(1000,)], [(10_000,)]], 4, "cpu")
    assert several is not None and several.how == SIZES and several.off.high > 1.5


@pytest.mark.parametrize("settings", EVERY, ids=lambda each: f"{each.method} {each.rank}")
def test_a_gpu_takes_its_passes_or_its_launches(settings: CompressionSettings) -> None:
    v100, h100 = named("v100"), named("h100")
    large = [[(4096, 4096)]]
    there, faster = (by_traffic(settings, large, 8, each) for each in (v100, h100))
    assert there.how == TRAFFIC and there.off.low <= 1 <= there.off.high
    assert sum(map(sum, faster.seconds)) <= sum(map(sum, there.seconds))
    for side in work(settings, large[0], 8):
        central, low, high = traffic_s(side, v100)
        assert 0 < low <= central <= high
        assert central >= (side.streamed + side.irregular) / (1e9 * v100.memory_gb_s)
        little = replace(side, streamed=0.0, irregular=0.0)
        assert traffic_s(little, v100)[0] == pytest.approx(traffic_s(little, h100)[0])  # launches are the host's


@pytest.mark.parametrize(
    ("asked", "quoted_s"),
    [
        ({"method": "topk", "share": 0.01}, 0.240), ({"method": "topk", "share": 0.1}, 0.289),
        ({"method": "dgc", "share": 0.001}, 0.240), ({"method": "powersgd", "rank": 4}, 0.045),
        ({"method": "powersgd", "rank": 16}, 0.130), ({"method": "sign"}, 0.016),
    ],
)  # fmt: skip
def test_published_times_are_in_the_range(asked: dict[str, Any], quoted_s: float) -> None:
    buckets: list[list[tuple[int, ...]]] = [
        [(512, 512, 3, 3)] * 10,
        [(1000, 1960)],
    ]  # the 102 MB of ResNet-50's gradients
    found = by_traffic(CompressionSettings(**asked), buckets, 16, named("v100"))
    assert sum(map(sum, found.seconds)) * found.off.low <= quoted_s <= sum(map(sum, found.seconds)) * found.off.high
