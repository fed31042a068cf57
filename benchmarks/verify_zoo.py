"""Verify techniques on models of the zoo, on this machine, and keep every row: benchmarks/data/ledger.jsonl.

    python benchmarks/verify_zoo.py [PART ...] [--again]      # --seconds S for running the arms of each
    python benchmarks/verify_zoo.py --matrix [PART ...]       # every technique in two settings on every model, hours

Every row is one `foretrace verify`: record the model, predict, then run both arms interleaved. `compiled kernels=` gets
the answer of `foretrace kernels MODEL --json`, made right before. Conclusive rows that are there are kept unless
`--again`; PART keeps the plan to rows whose technique or model contains it. Nothing else should use the cores
meanwhile. `python benchmarks/accuracy.py techniques` writes the table.

`--matrix` runs short verifications that keep no row, and prints how many concluded, how many refused to (with the
reason), how many techniques refused the model in one sentence, and how many went wrong: those are listed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from foretrace.experiment.ledger import Ledger, write
from foretrace.experiment.statistics import Verdict
from foretrace.techniques.arguments import parse
from foretrace.zoo.registry import entries

DATA = Path(__file__).parent / "data"
ROWS = DATA / "ledger.jsonl"

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_cnn.py"

# Models whose step is forward, backward and update, and that torch.compile takes.
COMPILED = (
    "gpt2", "mobilenet-v2", "lstm-lm", "dlrm", "llama", "transformer", "gnn", "seq2seq", "resnet50", "bert", "ncf",
    "vgg11",
)  # fmt: skip

# Techniques (several in one entry are applied together) and the models each is verified on.
PLAN: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("mixed-precision",), ("resnet50", "bert", "gpt2", "lstm-lm", "mobilenet-v2", "ncf")),
    (("fused-optimizer",), ("bert", "mobilenet-v2", "dlrm", "gan", "inception-v3")),
    (("batch-size by=2",), ("resnet50", "gpt2", "lstm-lm", "gnn", "detector")),
    (("batch-size by=0.5",), ("inception-v3", "llama", "deepspeech2")),
    (("gradient-accumulation steps=2",), ("resnet50", "bert", "seq2seq", "dlrm")),
    (("activation-recomputation",), ("bert", "gpt2", "llama", "resnet50")),
    (("channels-last",), ("resnet50", "mobilenet-v2", "inception-v3", "detector")),
    (("activation-compression",), ("resnet50", "gpt2", "inception-v3")),
    (("activation-offload to=disk",), ("resnet50", "bert", "transformer")),
    (("reconstruct-batchnorm",), ("resnet50", "inception-v3", "mobilenet-v2")),
    (("structured-dropout p=0.5",), ("dropout-lstm", "dropout-lstm-large", "acoustic-lstm")),
    (("prefetch-data workers=1",), ("ncf", "dlrm", "gnn", str(EXAMPLE))),
    (("compiled kernels=MODEL.json",), COMPILED),
    (("compiled",), COMPILED),
    (("mixed-precision", "fused-optimizer"), ("bert",)),
    (("activation-recomputation", "mixed-precision"), ("gpt2",)),
    (("batch-size by=2", "fused-optimizer"), ("mobilenet-v2",)),
    (("channels-last", "mixed-precision"), ("resnet50",)),
)


# Every technique that a single process on a processor can make real, in two settings.
MATRIX = (
    "prefetch-data", "prefetch-data workers=2 prefetch_factor=4", "mixed-precision", "mixed-precision dtype=float16",
    "fused-optimizer", "fused-optimizer implementation=foreach", "compiled", "channels-last", "batch-size by=2",
    "batch-size by=0.5", "gradient-accumulation steps=2", "gradient-accumulation steps=4", "activation-recomputation",
    "activation-recomputation blocks=Linear", "reconstruct-batchnorm", "reconstruct-batchnorm min_bytes=0",
    "activation-offload to=disk", "activation-offload to=disk min_bytes=0", "activation-compression",
    "activation-compression min_bytes=0", "structured-dropout p=0.5", "structured-dropout p=0.65",
)  # fmt: skip
_BRIEF = ("--seconds", "0.5", "--no-ledger", "--json")


def matrix(parts: Sequence[str]) -> int:
    """Verify MATRIX on every model of the zoo and print the counts; 1 if anything went wrong."""
    counts: Counter[str] = Counter()
    cells = [(technique, model) for technique in MATRIX for model in entries()]
    cells = [cell for cell in cells if not parts or any(part in " ".join(cell) for part in parts)]
    for number, (technique, model) in enumerate(cells, start=1):
        command = [sys.executable, "-m", "foretrace", "verify", technique, "--model", model, *_BRIEF]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stderr.strip().splitlines()
        sentence = done.returncode == 2 and len(said) == 1 and "Traceback" not in done.stderr
        kind = json.loads(done.stdout)["verdict"] if done.returncode == 0 else "refused" if sentence else "WRONG"
        counts[kind] += 1
        told = json.loads(done.stdout)["headline"] if done.returncode == 0 else said[-1] if said else "nothing said"
        print(f"{number}/{len(cells)} {technique} on {model}: {kind}: {told}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return int(counts["WRONG"] > 0)


def chosen(parts: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The rows of the plan, or those that any part names."""
    for techniques, models in PLAN:
        for model in models:
            if not parts or any(part in " ".join((*techniques, model)) for part in parts):
                yield tuple(each.replace("MODEL", model) for each in techniques), model


def time_kernels(model: str, folder: str) -> None:
    """Keep the answer of `foretrace kernels` in the folder, where `compiled kernels=MODEL.json` looks for it."""
    command = [sys.executable, "-m", "foretrace", "kernels", model, "--seconds", "10", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{model}: {done.stderr.strip()[-500:]}", flush=True)
    (Path(folder) / f"{model}.json").write_text(done.stdout or "{}", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="rows whose technique or model contains a part")
    parser.add_argument("--again", action="store_true", help="run what has conclusive rows, too")
    parser.add_argument("--seconds", default="20", help="for running the arms of a row")
    parser.add_argument("--matrix", action="store_true", help="every technique in two settings on every model")
    given = parser.parse_args(arguments)
    if given.matrix:
        return matrix(given.parts)
    ledger = Ledger((DATA / "ledger.sqlite").resolve())
    if ROWS.exists():
        ledger.import_jsonl(ROWS)
    plan = list(chosen(given.parts))
    failed = 0
    for number, (techniques, model) in enumerate(plan, start=1):
        text = " + ".join(techniques)
        if not given.again and concluded(ledger, techniques, model):
            continue
        began = time.monotonic()
        command = [sys.executable, "-m", "foretrace", "verify", *techniques, "--model", model, "--json"]
        command += ["--seconds", given.seconds, "--ledger", str(ledger.path)]
        with TemporaryDirectory(prefix="foretrace-zoo-") as folder:
            if "kernels=" in text:
                time_kernels(model, folder)
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        took = time.monotonic() - began
        if done.returncode:
            failed += 1
            print(f"{number}/{len(plan)} {text} on {model}: {done.stderr.strip()[-500:]}", flush=True)
            continue
        print(f"{number}/{len(plan)} {text} on {model}: {summary(done.stdout)}, {took:.0f} s", flush=True)
        write(ledger.rows(), ROWS)
    return int(failed > 0)


def concluded(ledger: Ledger, techniques: Sequence[str], model: str) -> bool:
    """Whether a conclusive row of these techniques together on this model exists."""
    if not ledger.path.is_file():
        return False
    wanted = " + ".join(str(parse(text)) for text in techniques)
    rows = ledger.rows(model=Path(model).name)
    return any(row.techniques == wanted and row.verdict != Verdict.INCONCLUSIVE for row in rows)


def summary(text: str) -> str:
    """One line of a verification's JSON."""
    found = json.loads(text)
    return f"{found.get('headline', '')}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
