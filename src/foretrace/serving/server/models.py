"""What a path or a name is, as one function from named arrays to named arrays.

    source = ModelSource(name="resnet50", size="tiny")     # a model of the zoo
    source = ModelSource(name="nets.py:classifier")        # a function that returns (module, example inputs)
    source = ModelSource(name="net.pt", inputs=(TensorSpec.parse("x=float32[3,224,224]"),))  # TorchScript
    source = ModelSource(name="net.pt2"), ModelSource(name="net.onnx")                       # torch.export, ONNX
    model = source.load(threads=2)
    logits, = model({"x": array}).values()                 # shape (samples, ...)

The first dimension of every input and output counts the samples, and samples do not depend on each other.
"""

from __future__ import annotations

import inspect
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError, needing

if TYPE_CHECKING:
    from torch import nn

Array = npt.NDArray[Any]
Function = Callable[[Mapping[str, Array]], Mapping[str, Array]]

DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
_ONNX_DTYPES = {"float": "float32", "double": "float64"}
_FILES = (".pt", ".pth", ".zip", ".pt2", ".onnx")
_SPEC = re.compile(r"([^=\[\]]+)=(\w+)\[([\d,\s]*)\]")
_LARGEST = 1 << 40  # bytes of one sample


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output: its name, numpy type, and the sizes of one sample, without the batch dimension."""

    name: str
    dtype: str
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ForetraceError(f"tensor {self.name} must be one of {', '.join(DTYPES)}, got {self.dtype[:40]!r}.")
        if min(self.sizes, default=1) < 1 or self.nbytes > _LARGEST:
            raise ForetraceError(f"tensor {self.name} must have sizes from 1 on that fit a memory, got {self.sizes}.")

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Parse "x=float32[3,224,224]": the sizes of one sample. Raises ForetraceError."""
        found = _SPEC.fullmatch(text.strip())
        if found is None:
            raise ForetraceError(
                f"`input={text[:80]}` must be NAME=TYPE[SIZES] of one sample; write x=float32[3,224,224]."
            )
        name, dtype, sizes = found.groups()
        return cls(name.strip(), dtype, tuple(int(each[:15]) for each in sizes.split(",") if each.strip()))

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return prod(self.sizes) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What there is to know of a loaded model without running it."""

    name: str
    kind: str  # "zoo", "module", "torchscript", "exported", "onnx"
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    fixed_batch: int | None  # samples of every call, where the model takes no other number
    weight_bytes: int
    fingerprint: int  # of the weights or the file: processes that loaded the same model have the same one


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in this process. Made by `ModelSource.load`."""

    facts: ModelFacts
    function: Function
    example: Mapping[str, Array] = field(repr=False)  # real samples, or made ones, a few of each input

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return outputs for inputs of shape (samples, ...), each by name.

        Raises what the model raises, and ForetraceError where the sizes of outputs depend on the data, or there are
        more samples than a model with a fixed batch takes; fewer are filled up with the same again.
        """
        samples, fixed = len(next(iter(inputs.values()))), self.facts.fixed_batch
        if fixed and samples > fixed:
            raise ForetraceError(f"the model takes {fixed} samples at once, got {samples}; use batches of {fixed}.")
        found = self.function(_repeated(inputs, fixed) if fixed and samples < fixed else inputs)
        outputs = {each.name: found[each.name][:samples] for each in self.facts.outputs}
        for each in self.facts.outputs:
            if outputs[each.name].shape != (samples, *each.sizes):
                raise ForetraceError(
                    f"output {each.name} must have sizes {(samples, *each.sizes)} whatever the data, got "
                    f"{outputs[each.name].shape}; fix them."
                )
        return outputs

    def examples(self, samples: int) -> dict[str, Array]:
        """Return so many samples of every input, those of `example` again and again."""
        return _repeated(self.example, samples)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What to serve, as a user names it; `inputs` where neither the file nor an example tells them."""

    name: str
    size: str = "full"  # of a zoo model
    inputs: tuple[TensorSpec, ...] = ()

    @property
    def libraries(self) -> tuple[str, ...]:
        """Modules that take seconds to load and are needed for it.

        PyTorch's compiler is what optimizers of the zoo's trainings and exported programs load; a script's modules do
        not.
        """
        if self.name.endswith(".onnx"):
            return ("onnxruntime",)
        return ("torch",) if self.name.partition(":")[0].endswith(".py") else ("torch", "torch._dynamo")

    def load(self, *, threads: int = 1) -> LoadedModel:
        """Load it into this process; `threads` matters to ONNX Runtime alone, which has threads of its own.

        Raises ForetraceError for what is no model, or one whose outputs have no batch dimension; MissingExtraError.
        """
        path, _, function = self.name.partition(":")
        if path.endswith(".py"):
            return self._script(Path(path), function)
        file = Path(self.name)
        if file.is_file():
            load = {".onnx": self._onnx, ".pt2": self._exported}.get(file.suffix, self._torchscript)
            return load(file, threads)
        if file.suffix in _FILES:
            raise ForetraceError(f"{self.name} does not exist; name a file that does.")
        from foretrace.plan.rewrite.capture import of_training
        from foretrace.zoo.registry import entry, training

        return self._module(entry(self.name).name, "zoo", *of_training(training(self.name, self.size)))

    def _script(self, path: Path, function: str) -> LoadedModel:
        torch = import_torch()
        from foretrace.zoo.registry import call_script

        if not path.is_file() or not function:
            raise ForetraceError(f"{self.name} must be SCRIPT.py:FUNCTION, a script that exists and what it defines.")
        made = call_script(path, function, "(module, example inputs)")
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.nn.Module):
            raise ForetraceError(
                f"{function}() of {path} must return (module, example inputs), got {type(made).__name__}; wrap it."
            )
        module, example = made
        if isinstance(example, dict):
            return self._module(path.stem, "module", module, (), example)
        return self._module(path.stem, "module", module, example if isinstance(example, tuple) else (example,), {})

    def _torchscript(self, path: Path, _: int) -> LoadedModel:
        module = _read(path, lambda: import_torch().jit.load(str(path), map_location="cpu"))
        if not self.inputs:
            raise ForetraceError(
                f"{path} is TorchScript, which does not say its inputs; give `input=x=float32[3,224,224]`."
            )
        return self._module(path.stem, "torchscript", module, (), self._made_tensors(), file=path)

    def _exported(self, path: Path, _: int) -> LoadedModel:
        program = _read(path, lambda: import_torch().export.load(path))
        args, kwargs = program.example_inputs or ((), {})
        names = program.graph_signature.user_inputs
        given = self._made_tensors() or dict(zip(names, args, strict=False))
        if kwargs or len(given) != len(names):
            raise ForetraceError(
                f"{path} must take positional inputs and hold an example of each; export it again, or say `input=` of "
                f"{', '.join(map(str, names))}."
            )
        sizes = [tuple(each.meta["val"].shape) for each in program.graph.nodes if each.name in names]
        fixed = next((each[0] for each in sizes if each and isinstance(each[0], int)), None)  # open ones are symbols
        return self._module(path.stem, "exported", program.module(), (), given, file=path, fixed=fixed)

    def _onnx(self, path: Path, threads: int) -> LoadedModel:
        with needing("serving"):
            import onnxruntime
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        settings.log_severity_level = 4
        providers = ["CPUExecutionProvider"]
        session = _read(path, lambda: onnxruntime.InferenceSession(str(path), settings, providers=providers))
        inputs = {each.name: each for each in self.inputs}
        for each in session.get_inputs():
            if each.name in inputs:
                continue
            if not each.shape or not all(isinstance(size, int) for size in each.shape[1:]):
                raise ForetraceError(
                    f"{path}: input {each.name} must have fixed sizes behind its batch dimension, got {each.shape}; "
                    f"say those of a sample, `input={each.name}=float32[...]`."
                )
            kind = each.type.removeprefix("tensor(").removesuffix(")")
            inputs[each.name] = TensorSpec(each.name, _ONNX_DTYPES.get(kind, kind), tuple(each.shape[1:]))
        names = [each.name for each in session.get_outputs()]
        batches = [each.shape[0] for each in session.get_inputs() if each.shape and isinstance(each.shape[0], int)]
        return _checked(
            lambda arrays: dict(zip(names, session.run(names, dict(arrays)), strict=True)),
            {name: _made(each, 2) for name, each in inputs.items()}, name=path.stem, kind="onnx",
            fixed_batch=min(batches, default=None), weight_bytes=path.stat().st_size, fingerprint=_crc([_bytes(path)]),
        )  # fmt: skip

    def _made_tensors(self) -> dict[str, Any]:
        torch = import_torch()
        return {each.name: torch.from_numpy(_made(each, 2)) for each in self.inputs}

    def _module(
        self, name: str, kind: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *,
        file: Path | None = None, fixed: int | None = None,
    ) -> LoadedModel:  # fmt: skip
        """Return a module with the arguments of one call, of which all tensors are inputs."""
        torch = import_torch()
        if kind != "exported":  # whose mode is part of the program
            module.eval()
        by_name = file is None  # files have lost the names that Python gave
        named = _named(module, args, kwargs) if by_name else dict(kwargs)
        rest = {key: each for key, each in named.items() if not isinstance(each, torch.Tensor | list | tuple | dict)}
        tensors = {key: each for key, each in named.items() if key not in rest}
        sizes = {len(each) if torch.is_tensor(each) and each.dim() else 0 for each in tensors.values()}
        if len(sizes) != 1 or not min(sizes):
            raise ForetraceError(f"{self.name} must take tensors whose first dimension counts the samples; wrap it.")

        def function(arrays: Mapping[str, Array]) -> dict[str, Array]:
            with torch.inference_mode():
                given = {key: torch.from_numpy(arrays[key]) for key in tensors}
                return _outputs(module(**given, **rest) if by_name else module(*given.values()))

        weights = [each.detach() for each in (*module.parameters(), *module.buffers())]
        parts = (each.contiguous().reshape(-1).view(torch.uint8).numpy() for each in weights)
        return _checked(
            function, {key: each.detach().numpy() for key, each in tensors.items()}, name=name, kind=kind,
            fixed_batch=fixed, weight_bytes=sum(each.nbytes for each in weights),
            fingerprint=_crc(parts if file is None else [_bytes(file)]),
        )  # fmt: skip


def import_torch() -> Any:
    """Return PyTorch. Raises MissingExtraError."""
    with needing("serving"):
        import torch
    return torch


def said(error: BaseException) -> str:
    """Return what an error of a library says, for the inside of a sentence."""
    text = " ".join(str(error).split())[:200].rstrip(".")
    return f"{type(error).__name__}{': ' if text else ''}{text}"


def _checked(
    function: Function, example: Mapping[str, Array], *, name: str, fixed_batch: int | None, **facts: Any
) -> LoadedModel:
    """Return a model whose outputs are found by calling it on two numbers of samples (or the fixed one)."""
    most, least = (fixed_batch, fixed_batch) if fixed_batch else (3, 2)
    many, few = function(_repeated(example, most)), function(_repeated(example, least))
    outputs = tuple(
        TensorSpec(key, str(found.dtype), found.shape[1:])
        for key, found in many.items()
        if found.ndim and len(found) == most and few[key].shape == (least, *found.shape[1:])
    )
    if not outputs:
        raise ForetraceError(
            f"{name} must return tensors whose first dimension counts the samples, got "
            f"{', '.join(f'{key} {found.shape}' for key, found in many.items()) or 'none'}; wrap the model."
        )
    inputs = tuple(TensorSpec(key, str(each.dtype), each.shape[1:]) for key, each in example.items())
    known = ModelFacts(name=name, inputs=inputs, outputs=outputs, fixed_batch=fixed_batch, **facts)
    return LoadedModel(facts=known, function=function, example=example)


def _read(path: Path, load: Callable[[], Any]) -> Any:
    """Return what `load` makes of a file, whose damage is the user's matter."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which files still are
            return load()
    except Exception as error:  # whatever the reader of the format raises
        why, _, _ = said(error).partition(". ")
        raise ForetraceError(
            f"{path} cannot be loaded ({why}); give a file of TorchScript, torch.export (.pt2) or ONNX, or "
            "SCRIPT.py:FUNCTION."
        ) from None


def _named(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a call by the names that `forward` gives them."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    found = dict[str, Any]()
    for key, value in bound.arguments.items():
        kind = bound.signature.parameters[key].kind
        found |= value if kind is inspect.Parameter.VAR_KEYWORD else {key: value}
    return found


def _made(spec: TensorSpec, samples: int) -> Array:
    """Return numbers where nobody gave an example: normal floats, and zeros, which also every table of words has."""
    shape = (samples, *spec.sizes)
    if not spec.dtype.startswith("float"):
        return np.zeros(shape, spec.dtype)
    return np.random.default_rng(0).standard_normal(shape).astype(spec.dtype)


def _repeated(arrays: Mapping[str, Array], samples: int) -> dict[str, Array]:
    return {name: each[np.arange(samples) % len(each)] for name, each in arrays.items()}


def _outputs(made: Any) -> dict[str, Array]:
    """Return tensors that a module returned, by key or number; numpy has no bfloat16."""
    import torch

    if torch.is_tensor(made):
        made = {"output": made}
    elif not isinstance(made, Mapping):
        made = {f"output_{i}": each for i, each in enumerate(made if isinstance(made, list | tuple) else ())}
    tensors = {str(key): each for key, each in made.items() if torch.is_tensor(each)}
    return {key: (each.float() if each.dtype == torch.bfloat16 else each).numpy() for key, each in tensors.items()}


def _bytes(path: Path) -> Array:
    return np.memmap(path, np.uint8, "r")


def _crc(parts: Iterable[Array]) -> int:
    found = 0
    for each in parts:
        found = zlib.crc32(each.data, found)
    return found
