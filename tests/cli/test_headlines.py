"""A first sentence names what the table below it shows, and recommends nothing that its own row speaks against."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrace.report.names import short_name
from tests.cli.conftest import Cli

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs.csv"
DEVICES = (
    "kineto/resnet50_num_workers_4.worker0.1623212756351.pt.trace.json.gz",  # (no layer) is the first row
    "triosim/h100_vgg13_kineto.json.gz",  # the longest kernel is not the first row
)


def _table(out: str, titles: str) -> list[str]:
    """The rows below the line that begins with these titles, up to the first line that is none."""
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(titles))
    rows = []
    for line in lines[at + 1 :]:
        if not line.startswith("  ") or line.strip().startswith("next:"):
            break
        rows.append(line.strip())
    return rows


def _blame_names_its_first_row(cli: Cli, file: Path) -> None:
    for by in ("name", "layer", "kind", "phase"):
        found = cli("blame", file, "--by", by, "--json").json
        first = found["rows"][0]["name"]
        subject = found["headline"].split(" holds the step back")[0]
        assert subject == (f"What has {first[1:-1]}" if first.startswith("(no ") else short_name(first))
        shown = _table(cli("blame", file, "--by", by, "--top", "1").out, f"by {by}")[0]
        assert shown.startswith(short_name(first)[:16])


@pytest.mark.parametrize("name", ["cnn", "recommender"])
def test_blame_names_the_first_row(cli: Cli, name: str) -> None:
    _blame_names_its_first_row(cli, Path(__file__).parents[1] / "data" / f"{name}.json.gz")


@pytest.mark.parametrize("path", DEVICES)
def test_what_is_named_on_a_device_is_in_the_table(cli: Cli, shared_data: Path, path: str) -> None:
    file = shared_data / "traces" / path
    _blame_names_its_first_row(cli, file)
    found = cli("show", file, "--json").json
    out = cli("show", file, "--top", "1").out
    named = [row["name"] for row in found["holds_back"] if short_name(row["name"], 40) in found["headline"]]
    shown = _table(out, "what holds the step back")
    for name in named[:1]:
        assert any(line.startswith(short_name(name)[:16]) for line in shown)
    if " alone takes " in found["headline"]:
        assert named


def test_advice_recommends_what_its_rows_say(cli: Cli, recommender: Path) -> None:
    found = cli("advise", recommender, "--json").json
    first, *_ = found["rows"]
    assert found["headline"].startswith(f"Do {first['name']} first: ")
    assert first["saved_range_s"][0] > 0
    together = found["together"] or first
    assert all(f"--do {each}" in found["next"] for each in together["do"])
    table = _table(cli("advise", recommender).out, "what to do")
    assert [line.split()[0] for line in table[: len(found["rows"])]] == [row["do"][0] for row in found["rows"]]


def test_show_says_what_answers_its_bottleneck(cli: Cli, recommender: Path) -> None:
    (tried,) = cli("show", recommender, "--json").json["advice"]
    low, high = tried["saved_range_s"]
    assert 0 < low <= tried["saved_s"] <= high
    found = cli("advise", recommender, "--json").json
    same = next(row for row in found["rows"] if row["name"] == tried["name"])
    assert same["saved_s"] == tried["saved_s"]
    out = cli("show", recommender).out
    assert f"try: {tried['name']} saves " in out
    assert tried["effort"] in out


@pytest.mark.parametrize("network", ["0.1gbit/50us", "10gbit/20us"])
def test_compression_recommends_only_what_its_row_calls_a_gain(cli: Cli, recommender: Path, network: str) -> None:
    pytest.importorskip("torch")
    found = cli("compression", "advise", recommender, "--workers", "2", "--network", network,
                "--method", "fp16", "--method", "dgc share=0.001", "--json").json  # fmt: skip
    rows = {row["name"]: row for row in found["methods"]}
    named = [name for name in rows if f" {name.split('method=', 1)[1]} " in found["headline"]]
    assert named
    if found["best"] is None:
        assert "gradient-compression" not in found["next"]
        nearest = max(rows.values(), key=lambda row: row["gain_s"])
        assert ("is predicted to lose" in found["headline"]) == (nearest["gain_s"] <= 0)
    else:
        best = rows[found["best"]]
        assert best["verdict"] == "pays"
        assert best["gain_interval_s"][0] > 0
        assert found["best"] in found["next"]


def test_why_a_job_waits_leads_with_what_answers_its_reason(cli: Cli) -> None:
    found = cli("fleet", "why", JOBS, "job150", "--cluster", "2x4x8", "--json").json
    assert list(found["causes_s"]) == ["behind"]  # the queue, with GPUs free
    assert "What helps: others may pass" in found["headline"]
    assert found["next"].endswith("--policy fifo-skip")
    full = cli("fleet", "why", JOBS, "job150", "--cluster", "1x2x8", "--policy", "fifo-skip", "--json").json
    assert max(full["causes_s"], key=lambda cause: full["causes_s"][cause]) == "full"
    assert "What helps: one more rack" in full["headline"]
    assert full["next"].endswith("--add-rack 1")
