"""Record pairs on the GPU at hand: each job as it is and with one technique, measured; benchmarks/data/gpu.

    python benchmarks/record_pairs.py [PART ...] [--device cuda] [--size full] [--out FOLDER] [--budget-s S]

Every pair is one `foretrace verify` on the device: record the job, predict from that recording alone, run both arms
interleaved with the job a second time as the floor, record the changed job. Kept are both recordings of a few steps
(gzip, module calls but no other Python, nothing that names the machine or its user), as MODEL.before.json.gz and
MODEL.TECHNIQUES.json.gz, and the rows of the ledger (ledger.jsonl). What cannot be run is named at the end and costs
no other pair; pairs that are in ledger.jsonl already are left out, so an interrupted run goes on. With
`--device cpu --size tiny` it is a dry run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from foretrace.experiment.ledger import Ledger, write
from foretrace.files import write_bytes
from verify_zoo import concluded

MODELS = ("resnet50", "bert", "gpt2")
PLAN: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("mixed-precision",), MODELS),
    (("fused-optimizer",), MODELS),
    (("channels-last",), ("resnet50",)),
    (("batch-size to=16",), MODELS),
    (("batch-size to=64",), MODELS),
    (("prefetch-data workers=4",), ("resnet50",)),
    (("prefetch-data workers=4 pinned=yes",), ("resnet50",)),
    (("compiled",), MODELS),
    (("cuda-graphs phases=forward,backward",), MODELS),
    (("activation-recomputation",), MODELS),
    (("gradient-accumulation steps=2",), MODELS),
    (("activation-offload to=host",), ("resnet50", "gpt2")),
    (("activation-compression",), ("resnet50", "gpt2")),
    (("reconstruct-batchnorm",), ("resnet50",)),
    (("channels-last", "mixed-precision"), ("resnet50",)),
    (("mixed-precision", "fused-optimizer"), MODELS),
)
STEPS = 3  # recorded
MAX_FILE_BYTES = 1_500_000  # larger recordings are left out, their rows stay


def small(recording: Path) -> bytes:
    """A recording without Python functions other than modules and without private names, as gzip bytes.

    Decimal numbers keep their text: a time stamp with three decimals does not survive a double.
    """
    mark = "\ufdd0"  # a code point that no text may contain
    with gzip.open(recording, "rt", encoding="utf-8") as file:
        trace = json.load(file, parse_float=lambda text: mark + text)
    for private in ("traceName", "host_name", "hostname"):
        trace.pop(private, None)
    trace["traceEvents"] = modules_only(trace["traceEvents"])
    text = json.dumps(trace, separators=(",", ":"), ensure_ascii=False)
    text = re.sub(f'"{mark}([^"]*)"', r"\1", text)
    secrets = {str(Path.cwd()), str(Path.home()), sys.prefix, tempfile.gettempdir(), socket.gethostname()}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) > 3 and secret != "localhost":
            text = text.replace(secret, "")
    return gzip.compress(text.encode(), compresslevel=9, mtime=0)


def modules_only(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop python functions that are no module call; a module's parent becomes its nearest kept ancestor."""
    python = {e["args"]["Python id"]: e for e in events if e.get("cat") == "python_function"}
    kept = {key for key, e in python.items() if e["name"].startswith("nn.Module: ")}
    out = []
    for event in events:
        if event.get("cat") == "python_function":
            if event["args"]["Python id"] not in kept:
                continue
            parent = event["args"].get("Python parent id")
            while parent is not None and parent not in kept:
                parent = python[parent]["args"].get("Python parent id") if parent in python else None
            event["args"]["Python parent id"] = parent
        out.append(event)
    return out


def keep(folder: Path, out: Path, model: str, name: str) -> str:
    """Store both recordings of a pair in `out`; what was left out, "" if nothing."""
    missing = []
    for arm, target in (("before", f"{model}.before.json.gz"), ("after", f"{model}.{name}.json.gz")):
        for recording in sorted((folder / arm).glob("rank*.json.gz")):
            content = small(recording)
            if len(content) > MAX_FILE_BYTES:
                missing.append(f"{target} ({len(content):,} bytes)")
            else:
                write_bytes(out / target, content)
    return ", ".join(missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="only pairs whose techniques or model contain one of these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="full", choices=("tiny", "full"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data" / "gpu")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no pair after so many seconds")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows, began, failed = given.out / "ledger.jsonl", time.monotonic(), []
    with tempfile.TemporaryDirectory() as temporary:
        ledger = Ledger(Path(temporary) / "ledger.sqlite")
        if rows.exists():
            ledger.import_jsonl(rows)
        for techniques, models in PLAN:
            for model in models:
                text = " + ".join(techniques)
                if given.parts and not any(part in f"{text} {model}" for part in given.parts):
                    continue
                if concluded(ledger, techniques, model):
                    continue
                if time.monotonic() - began > given.budget_s:
                    failed.append(f"{text} on {model}: no time was left")
                    continue
                folder = Path(temporary) / f"{model}-{len(failed)}-{time.monotonic_ns()}"
                options = ["--device", given.device, "--size", given.size, "--steps", str(STEPS), "--json"]
                command = [sys.executable, "-m", "foretrace", "verify", *techniques, "--model", model, *options]
                command += ["--keep", str(folder), "--ledger", str(ledger.path)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    failed.append(f"{text} on {model}: {done.stderr.strip()[-400:]}")
                    continue
                name = "+".join(each.replace(" ", ",") for each in techniques)
                if left_out := keep(folder, given.out, model, name):
                    failed.append(f"{text} on {model}: too large to keep: {left_out}")
                write(ledger.rows(), rows)
                print(f"{text} on {model}: {json.loads(done.stdout)['headline']}", flush=True)
    print(*failed, sep="\n", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
