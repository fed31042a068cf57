"""Reinforcement learning: advantage actor-critic that balances poles, and sees them only as pictures.

The environment is the cart-pole of Barto, Sutton and Anderson (1983), as many at once as the batch has samples,
simulated and drawn with tensors. A batch is (state (batch, 4), draws (batch, steps) float32 in 0 ... 1): where every
environment starts, and the random numbers that choose its actions, so that a step depends on nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training
from foretrace.zoo.data import loader

_TICK_S = 0.02
_GRAVITY = 9.8
_FORCE_N = 10.0
_CART_KG, _POLE_KG, _HALF_LENGTH_M = 1.0, 0.1, 0.5
_FAR_M, _TILTED_RAD = 2.4, 12 * math.pi / 180
_DISCOUNT = 0.99
_VALUE_WEIGHT, _ENTROPY_WEIGHT = 0.5, 0.01


@dataclass(frozen=True, kw_only=True)
class Start:
    """A cart near the middle with its pole nearly upright, and the random numbers of a rollout."""

    steps: int

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        state = torch.rand(4, generator=generator) * 0.1 - 0.05
        return state, torch.rand(self.steps, generator=generator)


def moved(state: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return one tick of every cart-pole pushed right or left: new states, and which are over (they restart, upright).

    `state` is (batch, 4): position (m), speed (m/s), angle (rad), angular speed (rad/s); `right` is (batch,) of bool.
    """
    _, speed, angle, turning = state.unbind(1)
    force = torch.where(right, _FORCE_N, -_FORCE_N)
    total, moment = _CART_KG + _POLE_KG, _POLE_KG * _HALF_LENGTH_M
    sine, cosine = angle.sin(), angle.cos()
    pushed = (force + moment * turning.square() * sine) / total
    turn = (_GRAVITY * sine - cosine * pushed) / (_HALF_LENGTH_M * (4 / 3 - _POLE_KG * cosine.square() / total))
    pull = pushed - moment * turn * cosine / total
    after = state + _TICK_S * torch.stack([speed, pull, turning, turn], 1)
    over = (after[:, 0].abs() > _FAR_M) | (after[:, 2].abs() > _TILTED_RAD)
    return after.masked_fill(over[:, None], 0.0), over


def drawn(state: Tensor, side: int) -> Tensor:
    """Return pictures (batch, side, side) of the cart-poles: bright near the pole, which stands on the cart."""
    line = torch.linspace(-1, 1, side, device=state.device)
    across, up = line[None, None, :], -line[None, :, None]
    foot = (state[:, 0] / _FAR_M)[:, None, None]
    tilt = state[:, 2][:, None, None]
    x, y = across - foot, up + 0.8
    along = (x * tilt.sin() + y * tilt.cos()).clamp(0, 1.4)
    distance = (x - along * tilt.sin()).square() + (y - along * tilt.cos()).square()
    return torch.exp(distance * -200)


class ActorCritic(nn.Module):
    """The convolutional network of Mnih et al. 2016 for four frames, with a policy and a value."""

    def __init__(self, *, side: int, channels: tuple[int, int], hidden: int) -> None:
        super().__init__()
        self.side = side
        inner = ((side - 8) // 4 + 1 - 4) // 2 + 1
        self.body = nn.Sequential(
            nn.Conv2d(4, channels[0], 8, stride=4),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels[0], channels[1], 4, stride=2),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(channels[1] * inner**2, hidden),
            nn.ReLU(inplace=True),
        )
        self.policy = nn.Linear(hidden, 2)
        self.value = nn.Linear(hidden, 1)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-odds of both actions (batch, 2) and value (batch,)."""
        found = self.body(frames)
        return self.policy(found), self.value(found).squeeze(1)


def rollout_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return play, then policy gradient with the advantage, squared error of the value, less entropy (section 4)."""
    side = model.side
    assert isinstance(side, int)
    state, draws = batch
    frames = drawn(state, side)[:, None].repeat(1, 4, 1, 1)
    chosen, values, entropies, rewards, goes_on = [], [], [], [], []
    for draw in draws.unbind(1):
        policy, value = model(frames)
        logarithms = policy.float().log_softmax(1)
        right = draw < logarithms.detach()[:, 1].exp()
        chosen.append(logarithms.gather(1, right.long()[:, None]).squeeze(1))
        entropies.append(-(logarithms.exp() * logarithms).sum(1))
        values.append(value.float())
        state, over = moved(state, right)
        frames = torch.cat([frames[:, 1:], drawn(state, side)[:, None]], 1)
        rewards.append(1.0 - over.float())
        goes_on.append(1.0 - over.float())
    with torch.no_grad():
        future = model(frames)[1].float()
    returns: list[Tensor] = []
    for reward, on in zip(reversed(rewards), reversed(goes_on), strict=True):
        future = reward + _DISCOUNT * on * future
        returns.insert(0, future)
    value, target = torch.stack(values), torch.stack(returns)
    advantage = target - value.detach()
    policy_loss = -(torch.stack(chosen) * advantage).mean()
    value_loss = functional.mse_loss(value, target)
    return policy_loss + _VALUE_WEIGHT * value_loss - _ENTROPY_WEIGHT * torch.stack(entropies).mean()


def actor_critic(size: str) -> Training:
    if size == "full":  # 84 x 84 pixels, 5 ticks, 16 environments
        model, start, batch_size = ActorCritic(side=84, channels=(16, 32), hidden=256), Start(steps=5), 16
    else:
        model, start, batch_size = ActorCritic(side=36, channels=(8, 16), hidden=64), Start(steps=16), 8
    optimizer = torch.optim.RMSprop(model.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
    batches = loader(start, batch_size=batch_size)
    return Training(name="actor-critic", model=model, optimizers=(optimizer,), loader=batches, loss=rollout_loss)
