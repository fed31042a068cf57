"""Kill processes in the middle of writing, many times, and count what they leave.

    python benchmarks/kills.py [--rounds 15] [--seed 1] [--json]

Every round starts a process that writes (a recording, rows of a ledger, cells of a sweep, a saved graph, times of a
calibration), waits for its first word and a random time, and ends it with SIGKILL. Then nothing half-written may be
left: every file is read by its own reader, the next writer goes on where this one was, no temporary file stays, and no
process that the killed one had started lives on. Of a recording, the command that records is killed and, by itself, the
training that is recorded. Exit code 1 where anything of that failed. Linux, since processes are found in /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from foretrace import flow
from foretrace.cost.operators import store
from foretrace.experiment.ledger import Ledger
from foretrace.files import PART
from foretrace.fleet import sweep
from tables import ROOT, table

MARK = "FORETRACE_KILLED_BY"  # inherited by whatever a writer starts
PATIENCE_S = 20.0  # for the end of what a killed process had started

LEDGER = """
from pathlib import Path
from foretrace.experiment.ledger import Ledger
from tests.experiment.ledger_rows import make_row
while True:
    Ledger(Path("ledger.sqlite")).add([make_row(notes=("x" * 5000,)) for _ in range(20)])
    print("row", flush=True)
"""
GRAPH = f"""
from foretrace import flow
graph = flow.read({str(ROOT / "tests/data/recommender.json.gz")!r}).graph()
while True:
    graph.save("saved.graph")
    print("graph", flush=True)
"""
CALIBRATION = """
from foretrace.cost.operators import store
number = 0
while True:
    number += 1
    store.save({"cpu": "killed", "threads": 1}, {f"operator {number} {i}": 1.0 + i for i in range(500)})
    print("times", flush=True)
"""
SWEEP = f"""
from foretrace.cli import main
import sys, threading, time
from pathlib import Path
def watch():
    while len(list(Path("sweep").glob("*.json"))) < 3:
        time.sleep(0.002)
    print("cell", flush=True)
threading.Thread(target=watch, daemon=True).start()
loads = ",".join(f"{{0.5 + i / 100:g}}" for i in range(400))
sys.argv = ["foretrace", "fleet", "sweep", {str(ROOT / "examples/jobs.csv")!r}, "--policy", "fifo",
            "--set", f"load={{loads}}", "--jobs", "20", "--out", "sweep"]
main()
"""
TRAINING = """
import sys, time
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100_000):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", flush=True)
"""
RECORDING = """
import sys
from foretrace.cli import main
sys.argv = ["foretrace", "record", "--out", "run", "--overwrite", "--steps", "4", "--wait", "1", "--skip-first", "0",
            "--", sys.executable, "train.py"]
main()
"""


@dataclass(slots=True, kw_only=True)
class Count:
    """What one kind of writer left."""

    what: str
    kills: int = 0
    broken: int = 0  # files that their reader refuses
    left: int = 0  # temporary files
    orphans: int = 0  # processes


def whole_ledger(folder: Path) -> None:
    """Every row can be read; the file is sound, and takes another row."""
    path = folder / "ledger.sqlite"
    if path.exists():
        Ledger(path).rows()
        Ledger(path).checked()


def whole_graph(folder: Path) -> None:
    """The graph is there and replays."""
    flow.load(folder / "saved.graph").simulate()


def whole_calibration(folder: Path) -> None:
    """The times are there."""
    os.environ["FORETRACE_CACHE"] = str(folder)
    if not store.load({"cpu": "killed", "threads": 1}):
        raise ValueError("no times are left")


def whole_sweep(folder: Path) -> None:
    """Cells are whole, and their head."""
    for path in (folder / "sweep").glob("*.json"):
        if set(json.loads(path.read_text())) != {"cell", "found"} and path.name != sweep.HEAD:
            raise ValueError(f"{path} is no cell")


def whole_recording(folder: Path) -> None:
    """A recording, whole or of fewer steps, or none."""
    for path in (folder / "run").glob("*.json.gz"):
        flow.read(path).graph().simulate()


WRITERS: dict[str, tuple[str, float, Callable[[Path], None]]] = {  # program, longest wait in s, check
    "ledger": (LEDGER, 0.2, whole_ledger),
    "graph": (GRAPH, 0.2, whole_graph),
    "calibration": (CALIBRATION, 0.2, whole_calibration),
    "sweep": (SWEEP, 0.5, whole_sweep),
    "recording": (RECORDING, 3.0, whole_recording),
    "training": (RECORDING, 3.0, whole_recording),
}


def kill_once(what: str, folder: Path, chance: random.Random, count: Count) -> None:
    """One writer, one SIGKILL, one look at what is left; the folder stays for the next round."""
    program, longest_s, whole = WRITERS[what]
    mark = secrets.token_hex(8)
    environment = {**os.environ, MARK: mark, "FORETRACE_CACHE": str(folder), "PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0, longest_s))
        if what == "training":
            for pid in marked(mark):
                if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    os.kill(pid, 9)
        else:
            process.kill()
        end = time.monotonic() + PATIENCE_S
        while (living := marked(mark)) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in living:
            with suppress(OSError):
                os.kill(pid, 9)
    count.kills += 1
    count.orphans += len(living)
    count.left += sum(PART in each.name or each.suffix == ".tmp" for each in folder.rglob("*"))
    try:
        whole(folder)
    except Exception as error:
        count.broken += 1
        print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr)


def marked(mark: str) -> list[int]:
    """Processes that a writer has started, itself among them."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def main() -> int:
    """Run all kinds and print the counts."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[[], *WRITERS], help="kinds of writers; by default all")
    parser.add_argument("--rounds", type=int, default=15, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    counts = []
    for what in given.what or WRITERS:
        counts.append(Count(what=what))
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.py").write_text(TRAINING)
            for _ in range(given.rounds):
                kill_once(what, Path(folder), chance, counts[-1])
    wrong = sum(each.broken + each.left + each.orphans for each in counts)
    if given.json:
        print(json.dumps({"seed": given.seed, "counts": [asdict(each) for each in counts], "wrong": wrong}, indent=2))
    else:
        rows = [(each.what, str(each.kills), str(each.broken), str(each.left), str(each.orphans)) for each in counts]
        print(table(("writing", "SIGKILLs", "half-written", "temporary files", "orphans"), rows))
        print(f"\n{sum(each.kills for each in counts)} SIGKILLs, {wrong} wrong (seed {given.seed}).")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
