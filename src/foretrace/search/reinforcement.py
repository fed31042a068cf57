"""Reinforcement learning on coordinates: `DQN` learns what a change gains, `REINFORCE` moves a policy.

`DenseNet` is a small network in numpy, with gradients for its weights and for what goes in; `Adam` follows them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from foretrace.arrays import Float64
from foretrace.search.space import Point, Space
from foretrace.search.strategy import SearchContext, Steps

_FORGET, _FORGET_SQUARES, _LEAST = 0.9, 0.999, 1e-8


class DenseNet:
    """Layers with tanh between them; `sizes` from the inputs to the outputs."""

    def __init__(self, sizes: Sequence[int], rng: np.random.Generator) -> None:
        """Draw weights of variance 1 / inputs, no biases."""
        self.parameters: list[Float64] = []
        for inputs, outputs in pairwise(sizes):
            self.parameters += [rng.normal(size=(inputs, outputs)) / max(inputs, 1) ** 0.5, np.zeros(outputs)]

    def forward(self, x: Float64) -> list[Float64]:
        """Return what goes into every layer (samples x inputs), and the outputs last."""
        values = [x]
        for i in range(0, len(self.parameters), 2):
            out = values[-1] @ self.parameters[i] + self.parameters[i + 1]
            values.append(np.tanh(out) if i + 2 < len(self.parameters) else out)
        return values

    def __call__(self, x: Float64) -> Float64:
        """Return outputs (samples x outputs)."""
        return self.forward(x)[-1]

    def backward(self, values: list[Float64], gradient: Float64) -> tuple[list[Float64], Float64]:
        """Return gradients of all parameters and of the inputs from that of the outputs; `values`: of `forward`."""
        found: list[Float64] = []
        for i in range(len(self.parameters) - 2, -1, -2):
            found[:0] = [values[i // 2].T @ gradient, gradient.sum(axis=0)]
            gradient = gradient @ self.parameters[i].T
            if i:
                gradient = gradient * (1 - values[i // 2] ** 2)
        return found, gradient


class Adam:
    """Changes arrays in place (Kingma and Ba, 2015)."""

    def __init__(self, parameters: Sequence[Float64]) -> None:
        self._all = [(each, np.zeros_like(each), np.zeros_like(each)) for each in parameters]
        self._steps = 0

    def step(self, gradients: Sequence[Float64], rate: float) -> None:
        """Step against the gradients, by about `rate`."""
        self._steps += 1
        for (at, mean, square), gradient in zip(self._all, gradients, strict=True):
            mean[...] += (1 - _FORGET) * (gradient - mean)
            square[...] += (1 - _FORGET_SQUARES) * (gradient**2 - square)
            unbiased = mean / (1 - _FORGET**self._steps)
            at[...] -= rate * unbiased / (np.sqrt(square / (1 - _FORGET_SQUARES**self._steps)) + _LEAST)


@dataclass(frozen=True, kw_only=True)
class DQN:
    """Q-learning with a network (Mnih et al., 2015): an action moves one coordinate, its reward is what that gains.

    Rewards are shares of the typical change of the costs met so far. An episode begins at the best point by then; after
    one that met nothing new, at a random point, from where actions are random.
    """

    stride: float = 0.05  # of an action, doubled until the point is another
    length: int = 32  # actions of an episode
    explore: tuple[float, float] = (0.5, 0.05)  # share of random actions: of the first episode, and at least
    fade: float = 0.9  # of that share, per episode
    discount: float = 0.7
    rate: float = 3e-3
    width: int = 32
    batch: int = 32
    lag: int = 64  # new points after which the network that judges follows the one that learns

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        """Yield episode by episode, from the best of the starts."""
        space, rng = context.space, context.rng
        best, least = yield from context.first()
        many = 2 * len(space.encode(best))
        draw = np.random.default_rng(rng.getrandbits(32))
        net, judge = (DenseNet((many // 2, self.width, many), draw) for _ in range(2))
        judge.parameters = [each.copy() for each in net.parameters]
        adam, met = Adam(net.parameters), list[tuple[Float64, int, float, Float64]]()
        share, changes, made, seen = self.explore[0], list[float](), 0, {space.key(best)}
        while True:
            fresh = len(seen) > made or made == 0
            at, cost, made = best, least, len(seen)
            if not fresh:
                (cost,) = yield [at := space.random(rng)]
            code = np.array(space.encode(at))
            for _ in range(self.length):
                chance = share if fresh else 1.0
                action = draw.integers(many) if rng.random() < chance else int(np.argmax(net(code[None])[0]))
                other = moved(space, at, int(action), self.stride)
                (new,) = yield [other]
                gain = -inf if new == inf else 0.0 if cost == inf else cost - new
                if abs(gain) < inf and gain:
                    changes.append(abs(gain))
                if new < inf:
                    at, cost = other, new
                if new < least:
                    best, least = other, new
                then = np.array(space.encode(at))
                met.append((code, int(action), gain, then))
                code = then
                if (key := space.key(other)) in seen:
                    continue
                seen.add(key)
                typical = float(np.median(changes[-1000:])) if changes else 1.0
                self._learn(net, judge, adam, [met[i] for i in draw.integers(len(met), size=self.batch)], typical)
                if len(seen) % self.lag == 0:
                    judge.parameters = [each.copy() for each in net.parameters]
            share = max(self.explore[1], self.fade * share)
            yield ()

    def _learn(
        self, net: DenseNet, judge: DenseNet, adam: Adam, met: Sequence[tuple[Float64, int, float, Float64]],
        typical: float,
    ) -> None:  # fmt: skip
        codes, actions, gains, then = (np.array(each) for each in zip(*met, strict=True))
        reward = np.clip(gains / typical, -3, 3)
        values, rows = net.forward(codes), np.arange(len(met))
        off = np.zeros_like(values[-1])
        wanted = reward + self.discount * np.maximum(judge(then).max(axis=1), 0)  # an episode may end at any time
        off[rows, actions] = np.clip(values[-1][rows, actions] - wanted, -1, 1) / len(met)
        adam.step(net.backward(values, off)[0], self.rate)


def moved(space: Space[Point], at: Point, action: int, stride: float) -> Point:
    """Return the point with one coordinate higher (even actions) or lower, by the first doubled stride that does."""
    code, key, other = list(space.encode(at)), space.key(at), at
    i, sign, begin = action // 2, 1 - 2 * (action % 2), code[action // 2]
    while stride < 2 and space.key(other) == key:
        code[i] = min(max(begin + sign * stride, 0.0), 1.0)
        other, stride = space.decode(code), 2 * stride
    return other


@dataclass(frozen=True, kw_only=True)
class REINFORCE:
    """Policy gradient (Williams, 1992) of points drawn at once: a normal distribution of every coordinate.

    What a point is worth is its rank among those drawn with it, so that the unit of costs does not matter.
    """

    sigma: float = 0.2  # standard deviation at the begin, of coordinates from 0 to 1
    least: float = 0.02  # and at any time
    batch: int = 16
    rate: float = 0.05

    def steps(self, context: SearchContext[Point]) -> Steps[Point]:
        """Yield batch by batch, from the best of the starts; from a random point where one met nothing new."""
        space, seen = context.space, set[Hashable]()
        at, _ = yield from context.first()
        draw = np.random.default_rng(context.rng.getrandbits(32))
        while True:
            mean = np.array(space.encode(at), dtype=np.float64)
            spread = np.full(len(mean), np.log(self.sigma))
            adam = Adam([mean, spread])
            while True:
                sigma = np.exp(spread)
                noise = draw.normal(size=(self.batch, len(mean)))
                asked = [space.decode(list(code)) for code in mean + sigma * noise]
                costs = np.array((yield asked))
                worth = 0.5 - np.argsort(np.argsort(costs, kind="stable"), kind="stable") / (self.batch - 1)
                adam.step([-(worth @ noise) / sigma / self.batch, -(worth @ (noise**2 - 1)) / self.batch], self.rate)
                np.clip(mean, 0, 1, out=mean)
                np.maximum(spread, np.log(self.least), out=spread)
                yield ()
                if seen.issuperset(keys := set(map(space.key, asked))):
                    break
                seen |= keys
            at = space.random(context.rng)
