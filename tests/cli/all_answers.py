"""Run in a process of its own: the commands in a file (JSON lists of words); prints their codes and outputs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrace.cli.app import run


def settle(environment: Mapping[str, str], patch: Any) -> None:
    """Give this process an environment of a test, with the operators that other tests have captured."""
    captured, cache = Path(os.environ["FORETRACE_CACHE"]) / "operators", Path(environment["FORETRACE_CACHE"])
    cache.mkdir()
    (cache / "operators").symlink_to(captured)
    for name, value in environment.items():
        patch.setenv(name, value)


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
