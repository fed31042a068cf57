"""Operator graphs of NeuSight's form (`data/kernels/opgraph`): read, repeat the layer, list what is computed.

One CSV file is one model: Name, OpName, FwOps, BwOps, AccOps (lists of [operator, dimensions]), Prev, Next,
InputShapes, OutputShape, all Python literals. Products are (B, M, N, K) or (M, N, K) with N the dimension that is
summed over; vector operators are (rows, width); MEM has the shapes that it touches. Only one block of a model is in
the file; it is repeated between two named nodes (`cost-models-hardware-accelerators.md`, section 2).
"""

from __future__ import annotations

import ast
import csv
import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from foretrace.errors import ForetraceError

COLUMNS = ("Name", "OpName", "FwOps", "BwOps", "AccOps", "Prev", "Next", "InputShapes", "OutputShape")
BLOCKS = {
    "bert": (("bert_encoder_layer_0_attention_self_query",), "bert_encoder_layer_0_output_layer_norm"),
    "gpt": (("transformer_h_0_ln_1_grad", "transformer_h_0_ln_1"), "add_15"),
    "opt": (("model_decoder_layers_0_self_attn_layer_norm",), "view_11"),
}
LAYERS = {"bert_large": 24, "gpt2_large": 36, "gpt3_xl": 24, "gpt3_27": 32, "opt_13": 24}
TWO_OPERANDS = ("add", "mul", "div", "pow")
ELEMENT = 4  # bytes: everything is float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """One operation as the file states it."""

    kind: str  # "gemm", "vec" or "mem"
    op: str  # "BMM", "Linear", "add", "softmax", ..., "MEM"
    dims: tuple[int, ...]  # gemm: b, m, k, n with k summed over; vec: rows, width; mem: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a graph."""

    name: str
    op: str
    forward: tuple[Stated, ...]
    backward: tuple[Stated, ...]
    accumulate: tuple[Stated, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]

    @property
    def base(self) -> str:
        """Name without its number: "permute_3" is a permute."""
        return re.sub(r"_\d+$", "", self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One model: nodes in order, the repeated block written out `layers` times."""

    name: str
    model: str
    nodes: tuple[Node, ...]  # of the file, each once
    order: tuple[int, ...]  # rows of `nodes`, in the order in which they run
    train: bool


def find(folder: Path, model: str, mode: str, seqlen: int, batch: int) -> Path:
    """The file of one network; raises ForetraceError where the folder lacks it."""
    stem = f"{model}-{mode}-{seqlen}-{batch}.csv"
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.exists():
            return path
    raise ForetraceError(f"{folder} has no {stem} or {stem}.gz; give the folder of the operator graphs.")


def read(path: Path, layers: int | None = None) -> Graph:
    """Read one file; `layers` is how often the block runs (0: the file is written out), by the model's name if None.

    Raises ForetraceError that names the line for whatever is not as the module says.
    """
    stem = path.name.removesuffix(".gz").removesuffix(".csv")
    model, _, rest = stem.partition("-")
    nodes: list[Node] = []
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
                raise ForetraceError(f"{path} has no column {', '.join(missing)}; it is no operator graph.")
            for row in reader:
                nodes.append(_node(path, reader.line_num, row))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ForetraceError(f"{path} cannot be read as a CSV file: {error}.") from error
    if not nodes:
        raise ForetraceError(f"{path} has no nodes; it is no operator graph.")
    times = LAYERS.get(model, 0) if layers is None else layers
    return Graph(
        name=stem, model=model, nodes=tuple(nodes), order=_repeated(path, model, nodes, times), train="train" in rest
    )


def _node(path: Path, line: int, row: dict[str, Any]) -> Node:
    where = f"{path}, line {line}"
    value: dict[str, Any] = {}
    for column in COLUMNS[2:]:
        text = row[column]
        if text is None:
            raise ForetraceError(f"{where} ends before its column {column}; copy the file again.")
        try:
            value[column] = set() if text == "set()" else ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
            raise ForetraceError(f"{where}: column {column} is no Python literal: {text[:60]!r}.") from error
    try:
        forward, backward, accumulate = (
            tuple(_stated(str(op), dims) for op, dims in value[column]) for column in ("FwOps", "BwOps", "AccOps")
        )
        return Node(
            name=row["Name"],
            op=row["OpName"],
            forward=forward,
            backward=backward,
            accumulate=accumulate,
            before=tuple(sorted(value["Prev"])),
            after=tuple(sorted(value["Next"])),
            inputs=tuple(_shape(each) for each in value["InputShapes"]),
            output=_shape(value["OutputShape"]),
        )
    except (ValueError, TypeError) as error:
        raise ForetraceError(f"{where}, node {row['Name']}: {error}.") from error


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not all(isinstance(each, int) and each >= 0 for each in value):
        raise ValueError(f"{value!r} is no shape")
    return tuple(value)


def _stated(op: str, dims: Any) -> Stated:
    if op == "MEM":
        return Stated(kind="mem", op=op, dims=(ELEMENT * sum(prod(_shape(each)) for each in dims),))
    sizes = _shape(dims)
    if op == "BMM" and len(sizes) == 4:
        b, m, k, n = sizes
        return Stated(kind="gemm", op=op, dims=(b, m, k, n))
    if op == "Linear" and len(sizes) == 3:
        return Stated(kind="gemm", op=op, dims=(1, *sizes))
    if op.startswith("VEC") and len(sizes) == 2:
        return Stated(kind="vec", op=op.removeprefix("VEC"), dims=sizes)
    raise ValueError(f"operation {op}{list(sizes)} is none of MEM, BMM (4 sizes), Linear (3) and VEC.. (2)")


def _repeated(path: Path, model: str, nodes: Sequence[Node], layers: int) -> tuple[int, ...]:
    family = next((name for name in BLOCKS if model.startswith(name)), None)
    if layers == 0 or family is None:
        return tuple(range(len(nodes)))
    names = [node.name for node in nodes]
    firsts, last = BLOCKS[family]
    begin = next((names.index(name) for name in firsts if name in names), None)
    if begin is None or last not in names or names.index(last) < begin:
        raise ForetraceError(
            f"{path} has no block from {firsts[-1]} to {last}, which would be repeated {layers} times."
        )
    end = names.index(last) + 1
    return (*range(begin), *(list(range(begin, end)) * layers), *range(end, len(nodes)))


def operands(op: str) -> int:
    """Tensors that a vector operator reads."""
    return 2 if op in TWO_OPERANDS else 1


def stated_bytes(each: Stated) -> float:
    """Bytes of one operation as stated, every tensor once."""
    if each.kind == "mem":
        return float(each.dims[0])
    if each.kind == "vec":
        return float(ELEMENT * prod(each.dims) * (operands(each.op) + 1))
    b, m, k, n = each.dims
    return float(ELEMENT * b * (m * k + k * n + m * n))


def roofline_s(graph: Graph, flops_per_s: float, bytes_per_s: float) -> float:
    """Sum of all stated operations at the roofline: the check that the graphs are read as their authors do."""
    per_operation = {"softmax": 5.0, "ln": 6.0}
    per_node = []
    for node in graph.nodes:
        total = 0.0
        for each in (*node.forward, *node.backward, *node.accumulate):
            nbytes = stated_bytes(each)
            flops = 2.0 * prod(each.dims) if each.kind == "gemm" else 0.0
            if each.kind == "vec":
                flops = prod(each.dims) * per_operation.get(each.op, 1.0)
            total += max(flops / flops_per_s, nbytes / bytes_per_s)
        per_node.append(total)
    return sum(per_node[row] for row in graph.order)
