"""What the generated pages have in common: tables, the machine, the date, and sections that can be renewed alone."""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

from foretrace.hardware import processor

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for `reproductions`, some of whose tables stand on the pages


def shared_traces() -> Path | None:
    """Folder of real recordings of other machines, which is no part of the project; None where it is absent."""
    given = os.environ.get("FORETRACE_SHARED_DATA")
    traces = (Path(given) if given else ROOT.parent / "shared" / "data") / "traces"
    return traces if traces.is_dir() else None


def machine() -> str:
    """One line: processor with what this process may use of it, versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE)):
        cpu = found.group(1)
    sets, cores = processor.named(processor.instruction_sets()), processor.usable_cores()
    parts = [f"{cpu} ({sets}), {cores:g} cores, {platform.system()}", f"Python {platform.python_version()}"]
    for package in ("numpy", "numba", "torch"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    return ", ".join(parts)


def today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def load() -> str:
    """Load averages, as far as the system has them."""
    return ", ".join(f"{value:.1f}" for value in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns after the first are right-aligned."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def percent(value: float, *, signed: bool = False) -> str:
    """Two digits behind the point, "0" for what rounds to nothing."""
    text = f"{100 * value:+.2f}" if signed else f"{100 * value:.2f}"
    return "0" if float(text) == 0 else text


def update(page: Path, head: str, sections: dict[str, str], order: Sequence[str]) -> None:
    """Write a page; sections that were not made anew are kept from the page as it stands.

    One that is not in `order` is another command's, and stays behind the section that it follows.
    """
    kept: dict[str, str] = {}
    if page.exists():
        for part in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            title, _, body = part.partition("\n")
            kept[title.strip()] = body.strip()
    merged = kept | sections
    order = list(order)
    for before, title in pairwise(("", *kept)):
        if title not in order:
            order.insert(order.index(before) + 1 if before else 0, title)
    text = head.strip() + "\n" + "".join(f"\n## {title}\n\n{merged[title]}\n" for title in order if title in merged)
    temporary = page.with_name(f".{page.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(page)
