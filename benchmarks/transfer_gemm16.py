"""16-bit products on GPUs that were not measured: the laws, what a few measurements say, and both scored.

`train_gemm16.py` uses it. Every family of GPUs (the first word of its architecture) is left out in turn: the law that
the others share, their own laws, and the belief on how products hang together know nothing of it. The belief in turn
is learned from residuals of GPUs whose family was left out of the laws, too. So nothing that is scored was fitted to,
and the ranges that a family is scored with come from the other families.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.devices.learned import gemm16_law as law
from foretrace.cost.devices.learned import gemm16_shift as shift
from foretrace.cost.devices.learned.gemm16 import EDGES_S, Gemm16, features
from foretrace.cost.devices.learned.gemm16_shift import Belief, Places
from gemm16_fit import adapt, fit_together
from gemm_table import System

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Families = frozenset[str]
Logs = dict[str, list[tuple[Floats, Floats]]]  # by family: predicted seconds, logarithm of measured over predicted

#: Chosen by leaving families out (mean |error| %, A100 / H100 / H200 / L40S / RTX PRO; loading, epilogue, cache), with
#: power limits of units that registers feed only:
#: 0 0 0: 8.9 / 18.3 / 19.4 / 14.0 / 14.6; .5 .5 .5: 8.7 / 12.5 / 13.0 / 15.3 / 13.3; 1 0 1: 9.1 / 14.4 / 15.0 / 16.3 /
#: 13.6; 1 1 1: 8.9 / 10.8 / 11.3 / 16.4 / 13.0; 1 1 .5: 8.9 / 10.4 / 11.0 / 15.4 / 12.9; 1 1 0: 9.0 / 10.4 / 11.1 /
#: 14.4 / 13.1. The others choose the last whichever family is left out, but without Ada they choose 1 1 .5.
FOLLOW = {"follow_load": 1.0, "follow_epilogue": 1.0, "follow_cache": 0.0}
OWN = {"compute": 0.2, "memory": 0.1, "floor": 0.2}  # what a training GPU may have of its own, and by how much
ROWS = 2000  # of a GPU, for a law
COUNTS = (0, 10, 20, 50, 100)
POOL, DRAWS = 600, 5  # candidates to be measured, and how many times they are drawn for scoring
LEAST_SPREAD = 0.03
#: Products that the peak would take so long for draw all the power there is. Which limit was chosen with all families
#: in view, same order: none 9.1 / 11.2 / 11.5 / 19.1 / 12.7 (cache 1); of units that registers feed, with the mean of
#: the families' energies, 9.0 / 10.4 / 11.1 / 14.4 / 13.1 (cache 0, as the others); of all units 10.0 / 10.2 / 10.8 /
#: 13.7 / 13.9; with the thriftiest's energy 9.4 / 10.3 / 10.9 / 13.9 / 13.5.
LARGE_S = 1e-3
ALONE = 0.2  # by what a parameter of one family's law may differ from where fitting starts; wider ones travel no better
FREE = 0.5  # by what a parameter may differ when the law of a GPU is reached from the shared one
RESIDUALS, EVIDENCE = 2500, 150  # rows of a GPU for the trees, and for the marginal likelihood
OUTLIER = 0.8  # residuals are cut there for both
TREES, DEPTH, BINS, RATE, RIDGE = 60, 4, 32, 0.1, 5.0  # of each GPU's residuals
#: Amplitude; chosen by leaving families out, mean error with 50 of five GPUs: .1 9.5, .15 9.6, .2 9.3, .3 9.7.
LEAF = 0.2
SCORED_ROWS = 12_000  # of a GPU that is left out
STUDENT = {1: 3.078, 2: 1.886, 3: 1.638, 4: 1.533, 5: 1.476, 6: 1.440, 7: 1.415, 8: 1.397}  # t below with 90 %
NESTED_ROWS = 4000  # of a GPU, for the ranges that another family is scored with
#: The first, of the law's shift: .35 9.7, .7 9.4, 1 9.8 (mean error with 50 of five GPUs left out, %).
#: Logarithms where amplitudes, lengths and noise start, and how far they may go from there.
FIRST = np.log([0.7, 0.05, 0.1, 0.5, *[0.05] * 9, *[2.0] * 11])
GIVE = np.array([0.3, 1.5, 0.2, 0.5, *[1.5] * 9, *[0.4] * 11])


def family(system: System) -> str:
    """What is left out together."""
    return (system.device.arch or system.name).split()[0]


def sample(system: System, rows: Ints | None = None, count: int = ROWS) -> Ints:
    """Some of a system's rows, the same triples wherever the table has them."""
    pool = np.arange(len(system)) if rows is None else rows
    return np.sort(np.random.RandomState(5).permutation(pool)[:count])


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Products of one GPU under laws that did not see its family."""

    name: str
    places: Places
    features: npt.NDArray[np.float32]  # [inputs, n]
    residual: Floats


@dataclass(frozen=True, kw_only=True)
class Laws:
    """Laws by the families that they did not see; each is fitted once."""

    systems: Mapping[str, System]
    shared_: dict[Families, dict[str, float]] = field(default_factory=dict)
    own_: dict[str, dict[str, float]] = field(default_factory=dict)

    def without(self, out: Families) -> list[str]:
        """GPUs of other families."""
        return [name for name, each in self.systems.items() if family(each) not in out]

    def families(self, out: Families = frozenset()) -> list[str]:
        """Families but these."""
        return sorted({family(each) for each in self.systems.values()} - out)

    def shared(self, out: Families) -> dict[str, float]:
        """The law that the others share."""
        if out not in self.shared_:
            chosen = [self.systems[name] for name in self.without(out)]
            start = law.START | FOLLOW | self.energy(self.families(out))
            self.shared_[out], _ = fit_together(start, [s.measured(sample(s)) for s in chosen], OWN, fixed=("energy",))
        return self.shared_[out]

    def own(self, one: str) -> dict[str, float]:
        """The law of one family alone: one each, or a family of many GPUs would outvote the others."""
        if one not in self.own_:
            alone = [each.measured(sample(each)) for each in self.systems.values() if family(each) == one]
            start = law.START | FOLLOW | self.energy([one])
            self.own_[one], _ = fit_together(start, alone, {}, spread=ALONE, fixed=("energy",))
        return self.own_[one]

    def traits(self, out: Families) -> Floats:
        """[GPUs of other families, traits]."""
        return np.array([law.Chip.of(self.systems[name].device).traits for name in self.without(out)])

    def reach(self, out: Families) -> float:
        """The greatest distance of a GPU from those that predict it where ranges come from: up to two families left
        out beside `out`, which widened no family's range (mean of its ends at distances up to 0.7 and from 1.6 to 2.1,
        without measurements: Ada 0.23 and 0.22, Ampere 0.15 and 0.14, Blackwell 0.23 and 0.23, Hopper 0.16 and 0.17).
        """
        families = self.families(out)
        pairs = [{one, other} for one in families for other in families if {one, other} < set(families)]
        return max(
            law.apart(law.Chip.of(self.systems[name].device).traits, self.traits(frozenset(out | pair)))
            for pair in pairs
            for name in self.without(out)
            if family(self.systems[name]) in pair
        )

    def energy(self, families: Sequence[str]) -> dict[str, float]:
        """What the thriftiest of families draws per FLOP where products are large; nothing where no limit is known."""
        drawn = []
        for one in families:
            each_pj = []
            for system in (each for each in self.systems.values() if family(each) == one):
                chip, work = law.Chip.of(system.device), 2 * system.m * system.n * system.k
                spent = 1e12 * chip.power_w * system.seconds / work
                each_pj.append(np.log(np.median(spent[work > LARGE_S * chip.peak])))
            drawn.append(float(np.mean(each_pj)))
        return {"energy": min(drawn)} if np.isfinite(min(drawn)) else {}

    def all(self, out: Families) -> list[dict[str, float]]:
        """The shared one first."""
        return [self.shared(out), *(self.own(one) for one in self.families(out))]

    def seen(self, name: str, out: Families, count: int) -> Seen:
        """Products of a GPU under the laws without its family and `out`."""
        system, laws = self.systems[name], self.all(out | {family(self.systems[name])})
        at = np.random.RandomState(3).permutation(len(system))[:count]
        chip = law.Chip.of(system.device)
        m, n, k = system.m[at], system.n[at], system.k[at]
        middle, beside = shift.expected(laws, chip, m, n, k)
        seen = features(np.exp(middle), chip, m, n, k)
        places = shift.places_of(_BLANK, chip, m, n, k, None, middle, beside, seen)
        return Seen(name=name, places=places, features=seen, residual=np.log(system.seconds[at]) - middle)

    def spread(self, out: Families) -> tuple[list[str], Floats]:
        """Parameters that may move, and by how much those of families differed from the law without them."""
        names = list(law.START)
        moves = []
        for one in self.families(out):
            from_there = self.shared(out | {one})
            for name in self.without(out):
                system = self.systems[name]
                if family(system) == one:
                    there = adapt(from_there, dict.fromkeys(names, FREE), system.measured(sample(system)))
                    weight = sum(family(self.systems[each]) == one for each in self.without(out))
                    moves.append(np.square([there[each] - from_there[each] for each in names]) / weight)
        return names, np.maximum(np.sqrt(np.sum(moves, axis=0) / len(self.families(out))), LEAST_SPREAD)


_BLANK = Belief(
    names=(),
    spread=np.empty(0),
    hyper=FIRST,
    leaf=0.0,
    edges=np.empty((0, 0), np.float32),
    cuts=np.empty((0, DEPTH, 2), np.uint8),
)


def believe(laws: Laws, out: Families) -> tuple[Belief, list[str]]:
    """How products hang together, from GPUs of other families; and which GPU each tree is of."""
    names, spread = laws.spread(out)
    seen = [laws.seen(name, out, RESIDUALS) for name in laws.without(out)]
    every = np.concatenate([each.features for each in seen], axis=1)
    edges = np.stack([np.quantile(row, np.linspace(0, 1, BINS + 1)[1:-1]) for row in every]).astype(np.float32)
    cuts = [grow(each.features, each.residual, edges) for each in seen]
    hyper = likeliest(laws, out, seen, names, spread)
    belief = Belief(
        names=tuple(names), spread=spread, hyper=hyper, leaf=LEAF, edges=edges, cuts=np.concatenate(cuts)
    )  # fmt: skip
    return belief, [each.name for each in seen for _ in range(TREES)]


def grow(seen: npt.NDArray[np.float32], residual: Floats, edges: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Boosted trees of residuals, [TREES, DEPTH, 2]: the same cut in all nodes of a level (feature, edge)."""
    rng = np.random.RandomState(0)
    bins = np.stack([np.searchsorted(row, x) for row, x in zip(edges, seen, strict=True)])
    left = np.clip(residual, -OUTLIER, OUTLIER)
    left = left - left.mean()
    cuts = np.zeros((TREES, DEPTH, 2), np.uint8)
    for tree in range(TREES):
        used = rng.rand(len(left)) < 0.6
        asked = rng.permutation(len(edges))[: len(edges) // 2]
        leaf = np.zeros(len(left), np.int64)
        for level in range(DEPTH):
            gains = []
            for each in asked:
                key, size = leaf[used] * BINS + bins[each, used], BINS << level
                count = np.bincount(key, minlength=size).reshape(-1, BINS).cumsum(axis=1)
                total = np.bincount(key, weights=left[used], minlength=size).reshape(-1, BINS).cumsum(axis=1)
                right = (total[:, -1:] - total) ** 2 / (count[:, -1:] - count + RIDGE)
                gains.append((total**2 / (count + RIDGE) + right).sum(axis=0)[:-1])
            best, edge = np.unravel_index(int(np.argmax(gains)), (len(asked), BINS - 1))
            cuts[tree, level] = asked[best], edge
            leaf = 2 * leaf + (bins[asked[best]] > edge)
        sums = np.bincount(leaf[used], weights=left[used], minlength=1 << DEPTH)
        left = left - RATE * (sums / (np.bincount(leaf[used], minlength=1 << DEPTH) + RIDGE))[leaf]
    return cuts


def likeliest(laws: Laws, out: Families, seen: Sequence[Seen], names: Sequence[str], spread: Floats) -> Floats:
    """Amplitudes, lengths and noise at which the residuals of GPUs left out are most likely."""
    import torch

    torch.set_num_threads(1)
    tasks: list[tuple[Any, ...]] = []
    for each in seen:
        system, at = laws.systems[each.name], np.random.RandomState(3).permutation(len(laws.systems[each.name]))
        at = at[:EVIDENCE]
        steep = shift.slopes(
            laws.shared(out | {family(system)}), names, law.Chip.of(system.device), system.m[at], system.n[at],
            system.k[at],
        )  # fmt: skip
        near = each.places.take(np.arange(EVIDENCE))
        columns = (near.at, near.like, steep * spread, np.clip(each.residual[:EVIDENCE], -OUTLIER, OUTLIER))
        tasks.append(tuple(torch.tensor(column) for column in columns))
    first, give = torch.tensor(FIRST), torch.tensor(GIVE)
    hyper = first.clone().requires_grad_()
    step = torch.optim.LBFGS([hyper], max_iter=60, line_search_fn="strong_wolfe")

    def unlikely() -> Any:
        step.zero_grad()
        total = 0.5 * (((hyper - first) / give) ** 2).sum()
        for at, like, steep, residual in tasks:
            whole = shift.smooth(hyper, at, like, at, like, exp=torch.exp)
            whole = whole + torch.exp(2 * hyper[shift.LAW]) * (steep @ steep.T)
            whole = whole + (torch.exp(2 * hyper[shift.NOISE]) + 1e-8) * torch.eye(len(residual))
            root = torch.linalg.cholesky(whole)
            white = torch.linalg.solve_triangular(root, residual[:, None], upper=False)
            total = total + 0.5 * (white**2).sum() + torch.log(torch.diagonal(root)).sum()
        total.backward()
        return total

    step.step(unlikely)
    return np.asarray(hyper.detach().numpy(), np.float64)


def model_of(laws: Laws, out: Families, belief: Belief) -> Gemm16:
    """What would ship if these families had not been measured; its ranges are still open."""
    shared, *own = laws.all(out)
    return Gemm16(
        theta=shared, laws=tuple(own), belief=belief, pool=np.empty((0, 3), np.int64), low=np.ones((len(COUNTS), 3)),
        high=np.ones((len(COUNTS), 3)), counts=COUNTS, known={},
        trained_on=tuple(laws.systems[name].device.short for name in laws.without(out)), traits=laws.traits(out),
        reach=laws.reach(out),
    )  # fmt: skip


def draw(system: System, number: int) -> Ints:
    """Rows of a system that may be chosen to be measured."""
    return np.random.RandomState(70 + number).permutation(len(system))[:POOL]


def few_shot(model: Gemm16, system: System, pool: Ints, rest: Ints, *, chosen: bool = True) -> dict[int, Floats]:
    """Seconds of the rows `rest` by how many products of `pool` were measured: those chosen, or the first ones."""
    triples = np.stack([system.m[pool], system.n[pool], system.k[pool]], axis=1)
    order = pool
    if chosen:
        place = {tuple(row): i for row, i in zip(triples.tolist(), pool.tolist(), strict=True)}
        picked = model.choose(system.device, max(COUNTS), triples)
        order = np.array([place[tuple(row)] for row in picked.astype(float).tolist()])
    found = {}
    for count in COUNTS:
        at = order[:count]
        knows = (
            model.few_shot(system.device, system.m[at], system.n[at], system.k[at], system.seconds[at])
            if count
            else model
        )
        found[count] = knows.seconds(system.device, system.m[rest], system.n[rest], system.k[rest])
    return found


def ranges(logs: Mapping[int, Logs]) -> tuple[Floats, Floats]:
    """[counts, parts] factors of the 80 % range on a family that is not among these.

    An end is the one that a further family has with 90 %, if the families' ends are normally distributed (Student's t,
    as there are few), but no nearer than the worst one's.
    """
    found = []
    for count in COUNTS:
        ends = np.array([
            [[quantile(each, part, q) for part in range(len(EDGES_S) + 1)] for q in (0.1, 0.9)]
            for each in logs[count].values()
        ])  # fmt: skip
        families = len(ends)
        margin = STUDENT[families - 1] * np.sqrt(1 + 1 / families) * ends.std(axis=0, ddof=1)
        low, high = ends.mean(axis=0) + np.stack([-margin[0], margin[1]])
        found.append((np.minimum(low, ends[:, 0].min(axis=0)), np.maximum(high, ends[:, 1].max(axis=0))))
    low, high = np.exp(np.array(found)).swapaxes(0, 1)
    return low, high


def quantile(logs: Sequence[tuple[Floats, Floats]], part: int, q: float) -> float:
    """Of logarithmic errors in one part of the times, every GPU with the same weight."""
    values = [log[np.digitize(found, EDGES_S) == part] for found, log in logs]
    weight = np.concatenate([np.full(len(v), 1.0 / max(len(v), 1)) for v in values])
    every = np.concatenate(values)
    order = np.argsort(every)
    return float(every[order][min(int(np.searchsorted(np.cumsum(weight[order]), q * weight.sum())), len(every) - 1)])


def errors(predicted: Floats, truth: Floats) -> dict[str, float]:
    """Mean and median |predicted / measured - 1|."""
    off = np.abs(predicted / truth - 1)
    return {"mean": float(off.mean()), "median": float(np.median(off))}


def leave_out(laws: Laws, one: str) -> tuple[dict[str, Any], dict[int, Logs]]:
    """Scores of the GPUs of a family left out, and their errors; ranges come from the other families."""
    out = frozenset({one})
    belief, trees_of = believe(laws, out)
    nested: dict[int, Logs] = {count: {} for count in COUNTS}
    for name in laws.without(out):
        system, both = laws.systems[name], out | {family(laws.systems[name])}
        others = np.array([family(laws.systems[each]) not in both for each in trees_of])
        model = model_of(laws, both, replace(belief, cuts=belief.cuts[others]))
        pool = draw(system, 0)
        rest = np.setdiff1d(np.random.RandomState(8).permutation(len(system))[:NESTED_ROWS], pool)
        for count, found in few_shot(model, system, pool, rest).items():
            pair = (found, np.log(system.seconds[rest] / found))
            nested[count].setdefault(family(system), []).append(pair)
    low, high = ranges(nested)
    model = replace(model_of(laws, out, belief), low=low, high=high)
    report: dict[str, Any] = {}
    logs: dict[int, Logs] = {count: {} for count in COUNTS}
    for name in (each for each in laws.systems if family(laws.systems[each]) == one):
        system = laws.systems[name]
        pools = [draw(system, number) for number in range(DRAWS)]
        rest = np.setdiff1d(np.random.RandomState(8).permutation(len(system))[:SCORED_ROWS], np.concatenate(pools))
        drawn = [few_shot(model, system, pool, rest) for pool in pools]
        random = [few_shot(model, system, pool, rest, chosen=False) for pool in pools]
        report[name] = {}
        for i, count in enumerate(COUNTS):
            truth = system.seconds[rest]
            each = [errors(found[count], truth) for found in drawn]
            part = [np.digitize(found[count], EDGES_S) for found in drawn]
            held = [
                (truth >= found[count] * low[i][p]) & (truth <= found[count] * high[i][p])
                for found, p in zip(drawn, part, strict=True)
            ]
            report[name][str(count)] = {
                "mean": float(np.mean([x["mean"] for x in each])),
                "median": float(np.mean([x["median"] for x in each])),
                "best and worst pool": [min(x["mean"] for x in each), max(x["mean"] for x in each)],
                "random choice": float(np.mean([errors(found[count], truth)["mean"] for found in random])),
                "bias": float(np.median(drawn[0][count] / truth) - 1),
                "covered": float(np.mean(held)),
                "range": float(np.median((high[i] / low[i])[part[0]])),
            }
            pair = (drawn[0][count], np.log(truth / drawn[0][count]))
            logs[count].setdefault(one, []).append(pair)
        print(name, {count: f"{100 * row['mean']:.1f}" for count, row in report[name].items()}, flush=True)
    return report, logs


def transfer(systems: Mapping[str, System]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays for GPUs that were not measured, and the table of errors by GPU left out."""
    laws = Laws(systems=systems)
    if len(laws.families()) < 4:
        raise SystemExit(f"leaving two families out takes four; the table has {', '.join(laws.families())}")
    report: dict[str, Any] = {}
    logs: dict[int, Logs] = {count: {} for count in COUNTS}
    for one in laws.families():
        rows, left = leave_out(laws, one)
        report.update(rows)
        for count in COUNTS:
            logs[count] |= left[count]
    low, high = ranges(logs)
    belief, _ = believe(laws, frozenset())
    shared, *own = laws.all(frozenset())
    names = list(shared)
    spread = dict(zip(belief.names, belief.spread.tolist(), strict=True))
    triples = np.unique(np.concatenate([np.stack([s.m, s.n, s.k], axis=1) for s in systems.values()]), axis=0)
    arrays = {
        "names": np.array(names),
        "theta": np.array([shared[name] for name in names]),
        "laws": np.array([[each[name] for name in names] for each in own]),
        "spread": np.array([spread.get(name, 0.0) for name in names]),
        "hyper": belief.hyper,
        "leaf": np.array(belief.leaf),
        "edges": belief.edges,
        "cuts": belief.cuts,
        "pool": triples[np.random.RandomState(7).permutation(len(triples))[:POOL]].astype(np.int32),
        "low": low,
        "high": high,
        "counts": np.array(COUNTS),
        "trained_on": np.array([each.device.short for each in systems.values()]),
        "traits": laws.traits(frozenset()),
        "reach": np.array(laws.reach(frozenset())),
    }
    return arrays, {"left out": {name: report[name] for name in systems}, "theta": shared, "spread": spread}
