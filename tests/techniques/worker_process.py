"""What one process of several that train together does: applies techniques, trains, says what came out."""

from __future__ import annotations

from typing import Any

STEPS = 4


def make(batch_size: int = 8, *, micro_friendly: bool = True) -> Any:
    """A small residual network without batch norm, so that workers together do what one does on a larger batch."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from foretrace.training.training import Training

    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(24, 40), nn.Linear(40, 24)

        def forward(self, x: Any) -> Any:
            return x + self.outer(self.inner(x).relu())

    model = nn.Sequential(nn.Linear(12, 24), Block(), Block(), Block(), nn.Linear(24, 5))
    data = TensorDataset(torch.randn(192, 12), torch.randint(0, 5, (192,)))
    return Training(
        name="blocks",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),),
        loader=DataLoader(data, batch_size=batch_size),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


def weights(model: Any) -> list[float]:
    """All parameters in a row, gathered where they are sharded."""
    found: list[float] = []
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found += whole.detach().flatten().tolist()
    return found


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train with the techniques of a case; what they changed, losses and weights."""
    from torch.nn.parallel import DistributedDataParallel

    from foretrace.errors import ForetraceError
    from foretrace.techniques.arguments import parse_all

    training = make()
    calls: list[int] = []
    try:
        for technique in parse_all(case["techniques"]):
            training = technique.apply(training)
        if case.get("count") and isinstance(training.model, DistributedDataParallel):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            def counted(bucket: Any) -> Any:
                calls.append(bucket.index())
                return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # the default group

            training.model.register_comm_hook(None, lambda _, bucket: counted(bucket))
        losses = [float(each) for each in training.steps(STEPS)]
    except ForetraceError as error:
        return {"refused": str(error)}
    model: Any = training.model
    log = model._get_ddp_logging_data() if isinstance(model, DistributedDataParallel) else {}
    held = sum(
        (each.to_local() if hasattr(each, "to_local") else each).numel()
        for optimizer in training.optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    )
    buckets = str(log.get("rebuilt_bucket_sizes", ""))
    sent = getattr(training.optimizers[0], "sent_bytes", None)
    return {
        "losses": losses, "weights": weights(model), "calls": calls, "buckets": buckets, "held": held, "sent": sent,
    }  # fmt: skip


def answers(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One answer per case."""
    return [run(case) for case in cases]
