"""Kernels, framework and pages of compiled steps against the steps themselves; writes docs/accuracy/compiled.md.

    python benchmarks/compiled_kernels.py [MODEL ...] [--seconds 15]

Every model in a process of its own, as `foretrace kernels` runs it; models that are not named keep their rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import numpy as np

from foretrace.files import write_bytes, write_text
from tables import ROOT, load, machine, percent, table, today

PAGE, DATA = ROOT / "docs" / "accuracy" / "compiled.md", ROOT / "benchmarks" / "data" / "compiled_kernels.json"
MODELS = ("vgg11", "mobilenet-v2", "resnet50", "bert", "gpt2", "llama", "transformer", "seq2seq", "ncf", "dlrm")


def main() -> None:
    """Run the models, keep what came out, write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--seconds", default="15", help="for running the steps of a model")
    given = parser.parse_args()
    rows = json.loads(DATA.read_text()) if DATA.exists() else {}
    for model in given.models:
        command = [sys.executable, "-m", "foretrace", "kernels", model, "--seconds", given.seconds, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{model}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        answer = json.loads(done.stdout)
        fused = sum(each["fused"] for each in answer["kernels"])
        keep = ("step_s", "interval_s", "kernels_s", "framework_s", "pages_s", "sum_s", "steps")
        rows[model] = {key: answer[key] for key in keep} | {
            "fused": fused, "kernels": len(answer["kernels"]), "date": today(), "machine": machine(), "load": load(),
        }  # fmt: skip
        write_bytes(DATA, (json.dumps(rows, indent=1) + "\n").encode())
    write_text(PAGE, page(rows))


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The whole page."""
    lines, errors = [], []
    for model, row in sorted(rows.items()):
        step, low, high, kernels, framework, pages, total = (
            1e3 * value
            for value in (
                row["step_s"], *row["interval_s"], row["kernels_s"], row["framework_s"], row["pages_s"], row["sum_s"],
            )
        )  # fmt: skip
        errors.append(total / step - 1)
        lines.append([
            model, f"{row['fused']} of {row['kernels']}", f"{step:.1f}", f"{low:.1f} – {high:.1f}", f"{kernels:.1f}",
            f"{framework:.1f}", f"{pages:.2f}", percent(errors[-1], signed=True), str(row["steps"]),
        ])  # fmt: skip
    header = (
        "model, tiny", "kernels that are fused", "step ms", "10 – 90 %", "kernels", "framework", "pages", "sum off, %",
        "steps of each kind",
    )  # fmt: skip
    newest = max(rows.values(), key=lambda row: str(row["date"]))
    middle, worst = percent(float(np.median(np.abs(errors)))), percent(max(errors, key=abs), signed=True)
    return (
        "# Kernels of compiled steps\n\n"
        f"*{newest['date']}, {newest['machine']}, one thread, load {newest['load']}.*\n\n"
        "`foretrace kernels MODEL`: medians of plain steps, of every call of the generated code where it stands, and "
        "of hollow steps, which are the framework with the loss and caches as kernels leave them; nothing is fitted. *Sum off*: kernels + "
        f"framework + pages over the plain step, less 1: median of its size {middle} %, worst {worst} %.\n\n"
        + table(header, lines)
    ) + "\n"


if __name__ == "__main__":
    main()
