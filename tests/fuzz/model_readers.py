"""Readers of models: operators in three formats, configurations of decoders, rules that rewrite graphs."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from tests.fuzz.mutations import _joined, _varint
from tests.fuzz.reader import Figure, Reader, Samples, printed


@cache
def operator_files() -> Samples:
    """Our JSON in its three forms."""
    from foretrace.model.readers.json_form import dumps, loads

    head = '{"format": "foretrace operators", "version": 1, "name": "m", "batch": 4, '
    calls = head + '"calls": [{"op": "aten::mm", "dims": [[8, 16], [16, 4]], "times": 3}, {"op": "aten::relu", '
    calls += '"dims": [[8, 4]], "phase": "backward", "layer": "a.b"}]}'
    nodes = head + '"tensors": [{"dims": [8, 16], "role": "input"}, {"dims": [16, 4], "role": "weight"}, '
    nodes += '{"dims": [8, 4]}, {"dims": [4, 8], "of": 2}], "nodes": [{"op": "aten::mm", "inputs": [0, 1], "outputs": '
    nodes += '[2], "flops": 1024}, {"op": "aten::t", "inputs": [2], "outputs": [3], "layer": "x"}]}'
    return {"whole.json": dumps(loads(nodes.encode())), "calls.json": calls.encode(), "nodes.json": nodes.encode()}


@cache
def execution_traces() -> Samples:
    """PyTorch's and Chakra's JSON, and Chakra's protocol buffers."""
    from foretrace.model.readers.chakra import VERSIONS
    from tests.model.test_chakra import NODES, old, trace

    protobuf = b"".join(_length(part) + part for part in _chakra_messages(VERSIONS[-1]))
    return {
        "chakra.json": trace(NODES),
        "old.json": trace([old(each) for each in NODES], "1.0.1"),
        "chakra.et": protobuf,
    }


def _length(part: bytes) -> bytes:
    return _varint(len(part))


def _chakra_messages(version: str) -> list[bytes]:
    from tests.model.test_chakra import NODES

    def attribute(name: str, number: int, value: Any) -> bytes:
        return _joined([(1, 2, name.encode()), (number, 0 if isinstance(value, int) else 2, value)])

    parts = [_joined([(1, 2, version.encode()), (2, 2, attribute("schema", 29, version.encode()))])]
    for node in NODES:
        arguments = [
            _joined([(i, 2, repr(node[side][key]).encode()) for i, key in ((1, "values"), (2, "shapes"), (3, "types"))])
            for side in ("inputs", "outputs")
        ]
        parts.append(
            _joined([
                (1, 0, node["id"]), (2, 2, node["name"].encode()), (4, 0, node["ctrl_deps"]), (8, 2, arguments[0]),
                (9, 2, arguments[1]), (10, 2, attribute("is_cpu_op", 27, 1)), (10, 2, attribute("tid", 9, 1)),
            ])
        )  # fmt: skip
    return parts


@cache
def onnx_models() -> Samples:
    """A small network with fixed sizes; nothing without the onnx package."""
    try:
        from tests.model.test_onnx import cnn
    except BaseException:  # pytest skips the module where onnx is missing
        return {}
    return {"cnn.onnx": cnn(2)}


def _play_operators(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.model.estimate import estimate
    from foretrace.model.memory.memory import peak
    from foretrace.model.readers.sources import load_operators
    from foretrace.model.target import target
    from foretrace.report import estimate as report
    from foretrace.report.jsonout import dumps
    from foretrace.report.terminal import Terminal, render

    graph = load_operators(path)
    yield "flops", [graph.flops, graph.nbytes]
    yield "peak", peak(graph).peak_bytes
    on = target("a100")
    found = estimate(graph, device=on.device, costs=on.costs)
    view = report.estimate(found, model=graph.name)
    yield "estimate", view
    yield "step", [found.step.step_time_s, *found.step.interval_s, found.step.utilisation]
    dumps(view)
    printed(render(view, Terminal(width=100)))


def _kept_operators() -> Samples:
    from foretrace.model.readers.json_form import loads

    return {"a.operators": zlib.compress(msgspec.msgpack.encode(loads(operator_files()["whole.json"])))}


def _play_kept(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.model.capture.kept import read

    found = read(path)
    if found is not None:  # damaged, it is captured again
        yield "flops", [found.flops, found.nbytes]


def _play_decoder(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.model.decoder_config import decoder_config

    found = decoder_config(str(path))
    yield "shape", [found.layers, found.hidden, found.heads, found.kv_heads, found.inner, found.words, found.length]


def _rules() -> Samples:
    def operator(kind: int, inputs: Sequence[tuple[int, int]]) -> bytes:
        told = [(2, 2, _joined([(1, 0, op % 2**64), (2, 0, out)])) for op, out in inputs]
        return _joined([(1, 0, kind), *told, (3, 2, _joined([(1, 0, 9), (2, 0, 0)]))])

    from foretrace.plan.rewrite.taso import KINDS

    add = next(number for number, name in KINDS.items() if "add" in str(name).lower())
    rule = [(1, 2, operator(add, [(-1, 0), (-2, 0)])), (2, 2, operator(add, [(-2, 0), (-1, 0)]))]
    rule.append((3, 2, _joined([(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 0)])))
    return {"rules.pb": _joined([(1, 2, _joined(rule)), (1, 2, _joined(rule))])}


def _play_rules(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.plan.rewrite.taso import read

    yield "rules", len(read(path))


def model_readers() -> Iterator[Reader]:
    """The readers of this file."""
    for name, samples, module in (
        ("operators", operator_files, "json_form"),
        ("execution-trace", execution_traces, "chakra"),
        ("onnx", onnx_models, "onnx"),
    ):
        covers = (
            "model.readers.sources",
            f"model.readers.{module}",
            "model.texts",
            "model.capture.unroll",
            "techniques.compute.batching",
        )
        yield Reader(name=name, covers=covers, samples=samples, play=_play_operators)
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 2048,
              "tie_word_embeddings": False, "head_dim": 16}  # fmt: skip
    yield Reader(name="decoder", covers=("model.decoder_config",), play=_play_decoder,
                 samples=lambda: {"config.json": json.dumps(config).encode()})  # fmt: skip
    yield Reader(name="kept-operators", covers=("model.capture.kept",), samples=_kept_operators, play=_play_kept)
    yield Reader(name="rules", covers=("plan.rewrite.taso", "model.readers.protobuf"), samples=_rules, play=_play_rules)
