"""ONNX models as an `OperatorGraph`: the forward pass of an inference, with sizes found by ONNX's shape inference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from foretrace.errors import ForetraceError, needing
from foretrace.graph.taskgraph import Phase
from foretrace.model.draft import OperatorGraphDraft, is_view
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.readers.onnx_ops import CONTROL_FLOW, VIEWS, Mapped, mapped
from foretrace.model.texts import LARGEST, TensorType

_TYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "int16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "int32", 13: "int64", 14: "complex64", 15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn",
    19: "float8_e5m2",
}  # fmt: skip
_OWN = ("", "ai.onnx", "ai.onnx.ml")
_MOST_GUESSES = 200  # of results of operators that ONNX does not know


def from_onnx(
    data: bytes, name: str, *, where: str = "the model", dims: Mapping[str, int] | None = None
) -> OperatorGraph:
    """Return the operators of one inference.

    `dims` gives sizes to the model's named dimensions, and to unnamed ones as "input.axis". Weights in other files are
    not read. Raises MissingExtraError without the package, ForetraceError with the node or dimension that cannot be
    known and what to do.
    """
    with needing(where):
        import onnx
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # whatever the protocol buffer library raises
        raise ForetraceError(f"{where} is no ONNX model: {_line(error)}; export it again.") from None
    if not model.graph.node:
        raise ForetraceError(f"{where} is no ONNX model, or one without nodes; export it again.")
    if bad := next((text for text in _texts(model.graph) if isinstance(text, bytes)), None):
        # protobuf hands out text that is no UTF-8 as bytes, which nothing behind it expects
        raise ForetraceError(
            f"{where} holds a name that is no text, {bad[:40]!r}; the file is damaged, export it again."
        )
    opset = max((each.version for each in model.opset_import if each.domain in _OWN), default=0)
    if model.functions:
        import onnx.inliner

        model = onnx.inliner.inline_local_functions(model)
    _check_nodes(model, where)
    _give_sizes(model, dict(dims or {}), where)
    reader = _Reader(*_inferred(model, where), where)
    return reader.graph(name, f"onnx opset {opset}", int((dims or {}).get("batch", 0)))


def _texts(graph: Any) -> Iterator[object]:
    """Yield names in a graph: of nodes, their operators, values and open dimensions."""
    for node in graph.node:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (each.name for each in node.attribute)
    for entry in (*graph.input, *graph.output, *graph.value_info):
        yield entry.name
        yield from (each.dim_param for each in entry.type.tensor_type.shape.dim)
    yield from (each.name for each in graph.initializer)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__


def _label(node: Any, index: int) -> str:
    return f"node {node.name or index} ({node.op_type})"


def _plain(value: Any) -> Any:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def _check_nodes(model: Any, where: str) -> None:
    """Refuse control flow, and what stands under ONNX's own name that ONNX does not know."""
    import onnx

    for i, node in enumerate(model.graph.node):
        if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type):
            raise ForetraceError(
                f"{where}: {_label(node, i)} is no operator of ONNX; give it a domain of its own, or export the model "
                "again."
            )
        if node.op_type in CONTROL_FLOW and node.domain in _OWN:
            raise ForetraceError(
                f"{where}: {_label(node, i)} is control flow, and what it does depends on data; export the model with "
                "the branch or number of turns fixed, or simplify it (onnxsim) first."
            )


def _give_sizes(model: Any, dims: dict[str, int], where: str) -> None:
    """Put sizes in place of names in the inputs; forget results of which the exporter stated a name."""
    for key, size in dims.items():
        if not 0 < size < LARGEST:
            raise ForetraceError(f"`dim={key}={size}`: a dimension is a number from 1 on; give another one.")
    initial = {each.name for each in model.graph.initializer} | {
        each.values.name for each in model.graph.sparse_initializer
    }
    named: list[str] = []
    missing: list[str] = []
    for entry in model.graph.input:
        if entry.name in initial:
            continue
        for axis, each in enumerate(entry.type.tensor_type.shape.dim):
            key = each.dim_param or f"{entry.name}.{axis}"
            if each.HasField("dim_value") and each.dim_value > 0 and f"{entry.name}.{axis}" not in dims:
                continue
            named.append(key)
            given = dims.get(f"{entry.name}.{axis}", dims.get(key))
            if given is None:
                missing.append(key)
            else:
                each.dim_value = given
    if missing:
        first = missing[0]
        most = ", ".join(dict.fromkeys(missing))
        raise ForetraceError(f"{where}: the sizes of {most} are not fixed; give them, as in `dim={first}=8`.")
    if unknown := [key for key in dims if key not in named]:
        shown = ", ".join(dict.fromkeys(named)) or "none that is open"
        raise ForetraceError(f"{where}: has no open dimension {unknown[0]!r}; it has {shown}.")
    del model.graph.value_info[:]
    for entry in model.graph.output:
        if any(each.dim_param for each in entry.type.tensor_type.shape.dim):
            entry.type.tensor_type.ClearField("shape")


def _inferred(model: Any, where: str) -> tuple[Any, list[str]]:
    """Return the model with sizes of all results, and the results whose sizes were guessed."""
    import onnx
    from onnx import shape_inference

    guessed: list[str] = []
    while True:
        try:
            model = shape_inference.infer_shapes(model, data_prop=True)
        except Exception as error:
            raise ForetraceError(
                f"{where}: shape inference fails: {_line(error)}; check the model with onnx.checker."
            ) from None
        known = _values(model)
        for i, node in enumerate(model.graph.node):
            missing = [each for each in node.output if each and each not in known]
            if not missing:
                continue
            foreign = node.domain not in _OWN
            source = next((known[each] for each in node.input if each in known), None)
            if not foreign or source is None or len(guessed) > _MOST_GUESSES:
                raise ForetraceError(
                    f"{where}: the size of {missing[0]!r} of {_label(node, i)} depends on data or cannot be inferred; "
                    "fix it in the exported model, or simplify it (onnxsim) first."
                )
            kind = {dtype: number for number, dtype in _TYPES.items()}[source.dtype]
            for each in missing:
                guessed.append(each)
                model.graph.value_info.append(onnx.helper.make_tensor_value_info(each, kind, list(source.dims)))
            break
        else:
            return model, guessed


_MOST_ELEMENTS = 1 << 50  # of a tensor: petabytes


def _values(model: Any) -> dict[str, TensorType]:
    """Return tensors of known sizes and type, by name."""
    found = {}
    for entry in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        tensor = entry.type.tensor_type
        sizes = tensor.shape.dim
        fixed = all(each.HasField("dim_value") and each.dim_value >= 0 for each in sizes)
        known = entry.type.HasField("tensor_type") and tensor.HasField("shape") and tensor.elem_type in _TYPES
        if fixed and known:
            found[entry.name] = TensorType(dims=tuple(each.dim_value for each in sizes), dtype=_TYPES[tensor.elem_type])
    for each in model.graph.initializer:
        found[each.name] = TensorType(dims=tuple(each.dims), dtype=_TYPES.get(each.data_type, "float32"))
    for name, value in found.items():
        if any(size < 0 for size in value.dims) or prod(value.dims) > _MOST_ELEMENTS:
            sizes = ", ".join(map(str, value.dims))
            raise ForetraceError(
                f"tensor {name[:80]} must have sizes that a memory can hold, got {sizes}; export it again."
            )
    return found


class _Reader:
    """Makes nodes of an inferred model."""

    def __init__(self, model: Any, guessed: list[str], where: str) -> None:
        self.model, self.where, self.draft = model, where, OperatorGraphDraft()
        self._values = _values(model)
        self._tensor: dict[str, int] = {}
        self._constant: set[str] = set()  # weights and what follows from them alone: found before the model runs
        self._unknown = Counter[str]()
        self._guessed = guessed

    def graph(self, name: str, source: str, batch: int) -> OperatorGraph:
        """Return all nodes, and what could not be known as notes."""
        graph = self.model.graph
        for each in graph.initializer:
            self._constant.add(each.name)
        inputs = [each.name for each in graph.input if each.name not in self._constant]
        for each in inputs:
            if each not in self._values:
                raise ForetraceError(
                    f"{self.where}: input {each!r} is no tensor of known size and type; export the model with tensors."
                )
            self._tensor[each] = self.draft.tensor(self._values[each], role=Role.INPUT, name=each)
        for i, node in enumerate(graph.node):
            self._add(node, i)
        if not self.draft.nodes:
            raise ForetraceError(
                f"{self.where}: nothing depends on the inputs of the model; export it with its inputs."
            )
        if not batch and inputs and self._values[inputs[0]].dims:
            batch = self._values[inputs[0]].dims[0]
        return self.draft.finish(name, batch=batch, source=source, notes=self._notes())

    def _notes(self) -> list[str]:
        notes = []
        if self._unknown:
            named = ", ".join(f"{op} ({count})" for op, count in self._unknown.most_common(4))
            notes.append(f"operators that are known by their bytes only: {named}.")
        if self._guessed:
            notes.append(
                f"{len(self._guessed)} results of operators outside ONNX are taken to have the size of the first input."
            )
        return notes

    def _add(self, node: Any, index: int) -> None:
        import onnx

        given = [each for each in node.input if each]
        made = [each for each in node.output if each]
        if node.op_type in ("Constant", "Shape", "Size", "ConstantOfShape", "Range") or (
            given and all(each in self._constant for each in given)
        ):
            self._constant |= set(made)
            return
        if missing := next((each for each in given if each not in self._values), None):
            raise ForetraceError(
                f"{self.where}: {_label(node, index)} reads {missing!r}, which nothing makes; check the model with "
                "onnx.checker."
            )
        attributes = {each.name: _plain(onnx.helper.get_attribute_value(each)) for each in node.attribute}
        inputs, outputs = ([self._values[each] for each in names] for names in (given, made))
        table = bool(given) and given[0] in self._constant
        try:
            call = mapped(node.op_type, inputs, outputs, attributes, table=table)
        except (IndexError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ForetraceError(
                f"{self.where}: {_label(node, index)} does not fit its inputs ({_line(error)}); check the model with "
                "onnx.checker."
            ) from None
        if call is None or (node.domain not in _OWN and node.domain != "com.microsoft"):
            op = f"{(node.domain if node.domain not in _OWN else '') or 'onnx'}::{node.op_type}"
            self._unknown[op] += 1
            call = Mapped(op=op, text="")
        view = node.op_type in VIEWS and is_view(call.op)
        statistics = set(given[3:]) if node.op_type == "BatchNormalization" else set()
        read = [self._input(each, each in statistics) for each in given[: 1 if view else None]]
        results = []
        for each, value in zip(made, outputs, strict=True):
            storage = self.draft.tensors[read[0]].storage if view and read else -1
            self._tensor[each] = self.draft.tensor(value, storage=storage, name=each)
            results.append(self._tensor[each])
        layer = node.name.strip("/").rpartition("/")[0].replace("/", ".")
        self.draft.node(call.op, read, results, text=call.text, phase=Phase.FORWARD, layer=layer, flops=call.flops)

    def _input(self, name: str, statistics: bool = False) -> int:
        """Return a tensor by name; a constant becomes a weight when it is first read."""
        if name not in self._tensor:
            value = self._values[name]
            weight = len(value.dims) > 0 and "float" in value.dtype and not statistics
            role = Role.WEIGHT if weight else Role.BUFFER
            self._tensor[name] = self.draft.tensor(value, role=role, name=name)
        return self._tensor[name]
