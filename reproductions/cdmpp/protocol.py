"""Tensor programs on this machine: measure them, train the predictor, score it on tasks that it has not seen.

    python -m reproductions cdmpp measure [--minutes 15] [--per-task 24]
    python -m reproductions cdmpp train
    python -m reproductions cdmpp score [--ablate] [--json]

`measure` goes on where an earlier recording of the same machine stopped; `train` writes the weights;
`score` writes docs/accuracy/programs.md, or with --json only prints its figures.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

from reproductions import parser_of  # noqa: E402
from reproductions.cdmpp import data, score  # noqa: E402


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("cdmpp", __doc__)
    parser.add_argument("what", choices=("measure", "train", "score"))
    parser.add_argument("--minutes", type=float, default=15.0, help="measure: at most so long")
    parser.add_argument("--per-task", type=int, default=24, help="measure: at most so many programs of a task")
    parser.add_argument("--json", action="store_true", help="score: print the figures as JSON")
    parser.add_argument("--ablate", action="store_true", help="score: also leave out parts of the predictor in turn")
    given = parser.parse_args(arguments)
    if given.what == "measure":
        data.measure(given.minutes, given.per_task, say)
        return 0
    import torch

    torch.set_num_threads(1)
    if given.what == "train":
        score.train(say)
        return 0
    found = score.score(say, ablate=given.ablate)
    if given.json:
        print(json.dumps(found, indent=1))
        return 0
    import accuracy

    accuracy.write("programs", score.page(found))
    return 0
