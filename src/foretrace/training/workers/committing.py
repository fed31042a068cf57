"""`Committing`: an optimizer whose updates workers exchange as a sparse `SyncPolicy` says, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from foretrace.errors import ForetraceError
from foretrace.training.workers.policy import NUMBER, SyncPolicy

_OWN = "committing"  # in a state


class Committing(Optimizer):
    """The optimizer, and after every so many steps an exchange of the updates that the policy chooses.

    All workers add the mean of what all send to the model that they share; what is not sent waits, and acts on the own
    model where the policy is local. The same as `SyncWorker` and `Server` with workers that wait for each other, with
    an all-gather in the server's place.
    """

    def __init__(self, optimizer: Optimizer, policy: SyncPolicy, every: int, group: Any = None) -> None:
        # Not the base's constructor, which would take the parameters a second time.
        self.inner, self.policy, self.every = optimizer, policy, every
        self.group = group  # None is the default process group
        self.steps = 0
        self.sent_bytes = 0  # by this worker
        self.shared = self._flat()
        self.pending = torch.zeros_like(self.shared)

    @property
    def state(self) -> Any:  # type: ignore[override]  # a field of the base
        """The inner optimizer's."""
        return self.inner.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]  # likewise; loading replaces the inner optimizer's list
        """The inner optimizer's."""
        return self.inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's, and what is this worker's own: updates that wait, the shared model, counts."""
        own = {"steps": self.steps, "sent_bytes": self.sent_bytes, "shared": self.shared, "pending": self.pending}
        return {**self.inner.state_dict(), _OWN: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue to the bit where this worker stopped. Raises ForetraceError for the state of another optimizer."""
        own = state_dict.get(_OWN)
        if own is None or own["shared"].shape != self.shared.shape:
            raise ForetraceError(
                "an optimizer's state must be one that this worker saved with the same model and updates= of "
                "local-steps, got another one; begin again without it."
            )
        self.inner.load_state_dict(state_dict)
        self.steps, self.sent_bytes = own["steps"], own["sent_bytes"]
        self.shared.copy_(own["shared"])
        self.pending.copy_(own["pending"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        before = self.shared + self.pending if self.policy.local else self.shared
        with torch.enable_grad():
            loss = self.inner.step(closure)
        self.steps += 1
        now = self._flat()
        self.pending += now - before
        if self.steps % self.every == 0:
            self._exchange(now)
            now = self.shared + self.pending if self.policy.local else self.shared
            mine = self._parameters()
            for each, part in zip(mine, now.split([each.numel() for each in mine]), strict=True):
                each.copy_(part.view_as(each))
        return loss

    def _exchange(self, model: Tensor) -> None:
        chosen = self.policy.chosen(_array(self.pending), _array(model), self.steps)
        indices = torch.from_numpy(chosen).to(self.pending.device)
        values = self.pending[indices]
        self.pending[indices] = 0
        world = distributed.get_world_size(self.group)
        counts = self._gathered(torch.tensor([len(values)], device=values.device))
        most = max(map(int, counts))  # messages of a collective are of one length
        if 2 * most >= len(self.pending):  # then values without indices are less
            dense = torch.zeros_like(self.pending).index_copy_(0, indices, values)
            distributed.all_reduce(dense, group=self.group)
            self.shared += dense / world
            self.sent_bytes += NUMBER * len(dense)
        elif most:
            short = torch.nn.functional.pad(indices.int(), (0, most - len(indices)))
            filled = torch.nn.functional.pad(values, (0, most - len(values)))
            for count, got, at in zip(counts, self._gathered(filled), self._gathered(short), strict=True):
                self.shared[at[: int(count)].long()] += got[: int(count)] / world
            self.sent_bytes += 2 * NUMBER * most

    def _gathered(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(distributed.get_world_size(self.group))]
        distributed.all_gather(found, own, group=self.group)
        return found

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    def _flat(self) -> Tensor:
        return torch.nn.utils.parameters_to_vector(self._parameters()).detach()


def _array(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return tensor.cpu().numpy()
