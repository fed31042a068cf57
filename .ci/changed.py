"""Print the tests of what changed since the branch left main, and of one way through the whole house.

`make check` runs them. A file of a room stands for the tests of that room, a helper of tests for the folders that
import it, anything else (a page, a configuration) for the tests that name it. Without a change, the last commit
counts.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Record a script, read it, ask what if, estimate a model, play a log of jobs; imports and floors.
SMOKE = (
    "tests/test_architecture.py",
    "tests/test_import.py",
    "tests/test_flow.py",
    "tests/trace/test_record_command.py::test_stop_after_ends_the_script_and_overwrite_replaces_old_ranks",
    "tests/cli/test_answers.py::test_json_keeps_its_contract",
    "tests/cli/test_estimate.py::test_the_answer_as_json",
    "tests/cli/test_fleet.py::test_a_run_and_its_rows",
)


def git(*words: str) -> list[str]:
    """Lines that git prints; none where it refuses."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode in (0, 1) else []


def changed() -> set[str]:
    """Files that differ from where this branch left main, those of the working tree among them."""
    left = git("merge-base", "HEAD", "origin/main") or git("merge-base", "HEAD", "main") or ["HEAD"]
    found = {*git("diff", "--name-only", left[0]), *git("ls-files", "--others", "--exclude-standard")}
    return found or set(git("diff", "--name-only", "HEAD~1"))


def tests_of(file: str) -> set[str]:
    """Folders and files of tests to run where `file` changed."""
    path = Path(file)
    top, *inner = path.parts
    if top == "src" and len(inner) > 1:
        room = inner[1]
        return {f"tests/{room}" if len(inner) > 2 else f"tests/test_{room}"}
    if top == "reproductions" and len(inner) > 1:
        return {f"reproductions/{inner[0]}"}
    if path.name.startswith("test_") and path.suffix == ".py":
        return {file if len(inner) == 1 else str(path.parent)}
    if top == "tests" and path.suffix == ".py" and path.stem != "conftest":
        module = ".".join(path.with_suffix("").parts)
        users = git("grep", "-lE", rf"(from|import) {module}\b", "--", "tests", "reproductions")
        return {str(Path(each).parent) for each in users}
    if top == "tests" and len(inner) > 1:
        return {f"tests/{inner[0]}"}
    return set(git("grep", "-lF", path.name, "--", "tests/**/test_*.py", "tests/test_*.py", "reproductions/test_*.py"))


def chosen(files: set[str]) -> list[str]:
    """Arguments for pytest: no folder inside another, nothing that is not there."""
    wanted = {each for file in files for each in tests_of(file)}
    here = {each for each in wanted if (ROOT / each).exists() and each not in ("tests", "reproductions")}
    covered = [each for each in here if any(str(above) in here for above in Path(each).parents)]
    smoke = [each for each in SMOKE if not any(str(above) in here for above in Path(each.split("::")[0]).parents)]
    return sorted(here - set(covered) - set(SMOKE)) + smoke


if __name__ == "__main__":
    print("\n".join(chosen(changed())))
