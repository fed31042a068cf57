"""Steps on this machine's processor, predicted from a few measured operators, then measured.

    python benchmarks/local.py capture --groups score,outside --folder F    # operators of every model
    python benchmarks/local.py predict --folder F --seconds 300             # what is said before; again for the rest
    python benchmarks/local.py steps --folder F --seconds 380               # real steps; again for more turns
    python benchmarks/local.py keep --folder F                              # the table

In parts, so that those that time can have the machine for themselves for some minutes. `predict` calibrates the machine
(50 operators and the constants of `model.effects`), times the OWN calls of every model that say most of its step, and
predicts: from the prices of the package alone, from the 50, and with the model's own. Those are timed in two rounds
apart in time, and once more where these differ. Only then are real steps run. Groups: the zoo's models fall into halves
by a seed: on one, `DEVELOPMENT` (with CHOSEN_FULL, and CHOSEN of `local_models`), every rule and constant was chosen;
the other, `SCORE`, is looked at once per set of rules. `outside` are models of `local_models`, `full` some of the zoo
at full size with small batches, `unseen` and `new` models of `local_models` that one set of earlier rules, or none, was
scored on. Batches lie ready in memory, one thread does all. Models take turns, a second or so at a time, and probes
tell how fast the machine is just then, small calls beside every step, products and memory beside every turn: steps
count that met it calm, as the operators that count were timed, since other users make a machine up to twice as slow
within seconds. CPU time is taken, which waiting for a core does not touch. The result is kept in
benchmarks/data/local.json; `python benchmarks/accuracy.py local` writes the section.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.training.training import Training
from tables import ROOT, load, machine, table, today

if TYPE_CHECKING:
    from foretrace.model.timed_operators import TimedOperators

DATA = ROOT / "benchmarks" / "data" / "local.json"
NARROW = DATA.with_name("local_avx2.json")  # with ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2
# Halves of the zoo as it was when a seed drew them; models that came since are in neither.
DEVELOPMENT = frozenset(["deepspeech2", "dlrm", "dropout-lstm-large", "gan", "gnn", "llama", "lstm-lm", "ncf",
                         "seq2seq", "transformer"])  # fmt: skip
SCORE = frozenset(["acoustic-lstm", "actor-critic", "bert", "detector", "dropout-lstm", "gpt2", "inception-v3",
                   "mobilenet-v2", "resnet50", "vgg11"])  # fmt: skip
OWN, OPERATORS = 10, 50
WAYS = {"prices": "nothing measured", "probes": "three probes", "general": "50 operators", "own": "and 10 of its own"}
LATER = {"then": "the same, range by the probes beside the steps"}
GROUPS = ("development", "development full", "score", "outside", "full", "unseen", "new")
HELD = ("score", "outside", "full")  # that earlier rules were scored on, too
BEFORE = "before"  # rows that were predicted before effects and own operators were; kept until new ones are
# Models with another batch than their own: name and batch.
OTHERS = (("resnet50", 4), ("bert", 16), ("lstm-lm", 32), ("ncf", 64))
FULL = (("bert", 1), ("lstm-lm", 4), ("resnet50", 2), ("seq2seq", 2))
CHOSEN_FULL = (("dropout-lstm-large", 4), ("transformer", 2), ("gan", 4))  # none of FULL
_WARM, _ENOUGH = 4, 12
# glibc keeps what was freed, instead of giving it back and faulting it in again in every step.
KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TOP_PAD_": "268435456",
}  # fmt: skip
Case = tuple[str, str, str, int | None]  # label, group, model, batch or None for its own


def cases(groups: Sequence[str]) -> list[Case]:
    """What is predicted and run."""
    from foretrace.zoo.registry import entries
    from local_models import CHOSEN, MODELS, NEW, UNSEEN

    both: list[tuple[str, str, int | None]] = [(name, name, None) for name in entries() if name in DEVELOPMENT | SCORE]
    both += [(f"{name} batch {batch}", name, batch) for name, batch in OTHERS]
    found: list[Case] = [(label, "development" if n in DEVELOPMENT else "score", n, b) for label, n, b in both]
    found += [(name, "outside", name, None) for name in MODELS]
    found += [(name, "development", name, None) for name in CHOSEN]
    found += [(name, group, name, None) for group, names in (("unseen", UNSEEN), ("new", NEW)) for name in names]
    for group, full in (("full", FULL), ("development full", CHOSEN_FULL)):
        found += [(f"{name} full", group, name, batch) for name, batch in full]
    return [each for each in found if each[1] in groups]


def made(case: Case) -> Training:
    """The model on batches that lie ready."""
    from foretrace.training.batches import resized
    from foretrace.zoo.registry import training
    from local_models import CHOSEN, MODELS, NEW, UNSEEN

    _, group, name, batch = case
    own = MODELS | CHOSEN | UNSEEN | NEW
    if name in own:
        import torch

        torch.manual_seed(0)
        return own[name]()
    found = training(name, "full" if group.endswith("full") else "tiny")
    if batch is not None:
        found = replace(found, loader=resized(found.loader, batch))
    return found.with_batches(2)


def captured(groups: Sequence[str], folder: Path) -> None:
    """Operators of every model, kept in the folder."""
    from foretrace.model.capture.capture import capture

    path = folder / "graphs.pickle"
    found = pickle.loads(path.read_bytes()) if path.exists() else {}
    for case in cases(groups):
        if case in found:
            continue
        try:
            found[case] = capture(made(case), like="cpu")
        except ForetraceError as error:
            found[case] = str(error)
        print(f"{case[0]}: {found[case] if isinstance(found[case], str) else len(found[case])}", flush=True)
        write_bytes(path, pickle.dumps(found))


def predict(folder: Path, seconds: float) -> None:
    """Calibrate, time, then predict what was timed; for so many seconds, and again for the rest, before any step.

    The models' own operators are timed in rounds: all models, then all in reverse, then those operators that differed.
    """
    from foretrace.model.on_processor import Processor, calibrated
    from foretrace.model.timed_operators import agreed, timed

    path, began = folder / "timed.pickle", time.perf_counter()
    until = began + seconds
    graphs = dict(pickle.loads((folder / "graphs.pickle").read_bytes()))
    if not path.exists():
        calibration = calibrated(OPERATORS)
        facts = {
            "date": today(), "machine": machine(), "load": [load()], "calibration_s": time.perf_counter() - began,
            "probe_s": calibration.usual_s.tolist(), "calm": calibration.alike,
            "allocator": {key: value for key, value in os.environ.items() if key.startswith("MALLOC_")},
        }  # fmt: skip
        write_bytes(path, pickle.dumps((facts, calibration, {})))
    facts, calibration, rounds = pickle.loads(path.read_bytes())
    known = known_of(calibration)
    general = Processor.of(known)
    wanted = {case: general.telling(graph, OWN, known) for case, graph in graphs.items() if not isinstance(graph, str)}
    own: dict[Case, list[TimedOperators]] = rounds
    for turn in range(3):
        for case in list(wanted)[:: -1 if turn % 2 else 1]:
            done = own.setdefault(case, [])
            if len(done) > turn or time.perf_counter() > until:
                continue
            left = wanted[case][:: -1 if turn % 2 else 1]
            if turn == 2:
                unsure = agreed(done, calibration.usual_s).unsure
                left = [each for each in left if {each.key, each.near_key} & set(unsure)]
            if left:
                done.append(timed(left, turns=2, budget_s=40.0))
                print(f"{case[0]}: round {turn + 1}, {len(left)}", file=sys.stderr, flush=True)
        write_bytes(path, pickle.dumps((facts, calibration, own)))
    write_bytes(folder / "predicted.json", json.dumps(predicted(facts, graphs, calibration, own)).encode())


def known_of(timed: TimedOperators, before: TimedOperators | None = None) -> dict[str, float]:
    """What a calibration would have stored of these."""
    from foretrace.model.machine_state import USUAL

    known = {} if before is None else known_of(before)
    return {**dict(zip(USUAL, timed.usual_s.tolist(), strict=True)), **known, **timed.known}


def predicted(
    facts: dict[str, Any], graphs: dict[Case, Any], calibration: TimedOperators, own: dict[Case, list[TimedOperators]]
) -> dict[str, Any]:
    """A row per model: what is said from nothing, the calibration, and its own operators."""
    from foretrace.cost.operators.local import Local
    from foretrace.model.on_processor import HostOverhead, Processor
    from foretrace.model.timed_operators import agreed

    nothing = Local.of({})
    rows = []
    for case, graph in graphs.items():
        if isinstance(graph, str) or not own.get(case):
            continue
        found = agreed(own[case], calibration.usual_s)
        processors = {
            "prices": Processor(local=nothing, host=HostOverhead.of({}, nothing)),
            "probes": Processor.probed(calibration.usual_s),
            "general": Processor.of(known_of(calibration)), "own": Processor.of(known_of(found, calibration)),
        }  # fmt: skip
        row: dict[str, Any] = {"case": list(case), "batch": graph.batch, "calls": len(graph)}
        row |= {"own_calm": found.alike, "own_probe": found.usual_s.tolist(), "not_timed": found.measured.failed}
        row |= {"unsure": len(found.unsure), "rounds": len(own[case])}
        for way, processor in processors.items():
            step = processor.step(graph)
            row[way] = [step.seconds, step.low_s, step.high_s]
        rows.append(row)
    refused = {case[0]: graph for case, graph in graphs.items() if isinstance(graph, str)}
    return {**facts, "rows": rows, "refused": refused}


def measure(folder: Path, seconds: float, each_s: float) -> None:
    """Real steps of every case in turns, for so many seconds; adds to what the folder has."""
    from foretrace.model.machine_state import probe, views

    predicted = json.loads((folder / "predicted.json").read_text())
    path = folder / "steps.json"
    samples: dict[str, list[list[float]]] = json.loads(path.read_text()) if path.exists() else {}
    until = time.perf_counter() + seconds
    usual = np.array(predicted["probe_s"])
    told: list[Case] = [tuple(row["case"]) for row in predicted["rows"]]
    running: dict[str, Iterator[Any]] = {}
    turn = 0
    while time.perf_counter() < until and turn < 12:
        for case in sorted(told, key=lambda each: len(samples.get(each[0], ()))):
            mine = samples.setdefault(case[0], [])
            met = sum(calm(np.array(mine), usual)) if mine else 0
            if time.perf_counter() > until or (met >= _ENOUGH and turn):
                continue
            first = case[0] not in running
            if first:
                running[case[0]] = made(case).steps()
            for _ in range((2 if case[1].endswith("full") else _WARM) if first else 1):
                next(running[case[0]])
            gc.collect()
            ends, first_state = time.perf_counter() + each_s, probe()
            steps: list[list[float]] = []
            while time.perf_counter() < ends or len(steps) < 2:
                before, begin, wall = views(), time.process_time(), time.perf_counter()
                next(running[case[0]])
                cpu, wall = time.process_time() - begin, time.perf_counter() - wall
                steps.append([cpu, wall, (before + views()) / 2])
            state = np.sqrt(first_state * probe()).tolist()  # these touch memory: not beside every step
            mine += [[*each, *state[1:]] for each in steps]
            if case[1].endswith("full"):  # its tensors would crowd out the others'
                del running[case[0]]
                gc.collect()
            write_bytes(path, json.dumps(samples).encode())
        turn += 1


def calm(steps: Any, usual: Any) -> Any:
    """Which of the steps [n x (CPU, wall, probes)] met the machine as calm as the calibration did."""
    from foretrace.model.machine_state import ALIKE

    return (np.abs(np.log(steps[:, 2:] / usual)) < ALIKE).all(axis=1)


def joined(folder: Path) -> dict[str, Any]:
    """What was predicted with what was measured."""
    from foretrace.model.on_processor import Processor
    from foretrace.model.timed_operators import agreed

    data: dict[str, Any] = json.loads((folder / "predicted.json").read_text())
    samples = json.loads((folder / "steps.json").read_text())
    _, calibration, own = pickle.loads((folder / "timed.pickle").read_bytes())
    graphs = {case[0]: graph for case, graph in pickle.loads((folder / "graphs.pickle").read_bytes()).items()}
    rows = []
    for row in data["rows"]:
        found = np.array(samples.get(row["case"][0], []))
        if len(found) < 2:
            data["refused"][row["case"][0]] = "no time was left to run it"
            continue
        alike = calm(found, np.array(data["probe_s"]))
        used = found[alike] if alike.sum() >= min(5, len(found)) else found
        row |= {"steps": len(found), "alike": int(alike.sum()), "measured_s": float(np.median(used[:, 0]))}
        row["spread"] = [float(value) for value in np.quantile(used[:, 0], [0.25, 0.75])]
        state = np.median(used[:, 2:], axis=0)  # beside these steps, as `estimate` would probe it just then
        processor = Processor.of(known_of(agreed(own[tuple(row["case"])], calibration.usual_s), calibration))
        then = processor.now(state).step(graphs[row["case"][0]])
        row |= {"then": [then.seconds, then.low_s, then.high_s], "state": (state / data["probe_s"]).tolist()}
        row |= {"all_s": float(np.median(found[:, 0])), "wall_s": float(np.median(found[:, 1]))}
        rows.append(row)
    data["rows"] = rows
    return data


def summary(rows: Sequence[dict[str, Any]], way: str) -> list[str]:
    """Median, signed median and worst error, and how often the range held."""
    errors = np.array([row[way][0] / row["measured_s"] - 1 for row in rows])
    held = np.mean([row[way][1] <= row["measured_s"] <= row[way][2] for row in rows])
    worst = errors[np.argmax(np.abs(errors))]
    return [f"{100 * each:.1f}" for each in (np.median(np.abs(errors)), np.median(errors), worst, held)]


def section(data: dict[str, Any]) -> str:
    """The page docs/accuracy/local.md, from what was kept."""
    rows = data["rows"]
    ways = {way: said for way, said in WAYS.items() if all(way in row for row in rows)}
    later = {way: said for way, said in LATER.items() if all(way in row for row in rows)}
    best = list(ways)[-1]
    lines = []
    for row in rows:
        low, high = row[best][1:]
        ms = [f"{1e3 * value:.1f}" for value in (row[best][0], low, high, row["measured_s"], *row["spread"])]
        error = [f"{100 * (row[way][0] / row['measured_s'] - 1):+.0f}" for way in ways]
        lines.append([
            row["case"][0], row["case"][1], str(row["batch"]), str(row["calls"]), ms[0], f"{ms[1]} – {ms[2]}", ms[3],
            f"{ms[4]} – {ms[5]}", *error, f"{row['alike']} of {row['steps']}",
        ])  # fmt: skip
    groups = [each for each in (BEFORE, *GROUPS) if any(row["case"][1] == each for row in rows)]
    seen = [each for each in groups if each in HELD]
    curve = []
    for name, among in [*((each, [each]) for each in groups), (", ".join(HELD), seen)]:
        mine = [row for row in rows if row["case"][1] in among]
        curve += (
            [[name, str(len(mine)), said, *summary(mine, way)] for way, said in (ways | later).items()] if mine else []
        )
    refused = "".join(f"\n- {case}: {why}" for case, why in data["refused"].items())
    probes = np.atleast_1d(data["probe_s"])
    calm_probe = ", ".join(
        f"{scale * each:.3g} {what}"
        for each, scale, what in zip(
            probes, (1e6, 1e3, 1e3), ("µs a view", "ms a product of 256³", "ms a copy of 4 MiB"), strict=False
        )
    )
    split = (
        f"Halves of the zoo were drawn by a seed: on *development* ({', '.join(sorted(DEVELOPMENT))}) and "
        "on further models and sizes (`CHOSEN` of `local_models`, `CHOSEN_FULL`) every rule, constant and range was "
        "chosen; *score*, *outside* (transformers' configurations and networks of our "
        "own) and *full* (full size, small batch) were predicted once, by rules and from times that were there before "
        "any of these steps ran. They are not new any more: earlier rules were scored on them, too, and that "
        "convolution nets came out low there is why development models of that kind were looked into, operator by "
        "operator. Nothing was set on their times, but for the range of calls larger than those of the unit costs, "
        "which was made to hold for full lstm-lm. "
        "*unseen* are models that one set of earlier rules was scored on: that half of what swin was low by went with "
        "denormal numbers flushed was seen there, and masks are counted since. "
        "*new* are models on which nothing was scored before. After these rows had first been predicted and run (25 "
        "cases: median 3.4 %, signed 0.6 %, worst 35.0 %, ranges held 84 %; with AVX2 5.7, 1.2, 20.0, 92 %), three "
        "things were changed with them in view: by how much calls beyond the unit costs are less sure counts in no "
        "mean any more, as full models had come out high; steps of full size have wider ranges, as development models "
        "of full size ask for, too; convolutions with channels last are timed as such, for which convnext alone was "
        "captured, timed and run again. Ranges hold more than the 75 to 90 % that they should since."
    )
    beside = (
        "The last line of every group is what `estimate` would have said beside the steps, from the times of before: "
        "its range widens where the probes differ. "
    ) * bool(later)
    old = (
        "These rows were measured before `estimate --measure` and the effects of a step "
        "([calibration](../calibration.md)) were modelled; `benchmarks/local.py` compares with them since."
    )
    return (
        f"*{data['date']}, {data['machine']}, one thread, load {' then '.join(data['load'])}.*\n\n"
        "Training steps that were never run, from captured operators; then the real steps, on batches that lie in "
        "memory. Prices that a calibration starts from were fitted on an Intel Xeon with AVX-512. "
        f"{split if seen or BEFORE not in groups else old}\n\n"
        "*Measured*: median CPU time of the steps during which probes of small calls, products and memory ran as fast "
        "(±15 %) as on the calm machine, since the machine was shared; with fewer than five such steps all count. "
        f"{beside}The calibration took {data['calibration_s']:.0f} s; "
        f"{100 * data['calm']:.0f} % of its times met the machine calm ({calm_probe}). glibc was told to keep freed "
        "memory (`MALLOC_TRIM_THRESHOLD_` and others).\n\n"
        + table(("models", "cases", "from", "median error %", "signed median", "worst", "range held %"), curve)
        + f"\n\nEvery case, predicted from {ways[best]}; errors in the order of the table above:\n\n"
        + table(
            ("model", "group", "batch", "calls", "predicted ms", "80 % range", "measured ms", "quartiles",
             *(f"error %, {said}" for said in ways.values()), "steps that count"),
            lines,
        )
        + (f"\n\nNot compared:\n{refused}" if refused else "")
    )  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=("capture", "predict", "steps", "keep"), help="what to do")
    parser.add_argument("--folder", type=Path, required=True, help="what the parts hand on")
    parser.add_argument("--groups", default=",".join(GROUPS[1:]), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--seconds", type=float, default=380.0, help="for all predictions, or all real steps")
    parser.add_argument("--each", type=float, default=1.0, help="seconds of a model in a turn")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--default-allocator", action="store_true", help="let glibc give memory back in every step")
    given = parser.parse_args(arguments)
    if not given.default_allocator and any(os.environ.get(key) != value for key, value in KEEPING.items()):
        words = [sys.executable, str(Path(__file__).resolve()), *arguments]  # glibc reads them when a process starts
        os.execve(sys.executable, words, {**os.environ, **KEEPING})
    import torch

    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part == "capture":
        captured(given.groups.split(","), given.folder)
    elif given.part == "predict":
        predict(given.folder, given.seconds)
    elif given.part == "steps":
        measure(given.folder, given.seconds, given.each)
    else:
        data = joined(given.folder)
        write_bytes(
            NARROW if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2" else DATA, json.dumps(data, indent=1).encode()
        )
        print(json.dumps(data, indent=1) if given.json else section(data))
    return 0


def kept() -> str:
    """The section from the kept results."""
    import local_causes

    narrow = json.loads(NARROW.read_text())
    rounds = max(row["rounds"] for row in narrow["rows"])
    lines = [
        [name, str(len(mine)), said, *summary(mine, way)]
        for name in (*GROUPS, ", ".join(HELD))
        if (mine := [row for row in narrow["rows"] if row["case"][1] in name.split(", ")])
        for way, said in WAYS.items()
        if way in mine[0]
    ]
    return (
        section(json.loads(DATA.read_text()))
        + f"\n\n## With AVX2 alone\n\n*{narrow['date']}, {narrow['machine']}.* The same models with "
        "`ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2`, calibrated again. "
        f"Operators of their own were timed in {rounds} round{'s' if rounds > 1 else ''}.\n\n"
        + table(("models", "cases", "from", "median error %", "signed median", "worst", "range held %"), lines)
        + "\n\n## Where the time of steps is\n\n"
        + local_causes.section()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
