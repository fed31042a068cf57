"""Damage to files, drawn by seed: to their structure where it is known (by the ending of the name), and to their bytes.

`mutated(data, form, dice)` gives another file; the same dice give the same file.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]

# Values that a reader may meet where it expects something else; Raw stands in the text as it is.


class Raw(str):
    """Text of a JSON value that `json` would not write."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may come twice, in the order of the file."""


NUMBERS = [
    "0", "-0", "-1", "1", "2", "255", "-2147483649", "4294967295", "9223372036854775807", "-9223372036854775808",
    "9223372036854775808", "18446744073709551616", "1e18", "1e19", "1e300", "1e400", "-1e400", "1e-400", "0.5", "1.0",
    "-0.5", "NaN", "Infinity", "-Infinity", "9" * 400, "9" * 5000, "1_0", "0x10", "1e", "+1", ".5", "٣", "²", "1,5",
]  # fmt: skip
TEXTS = [
    "", " ", "\x00", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "\u202e", "²", "9" * 5000, "x" * 20_000, "é",
    "\u2028", "😀", "a\nb", "a\tb", "\r\n", "nan", "None", "null", "true", "../../etc/passwd", "</script><b>", "%s%n",
    "${x}", "'", '"', "\\", ",", "\ufeff", "a\x85b", "stream 7", "[0, 1]", "ProfilerStep#99999999999999999999", "-",
    "ncclDevKernel_AllReduce", "(", "('A', 1)", "[[1, 2], [3]]",
]  # fmt: skip
VALUES: list[Any] = [
    *map(Raw, NUMBERS[:27]), *TEXTS, None, True, False, [], {}, [[]], [None], {"": 0}, Raw('"\\ud800"'),
    Raw("[" * 200 + "]" * 200), Raw("[" * 3000 + "]" * 3000), Raw('{"a":' * 600 + "1" + "}" * 600), [0] * 3000,
]  # fmt: skip
STRAYS = [
    b'"', b"'", b",", b"\t", b"|", b"\n", b"\r\n", b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"-", b"e9", b"nan",
    b"inf", b"null", b"{}", b"[", b"]", b"}", b"{", b"},{", b"}]}", b"9" * 400, b"\\", b"\\u0000", b"\\ud800", b"#",
    b":", b"&a", b"*a", b"!!", b"%", b"\x1b[31m", b"=", b"(", b")", b"[" * 3000, b" " * 3000, b"\xe2\x80\xa8", b"-1",
]  # fmt: skip


def mutated(data: bytes, form: str, dice: Random) -> bytes:
    """A damaged copy; `form` is the ending of the file's name, such as "json" or "tar.gz"."""
    inner = FORMS.get(form)
    for _ in range(dice.choice((1, 1, 1, 1, 2, 3))):
        try:
            data = inner(data, dice) if inner is not None and dice.random() < 0.7 else in_bytes(data, dice)
        except Exception:  # damaged too much by now for its form: whatever that form's parser raises
            data = in_bytes(data, dice)
    return packed(data, dice) if dice.random() < 0.03 else data


def packed(data: bytes, dice: Random) -> bytes:
    """Packed once more than the reader expects, whole or cut."""
    found = dice.choice((gzip.compress, lzma.compress, lambda each: b"\x28\xb5\x2f\xfd" + each))(data)
    return found[: dice.randrange(len(found) + 1)] if dice.random() < 0.3 else found


def in_bytes(data: bytes, dice: Random) -> bytes:
    """Flip, cut out, repeat, splice, insert and truncate."""
    text = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 5, 20))):
        at = dice.randrange(len(text) + 1)
        match dice.randrange(8):
            case 0:
                text[at : at + 1] = bytes([dice.randrange(256)])
            case 1 if at < len(text):
                text[at] ^= 1 << dice.randrange(8)
            case 2:
                del text[at : at + dice.choice((1, 5, 50, 500))]
            case 3:
                text[at:at] = dice.choice(STRAYS)
            case 4:
                source = dice.randrange(len(text) + 1)
                text[at:at] = text[source : source + dice.choice((1, 10, 300, 3000))]
            case 5:
                end = at
                while end < len(text) and chr(text[end]) in "0123456789.-+eE":
                    end += 1
                text[at:end] = dice.choice(NUMBERS).encode()
            case 6:
                size = dice.choice((1, 2, 4, 8))
                text[at : at + size] = dice.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * size
            case _ if dice.random() < 0.2:
                del text[at:]
    return bytes(text)


# --- JSON -------------------------------------------------------------------------------------------------------------


def in_json(data: bytes, dice: Random) -> bytes:
    """Drop, repeat, rename and swap keys and entries; other values, other types, depth."""
    try:
        root = json.loads(data, object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        return in_bytes(data, dice)
    if dice.random() < 0.5 and (events := _events(root)):
        _edit_events(events, dice)
        return _written(root, ",").encode("utf-8", "surrogatepass")
    places = list(_places(root))
    if not places:
        return dice.choice(NUMBERS).encode()
    for _ in range(dice.choice((1, 1, 1, 1, 2, 4))):
        _edit(*dice.choice(places), places, dice)
    return _written(root, dice.choice((",", ",", ", ", ",\n"))).encode("utf-8", "surrogatepass")


def _events(root: Any) -> list[Pairs]:
    """The events of a recording, the list itself; empty for anything else."""
    found = dict(root).get("traceEvents") if isinstance(root, Pairs) else root
    if isinstance(found, list) and found and all(isinstance(each, Pairs) for each in found):
        return found
    return []


def _edit_events(events: list[Pairs], dice: Random) -> None:
    """What befalls a class of events at once: gone, alone, elsewhere, at other times, with other links."""
    key = dice.choice(("cat", "name", "tid", "ph"))
    value = dict(dice.choice(events)).get(key)
    chosen = [i for i, each in enumerate(events) if dict(each).get(key) == value]

    def put(field: str, new: Callable[[Any], Any]) -> None:
        for i in chosen:
            events[i] = Pairs([(k, new(v)) if k == field else (k, v) for k, v in events[i]])

    def number(new: Callable[[float], float]) -> Callable[[Any], Any]:
        return lambda old: new(old) if isinstance(old, int | float) and not isinstance(old, bool) else old

    match dice.randrange(10):
        case 0:
            events[:] = [each for i, each in enumerate(events) if i not in set(chosen)]
        case 1:
            events[:] = [events[i] for i in chosen]
        case 2:
            events[:] = [each for each in events if dice.random() < dice.choice((0.1, 0.5, 0.9))]
        case 3:
            put("tid", lambda _: dice.choice((10, 11, 7, 20, "x")))
        case 4:
            factor = dice.choice((0, 0.001, 1000, -1))
            put("dur", number(lambda old: old * factor))
        case 5:
            shift = dice.choice((1, -1, 50, 333, 5000, -5000, 1e9))
            put("ts", number(lambda old: old + shift))
        case 6:
            at = dict(dice.choice(events)).get("ts", 0)
            put("ts", lambda _: at)
        case 7:
            put("cat", lambda _: dict(dice.choice(events)).get("cat", "cpu_op"))
        case 8:
            put("name", lambda _: dict(dice.choice(events)).get("name", ""))
        case _:
            shift = dice.choice((0, 1, 100, 2000))
            events += [Pairs([(k, number(lambda old: old + shift)(v) if k == "ts" else v) for k, v in events[i]])
                       for i in chosen]  # fmt: skip


def _places(node: Any) -> list[tuple[Any, int]]:
    """(container, index) of every value below."""
    found: list[tuple[Any, int]] = []
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            found += [(each, i) for i in range(len(each))]
            waiting += [value for _, value in each] if isinstance(each, Pairs) else each
    return found


def _edit(box: Any, at: int, places: list[tuple[Any, int]], dice: Random) -> None:
    if at >= len(box):
        return
    pairs = isinstance(box, Pairs)
    key, value = box[at] if pairs else ("", box[at])
    match dice.randrange(9):
        case 0:
            del box[at]
            return
        case 1:
            again = (key, dice.choice(VALUES)) if pairs else value
            box.insert(dice.randrange(len(box) + 1), again)
            return
        case 2 if pairs:
            key = dice.choice((*TEXTS, key + " ", key.upper(), key[:-1]))
        case 3:
            other, i = dice.choice(places)
            if i < len(other):
                value = other[i][1] if isinstance(other, Pairs) else other[i]
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            value = dice.choice(
                (-value, value + 0.5, value * 10**12, str(value), value - 1, value + 1, int(value) << 32)
            )
        case 5 if isinstance(value, list) and value:
            count = dice.choice((0, 1, len(value) - 1))
            value = type(value)(value[:count]) if dice.random() < 0.5 else type(value)([*value, *value])
        case 6 if isinstance(value, str):
            cut = dice.randrange(len(value) + 1)
            value = value[:cut] + dice.choice(TEXTS) + value[cut:]
        case 7:
            value = [value] if dice.random() < 0.5 else Pairs([("a", value)])
        case _:
            value = dice.choice(VALUES)
    if value is not box and not _holds(value, box):
        box[at] = (key, value) if pairs else value


def _holds(value: Any, box: Any) -> bool:
    """Whether a value would contain the place that it is put in."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if each is box:
            return True
        if isinstance(each, list):
            waiting += [inner for _, inner in each] if isinstance(each, Pairs) else each
    return False


def _written(node: Any, comma: str) -> str:
    if isinstance(node, Pairs):
        return "{" + comma.join(f"{json.dumps(k, ensure_ascii=False)}:{_written(v, comma)}" for k, v in node) + "}"
    if isinstance(node, list):
        return "[" + comma.join(_written(each, comma) for each in node) + "]"
    if isinstance(node, Raw):
        return node
    return json.dumps(node, ensure_ascii=False)


def in_json_lines(data: bytes, dice: Random) -> bytes:
    """One line of a file with a JSON value on each."""
    lines = data.split(b"\n")
    at = dice.randrange(len(lines))
    lines[at] = in_json(lines[at], dice)
    return b"\n".join(lines)


# --- tables -----------------------------------------------------------------------------------------------------------


def in_table(data: bytes, dice: Random) -> bytes:
    """Cells, columns and rows of text that a comma, tab, bar or blank cuts."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    delimiter = max((",", "\t", "|"), key=lambda each: sum(line.count(each) for line in lines[:20]))
    if not any(delimiter in line for line in lines):
        delimiter = " "
    at = dice.randrange(min(len(lines), 40)) if dice.random() < 0.8 else 0
    cells = lines[at].split(delimiter)
    column = dice.randrange(len(cells))
    match dice.randrange(10):
        case 0:
            del cells[column]
        case 1:
            cells.insert(column, dice.choice(TEXTS))
        case 2:
            lines.insert(dice.randrange(len(lines) + 1), lines[at])
        case 3 if len(lines) > 1:
            del lines[at]
            return delimiter.join(lines[:0]).encode() + "\n".join(lines).encode("utf-8", "surrogateescape")
        case 4:
            other = dice.randrange(len(cells))
            cells[column], cells[other] = cells[other], cells[column]
        case 5:
            for i, line in enumerate(lines):  # a whole column
                parts = line.split(delimiter)
                if column < len(parts):
                    parts[column] = dice.choice(NUMBERS)
                    lines[i] = delimiter.join(parts)
            return "\n".join(lines).encode("utf-8", "surrogateescape")
        case 6:
            cells[column] = '"' + cells[column]
        case 7:
            cells[column] = dice.choice(TEXTS)
        case _:
            cells[column] = dice.choice(NUMBERS)
    lines[min(at, len(lines) - 1)] = delimiter.join(cells)
    return "\n".join(lines).encode("utf-8", "surrogateescape")


# --- YAML -------------------------------------------------------------------------------------------------------------

YAML_VALUES = [
    *NUMBERS, "~", "yes", "2020-99-99", "2020-01-01", "12:30:45", "!!python/object:os.system {}", "!!binary abc",
    "!!float x", "!!int x", "!!set {a, b}", "!!timestamp 1", "&a [*a]", "*nowhere", "[" * 300 + "]" * 300,
    "? [1]", "| \n  x", "0o17", ".nan", ".inf", "-.inf", "[1, 2]", '"\\x1b[31m"', '"\\ud800"', "300gbit/2us", "nvlink",
    "1e300gbit", "0gbit", "-1gbit/2us", "1gbit/-2us", "nangbit", "inf", '"²"', "<<: 1", "!!omap [a: 1]", "1" * 5000,
]  # fmt: skip


def in_yaml(data: bytes, dice: Random) -> bytes:
    """Values, keys, indentation, anchors and aliases, line by line."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    at = dice.randrange(len(lines))
    line = lines[at]
    key, colon, value = line.partition(":")
    match dice.randrange(9):
        case 0:
            lines[at] = " " * dice.randrange(6) + line.lstrip()
        case 1:
            lines.insert(at, line)
        case 2:
            del lines[at]
        case 3 if dice.random() < 0.3:
            bomb = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
            bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
            lines[at:at] = bomb
            if colon:
                lines.append(f"{key}: *a9")
        case 4 if colon:
            lines[at] = f"{key}: &here{value}"
            lines.insert(
                dice.randrange(at + 1, len(lines) + 1), f"{dice.choice(('name', 'nodes', key.strip()))}: *here"
            )
        case 5:
            lines[at] = line.replace(":", dice.choice((" ", ": :", "::", ":\t")), 1)
        case 6:
            inside = re.split(r"([\[\]{},])", line)
            place = dice.randrange(len(inside))
            inside[place] = dice.choice(YAML_VALUES)
            lines[at] = "".join(inside)
        case _ if colon:
            lines[at] = f"{key}: {dice.choice(YAML_VALUES)}"
    return "\n".join(lines).encode("utf-8", "surrogateescape")


# --- protocol buffers -------------------------------------------------------------------------------------------------

_VARINTS = [0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _take(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80 or shift > 70:
            return value, at


def _fields(data: bytes) -> list[tuple[int, int, Any]]:
    """(number, wire type, value) of a message; raises ValueError or IndexError where it is none."""
    found: list[tuple[int, int, Any]] = []
    at = 0
    while at < len(data):
        tag, at = _take(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0 or kind not in (0, 1, 2, 5):
            raise ValueError("no message")
        if kind == 0:
            value, at = _take(data, at)
            found.append((number, kind, value))
            continue
        size = 8 if kind == 1 else 4
        if kind == 2:
            size, at = _take(data, at)
        if at + size > len(data):
            raise ValueError("no message")
        found.append((number, kind, data[at : at + size]))
        at += size
    return found


def _joined(fields: list[tuple[int, int, Any]]) -> bytes:
    parts = []
    for number, kind, value in fields:
        parts.append(_varint(number << 3 | kind))
        if kind == 0:
            parts.append(_varint(value))
        else:
            parts.append((_varint(len(value)) if kind == 2 else b"") + value)
    return b"".join(parts)


def in_protobuf(data: bytes, dice: Random) -> bytes:
    """Fields of a message, or of one inside it: dropped, repeated, renumbered, other values, other lengths."""
    try:
        fields = _fields(data)
    except (ValueError, IndexError):
        return in_bytes(data, dice) if data else dice.choice(TEXTS).encode("utf-8", "replace")
    if not fields:
        return _varint(8) + _varint(dice.choice(_VARINTS))
    at = dice.randrange(len(fields))
    number, kind, value = fields[at]
    if kind == 2 and dice.random() < 0.75:
        text = dice.random() < 0.15
        fields[at] = number, kind, dice.choice(TEXTS).encode("utf-8", "replace") if text else in_protobuf(value, dice)
        return _joined(fields)
    match dice.randrange(6):
        case 0:
            del fields[at]
        case 1:
            fields.insert(dice.randrange(len(fields) + 1), fields[at])
        case 2:
            fields[at] = dice.randrange(1, 40), kind, value
        case 3:
            fields[at] = number, 0, dice.choice(_VARINTS)
        case 4 if kind in (1, 5):
            double = struct.pack(
                "<d" if kind == 1 else "<f", dice.choice((float("nan"), float("inf"), -1.0, 0.0, 1e30))
            )
            fields[at] = number, kind, double
        case _:
            fields[at] = (number, 0, dice.choice(_VARINTS)) if kind == 0 else (number, 2, b"\xff" * dice.randrange(9))
    return _joined(fields)


def in_messages(data: bytes, dice: Random) -> bytes:
    """One of several messages that follow one another behind their lengths."""
    parts, at = [], 0
    try:
        while at < len(data):
            size, at = _take(data, at)
            parts.append(data[at : at + size])
            at += size
    except IndexError:
        return in_bytes(data, dice)
    if not parts:
        return in_bytes(data, dice)
    at = dice.randrange(len(parts))
    match dice.randrange(6):
        case 0:
            del parts[at]
        case 1:
            parts.insert(dice.randrange(len(parts) + 1), parts[at])
        case _:
            parts[at] = in_protobuf(parts[at], dice)
    return b"".join(_varint(len(part)) + part for part in parts)


# --- files that hold others -------------------------------------------------------------------------------------------


def in_graph(data: bytes, dice: Random) -> bytes:
    """A saved graph: its header as JSON, or numbers in its columns."""
    size = int.from_bytes(data[8:16], "little")
    if dice.random() < 0.5 and size < len(data):
        header = in_json(data[16 : 16 + size], dice)
        header += b" " * (-(16 + len(header)) % 64)
        return data[:8] + len(header).to_bytes(8, "little") + header + data[16 + size :]
    text = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 8))):
        width = dice.choice((1, 4, 8))
        at = 16 + size + width * dice.randrange(max((len(data) - 16 - size) // width, 1))
        value = dice.choice((0, 1, 2, 3, -1, -2, 127, 255, 2**31 - 1, -(2**31), 2**62, -(2**63), dice.randrange(300)))
        text[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(text)


def in_gzip(data: bytes, dice: Random) -> bytes:
    """What is packed, as JSON, or the packing."""
    try:
        return gzip.compress(in_json(gzip.decompress(data), dice), compresslevel=1, mtime=0)
    except (OSError, EOFError, ValueError, zlib.error):
        return in_bytes(data, dice)


def in_tar(data: bytes, dice: Random) -> bytes:
    """A member of the archive, as JSON, its name, or the archive."""
    if dice.random() < 0.3:
        return in_bytes(data, dice)
    out = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(data)) as given,
            tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as to,
        ):
            members = given.getmembers()
            for i, member in enumerate(members):
                content = given.extractfile(member)
                inner = content.read() if content else b""
                if i == dice.randrange(len(members)):
                    inner = in_json(inner, dice) if dice.random() < 0.7 else in_bytes(inner, dice)
                    if dice.random() < 0.3:
                        member.name = (
                            dice.choice(("²", "9" * 5000, "../a", "a\x1b[31m", "\udcff", "rank3", "")) + ".json"
                        )
                member.size = len(inner)
                to.addfile(member, io.BytesIO(inner))
    except (tarfile.TarError, OSError, EOFError, ValueError):
        return in_bytes(data, dice)
    return out.getvalue()


def in_zip(data: bytes, dice: Random) -> bytes:
    """A member of the archive, as JSON, its name, or the archive."""
    if dice.random() < 0.3:
        return in_bytes(data, dice)
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as given, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as to:
            for info in given.infolist():
                inner, name = given.read(info), info.filename
                if dice.random() < 0.5:
                    inner = in_json(inner, dice)
                    name = dice.choice((name, name, "².json", "9" * 5000 + ".json", "../a.json", "a\x1b[31m.json"))
                to.writestr(name, inner)
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError):
        return in_bytes(data, dice)
    return out.getvalue()


FORMS: dict[str, Mutation] = {
    "json": in_json,
    "jsonl": in_json_lines,
    "csv": in_table,
    "tsv": in_table,
    "txt": in_table,
    "log": in_table,
    "swf": in_table,
    "yaml": in_yaml,
    "onnx": in_protobuf,
    "pb": in_protobuf,
    "et": in_messages,
    "graph": in_graph,
    "json.gz": in_gzip,
    "tar.gz": in_tar,
    "zip": in_zip,
}
