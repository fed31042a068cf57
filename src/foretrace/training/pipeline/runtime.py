"""`StageWorker`: run exactly the row of this process, on weights that equal those of one process bit for bit.

What makes them equal: one order of additions (micro-batches in turn, tied gradients by stage, the norm of all
parameters in the order of the stages as `torch.nn.utils.clip_grad_norm_` takes it), random numbers that follow from
micro-batch and layer, and versions of weights instead of weights that change while a batch is under way.

Clipping and loss scaling need no flush. An update sends what it has (one vector of norms, one flag), and what comes
back is used just before the first forward pass that reads the new weights. With V versions the scale of a batch is, as
its weights are, the one that is known V - 1 updates earlier.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from foretrace.errors import ForetraceError
from foretrace.training.pipeline.job import PipelineJob
from foretrace.training.pipeline.schedule import Action, B, F, I, PipelineSchedule, U, W
from foretrace.training.pipeline.transport import Transport, lost
from foretrace.training.pipeline.versions import StageVersions

_TIED = 2**24  # tags of tied gradients are above those of activations


@dataclass(frozen=True, kw_only=True)
class Span:
    """When an action ran, seconds of the monotonic clock; `begin` is when all that it reads was there."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a process has in the end: losses by batch (on the last stage's process), weights by layer and name."""

    losses: dict[int, float]
    weights: dict[str, Tensor]
    scale: float
    skipped: tuple[int, ...]  # batches whose gradients overflowed
    spans: tuple[Span, ...]
    fixed_bytes: int  # weights in all versions, and the optimizer's state


@dataclass(kw_only=True)
class _Update:
    """An update whose gradients are taken off and whose messages are under way."""

    batch: int
    gradients: dict[int, list[Tensor | None]]  # by stage
    norms: Tensor | None = None
    works: list[Any] = field(default_factory=list)
    sent: list[Tensor] = field(default_factory=list)  # kept until it has arrived

    def gradient(self, stage: int, parameter: int) -> Tensor:
        """Return the gradient of a tied parameter. Raises ForetraceError where it has none."""
        found = self.gradients[stage][parameter]
        if found is None:
            raise ForetraceError(f"a tied parameter of stage {stage} got no gradient; use it there, or do not tie it.")
        return found


class StageWorker:
    """One process of a pipeline, with the stages that its row names."""

    def __init__(
        self, job: PipelineJob, schedule: PipelineSchedule, rank: int, *, device: str = "cpu",
        state: dict[str, Any] | None = None, after: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """Take `state`, what a checkpoint kept, where the schedule does not begin with batch 0.

        `after` is called with the number of updates made after each.
        """
        if len(job.cut) != schedule.stages:
            raise ForetraceError(
                f"the job has {len(job.cut)} stages and the schedule {schedule.name} {schedule.stages}; cut it alike."
            )
        if job.recompute and schedule.halves:
            raise ForetraceError("recomputation needs whole backward passes; choose a schedule without halves.")
        if (state is None) != (schedule.first == 0):
            raise ForetraceError(f"the schedule begins with batch {schedule.first}; give the checkpoint of that batch.")
        self.job, self.schedule, self.rank, self.device = job, schedule, rank, torch.device(device)
        self.after, self.done = after, schedule.first
        holders = [[job.stage_of(int(name.split(".")[0])) for name in group] for group in job.tied]
        self.synchronised = bool(job.clip_norm or job.scaling)
        schedule.run_order(clipped=self.synchronised, tied=holders)  # refuses what would wait without end
        self.stages = {
            s: StageVersions(job, s, schedule.versions[s], self.device)
            for s, process in sorted(schedule.process_of.items())
            if process == rank
        }
        if any(each.statistics for each in self.stages.values()) and max(schedule.versions) > 1:
            warnings.warn(
                "running statistics of batch normalisation belong to no version of the weights: they differ from those "
                "of one process, weights do not.",
                stacklevel=2,
            )
        self._tied = [
            [
                (s, self.stages[s].names.index(name) if s in self.stages else -1)
                for s, name in zip(at, group, strict=True)
            ]
            for at, group in zip(holders, job.tied, strict=True)
        ]
        self._borrowed = {each for group in self._tied for each in group[1:]}
        self._begins, self._all_parameters = self._places() if self.synchronised else ({}, 0)
        self._transport = Transport(schedule, rank, self.device)
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}  # (stage, micro-batch): input, output
        self._half: dict[tuple[int, int], Any] = {}
        self._pending: deque[_Update] = deque()
        self._scales: dict[int, tuple[float, int]] = {0: (job.scaling.scale if job.scaling else 1.0, 0)}
        self.losses: dict[int, Tensor] = {}
        self.skipped: list[int] = []
        self.spans: list[Span] = []
        if state is not None:
            self._scales = state["scales"]
            for s, each in self.stages.items():
                each.restore(state["stages"][s], self.done)

    def run(self) -> Trained:
        """Run the row of this process. Raises LostError where another process ends or does not answer in time."""
        do = {F: self._forward, B: self._backward, I: self._input_half, W: self._weight_half, U: self._update}
        for action in self.schedule.rows[self.rank]:
            if action.kind == F:
                self._commit(action.number // self.schedule.micro_batches - self.schedule.versions[action.stage])
            begin = do[action.kind](action)
            if action.kind == U and not self._pending[-1].works:
                self._commit(action.number)
            self.spans.append(Span(action=action, begin=begin, end=time.monotonic()))
        self._commit(self.schedule.last)
        self._transport.finish()
        return Trained(
            losses={t: float(loss) / self.schedule.micro_batches for t, loss in self.losses.items()},
            weights={name: each for s in self.stages.values() for name, each in s.weights(self.done).items()},
            scale=self._scales[self.done][0] if self.job.scaling else 1.0,
            skipped=tuple(self.skipped),
            spans=tuple(self.spans),
            fixed_bytes=sum(each.nbytes() for each in self.stages.values()),
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this process after `done` updates."""
        return {"scales": dict(self._scales), "stages": {s: each.state() for s, each in self.stages.items()}}

    def _places(self) -> tuple[dict[int, int], int]:
        """Return where the parameters of each own stage begin among those of all stages, and how many there are."""
        own = {s: len(each.names) - sum(stage == s for stage, _ in self._borrowed) for s, each in self.stages.items()}
        found: list[dict[int, int]] = [own]
        if len(self.schedule.rows) > 1:
            found = [{} for _ in self.schedule.rows]
            dist.all_gather_object(found, own)
        counts = {s: count for each in found for s, count in each.items()}
        return {s: sum(counts[other] for other in range(s)) for s in own}, sum(counts.values())

    # -- passes ------------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> float:
        _, i, s = action
        x = self._input(action)
        begin = time.monotonic()
        with torch.set_grad_enabled(not self.job.recompute):
            out = self._run(s, i, x)
        self._kept[s, i] = (x, None if self.job.recompute else out)
        if s + 1 < self.schedule.stages:
            reader = Action(F, i, s + 1)
            self._transport.send(reader, out)
            self._transport.will_return(Action(I if self.schedule.halves else B, i, s), out)
        else:
            batch = i // self.schedule.micro_batches
            self.losses[batch] = self.losses.get(batch, 0.0) + out.detach()
        return begin

    def _input(self, action: Action) -> Tensor:
        if action.stage == 0:
            return self.job.data(action.number)[0].to(self.device)
        x = self._transport.receive(action)
        return x.requires_grad_(x.is_floating_point())

    def _run(self, s: int, i: int, x: Tensor) -> Tensor:
        """Return output of a stage; of the last one the loss."""
        version = self.schedule.version(s, i // self.schedule.micro_batches)
        out = self.stages[s].run(version, x, i)
        if s + 1 < self.schedule.stages:
            return out
        target = self.job.data(i)[1]
        return self.job.loss(out, target.to(self.device) if isinstance(target, Tensor) else target)

    def _gradient(self, action: Action, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the backward pass begins with, and its gradient: the share of the (scaled) loss, or what came."""
        _, i, s = action
        if s + 1 < self.schedule.stages:
            return out, self._transport.receive(action)
        share = out / self.schedule.micro_batches if self.schedule.micro_batches > 1 else out
        if self.job.scaling:
            share = share * self._scale(i // self.schedule.micro_batches)
        return share, torch.ones_like(share)

    def _backward(self, action: Action) -> float:
        _, i, s = action
        x, out = self._kept.pop((s, i))
        gradient = None if s + 1 == self.schedule.stages else self._transport.receive(action)
        begin = time.monotonic()
        if out is None:
            out = self._run(s, i, x)
        if gradient is None:
            out, gradient = self._gradient(action, out)
        torch.autograd.backward(out, gradient)
        self._return(action, x.grad)
        return begin

    def _input_half(self, action: Action) -> float:
        from torch.distributed.pipelining._backward import stage_backward_input

        _, i, s = action
        x, out = self._kept.pop((s, i))
        assert out is not None  # recomputation was refused
        out, gradient = self._gradient(action, out)
        begin = time.monotonic()
        if s == 0:  # there is no input to have a gradient
            self._half[s, i] = (out, gradient)
        else:
            version = self.schedule.version(s, i // self.schedule.micro_batches)
            parameters = self.stages[s].parameters[version % len(self.stages[s].sets)]
            (found,), groups = stage_backward_input([out], [gradient], [x], iter(parameters))
            self._half[s, i] = (parameters, groups)
            self._return(action, found)
        return begin

    def _weight_half(self, action: Action) -> float:
        from torch.distributed.pipelining._backward import stage_backward_weight

        begin, (_, i, s) = time.monotonic(), action
        first, second = self._half.pop((s, i))
        if s == 0:
            torch.autograd.backward(first, second)
        else:
            stage_backward_weight(iter(first), second)
        return begin

    def _return(self, action: Action, gradient: Tensor | None) -> None:
        if action.stage:
            if gradient is None:
                raise ForetraceError(
                    f"stage {action.stage} does not depend on stage {action.stage - 1}; cut elsewhere."
                )
            self._transport.send(action._replace(stage=action.stage - 1), gradient)

    # -- updates -----------------------------------------------------------------------------------------------------

    def _scale(self, batch: int) -> float:
        """Return the scale of a batch's loss: known to all stages when the last one begins with it."""
        return self._scales[max(batch - self.schedule.versions[-1] + 1, 0)][0]

    def _update(self, action: Action) -> float:
        """Take the gradients off and start their messages; `_commit` ends the update."""
        begin, t = time.monotonic(), action.number
        update = _Update(
            batch=t, gradients={s: each.take(self.schedule.version(s, t)) for s, each in self.stages.items()}
        )
        if self.synchronised:
            self._commit(t - self.schedule.versions[-1])
        self._pending.append(update)
        self._exchange_tied(update)
        if self.synchronised:
            update.norms = self._norms(update)
            if len(self.schedule.rows) > 1:
                update.works.append(dist.all_reduce(update.norms, async_op=True))
        return begin

    def _exchange_tied(self, update: _Update) -> None:
        """Add the gradients of a tied weight on its first stage, in the order of stages, and send the sum back.

        The first stage ends a batch last, so that it finds the others' gradients there and nobody waits here.
        """
        mine, tag = self.stages, 2 * update.batch * len(self._tied) + _TIED
        for at, (owner, *others) in enumerate(self._tied):
            for s, p in others:
                if s in mine and owner[0] not in mine:
                    peer, sent = self.schedule.process_of[owner[0]], update.gradient(s, p)
                    update.works.append(dist.isend(sent, peer, tag=tag + 2 * at))
                    update.gradients[s][p] = total = torch.empty_like(sent)
                    update.works.append(dist.irecv(total, peer, tag=tag + 2 * at + 1))
                    update.sent.append(sent)
        for at, (owner, *others) in enumerate(self._tied):
            if owner[0] in mine:
                total = update.gradient(*owner)
                for s, p in others:
                    if s in mine:
                        other = update.gradient(s, p)
                    else:
                        other, peer = torch.empty_like(total), self.schedule.process_of[s]
                        self._waited(dist.irecv(other, peer, tag=tag + 2 * at), update.batch)
                    total = total + other
                update.gradients[owner[0]][owner[1]] = total
        if self.job.scaling:
            inverse = 1.0 / self._scale(update.batch)
            for _, gradient in self._own(update):
                gradient.mul_(inverse)
        for at, (owner, *others) in enumerate(self._tied):
            for s, p in others if owner[0] in mine else ():
                total = update.gradient(*owner)
                if s in mine:
                    update.gradients[s][p] = total.clone()  # clipping multiplies each in place
                else:
                    sent = total.clone()
                    update.sent.append(sent)
                    update.works.append(dist.isend(sent, self.schedule.process_of[s], tag=tag + 2 * at + 1))

    def _norms(self, update: _Update) -> Tensor:
        """Return norms of the own gradients at their places among all, which there are, and how many overflowed.

        Places of others are zero, so that adding up over processes changes no bit.
        """
        found, own = torch.zeros(2 * self._all_parameters + 1, dtype=torch.float64), list(self._own(update))
        norms = torch._foreach_norm([gradient for _, gradient in own])
        for (place, gradient), norm in zip(own, norms, strict=True):
            found[2 * place], found[2 * place + 1] = norm.item(), 1
            if self.job.scaling:
                found[-1] += not bool(torch.isfinite(gradient).all())
        return found.to(self.device)

    def _own(self, update: _Update) -> Iterator[tuple[int, Tensor]]:
        """Yield the gradients of parameters that are not counted on another stage, with their places among all."""
        for s, gradients in update.gradients.items():
            own = [each for p, each in enumerate(gradients) if (s, p) not in self._borrowed]
            yield from ((place, each) for place, each in enumerate(own, self._begins[s]) if each is not None)

    def _commit(self, until: int) -> None:
        """Finish the updates up to this batch: what others sent is used, and the weights change."""
        while self._pending and self._pending[0].batch <= until:
            update = self._pending.popleft()
            t = update.batch
            for work in update.works:
                self._waited(work, t)
            overflow = False
            if update.norms is not None:
                norms = update.norms.cpu()
                overflow = bool(norms[-1])
                if self.job.clip_norm and not overflow:
                    self._clip(update, norms[:-1].view(-1, 2))
            if overflow:
                self.skipped.append(t)
            for s, each in self.stages.items():
                each.advance(t, None if overflow else update.gradients[s])
            if self.job.scaling:
                self._scales[t + 1] = self.job.scaling.after(*self._scales[t], overflow=overflow)
                self._scales.pop(t - max(self.schedule.versions), None)
            self.done = t + 1
            if self.after:
                self.after(self.done)

    def _clip(self, update: _Update, norms: Tensor) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ does, over the parameters of all stages."""
        gradients = [each for some in update.gradients.values() for each in some if each is not None]
        if gradients:
            total = torch.linalg.vector_norm(norms[norms[:, 1] > 0, 0].to(gradients[0].dtype))
            factor = torch.clamp(self.job.clip_norm / (total + 1e-6), max=1.0).to(self.device)
            for each in gradients:
                each.mul_(factor)

    def _waited(self, work: Any, batch: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise lost(self.rank, "another process", f"the update with batch {batch}", error) from None
