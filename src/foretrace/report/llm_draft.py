"""`foretrace llm draft` as an answer: drafts by depth and width, and what each gains."""

from __future__ import annotations

from collections.abc import Iterator

from foretrace.report.blocks import About, Block, Line, listing
from foretrace.report.units import count, digits, seconds, things
from foretrace.report.views import Report
from foretrace.serving.speculative.drafts import DraftSetting, RankedDraft


class LlmDraftView(Report, frozen=True, kw_only=True):
    """`foretrace llm draft`: drafts for speculative decoding, the one that gains most first."""

    command: str = "llm draft"
    target: str
    device: str
    batch: int
    context: int
    drafts: tuple[RankedDraft, ...]

    def shown(self, top: int) -> Iterator[Block]:
        """Yield one row per draft."""
        yield About((f"{self.target} on {self.device}", f"batch {count(self.batch)}", f"context {count(self.context)}"))
        yield listing(
            self.drafts,
            (lambda each: f"{each.layers} x {each.width}", "layers x width"), ("parameters", "parameters", "count"),
            ("latency_s", "latency", "time"), ("acceptance", "accepted"), ("k", "k", "count"),
            ("tau", "tokens", "digits"), ("speedup", "speed-up", "digits"),
            (lambda each: f"{digits(each.speedup_low)} – {digits(each.speedup_high)}", "range"),
            (lambda each: seconds(each.must_be_below_s) if each.must_be_below_s else "none", "must be below"),
            (lambda each: count(each.hurts_from_batch) if each.hurts_from_batch else "–", "hurts from batch"),
            top=top, noun="draft", how="--top",
        )  # fmt: skip
        yield Line("tokens: of a round of k proposals; must be below: latency at which they gain nothing", soft=True)


def llm_drafts(setting: DraftSetting, found: tuple[RankedDraft, ...], *, stated: bool) -> LlmDraftView:
    """Return the answer to a search; `stated`: the user said what the target accepts."""
    one = found[0]
    best = f"A draft with {things(one.layers, 'layer')} of {one.width} decodes {digits(one.speedup)} times as fast"
    gain = (
        best if one.speedup > 1 else "No draft gains; the best makes decoding " + f"{digits(one.speedup)} times as fast"
    )
    published = "a range of published pairs by parameters (Leviathan et al., 2023, table 3): measure a draft's own"
    source = f"acceptance is {'what you stated, for every draft' if stated else published}."
    return LlmDraftView(
        headline=f"{gain} ({digits(one.speedup_low)} – {digits(one.speedup_high)}) with k = {one.k}.",
        target=setting.target.name, device=setting.device, batch=setting.batch, context=setting.context, drafts=found,
        notes=(source, "latencies are the law of a step; drafts run on one device; nothing was trained or run."),
    )  # fmt: skip
