"""`Workload`: jobs as columns, whatever log or generator they come from."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Object = npt.NDArray[np.object_]
Key = TypeVar("Key", bound=Hashable)
SECOND = 1_000_000_000
TEXTS = ("model", "tenant", "user", "gpu_type")  # columns that are "" where nothing is known, and what others are then
NUMBERS = {"estimate_s": np.nan, "priority": 0.0, "share": 1.0, "iterations": np.nan, "batch": np.nan}
LONGEST_S, FARTHEST_S = 1e9, 9e9  # a run of 31 years, a time 285 years off; int64 nanoseconds reach 292


@dataclass(frozen=True, slots=True)
class Refused:
    """One row of an input that is not a job: where it stands and what is wrong with it."""

    where: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a workload was read from, and what of it was refused. `rows` counts all rows, the refused ones too."""

    path: str = ""
    format: str = ""
    rows: int = 0
    refused: tuple[Refused, ...] = ()
    notes: tuple[str, ...] = ()  # what the reader took differently from what is written, one sentence each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """n jobs in order of submission; ties keep the order of the source.

    job: (n,) text, what the source calls the job; no two are alike.
    submit_ns: (n,) int64, submission after `epoch_s`; the first is 0 unless the source counts from its own zero.
    gpus: (n,) int64 ≥ 1, devices the job requests, all or nothing.
    work_s: (n,) float64 > 0, seconds the job runs on `gpus` devices of the reference kind, consolidated, undisturbed;
    nan where the source says how much is to be done but not how long it takes (`details` then says how much).
    model: (n,) text, what speed tables know the job by ("" unknown); tenant: virtual cluster, partition or queue;
    user; gpu_type: the only kind of device it may use, several joined by "|" ("" any).
    min_gpus, max_gpus: (n,) int64, the range of an elastic job; equal to `gpus` for a rigid one.
    estimate_s: (n,) float64, run time as the user states it, nan where unknown (time limits of a log).
    priority: (n,) float64, larger is more important; share: (n,) float64 in (0, 1], part of one device it needs.
    iterations: (n,) float64, steps of training, nan where unknown; batch: (n,) float64, samples per step, nan unknown.
    logged_start_ns, logged_end_ns: (n,) int64 on the clock of `submit_ns`, −1 unknown: what really happened.
    details: more columns of the source by name, each (n,), that particular policies know how to use.
    """

    name: str
    job: Object
    submit_ns: Int64
    gpus: Int64
    work_s: Float64
    model: Object
    tenant: Object
    user: Object
    gpu_type: Object
    min_gpus: Int64
    max_gpus: Int64
    estimate_s: Float64
    priority: Float64
    share: Float64
    iterations: Float64
    batch: Float64
    logged_start_ns: Int64
    logged_end_ns: Int64
    details: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    epoch_s: float = 0.0  # Unix time of submit_ns = 0; 0 where the source has no dates
    origin: Origin = field(default_factory=Origin)

    def __len__(self) -> int:
        return len(self.submit_ns)

    @classmethod
    def of(
        cls,
        *,
        submit_s: Iterable[float],
        gpus: Iterable[int],
        work_s: Iterable[float],
        job: Sequence[str] | None = None,
        name: str = "",
        origin: Origin | None = None,
        epoch_s: float = 0.0,
        details: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> Workload:
        """Make it from seconds and whatever columns are known; sorted by submission, unknown columns filled in.

        `logged_start_s` and `logged_end_s` may be given in seconds (nan unknown). Raises ForetraceError where a job
        requests no device, has no work, or two are called the same.
        """
        submit = np.asarray(list(submit_s) if not isinstance(submit_s, np.ndarray) else submit_s, np.float64)
        n = len(submit)
        wanted = np.asarray(list(gpus) if not isinstance(gpus, np.ndarray) else gpus, np.int64)
        work = np.asarray(list(work_s) if not isinstance(work_s, np.ndarray) else work_s, np.float64)
        names = np.array([str(i) for i in range(n)] if job is None else [str(each) for each in job], object)
        if not len(wanted) == len(work) == len(names) == n:
            raise ValueError("columns of a workload must be equally long")
        submit_ns = nanoseconds(submit)
        order = np.argsort(submit_ns, kind="stable")

        def column(key: str, default: Any, kind: Any) -> npt.NDArray[Any]:
            values = columns.pop(key, None)
            if values is None:
                values = np.full(n, default, kind)
            elif kind is object:
                values = np.array([str(each) for each in np.asarray(values)], object)
            return np.asarray(values).astype(kind)[order]

        known: dict[str, Any] = {key: column(key, "", object) for key in TEXTS}
        known |= {key: column(key, default, np.float64) for key, default in NUMBERS.items()}
        known |= {key: column(key, wanted, np.int64) for key in ("min_gpus", "max_gpus")}
        for key in ("logged_start", "logged_end"):
            stamps = np.asarray(columns.pop(f"{key}_s", np.full(n, np.nan)), np.float64)
            known[f"{key}_ns"] = np.where(np.isnan(stamps), -1, nanoseconds(np.nan_to_num(stamps)))[order]
        if columns:
            raise TypeError(f"a workload has no column {sorted(columns)[0]!r}; put it into details")
        made = cls(
            name=name,
            job=names[order],
            submit_ns=submit_ns[order],
            gpus=wanted[order],
            work_s=work[order],
            **known,
            details={key: np.asarray(value)[order] for key, value in (details or {}).items()},
            epoch_s=epoch_s,
            origin=origin or Origin(),
        )
        made.validate()
        return made

    def validate(self) -> None:
        """Raise ForetraceError naming the first job that cannot be."""
        where = self.origin.path or self.name or "workload"

        def refuse(bad: npt.NDArray[np.bool_], what: str) -> None:
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                raise ForetraceError(f"{where}: job {self.job[at]!r} {what}; correct that row or read with `salvage=`.")

        refuse(self.gpus < 1, "requests no GPU")
        refuse(~(np.isnan(self.work_s) | (np.isfinite(self.work_s) & (self.work_s > 0))), "has no run time above zero")
        refuse(self.work_s > LONGEST_S, f"runs for more than {LONGEST_S:.0e} s, which cannot be meant")
        refuse((self.min_gpus < 1) | (self.min_gpus > self.max_gpus), "has an empty range of GPUs")
        refuse(~((self.share > 0) & (self.share <= 1)), "needs a share of a GPU outside (0, 1]")
        if len(set(self.job.tolist())) < len(self):
            names, counts = np.unique(self.job.astype(str), return_counts=True)
            twice = str(names[counts > 1][0])
            raise ForetraceError(f"{where}: two jobs are called {twice!r}; give each job a name of its own.")

    def take(self, which: npt.NDArray[Any], *, name: str | None = None) -> Workload:
        """Return the jobs at these positions, or where a mask holds; they keep their times."""
        at = np.flatnonzero(which) if which.dtype == bool else np.sort(np.asarray(which, np.int64))
        columns = {key: getattr(self, key)[at] for key in _COLUMNS}
        details = {key: value[at] for key, value in self.details.items()}
        return replace(self, **columns, details=details, name=self.name if name is None else name)

    def with_columns(self, **columns: npt.NDArray[Any]) -> Workload:
        """Return a copy with columns replaced; jobs are put in order again if submissions changed."""
        made = replace(self, **columns)  # type: ignore[arg-type]  # columns by name
        order = np.argsort(made.submit_ns, kind="stable")
        if (order == np.arange(len(made))).all():
            return made
        moved = {key: getattr(made, key)[order] for key in _COLUMNS}
        return replace(made, **moved, details={key: value[order] for key, value in made.details.items()})

    def position(self, job: str) -> int:
        """Return where the job of this name stands; raises ForetraceError where there is none."""
        found = np.flatnonzero(self.job == job)
        if not len(found):
            some = ", ".join(map(str, self.job[:3]))
            raise ForetraceError(f"there is no job {job!r} among the {len(self):,} jobs; they are called {some}, ...")
        return int(found[0])

    @property
    def gpu_seconds(self) -> Float64:
        """(n,) devices × seconds each job needs at reference speed."""
        return self.gpus * self.work_s


_COLUMNS = (
    "job", "submit_ns", "gpus", "work_s", *TEXTS, "min_gpus", "max_gpus", *NUMBERS, "logged_start_ns", "logged_end_ns",
)  # fmt: skip


def nanoseconds(seconds: npt.ArrayLike) -> Int64:
    """Return seconds as whole nanoseconds, rounded half to even. Raises ForetraceError beyond what int64 holds."""
    given = np.asarray(seconds, np.float64)
    far = np.abs(given) > FARTHEST_S
    if far.any():
        raise ForetraceError(f"{given[far].flat[0]:g} s is more than the 285 years that can be played; give less.")
    whole: Int64 = np.rint(given * SECOND).astype(np.int64)
    return whole


def plain(name: str) -> str:
    """Return letters and digits of the name of a model, in lower case."""
    return "".join(each for each in name.casefold() if each.isalnum())


def codes(keys: Iterable[Key]) -> tuple[Int64, list[Key]]:
    """Return equal keys as equal small whole numbers, in order of their first appearance, and the keys."""
    seen: dict[Key, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], np.int64), list(seen)
