"""Fit the predictor of 16-bit products to a table of measured ones and write the weights that the package ships.

    python benchmarks/train_gemm16.py [--gemm FILE] [--devices FILE] [--out FILE]

Two things are made. The *law* for GPUs that nobody measured is fitted to the training GPUs only (Ampere, Ada, RTX PRO;
all their products); leaving each of them out in turn gives the deviations between GPUs and the 80 % ranges, with
nothing and with a few products measured. The *nets* of GPUs that were measured are fitted to the triples that P2a does
not hold out; each net leaves another tenth of those out, which sets their ranges. Deterministic; minutes on one core;
PyTorch for the nets.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.learned import gemm16_law as law
from foretrace.cost.learned.gemm16 import EDGES_S, features
from foretrace.cost.learned.gemm16_fit import NOISE, adapt, fit_together
from foretrace.cost.sampling import choose_tasks
from foretrace.files import write_bytes
from gemm_table import TRAINING, System, fingerprint, read
from tables import ROOT, today

Floats = npt.NDArray[np.float64]
SHARED = Path(os.environ.get("FORETRACE_SHARED_DATA", ROOT.parent / "shared" / "data"))
WEIGHTS = ROOT / "src" / "foretrace" / "cost" / "learned" / "gemm16.npz"
#: Chosen by leaving each training GPU out (mean |error| %, A100 / L40S / RTX PRO; loading, epilogue, cache):
#: 0 0 0: 19.5 / 19.7 / 16.4; .5 .5 0: 22.4 / 19.6 / 15.8; 1 0 0: 15.2 / 20.1 / 15.2; 1 1 0: 12.7 / 19.6 / 15.7;
#: 1 1 1: 11.7 / 17.9 / 15.4.
FOLLOW = {"follow_load": 1.0, "follow_epilogue": 1.0, "follow_cache": 1.0}
OWN = {"compute": 0.2, "memory": 0.1, "floor": 0.2}  # what a training GPU may have of its own, and by how much
ROWS = 3000  # of a GPU, for the law
COUNTS = (0, 10, 20, 50)
LEAST_SPREAD = 0.03
NETS, CALIBRATION = 2, 0.1  # nets of a GPU; the share of rows, another for each, that it does not see: for ranges
WIDTH, LAYERS, EPOCHS, BATCH, RATE, DECAY = 64, 3, 100, 512, 4e-3, 1e-3


def sample(system: System, rows: npt.NDArray[np.int64] | None = None, count: int = ROWS) -> npt.NDArray[np.int64]:
    """Some of a system's rows, the same triples wherever the table has them."""
    pool = np.arange(len(system)) if rows is None else rows
    return np.sort(np.random.RandomState(5).permutation(pool)[:count])


def errors(predicted: Floats, truth: Floats) -> dict[str, float]:
    """Mean and median |predicted / measured - 1|."""
    off = np.abs(predicted / truth - 1)
    return {"mean": float(off.mean()), "median": float(np.median(off))}


def task_features(theta: Mapping[str, float], system: System) -> Floats:
    """What tasks are chosen by, no label in it: sizes and the time that the law expects."""
    expected = law.seconds(theta, law.Chip.of(system.device), system.m, system.n, system.k)
    return np.log2(np.stack([system.m, system.n, system.k, expected], axis=1))


def transfer(systems: Mapping[str, System]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The law for unknown GPUs and what it needs beside it, and its table of errors by device left out."""
    start = law.START | FOLLOW
    chosen = [systems[name] for name in TRAINING if name in systems]
    data = [each.measured(sample(each)) for each in chosen]
    theta, shifts = fit_together(start, data, OWN)
    names = list(theta)
    report: dict[str, Any] = {"device shifts": {s.name: o for s, o in zip(chosen, shifts, strict=True)}, "left out": {}}
    moves, without = [], []
    for i, out in enumerate(chosen):
        rest, _ = fit_together(start, [d for j, d in enumerate(data) if j != i], OWN)
        free = {name: 0.5 for name in names if not name.startswith("follow_")}
        alone = adapt(rest, free, data[i], noise=0.1)  # thousands of products: they count in full
        moves.append([alone[name] - rest[name] for name in names])
        without.append(rest)
        print(f"left out {out.name}: {score(out, rest)}", flush=True)
    spread = dict(zip(names, np.sqrt(np.mean(np.square(moves), axis=0)).tolist(), strict=True))
    spread = {name: max(x, LEAST_SPREAD) for name, x in spread.items() if not name.startswith("follow_")}
    logs: dict[int, list[tuple[Floats, Floats]]] = {count: [] for count in COUNTS}
    for i, out in enumerate(chosen):
        # by how much GPUs differ is asked of the other two here: the one left out is as new as a target would be
        others = [np.square(move) for j, move in enumerate(moves) if j != i]
        theirs = dict(zip(names, np.sqrt(np.mean(others, axis=0)).tolist(), strict=True))
        theirs = {name: max(theirs[name], LEAST_SPREAD) for name in spread}
        rows = {}
        for count in COUNTS:
            tasks = choose_tasks(task_features(without[i], out), count)
            moved = adapt(without[i], theirs, out.measured(tasks), noise=NOISE)
            rest_rows = np.setdiff1d(np.arange(len(out)), tasks)
            found = law.seconds(moved, law.Chip.of(out.device), out.m, out.n, out.k)[rest_rows]
            logs[count].append((found, np.log(out.seconds[rest_rows] / found)))
            rows[str(count)] = errors(found, out.seconds[rest_rows])
        report["left out"][out.name] = rows
        print(out.name, {count: f"{100 * row['mean']:.1f}" for count, row in rows.items()}, flush=True)
    low, high = (np.array([[_quantile(logs[c], part, q) for part in range(3)] for c in COUNTS]) for q in (0.1, 0.9))
    return {"theta": theta, "spread": spread, "low": np.exp(low), "high": np.exp(high)}, report


def score(system: System, theta: Mapping[str, float]) -> dict[str, float]:
    return errors(law.seconds(theta, law.Chip.of(system.device), system.m, system.n, system.k), system.seconds)


def _quantile(logs: list[tuple[Floats, Floats]], part: int, q: float) -> float:
    """Of logarithmic errors in one part of the times, every device with the same weight."""
    values = [log[np.digitize(found, EDGES_S) == part] for found, log in logs]
    weight = np.concatenate([np.full(len(v), 1.0 / max(len(v), 1)) for v in values])
    every = np.concatenate(values)
    order = np.argsort(every)
    return float(every[order][min(int(np.searchsorted(np.cumsum(weight[order]), q * weight.sum())), len(every) - 1)])


def known(system: System) -> tuple[dict[str, Any], dict[str, float]]:
    """Law and net of one measured GPU, from the triples that are not held out."""
    import torch

    torch.set_num_threads(1)
    rows = np.flatnonzero(~system.held_out)
    theta, (shift,) = fit_together(law.START | FOLLOW, [system.measured(sample(system, rows))], {"compute": 0.01})
    theta = {**theta, "compute": theta["compute"] + shift["compute"]}
    chip = law.Chip.of(system.device)
    base = law.seconds(theta, chip, system.m, system.n, system.k)
    x = np.ascontiguousarray(features(base, chip, system.m, system.n, system.k).T)
    y = np.log(system.seconds / base).astype(np.float32)
    mean, std = x[rows].mean(axis=0), x[rows].std(axis=0) + 1e-6
    inputs, target = torch.from_numpy((x - mean) / std), torch.from_numpy(y)
    part = np.random.RandomState(1).rand(len(rows)) // CALIBRATION
    nets, off, seen = [], [], []
    for i in range(NETS):
        net = train(inputs, target, rows[part != i], seed=i)
        with torch.no_grad():
            found = base * np.exp(np.clip(net(inputs)[:, 0].numpy(), -1.5, 1.5))
        apart = rows[part == i]
        off.append((found[apart], np.log(system.seconds[apart] / found[apart])))
        seen.append(errors(found[rows[part != i]], system.seconds[rows[part != i]])["mean"])
        nets.append(_layers(net, mean, std))
    low, high = (np.exp([_quantile(off, part, q) for part in range(3)]) for q in (0.1, 0.9))
    unseen = np.concatenate([log for _, log in off])
    table = {
        "law": errors(base[rows], system.seconds[rows])["mean"],
        "one net, rows kept apart": float(np.abs(np.exp(-unseen) - 1).mean()),
        "one net, rows fitted to": float(np.mean(seen)),
    }
    print(system.name, {key: f"{100 * value:.2f}" for key, value in table.items()}, flush=True)
    return {"theta": theta, "weights": _side_by_side(nets), "low": low, "high": high}, table


def train(inputs: Any, target: Any, rows: npt.NDArray[np.int64], seed: int) -> Any:
    """A net fitted to some rows."""
    import torch

    torch.manual_seed(seed)
    rng = np.random.RandomState(seed)
    layers: list[Any] = []
    for i in range(LAYERS):
        layers += [torch.nn.Linear(inputs.shape[1] if i == 0 else WIDTH, WIDTH), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=EPOCHS * -(-len(rows) // BATCH))
    for _ in range(EPOCHS):
        order = rng.permutation(rows)
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            loss = torch.tanh((net(inputs[batch])[:, 0] - target[batch]).abs() / 2).mean()  # |t - p| / (t + p)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            plan.step()
    return net


def _layers(net: Any, mean: npt.NDArray[Any], std: npt.NDArray[Any]) -> list[tuple[Floats, Floats]]:
    """Weights [inputs, outputs] and biases; standardising goes into the first."""
    found = []
    for layer in net:
        if hasattr(layer, "weight"):
            found.append(
                (layer.weight.detach().numpy().T.astype(np.float64), layer.bias.detach().numpy().astype(float))
            )
    first = found[0][0] / std[:, None]
    return [(first, found[0][1] - mean @ first), *found[1:]]


def _side_by_side(nets: list[list[tuple[Floats, Floats]]]) -> list[tuple[npt.NDArray[np.float32], ...]]:
    """Layers [nets, inputs, outputs] and [nets, outputs]."""
    return [
        tuple(np.stack([net[i][j] for net in nets]).astype(np.float32) for j in range(2)) for i in range(LAYERS + 1)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemm", type=Path, default=SHARED / "gemm" / "gemm_bf16.parquet")
    parser.add_argument("--devices", type=Path, default=SHARED / "hardware" / "hardware.csv")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    given = parser.parse_args()
    systems, notes = read(given.gemm, given.devices)
    for note in notes:
        print(note, file=sys.stderr)
    found, left_out = transfer(systems)
    names = list(found["theta"])
    arrays: dict[str, Any] = {
        "names": np.array(names),
        "theta": np.array([found["theta"][name] for name in names]),
        "spread": np.array([found["spread"].get(name, 0.0) for name in names]),
        "low": found["low"],
        "high": found["high"],
        "counts": np.array(COUNTS),
        "trained_on": np.array([systems[name].device.short for name in TRAINING if name in systems]),
        "known": np.array([each.device.short for each in systems.values()]),
    }
    tables = {}
    for system in systems.values():
        short = system.device.short
        model, tables[system.name] = known(system)
        arrays[f"{short}.theta"] = np.array([model["theta"][name] for name in names])
        arrays[f"{short}.low"], arrays[f"{short}.high"] = model["low"], model["high"]
        arrays[f"{short}.layers"] = np.array(len(model["weights"]))
        for i, (weight, bias) in enumerate(model["weights"]):
            arrays[f"{short}.w{i}"], arrays[f"{short}.b{i}"] = weight, bias
    given.out.parent.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write_bytes(given.out, packed.getvalue())
    report = {
        "data": given.gemm.name,
        "date": today(),
        "triples": fingerprint(systems),
        "law fitted to": [name for name in TRAINING if name in systems],
        "law, mean and median error by measured products of the GPU left out": left_out["left out"],
        "shifts of the training GPUs": left_out["device shifts"],
        "parameters": {name: round(value, 4) for name, value in found["theta"].items()},
        "deviations between GPUs": {name: round(value, 4) for name, value in found["spread"].items()},
        "nets": tables,
    }
    write_bytes(given.out.with_suffix(".json"), json.dumps(report, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
