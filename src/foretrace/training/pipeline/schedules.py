"""The published schedules as tables, one function each, by name in `SCHEDULES`.

GPipe (Huang et al., NeurIPS 2019), 1F1B with a flush (PipeDream-Flush, Megatron-LM), 1F1B without (PipeDream, SOSP
2019), PipeDream-2BW (ICML 2021), interleaved 1F1B (Narayanan et al., SC 2021), ZB-H1 (Qi et al., ICLR 2024).
All accumulate gradients in the order of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from foretrace.errors import ForetraceError
from foretrace.training.pipeline.schedule import Action, B, F, I, PipelineSchedule, W, table


def gpipe(stages: int, micro_batches: int, batches: int, *, first: int = 0) -> PipelineSchedule:
    """Return all forward passes of a batch, then all its backward passes."""
    return _rows("gpipe", [1] * stages, micro_batches, batches, first, lambda stage: micro_batches)


def one_f_one_b_flush(
    stages: int, micro_batches: int, batches: int, *, warmup: int = 1, first: int = 0
) -> PipelineSchedule:
    """Return p - s - 1 forward passes (times `warmup`) of stage s, then one forward, one backward; then a flush."""
    return _rows("1f1b-flush", [1] * stages, micro_batches, batches, first, lambda s: warmup * (stages - s - 1))


def one_f_one_b(stages: int, micro_batches: int, batches: int, *, warmup: int = 1, first: int = 0) -> PipelineSchedule:
    """Return PipeDream: never drained; each stage keeps as many versions of its weights as are in use."""
    versions = [1 - (-warmup * (stages - s - 1) // micro_batches) for s in range(stages)]
    return _rows("1f1b", versions, micro_batches, batches, first, lambda s: warmup * (stages - s - 1), flush=False)


def two_bw(stages: int, micro_batches: int, batches: int, *, warmup: int = 1, first: int = 0) -> PipelineSchedule:
    """Return PipeDream-2BW: never drained, two versions. Raises ForetraceError with the fewest micro-batches."""
    least = max(warmup * (stages - 1), 1)
    if micro_batches < least:
        raise ForetraceError(
            f"2bw with {stages} stages and a warm-up of {warmup} needs {least} micro-batches per batch or more, got "
            f"{micro_batches}: with fewer, a third version of the weights would be needed; give "
            f"`micro_batches={least}`."
        )
    return _rows("2bw", [2] * stages, micro_batches, batches, first, lambda s: warmup * (stages - s - 1), flush=False)


def zero_bubble(stages: int, micro_batches: int, batches: int, *, first: int = 0) -> PipelineSchedule:
    """Return ZB-H1: 1F1B with a flush, whose stage s puts off s gradients of weights into what would be its bubble."""

    def passes(stage: int) -> Iterator[Action]:
        for t in range(first, first + batches):
            weight = t * micro_batches
            for each in _alternating(t * micro_batches, micro_batches, stages - stage - 1, stage):
                if each.kind == F:
                    yield each
                    continue
                yield Action(I, each.number, stage)
                if each.number - weight >= stage:
                    yield Action(W, weight, stage)
                    weight += 1
            yield from (Action(W, i, stage) for i in range(weight, (t + 1) * micro_batches))

    return table(
        "zero-bubble", map(passes, range(stages)), micro_batches=micro_batches, versions=[1] * stages, first=first
    )


def interleaved(stages: int, micro_batches: int, batches: int, *, chunks: int = 2, first: int = 0) -> PipelineSchedule:
    """Return 1F1B with a flush on stages / chunks processes; process r has the stages r, r + p, r + 2 p, ..."""
    p = stages // max(chunks, 1)
    if chunks < 1 or p < 1 or p * chunks != stages or micro_batches % p:
        near = max(-(-micro_batches // max(p, 1)) * max(p, 1), 1)
        raise ForetraceError(
            f"interleaved needs stages that `chunks=` divides and micro-batches in groups of the processes, "
            f"got {stages} stages, {chunks} chunks and {micro_batches} micro-batches; give "
            f"`micro_batches={near}` and `chunks=1` or a divisor of {stages}."
        )
    count = micro_batches * chunks

    def passes(process: int) -> Iterator[Action]:
        warm = min(2 * (p - process - 1) + (chunks - 1) * p, count)
        for t in range(first, first + batches):
            for kind, k, _ in _alternating(0, count, warm, 0):
                chunk = k // p % chunks if kind == F else chunks - 1 - k // p % chunks
                yield Action(kind, t * micro_batches + k // (p * chunks) * p + k % p, chunk * p + process)

    return table("interleaved", map(passes, range(p)), micro_batches=micro_batches, versions=[1] * stages, first=first)


SCHEDULES: dict[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b-flush": one_f_one_b_flush,
    "1f1b": one_f_one_b,
    "2bw": two_bw,
    "zero-bubble": zero_bubble,
    "interleaved": interleaved,
}


def _rows(
    name: str, versions: list[int], m: int, batches: int, first: int, warm: Callable[[int], int], *, flush: bool = True
) -> PipelineSchedule:
    """Return rows of alternating passes, which begin again with every batch where there is a flush."""
    runs = [(t * m, m) for t in range(first, first + batches)] if flush else [(first * m, batches * m)]
    rows = ((each for run in runs for each in _alternating(*run, warm(s), s)) for s in range(len(versions)))
    return table(name, rows, micro_batches=m, versions=versions, first=first)


def _alternating(begin: int, count: int, warm: int, stage: int) -> Iterator[Action]:
    """Yield `warm` forward passes, then one forward and one backward in turns, then what is left."""
    warm = min(max(warm, 0), count)
    yield from (Action(F, begin + i, stage) for i in range(warm))
    for i in range(count):
        if warm + i < count:
            yield Action(F, begin + warm + i, stage)
        yield Action(B, begin + i, stage)
