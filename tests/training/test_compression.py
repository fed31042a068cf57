"""Codecs keep what they promise, and hooks on real processes train."""

from __future__ import annotations

from math import ceil, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foretrace.cost.operators.bench import measure
from foretrace.training.compression import codecs
from foretrace.training.compression.hooks import register
from foretrace.training.compression.settings import CompressionSettings, kept, share_at
from foretrace.training.compression.timing import ALL, ENCODE, hook_operator, prepared_hook
from tests.gloo_workers import together

FLAT = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=200).map(torch.tensor)


@given(FLAT, st.floats(0.001, 1))
def test_top_k_keeps_the_largest(flat: Tensor, share: float) -> None:
    k = kept(len(flat), share)
    values, indices = codecs.top_k(flat, k)
    assert len(values) == len(set(indices.tolist())) == k
    back = codecs.scattered(values, indices, len(flat))
    assert torch.equal(back[indices.long()], flat[indices.long()])
    dropped = flat - back
    assert dropped.abs().max() <= values.abs().min()
    assert dropped.square().sum() <= (1 - k / len(flat)) * flat.square().sum() + 1e-3


@given(FLAT, st.floats(0.001, 1), st.integers(0, 100), st.integers(0, 9))
def test_random_k_is_the_same_everywhere_and_distinct(flat: Tensor, share: float, step: int, bucket: int) -> None:
    k = kept(len(flat), share)
    values, indices = codecs.random_k(flat, k, step=step, bucket=bucket)
    again = codecs.random_indices(len(flat), k, step=step, bucket=bucket)
    assert torch.equal(indices, again) and len(set(indices.tolist())) == k
    assert torch.equal(values, flat[indices])


def test_random_k_is_unbiased_when_scaled() -> None:
    flat, rounds, k = torch.linspace(-1, 2, 40), 4000, 8
    total = torch.zeros_like(flat)
    for step in range(rounds):
        values, indices = codecs.random_k(flat, k, step=step, bucket=3)
        total += codecs.scattered(values * (len(flat) / k), indices, len(flat))
    deviation = flat.abs() * (len(flat) / k - 1) ** 0.5 / rounds**0.5
    assert torch.all((total / rounds - flat).abs() <= 5 * deviation + 1e-6)


@given(FLAT)
def test_signs_survive_packing(flat: Tensor) -> None:
    packed = codecs.pack_signs(flat)
    assert packed.dtype == torch.uint8 and len(packed) == ceil(len(flat) / 8)
    assert torch.equal(codecs.unpack_signs(packed, len(flat)), torch.where(flat >= 0, 1, -1).to(torch.int8))


@given(FLAT, st.sampled_from([2, 4, 8]))
def test_quantisation_is_off_by_half_a_step_at_most(flat: Tensor, bits: int) -> None:
    levels = codecs.quantise(flat, bits)
    assert len(levels.packed) == ceil(len(flat) * bits / 8)
    back = codecs.dequantise(levels)
    assert back.shape == flat.shape
    assert torch.all((back - flat).abs() <= 0.5 * levels.step * (1 + 1e-3) + 1e-4)


def _hooked(shapes: list[tuple[int, ...]], **given: object) -> tuple[Tensor, Tensor]:
    """A bucket before and what a hook alone makes of it."""
    operator = hook_operator(CompressionSettings(**given), shapes, 2, ALL)  # type: ignore[arg-type]
    call = prepared_hook(operator)
    torch.manual_seed(0)
    before = torch.randn(sum(prod(shape) for shape in shapes))
    return before, call().wait()  # type: ignore[attr-defined]  # a future


@pytest.mark.parametrize(("method", "close"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_precision_is_close(method: str, close: float) -> None:
    before, after = _hooked([(8, 8), (5,)], method=method)
    torch.testing.assert_close(after, before, rtol=close, atol=1e-4)


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(8, 20), st.integers(8, 20))
def test_powersgd_is_exact_from_the_rank_of_the_matrix_on(rank: int, n: int, m: int) -> None:
    from foretrace.training.compression.hooks import make_hook
    from foretrace.training.compression.timing import _bucket, stand_in

    torch.manual_seed(rank)
    matrix = torch.randn(n, rank) @ torch.randn(rank, m)
    bucket = _bucket(matrix.reshape(-1).clone(), [(n, m)])
    state, hook = make_hook(CompressionSettings(method="powersgd", rank=rank, min_rate=0.01), stand_in(1))
    state.iter = state.start_powerSGD_iter
    hook(state, bucket).wait()
    torch.testing.assert_close(bucket.buffer().view(n, m), matrix, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["topk", "randomk", "dgc"])
def test_what_was_not_sent_is_sent_later(method: str) -> None:
    """The sum of what a hook sent of the same gradient approaches the sum of the gradients: error feedback."""
    shapes = [(40,)]
    call = prepared_hook(hook_operator(CompressionSettings(method=method, share=0.2, momentum=0.0), shapes, 1, ALL))
    torch.manual_seed(0)
    gradient = torch.randn(40)
    total = sum((call().wait() for _ in range(100)), torch.zeros(40))  # type: ignore[attr-defined]
    assert (total / 100 - gradient).abs().max() < 0.4 * gradient.abs().max()
    assert torch.nn.functional.cosine_similarity(total, gradient, dim=0) > 0.98


def test_sign_is_the_majority_times_the_mean_magnitude() -> None:
    before, after = _hooked([(64,)], method="sign")
    assert torch.equal(after.sign(), torch.where(before >= 0, 1.0, -1.0))
    torch.testing.assert_close(after.abs(), torch.full_like(after, float(before.abs().mean())))


def test_warm_up_of_dgc_sends_less_and_less() -> None:
    dgc = CompressionSettings(method="dgc", share=0.001, warm_steps=8)
    assert [share_at(dgc, step) for step in (0, 1, 2, 4, 6, 7, 8, 99)] == [
        0.25, 0.25, 0.0625, 0.015625, 0.004, 0.004, 0.001, 0.001,
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["fp16", "bf16", "powersgd", "topk", "randomk", "sign", "dgc"])
def test_every_hook_can_be_timed_alone(method: str) -> None:
    operators = [
        hook_operator(CompressionSettings(method=method), [(64, 32), (64,)], 4, part) for part in (ENCODE, ALL)
    ]
    found = measure(operators, target_s=0.002)
    assert not found.failed
    assert set(found.seconds) >= {each.key for each in operators}


METHODS = (
    None,
    CompressionSettings(method="fp16"),
    CompressionSettings(method="bf16"),
    CompressionSettings(method="powersgd", rank=2),
    CompressionSettings(method="topk", share=0.05),
    CompressionSettings(method="randomk", share=0.1),
    CompressionSettings(method="sign"),
    CompressionSettings(method="dgc", share=0.05, warm_steps=4, clip=10.0),
)


def train_all(rank: int) -> list[tuple[list[float], Tensor]]:
    """Losses and final weights with every method, on many small buckets."""
    found = []
    for each in METHODS:
        torch.manual_seed(0)
        x = torch.randn(64, 64)
        y = torch.tanh(x @ torch.randn(64, 64) * 0.2)
        hidden = [layer for _ in range(2) for layer in (nn.Linear(256, 256), nn.ReLU())]
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 64))
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.2)
        if each is not None:
            register(parallel, each)
        momentum = 0.0 if each is not None and each.method == "dgc" else 0.9
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum)
        mine = slice(32 * rank, 32 * rank + 32)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = (parallel(x[mine]) - y[mine]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, torch.cat([p.detach().view(-1) for p in model.parameters()])))
    return found


def test_all_methods_train_on_real_processes() -> None:
    first, second = together(train_all, 2)
    plain = first[0][0]
    assert plain[-1] < 0.6 * plain[0]
    for method, (losses, weights), (_, others) in zip(METHODS, first, second, strict=True):
        assert torch.equal(weights, others), f"{method}: workers drift apart"
        assert losses[-1] < 0.93 * losses[0], f"{method}: {losses[0]:.3g} -> {losses[-1]:.3g}"
        if method is not None and method.method in ("fp16", "bf16"):
            assert abs(losses[-1] - plain[-1]) < 0.02 * plain[-1]
