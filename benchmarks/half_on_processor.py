"""What 16-bit operators take on this processor relative to float32, by what oneDNN may use of it.

    python benchmarks/half_on_processor.py            # all settings that this processor has, some minutes
    python benchmarks/half_on_processor.py --one      # this process as it is

A child process per setting of ONEDNN_MAX_CPU_ISA (oneDNN reads it once), one thread, CPU time, shortest of repeats.
Gains are float32 time over 16-bit time: lowest, median and highest of the sizes of a class. The priors of
`foretrace.techniques.compute.half_prices` are read from this table.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

SETTINGS = ("", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2")
TYPES = ("bfloat16", "float16")
_SECONDS = 0.25  # per call and type


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", action="store_true", help="this process only")
    if parser.parse_args().one:
        one()
        return
    for setting in SETTINGS:
        environment = {key: value for key, value in os.environ.items() if not key.endswith("_MAX_CPU_ISA")}
        # ATen's own kernels follow: what is wanted is a processor that has no more.
        aten = {"ATEN_CPU_CAPABILITY": "avx2"} if setting == "AVX2" else {}
        extra = {"OMP_NUM_THREADS": "1", **({"ONEDNN_MAX_CPU_ISA": setting} if setting else {}), **aten}
        subprocess.run([sys.executable, __file__, "--one"], env=environment | extra, check=True)


def one() -> None:
    """Print the table of this process."""
    import torch

    from foretrace.hardware import processor

    torch.set_num_threads(1)
    sets = processor.instruction_sets()
    print(f"\n{processor.named(sets)}, PyTorch {torch.__version__}, one thread")
    print(f"  {'class':<14} {'type':<9} {'calls':>5} {'lowest':>8} {'median':>8} {'highest':>8}")
    gains: dict[tuple[str, str], list[float]] = {}
    for family, call, tensors in calls():
        for name in TYPES:
            dtype = getattr(torch, name)
            with torch.no_grad():
                before = shortest(call, tensors)
                try:
                    after = shortest(call, [each.to(dtype) for each in tensors])
                except RuntimeError as error:
                    print(f"  {family:<14} {name:<9} cannot run: {str(error).splitlines()[0][:80]}")
                    continue
            gains.setdefault((family, name), []).append(before / after)
    for (family, name), found in gains.items():
        print(
            f"  {family:<14} {name:<9} {len(found):>5} {min(found):>8.3g} {median(found):>8.3g} {max(found):>8.3g}",
            flush=True,
        )


def calls() -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """(class, call, float32 tensors) in a few sizes each."""
    import torch

    aten, found = torch.ops.aten, list[tuple[str, Callable[..., Any], list[Any]]]()

    def random(*size: int) -> Any:
        return torch.rand(size) + 0.01

    for m, k, n in ((16, 64, 64), (64, 64, 64)):
        found.append(("gemm, small", torch.mm, [random(m, k), random(k, n)]))
    for m, k, n in (
        (128, 128, 512),
        (64, 512, 512),
        (256, 256, 256),
        (256, 512, 1024),
        (512, 768, 768),
        (16, 1024, 1024),
    ):
        found.append(("gemm", torch.mm, [random(m, k), random(k, n)]))
    for b, m, k, n in ((16, 64, 32, 64), (16, 128, 64, 128)):
        found.append(("bmm", torch.bmm, [random(b, m, k), random(b, k, n)]))
    for c, o, kernel, side, groups in ((3, 32, 3, 32, 1), (32, 32, 3, 32, 1), (64, 64, 3, 16, 1), (256, 256, 3, 8, 1),
                                       (64, 256, 1, 16, 1), (48, 48, 3, 16, 48)):  # fmt: skip
        x, w, y = random(8, c, side, side), random(o, c // groups, kernel, kernel), random(8, o, side, side)
        pad = [kernel // 2] * 2
        rest = ([1, 1], pad, [1, 1], False, [0, 0], groups)
        found.append(("conv", lambda x, w, rest=rest: aten.convolution(x, w, None, *rest), [x, w]))
        back = (*rest, [True, True, False])
        found.append(
            ("conv backward", lambda y, x, w, back=back: aten.convolution_backward(y, x, w, None, *back), [y, x, w])
        )
    for b, h, m, d in ((4, 8, 64, 32), (4, 4, 256, 64), (1, 12, 512, 64)):
        q = random(b, h, m, d)
        found.append(("attention", lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q), [q]))

        def backward(q: Any) -> Any:
            out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(q, q, q, q, out, sums, 0.0, False)

        found.append(("attention f+b", backward, [q]))
    for n, c, side in ((16, 32, 32), (8, 256, 8)):
        x, w = random(n, c, side, side), torch.ones(c)
        found.append(("batch norm", lambda x, w=w: aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5), [x]))
    for n in (4096, 65_536, 1 << 20):
        a, b = random(n), random(n)
        found.append(("elementwise", torch.add, [a, b]))
        found.append(("elementwise", lambda a, b: torch.mul(a, b, out=a), [torch.ones(n), torch.ones(n)]))
        found.append(("elementwise", torch.nn.functional.gelu, [a]))
        found.append(("elementwise", torch.relu, [a]))
    found.append(("softmax", lambda x: torch.softmax(x, -1), [random(256, 256)]))
    return found


def shortest(call: Callable[..., Any], tensors: list[Any]) -> float:
    """CPU seconds of the shortest call within the time that each gets."""
    call(*tensors)
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while True:
        began = time.thread_time()
        call(*tensors)
        best = min(best, time.thread_time() - began)
        if time.perf_counter() > end:
            return best


if __name__ == "__main__":
    main()
