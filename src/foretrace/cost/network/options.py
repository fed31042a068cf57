"""Options behind the name of a network: "nccl:h200,nodes=4,nics=8"."""

from __future__ import annotations

from foretrace.errors import ForetraceError
from foretrace.plaintext import whole_number


def split(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the first comma, and the key=value pairs behind it."""
    head, *rest = (part.strip() for part in text.strip().split(","))
    options: dict[str, str] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ForetraceError(f"{text!r}: {part!r} is no option; write key=value, e.g. per-node=4.")
        options[key.strip()] = value.strip()
    return head, options


def none_left(options: dict[str, str], text: str) -> None:
    """Raise ForetraceError where there are options but nothing takes any."""
    if options:
        raise ForetraceError(f"{text!r}: {', '.join(options)} says nothing here; leave it out.")


def whole(options: dict[str, str], key: str, default: int) -> int:
    """An option that is a whole number above 0. Raises ForetraceError."""
    if key not in options:
        return default
    number = whole_number(text := options.pop(key))
    if number is None or number < 1:
        raise ForetraceError(f"{key}={text} is no whole number above 0.")
    return number


def none_else(options: dict[str, str], where: str, allowed: str) -> None:
    """Raise ForetraceError where an option is left that nobody knows."""
    if options:
        raise ForetraceError(f"{where}: {', '.join(options)} is unknown; there are {allowed}.")
