"""The study of the space as it is run: its text, its JSON, and files that are not there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from reproductions.__main__ import main
from reproductions.nas_bench_201.cells import OPERATIONS, space
from reproductions.nas_bench_201.study import column


def space_files(folder: Path, networks: int = 100) -> list[str]:
    rng = np.random.default_rng(1)
    cells = []
    for _ in range(networks):
        nodes = ["".join(f"|{OPERATIONS[rng.integers(5)]}~{i}" for i in range(at)) + "|" for at in (1, 2, 3)]
        cells.append("+".join(nodes))
    work = space(cells)
    peak = column("2080ti")[0].flops_per_s
    ms = 1e3 * (work.flops / peak * 4 + 2e-6 * work.kernels())
    rows = [f"{i},{a:.6g},{256 * b:.6g}" for i, (a, b) in enumerate(zip(ms, 1e3 * work.flops / peak * 4, strict=True))]
    archs, latencies = folder / "archs.csv", folder / "latencies.csv"
    archs.write_text("arch_idx,arch\n" + "\n".join(f"{i},{cell}" for i, cell in enumerate(cells)) + "\n")
    latencies.write_text("arch_idx,2080ti_1,2080ti_256\n" + "\n".join(rows) + "\n")
    return ["--archs", str(archs), "--latencies", str(latencies), "--measure", "20"]


def test_a_space_of_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["nas_bench_201", *space_files(tmp_path)]
    assert main([*words, "--json"]) == 0
    study = json.loads(capsys.readouterr().out)
    assert study["networks"] == 100 and [each["name"] for each in study["columns"]] == ["2080ti_1", "2080ti_256"]
    assert study["columns"][1]["utilisation"] == pytest.approx([0.25] * 3, rel=1e-4)
    assert study["columns"][1]["flops_with_latency"] > 0.999
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "rank correlation of latency between columns" in text and "2080ti_256" in text


@pytest.mark.parametrize(("words", "says"), [
    (["--archs", "no.csv"], "HayeonLee/HELP"),
    (["--archs", "no.csv", "--latencies", "no.csv"], "no.csv, which does not exist"),
])  # fmt: skip
def test_mistakes_are_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nas_bench_201", *words]) == 2
    complaint = capsys.readouterr().err
    assert says in complaint and complaint.count("\n") == 1
