"""`foretrace fleet live`: the queue of a Slurm cluster, played on from now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.cli import options
from foretrace.cli.fleet_options import Seed
from foretrace.cli.options import argument, option
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result


def live(
    job: str = argument("", "JOB", "The number of a job that waits; by default all of them."),
    *,
    from_: Path | None = option(None, "FOLDER", "Saved outputs, instead of the Slurm that answers here.", "--from"),
    save: Path | None = option(None, "FOLDER", "Save what Slurm's commands print, for --from."),
    history: list[Path] | None = option(None, "LOG", "Past jobs (sacct -P, jobcomp/filetxt, any log); repeat it."),
    add_rack: int = option(0, "N", "Also: what so many more leaf switches of nodes would do.", least=0),
    set_: list[str] | None = option(
        None, "NAME=VALUE", "Also: what bf_interval, bf_window, bf_max_job_test or max_switch_wait would do.", "--set"
    ),
    draws: int = option(200, "N", "How often the queue is played on.", least=20, most=10_000),
    seed: Seed = 0,
) -> Result:
    """Say when jobs of a Slurm queue start.

    And why they wait, and what would start one sooner. Reads scontrol and squeue here (read-only), or saved outputs,
    and plays the queue on with run times drawn from past jobs and time limits.

    Example: foretrace fleet live 41 --from slurm --history slurm/history.txt
    """
    from foretrace.fleet.live import history as histories
    from foretrace.fleet.live import questions, sources
    from foretrace.report import fleet_live as report

    if from_ is not None and save is not None:
        raise ForetraceError("--save keeps what Slurm prints now, --from reads what was kept; give one of them.")
    past = [each for log in history or [] for each in histories.read_past(log)]
    seen = sources.read_folder(from_) if from_ is not None else sources.read_slurm(sources.ask_slurm(save=save))
    with options.progress("playing the queue on") as tell:
        found = questions.ask(
            seen, past, job=job or None, draws=draws, seed=seed, racks=add_rack, progress=tell,
            settings=set_ or (),
        )  # fmt: skip
    return report.live(found, next_=report.following(found, [] if from_ is None else ["--from", str(from_)]))
