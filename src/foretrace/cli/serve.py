"""`foretrace serve`: a model behind HTTP on this machine's cores, how to split them, and load for such a server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from foretrace import plan as plans
from foretrace import report, serving
from foretrace.cli import completion, options
from foretrace.cli.answers import Result, group, writable
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError

_MODEL = "A zoo model, SCRIPT.py:FUNCTION that returns (module, example inputs), TorchScript, torch.export or ONNX"
Inputs = Annotated[
    list[str] | None, option(..., "NAME=TYPE[SIZES]", "An input of one sample: x=float32[3,224,224]; several.")
]
Token = Annotated[Path | None, option(..., "FILE", "Bearer token of the server, else FORETRACE_TOKEN's.")]


def _source(model: str, size: str, inputs: list[str] | None) -> serving.ModelSource:
    return serving.ModelSource(name=model, size=size, inputs=tuple(map(serving.TensorSpec.parse, inputs or ())))


def run(
    model: str = argument(..., "MODEL", f"{_MODEL}.", complete=completion.models),
    split: str = option(
        "", "NxT:B+...", "N instances with T threads and batch B each; by default one, all cores, batch 8."
    ),
    plan: list[Path] | None = option(None, "FILE", "JSON of serve plan; of several the one for the load; several."),
    input: Inputs = None,
    size: options.Size = "full",
    host: str = option("127.0.0.1", "ADDRESS", "Where to listen; beyond this machine a token is needed."),
    port: int = option(8000, "N", "Where to listen; 0 takes any free one.", least=0, most=65535),
    token_file: Token = None,
    certificate: Path | None = option(None, "FILE", "For TLS, as PEM; with --key."),
    key: Path | None = option(None, "FILE", "The certificate's key."),
    queue: int = option(1024, "N", "Samples that may wait.", least=1),
    deadline_s: float = option(60.0, "S", "The longest that a request may take.", least=0.001),
    every_s: float = option(1.0, "S", "Between two looks at the load, with several plans.", least=0.1),
) -> None:
    """Serve a model over HTTP, until Ctrl-C.

    By the Open Inference Protocol; also without the word run.
    Example: foretrace serve run resnet50 --size tiny --split 2x1:4
    """
    if split and plan:
        raise ForetraceError("`split=` and `plan=` both say how to split the cores; give one of them.")
    if (certificate is None) != (key is None):
        raise ForetraceError("`certificate=` and `key=` go together; give both, or neither.")
    one = serving.CoreSplit.parse(split or f"1x{len(serving.server_run.usable())}:8")
    serving.server_run.run_server(
        _source(model, size, input), serving.server_run.read_plans(plan) if plan else {one.batch: one},
        every_s=every_s, host=host, port=port, token=serving.server_run.read_token(token_file), queue=queue,
        certificate=certificate, key=key, deadline_s=deadline_s,
        told=lambda address: print(f"serving {model} on {address}, Ctrl-C ends it", flush=True),
    )  # fmt: skip


def plan(
    model: str = argument(..., "MODEL", f"{_MODEL}, or its name in a recorded profile.", complete=completion.models),
    batch: int = option(..., "N", "Samples of a batch.", least=1),
    threads: int | None = option(None, "N", "Cores to share out; by default all that can be had.", least=1),
    tail: float = option(0.5, "Q", "The quantile of the latency to make small: 0.99; by default the median."),
    memory_limit: str = option("", "SIZE", "For the weights of all instances, as 16GB."),
    profile: Path | None = option(None, "FILE", "Latencies of instances (CSV), kept there; by default in the cache."),
    input: Inputs = None,
    size: options.Size = "full",
    run: bool = flag("--run", "Then run the best split, one instance and an instance per thread in turns."),
    seconds: float = option(30.0, "S", "For --run, 8 rounds at least.", least=0.1),
    rows: options.LedgerOptions = options.LedgerOptions(),
) -> Result:
    """Split cores among instances of a model.

    So that a batch ends soonest: how many instances, with which threads and samples.

    Example: foretrace serve plan resnet50 --size tiny --batch 16
    """
    writable(profile)
    keep = rows.keeper(run=run)
    with options.stages("loading the model") as tell:
        found = serving.plan_splits(
            _source(model, size, input), batch=batch, threads=threads, tail=tail,
            memory_limit=plans.size_of(memory_limit), profile=profile, tell=tell,
        )  # fmt: skip
    if not run:
        return report.serve.planned(found)
    with options.progress("running splits in turns") as share:
        trial, row = serving.try_splits(found, seconds=seconds, tell=share)
    return report.serve.planned(found, trial, *keep(row))


def load(
    url: str = argument(..., "URL", "http://127.0.0.1:8000, or with /v2/models/NAME."),
    rate: float = option(10.0, "R", "Requests per second, of diurnal ones at the peak.", least=0.001),
    arrivals: str = option("poisson", "constant|poisson|diurnal|FILE", "When they come; of a CSV, its arrivals."),
    clients: int = option(0, "N", "Instead of a rate: so many clients that wait for each answer.", least=0),
    samples: int = option(1, "N", "Samples of a request.", least=1),
    seconds: float = option(10.0, "S", "How long requests are sent; answers come later.", least=0.01),
    seed: int = option(0, "N", "Seed of samples and arrivals.", least=0),
    token_file: Token = None,
) -> Result:
    """Send requests to a server and time its answers.

    Counted from when each was due. Exit code 1 where a request had no answer.
    Example: foretrace serve load http://127.0.0.1:8000 --rate 50
    """
    if clients and arrivals != "poisson":
        raise ForetraceError("`clients=` ask as soon as they are answered; leave `arrivals=` out, or give a rate.")
    due = None if clients else serving.server_load.arrivals(arrivals, rate=rate, seconds=seconds, seed=seed)
    with options.progress(f"asking {url}") as tell:
        found = serving.server_load.load(
            url, due=due, clients=clients, seconds=seconds, samples=samples, seed=seed,
            token=serving.server_run.read_token(token_file), progress=tell,
        )  # fmt: skip
    return report.serve.loaded(found, url=url, arrivals=arrivals, clients=clients, samples=samples)


serve = group(
    "serve", "Serve a model on the cores of this machine.", default="run", models=partial(completion.models, ""),
    run=run, plan=plan, load=load,
)  # fmt: skip
