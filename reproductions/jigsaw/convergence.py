"""How many more iterations partial backpropagation needs: a small network really trained with and without it.

K workers with a batch each are played in one process, which is exact where no layer looks at a whole batch: every
gradient is the mean over the workers that compute it, with the groups, depths and rotation of `training.partial`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

BLOCKS, WIDTH, CLASSES, RATE = 8, 32, 8, 0.02
BACKWARD = 2  # times as long as forward
EVERY, HELD_OUT = 5, 1024
SMOOTH = 5  # held-out losses that are averaged before they are compared
LIMIT = 3  # times as many iterations are tried


class Convergence(msgspec.Struct, frozen=True, kw_only=True):
    """Iterations until a held-out loss is reached that the plain training ends with."""

    workers: int
    batch: int  # samples per worker and iteration
    seed: int
    loss: float
    plain: int
    partial: int | None  # None: not within three times as many
    smaller: int | None  # plain with a batch smaller by as much as partial backward passes compute less


def converge(workers: int, batch: int, seed: int, *, iterations: int) -> Convergence:
    """Train a residual perceptron of eight blocks to tell the classes of a random teacher, plainly and partially.

    Both begin with the same weights and see the same batches; SGD with momentum 0.9. PyTorch must be
    installed.
    """
    plain = _losses(workers, batch, seed, iterations, partial=False)
    goal = plain[-1]
    partial = _losses(workers, batch, seed, LIMIT * iterations, goal=goal, partial=True)
    less = (1 + BACKWARD * (workers + 1) / (2 * workers)) / (1 + BACKWARD)
    smaller = _losses(workers, round(batch * less), seed, LIMIT * iterations, goal=goal, partial=False)
    return Convergence(
        workers=workers,
        batch=batch,
        seed=seed,
        loss=goal,
        plain=EVERY * (1 + next(i for i, each in enumerate(plain) if each <= goal)),
        partial=EVERY * len(partial) if partial[-1] <= goal else None,
        smaller=EVERY * len(smaller) if smaller[-1] <= goal else None,
    )


def _losses(
    workers: int, batch: int, seed: int, iterations: int, *, partial: bool, goal: float = float("-inf")
) -> list[float]:
    """Smoothed held-out losses after every few iterations, up to the first that is as low as the goal."""
    import torch

    from foretrace.training.partial import depth

    random = torch.Generator().manual_seed(seed)
    blocks, head = _network(random)
    teacher = torch.randn(WIDTH, CLASSES, generator=random)
    hidden = torch.randn(WIDTH, WIDTH, generator=random) / WIDTH**0.5
    parameters = [
        [each for block in blocks[i * BLOCKS // workers : (i + 1) * BLOCKS // workers] for each in block]
        for i in reversed(range(workers))
    ]
    parameters[0].append(head)  # group 0 is at the output
    optimizer = torch.optim.SGD([each for group in parameters for each in group], lr=RATE, momentum=0.9)

    def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(count, WIDTH, generator=random)
        return inputs, (torch.tanh(inputs @ hidden) @ teacher).argmax(dim=1)

    held_out, raw, smooth = samples(HELD_OUT), list[float](), list[float]()
    for turn in range(iterations):
        losses = _loss(blocks, head, *samples(workers * batch)).view(workers, batch)
        for group, members in enumerate(parameters):
            those = [w for w in range(workers) if not partial or depth(w, turn, workers) > group]
            gradients = torch.autograd.grad(losses[those].mean(), members, retain_graph=group < workers - 1)
            for each, gradient in zip(members, gradients, strict=True):
                each.grad = gradient
        optimizer.step()
        if (turn + 1) % EVERY == 0:
            with torch.no_grad():
                raw.append(float(_loss(blocks, head, *held_out).mean()))
            smooth.append(sum(raw[-SMOOTH:]) / len(raw[-SMOOTH:]))
            if smooth[-1] <= goal:
                break
    return smooth


def _network(random: torch.Generator) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Two matrices per block, and the one behind them."""
    import torch

    def matrix(columns: int, scale: float) -> torch.Tensor:
        made: torch.Tensor = torch.randn(WIDTH, columns, generator=random) * scale / WIDTH**0.5
        return made.requires_grad_()

    return [(matrix(WIDTH, 1.0), matrix(WIDTH, 0.3)) for _ in range(BLOCKS)], matrix(CLASSES, 1.0)


def _loss(
    blocks: list[tuple[torch.Tensor, torch.Tensor]], head: torch.Tensor, inputs: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    """(samples,) cross entropy."""
    import torch

    x = inputs
    for inner, outer in blocks:
        x = x + torch.relu(x @ inner) @ outer
    losses: torch.Tensor = torch.nn.functional.cross_entropy(x @ head, classes, reduction="none")
    return losses
