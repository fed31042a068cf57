"""`Transport`: activations and gradients between neighbouring stages, over a process group or within the process.

Receives are posted two ahead, in the order in which the neighbour sends; a send is kept until a later message of the
reader proves that it has arrived, because gloo's sends cannot be asked.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from foretrace.errors import ForetraceError
from foretrace.training.pipeline.schedule import Action, ActionKind, F, PipelineSchedule

AHEAD = 2
_TAGS = 2**24
_MOST_DIMS = 8
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)


class LostError(ForetraceError):
    """Another process of the pipeline ended or did not answer in time."""


class Transport:
    """The messages of one process. A message is named by the action that reads it."""

    def __init__(self, schedule: PipelineSchedule, rank: int, device: torch.device) -> None:
        self._rank, self._device, self._process = rank, device, schedule.process_of
        self._stages = schedule.stages
        self._local: dict[Action, Tensor] = {}
        self._sent: dict[Action, list[tuple[Any, Tensor]]] = {}
        self._posted: dict[Action, tuple[Any, Tensor]] = {}
        self._sizes: dict[tuple[ActionKind, int], tuple[torch.dtype, tuple[int, ...]]] = {}  # by reader's kind, stage
        self._coming: dict[int, deque[Action]] = defaultdict(deque)  # by sender, in its order
        self._proven: dict[Action, list[Action]] = {}  # sends that have arrived once a message is here
        links = []
        for peer, row in enumerate(schedule.rows):
            read: list[Action] = []
            for action in row:
                if peer != rank and schedule.sender(action) == rank:
                    read.append(action)
                reader = schedule.reader(action)
                if reader is None or self._process[reader.stage] == peer:
                    continue
                links.append((peer, self._process[reader.stage], reader.kind))
                if self._process[reader.stage] == rank:
                    self._coming[peer].append(reader)
                    self._proven[reader], read = read, []
        # NCCL runs what one group sends between two processes in one order, so that each direction needs its own.
        wanted = list(dict.fromkeys(links)) if dist.is_initialized() and dist.get_backend() == "nccl" else []
        self._groups = {link: dist.new_group(sorted(link[:2])) for link in wanted}

    def send(self, reader: Action, tensor: Tensor) -> None:
        """Send what `reader`, an action of a neighbouring stage, reads."""
        peer, tensor = self._process[reader.stage], tensor.detach().contiguous()
        if peer == self._rank:
            self._local[reader] = tensor
            return
        messages, size, key = [tensor], (tensor.dtype, tuple(tensor.shape)), (reader.kind, reader.stage)
        if key not in self._sizes:
            self._sizes[key] = size
            if reader.kind == F:  # gradients are as large as what was sent
                messages.insert(0, self._header(tensor))
        elif self._sizes[key] != size:
            raise ForetraceError(
                f"micro-batch {reader.number} gives stage {reader.stage} a tensor of {list(size[1])}, the first one "
                f"{list(self._sizes[key][1])}; all micro-batches must have one size."
            )
        group, tag = self._groups.get((self._rank, peer, reader.kind)), self._tag(reader)
        self._sent[reader] = [(dist.isend(each, peer, group, tag), each) for each in messages]

    def receive(self, reader: Action) -> Tensor:
        """Return what a neighbouring stage sent for `reader`. Raises LostError."""
        peer = self._process[reader.stage + (-1 if reader.kind == F else 1)]
        if peer == self._rank:
            return self._local.pop(reader)
        coming = self._coming[peer]
        try:
            while reader not in self._posted:
                self._post(peer, coming.popleft())
            work, tensor = self._posted.pop(reader)
            work.wait()
            while coming and len(self._posted) < AHEAD * len(self._coming) and self._size(coming[0]):
                self._post(peer, coming.popleft())
            for proven in self._proven[reader]:
                for sent, _ in self._sent.pop(proven):
                    sent.wait()
        except RuntimeError as error:
            raise lost(self._rank, f"process {peer}", str(reader), error) from None
        return tensor

    def will_return(self, reader: Action, tensor: Tensor) -> None:
        """Note that gradients for `reader` are as large as what was sent."""
        self._sizes[reader.kind, reader.stage] = (tensor.dtype, tuple(tensor.shape))

    def finish(self) -> None:
        """Wait until all that was sent has arrived. Raises LostError."""
        try:
            for work, _ in (each for sent in self._sent.values() for each in sent):
                work.wait()
        except RuntimeError as error:
            raise lost(self._rank, "its neighbours", "the end", error) from None
        self._sent.clear()

    def _post(self, peer: int, reader: Action) -> None:
        group, tag = self._groups.get((peer, self._rank, reader.kind)), self._tag(reader)
        size = self._size(reader)
        if size is None:
            header = torch.empty(_MOST_DIMS + 2, dtype=torch.int64, device=self._device)
            dist.recv(header, peer, group, tag)
            dtype, dims, *shape = header.tolist()
            size = self._sizes[reader.kind, reader.stage] = (_DTYPES[dtype], tuple(shape[:dims]))
        tensor = torch.empty(size[1], dtype=size[0], device=self._device)
        self._posted[reader] = (dist.irecv(tensor, peer, group, tag), tensor)

    def _size(self, reader: Action) -> tuple[torch.dtype, tuple[int, ...]] | None:
        return self._sizes.get((reader.kind, reader.stage))

    def _header(self, tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if tensor.dtype not in _DTYPES or len(shape) > _MOST_DIMS:
            raise ForetraceError(f"a stage gives a {len(shape)}-dimensional tensor of {tensor.dtype}; cut elsewhere.")
        values = [_DTYPES.index(tensor.dtype), len(shape), *shape, *[0] * (_MOST_DIMS - len(shape))]
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _tag(self, reader: Action) -> int:
        return (2 * (reader.number * self._stages + reader.stage) + (reader.kind == F)) % _TAGS


def lost(rank: int, whom: str, where: str, error: RuntimeError) -> LostError:
    """Return the error of a process that does not get what it needs."""
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    return LostError(
        f"process {rank} got no answer from {whom} at {where}, which ended or took longer than the timeout ({first}); "
        "start again from the last checkpoint."
    )
