"""MariusGNN's orders, memory and quality, written to README.md.

    python -m reproductions marius [--graphs FOLDER] [--epochs 40] [--seeds 3] [--print]

Swaps are computed; citation graphs (FOLDER with cora.npz and citeseer.npz) are trained here, in memory and in a buffer;
the graph of 10 million edges is the run of `benchmarks/out_of_core.py` whose lines are kept in measured.jsonl.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.training.rows import graphs, orders, partitions
from foretrace.training.rows.out_of_core import TrainingJob, train
from reproductions import parser_of, shared_data
from reproductions.ledgers import predictions
from reproductions.systems import put
from tables import machine, table, today

HERE = Path(__file__).parent
MEASURED = HERE / "measured.jsonl"
PARTITIONS, BUFFERS = (8, 16, 32, 64), (2, 4, 8, 16)
SAMPLED = 8  # partitions of a citation graph
COLUMNS = (
    "edges", "seed", "choice", "swaps / bound", "AUC", "in memory", "epoch, s", "ratio", "error", "limit, MB",
    "peak, MB", "in memory, MB", "waited, s",
)  # fmt: skip
HEAD = """# MariusGNN: graphs larger than memory

Marius (OSDI 2021) and MariusGNN (EuroSys 2023) train on graphs of which a buffer of partitions is in memory, in orders
that need few swaps. `foretrace plan data` chooses buffer and order under a limit of memory and trains by them
([rows](../../docs/rows.md)). Written by `make reproduce NAME=marius`.
"""


def swap_rows() -> Iterator[tuple[str, ...]]:
    """Swaps of BETA and COMET over the bound, by partitions and buffer."""
    random = np.random.default_rng(0)
    for count in PARTITIONS:
        cells = []
        for buffer in BUFFERS:
            if 2 * buffer > count:
                cells.append("–")
                continue
            bound = orders.swaps_bound(count, buffer)
            found = [orders.swaps(orders.beta(count, buffer, random))]
            found += [orders.swaps(orders.comet(count, buffer, random))] if buffer > 2 else []
            cells.append(f"{bound}: " + ", ".join(f"{each} ({each / bound:.2f})" for each in found))
        yield str(count), *cells


def citation_rows(folder: Path, *, epochs: int, seeds: int) -> Iterator[tuple[str, ...]]:
    """Accuracy on test nodes in memory, and with a half and a quarter of the partitions in the buffer."""
    for name in ("cora", "citeseer"):
        data = graphs.read(folder / f"{name}.npz")
        with tempfile.TemporaryDirectory() as own:
            drawn = [
                partitions.write(data, Path(own) / str(seed), partitions=SAMPLED, hold_out=False, seed=seed)
                for seed in range(seeds)
            ]
            base: dict[str, Any] = {"task": "nodes", "epochs": epochs, "batch": 140, "rate": 0.01}
            arms: dict[str, dict[str, Any]] = {
                "in memory": {"loader": "in memory"},
                "4 of 8 partitions": {"loader": "partition buffer", "buffer": 4},
                "2 of 8 partitions": {"loader": "partition buffer", "buffer": 2},
            }
            for words, how in arms.items():
                jobs = [TrainingJob(folder=str(graph.folder), **base, **how, seed=k) for k, graph in enumerate(drawn)]
                found = np.array([train(job).quality for job in jobs])
                yield name, words, f"{found.mean():.3f}", " ".join(f"{each:.3f}" for each in found)


def measured_rows(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The runs of the benchmark, one per seed."""
    for each in lines:
        if "seed" in each:
            yield (
                f"{each['edges'] / 1e6:.1f} M", str(each["seed"]), each["choice"].removeprefix("partition buffer "),
                f"{each['swaps']} / {each['bound']}", f"{each['quality']:.3f}", f"{each['quality_in_memory']:.3f}",
                f"{np.median(each['epochs_s']):.3g}", f"{each['over_in_memory'][0]:.2f}",
                f"{1 / each['measured_over_predicted'][0] - 1:+.0%}", f"{each['limit_mb']:.0f}",
                f"{each['peak_mb']:.0f}", f"{each['peak_in_memory_mb']:.0f}", f"{sum(each['waited_s']):.2f}",
            )  # fmt: skip


def page(folder: Path, *, epochs: int, seeds: int) -> str:
    """What README.md says."""
    lines = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    facts = [
        f"- {each['loader']}: " + (f"{each['edges_per_s']:,.0f} edges/s" if "edges_per_s" in each else
        "; ".join(f"`{name}` {said}" for name, said in each.items() if name != "loader"))
        for each in lines if "loader" in each
    ]  # fmt: skip
    return "\n".join([
        HEAD, f"*{today()}, {machine()}.*\n",
        "## Swaps\n",
        "Of an epoch: the lower bound, then BETA and COMET (two partitions at a time) with their ratio to it.\n",
        table(("partitions", *(f"buffer {each}" for each in BUFFERS)), swap_rows()), "",
        "## Links of a generated graph\n",
        "Of "
        + " and ".join(dict.fromkeys(f"`{each['graph']}`" for each in lines if "seed" in each))
        + ": the choice of `plan data` within a limit, enforced by RLIMIT_DATA beyond what libraries have. "
        "Seconds are those of the processor and of waiting for the disk, the median of an epoch; the ratio is to all "
        "rows in memory, without a limit; the error is that of the plan. AUC is of edges kept apart against random "
        "pairs. Those of 9.9 M edges ran on 2026-11-28 on an Intel Xeon, seeds 0 and 1 beside other work. With seed 0 "
        "partitions follow communities: until that evening graph and partitions were drawn by the same numbers.\n",
        table(COLUMNS, measured_rows(lines)), "",
        "Other loaders here:\n", *facts, "",
        "## Nodes of citation graphs\n",
        f"Accuracy on test nodes after {epochs} epochs, GraphSAGE of two layers, fan-out 10; neighbours are drawn "
        "among the nodes in the buffer, judged with all of them. Each seed also divides the graph anew.\n",
        table(("graph", "rows", "mean", "seeds"), citation_rows(folder, epochs=epochs, seeds=seeds)), "",
        "## Rows of the ledger\n",
        "An epoch of the choice, by `foretrace plan data ... --run`; rows of the morning of 2026-11-28 (the first "
        "three of that day) beside other work (load 8 to 12). Epochs of nodes were timed wrongly until that evening: "
        "their last four rows are after it.\n",
        predictions("plan-data"), "",
    ])  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("marius", __doc__)
    default = shared_data() / "graphs"
    parser.add_argument("--graphs", type=Path, default=default)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--print", action="store_true", help="print instead of writing README.md")
    given = parser.parse_args(arguments)
    if not given.graphs.is_dir():
        raise ForetraceError(f"{given.graphs} must hold cora.npz and citeseer.npz; name their folder with --graphs.")
    found = page(given.graphs, epochs=given.epochs, seeds=given.seeds)
    if given.print:
        print(found)
    else:
        put(HERE / "README.md", found)
    return 0
