"""How fast an elastic training job runs by nodes, replicas and batch size, from a model fitted to measured steps.

Source: Pollux (Qiao et al., OSDI'21), section 3; fleet-scheduling.md 4.2. With K replicas on one or more nodes, m
samples per replica and pass, and s accumulation passes before the one that synchronises:

    compute = alpha_c + beta_c m                    network = alpha + beta max(K - 2, 0)
    step    = (compute^gamma + network^gamma)^(1/gamma) + s compute

with one pair (alpha, beta) inside a node (r) and one across nodes (n). Goodput = samples per second x efficiency: what
a sample is worth in a batch of that size against one in the smallest batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError, needing
from foretrace.fleet.pollux.profiles import EPS, Application, Profiles
from foretrace.fleet.speeds import Shape, Speed
from foretrace.fleet.workload import Float64, Int64, Workload, codes

_CANDIDATES = 50  # batch sizes tried per allocation, in geometric spacing
_LEAST = 1e-8  # lower bound of every parameter but gamma, and the network time of one replica


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds per step; parameters in the order in which they are fitted."""

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def compute_s(self, local: npt.ArrayLike) -> Float64:
        """Return seconds of one pass over `local` samples."""
        return self.alpha_c + self.beta_c * np.asarray(local, np.float64)

    def network_s(self, nodes: npt.ArrayLike, replicas: npt.ArrayLike) -> Float64:
        """Return seconds of synchronisation."""
        across, several = np.asarray(nodes) > 1, np.asarray(replicas) > 1
        more = np.maximum(np.asarray(replicas) - 2, _LEAST)
        inside = np.where(several, self.alpha_r + self.beta_r * more, _LEAST)
        return np.where(across, self.alpha_n + self.beta_n * more, inside)

    def step_s(
        self, nodes: npt.ArrayLike, replicas: npt.ArrayLike, local: npt.ArrayLike, accumulation: npt.ArrayLike = 0
    ) -> Float64:
        """Return seconds of a step with its accumulation passes; arguments broadcast."""
        compute = self.compute_s(local)
        overlapped = (compute**self.gamma + self.network_s(nodes, replicas) ** self.gamma) ** (1 / self.gamma)
        return np.asarray(accumulation) * compute + overlapped


def fit_step_model(
    nodes: npt.ArrayLike, replicas: npt.ArrayLike, local: npt.ArrayLike, step_s: npt.ArrayLike, sync_s: npt.ArrayLike
) -> StepModel:
    """Return the model nearest to measured rows, (rows,) each.

    Minimises the root mean square error of the logarithms of compute and of step seconds, plus 1e-3 (gamma - 1)^2 and
    1e-2 ((beta_n / alpha_n)^2 + (beta_r / alpha_r)^2). What the rows cannot tell stays at its lower bound, and across
    nodes is taken to cost at least 1.1 times as much as inside one. Raises ForetraceError without a usable row and
    MissingExtraError without scipy.
    """
    with needing("fitting goodput models"):
        from scipy.optimize import minimize
    n, k = np.atleast_1d(np.asarray(nodes, np.int64)), np.atleast_1d(np.asarray(replicas, np.int64))
    m, step = np.atleast_1d(np.asarray(local, np.float64)), np.atleast_1d(np.asarray(step_s, np.float64))
    compute = step - np.asarray(sync_s, np.float64)
    if not len(step) or not ((compute > 0).all() and np.isfinite(step).all()):
        raise ForetraceError(
            "a goodput model needs at least one measured step, each longer than its synchronisation; correct the rows."
        )
    start = np.array([0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001])
    low, high = np.array([_LEAST] * 6 + [1.0]), np.array([np.inf] * 6 + [10.0])
    across, inside = n > 1, (n == 1) & (k > 1)
    fixed = np.zeros(7, bool)
    if (m == m[0]).all():  # one batch size tells no slope: half of the time is taken to be constant
        start[0], fixed[0] = compute.mean() / 2, True
    unknown = [*([2, 3] if not across.any() else []), *([4, 5] if not inside.any() else [])]
    unknown += [3, 5] if not (k > 2).any() else []
    start[unknown], fixed[unknown] = _LEAST, True
    low[fixed] = high[fixed] = start[fixed]
    found = minimize(
        _loss(across, inside, np.maximum(k - 2.0, _LEAST), m, np.log(compute), np.log(step)),
        start, jac=True, method="L-BFGS-B", bounds=np.column_stack([low, high]),
    ).x  # fmt: skip
    if not across.any():
        found[2:4] = np.maximum(found[2:4], 1.1 * found[4:6])
    return StepModel(*map(float, found))


def _loss(
    across: npt.NDArray[np.bool_], inside: npt.NDArray[np.bool_], more: Float64, m: Float64,
    log_compute: Float64, log_step: Float64,
) -> Callable[[Float64], tuple[float, Float64]]:  # fmt: skip
    """Return loss and its gradient by the seven parameters."""
    network_by = np.array([across, across * more, inside, inside * more])  # by alpha_n, beta_n, alpha_r, beta_r
    alone = np.where(across | inside, 0.0, _LEAST)
    compute_by = np.array([np.ones_like(m), m])

    rows = len(m)

    def loss(x: Float64) -> tuple[float, Float64]:
        gamma = float(x[6])
        compute, network = x[:2] @ compute_by, x[2:6] @ network_by + alone
        log_c, log_n = np.log(compute), np.log(network)
        # (c^g + n^g)^(1/g) by logarithms, as g up to 10 would lose small times.
        total = np.logaddexp(gamma * log_c, gamma * log_n)
        share = np.exp(gamma * log_c - total)  # c^g / (c^g + n^g)
        off_c, off_s = log_c - log_compute, total / gamma - log_step
        rms_c, rms_s = math.sqrt(off_c @ off_c / rows), math.sqrt(off_s @ off_s / rows)
        by_c = off_c / (rms_c * rows) if rms_c > 0 else off_c
        by_s = off_s / (rms_s * rows) if rms_s > 0 else off_s
        alpha_n, beta_n, alpha_r, beta_r = x[2:6].tolist()
        ratio_n, ratio_r = beta_n / alpha_n, beta_r / alpha_r
        value = rms_c + rms_s + 1e-3 * (gamma - 1) ** 2 + 1e-2 * (ratio_n**2 + ratio_r**2)
        slope = np.empty(7)
        slope[:2] = compute_by @ ((by_c + by_s * share) / compute)
        slope[2:6] = network_by @ (by_s * (1 - share) / network)
        slope[2] -= 2e-2 * ratio_n**2 / alpha_n
        slope[3] += 2e-2 * ratio_n / alpha_n
        slope[4] -= 2e-2 * ratio_r**2 / alpha_r
        slope[5] += 2e-2 * ratio_r / alpha_r
        slope[6] = by_s @ (log_n + share * (log_c - log_n) - total / gamma) / gamma + 2e-3 * (gamma - 1)
        return value, slope

    return loss


def efficiency(sqr: float, var: float, scale: npt.ArrayLike) -> Float64:
    """Return what a sample is worth in a batch `scale` times the smallest, where it is 1."""
    scale = np.asarray(scale, np.float64)
    below = var / scale + sqr
    gain: Float64 = np.where(below > 0, (var + sqr) / np.where(below > 0, below, 1), 1.0)
    worth: Float64 = gain / scale
    return worth


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Total batch sizes from `init` to `most`, and samples per replica and pass from `low` to `high`."""

    init: int
    most: int
    low: int
    high: int

    @classmethod
    def of(cls, app: Application) -> BatchLimits:
        """Return the limits of a profiled application."""
        return cls(app.init_batch, app.max_batch, app.min_local, app.max_local)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Batch sizes tried in (n,) allocations of `nodes` and `replicas`; the rest is (50, n).

    local: samples per replica and pass; passes: accumulation; allowed: local is within its limits; batch: total;
    scale: the same in smallest batches.
    """

    nodes: Int64
    replicas: Int64
    local: Int64
    passes: Int64
    allowed: npt.NDArray[np.bool_]
    batch: Int64
    scale: Float64

    @classmethod
    def of(cls, limits: BatchLimits, nodes: npt.ArrayLike, replicas: npt.ArrayLike) -> Candidates:
        """Return total batches in geometric spacing, each divided among the replicas.

        One replica with more than the smallest batch accumulates at least once, as the noise of the gradient cannot be
        estimated from a single pass.
        """
        n, k = np.asarray(nodes, np.int64), np.asarray(replicas, np.int64)
        least = np.maximum(limits.init, limits.low * k).astype(np.float64)
        share = np.geomspace(least, float(limits.most), _CANDIDATES) / k
        several = np.ceil(share / limits.high - EPS) - 1
        several = np.where((k == 1) & (share > limits.init + EPS), np.maximum(several, 1), several)
        local = np.ceil(share / (several + 1) - EPS).astype(np.int64)
        passes = several.astype(np.int64)
        allowed = (local >= limits.low) & (local <= limits.high)
        batch = k * local * (passes + 1)
        return cls(n, k, local, passes, allowed, batch, batch / limits.init)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput of one job: its step model, the squared norm and variance of its gradient, and its batch limits."""

    model: StepModel
    sqr: float
    var: float
    limits: BatchLimits

    def at(
        self, nodes: npt.ArrayLike, replicas: npt.ArrayLike, local: npt.ArrayLike, accumulation: npt.ArrayLike
    ) -> Float64:
        """Return samples per second, each worth what it would be in the smallest batch."""
        batch = np.asarray(replicas) * np.asarray(local) * (np.asarray(accumulation) + 1)
        worth = efficiency(self.sqr, self.var, batch / self.limits.init)
        rate: Float64 = batch / self.model.step_s(nodes, replicas, local, accumulation)
        return rate * worth

    def best(self, tried: Candidates) -> tuple[Float64, Int64, Int64]:
        """Return (goodput, local batch, accumulation) of the best batch per allocation, (n,) each; 0 if none fits."""
        rate = tried.batch / self.model.step_s(tried.nodes, tried.replicas, tried.local, tried.passes)
        found = np.where(tried.allowed, rate * efficiency(self.sqr, self.var, tried.scale), 0.0)
        which = np.argmax(found, axis=0), np.arange(len(tried.replicas))
        return found[which], tried.local[which], tried.passes[which]


def fit_application(app: Application) -> StepModel:
    """Return the model fitted to all measured rows of a profile."""
    return fit_step_model(*app.measured.T)


class GoodputSpeeds:
    """`Speeds` of profiled applications: goodput in a placement over goodput of the job's own, consolidated one.

    A job's `model` names its application. With `adapt` it takes the best batch size in each placement, else it keeps
    its own. Efficiency is that of the middle of training. The profiles must have been measured on kind `gpu_type`.
    """

    name = "goodput"

    def __init__(
        self, profiles: Profiles | Path, *, per_node: int = 4, adapt: bool = False, gpu_type: str = ""
    ) -> None:
        """Take `per_node`: GPUs on each node of the allocation that a job's `work_s` refers to."""
        self.profiles = profiles if isinstance(profiles, Profiles) else Profiles(profiles)
        self.per_node, self.adapt, self.gpu_type = per_node, adapt, gpu_type
        self._goodputs: dict[str, Goodput] = {}

    def kinds(self, workload: Workload) -> Int64:
        """Return (n,) kind of each job: those of equal application, GPUs and batch size are equally fast."""
        batch = np.nan_to_num(workload.batch, nan=-1.0)
        return codes(zip(workload.model.tolist(), workload.gpus.tolist(), batch.tolist(), strict=True))[0]

    def run_times(self, workload: Workload) -> Float64:
        """Return (n,) seconds of each job from measured steps and gradients where `work_s` is nan (`with_work`)."""
        return with_work(workload, self.profiles, per_node=self.per_node).work_s

    def of(self, application: str) -> Goodput:
        """Return the goodput of an application; raises ForetraceError where it has no profile."""
        if application not in self._goodputs:
            app = self.profiles.application(application)
            stats = app.grad_stats(app.init_batch, app.epochs // 2)
            self._goodputs[application] = Goodput(fit_application(app), *stats, BatchLimits.of(app))
        return self._goodputs[application]

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return the speed as `Speeds.speed` does; communication is the part of a step beyond its compute."""
        name = str(workload.job[job])
        if shape.gpu_type != self.gpu_type:
            kind = f"measured on {self.gpu_type!r}" if self.gpu_type else "not said to be measured on any kind"
            raise ForetraceError(
                f"job {name!r}: the profiles are {kind}, so they say nothing about {shape.gpu_type!r}; "
                "name the kind they were measured on, or leave it out of the cluster."
            )
        if shape.sharers:
            raise ForetraceError(f"job {name!r}: profiles do not say how fast jobs are that share a GPU; do not share.")
        gpus = int(workload.gpus[job])
        reference, _ = self._placed(workload, job, -(-gpus // self.per_node), gpus, adapt=False)
        here, communication = self._placed(workload, job, shape.units[0], shape.gpus, adapt=self.adapt)
        return Speed(here / reference, communication)

    def _placed(self, workload: Workload, job: int, nodes: int, replicas: int, *, adapt: bool) -> tuple[float, float]:
        """Return (goodput, part of a step that is communication) in one placement."""
        application, batch = str(workload.model[job]), float(workload.batch[job])
        given, app = self.of(application), self.profiles.application(application)
        own = np.isfinite(batch) and not adapt
        if replicas * app.min_local > (batch if own else app.max_batch):
            total = f"{batch:g}" if own else f"{app.max_batch}"
            raise ForetraceError(
                f"job {workload.job[job]!r}: a total batch of {total} leaves {replicas} GPUs less than the "
                f"{app.min_local} samples each that {application} was profiled with; use fewer GPUs or a larger batch."
            )
        if own:
            app.neighbours(round(batch))
            local, passes = app.split(round(batch), replicas)
            rate = float(given.at(nodes, replicas, local, passes))
        else:
            rates, locals_, several = given.best(Candidates.of(given.limits, [nodes], [replicas]))
            rate, local, passes = float(rates[0]), int(locals_[0]), int(several[0])
        compute = float(given.model.compute_s(local)) * (passes + 1)
        return rate, max(0.0, 1 - compute / float(given.model.step_s(nodes, replicas, local, passes)))


def with_work(workload: Workload, profiles: Profiles, *, per_node: int = 4) -> Workload:
    """Return a copy with `work_s` where it is nan: seconds to the end of training by the measured steps and gradients.

    Meant is the job's own number of GPUs and batch size, consolidated and undisturbed. Raises ForetraceError for what
    is not profiled.
    """
    work = workload.work_s.copy()
    known: dict[tuple[str, int, float], float] = {}
    for at in np.flatnonzero(np.isnan(work)).tolist():
        key = str(workload.model[at]), int(workload.gpus[at]), float(workload.batch[at])
        if key not in known:
            try:
                known[key] = _whole_run_s(profiles.application(key[0]), key[1], key[2], per_node)
            except ForetraceError as error:
                raise ForetraceError(f"job {workload.job[at]!r}: {error}") from None
        work[at] = known[key]
    return workload.with_columns(work_s=work)


def _whole_run_s(app: Application, gpus: int, batch: float, per_node: int) -> float:
    if not (batch >= 1 and float(batch).is_integer()):
        raise ForetraceError("its run time follows from its batch size, which is unknown; add the column batch_size.")
    app.neighbours(int(batch))
    placement = (per_node,) * (gpus // per_node) + ((gpus % per_node,) if gpus % per_node else ())
    local, passes = app.split(int(batch), gpus)
    step, sync = app.step_seconds(placement, local)
    total = gpus * local * (passes + 1)
    ends = [0.0, *app.ends]
    steps = sum((ends[e + 1] - ends[e]) / app.gain(total, e) for e in range(app.epochs))
    return float(steps * (step + (step - sync) * passes))
