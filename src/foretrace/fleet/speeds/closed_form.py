"""Speeds from numbers: always 1, or the closed form S = compute / (compute + communication) with profiles of models:
what an iteration computes and exchanges on one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.speeds import Shape, Speed, Speeds, alone, dimensions
from foretrace.fleet.workload import Int64, Object, Workload, codes, plain

_Above = Annotated[float, msgspec.Meta(gt=0, le=1e300)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an iteration of a model computes and exchanges on one GPU."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    compute_ms: _Above
    gradient_mb: _Above  # MB (1e6 bytes) that every worker sends around
    batch: Annotated[int, msgspec.Meta(gt=0)]  # samples per iteration and GPU
    aliases: tuple[str, ...] = ()
    published_scale: _Above | None = None  # what the authors' simulator multiplies compute_ms by
    note: str = ""


class _Profiles(msgspec.Struct):
    profiles: Annotated[tuple[Profile, ...], msgspec.Meta(min_length=1)]


def load_profiles(path: Path | None = None) -> tuple[Profile, ...]:
    """Return profiles from JSON, by default the shipped ones. Raises ForetraceError naming entry and key."""
    where = path or files("foretrace.fleet").joinpath("model_profiles.json")
    text = where.read_text(encoding="utf-8") if path is None else reading.read_text(path)
    try:
        return msgspec.convert(reading.parse_json(text, str(where)), _Profiles).profiles
    except msgspec.ValidationError as error:
        raise ForetraceError(
            f'{where} holds no profiles ({error}); write {{"profiles": [{{"name": ..., "compute_ms": ...}}]}}.'
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantSpeeds:
    """Placement does not matter: every job progresses at 1 in every shape."""

    name: str = "constant"

    def kinds(self, workload: Workload) -> Int64:
        """Return (n,) zeros: all jobs alike."""
        return np.zeros(len(workload), np.int64)

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return 1, nothing of it communication."""
        return Speed(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """Speed of one model on so many GPUs that lie in one unit of `level`, each alone in its unit of the level below."""

    model: str
    level: str
    gpus: int
    progress: float
    communication: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ClosedFormSpeeds:
    """S = compute / (compute + communication), nothing overlapped; progress 1 is S = 1, a job's ideal run time.

    communication = Σ over levels [2 (n−1)/n · bytes / bandwidth + latency], n being the size of a level's dimension
    (`dimensions`); bytes are not divided from level to level (fleet-scheduling 2.6). It overstates what overlap and
    hierarchical all-reduce would hide: `GraphSpeeds` simulates them.

    bandwidth_gb_s, latency_us: per level, innermost (inside a node) first, whole cluster last. congestion divides the
    bandwidth of all levels above the innermost. compute_scale: "full" (as profiled), "published" (as the authors'
    simulator scales, which makes communication 10 to 1000 times as heavy) or a factor. unknown: what to do with a model
    that has no profile: "refuse", or "uniform:SEED", one of the profiles at random by seed and name of the job.
    A job on more or fewer GPUs than it requests progresses in proportion to them, times S. Jobs of one GPU need no
    profile. Raises ForetraceError where a parameter cannot be.
    """

    bandwidth_gb_s: Sequence[float]
    latency_us: Sequence[float] = ()
    congestion: float = 1.0
    compute_scale: str | float = "full"
    unknown: str = "refuse"
    levels: Sequence[str] = ()
    profiles: Sequence[Profile] = ()  # those that come with foretrace where there are none
    name: str = "closed-form"

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "bandwidth_gb_s", tuple(float(each) for each in self.bandwidth_gb_s))
        set_(self, "latency_us", tuple(float(each) for each in self.latency_us) or (0.0,) * len(self.bandwidth_gb_s))
        set_(self, "levels", tuple(self.levels) or tuple(f"level {i + 1}" for i in range(len(self.bandwidth_gb_s))))
        set_(self, "profiles", tuple(self.profiles) or load_profiles())
        if not self.bandwidth_gb_s or not all(0 < each < inf for each in self.bandwidth_gb_s):
            raise ForetraceError("bandwidths must be GB/s above 0, one per level, innermost first, e.g. 50,25,12.5.")
        if not all(0 <= each < inf for each in self.latency_us):
            raise ForetraceError("latencies must be microseconds, 0 or more, one per level, innermost first.")
        if len({len(self.bandwidth_gb_s), len(self.latency_us), len(self.levels)}) > 1:
            raise ForetraceError(
                f"there are {len(self.bandwidth_gb_s)} bandwidths, {len(self.latency_us)} latencies and "
                f"{len(self.levels)} names of levels; give each level one of each."
            )
        if not 1 <= self.congestion < inf:
            raise ForetraceError(f"congestion={self.congestion} must be 1 (none) or more.")
        self._scale(self.profiles[0])
        names: dict[str, int] = {}
        for at, profile in enumerate(self.profiles):
            for each in (profile.name, *profile.aliases):
                if names.setdefault(plain(each), at) != at:
                    raise ForetraceError(f"two profiles are called {each!r}; give each model one profile.")
        set_(self, "_names", names)
        set_(self, "_seed", self._parse_unknown())

    _names: dict[str, int] = None  # type: ignore[assignment]  # filled in __post_init__
    _seed: str | None = None

    @classmethod
    def on(cls, cluster: ClusterTree, **parameters: Any) -> ClosedFormSpeeds:
        """Return it with the bandwidths that a cluster gives (gbit_s). Raises ForetraceError where it gives none."""
        return cls(
            bandwidth_gb_s=tuple(each / 8 for each in cluster_gbit_s(cluster)), levels=cluster.levels, **parameters
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers rest on, one sentence each."""
        scaled = {
            "full": "compute times are as profiled",
            "published": "compute times are scaled as in the published simulator: about one sample per iteration, "
            "against the gradients of whole iterations",
        }.get(str(self.compute_scale), f"compute times are multiplied by {self.compute_scale}")
        found = [
            f"{scaled}, and the same on every kind of GPU.",
            "communication is not overlapped with compute, and every level moves all bytes.",
            *(
                f"{each.name}: {each.compute_ms * self._scale(each):.4g} ms of compute and {each.gradient_mb:.4g} MB "
                f"of gradients per iteration of {each.batch} samples" + (f" ({each.note})." if each.note else ".")
                for each in self.profiles
            ),
        ]
        if self._seed is not None:
            found.append(
                f"a model without a profile is given one of the {len(self.profiles)} at random (seed {self._seed})."
            )
        return tuple(found)

    def kinds(self, workload: Workload) -> Int64:
        """Return (n,) equal for jobs of one profile and number of GPUs. Raises ForetraceError for a job without."""
        return codes(zip(self._which(workload).tolist(), workload.gpus.tolist(), strict=True))[0]

    def profiles_of(self, workload: Workload) -> Object:
        """Return (n,) name of the profile that each job has, drawn ones too; "" where one GPU needs none."""
        names = np.array(["", *(each.name for each in self.profiles)], object)
        given: Object = names[self._which(workload) + 1]
        return given

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return S of the job's profile in this shape, times GPUs held over GPUs asked for."""
        alone(self.name, shape)
        share = shape.gpus / int(workload.gpus[job])
        if shape.gpus == 1:
            return Speed(share)
        at = self._profile_of(str(workload.model[job]), str(workload.job[job]))
        if at < 0:
            raise self._refusal(workload, job)
        profile = self.profiles[at]
        compute_s = profile.compute_ms * 1e-3 * self._scale(profile)
        s = compute_s / (compute_s + self.communication_s(profile, shape))
        return Speed(s * share, 1 - s)

    def communication_s(self, profile: Profile, shape: Shape) -> float:
        """Return seconds that the gradients of one iteration take among these GPUs."""
        if len(shape.units) != len(self.bandwidth_gb_s):
            raise ForetraceError(
                f"the cluster has {len(shape.units)} levels and bandwidth is given for {len(self.bandwidth_gb_s)} "
                f"({', '.join(self.levels)}); give one per level, innermost first."
            )
        total = 0.0
        for level, size in dimensions(shape):
            bytes_per_s = self.bandwidth_gb_s[level] * 1e9 / (self.congestion if level else 1.0)
            total += 2 * (size - 1) / size * profile.gradient_mb * 1e6 / bytes_per_s + self.latency_us[level] * 1e-6
        return total

    def table(self, *, gpus: int = 8) -> tuple[SpeedRow, ...]:
        """Return S of every profile at every level, to be looked at before a run."""
        return speed_table(self, [each.name for each in self.profiles], gpus=gpus, levels=self.levels)

    def _scale(self, profile: Profile) -> float:
        if self.compute_scale == "full":
            return 1.0
        if self.compute_scale == "published":
            if profile.published_scale is None:
                raise ForetraceError(f"the profile {profile.name} has no published_scale; use full or a number.")
            return profile.published_scale
        if isinstance(self.compute_scale, str) or not 0 < self.compute_scale < inf:
            raise ForetraceError(f"compute_scale={self.compute_scale} must be full, published or a number above 0.")
        return float(self.compute_scale)

    def _parse_unknown(self) -> str | None:
        kind, _, seed = self.unknown.partition(":")
        if self.unknown == "refuse":
            return None
        if kind != "uniform" or not seed.strip().isdecimal():
            raise ForetraceError(f"unknown={self.unknown} must be refuse or uniform:SEED, e.g. uniform:0.")
        return str(int(seed))

    def _profile_of(self, model: str, job: str) -> int:
        """Return the position of a job's profile, −1 where it has none."""
        at = self._names.get(plain(model), -1)
        if at < 0 and self._seed is not None:
            drawn = blake2b(f"{self._seed}\n{job}".encode(), digest_size=8).digest()
            return int.from_bytes(drawn, "little") % len(self.profiles)
        return at

    def _which(self, workload: Workload) -> Int64:
        """Return (n,) position of every job's profile; −1 for jobs that never have more than one GPU and no profile."""
        pairs = zip(workload.model.tolist(), workload.job.tolist(), strict=True)
        which = np.array([self._profile_of(str(model), str(job)) for model, job in pairs], np.int64)
        without = (which < 0) & (np.maximum(workload.gpus, workload.max_gpus) > 1)
        if without.any():
            raise self._refusal(workload, int(np.flatnonzero(without)[0]))
        return which

    def _refusal(self, workload: Workload, job: int) -> ForetraceError:
        known = ", ".join(each.name for each in self.profiles)
        return ForetraceError(
            f"job {workload.job[job]!r} is of the model {workload.model[job]!r}, which has no profile (there are "
            f"{known}); add one, or assign profiles at random with unknown=uniform:SEED."
        )


def speed_table(speeds: Speeds, models: Sequence[str], *, gpus: int, levels: Sequence[str]) -> tuple[SpeedRow, ...]:
    """Return the speed of each model on `gpus` GPUs at every level: all in one unit of it, no two in one unit of the
    level below.

    levels: names, innermost first. The jobs of a fleet may lie on several levels at once and are then slower still.
    """
    if gpus < 2:
        raise ForetraceError("one GPU communicates with none; ask for the speed of 2 GPUs or more.")
    jobs = Workload.of(
        submit_s=[0.0] * len(models), gpus=[gpus] * len(models), work_s=[1.0] * len(models), model=models
    )
    found = list[SpeedRow]()
    for job, model in enumerate(models):
        for level, name in enumerate(levels):
            shape = Shape(gpus, tuple(gpus if i < level else 1 for i in range(len(levels))))
            speed = speeds.speed(jobs, job, shape)
            found.append(
                SpeedRow(model=model, level=name, gpus=gpus, progress=speed.progress, communication=speed.communication)
            )
    return tuple(found)


def as_text(rows: Sequence[SpeedRow]) -> str:
    """Return the table, one line per model and one column per level."""
    levels = list(dict.fromkeys(row.level for row in rows))
    at = {(row.model, row.level): row.progress for row in rows}
    width = max(len("model"), *(len(row.model) for row in rows))
    lines = [f"{'model':{width}}  " + "  ".join(f"{level:>9}" for level in levels)]
    for model in dict.fromkeys(row.model for row in rows):
        lines.append(f"{model:{width}}  " + "  ".join(f"{at[model, level]:>9.4g}" for level in levels))
    return "\n".join(lines)


def cluster_gbit_s(cluster: ClusterTree) -> tuple[float, ...]:
    """Return the bandwidth of every level of a cluster. Raises ForetraceError where it does not give one."""
    rates = cluster.gbit_s or (0.0,) * len(cluster.levels)
    missing = [level for level, rate in zip(cluster.levels, rates, strict=True) if not rate > 0]
    if missing:
        raise ForetraceError(
            f"cluster {cluster.name!r} gives no bandwidth for {', '.join(missing)}; add gbit_s to its file, or state "
            "the bandwidth of every level, as in `speeds=` 'closed-form gb-s=300,50,25'."
        )
    return rates
