"""`plan_decoder`: answers for names that people expect, refusals with the nearest change, published rows."""

from __future__ import annotations

import csv
from math import log
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError
from foretrace.plan.transformers import kernels
from foretrace.plan.transformers.model import Parallelism, machine, softwares
from foretrace.plan.transformers.plan import plan_decoder
from foretrace.plan.transformers.shape import TransformerSizes, transformer
from foretrace.plan.transformers.space import ParallelismSpace


def test_a_plan_says_what_wins_and_why_others_lose() -> None:
    found = plan_decoder("gpt3-175b", devices=512, device="a100-80gb", batch=1536)
    best = found.best
    assert found.space.on.device == "A100-SXM4-80GB" and best.configuration.devices == 512
    assert best.interval_s[0] < best.seconds < best.interval_s[1] and best.peak_bytes <= found.space.on.capacity
    assert len(best.memory) == best.configuration.pipeline
    assert all(each.cost.seconds >= best.seconds and "slower" in each.why for each in found.runners_up)
    assert all(each.cost.peak_bytes > found.space.on.capacity for each in found.too_large)
    assert all("out of memory: stage" in each.why for each in found.too_large) and found.too_large
    assert sum(found.lost.values()) < found.valid and found.lost["out of memory"] == found.valid - found.fitting
    assert found.gpu_hours(1e12) == pytest.approx(1e12 / found.tokens_per_s * 512 / 3600)
    assert 0.3 < found.utilisation < 0.8


def test_the_same_question_has_the_same_answer() -> None:
    first, second = (plan_decoder("llama-2-7b", devices=64, device="h100", batch=256) for _ in range(2))
    assert first.best == second.best and first.runners_up == second.runners_up


def test_fixed_fields_are_kept_and_never_better() -> None:
    free = plan_decoder("gpt2-xl", devices=16, device="a100", batch=64)
    fixed = plan_decoder("gpt2-xl", devices=16, device="a100", batch=64, fixed={"pipeline": 4, "recompute": 2})
    assert fixed.configuration.pipeline == 4 and fixed.configuration.recompute == 2
    assert fixed.best.seconds >= free.best.seconds and fixed.valid < free.valid


@pytest.mark.parametrize(
    "name",
    ["gpt3-175b", "gpt2-xl", "opt-66b", "llama-2-70b", "meta-llama/Llama-2-7b-hf", "llama-3-8b", "qwen3-8b",
     "qwen2.5-72b", "mixtral-8x7b", "Mixtral 8x22B", "megatron-bert-1.3b"],
)  # fmt: skip
def test_names_that_people_expect(name: str) -> None:
    assert plan_decoder(name, devices=256, device="h100", batch=512).best.seconds > 0


def test_sizes_are_the_published_ones() -> None:
    for name, thousand_millions in (("mixtral-8x7b", 46.7), ("mixtral-8x22b", 140.6), ("megatron-bert-3.9b", 3.9),
                                    ("gpt2-xl", 1.56), ("qwen2.5-72b", 72.7), ("opt-66b", 65.7)):  # fmt: skip
        assert transformer(name).parameters / 1e9 == pytest.approx(thousand_millions, rel=0.02)


def test_ranges_widen_away_from_what_was_fitted() -> None:
    def width(device: str, name: str, **at: int) -> float:
        space = ParallelismSpace(
            model=transformer(name), on=machine(device), software=softwares()["megatron-2022"], devices=8, batch=64
        )
        found = space.cost(Parallelism(data=8, **at))
        return log(found.interval_s[1] / found.interval_s[0])

    fitted, elsewhere = width("a100-80gb", "gpt2-xl"), width("h100", "gpt2-xl")
    assert 0 < fitted < elsewhere
    assert width("h100", "mixtral-8x7b") == pytest.approx(2 * elsewhere)
    assert width("h100", "gpt2-xl", zero=3) == pytest.approx(2 * elsewhere)


def test_stored_fits_have_every_constant() -> None:
    for each in softwares().values():
        assert list(each.constants) == list(softwares()["megatron"].constants)
        assert each.low < 0 < each.high and each.other_low < 0 < each.other_high


def test_what_cannot_be_done_is_refused_with_the_nearest_change() -> None:
    def refused(name: str | TransformerSizes = "gpt3-175b", **changes: object) -> str:
        with pytest.raises(ForetraceError) as caught:
            plan_decoder(name, **{"devices": 64, "device": "a100-80gb", "batch": 64, **changes})  # type: ignore[arg-type]
        text = str(caught.value)
        assert text.endswith((".", "?")) and "\n" not in text
        return text

    assert "does not fit into 80 GB of each of 8 devices" in refused(devices=8)
    assert "give 48 devices" in refused(devices=8)
    assert "multiply to 7 devices; give 6 devices" in refused(devices=7, batch=96)
    assert "7 devices cannot be cut by tensor degree 8" in refused(devices=7, fixed={"tensor": 8})
    assert "did you mean tensor" in refused(fixed={"tensors": 8})
    assert "in no catalog" in refused(device="xyz900")
    assert "did you mean gpt3-175b" in refused("gpt3-17b5")
    with pytest.raises(ForetraceError, match="layers of none must be a whole number above 0, got 0"):
        TransformerSizes(name="none", layers=0, hidden=64, heads=1, kv_heads=1, inner=64, words=10, length=8)


def test_what_is_proposed_instead_works() -> None:
    assert plan_decoder("gpt3-175b", devices=48, device="a100-80gb", batch=64).fitting
    assert plan_decoder("gpt2-xl", devices=6, device="a100-80gb", batch=96).fitting


def test_published_memory_is_met(shared_data: Path) -> None:
    """Figures of Korthikanti et al., in which nothing is fitted."""
    by, on = softwares()["megatron-2022"], machine("a100-80gb")
    text = (shared_data / "placement" / "calculon_validation.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        if row["metric"] != "activation_memory":
            continue
        hidden = int(row["hidden"])
        model = TransformerSizes(
            name=row["model"], layers=int(row["layers"]), hidden=hidden, heads=int(row["heads"]),
            kv_heads=int(row["heads"]), inner=4 * hidden, words=51200, length=int(row["seq"]), tied=True,
        )  # fmt: skip
        at = Parallelism(
            tensor=int(row["tp"]), sequence=int(row["tp_comm"] == "rs_ag"), pipeline=int(row["pp"]),
            virtual=int(row["interleave"]), data=int(row["dp"]), micro=int(row["micro_batch"]),
            recompute={"none": kernels.NONE, "attn_only": kernels.SELECTIVE, "full": kernels.FULL}[row["recompute"]],
        )  # fmt: skip
        space = ParallelismSpace(model=model, on=on, software=by, devices=at.devices, batch=int(row["batch"]))
        kept = space.cost(at).memory[0]["activations"]
        assert kept / 2**30 == pytest.approx(float(row["published"]), rel=1e-3)
