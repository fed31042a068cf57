"""Calls that are taken from before: the same tensors as PyTorch works out, and only where that is sure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from foretrace.model.capture.capture import capture  # noqa: E402
from foretrace.model.capture.repeated import RepeatedCalls  # noqa: E402
from foretrace.zoo.registry import job  # noqa: E402

aten = torch.ops.aten


class Counted:
    """An operator that counts how often PyTorch was asked."""

    def __init__(self, func: Any) -> None:
        self.func, self.asked, self.namespace, self._schema = func, 0, func.namespace, func._schema

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return self.func(*args, **kwargs)


def meta(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(shape, device="meta", dtype=dtype)


def looks(value: Any) -> Any:
    """All that a capture sees of what a call returned."""
    if isinstance(value, list | tuple):
        return type(value), [looks(each) for each in value]
    if value is None:
        return None
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.mm.default, lambda: (meta(3, 4), meta(4, 5))),
        (aten.add.Tensor, lambda: (meta(3, 1).expand(3, 4), meta(4, dtype=torch.int64))),
        (aten.convolution.default,
         lambda: (meta(2, 3, 8, 8).to(memory_format=torch.channels_last), meta(4, 3, 3, 3), None, [1, 1], [1, 1],
                  [1, 1], False, [0, 0], 1)),
        (aten.convolution_backward.default,
         lambda: (meta(2, 4, 8, 8), meta(2, 3, 8, 8), meta(4, 3, 3, 3), [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
                  [False, True, True])),
        (aten.native_layer_norm.default, lambda: (meta(2, 6), [6], meta(6), meta(6), 1e-5)),
        (aten._foreach_add.Scalar, lambda: ([meta(2), meta(3, 2)], 1)),
        (aten.cat.default, lambda: ([meta(2, 3), meta(5, 3)],)),
    ],
    ids=lambda value: str(value) if not callable(value) or hasattr(value, "_schema") else "",
)  # fmt: skip
def test_the_second_call_is_as_the_first(func: Any, args: Callable[[], tuple[Any, ...]]) -> None:
    calls, counted = RepeatedCalls(), Counted(func)
    first = calls.call(counted, args(), {})
    again = calls.call(counted, args(), {})
    assert counted.asked == 1
    assert looks(first) == looks(again) == looks(func(*args()))
    tensors = [each for found in (first, again) for each in (found if isinstance(found, list | tuple) else [found])]
    storages = [each.untyped_storage()._cdata for each in tensors if each is not None]
    assert len(storages) == len(set(storages))


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.add_.Tensor, lambda: (meta(3), meta(3))),
        (aten.view.default, lambda: (meta(3, 4), [12])),
        (aten._unsafe_view.default, lambda: (meta(3, 4), [12])),
        (aten.mul.Tensor, lambda: (meta(3), torch.tensor(2.0, dtype=torch.float64))),
        (aten.split.Tensor, lambda: (meta(6), 2)),
        (aten.cos.default, lambda: (torch.ones(3),)),
    ],
)
def test_what_may_be_another_tensor_is_asked_again(func: Any, args: Callable[[], tuple[Any, ...]]) -> None:
    """Writes, views (said or not), tensors with data."""
    calls, counted = RepeatedCalls(), Counted(func)
    for _ in range(2):
        assert looks(calls.call(counted, args(), {})) == looks(func(*args()))
    assert counted.asked == 2


def test_what_types_hang_on_is_told_apart() -> None:
    calls, counted = RepeatedCalls(), Counted(aten.add.Tensor)
    whole = meta(2, dtype=torch.int64)
    kinds = [calls.call(counted, (whole, each), {}).dtype for each in (1, 1.0, True, 1 + 0j, 1)]
    assert kinds == [torch.int64, torch.float32, torch.int64, torch.complex64, torch.int64]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert calls.call(counted, (whole, 1.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert counted.asked == 5


def test_fake_tensors_keep_device_and_constants() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as fake:
        calls, counted = RepeatedCalls(fake), Counted(aten.mm.default)
        found = [calls.call(counted, (torch.empty(3, 4), torch.empty(4, 5)), {}) for _ in range(2)]
        assert counted.asked == 1 and found[0] is not found[1]
        assert {(each.device.type, each.fake_mode is fake, each.shape) for each in found} == {("cpu", True, (3, 5))}
        known = torch.tensor(3)  # a constant: what is computed of it is one, too
        assert known.constant is not None
        added = Counted(aten.add.Tensor)
        assert [calls.call(added, (known, 1), {}).constant is None for _ in range(2)] == [False, False]
        other = RepeatedCalls(FakeTensorMode())
        other.call(counted, (found[0], torch.empty(5, 2)), {})
    assert (counted.asked, added.asked) == (2, 2) and not other._made


@pytest.mark.parametrize(
    ("model", "options"),
    [("transformer", {}), ("gan", {}), ("gpt2", {}), ("seq2seq", {"precision": "bf16"}), ("lstm-lm", {"like": "cpu"})],
)  # fmt: skip
def test_captures_are_those_without_it(model: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = capture(job(model, "tiny"), **options)  # type: ignore[arg-type]
    monkeypatch.setattr(RepeatedCalls, "call", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert capture(job(model, "tiny"), **options) == found  # type: ignore[arg-type]
