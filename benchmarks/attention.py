"""Rates of fused attention in a public table, and the law of `cost/devices/attention.py` on them.

    python benchmarks/attention.py

Forward passes of aiconfigurator's tables (docs/systems.md), found by FORETRACE_SHARED_DATA: causal, 16 bit, large
enough to be bound by arithmetic. The law's two constants are least squares on every second length; the error is that on
the others.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from foretrace.cost.devices.attention import EDGE, SHARE
from foretrace.hardware.devices import named

LARGE = 2e11  # FLOPs


def main() -> None:
    """Print it."""
    data = Path(os.environ["FORETRACE_SHARED_DATA"]) / "serving" / "aiconfigurator"
    for folder, device in (("a100_sxm", "a100"), ("h100_sxm", "h100")):
        for path in sorted(data.glob(f"{folder}/**/context_attention*.parquet")):
            table = pq.read_table(path)
            column = {name: np.array(table.column(name).to_pylist()) for name in table.column_names}
            keep = (column["head_dim"] == 128) & (column["attn_dtype"] == "bfloat16")
            if "window_size" in column:
                keep &= column["window_size"] == 0
            keys = column["isl"].astype(float)
            flops = 4.0 * column["batch_size"] * column["num_heads"] * keys**2 * 128
            keep &= (flops > LARGE) & (keys >= 512)
            rate = flops[keep] / (column["latency"][keep] * 1e-3) / (named(device).bf16_tflops * 1e12) / 2
            x, lengths = keys[keep], np.unique(keys[keep])
            train = np.isin(x, lengths[::2])
            # 1 / rate = (1 + edge / keys) / share
            matrix = np.stack([np.ones(train.sum()), 1 / x[train]], axis=1) * rate[train][:, None]
            (one, edge), *_ = np.linalg.lstsq(matrix, np.ones(int(train.sum())), rcond=None)
            error = rate[~train] * (one + edge / x[~train]) - 1
            shipped = rate * (1 + EDGE / x) / SHARE - 1
            print(
                f"{path.parent.parent.name}/{path.parent.name} on {device}: {keep.sum()} calls; share {1 / one:.2f}, "
                f"edge {edge / one:.0f} keys; other lengths {np.mean(np.abs(error)):.1%} mean, "
                f"{np.percentile(error, 10):+.0%} to {np.percentile(error, 90):+.0%}; the law with the constants of "
                f"Ampere {np.mean(shipped):+.0%}"
            )


if __name__ == "__main__":
    main()
