"""Logs of other systems become workloads, and every row of them is accounted for."""

from __future__ import annotations

import gzip
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.fleet.formats import FORMATS, read
from foretrace.fleet.workload import SECOND, Workload
from tests.fleet import format_samples as samples
from tests.fleet.format_samples import SAMPLES


def written(folder: Path, text: str, name: str = "log.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def accounted(workload: Workload) -> int:
    """Rows that became jobs, were refused, or are counted in a note."""
    notes = (re.match(r"(\d+) rows ", note) for note in workload.origin.notes)
    return len(workload) + len(workload.origin.refused) + sum(int(note[1]) for note in notes if note)


@pytest.mark.parametrize("name", SAMPLES)
def test_content_decides_and_every_row_is_accounted_for(name: str, tmp_path: Path) -> None:
    text, format = SAMPLES[name]
    made = read(written(tmp_path, text))
    assert made.origin.format == format
    assert made.name == "log"
    assert accounted(made) == made.origin.rows
    packed = tmp_path / "log.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    again = read(packed, format)
    assert again.job.tolist() == made.job.tolist()
    assert (again.submit_ns == made.submit_ns).all()


def test_every_format_has_a_sample() -> None:
    assert {format for _, format in SAMPLES.values()} == set(FORMATS)


def test_philly(tmp_path: Path) -> None:
    made = read(written(tmp_path, samples.PHILLY))
    assert made.job.tolist() == ["1", "0"]  # by submission, called by their rows
    assert made.submit_ns.tolist() == [0, 2932 * SECOND]
    assert made.epoch_s == 1507529583.0
    assert made.work_s.tolist() == [2951.0, 66.0]
    assert made.tenant.tolist() == ["6214e9", "11cb48"]
    assert read(tmp_path / "log.txt", timezone="Asia/Tokyo").epoch_s == 1507529583.0 - 9 * 3600


def test_gavel(tmp_path: Path) -> None:
    made = read(written(tmp_path, samples.GAVEL))
    assert made.model.tolist() == ["ResNet-50 (batch size 64)", "LM (batch size 10)"]
    assert made.batch.tolist() == [64, 10]
    assert made.iterations.tolist() == [2931, 8601.5]
    assert made.gpus.tolist() == [1, 4]
    assert made.priority.tolist() == [1, 2.5]
    assert np.isnan(made.work_s).all()
    assert math.isnan(made.details["slo"][0])
    assert made.details["slo"][1] == 3600
    assert made.details["mode"].tolist() == ["static", "static"]
    narrow = read(written(tmp_path, samples.GAVEL_NARROW))
    assert (narrow.gpus.tolist(), narrow.submit_ns.tolist()) == ([1, 8], [0, 6 * SECOND])
    generated = read(written(tmp_path, samples.GAVEL_GENERATED))
    assert generated.details["allox_jct_s"][1] == 59.5
    assert generated.submit_ns.tolist() == [0, 2855_500_000_000]


def test_shockwave_tiresias_pollux(tmp_path: Path) -> None:
    made = read(written(tmp_path, samples.SHOCKWAVE))
    assert made.work_s.tolist() == [1418, 3338]
    assert made.details["mode"].tolist() == ["gns", "accordion"]
    made = read(written(tmp_path, samples.TIRESIAS))
    assert (made.work_s.tolist(), made.iterations.tolist()) == ([164, 147], [606, 133])
    assert made.details["interval"].tolist() == [30, 23]
    assert made.model.tolist() == ["vgg19", "vgg11"]
    made = read(written(tmp_path, samples.POLLUX))
    assert (made.job.tolist(), made.model.tolist()) == (["cifar10-0", "bert-1"], ["cifar10", "bert"])
    assert (made.gpus.tolist(), made.batch.tolist()) == ([6, 2], [2048, 24])
    assert np.isnan(made.work_s).all()


def test_helios(tmp_path: Path) -> None:
    made = read(written(tmp_path, samples.HELIOS))
    assert made.job.tolist() == ["1425511", "1425512"]
    assert made.logged_start_ns.tolist() == [0, 36 * SECOND]
    assert made.logged_end_ns[0] == made.work_s[0] * SECOND
    assert made.details["state"].tolist() == ["COMPLETED", "FAILED"]
    assert "1 rows set aside: jobs without GPUs" in made.origin.notes


def test_alibaba_2020_joins_tasks_and_takes_submission_from_the_job_table(tmp_path: Path) -> None:
    path = written(tmp_path, samples.ALIBABA2020)
    made = read(path)
    assert made.job.tolist() == ["j1", "j2"]
    assert made.gpus.tolist() == [4 * 2 + 1, 1]
    assert made.share.tolist() == [1, 0.5]
    assert made.work_s.tolist() == [66, 30]
    assert made.details["given_type"].tolist() == ["T4|V100", "MISC"]
    assert made.gpu_type.tolist() == ["", ""]
    assert made.origin.rows == 4
    jobs = written(tmp_path, samples.ALIBABA2020_JOBS, "jobs.csv")
    timed = read(path, jobs=jobs, bind_types=True)
    assert (timed.logged_start_ns - timed.submit_ns).tolist() == [64 * SECOND, 0]
    assert timed.user.tolist() == ["u1", "u2"]
    assert timed.gpu_type.tolist() == ["T4|V100", "MISC"]
    with pytest.raises(ForetraceError, match="tells no GPUs; name pai_task_table"):
        read(jobs)


def test_alibaba_2023(tmp_path: Path) -> None:
    path = written(tmp_path, samples.ALIBABA2023)
    made = read(path)
    assert made.gpus.tolist() == [1, 8]
    assert made.share.tolist() == [0.46, 1]
    assert made.gpu_type.tolist() == ["V100M16|V100M32", ""]
    assert made.work_s.tolist() == [1246, 1291]
    assert made.submit_ns.tolist() == [5 * SECOND, 9 * SECOND]  # the trace counts from its own zero
    assert (made.logged_start_ns - made.submit_ns).tolist() == [2 * SECOND, 0]
    waiting = read(path, pending=True)
    assert math.isnan(waiting.work_s[waiting.position("pod-3")])


def test_swf(tmp_path: Path) -> None:
    made = read(written(tmp_path, samples.SWF))
    assert made.epoch_s == 1e9
    assert made.gpus.tolist() == [8, 4]
    assert made.estimate_s[0] == 3600
    assert made.logged_start_ns.tolist() == [10 * SECOND, -1]
    assert made.details["status"].tolist() == ["completed", "failed"]
    assert read(tmp_path / "log.txt", processors_per_gpu=8).gpus.tolist() == [1, 1]


def test_slurm(tmp_path: Path) -> None:
    path = written(tmp_path, samples.SLURM)
    made = read(path, timezone="Europe/Berlin")
    assert made.job.tolist() == ["11", "12_3"]
    assert made.epoch_s == 1709283600.0  # ten o'clock in Berlin is nine in UTC
    assert made.gpus.tolist() == [8, 2]
    assert made.gpu_type.tolist() == ["h100", ""]
    assert made.work_s.tolist() == [3600, 30]
    assert made.estimate_s[0] == 7200
    assert math.isnan(made.estimate_s[1])
    assert made.details["state"].tolist() == ["COMPLETED", "CANCELLED"]
    assert (made.logged_start_ns - made.submit_ns).tolist() == [600 * SECOND, 660 * SECOND]
    eligible = read(path, since="eligible")
    assert (eligible.logged_start_ns - eligible.submit_ns)[eligible.position("11")] == 300 * SECOND
    assert "14" in read(path, unfinished=True).job
    with_bar = "".join(line + "|\n" for line in samples.SLURM.splitlines())  # sacct -p
    assert read(written(tmp_path, with_bar)).job.tolist() == ["11", "12_3"]


def test_slurm_takes_the_last_run_of_a_job_put_back_into_the_queue(tmp_path: Path) -> None:
    head = "JobIDRaw|Submit|Start|End|State|AllocTRES|Timelimit\n"
    rows = (
        "7|2024-03-01T10:00:00|2024-03-01T10:01:00|2024-03-01T10:02:00|PREEMPTED|gres/gpu=4|1-02:03:04\n"
        "7|2024-03-01T10:02:00|2024-03-01T10:05:00|2024-03-01T10:15:00|COMPLETED|gres/gpu=4|30:00\n"
    )
    made = read(written(tmp_path, head + rows))
    assert (made.work_s.tolist(), made.estimate_s.tolist()) == ([600], [1800])
    assert accounted(made) == made.origin.rows == 2
    first = read(written(tmp_path, head + rows.splitlines()[0]))
    assert first.estimate_s.tolist() == [86400 + 2 * 3600 + 3 * 60 + 4]


def test_the_hour_that_clocks_show_twice(tmp_path: Path) -> None:
    text = (
        "JobID|Submit|Start|End|State|ReqTRES\n"
        "1|2024-10-27T02:50:00|2024-10-27T02:55:00|2024-10-27T02:10:00|OUT_OF_ME+|gres/gpu=1\n"
    )
    path = written(tmp_path, text)
    made = read(path, timezone="Europe/Berlin")
    assert made.work_s.tolist() == [900]
    assert made.details["state"].tolist() == ["OUT_OF_MEMORY"]
    with pytest.raises(ForetraceError, match="it ended before it started"):
        read(path)


def test_kueue(tmp_path: Path) -> None:
    made = read(written(tmp_path, samples.KUEUE))
    assert made.job.tolist() == ["team/w1", "team/w2"]
    assert made.gpus.tolist() == [32, 2]
    assert made.min_gpus.tolist() == [8, 1]
    assert made.work_s.tolist() == [3600, 3600]
    assert made.gpu_type.tolist() == ["H100", "H100"]
    assert made.estimate_s.tolist() == [7200, 7200]
    assert made.details["topology"][0] == "required=cloud.provider.com/topology-rack"
    assert made.logged_start_ns.tolist() == [300 * SECOND] * 2
    notes = made.origin.notes
    assert "1 rows set aside: workloads without GPUs" in notes
    assert "1 rows set aside: workloads that have not finished" in notes


def test_ray(tmp_path: Path) -> None:
    made = read(written(tmp_path, samples.RAY))
    assert made.job.tolist() == ["raysubmit_1", "raysubmit_2"]
    assert (made.gpus.tolist(), made.share.tolist()) == ([8, 1], [1, 0.5])
    assert made.work_s.tolist() == [3600, 100]
    assert made.submit_ns.tolist() == [0, SECOND]
    with pytest.raises(
        ForetraceError, match=r"1 of 3 rows .* entry 1 .*neither entrypoint_num_gpus nor metadata count"
    ):
        read(tmp_path / "log.txt", gpus_key="count")


def test_malformed_rows_are_named_or_left_out_on_request(tmp_path: Path) -> None:
    text = samples.TIRESIAS + "2,zero,40,1,vgg,10,1\n3,1,50,1,vgg,-5,1\n4,1,60,1,vgg\n0,1,70,1,vgg,9,1\n"
    path = written(tmp_path, text)
    with pytest.raises(ForetraceError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path}: 4 of 6 rows cannot be read, the first at line 4 (num_gpu is 'zero', not a number); correct them, or "
        "read with `salvage=` to leave them out."
    )
    made = read(path, salvage=True)
    assert made.job.tolist() == ["0", "1"]
    assert [refused.where for refused in made.origin.refused] == ["line 4", "line 5", "line 6", "line 7"]
    assert "stands at line 2 already" in made.origin.refused[3].why
    assert accounted(made) == made.origin.rows == 6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("hello\n", "is of no known format .*say which with `format=`"),
        ("job_id,num_gpu,submit_time,duration\n", "holds no job"),
        ("{}", "is of no known format"),
        ('{"kind": "List", "items": [{"kind": "Pod"}]}', "is of no known format"),
        ("a|b\n", "is of no known format"),
        ("name,num_gpu,gpu_milli\nx,1,1000\n", "has no column 'creation_time'"),
    ],
)
def test_what_is_no_log_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match=said):
        read(written(tmp_path, text))


def test_mistakes_in_the_call_are_said(tmp_path: Path) -> None:
    path = written(tmp_path, samples.PHILLY)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: read(tmp_path / "none"), "give a file that exists"),
        (lambda: read(path, "excel"), "there is no format 'excel'"),
        (lambda: read(path, colour=1), "has no option 'colour'; it has ties, timezone"),
        (lambda: read(path, timezone="Mars/Base"), "no time zone"),
        (lambda: read(path, ties="luck"), "file, reverse or name"),
        (lambda: read(path, "tiresias"), "has no column 'job_id'"),
    ]
    for call, said in calls:
        with pytest.raises(ForetraceError, match=said):
            call()
    (tmp_path / "cut.gz").write_bytes(gzip.compress(samples.PHILLY.encode())[:-9])
    with pytest.raises(ForetraceError, match="damaged gzip"):
        read(tmp_path / "cut.gz")


def test_order_of_jobs_submitted_at_once_is_a_choice(tmp_path: Path) -> None:
    head = "job_id,num_gpu,submit_time,duration\n"
    path = written(tmp_path, head + "j10,1,0,5\nj9,1,0,5\nj1,1,0,5\n")
    assert read(path).job.tolist() == ["j10", "j9", "j1"]
    assert read(path, ties="reverse").job.tolist() == ["j1", "j9", "j10"]
    assert read(path, ties="name").job.tolist() == ["j1", "j9", "j10"]


def test_other_encodings_are_told(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(samples.POLLUX.replace("bert-1", "b\xe9rt").encode("latin-1"))
    made = read(path)
    assert made.job[1] == "b\ufffdrt"
    assert "1 pieces are not UTF-8 and were read as the replacement character" in made.origin.notes
    path.write_bytes(samples.POLLUX.replace("\n", "\r\n").encode("utf-16"))
    assert read(path).job.tolist() == ["cifar10-0", "bert-1"]
    path.write_bytes(b"\xef\xbb\xbf" + samples.POLLUX.encode())
    assert not read(path).origin.notes


def test_real_files(shared_data: Path) -> None:
    fleet = shared_data / "fleet"
    jobs = {
        "philly/philly.csv.gz": (82_247, 82_247),
        "gavel/generated_seed42_lam9000.csv.gz": (5_036, 5_036),
        "gavel/physical_cluster/max_min_fairness.trace": (96, 96),
        "gavel/msr_seed0/ee9e8c.trace.gz": (2_000, 2_000),
        "tiresias/60_job.csv": (60, 60),
        "repro/philly_ee9e8c_500.csv": (500, 500),
        "pollux/workloads/workload-6.csv": (160, 160),
        "alibaba2023/openb_pod_list_default.csv.gz": (6_203, 8_152),
    }
    for name, (accepted, rows) in jobs.items():
        made = read(fleet / name)
        assert (len(made), made.origin.rows, made.origin.refused) == (accepted, rows, ()), name
        assert accounted(made) == rows
    assert sum(len(read(path)) for path in fleet.glob("shockwave/*.trace*")) == 120 + 220 + 460 + 900 + 900
    twice = fleet / "tiresias" / "tf_job.csv"
    with pytest.raises(ForetraceError, match="1 of 2 rows cannot be read, the first at line 3"):
        read(twice)
    assert len(read(twice, salvage=True)) == 1


def test_examples_of_the_documentation_are_read(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "fleet-formats.md").read_text()
    examples = dict(re.findall(r"^### (\w+)\n.*?^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert set(examples) == set(FORMATS)
    for name, example in examples.items():
        made = read(written(tmp_path, example))
        assert made.origin.format == name
        assert len(made) == made.origin.rows
        described = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        options = described.split("|")[-2]
        for option in FORMATS[name].options:
            assert option == "ties" or option in options, f"{name}: {option} is not in the table"
