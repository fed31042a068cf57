"""Files of others come in within limits: packed, nested, aliased, or in bytes that are no text."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.reading import parse_json, parse_yaml, read_bytes, read_text
from foretrace.trace.read import read
from foretrace.trace.stream import _natural


def test_what_is_packed_is_unpacked_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(b"one") + gzip.compress(b"two") + b"\0" * 10)
    assert read_bytes(path) == b"onetwo"
    path.write_bytes(b"\xef\xbb\xbfplain")
    assert read_text(path) == "plain"


@pytest.mark.parametrize("cut", [1, 5, 12, -9, -1])
def test_a_cut_file_is_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"text" * 1000)[:cut])
    if cut == 1:
        assert read_bytes(path) == b"\x1f"  # too short to be gzip
    else:
        with pytest.raises(ForetraceError, match="damaged gzip"):
            read_bytes(path)


def test_bombs_are_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FREE", 1 << 20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0" * (8 << 20)))
    with pytest.raises(reading.TooLargeError, match=r"400 times its size.*`allow_large=`"):
        read_bytes(path)
    monkeypatch.setenv(reading.ALLOW_LARGE, "1")
    assert len(read_bytes(path)) == 8 << 20


def test_packed_arrays_keep_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "FREE", 1 << 20)
    held = io.BytesIO()
    np.savez_compressed(held, edges=np.zeros(1 << 20))
    with pytest.raises(reading.TooLargeError, match="400 times its size"):
        reading.parse_npz(held.getvalue())


def test_the_limit_holds_over_all_levels_of_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level alone stays below 400 : 1; together they do not."""
    monkeypatch.setattr(reading, "FREE", 1 << 20)
    inner = b'{"traceEvents": [' + b'{"ph": "s"},' * 500_000 + b"{}]}"
    once = gzip.compress(inner, 1)
    twice = gzip.compress(once, 9)
    assert len(inner) / len(once) < 400
    path = tmp_path / "a.json.gz"
    path.write_bytes(twice)
    with pytest.raises(ForetraceError, match="400 times"):
        read(path)


def test_large_files_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "WHOLE", 10)
    path = tmp_path / "a"
    path.write_bytes(b"x" * 11)
    with pytest.raises(reading.TooLargeError, match="`allow_large=`"):
        read_bytes(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML"),
        ("a: 1\na: 2", "comes twice"),
        ("? [1]\n: 2", "a key is no word"),
        ("when: 2020-99-99", "not YAML"),
        ("x: !!timestamp 1", "not YAML"),
        ("x: !!python/object:os.system {}", "not YAML"),
        ("n: " + "1" * 5000, "not YAML"),
        ("a: &a [*a]", "inside what it names"),
        ("x: " + "[" * 300 + "]" * 300, "too deeply"),
    ],
)
def test_yaml_that_cannot_be_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ForetraceError, match=says) as caught:
        parse_yaml(text, "c.yaml")
    assert str(caught.value).startswith("c.yaml")
    assert "\n" not in str(caught.value)


def test_aliases_may_be_used_but_may_not_blow_up() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}", "c") == {
        "a": {"b": 1},
        "c": {"b": 1},
        "d": {"b": 1, "e": 2},
    }
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    with pytest.raises(ForetraceError, match="aliases, written out, make"):
        parse_yaml(bomb, "c")


def test_json_of_others_holds_text_and_numbers_alone() -> None:
    found: dict[str, Any] = parse_json('{"a": "\\ud800x", "b": "\\ud83d\\ude00", "c": "\\\\ud800"}', "f")
    assert found == {"a": "\ufffdx", "b": "\U0001f600", "c": "\\ud800"}
    for bad in ("[NaN]", "[1" + "0" * 5000 + "]", "[" * 100_000, "{", b"\xff"):
        with pytest.raises(ForetraceError, match="f is "):
            parse_json(bad, "f")


@pytest.mark.parametrize(
    ("name", "what"),
    [("t.json.zst", b"\x28\xb5\x2f\xfdx"), ("t.json.xz", b"\xfd7zXZ\x00"), ("t.json.bz2", b"BZh91AY")],
)
def test_other_packers_are_named_with_what_unpacks_them(tmp_path: Path, name: str, what: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(what)
    for reader in (read, read_bytes):
        with pytest.raises(ForetraceError, match=f"unpack it first: .* {name}"):
            reader(path)


def test_addresses_are_not_fetched() -> None:
    assert reading.address(Path("https://a.b/c.json")).endswith("curl -LO https://a.b/c.json")
    assert "aws s3 cp s3://bucket/key" in reading.address("s3://bucket/key")
    assert reading.address("C:/x") == reading.address("run/rank0.json") == ""


def test_names_sort_by_their_numbers_whatever_digits_they_hold() -> None:
    names = ["rank10", "rank2", "rank²", "rank", "rank02", "r" + "9" * 5000, "10", "9", "١"]
    ordered = [path.name for path in sorted(map(Path, names), key=_natural)]
    assert ordered.index("9") < ordered.index("10")
    assert ordered.index("rank2") < ordered.index("rank10")
    assert set(ordered) == set(names)
