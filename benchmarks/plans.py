"""Plans for some models on some machines, with equal and unequal stages: the table of docs/plans.md.

python benchmarks/plans.py [--write]
"""

from __future__ import annotations

import argparse
import re
import time

from foretrace.files import write_text
from foretrace.plan.transformers.alpa import unequal_stages
from foretrace.plan.transformers.plan import plan_decoder
from tables import ROOT, table, today

PAGE = ROOT / "docs" / "plans.md"
CASES = (  # model, device, how many, samples of a step, GB/s between nodes (0: the catalog's)
    ("llama-2-7b", "a100-40gb", 24, 96, 1.25), ("llama-3-8b", "h100", 12, 48, 1.25),
    ("qwen2.5-72b", "h100", 64, 256, 2.0), ("gpt3-175b", "a100-80gb", 96, 384, 0.0),
    ("llama-3-405b", "h100", 256, 512, 2.0), ("llama-3-405b", "h100", 256, 512, 0.0),
)  # fmt: skip


def rows() -> list[tuple[str, ...]]:
    """One per case."""
    found = list[tuple[str, ...]]()
    unequal_stages(plan_decoder("gpt2-xl", devices=2, device="a100", batch=2).space)  # loads what is compiled
    for model, device, devices, batch, network in CASES:
        plan = plan_decoder(model, devices=devices, device=device, batch=batch, network_gb_s=network)
        begin = time.process_time()
        unequal = unequal_stages(plan.space)
        spent = time.process_time() - begin
        best = plan.simulated_s(plan.configuration)
        layers = ", ".join(str(each.layers) for each in unequal.stages)
        found.append((
            f"{model}, {devices} × {device}, {plan.space.on.network / 1e9:g} GB/s, batch {batch}",
            f"{best:.3g}" if best else "–", f"{unequal.equal_s:.4g}", f"{unequal.step_s:.4g}",
            f"{100 * (unequal.equal_s / unequal.step_s - 1):.1f}", layers, f"{spent:.1f}",
        ))  # fmt: skip
    return found


def rate() -> str:
    """How many configurations are timed per CPU-second, without and with what each loses by."""
    space = plan_decoder("gpt3-175b", devices=3072, device="a100-80gb", batch=9216).space
    found = list[str]()
    for timed in (space.sweep, space.search):
        begin = time.process_time()
        valid = timed(256).valid
        found.append(f"{valid / (time.process_time() - begin) / 1e6:.0f}")
    return (
        f"The {valid:,} configurations of gpt3-175b, 3072 × a100-80gb, batch 9216, are timed at {found[0]} million per "
        f"CPU-second, and at {found[1]} with the part of the step by which each loses."
    )


def section() -> str:
    """What stands between the marks of the page."""
    header = ("model", "best of all, s", "equal stages, s", "unequal, s", "gain, %", "layers", "CPU s")
    return (
        f"*{today()}, simulated steps, `python benchmarks/plans.py --write`; the best of all may have virtual stages.*"
        f"\n\n{table(header, rows())}\n\n{rate()}\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    text = section()
    print(text)
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        marks = r"(<!-- tables -->\n).*?(<!-- end -->)"
        write_text(PAGE, re.sub(marks, lambda found: f"{found[1]}{text}{found[2]}", page, flags=re.DOTALL))
