"""Commands about models without a run: what there is to try, what a step computes, takes and could be instead."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.cli import completion, options
from foretrace.cli.answers import Reply
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError
from foretrace.names import resolve

if TYPE_CHECKING:
    from foretrace.cost.model import CostModel
    from foretrace.report.views import Result

# What says which step is meant, in the order in which the command to try next says it.
_RECIPE = (
    "device", "batch", "precision", "inference", "size", "do", "recompute", "recompute_every", "tensor", "network",
    "optimizer", "attention", "loss", "reentrant", "accumulate", "zero", "workers", "length", "dim", "threads",
)  # fmt: skip
_USUAL = {"size": "full", "tensor": 1, "accumulate": 1, "workers": 1}
_BY = ("family", "operator", "phase", "layer")


def zoo(
    name: str = argument("", "[NAME]", "One model, to build and run.", complete=completion.models),
    size: options.Size = "tiny",
    steps: int = option(10, "N", "Steps to time, after a warm-up.", least=1),
    seed: int = option(0, "N", "Seed of weights and data.", least=0),
) -> Result:
    """List the models to verify on, or train one for some steps.

    Example: foretrace zoo resnet50
    """
    from foretrace.report.zoo import zoo
    from foretrace.zoo import registry

    if not name:
        return zoo(registry.entries().values())
    from foretrace.zoo.trial import trial

    found = registry.entry(name)
    with options.progress(f"training {name} ({size})") as progress:
        run = trial(registry.training(name, size, seed=seed), steps, progress)
    return zoo([found], run, size=size, seed=seed)


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
    threads: int | None = option(None, "N", "Threads of an operator, with --device here.", least=1),
    measure: int = option(0, "N", "With --device here: first time N of its operators, those that tell most.", least=0),
    grid: options.Grid = None,
    top: options.Top = 14,
) -> Reply:  # fmt: skip
    """Predict a step's time and memory from the model alone.

    What is captured of a named model is kept in $FORETRACE_CACHE, else ~/.cache/foretrace.

    Example: foretrace estimate resnet50 --device h100 --batch 32 --precision bf16
    """
    given = locals()
    from foretrace import flow
    from foretrace.graph.store import save
    from foretrace.report import estimate as report

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
    view = report.estimate(found, model=source, asked=asked, out=out, grid=grid)
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
    from foretrace.report import operators as report
    from foretrace.zoo.operators import operators_in

    by = resolve(by, _BY, {"families": "family", **{f"{each}s": each for each in _BY}}) or by
    if by not in _BY:
        raise ForetraceError(f"--by {by}: a row is a {', '.join(_BY[:-1])} or {_BY[-1]}.")
    if out is not None:
        checked(out)
    dims, reads = options.sizes(dim), Path(source).exists() and not source.endswith(".py")
    with options.progress(f"reading {Path(source).name}" if reads else f"capturing {source}") as tell:
        graph = operators_in(
            source, size=size, batch=batch, dims=dims, step=step, rank=rank, salvage=salvage, progress=tell
        )
    graph = with_blocks(fused(graph) if fuse else graph)
    view = report.operators(graph, path=source, fused=fuse)
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
    from foretrace.hardware.devices import named
    from foretrace.model.estimate import model_usage
    from foretrace.report import utilisation as report
    from foretrace.zoo.operators import operators_of

    target = named(device)
    with options.progress(f"capturing {model}") as tell:
        graph = operators_of(model, size=size, batch=batch, precision=precision, training=not inference, progress=tell)
    used = model_usage(graph, device=target, known=[member for path in measured or () for member in _times(path)])
    return report.of_model(
        used, model=model, training=not inference, next=f"foretrace estimate {model} --device {device}"
    )


def _times(path: Path) -> list[CostModel]:
    """Return what was measured: a table, or the calls of a recording, on its own device and scaled to others."""
    from foretrace.cost.devices.measured import Measured
    from foretrace.cost.devices.scaled import Scaled

    if path.name.endswith((".csv", ".csv.gz")):
        return [Measured.from_table(path)]
    graph = options.scenario(path).graph
    return [Measured.from_graph(graph), Scaled.from_graph(graph)]


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
    from foretrace.cost.accelerators.sparse import SparseArray
    from foretrace.report import sparsity as report
    from foretrace.training.sparsity import exact, samples
    from foretrace.zoo.registry import job, script_mistakes

    on, make = SparseArray.of(array), job(model, size, seed=seed)
    found, checked, why = [], None, ""
    with script_mistakes(model), options.progress(f"training {model}") as tell:
        training = make()
        for each in samples(training, (0, steps // 2, steps), images=images):
            found.append(report.sample(each, on))
            if tell:
                tell(each.step / max(steps, 1))
        try:
            checked = exact(training)
        except ForetraceError as error:
            why = str(error)
    return report.sparsity(found, model=model, size=size, array=on, images=images, exact=checked, unchecked=why)


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
    out: Path | None = option(None, "FILE.pt2", "Write the model, as torch.export does."),
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
