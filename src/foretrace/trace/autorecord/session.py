"""`Session`: one training process that is being recorded from inside its optimizer's step hook.

A step is one step of the first optimizer that ever stepped (a GAN has two; gradient accumulation makes one
of several backward passes). Whatever goes wrong here must not change what the script does: the session then
gives up, says so, and the script continues.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.trace.observe import machine
from foretrace.trace.recorder import Recorder, RecordOptions


class Session:
    """Records this process. `config` is what the launcher wrote: out, options, status, stop_after."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._pid = os.getpid()
        self._status = Path(config["status"])
        self._recorder: Recorder | None = None
        self._marker: weakref.ref[Any] | None = None
        self._claim: Path | None = None
        self._over = False
        self._rank = 0

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Call this after every optimizer step. It ends the script with SystemExit if it was asked to."""
        if self._over or os.getpid() != self._pid:  # a fork inherits the hook
            return
        if self._recorder is None and _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
        # Swapping handlers would lengthen every recorded step, so only where an interruption would do harm.
        held = self._recorder is None or self._recorder.step_is_long
        with self._signals_held() if held else contextlib.nullcontext():
            try:
                self._step(optimizer)
            except Exception as error:
                self._give_up(error)
        if self._over:
            self._restore_sigterm()
            if self._config["stop_after"] and self._recorder is not None and self._recorder.path is not None:
                raise SystemExit(0)

    def _step(self, optimizer: Any) -> None:
        if self._recorder is None:
            self._begin(optimizer)
            return
        self._recorder.note_optimizer(optimizer)
        marker = self._marker() if self._marker else None
        if marker is None:  # the first optimizer is gone; the one that follows marks steps now
            self._marker = weakref.ref(optimizer)
        elif marker is not optimizer:
            return
        self._recorder.step()
        if self._recorder.over:
            self._end()
            if self._rank == 0 and not self._config["stop_after"]:
                count = len(self._recorder.whole_steps)
                _say(f"recorded {count} steps in {self._recorder.path}; the script continues")
        elif self._recorder.phase in ("skip", "rehearse", "observe"):  # it would lengthen a step that counts
            self._report("stepping")

    def _begin(self, optimizer: Any) -> None:
        self._rank = machine.distributed()["rank"]
        claim = self._status / f"rank{self._rank}"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:  # another process of the script records as this rank
            self._over = True
            self._report("second")
            return
        self._claim = claim
        self._marker = weakref.ref(optimizer)
        options = RecordOptions(**self._config["options"])
        self._recorder = Recorder(Path(self._config["out"]), options, in_hook=True)
        self._recorder.note_optimizer(optimizer)
        # The interpreter's end is the only moment common to a normal end, an exception, sys.exit and Ctrl-C.
        atexit.register(self._script_ends)
        self._report("stepping")
        self._recorder.start()

    def _script_ends(self) -> None:
        if self._over or self._recorder is None or os.getpid() != self._pid:
            return
        with self._signals_held():
            try:
                self._recorder.finish()
                self._end()
            except Exception as error:
                self._give_up(error)

    def _terminated(self, number: int, _frame: FrameType | None) -> None:
        self._script_ends()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _end(self) -> None:
        assert self._recorder is not None
        self._over = True
        if self._recorder.path is None:
            self._report("too few", sentence=self._recorder.too_few())
            self._release()
        else:
            self._report("recorded")

    def _give_up(self, error: Exception) -> None:
        self._over = True
        reason = str(error) if isinstance(error, ForetraceError) else f"{type(error).__name__}: {error}"
        if self._recorder is not None:
            with contextlib.suppress(Exception):
                self._recorder.abandon()
        self._report("failed", sentence=f"nothing was recorded: {reason}")
        self._release()
        _say(f"gives up recording, the script continues: {reason}")

    def _restore_sigterm(self) -> None:
        if _in_main_thread() and signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.unlink(missing_ok=True)

    def _report(self, state: str, *, sentence: str = "") -> None:
        """Tell the launcher where this process stands; also what it stood at if it is killed."""
        recorder = self._recorder
        told = {
            "state": state,
            "rank": self._rank,
            "steps": recorder.steps_seen + 1 if recorder else 1,
            "sentence": sentence,
        }
        if recorder is not None and recorder.path is not None:
            told |= {
                "file": str(recorder.path),
                "recorded": len(recorder.whole_steps),
                "overhead": recorder.overhead,
            }
        with contextlib.suppress(OSError):  # the launcher may be gone
            new = self._status / f"{self._pid}.new"
            new.write_text(json.dumps(told))
            new.replace(self._status / f"{self._pid}.json")

    @contextlib.contextmanager
    def _signals_held(self) -> Iterator[None]:
        """Hold Ctrl-C and SIGTERM until the block is done, so that no file is left half written."""
        if not _in_main_thread():
            yield
            return
        came: list[int] = []
        held = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not None]
        usual = {n: signal.getsignal(n) for n in held}
        for number in held:
            signal.signal(number, lambda n, _frame: came.append(n))
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)
            for arrived in came:
                signal.raise_signal(arrived)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _say(sentence: str) -> None:
    print(f"foretrace: {sentence}", file=sys.stderr, flush=True)
