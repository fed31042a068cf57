"""CHAI: verify clustered heads while a decoder decodes, and judge their perplexity beside random clusters.

    python -m reproductions chai [--contexts 512,2048,4096] [--clusters 2,4] [--steps N] [--ledger FILE]

Decoding (`examples/decode.py`, random weights) is verified in turns for every context and count. Perplexity is that of
a decoder trained here; counts are chosen on other files than those that judge them.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foretrace.experiment import processes
from foretrace.experiment.job import Job
from foretrace.experiment.ledger import Ledger
from reproductions import ROOT, parser_of

WARM_UP, SAVINGS, SEEDS = 64, (0.1, 0.2, 0.25), 3


def decoding(context: int, clusters: int, ledger: Path | None) -> str:
    """Verify decoding once; a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"decode_{context}.py"
        lines = [f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})", "import decode"]
        script.write_text("\n".join([*lines, f"def training(): return decode.training({context})\n"]))
        found = processes.run(Job(techniques=(f"clustered-heads clusters={clusters}",), model=str(script)))
    if ledger is not None:
        Ledger(ledger).keep(found.row())
    said, was = found.trial.predicted, found.trial.measured
    return (
        f"| {context} | {clusters}/8 | {said.value:.3f} ({said.low:.3f} – {said.high:.3f}) | "
        f"{was.value:.3f} ({was.low:.3f} – {was.high:.3f}) | {100 * found.trial.error:+.1f} % | {found.trial.verdict} |"
    )


def perplexities(steps: int) -> list[str]:
    """Train, choose counts, judge them: rows of the table."""
    from foretrace.training.clustered_heads import cluster_heads
    from foretrace.training.head_counts import choose_counts, deviations, elbow, kv_saving, loss_after, spreads
    from reproductions.chai.trained import HEADS, LENGTH, train

    made = train(steps=steps, length=LENGTH, samples=32)
    chosen = [("scores", "elbow", [elbow(row) for row in spreads(made.model, made.choose[:4])])]
    for by in ("scores", "outputs"):
        measured = deviations(made.model, made.choose[:16], warm_up=WARM_UP, by=by)
        chosen += [(by, f"{share:.0%}", choose_counts(measured, share)) for share in SAVINGS]
    whole, rows = loss_after(made.model, made.judge, WARM_UP), []
    for by, name, counts in chosen:
        more = []
        for how, seed in ((by, 0), *(("random", seed) for seed in range(SEEDS))):
            changed = copy.deepcopy(made.model)
            cluster_heads(changed, counts, warm_up=WARM_UP, by=how, seed=seed)
            more.append(f"{100 * (np.exp(loss_after(changed, made.judge, WARM_UP) - whole) - 1):+.1f} %")
        kept = ", ".join(map(str, counts))
        saved = f"{-100 * kv_saving(counts, HEADS):.1f} %"
        rows.append(f"| {by} | {name} | {kept} | {saved} | {more[0]} | {', '.join(more[1:])} |")
    return rows


def main(arguments: Sequence[str]) -> int:
    """Print both tables."""
    parser = parser_of("chai", __doc__)
    parser.add_argument("--contexts", default="512,2048,4096")
    parser.add_argument("--clusters", default="2,4")
    parser.add_argument("--steps", type=int, default=600, help="of training; 0: no perplexity")
    parser.add_argument("--ledger", type=Path, help="keep the rows there")
    given = parser.parse_args(arguments)
    print(
        "| context | k/H | predicted step (80 %) | measured (80 %) | error | verdict |\n|---:|---:|---:|---:|---:|---|"
    )
    for context in filter(None, given.contexts.split(",")):
        for count in given.clusters.split(","):
            print(decoding(int(context), int(count), given.ledger), flush=True)
    if given.steps:
        print("\n| clustered by | counts for | per layer | K/V bytes | perplexity | random, three seeds |")
        print("|---|---|---|---:|---:|---:|")
        print("\n".join(perplexities(given.steps)))
    return 0
