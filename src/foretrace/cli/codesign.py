"""`foretrace codesign`: which accelerator to build for a model, with the plan that uses it."""

from __future__ import annotations

from pathlib import Path

from foretrace.cli import completion, options
from foretrace.cli.answers import Reply
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError


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
    perfetto: Path | None = option(None, "FILE", "Write the timelines for Perfetto (.json or .json.gz), too."),
    top: options.Top = 8,
) -> Reply:
    """Search the accelerator and the plan together.

    All designs with all plans are priced, so the best is proven within the model.

    Example: foretrace codesign gpt2-xl --devices 1024 --link 50GB/s
    """
    from foretrace.hardware.cluster import parse_link
    from foretrace.plan.codesign.answer import codesign as search
    from foretrace.plan.codesign.schedule import layer_schedules
    from foretrace.plan.codesign.searched import DesignProblem
    from foretrace.report import perfetto as timelines
    from foretrace.report.codesign import codesigned
    from foretrace.report.tracks import track
    from foretrace.search.named import search_named
    from foretrace.simulate.timeline import simulate

    between = parse_link(link)
    if between.latency_us:
        raise ForetraceError(
            f"`link={link}` must be a rate alone, as 50GB/s: latencies are not modelled; leave it out."
        )
    rate = between.bytes_per_s / 1e9
    with options.progress("pricing designs"):
        found = search(model, devices=devices, batch=batch, area=area * 1e6, link_gb_s=rate, training=not inference,
                       length=length, decode=decode)  # fmt: skip
    space, best = found.space, found.best
    given = space.model, best.plan, best.design
    layers = layer_schedules(*given, training=space.training, decode=decode) if layer else ()
    runs = [simulate(each.graph()) for each in layers]
    ordered = [(each, run.window_ns / 1e9) for each, run in zip(layers, runs, strict=True)]
    by = search_named(DesignProblem(space, rate), strategy, calls=calls, seed=seed) if strategy else None
    view = codesigned(found, model, ordered, by=by)
    names = [f"a layer, {each.phase}" for each in view.layer]
    files = {perfetto: lambda path: timelines.write([track(model, found.simulated), *map(track, names, runs)], path)}
    return Reply(result=view, files=files)
