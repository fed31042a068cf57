"""What autograd keeps between forward and backward, kept in another form: 16 bit wide, or in a file.

`Keeping` is a context for `Training.around_forward`. Inside it every tensor that an operator saves for its backward is
handed to a `Codec` and given back when the backward needs it. Parameters, their views and small tensors stay as
they are, and a tensor that two operators save (the result of a ReLU is the input of the next convolution) is stored
once. Both directions can be timed alone (`prepared_store`, `prepared_restore`, `prepared_hooks`).
"""

from __future__ import annotations

import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from foretrace.cost.operators.operator import Operator

if TYPE_CHECKING:
    from torch import Tensor

HOME = __name__
HOOKED = 64  # tensors that the operator of `hooks_operator` saves
_KEPT_BYTES = 48 * 2**20  # so much lies between storing a tensor and restoring it when timed alone: no cache holds it


class Codec(ABC):
    """How a dense one-dimensional tensor is stored and given back."""

    def takes(self, tensor: Tensor) -> bool:
        """Return whether it is worth storing in this form at all."""
        return True

    @abstractmethod
    def store(self, flat: Tensor) -> Any:
        """Put it away; what is returned is all that stays in memory."""

    @abstractmethod
    def restore(self, stored: Any) -> Tensor:
        """Return the tensor again, as a new one."""


class Narrow(Codec):
    """float32 as a 16-bit type: half the bytes, rounded once (Gist's delayed precision reduction)."""

    def __init__(self, format: str) -> None:
        self.format = format

    def takes(self, tensor: Tensor) -> bool:
        import torch

        return tensor.dtype == torch.float32

    def store(self, flat: Tensor) -> Tensor:
        import torch

        return flat.to(getattr(torch, self.format))

    def restore(self, stored: Tensor) -> Tensor:
        return stored.float()


class Disk(Codec):
    """Bytes in a file of a temporary folder that has no name any more; places that are free again are reused."""

    def __init__(self) -> None:
        self.file: Any = None
        self.end = 0
        self.free: dict[int, list[int]] = {}  # bytes of a place -> where such places begin

    def __deepcopy__(self, memo: dict[int, Any]) -> Disk:
        return Disk()  # a training of its own writes to a file of its own

    def store(self, flat: Tensor) -> _Place:
        if self.file is None:
            self.file = tempfile.TemporaryFile(prefix="foretrace-")  # noqa: SIM115  # lives as long as the codec
            weakref.finalize(self, self.file.close)
        nbytes = flat.numel() * flat.element_size()
        free = self.free.get(nbytes)
        if free:
            at = free.pop()
        else:
            at, self.end = self.end, self.end + nbytes
        view, done = memoryview(_bytes(flat)), 0
        while done < nbytes:
            done += os.pwrite(self.file.fileno(), view[done:], at + done)
        return _Place(self, at, nbytes, flat.dtype)

    def restore(self, stored: _Place) -> Tensor:
        import torch

        made = torch.empty(stored.nbytes // stored.dtype.itemsize, dtype=stored.dtype)
        view, done = memoryview(_bytes(made)), 0
        while done < stored.nbytes:
            count = os.preadv(self.file.fileno(), [view[done:]], stored.at + done)
            if count == 0:
                raise OSError("the file with activations ended early")
            done += count
        return made


class _Place:
    """Where a tensor lies in the file of a `Disk`; the place is free again when nobody holds this."""

    __slots__ = ("__weakref__", "at", "dtype", "nbytes")

    def __init__(self, disk: Disk, at: int, nbytes: int, dtype: Any) -> None:
        self.at, self.nbytes, self.dtype = at, nbytes, dtype
        weakref.finalize(self, disk.free.setdefault(nbytes, []).append, at).atexit = False


class Pinned(Codec):
    """Pinned host memory, copied on a stream of its own; what comes next in the backward is fetched ahead."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.stream: Any = None
        self.order: list[weakref.ref[_Copy]] = []  # stored in this forward pass, in order

    def __deepcopy__(self, memo: dict[int, Any]) -> Pinned:
        return Pinned(self.ahead)

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def store(self, flat: Tensor) -> _Copy:
        import torch

        if self.stream is None:
            self.stream = torch.cuda.Stream(flat.device)
        self.stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(self.stream):
            host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
            host.copy_(flat, non_blocking=True)
        flat.record_stream(self.stream)  # its memory is not given away before the copy is done
        self.order = [each for each in self.order if each() is not None]
        made = _Copy(host, flat.device)
        self.order.append(weakref.ref(made))
        return made

    def restore(self, stored: _Copy) -> Tensor:
        import torch

        here = next((i for i, each in enumerate(self.order) if each() is stored), 0)
        for each in reversed(self.order[max(here - self.ahead, 0) : here + 1]):
            copy = each()
            if copy is not None and copy.device is None:
                with torch.cuda.stream(self.stream):
                    copy.device = copy.host.to(copy.where, non_blocking=True)
        current = torch.cuda.current_stream(stored.where)
        current.wait_stream(self.stream)
        made, stored.device = stored.device, None
        assert made is not None  # fetched above: it is the last of its own range
        made.record_stream(current)
        return made


class _Copy:
    """A tensor in pinned memory, and on the device again once it was fetched."""

    __slots__ = ("__weakref__", "device", "host", "where")

    def __init__(self, host: Tensor, where: Any) -> None:
        self.host, self.where = host, where
        self.device: Tensor | None = None


class _Kept:
    """One stored tensor and how often the backward will ask for it."""

    __slots__ = ("__weakref__", "again", "asked", "storage", "stored")

    def __init__(self, stored: Any, storage: Any) -> None:
        self.stored = stored
        self.storage = storage  # weak reference: as long as it is held, no other storage has the same address
        self.asked = 0
        self.again: Tensor | None = None  # restored, while another operator will ask for it


class Keeping:
    """Context factory: `Keeping(codec, parameters, min_bytes)()` around a forward pass."""

    def __init__(self, codec: Codec, parameters: Iterable[Tensor], min_bytes: int) -> None:
        self.codec = codec
        self.parameters = list(parameters)
        self.min_bytes = min_bytes
        self.known: set[int] = set()
        self.kept: WeakValueDictionary[tuple[Any, ...], _Kept] = WeakValueDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeping:
        from copy import deepcopy

        return Keeping(deepcopy(self.codec, memo), deepcopy(self.parameters, memo), self.min_bytes)

    def __call__(self) -> AbstractContextManager[Any]:
        from torch.autograd.graph import saved_tensors_hooks

        self.known = {each.untyped_storage().data_ptr() for each in self.parameters}
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        """Return what autograd keeps in the place of a tensor that an operator saves."""
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        if tensor.numel() * tensor.element_size() < self.min_bytes or not self.codec.takes(tensor):
            return tensor
        if tensor.layout != torch.strided or type(tensor) is not torch.Tensor:
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.known:
            return tensor
        size, stride, numel = tensor.size(), tensor.stride(), tensor.numel()
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            tensor = tensor.contiguous()  # a slice of a larger one, say: stored on its own
            stride = tensor.stride()
            kept = _Kept(self.codec.store(tensor.view(-1)), None)
        else:
            key = (storage._cdata, tensor.storage_offset(), numel, tensor.element_size(), tensor._version)
            found = self.kept.get(key)
            if found is None:
                flat = tensor.as_strided((numel,), (1,))
                found = self.kept[key] = _Kept(self.codec.store(flat), StorageWeakRef(storage))
            kept = found
        kept.asked += 1
        return kept, size, stride

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that the backward of an operator needs."""
        if not isinstance(packed, tuple):
            left: Tensor = packed
            return left
        kept, size, stride = packed
        flat: Tensor = kept.again if kept.again is not None else self.codec.restore(kept.stored)
        kept.asked -= 1
        kept.again = flat if kept.asked > 0 else None
        return flat.as_strided(size, stride)


# --- timed alone ---------------------------------------------------------------------------------------------


def store_operator(codec: str, numel: int, dtype: str) -> Operator:
    """Return storing one tensor; `codec` is bfloat16, float16 or disk, `dtype` as in a recording ("float")."""
    return Operator.of(f"{HOME}:prepared_store", [[numel], []], [dtype, ""], ["", codec])


def restore_operator(codec: str, numel: int, dtype: str) -> Operator:
    """Return giving it back."""
    return Operator.of(f"{HOME}:prepared_restore", [[numel], []], [dtype, ""], ["", codec])


def hooks_operator(*, hooked: bool) -> Operator:
    """Return forward and backward of `HOOKED` small operators that save one tensor each, with or without hooks
    around.
    """
    return Operator.of(f"{HOME}:prepared_hooks", [[HOOKED], []], ["float", ""], ["", "hooks" if hooked else "plain"])


def prepared_store(operator: Operator) -> Callable[[], object]:
    """Return what a `store_operator` stands for, the hook around it included; results stay alive for a while, as in a
    step.
    """
    keeping, fresh, count = _timed(operator)
    sources, packed, turn = [fresh() for _ in range(min(count, 4))], deque[Any](maxlen=count), 0

    def call() -> None:
        nonlocal turn
        keeping.kept.clear()  # every tensor is met for the first time
        packed.append(keeping.pack(sources[turn].detach()))
        turn = (turn + 1) % len(sources)

    for _ in range(count + 1):  # from here on, memory and places in the file are reused, as in a step
        call()
    return call


def prepared_restore(operator: Operator) -> Callable[[], object]:
    """Return what a `restore_operator` stands for; calls take turns on tensors that no cache holds."""
    keeping, fresh, count = _timed(operator)
    packed, turn = [keeping.pack(fresh()) for _ in range(count)], 0

    def call() -> object:
        nonlocal turn
        turn = (turn + 1) % len(packed)
        packed[turn][0].asked = 1
        return keeping.unpack(packed[turn])

    return call


def prepared_hooks(operator: Operator) -> Callable[[], object]:
    """Return what a `hooks_operator` stands for."""
    import torch

    keeping = Keeping(Narrow("bfloat16"), (), 1 << 20)
    start = torch.zeros(4, requires_grad=True)

    def run() -> None:
        value = start
        for _ in range(HOOKED):
            value = value.sin()
        value.sum().backward()

    def call() -> None:
        with torch.enable_grad():
            if operator.concrete[1] == "plain":
                run()
            else:
                with keeping():
                    run()

    return call


def codec(name: str) -> Codec:
    """Return the codec by name: "bfloat16", "float16" or "disk"."""
    return Disk() if name == "disk" else Narrow(name)


def _timed(operator: Operator) -> tuple[Keeping, Callable[[], Tensor], int]:
    """Return hooks, source of tensors and how many of them exceed the caches."""
    import torch

    size = prod(operator.dims[0])
    dtype = {"float": torch.float32, "long int": torch.int64, "unsigned char": torch.uint8}[operator.types[0]]
    count = max(2, min(256, _KEPT_BYTES // max(size * dtype.itemsize, 1)))
    return Keeping(codec(operator.concrete[1]), (), 0), lambda: torch.randn(size).to(dtype), count


def _bytes(flat: Tensor) -> Any:
    """Return the memory of a dense tensor as a numpy array of bytes."""
    import torch

    return flat.detach().view(torch.uint8).numpy()
