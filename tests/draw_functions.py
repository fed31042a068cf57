"""Draw functions of a few rooms, to see for how many docs/architecture.md alone names the file.

    python -m tests.draw_functions --seed 14

Read the page, write down a file for every name and its first line of documentation, then compare with --answers.
Drawn are public names that one function alone has: an interface (`change`, `matches`) is in every file of its kind.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "foretrace"
ROOMS = ("graph", "cost", "fleet", "techniques", "report")


def functions() -> list[tuple[str, str, str]]:
    """Public functions and methods of the rooms: room, name with its documentation, file; in a stable order."""
    found: list[tuple[str, str, str, str]] = []
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    first = (ast.get_docstring(node) or "").partition("\n")[0]
                    arguments = ", ".join(each.arg for each in node.args.args + node.args.kwonlyargs)
                    what = f"{node.name}({arguments})  {first}"
                    found.append((node.name, room, what, path.relative_to(PACKAGE).as_posix()))
    count = Counter(name for name, *_ in found)
    return [(room, what, file) for name, room, what, file in found if count[name] == 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--answers", action="store_true", help="print the files, too")
    given = parser.parse_args()
    for room, what, file in random.Random(given.seed).sample(functions(), 10):
        print(f"{room:11} {what}" + (f"\n{'':11} -> {file}" if given.answers else ""))


if __name__ == "__main__":
    main()
