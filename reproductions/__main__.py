"""Run a reproduction: `make reproduce NAME=dally ARGS="--quick"` calls `python -m reproductions dally --quick`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from foretrace.errors import ForetraceError

NAMES = tuple(sorted(each.parent.name for each in Path(__file__).parent.glob("*/protocol.py")))


def main(given: Sequence[str]) -> int:
    """Exit code of the protocol that is named: 0 done, 2 the user's mistake, said in one line."""
    name, *words = given or ("",)
    if name not in NAMES:
        print(f"NAME must be one of {', '.join(NAMES)}, got {name!r}; choose one.", file=sys.stderr)
        return 2
    try:
        return int(import_module(f"reproductions.{name}.protocol").main(words))
    except ForetraceError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
