"""`foretrace network check`, `calibrate network` and `devices`: sentences, verdicts, JSON, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.cost.network.collective_table import series_of, table_of
from foretrace.cost.network.network import CollectiveKind, bus_share
from foretrace.report.jsonout import schema
from tests.cli.conftest import Cli

BOX = """
per_node: 8
device: A100-SXM4-80GB
inside: nvlink
"""
PAIR = """
nodes: 2
per_node: 8
inside: 1600gbit/3us
between: 200gbit/10us
nics: 4
"""


def table(path: Path, *, gb_s: float, alpha_s: float = 5e-5, per_node: int = 8, workers: int = 8) -> Path:
    """All-reduces of 4 KB to 1 GB at a bus bandwidth."""
    sizes = np.geomspace(4e3, 1e9, 20)
    share = bus_share(CollectiveKind.ALL_REDUCE, workers)
    points = [(size, alpha_s + share * size / (gb_s * 1e9), 0.0) for size in sizes]
    series = series_of(str(path), kind=CollectiveKind.ALL_REDUCE, workers=workers, per_node=per_node, points=points)
    table_of(path.name, [series], name=path.stem).save(path)
    return path


@pytest.fixture
def box(tmp_path: Path) -> Path:
    (tmp_path / "box.yaml").write_text(BOX)
    return tmp_path / "box.yaml"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    (tmp_path / "pair.yaml").write_text(PAIR)
    return tmp_path / "pair.yaml"


def test_a_machine_that_is_right(cli: Cli, tmp_path: Path, box: Path) -> None:
    answer = cli("network", "check", table(tmp_path / "t.json", gb_s=229), "--on", box)
    assert answer.code == 0, answer.out + answer.err
    assert answer.out.startswith("The bus bandwidth is right: 228 GB/s at 954 MiB")
    assert "suspicion" not in answer.out and "next: foretrace techniques data-parallel" in answer.out


def test_pcie_instead_of_nvlink_is_suspected(cli: Cli, tmp_path: Path, box: Path) -> None:
    answer = cli("network", "check", table(tmp_path / "t.json", gb_s=20), "--on", box)
    assert answer.code == 1
    assert answer.out.startswith("The bus bandwidth is too low, 20.0 GB/s") and "PCIe" in answer.out.splitlines()[0]


def test_missing_network_cards_are_counted(cli: Cli, tmp_path: Path, pair: Path) -> None:
    found = table(tmp_path / "t.json", gb_s=50, workers=16, alpha_s=1e-4)
    answer = cli("network", "check", found, "--on", pair, "--json")
    assert answer.code == 1 and not answer.json["ok"]
    assert any("2 of 4 network cards" in line for line in answer.json["suspicions"])


def test_slow_starts_are_told_from_slow_links(cli: Cli, tmp_path: Path, pair: Path) -> None:
    found = table(tmp_path / "t.json", gb_s=98, workers=16, alpha_s=2.5e-4)
    answer = cli("network", "check", found, "--on", pair, "--json").json
    verdicts = {each["regime"]: each["verdict"] for each in answer["regimes"]}
    assert verdicts["latency"] == "slower" and verdicts["link"] == "as expected"
    assert answer["headline"].startswith("Large transfers are right")


def test_json_has_every_size_and_keeps_the_schema(cli: Cli, tmp_path: Path, box: Path) -> None:
    answer = cli("network", "check", table(tmp_path / "t.json", gb_s=229), "--on", box, "--json").json
    assert set(answer) == set(schema("network check")["properties"])
    assert len(answer["sizes"]) == 20 and answer["workers"] == 8
    for size in answer["sizes"]:
        assert size["expected_low_s"] <= size["expected_s"] <= size["expected_high_s"]


def test_measured_tables_of_others(cli: Cli, shared_data: Path, box: Path) -> None:
    folder = shared_data / "network"
    a100 = cli("network", "check", folder / "vtrain_allreduce_a100" / "AR_GPU8_1M_1024M.csv.gz", "--on", box)
    assert a100.code == 0 and "229 GB/s at 1.00 GiB" in a100.out
    v100 = folder / "vtrain_allreduce_v100" / "AR_GPU7_1M_1024M.csv.gz"
    assert "right" in cli("network", "check", v100, "--on", "nccl:V100-SXM2").out.splitlines()[0]
    many = cli("network", "check", folder / "vidur" / "a100_dgx_all_reduce.csv.gz", "--on", "1gbit")
    assert many.code == 2 and "16 workers, 8 per machine" in many.err
    slow = cli(
        "network", "check", folder / "vidur" / "a100_dgx_all_reduce.csv.gz",
        "--workers", "16", "--on", "nccl:A100-SXM4-80GB,nics=8,nic=200gbit",
    )  # fmt: skip
    assert slow.code == 1 and "another network than declared" in slow.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none.log", "--on", "1gbit"], "cannot read"),
        (["t.json"], "--on"),
        (["t.json", "--on", "x"], "no link"),
        (["t.json", "--on", "none.yaml"], "cannot read"),
        (["t.json", "--on", "1gbit", "--workers", "3"], "holds nothing of that"),
        (["t.json", "--on", "1gbit", "--kind", "hug"], "no collective"),
        (["empty.csv", "--on", "1gbit"], "is empty"),
    ],
)
def test_mistakes_of_check(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "t.json", gb_s=1)
    (tmp_path / "empty.csv").write_text("")
    answer = cli("network", "check", *words)
    assert answer.code == 2 and says in answer.err and not answer.out and "Traceback" not in answer.err


def test_a_calibration_is_kept_and_used(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "gloo.json"
    words = ["--from", "4096", "--to", "65536", "--sizes", "2", "--accept-noise"]
    answer = cli("calibrate", "network", "--workers", "2", "--backend", "gloo", *words, "--out", file)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("gloo between 2 workers of this machine") and f"stored in {file}" in answer.out
    again: Any = cli("network", "check", file, "--on", file, "--json").json
    assert again["ok"] and [size["bytes"] for size in again["sizes"]] == [4096, 65536]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workers", "1"], "1 workers"),
        (["--from", "0"], "--from"),
        (["--from", "100", "--to", "50"], "cannot be"),
        (["--repetitions", "2"], "--repetitions"),
        (["--backend", "smoke"], "backend smoke"),
        (["--kinds", "hug"], "hug"),
        (["--limit", "inf"], "--limit inf must be finite"),
        (["--limit", "nan"], "limit"),
        (["--out", "nowhere/table.json"], "cannot write"),
    ],
)
def test_mistakes_of_calibrate(cli: Cli, words: list[str], says: str) -> None:
    answer = cli("calibrate", "network", *words)
    assert answer.code == 2 and says in answer.err and "Traceback" not in answer.err


def test_devices(cli: Cli) -> None:
    answer = cli("devices")
    assert answer.code == 0 and answer.out.startswith("36 devices") and "H100-SXM5-80GB" in answer.out
    one = cli("devices", "h200")
    assert "confirmed by aiconfigurator" in one.out and "unconfirmed" in one.out
    found = cli("devices", "t4", "--json").json["devices"]
    assert [each["short"] for each in found] == ["T4"] and found[0]["scaleup_gb_s"] is None
    unknown = cli("devices", "H300")
    assert unknown.code == 2 and "H300" in unknown.err
