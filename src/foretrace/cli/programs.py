"""Commands about compiled code: tensor programs, and the kernels that a compiler made of a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from foretrace.cli import completion, options
from foretrace.cli.options import argument, option
from foretrace.errors import ForetraceError
from foretrace.names import keyed, question, resolve

if TYPE_CHECKING:
    from foretrace.report.views import Result


def program(
    kind: str = argument(..., "KIND", "What is computed: matmul, conv2d, softmax, layer-norm ..."),
    size: list[str] = argument(..., "NAME=N ...", "Its sizes, as in m=64 n=128 k=64."),
    tries: int = option(100, "N", "Schedules that are drawn and predicted.", least=1, most=10_000),
    measure: int = option(5, "N", "The best of them that are timed.", least=0),
    calibrate: str = option("", "TIME", "Time programs of all kinds for so long at most before: 30s."),
    seed: int = option(0, "N", "Seed of the schedules.", least=0),
    top: options.Top = 10,
) -> Result:
    """Rank schedules of a tensor program, and time the best.

    Each has its predicted time, and what binds it.

    Example: foretrace program matmul m=64 n=128 k=64 --tries 30 --measure 3
    """
    from foretrace.cost.programs.rank import rank
    from foretrace.cost.programs.tasks import KINDS, SIZES, task
    from foretrace.report.program import program as report

    found = resolve(kind, KINDS)
    if found is None:
        raise ForetraceError(f"kind {kind!r} is unknown; {question(kind, KINDS)}")
    names = [*SIZES[found], *["t"] * (found == "matmul")]
    number = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)s", calibrate or "0s")
    if number is None or 0 < float(number[1]) < 5:
        raise ForetraceError(f"`calibrate={calibrate}` must be 5 to 999 seconds; write --calibrate 30s.")
    sizes = {name: _size(name, text) for name, text in keyed(size, names, found).items()}
    given = task(found, **{name: sizes[name] for name in names if name in sizes})
    with options.progress("predicting schedules") as tell:
        ranked = rank(given, tries=tries, measured=measure, seed=seed, calibrate_s=float(number[1]), tell=tell)
    return report(ranked)


def _size(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 6 or not (int(text) or name == "t"):
        raise ForetraceError(f"{name}={text} must be a whole number from 1 to 999999; write {name}=64.")
    return int(text)


def kernels(
    model: str = argument(..., "MODEL|SCRIPT", "A zoo model, or a script with training().", complete=completion.models),
    size: options.Size = "tiny",
    threads: int = option(1, "N", "Threads of an operator.", least=1),
    seconds: float = option(20.0, "S", "For running steps, 3 of each kind at least; compiling is extra.", least=0.1),
    seed: int = option(0, "N", "Seed of weights and data.", least=0),
    top: options.Top = 12,
) -> Result:
    """Time each kernel of a compiled model in its step.

    The sum is held against the step of torch.compile.

    Example: foretrace kernels vgg11 --seconds 10
    """
    from foretrace.experiment.kernels import step_kernels
    from foretrace.hardware.processor import operator_threads
    from foretrace.report.kernels import kernels as report
    from foretrace.zoo.registry import job, script_mistakes

    make = job(model, size, seed=seed)
    with operator_threads(threads), options.progress(f"compiling and running {model}") as tell:
        with script_mistakes(model):
            training = make()
        return report(step_kernels(training, seconds=seconds, tell=tell), model)
