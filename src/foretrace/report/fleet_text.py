"""The answers about fleets as lines for people: the sentence, figures with intervals, why, the next command."""

from __future__ import annotations

from collections.abc import Iterator

from foretrace.report.fleet import energy, level_text, long_range, long_time
from foretrace.report.fleet_views import (
    FleetCompareView,
    FleetFitView,
    FleetRunView,
    FleetSlotsView,
    PolicyFigureView,
    SlotsView,
)
from foretrace.report.units import count, digits, share

COLUMNS = (
    ("mean JCT", "mean_jct_s", "time"),
    ("p50", "p50_jct_s", "time"),
    ("p99", "p99_jct_s", "time"),
    ("mean wait", "mean_queue_s", "time"),
    ("makespan", "makespan_s", "time"),
    ("used", "utilisation", "share"),
)
VERDICT = {"within noise": "within noise", "same": "the same in every run", "unknown": "noise unknown"}


def figure_text(value: float | None, kind: str) -> str:
    """A figure of a table."""
    if value is None:
        return "–"
    return share(value) if kind == "share" else long_time(value)


def facts(view: FleetRunView) -> list[str]:
    """What was simulated, in a few words each."""
    named = (view.source, f"{count(view.jobs)} jobs", f"{view.cluster}, {count(view.gpus)} GPUs", view.policy)
    return [each for each in named if each]


def run_lines(view: FleetRunView, *, rows: int = 8) -> Iterator[str]:
    """`foretrace fleet run` for people; at most `rows` tenants, those with most GPU time first."""
    yield " · ".join(facts(view))
    yield ""
    yield view.headline
    yield ""
    head = "".join(f"{word:>10}" for word in ("mean", "p50", "p90", "p99"))
    yield f"  {'':16}{head}   {'interval of the mean' if view.intervals else ''}".rstrip()
    completion = (view.mean_jct_s, view.p50_jct_s, view.p90_jct_s, view.p99_jct_s)
    waiting = (view.mean_queue_s, view.p50_queue_s, view.p90_queue_s, view.p99_queue_s)
    for word, name, figures in (("completion", "mean_jct_s", completion), ("waiting", "mean_queue_s", waiting)):
        yield f"  {word:16}{''.join(f'{long_time(each):>10}' for each in figures)}   {_interval(view, name)}".rstrip()
    yield f"  {'makespan':16}{long_time(view.makespan_s):>10}{'':33}{_interval(view, 'makespan_s')}".rstrip()
    also = ""
    if view.useful_utilisation is not None and view.lost.gpu_h:
        also = f"   {share(view.useful_utilisation)} without lost time"
    used = figure_text(view.utilisation, "share")
    yield f"  {'GPUs in use':16}{used:>10}{also:33}{_interval(view, 'utilisation')}".rstrip()
    if view.repetitions > 1:
        yield f"  {level_text(view.interval_level)} intervals from {count(view.repetitions)} runs: {view.repeated_how}"
    if view.causes:
        yield ""
        yield f"  {'waits because':62}{'of all jobs':>12}{'share':>9}"
        for cause in view.causes:
            yield f"  {cause.why[:62]:62}{long_time(cause.wait_s):>12}{share(cause.share):>9}"
    if view.communication.total_s:
        comm = view.communication
        wide = ""
        if comm.above_machine_s is not None:
            wide = f", {long_time(comm.above_machine_s)} of it between machines"
            if comm.above_machine_low_s != comm.above_machine_high_s:
                wide += f" ({long_range(comm.above_machine_low_s or 0, comm.above_machine_high_s or 0)})"
        yield ""
        yield (
            f"  communication: {long_time(comm.total_s)} over all jobs{wide}; {share(comm.share_of_running)} of the "
            "running time"
        )
    if view.mean_rho is not None:
        worst = f"p99 {digits(view.p99_rho or 0)}, worst {digits(view.worst_rho or 0)}"
        yield f"  fairness: rho {digits(view.mean_rho)} on average, {worst}; 1 or less is a fair share"
    if view.lost.gpu_h:
        lost = view.lost
        yield (
            f"  lost: {digits(lost.gpu_h)} GPU-hours without progress ({count(lost.preemptions)} preemptions, "
            f"{count(lost.failures)} failures)"
        )
    if view.usd_all is not None and view.usd_used is not None:
        yield f"  cost: ${view.usd_used:,.0f} for what jobs held, ${view.usd_all:,.0f} for all GPUs all the time"
    if view.kwh is not None:
        yield f"  energy: {energy(view.kwh)}, GPUs alone"
    if view.slots:
        yield ""
        yield from _slot_table(view.slots)
    if len(view.tenants) > 1:
        yield ""
        yield f"  {'tenant':20}{'jobs':>9}{'GPU time':>10}{'mean JCT':>11}{'p99':>10}{'mean wait':>11}{'rho':>8}"
        for each in view.tenants[:rows]:
            rho = "–" if each.mean_rho is None else digits(each.mean_rho)
            times = f"{long_time(each.mean_jct_s):>11}{long_time(each.p99_jct_s):>10}{long_time(each.mean_queue_s):>11}"
            yield f"  {each.tenant[:20]:20}{count(each.jobs):>9}{share(each.gpu_share):>10}{times}{rho:>8}"
        if len(view.tenants) > rows:
            yield f"  {count(len(view.tenants) - rows)} more: --json."
    yield ""
    for note in view.notes:
        yield f"  {note}"
    if view.repetitions == 1:
        unknown = "one run has no interval: moving submissions by a minute moves a makespan by some per cent"
        yield f"  {view.facts.get('range', unknown)}"
    if view.next:
        yield f"  next: {view.next}"


def _interval(view: FleetRunView, name: str) -> str:
    found = view.intervals.get(name)
    if found is None or found.low is None or found.high is None:
        return ""
    if name == "utilisation":
        return f"{digits(100 * found.low)} – {share(found.high)}"
    return long_range(found.low, found.high)


def _slot_table(slots: tuple[SlotsView, ...]) -> Iterator[str]:
    yield f"  {'free slots':26}{'now':>8}{'on average':>12}{'if together':>13}{'empty cluster':>15}"
    for each in slots:
        means = f"{digits(each.mean_free):>12}{digits(each.mean_together):>13}"
        where = f"{each.slot_gpus} GPUs inside a {each.level}"
        yield f"  {where:26}{count(each.free_now):>8}{means}{count(each.capacity):>15}"


def compare_lines(view: FleetCompareView) -> Iterator[str]:
    """`foretrace fleet compare` for people."""
    yield f"{view.source} · {count(view.jobs)} jobs · {view.cluster}, {count(view.gpus)} GPUs"
    yield ""
    yield view.headline
    yield ""
    wide = max(12, *(len(each.policy) + 2 for each in view.policies))
    titles = "".join(f"{title:>12}" for title, _, _ in COLUMNS)
    yield f"  {'policy':{wide}}{titles}   mean JCT against {view.baseline}"
    for row in view.policies:
        cells = "".join(f"{figure_text(row.figures[name].mean, kind):>12}" for _, name, kind in COLUMNS)
        yield f"  {row.policy:{wide}}{cells}   {against(row.figures['mean_jct_s'])}".rstrip()
    if view.repetitions > 1:
        yield ""
        yield f"  {'mean JCT':{wide}}{f'{level_text(view.interval_level)} interval':>24}"
        for row in view.policies:
            each = row.figures["mean_jct_s"]
            if each.low is not None and each.high is not None:
                yield f"  {row.policy:{wide}}{long_range(each.low, each.high):>24}"
        yield f"  from {count(view.repetitions)} runs of each: {view.repeated_how}"
    for note in view.notes:
        yield f"  {note}"
    if view.next:
        yield f"  next: {view.next}"


def against(each: PolicyFigureView) -> str:
    """As in "0.61× (0.58 – 0.64)", "1.01× (0.98 – 1.04), within noise"."""
    if each.verdict == "baseline":
        return "baseline"
    if each.ratio is None:
        return "not known"
    text = f"{digits(each.ratio)}×"
    if each.ratio_low is not None and each.ratio_high is not None and each.verdict != "same":
        text += f" ({digits(each.ratio_low)} – {digits(each.ratio_high)})"
    return f"{text}, {VERDICT[each.verdict]}" if each.verdict in VERDICT else text


def slots_lines(view: FleetSlotsView) -> Iterator[str]:
    """`foretrace fleet slots` for people."""
    yield " · ".join(part for part in (view.source, f"{view.cluster}, {count(view.gpus)} GPUs", view.policy) if part)
    yield ""
    yield view.headline
    yield ""
    yield from _slot_table(view.slots)
    for note in view.notes:
        yield f"  {note}"
    if view.next:
        yield f"  next: {view.next}"


def fit_lines(view: FleetFitView) -> Iterator[str]:
    """`foretrace fleet fit` for people."""
    yield view.headline
    yield ""
    yield f"  kinds of jobs {count(view.kinds)}, by tenant {count(view.strata)}; rhythm: {view.profile_of}"
    yield "  kept: tenant x kind x duration, sweeps, rhythm and wandering of arrivals"
    yield "  not kept: users, and how they react to queues"
    for note in view.notes:
        yield f"  {note}"
    if view.stored:
        yield f"  stored: {view.stored}"
    if view.next:
        yield f"  next: {view.next}"
