"""How many kernels per second the learned predictor answers on one core, against torch on the same nets.

    python benchmarks/predictors.py [rows]

Both take the same features and run in the same process in turns, in seconds of the thread's own processor time; the
figure that counts is the ratio, the rate is that of this machine. "products" and "vector" are the whole answer of
`Fp32` (features, nets and laws, numpy alone), the other two the nets only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from foretrace.cost.devices.learned import fp32
from foretrace.hardware.devices import named
from tables import load, machine

ROUNDS = 7


def measure(rows: int) -> dict[str, float | str]:
    """Rates in predictions per second: the median of rounds that take turns."""
    import torch

    torch.set_num_threads(1)
    rng = np.random.RandomState(0)
    b, m, k, n = (np.exp2(rng.uniform(0, 12, rows)) // 1 + 1 for _ in range(4))
    b, linear = np.ones(rows), np.ones(rows)
    op = rng.randint(0, len(fp32.VECTOR_OPS), rows)
    on = fp32.board(named("h100-sxm5"))
    if on is None:
        raise AssertionError("the H100 is a known board")
    model = fp32.shipped()
    nets = model.product
    features = fp32.product_features(b, m, k, n, linear, on.sms)
    halves = (nets.first, nets.first_bias, nets.hidden, nets.hidden_bias.reshape(nets.nets, 1, -1))
    tensors = [torch.from_numpy(2 * each) for each in halves]  # see `Ensemble`
    last, last_bias, inputs = (torch.from_numpy(each) for each in (nets.last, nets.last_bias, features))

    def by_torch() -> None:
        first, first_bias, hidden, hidden_bias = tensors
        with torch.inference_mode():
            for part in inputs.split(65536):
                x = torch.nn.functional.silu(torch.addmm(first_bias, part, first))
                wide = x.view(len(part), nets.nets, -1).transpose(0, 1)
                wide = torch.nn.functional.silu(torch.baddbmm(hidden_bias, wide, hidden))
                torch.addmm(last_bias, wide.transpose(0, 1).reshape(len(part), -1), last)

    jobs: dict[str, Callable[[], object]] = {
        "products": lambda: model.product_s(b, m, k, n, linear, on),
        "products_nets_only": lambda: nets(features),
        "vector": lambda: model.vector_s(op, m, n, 8 * m * n, on),
        "products_nets_torch": by_torch,
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(ROUNDS):
        for name, job in jobs.items():
            begin = time.thread_time()
            job()
            times[name].append(time.thread_time() - begin)
    found: dict[str, float | str] = {name: round(rows / float(np.median(each))) for name, each in times.items()}
    ratios = [slow / fast for slow, fast in zip(times["products_nets_torch"], times["products_nets_only"], strict=True)]
    found["nets_against_torch"] = round(float(np.median(ratios)), 2)
    found["machine"] = f"{machine()}, one thread, load {load()}"
    return found


def main(given: Sequence[str]) -> int:
    print(json.dumps(measure(int(given[0]) if given else 1_000_000), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
