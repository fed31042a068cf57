"""Damage to stored graphs: bytes, columns, and the header's tree; seeded, so that a number names the damage."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from foretrace.graph.store import MAGIC

_START = len(MAGIC) + 8
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 255, 2**31, -(2**31) - 1, 2**62, 2**63, 2**64 - 1, -(2**62), 0.5, -0.5, 1e300),
    *("", "x", "\u0000", "\ud7ff" * 40, "../../etc", [], [[]], {}, {"a": 1}, [0] * 7, ["", ""]),
)


def mutated(content: bytes, seed: int) -> bytes:
    """One damaged version of a stored graph."""
    choose = random.Random(seed)
    how = choose.choice((_bytes, _cut, _columns, _columns, _columns, _header, _header, _header, _header))
    damaged = how(content, choose)
    return _bytes(damaged, choose) if choose.random() < 0.1 else damaged


def _bytes(content: bytes, choose: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(choose.randint(1, 5)):
        data[choose.randrange(len(data))] = choose.randrange(256)
    return bytes(data)


def _cut(content: bytes, choose: random.Random) -> bytes:
    begin = choose.randrange(len(content))
    return content[:begin] if choose.random() < 0.7 else content[:begin] + content[begin + choose.randint(1, 200) :]


def _columns(content: bytes, choose: random.Random) -> bytes:
    """Values of one or several columns: extremes, and values of other rows."""
    data = bytearray(content)
    size = int.from_bytes(content[len(MAGIC) : _START], "little")
    header = json.loads(content[_START : _START + size])
    for _ in range(choose.randint(1, 3)):
        column = choose.choice(header["columns"])
        dtype = np.dtype(column["dtype"])
        begin = _START + size + column["offset"]
        values = np.frombuffer(data, dtype=dtype, count=column["length"], offset=begin)
        for _ in range(choose.randint(1, 4)):
            if not len(values):
                continue
            at = choose.randrange(len(values))
            odd: list[Any] = [values[choose.randrange(len(values))]]
            if choose.random() < 0.5:  # a value that the column may hold
                values[at] = odd[0]
                continue
            if dtype.kind == "f":
                odd += [np.nan, np.inf, -np.inf, -1.0, 1e308]
            elif dtype.kind in "iu":
                limit = np.iinfo(dtype)
                ends = (limit.max, limit.min, limit.max // 2, limit.min // 2)
                odd += [*ends, 0, 1, min(len(values), limit.max), max(limit.min, -1)]
            else:
                data[begin + at] = choose.randrange(256)
                continue
            values[at] = choose.choice(odd)
    return bytes(data)


def _header(content: bytes, choose: random.Random) -> bytes:
    """One or two places of the header's tree hold something else, are gone, or come twice."""
    size = int.from_bytes(content[len(MAGIC) : _START], "little")
    header = json.loads(content[_START : _START + size])
    for _ in range(choose.randint(1, 2)):
        _change(header, choose)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    text += b" " * (-(_START + len(text)) % 64)
    return MAGIC + len(text).to_bytes(8, "little") + text + content[_START + size :]


def _change(tree: Any, choose: random.Random) -> None:
    """Some place of the tree holds something else, mostly of the same type, is gone, or comes twice."""
    places = list(_places(tree))
    if not places:
        return
    holder, key = choose.choice(places)
    below, how = holder[key], choose.random()
    if how < 0.1:
        del holder[key]
    elif how < 0.2 and isinstance(holder, list):
        holder.append(below)
    elif how < 0.4:
        holder[key] = choose.choice(_ODD)
    elif isinstance(below, str):
        holder[key] = _text(below, choose)
    else:
        holder[key] = choose.choice([each for each in _ODD if type(each) is type(below)] or [below])


def _text(text: str, choose: random.Random) -> str:
    """Another text; of JSON in a text, another tree."""
    try:
        tree = json.loads(text)
    except ValueError:
        tree = None
    if isinstance(tree, (dict, list)) and choose.random() < 0.9:
        _change(tree, choose)
        return json.dumps(tree)
    at = choose.randrange(len(text) + 1)
    return choose.choice([text[:at], text[at:], text * 3, text[::-1], text[:at] + "\u2028" + text[at:], "", "x"])


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place below a tree: the holder and the key. Of a long list a few items stand for all."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if isinstance(tree, list) and len(keys) > 12:
        keys = keys[:4] + keys[len(keys) // 2 : len(keys) // 2 + 4] + keys[-4:]
    for key in keys:
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from _places(tree[key])
