"""`foretrace llm`: engines that serve large language models."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from foretrace import flow, report, serving
from foretrace.cli import completion, options
from foretrace.cli.answers import Reply, Result, group
from foretrace.cli.options import argument, option
from foretrace.errors import ForetraceError


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """What one engine runs on, and how its step times are known: further arguments of `step_times`."""

    tp: Annotated[int, option(..., "N", "Devices that share each layer.", least=1)] = 1
    dp: Annotated[int, option(..., "N", "Groups of them with sequences of their own (attention).", least=1)] = 1
    pp: Annotated[int, option(..., "N", "Stages of a pipeline.", least=1)] = 1
    ep: Annotated[int, option(..., "N", "Devices among which whole experts are divided.", least=1)] = 1
    dtype: Annotated[str, option(..., "NAME", "Of the weights: bf16, fp8, fp4 or int4 (experts alone).")] = "bf16"
    engine: Annotated[str, option(..., "NAME", "Whose step times: vllm, sglang or trtllm.")] = "vllm"
    tables: Annotated[Path | None, option(..., "FOLDER", "Measured operators of the device (aiconfigurator's).")] = None


def simulate(
    *,
    model: str = argument(..., "MODEL", "A decoder by name, or its config.json.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    requests: str = option(
        "poisson qps=2", '"KIND KEY=VALUE ..."|FILE',
        "poisson, gamma, constant, diurnal (qps=), closed (concurrency=), burst; prompt= and output=; or a trace.",
    ),
    seconds: float = option(600.0, "S", "How long requests come; 0: all of a trace.", least=0),
    layout: LayoutOptions,
    calibration: Path | None = option(None, "FILE", "What foretrace llm calibrate found of this server."),
    policy: str = option("chunked", "NAME", "chunked, prefill-first, orca or static."),
    token_budget: int = option(
        0, "N", "Tokens of a step (max_num_batched_tokens); default 2,048 of chunked, else 8,192.", least=0
    ),
    sequences: int = option(256, "N", "Sequences that an engine runs at a time (max_num_seqs).", least=1),
    utilisation: float = option(
        0.9, "SHARE", "Of the device's memory that an engine uses (gpu_memory_utilization)."
    ),
    preemption: str = option("recompute", "recompute|swap", "What becomes of a cache that has to make room."),
    replicas: int = option(1, "N", "Equal engines.", least=1),
    router: str = option("round-robin", "NAME", "round-robin, least-outstanding or prefix-aware."),
    pools: str = option("", "N:M|best", "Engines for prompts and for decoding, apart; best tries all of --replicas."),
    draft: str = option("", "DRAFT", "Speculative decoding: layers x width as 2x2048, or a decoder."),
    k: int | None = option(None, "N", "Tokens that the draft proposes in a round; by default 4."),
    acceptance: str = option("", "RATE", "Of what it proposes: 0.7 (by default), 0.6-0.8, or rounds 30/12/8/50."),
    slo: str = option("", '"ttft.p99=0.5s ..."', "Limits of ttft, tpot, itl, e2e, each p50, p90, p99 or mean."),
    seed: int = option(0, "N", "Of what is drawn.", least=0),
    grid: options.Grid = None,
    first_steps: int = option(2000, "N", "Steps that --save and --perfetto keep.", least=1),
    save: Path | None = option(None, "FILE", "Save the first steps as a graph for show, blame and others."),
    perfetto: options.Perfetto = None,
    on: str = option("here", "here|ray", "Where replicas are simulated: on this machine's cores, or a Ray cluster."),
) -> Reply:  # fmt: skip
    """Simulate engines of a model under requests.

    With latencies, rates, and the use of the cache.

    Example: foretrace llm simulate llama-3-8b --device h100 --requests "poisson qps=2" --slo "ttft=0.5s tpot=50ms"
    """
    given: dict[str, Any] = {"draft": draft, "k": k, "acceptance": acceptance}
    drafting = {name: value for name, value in given.items() if value not in (None, "")}
    if drafting and not draft:
        raise ForetraceError(f"`{next(iter(drafting))}=` is about a draft, and none is given; add `draft=4x2048`.")
    rules = serving.EngineRules(policy=policy, token_budget=token_budget, sequences=sequences, utilisation=utilisation,
                        preemption=preemption)  # fmt: skip
    with options.progress(f"serving {model}"):
        found = flow.simulate_llm(
            model=model, device=device, asked=requests, seconds=seconds,
            layout=asdict(layout) | {"calibration": calibration}, rules=rules, replicas=replicas, router=router,
            pools=pools, slo=slo, seed=seed, on=on, log=first_steps if save or perfetto else 0, **drafting,
        )  # fmt: skip

    def kept() -> flow.Scenario:
        return flow.Scenario(graph=serving.steps_graph(found.run, found.steps, rules))

    return Reply(
        result=report.llm.llm_simulated(found, grid=grid), files={save: lambda path: kept().save(path)},
        timelines=lambda: {model: kept().simulate()},
    )  # fmt: skip


def capacity(
    *,
    model: str = argument(..., "MODEL", "A decoder by name, or its config.json.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    slo: str = option(..., '"ttft.p99=0.5s ..."', "Limits of ttft, tpot, itl, e2e, each p50, p90, p99 or mean."),
    requests: str = option(
        "poisson requests=1000", '"KIND KEY=VALUE ..."|FILE',
        "Requests whose rate is changed: poisson, gamma, constant or diurnal, prompt= and output=; or a trace.",
    ),
    devices: int = option(8, "N", "Devices of one engine at most.", least=1),
    seconds: float = option(60.0, "S", "For the search.", least=0),
    dtype: str = option("bf16", "NAME", "Of the weights: bf16, fp8, fp4 or int4 (experts alone)."),
    price: float = option(0.0, "USD", "Of a device per hour; by default on the cheapest fitting machine.", least=0),
    state: Path | None = option(None, "FILE", "Keep what was found; the next search begins there."),
    seed: int = option(0, "N", "Of what is drawn.", least=0),
    grid: options.Grid = None,
    top: options.Top = 12,
    on: str = option("here", "here|ray", "Where deployments are simulated: on this machine's cores, or a Ray cluster."),
) -> Result:  # fmt: skip
    """Find the highest rate of requests that keeps the limits.

    For every deployment of a model, and what it costs.

    Example: foretrace llm capacity llama-3-8b --device h100 --devices 2 --slo "ttft.p99=0.5s tpot.p99=50ms"
    """
    asked = serving.SimulationConfig(
        model=model, device=device, asked=requests, layout={"dtype": dtype}, slo=slo, seed=seed, on=on
    )
    with options.progress(f"searching deployments of {model}") as progress:
        found = serving.capacities(asked, devices=devices, seconds=seconds, price=price, state=state, progress=progress)
    return report.llm.llm_capacity(found, grid=grid)


def calibrate(
    *,
    runs: list[Path] = argument(..., "RUN...", "Results of vllm bench serve, SGLang's bench_serving, llm simulate."),
    model: str = option(..., "NAME", "A decoder by name, or its config.json.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    layout: LayoutOptions,
    save: Path | None = option(None, "FILE", "Keep what was found, for --calibration."),
) -> Reply:
    """Fit what a server takes beside its steps, to measured runs.

    One run gives a factor on the devices' time and what a request waits; runs of several loads also the host's time.
    Example: foretrace llm calibrate bench.json --model llama-3-8b --device h100 --save server.json
    """
    law = serving.law_of(layout.engine)
    measured = [run for path in runs for run in serving.llm_calibration.read_runs(path)]
    steps = serving.step_times(model, device, **asdict(layout))
    found = serving.llm_calibration.calibrate(steps, measured, law.calibrated_low, law.calibrated_high)
    return Reply(result=report.llm.llm_calibrated(found, save), files={save: found.save})


def draft(
    *,
    target: str = argument(..., "TARGET", "A decoder by name, or its config.json.", complete=completion.decoders),
    device: str = option(..., "NAME", "As foretrace devices lists them.", complete=completion.devices),
    layout: LayoutOptions,
    acceptance: str = option("", "RATE", "What it accepts of any draft: 0.7, 0.6-0.8, or rounds by count 30/12/8/50."),
    k: int = option(0, "N", "Tokens that a draft proposes in a round; by default the best of 1 to 16.", least=0),
    batch: int = option(1, "N", "Sequences decoded together.", least=1),
    context: int = option(1024, "N", "Tokens that each attends to.", least=1),
    parameters: float = option(0.0, "N", "Of a draft at most; by default a tenth of the target's.", least=0),
    latency_ms: float = option(0.0, "MS", "Of a pass of a draft at most.", least=0),
    top: options.Top = 12,
) -> Result:  # fmt: skip
    """Find the draft with which a model decodes fastest.

    Its depth and width, for speculative decoding.

    Example: foretrace llm draft llama-2-70b --device h100 --tp 4 --parameters 1e9
    """
    of, on = serving.served_model(target), asdict(layout)
    setting = serving.DraftSetting(target=of, device=device, layout=on, batch=batch, context=context, k=k)
    with options.progress(f"searching drafts of {target}"):
        found = serving.search_drafts(setting, acceptance=acceptance, parameters=parameters, latency_s=latency_ms / 1e3)
    return report.llm.llm_drafts(setting, found, stated=bool(acceptance))


llm = group(
    "llm", "Engines of large language models under requests.", simulate=simulate, capacity=capacity,
    calibrate=calibrate, draft=draft,
)  # fmt: skip
