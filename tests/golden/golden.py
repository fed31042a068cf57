"""Hold what commands answer equal to the answers kept here: `python -m tests.golden.golden [--write] [NAME ...]`.

`questions.txt` names the commands; each answer is kept as `answers/NAME.json`: its exit code, its --json and its
messages. Numbers are equal within one part in 10^12, or 10^-12 of their unit (10^-5 with float32 networks, whose sums
processors round differently); everything else to the letter; what a run measured is left out.
A change that means to change an answer says so: `make golden ARGS="--write NAME"`, and the difference is committed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretrace.files import write_bytes
from foretrace.names import question
from foretrace.report.jsonout import MEASURED

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ANSWERS = HERE / "answers"
CLOSE, CLOSE_FLOAT32 = 1e-12, 1e-5
_LEARNED = ("plan-place-bert", "plan-pipeline-")  # times of float32 networks, whose answers do not name them
_NO_JSON = ("graph",)  # a command that only writes a file


def questions() -> dict[str, str]:
    """Commands by name, in their order."""
    lines = (HERE / "questions.txt").read_text().splitlines()
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    return {name: words for name, _, words in pairs}


def with_makers(chosen: Collection[str], known: Mapping[str, str]) -> dict[str, str]:
    """The chosen questions, and those that make the files which they read, in their order."""
    read = {word for name in chosen for word in known[name].split() if word.startswith("T/")}
    return {
        name: words for name, words in known.items() if name in chosen or any(f"--out {each}" in words for each in read)
    }


def elsewhere(commands: list[list[str]], environment: Mapping[str, str], folder: Path) -> list[list[Any]]:
    """Code, output and messages of each command, asked in a process of its own."""
    (folder / "questions.json").write_text(json.dumps(commands))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.all_answers", str(folder / "questions.json")], cwd=ROOT,
        env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def answers(
    asked: Mapping[str, str], data: Path | None, folder: Path, ask: Callable[..., Sequence[Sequence[Any]]] = elsewhere
) -> dict[str, dict[str, Any]]:
    """Ask all, with no calibration and no ledger; their files go to the empty `folder`."""
    given = places(data, folder)
    commands = [
        [*placed(words, given), *([] if words.split()[0] in _NO_JSON else ["--json"])] for words in asked.values()
    ]
    found = ask(commands, environment(folder), folder)
    return {name: kept_form(answer, given) for name, answer in zip(asked, found, strict=True)}


def places(data: Path | None, folder: Path) -> dict[str, str]:
    """Folders by the letters that stand for them."""
    return {"D": str(data), "R": str(ROOT / "tests" / "data"), "X": str(ROOT / "examples"), "T": str(folder)}


def placed(words: str, given: Mapping[str, str]) -> list[str]:
    """Words of a command with folders in place of their letters: a word begins so, or a value in it."""
    letters = "".join(given)
    return [
        re.sub(rf"(?<![^\s=:])([{letters}])(?=/)", lambda found: given[found[1]], word) for word in shlex.split(words)
    ]


def environment(folder: Path) -> dict[str, str]:
    """Variables with which answers are those that are kept: nothing was measured here before."""
    return {
        "FORETRACE_CACHE": str(folder / "cache"), "FORETRACE_LEDGER": str(folder / "ledger.sqlite"),
        "XDG_DATA_HOME": str(folder / "data"), "COLUMNS": "100",
    }  # fmt: skip


def kept_form(found: Sequence[Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Code, output and messages of a command as they are kept."""
    code, *texts = found
    out, err = (_without(given, text) for text in texts)
    answer = json.loads(out) if out.startswith(("{", "[")) else out
    return {"exit": code, "answer": unmeasured(answer), "messages": err.splitlines()}


def _without(places: Mapping[str, str], text: str) -> str:
    """The text with the letters of folders in place of their paths."""
    for letter, place in places.items():
        text = text.replace(place, letter)
    return text


def unmeasured(answer: Any) -> Any:
    """The answer with fields that hold measured times emptied."""
    for path in MEASURED.get(answer.get("command", ""), ()) if isinstance(answer, dict) else ():
        *outer, last = path.split(".")
        place = answer
        for key in outer:
            place = place[key]
        place[last] = None
    return answer


def differences(kept: Any, found: Any, path: str = "", *, close: float = CLOSE) -> Iterator[str]:
    """Where two answers differ by more than `close`, and in what."""
    if isinstance(kept, dict) and isinstance(found, dict):
        for key in kept.keys() | found.keys():
            if key not in kept or key not in found:
                yield f"{path}.{key} is {'new' if key in found else 'gone'}"
            else:
                yield from differences(kept[key], found[key], f"{path}.{key}", close=close)
    elif isinstance(kept, list) and isinstance(found, list):
        if len(kept) != len(found):
            yield f"{path} has {len(found)} items, had {len(kept)}"
        for number, (before, after) in enumerate(zip(kept, found, strict=False)):
            yield from differences(before, after, f"{path}[{number}]", close=close)
    elif {type(kept), type(found)} <= {int, float}:
        if not math.isclose(kept, found, rel_tol=close, abs_tol=min(close, CLOSE)):
            yield f"{path} is {_short(found)}, was {_short(kept)}"
    elif type(kept) is not type(found) or kept != found:
        yield f"{path} is {_short(found)}, was {_short(kept)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else f"{text[:100]}... ({len(text):,} characters)"


def compare(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """What differs from the kept answers, by question."""
    wrong = {}
    for name, answer in found.items():
        kept = ANSWERS / f"{name}.json"
        text = kept.read_text() if kept.exists() else ""
        close = CLOSE_FLOAT32 if '"learned"' in text or name.startswith(_LEARNED) else CLOSE
        said = list(differences(json.loads(text), answer, close=close)) if text else ["no answer is kept"]
        if said:
            wrong[name] = said
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all answers, or keep them anew; the exit code is 1 where any differs, 2 for a name of no question."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these questions, and those that begin so")
    parser.add_argument("--write", action="store_true", help="keep the answers as they are now")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="the shared recordings")
    given = parser.parse_args(arguments)
    known = questions()
    if unknown := [each for each in given.names if not any(name.startswith(each) for name in known)]:
        mend = question(unknown[0], known, lists="read questions.txt.")
        parser.error(f"NAME must begin a question, got {', '.join(unknown)}; {mend}")
    data = given.data if given.data.is_dir() else None
    asked = with_makers({name for name in known if not given.names or name.startswith(tuple(given.names))}, known)
    chosen = {name: words for name, words in asked.items() if data or " D/" not in words}
    with tempfile.TemporaryDirectory() as folder:
        found = answers(chosen, data, Path(folder))
    wrong = compare(found)
    if given.write:
        ANSWERS.mkdir(exist_ok=True)
        for name in wrong:
            text = json.dumps(found[name], indent=1, ensure_ascii=False) + "\n"
            write_bytes(ANSWERS / f"{name}.json", text.encode())
    for name, said in wrong.items():
        print(f"{name}: {'; '.join(said[:4])}{f'; and {len(said) - 4} more' if len(said) > 4 else ''}")
    left = f"; {len(asked) - len(chosen)} left out, as {given.data} is absent" if len(chosen) < len(asked) else ""
    print(f"{len(found)} answers, {len(wrong)} {'written anew' if given.write else 'differ'}{left}")
    return int(bool(wrong) and not given.write)


if __name__ == "__main__":
    raise SystemExit(main())
