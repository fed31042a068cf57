"""Fit the predictor of 16-bit products to a table of measured ones and write the weights that the package ships.

    python benchmarks/train_gemm16.py [--gemm FILE] [--devices FILE] [--out FILE] [--keep-nets]

Two things are made. The *laws* for GPUs that nobody measured, and what a few measurements there say, are fitted to all
GPUs of the table; leaving each family of them out in turn gives the errors and the 80 % ranges, with nothing and with
a few products measured (`transfer_gemm16.py`). The *nets* of GPUs that were measured are fitted to the triples that
P2a does not hold out; each net leaves another tenth of those out, which sets their ranges; --keep-nets leaves them as
the file has them. Deterministic; minutes on one core; PyTorch for the nets and for the likelihood.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.devices.learned import gemm16_law as law
from foretrace.cost.devices.learned.gemm16 import features
from foretrace.files import write_bytes
from gemm16_fit import fit_together
from gemm_table import System, fingerprint, read
from tables import ROOT, today
from transfer_gemm16 import FOLLOW, errors, quantile, sample, transfer

Floats = npt.NDArray[np.float64]
SHARED = Path(os.environ.get("FORETRACE_SHARED_DATA", ROOT.parent / "shared" / "data"))
WEIGHTS = ROOT / "src" / "foretrace" / "cost" / "devices" / "learned" / "gemm16.npz"
LAW_ROWS = 3000  # of a GPU, for the law that its nets correct
NETS, CALIBRATION = 2, 0.1  # nets of a GPU; the share of rows, another for each, that it does not see: for ranges
WIDTH, LAYERS, EPOCHS, BATCH, RATE, DECAY = 64, 3, 100, 512, 4e-3, 1e-3


def known(system: System) -> tuple[dict[str, Any], dict[str, float]]:
    """Law and net of one measured GPU, from the triples that are not held out."""
    import torch

    torch.set_num_threads(1)
    rows = np.flatnonzero(~system.held_out)
    theta, (shift,) = fit_together(
        law.START | FOLLOW, [system.measured(sample(system, rows, LAW_ROWS))], {"compute": 0.01}
    )
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
    low, high = (np.exp([quantile(off, part, q) for part in range(3)]) for q in (0.1, 0.9))
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


def _kept(path: Path, triples: str, shorts: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Nets and their table from an earlier run on the same triples."""
    report = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if report["triples"] != triples:
        raise SystemExit(f"{path} was trained on other triples; leave --keep-nets out.")
    with np.load(path, allow_pickle=False) as stored:
        own = {name: stored[name] for name in stored.files if name.rpartition(".")[0] in shorts}
    return own, report["nets"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemm", type=Path, default=SHARED / "gemm" / "gemm_bf16.parquet")
    parser.add_argument("--devices", type=Path, default=SHARED / "hardware" / "hardware.csv")
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--keep-nets", action="store_true", help="take the nets of measured GPUs from --out")
    given = parser.parse_args()
    systems, notes = read(given.gemm, given.devices)
    for note in notes:
        print(note, file=sys.stderr)
    shorts = [each.device.short for each in systems.values()]
    if given.keep_nets:
        nets, tables = _kept(given.out, fingerprint(systems), shorts)
    arrays, found = transfer(systems)
    names = list(found["theta"])
    if not given.keep_nets:
        nets, tables = {}, {}
        for system in systems.values():
            short = system.device.short
            model, tables[system.name] = known(system)
            nets[f"{short}.theta"] = np.array([model["theta"][name] for name in names])
            nets[f"{short}.low"], nets[f"{short}.high"] = model["low"], model["high"]
            nets[f"{short}.layers"] = np.array(len(model["weights"]))
            for i, (weight, bias) in enumerate(model["weights"]):
                nets[f"{short}.w{i}"], nets[f"{short}.b{i}"] = weight, bias
    arrays |= nets | {"known": np.array(shorts)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write_bytes(given.out, packed.getvalue())
    report = {
        "data": given.gemm.name,
        "date": today(),
        "triples": fingerprint(systems),
        "law fitted to": list(systems),
        "families left out": "each GPU with all of its family; ranges come from the other families",
        "law, error by measured products of the GPU left out": found["left out"],
        "parameters": {name: round(value, 4) for name, value in found["theta"].items()},
        "deviations between GPUs": {name: round(value, 4) for name, value in found["spread"].items()},
        "covariance, logarithms": [round(value, 3) for value in arrays["hyper"].tolist()],
        "nets": tables,
    }
    write_bytes(given.out.with_suffix(".json"), json.dumps(report, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
