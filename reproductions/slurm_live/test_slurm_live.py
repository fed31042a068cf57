"""The workloads are as said, and predictions are summed up right; the rig itself is played by the protocol alone."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

from foretrace.fleet.live import history
from reproductions.slurm_live.protocol import summary
from reproductions.slurm_live.workloads import as_sacct, jobs


def test_workloads_offer_the_load_that_is_wanted(tmp_path: Path) -> None:
    rows = [
        f"2017-10-{1 + i // 40:02d} 07:00:{i % 40:02d},{300 + 60 * (i % 50)},{(1, 2, 4, 8)[i % 4]},0,u{i % 3}"
        for i in range(800)
    ]
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(("timestamp,duration,num_gpus,gpu_time,cluster\n" + "\n".join(rows)).encode()))
    played, past = jobs(path, count=40, load=2.0, gpus=64, seed=1)
    work = sum(each.gpus * each.run_s for each in played)
    assert len(played) == 40 and played[-1].submit_s <= work / 64 / 2.0
    assert all(each.run_s < each.limit_min * 60 for each in played)
    log = tmp_path / "history.txt"
    log.write_text(as_sacct(past))
    read = history.read_past(log)
    assert len(read) == len(past) and {each.account for each in read} <= {"u0", "u1", "u2"}


def test_errors_are_compared_where_slurm_answers() -> None:
    rows = [{"came": 10.0, "said": 12.0, "low": 5.0, "high": 15.0, "slurm": 50.0},
            {"came": 10.0, "said": 30.0, "low": 20.0, "high": 40.0, "slurm": math.nan}]  # fmt: skip
    found = summary(rows)
    assert (found["median error s"], found["squeue --start s"], found["ratio"], found["coverage"]) == (
        2.0,
        40.0,
        20.0,
        0.5,
    )
