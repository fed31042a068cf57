"""TTFT and TPOT of measured servers of large language models, predicted for groups that were not fitted.

    python -m reproductions aiconfigurator [--data FOLDER] [--quick] [--json] [--write]

FOLDER holds silicon_sample.csv.gz and the tables of operators, by default that of the shared data. `--write` writes
docs/accuracy/serving.md and the laws that `foretrace llm` predicts with (src/foretrace/serving/llm/laws.csv);
`--quick` does one split of every eighth row.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.files import write_text
from foretrace.hardware.devices import named
from foretrace.serving.llm.operator_tables import OperatorTables, read_tables
from foretrace.serving.llm.step_law import StepLaw
from reproductions import ROOT, parser_of
from reproductions.aiconfigurator import planner
from reproductions.aiconfigurator.forms import FORMS, chosen
from reproductions.aiconfigurator.model import Aggregated, fitted, of_logs
from reproductions.aiconfigurator.sample import Cleaned, read
from reproductions.aiconfigurator.study import SPLITS, HeldOut, by_one_run, held_out, medians, ranges
from tables import machine, percent, shared_traces, table, today

PAGE = ROOT / "docs" / "accuracy" / "serving.md"
LAWS = ROOT / "src" / "foretrace" / "serving" / "llm" / "laws.csv"
GOALS = {"aggregated": (0.11, 0.29), "one run": (0.08, 0.20), "disaggregated": (0.09, None)}
FEWEST = 10  # rows of a group that is named


def studied(data: Cleaned, operators: OperatorTables | None, *, quick: bool = False) -> dict[str, HeldOut]:
    """Every split's errors by name."""

    def told(text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)

    splits = dict(list(SPLITS.items())[:1]) if quick else SPLITS
    found = {
        f"aggregated, {name}": held_out(data.aggregated, key, tables=operators, told=told)
        for name, key in splits.items()
    }
    by_group = found["aggregated, (architecture, system)"]
    found["aggregated, one run"] = by_one_run(by_group)
    if not quick:
        found["disaggregated, (architecture, system)"] = held_out(
            data.disaggregated, SPLITS["(architecture, system)"], begun=data.aggregated, told=told
        )
    return found


def by_choice(data: Cleaned, operators: OperatorTables | None) -> str:
    """What the choice of a form on other groups alone gives, in a sentence."""
    found = {name: chosen(data.aggregated, SPLITS[name], operators) for name in ("architecture", "system")}
    return "; ".join(
        f"{each.forms[next(iter(FORMS))]} of {each.forms.total()} {name}s, TPOT {percent(each.medians[0])} %, TTFT "
        f"{percent(each.medians[1])} %"
        for name, each in found.items()
    )


def write_laws(data: Cleaned, found: Mapping[str, HeldOut]) -> None:
    """Fit to all rows; the range is that of TPOT of groups not fitted, and after one run."""
    fit = of_logs(fitted(Aggregated(data.aggregated)))
    wide, narrow = (ranges(found[f"aggregated, {name}"]) for name in ("(architecture, system)", "one run"))
    laws = {
        engine: replace(law, low=min(wide.low[0], 1.0), high=max(wide.high[0], 1.0),
                        calibrated_low=min(narrow.low[0], 1.0), calibrated_high=max(narrow.high[0], 1.0))
        for engine, law in fit.laws.items()
    }  # fmt: skip
    text = io.StringIO()
    table_ = csv.DictWriter(text, [each.name for each in fields(StepLaw)], lineterminator="\n")
    table_.writeheader()
    for law in laws.values():
        table_.writerow(
            {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in asdict(law).items()}
        )
    write_text(LAWS, text.getvalue())


def summary(found: Mapping[str, HeldOut]) -> dict[str, Any]:
    """Medians, ranges and worst groups of every split."""
    result: dict[str, Any] = {}
    for name, each in found.items():
        tpot, ttft = medians(each.errors)
        lies = ranges(each)
        result[name] = {
            "rows": len(each.rows), "tpot": tpot, "ttft": ttft, "range_low": lies.low, "range_high": lies.high,
            "held": lies.held,
            "engines": by_engine(each),
            "worst": [(str(group), count, *both) for group, count, both in worst(each)],
        }  # fmt: skip
    return result


def by_engine(found: HeldOut) -> dict[str, tuple[float, float]]:
    """Medians of TPOT and TTFT."""
    engines = np.array([one.engine for one in found.rows])
    return {engine: medians(found.errors[engines == engine]) for engine in sorted(set(engines.tolist()))}


def worst(found: HeldOut) -> list[tuple[Hashable, int, tuple[float, float]]]:
    """Groups of FEWEST rows or more by architecture, system, engine and format, the worst TPOT first."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, one in enumerate(found.rows):
        groups[f"{one.architecture}, {one.system}, {one.engine} {one.dtype}, {one.harness}"].append(i)
    each = [(name, len(at), medians(found.errors[at])) for name, at in groups.items() if len(at) >= FEWEST]
    return sorted(each, key=lambda item: -item[2][0])


def beside_planner(found: HeldOut) -> tuple[int, int, tuple[float, float], tuple[float, float]]:
    """Rows that the planner was asked for, those that it predicts, and medians of its errors and of ours on these."""
    told = planner.predicted()
    known = {name: both for name, both in told.items() if both is not None}
    at = [i for i, one in enumerate(found.rows) if one.id in known]
    measured = [(found.rows[i].tpot_s, found.rows[i].ttft_s) for i in at]
    theirs = np.log(np.array([known[found.rows[i].id] for i in at])) - np.log(np.array(measured))
    return len(told), len(at), medians(theirs), medians(found.errors[at])


def page(data: Cleaned, found: Mapping[str, HeldOut], told: Mapping[str, Any], choice: str) -> str:
    """docs/accuracy/serving.md; `choice`: see `by_choice`."""
    goals = {name: GOALS[next(key for key in reversed(GOALS) if key in name)] for name in told}

    def cell(value: float | None) -> str:
        return "–" if value is None else percent(value)

    rows = [
        [name, str(each["rows"]), percent(each["tpot"]), cell(goals[name][0]), percent(each["ttft"]),
         cell(goals[name][1]), f"{percent(each['held'][0])}, {percent(each['held'][1])}",
         ", ".join(f"{low:.2f} – {high:.2f}" for low, high in zip(each["range_low"], each["range_high"], strict=True))]
        for name, each in told.items()
    ]  # fmt: skip
    engines = [
        [name, *(f"{percent(both[0])} / {percent(both[1])}" for both in
                 (each["engines"].get(e, (np.nan, np.nan)) for e in ("vllm", "sglang", "trtllm")))]
        for name, each in told.items()
    ]  # fmt: skip
    first = told["aggregated, (architecture, system)"]
    groups = [[name, str(count), percent(tpot), percent(ttft)] for name, count, tpot, ttft in first["worst"]]
    notes = "; ".join(f"{count} {name}" for name, count in data.notes.items())
    asked, known, theirs, ours = beside_planner(found["aggregated, (architecture, system)"])
    return (
        f"# Servers of large language models\n\n*{today()}, {machine()}; `make reproduce NAME=aiconfigurator "
        "ARGS=--write`.*\n\nMean time to the first token (TTFT) and per output token (TPOT) of servers that others "
        "measured, against the law of a step that `foretrace llm` uses, played in a closed loop. Each group was "
        "predicted by a fit to the others. Errors are medians of |predicted / measured − 1| in %; *goal* is what was "
        "asked before any of this was run. *Held*: rows within an 80 % range (TPOT, TTFT) that comes from the other "
        "groups' errors; the range are factors on the prediction. *One run*: other loads of a server after its run "
        "with the fewest clients was measured (a share of its error is taken over, less with more clients, as was best "
        "on the other groups). Dense Llama on H100 is predicted from measured operators.\n\n"
        + table(("rows, held out", "rows", "TPOT %", "goal", "TTFT %", "goal", "held %", "range"), rows)
        + f"\n\nThe reference planner (aiconfigurator 0.12.0 with its newest tables) was asked for {asked} aggregated "
        f"rows drawn at random and predicts {known} of them: TPOT {percent(theirs[0])} %, TTFT {percent(theirs[1])} % "
        "off (medians). On the same rows the law above, their groups not fitted: TPOT "
        f"{percent(ours[0])} %, TTFT {percent(ours[1])} %. Its tables hold operators measured on these systems "
        "(`reproductions/aiconfigurator/planner.py`).\n\nThe law's form was found with all groups in view. Whether "
        "kernels that convert what products multiply count in fp8, in fp4, too, or not at all, was then chosen on the "
        f"other groups alone: as used for {choice} (medians by these choices). How a request's wait beside steps was "
        "chosen is in `reproductions/aiconfigurator/README.md`. No fit counts TTFT of Llama on H100, which holds a "
        "wait that no input states.\n\n## By engine (TPOT / TTFT, %)\n\n"
        + table(("rows, held out", "vLLM", "SGLang", "TensorRT-LLM"), engines)
        + "\n\n## Groups, the worst first\n\n"
        + table(("group", "rows", "TPOT %", "TTFT %"), groups)
        + "\n\n## What the rows hold that no input says\n\n"
        "Some servers of DeepSeek write several tokens per step (multi-token prediction): the same settings stand with "
        "TPOT 5.4 and 10.3 ms. Rows before December 2025 (*cold*) come from a harness without requests that warm the "
        "engine up: seconds of compiling are in their mean TTFT, at some loads and not at others. Scheduling settings "
        "(tokens of a step, steps between two looks for requests, waiting for more prompts) are those of the public "
        "recipes of InferenceX by engine and model, not of each row.\n\n## How the table was cleaned\n\n"
        f"{notes}. The rules are in `reproductions/aiconfigurator/sample.py`.\n"
    )


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("aiconfigurator", __doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    traces = shared_traces()
    folder = given.data or (traces and traces.parent / "serving" / "aiconfigurator")
    if not folder:
        raise ForetraceError("no table of measured servers is here; give --data, or set FORETRACE_SHARED_DATA.")
    if given.quick and given.write:
        raise ForetraceError("--quick leaves rows out, so nothing of it is written; leave one of them out.")
    data = read(folder / "silicon_sample.csv.gz")
    if given.quick:
        data = replace(data, aggregated=data.aggregated[::8], disaggregated=())
    there = any(folder.rglob("*_perf.parquet"))
    operators = read_tables(folder, named("h100"), "trtllm") if there else None
    found = studied(data, operators, quick=given.quick)
    told = summary(found)
    text = "" if given.json else page(data, found, told, "" if given.quick else by_choice(data, operators))
    if given.write:
        write_laws(data, found)
        write_text(PAGE, text)
    print(json.dumps(told, indent=1) if given.json else text)
    return 0
