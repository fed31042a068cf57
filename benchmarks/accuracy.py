"""Score predictions against everything that was really measured; writes the pages of docs/accuracy/.

    python benchmarks/accuracy.py [replay] [kernels] [loader] [gpu] [techniques] ... [collectives]

Without arguments every page is written again; with names, only those. Recordings of other machines are found by
FORETRACE_SHARED_DATA; pages that need them are skipped where they are absent. docs/accuracy.md, the table of one line
per page, is written by hand: tests/test_docs.py fails where a figure of a line is not on its page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from foretrace import flow
from foretrace.experiment.ledger import Row, import_lines, models_of
from foretrace.experiment.statistics import Verdict
from foretrace.files import write_bytes, write_text
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.check import check, device_zero, host_zero, structural_error, swap_steps
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse_all
from kernel_swap import swap
from ledger_tables import markdown, markdown_summary
from tables import ROOT, percent, shared_traces, table, today
from verify_rig import HELD_OUT, UNSEEN

PAGES = ROOT / "docs" / "accuracy"
DATA = ROOT / "benchmarks" / "data"
GPU = DATA / "gpu"
LOADER = tuple(f"kineto/resnet50_num_workers_{n}.*.json.gz" for n in (0, 4))
DEVICES = ("Qwen_Qwen1.5-0.5B-Chat", "gaunernst_bert-small-uncased", "google_owlv2-large-patch14-ensemble")


def made(where: str) -> str:
    return f"*{today()}, {where}.*\n\n"


# --- replay and counterfactuals: every recording, no truth needed --------------------------------------------


def replay_section(traces: Path) -> str:
    """Self-replay, structural replay, step swap and the two counterfactuals, one row per recording."""
    rows = []
    for path in _recordings(traces):
        run = flow.read(path)
        for rank in [each.rank for each in run.trace.ranks]:
            graph = run.graph(rank=rank, as_recorded=True).graph
            name = f"{path.parent.name}/{path.name.split('.')[0][:44]}"
            rows.append(_replay_row(name + (f" rank {rank}" if len(run.trace.ranks) > 1 else ""), graph))
    header = (
        "recording", "tasks", "steps", "self-replay ns", "structural (worst step)", "step swap mean (max)",
        "guess", "GPU = 0 ms (host alone)", "CPU = 0 ms (busiest stream)", "unexplained", "attributed",
        "not usable for",
    )  # fmt: skip
    return (
        made("the arithmetic does not depend on the machine")
        + (
            "*Self-replay*: largest difference between replayed and recorded starts. *Structural*: the window "
            "with typical instead "
            "of recorded lags and no unexplained delays. *Step swap*: durations of step i on the graph of step "
            "j, all pairs; "
            "*guess* is the error of taking step j for step i. *GPU = 0* must give the time of the host alone "
            "and never less, "
            "*CPU = 0* the busiest stream with its gaps where there is one stream. Shares of GPU time in %.\n\n"
        )
        + table(header, rows)
    )


def _recordings(traces: Path) -> list[Path]:
    found = [path for folder in ("kineto", "hta", "tracelens") for path in sorted((traces / folder).glob("*.json.gz"))]
    found += [*sorted((traces / "param").glob("*_kineto.json.gz")), traces / "param" / "dlrm_kineto_8rank"]
    return [*found, *sorted((traces / "triosim").glob("*_kineto.json.gz")), *sorted((ROOT / "tests/data").glob("*.gz"))]


def _replay_row(name: str, graph: TaskGraph) -> list[str]:
    timeline = simulate(graph)
    self_replay = int(np.abs(timeline.start - graph.recorded).max(initial=0))
    total, worst = structural_error(graph)
    swapped = guess = zero = busy = unexplained = attributed = "–"
    if graph.n_steps > 1:
        result = swap_steps(graph)
        swapped, guess = f"{percent(result.mean_error)} ({percent(result.worst_error)})", percent(result.trivial_error)
    if graph.on_device.any():
        window, host = device_zero(graph)
        span, busiest, _ = host_zero(graph)
        zero, busy = f"{window / 1e6:.2f} ({host / 1e6:.2f})", f"{span / 1e6:.2f} ({busiest / 1e6:.2f})"
        unexplained, attributed = percent(graph.info.unexplained_share), percent(graph.info.attributed_share)
    report = check(graph)
    reasons = [finding.name for finding in report.findings if finding.verdict == "fail"]
    if not report.gpu_whatifs:
        reasons = ["what-ifs on the device", *(r for r in reasons if r != "unexplained delay")]
    return [
        name, f"{len(graph):,}", str(graph.n_steps), str(self_replay),
        f"{percent(total, signed=True)} ({percent(worst)})", swapped, guess, zero, busy, unexplained, attributed,
        ", ".join(reasons) or "–",
    ]  # fmt: skip


# --- kernel times of another GPU ----------------------------------------------------------------------------


def kernels_section(traces: Path) -> str:
    """One GPU's kernel times on the graph that another GPU recorded, in both directions."""
    rows = []
    for model in DEVICES:
        sides = [next((traces / "tracelens").glob(f"{device}_{model}*")) for device in ("h100", "mi300")]
        h100, mi300 = (flow.read(path).graph().graph for path in sides)
        for graph, target, way in ((h100, mi300, "H100 → MI300X"), (mi300, h100, "MI300X → H100")):
            result = swap(graph, target)
            rows.append([
                f"{model.split('_')[-1]}, {way}", f"{1e3 * result.measured_s:.1f}",
                percent(result.kernels_only, signed=True), percent(result.with_host, signed=True),
                f"{result.host_factor:.2f}", f"{result.data_factor:.2f}", percent(result.matched),
            ])  # fmt: skip
    header = (
        "model, graph → kernels of",
        "measured ms",
        "error, kernels alone",
        "with host factor",
        "host",
        "data",
        "matched",
    )
    return (
        made("recordings of the same model and input on both GPUs")
        + (
            "Operators matched in order, their kernels take the other GPU's times; *with host factor*: host work "
            "scaled by the "
            "ratio of the two hosts, data loading apart. The factor is taken from the target, so this is the "
            "best that is "
            "knowable, not a prediction from one machine.\n\n"
        )
        + table(header, rows)
    )


# --- the one independent before/after pair of the collection --------------------------------------------------


def loader_section(traces: Path) -> str:
    """ResNet-50 with loader workers 0 predicts the run with workers 4."""
    before, after = (flow.read(next(traces.glob(pattern))).graph() for pattern in LOADER)
    steps = after.simulate().step_times_ns / 1e6
    typical = float(np.median(steps[1:]))  # the first step fetches what every later one finds fetched
    rows = []
    for words in ("prefetch-data workers=4", "prefetch-data workers=4 host_contention=1 copy_contention=1"):
        found = before.apply(*parse_all([words])).whatif()
        low, high = (1e3 * each for each in found.interval_s)
        rows.append([
            f"`{words}`", f"{1e3 * found.before_s:.1f}", f"{1e3 * found.after_s:.1f}", f"{low:.1f} – {high:.1f}",
            f"{typical:.1f}", percent(1e3 * found.after_s / typical - 1, signed=True),
            "yes" if low <= typical <= high else "no",
        ])  # fmt: skip
    header = ("asked", "before ms", "predicted ms", "80 % interval", "measured ms", "error", "covered")
    shown = ", ".join(f"{step:.1f}" for step in steps)
    return (
        made("ResNet-50 on one V100, recorded in 2021 by others")
        + (
            f"Measured steps with 4 workers: {shown} ms; compared is the median without the first. The second "
            "row assumes that "
            "workers slow nothing down; the first uses the technique's stated ranges, which are not tuned to "
            "this pair.\n\n"
        )
        + table(header, rows)
    )


# --- pairs recorded on GPUs by the project itself ----------------------------------------------------------------


def gpu_section(_: Path | None) -> str:
    """Rows of benchmarks/record_pairs.py, if a GPU was at hand."""
    rows = rows_of(GPU / "ledger.jsonl")
    if not rows:
        return (
            "None yet: no GPU was at hand. `python benchmarks/record_pairs.py` records them, and this command then "
            "puts them here. Until then no GPU what-if but the [loader pair](loader.md) was held against a measurement."
        )
    return f"*{when(rows)}.*\n\n{markdown_summary(rows)}\n{markdown(rows)}"


# --- verified on a processor by the project itself ---------------------------------------------------------------


def ledger_section(_: Path | None) -> str:
    """Rows of benchmarks/verify_zoo.py: the newest of every technique and model."""
    everything = rows_of(DATA / "ledger.jsonl")
    rows = tuple(row for row in everything if "rig" not in row.arms)
    if not rows:
        raise RuntimeError("there are no rows; run python benchmarks/verify_zoo.py first")
    shipped = msgspec.json.encode(models_of(everything), order="sorted")
    write_bytes(ROOT / "src" / "foretrace" / "experiment" / "shipped.json", msgspec.json.format(shipped) + b"\n")
    single, several = ([row for row in rows if (len(row.names) > 1) is many] for many in (False, True))
    return (
        f"*{when(rows)}; one thread.*\n\n"
        "Each row is one `foretrace verify` on a tiny model of the zoo (`python benchmarks/verify_zoo.py`): record the "
        "model, time the operators that the technique asks for alone, predict, and only then run both arms and the "
        "baseline once more, in turns. Ratios are step after / step before; *error* is predicted / measured − 1; "
        "*covered* says whether the 80 % interval of the prediction holds the measured ratio; *A/A floor* is the "
        "change below which this run could see nothing. Rules and ranges were worked out on small networks that are "
        "not in the zoo and on resnet50, bert, gpt2, transformer, lstm-lm; misses on gpt2, gnn, detector, inception-v3 "
        "and dlrm led to timing operators near and far and to another estimate of what recording costs. No rule was "
        "changed for the other models (mobilenet-v2, vgg11, llama, deepspeech2, seq2seq, ncf, gan): their rows are the "
        "held-out ones, except that costs and ranges of `compiled` on processors were set with all of its models in "
        "view. Rows that were inconclusive, or whose recorded step differed from the arms' own baseline by over 6 %, "
        f"were run again once, whatever they said; {unlike(rows)} of {len(rows)} rows shown still differ by that "
        "much.\n\n"
        f"{markdown_summary(single)}\n{_compiled(single)}\n{markdown(single)}\n"
        f"## Two techniques predicted together, and applied together\n\n{markdown(several)}\n"
        f"## Where predictions miss\n\n{misses(rows)}"
    )


def _compiled(rows: Sequence[Row]) -> str:
    """`compiled` by what the prediction starts from."""
    found = [row for row in rows if row.names == ("compiled",) and row.verdict != Verdict.INCONCLUSIVE]
    lines = []
    for start, with_kernels in (("generated kernels, timed before (`kernels=`)", True), ("the recording alone", False)):
        if some := [row for row in found if bool(row.parameters["compiled"].get("kernels")) is with_kernels]:
            off, held = np.abs([row.error for row in some]), sum(row.covered for row in some)
            numbers = (percent(float(np.median(off))), percent(float(off.max())), f"{held} of {len(some)}")
            lines.append([start, str(len(some)), *numbers])
    return table(("`compiled` from", "concluded", "median error", "worst", "covered"), lines) + "\n"


# --- several workers on real links -------------------------------------------------------------------------------


def rig_section(_: Path | None) -> str:
    """Rows of benchmarks/verify_rig.py."""
    everything = [row for row in rows_of(DATA / "ledger.jsonl") if "rig" in row.arms]
    rows = [row for row in everything if not row.arms["rig"]["against"]]
    found = [row for row in everything if row.arms["rig"]["against"]]
    if not rows:
        raise RuntimeError("there are no rows; run python benchmarks/verify_rig.py first, as root")
    chosen = [r for r in rows if "updates=" in r.techniques]
    everyone, rows = rows, [r for r in rows if r not in chosen]
    kinds = {
        "two workers, layers that sleep": [r for r in rows if r.arms["rig"]["workers"] == 2 and r.model[:1].isdigit()],
        "more workers, layers that sleep": [r for r in rows if r.arms["rig"]["workers"] > 2 and r.model.count("/") < 3],
        "more workers, layers that also compute": [r for r in rows if r.model.count("/") == 3],
        "two workers that compute, developed on": [r for r in rows if r.model in ("resnet50", "bert", "vgg11")],
        "two workers that compute, held out": [r for r in rows if any(r.model in models for models, _ in HELD_OUT)],
        "two workers that compute, models that changed nothing": [r for r in rows if r.model in UNSEEN],
        "two workers that send chosen updates (dgc, gaia)": chosen,
    }
    summary = []
    for kind, some in kinds.items():
        off = np.abs([row.arms["rig"]["step_error"] for row in some])
        if len(off):
            held = sum(row.covered for row in some)
            open_ = sum(row.verdict == Verdict.INCONCLUSIVE for row in some)
            numbers = [percent(float(np.median(off))), percent(float(off.max())), f"{held} of {len(some)}"]
            summary.append([kind, str(len(some)), str(open_), *numbers])
    lines = [
        [
            f"{row.model}, {row.size}", row.techniques.replace(f" network={row.arms['rig']['link']}", ""),
            f"{row.arms['rig']['link_mbit_s']:.0f}", f"{1e3 * row.arms['rig']['predicted_step_s']:.1f}",
            f"{1e3 * row.after_s:.1f}", percent(row.arms["rig"]["step_error"], signed=True),
            "yes" if row.covered else "no", str(row.verdict),
        ]
        for row in everyone
    ]  # fmt: skip
    return (
        f"*{when(everyone)}.*\n\n"
        "Real gloo processes, each in a network namespace of its own behind a token bucket (`python "
        "benchmarks/verify_rig.py`, [rig.md](../rig.md)). The link is measured first, one worker is recorded alone, "
        "the step of all workers is predicted, and only then it is run, interleaved with the worker alone. *Layers "
        "that sleep* exchange real gradients through PyTorch's own data parallelism but compute nothing, so that two "
        "cores do not decide. *Error* is predicted / measured step − 1 in %; *covered*: whether the 80 % interval of "
        "the predicted ratio to one worker alone holds the measured one. Rows are the newest of every setting; "
        "buckets at 1 Gbit/s were run twice, because other work ran on the cores beside the first. The held-out models "
        "were first run before changes of what is predicted (steps that wait for each other, messages that wait for "
        "their thread, what workers wait for buffers), and what they missed there led to them. Updates that are "
        "chosen: what workers do around an exchange is timed by all workers at once before it is predicted, and "
        "Gaia's share of updates is counted there; the row at 200 Mbit/s was predicted from one worker that did so "
        "alone, and what it missed led to that.\n\n"
        + table(("", "rows", "inconclusive", "median error", "worst", "covered"), summary)
        + "\n\n"
        + table(
            ("work, workers, link", "techniques", "payload Mbit/s", "predicted ms", "measured ms", "error", "covered",
             "verdict"),
            lines,
        )
        + _found(found)
        + _shared_models(rows_of(DATA / "model_parallel.jsonl"))
        + _contention(rows_of(DATA / "shared_link.jsonl"))
    )  # fmt: skip


def _shared_models(rows: Sequence[Row]) -> str:
    """Compressed activations between two workers that share a model."""
    if not rows:
        return ""

    def ratio(*values: float) -> str:
        value, low, high = values
        return f"{value:.3f} ({low:.3f} – {high:.3f})"

    off = np.abs([row.error for row in rows])
    lines = [
        [
            f"{row.model}, {row.size}", row.techniques.split("method=")[1].split(" where=")[0],
            f"{1e3 * row.before_s:.1f}", f"{1e3 * row.after_s:.1f}",
            ratio(row.predicted, row.predicted_low, row.predicted_high),
            ratio(row.measured, row.measured_low, row.measured_high), percent(row.error, signed=True),
            "yes" if row.covered else "no", str(row.verdict),
        ]
        for row in rows
    ]  # fmt: skip
    return (
        "\n\n**Compressed activations between two workers that share a model** (`python benchmarks/"
        f"model_parallel.py`, {when(rows)}): encoder layers whose MLPs are divided (tensor cut, the last half of the "
        "sums compressed), or halves of the layers one behind the other (pipeline cut, activation and gradient). The "
        "plain run is recorded, coding is timed by both workers at once, the step is predicted, then run in turns with "
        "the plain one. Ratios compressed / plain with 80 % ranges; errors: median "
        f"{percent(float(np.median(off)))}, worst {percent(float(off.max()))}, ranges hold "
        f"{sum(row.covered for row in rows)} of {len(rows)}.\n\n"
        + table(
            ("model, cut, link", "method", "plain ms", "compressed ms", "ratio, predicted", "measured", "error",
             "covered", "verdict"),
            lines,
        )
    )  # fmt: skip


def _contention(rows: Sequence[Row]) -> str:
    """Two jobs on one link."""
    if not rows:
        return ""
    off = np.abs([row.error for row in rows])
    lines = [
        [
            f"{row.model} {row.size}", f"{1e3 * row.parameters['contention']['alone_s']:.1f}",
            f"{1e3 * row.before_s:.1f} ({1e3 * row.predicted_low * row.before_s:.1f} – "
            f"{1e3 * row.predicted_high * row.before_s:.1f})", f"{1e3 * float(np.mean(row.arms['blocks_s'])):.1f}",
            percent(row.error, signed=True), "yes" if row.covered else "no", str(row.verdict),
        ]
        for row in rows
    ]  # fmt: skip
    return (
        f"\n\n**Two jobs on one link** (`python benchmarks/shared_link.py`, {when(rows)}): a worker of either job in "
        "each of two namespaces, so that all messages cross the same links. Each job is recorded alone; both together "
        "are predicted by max-min fair flows, over eight moments at which the second may begin, before they run. In a "
        "*fair* queue each job has a class of its own that may borrow the whole link (hierarchical token bucket). "
        "*First come*, first served, TCP decides: there one job has more of the link than the other for as long "
        "as both run, which no fair flows show; both together are as predicted. Milliseconds per step, means of "
        "rounds; in a fair "
        "queue a round has its own moment and prediction, and *error* is the median of theirs; errors: median "
        f"{percent(float(np.median(off)))}, worst {percent(float(off.max()))}, ranges hold "
        f"{sum(row.covered for row in rows)} of {len(rows)}.\n\n"
        + table(("job, beside, link", "alone", "together, predicted", "measured", "error", "covered", "verdict"), lines)
    )


def _found(rows: Sequence[Row]) -> str:
    """Buckets that a search found, against the default ones."""
    if not rows:
        return ""

    def times(*values: float) -> str:
        value, *ends = (1 / each for each in values)
        return f"{value:.3f}" + (f" ({min(ends):.3f} – {max(ends):.3f})" if ends else "")

    lines = [
        [
            f"{row.model}, {row.size}", str(len(row.arms["rig"]["buckets"])), f"{1e3 * row.before_s:.1f}",
            f"{1e3 * row.after_s:.1f}", times(row.predicted, row.predicted_low, row.predicted_high),
            times(row.measured, row.measured_low, row.measured_high),
            percent(row.measured / row.predicted - 1, signed=True), str(row.verdict),
        ]
        for row in {(row.model, row.size): row for row in rows}.values()
    ]  # fmt: skip
    return (
        "\n\n**Buckets that `foretrace optimise --only-buckets` found**, for the recording of one worker and the link "
        "as measured, run beside DistributedDataParallel's default in turns, the newest run of each. How many times "
        "faster, predicted before both ran and measured, with 80 % ranges; *error* is predicted / measured − 1 in %. "
        "Where layers sleep, messages wait for no thread that computes: until 2026-11-28 these predictions took the "
        "delays of layers that compute, and were up to 24 % too long. The search does not cut "
        "buckets into parts: that pays only if messages overtake others, which DistributedDataParallel cannot do.\n\n"
        + table(
            ("work, workers, link", "buckets", "default ms", "found ms", "times faster, predicted", "measured", "error",
             "verdict"),
            lines,
        )
    )  # fmt: skip


# --- models of collectives against measured tables ---------------------------------------------------------------


def collectives_section(traces: Path) -> str:
    """Rows of benchmarks/collectives.py."""
    import collectives

    return made("tables measured by others on A100, V100, H200 and B200") + collectives.section(
        traces.parent / "network"
    )


# --- distributed training measured by others ---------------------------------------------------------------------


def iterations_section(traces: Path) -> str:
    """Rows of reproductions/vtrain; fits the constants anew on every split, which takes some minutes."""
    from reproductions.vtrain import protocol as vtrain

    files = sorted((traces.parent / "vtrain").glob("measured_*.csv"))
    return made("iterations of GPT models on up to 512 A100, measured by the authors of vTrain") + vtrain.section(files)


def scaling_section(traces: Path) -> str:
    """Rows of reproductions/mlperf."""
    from reproductions.mlperf import protocol as mlperf

    files = sorted((traces.parent / "mlperf-training").glob("*_runs.csv.gz"))
    return made("results of MLPerf Training 3.0, 4.0 and 5.0") + mlperf.section(files)


# --- networks on GPUs never seen -----------------------------------------------------------------------------------


def predictor_section(traces: Path) -> str:
    """Tables of benchmarks/accuracy_p1.py."""
    import p1_section

    return made("networks and kernels measured by the authors of NeuSight") + p1_section.section(traces.parent)


def gemm_section(traces: Path) -> str:
    """Tables of benchmarks/accuracy_p2.py."""
    import accuracy_p2

    return accuracy_p2.section(traces.parent)


def devices_section(traces: Path) -> str:
    """Tables of benchmarks/device_pairs.py and benchmarks/scaling.py."""
    import device_pairs

    return made("recordings of the same model on two GPUs; public tables of kernels") + device_pairs.section(traces)


def programs_section(_: Path | None) -> str:
    """Tables of reproductions/cdmpp on the recorded programs."""
    from reproductions.cdmpp import study

    return study.page(study.results(lambda text: print(text, file=sys.stderr)))


def local_section(_: Path | None) -> str:
    """Table of benchmarks/local.py, as it was kept."""
    import local

    return local.kept()


def memory_section(_: Path | None) -> str:
    """Table of benchmarks/memory.py, as it was kept."""
    import memory

    return memory.section()


def rows_of(path: Path) -> tuple[Row, ...]:
    """The newest row of every technique, model and size."""
    if not path.exists():
        return ()
    newest: dict[tuple[str, str, str], Row] = {}
    for row in sorted(import_lines(path.read_text(encoding="utf-8"), str(path)), key=lambda row: row.time):
        newest[row.techniques, row.model, row.size] = row
    return tuple(newest.values())


def unlike(rows: Sequence[Row]) -> int:
    """Rows whose recording was of another speed than the baseline measured after it."""
    return sum(abs(row.arms["recorded_s"] / row.before_s - 1) > 0.06 for row in rows)


def when(rows: Sequence[Row]) -> str:
    """Days and machines of rows."""
    days = sorted({row.time[:10] for row in rows})
    machines = sorted({f"{row.machine.get('cpu', row.device)}, {row.device}, PyTorch {row.torch}" for row in rows})
    return f"{' to '.join(dict.fromkeys([days[0], days[-1]]))}, {'; '.join(machines)}"


def misses(rows: Sequence[Row]) -> str:
    """For every row that is not covered, the layers in which the recorded changed step differs most."""
    lines = []
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        if row.covered or row.verdict == Verdict.INCONCLUSIVE:
            continue
        found = ((each, 1e3 * (each["recorded_s"] - each["predicted_s"])) for each in row.residual[:3])
        parts = [f"{each['layer'].rpartition('.')[2]} {each['phase']} {more_ms:+.2f} ms" for each, more_ms in found]
        step_ms = 1e3 * row.after_s
        text = f"- {row.techniques} on {row.model}: {percent(row.error, signed=True)} % of {step_ms:.1f} ms"
        lines.append(f"{text}; recorded minus predicted: {', '.join(parts) or 'not attributed'}")
    return "\n".join(lines) or "Every conclusive row is covered."


def fleet_section(traces: Path) -> str:
    """Known answers of scheduler simulators, and 32 real GPUs."""
    from reproductions import simulators
    from reproductions.gavel import protocol as gavel
    from reproductions.pollux import protocol as pollux
    from reproductions.shockwave import protocol as shockwave
    from reproductions.tiresias import protocol as tiresias

    folder = traces.parent / "fleet"
    rows = [row for each in (tiresias, pollux, gavel) for row in simulators.answers(each.SIMULATOR, each.KNOWN, folder)]
    found = shockwave.run(folder / "shockwave", None, sensitivity=True, choose=True)
    return (
        made("mean completion times by the rules of published programs")
        + simulators.text(rows)
        + "\n\nShockwave's 32 real GPUs (`make reproduce NAME=shockwave`); run times of jobs come from the runs of the "
        "other policies. When rounds are decided and how long a restart takes was chosen by leaving one policy out. "
        "Errors in %.\n\n" + shockwave.text(found)
    )


SECTIONS: dict[str, tuple[str, Callable[[Path], str] | Callable[[Path | None], str], bool]] = {
    "replay": ("Replay and counterfactuals", replay_section, True),
    "kernels": ("Kernel times of another GPU", kernels_section, True),
    "loader": ("Loader workers 0 → 4 on a GPU", loader_section, True),
    "gpu": ("GPU pairs", gpu_section, False),
    "techniques": ("Techniques verified on a processor", ledger_section, False),
    "rig": ("Several workers on real links", rig_section, False),
    "collectives": ("Collectives", collectives_section, True),
    "iterations": ("Iterations of many GPUs", iterations_section, True),
    "scaling": ("Strong scaling", scaling_section, True),
    "local": ("Steps on this processor, without a recording", local_section, False),
    "memory": ("Memory of a step, without running it", memory_section, False),
    "predictor": ("Networks on GPUs never seen", predictor_section, True),
    "gemm": ("16-bit products on GPUs, measured and never seen", gemm_section, True),
    "devices": ("Another device", devices_section, True),
    "programs": ("Latency of tensor programs", programs_section, False),
    "fleet": ("Fleet", fleet_section, True),
}


def write(name: str, text: str) -> None:
    """Write the page of a section."""
    page = PAGES / f"{name}.md"
    write_text(page, f"# {SECTIONS[name][0]}\n\n{text.strip()}\n")
    print(f"wrote {page.relative_to(ROOT)}", file=sys.stderr)


def main(wanted: Sequence[str]) -> int:
    if unknown := [name for name in wanted if name not in SECTIONS]:
        print(f"there is no section {' or '.join(unknown)}; choose from {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    traces = shared_traces()
    for name in wanted or SECTIONS:
        _, section, needs_traces = SECTIONS[name]
        if needs_traces and traces is None:
            print(f"{name}: left out, no recordings of other machines (FORETRACE_SHARED_DATA)", file=sys.stderr)
            continue
        print(f"{name} ...", file=sys.stderr)
        write(name, section(traces))  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
