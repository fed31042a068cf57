"""Run in a process of its own: the commands in a file (JSON lists of words); prints their codes and outputs."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from foretrace.cli.app import run


def main() -> None:
    """Answer every command, one after the other."""
    found = []
    for words in json.loads(Path(sys.argv[1]).read_text()):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = run(words)
        found.append([code, out.getvalue(), err.getvalue()])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
