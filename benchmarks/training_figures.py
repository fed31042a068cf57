"""Published training throughputs against `foretrace estimate`, which has seen none of these machines or runs.

    python benchmarks/training_figures.py            # the tables of docs/accuracy/trainings.md
    python benchmarks/training_figures.py --write    # puts it there

Every row is a figure that its authors measured and printed, with the recipe that they state; the estimate is asked for
that recipe, on the catalog's device. Constants of the estimate (`cost/devices/defaults.py`, `model/estimate.py`) were
chosen on the rows of LLM Foundry with eight devices; mechanisms and recipes were found with all rows in view. No
constant belongs to a row. Megatron's tables are found by FORETRACE_SHARED_DATA.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from foretrace.cli.app import run

FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
FMS = "foundation-model-stack/fms-fsdp, README.md of 2024-05 (before compiled models)"
TITAN = "pytorch/torchtitan, docs/performance.md of 2024 (FSDP2, 64 A100-80GB)"
NVIDIA = "NVIDIA/DeepLearningExamples, ConvNets/resnet50v1.5/README.md (NGC 21.03)"
MEGATRON = "Shoeybi et al., Megatron-LM, 2020, table of iteration times"
SC21 = "Narayanan et al., SC 2021, table 1"
SELECTIVE = "Korthikanti et al., 2022, table 5"
ACCURACY = Path(__file__).parent.parent / "docs" / "accuracy" / "trainings.md"
BEGIN, END = "<!-- training figures: begin -->", "<!-- training figures: end -->"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published throughput: tokens or images per second and device."""

    group: str
    model: str
    options: str
    published: float  # per device
    unit: str
    source: str
    chosen: bool = False  # looked at when constants were chosen


def foundry(device: str, gpus: int, model: str, micro: int, parts: int, tokens: float, *, length: int = 2048,
            recompute: bool = False, stage: int = 3, chosen: bool = False) -> Figure:  # fmt: skip
    """A row of LLM Foundry: Composer with FSDP, its own AdamW, which works parameter by parameter.

    Which attention ran is not said there. The first FlashAttention is inferred: it fits the rows of other lengths on
    eight devices, although the script of today installs the second.
    """
    options = f"--device {device} --batch {micro} --accumulate {parts} --workers {gpus} --zero {stage}"
    options += (
        f" --precision bf16 --optimizer foreach --attention flash-1 --length {length}{' --recompute' * recompute}"
    )
    group = f"LLM Foundry, {gpus} {device.upper()}" if gpus <= 8 else f"LLM Foundry, {device.upper()}, several nodes"
    return Figure(group=group, model=f"mpt-{model}", options=options, published=tokens, unit="tokens/s",
                  source=FOUNDRY, chosen=chosen)  # fmt: skip


def figures() -> Iterator[Figure]:
    """All rows. What joins the machines of fms-fsdp (400 and 800 Gbit/s each) is said in its table."""
    yield from (
        foundry("a100", 8, "125m", 32, 2, 141_737, chosen=True),
        foundry("a100", 8, "350m", 32, 2, 58_782, chosen=True),
        foundry("a100", 8, "760m", 24, 2, 32_434, chosen=True),
        foundry("a100", 8, "1b", 14, 4, 20_513, chosen=True),
        foundry("a100", 8, "3b", 10, 2, 10_811, chosen=True),
        foundry("a100", 8, "7b", 6, 2, 4_641, chosen=True),
        foundry("a100", 8, "7b", 16, 2, 3_684, length=4096, recompute=True, chosen=True),
        foundry("a100", 8, "13b", 2, 3, 2_262, chosen=True),
        foundry("a100", 8, "30b", 3, 21, 916, recompute=True, chosen=True),
        foundry("a100", 64, "70b", 8, 4, 410, recompute=True),
        foundry("h100", 8, "760m", 24, 2, 63_147, chosen=True),
        foundry("h100", 8, "1b", 14, 1, 45_455, chosen=True),
        foundry("h100", 8, "3b", 5, 6, 20_964, length=4096, chosen=True),
        foundry("h100", 8, "7b", 6, 1, 10_643, chosen=True),
        foundry("h100", 8, "7b", 16, 2, 8_611, length=4096, recompute=True, chosen=True),
        foundry("h100", 8, "13b", 2, 1, 4_792, chosen=True),
        foundry("h100", 8, "30b", 3, 21, 2_002, recompute=True, chosen=True),
        foundry("h100", 128, "1b", 12, 1, 44_123, stage=2),
        foundry("h100", 128, "3b", 8, 1, 23_422, stage=2),
        foundry("h100", 128, "7b", 6, 1, 10_475),
        foundry("h100", 512, "7b", 6, 1, 9_670),
        foundry("h100", 128, "13b", 16, 1, 5_080, recompute=True),
        foundry("h100", 128, "30b", 8, 1, 2_199, recompute=True),
        foundry("h100", 128, "70b", 8, 1, 1_058, recompute=True),
        foundry("h100", 512, "70b", 8, 1, 1_007, recompute=True),
    )
    for device, gpus, nic, seven, thirteen, more, largest in (
        ("a100", 128, 50, 3700, 1800, 700, 370),
        ("h100", 96, 100, 7500, 3800, 1550, 800),
    ):
        for model, tokens, options in (
            ("llama-2-7b", seven, ""),
            ("llama-2-13b", thirteen, " --recompute-every 2"),
            ("codellama-34b", more, " --recompute"),
            ("llama-2-70b", largest, " --recompute"),
        ):
            yield Figure(
                group=f"fms-fsdp, {gpus} {device.upper()}", model=model, published=tokens, unit="tokens/s", source=FMS,
                options=f"--device {device} --batch 2 --workers {gpus} --zero 3 --precision bf16{options} "
                f"--network nccl:{device},nics=8,nic={nic}gbit",
            )  # fmt: skip
    for model, options, tokens in (("llama-3-8b", " --recompute-every 2", 2904), ("llama-3-70b", " --recompute", 331)):
        yield Figure(
            group="torchtitan, 64 A100", model=model, published=tokens, unit="tokens/s", source=TITAN,
            options=f"--device a100 --batch 1 --workers 64 --zero 3 --precision bf16{options}",
        )  # fmt: skip
    for device, options, images, chosen in (
        ("a100", "--precision fp16 --do channels-last", 2470, False),
        ("v100", "--precision fp16 --do channels-last", 1156, False),
        ("a100", "", 938, False),
        ("v100", "", 356, False),
    ):
        kind = "AMP" if options else "TF32" if device == "a100" else "float32"
        yield Figure(
            group=f"ResNet-50, {kind}", model="resnet50", published=images, unit="images/s", source=NVIDIA,
            options=f"--device {device} --batch 256 {options}".strip(), chosen=chosen,
        )  # fmt: skip


def megatron() -> Iterator[Figure]:
    """Megatron-LM's own tables, in the shared data: fp16 with float32 masters, full recomputation, separate attention.

    Seconds of an iteration are turned into tokens per second and device.
    """
    root = Path(os.environ["FORETRACE_SHARED_DATA"]) / "placement"
    common = "--precision fp16-master --attention separate --recompute --reentrant"
    with (root / "megatron" / "megatron_2020.csv").open() as file:
        for row in csv.DictReader(file):
            gpus, split, batch = int(row["gpus"]), int(row["tensor_parallel"]), int(row["global_batch"])
            workers = gpus // split
            device = "v100-sxm3" if "V100" in row["system"] else "a100-sxm4-40gb"
            data = f" --workers {workers} --network nccl:a100,nics=8,nic=200gbit" if workers > 1 else ""
            tokens = batch * 1024 / (float(row["iteration_ms"]) * 1e-3) / gpus
            size = {1920: "1.2b", 2304: "2b", 3072: "4b", 4096: "8b"}[int(row["hidden"])]
            yield Figure(
                group=f"Megatron-LM 2020, {row['system'].split()[-1]}, {'one node' if gpus <= 8 else 'many nodes'}",
                model=f"megatron-{size}", published=tokens, unit="tokens/s", source=MEGATRON,
                options=f"--device {device} --batch {batch // workers} --tensor {split} {common}{data}",
            )  # fmt: skip
    with (root / "megatron" / "sc21_table1.csv").open() as file:
        for row in csv.DictReader(file):
            if row["PP"] != "1":
                continue
            gpus, split, micro, batch = (int(row[key]) for key in ("gpus", "TP", "MBS", "GBS"))
            hidden, layers, workers = int(row["hidden"]), int(row["layers"]), gpus // split
            flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51_200 / (16 * layers * hidden))
            seconds = flops / (gpus * float(row["tflops_per_gpu"]) * 1e12)
            size = {2304: "1.7b", 3072: "3.6b", 4096: "7.5b", 6144: "18b"}[hidden]
            yield Figure(
                group="Megatron-LM, SC 2021", model=f"megatron-{size}", published=batch * 2048 / seconds / gpus,
                unit="tokens/s", source=SC21,
                options=f"--device a100 --batch {micro} --accumulate {batch // workers // micro} --workers {workers} "
                f"--tensor {split} {common}",
            )  # fmt: skip
    yield Figure(group="Megatron-LM 2022, full recomputation", model="megatron-22b", published=4 * 2048 / 1.42 / 8,
                 unit="tokens/s", source=SELECTIVE,
                 options=f"--device a100 --batch 4 --tensor 8 {common}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A figure and what was estimated."""

    figure: Figure
    estimated: float
    low: float
    high: float
    fits: str
    found: dict[str, object]

    @property
    def error(self) -> float:
        """Relative, of the throughput."""
        return self.estimated / self.figure.published - 1

    @property
    def covered(self) -> bool:
        """Whether the published figure lies in the range."""
        return self.low <= self.figure.published <= self.high

    @property
    def used(self) -> float:
        """How far the published figure is from the estimate, relative to the end of the range on its side."""
        end = self.high if self.figure.published > self.estimated else self.low
        return (self.figure.published - self.estimated) / (end - self.estimated)


def measure(figure: Figure) -> Row:
    """The estimate for a figure's recipe."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run(["estimate", figure.model, *figure.options.split(), "--json"])
    if code:
        raise SystemExit(f"{figure.model} {figure.options} ended with exit code {code}.")
    found = json.loads(out.getvalue())
    per_device = found["tokens_per_s_per_device"] if figure.unit == "tokens/s" else found["samples_per_s"]
    low, high = found["interval_s"]
    step = found["step_time_s"]
    return Row(figure=figure, estimated=per_device, low=per_device * step / high, high=per_device * step / low,
               fits=found["fits"], found=found)  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose group or model contains this")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/accuracy/trainings.md")
    parser.add_argument("--raw", type=Path, help="write what was estimated there, as JSON")
    given = parser.parse_args()
    rows = []
    for figure in (*figures(), *megatron()):
        if given.only in f"{figure.group} {figure.model} {figure.options}":
            rows.append(measure(figure))
            print(_line(rows[-1]), flush=True)
    if given.raw:
        given.raw.write_text(json.dumps([{"group": row.figure.group, "published": row.figure.published,
                                          "estimated": row.estimated, **row.found} for row in rows]))  # fmt: skip
    text = "\n".join(_table(rows))
    print(text)
    if given.write:
        before, _, rest = ACCURACY.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        ACCURACY.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def _line(row: Row) -> str:
    return (
        f"{row.figure.group:32} {row.figure.model:14} {row.figure.published:>9,.0f} {row.estimated:>9,.0f} "
        f"{row.error:+7.1%} {'in' if row.covered else 'OUT'} {row.fits}"
    )


def _table(rows: list[Row]) -> Iterator[str]:
    yield f"Made by `python benchmarks/training_figures.py --write` on {date.today().isoformat()}."
    yield ""
    yield "| group | model and recipe | published a device | estimated (range) | error | in range | memory |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        each = row.figure
        mark = " †" if each.chosen else ""
        yield (
            f"| {each.group}{mark} | `{each.model} {each.options}` | {each.published:,.0f} {each.unit} | "
            f"{row.estimated:,.0f} ({row.low:,.0f} – {row.high:,.0f}) | {row.error:+.1%} | "
            f"{'yes' if row.covered else '**no**'} | {row.fits} |"
        )
    yield ""
    blind = "Mechanisms and recipes were found with all rows in view: no row is a blind test."
    yield f"† constants were chosen on these. {blind}"
    yield ""
    yield "| group | rows | mean error | mean absolute | worst | in range |"
    yield "|---|---|---|---|---|---|"
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.figure.group, []).append(row)
        groups.setdefault("**all others**" if not row.figure.chosen else "**all constants were chosen on**", []).append(
            row
        )
    for name, mine in sorted(groups.items()):
        errors = [row.error for row in mine]
        yield (
            f"| {name} | {len(mine)} | {statistics.mean(errors):+.1%} | {statistics.mean(map(abs, errors)):.1%} | "
            f"{max(errors, key=abs):+.1%} | {sum(row.covered for row in mine)} of {len(mine)} |"
        )
    yield ""
    most = statistics.quantiles([row.used for row in rows], n=10)[7] if len(rows) > 1 else rows[0].used
    yield f"Ranges are meant to hold 4 times out of 5; 4 of 5 of these rows lie within {most:.0%} of theirs."
    yield ""
    for source in dict.fromkeys(row.figure.source for row in rows):
        yield f"- {source}"


if __name__ == "__main__":
    main()
