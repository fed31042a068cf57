"""The page of published systems, docs/systems.md, from one block per system: `python -m reproductions.systems`.

A system with a folder here has its block as the front matter of the folder's README.md; one that lives in the product
alone has it in docs/systems.yaml.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import yaml

from foretrace.files import write_text
from reproductions import ROOT

PAGE = ROOT / "docs" / "systems.md"
_FRONT = re.compile(r"\A---\n(.*?)\n---\n+", re.DOTALL)
HEAD = """# Published systems, and what of them is here

Written by `python -m reproductions.systems` from the block of each system: [systems.yaml](systems.yaml), and the first
lines of every `reproductions/NAME/README.md`. Parts only: a row says which part, where it lives (in `src/foretrace`
where no folder is named), how it was checked, what the paper claims and what foretrace reaches. Claims were reached on
other machines and other data, so they are context, not a contest. *Date* is when ours was last measured.
*Verified* means: predicted from a recording, then applied and run beside the unchanged job by `foretrace verify`
([verify.md](verify.md)) or, for several workers, `foretrace rig verify` ([rig.md](rig.md)), on a processor; every row
is in `benchmarks/data/ledger.jsonl`, or in the file of its reproduction beside it: `heads.jsonl`, `kfac.jsonl`,
`rows.jsonl` (rows of embeddings and graphs), `slurm_switches.jsonl` (Dally's timers on a real Slurm),
`job_switches.jsonl` (what a switch costs JigSaw). None of it has been run on a GPU yet.
"""


class System(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published system. Texts are Markdown, "–" where there is nothing to say; links are as of docs/."""

    paper: str
    here: str  # which part, and what is different
    where: tuple[str, ...]  # files or folders, below src/foretrace or the repository
    checked: str
    claims: str
    ours: str
    command: str  # what shows it
    date: str = "–"  # of ours


def front(text: str) -> tuple[str, str]:
    """The front matter of a page as YAML, "" where there is none, and the rest of the page."""
    found = _FRONT.match(text)
    return (found[1], text[found.end() :]) if found else ("", text)


def put(path: Path, page: str) -> None:
    """Write a page anew under the front matter that it has."""
    block, _ = front(path.read_text(encoding="utf-8"))
    write_text(path, f"---\n{block}\n---\n\n{page}" if block else page)


def systems() -> tuple[tuple[System, ...], tuple[System, ...]]:
    """Those of the product, then the reproductions by folder."""
    kept = yaml.safe_load((ROOT / "docs" / "systems.yaml").read_text(encoding="utf-8"))
    folders = sorted((ROOT / "reproductions").glob("*/README.md"))
    blocks = [yaml.safe_load(front(path.read_text(encoding="utf-8"))[0]) for path in folders]
    return msgspec.convert(kept, tuple[System, ...]), msgspec.convert(blocks, tuple[System, ...])


def row(system: System) -> str:
    """One line of the table."""
    where = ", ".join(f"`{place}`" for place in system.where)
    cells = (
        system.paper, system.here, where, system.checked, system.claims, system.ours, system.command, system.date
    )  # fmt: skip
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """docs/systems.md."""
    header = "| paper | what of it is here | where | how it was checked | claims | ours | command | date |"
    parts = [HEAD]
    for title, each in zip(("In the product", "Reproductions"), systems(), strict=True):
        parts.append("\n".join(["", f"## {title}", "", header, "|---" * 8 + "|", *map(row, each), ""]))
    return "".join(parts)


if __name__ == "__main__":
    write_text(PAGE, page())
