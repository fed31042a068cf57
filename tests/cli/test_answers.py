"""Every command on real recordings: the answer in words, and the JSON contract."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from foretrace.report import jsonout
from tests.cli.conftest import Cli
from tests.report.test_jsonout import check

COMMANDS = {
    "show": (),
    "simulate": (),
    "blame": ("--by", "layer"),
    "whatif": ("--do", "fused-optimizer"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_json_keeps_its_contract(cli: Cli, cnn: Path, command: str) -> None:
    answer = cli(command, cnn, *COMMANDS[command], "--json")
    assert answer.code == 0, answer.err
    view = jsonout.loads(answer.out, command)
    assert answer.json["command"] == command
    assert view.headline in cli(command, cnn, *COMMANDS[command]).out.replace("\n", " ")


@pytest.mark.parametrize("words", [("zoo",), ("techniques",), ("techniques", "scale"), ("check", "CNN")], ids=" ".join)
def test_lists_keep_their_contract(cli: Cli, cnn: Path, words: tuple[str, ...]) -> None:
    answer = cli(*(cnn if word == "CNN" else word for word in words), "--json").json
    rules = jsonout.schema(words[0])
    assert not check(answer, rules, rules["$defs"])


def test_show_begins_with_one_sentence_and_sums_to_the_step(cli: Cli, cnn: Path) -> None:
    answer = cli("show", cnn, "--json").json
    assert answer["headline"].endswith(".")
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["step_time_s"]["median"], rel=1e-6)
    assert answer["steps"] == 2


def test_plain_replay_reproduces_the_recording(cli: Cli, recommender: Path) -> None:
    answer = cli("simulate", recommender, "--json").json
    assert answer["error"] == 0.0
    assert answer["step_time_s"] == answer["measured_s"]


def test_blame_ranks_by_what_would_be_saved(cli: Cli, recommender: Path) -> None:
    rows = cli("blame", recommender, "--by", "phase", "--json").json["rows"]
    saved = [row["saved_if_10pct_faster_s"] for row in rows]
    assert saved == sorted(saved, reverse=True)
    assert {"forward", "backward", "optimizer"} <= {row["name"] for row in rows}


def test_whatif_says_what_it_changed_and_assumed(cli: Cli, recommender: Path) -> None:
    answer = cli("whatif", recommender, "--do", "fused-optimizer", "--json").json
    assert answer["after_s"] < answer["before_s"]
    low, high = answer["interval_s"]
    assert low <= answer["after_s"] <= high
    assert answer["changes"]
    assert answer["assumptions"]


def test_whatifs_compose_in_order(cli: Cli, recommender: Path) -> None:
    halved = ("--do", "scale phase=optimizer by=0.5")
    once = cli("whatif", recommender, *halved, "--json").json
    twice = cli("whatif", recommender, *halved, *halved, "--json").json
    assert [stage["name"] for stage in twice["stages"]] == [halved[1], halved[1]]
    saved = once["before_s"] - once["after_s"]
    assert twice["before_s"] - twice["after_s"] == pytest.approx(1.5 * saved, rel=0.02)


def test_compare_explains_the_whole_difference_by_layer(cli: Cli, recommender: Path, fused: Path) -> None:
    answer = cli("compare", recommender, fused, "--json").json
    assert answer["speedup"] > 1
    moved = sum(row["critical_after_s"] - row["critical_before_s"] for row in answer["rows"])
    assert moved == pytest.approx(answer["change_s"], rel=1e-6)
    assert answer["rows"][0]["phase"] == "optimizer"


def test_a_run_compared_with_itself_is_the_same(cli: Cli, cnn: Path) -> None:
    answer = cli("compare", cnn, cnn, "--json").json
    assert answer["change_s"] == 0.0
    assert answer["matched_share"] == pytest.approx(1.0)
    assert all(row["changed"] == row["only_before"] == row["only_after"] == 0 for row in answer["rows"])


def test_a_saved_graph_stands_in_for_its_recording(cli: Cli, recommender: Path, tmp_path: Path) -> None:
    kept = tmp_path / "run.graph"
    assert cli("graph", recommender, "--out", kept).out == f"  wrote {kept}\n"
    from_file, from_trace = (cli("blame", source, "--json").json for source in (kept, recommender))
    assert from_file["rows"] == from_trace["rows"]


def test_a_saved_prediction_can_be_compared_with_the_real_thing(
    cli: Cli, recommender: Path, fused: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "predicted.graph"
    predicted = cli("whatif", recommender, "--do", "fused-optimizer", "--save", kept, "--json").json
    answer = cli("compare", kept, fused, "--json").json
    assert answer["before_s"] == pytest.approx(predicted["after_s"])


def test_check_holds_on_a_recording(cli: Cli, cnn: Path) -> None:
    answer = cli("check", cnn, "--json")
    assert answer.code == 0
    assert answer.json["ok"]
    assert "self-replay" in {finding["name"] for finding in answer.json["findings"]}
    assert cli("check", cnn).out.startswith("All ")


def test_whatif_writes_page_and_timeline(cli: Cli, cnn: Path, tmp_path: Path) -> None:
    page, timeline = tmp_path / "report.html", tmp_path / "timeline.json.gz"
    do = ("--do", "scale op=*conv* by=0.5")
    answer = cli("whatif", cnn, *do, "--html", page, "--perfetto", timeline)
    assert answer.out.endswith(f"  wrote {page}\n  wrote {timeline}\n")
    assert "<html" in page.read_text()
    events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {name.split(" ")[0] for name in names} == {"recorded", "scale"}


def test_report_puts_whatifs_side_by_side(cli: Cli, recommender: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    answer = cli("report", recommender, "--do", "fused-optimizer", "--do", "scale phase=forward by=0.5", "-o", page)
    assert answer.out == f"  wrote {page}\n"
    assert "fused-optimizer" in page.read_text()


def test_export_alone_draws_the_recording(cli: Cli, recommender: Path, tmp_path: Path) -> None:
    target = tmp_path / "timeline.json"
    assert cli("export", recommender, "--out", target).code == 0
    events = json.loads(target.read_bytes())["traceEvents"]
    assert len([event for event in events if event["name"] == "process_name"]) == 1


def test_techniques_lists_what_do_takes(cli: Cli) -> None:
    listed = [each["name"] for each in cli("techniques", "--json").json["techniques"]]
    assert {"prefetch-data", "fused-optimizer", "mixed-precision", "cuda-graphs", "faster-device"} <= set(listed)
    assert "by=" in cli("techniques", "scale").out
    shown = cli("techniques", "data-parallel").out  # as PyTorch counts buckets, and as gradients are counted
    assert "by default (MiB)" in shown and "(default 0.0 MB)" in shown and "(default )" not in shown


def test_steps_keep_a_part(cli: Cli, recommender: Path) -> None:
    numbers = cli("show", recommender, "--json").json["step_numbers"]
    kept = cli("show", recommender, "--steps", f"{numbers[0]}-{numbers[1]}", "--json").json
    assert kept["step_numbers"] == numbers[:2]


def test_help_of_every_command_has_an_example(cli: Cli) -> None:
    top = cli("--help").out
    commands = re.findall(r"^  ([a-z]+) {2,}", top.split("Record and look:")[1], re.MULTILINE)
    assert {"record", "show", "whatif", "verify", "ledger", "calibrate", "zoo", "profile"} <= set(commands)
    for name in commands:
        shown = cli(name, "--help")
        assert shown.code == 0
        assert f"foretrace {name} " in shown.out.replace("\n", " "), name
    assert "..." not in top.split("Record and look:")[1], "a summary is cut"
    for name in ("calibrate", "cloud", "compression", "energy", "fleet", "llm", "network", "plan", "rig", "serve"):
        assert "..." not in cli(name, "--help").out.split("Commands:")[1], f"a summary of {name} is cut"
