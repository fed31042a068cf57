"""Run in a process of its own: the commands in a file (JSON lists of words); prints their codes and outputs."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from foretrace.cli.app import run


def answers(asked: Iterable[Sequence[str]]) -> list[tuple[int, str, str]]:
    """Code, output and messages of every command, one after the other."""
    found = []
    for words in asked:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = run(words)
        found.append((code, out.getvalue(), err.getvalue()))
    return found


if __name__ == "__main__":
    json.dump(answers(json.loads(Path(sys.argv[1]).read_text())), sys.stdout)
