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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError, MissingExtraError

if TYPE_CHECKING:
    from torch import nn

Array = npt.NDArray[Any]
Function = Callable[[Mapping[str, Array]], Mapping[str, Array]]

DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
_ONNX_DTYPES = {"float": "float32", "double": "float64"}
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
        more samples than a model with a fixed batch takes; fewer are filled up with zeros.
        """
        samples, fixed = len(next(iter(inputs.values()))), self.facts.fixed_batch
        if fixed is not None and samples > fixed:
            raise ForetraceError(f"the model takes {fixed} samples at once, got {samples}; use batches of {fixed}.")
        if fixed is not None and samples < fixed:
            inputs = {
                key: np.concatenate([each, np.zeros((fixed - samples, *each.shape[1:]), each.dtype)])
                for key, each in inputs.items()
            }
        found = self.function(inputs)
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
        return {name: array[np.arange(samples) % len(array)] for name, array in self.example.items()}


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
        if not file.is_file():
            if file.suffix in (".pt", ".pt2", ".onnx", ".pth", ".zip"):
                raise ForetraceError(f"{self.name} does not exist; name a file that does.")
            return self._zoo()
        if self.name.endswith(".onnx"):
            return self._onnx(file, threads)
        try:
            with ZipFile(file) as archive:
                names = archive.namelist()
        except (OSError, BadZipFile):
            names = []
        inner = {each.partition("/")[2] for each in names}
        if any(each.startswith("code/") for each in inner):
            return self._torchscript(file)
        if any(each.startswith("models/") or each == "serialized_exported_program.json" for each in [*inner, *names]):
            return self._exported(file)
        what = "holds a pickle of Python objects" if "data.pkl" in inner else "is no model"
        raise ForetraceError(
            f"{self.name} {what}; give a TorchScript file, one of torch.export, ONNX, or SCRIPT.py:FUNCTION."
        )

    def _zoo(self) -> LoadedModel:
        from foretrace.plan.rewrite.capture import of_training
        from foretrace.zoo.registry import entry, training

        return self._module(entry(self.name).name, "zoo", *of_training(training(self.name, self.size)))

    def _script(self, path: Path, function: str) -> LoadedModel:
        import_torch()
        from torch import nn

        from foretrace.plan.rewrite.capture import of_training
        from foretrace.training.training import Training
        from foretrace.zoo.registry import call_script

        if not path.is_file():
            raise ForetraceError(f"{path} does not exist; give a script that does, as SCRIPT.py:FUNCTION.")
        if not function:
            raise ForetraceError(
                f"{path} may hold many functions; name the one that returns the model: {path}:FUNCTION."
            )
        made = call_script(path, function, "(module, example inputs)")
        if isinstance(made, Training):
            return self._module(path.stem, "module", *of_training(made))
        module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, self._made_tensors())
        if not isinstance(module, nn.Module) or not (self.inputs or module is not made):
            raise ForetraceError(
                f"{function}() of {path} must return (module, example inputs), a foretrace.Training, or a module whose "
                f"inputs `input=` says, got {type(made).__name__}."
            )
        if isinstance(example, dict):
            return self._module(path.stem, "module", module, (), example)
        return self._module(path.stem, "module", module, example if isinstance(example, tuple) else (example,), {})

    def _torchscript(self, path: Path) -> LoadedModel:
        if not self.inputs:
            raise ForetraceError(
                f"{path} is TorchScript, which does not say its inputs; give `input=x=float32[3,224,224]`."
            )
        module = _read(path, lambda: import_torch().jit.load(str(path), map_location="cpu"))
        return self._module(path.stem, "torchscript", module, (), self._made_tensors(), _crc(path))

    def _exported(self, path: Path) -> LoadedModel:
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
        return self._module(path.stem, "exported", program.module(), (), given, _crc(path), fixed)

    def _onnx(self, path: Path, threads: int) -> LoadedModel:
        try:
            import onnxruntime
        except ImportError:
            raise MissingExtraError(f"{path} needs ONNX Runtime: pip install onnxruntime") from None
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        settings.log_severity_level = 4
        session = _read(
            path, lambda: onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        )
        given = {each.name: each for each in self.inputs}
        sizes = {each.name: list(each.shape) for each in session.get_inputs()}
        inputs = []
        for each in session.get_inputs():
            if each.name not in given and not (sizes[each.name] and all(isinstance(n, int) for n in each.shape[1:])):
                raise ForetraceError(
                    f"{path}: input {each.name} must have fixed sizes behind its batch dimension, got {each.shape}; "
                    f"say those of a sample, `input={each.name}=float32[...]`."
                )
            kind = each.type.removeprefix("tensor(").removesuffix(")")
            inputs.append(
                given.get(each.name) or TensorSpec(each.name, _ONNX_DTYPES.get(kind, kind), tuple(each.shape[1:]))
            )
        names = [each.name for each in session.get_outputs()]

        def function(arrays: Mapping[str, Array]) -> dict[str, Array]:
            return dict(zip(names, session.run(names, dict(arrays)), strict=True))

        fixed = min((shape[0] for shape in sizes.values() if shape and isinstance(shape[0], int)), default=None)
        facts = ModelFacts(name=path.stem, kind="onnx", inputs=tuple(inputs), outputs=(), fixed_batch=fixed,
                           weight_bytes=path.stat().st_size, fingerprint=_crc(path))  # fmt: skip
        return self._finished(facts, function, {each.name: _made(each, 2) for each in inputs})

    def _made_tensors(self) -> dict[str, Any]:
        torch = import_torch()
        return {each.name: torch.from_numpy(_made(each, 2)) for each in self.inputs}

    def _module(
        self, name: str, kind: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
        crc: int | None = None, fixed: int | None = None,
    ) -> LoadedModel:  # fmt: skip
        """Return a module with the arguments of one call, of which all tensors are inputs."""
        torch = import_torch()
        if kind != "exported":  # whose mode is part of the program
            module.eval()
        by_name = kind not in ("torchscript", "exported")  # those have lost the names that Python gave
        named = _named(module, args, kwargs) if by_name else dict(kwargs)
        tensors = {key: each for key, each in named.items() if torch.is_tensor(each)}
        rest = {key: each for key, each in named.items() if key not in tensors}
        if nested := next((key for key, each in rest.items() if isinstance(each, list | tuple | dict)), None):
            raise ForetraceError(
                f"argument {nested} of {self.name} must be a tensor, got {type(rest[nested]).__name__}; wrap it."
            )
        sizes = {len(each) if each.dim() else 0 for each in tensors.values()}
        if len(sizes) != 1 or not min(sizes):
            raise ForetraceError(f"{self.name} must take tensors of which the first dimension counts samples; wrap it.")

        def function(arrays: Mapping[str, Array]) -> dict[str, Array]:
            with torch.inference_mode():
                given = {key: torch.from_numpy(arrays[key]) for key in tensors}
                return _outputs(module(**given, **rest) if by_name else module(*given.values()))

        weights = [*module.parameters(), *module.buffers()]
        for each in weights if crc is None else ():
            crc = zlib.crc32(each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data, crc or 0)
        inputs = [TensorSpec(key, str(each.dtype)[6:], tuple(each.shape[1:])) for key, each in tensors.items()]
        facts = ModelFacts(name=name, kind=kind, inputs=tuple(inputs), outputs=(), fixed_batch=fixed,
                           weight_bytes=sum(each.nbytes for each in weights), fingerprint=crc or 0)  # fmt: skip
        return self._finished(facts, function, {key: each.detach().numpy() for key, each in tensors.items()})

    def _finished(self, facts: ModelFacts, function: Function, example: Mapping[str, Array]) -> LoadedModel:
        """Find the outputs by calling the model on two numbers of samples (or the fixed one)."""
        model = LoadedModel(facts=facts, function=function, example=example)
        tried = (facts.fixed_batch,) if facts.fixed_batch else (3, 2)
        many, few = (function(model.examples(count)) for count in (tried[0], tried[-1]))
        outputs = tuple(
            TensorSpec(key, str(found.dtype), found.shape[1:])
            for key, found in many.items()
            if found.ndim and len(found) == tried[0] and few[key].shape == (tried[-1], *found.shape[1:])
        )
        if not outputs:
            raise ForetraceError(
                f"{self.name} must return tensors whose first dimension counts the samples, got "
                f"{', '.join(f'{key} {found.shape}' for key, found in many.items()) or 'none'}; wrap the model."
            )
        return replace(model, facts=replace(facts, outputs=outputs))


def import_torch() -> Any:
    """Return pyTorch. Raises MissingExtraError."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError("serving this model needs torch: pip install 'foretrace[torch]'") from None
    return torch


def _read(path: Path, load: Callable[[], Any]) -> Any:
    """Return what `load` makes of a file, whose damage is the user's matter."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, which files still are
            return load()
    except Exception as error:  # whatever the reader of the format raises
        said = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise ForetraceError(f"{path} cannot be loaded: {said}; export it again.") from None


def _named(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a call by the names that `forward` gives them."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    found = dict[str, Any]()
    for key, value in bound.arguments.items():
        kind = bound.signature.parameters[key].kind
        found |= value if kind is inspect.Parameter.VAR_KEYWORD else {key: value}
    return found


def _made(spec: TensorSpec, samples: int) -> Array:
    """Return numbers where nobody gave an example: zeros, which also every table of words has; normal ones for
    floats.
    """
    shape = (samples, *spec.sizes)
    if not spec.dtype.startswith("float"):
        return np.zeros(shape, spec.dtype)
    return np.random.default_rng(0).standard_normal(shape).astype(spec.dtype)


def _outputs(made: Any) -> dict[str, Array]:
    """Return tensors that a module returned, by name: keys of a mapping, numbers of a sequence; numpy has no
    bfloat16.
    """
    import torch

    if torch.is_tensor(made):
        made = {"output": made}
    elif not isinstance(made, Mapping):
        made = {f"output_{i}": each for i, each in enumerate(made if isinstance(made, list | tuple) else ())}
    tensors = {str(key): each for key, each in made.items() if torch.is_tensor(each)}
    return {key: (each.float() if each.dtype == torch.bfloat16 else each).numpy() for key, each in tensors.items()}


def _crc(path: Path) -> int:
    return zlib.crc32(np.memmap(path, np.uint8, "r").data)
