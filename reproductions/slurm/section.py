"""The table of the study, for its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from foretrace.files import write_text
from foretrace.fleet.rig.against import RigErrors
from reproductions.slurm.rules import RuleRow
from reproductions.slurm.runs import Row

BEGIN = '<!-- table: make reproduce NAME=slurm ARGS="--write reproductions/slurm/README.md" -->'
END = "<!-- /table -->"
TITLES = (
    "workload", "policy", "runs", "mean JCT s", "JCT error", "of runs", "start error s, mean / p95", "of runs",
    "within 2 intervals", "of runs", "order equal", "of runs", "plain policy, JCT",
)  # fmt: skip


def section(found: Sequence[Row], single: Sequence[RuleRow] = ()) -> str:
    """A row per workload, and what all come to; then those of single rules."""
    lines = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|", *map(_line, found)]
    lines += ["", _all(found), ""] if found else []
    titles = ("rule", *TITLES[1:2], "jobs", *TITLES[2:-1])
    more = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *map(_line, single)]
    return "\n".join([*(lines if found else []), *(more if single else [])]).rstrip()


def _line(row: Row | RuleRow) -> str:
    def pair(of: str, digits: int = 1) -> list[str]:
        return [
            f"{getattr(each, of) * 100:.{digits}f} %" if each is not None else "–"
            for each in (row.simulated, row.repeats)
        ]

    def starts(of: RigErrors | None) -> str:
        return "–" if of is None else f"{of.start_error_s.mean:.1f} / {of.start_error_s.p95:.0f}"

    first = [row.cell.name, f"`{row.cell.policy}`"] if isinstance(row, Row) else [
        row.name, f"`{row.policy}`", str(row.jobs)]  # fmt: skip
    cells = [
        *first, str(row.runs), f"{row.mean_jct_s:.0f}", *pair("jct_error"), starts(row.simulated), starts(row.repeats),
        *pair("within"), *pair("order_equal"),
    ]  # fmt: skip
    cells += [f"{row.plain.jct_error * 100:.0f} %"] if isinstance(row, Row) else []
    return "| " + " | ".join(cells) + " |"


def met(row: Row) -> dict[str, bool]:
    """Whether the simulation is as near as asked, or as near as another run is."""
    sim, rep = row.simulated, row.repeats
    return {
        "JCT": sim.jct_error <= max(0.02, rep.jct_error if rep else 0.0),
        "starts": sim.within >= min(0.95, rep.within if rep else 1.0),
        "order": sim.order_equal >= min(0.98, rep.order_equal if rep else 1.0),
    }


def _all(found: Sequence[Row]) -> str:
    names = met(found[0])
    parts = [f"{name} in {sum(met(row)[name] for row in found)}" for name in names]
    every = sum(all(met(row).values()) for row in found)
    return (
        f"Of {len(found)} workloads the simulation is as near as asked (JCT within 2 %, 95 % of starts within two "
        f"intervals, 98 % of the order), or as near as another run of the same jobs: {', '.join(parts)}; "
        f"in all three {every}."
    )


def write(found: Sequence[Row], single: Sequence[RuleRow], page: Path) -> None:
    """Put the table between its marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    write_text(page, f"{before}{BEGIN}\n\n{section(found, single)}\n\n{END}{rest.partition(END)[2]}")
