"""`foretrace fleet`: answers for people and scripts, a sweep that continues, mistakes in one sentence."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foretrace.cli.app import run
from foretrace.cli.fleet import fleet
from foretrace.cli.fleet_options import KINDS, Played
from foretrace.fleet.scene import Spec
from foretrace.report.jsonout import answers, schema

ROOT = Path(__file__).resolve().parents[2]
LOG = str(ROOT / "examples" / "jobs.csv")
SMALL = (LOG, "--cluster", "2x4x8")


def answer(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> dict[str, Any]:
    assert run(["fleet", command, *words, "--json"]) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    msgspec.json.decode(text, type=answers()[f"fleet {command}"])
    found: dict[str, Any] = json.loads(text)
    assert set(found) == set(schema(f"fleet {command}")["properties"])
    return found


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["fleet", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err and len(captured.err.strip().splitlines()) == 1
    return captured.err


def test_a_run_and_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "jobs.csv"
    found = answer(capsys, "run", *SMALL, "--policy", "fifo", "--out", str(out))
    with out.open() as lines:
        rows = list(csv.DictReader(lines))
    assert found["jobs"] == len(rows) == 300
    jct = [float(row["jct_s"]) for row in rows]
    assert found["mean_jct_s"] == pytest.approx(sum(jct) / len(jct))
    queue = [float(row["queue_s"]) for row in rows]
    assert found["mean_queue_s"] == pytest.approx(sum(queue) / len(queue))
    first, last = min(float(row["submit_s"]) for row in rows), max(float(row["end_s"]) for row in rows)
    assert found["makespan_s"] == pytest.approx(last - first)
    held = sum(float(row["held_s"]) * int(row["gpus"]) for row in rows)
    assert found["utilisation"] == pytest.approx(held / (64 * (last - first)))
    assert sum(each["share"] for each in found["causes"]) == pytest.approx(1)


def test_measured_over_some_jobs_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.csv"
    log.write_text("job,submit_s,gpus,work_s\n1,0,1,100\n2,0,1,200\n3,0,1,600\n")
    found = answer(capsys, "run", str(log), "--cluster", "1x8", "--measure", "2-3")
    assert found["mean_jct_s"] == 400


def test_a_move_costs_what_moving_the_state_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--policy", "las lease-s=600")
    free = answer(capsys, "run", *words)
    moved = answer(capsys, "run", *words, "--checkpoint-gb", "bert=12,vgg11=2", "--storage-gb-s", "0.5")
    assert free["lost"]["gpu_h"] == 0 < moved["lost"]["gpu_h"]


def test_why_names_the_constraint_and_what_would_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "run", *SMALL)
    assert found["mean_queue_s"] > 0
    worst = answer(capsys, "why", LOG, "job150", "--cluster", "2x4x8")
    assert worst["causes_s"] and sum(worst["causes_s"].values()) == pytest.approx(worst["queue_s"])
    assert any(each["helps"] for each in worst["remedies"])
    assert worst["decisions"][-1]["what"] == "finish"
    assert run(["fleet", "why", LOG, "job150", "--cluster", "2x4x8"]) == 0
    assert "would it help?" in capsys.readouterr().out


def test_a_table_of_figures_names_them_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fleet", "whatif", *SMALL, "--add-rack", "1"]) == 0
    out = capsys.readouterr().out
    assert "The mean JCT falls" in out and "mean wait" in out
    assert not re.search(r"[a-z]_[a-z]", out.partition("figure")[2].partition("jobs end")[0])


def test_what_a_rack_a_policy_and_a_network_buy(capsys: pytest.CaptureFixture[str]) -> None:
    rack = answer(capsys, "whatif", *SMALL, "--add-rack", "1")
    before = {each["name"]: each["before"] for each in rack["figures"]}
    after = {each["name"]: each["after"] for each in rack["figures"]}
    assert after["mean_queue_s"] < before["mean_queue_s"]
    assert answer(capsys, "whatif", *SMALL, "--policy", "las")["changes"] == ["policy las"]
    network = answer(
        capsys, "whatif", *SMALL, "--now", "fifo-skip consolidate=no", "--network", "400Gbps",
        "--speeds", "closed-form gb-s=300,5,2.5",
    )  # fmt: skip
    comm = next(each for each in network["figures"] if each["name"] == "comm_s")
    assert comm["after"] < comm["before"]


def test_arrays_are_tasks_under_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "jobs.csv"
    log.write_text("job,submit_s,gpus,work_s,text:array\n1,0,1,60,0-3\n2,10,1,60,\n3,20,1,60,\n")
    played = (str(log), "--cluster", "1x1")
    assert answer(capsys, "run", *played)["jobs"] == 6
    found = answer(capsys, "whatif", *played, "--now", "fifo", "--policy", "fifo slurm=yes")
    assert found["jobs"] == 6 and found["figures"][0]["ratio"] > 1
    why = answer(capsys, "why", str(log), "3", "--cluster", "1x1", "--policy", "fifo slurm=yes")
    assert why["job"] == "3" and 160 < why["queue_s"] < 170, "behind one task and job 2"


def test_policies_are_compared_with_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "fleet.html"
    found = answer(
        capsys, "compare", *SMALL, "--policy", "fifo", "--policy", "las", "--seeds", "3", "--html", str(page)
    )
    las = next(each for each in found["policies"] if each["policy"] == "las")["figures"]["mean_jct_s"]
    assert las["low"] <= las["mean"] <= las["high"] and las["verdict"] == "better"
    assert page.stat().st_size > 10_000


def test_a_killed_sweep_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "fleet", "sweep", LOG, "--policy", "fifo", "--policy", "las", "--policy", "srtf", "--set", "load=0.5,0.7,1,1.5",
        "--set", "restart-s=0,30", "--jobs", "100", "--out", str(tmp_path / "sweep"), "--json",
    ]  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; from foretrace.cli import main; main()", *words],
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    folder = tmp_path / "sweep"
    until = time.monotonic() + 120
    while len(list(folder.glob("*.json"))) < 4 and child.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    kept = {path: path.read_bytes() for path in folder.glob("*.json")}
    assert len(kept) >= 4
    for text in kept.values():
        json.loads(text)  # whole files only
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cells"] == 24 and found["reused"] == len(kept) - 1  # one file says what is swept
    assert all(path.read_bytes() == text for path, text in kept.items())
    again = tmp_path / "again"
    assert run([*words[:-2], str(again), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == found["rows"]


def test_a_sweep_that_was_moved_with_its_log_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    log = shutil.copy(LOG, here / "jobs.csv")

    def swept(folder: Path) -> dict[str, Any]:
        return answer(
            capsys, "sweep", str(folder / "jobs.csv"), "--policy", "fifo", "--policy", "las", "--jobs", "50",
            "--out", str(folder / "sweep"),
        )  # fmt: skip

    first = swept(here)
    shutil.copytree(here, there)
    os.utime(there / "jobs.csv", (1, 1))
    second = swept(there)
    assert (first["reused"], second["reused"]) == (0, 2)
    assert second["rows"] == first["rows"]
    (there / "jobs.csv").write_text(Path(log).read_text() + "\n")
    assert run(["fleet", "sweep", str(there / "jobs.csv"), "--policy", "fifo", "--out", str(there / "sweep")]) == 2
    assert "holds a sweep with another" in capsys.readouterr().err


def test_a_workload_like_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    like, jobs = tmp_path / "like.json", tmp_path / "more.csv"
    assert answer(capsys, "fit", LOG, "--out", str(like))["jobs"] == 300
    assert run(["fleet", "generate", str(like), "--jobs", "500", "--out", str(jobs)]) == 0
    capsys.readouterr()
    assert answer(capsys, "run", str(jobs))["jobs"] == 500


def test_decisions_for_a_scheduler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for to in ("slurm", "kueue", "volcano", "ray"):
        out = tmp_path / to
        words = ["fleet", "export", *SMALL, "--to", to, "--job", "job3", "--level", "rack", "--wait-s", "600"]
        assert run([*words, "--out", str(out)]) == 0
        assert any(out.iterdir())
    assert "--switches=1@00:10:00" in next((tmp_path / "slurm").iterdir()).read_text()


def test_free_slots_and_policies(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "slots", *SMALL, "--size", "8", "--at", "90000")
    assert {each["slot_gpus"] for each in found["slots"]} == {8}
    names = {each["name"] for each in answer(capsys, "policies")["policies"]}
    assert {"fifo", "dally", "tiresias", "gavel-max-min", "pollux"} <= names


MISTAKES = {
    "no such log": ("run", "nowhere.csv"),
    "no such policy": ("run", *SMALL, "--policy", "daly"),
    "no such parameter": ("run", *SMALL, "--policy", "dally leese-s=3"),
    "a lease of no time": ("run", *SMALL, "--policy", "las lease-s=0"),
    "a lease shorter than a restart": ("run", *SMALL, "--policy", "las lease-s=10", "--restart-s", "10"),
    "a lease that is no number": ("run", *SMALL, "--policy", "las lease-s=nan"),
    "no such cluster": ("run", LOG, "--cluster", "4xx8"),
    "an empty cluster": ("run", LOG, "--cluster", "0x8"),
    "no such format": ("run", *SMALL, "--format", "pbs"),
    "another format": ("run", *SMALL, "--format", "philly"),
    "no such speeds": ("run", *SMALL, "--speeds", "magic"),
    "more GPUs than there can be": ("run", LOG, "--cluster", "9999999x9999999"),
    "a kind of GPU without a name": ("run", LOG, "--cluster", "4x8@"),
    "a lease of ages": ("run", *SMALL, "--policy", "las lease-s=1e300"),
    "a restart of ages": ("run", *SMALL, "--restart-s", "1e300"),
    "more seeds than anybody needs": ("compare", *SMALL, "--policy", "fifo", "--policy", "las", "--seeds", "9" * 20),
    "slots at no time": ("slots", *SMALL, "--size", "8", "--at", "nan"),
    "a sweep of an empty log": ("sweep", os.devnull, "--policy", "fifo", "--out", "sweep"),
    "a sweep with jitter that is no time": (
        "sweep", LOG, "--policy", "fifo", "--seeds", "2", "--jitter-s", "nan", "--out", "sweep",
    ),
    "a page beside rows to nowhere": ("run", *SMALL, "--out", "rows.csv", "--html", "no/such/folder/page.html"),
    "rows below a file": ("run", *SMALL, "--out", f"{LOG}/rows.csv"),
    "a name longer than a file may have": ("fit", LOG, "--out", "x" * 300),
    "jitter of ages": ("compare", *SMALL, "--policy", "fifo", "--policy", "las", "--jitter-s", "1e300"),
    "jobs that never come": ("run", *SMALL, "--load", "1e-300"),
    "a folder as a log": ("run", str(ROOT / "examples"), "--cluster", "2x4x8"),
    "a page to nowhere": ("run", *SMALL, "--html", "no/such/folder/page.html"),
    "a log that is a program": ("run", __file__, "--cluster", "2x4x8"),
    "a log that is no generator": ("generate", LOG, "--jobs", "5", "--out", "x.csv"),
    "a table that is a log": ("run", *SMALL, "--speeds", f"table={LOG}"),
    "a goodput profile that is missing": ("run", *SMALL, "--speeds", "goodput=nowhere"),
    "no such recording": ("run", *SMALL, "--speeds", "graphs cnn=nowhere links=1gbit,1gbit,1gbit"),
    "a network of no speed": ("whatif", *SMALL, "--network", "0Gbps", "--speeds", "closed-form gb-s=300,5,2"),
    "a level that the cluster lacks": ("export", *SMALL, "--to", "slurm", "--level", "pod", "--out", "x"),
    "bandwidths of another tree": ("run", *SMALL, "--speeds", "closed-form gb-s=1,2"),
    "speeds without bandwidths": ("run", *SMALL, "--speeds", "closed-form"),
    "a negative restart": ("run", *SMALL, "--restart-s", "-1"),
    "no time between failures": ("run", *SMALL, "--mtbf-h", "nan"),
    "no load": ("run", *SMALL, "--load", "0"),
    "no jobs": ("run", *SMALL, "--jobs", "-5"),
    "jobs to measure that are not there": ("run", *SMALL, "--measure", "5-3"),
    "rows to nowhere": ("run", *SMALL, "--out", "no/such/folder/rows.csv"),
    "no such job": ("why", LOG, "job9999", "--cluster", "2x4x8"),
    "a time before all": ("why", LOG, "job3", "--at", "-1"),
    "nothing changes": ("whatif", *SMALL),
    "a network that nobody asks for": ("whatif", *SMALL, "--network", "400Gbps"),
    "the same policy twice": ("compare", *SMALL, "--policy", "fifo", "--policy", "fifo"),
    "jitter that is no time": ("compare", *SMALL, "--policy", "fifo", "--policy", "las", "--jitter-s", "nan"),
    "a sweep of nothing": ("sweep", LOG, "--policy", "fifo", "--set", "colour=red", "--out", "sweep"),
    "a sweep of text": ("sweep", LOG, "--policy", "fifo", "--set", "load=high", "--out", "sweep"),
    "a sweep of no log": ("sweep", "nowhere.csv", "--policy", "fifo", "--out", "sweep"),
    "failures every few seconds": ("run", *SMALL, "--mtbf-h", "1e-6"),
    "leases of no length": ("run", *SMALL, "--policy", "las lease-s=1e-9"),
    "rows to a device": ("run", *SMALL, "--out", os.devnull),
    "a state of no size": ("run", *SMALL, "--checkpoint-gb", "bert"),
    "storage that does not move": ("run", *SMALL, "--checkpoint-gb", "bert=1", "--storage-gb-s", "0"),
    "a state of a model that nobody trains": ("run", *SMALL, "--checkpoint-gb", "gpt=3"),
    "constant speeds of something": ("run", *SMALL, "--speeds", "constant=3"),
    "rounds of no length": ("run", *SMALL, "--policy", "gavel-max-min round-s=1e-9"),
    "a job exported twice": ("export", *SMALL, "--to", "slurm", "--job", "job3", "--job", "job3", "--out", "x"),
    "a policy that decides nothing": ("export", *SMALL, "--to", "slurm", "--policy", "las", "--out", "x"),
    "no such generator": ("generate", "nowhere.json", "--jobs", "5", "--out", "x.csv"),
    "how much is not said": ("generate", "nowhere.json", "--out", "x.csv"),
    "no such scheduler": ("export", *SMALL, "--to", "pbs", "--out", "x"),
}  # fmt: skip


LOGS = {
    "nothing": "",
    "a head alone": "",
    "a job that comes at no time": "1,nan,1,5",
    "a job without end": "1,0,1,inf",
    "a job of ages": "1,0,1,1e30",
    "a job without GPUs": "1,0,0,5",
    "half a GPU more": "1,0,1.5,5",
    "a row cut short": "1,0",
    "a quote that stays open": '"1,0,1,5',
    "a job twice": "1,0,1,5\n1,0,1,5",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_wrong_is_one_sentence(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.csv"
    log.write_text("" if name == "nothing" else f"job,submit_s,gpus,work_s\n{LOGS[name]}\n")
    out = tmp_path / "rows.csv"
    assert str(log) in complaint(capsys, "run", str(log), "--cluster", "1x8", "--out", str(out))
    assert not out.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [("span_s", 0), ("tenants", []), ("profile", [1, 2]), ("gap_logs", [1]), ("kinds", []), ("gap_pool", -1)],
)
def test_a_damaged_generator_is_one_sentence(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    like, out = tmp_path / "like.json", tmp_path / "jobs.csv"
    assert run(["fleet", "fit", LOG, "--out", str(like)]) == 0
    capsys.readouterr()
    like.write_text(json.dumps(json.loads(like.read_text()) | {key: value}))
    said = complaint(capsys, "generate", str(like), "--jobs", "5", "--out", str(out))
    assert "damaged generator" in said or "is no generator of workloads" in said
    assert not out.exists()


def test_more_jobs_than_can_be_are_not_generated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    like, out = tmp_path / "like.json", tmp_path / "jobs.csv"
    assert run(["fleet", "fit", LOG, "--out", str(like)]) == 0
    capsys.readouterr()
    for words in (("--jobs", "100000000000"), ("--days", "1e12"), ("--jobs", "5", "--load", "1e-300")):
        assert "too many" in complaint(capsys, "generate", str(like), *words, "--out", str(out))
    assert not out.exists()


def test_the_example_of_each_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(LOG, "jobs.csv")
    shutil.copytree(ROOT / "examples" / "slurm", "slurm")
    for command in fleet.registered_commands:
        assert command.callback is not None
        said = inspect.getdoc(command.callback) or ""
        words = shlex.split(said.partition("Example: ")[2])
        assert words[:3] == ["foretrace", "fleet", command.name]
        assert run(words[1:]) == 0, capsys.readouterr().err
    assert run(["fleet", "--help"]) == 0
    assert "..." not in capsys.readouterr().out.rpartition("Commands:")[2], "a summary is cut"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint(capsys, *MISTAKES[name]).startswith("foretrace: ")
    assert not list(tmp_path.iterdir())


def test_options_are_fields_of_a_spec_with_its_defaults() -> None:
    fields = {each.name: each.default for each in dataclasses.fields(Spec)}
    assert {name: getattr(Played, name) for name in KINDS if name != "trace"} == {
        name: fields[name] for name in KINDS if name != "trace"
    }
    assert set(fields) - set(KINDS) == {"add", "jitter_s"}  # of whatif and sweep alone


def test_every_command_answers_in_json_and_as_a_page() -> None:
    for command in fleet.registered_commands:
        assert command.callback is not None
        assert {"html", "as_json"} <= inspect.signature(command.callback).parameters.keys(), command.name
