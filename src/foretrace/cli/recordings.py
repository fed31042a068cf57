"""Commands about a recording: look at it, ask what if, and write what its timeline shows."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import argument, flag, option
from foretrace.files import write_text

if TYPE_CHECKING:
    from foretrace.report.views import Result


class By(StrEnum):
    """What tasks are summed up by."""

    name = "name"
    layer = "layer"
    kind = "kind"
    phase = "phase"


def show(
    source: options.Source,
    rank: options.Rank = None,
    steps: options.Steps = "",
    salvage: options.Salvage = False,
    on: options.On = "here",
    top: options.Top = 6,
) -> Result:
    """Say what is in a recording and what holds its step back.

    Of several ranks: who waits for whom, and why; --rank looks at one of them.

    Example: foretrace show run/
    """
    run = options.scenario(source, rank=rank, steps=steps, salvage=salvage, all_ranks=None, on=on)
    from foretrace.report.show import show

    return show(run.simulate(), path=str(source))


def blame(
    *, by: By = option(By.name, "", "What to group rows by."), run: options.RunOptions, top: options.Top = 12
) -> Result:
    """Rank operators by what the step would save.

    Kernels, operators, layers or phases: the step time saved if they were 10 % faster, or gone.

    Example: foretrace blame run/ --by layer
    """
    timeline = run.read().simulate()
    from foretrace.report.blame import blame

    return blame(timeline, by.value, path=run.path)


def simulate(run: options.RunOptions) -> Result:
    """Replay a recording unchanged, beside what was measured.

    Example: foretrace simulate run/
    """
    timeline = run.read(as_recorded=True).simulate()
    from foretrace.report.simulate import simulate

    return simulate(timeline, path=run.path)


def check(run: options.RunOptions) -> Result:
    """Test a graph with questions whose answers are known.

    Checks its invariants, and what it predicts where the answer is known.

    Exit code 1 where a check fails. Example: foretrace check run/
    """
    found = run.read(as_recorded=True).check()
    from foretrace.report.check import check

    return check(found)


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
    from foretrace.report.compare import compare

    return compare(*sides, before_path=str(before), after_path=str(after))


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
    from foretrace.report.advise import advise

    with options.progress("trying techniques"):
        advice = scenario.advise(exact=exact)
    # A failure is our bug; it costs no other technique its advice, but it is reported like any other.
    names = ", ".join(each.name for each in advice.failed)
    failed = (
        ExceptionGroup(f"these techniques failed: {names}", [each.error for each in advice.failed]) if names else None
    )
    return Reply(result=advise(advice, path=run.path), error=failed)


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
    from foretrace.report import html
    from foretrace.report import perfetto as timelines
    from foretrace.report.whatif import whatif

    with options.progress("weighing the assumptions"):
        found = predicted.whatif()
        view = whatif(found, path=run.path, grid=grid)
    return Reply(
        result=view,
        page=lambda: html.render(html.page_of(found.before, [found], path=run.path)),
        files={perfetto: lambda path: timelines.write_runs(path, found.before, found), save: predicted.save},
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
    from foretrace.report import html

    with options.progress("weighing the what-ifs"):
        found = [scenario.apply(technique).whatif() for technique in techniques]
        write_text(out, html.render(html.page_of(scenario.simulate(), found, path=run.path)))
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
    from foretrace.report import perfetto

    found = scenario.apply(*techniques).whatif() if techniques else None
    perfetto.write_runs(out, scenario.simulate() if found is None else found.before, found)
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
