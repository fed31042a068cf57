"""Text that others wrote, made fit to be shown: nothing in it that a terminal would obey, none of it without end."""

from __future__ import annotations

import re
from typing import Any

# Control characters (but for line ends and tabs), C1 controls, marks that turn the direction of writing, line and
# paragraph separators, and halves of surrogate pairs, which stand for bytes of file names that are no text.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
_WHOLE = re.compile(r"\s*([+-]?[0-9]{1,18})\s*")
_LONGEST_WORD = 600
_LONGEST = 2_000


def visible(text: str) -> str:
    """Return the text with everything that a terminal would obey as an escape that can be read."""
    return _OBEYED.sub(_escape, text)


def sentence(text: str) -> str:
    """Return one line of `visible` text; words and the whole are shortened in the middle where they are too long."""
    words = (_shortened(word, _LONGEST_WORD) for word in visible(text).split())
    return _shortened(" ".join(words), _LONGEST)


def encoded(value: Any) -> bytes:
    """Return JSON of what msgspec can encode; lone surrogates, as in undecodable file names, as escapes."""
    import json

    import msgspec

    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(_whole(msgspec.to_builtins(value, str_keys=True)), ensure_ascii=False).encode()


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(key): _whole(each) for key, each in value.items()}
    return [_whole(each) for each in value] if isinstance(value, list | tuple) else value


def whole_number(text: str) -> int | None:
    """Return the whole number of a text of at most 18 ASCII digits, with a sign or without; None for any other.

    `str.isdigit` and `int` do not agree on what a digit is (², 5,000 of them).
    """
    found = _WHOLE.fullmatch(text)
    return int(found[1]) if found else None


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"  # so that what stands in a string of JSON stays the same string


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]}…{text[-most // 4 :]}"
