"""Tensors without data, of two kinds.

Meta tensors are quick: a call costs PyTorch microseconds to work out sizes. Fake tensors cost it a millisecond, yet
they stand for tensors of a processor, so that PyTorch chooses the operators of one, and know sparse tensors and tensors
of several devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from foretrace.model.capture.light import replaced
from foretrace.training.training import Training


class Sizes(ABC):
    """One kind of tensors without data."""

    device: str
    fake: Any = None  # the `FakeTensorMode` of fake tensors

    @abstractmethod
    def of(self, tensor: Any) -> Any:
        """Return the tensor without its data."""

    @abstractmethod
    def entered(self) -> Any:
        """Return a context in which whatever is made has no data."""

    def _like(self, tensor: Any) -> Any:
        """Return a new tensor of the same sizes, without data."""
        import torch

        with self.entered(), torch.no_grad():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def made(self, source: Callable[[], Training]) -> Training:
        """Return the training, its model without data; with data where its code looks at values."""
        from torch._subclasses import fake_tensor

        try:
            with self.entered():
                return source()
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException, RuntimeError):
            return source()


class Fake(Sizes):
    """Fake tensors of a processor."""

    device = "cpu"

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def of(self, tensor: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake and tensor.device.type == self.device:
            return tensor
        return self._like(tensor) if tensor.device.type == "meta" else self.fake.from_tensor(tensor)

    def entered(self) -> Any:
        return self.fake


class Meta(Sizes):
    """Meta tensors."""

    device = "meta"

    def made(self, source: Callable[[], Training]) -> Training:
        """Return the training; nothing is drawn for weights without data, which takes PyTorch milliseconds each."""
        import torch

        def undrawn(draw: Callable[..., Any]) -> Callable[..., Any]:
            return lambda tensor, *given, **named: tensor if tensor.is_meta else draw(tensor, *given, **named)

        home = torch.Tensor
        with replaced([(home, name, undrawn(getattr(home, name))) for name in ("normal_", "uniform_")]):
            return super().made(source)

    def of(self, tensor: Any) -> Any:
        import torch

        plain = tensor.device.type == "meta" and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        return tensor if plain else self._like(tensor)

    def entered(self) -> Any:
        import torch

        return torch.device("meta")
