"""The JigSaw study in words: claims found before held against its tables, and the tables as a section of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from foretrace.files import write_text
from reproductions.jigsaw.study import ClaimRow, Interval, JigsawStudy, MixRow, PackingRow

MARKS = "<!-- jigsaw: written by make reproduce NAME=jigsaw -->", "<!-- end of jigsaw -->"
ROUNDED = 0.005  # earlier figures are whole per cent
CLOSE = ROUNDED + 0.006  # and a run of finite length is off by some tenths
# Found earlier by a prototype simulator, per cent, by workers; columns are exchanges of 0, 0.1, 0.3, 1 of the compute.
_BOUND = {2: 20.0, 3: 28.6, 4: 33.3, 8: 41.2}
_ALONE = {2: (0, 2, 6, 14), 4: (0, 4, 9, 23), 8: (0, 4, 11, 28)}
_TOGETHER = {2: (20, 26, 37), 4: (33, 41, 54), 8: (41, 49, 64)}
_SHARING = dict.fromkeys((2, 4, 8), (0, 10, 30))
_SHARE = {2: (20, 15, 6), 4: (33, 28, 19), 8: (41, 36, 26)}
_EXCHANGES = (0.0, 0.1, 0.3, 1.0)
CONFIRMED, REFUTED = "confirmed", "refuted"


def headline_of(study: JigsawStudy) -> str:
    """The answer in a sentence."""
    two = [row for row in study.packing if row.sharers == 2 and not row.switch]
    ready = [row.partial_share for row in two if row.dispatch == "first-ready"]
    longest = [row.partial_share for row in two if row.dispatch == "longest-first"]
    alone = [row.partial_alone for row in two]
    return (
        f"Partial backpropagation gains {_percents(alone)} on GPUs of its own; where two jobs share them it adds "
        f"{_percents(ready)} if the job that is ready first goes first, {_percents(longest)} if the longest task does."
    )


def claims_of(study: JigsawStudy) -> tuple[ClaimRow, ...]:
    """Every earlier finding with what this study found; only the cells that the study has are compared."""
    plain = [row for row in study.packing if not row.switch]
    longest = [row for row in plain if row.dispatch == "longest-first"]
    ready = [row for row in plain if row.dispatch == "first-ready"]
    bounds = {row.workers: row.gain for row in study.bounds}
    rows = [
        _told(
            "compute bound +20 % (K = 2), +28.6 % (3), +33 % (4), +41 % (8)",
            [(bounds[k], each / 100) for k, each in _BOUND.items()],
        ),
        _table("partial backpropagation on GPUs of its own: 0 to 28 %", longest, 1, "partial_alone", _ALONE),
        _table("two jobs per GPU, whole backward passes: 0 / 10 / 30 %", longest, 2, "time_sharing", _SHARING),
        _table("two jobs per GPU, both effects: 20 to 64 %, longest task first", longest, 2, "together", _TOGETHER),
        _table("of it partial backpropagation: 41 to 6 %, longest task first", longest, 2, "partial_share", _SHARE),
        _table("the same with the job first that is ready first", ready, 2, "partial_share", _SHARE),
        _alone_is_alone(plain),
    ]
    rows += _meeting(longest, ready)
    rows += _mixed(study.mixes)
    rows.append(_published(study, ready))
    return tuple(rows)


def _told(claim: str, pairs: Sequence[tuple[float, float]]) -> ClaimRow:
    """A claim of several figures: confirmed where every one is met to the rounding."""
    off = [found - expected for found, expected in pairs]
    close = sum(abs(each) <= CLOSE for each in off)
    worst = max(off, key=abs)
    differently = f"{REFUTED}: never less, up to {100 * worst:.0f} points more" if min(off) >= -CLOSE else REFUTED
    return ClaimRow(
        claim=claim,
        expected=f"{len(pairs)} figures",
        found=f"{close} of {len(pairs)} met, largest difference {100 * worst:+.1f} points".replace("-", "−"),
        verdict=CONFIRMED if close == len(pairs) else differently,
    )


def _table(
    claim: str, rows: Iterable[PackingRow], sharers: int, figure: str, earlier: Mapping[int, tuple[int, ...]]
) -> ClaimRow:
    pairs = []
    for row in rows:
        known = earlier.get(row.workers, ())
        place = _EXCHANGES.index(row.exchange) if row.exchange in _EXCHANGES else len(known)
        if row.sharers == sharers and place < len(known):
            pairs.append((float(getattr(row, figure)), known[place] / 100))
    return _told(claim, pairs)


def _alone_is_alone(rows: Sequence[PackingRow]) -> ClaimRow:
    off = max(abs(row.together - row.partial_alone) for row in rows if row.sharers == 1)
    return ClaimRow(
        claim="one job per GPU: JigSaw equals partial backpropagation alone",
        expected="no difference",
        found=f"largest difference {100 * off:.1f} points",
        verdict=CONFIRMED if off < 1e-9 else REFUTED,
    )


def _meeting(longest: Sequence[PackingRow], ready: Sequence[PackingRow]) -> list[ClaimRow]:
    """What happens at K = 2 where an exchange takes as long as the compute; nothing where that was not run."""

    def share(rows: Sequence[PackingRow], sharers: int) -> float | None:
        cell = [row for row in rows if (row.workers, row.exchange, row.sharers) == (2, 1.0, sharers)]
        return cell[0].partial_share if cell else None

    two, three, other = share(longest, 2), share(longest, 3), share(ready, 2)
    if two is None or three is None or other is None:
        return []
    met = abs(two + 0.17) <= CLOSE
    return [
        ClaimRow(
            claim="exchange as long as compute, two jobs per GPU, K = 2: slower than whole passes",
            expected="−17 %",
            found=f"{_percent(two)} longest task first, {_percent(other)} first-ready",
            verdict=("confirmed for longest-first only" if other > 0 else CONFIRMED) if met else REFUTED,
        ),
        ClaimRow(
            claim="three jobs per GPU mend it",
            expected="no loss",
            found=f"{_percent(three)} longest task first",
            verdict=CONFIRMED if three > 0 else REFUTED,
        ),
    ]


def _mixed(rows: Sequence[MixRow]) -> list[ClaimRow]:
    crowded, roomy = (max((row.load for row in rows), default=0), sorted({row.load for row in rows})[-2])
    at = {(row.dispatch, row.load): row for row in rows}
    claims = (
        ("mixes, oversubscribed: part of partial backpropagation", "partial_share", [crowded], 0.29, 0.32),
        ("mixes, twice as many GPUs: part of partial backpropagation", "partial_share", [roomy], 0.12, 0.20),
        ("mixes: sharing alone", "time_sharing", [crowded, roomy], 0.25, 0.66),
    )
    found = []
    for claim, figure, loads, low, high in claims:
        words, inside, seen = [], list[str](), 0
        for dispatch in dict.fromkeys(row.dispatch for row in rows):
            values = [getattr(at[dispatch, load], figure) for load in loads]
            seen += len(values)
            inside += [
                f"{dispatch} at {load:g} workers per GPU"
                for load, each in zip(loads, values, strict=True)
                if low - ROUNDED <= each.mean <= high + ROUNDED
            ]
            words.append(f"{dispatch} {' and '.join(_interval(each) for each in values)}")
        some = f"only {', '.join(inside)}" if inside else REFUTED
        found.append(
            ClaimRow(
                claim=claim,
                expected=f"{_percent(low)} to {_percent(high)}",
                found="; ".join(words),
                verdict=CONFIRMED if len(inside) == seen else some,
            )
        )
    return found


def _published(study: JigsawStudy, ready: Sequence[PackingRow]) -> ClaimRow:
    best = [row.partial_share for row in ready if row.sharers == 2 and row.workers in (2, 3, 4)]
    bound = next(row.gain for row in study.bounds if row.workers == 3)
    return ClaimRow(
        claim="published: cluster efficiency up to +28 %; equals the compute bound of K = 3",
        expected="+28 %",
        found=f"bound {_percent(bound)} for K = 3; partial backpropagation adds {_percents(best)} for K = 2 to 4",
        verdict="consistent, set-up not published" if min(best) <= 0.28 <= max(best) + CLOSE else REFUTED,
    )


# --- the page ------------------------------------------------------------------------------------------------


def write(study: JigsawStudy, path: Path) -> None:
    """The section in the place of its former self, at the end of the page where there is none, else a new page."""
    put(section(study), path, MARKS)


def put(part: str, path: Path, marks: tuple[str, str]) -> None:
    """A section between its marks into a page, as `write` does."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# JigSaw\n"
    if marks[0] in text:
        before, _, rest = text.partition(marks[0])
        text = before + part + rest.partition(marks[1])[2]
    else:
        text = text.rstrip("\n") + "\n\n" + part + "\n"
    write_text(path, text)


def section(study: JigsawStudy) -> str:
    """The tables in Markdown, between their marks."""
    quick = ", in its quick form" if study.quick else ""
    lines = [
        MARKS[0],
        "## Figures",
        "",
        f"*{study.date}, {study.machine}, {study.seeds} seeds, {study.took_s:.0f} s{quick}. Only the recorded rows "
        "depend on a machine, the one of the recording.*",
        "",
        f"{study.headline}",
        "",
        "### Held against earlier findings",
        "",
        *_rows(
            ("finding", "earlier", "here", "verdict"),
            [(row.claim, row.expected, row.found, f"**{row.verdict}**") for row in study.claims],
        ),
        *_packing(study),
        *_switches(study),
        *_ways(study),
        *_mixes(study),
        *_recorded(study),
        *_convergence(study),
        MARKS[1],
    ]
    return "\n".join(lines)


def _packing(study: JigsawStudy) -> list[str]:
    plain = {(r.dispatch, r.workers, r.exchange, r.sharers): r for r in study.packing if not r.switch}
    sharers = sorted({key[3] for key in plain if key[3] > 1})
    whole = {(r.workers, r.exchange): r.whole for r in study.traffic}
    rows = []
    for k, c in sorted({(key[1], key[2]) for key in plain}):
        alone = plain["first-ready", k, c, 1]
        cells = [
            f"{_percent(plain[d, k, c, m].together)}; {_percent(plain[d, k, c, m].partial_share)}"
            for d in ("longest-first", "first-ready")
            for m in sharers
        ]
        full = _percent(whole[k, c]) if (k, c) in whole else "0 %"
        sharing = _percent(plain["first-ready", k, c, 2].time_sharing)
        rows.append(
            (str(k), f"{c:g}", _percent(alone.bound), f"{_percent(alone.partial_alone)} ({full})", sharing, *cells)
        )
    return [
        "### Equal jobs on the same GPUs",
        "",
        "Backward twice as long as forward, no switch cost. *Own GPUs*: partial backpropagation alone, its exchange "
        "shorter by what nobody computes; in brackets where every worker takes part in every all-reduce. *Sharing*: "
        "two jobs, whole backward passes. Then, by jobs per GPU, both effects; and what partial backpropagation adds "
        "to sharing. Longest-first gives a task to any GPU of its job, first-ready to its worker's own, every other "
        "job rotating the other way.",
        "",
        *_rows(
            (
                *("K", "exchange", "bound", "own GPUs", "sharing"),
                *(f"{d}, {m}" for d in ("longest-first", "first-ready") for m in sharers),
            ),
            rows,
        ),
    ]


def _switches(study: JigsawStudy) -> list[str]:
    """Of the exchanges the smallest and the largest that are not nought: the page is long enough."""
    cells = {
        (r.workers, r.exchange, r.sharers, r.switch): r
        for r in study.packing
        if r.dispatch == "first-ready" and r.sharers > 1
    }
    costs = sorted({key[3] for key in cells})
    some = sorted({key[1] for key in cells if key[1]})
    rows = [
        (
            *(str(k), f"{c:g}", str(m)),
            *(f"{_percent(cells[k, c, m, s].together)}; {_percent(cells[k, c, m, s].partial_share)}" for s in costs),
        )
        for k, c, m in sorted({key[:3] for key in cells})
        if c in (some[0], some[-1])
    ]
    return [
        "### What a switch may cost",
        "",
        "First-ready; a switch as a share of a whole task. Both effects; what partial backpropagation adds to sharing "
        "at the same cost.",
        "",
        *_rows(("K", "exchange", "jobs per GPU", *(_percent(s, sign=False) for s in costs)), rows),
    ]


def _ways(study: JigsawStudy) -> list[str]:
    cells = {(r.way, r.exchange, r.sharers): r for r in study.ways}
    heads = sorted({key[1:] for key in cells})
    rows = [
        (way, *(_percent(cells[way, c, m].partial_share) for c, m in heads))
        for way in dict.fromkeys(r.way for r in study.ways)
    ]
    return [
        "### Who goes first, and where",
        "",
        "Four workers: what partial backpropagation adds to sharing, by exchange and jobs per GPU (bound "
        f"{_percent(study.ways[0].bound)}).",
        "",
        *_rows(("dispatch", *(f"{c:g}, {m} jobs" for c, m in heads)), rows),
    ]


def _mixes(study: JigsawStudy) -> list[str]:
    rows = [
        (
            row.dispatch,
            f"{row.load:g}",
            f"{row.gpus:.0f}",
            *map(_interval, (row.time_sharing, row.partial_alone, row.together, row.partial_share)),
            _percent(row.bound.mean),
            f"{row.slowest.mean:.2f} [{row.slowest.low:.2f}, {row.slowest.high:.2f}]",
        )
        for row in study.mixes
    ]
    return [
        "### Mixes",
        "",
        "24 jobs of 1, 2, 4 or 8 workers, exchanges 5 to 50 % of the compute (none for one worker), at most three jobs "
        f"per GPU; means over {study.seeds} seeds with 95 % bootstrap intervals. *Slowest*: least relative speed of a "
        "job beside others; 0 is a job that never runs.",
        "",
        *_rows(
            (
                "dispatch",
                "workers per GPU",
                "GPUs",
                "sharing",
                "partial alone",
                "both",
                "partial adds",
                "bound",
                "slowest",
            ),
            rows,
        ),
    ]


def _recorded(study: JigsawStudy) -> list[str]:
    if not study.recorded:
        return ["### Recorded steps", "", "No recording was given.", ""]
    rows = [
        (
            row.recording,
            str(row.workers),
            " / ".join(f"{each:.2f}" for each in row.tasks_ms),
            f"{row.exchange_ms:.2f} ({row.full_exchange_ms:.2f})",
            _percent(row.partial_alone),
            _percent(row.time_sharing),
            _percent(row.together),
            _percent(row.partial_share),
            _percent(row.bound),
            f"{row.relative:.2f}",
            f"{row.fixed_mb:.2f} + {' / '.join(f'{each:.3f}' for each in row.activations_mb)}",
            f"{row.two_kept_mb:.2f} ({row.two_returned_mb:.2f})",
        )
        for row in study.recorded
    ]
    return [
        "### Recorded steps",
        "",
        f"Two equal jobs on the same workers over {study.recorded[0].network}, first-ready. Tasks by depth are the "
        "recorded step replayed without the groups that a worker leaves out; loading and the update are in all of "
        "them. Exchanges as far as nothing hides them, in brackets with whole backward passes (there the pass hides a "
        "part). Memory: what stays, and activations by depth; two jobs that keep room for their deepest task (that "
        "give it back).",
        "",
        *_rows(
            (
                "recording", "K", "tasks, ms", "exchange, ms", "partial alone", "sharing", "both", "partial adds",
                "bound", "speed of each", "one job, MB", "two jobs, MB",
            ),
            rows,
        ),
    ]  # fmt: skip


def _convergence(study: JigsawStudy) -> list[str]:
    if not study.convergence:
        return ["### Iterations to the same loss", "", "PyTorch is not installed here, so nothing was trained.", ""]
    rows = [
        (
            str(row.workers),
            str(row.batch),
            f"{row.partial:.2f} ({row.partial_low:.2f} to {row.partial_high:.2f})"
            + (f", {row.not_reached} of {row.seeds} never" if row.not_reached else ""),
            f"{row.smaller:.2f}" + (f", {row.smaller_not_reached} never" if row.smaller_not_reached else ""),
            f"{row.net:.2f}",
        )
        for row in study.convergence
    ]
    return [
        "### Iterations to the same loss",
        "",
        "A residual perceptron of eight blocks really trained on fresh samples of a random teacher until its held-out "
        f"loss is what plain training ends with after {study.convergence[0].iterations} iterations: iterations as a "
        f"multiple of plain training's, median of {study.convergence[0].seeds} seeds (least to largest). *Smaller "
        "batch*: plain training that spends as little compute per iteration as partial backpropagation. *Compute*: "
        "what partial backpropagation computes until then over what plain training does; above 1 the gain per "
        "iteration is lost.",
        "",
        *_rows(("K", "batch per worker", "partial", "smaller batch", "compute"), rows),
    ]


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def _percent(share: float, *, sign: bool = True) -> str:
    value = 100 * share
    text = f"{value:+.1f}" if sign else f"{value:g}"
    return f"{'0' if abs(value) < 0.05 else text.replace('-', '−')} %"


def _percents(shares: Sequence[float]) -> str:
    return f"{_percent(min(shares))} to {_percent(max(shares))}"


def _interval(each: Interval) -> str:
    low, high = (f"{100 * value:.1f}".replace("-", "−") for value in (each.low, each.high))
    return f"{_percent(each.mean)} [{low}, {high}]"
