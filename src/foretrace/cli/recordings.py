"""Commands about a recording: look at it, ask what if, and write what its timeline shows."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from foretrace import experiment, hardware
from foretrace import plan as plans
from foretrace import report as reports
from foretrace import zoo as zoos
from foretrace.cli import options
from foretrace.cli.answers import Reply, Result
from foretrace.cli.options import argument, flag, option
from foretrace.errors import ForetraceError
from foretrace.files import write_text


class By(StrEnum):
    """What tasks are summed up by."""

    name = "name"
    layer = "layer"
    kind = "kind"
    phase = "phase"


def show(
    source: options.Source,
    part: options.RankOptions = options.RankOptions(),
    on: options.On = "here",
    top: options.Top = 6,
) -> Result:
    """Say what is in a recording and what holds its step back.

    Of several ranks: who waits for whom, and why; --rank looks at one of them.

    Example: foretrace show run/
    """
    run = part.of(source, all_ranks=None, on=on)

    return reports.show.show(run.simulate(), path=str(source))


def blame(
    *, by: By = option(By.name, "", "What to group rows by."), run: options.RunOptions, top: options.Top = 12
) -> Result:
    """Rank operators by what the step would save.

    Kernels, operators, layers or phases: the step time saved if they were 10 % faster, or gone.

    Example: foretrace blame run/ --by layer
    """
    timeline = run.read().simulate()

    return reports.show.blame(timeline, by.value, path=run.path)


def simulate(run: options.RunOptions) -> Result:
    """Replay a recording unchanged, beside what was measured.

    Example: foretrace simulate run/
    """
    timeline = run.read(as_recorded=True).simulate()

    return reports.check.simulate(timeline, path=run.path)


def check(run: options.RunOptions) -> Result:
    """Test a graph with questions whose answers are known.

    Checks its invariants, and what it predicts where the answer is known.

    Exit code 1 where a check fails. Example: foretrace check run/
    """
    found = run.read(as_recorded=True).check()

    return reports.check.check(found)


def compare(
    before: Path = argument(..., "BEFORE", "A recording or a saved graph."),
    after: Path = argument(..., "AFTER", "Another recording or saved graph."),
    *,
    part: options.PartOptions,
    top: options.Top = 12,
) -> Result:
    """Explain by layer why one of two runs takes longer.

    Example: foretrace compare before/ after/
    """
    sides = [part.of(source).simulate() for source in (before, after)]

    return reports.compare.compare(*sides, before_path=str(before), after_path=str(after))


def advise(
    *,
    exact: bool = flag("--exact", "Vary every assumption separately, however long."),
    calibration: options.Calibration = True,
    run: options.RunOptions,
    top: options.Top = 6,
) -> Reply:
    """Try every technique that applies and say what to do first.

    Ranked by what the step would save, the best three predicted together, refusals with their reason.

    Example: foretrace advise run/
    """
    scenario = run.read().calibrated() if calibration else run.read()

    with options.progress("trying techniques"):
        advice = scenario.advise(exact=exact)
    # A failure is our bug; it costs no other technique its advice, but it is reported like any other.
    names = ", ".join(each.name for each in advice.failed)
    failed = (
        ExceptionGroup(f"these techniques failed: {names}", [each.error for each in advice.failed]) if names else None
    )
    return Reply(result=reports.advise.advise(advice, path=run.path), error=failed)


def whatif(
    do: options.Do,
    *,
    perfetto: options.Perfetto = None,
    save: Path | None = option(None, "FILE", "Keep the predicted graph, for compare."),
    calibration: options.Calibration = True,
    grid: options.Grid = None,
    run: options.RunOptions,
) -> Reply:
    """Predict the step time with changes that have not been made.

    Example: foretrace whatif run/ --do fused-optimizer --do "prefetch-data workers=1" --html report.html
    """
    techniques = options.parsed(do)
    scenario = run.read()
    if calibration:
        scenario = scenario.calibrated()
        if known := len(scenario.graph.info.calibration.get("seconds", ())):
            options.say(
                f"using {known:,} operator times measured on the recorded machine (--no-calibration ignores them)"
            )
    predicted = scenario.apply(*techniques)

    with options.progress("weighing the assumptions"):
        found = predicted.whatif()
        view = reports.whatif.whatif(found, path=run.path, grid=grid)
    return Reply(
        result=view,
        page=lambda: reports.html.render(reports.html.page_of(found.before, [found], path=run.path)),
        files={perfetto: lambda path: reports.perfetto.write_runs(path, found.before, found), save: predicted.save},
    )


def report(
    *,
    do: options.Do = None,
    out: Path = option(Path("report.html"), "FILE", "The page to write.", "--out", "-o"),
    run: options.RunOptions,
) -> None:
    """Write one self-contained HTML page about a run.

    Timeline, breakdown, ranking, and every --do as a what-if of its own.

    Example: foretrace report run/ --do prefetch-data --do fused-optimizer --out report.html
    """
    techniques = options.parsed(do)
    scenario = run.read()

    with options.progress("weighing the what-ifs"):
        found = [scenario.apply(technique).whatif() for technique in techniques]
        write_text(out, reports.html.render(reports.html.page_of(scenario.simulate(), found, path=run.path)))
    options.wrote(out)


def export(
    *,
    do: options.Do = None,
    out: Path = option(Path("timeline.json.gz"), "FILE", ".json or .json.gz", "--out", "-o"),
    run: options.RunOptions,
) -> None:
    """Write the timeline for Perfetto, recorded and predicted.

    With --do, the lanes of the predicted run lie below the recorded ones.

    Example: foretrace export run/ --do prefetch-data --out timeline.json.gz, then open it in ui.perfetto.dev
    """
    techniques = options.parsed(do)
    scenario = run.read()

    found = scenario.apply(*techniques).whatif() if techniques else None
    reports.perfetto.write_runs(out, scenario.simulate() if found is None else found.before, found)
    options.wrote(out)


def graph(
    *,
    out: Path = option(..., "FILE", "The file to write.", "--out", "-o"),
    do: options.Do = None,
    run: options.RunOptions,
) -> None:
    """Build and save a task graph, for faster loading.

    Every other command takes the file in place of a recording.

    Example: foretrace graph run/ --out run.graph
    """
    techniques = options.parsed(do)
    run.read().apply(*techniques).save(out)
    options.wrote(out)


def stash(
    source: str = argument(..., "TRACE|SCRIPT|MODEL", "A recording; or what to run: a script, a model of the zoo."),
    workers: int = option(1, "N", "Workers; 2 or more for stalls between them."),
    inside: str = option("", "LINK|FILE", "Between workers of a machine, for a recording."),
    between: str = option("", "LINK|FILE", "Between machines; for runs, a shaped link: 300mbit."),
    gradient_mb: float = option(0.0, "MB", "All gradients, if the recording lacks them.", least=0.0),
    data: list[str] | None = option(None, "PATH", "Files of the data set, to be taken out of the page cache."),
    size: options.Size = "tiny",
    steps: int = option(8, "N", "Steps of every run and round.", least=1),
    rank: options.Rank = None,
) -> Result:
    """Show why a step stalls: workers, network, data loading.

    A recording is answered at once; a script or model is also run for real, four ways in turns, and both are compared.
    Example: foretrace stash resnet50 --workers 2
    """
    if options.is_recording(source):
        scenario = options.scenario(Path(source), rank=rank)
        found = experiment.stalls_of(
            scenario.graph, workers=workers, inside=inside, between=between, gradient_mb=gradient_mb
        )
        return reports.workers.stash(found, source=source, workers=workers)

    if inside or gradient_mb or rank is not None:
        raise ForetraceError("--inside, --gradient-mb and --rank are for recordings; runs measure these themselves.")
    zoos.job(source, size)
    wanted = experiment.DifferentialRequest(
        work=source, workers=workers, size=size, link=between, data=tuple(data or ()), steps=steps
    )
    with options.stages() as tell:
        compared = experiment.run_differently(wanted, tell or (lambda what, share: None))
    return reports.workers.stash(compared, source=source, workers=workers)


_WAIT = 3  # unprofiled steps on each side: enough for the CPU time beside the recorded steps


def profile(
    what: str = argument(..., "NAME|SCRIPT|TRACE", "A zoo model, a script with training(), or a recording."),
    size: options.Size = "tiny",
    steps: int = option(8, "N", "Steps to record.", least=1),
    threads: options.Threads = 1,
    batch: int | None = option(None, "N", "Samples per step, where the recording lacks it.", least=1),
    out: Path | None = option(None, "FOLDER", "Keep the recording there.", "--out", "-o"),
    peak_gflops: float | None = option(None, "X", "Peak of the device, GFLOP/s.", least=1e-3),
    peak_gb_s: float | None = option(None, "X", "Peak of its memory, GB/s.", least=1e-3),
    rank: options.Rank = None,
    salvage: options.Salvage = False,
    top: options.Top = 8,
) -> Reply:
    """Compare a job's rates with the peaks, and split its memory.

    Example: foretrace profile resnet50, or foretrace profile run/
    """
    from foretrace.techniques.compute.rates import peaks_of

    recorded, name = options.is_recording(what), what if what.endswith(".py") else f"{what} ({size})"
    if not recorded and out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ForetraceError(f"{out} is not an empty folder; give another one for the recording.")
    with TemporaryDirectory(prefix="foretrace-") as made:
        if recorded:
            run = options.scenario(Path(what), rank=rank, salvage=salvage)
        else:
            _record(what, size, name, steps, threads, out or Path(made))
            run, rank = options.scenario(out or Path(made)), None
        peaks = peaks_of(run.graph, gflops=peak_gflops, gb_s=peak_gb_s)
        view = reports.profile.profile(
            run.simulate(), peaks=peaks, memory=run.memory(rank), samples=batch,
            path=what if recorded else str(out or ""), name="" if recorded else name,
        )  # fmt: skip
    return Reply(result=view, files={out: lambda path: None})  # the recorder has written it


def _record(what: str, size: str, name: str, steps: int, threads: int, folder: Path) -> None:
    """Run the job in this process and record it; of a processor, with its peaks."""
    from foretrace.trace.recorder import RecordOptions
    from foretrace.training.recording import record_training

    training = zoos.job(what, size)()
    total = len(RecordOptions(wait=_WAIT, active=steps).phases(in_hook=False))
    options.say(f"recording {steps} of {total} steps of {name} with {threads} thread{'s' if threads > 1 else ''}")
    with hardware.operator_threads(threads), options.progress(f"running {name}") as bar, redirect_stdout(sys.stderr):
        peaks = {"peaks": hardware.cpu_peaks(threads).as_dict()} if training.device == "cpu" else {}
        tell = bar and (lambda seen: bar(seen / total))
        record_training(training, folder, facts=peaks, tell=tell, wait=_WAIT, active=steps)


def optimise(
    source: options.Source,
    goal: str = option("step-time", "step-time", "What to minimise.", "--for"),
    workers: int = option(1, "N", "Workers that train together."),
    network: str = option("", "RATE[/LATENCY]|FILE", "Between the workers: 10gbit/20us."),
    backend: str = option("", "gloo|nccl", "The communication back end; by the device."),
    gradient_mb: float = option(0.0, "MB", "Size of all gradients, where the recording hides them."),
    only_buckets: bool = flag("--only-buckets", "Leave precision, compiling and the optimizer as they are."),
    memory_limit: str = option("", "SIZE", "Most memory at the peak of a step: 16GB, 900MiB."),
    seconds: float = option(60.0, "S", "For the search and its answer; reading, and compiling once, are extra."),
    resume: Path | None = option(None, "FILE", "Keep the state of the search here, and continue from it."),
    write: Path | None = option(None, "FILE", "Write the configuration, as Python (.py) or JSON (.json)."),
    calibration: options.Calibration = True,
    part: options.RankOptions = options.RankOptions(),
) -> Reply:
    """Find the techniques and bucket sizes with the fastest step.

    Interrupt it for the best so far. Example: foretrace optimise run/ --for step-time --workers 8 --network 10gbit/20us
    """
    if goal != "step-time":
        raise ForetraceError(f"--for {goal} does not exist; choose step-time.")
    if seconds <= 0:
        raise ForetraceError(f"--seconds {seconds} is no time; give seconds above 0, e.g. --seconds 30.")
    if write is not None and write.suffix not in (".py", ".json"):
        raise ForetraceError(f"--write {write}: name a file that ends in .py or .json.")
    wanted = plans.OptimiseRequest(
        workers=workers, network=network, backend=backend, gradient_mb=gradient_mb,
        memory_limit=plans.size_of(memory_limit), only_buckets=only_buckets,
    ).checked()  # fmt: skip
    run = part.of(source)
    with options.stages("searching") as bar:
        found = (run.calibrated() if calibration else run).optimise(
            wanted,
            seconds=seconds,
            state=resume,
            tell=bar and (lambda what, share, best_s: bar(f"{what}; best {reports.units.seconds(best_s)}", share)),
        )
    chosen = plans.answer.configuration(found)
    return Reply(
        result=reports.optimise.optimise(found, chosen, plans.answer.snippet(chosen), source=str(source)),
        files={write: lambda path: write_text(path, plans.answer.text(chosen, path.suffix))},
    )
