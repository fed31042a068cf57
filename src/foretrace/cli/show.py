"""`foretrace show`: what is in a recording, and what holds its step back."""

from __future__ import annotations

from foretrace.cli import options


def show(
    source: options.Source,
    rank: options.Rank = None,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    on: options.On = "here",
    top: options.Top = 6,
    as_json: options.AsJson = False,
) -> None:
    """Say what is in a recording and what holds its step back.

    Of several ranks: who waits for whom, and why; --rank looks at one of them.

    Example: foretrace show run/
    """
    run = options.all_ranks(source, rank=rank, steps=steps, salvage=salvage, on=on)
    from foretrace.report import build

    options.answer(
        build.show(run.simulate(), path=str(source)), as_json=as_json, top=top, rank=rank, steps=steps, salvage=salvage
    )
