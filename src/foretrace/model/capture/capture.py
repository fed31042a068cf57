"""`capture`: the OperatorGraph of a training step, without running it.

    graph = capture(job("resnet50", "full"))
    graph = capture(training, batch=32, precision="bf16")

The step is run twice on fake tensors, which have sizes but no data: the first step makes what is made lazily (the
optimizer's state), the second is logged call by call. So nothing is computed and no memory is needed, whatever the
size of the model.

`like` says whose operators are wanted. "gpu": where PyTorch calls one fused operator on a GPU and several on a
processor (attention, dropout, recurrent layers, updates of many parameters at once), the GPU's. "cpu": those of this
machine's processor.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.model.capture.sizes import Fake, Meta, Sizes
from foretrace.model.operator_graph import Node, OperatorGraph, Role
from foretrace.names import plain, question, resolve
from foretrace.training.batches import mapped, resized, size
from foretrace.training.training import Training

if TYPE_CHECKING:
    from foretrace.model.capture.log import Log, Where

Like = Literal["gpu", "cpu"]
ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "full": "fp32",
           "single": "fp32", "amp-bf16": "bf16", "amp-fp16": "fp16", "pure-bf16": "bf16-weights"}  # fmt: skip
_SAID = {
    **dict.fromkeys(
        ("amp", "mixed", "mixedprecision", "autocast"), "is fp16 or bf16 with autocast; choose one of them."
    ),
    "tf32": "is what convolutions of fp32 run in where the device can, by PyTorch's defaults, and products do not; "
    "choose fp32.",
}
_FEW = 100_000  # young objects, among which a search takes some milliseconds
AUTOCAST = ("bf16", "fp16")
# What a model's code and PyTorch raise where types, sizes or values do not fit.
_OF_A_MODEL = (RuntimeError, TypeError, ValueError)
PRECISIONS = ("fp32", *AUTOCAST, "bf16-weights", "fp16-weights", "bf16-master", "fp16-master")


def capture(
    source: Training | Callable[[], Training],
    *,
    batch: int | None = None,
    like: Like = "gpu",
    precision: str = "fp32",
    update: str = "",
    attention: str = "",
) -> OperatorGraph:
    """Return the second step of a training: forward, backward and update.

    `source` is a Training, or a function that makes one (see `foretrace.zoo.registry.job`), which is then called on
    fake tensors, so that a model larger than this machine's memory can be captured. `batch` is the number of samples of
    a step. `precision` "bf16" and "fp16" put autocast around the forward pass, "bf16-weights" and "fp16-weights" cast
    model and batch, "bf16-master" and "fp16-master" likewise (what is updated in float32 is asked of `memory` and
    `repeat`).
    `update` is the implementation of the optimizers ("fused", "foreach", "for-loop") instead of the one that they were
    made with; `attention` "separate" is products and a softmax instead of one fused call.

    Raises ForetraceError where the batch cannot be changed, and for what cannot be captured, naming operator and layer.
    """
    if like not in ("gpu", "cpu"):
        raise ForetraceError(f"operators can be those of a gpu or of a cpu, not {like!r}.")
    if precision not in PRECISIONS:
        raise ForetraceError(f"there is no precision {precision!r}; {question(precision, PRECISIONS, ALIASES)}")

    from foretrace.model.capture import known

    def on(mode: Sizes) -> OperatorGraph:
        training = mode.made(source) if callable(source) else source
        example, samples = _batch(training, batch, values=like == "cpu")
        fake = _faked(training, mode, precision)
        data = mapped(example, (lambda each: known.of_batch(mode.of(each), each)) if like == "cpu" else mode.of)
        if (dtype := _of_weights(precision)) is not None:  # what is given to 16-bit weights must be 16-bit, too
            data = mapped(data, lambda each: _cast(each, dtype, mode))
        with mode.entered():
            for change in fake.on_batch:
                data = change(data)
        return _logged(fake, data, samples, mode, like, update, attention)

    # Autocast is not seen on meta tensors, and is around every forward pass of these: they would only be tried for it.
    return _on_sizes(on, meta=like == "gpu" and precision not in AUTOCAST)


def forward_only(training: Training) -> Training:
    """Return the training with a step that only predicts: `eval()`, no gradients, no update."""

    def run(job: Training, batch: Any) -> Any:
        import torch

        job.model.eval()
        with torch.no_grad():
            return job.forward(batch)

    return replace(training, run=run, optimizers=())


def precision_named(text: str) -> str:
    """Return what a user means by a precision: "bfloat16" is bf16. Raises ForetraceError."""
    found = resolve(text, PRECISIONS, ALIASES)
    if found is None:
        every = f"choose {', '.join(PRECISIONS)}."
        hint = _SAID.get(plain(text)) or f"is no precision; {question(text, PRECISIONS, ALIASES, lists=every)}"
        raise ForetraceError(f"{text!r} {hint}")
    return found


def _on_sizes(capture_on: Callable[[Sizes], OperatorGraph], *, meta: bool) -> OperatorGraph:
    """Capture on meta tensors; on fake ones, which are several times slower, where meta tensors do not go through."""
    from foretrace.cost.operators.bench import no_collection
    from foretrace.model.capture.light import without_compiler
    from foretrace.model.capture.like import NeedsFake

    notes: tuple[str, ...] = ()
    if meta:
        try:
            with without_compiler(), no_collection():
                return capture_on(Meta())
        except NeedsFake:
            pass
        except (*_OF_A_MODEL, ForetraceError) as error:
            # Fake tensors know more; what they cannot do either, they say.
            why = (str(error).strip() or type(error).__name__).splitlines()[0].partition("; ")[0].rstrip(".")
            notes = (f"captured on tensors of a processor, whose operators may differ from a GPU's: {why}.",)
    try:
        found = capture_on(Fake())
        return replace(found, notes=(*found.notes, *notes))
    except _OF_A_MODEL as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ForetraceError(
            f"the step cannot be captured: {first}; see that it runs for real, on one device, or take the operators "
            "from a recording of a real run."
        ) from error


def _batch(training: Training, samples: int | None, *, values: bool) -> tuple[Any, int]:
    """Return a batch of so many samples, and how many it has.

    Tensors of two small batches tell which sizes grow with the samples, so that a large batch need not be loaded; nor
    need the loader's own, where `values` of it do not matter and all samples have the same sizes.
    """
    if samples is not None and samples < 1:
        raise ForetraceError(f"a batch of {samples} samples is too small; give at least 1.")
    own = samples is None or samples == training.batch_size
    if own and (values or not _alike(training)):
        found = _first(training, training.loader)
        return found, size(found)
    if not training.batch_size:
        raise ForetraceError(f"the loader of {training.name} has no batch_size to change; give it one.")
    wanted = samples or training.batch_size
    parts = training.micro_batches
    few, more = 2 * parts, 3 * parts
    return _grown(_first(training, resized(training.loader, few)), _first(training, resized(training.loader, more)),
                  few, more, wanted), wanted  # fmt: skip


def _alike(training: Training) -> bool:
    """Return whether a few samples tell all of a batch's sizes: PyTorch's own collation stacks no unequal tensors."""
    from torch.utils.data import BatchSampler, DataLoader, default_collate

    loader: Any = training.loader
    if not isinstance(loader, DataLoader) or loader.num_workers or loader.collate_fn is not default_collate:
        return False
    if type(loader.batch_sampler) is not BatchSampler or not isinstance(loader.sampler, Sized):
        return False
    if not len(loader.sampler) >= training.batch_size > 6 * training.micro_batches:
        return False
    return _all_tensors(_first(training, resized(loader, 1)))  # texts make a list, as long as the batch


def _all_tensors(batch: Any) -> bool:
    import torch

    if isinstance(batch, dict | tuple | list):
        return all(map(_all_tensors, batch.values() if isinstance(batch, dict) else batch))
    return isinstance(batch, torch.Tensor)


def _first(training: Training, loader: Any) -> Any:
    for found in loader:
        return found
    raise ForetraceError(f"the loader of {training.name} gives no batch; give it at least one batch of samples.")


def _grown(first: Any, second: Any, few: int, more: int, samples: int) -> Any:
    """Return the batch whose sizes continue as those of two batches with `few` and `more` samples do."""
    import torch

    others: list[Any] = []
    mapped(second, others.append)

    def one(tensor: Any) -> Any:
        dims = []
        for a, b in zip(tensor.shape, others.pop(0).shape, strict=True):
            grown, left = divmod((b - a) * (samples - few), more - few)
            if left or a + grown < 0:
                raise ForetraceError(
                    "the sizes of a batch do not grow evenly with its samples; make the loader with that batch_size."
                )
            dims.append(a + grown)
        return torch.empty(dims, dtype=tensor.dtype, device="meta")

    return mapped(first, one)


def _faked(training: Training, mode: Sizes, precision: str) -> Training:
    """Return a copy whose tensors are fake, of the kind that watches its phases."""
    import torch

    tensors = [*training.model.parameters(), *training.model.buffers()]
    for optimizer in training.optimizers:
        tensors += [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
        tensors += [each for group in optimizer.param_groups for each in group["params"]]
    memo = {id(each): mode.of(each) for each in tensors}
    if (of_weights := _of_weights(precision)) is not None:  # `Module.to` cannot swap tensors that something refers to
        for each in (*training.model.parameters(), *training.model.buffers()):
            memo[id(each)] = _cast(memo[id(each)], of_weights, mode)
    for each in tensors:
        memo[id(each)].grad = None
    kept = list(tensors)  # ids in the memo must stay those of living tensors
    parts = (training.model, training.optimizers, training.around_forward, training.loss, training.scaler)
    with mode.entered():
        model, optimizers, around, loss, scaler = copy.deepcopy(parts, memo)
    del kept
    if precision in AUTOCAST:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        around = (*around, lambda: torch.autocast("cpu", dtype))
    values = {each.name: getattr(training, each.name) for each in fields(Training)}
    values |= {"model": model, "optimizers": optimizers, "around_forward": around, "loss": loss, "scaler": scaler}
    values["device"] = mode.device
    return _Watched(**values)


def _of_weights(precision: str) -> Any:
    """Return the type that a precision casts weights to; None where they stay as they are."""
    import torch

    if not precision.endswith(("-weights", "-master")):
        return None
    return torch.bfloat16 if precision.startswith("bf16") else torch.float16


def _cast(tensor: Any, dtype: Any, mode: Sizes) -> Any:
    """Return the tensor in another type if it holds floating-point numbers; a parameter stays one."""
    import torch

    if not tensor.is_floating_point():
        return tensor
    with mode.entered(), torch.no_grad():
        found = tensor.to(dtype)
    return torch.nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else found


class _Watched(Training):
    """A training that says in which phase it is."""

    where: Where | None = None  # set while it is logged; no field of the dataclass

    def forward(self, batch: Any, loss: Any = None) -> Any:
        with self._in(Phase.FORWARD):
            return super().forward(batch, loss)

    def backward(self, loss: Any) -> None:
        with self._in(Phase.BACKWARD):
            super().backward(loss)

    def update(self, *optimizers: Any) -> None:
        with self._in(Phase.OPTIMIZER):
            super().update(*optimizers)

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        if self.where is None:
            yield
            return
        before, self.where.phase = self.where.phase, phase
        try:
            yield
        finally:
            self.where.phase = before


def _logged(
    training: Training,
    data: Any,
    samples: int,
    mode: Sizes,
    like: Like,
    update: str,
    attention: str,
) -> OperatorGraph:
    """Return two steps, the second one logged; garbage of the first is not freed in it."""
    from foretrace.model.capture.known import as_if_real
    from foretrace.model.capture.like import operators_of
    from foretrace.model.capture.log import Log, Where

    where = Where(training.model)
    object.__setattr__(training, "where", where)
    log, meta = Log(where, title=training.name, host=like == "cpu", fake=mode.fake), mode.fake is None
    training.model.train()
    with ExitStack() as stack:
        for handle in _watching(where, log):
            stack.callback(handle.remove)
        stack.enter_context(as_if_real())
        stack.enter_context(operators_of(like, training.optimizers, meta=meta, update=update, attention=attention))
        stack.enter_context(mode.entered())
        stack.enter_context(log)
        stack.enter_context(_young())
        training.step(data)
        gc.collect(0)
        _register(log, training, data)
        for handle in _gradients(log, training):
            stack.callback(handle.remove)
        log.active = True
        loss = training.step(data)
        del loss
        log.active = False
        nodes, tensors, storages = log.result()
    sparse = any(node.op == "aten::_indices" for node in nodes)
    return OperatorGraph(
        name=training.name,
        nodes=nodes,
        tensors=tensors,
        storages=storages,
        batch=samples,
        source="capture",
        recipe=_recipe(training) | _attention(attention, nodes),
        denormal=log.denormal,
        notes=("updates by sparse gradients are costed as if they touched every row of their tables.",) * sparse,
    )


@contextmanager
def _young() -> Iterator[None]:
    """Let the youngest objects be those made here: a search for garbage among them is none among all of PyTorch.

    None starts by itself meanwhile, so that what a step frees does not hang on what the process did before.
    """
    # Whether something is frozen (by somebody else: it stays so) is only known by counting all of it, which takes as
    # long as a search among as many objects.
    collects, few = gc.isenabled(), gc.get_count()[0] < _FEW or gc.get_freeze_count() > 0
    if few:
        gc.collect(0)
    else:  # and what was not frozen is to be freed one day
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not few:
            gc.unfreeze()
        if collects:
            gc.enable()


def _attention(how: str, nodes: Sequence[Node]) -> dict[str, str]:
    fused = any("scaled_dot_product" in node.op for node in nodes)
    return {"attention": how or "fused"} if fused or how == "separate" else {}


def _recipe(training: Training) -> dict[str, str]:
    """Return what a reader of an estimate wants to know of the training and cannot see in its operators."""
    import torch

    ways = []
    for optimizer in training.optimizers:
        group = optimizer.param_groups[0]
        how = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "one parameter at a time"
        ways.append(f"{type(optimizer).__name__}, {how}")
    found = {"optimizer": " and ".join(dict.fromkeys(ways))} if ways else {}
    weights = {str(each.dtype).removeprefix("torch.") for each in training.model.parameters()}
    if weights:
        found["weights"] = ", ".join(sorted(weights))
    four = [each for each in training.model.parameters() if each.dim() == 4]
    if four:
        last = sum(each.is_contiguous(memory_format=torch.channels_last) and not each.is_contiguous() for each in four)
        found["layout"] = "channels last" if last else "channels first"
    return found


def _watching(where: Where, log: Log) -> list[Any]:
    """Return hooks on modules and optimizers."""
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    updating = 0

    def began(*_: Any) -> None:
        nonlocal updating
        updating += 1
        stack.append(where.phase)
        where.phase = Phase.OPTIMIZER

    def ended(*_: Any) -> None:
        nonlocal updating
        updating -= 1
        where.phase = stack.pop()

    stack: list[Phase] = []
    # An optimizer asks its counter of steps; a gradient scaler asks whether anything overflowed.
    log.scalars = lambda: 1.0 if updating else 0.0 if where.phase == Phase.OPTIMIZER else None
    return [
        modules.register_module_forward_pre_hook(lambda module, _: where.enter(module)),
        modules.register_module_forward_hook(lambda *_: where.leave(), always_call=True),
        optimizers.register_optimizer_step_pre_hook(began),
        optimizers.register_optimizer_step_post_hook(ended),
    ]


def _register(log: Log, training: Training, data: Any) -> None:
    """Register what exists before the step, and what for."""
    import torch

    for name, weight in training.model.named_parameters():
        log.exists(weight, Role.WEIGHT, name)
        if weight.grad is not None:
            log.exists(weight.grad, Role.GRADIENT, name)
    for name, buffer in training.model.named_buffers():
        log.exists(buffer, Role.BUFFER, name)
    names: dict[int, str] = {id(weight): name for name, weight in training.model.named_parameters()}
    for optimizer in training.optimizers:
        for owner, state in optimizer.state.items():
            for key, value in state.items():
                if torch.is_tensor(value):
                    log.exists(value, Role.OPTIMIZER, f"{names.get(id(owner), '')}.{key}")
    mapped(data, lambda tensor: log.exists(tensor, Role.INPUT))


def _gradients(log: Log, training: Training) -> list[Any]:
    """Register hooks by which the log knows gradients of weights, and return them."""
    return [
        weight.register_post_accumulate_grad_hook(lambda leaf, name=name: log.mark(leaf.grad, Role.GRADIENT, name))
        for name, weight in training.model.named_parameters()
        if weight.requires_grad
    ]
