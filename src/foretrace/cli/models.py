"""Commands about models without a run: what a step computes, takes and could be instead, and its compiled code."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace import cost, experiment, flow, hardware, report
from foretrace import plan as plans
from foretrace import zoo as zoos
from foretrace.cli import completion, options
from foretrace.cli.answers import Reply, Result, writable
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError
from foretrace.names import chosen, keyed, resolve
from foretrace.report.names import command

if TYPE_CHECKING:
    from foretrace.cost.model import CostModel

# What says which step is meant, in the order in which the command to try next says it.
_RECIPE = (
    "device", "batch", "precision", "inference", "size", "do", "recompute", "recompute_every", "tensor", "network",
    "optimizer", "attention", "loss", "reentrant", "accumulate", "zero", "workers", "length", "dim", "threads",
)  # fmt: skip
_USUAL = {"size": "full", "tensor": 1, "accumulate": 1, "workers": 1}
_BY = ("family", "operator", "phase", "layer")


def estimate(
    source: str = argument(
        ..., "MODEL", "A zoo model, a decoder (llama-2-70b), a script with training(), ONNX, Chakra, JSON.",
        complete=completion.decoders,
    ),
    device: str = option(
        ..., "NAME", "As foretrace devices lists them; here: this processor.", complete=completion.devices
    ),
    batch: options.Batch = None,
    precision: options.Precision = "",
    inference: options.Inference = False,
    size: options.Size = "full",
    do: options.Do = None,
    recompute: bool = flag("--recompute", "Every block's forward pass again before its backward pass."),
    recompute_every: int = option(0, "N", "The same of every N-th block; 0: of none.", least=0),
    reentrant: bool = flag("--reentrant", "Blocks run again to their end, as in Megatron, not only as far as read."),
    accumulate: int = option(1, "N", "Micro-batches of --batch samples per update.", least=1),
    zero: int = option(0, "STAGE", "What ZeRO shares out; 3 is FSDP.", least=0, most=3),
    workers: int = option(1, "N", "Data-parallel workers; each has --batch.", least=1),
    gpus: int | None = option(None, "N", "Devices in all, instead of --workers.", least=1),
    tensor: int = option(1, "N", "Devices that share every layer of a decoder.", least=1),
    network: str = option("", "LINK", "Between workers: 400gbit/5us, a file, nccl:DEVICE."),
    optimizer: str = option("", "HOW", "Its implementation: fused, foreach or for-loop."),
    attention: str = option("", "HOW", "fused; flash-1, the first one; separate: products and a softmax."),
    loss: str = option("", "HOW", "fused: cross entropy of 16-bit scores in one kernel; separate."),
    pipeline: int = option(1, "", "", hidden=True),
    sequence: bool = flag("--sequence-parallel", "", hidden=True),
    length: int | None = option(None, "N", "Words of a sequence, for a decoder.", least=2),
    dim: list[str] | None = option(None, "NAME=N", "Size of an open dimension of an ONNX model."),
    out: Path | None = option(None, "FILE", "Write the task graph there, for whatif.", "--out", "-o"),
    threads: int | None = option(None, "N", "Intra-op threads, with --device here.", least=1, most=1024),
    measure: int = option(0, "N", "With --device here: first time N of its operators, those that tell most.", least=0),
    grid: options.Grid = None,
    top: options.Top = 14,
) -> Reply:  # fmt: skip
    """Predict a step's time and memory from the model alone.

    What is captured of a named model is kept in $FORETRACE_CACHE, else ~/.cache/foretrace.

    Example: foretrace estimate resnet50 --device h100 --batch 32 --precision bf16
    """
    given = locals()
    from foretrace.graph.store import save

    if pipeline != 1 or sequence:
        what = "--sequence-parallel" if sequence else f"--pipeline {pipeline}"
        raise ForetraceError(
            f"{what} is not modelled by estimate: layers are shared by --tensor, data by --zero; leave it out."
        )
    gc.disable()  # what is captured lives as long as the program; the collector need not go through it
    with options.progress(f"capturing {source}") as tell:
        found = flow.estimate(
            source, device=device, batch=batch, precision=precision, inference=inference, size=size,
            techniques=options.parsed(do), recompute=recompute_every or int(recompute), reentrant=reentrant,
            accumulate=accumulate, zero=zero, workers=workers, gpus=gpus, tensor=tensor, network=network,
            optimizer=optimizer, attention=attention, loss=loss, length=length, dims=options.sizes(dim),
            threads=threads, measure=measure, progress=tell,
        )  # fmt: skip
    given["workers"] = found.sharding.workers
    asked = {name: given[name] for name in _RECIPE if given[name] and given[name] != _USUAL.get(name)}
    view = report.estimate.estimate(found, model=source, asked=asked, out=out, grid=grid)
    return Reply(result=view, files={out: lambda path: save(found.step.lowered.graph, path)})


def operators(
    source: str = argument(
        ..., "SOURCE", "A zoo model, a script with training(), a recording, an execution trace, ONNX or JSON."
    ),
    size: str = option("", "tiny|full", "Size of a zoo model, full by default."),
    batch: int | None = option(None, "N", "Samples per step; where a file lacks it.", least=1),
    dim: list[str] | None = option(None, "NAME=N", "Size of an open dimension of an ONNX model."),
    step: int | None = option(None, "N", "The training step; by default the last one.", least=0),
    rank: options.Rank = None,
    salvage: options.Salvage = False,
    fuse: bool = flag("--fuse", "Fuse operators into kernels, as compilers do."),
    by: str = option("family", "|".join(_BY), "What a row of the table is."),
    out: Path | None = option(None, "FILE", "Write the operators there (.json or .json.gz).", "--out", "-o"),
    top: options.Top = 14,
) -> Reply:
    """Count a step's operators, FLOPs and bytes.

    Example: foretrace operators resnet50 --batch 32, or foretrace operators model.onnx --dim batch=8
    """
    from foretrace.model.blocks import with_blocks
    from foretrace.model.fusion import fuse as fused
    from foretrace.model.readers.json_form import checked, write

    by = resolve(by, _BY, {"families": "family", **{f"{each}s": each for each in _BY}}) or by
    if by not in _BY:
        raise ForetraceError(f"--by {by}: a row is a {', '.join(_BY[:-1])} or {_BY[-1]}.")
    if out is not None:
        checked(out)
    dims, reads = options.sizes(dim), Path(source).exists() and not source.endswith(".py")
    with options.progress(f"reading {Path(source).name}" if reads else f"capturing {source}") as tell:
        graph = zoos.operators_in(
            source, size=size, batch=batch, dims=dims, step=step, rank=rank, salvage=salvage, progress=tell
        )
    graph = with_blocks(fused(graph) if fuse else graph)
    again = {"size": size, "batch": batch, "dim": dim}
    then = command("operators", source, **again, step=step, rank=rank, salvage=salvage, fuse=True)
    if fuse:
        recorded = graph.source.startswith("recording")
        then = "" if recorded else command("estimate", source, device="h100", **again)
    view = report.models.operators(graph, fused=fuse, next=then)
    if by == "layer" and not view.layers:
        raise ForetraceError(f"--by layer: {source} does not name layers; leave it out, or take --by operator.")
    return Reply(result=view, how={"by": by}, files={out: lambda path: write(graph, path)})


def utilisation(
    model: str = argument(..., "MODEL", "A zoo model, a script with training(), or a file: ONNX, Chakra, JSON."),
    device: options.Device = "h100",
    batch: options.Batch = None,
    precision: options.Precision = "",
    inference: options.Inference = False,
    size: options.Size = "full",
    measured: list[Path] | None = option(None, "FILE", "Times to prefer to predictions: a recording or CSV; several."),
) -> Result:
    """Predict how much of a device a model uses.

    Example: foretrace utilisation resnet50 --device h100 --batch 32 --precision bf16
    """
    from foretrace.model.estimate import model_usage

    target = hardware.named(device)
    with options.progress(f"capturing {model}") as tell:
        graph = zoos.operators_of(
            model, size=size, batch=batch, precision=precision, training=not inference, progress=tell
        )
    used = model_usage(graph, device=target, known=[member for path in measured or () for member in _times(path)])
    then = command(
        "estimate", model, device=device, batch=batch, precision=precision, inference=inference,
        size="" if size == "full" else size,
    )  # fmt: skip
    return report.models.utilisation(used, model=model, training=not inference, next=then)


def _times(path: Path) -> list[CostModel]:
    """Return what was measured: a table, or the calls of a recording, on its own device and scaled to others."""
    if path.name.endswith((".csv", ".csv.gz")):
        return [cost.Measured.from_table(path)]
    graph = options.scenario(path).graph
    return [cost.Measured.from_graph(graph), cost.Scaled.from_graph(graph)]


def sparsity(
    model: str = argument(..., "MODEL", "A zoo model, or a script with training().", complete=completion.models),
    steps: int = option(0, "N", "Train so long; masks are taken before, halfway and after.", least=0),
    array: str = option(
        "", '"KEY=VALUE ..."',
        "pes, lanes, barrier, order=channels|pixels|blocked, dispatch=unmasked|fixed|redistributed, packing=tap|sum, "
        "bitmaps=yes|no, buffer_kib, bandwidth (bytes a cycle), word, multiply_pj, buffer_pj, memory_pj.",
    ),
    images: int = option(8, "N", "Samples of a batch whose masks are taken.", least=1),
    size: options.Size = "tiny",
    seed: int = option(0, "N", "Seed of weights and data.", least=0),
    top: options.Top = 14,
) -> Result:  # fmt: skip
    """Measure zeros in training, and what skipping them gains.

    The gain is of an array that multiplies no zeros.

    The answer with --json is what the technique sparse-accelerator takes by masks=.

    Example: foretrace sparsity vgg11 --array "lanes=8 dispatch=fixed"
    """
    from foretrace.training.sparsity import exact, samples

    on, make = cost.SparseArray.of(array), zoos.job(model, size, seed=seed)
    found, checked, why = [], None, ""
    with zoos.script_mistakes(model), options.progress(f"training {model}") as tell:
        training = make()
        for each in samples(training, (0, steps // 2, steps), images=images):
            found.append(report.models.sample(each, on))
            if tell:
                tell(each.step / max(steps, 1))
        try:
            checked = exact(training)
        except ForetraceError as error:
            why = str(error)
    return report.models.sparsity(found, model=model, size=size, array=on, images=images, exact=checked, unchecked=why)


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
    threads: options.Threads = 1,
    measure: bool = flag("--measure/--no-measure", "Run both models in turns on this machine.", default=True),
    out: Path | None = option(None, "FILE.pt2", "Write the model, as torch.export does."),
) -> Reply:
    """Rewrite a model into an equivalent one with faster operators.

    Inference only: weights are folded. Example: foretrace rewrite actor-critic --alpha 1.05 --budget 20
    """
    writable(out)
    if out is not None and out.suffix != ".pt2":
        raise ForetraceError(f"--out {out}: name a file that ends in .pt2.")
    wanted = plans.RewriteRequest(alpha=alpha, budget=budget, seconds=seconds, rules=rules, measure=measure).checked()
    with options.stages() as tell:
        found, count = plans.rewrite_named(
            source, size, batch, wanted=wanted, device=device, threads=threads, tell=tell
        )
    if out is not None and not found.check.equal:
        raise ForetraceError(
            f"{source} was not written: rewritten, it differs from the original by {found.check.float64:.1g} in "
            f"float64 and {found.check.float32:.1g} in float32; please report it with the model."
        )
    shown_size = "" if source.endswith(".py") else size
    view = report.programs.rewriting(found, wanted, source=source, size=shown_size, batch=count, wrote=str(out or ""))
    return Reply(result=view, files={out: found.emitted.write})


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
    found = chosen(kind, cost.PROGRAM_KINDS, f"kind {kind!r} is unknown")
    names = [*cost.PROGRAM_SIZES[found], *["t"] * (found == "matmul")]
    number = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)s", calibrate or "0s")
    if number is None or 0 < float(number[1]) < 5:
        raise ForetraceError(f"`calibrate={calibrate}` must be 5 to 999 seconds; write --calibrate 30s.")
    sizes = {name: _size(name, text) for name, text in keyed(size, names, found).items()}
    given = cost.program_task(found, **{name: sizes[name] for name in names if name in sizes})
    with options.progress("predicting schedules") as tell:
        ranked = cost.rank_schedules(
            given, tries=tries, measured=measure, seed=seed, calibrate_s=float(number[1]), tell=tell
        )
    return report.programs.program(ranked)


def _size(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 6 or not (int(text) or name == "t"):
        raise ForetraceError(f"{name}={text} must be a whole number from 1 to 999999; write {name}=64.")
    return int(text)


def kernels(
    model: str = argument(..., "MODEL|SCRIPT", "A zoo model, or a script with training().", complete=completion.models),
    size: options.Size = "tiny",
    threads: options.Threads = 1,
    seconds: float = option(20.0, "S", "For running steps, 3 of each kind at least; compiling is extra.", least=0.1),
    seed: int = option(0, "N", "Seed of weights and data.", least=0),
    top: options.Top = 12,
) -> Result:
    """Time each kernel of a compiled model in its step.

    The sum is held against the step of torch.compile.

    Example: foretrace kernels vgg11 --seconds 10
    """
    make = zoos.job(model, size, seed=seed)
    with hardware.operator_threads(threads), options.progress(f"compiling and running {model}") as tell:
        with zoos.script_mistakes(model):
            training = make()
        return report.programs.kernels(experiment.step_kernels(training, seconds=seconds, tell=tell), model)


def codesign(
    model: str = argument(
        ..., "MODEL", "A transformer by name (gpt2-2.5b), or its config.json.", complete=completion.decoders
    ),
    devices: int = option(1024, "N", "How many of the accelerators.", least=1),
    batch: int = option(4096, "N", "Samples per step.", least=1),
    area: float = option(0.0, "MM2", "Most area of one, in 45 nm; by default that of a TPU-like one, 279.", least=0.0),
    link: str = option("50GB/s", "RATE", "Between accelerators, of each in each direction."),
    length: int = option(0, "N", "Words of a sequence; by default the model's.", least=0),
    inference: options.Inference = False,
    decode: int = option(0, "WORDS", "One more word of each sample, with so many in its cache.", least=0),
    layer: bool = flag("--layer/--no-layer", "Order a layer's operators on the winner's cores.", default=True),
    strategy: options.Strategy = "",
    calls: options.Calls = 400,
    seed: int = option(0, "N", "Seed of --strategy.", least=0),
    perfetto: options.Perfetto = None,
    top: options.Top = 8,
) -> Reply:
    """Search the accelerator and the plan together.

    All designs with all plans are priced, so the best is proven within the model.

    Example: foretrace codesign gpt2-xl --devices 1024 --link 50GB/s
    """
    from foretrace.simulate.timeline import simulate

    between = hardware.parse_link(link)
    if between.latency_us:
        raise ForetraceError(
            f"`link={link}` must be a rate alone, as 50GB/s: latencies are not modelled; leave it out."
        )
    rate = between.bytes_per_s / 1e9
    with options.progress("pricing designs"):
        found = plans.best_design(model, devices=devices, batch=batch, area=area * 1e6, link_gb_s=rate,
                                  training=not inference, length=length, decode=decode)  # fmt: skip
    space, best = found.space, found.best
    given = space.model, best.plan, best.design
    layers = plans.layer_schedules(*given, training=space.training, decode=decode) if layer else ()
    runs = [simulate(each.graph()) for each in layers]
    ordered = [(each, run.window_ns / 1e9) for each, run in zip(layers, runs, strict=True)]
    by = plans.search_named(plans.DesignProblem(space, rate), strategy, calls=calls, seed=seed) if strategy else None
    view = report.codesign.codesigned(found, model, ordered, by=by)
    names = [f"a layer, {each.phase}" for each in view.layer]
    return Reply(result=view, timelines=lambda: {model: found.simulated, **dict(zip(names, runs, strict=True))})
