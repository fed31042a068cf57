"""Damage that once ended in a traceback or in a number that cannot be: what it is answered with now."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foretrace.errors import ForetraceError
from tests.fuzz.reader import check
from tests.fuzz.readers import readers
from tests.fuzz.recording_readers import recordings

DEEP = b"[" * 500_000 + b"]" * 500_000  # beyond what a stack holds: Python 3.14 counts that alone
DIGITS = "9" * 5000
LOG = b"#  Rank  0 Pid 1 on a device  0\n#  Rank  1 Pid 2 on a device  1\n# all_reduce_perf\n"
KNOWN: dict[str, tuple[str, str, bytes, str]] = {
    # reader, file, content, words of the sentence; "" where it is read
    "a table of 5,000 digits": (
        "speed-table", "t.csv", f"model,gpus,nodes,steps_per_s\nm,{DIGITS},1,2\n".encode(), "no whole number",
    ),
    "digits that are none": (
        "speed-table", "t.csv", "model,gpus,nodes,steps_per_s\nm,²,1,2\n".encode(), "no whole number",
    ),
    "a speed beyond floats": (
        "throughputs", "t.json", b'{"v100": {"(\'A\', 1)": {"null": 1%s}}}' % (b"0" * 400), "digits",
    ),
    "a profile beyond floats": (
        "profiles", "p.json", b'{"profiles": [{"name": "m", "compute_ms": 1%s}]}' % (b"0" * 400), "digits",
    ),
    "a short row": ("networks", "archs.csv", b"arch_idx,arch\n0\n", "line 2 has fewer columns"),
    "a calibration without end": (
        "calibration", "c.json", b'{"format": 1, "machine": {"a": %s}, "seconds": {}}' % DEEP, "no calibration",
    ),
    "a configuration of text": (
        "decoder", "config.json", b'{"model_type": "llama", "num_hidden_layers": "two"}', "must be a whole number",
    ),
    "a configuration of nothing": (
        "decoder", "config.json", b'{"model_type": "llama", "vocab_size": null}', "must be a whole number",
    ),
    "nccl-tests with NaN": ("collectives", "t.log", LOG + b"8 2 float sum -1 nan nan nan 0\n", "no finite number"),
    "nccl-tests with a root that is NaN": ("collectives", "t.log", LOG + b"8 2 float nan 1.0 1.0 1.0\n", ""),
    "nccl-tests of very unlike sizes": (
        "collectives", "t.log",
        LOG + b"".join(b"%d 2 float sum -1 %d.5 1.0 1.0 0\n" % (10**k, k + 1) for k in (1, 9, 18)), "",
    ),
    "YAML that blows up": (
        "cluster", "c.yaml",
        b"a0: &a0 [x]\n"
        + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1)] * 10)) for i in range(1, 10)), "aliases",
    ),
    "a date that does not exist": ("cluster", "c.yaml", b"nodes: 2020-99-99\n", "not YAML"),
    "operators of a day each": (
        "operators", "o.json",
        b'{"format": "foretrace operators", "version": 1, "calls": [{"op": "aten::mm", "dims": [[4000000000, 4000000], '
        b"[4000000, 400000000]]}]}", "",
    ),
    "a calibration of a machine of lists": (
        "calibration", "c.json", b'{"format": 1, "machine": {"instruction_sets": [["avx2"], null]}, "seconds": {}}', "",
    ),
    "a cluster beyond floats": ("cluster", "c.yaml", b"nodes: 2\ngpus: 2\nmemory: 1%s\n" % (b"0" * 400), ""),
    "results without end": ("simulators", "results.json", DEEP, "too deeply"),
}  # fmt: skip


def answer(reader: str, path: Path, way: int = 1) -> str:
    """The sentence of refusal, "" where the file is read; asserts that what is read can be."""
    try:
        for name, value in readers()[reader].play(path, way):
            assert not check(name, value)
    except ForetraceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", KNOWN)
def test_known_damage(what: str, tmp_path: Path) -> None:
    reader, name, content, says = KNOWN[what]
    path = tmp_path / name
    path.write_bytes(content)
    found = answer(reader, path)
    assert says in found


def _facts(change: Callable[[dict[str, Any]], Any]) -> bytes:
    told = json.loads(recordings()["own_gpu.json"])
    change(told["foretrace"])
    return json.dumps(told).encode()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", ["x"]), ("steps", {"a": 1}), ("steps", [{"phase": "before", "wall_ns": -5}]),
        ("steps", [{"phase": "before", "wall_ns": 2**62}]), ("overhead", 3),
        ("overhead", {"profiled": {"wall_ns": "x"}}),
        ("threads", {"intra_op": []}), ("whole_steps", "34"), ("machine", ["x"]), ("options", {"samples": {}}),
        ("parameters", [{"shape": [-1]}]), ("gradient_order", [[7, 1]]), ("module_calls", [3]), ("loaders", [1]),
        ("memory", {"peak_allocated_bytes": "much"}), ("optimizers", [[]]), ("buffer_bytes", -1),
    ],
)  # fmt: skip
def test_what_the_recorder_cannot_have_stored_is_left_out(key: str, value: Any, tmp_path: Path) -> None:
    from foretrace.trace.read import read

    path = tmp_path / "t.json"
    path.write_bytes(_facts(lambda facts: facts.update({key: value})))
    trace = read(path)
    assert key not in trace.ranks[0].recording
    assert any(repr(key) in dropped.reason for dropped in trace.dropped)
    assert answer("recording", path) == ""


def test_what_the_recorder_stores_is_kept() -> None:
    from foretrace.trace.read import read

    data = Path(__file__).resolve().parents[1] / "data"
    for name in ("cnn.json.gz", "recommender.json.gz", "recommender-fused.json.gz"):
        assert not [each for each in read(data / name).dropped if "recorder's fact" in each.reason]


@pytest.mark.parametrize("sample", ["gpu.json", "cpu.json", "rocm.json"])
def test_a_step_without_any_time_is_shown(sample: str, tmp_path: Path) -> None:
    told = json.loads(recordings()[sample])
    for event in told["traceEvents"]:
        event.update({"ts": 5, "dur": 0} if event["ph"] == "X" else {"ts": 5})
    path = tmp_path / "t.json"
    path.write_text(json.dumps(told))
    assert answer("recording", path) == ""
