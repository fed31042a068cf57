"""`foretrace utilisation`: how much of a device a model would use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretrace.cli import options

if TYPE_CHECKING:
    from foretrace.cost.model import CostModel
    from foretrace.report.views import Result


def utilisation(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A zoo model, a script with training(), or a file: ONNX, Chakra, JSON."),
    ],
    device: options.Device = "h100",
    batch: options.Batch = None,
    precision: options.Precision = "",
    inference: options.Inference = False,
    size: options.Size = "full",
    measured: Annotated[
        list[Path] | None,
        typer.Option("--measured", metavar="FILE", help="Times to prefer to predictions: a recording or CSV; several."),
    ] = None,
) -> Result:
    """Predict how much of a device a model uses.

    Example: foretrace utilisation resnet50 --device h100 --batch 32 --precision bf16
    """
    from foretrace.cost.devices.defaults import standard
    from foretrace.hardware.devices import named
    from foretrace.model.estimate import model_usage
    from foretrace.report import utilisation as report
    from foretrace.zoo.operators import operators_of

    target = named(device)
    with options.progress(f"capturing {model}") as tell:
        graph = operators_of(model, size=size, batch=batch, precision=precision, training=not inference, progress=tell)
    known = [member for path in measured or () for member in _times(path)]
    used = model_usage(graph, device=target, costs=standard(known))
    again = f"foretrace estimate {model} --device {device}"
    unheard = known and not {each.name for each in known} & set(used.step.cost_sources)
    notes = ["no call of the model is among the measured ones: operator and inputs must be the same."]
    said = notes if unheard else ()
    return report.of_model(used, model=model, training=not inference, again=again, remarks=said)


def _times(path: Path) -> list[CostModel]:
    """What was measured: a table, or the calls of a recording, on its own device and scaled to others."""
    from foretrace.cost.devices.measured import Measured
    from foretrace.cost.devices.scaled import Scaled

    if path.name.endswith((".csv", ".csv.gz")):
        return [Measured.from_table(path)]
    graph = options.scenario(path).graph
    return [Measured.from_graph(graph), Scaled.from_graph(graph)]
