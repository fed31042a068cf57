"""What workers do around an exchange of parameters, as something to be timed alone, without other workers.

As in `training/compression/timing.py`: messages are answered at once by a group that stands in for the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from foretrace.cost.operators.operator import Operator
from foretrace.training.compression.timing import stand_in
from foretrace.training.training import Training


class _Clocked:
    """An optimizer, and the time of its steps, each of which begins when all have met."""

    def __init__(self, optimizer: Any, meet: Callable[[], object] = lambda: None) -> None:
        self.optimizer, self.meet, self.spent_s = optimizer, meet, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, *closure: Any) -> Any:
        self.meet()
        begin = time.perf_counter()
        loss = self.optimizer.step(*closure)
        self.spent_s += time.perf_counter() - begin
        return loss


def tried_exchanges(
    training: Training, exchanging: Callable[[Any], Any], every: int, count: int, meet: Callable[[], object]
) -> list[tuple[float, float]]:
    """Return (bytes sent, seconds) of so many exchanges of one worker's training, `every` so many steps.

    `exchanging` makes an optimizer one that exchanges with workers that answer at once; before every step workers
    `meet`. Seconds are those that its steps take longer than the optimizer's own do without exchanges, which leave
    other data in the caches. Bytes are 0 where the optimizer does not count them.
    """
    own = [_Clocked(each) for each in training.optimizers]
    ends_s = [0.0]
    for _ in replace(training, optimizers=tuple(own)).steps(count):  # type: ignore[arg-type]  # it quacks
        ends_s.append(sum(each.spent_s for each in own))
    own_s = median(end - begin for begin, end in pairwise(ends_s))
    outer: list[Any] = [_Clocked(exchanging(each), meet) for each in training.optimizers]
    found, before = [], (0.0, 0.0)
    for step, _ in enumerate(replace(training, optimizers=tuple(outer)).steps(every * count), 1):
        if step % every == 0:
            sent = float(sum(getattr(each.optimizer, "sent_bytes", 0) for each in outer))
            spent_s = sum(each.spent_s for each in outer)
            found.append((sent - before[0], max(spent_s - before[1] - every * own_s, 0.0)))
            before = sent, spent_s
    return found


def exchange_operator(updates: str, elements: Sequence[int], workers: int, share: float) -> Operator:
    """Return what workers do around the exchange of parameters of so many `elements` each, after their update.

    `updates` as of `local-steps`: all, gaia or dgc; `share` of the elements is sent of the latter two.
    """
    known = {"updates": updates, "workers": workers, "share": float(f"{share:.2g}")}
    dims: list[Any] = [[[each] for each in elements], []]
    return Operator.of(f"{__name__}:prepared_exchange", dims, ["TensorList", ""], ["", json.dumps(known)])


def prepared_exchange(operator: Operator) -> Callable[[], object]:
    """Return what `exchange_operator` stands for, ready to be called: steps without an update of their own."""
    import torch
    from torch.distributed.algorithms.model_averaging import utils

    from foretrace.training.workers.committing import Committing
    from foretrace.training.workers.policies import DeepCompression, Gaia

    known = json.loads(operator.concrete[1])
    group, share = stand_in(known["workers"]), known["share"]
    torch.manual_seed(0)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(shape)) for shape in operator.dims[0]], lr=0.0)
    if known["updates"] == "all":
        for each in inner.param_groups[0]["params"]:
            each.data.zero_()  # divided again and again, other numbers would become subnormal
            each.grad = each.new_zeros(()).expand_as(each)  # without a gradient it would be passed over
        return partial(utils.average_parameters_or_parameter_groups, inner.param_groups, group)
    policy = DeepCompression(share=share) if known["updates"] == "dgc" else Gaia(threshold=1e-6)
    committing = Committing(inner, policy, 1, group)
    waits = torch.randn_like(committing.pending)
    if known["updates"] == "gaia":  # so small that weights stay about 1
        waits = torch.where(torch.rand_like(waits) < share, waits.sign() * 1e-5, waits * 1e-9)

    def step() -> None:
        committing.pending.copy_(waits)  # a pass of about forty; without it less would be found every time
        committing.step()

    return step
