"""What the compiled engine knows at one moment, in arrays that its loops reach through one table of addresses.

`EngineState` holds the arrays; its `addresses` lists address and extents of each. Inside the loops `read(table)` is
the same state again: `st.jobs[j]` is a record whose fields are read and written in place. One pointer is passed from
loop to loop; arrays passed by value would be some 200 numbers per call, and most of the time to compile.
"""

# numba types neither its extensions nor what they are handed.
# mypy: disable-error-code="no-untyped-call,misc,no-any-return,import-untyped,override,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import from_dtype

NEVER = np.int64(2**62)
# what `run` returns
FINISHED, STOPPED, NEED_SPEED, NEED_ROOM = 0, 1, 2, 3
# status of a job
FUTURE, WAITING, RUNNING, DONE = 0, 1, 2, 3
# order rules
BY_KEY, BY_REMAINING, BY_SERVICE, BY_QUEUE, BY_NETWORK, BY_LAST, BY_FAIRNESS = 0, 1, 2, 3, 4, 5, 6
# admission rules
BLOCK, SKIP, BACKFILL = 0, 1, 2
# preemption rules
KEEP, LEASE, ALWAYS = 0, 1, 2
# causes of waiting, as result.Cause
(C_UNDECIDED, C_BEHIND, C_FULL, C_SCATTERED, C_TIMER, C_QUOTA, C_TYPE, C_RESERVED, C_OUTRANKED) = range(9)
CAUSES = 10
# what happened, in the log of decisions
L_START, L_WAIT, L_PREEMPT, L_MIGRATE, L_FINISH, L_FAIL = 0, 1, 2, 3, 4, 5
UNWATCHED = -2  # no decision is written down


def _record(integers: str, floats: str = "") -> np.dtype[Any]:
    fields = [(name, np.int64) for name in integers.split()] + [(name, np.float64) for name in floats.split()]
    return np.dtype(fields, align=True)


# Where the simulation stands, its rules, and how far each log is filled.
NUMBERS = _record(
    "now next heap head tail pending free segments devices log events next_failure order admit preempt lease machine "
    "auto history samples timers migrate track keep checkpoint share filled fresh first_cost limit wanted at kept "
    "blocked shadow spare reserved stale resume final"
)
# What a job is (asked for) and how it stands. Times in ns; `work`, `remaining` ns at speed 1; `gpu_ns` is service had.
# demand: class of (GPUs, kinds allowed); size: class of GPUs alone, for the tuner; eager: no delay timer holds it;
# fresh: when this stretch began to make progress, what a failure can lose; reclaims: it released its GPUs in this
# decision and gets them back for nothing if they stay free; band: queue of a discretised order; head: the first of its
# GPUs.
# What a look at a waiting job needs is first, side by side in memory.
JOB = _record(
    "gpus demand cause cause_since last when pos eager size tenant level reclaims status submit kind restart mark "
    "ready fresh first ended held dead starts preempted failed lease_end finish_at band head stretch stretch_dead",
    "work remaining estimate key talk gpu_ns rate talking k1 k2",
)
DEVICE = _record("owner nxt reclaimer kind unit")  # nxt: the next GPU of its job; unit: the innermost one
UNIT = _record("lo hi parent child count touched")  # GPUs lo ... hi - 1, units child ... child of the next - 1
LEVEL = _record("at wait", "floor cap")  # first unit; wait before spreading (ns); tuner's floor and cap in leases
# A class of jobs: its GPUs, how many wait, why none fits in this decision (-1: one may), how wide one was tried, and
# the widest level at which one did not fit in this decision.
DEMAND = _record("gpus waiting unfit widest memo")
TENANT = _record("quota used")
# Samples by (size, level) in a linked list; `patience` is what they say at the moment `asked`.
WINDOW = _record("head tail n said asked patience", "sum sq")
SAMPLE = _record("at next", "leases")
RATE = _record("filled", "progress communication")  # speeds, open addressing beside `rows`
FAILURE = _record("at unit up")
INDEX = _record("", "service value")
SEGMENT = _record("job start end gpus level dead device")  # device: where its GPUs begin in `devices`
EVENT = _record("time job what a b last")  # last: when the job last gained or lost GPUs
TIMER = _record("time gpus level wait")


class EngineState(NamedTuple):
    """Everything that is known at one moment. n jobs, G GPUs, U units, L levels, T kinds of GPU."""

    s: Any  # (1,) NUMBERS
    jobs: Any  # (n,) JOB
    waited: Any  # (n, CAUSES) ns
    heap: Any  # (n,) jobs by their next event
    queue: Any  # (n,) the waiting line, between s.head and s.tail
    order: Any  # (n,) scratch
    merged: Any  # (n,) scratch of `sort`
    newly: Any  # (2 n,) who came to wait since the last decision
    devs: Any  # (G,) DEVICE
    units: Any  # (U + 1,) UNIT, innermost level first
    free: Any  # (T, U)
    levels: Any  # (L + 1,) LEVEL
    capacity: Any  # (demands, L) largest unit of a level for such a job
    allowed: Any  # (demands, T) 0 or 1
    demands: Any  # (demands,) DEMAND
    thresholds: Any  # bands of service, GPU-ns
    index: Any  # INDEX
    tenants: Any  # TENANT
    windows: Any  # (sizes * L,) WINDOW
    samples: Any  # SAMPLE
    timer_log: Any  # TIMER
    rows: Any  # (slots, 4 + L) kind of job, GPUs, even, kind of GPU, units per level
    table: Any  # (slots,) RATE
    ask: Any  # (6 + L,) such a row, the job, the slot
    fails: Any  # FAILURE by time
    seg: Any  # SEGMENT
    devices: Any  # GPUs of the stretches one after the other
    log: Any  # EVENT

    def addresses(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Return (arrays, 3) address and extents of each, for `read`; valid as long as this state lives."""
        made = np.zeros((len(self), 3), np.int64)
        for row, name, array in zip(made, self._fields, self, strict=True):
            wanted, dimensions = _FIELDS[name]
            if array.dtype != wanted or array.ndim != dimensions or not array.flags.c_contiguous:
                raise TypeError(f"{name} must be a contiguous array of {wanted} with {dimensions} dimensions")
            row[0], row[1 : 1 + dimensions] = array.ctypes.data, array.shape
        return made


_FIELDS: dict[str, tuple[Any, int]] = dict.fromkeys(EngineState._fields, (np.dtype(np.int64), 1))
_FIELDS |= dict.fromkeys(("waited", "free", "capacity", "allowed", "rows"), (np.dtype(np.int64), 2))
_FIELDS |= {
    "s": (NUMBERS, 1), "jobs": (JOB, 1), "devs": (DEVICE, 1), "units": (UNIT, 1), "levels": (LEVEL, 1),
    "demands": (DEMAND, 1), "thresholds": (np.dtype(np.float64), 1), "index": (INDEX, 1), "tenants": (TENANT, 1),
    "windows": (WINDOW, 1), "samples": (SAMPLE, 1), "timer_log": (TIMER, 1), "table": (RATE, 1), "fails": (FAILURE, 1),
    "seg": (SEGMENT, 1), "log": (EVENT, 1),
}  # fmt: skip


class _StateType(types.Type):
    """A pointer to the table of addresses, as numba types it."""

    def __init__(self) -> None:
        super().__init__(name="foretrace.fleet.State")


_STATE = _StateType()
_TYPES = {name: types.Array(from_dtype(dtype), n, "C") for name, (dtype, n) in _FIELDS.items()}
_TYPES["s"] = _TYPES["s"].dtype  # the one record itself


@register_model(_StateType)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64).as_pointer())


@infer_getattr
class _Attributes(AttributeTemplate):
    key = _StateType

    def generic_resolve(self, _: Any, name: str) -> Any:
        return _TYPES.get(name)


@lower_getattr_generic(_StateType)
def _attribute(context: Any, builder: Any, _: Any, table: Any, name: str) -> Any:
    """Return an array of the table; the table does not change while a loop runs, which the optimiser is told."""

    def entry(at: int) -> Any:
        found = builder.load(
            builder.gep(table, [ir.Constant(ir.IntType(64), 3 * EngineState._fields.index(name) + at)])
        )
        found.set_metadata("invariant.load", builder.module.add_metadata([]))
        return found

    kind = _TYPES[name]
    if isinstance(kind, types.Record):
        return builder.inttoptr(entry(0), context.get_value_type(kind))
    array = context.make_array(kind)(context, builder)
    item = context.get_data_type(kind.dtype)
    size = context.get_constant(types.intp, context.get_abi_sizeof(item))
    shape = [entry(1 + at) for at in range(kind.ndim)]
    strides = [size] if kind.ndim == 1 else [builder.mul(shape[1], size), size]
    populate_array(
        array,
        data=builder.inttoptr(entry(0), item.as_pointer()),
        shape=cgutils.pack_array(builder, shape),
        strides=cgutils.pack_array(builder, strides),
        itemsize=size,
        meminfo=None,
    )
    return array._getvalue()


@intrinsic
def read(_: Any, table: Any) -> Any:
    """Return the state that a table of addresses (`EngineState.addresses`) lists."""

    def made(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return _STATE(table), made
