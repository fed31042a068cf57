"""`record`: a few steps of a training loop, profiled, with everything a prediction needs stored beside them.

    with foretrace.record("run/") as r:
        for batch in loader:
            ...
            r.step()

The folder then holds `rank0.json.gz` (one file per rank): the profiler's own JSON plus one key, "foretrace".

Steps are counted from 0 and walk through these phases (the profiler's schedule words keep their meaning):

    skip       `skip_first` steps: first allocations, first compilations
    untouched  `wait` steps as they are before anything was profiled (only if `rehearse`)
    rehearse   as many steps as warmup, active and closing: profiled and thrown away, so that the page faults
               of the profiler's first event buffers are not in the recording (only if `rehearse`)
    observe    1 step: hooks on gradients and modules; neither profiled nor counted as a neighbour
    before     `wait` steps: unprofiled, timed
    warmup     `warmup` steps: profiler prepared, nothing kept
    active     `active` steps: recorded
    closing    1 more recorded step, only where steps end inside an optimizer hook, which the stop cuts
    after      `wait` steps: unprofiled, timed

The file is written after the last phase, or when the `with` block ends early and at least one whole step was
recorded. `before` and `after` are the unprofiled neighbours: active steps compared with them give the cost
of recording. Times of a step exclude the recorder's own work between two steps. A profiler changes how a
process holds memory (glibc keeps more of it after large buffers were freed), so neighbours can be faster than
`untouched` steps; `page_faults` tells.

Keys of the "foretrace" object (times in ns; a fact that could not be had is named in `missing`):

    format           1
    started_by       "with" or "command"
    script           file name of the script
    complete         whether all phases ran
    python, torch, cuda, hip, device {type, name, count, ...}, threads {intra_op, inter_op}, cpu_capability,
    libraries, numerics, allocator
    machine          {system, architecture, libc, cpu, instruction_sets, cores, affinity, cpu_quota, usable_cores,
                     memory_bytes, ...}: see `foretrace.hardware.processor`
    environment      variables of OpenMP, BLAS, malloc, CUDA and NCCL that change speed
    load             {start, end}: load averages over 1, 5, 15 minutes
    rank, world_size, backend
    options          {wait, warmup, active, skip_first, rehearse, shapes, memory, modules, samples, sync_events}
    steps            [{step, phase, wall_ns, cpu_ns, page_faults, preemptions, device_ns?, batches?,
                     loader_wall_ns?, loader_cpu_ns?, loader_queued_ns?}]: every step since the start; `step` is
                     the number in "ProfilerStep#<step>"; cpu_ns is of the whole process; device_ns between CUDA events
    whole_steps      numbers of the recorded steps that nothing cut
    overhead         {unprofiled: {wall_ns, cpu_ns, page_faults, preemptions, device_ns?}, profiled: {...},
                     untouched: {...}}: medians over neighbours, whole recorded steps, untouched steps
    optimizers       [{class, module, settings, groups, tensors {dtype: {count, elements}}, with_gradient,
                     steps, marks_steps, state_bytes?}]
    modules          [{root, name, class, parameters (own, not of children)}]; name as in `named_modules()`
    module_calls     indices into `modules`, in call order, of one step
    parameters       [{root, name, shape, dtype, numel, device, trained, optimizer, group}]
    buffer_bytes     of the modules' buffers (running statistics and the like)
    peaks            what the machine reached in a short probe, see `foretrace.hardware.probe`; `profile` stores it
    gradient_order   [[index into `parameters`, ns since the step began]] as gradients were accumulated
    ddp              bucket sizes and settings of DistributedDataParallel wrappers
    loaders          [{dataset, num_workers, batch_size, prefetch_factor, persistent_workers, pin_memory,
                     start_method, read_by_step_thread, batches, workers? {processes, batches, cpu_ns,
                     queued_ns}}]; workers' clocks are of their main threads, over about that many batches
    clock            "cpu" or "wall": the clock that its steps are to be compared on, where a verification made it
    memory           {peak_rss_bytes, peak_allocated_bytes?, peak_reserved_bytes?}
    missing          [{what, why}]
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from foretrace.errors import ForetraceError, MissingExtraError, TraceError
from foretrace.trace.observe import machine, pytorch
from foretrace.trace.observe.loaders import LoaderWatch
from foretrace.trace.observe.model import ModelWatch
from foretrace.trace.recording_file import write_recording

FORMAT = 1
_MEASURED = (*machine.Stamp._fields, "device_ns")


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """How many steps each phase lasts and what the profiler keeps."""

    wait: int = 5
    warmup: int = 1
    active: int = 8
    skip_first: int = 2
    rehearse: bool = True
    shapes: bool = True
    memory: bool = True
    modules: bool = True
    samples: int = 0  # per step, where no data loader tells; 0 if unknown

    def __post_init__(self) -> None:
        for name, least in (("wait", 0), ("warmup", 0), ("active", 1), ("skip_first", 0), ("samples", 0)):
            value = getattr(self, name)
            if value < least:
                raise ForetraceError(f"{name}={value} is too small for a recording; give at least {least}")

    def phases(self, *, in_hook: bool) -> tuple[str, ...]:
        """Return the phase of every step from the first to the last one needed."""
        return (
            *["skip"] * self.skip_first,
            *["untouched"] * (self.wait if self.rehearse else 0),
            *["rehearse"] * (self.warmup + self.active + in_hook if self.rehearse else 0),
            "observe",
            *["before"] * self.wait,
            *["warmup"] * self.warmup,
            *["active"] * self.active,
            *["closing"] * in_hook,
            *["after"] * self.wait,
        )


def record(
    folder: str | os.PathLike[str],
    *,
    wait: int = 5,
    warmup: int = 1,
    active: int = 8,
    skip_first: int = 2,
    rehearse: bool = True,
    shapes: bool = True,
    memory: bool = True,
    modules: bool = True,
    samples: int = 0,
) -> Recorder:
    """Return a context manager that records `active` training steps into `folder`; call `step()` after each of them.

    `wait` unprofiled steps are timed before and after the window, `warmup` steps run with the profiler
    prepared, `skip_first` steps are left alone. `rehearse` runs a throw-away cycle first. `shapes`, `memory`
    and `modules` choose what the profiler stores: input sizes, allocations, and the tree of `nn.Module` calls
    (Python stacks). `samples` is the number of samples per step, where no data loader tells it.

    Raises MissingExtraError without PyTorch, ForetraceError for counts that cannot work, TraceError if the
    file cannot be written or another profiler is running.
    """
    options = RecordOptions(
        wait=wait,
        warmup=warmup,
        active=active,
        skip_first=skip_first,
        rehearse=rehearse,
        shapes=shapes,
        memory=memory,
        modules=modules,
        samples=samples,
    )
    return Recorder(Path(folder), options)


class Recorder:
    """A recording under way. `path` is the file once it is written, `whole_steps` the steps that it holds."""

    def __init__(self, folder: Path, options: RecordOptions, *, in_hook: bool = False) -> None:
        try:
            torch = pytorch()
        except ImportError as error:
            message = 'recording needs PyTorch in the Python that trains: pip install "foretrace[torch]"'
            raise MissingExtraError(message) from error
        if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
            message = f"recording needs PyTorch 2.1 or newer, this is {torch.__version__}; update it"
            raise MissingExtraError(message)
        self.path: Path | None = None
        self.whole_steps: tuple[int, ...] = ()
        self.over = False
        self._folder = folder
        self._options = options
        self._in_hook = in_hook
        self._phases = options.phases(in_hook=in_hook)
        self._steps: list[dict[str, Any]] = []
        self._marks: list[Any] = []
        self._model = ModelWatch()
        self._loaders = LoaderWatch()
        self._profiler: Any = None
        self._hook: Any = None
        self._marker = 0
        self._begin = machine.stamp()
        self._load: dict[str, Any] = {}
        self._sync_events = False
        self.extra: dict[str, Any] = {}  # further keys of the "foretrace" object

    @property
    def steps_seen(self) -> int:
        """Steps that have ended since the start."""
        return len(self._steps)

    @property
    def steps_needed(self) -> int:
        """Steps after which the first recorded one is whole."""
        return self._phases.index("active") + 1

    @property
    def phase(self) -> str:
        """Phase of the step that has begun."""
        return "over" if self.over else self._phases[len(self._steps)]

    @property
    def step_is_long(self) -> bool:
        """Whether the next `step` may start or stop the profiler or write the file."""
        last = len(self._steps) + 1 >= len(self._phases)
        return last or self.phase in ("rehearse", "warmup", "closing")

    @property
    def overhead(self) -> dict[str, dict[str, int]]:
        """Medians of unprofiled neighbours, whole recorded steps and untouched steps, where there are any."""
        groups = {
            "unprofiled": [s for s in self._steps if s["phase"] in ("before", "after")],
            "profiled": [s for s in self._steps if s["phase"] == "active"],
            "untouched": [s for s in self._steps if s["phase"] == "untouched"],
        }
        return {name: _medians(steps) for name, steps in groups.items() if steps}

    def __enter__(self) -> Self:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self.note_optimizer(optimizer))
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        if error is None:
            self.finish()
            if self.path is None:
                warnings.warn(self.too_few(), RuntimeWarning, stacklevel=2)
            return
        try:
            self.finish()
        except Exception as second:  # the script's own error is the one to report
            error.add_note(f"foretrace: nothing was recorded: {second}")

    def start(self) -> None:
        """Begin step 0."""
        self._load["start"] = machine.load()
        self._profiler = self._new_profiler()
        self._loaders.install()
        self._profiler.start()
        self._enter(self._phases[0])
        self._begin_timing()

    def note_optimizer(self, optimizer: Any) -> None:
        """Tell that an optimizer stepped. `with foretrace.record` does it by itself."""
        if not self.over:
            self._model.optimizer_stepped(optimizer)

    def step(self) -> None:
        """Mark the end of a training step.

        Raises TraceError if another profiler runs where this one should begin, or the file cannot be written.
        """
        if self.over:
            return
        self._end_timing()
        number = len(self._steps)
        before = self._phases[number - 1]
        after = self._phases[number] if number < len(self._phases) else "over"
        if before == "observe":
            self._model.end_step()
        if after in ("rehearse", "warmup", "active") and before not in ("rehearse", "warmup", "active"):
            self._refuse_second_profiler()
        self._profiler.step()
        if before == "rehearse" and after != "rehearse":
            self._profiler.profiler = None  # frees its buffers for the recording to use again
        if after == "over":
            self.finish()
        else:
            self._enter(after)
            self._begin_timing()

    def finish(self) -> None:
        """Stop, and write the file if at least one whole step was recorded. Safe to call again."""
        if self.over:
            return
        self._stop()
        self.whole_steps = tuple(s["step"] for s in self._steps if s["phase"] == "active")
        if self.whole_steps:
            self._load["end"] = machine.load()
            world = machine.distributed()
            path = self._folder / f"rank{world['rank']}.json.gz"
            write_recording(self._profiler.export_chrome_trace, path, self._metadata(world))
            self.path = path
        self._profiler = None
        self._marks.clear()

    def abandon(self) -> None:
        """Stop and write nothing."""
        if not self.over:
            self._stop()
            self._profiler = None

    def _stop(self) -> None:
        self.over = True
        self._model.end_step()
        self._loaders.remove()
        self._profiler.stop()

    def too_few(self) -> str:
        """Return one sentence that says why nothing was recorded."""
        first = int(self._in_hook)  # the optimizer step that started the recording
        counts = {"start": first} if first else {}
        for phase in self._phases[: self.steps_needed]:
            counts[phase] = counts.get(phase, 0) + 1
        parts = " + ".join(f"{n} {phase}" for phase, n in counts.items())
        return (
            f"nothing was recorded: the script made {self.steps_seen + first} steps and the first recorded "
            f"one is step {self.steps_needed + first} ({parts}); run longer, lower skip-first, wait or the "
            "number of steps, or do without the rehearsal"
        )

    def _new_profiler(self) -> Any:
        torch = pytorch()
        profiler = torch.profiler
        activities = [profiler.ProfilerActivity.CPU]
        config = None
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
            config, self._sync_events = _sync_event_config()
        return profiler.profile(
            activities=activities,
            schedule=self._schedule(),
            record_shapes=self._options.shapes,
            profile_memory=self._options.memory,
            with_stack=self._options.modules,
            experimental_config=config,
        )

    def _schedule(self) -> Callable[[int], Any]:
        """Return the profiler's action in every step."""
        action = pytorch().profiler.ProfilerAction
        phases = list(self._phases)
        if self._options.rehearse:
            first, length = phases.index("rehearse"), phases.count("rehearse")
            real = phases.index("observe") + 1 + self._options.wait
            phases[first : first + length] = phases[real : real + length]
        of_phase = {"warmup": action.WARMUP, "active": action.RECORD, "closing": action.RECORD}
        plan = [of_phase.get(phase, action.NONE) for phase in phases]
        for step, following in enumerate([*plan[1:], action.NONE]):
            if plan[step] == action.RECORD and following == action.NONE:
                plan[step] = action.RECORD_AND_SAVE
        return lambda step: plan[step] if step < len(plan) else action.NONE

    def _enter(self, phase: str) -> None:
        if phase == "observe":
            self._model.begin_step()
        if phase not in ("active", "closing"):  # reading files would lengthen a recorded step
            self._loaders.sample_workers()
        self._loaders.take_step()

    def _begin_timing(self) -> None:
        # PyTorch 2.1 calls the second step 0 again, so the number is taken from the profiler's own marker.
        self._marker = int(self._profiler.step_rec_fn.name.rpartition("#")[2])
        self._marks.append(_device_mark())
        self._begin = machine.stamp()

    def _end_timing(self) -> None:
        begin, end = self._begin, machine.stamp()
        self._marks.append(_device_mark())
        step = {"step": self._marker, "phase": self._phases[len(self._steps)]}
        self._steps.append({**step, **_spent(begin, end), **self._loaders.take_step()})

    def _refuse_second_profiler(self) -> None:
        if pytorch().autograd._profiler_enabled():
            raise TraceError("another PyTorch profiler is running in this process; switch it off to record")

    def _metadata(self, world: dict[str, Any]) -> dict[str, Any]:
        torch = pytorch()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for step, begin, end in zip(self._steps, self._marks[::2], self._marks[1::2], strict=False):
            if begin is not None and end is not None:
                step["device_ns"] = round(begin.elapsed_time(end) * 1e6)
        model = self._model.facts()
        for index, optimizer in enumerate(model["optimizers"]):
            optimizer["marks_steps"] = self._in_hook and index == 0
        return {
            "format": FORMAT,
            "started_by": "command" if self._in_hook else "with",
            "script": Path(sys.argv[0]).name if sys.argv else "",
            "complete": len(self._steps) == len(self._phases),
            "python": platform.python_version(),
            **machine.torch_settings(),
            "machine": machine.machine(),
            "environment": machine.environment(),
            "load": self._load,
            **world,
            "options": {**asdict(self._options), "sync_events": self._sync_events},
            "steps": self._steps,
            "whole_steps": list(self.whole_steps),
            "overhead": self.overhead,
            **model,
            "loaders": self._loaders.facts(),
            "memory": {"peak_rss_bytes": machine.peak_rss_bytes(), **machine.device_memory()},
            "missing": self._model.missing,
            **self.extra,
        }


def _medians(steps: list[dict[str, Any]]) -> dict[str, int]:
    return {key: int(median(s[key] for s in steps)) for key in _MEASURED if all(key in s for s in steps)}


def _spent(begin: machine.Stamp, end: machine.Stamp) -> dict[str, int]:
    return {name: b - a for name, a, b in zip(machine.Stamp._fields, begin, end, strict=True)}


def _device_mark() -> Any:
    """Return an event in the current CUDA stream, None without CUDA or while a graph is captured."""
    cuda = pytorch().cuda
    if not cuda.is_initialized() or cuda.is_current_stream_capturing():
        return None
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def _sync_event_config() -> tuple[Any, bool]:
    """Return a profiler configuration that stores which event a stream waited for, and whether this PyTorch can."""
    try:
        return pytorch()._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True), True
    except TypeError:  # before PyTorch 2.2
        return None, False
