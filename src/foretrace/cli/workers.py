"""Commands about many workers: clocks and more ranks, collectives, compressed gradients, rented machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace import cost, experiment, flow, hardware, report
from foretrace import plan as plans
from foretrace.cli import completion, options
from foretrace.cli.answers import Reply, Result, group
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError
from foretrace.files import write_text

if TYPE_CHECKING:
    from foretrace.graph.taskgraph import TaskGraph


def align(
    source: options.Source,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    on: options.On = "here",
) -> Result:
    """Show how far the clocks of recorded ranks are apart.

    From their collectives: nobody leaves one before the last has entered it, and all leave at nearly the same time.

    Example: foretrace align run/
    """
    if flow.is_graph(source):
        raise ForetraceError(f"{source} is a saved graph; name the folder of the ranks' recordings.")
    graphs = options.rank_graphs(source, steps=steps, salvage=salvage, on=on)
    if len(graphs) < 2:
        raise ForetraceError(f"{source} holds one rank, whose clock has none to be compared with; name several ranks.")
    return report.ranks.align(*flow.alignment(graphs))


def scale(
    source: Path = argument(..., "DIR", "A folder or archive with the recordings of two or more ranks."),
    ranks: int = option(..., "N", "How many ranks to predict.", least=1),
    network: str = option(
        "", "LINK|FILE",
        "What connects them: 100gbit/5us, a cluster (FILE.yaml) or measured collectives (FILE.csv).",
    ),
    samples: int = option(32, "N", "How often noise is drawn; 0: ranks do not vary.", least=0),
    seed: int = option(0, "N", "Seed of the noise.", least=0),
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    on: options.On = "here",
    top: options.Top = 8,
) -> Result:  # fmt: skip
    """Predict a run of many ranks from the recordings of a few.

    Example: foretrace scale run/ --ranks 1024 --network 100gbit/5us
    """
    graphs = options.rank_graphs(source, steps=steps, salvage=salvage, on=on)
    with options.progress(f"{ranks:,} ranks") as tell:
        found = flow.scale(graphs, ranks, network=network, samples=samples, seed=seed, progress=tell)
    return report.ranks.scale(found, path=str(source), network=network)


def network_check(
    measured: Path = argument(..., "MEASURED", "Output of nccl-tests, a table (.csv), or one of ours (.json)."),
    on: str = option(..., "NETWORK", "CLUSTER.yaml, nccl:DEVICE, another table, or a link (25gbit/10us)."),
    workers: int = option(0, "N", "Where the file has several, or does not say.", least=0),
    per_node: int = option(0, "N", "Workers of one machine, in the same cases.", least=0),
    kind: str = option("", "KIND", "all-reduce, ..., in the same cases."),
    system: str = option("", "NAME", "One of several systems in a file."),
) -> Result:
    """Check the bus bandwidth of measured collectives.

    Against what the machine should give, size by size.

    Exit code 1 where they are slower. Example: foretrace network check all_reduce.log --on nccl:H100-SXM5-80GB
    """
    table = cost.read_collectives(measured, workers=workers, per_node=per_node, kind=kind)
    series = table.one(workers=workers, per_node=per_node, kind=kind, system=system)
    return report.calibrate.check(series, cost.parse_network(on, series.workers), on=on)


def compression_advise(
    source: str = argument(..., "TRACE|MODEL", "A recording of one worker or a saved graph; or what estimate takes."),
    network: str = option(..., "LINK|FILE", "Link between workers (10gbit/50us), or a file."),
    workers: int = option(..., "N", "Data-parallel processes.", least=2),
    method: list[str] | None = option(None, '"NAME KEY=VALUE ..."', "Try this one, e.g. powersgd rank=8; several."),
    device: str = option("", "NAME", "Of a MODEL: its device; here: this processor.", complete=completion.devices),
    batch: options.Batch = None,
    precision: options.Precision = "",
    size: options.Size = "full",
    bucket_mb: float | None = option(None, "MIB", "Size at which a bucket is sent."),
    gradient_mb: float = option(0.0, "MB", "Size of all gradients, where TRACE does not show them."),
    backend: str = option("", "gloo|nccl", "By the recorded device."),
    tolerance: float = option(0.05, "SHARE", "What still counts as near-linear scaling."),
    measure: bool = flag(
        "--measure/--no-measure", "Time the hooks here, if this is the machine of the recording.", default=True
    ),
    seconds: float = option(60.0, "S", "At most this many seconds for timing hooks.", least=1.0),
    part: options.RankOptions = options.RankOptions(),
) -> Result:  # fmt: skip
    """Say which gradient compression pays.

    Which ratio near-linear scaling needs, and from which bandwidth down each method gains.

    Of a model that never ran, with --device, the step is estimated. Hooks are timed on processors; what they take on a
    GPU follows from their passes over its memory.
    Example: foretrace compression advise run/ --network 10gbit/50us --workers 8
    """
    plans.compression_advice.positive(tolerance=tolerance, seconds=seconds)
    chosen = plans.compression_advice.methods_named(method or ()) or plans.compression_advice.DEFAULT
    parallel = plans.compression_advice.data_parallel(
        workers, network, bucket_mb=bucket_mb, gradient_mb=gradient_mb, backend=backend
    )
    if not device and not options.is_recording(source):
        raise ForetraceError(f"{source} does not exist; give a recording, or a model with its --device.")
    if not device and (batch or precision):
        raise ForetraceError(
            f"--batch and --precision are of a model, not of {source}; say its --device, or leave them out."
        )
    if device and part != options.RankOptions():
        raise ForetraceError(f"--rank, --steps and --salvage are of a recording, not of {source}; leave them out.")
    if device:
        asked: dict[str, Any] = {"device": device, "batch": batch, "precision": precision, "size": size}
        graph, note = _estimated(source, **asked), ""
    else:
        run = part.of(Path(source))
        asked, graph, note = {}, run.calibrated().graph, ""
    if measure and not (device and graph.info.devices):
        with options.progress("timing hooks") as told:
            graph, note = experiment.with_hooks(graph, [(parallel, each) for each in chosen], seconds, told)
    with options.progress("predicting methods") as told:
        advice = plans.compression_advice.advise(graph, parallel, chosen, tolerance=tolerance, progress=told)
    return report.workers.compression(advice, source=source, note=note, asked=asked)


def _estimated(source: str, *, device: str, **how: Any) -> TaskGraph:
    """Return the graph of a step of a model that never ran."""
    from foretrace.model.target import HERE

    with options.progress(f"capturing {source}") as tell:
        graph = flow.estimate(source, device=device, progress=tell, **how).step.lowered.graph
    if device != HERE:
        return graph

    graph = experiment.as_here(graph)
    return cost.Calibration.load_for(graph).on(graph)


def cloud_advise(
    source: options.Source,
    samples: int = option(..., "N", "Samples of an epoch."),
    epochs: int = option(1, "N", "Epochs to train."),
    within: float = option(0.0, "HOURS", "Time for all epochs."),
    budget: float = option(0.0, "MONEY", "For all epochs, in the currency of the prices."),
    counts: str = option("1,2,4", "N,N", "Numbers of machines to try."),
    types: str = option("", "NAME,NAME", "Only these types; the beginning of a name will do."),
    prices: Path | None = option(None, "FILE", "Your types and prices (CSV), instead of ours."),
    step: list[str] | None = option(None, "DEVICE=SECONDS", "A step measured on one device, instead of predicted."),
    gradient_mb: float = option(0.0, "MB", "All gradients, if the recording lacks them.", least=0.0),
    plot: Path | None = option(None, "FILE.svg", "Draw time against money of all offers, too."),
    rank: options.Rank = None,
) -> Reply:
    """Predict epoch time and price on rented machines.

    Chooses the cheapest in time, or the fastest for the money.

    Example: foretrace cloud advise run/ --samples 100000 --epochs 2 --within 24 --step K80-half=0.2
    """
    wrong = "--step {}: write the device and seconds above 0, at most a million, as in T4=0.21."
    wanted = plans.cloud.RentalRequest(
        samples=samples, epochs=epochs, hours=within, dollars=budget, gradient_mb=gradient_mb, counts=_counts(counts),
        steps_s=options.pairs(step, _seconds, wrong),
    ).checked()  # fmt: skip
    types_found = hardware.instance_types(prices, types=types)
    scenario = options.scenario(source, rank=rank)
    with options.progress("predicting offers") as tell:
        advice = plans.cloud.advise(scenario.graph, types_found, wanted, tell)
    view = report.workers.cloud(advice, wanted, source=str(source))
    return Reply(result=view, files={plot: lambda path: write_text(path, report.workers.pareto_svg(view))})


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 10_000 for part in parts):
        raise ForetraceError(f"--counts {text}: write whole numbers above 0, as in 1,2,4.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 1e6:
        raise ValueError
    return seconds


network = group("network", "Expected times of collectives, compared with yours.", check=network_check)
compression = group("compression", "Whether compressing gradients pays off.", advise=compression_advise)
cloud = group("cloud", "Choose rented machines for a recorded job.", advise=cloud_advise)
