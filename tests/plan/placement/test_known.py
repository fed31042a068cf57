"""Published workloads: optima that the reference program and an independent solver agree on, and figures of others."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.plan.placement.blocks import contract
from foretrace.plan.placement.latency import latency
from foretrace.plan.placement.place import place
from foretrace.plan.placement.problem import PlacementProblem, load
from tests.plan.placement.problems import placements

QUICK = 20_000  # ideals


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    found = shared_data / "placement" / "dnn-partitioning"
    if not found.is_dir():
        pytest.skip(f"no placement workloads at {found}")
    return found


def _problem(folder: Path, kind: str, workload: str) -> PlacementProblem:
    return load(next((folder / f"{kind}-inputs").glob(f"{workload}.json*")))


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / name).read_text().splitlines()))


def test_optima_of_throughput(folder: Path) -> None:
    tried = 0
    for row in _rows(folder, "known_optima.csv"):
        if int(row["ideals"]) > QUICK:
            continue
        found = place(_problem(folder, "throughput", row["workload"]))
        assert found.proven
        assert found.objective_value == pytest.approx(float(row["optimal_max_load"]), rel=float(row["rel_tol"]))
        assert f"{row['ideals']} ideals" in found.method
        tried += 1
    assert tried >= 9


def test_latency_is_never_above_greedy(folder: Path) -> None:
    for row in _rows(folder, "known_latency.csv"):
        found = place(_problem(folder, "latency", row["workload"]), objective="latency", seconds=0)
        assert found.bound <= found.objective_value <= float(row["greedy_total_latency"]) * (1 + 1e-6)


def test_expert_splits_cost_what_the_reference_says(folder: Path) -> None:
    known = {row["workload"]: row for row in _rows(folder, "known_latency.csv")}
    optima = {row["workload"]: row for row in _rows(folder, "known_optima.csv")}
    for name in ("bert24", "gnmt"):
        expert = json.loads((folder / "human-experts" / f"{name}_inference_expert.json").read_text())
        for kind, table, column in (
            ("latency", known, "expert_total_latency"),
            ("throughput", optima, "expert"),
        ):
            workload = f"LayerGraphs/{name}_inference"
            problem = replace(_problem(folder, kind, workload), memory_limit=inf, accelerators=6)
            row = {each: at for at, each in enumerate(problem.ids)}
            devices = [problem.device("accelerator", [row[each] for each in one["nodes"]]) for one in expert["fpgas"]]
            value = latency(problem, devices) if kind == "latency" else problem.check(devices)
            assert value == pytest.approx(float(table[workload][column]), rel=1e-5)


def test_sets_that_need_not_be_contiguous(folder: Path) -> None:
    pytest.importorskip("ortools", reason="integer programs need OR-Tools: pip install 'foretrace[plan]'")
    found = place(_problem(folder, "throughput", "OperatorGraphs/bert_l-3_inference"), contiguous=False, seconds=60)
    assert found.proven
    assert found.objective_value == pytest.approx(21.9083, abs=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_workloads_against_every_placement(folder: Path, seed: int) -> None:
    """Some neighbouring blocks of a published graph, on other devices with less memory."""
    rng = Random(seed)
    name = rng.choice(
        ("LayerGraphs/gnmt_training", "LayerGraphs/inceptionv3_inference", "LayerGraphs/resnet50_training",
         "OperatorGraphs/bert_l-3_inference")
    )  # fmt: skip
    whole = _problem(folder, "throughput", name)
    blocks = contract(whole)
    begin = rng.randrange(len(blocks) - 7)
    problem = _part(whole, sorted(row for rows in blocks.rows[begin : begin + 7] for row in rows))
    sizes = [problem.nbytes[list(rows)].sum() for rows in contract(problem).rows]
    limit = rng.uniform(max(sizes), sum(sizes))
    problem = replace(problem, accelerators=rng.randint(2, 3), cpus=rng.randint(0, 1), memory_limit=limit)
    every = list(placements(problem, contiguous=True, blocks=contract(problem)))
    least = min(map(problem.check, every))
    if least == inf:
        with pytest.raises(ForetraceError, match="does not fit"):
            place(problem)
        return
    assert place(problem).objective_value == pytest.approx(least, rel=1e-9)


def _part(whole: PlacementProblem, rows: list[int]) -> PlacementProblem:
    """The problem of some rows alone."""
    number = {row: at for at, row in enumerate(rows)}
    edges = [(number[a], number[b]) for a, b in whole.edges.tolist() if a in number and b in number]
    columns = ("accelerator_time", "cpu_time", "nbytes", "transfer", "backward", "colour")
    return replace(
        whole, ids=tuple(rows), labels=tuple(map(str, rows)), edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        **{name: getattr(whole, name)[rows] for name in columns},
    )  # fmt: skip
