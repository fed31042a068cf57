"""Kernel and operator names cut to what tells them apart, and commands to try next."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Sequence

_GENERIC = {"kernel", "kernel2", "kentry", "device_kernel", "run", "call", "forward", "backward"}  # say nothing alone
_LOADER = re.compile(r"DataLoader.*\.__next__$")
_RETURN_TYPE = re.compile(r"^(?:void|static|int|bool)\s+")


def short_name(name: str, width: int = 48) -> str:
    """Return the part of a kernel's or operator's name that tells it apart, at most `width` characters.

    C++ kernels lose return type, namespaces, template and call arguments; the functor that an elementwise kernel
    applies is kept in brackets. What is still too long is cut in the middle, so that both ends can be compared.
    """
    text = name.strip() or "(no name)"
    if _LOADER.search(text):
        text = "DataLoader.__next__"
    elif text.startswith("_ZN"):
        text = _mangled_name(text)
    elif "<" in text or text.startswith("void ") or ("(" in text and "::" in text):
        text = _kernel_name(text)
    return _cut(text, width)


def short_names(names: Sequence[str], width: int = 48) -> list[str]:
    """Return `short_name` of each, with the part that differs appended where different names would read the same."""
    shorts = [short_name(name, width) for name in names]
    same: dict[str, set[str]] = defaultdict(set)
    for name, short in zip(names, shorts, strict=True):
        same[short].add(name)
    told_apart: dict[str, str] = {}
    for short, group in same.items():
        ordered = sorted(group)
        for i, name in enumerate(ordered):
            near = ordered[max(i - 1, 0) : i] + ordered[i + 1 : i + 2]
            told_apart[name] = _with_difference(name, short, near, width) if near else short
    return [told_apart[name] for name in names]


def listed(names: Sequence[str]) -> str:
    """Return text such as "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def command(*words: object, **options: object) -> str:
    """Return a command of foretrace for a shell: words, then options that are not None, False or "".

    One that is True is a flag; one with several values is given once for each.
    """
    said = ["foretrace", *map(str, words)]
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None and each is not False and each != "":
                said += [f"--{name.replace('_', '-')}", *([] if each is True else [str(each)])]
    return shlex.join(said)


def _with_difference(name: str, short: str, near: Sequence[str], width: int) -> str:
    """Return text such as "wgrad_engine …7, 3>": from where the name departs from those that sort next to it."""
    at = max(_common(name, other) for other in near)
    token = at
    while token > 0 and (name[token - 1].isalnum() or name[token - 1] == "_"):
        token -= 1
    tail = " …" + (name[token:] if at - token <= 8 else name[max(at - 3, 0) :]).strip()
    tail = tail if len(tail) <= width // 3 else tail[: width // 3 - 1] + "…"
    return _cut(short, width - len(tail)) + tail


def _common(a: str, b: str) -> int:
    """Return the length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) * 2 // 3
    return text[:head] + "…" + text[len(text) - (width - 1 - head) :]


def _kernel_name(text: str) -> str:
    bare = _without_brackets(_RETURN_TYPE.sub("", text).replace("(anonymous namespace)", "anonymous"))
    parts = [part.strip() for part in bare.split("::")]
    base = parts[-1] or text
    if base.lower() in _GENERIC:
        argument = re.search(r"<([A-Za-z_]\w{15,})", text)  # cutlass::Kernel2<cutlass_75_tensorop_..._align8>
        base = argument[1] if argument else "::".join(parts[-2:])
    for functor in re.findall(r"([A-Za-z_]\w*)(?:<[^<>]*>)?", text[len(base) :]):
        if functor.endswith(("Functor", "_functor", "functor")) or "Functor_" in functor:
            plain = functor.removeprefix("CUDA").replace("Functor_", " ").replace("Functor", "").strip(" _")
            if plain:
                return f"{base} [{plain}]"
    return base


def _mangled_name(text: str) -> str:
    """Return the function of an Itanium-mangled name, with the next long type where it says nothing alone."""
    at, words = 3, list[str]()
    while length := re.match(r"[1-9]\d*", text[at:]):
        at += length.end() + int(length[0])
        words.append(text[at - int(length[0]) : at])
    if not words or not words[-1]:
        return text
    if words[-1].lower() not in _GENERIC:
        return words[-1]
    for digits in re.finditer(r"[1-9]\d*", text[at:]):
        word = text[at + digits.end() :][: int(digits[0])]
        if len(word) == int(digits[0]) >= 6 and word.isidentifier():
            return f"{words[-1]} [{word}]"
    return "::".join(words[-2:])


def _without_brackets(text: str) -> str:
    """Drop everything inside <> and (), at any depth; unbalanced text keeps what comes before."""
    depth, kept = 0, []
    for at, char in enumerate(text):
        if char in "<(":
            depth += 1
        elif char in ">)" and not (char == ">" and at and text[at - 1] == "-"):
            depth = max(depth - 1, 0)
        elif depth == 0:
            kept.append(char)
    return "".join(kept)
