"""Real processes: weights equal bit for bit those of one process, whatever is cut, stopped or continued."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrace.errors import ForetraceError
from foretrace.training.pipeline.job import LossScaling, PipelineJob
from foretrace.training.pipeline.launch import latest, train_here
from foretrace.training.pipeline.runtime import StageWorker, Trained
from foretrace.training.pipeline.schedule import SCHEDULES, F, PipelineSchedule, gpipe, one_f_one_b_flush, parse, two_bw
from foretrace.training.pipeline.versions import StageVersions
from pipeline_storages import measured
from tests.gloo_workers import together
from tests.training.pipeline.jobs import LENGTH, SAMPLES, SCALING, TIED, adamw, alone, job, steep, text

BATCHES = 6
EVERYTHING: dict[str, Any] = {"optimizer": adamw, "dropout": 0.1, "tied": TIED, "clip_norm": 0.1}
OVERFLOWS: dict[str, Any] = {"scaling": SCALING, "clip_norm": 0.5, "loss": steep, "tied": TIED}


def agree(job: PipelineJob, schedule: PipelineSchedule, found: tuple[Trained, ...], batches: int = BATCHES) -> Any:
    """Assert that losses, weights and scales are those of one process; its weights."""
    delays = [schedule.versions[job.stage_of(layer)] - 1 for layer in range(len(job.layers))]
    weights, losses, scale, skipped = alone(job, schedule.micro_batches, batches, delays=delays)
    got = {name: each for process in found for name, each in process.weights.items()}
    assert got.keys() == weights.keys()
    assert [name for name in got if not torch.equal(got[name], weights[name])] == []
    trained = {t: loss for process in found for t, loss in process.losses.items()}
    assert trained == {t: losses[t] for t in range(schedule.first, batches)}
    assert {process.scale for process in found} == {scale}
    assert {process.skipped for process in found} == {tuple(t for t in skipped if t >= schedule.first)}
    return weights


@pytest.mark.parametrize(
    ("stages", "name", "options"),
    [
        (4, "2bw", {}),
        (4, "2bw", EVERYTHING | {"recompute": True}),
        (4, "2bw", OVERFLOWS),
        (4, "1f1b", EVERYTHING),
        (4, "1f1b", OVERFLOWS),
        (2, "1f1b-flush", EVERYTHING | {"recompute": True}),
        (4, "gpipe", OVERFLOWS),
        (4, "zero-bubble", EVERYTHING),
    ],
    ids=lambda each: "+".join(each) or "plain" if isinstance(each, dict) else str(each),
)
def test_weights_are_those_of_one_process(stages: int, name: str, options: dict[str, Any]) -> None:
    cut = job(stages, **options)
    schedule = SCHEDULES[name](stages, 4, BATCHES)
    found = train_here(cut, schedule, timeout_s=60)
    weights = agree(cut, schedule, found)
    if "scaling" in options:
        assert found[0].skipped  # there was an overflow, and a step without one
        assert len(found[0].skipped) < BATCHES
    if max(schedule.versions) > 1:  # the test can fail: ordinary training is something else
        ordinary, *_ = alone(cut, 4, BATCHES)
        assert not all(torch.equal(ordinary[key], weights[key]) for key in weights)


def test_interleaved_stages_on_two_processes() -> None:
    cut = job(4, **EVERYTHING)
    schedule = SCHEDULES["interleaved"](4, 4, 3, chunks=2)
    agree(cut, schedule, train_here(cut, schedule, timeout_s=60), 3)


def test_every_schedule_in_one_process() -> None:
    """All rows that can run one after another, with no process group: a table of the user's own."""
    for name in ("gpipe", "zero-bubble"):
        rows = [action for _, action, _ in SCHEDULES[name](4, 3, 3).run_order() if action.kind != "U"]
        text = " ".join(
            " ".join(map(str, (each for each in rows if each.number // 3 == t))) + f" U{t}" for t in range(3)
        )
        schedule = parse(text, micro_batches=3)
        cut = job(4, **EVERYTHING)
        agree(cut, schedule, (StageWorker(cut, schedule, 0).run(),), 3)


def test_a_cut_and_more_warm_up_change_no_bit() -> None:
    """Two bits of evidence that neither is an approximation: 2 stages, 4 stages, warm-up of 1 and of 2."""
    found = [
        train_here(job(stages, **EVERYTHING), two_bw(stages, 6, 3, warmup=warmup), timeout_s=60)
        for stages, warmup in ((2, 1), (4, 2))
    ]
    both = [{name: each for process in some for name, each in process.weights.items()} for some in found]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0] | both[1])


# -- PyTorch's own schedules ------------------------------------------------------------------------------------------


def torchs(rank: int, kind: str, m: int) -> dict[str, Tensor]:
    """Weights of a stage after three batches under torch.distributed.pipelining; and its processes run ours, too."""
    from torch.distributed import pipelining

    cut = job(4)
    own = StageVersions(cut, rank, 1, torch.device("cpu"))

    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = own.sets[0]

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    stage = pipelining.PipelineStage(Piece(), rank, 4, torch.device("cpu"))
    schedule = getattr(pipelining, kind)(stage, m, loss_fn=cut.loss)
    for t in range(3):
        pairs = [text(i) for i in range(t * m, (t + 1) * m)]
        x, target = (torch.cat(each) for each in zip(*pairs, strict=True))
        schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank == 3 else {}))
        own.optimizer.step()
        own.optimizer.zero_grad()
    return own.weights(0)


def both_of_torchs(rank: int) -> list[dict[str, Tensor]]:
    return [torchs(rank, kind, 4) for kind in ("Schedule1F1B", "ScheduleGPipe")]


def test_torchs_own_schedules_give_the_same_weights() -> None:
    pytest.importorskip("torch", minversion="2.6", reason="older stages want examples of what they are given")
    theirs = together(both_of_torchs, 4)
    schedule = one_f_one_b_flush(4, 4, 3)
    ours = agree(job(4), schedule, train_here(job(4), schedule, timeout_s=60), 3)
    for at in range(2):
        weights = {name: each for process in theirs for name, each in process[at].items()}
        assert all(torch.equal(weights[name], ours[name]) for name in ours)


# -- versions ---------------------------------------------------------------------------------------------------------


def test_weights_that_are_overwritten_too_early_raise() -> None:
    """Autograd sees it, because sets are written in place; exchanging `.data` would give a wrong gradient silently."""
    for versions, raises in ((1, True), (2, False)):
        stage = StageVersions(job(1), 0, versions, torch.device("cpu"))
        x, target = text(0)
        loss = job(1).loss(stage.run(0, x, 0), target)
        stage.advance(0, [torch.ones_like(p) for p in stage.parameters[0]])
        if raises:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
            stage.take(0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss = job(1).loss(stage.run(0, x, 0), target)
                stage.advance(1, [torch.ones_like(p) for p in stage.parameters[0]])
                loss.backward()


def test_a_gradient_ends_with_its_batch() -> None:
    """Batches 0 and 1 run on the same set of parameters."""
    stage = StageVersions(job(1), 0, 2, torch.device("cpu"))
    x, target = text(0)
    job(1).loss(stage.run(0, x, 0), target).backward()
    assert all(each is not None for each in stage.take(0))
    assert all(each is None for each in stage.take(0))


def test_scaling_is_torchs() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    ours, since = 8.0, 0
    scaling = LossScaling(scale=8.0, every=2)
    for overflow in (False, True, False, False, False, True, True, False, False):
        scaler.scale((weight * (torch.inf if overflow else 0.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ours, since = scaling.after(ours, since, overflow=overflow)
        assert scaler.get_scale() == ours


# -- ends and checkpoints ---------------------------------------------------------------------------------------------


class Pause(nn.Module):
    """So that a training lasts until a process of it is stopped."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.005)
        return x


def slow(**options: Any) -> PipelineJob:
    whole = job(4, **EVERYTHING, **options)
    return PipelineJob(**{**vars(whole), "layers": (*whole.layers, Pause), "cut": (2, 2, 1, 3)})


def test_a_killed_stage_ends_all_and_its_checkpoint_continues(tmp_path: Path) -> None:
    cut, killed = slow(), list[int]()

    def watch(process: int, pid: int, updates: int) -> None:
        if process == 1 and updates >= 3 and not killed:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    with pytest.raises(ForetraceError, match=r"process 1 of 4 \(stage 1\) was ended by SIGKILL after \d+ updates") as e:
        train_here(cut, two_bw(4, 3, 1000), timeout_s=60, folder=tmp_path, every=1, watch=watch)
    assert "\n" not in str(e.value)
    first = latest(tmp_path, 4)  # stage 0 may have been an update behind
    assert 2 <= first < 500 and f"after the {first} updates that are kept in {tmp_path}" in str(e.value)
    schedule = two_bw(4, 3, 3, first=first)
    agree(cut, schedule, train_here(cut, schedule, timeout_s=60, folder=tmp_path), first + 3)
    (tmp_path / f"update-{first}-process-2-of-4.pt").unlink()
    with pytest.raises(ForetraceError, match=rf"no file of process 2 of 4 after {first} updates"):
        train_here(cut, schedule, timeout_s=60, folder=tmp_path)
    earlier = latest(tmp_path, 4)
    assert earlier < first
    with pytest.raises(ForetraceError, match=r"was kept by a pipeline of layers \[2, 2, 1, 3\], 3 micro-batches"):
        train_here(cut, two_bw(4, 4, 1, first=earlier), timeout_s=60, folder=tmp_path)


def test_a_stopped_stage_ends_all_within_the_stated_time() -> None:
    stopped = list[float]()

    def watch(process: int, pid: int, updates: int) -> None:
        if process == 2 and updates >= 1 and not stopped:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(time.monotonic())

    with pytest.raises(ForetraceError, match=r"process 2 of 4 \(stage 2\) gave no sign of life for 8 s after \d+"):
        train_here(slow(), two_bw(4, 3, 1000), timeout_s=8, watch=watch)


def test_checkpoints_of_a_scaler_continue(tmp_path: Path) -> None:
    cut = job(2, **OVERFLOWS)
    train_here(cut, two_bw(2, 3, 4), timeout_s=60, folder=tmp_path, every=3)
    schedule = two_bw(2, 3, 4, first=3)
    agree(cut, schedule, train_here(cut, schedule, timeout_s=60, folder=tmp_path), 7)


def broken(out: Tensor, target: Tensor) -> Tensor:
    raise ValueError("no such target")


def test_an_error_of_the_users_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"process 1 of the pipeline raised:(.|\n)*ValueError: no such target"):
        train_here(job(2, loss=broken), gpipe(2, 2, 1), timeout_s=60)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_activations_in_flight_are_those_of_the_table() -> None:
    """Storages that autograd keeps: 4, 3, 2, 1 micro-batches; 1F1B in steady state is GPipe's over its stages."""
    same = PipelineJob(**{**vars(job(4)), "cut": (2, 2, 2, 1)})
    one = measured(same, gpipe(4, 1, 1))
    for schedule in (one_f_one_b_flush(4, 4, 2), gpipe(4, 4, 2), two_bw(4, 4, 2)):
        found = measured(same, schedule)
        count = [schedule.in_flight(r) for r in range(4)]
        for process, single, held in zip(found, one, count, strict=True):
            assert process.peak_bytes == held * single.peak_bytes
        weights = [sum(each.nbytes for each in process.weights.values()) for process in found]
        for process, nbytes, versions in zip(found, weights, schedule.versions, strict=True):
            assert process.fixed_bytes == nbytes * (versions + 1)  # momentum is one more
    kept = measured(PipelineJob(**{**vars(same), "recompute": True}), gpipe(4, 4, 1))
    # Of each micro-batch the input alone, of one of them all.
    assert kept[1].peak_bytes == one[1].peak_bytes + 3 * SAMPLES * LENGTH * 16 * 4


# -- refused ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ForetraceError, match="cut it alike"):
        StageWorker(job(2), gpipe(1, 1, 1), 0)
    with pytest.raises(ForetraceError, match="cannot be cut into stages of"):
        PipelineJob(**{**vars(job(2)), "cut": (3, 3)})
    with pytest.raises(ForetraceError, match="whole backward passes"):
        StageWorker(job(2, recompute=True), SCHEDULES["zero-bubble"](2, 2, 1), 0)
    with pytest.raises(ForetraceError, match="give the checkpoint of that batch"):
        StageWorker(job(2), gpipe(2, 2, 1, first=3), 0)
    with pytest.raises(ForetraceError, match="must be of different stages"):
        job(1, tied=TIED)
    with pytest.raises(ForetraceError, match=r"needs 3 micro-batches .* give `micro_batches=3`"):
        two_bw(4, 2, 1)


def ragged(micro_batch: int) -> tuple[Tensor, Tensor]:
    x, target = text(micro_batch)
    return (x, target) if micro_batch < 2 else (x[:1], target[:1])


def test_micro_batches_of_two_sizes_are_refused() -> None:
    with pytest.raises(ForetraceError, match=r"micro-batch 2 gives stage 1 a tensor of \[1, 12, 16\], the first"):
        train_here(job(2, data=ragged), gpipe(2, 3, 1), timeout_s=60)


def norm() -> nn.Module:
    return nn.BatchNorm1d(LENGTH)


def test_batch_normalisation_with_two_versions_is_warned_of() -> None:
    cut = job(4)
    layers = (*cut.layers[:1], norm, *cut.layers[1:])
    plain = PipelineJob(**{**vars(cut), "layers": layers, "cut": (8,)})
    row = [each for each in two_bw(1, 1, 1).rows[0] if each.kind == F]
    assert row
    with pytest.warns(UserWarning, match="running statistics"):
        StageWorker(plain, two_bw(1, 1, 1), 0)
