"""`foretrace serve`: inference on the cores of this machine."""

from __future__ import annotations

from pathlib import Path

from foretrace.cli import completion, options
from foretrace.cli.answers import answers, group, writable
from foretrace.cli.options import argument, flag, option
from foretrace.cli.verify import LedgerFile, NoLedger
from foretrace.report.views import Result

serve = group("serve", "Serve a model on the cores of this machine, and plan how.")


@serve.command("plan")
@answers
def plan(
    model: str = argument(
        ...,
        "MODEL",
        "A model of the zoo, SCRIPT.py:FUNCTION, a TorchScript, torch.export or ONNX file, or the name "
        "that a recorded profile gives it.",
        complete=completion.models,
    ),
    batch: int = option(..., "N", "Samples of a batch.", least=1),
    threads: int | None = option(None, "N", "Cores to share out; by default all that can be had.", least=1),
    tail: float = option(0.5, "Q", "The quantile of the latency to make small: 0.99; by default the median."),
    memory_limit: str = option("", "SIZE", "For the weights of all instances, as 16GB."),
    profile: Path | None = option(None, "FILE", "Latencies of instances (CSV), kept there; by default in the cache."),
    input: list[str] | None = option(
        None, "NAME=TYPE[SIZES]", "An input of one sample: x=float32[3,224,224]; several."
    ),
    size: options.Size = "full",
    run: bool = flag("--run", "Then run the best split, one instance and an instance per thread in turns."),
    seconds: float = option(30.0, "S", "For --run, 8 rounds at least.", least=0.1),
    ledger: LedgerFile = None,
    no_ledger: NoLedger = False,
) -> Result:
    """Split cores among instances of a model so that a batch ends soonest: how many, with which threads and samples.

    Example: foretrace serve plan resnet50 --size tiny --batch 16
    """  # fmt: skip
    from foretrace import flow
    from foretrace.experiment.ledger import Ledger
    from foretrace.plan.result import size as size_of
    from foretrace.report import serving as report
    from foretrace.serving.server import trial as trials

    writable(profile)
    kept = Ledger(ledger).checked() if run and not no_ledger else None
    with options.stages("loading the model") as tell:
        found = flow.split(
            model, batch=batch, threads=threads, tail=tail, memory_limit=size_of(memory_limit), profile=profile,
            size=size, inputs=input or (), progress=tell,
        )  # fmt: skip
    if not run:
        return report.planned(found)
    with options.progress("running splits in turns") as share:
        tried = trials.try_plan(found, seconds=seconds, tell=share)
    return report.planned(found, tried, *(() if kept is None else kept.keep(trials.row_of(tried))))
