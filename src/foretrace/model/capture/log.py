"""What a training does, logged call by call as PyTorch dispatches it on tensors without data.

Two things are kept: calls (nodes), and storages with the calls that make them and after which they are free. Storages
are watched by weak references: they die here when they would die in a real run, since autograd, the module's code and
the optimizer are the real ones.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foretrace.cost.calls import describe
from foretrace.cost.operators.operator import CHANNELS_LAST
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.model.capture import known, scratch
from foretrace.model.capture.repeated import RepeatedCalls
from foretrace.model.operator_graph import BEFORE, DTYPE_BYTES, EXPONENTIALS, SOFTMAXES, Node, Role, Storage, Tensor
from foretrace.model.texts import arguments, call_text, dtype_name

_LANES = 16  # numbers of a vector
_INPUT_OF = {"aten::convolution": 0, "aten::convolution_backward": 1}  # which take another time by its layout
_ONTO_ZEROS = frozenset(  # what backward passes of picking rows call, on zeros of their own
    f"aten::{each}" for each in ("index_put", "index_add", "scatter_add", "scatter", "put")
)
_SILENT = frozenset(["prim", "prims", "profiler", "debugprims", "inductor"])  # what is no work of the model

_BY_VALUE = (
    "a value of a tensor decides what comes next (.item(), a branch or a list made of it); rewrite it with torch.where "
    "or fixed sizes, or take the operators from a recording of a real run"
)
_BY_DATA = (
    "the size of its result depends on the data; use a form of fixed size (masks, topk, torch.where), or take the "
    "operators from a recording of a real run"
)
_UNSUPPORTED = (
    "it cannot say which sizes its result has; register a fake implementation (torch.library.register_fake), or take "
    "the operators from a recording of a real run"
)


class Where:
    """In which phase and layer of the model the program is."""

    def __init__(self, model: Any) -> None:
        self.phase = Phase.FORWARD
        self.names = {id(module): name for name, module in model.named_modules()}
        self._weights = {id(weight): name for name, weight in model.named_parameters()}
        self._stack: list[str] = []
        # The number of autograd's next node when the layer changed, and the layer since then.
        self._numbers: list[int] = [-1]
        self._layers: list[str] = [""]

    def enter(self, module: Any) -> None:
        """Note that a module's forward begins."""
        self._stack.append(self.names.get(id(module), self._stack[-1] if self._stack else ""))
        self._moved()

    def leave(self) -> None:
        """Note that a module's forward ends."""
        if self._stack:
            self._stack.pop()
        self._moved()

    def _moved(self) -> None:
        self._numbers.append(int(torch._C._autograd._get_sequence_nr()))
        self._layers.append(self._stack[-1] if self._stack else "")

    def now(self) -> tuple[Phase, str]:
        """Return phase and layer of a call made now."""
        inside = torch._C._current_graph_task_id() != -1
        if self._stack and (inside or self.phase == Phase.FORWARD):
            return (Phase.RECOMPUTE if inside else self.phase), self._stack[-1]
        if not inside:
            return self.phase, ""
        node = torch._C._current_autograd_node()
        return Phase.BACKWARD, self._layer_of(node) if node is not None else ""

    def _layer_of(self, node: Any) -> str:
        """Return the layer whose forward pass made this node of autograd's graph."""
        weight = getattr(node, "variable", None)
        if weight is not None:
            return str(self._weights.get(id(weight), "")).rpartition(".")[0]
        at = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._layers[at]


def _channels_last(given: Sequence[Any], at: int) -> bool:
    """Return whether this one of some tensors holds the channels of a picture's point together."""
    last = at < len(given) and given[at].ndim == 4 and given[at].is_contiguous(memory_format=torch.channels_last)
    return bool(last and not given[at].is_contiguous())


@dataclass(slots=True)
class _Live:
    """A storage that is alive."""

    index: int
    views: dict[Any, int] = field(default_factory=dict)  # (offset, sizes, strides, type) -> latest tensor
    written: int | None = None  # tensor of the last call that wrote in place


@dataclass(slots=True)
class _Row:
    """A storage as it is being learned."""

    nbytes: int
    role: Role
    born: int
    dies: int = -1
    name: str = ""


class Log(TorchDispatchMode):
    """Logs every call made inside it, which runs on meta tensors or on fake ones.

    Of fake ones, `fake` is the `FakeTensorMode`, which is entered before it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return that nothing here is compiled: PyTorch would wrap every call to say so."""
        return False

    def __init__(self, where: Where, *, title: str, host: bool = False, fake: Any = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.host = host  # it is about the operators of a processor
        self.where = where
        self.title = title
        self.active = False
        self.scalars: Callable[[], float | None] = lambda: None  # what `.item()` gives, None: it cannot be known
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self.denormal: dict[int, float] = {}  # by node: see `OperatorGraph`
        self._rows: list[_Row] = []
        self._live: dict[int, _Live] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._calls: dict[Any, tuple[float, float, float]] = {}
        self._repeated = RepeatedCalls(fake)

    # --- what PyTorch calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        space = func.namespace
        if func is torch.ops.prim.device.default:  # half of all calls: somebody looks at a fake tensor's
            fake = getattr(args[0], "fake_mode", None)
            return func(*args) if fake is None or fake.in_kernel_invocation else args[0].fake_device
        if torch.Tag.dynamic_output_shape in func.tags and not scratch.has_sizes(func, args):
            raise self._refused(func, _BY_DATA)
        if func is torch.ops.aten._local_scalar_dense.default:
            value = known.values_of(args[0])
            value = self.scalars() if value is None else value
            if value is None:
                raise self._refused(func, _BY_VALUE)
            return value
        if space == "aten" and _composite(func, self.host):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        try:
            out = scratch.instead(func, args)
            if out is None:
                out = scratch.completed(func, args, self._repeated.call(func, args, kwargs))
        except Exception as error:
            raise self._told(func, error) from error
        if self.fake is not None:  # of meta tensors no values are kept
            known.follow(func, args, kwargs, out)
        if self.active and space not in _SILENT:
            self._note(func, args, kwargs, out)
        return out

    def _told(self, func: Any, error: Exception) -> Exception:
        """Return the error as a sentence, if it is about what cannot be captured."""
        from torch._subclasses import fake_tensor

        if isinstance(error, fake_tensor.DataDependentOutputException):
            return self._refused(func, _BY_VALUE)
        if isinstance(error, fake_tensor.DynamicOutputShapeException):
            return self._refused(func, _BY_DATA)
        if isinstance(error, fake_tensor.UnsupportedOperatorException | NotImplementedError):
            return self._refused(func, _UNSUPPORTED)
        return error

    def _refused(self, func: Any, why: str) -> ForetraceError:
        _, layer = self.where.now()
        place = f"{self.title}, layer {layer}," if layer else self.title
        return ForetraceError(f"{place} cannot be captured: {func._schema.name}: {why}.")

    # --- storages

    def exists(self, tensor: Any, role: Role, name: str = "") -> None:
        """Note a tensor that exists before the step."""
        for each in _parts(tensor):
            live = self._storage(each, born=BEFORE, role=role)
            row = self._rows[live.index]
            row.role, row.name = role, row.name or name
            self._tensor(each, live)

    def mark(self, tensor: Any, role: Role, name: str = "") -> None:
        """Say what the storage of a tensor that is alive is for."""
        for each in _parts(tensor):
            row = self._rows[self._storage(each, born=BEFORE, role=role).index]
            row.role, row.name = role, row.name or name

    def _storage(self, tensor: Any, *, born: int, role: Role) -> _Live:
        storage = tensor.untyped_storage()
        key = storage._cdata
        live = self._live.get(key)
        nbytes = storage.nbytes()
        if live is None:
            index = len(self._rows)
            self._rows.append(_Row(nbytes=nbytes, role=role, born=born))
            live = self._live[key] = _Live(index=index)
            self._watchers[index] = weakref.ref(storage, lambda _: self._freed(key, index))
        elif nbytes > self._rows[live.index].nbytes:
            self._rows[live.index].nbytes = nbytes  # it was resized
        return live

    def _freed(self, key: int, index: int) -> None:
        if self._rows[index].dies < 0:
            self._rows[index].dies = max(len(self.nodes) - 1, 0)
        live = self._live.get(key)
        if live is not None and live.index == index:
            del self._live[key]
        self._watchers.pop(index, None)

    # --- tensors

    def _tensor(self, tensor: Any, live: _Live) -> int:
        index = len(self.tensors)
        dims = tuple(map(int, tensor.shape))
        self.tensors.append(Tensor(dims=dims, dtype=dtype_name(tensor.dtype), storage=live.index))
        live.views[_view(tensor)] = index
        return index

    def _read(self, tensor: Any) -> int:
        """Return the value that a call reads."""
        live = self._storage(tensor, born=BEFORE, role=Role.BUFFER)
        found = live.views.get(_view(tensor))
        if found is None:
            # Another look at memory that was written in place, or at what a kernel of ours has not shown.
            found = live.written if live.written is not None else self._tensor(tensor, live)
        return found

    # --- calls

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        schema = func._schema
        at = len(self.nodes)
        given: list[Any] = []
        written: list[Any] = []
        for i, (name, _, _) in enumerate(arguments(schema)):
            value = args[i] if i < len(args) else kwargs.get(name)
            tensors = list(_tensors(value))
            given += tensors
            alias = schema.arguments[i].alias_info
            if tensors and alias is not None and alias.is_write:
                written += tensors
        inputs = tuple(self._read(each) for tensor in given for each in _parts(tensor))
        outputs = []
        for tensor in written:
            for each in _parts(tensor):
                live = self._storage(each, born=BEFORE, role=Role.BUFFER)
                live.views.clear()
                live.written = self._tensor(each, live)
                outputs.append(live.written)
        made = [each for each in _tensors(out) if not any(each is old for old in written)]
        for tensor in made:
            for each in _parts(tensor):
                outputs.append(self._tensor(each, self._storage(each, born=at, role=Role.TEMPORARY)))
        results = [(tuple(map(int, each.shape)), each.element_size()) for each in (made or written)]
        text = call_text(schema, args, kwargs)
        if self.host and _channels_last(given, _INPUT_OF.get(schema.name, len(given))):
            text = f'{text[:-1]},"{CHANNELS_LAST}"]'
        scratch_bytes = scratch.workspace(func, args) if self.host else 0
        if scratch_bytes:
            self._rows.append(_Row(nbytes=scratch_bytes, role=Role.WORKSPACE, born=at, dies=at))
        if self.host:
            self._look(at, schema.name, given, made)
        phase, layer = self.where.now()
        flops, read, wrote = self._work(schema.name, text, tuple(results))
        self.nodes.append(
            Node(op=schema.name, inputs=inputs, outputs=tuple(outputs), text=text, phase=phase, layer=layer,
                 flops=flops, read_bytes=read, written_bytes=wrote)
        )  # fmt: skip

    def _look(self, at: int, op: str, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Note the share of denormal numbers, where the batch alone says it: see `OperatorGraph`."""
        rows = op in ("aten::mm", "aten::bmm")
        shares = [
            known.vanishing(each) if op in SOFTMAXES else known.denormal(each, _LANES if rows and i else 1)
            for i, each in enumerate(made if op in EXPONENTIALS else given)
        ]
        if found := [share for share in shares if share is not None]:
            self.denormal[at] = max(found)

    def _work(self, op: str, text: str, outputs: tuple[tuple[tuple[int, ...], int], ...]) -> tuple[float, float, float]:
        key = (op, text, outputs)
        if key not in self._calls:
            call = describe(op, text, [dims for dims, _ in outputs], [size for _, size in outputs])
            self._calls[key] = call.flops, call.read_bytes, call.written_bytes
        return self._calls[key]

    # --- the end

    def result(self) -> tuple[tuple[Node, ...], tuple[Tensor, ...], tuple[Storage, ...]]:
        """Return nodes, tensors and storages; roles follow from when storages lived."""
        for row in self._rows:
            row.dies = len(self.nodes) if row.dies < 0 else row.dies
        moved = self._summed_in_place()
        phases = [node.phase for node in self.nodes]
        place: dict[int, int] = {}
        storages: list[Storage] = []
        for at, row in enumerate(self._rows):
            if at not in moved:
                place[at] = len(storages)
                role = _role(row, phases) if row.role == Role.TEMPORARY else row.role
                storages.append(Storage(nbytes=row.nbytes, role=role, born=row.born, dies=row.dies, name=row.name))
        tensors = (replace(each, storage=place[moved.get(each.storage, each.storage)]) for each in self.tensors)
        return tuple(self.nodes), tuple(tensors), tuple(storages)

    def _summed_in_place(self) -> dict[int, int]:
        """Return sums of gradients as autograd makes them: on the memory of one that nobody else needs.

        On fake tensors it makes them out of place (`can_accumulate_inplace` of torch/csrc/autograd/input_buffer.cpp,
        `index_backward` and `gather_backward` of FunctionsManual.cpp and TensorAdvancedIndexing.cpp). Gives the
        storages that are other ones in truth.
        """
        moved: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            onto = 2 if node.op == "aten::add" and len(node.inputs) == 2 else 1 if node.op in _ONTO_ZEROS else 0
            if not onto or node.phase != Phase.BACKWARD:
                continue
            out, *given = (self.tensors[at] for at in (*node.outputs, *node.inputs[:onto]))
            if any(each.dims != out.dims or each.dtype != out.dtype for each in given):
                continue
            made = self._rows[out.storage]
            for each in given:
                at = moved.get(each.storage, each.storage)
                row = self._rows[at]
                if row.dies == i and row.born >= 0 and row.nbytes == made.nbytes and out.storage != at:
                    row.dies, row.name = made.dies, made.name
                    row.role = made.role if made.role != Role.TEMPORARY else row.role
                    moved[out.storage] = at
                    self.nodes[i] = self._in_place(node, out)
                    break
        return moved

    def _in_place(self, node: Node, out: Tensor) -> Node:
        if node.op == "aten::add":
            return replace(node, op="aten::add_")
        flops, read, wrote = self._work(f"{node.op}_", node.text, ((out.dims, DTYPE_BYTES.get(out.dtype, 4)),))
        return replace(node, op=f"{node.op}_", flops=flops, read_bytes=read, written_bytes=wrote)


def _role(row: _Row, phases: Sequence[Phase]) -> Role:
    """Return what a storage is for that nobody has named."""
    born = phases[row.born] if 0 <= row.born < len(phases) else Phase.NONE
    if born not in (Phase.FORWARD, Phase.RECOMPUTE) or row.dies <= row.born:
        return Role.TEMPORARY
    last = phases[min(row.dies, len(phases) - 1)]
    return Role.ACTIVATION if last == Phase.BACKWARD else Role.TEMPORARY


@cache
def _composite(func: Any, host: bool) -> bool:
    """Return whether an operator is made of others, on a processor (`host`) or elsewhere."""
    if not func._can_decompose() or not _has_kernel(func, "CompositeImplicitAutograd"):
        return False
    return not (host and _has_kernel(func, "CPU"))


def _has_kernel(func: Any, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _view(tensor: Any) -> Any:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _parts(tensor: Any) -> Iterator[Any]:
    """Yield the dense tensors that a tensor is made of: itself, or indices and values of a sparse one."""
    if tensor.layout == torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    else:
        yield tensor


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
