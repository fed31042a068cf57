"""`foretrace llm`: engines that serve large language models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foretrace.cli import completion, options
from foretrace.cli.answers import Reply, answers, group
from foretrace.cli.options import argument, option

if TYPE_CHECKING:
    from collections.abc import Callable

# How one engine is laid out, and where its step times come from.
Dtype = Annotated[str, option(..., "NAME", "Of weights: bf16, fp8, fp4 or int4.")]
Engine = Annotated[str, option(..., "NAME", "vllm, sglang or trtllm: whose overheads.")]
Tables = Annotated[Path | None, option(..., "FOLDER", "Measured operators as aiconfigurator collects them (parquet).")]

llm = group("llm", "Engines that serve large language models: simulate them under requests.")


@llm.command("simulate")
@answers
def simulate(
    model: str = argument(..., "MODEL", "A decoder by name, or its config.json.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    requests: str = option(
        "poisson qps=2",
        '"KIND KEY=VALUE ..."|FILE',
        "poisson, gamma, constant (qps=), closed (concurrency=) or burst, with prompt= and output=; or a trace.",
    ),
    seconds: float = option(600.0, "S", "How long requests come; 0: all of a trace.", least=0),
    tp: int = option(1, "N", "Devices that share each layer.", least=1),
    pp: int = option(1, "N", "Stages of a pipeline.", least=1),
    ep: int = option(1, "N", "Devices, of --tp, among which whole experts are divided.", least=1),
    dtype: Dtype = "bf16",
    engine: Engine = "vllm",
    tables: Tables = None,
    calibration: Path | None = option(None, "FILE", "What foretrace llm calibrate found of this server."),
    policy: str = option("chunked", "NAME", "chunked, prefill-first, orca or static."),
    token_budget: int = option(0, "N", "Tokens of a step; by default 2,048 of chunked, else 8,192.", least=0),
    sequences: int = option(256, "N", "Sequences that an engine runs at a time.", least=1),
    utilisation: float = option(0.9, "SHARE", "Of the device's memory that an engine uses."),
    preemption: str = option("recompute", "recompute|swap", "What becomes of a cache that has to make room."),
    replicas: int = option(1, "N", "Equal engines.", least=1),
    router: str = option("round-robin", "NAME", "round-robin, least-outstanding or prefix-aware."),
    pools: str = option("", "N:M|best", "Engines for prompts and for decoding, apart; best tries all of --replicas."),
    slo: str = option("", '"ttft.p99=0.5s ..."', "Limits of ttft, tpot, itl, e2e, each p50, p90, p99 or mean."),
    seed: int = option(0, "N", "Of what is drawn."),
    first_steps: int = option(2000, "N", "Steps that --save and --perfetto keep.", least=1),
    save: Path | None = option(None, "FILE", "Save the first steps as a graph for show, blame and others."),
    perfetto: options.Perfetto = None,
    on: options.On = "here",
) -> Reply:
    """Simulate engines of a model under requests: latencies, rates, and the use of the cache.

    Example: foretrace llm simulate llama-3-8b --device h100 --requests "poisson qps=2" --slo "ttft=0.5s tpot=50ms"
    """
    from foretrace import flow
    from foretrace.report import perfetto as timelines
    from foretrace.report.serving_llm import llm_simulated
    from foretrace.report.tracks import track
    from foretrace.serving.llm.ask import Serving
    from foretrace.serving.llm.engine import EngineRules

    rules = EngineRules(policy=policy, token_budget=token_budget, sequences=sequences, utilisation=utilisation,
                        preemption=preemption)  # fmt: skip
    ask = Serving(
        model=model, device=device, asked=requests, seconds=seconds, rules=rules,
        layout={"tp": tp, "pp": pp, "ep": ep, "dtype": dtype, "engine": engine, "tables": tables,
                "calibration": calibration},
        replicas=replicas, router=router, pools=pools, slo=slo, seed=seed, on=on,
        log=first_steps if save or perfetto else 0,
    )  # fmt: skip
    with options.progress(f"serving {model}"):
        found = flow.serve(ask)
    files: dict[Path | None, Callable[[Path], object]] = {
        save: lambda path: flow.engine_steps(found).save(path),
        perfetto: lambda path: timelines.write([track(model, flow.engine_steps(found).simulate())], path),
    }
    return Reply(result=llm_simulated(found), files=files)


@llm.command("calibrate")
@answers
def calibrate(
    runs: list[Path] = argument(..., "RUN...", "Results of vllm bench serve, SGLang's bench_serving, or llm simulate."),
    model: str = option(..., "NAME", "A decoder by name, or its config.json.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    tp: int = option(1, "N", "Devices that share each layer.", least=1),
    pp: int = option(1, "N", "Stages of a pipeline.", least=1),
    ep: int = option(1, "N", "Devices, of --tp, among which whole experts are divided.", least=1),
    dtype: Dtype = "bf16",
    engine: Engine = "vllm",
    tables: Tables = None,
    save: Path | None = option(None, "FILE", "Keep what was found, for --calibration."),
) -> Reply:
    """Fit what a server takes beside its modelled steps to measured runs of it.

    One run gives a factor on the devices' time and what a request waits; runs of several loads also the host's time.
    Example: foretrace llm calibrate bench.json --model llama-3-8b --device h100 --save server.json
    """
    from foretrace import flow
    from foretrace.report.llm_calibrate import llm_calibrated

    layout = {"tp": tp, "pp": pp, "ep": ep, "dtype": dtype, "engine": engine, "tables": tables}
    found = flow.calibrate_engine(runs, model, device, layout)
    return Reply(result=llm_calibrated(found, save), files={save: found.save})
