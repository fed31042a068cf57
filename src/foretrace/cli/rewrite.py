"""`foretrace rewrite`: a model as an equal one with faster operators."""

from __future__ import annotations

from pathlib import Path

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError


def rewrite(
    source: str = argument(..., "MODEL", "A model of the zoo, or a script with training()."),
    alpha: float = option(1.05, "A", "Follow graphs that cost up to A times the best; 1 is greedy."),
    budget: int = option(60, "N", "Graphs to expand per part of the model."),
    seconds: float | None = option(
        None, "S", "For the search, then the best so far; capturing, checking and measuring are extra."
    ),
    rules: Path | None = option(None, "FILE", "More rules: the file of TASO's generator (.pb)."),
    size: options.Size = "tiny",
    batch: int | None = option(None, "N", "Samples of a run.", least=1),
    device: str = option("", "NAME", "Costs by a roofline of this device instead of measured."),
    threads: int = option(1, "N", "Intra-op threads.", least=1),
    measure: bool = flag("--measure/--no-measure", "Run both models in turns on this machine.", default=True),
    out: Path | None = option(None, "PATH", "Write the model: a .pt2 file, or a folder with code."),
) -> Reply:
    """Rewrite a model into an equivalent one with faster operators.

    Inference only: weights are folded. Example: foretrace rewrite actor-critic --alpha 1.05 --budget 20
    """
    from foretrace.plan.rewrite import write
    from foretrace.plan.rewrite.session import RewriteRequest, rewrite_named
    from foretrace.report import rewriting as report

    if out is not None:
        write.checked(out)
    wanted = RewriteRequest(alpha=alpha, budget=budget, seconds=seconds, rules=rules, measure=measure).checked()
    with options.stages() as tell:
        found, count = rewrite_named(source, size, batch, wanted=wanted, device=device, threads=threads, tell=tell)
    if out is not None and not found.check.equal:
        raise ForetraceError(
            f"{source} was not written: rewritten, it differs from the original by {found.check.float64:.1g} in "
            f"float64 and {found.check.float32:.1g} in float32; please report it with the model."
        )
    shown_size = "" if source.endswith(".py") else size
    view = report.rewriting(found, wanted, source=source, size=shown_size, batch=count, wrote=str(out or ""))
    return Reply(result=view, files={out: lambda path: write.write(found.emitted, path)})
