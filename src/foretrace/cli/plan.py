"""`foretrace plan`: how to share a model out over devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foretrace import cost, experiment, flow, hardware, report
from foretrace import plan as plans
from foretrace import zoo as zoos
from foretrace.cli import completion, options
from foretrace.cli.answers import Reply, Result, group, writable
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError
from foretrace.files import write_text

if TYPE_CHECKING:
    from foretrace.experiment.rows.placed import RanPlacement

Devices = Annotated[int, option(..., "N", "How many there are.", least=1)]
MemoryLimit = Annotated[str, option(..., "SIZE", "Of a device, as 16GB, instead of the catalog's memory.")]
Link = Annotated[str, option(..., "RATE", "Of a device in each direction, as 200gbit; by default the catalog's.")]


def _models() -> Collection[str]:
    from foretrace.model.decoder_config import DECODERS

    return [*DECODERS, *plans.TRANSFORMERS]


def place(
    source: str = argument(
        ...,
        "SOURCE",
        "A model as estimate reads it, a recording, or a placement problem (JSON).",
        complete=completion.decoders,
    ),
    device: str = option("", "NAME", "As foretrace devices lists them.", complete=completion.devices),
    devices: int | None = option(None, "N", "How many there are.", least=1),
    objective: str = option("throughput", "throughput|latency", "Of a full pipeline, or of one batch alone."),
    memory_limit: MemoryLimit = "",
    link: Link = "",
    batch: options.Batch = None,
    precision: options.Precision = "",
    inference: options.Inference = False,
    size: options.Size = "full",
    any_sets: bool = flag("--any-sets", "A device may run several pieces of the graph."),
    seconds: float = option(30.0, "S", "At most until an integer program ends, if one is needed.", least=0),
    grid: options.Grid = None,
) -> Result:
    """Share operators out over devices.

    For the best throughput of a full pipeline, or the best latency of one batch.

    Example: foretrace plan place bert --device a100-40gb --devices 4 --inference
    """
    with options.progress(f"placing {source}") as tell:
        found = flow.place(
            source, device=device, devices=devices, objective=objective, link=link, batch=batch,
            memory_limit=plans.size_of(memory_limit), precision=precision, training=not inference, size=size,
            contiguous=not any_sets, seconds=seconds, progress=tell,
        )  # fmt: skip
    return report.plan.placed(found, source, device, grid)


def pipeline(
    model: str = argument(..., "MODEL", "A model as estimate reads it.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    devices: Devices = 2,
    micro_batches: int = option(8, "N", "Micro-batches of a batch; --batch is the size of one.", least=1),
    schedule: list[str] | None = option(None, "NAME", "Only this one, e.g. 2bw; several."),
    planner: str = option("placement", "placement|pipedream|piper", "The last two replicate stages."),
    memory_limit: MemoryLimit = "",
    link: Link = "",
    batch: options.Batch = None,
    precision: options.Precision = "",
    size: options.Size = "full",
    grid: options.Grid = None,
) -> Result:
    """Cut a model into stages and compare schedules.

    Each with its time, bubble and memory.

    Example: foretrace plan pipeline bert --device a100-40gb --devices 4 --batch 8
    """
    with options.progress(f"cutting {model}") as tell:
        found = flow.pipeline(
            model, device=device, devices=devices, micro_batches=micro_batches, schedules=schedule or (),
            planner=planner, memory_limit=plans.size_of(memory_limit), link=link, batch=batch, precision=precision,
            size=size, progress=tell,
        )  # fmt: skip
    return report.plan.pipelined(found, model, device, grid)


def soap(
    source: str = argument(..., "MODEL", "A model as estimate reads it, or a recording.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    devices: Devices = 4,
    per_node: int = option(0, "N", "Devices of a machine; by default the catalog's.", least=0),
    link: Link = "",
    between: str = option("", "RATE", "Of a machine in each direction, as 100gbit; by default the catalog's."),
    memory_limit: MemoryLimit = "",
    batch: options.Batch = None,
    precision: options.Precision = "",
    size: options.Size = "full",
    calls: int = option(4000, "N", "Strategies that each search may simulate.", least=1, most=10_000_000),
    seed: int = option(0, "N", "Of the search.", least=0),
    on: str = option("here", "here|ray", "Where the chains of a search run; the plan is the same."),
    grid: options.Grid = None,
    perfetto: options.Perfetto = None,
    top: options.Top = 12,
) -> Reply:
    """Split and place every operator on its own.

    By samples, attributes and parameters (FlexFlow), within memory, never slower than data parallelism.

    Example: foretrace plan soap vgg11 --size tiny --device p100 --devices 4 --calls 400
    """
    with options.progress(f"searching {source}") as tell:
        found = plans.plan_soap(
            source, device=device, devices=devices, per_node=per_node, link=link, between=between, batch=batch,
            memory_limit=plans.size_of(memory_limit), precision=precision, size=size, calls=calls, seed=seed, on=on,
            progress=tell,
        )  # fmt: skip
    return Reply(
        result=report.plan_training.planned_soap(found, source, grid), timelines=lambda: {source: found.simulated}
    )


def rows(
    source: str = argument(..., "LOOKUPS", "Ids that samples read (NPZ, Parquet), or zipf:1.05 tables=26 pooling=1."),
    devices: Devices = 4,
    memory: str = option("", "SIZE", "For tables, of a device, as 2GB; by default any.", "--memory"),
    width: int = option(64, "N", "Numbers in a row of a table.", least=1),
    inference: options.Inference = False,
    samples: int = option(0, "N", "Of a batch of a file, over all devices; by default 512.", least=0),
    out: Path | None = option(None, "FILE", "Write the placement (NPZ), too."),
    run: bool = flag("--run", "Also run it and others on real processes, and compare them with whole tables."),
    between: str = option("", "RATE", "With --run or --perfetto: of a device's link, as 50mbit; predicts seconds."),
    perfetto: options.Perfetto = None,
    kept: options.LedgerOptions = options.LedgerOptions(),
    top: options.Top = 8,
) -> Reply:
    """Place rows of embedding tables on devices.

    What each keeps, what it sends, and how far from the best that is.

    Example: foretrace plan rows "zipf:1.05 tables=26 pooling=1 samples=2048" --devices 4 --memory 2GB
    """
    from foretrace.training.rows.lookups import read

    if bool(between) > (run or perfetto is not None) or bool(perfetto) > bool(between):
        raise ForetraceError("`between=RATE` is the link of a run or a timeline; give it with `run=` or `perfetto=`.")
    writable(out)
    keep = kept.keeper(run=run and bool(between))
    lookups = read(source, samples=samples)
    found = plans.plan_rows(
        lookups, devices=devices, memory=plans.size_of(memory, "memory") or inf, width=width, training=not inference
    )
    ran: tuple[RanPlacement, ...] = ()
    if run:
        with options.progress(f"running {source}") as tell:
            ran = plans.run_rows(found, source, samples, link=between, tell=tell)
    measured = plans.rows_of_placement(ran, source, devices, between)
    where = keep(*measured) if measured else ()
    moved = plans.exchange_rows(found, lookups, between) if between else None
    view = report.plan_rows.planned_rows(found, source, ran, *where, moved=moved)
    drawn = {source: moved} if moved else {}
    return Reply(result=view, files={out: found.placement.save}, timelines=lambda: drawn)


def data(
    graph: str = argument(..., "GRAPH", "A folder in partitions, an NPZ file, or planted:nodes=10000 edges=100000."),
    memory: str = option(..., "SIZE", "For training, beyond interpreter and libraries, as 500MB.", "--memory"),
    task: str = option("", "links|nodes", "What is learnt; by default nodes where the graph has features and labels."),
    sample: str = option("", "N,N", "Compare only samplers of so many neighbours at each hop, with their caches."),
    batch: int = option(10_000, "N", "Edges, or training nodes, of a step.", least=1),
    width: int = option(32, "N", "Numbers in an embedding, or of a hidden layer.", least=1),
    seed: int = option(0, "N", "Seed of what is drawn.", least=0),
    run: bool = flag("--run", "Then train the choice within that memory, enforced, and in memory without a limit."),
    epochs: int = option(4, "N", "For --run, 3 at least.", least=3),
    perfetto: options.Perfetto = None,
    kept: options.LedgerOptions = options.LedgerOptions(),
    top: options.Top = 5,
) -> Reply:
    """Choose how a training reads a graph that may not fit.

    Loader, buffer and order with the quickest epoch.

    Example: foretrace plan data "planted:nodes=10000 edges=100000 communities=100" --memory 40MB
    """
    keep = kept.keeper(run=run)
    with options.stages("reading the graph") as tell:
        source = plans.GraphSource.of(graph)
        limit = plans.size_of(memory, "memory") or 0
        if sample:
            if source.data is None or run or task or perfetto:
                raise ForetraceError(
                    "`sample=` needs a graph that is not in partitions, without `task=`, `run=`, `perfetto=`."
                )
            ways = plans.samplers(
                source.data, num_neighbors=plans.fan_outs(sample), batch_size=batch, memory_bytes=limit, seed=seed
            )
            return Reply(result=report.plan_rows.planned_samplers(graph, source.data, limit, ways))
        found = plans.plan_data(source, memory_bytes=limit, task=task, batch=batch, width=width, seed=seed, tell=tell)
        measured, tried = plans.try_data(found, source, epochs=epochs, tell=tell) if run else (None, None)
    view = report.plan_rows.planned_data(found, tried, *(keep(measured) if measured else ()))
    return Reply(result=view, timelines=lambda: {graph: found.timeline})


def second_order(
    source: options.Source,
    workers: int = option(8, "N", "Data-parallel processes; 1 is allowed.", least=1, most=4096),
    network: str = option("10gbit/50us", "LINK|FILE", "Link between workers, or a file; not for one worker."),
    memory: str = option("", "SIZE", "For factors and inverses, of a worker, as 500MB; by default any.", "--memory"),
    every: list[str] | None = option(
        None, "F/I", "Steps between factors and inverses; several: the first is planned. By default 10/100 and 1/10."
    ),
    skip: str = option("", "GLOB,GLOB", "Layers that are left to the optimizer."),
    measure: bool = flag(
        "--measure/--no-measure", "Time K-FAC here, if this is the machine of the recording.", default=True
    ),
    seconds: float = option(60.0, "S", "At most this many seconds for timing it.", least=1.0),
    part: options.RankOptions = options.RankOptions(),
    top: options.Top = 16,
) -> Result:
    """Choose the gradient-worker fraction of K-FAC.

    With memory, communication and step of each (KAISA).

    TRACE is a recording of one worker. Example: foretrace plan second-order run/ --workers 8 --network 10gbit/50us
    """
    from foretrace.techniques import Kfac

    often = [plans.second_order.frequency(each) for each in every or ("10/100", "1/10")]
    before = plans.second_order.chain(workers, network)
    graph = part.of(source).calibrated().graph
    if measure:
        with options.progress("timing K-FAC") as told:
            graph, _ = experiment.with_hooks(graph, [(*before, Kfac(skip=skip))], seconds, told)
    with options.progress("predicting fractions") as told:
        found = plans.second_order.plan_second_order(
            graph, workers=workers, network=network, memory_bytes=plans.size_of(memory, "memory") or inf, every=often,
            skip=skip, progress=told,
        )  # fmt: skip
    return report.plan_training.planned_second_order(found, str(source))


def look_ups(
    model: str = argument(..., "MODEL", "A zoo model, a script with training(), or a file: ONNX, Chakra, JSON."),
    setting: list[str] = option(..., "V/K/DISTANCE=ACCURACY", "What was measured, as 9/16/l1=0.936; several."),
    dense: float = option(..., "SHARE", "Accuracy of the model without look-ups, measured on the same samples."),
    samples: int = option(..., "N", "Test samples that accuracies were measured on.", least=1),
    most_loss: float = option(0.01, "SHARE", "Accuracy that a choice may lose."),
    bits: int = option(8, "N", "Of inputs, prototypes and tables.", least=2, most=32),
    batch: int = option(1, "N", "Samples for which tables are read once.", least=1),
    bytes_per_cycle: float = option(16.0, "N", "From memory, in a cycle of the accelerator."),
    on_chip: bool = flag("--on-chip", "Tables and weights of all layers lie on the chip."),
    size: options.Size = "full",
    top: options.Top = 16,
) -> Result:
    """Compare accelerators that look products up.

    Product quantisation against multipliers, at accuracies that you measured.

    Example: foretrace plan look-ups resnet50 --setting 9/16/l1=0.755 --dense 0.761 --samples 50000
    """
    settings = [plans.look_ups.setting(each, dense=dense, samples=samples, bits=bits) for each in setting]
    around = cost.Surroundings(bytes_per_cycle=bytes_per_cycle, batch=batch, all_on_chip=on_chip)
    with options.progress(f"capturing {model}") as tell:
        batched = None if model.endswith(".py") else 1  # loaders of scripts need not be resizable
        graph = zoos.operators_of(model, size=size, batch=batched, training=False, progress=tell)
    found = plans.look_ups.plan_look_ups(graph, settings, most_loss=most_loss, around=around)
    return report.codesign.planned_look_ups(found, model)


def transformer(
    model: str = argument(..., "MODEL", "A decoder by name: gpt3-175b, llama-3-70b.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    devices: Devices = 8,
    batch: int = option(0, "N", "Samples per step; by default one for each device.", least=0),
    length: int = option(0, "N", "Words of a sequence; by default the model's.", least=0),
    link: str = option("", "RATE", "Between machines, of a device in each direction; by default the catalog's."),
    fix: list[str] | None = option(None, "KEY=N", "A degree that is given, e.g. tensor=8; several."),
    tokens: float | None = option(None, "N", "Words to train on, for GPU-hours: 300e9."),
    explain: bool = flag("--explain", "Say of every way to lose how many configurations lost by it."),
    unequal: bool = flag("--unequal", "Also cut the layers into stages that may differ (Alpa)."),
    strategy: options.Strategy = "",
    calls: options.Calls = 400,
    seed: int = option(0, "N", "Seed of --strategy.", least=0),
    grid: options.Grid = None,
    perfetto: options.Perfetto = None,
    export: str = option("", "TARGET", "Write the plan for torchrun, slurm, megatron, deepspeed, ... into --out."),
    out: Path | None = option(None, "FILE", "Where --export writes, or a folder to write into."),
    top: options.Top = 5,
) -> Reply:
    """Find the quickest way to train a large transformer.

    Of all configurations that fit on the devices.

    Example: foretrace plan transformer gpt3-175b --devices 512 --device a100-80gb --batch 1536
    """
    if bool(export) != (out is not None):
        raise ForetraceError("`export=TARGET` and `out=FILE` go together; give both, or neither.")
    if export and unequal:
        raise ForetraceError("`export=` writes stages that are alike, the best of them; leave out `unequal=`.")
    to = plans.export.target(export) if export else ""
    path = plans.export.path_of(out, to) if out else None
    writable(path)
    found = plans.plan_decoder(
        model, devices=devices, device=device, batch=batch or devices, length=length, fixed=options.degrees(fix),
        network_gb_s=hardware.parse_link(link).bytes_per_s / 1e9 if link else 0.0, runners_up=top,
    )  # fmt: skip
    files = dict[Path | None, Callable[[Path], object]]()
    if path is not None:
        space = found.space
        launch = plans.LaunchedPlan(model=space.model, at=found.configuration, batch=space.batch, node=space.on.node)
        text = plans.export.export(launch, to)
        files[path] = lambda into: write_text(into, text)
    stages = plans.unequal_stages(found.space) if unequal else None
    by = (
        plans.search_named(plans.ParallelismProblem(found.space), strategy, calls=calls, seed=seed)
        if strategy
        else None
    )
    view = report.plan.planned(found, model, tokens=tokens, unequal=stages, by=by, grid=grid)
    return Reply(result=view, how={"explain": explain}, files=files, timelines=lambda: {model: found.simulated})


def cache(
    trace: str = argument(
        ..., "LOOKUPS", "zipf:1.05, reuse:FILE or recorded:MODEL, each with key=value words, or ids as NPZ or Parquet."
    ),
    trainers: int = option(2, "N", "Trainers of the table, each with a link.", least=1, most=32),
    link: str = option(..., "RATE", "Of a trainer in each direction, as 50mbit."),
    look_ahead: int = option(16, "N", "Batches that are known ahead.", least=1),
    width: int = option(32, "N", "Numbers in a row of a table.", least=1),
    optimizer: str = option("sgd", "NAME", "Of rows: sgd, or adagrad, whose state travels with its row."),
    compute_ms: float | None = option(None, "MS", "That the passes of a batch take; --run sleeps what is missing."),
    run: bool = flag("--run", "Then train both ways in turns on shaped links, as root, and compare."),
    kept: options.LedgerOptions = options.LedgerOptions(),
) -> Result:
    """Predict what looking ahead over rows of a server gains.

    Steps, bytes, hit rate and memory, where embedding rows come from a server.

    Example: foretrace plan cache "zipf:1.05 samples=64 batches=16" --link 50mbit --look-ahead 4
    """
    keep = kept.keeper(run=run)
    question = plans.CacheQuestion(
        source=trace, lookups=plans.cache_trace(trace), trainers=trainers, link=link, look_ahead=look_ahead,
        optimizer=optimizer, compute_s=compute_ms / 1e3 if compute_ms is not None else None, width=width,
    )  # fmt: skip
    found = plans.plan_cache(question)
    if not run:
        return report.plan_rows.planned_cache(found)

    with options.stages("starting trainers") as tell:
        measured, tried = plans.try_cache(question, tell)
    return report.plan_rows.planned_cache(found, tried, *keep(*measured))


def sync(
    source: str = argument(..., "TIMES", "Of a step of each worker, as 100,100,100,300ms; or a folder of ranks."),
    policy: list[str] | None = option(None, "NAME", "With its knobs, as 'adsp period_s=2'; several; default all."),
    commit_ms: float = option(0.0, "MS", "From a commit to its answer, beside the bytes.", least=0),
    link: str = option("", "RATE", "Of a worker in each direction, as 1gbit; by default any."),
    parameters: int = option(0, "N", "Weights of the model, 4 bytes each.", least=0, most=10**12),
    share: float = option(1.0, "X", "Of the weights, that gaia and dgc send."),
    commits: int = option(0, "N", "In all, after which a run ends; by default after 1,000 steps.", least=0, most=10**6),
    run: bool = flag("--run", "Then run them as processes, with a small real model and steps of that length."),
    kept: options.LedgerOptions = options.LedgerOptions(),
    top: options.Top = 8,
) -> Result:
    """Compare ways in which workers of unlike speed agree.

    Steps per second, waiting and bytes of each policy.

    Example: foretrace plan sync 100,100,100,300ms --commit-ms 200
    """
    from foretrace.training.workers.policies import POLICIES

    keep = kept.keeper(run=run)
    recorded = os.path.exists(source)  # noqa: PTH110  (a pathlib path that is too long raises OSError)
    step_s = (
        plans.sync.recorded_step_times(options.scenario(Path(source), all_ranks=None).graph)
        if recorded
        else plans.sync.step_times(source)
    )
    policies = tuple(plans.sync.fitted(each, step_s) for each in policy or POLICIES)
    question = plans.sync.SyncQuestion(
        source=source, step_s=step_s, commit_s=commit_ms / 1e3, elements=parameters, share=share,
        bytes_per_s=hardware.parse_link(link).bytes_per_s if link else inf, policies=policies, commits=commits,
    )  # fmt: skip
    found = plans.sync.plan_sync(question)
    if not run:
        return report.plan_training.planned_sync(found)
    with options.stages("starting workers") as tell:
        tried = plans.sync.try_policies(question, tell)
    return report.plan_training.planned_sync(found, tried, *keep(*plans.sync.rows_of(question, tried)))


plan = group(
    "plan", "Share a model out over devices, and say how good that is.", default="transformer", models=_models,
    place=place, pipeline=pipeline, soap=soap, rows=rows, data=data, second_order=second_order,
    look_ups=look_ups, transformer=transformer, cache=cache, sync=sync,
)  # fmt: skip
