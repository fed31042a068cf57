"""What a person sees of a result, said once: a list of blocks, which the terminal, the page and notebooks render.

A result is a frozen struct (its JSON is the struct); its `shown` says which blocks show it. Blocks hold values and what
they mean, never layout: how wide a name may be, whether a bar can be drawn and which unit a column of times has is for
the renderer to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import msgspec

from foretrace.report import units

Kind = Literal[
    "text", "name", "time", "change", "seconds", "long", "share", "count", "digits", "course", "bytes", "binary",
    "FLOP", "FLOP/s", "B/s", "J", "ratio", "signed", "yes",
]  # fmt: skip


class About(msgspec.Struct, frozen=True, tag=True):
    """What the answer is about, in a few words each."""

    parts: tuple[str, ...]


class Headline(msgspec.Struct, frozen=True, tag=True):
    """The answer in one sentence."""

    text: str


class Line(msgspec.Struct, frozen=True, tag=True):
    """A sentence; with a label where it is one of several of a kind ("assumed", "note")."""

    text: str
    label: str = ""
    soft: bool = False  # a remark rather than a part of the answer
    whole: bool = False  # stays on one line, so that it can be copied


class BarPart(msgspec.Struct, frozen=True):
    """One part of a bar, seconds."""

    key: str  # decides its colour
    word: str
    value: float


class Bar(msgspec.Struct, frozen=True):
    """Parts that sum to a whole."""

    label: str
    parts: tuple[BarPart, ...]


class Bars(msgspec.Struct, frozen=True, tag=True):
    """Bars on one scale. Without `legend`, nothing is lost where they cannot be drawn."""

    bars: tuple[Bar, ...]
    legend: bool = False


class Column(msgspec.Struct, frozen=True):
    """A column of a table.

    Kinds of values: texts; names of kernels and operators, which may be shortened; times in one unit for the whole
    column; changes of time, with their sign; seconds, each in its own unit; long times, up to years; shares; counts;
    numbers; amounts of bytes (decimal or binary) and FLOPs, and rates of them; ratios; shares with their sign; yes or
    no; courses over time (values from 0 to 1), which are drawn where bars are. Two values are the ends of a range, each
    in its own unit. None is unknown.
    """

    title: str = ""
    kind: Kind = "text"
    right: bool | None = None  # by default all but texts and names
    wide: bool = False  # may take several lines
    extra: bool = False  # is left out where a terminal has no room for it, the last one first
    unknown: str = "–"  # in place of None

    @property
    def flush_right(self) -> bool:
        """Whether its cells end in one line."""
        return self.kind not in ("text", "name", "yes") if self.right is None else self.right


class Grid(msgspec.Struct, frozen=True, tag=True):
    """Rows, most important first; beyond `top` they are folded away (0: none is)."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    top: int = 0
    noun: str = ""  # what a row is, in "3 more rows"
    how: str = ""  # the option that shows all rows, beside --json
    colours: tuple[str, ...] = ()  # kind of work per row, for its name

    def cells(self, column: int, rows: int, *, pads: tuple[str, str] = (" ", " ")) -> list[str]:
        """Return texts of the first rows of one column; names as they are."""
        values = [row[column] for row in self.rows[:rows]]
        kind, unknown = self.columns[column].kind, self.columns[column].unknown
        if kind in ("time", "change"):
            known = [value for value in values if value is not None]
            texts = iter(units.column(known, signed=kind == "change", pads=pads))
            return [unknown if value is None else next(texts) for value in values]
        return [unknown if value is None else text(value, kind) for value in values]

    @property
    def shown(self) -> int:
        """Rows that are not folded away."""
        return min(self.top or len(self.rows), len(self.rows))

    @property
    def folded(self) -> str:
        """As in "3 more rows: --top 15 or --json."; "" where all are shown."""
        left = len(self.rows) - self.shown
        if not left:
            return ""
        noun = f" {self.noun}{'' if left == 1 else 's'}" if self.noun else ""
        how = "" if not self.how else f"--top {len(self.rows)} or " if self.how == "--top" else f"{self.how} or "
        return f"{units.count(left)} more{noun}: {how}--json."


_HEIGHTS = " ▁▂▃▄▅▆▇█"


def heights(values: Sequence[float]) -> str:
    """Return values from 0 to 1 as characters of that height."""
    return "".join(_HEIGHTS[min(max(round(8 * each), int(each > 0)), 8)] for each in values)


_FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "name": str,
    "seconds": units.seconds,
    "long": units.long_time,
    "share": units.share,
    "level": units.level,
    "count": units.count,
    "digits": units.digits,
    "bytes": units.nbytes,
    "binary": units.binary,
    "FLOP": units.scaled,
    "FLOP/s": lambda value: units.scaled(value, "FLOP/s"),
    "J": lambda value: units.scaled(value, "J"),
    "B/s": lambda value: units.scaled(value, "B/s"),
    "ratio": lambda value: f"{units.digits(value)}×",
    "signed": units.signed,
    "yes": lambda value: "yes" if value else "no",
    "course": heights,
}


def text(value: Any, kind: str) -> str:
    """Return a value, or the two ends of a range, as a column of its kind shows it; "–" where it is not known."""
    if value is None:
        return "–"
    if isinstance(value, tuple) and kind != "course":
        return " – ".join(_FORMATS[kind](each) for each in value)
    return _FORMATS[kind](value)


class Curve(msgspec.Struct, frozen=True):
    """Points of one line, by x."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def at(self, places: Sequence[float]) -> list[float]:
        """Return its height at these x: linear between points, that of the nearest one beyond them."""
        import numpy as np

        found: list[float] = np.interp(places, self.x, self.y).tolist()
        return found


class Chart(msgspec.Struct, frozen=True, tag=True):
    """Curves over one axis, from 0 upwards. Where nothing can be drawn, nothing is said: the JSON has the points."""

    title: str
    curves: tuple[Curve, ...]
    x_kind: Kind = "digits"
    y_kind: Kind = "digits"
    log_x: bool = False

    @property
    def x_range(self) -> tuple[float, float]:
        """Where the axis begins and ends; above 0 where it is logarithmic."""
        xs = [x for curve in self.curves for x in curve.x if x > 0 or not self.log_x]
        return (min(xs), max(xs)) if xs else (0.0, 1.0)

    @property
    def most(self) -> float:
        """The height of the highest point."""
        return max((y for curve in self.curves for y in curve.y), default=0.0)

    def places(self, count: int) -> list[float]:
        """Return so many x at equal distances on the axis."""
        low, high = self.x_range
        shares = [i / max(count - 1, 1) for i in range(count)]
        if self.log_x:
            return [low * (high / low) ** share for share in shares]
        return [low + (high - low) * share for share in shares]

    def words(self, value: float, *, of_x: bool = False) -> str:
        """Return a value of an axis."""
        return _FORMATS[self.x_kind if of_x else self.y_kind](value)


class LaneSpan(msgspec.Struct, frozen=True):
    """Work on a lane from `begin_s` to `end_s`."""

    lane: str
    name: str
    begin_s: float
    end_s: float
    key: str = "compute"  # as of a `BarPart`


class LaneChart(msgspec.Struct, frozen=True, tag=True):
    """Lanes of work above one axis of time. A terminal draws none: the JSON has the spans."""

    title: str
    spans: tuple[LaneSpan, ...]


class Next(msgspec.Struct, frozen=True, tag=True):
    """The command to try next."""

    command: str


Block = str | About | Headline | Line | Bars | Chart | LaneChart | Grid | Next  # a str is a plain line; "" an empty one


def blocks(result: Any, top: int = 12, **how: Any) -> list[Block]:
    """Return what a person sees of a result, in order; `top` rows of a ranking are not folded away.

    A table without rows and a sentence without words are left out. The headline, the notes and the command to try next
    of a result are shown around its own blocks. `how` is what one result can be asked beside that.
    """
    found = [each for each in result.shown(top, **how) if not _empty(each)]
    if sentence := getattr(result, "headline", ""):
        found.insert(sum(isinstance(each, About) for each in found), Headline(sentence))
    spaced: list[Block] = []
    for each in [*found, *notes(getattr(result, "notes", ()))]:
        both = (each, *spaced[-1:])
        if len(both) > 1 and "" not in both and any(isinstance(one, Grid | Headline) for one in both):
            spaced.append("")
        spaced.append(each)
    return [*spaced, Next(result.next)] if getattr(result, "next", "") else spaced


def _empty(block: Block) -> bool:
    return (isinstance(block, Grid) and not block.rows) or (isinstance(block, Line) and not block.text)


def notes(texts: Iterable[str], label: str = "") -> Iterator[Line]:
    """Return remarks, one each."""
    return (Line(each, label=label, soft=not label) for each in texts)


def bar(label: str, parts: Mapping[str, float], words: Mapping[str, str]) -> Bar:
    """Return a bar of parts by key; `words` says what each is called."""
    return Bar(label, tuple(BarPart(key, words[key], value) for key, value in parts.items()))


def listing(items: Iterable[Any], *columns: tuple[Any, ...] | str, **more: Any) -> Grid:
    """Return a table with a row for every item.

    A column is what is in it (an attribute of an item, two attributes that are the ends of a range, or a function of an
    item), its title (or a Column) and its kind; a word alone is an attribute that holds texts, and its title.
    """
    whole = [(each, each) if isinstance(each, str) else each for each in columns]
    made = [title if isinstance(title, Column) else Column(title, *kind) for _, title, *kind in whole]
    values = [attrgetter(*what.split()) if isinstance(what, str) else what for what, *_ in whole]
    return table(made, [[value(item) for value in values] for item in items], **more)


def table(columns: Sequence[Column | str], rows: Iterable[Sequence[Any]], **more: Any) -> Grid:
    """Return a table; a column that is given by its title alone holds texts."""
    return Grid(
        tuple(Column(each) if isinstance(each, str) else each for each in columns), tuple(map(tuple, rows)), **more
    )
