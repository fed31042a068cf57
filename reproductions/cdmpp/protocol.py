"""Tensor programs on this machine: measure them, train the predictor, score it on tasks that it has not seen.

    python -m reproductions cdmpp measure [--passes 6]
    python -m reproductions cdmpp ship
    python -m reproductions cdmpp study [--json]
    python -m reproductions cdmpp train
    python -m reproductions cdmpp score [--ablate] [--json]

`measure` times all programs on this machine; `ship` fits what comes with the package to that; `study` scores it on
tasks left out and writes docs/accuracy/programs.md, or with --json only prints its figures. `train` and `score` are
of the transformer that it replaced, on the first recording; `score` writes reproductions/cdmpp/transformer.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

from foretrace.files import write_text  # noqa: E402
from reproductions import parser_of  # noqa: E402
from reproductions.cdmpp import data, score, study  # noqa: E402


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("cdmpp", __doc__)
    parser.add_argument("what", choices=("measure", "ship", "study", "train", "score"))
    parser.add_argument("--passes", type=int, default=6, help="measure: at most so often, two minutes apart")
    parser.add_argument("--json", action="store_true", help="study, score: print the figures as JSON")
    parser.add_argument("--ablate", action="store_true", help="score: also leave out parts of the predictor in turn")
    given = parser.parse_args(arguments)
    if given.what == "measure":
        data.measure(given.passes, 120.0, say)
        return 0
    if given.what == "ship":
        study.ship(say)
        return 0
    if given.what == "study":
        studied = study.results(say)
        if given.json:
            print(json.dumps(studied, indent=1))
        else:
            import accuracy

            accuracy.write("programs", study.page(studied))
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
    write_text(Path(__file__).parent / "transformer.md", f"# The transformer\n\n{score.page(found)}")
    return 0
