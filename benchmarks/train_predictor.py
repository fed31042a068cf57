"""Train the float32 predictor of `foretrace.cost.devices.learned` and write its weights; minutes on one core.

    python benchmarks/train_predictor.py [kernels.csv.gz] [--no-logo] [--dry] [--ablation] [name=value ...]

Reads rows of split "train" of the five training GPUs, nothing else. Drops the linear rows of devices that
`kernel_table.mismeasured` names. Leaves every GPU out once (LOGO): its errors, and the residuals that intervals come
from, are stored with the weights. `name=value` sets a field of `Setting`, `--dry` writes nothing, `--ablation` writes
LOGO's errors with this setting beside the others in `benchmarks/data/predictor_ablations.json` and no weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isolated
import left_out
from foretrace.cost.devices.learned import fp32
from foretrace.files import write_bytes
from kernel_table import TRAINING, Floats, Kernels, boards, mismeasured, read
from tables import ROOT, today

KERNELS = ROOT.parent / "shared" / "data" / "kernels" / "kernels.csv.gz"
ABLATIONS = ROOT / "benchmarks" / "data" / "predictor_ablations.json"
FOLDER = ROOT / "src" / "foretrace" / "cost" / "devices" / "learned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Every choice; the values are those that LOGO and physics gave."""

    nets: int = 4
    width: int = 24
    epochs: int = 10
    batch: int = 2048
    rate: float = 4e-3
    decay: float = 1e-2
    cmd: float = 0.0  # weight of the domain regulariser on the second hidden layer
    generation: bool = True  # two offsets of efficiency per generation of the kernel library
    power: bool = True
    window_s: float = 0.7e-3  # T4 against V100 on the same shapes: the ratio falls around 0.7 ms by 1.3 per e-fold
    window_slope: float = 1.3
    drop: bool = True
    seed: int = 0


class Nets(torch.nn.Module):
    """`nets` independent nets side by side: SiLU, two hidden layers; the last starts at zero."""

    def __init__(self, features: Floats, outputs: int, setting: Setting) -> None:
        super().__init__()
        inputs, width, nets = features.shape[1], setting.width, setting.nets
        self.register_buffer("mean", torch.tensor(features.mean(axis=0), dtype=torch.float32))
        self.register_buffer("std", torch.tensor(features.std(axis=0) + 1e-6, dtype=torch.float32))
        self.w0 = torch.nn.Parameter((torch.rand(nets, inputs, width) * 2 - 1) / inputs**0.5)
        self.b0 = torch.nn.Parameter((torch.rand(nets, 1, width) * 2 - 1) / inputs**0.5)
        self.w1 = torch.nn.Parameter((torch.rand(nets, width, width) * 2 - 1) / width**0.5)
        self.b1 = torch.nn.Parameter((torch.rand(nets, 1, width) * 2 - 1) / width**0.5)
        self.w2 = torch.nn.Parameter(torch.zeros(nets, width, outputs))
        self.b2 = torch.nn.Parameter(torch.zeros(nets, 1, outputs))

    mean: torch.Tensor
    std: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([nets, rows, outputs], last hidden layer) of raw features [rows, inputs]."""
        x = (x - self.mean) / self.std
        hidden = torch.nn.functional.silu(torch.matmul(x, self.w0) + self.b0)
        hidden = torch.nn.functional.silu(torch.matmul(hidden, self.w1) + self.b1)
        return torch.matmul(hidden, self.w2) + self.b2, hidden

    def arrays(self, prefix: str) -> dict[str, np.ndarray[Any, Any]]:
        """What `nets.Ensemble.of` reads."""
        found = {name: getattr(self, name).detach().numpy() for name in ("w0", "w1", "w2", "mean", "std")}
        found |= {name: getattr(self, name).detach().numpy()[:, 0] for name in ("b0", "b1", "b2")}
        return {f"{prefix}.{name}": np.asarray(value, dtype=np.float32) for name, value in found.items()}


class Law(torch.nn.Module):
    """What products and vector operators have in common: memory, and how an isolated measurement comes about."""

    def __init__(self, kernels: Kernels, operators: int, outputs: int, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.nets = Nets(features(kernels), outputs, setting)
        self.dram = torch.nn.Parameter(torch.tensor([1.3, 0.8, 0.8]))
        self.host = torch.nn.Parameter(torch.full((len(TRAINING), operators), float(np.log(30e-6))))
        self.launch = torch.nn.Parameter(torch.full((operators,), float(np.log(10e-6))))
        self.offset = torch.nn.Parameter(torch.zeros(len(fp32.GENERATIONS), 2))

    def isolated(self, device: torch.Tensor, c: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log of what a measurement of one kernel shows, from the log of its time on the device."""
        shown = torch.logaddexp(device, self.launch[c["op"]])
        p = isolated.MEASURED_SHARPNESS
        return torch.logaddexp(p * shown, p * self.host[c["device"], c["op"]]) / p


class Product(Law):
    def device_s(self, c: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log seconds on the device [nets, rows], hidden layer)."""
        out, hidden = self.nets(c["features"])
        if self.setting.generation:
            out = out + self.offset[c["generation"]]
        log_sigmoid = torch.nn.functional.logsigmoid
        compute = c["compute"] - log_sigmoid(out[..., 0] + fp32.COMPUTE_BIAS)
        memory = c["memory"] - log_sigmoid(out[..., 1] + fp32.MEMORY_BIAS) - log_sigmoid(self.dram[c["dram"]])
        p = fp32.SHARPNESS
        free = torch.logaddexp(p * compute, p * memory) / p
        if not self.setting.power:
            return free, hidden
        capped = torch.logaddexp(p * free, p * c["power"]) / p
        begun = torch.sigmoid(self.setting.window_slope * (free - float(np.log(self.setting.window_s))))
        return free + begun * (capped - free), hidden


class Vector(Law):
    def device_s(self, c: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log seconds on the device [nets, rows], hidden layer)."""
        out, hidden = self.nets(c["features"])
        log_sigmoid = torch.nn.functional.logsigmoid
        share = float(np.log(2.0)) + log_sigmoid(out[..., 0]) + log_sigmoid(self.dram[c["dram"]])
        return c["memory"] - share, hidden


def features(kernels: Kernels) -> Floats:
    """Inputs of the nets, by the very functions that inference uses."""
    if kernels.k.any():
        sms = np.array([each.sms for each in boards(kernels.devices)], dtype=np.float64)[kernels.device]
        linear = kernels.op.astype(np.float64)
        return fp32.product_features(kernels.b, kernels.m, kernels.k, kernels.n, linear, sms).astype(np.float64)
    return fp32.vector_features(kernels.op, kernels.m, kernels.n).astype(np.float64)


def columns(kernels: Kernels, seen: Sequence[int]) -> dict[str, torch.Tensor]:
    """Tensors of all rows; a kind of memory or library that no seen device has counts as the first that is seen."""
    on = boards(kernels.devices)
    generation = [each.generation for each in on]
    dram = [each.dram for each in on]
    have = {dram[i] for i in seen}

    def pick(values: list[float]) -> Floats:
        return np.array(values, dtype=np.float64)[kernels.device]

    found: dict[str, Any] = {
        "features": features(kernels),
        "memory": np.log(kernels.nbytes / pick([each.bytes_per_s for each in on])),
        "target": np.log(kernels.seconds),
    }
    if kernels.k.any():
        tile = fp32.ENERGY_TILE
        padded = 2 * kernels.b * kernels.k * tile**2 * np.ceil(kernels.m / tile) * np.ceil(kernels.n / tile)
        found["compute"] = np.log(kernels.flops / pick([each.peak_flops * each.issue for each in on]))
        found["power"] = np.log(padded * pick([each.joule_per_flop / each.budget_w for each in on]))
    tensors = {name: torch.tensor(value, dtype=torch.float32) for name, value in found.items()}
    whole = {
        "op": kernels.op,
        "device": kernels.device,
        "dram": np.array([each if each in have else 0 for each in dram])[kernels.device],
        "generation": np.array(generation)[kernels.device],
    }
    return tensors | {name: torch.tensor(value, dtype=torch.int64) for name, value in whole.items()}


def fit(kind: type[Law], kernels: Kernels, seen: Sequence[int], setting: Setting, target: Kernels | None = None) -> Law:
    """Train one law on the rows of the seen devices; `target` gives features of an unseen device, for CMD."""
    torch.manual_seed(setting.seed)
    rng = np.random.RandomState(setting.seed)
    rows = kernels.take(np.isin(kernels.device, seen))
    law = kind(rows, int(kernels.op.max()) + 1, 2 if kind is Product else 1, setting)
    data = columns(rows, seen)
    other = columns(target, seen)["features"] if target is not None and setting.cmd > 0 else None
    steps = -(-len(rows) // setting.batch)
    optimizer = torch.optim.AdamW(law.parameters(), lr=setting.rate, weight_decay=setting.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setting.rate, total_steps=steps * setting.epochs)
    for _ in range(setting.epochs):
        order = rng.permutation(len(rows))
        for i in range(steps):
            at = torch.tensor(order[i * setting.batch : (i + 1) * setting.batch])
            batch = {name: column[at] for name, column in data.items()}
            device, hidden = law.device_s(batch)  # type: ignore[operator]  # each kind of law has its own
            error = law.isolated(device, batch) - batch["target"]
            loss = torch.tanh(error.abs() / 2).mean(dim=1).sum()  # |t - p| / (t + p)
            if other is not None:
                from reproductions.cdmpp.cmd import cmd_torch

                _, far = law.nets(other[torch.tensor(rng.randint(0, len(other), len(at)))])
                loss = loss + setting.cmd * sum(
                    cmd_torch(torch.tanh(hidden[net]), torch.tanh(far[net])) for net in range(setting.nets)
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    _settle(law, seen, rows)
    return law


def _settle(law: Law, seen: Sequence[int], rows: Kernels) -> None:
    """Give what was never seen the values of what is nearest: library generations, kinds of memory, hosts."""
    with torch.no_grad():
        on = boards(rows.devices)
        have = {on[i].generation for i in seen}
        for i in range(len(fp32.GENERATIONS)):
            if i not in have:
                law.offset[i] = law.offset[sorted(have)].mean(dim=0)
        drams = {on[i].dram for i in seen}
        for i in range(3):
            if i not in drams:
                law.dram[i] = law.dram[0]
        for i in range(len(TRAINING)):
            if i not in seen:
                law.host[i] = law.host[list(seen)].mean(dim=0)


def predict(law: Law, kernels: Kernels, seen: Sequence[int]) -> Floats:
    """Seconds that isolated measurements show, mean over nets in the logarithm."""
    with torch.no_grad():
        data = columns(kernels, seen)
        device, _ = law.device_s(data)  # type: ignore[operator]
        return np.exp(law.isolated(device, data).mean(dim=0).numpy().astype(np.float64))


def bags(products: Kernels, vectors: Kernels, p: Floats, v: Floats, count: int = 300) -> Floats:
    """Errors of pseudo-networks: random bags of large kernels, whose families share time as in the op graphs."""
    rng = np.random.RandomState(0)
    large = products.flops > 2e9
    linear, bmm = (np.flatnonzero(large & (products.op == op)) for op in (1, 0))
    wide = np.flatnonzero(vectors.nbytes > 16e6)
    errors = np.empty(count)
    for i in range(count):
        total = 0.0
        for rows, said, true, share, number in (
            (linear if len(linear) else bmm, p, products.seconds, 0.75, 12), (bmm, p, products.seconds, 0.08, 4),
            (wide, v, vectors.seconds, 0.17, 40),
        ):  # fmt: skip
            at = rng.choice(rows, number)
            total += share * said[at].sum() / true[at].sum()
        errors[i] = total - 1
    return errors


def groups(kernels: Kernels) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Index into `fp32.GROUPS` per row."""
    if kernels.k.any():
        return kernels.op
    return np.where(kernels.op >= len(fp32.VECTOR_OPS) - len(fp32.ROW_OPS), 3, 2).astype(np.int64)


def leave_one_out(products: Kernels, vectors: Kernels, setting: Setting) -> dict[str, Any]:
    """Train without each device in turn, predict it: errors in %, and the intervals that its residuals give."""
    table: dict[str, dict[str, float]] = {}
    group, said_s, true_s, networks = list[Any](), list[Floats](), list[Floats](), list[Floats]()
    for held, name in enumerate(TRAINING):
        seen = [i for i in range(len(TRAINING)) if i != held]
        p, v = products.take(products.of(held)), vectors.take(vectors.of(held))
        said_p = predict(fit(Product, products, seen, setting, p), p, seen)
        said_v = predict(fit(Vector, vectors, seen, setting, v), v, seen)
        errors = bags(p, v, said_p, said_v)
        big, wide = p.flops > 2e9, v.nbytes > 16e6
        row = {"networks": np.abs(errors).mean(), "networks_signed": errors.mean()}
        for label, rows in (("bmm", big & (p.op == 0)), ("linear", big & (p.op == 1))):
            if rows.any():  # linear rows of some devices were dropped
                row[label] = np.abs(said_p / p.seconds - 1)[rows].mean()
        row["vector"] = np.abs(said_v / v.seconds - 1)[wide].mean()
        row["products_all"] = np.abs(said_p / p.seconds - 1).mean()
        row["vector_all"] = np.abs(said_v / v.seconds - 1).mean()
        table[name] = {key: round(100 * float(value), 2) for key, value in row.items()}
        print(f"  {name}: {table[name]}", file=sys.stderr, flush=True)
        group.append(np.concatenate([groups(p), groups(v)]))
        said_s.append(np.concatenate([said_p, said_v]))
        true_s.append(np.concatenate([p.seconds, v.seconds]))
        networks.append(-np.log1p(errors))
    low, high = left_out.weighted_quantiles(networks)
    return {
        "table": table,
        "mean_networks": round(float(np.mean([row["networks"] for row in table.values()])), 2),
        "intervals": left_out.table(group, said_s, true_s),
        "network_interval": [float(np.exp(low)), float(np.exp(high))],
    }


def arrays(product: Law, vector: Law, setting: Setting) -> dict[str, np.ndarray[Any, Any]]:
    """What `fp32.of_arrays` reads. Held-out devices run the newest library: its offsets go into the last bias."""
    newest = product.offset[-1].detach().numpy()
    found = product.nets.arrays("product") | vector.nets.arrays("vector")
    found["product.b2"] = found["product.b2"] + newest[None, :] * setting.generation
    for prefix, law in (("product", product), ("vector", vector)):
        found[f"{prefix}.dram"] = torch.nn.functional.logsigmoid(law.dram).detach().numpy().astype(np.float64)
        found[f"{prefix}.host_s"] = np.exp(law.host.detach().numpy().mean(axis=0)).astype(np.float64)
        found[f"{prefix}.launch_s"] = np.exp(law.launch.detach().numpy()).astype(np.float64)
    found["product.offset"] = (product.offset - product.offset[-1]).detach().numpy().astype(np.float64)
    found["window_s"], found["window_slope"] = np.array(setting.window_s), np.array(setting.window_slope)
    return found


def main(given: Sequence[str]) -> int:
    torch.set_num_threads(1)
    flags = {each for each in given if each.startswith("--")}
    values = dict(each.split("=", 1) for each in given if "=" in each)
    paths = [Path(each) for each in given if "=" not in each and not each.startswith("--")]
    if unknown := flags - {"--no-logo", "--dry", "--ablation"} | values.keys() - asdict(Setting()).keys():
        print(f"there is no {', '.join(sorted(unknown))}; see the head of this file", file=sys.stderr)
        return 2
    if {"--ablation", "--no-logo"} <= flags:
        print("an ablation is what leaving devices out shows; leave --no-logo away", file=sys.stderr)
        return 2
    setting = replace(Setting(), **{key: type(getattr(Setting(), key))(json.loads(v)) for key, v in values.items()})
    path = paths[0] if paths else KERNELS
    begin = time.perf_counter()
    products, vectors = read(path, "train", TRAINING)
    peaks = np.array([each.peak_flops for each in boards(TRAINING)])
    dropped = mismeasured(products, peaks) if setting.drop else []
    products = products.take(~((products.op == 1) & np.isin(products.device, dropped)))
    names = [TRAINING[i] for i in dropped]
    print(
        f"{len(products):,} products, {len(vectors):,} vector operators; linear rows dropped: {names}", file=sys.stderr
    )
    facts: dict[str, Any] = {
        "data": path.name, "split": "train", "devices": list(TRAINING), "date": today(), "setting": asdict(setting),
        "rows": {"products": len(products), "vector": len(vectors)}, "linear_rows_dropped": names,
    }  # fmt: skip
    if "--no-logo" not in flags:
        facts["leave_one_device_out"] = leave_one_out(products, vectors, setting)
        print(f"LOGO pseudo-networks {facts['leave_one_device_out']['mean_networks']} %", file=sys.stderr)
    everything = list(range(len(TRAINING)))
    if "--ablation" in flags:
        known = json.loads(ABLATIONS.read_text(encoding="utf-8")) if ABLATIONS.exists() else {}
        left_out = facts["leave_one_device_out"]
        known[" ".join(f"{key}={text}" for key, text in sorted(values.items())) or "as shipped"] = {
            "date": today(), "mean_networks": left_out["mean_networks"], "table": left_out["table"]
        }  # fmt: skip
        write_bytes(ABLATIONS, (json.dumps(dict(sorted(known.items())), indent=1) + "\n").encode())
    elif "--dry" not in flags:
        product, vector = (
            fit(kind, rows, everything, setting) for kind, rows in ((Product, products), (Vector, vectors))
        )
        within: dict[str, float] = {}
        for law, rows in ((product, products), (vector, vectors)):
            error = np.abs(predict(law, rows, everything) / rows.seconds - 1)
            within |= {
                f"{fp32.GROUPS[group]} on {TRAINING[i]}": round(100 * float(np.median(error[at])), 2)
                for group in np.unique(groups(rows)).tolist()
                for i in everything
                if (at := (groups(rows) == group) & rows.of(i)).any()
            }
        facts["median_error_on_training_rows"] = within
        facts["trained_in_s"] = round(time.perf_counter() - begin, 1)
        buffer = BytesIO()
        np.savez_compressed(buffer, **arrays(product, vector, setting))  # type: ignore[arg-type]
        write_bytes(FOLDER / fp32.WEIGHTS, buffer.getvalue())
        write_bytes(FOLDER / fp32.FACTS, (json.dumps(facts, indent=1) + "\n").encode())
    print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
