"""CHAI: clustered heads of decoders that are trained here, beside random clusters; written to README.md.

    python -m reproductions chai [--decoders 4x8,4x32] [--steps N] [--weights FOLDER] [--print]
    python -m reproductions chai --verify FILE [--contexts 512,2048,4096] [--clusters 2,4]

Decoders are trained for a stated number of steps; clusters are chosen on one text, ways to choose compared on another,
and judged on a third. `--verify` runs decoding (`examples/decode.py`, random weights) in turns with and without
clusters and adds rows to a ledger; exported to benchmarks/data/heads.jsonl (`foretrace ledger --export`), they are the
table of steps.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from foretrace.experiment import processes
from foretrace.experiment.job import Job
from foretrace.experiment.ledger import Ledger, Row, import_lines
from reproductions import ROOT, parser_of
from reproductions.systems import put
from tables import machine, table, today

ROWS = ROOT / "benchmarks" / "data" / "heads.jsonl"
WARM_UP, SEEDS = 32, 3
SAVINGS, CLAIMED = (0.05, 0.1, 0.15, 0.2, 0.25), (0.2, 3.2)
SAMPLES, CHOOSING = 64, 192  # of the texts that compare and judge, and of the one that clusters are chosen by
DECODERS = "4x8,4x32"  # layers x heads
HEAD = """# CHAI: heads that share attention scores

One head of each cluster computes queries times keys and softmax; all heads of the cluster weight their own values with
its scores. Written by `make reproduce NAME=chai`.
"""
STEPS = """Decoding of `examples/decode.py` (4 layers of 8 heads, width 512, `DynamicCache`), step with clusters over
step without ([rows](../../benchmarks/data/heads.jsonl), 2 cores that others used meanwhile, one thread, CPU time).
Contexts of other decoders and attention alone were not kept as rows.
"""
METHOD = """Decoders (layers x heads) of width {width}, {words} words, trained for {steps} steps of {tokens} tokens on
sources of Python's standard library ({cpu}). *Chosen* on the text that trains: {choosing} samples of {length}
tokens, by `merged_heads`: one head more follows others, each time the one that changes predictions least, until enough
is saved. What it changes is the divergence from predictions of all heads, to second order, of all layers together: the
Fisher matrix of what heads write with the scores of others. *Compared* on other files, {samples} samples: ways to
choose, and the decoder whose result is claimed above. *Judged* on others again, {samples} samples, which decided
nothing. Perplexity is of tokens behind the first {warm_up}, in % above that of all heads.

*Known* clusters hold for every request, from its first token on. *Per request* are clusters as published, of the same
counts: by scores of the first {warm_up} tokens, which all heads attend. *Random* clusters have the same counts, too;
three seeds. *Elbow* is the published rule for counts.
"""
CAUSE = """CHAI saves heads that attend alike, and here hardly two do: the largest correlation of a head's scores with
another head's of its layer is, median of the heads layer by layer, {same} (1: the same scores). So a head that
follows another attends to something else than it was trained for; many heads of which each does little cost less.
"""


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Clusters of one decoder, and % of perplexity above that of all heads."""

    layers: int
    heads: int
    rule: str  # "chosen" or "elbow"
    saved: float  # share of keys and values
    counts: list[int]
    compared: float | None  # of known clusters, on text that compares; None of the elbow
    known: float | None
    asked: float  # clustered per request by scores
    random: list[float]
    alike: list[float]  # of each layer, the median of heads' largest correlation; of all rows the same

    @property
    def decoder(self) -> str:
        """As in "4 x 32"."""
        return f"{self.layers} x {self.heads}"


def decoding(context: int, clusters: int) -> Row:
    """Verify decoding once."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"decode_{context}.py"
        lines = [f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})", "import decode"]
        script.write_text("\n".join([*lines, f"def training(): return decode.training({context})\n"]))
        return processes.run(Job(techniques=(f"clustered-heads clusters={clusters}",), model=str(script))).row()


def perplexities(made: Any, tell: Callable[[str], object] = print) -> Iterator[Held]:
    """Choose clusters of a decoder and hold them against text that it has not seen."""
    import torch

    from foretrace.training.clustered_heads import HeadGroups, cluster_heads, draw_groups, share_heads
    from reproductions.chai.head_counts import kv_saving, loss_after, merged_heads
    from reproductions.chai.published import alike, elbow, spreads

    layers, heads = int(made.model.config.num_hidden_layers), int(made.model.config.num_attention_heads)
    whole = {text: loss_after(made.model, text, WARM_UP) for text in (made.compare, made.judge)}
    tell(f"{layers} x {heads}: {whole[made.judge]:.3f} nats")

    def more(put_in: Callable[[Any], object], text: Any) -> float:
        changed = copy.deepcopy(made.model)
        put_in(changed)
        return 100 * float(np.expm1(loss_after(changed, text, WARM_UP) - whole[text]))

    def shared(groups: Sequence[HeadGroups], text: Any) -> float:
        return more(lambda model: share_heads(model, groups), text)

    def held(rule: str, counts: list[int], groups: Sequence[HeadGroups] | None) -> Held:
        drawn = [
            [draw_groups(1, heads, count, torch.Generator().manual_seed(100 * seed + i))
             for i, count in enumerate(counts)] for seed in range(SEEDS)
        ]  # fmt: skip
        compared, known = [None if groups is None else shared(groups, text) for text in whole]
        return Held(
            layers=layers, heads=heads, rule=rule, saved=kv_saving(counts, heads), counts=counts,
            compared=compared, known=known, random=[shared(each, made.judge) for each in drawn], alike=same,
            asked=more(lambda model: cluster_heads(model, counts, warm_up=WARM_UP), made.judge),
        )  # fmt: skip

    same = np.median(alike(made.model, made.choose[:SAMPLES]), 1).tolist()
    merged = merged_heads(made.model, made.choose, skip=WARM_UP)
    for saving in SAVINGS:
        groups = next(each for each in merged if _saved(each, heads) >= saving - 1e-9)
        yield (one := held("chosen", _counts(groups), groups))
        tell(f"{one}")
    yield held("elbow", [elbow(each) for each in spreads(made.model, made.choose[:4])], None)


def _counts(groups: Sequence[Any]) -> list[int]:
    return [each.representatives.shape[1] for each in groups]


def _saved(groups: Sequence[Any], heads: int) -> float:
    from reproductions.chai.head_counts import kv_saving

    return kv_saving(_counts(groups), heads)


def claims(found: Sequence[Held], steps: Sequence[Row]) -> str:
    """The table of claims; the decoder is the one with the least deviation on the text that compares."""
    saving, limit = CLAIMED
    one = min(
        (each for each in found if each.rule == "chosen" and each.saved >= saving),
        key=lambda each: each.compared or 0.0,
    )
    assert one.known is not None
    reached = "reached" if one.known <= limit else "**not reached**"
    quick = min(steps, key=lambda each: each.measured)
    slow = max((each for each in steps if _k(each) == _k(quick)), key=lambda each: each.measured)
    return table(["claim of the paper", "here", "why they differ"], [
        ["K/V cache up to 21.4 % smaller", f"{100 * one.saved:.1f} % at the counts chosen for {saving:.0%}; equal to "
         "½ · mean(1 − k/H) by bytes of storages", "counts are whole numbers"],
        ["up to 1.73 times faster to the next token (LLaMA-7B, 2,048 tokens, GPU)",
         f"whole step {1 / quick.measured:.2f} times at k/H = {_k(quick)}/8 and {_context(quick)} tokens, "
         f"{1 / slow.measured:.2f} times at {_context(slow)}", "a processor, where linear layers take more of a step; "
         "the published counts are ⅛ in 14 of 32 layers"],
        ["accuracy within 3.2 % (of tasks)", f"{reached} with {one.decoder} heads: perplexity {one.known:+.1f} % at "
         f"−{100 * one.saved:.1f} %; clustered per request {one.asked:+.1f} %, random "
         f"{min(one.random):+.1f} to {max(one.random):+.1f} %", "clusters known beforehand, chosen by what "
         "they change; a small decoder; perplexity in place of tasks"],
    ])  # fmt: skip


def _k(row: Row) -> int:
    return int(row.parameters["clustered-heads"]["clusters"])


def _context(row: Row) -> str:
    return f"{int(row.model.removeprefix('decode_').removesuffix('.py')):,}"


def step_table(steps: Sequence[Row]) -> str:
    """Rows of the ledger."""
    header = ["context", "k/H", "predicted step (80 %)", "measured (80 %)", "error, %", "verdict"]
    rows = [
        [_context(each), f"{_k(each)}/8",
         f"{each.predicted:.3f} ({each.predicted_low:.3f} – {each.predicted_high:.3f})",
         f"{each.measured:.3f} ({each.measured_low:.3f} – {each.measured_high:.3f})", f"{100 * each.error:+.1f}",
         str(each.verdict)] for each in steps
    ]  # fmt: skip
    machines = sorted({f"{each.time[:10]}, {each.device}, torch {each.torch}" for each in steps})
    return f"{table(header, rows)}\n\n*{'; '.join(machines)}.*"


def perplexity_table(found: Sequence[Held]) -> str:
    """One row per decoder and saving."""
    header = ["decoder, rule", "K/V bytes, %", "known: compared", "judged", "per request: judged", "random: judged"]
    rows = [
        [f"{each.decoder}, {each.rule}", f"−{100 * each.saved:.1f}",
         *("–" if one is None else f"{one:+.1f}" for one in (each.compared, each.known)), f"{each.asked:+.1f}",
         ", ".join(f"{one:+.1f}" for one in each.random)] for each in found
    ]  # fmt: skip
    chosen = [
        f"- {each.decoder} ({each.rule}), −{100 * each.saved:.1f} %: {', '.join(map(str, each.counts))}"
        for each in found if each.rule == "elbow" or CLAIMED[0] <= each.saved < CLAIMED[0] + 0.04
    ]  # fmt: skip
    alike = {each.decoder: " ".join(f"{one:.2f}" for one in each.alike) for each in found}
    cause = CAUSE.format(same=", ".join(f"{each} ({decoder})" for decoder, each in alike.items()))
    by_layer = f"Clusters by layer, chosen for {CLAIMED[0]:.0%} and by the elbow:\n\n" + "\n".join(chosen)
    return f"{table(header, rows)}\n\n{cause}\n{by_layer}"


def main(arguments: Sequence[str]) -> int:
    """Write the page, or verify steps."""
    parser = parser_of("chai", __doc__)
    parser.add_argument("--decoders", default=DECODERS, help="that are trained: layers x heads")
    parser.add_argument("--steps", type=int, default=None, help="of training")
    parser.add_argument(
        "--weights", type=Path, help="folder of trained weights and rows, kept there and read from there"
    )
    parser.add_argument("--print", action="store_true", help="print instead of writing README.md")
    parser.add_argument("--verify", type=Path, help="verify steps, and add them to this ledger")
    parser.add_argument("--contexts", default="512,2048,4096")
    parser.add_argument("--clusters", default="2,4")
    given = parser.parse_args(arguments)
    if given.verify:
        pairs = [(int(context), int(k)) for context in given.contexts.split(",") for k in given.clusters.split(",")]
        steps = [decoding(*each) for each in pairs]
        Ledger(given.verify).add(steps)
        print(step_table(steps))
    else:
        _page(given)
    return 0


def _page(given: argparse.Namespace) -> None:
    from reproductions.chai import trained

    def tell(said: str) -> None:
        print(said, file=sys.stderr, flush=True)

    found, cpu, steps = list[Held](), list[str](), given.steps or trained.STEPS
    for layers, heads in (map(int, each.split("x")) for each in given.decoders.split(",")):
        made = trained.train(
            heads, layers=layers, steps=steps, weights=given.weights, samples=SAMPLES, choosing=CHOOSING, tell=tell
        )
        cpu.append(f"{layers} x {heads}: {made.cpu_s:.0f} s")
        path = given.weights and given.weights / f"{layers}-layers-{heads}-heads-{steps}-steps.json"
        if path and path.exists():
            found += msgspec.json.decode(path.read_bytes(), type=list[Held])
            continue
        own = list(perplexities(made, tell))
        found += own
        if path:
            path.write_bytes(msgspec.json.encode(own))
    rows = import_lines(ROWS.read_text(encoding="utf-8"), str(ROWS))
    method = METHOD.format(
        width=trained.WIDTH, words=f"{trained.WORDS:,}", steps=f"{steps:,}", warm_up=WARM_UP,
        tokens=f"{trained.BATCH * trained.LENGTH:,}", cpu=f"CPU time of {', '.join(cpu)}", choosing=CHOOSING,
        length=trained.LENGTH, samples=SAMPLES,
    )  # fmt: skip
    page = "\n".join([
        HEAD, f"*{today()}, {machine()}; one thread.*\n", f"## Claims\n\n{claims(found, rows)}\n",
        f"## Perplexity, beside random clusters\n\n{method}\n{perplexity_table(found)}\n",
        f"## Steps, predicted and measured\n\n{STEPS}\n{step_table(rows)}\n",
    ])  # fmt: skip
    if given.print:
        print(page)
    else:
        put(Path(__file__).parent / "README.md", page)
