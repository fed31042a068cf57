"""The models of the zoo as the table of docs/zoo.md: `python benchmarks/zoo_table.py`."""

from __future__ import annotations

from foretrace.zoo.registry import ENTRIES


def table() -> str:
    """Markdown, one row per model."""
    rows = ["| model | task | what it is | parameters tiny | full | source |", "|---|---|---|--:|--:|---|"]
    for each in ENTRIES:
        tiny, full = each.parameters
        rows.append(f"| `{each.name}` | {each.task} | {each.summary} | {tiny:,} | {full:,} | {each.source} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
