"""`Requests`: when requests come and how long they are; drawn from a rate, or read from a trace.

requests("poisson qps=2 prompt=1024 output=128", seconds=3600)
requests("closed concurrency=16 prompt=820-1024 output=128 requests=160")
requests("trace.csv.gz", seconds=600)
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from foretrace import reading
from foretrace.arrays import Array, Float64, Int64, Mask
from foretrace.errors import ForetraceError
from foretrace.names import keyed, question

MOST_TOKENS = 1 << 31
MOST_REQUESTS = 100_000_000
TIMED = ("poisson", "gamma", "constant", "diurnal")
KINDS = (*TIMED, "closed", "burst")
# Shares of the rate in equal parts of the time; diurnal is Packrat's load, 8, 16, 32, 16, 8.
_COURSES = {"constant": (1.0,), "diurnal": (0.25, 0.5, 1.0, 0.5, 0.25)}
_OPTIONS = ("qps", "cv", "concurrency", "requests", "prompt", "output", "lengths")
_MOMENT = "a finite number of seconds"
_PROMPT, _OUTPUT = "1024", "256"  # where nothing is said
# Names of the columns arrival, prompt, output, and seconds in a unit of the arrival.
_COLUMNS = (
    ("arrival_s", "prompt", "output", 1.0),
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens", 1.0),  # Azure
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens", 1.0),  # Vidur
    ("Timestamp", "Request tokens", "Response tokens", 1.0),  # BurstGPT
    ("timestamp", "input_length", "output_length", 1e-3),  # Mooncake
)
_ARRIVALS = ("arrival_s", "arrived_at", "arrival", "timestamp")  # where there are no lengths: seconds
_MOONCAKE_BLOCK = 512  # tokens of a block that a hash of Mooncake's traces stands for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """n requests as columns, by arrival."""

    arrival_s: Float64  # (n,) seconds; of a closed loop 0
    prompt: Int64  # (n,) tokens, at least 1
    output: Int64  # (n,) tokens to be generated, at least 1
    hash_first: Int64  # (n + 1,) where the hashes of each prompt begin in `hashes`; all 0 where none are known
    hashes: Int64  # what the blocks of prompts hold: equal numbers, equal prefixes up to and with this block
    hash_tokens: int = 0  # of such a block
    concurrency: int = 0  # of a closed loop, how many clients each send the next request when one is answered; 0: open
    drawn: bool = False  # whether arrivals or lengths come from a generator of random numbers
    source: str = ""  # as a user wrote it
    notes: tuple[str, ...] = ()  # what a user should know of them

    def __len__(self) -> int:
        return len(self.prompt)

    def take(self, rows: Int64) -> Requests:
        """Return the requests of these rows, by arrival."""
        rows = rows[np.argsort(self.arrival_s[rows], kind="stable")]
        counts = np.diff(self.hash_first)[rows]
        first = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(first[-1]) + np.repeat(self.hash_first[:-1][rows] - first[:-1], counts)
        return replace(self, arrival_s=self.arrival_s[rows], prompt=self.prompt[rows], output=self.output[rows],
                       hash_first=first, hashes=self.hashes[at])  # fmt: skip


def of(
    arrival_s: Array | list[float], prompt: Array | list[int], output: Array | list[int], *,
    hash_first: Array | None = None, hashes: Array | None = None, hash_tokens: int = 0, concurrency: int = 0,
    drawn: bool = False, source: str = "requests", notes: tuple[str, ...] = (),
) -> Requests:  # fmt: skip
    """Return requests from columns, sorted by arrival. Raises ForetraceError where a number cannot be."""
    at, lengths = np.asarray(arrival_s, np.float64), [np.asarray(each, np.float64) for each in (prompt, output)]
    if not len(at):
        raise ForetraceError(f"{source} holds no requests; give a longer time or another trace.")
    if len(at) != len(lengths[0]) or len(at) != len(lengths[1]):
        raise ForetraceError(f"{source}: columns must have the same length, got {len(at)} arrivals.")
    _check(source, "an arrival", at, np.isfinite(at) & (np.abs(at) < 1e11), _MOMENT)
    for name, column in zip(("a prompt", "an output"), lengths, strict=True):
        good = (column >= 1) & (column < MOST_TOKENS) & (column == np.floor(column))
        _check(source, name, column, good, "a whole number of tokens from 1 on")
    made = Requests(
        arrival_s=at, prompt=lengths[0].astype(np.int64), output=lengths[1].astype(np.int64),
        hash_first=np.zeros(len(at) + 1, np.int64) if hash_first is None else np.asarray(hash_first, np.int64),
        hashes=np.zeros(0, np.int64) if hashes is None else np.asarray(hashes, np.int64), hash_tokens=hash_tokens,
        concurrency=concurrency, drawn=drawn, source=source, notes=notes,
    )  # fmt: skip
    return made if (np.diff(at) >= 0).all() else made.take(np.arange(len(at)))


def requests(text: str, *, seconds: float = 0.0, seed: int = 0) -> Requests:
    """Return requests from what a user writes: KIND KEY=VALUE ..., or the path of a trace.

    - `poisson qps=2`, `gamma qps=2 cv=3` (cv: of the times between arrivals, 1 is Poisson), `constant qps=2`,
      `diurnal qps=2`, which is the rate in the middle fifth of the time, of a half and a quarter around it;
    - `closed concurrency=16`: 16 clients, each sends when it has its answer; `burst`: all at once;
    - with all of them `prompt=1024`, `output=64-128` (uniform), or `lengths=FILE`, drawn in pairs; `requests=N`;
    - FILE: CSV of Azure, Vidur, BurstGPT or with the columns arrival_s, prompt, output; JSON lines with timestamp (ms),
      input_length, output_length and hash_ids, as Mooncake's.

    Args:
        text: see above.
        seconds: how long requests come; 0: all of a trace.
        seed: of what is drawn.

    Raises:
        ForetraceError: with the sentence that says what is wrong.

    """
    if not (np.isfinite(seconds) and seconds >= 0):
        raise ForetraceError(f"`seconds=` must be a time from 0 on, got {seconds}.")
    words = text.split()
    if words and words[0].lower() in KINDS:
        return _drawn(text, words[0].lower(), keyed(words[1:], _OPTIONS, repr(text)), seconds, seed)
    path = Path(text)
    if path.suffix or path.exists():
        found = _read(path)
        return found.take(np.flatnonzero(found.arrival_s < seconds)) if seconds else found
    word = words[0] if words else text
    raise ForetraceError(f"{word!r} is no kind of requests and no file; {question(word, KINDS)}")


# --- drawn -----------------------------------------------------------------------------------------------------------


def _drawn(text: str, kind: str, options: dict[str, str], seconds: float, seed: int) -> Requests:
    rng = np.random.default_rng([seed, 0x6C6C6D])
    timed = kind in TIMED
    qps = _number(text, options, "qps") if timed else 0.0
    cv = _number(text, options, "cv", "1") if kind == "gamma" else 1.0
    concurrency = int(_number(text, options, "concurrency", whole=True)) if kind == "closed" else 0
    asked = int(_number(text, options, "requests", whole=True)) if "requests" in options else 0
    if not asked and not (timed and seconds):
        need = "`requests=`" if not timed else "`seconds=` or `requests=`"
        raise ForetraceError(f"{text!r} has no end; say how many requests with {need}.")
    shares = _COURSES.get(kind, (1.0,))
    expected = asked or qps * float(np.mean(shares)) * seconds
    if expected > MOST_REQUESTS:
        raise ForetraceError(f"{text!r} makes {expected:.3g} requests; simulate at most {MOST_REQUESTS:,}.")
    arrival = np.zeros(asked)
    if kind in _COURSES:
        done = expected * np.cumsum([0.0, *shares]) / sum(shares)  # requests at the ends of the parts
        ends = np.linspace(0.0, expected / (qps * float(np.mean(shares))), len(done))
        arrival = np.interp(np.arange(ceil(round(expected, 6))), done, ends)
    elif timed:
        count = asked or int(expected + 6 * np.sqrt(expected) * max(cv, 1.0)) + 16
        arrival = np.cumsum(gaps := rng.gamma(1 / cv**2, cv**2 / qps, count))
        if not asked:
            while arrival[-1] < seconds:  # unlikely
                arrival = np.append(arrival, arrival[-1] + np.cumsum(rng.permutation(gaps)))
            arrival = arrival[arrival < seconds]
    notes: tuple[str, ...] = ()
    if file := options.pop("lengths", ""):
        found = _read(Path(file), arrivals=False)
        rows = rng.integers(0, len(found), len(arrival))
        prompt, output = found.prompt[rows], found.output[rows]
    else:
        if "prompt" not in options or "output" not in options:
            notes = (f"lengths that are not given: prompt={_PROMPT} output={_OUTPUT} tokens",)
        prompt, output = (
            _lengths(text, options.pop(name, default), name, rng, len(arrival))
            for name, default in (("prompt", _PROMPT), ("output", _OUTPUT))
        )
    if options:
        raise ForetraceError(f"{text!r}: {', '.join(options)} says nothing here; leave it out.")
    return of(arrival, prompt, output, concurrency=concurrency, drawn=True, source=text, notes=notes)


def _number(text: str, options: dict[str, str], key: str, default: str = "", *, whole: bool = False) -> float:
    value = options.pop(key, default)
    try:
        found = float(value)
    except ValueError:
        found = np.nan
    if not (np.isfinite(found) and found > 0) or (whole and (found != int(found) or found > MOST_REQUESTS)):
        wanted = f"whole number from 1 to {MOST_REQUESTS:,}" if whole else "number above 0"
        raise ForetraceError(f"{text!r}: {key}={value or '?'} must be a {wanted}.")
    return found


def _lengths(text: str, value: str, name: str, rng: np.random.Generator, count: int) -> Int64:
    low, dash, high = value.partition("-")
    if not low.isdecimal() or (dash and not high.isdecimal()) or not 0 < int(low) <= int(high or low) < MOST_TOKENS:
        raise ForetraceError(f"{text!r}: {name}={value} must be a number of tokens from 1 on, or a range as 64-128.")
    return rng.integers(int(low), int(high or low) + 1, count)


# --- traces ----------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Mapping[str, object]]:
    """Return the rows of a trace, by column: CSV, or an object of JSON per line. Raises ForetraceError."""
    text = reading.read_text(path)
    rows: list[Mapping[str, object]]
    try:
        if text.lstrip()[:1] == "{":
            rows = [msgspec.json.decode(line, type=dict[str, object]) for line in text.splitlines() if line.strip()]
        else:
            rows = list(csv.DictReader(text.splitlines(), strict=True))
    except (csv.Error, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ForetraceError(f"{path} is no CSV and no JSON lines ({error}); give a trace of requests.") from None
    if not rows:
        raise ForetraceError(f"{path} holds no requests; give a trace with a line for each.")
    return rows


def _read(path: Path, *, arrivals: bool = True) -> Requests:
    rows = read_rows(path)
    known = next((names for names in _COLUMNS if names[1] in rows[0] and names[2] in rows[0]), None)
    if known is None:
        raise ForetraceError(f"{path} has no columns of lengths; name them arrival_s, prompt and output.")
    when, prompt, output, unit = known
    if arrivals and when not in rows[0]:
        raise ForetraceError(f"{path} has no arrivals; draw them, e.g. 'poisson qps=2 lengths={path}'.")
    at = column(path, rows, when, moment) * unit if arrivals else np.zeros(len(rows))
    _check(str(path), "an arrival", at, np.isfinite(at), _MOMENT)
    prompts, outputs = (column(path, rows, name, _value) for name in (prompt, output))
    empty = (prompts == 0) | (outputs == 0)
    notes = (f"{int(empty.sum())} requests without prompt or output are left out",) if empty.any() else ()
    hashes, counts = _hashes(path, rows)
    found = of(
        at - at.min(), np.where(empty, 1, prompts), np.where(empty, 1, outputs),
        hash_first=np.concatenate([[0], np.cumsum(counts)]), hashes=hashes,
        hash_tokens=_MOONCAKE_BLOCK if len(hashes) else 0, source=str(path), notes=notes,
    )  # fmt: skip
    if empty.all():
        raise ForetraceError(f"{path} holds no request with a prompt and an output; give another trace.")
    return found.take(np.flatnonzero(~empty[np.argsort(at, kind="stable")])) if empty.any() else found


def arrivals_in(path: Path) -> Float64:
    """Return (n,) seconds of the arrivals in a trace, which may have no lengths, from 0 on. Raises ForetraceError."""
    rows = read_rows(path)
    known = next(((names[0], names[3]) for names in _COLUMNS if {*names[:3]} <= {*rows[0]}), None)
    known = known or next(((each, 1.0) for each in rows[0] if each.strip().lower() in _ARRIVALS), None)
    if known is None:
        raise ForetraceError(f"{path} must have a column of arrivals; call it {' or '.join(_ARRIVALS)}.")
    found: Float64 = column(path, rows, known[0], moment) * known[1]
    if not np.isfinite(found).all() or (np.diff(found) < 0).any():
        raise ForetraceError(f"{path}: arrivals must be numbers in order, none NaN; sort them.")
    found -= found[0]
    return found


def column(path: Path, rows: list[Mapping[str, object]], name: str, parse: Callable[[object], float]) -> Float64:
    """Return (rows,) what `parse` makes of a column. Raises ForetraceError with the row where that is no number."""
    made = np.empty(len(rows))
    for i, row in enumerate(rows):
        try:
            made[i] = parse(row.get(name))
        except (TypeError, ValueError, OverflowError):
            value = str(row.get(name))[:40]
            raise ForetraceError(f"{path}, request {i + 1}: {name} is {value!r}, no number; correct it.") from None
    return made


def _value(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    return float(value)


def moment(value: object) -> float:
    """Return seconds from a number, or Unix time from a date with time (UTC where it names no zone); to the
    microsecond.
    """
    try:
        return _value(value)
    except ValueError:
        when = datetime.fromisoformat(str(value).strip())
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _hashes(path: Path, rows: list[Mapping[str, object]]) -> tuple[Int64, Int64]:
    """Return hashes of the blocks of all prompts, and how many each has."""
    given = [row.get("hash_ids") or [] for row in rows]
    try:
        found = msgspec.convert(given, list[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]]])
    except msgspec.ValidationError as error:
        raise ForetraceError(f"{path}: hash_ids must be lists of whole numbers from 0 on ({error}).") from None
    return np.array([each for row in found for each in row], np.int64), np.array([len(row) for row in found], np.int64)


def _check(source: str, what: str, column: Float64, good: Mask, wanted: str) -> None:
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise ForetraceError(f"{source}, request {row + 1}: {what} must be {wanted}, got {column[row]:g}.")
