"""The study's finding on models of its size, and what is known of the acceptance of drafts that nobody trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

from foretrace.serving.llm.drafted import draft_like
from foretrace.serving.llm.served_model import ServedModel
from foretrace.serving.llm.step_law import law_of
from foretrace.serving.speculative.drafts import (
    PUBLISHED_RATES,
    DraftSetting,
    published_law,
    published_rate,
    timed_draft,
)
from tables import table

# Sizes of the published configuration files: princeton-nlp/Sheared-LLaMA-1.3B, minghaoyan/Wide-Sheared-LLaMA-796M.
DRAFTS = {"Sheared-LLaMA-1.3B": (24, 2048, 5504), "Wide-Sheared-LLaMA-796M": (5, 4096, 11008)}
#: A target of LLaMA-65B's sizes (Touvron et al., 2023, table 2).
TARGET = ServedModel(
    name="llama-65b", layers=80, hidden=8192, heads=64, kv_heads=64, head=128, words=32000, inner=22016, dense=80
)
PAIRS = ("T5 for T5-XXL, translating", "T5 for T5-XXL, summarising", "LaMDA for LaMDA 137B")
EAGER_S = 10e-6  # of the host for a kernel that eager PyTorch launches; between 5 and 20 µs on servers


def study_table() -> str:
    """Both drafts at several rates: latency goes with layers, whatever the accuracy."""
    rows = []
    for engine, kernel_s in (("kernels launched one by one", EAGER_S), ("captured in a graph", None)):
        law = replace(law_of("vllm"), host_s=0.0, host_per_sequence_s=0.0)  # a loop around models, no server
        law = replace(law, kernel_s=kernel_s or law.kernel_s)
        setting = DraftSetting(target=TARGET, device="a100", layout={"tp": 4}, law=law)
        for rate in ("0.5", "0.6", "0.7"):
            found = {}
            for name, (layers, hidden, inner) in DRAFTS.items():
                model = replace(draft_like(TARGET, layers, hidden), name=name, inner=inner)
                found[name] = timed_draft(setting, model, rate)
            deep, wide = found.values()
            rows.append(
                (engine, rate, *(f"{1e3 * each.latency_s:.2f} ms" for each in (deep, wide)),
                 *(f"{each.speedup:.2f} (k {each.k})" for each in (deep, wide)),
                 f"{100 * (wide.speedup / deep.speedup - 1):+.0f} %")
            )  # fmt: skip
    header = ("engine", "acceptance", "1.3B, 24 x 2048", "796M, 5 x 4096", "speed-up", "speed-up", "wide over deep")
    return (
        "## The study's two drafts\n\n"
        "A target of LLaMA-65B's sizes on four A100, drafts of the sizes in their published configuration files on one "
        "of them, a batch of one, equal acceptance, the best k of each. Published: +30 % in the first version. What "
        "the shallow draft gains goes with what a layer costs beside its weights: where the host launches one by one "
        f"({1e6 * EAGER_S:.0f} µs each, an assumption) more, in a captured graph less.\n\n{table(header, rows)}\n"
    )


def rates_table(own: Sequence[tuple[str, float, float]]) -> str:
    """Rates of acceptance beside the range by parameters that `llm draft` takes from the published ones.

    `own` are drafts that were trained here: name, parameters and rate under sampling.
    """
    rows, held = [], 0
    for pair, sampled, greedy in zip(PAIRS, PUBLISHED_RATES[::2], PUBLISHED_RATES[1::2], strict=True):
        for (parameters, rate), (_, best) in zip(sampled, greedy, strict=True):
            rows.append((pair, *_rated(parameters), f"{rate:.2f}", f"{best:.2f}"))
            low, high = published_rate(parameters)
            held += (low <= rate <= high) + (low <= best <= high)
    published = 2 * len(rows)
    rows += [(name, *_rated(parameters), f"{rate:.2f}", "–") for name, parameters, rate in own]
    level, slope, off = published_law()
    trained = " The drafts that were trained here, of the first of k proposals, had no part in it." if own else ""
    header = ("draft and target", "parameters of the draft", "range", "temperature 1", "temperature 0")
    return (
        "## Acceptance of drafts that nobody trained\n\n"
        "`foretrace llm draft` takes a range by parameters where no rate is stated: a line through published rates "
        "(Leviathan et al., table 3), "
        f"{level + slope * log(1e8):.2f} at 100 M parameters and {slope:.3f} more per e-fold, ± {off:.2f}, the 80 % "
        "range of the level of another pair (Student's distribution, three pairs); beyond the published parameters it "
        f"widens. It holds {held} of the {published} published rates, which it was made from.{trained}\n\n"
        f"{table(header, rows)}\n"
    )


def _rated(parameters: float) -> tuple[str, str]:
    return f"{parameters / 1e6:,.4g} M", "{:.2f} – {:.2f}".format(*published_rate(parameters))
