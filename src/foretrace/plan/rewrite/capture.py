"""`capture`: a PyTorch model in inference as a functional graph of terms, by `torch.export`."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretrace.errors import ForetraceError
from foretrace.plan.rewrite import translate
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph, Terms

if TYPE_CHECKING:
    import torch
    from torch import nn

    from foretrace.training.training import Training


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A captured model: its graph, what its weights hold, and how it is called."""

    name: str
    module: nn.Module  # the original, in eval mode
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graph: Graph
    inputs: tuple[Term | None, ...]  # of the flat arguments; None where one is no tensor or is not used
    weights: dict[Term, torch.Tensor]  # leaves that are constant
    structure: Any  # how flat results become what the model returns
    results: tuple[Any, ...]  # of the flat results: index into `graph.outputs`, or `PlainValue`


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A result that is no tensor."""

    value: Any


def of_training(training: Training, batch: int | None = None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return (model in eval mode, arguments, keyword arguments): how the loss of a training calls its model.

    Raises ForetraceError where the loss does not call it, and NotApplicableError where the batch cannot be resized.
    """
    import torch

    from foretrace.training.batches import resized

    loader = training.loader if batch is None else resized(training.loader, batch)
    data = next(iter(loader), None)
    if data is None:
        raise ForetraceError(f"the loader of {training.name} gives no batch; give it at least one batch of samples.")
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))
        raise _SeenError

    model = training.model.eval()
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with torch.no_grad():
            if training.run is not None:
                raise ForetraceError(
                    f"{training.name} has a step of its own, so its inference is unknown; give a script whose "
                    "training() has one model and a loss."
                )
            training.loss(model, data)
    except _SeenError:
        pass
    finally:
        handle.remove()
    if not seen:
        raise ForetraceError(f"the loss of {training.name} does not call its model; let it call the model itself.")
    return model, *seen[0]


def settled(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the batch norms of an untrained model the statistics of this batch.

    With those it starts from, deep untrained networks fade to a constant, and any two models would look equal.
    """
    import torch

    norms = [each for each in module.modules() if isinstance(each, torch.nn.modules.batchnorm._BatchNorm)]
    norms = [each for each in norms if each.track_running_stats]
    if not norms:
        return
    before = [each.momentum for each in norms]
    for each in norms:
        each.reset_running_stats()
        each.momentum = None  # the mean of all batches seen, here one
        each.train()
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    finally:
        for each, momentum in zip(norms, before, strict=True):
            each.momentum = momentum
        module.eval()


class _SeenError(Exception):
    """The arguments are known."""


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, name: str) -> Model:
    """Return the graph of `module(*args, **kwargs)` in eval mode.

    Raises ForetraceError, naming operator or module, where the model's path depends on data, or it draws random
    numbers, or changes its own state.
    """
    import torch

    kwargs = kwargs or {}
    module = module.eval()
    terms = Terms()
    with torch.no_grad(), _quiet():
        program = _exported(module, args, kwargs, name)
        signature = program.graph_signature
        changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
        if changed:
            raise ForetraceError(
                f"{name} changes {changed[0]} as it runs, which a rewritten model would not; make its forward pass "
                "free of side effects."
            )
        reader = translate.NodeReader(terms, name)
        weights: dict[Term, torch.Tensor] = {}
        inputs: list[Term | None] = []
        sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        lifted = signature.inputs_to_lifted_tensor_constants
        values = {**program.state_dict, **program.constants}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                source = sources.get(node.name) or lifted.get(node.name)
                given = reader.leaf(node, constant=source is not None, label=source or node.name)
                if source is None:
                    inputs.append(given)
                elif given is not None:
                    weights[given] = values[source].detach()
            elif node.op == "call_function":
                reader.call(node)
            elif node.op == "get_attr":
                raise ForetraceError(_branches(name, node))
        outputs: list[Term] = []
        results: list[Any] = []
        for each in next(node for node in program.graph.nodes if node.op == "output").args[0]:
            if hasattr(each, "op"):
                results.append(len(outputs))
                outputs.append(reader.term(each))
            else:
                results.append(PlainValue(each))
    return Model(
        name=name, module=module, args=args, kwargs=kwargs, graph=Graph(terms, tuple(outputs)), inputs=tuple(inputs),
        weights=weights, structure=program.call_spec.out_spec, results=tuple(results),
    )  # fmt: skip


def _exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    import torch

    try:
        return torch.export.export(module, args, kwargs, strict=False).run_decompositions({})
    except Exception as error:  # whatever the model's own code raises under fake tensors
        where = _culprit(error, module)
        raise ForetraceError(
            f"{name} cannot be captured{where} ({_first(error)}); a path that depends on data, or a call "
            "into code that PyTorch cannot trace, must be made static (torch.where, fixed sizes) or left out."
        ) from error


def _culprit(error: BaseException, module: nn.Module) -> str:
    """Return where in the model it happened: the innermost module's forward, by class and line."""
    import traceback

    kinds = {type(each) for each in module.modules()}
    codes = {kind.forward.__code__: kind.__name__ for kind in kinds if hasattr(kind.forward, "__code__")}
    found = ""
    at: BaseException | None = error
    while at is not None:
        for frame, line in traceback.walk_tb(at.__traceback__):
            if frame.f_code in codes:
                found = f" at {codes[frame.f_code]}.forward, line {line} of {frame.f_code.co_filename.split('/')[-1]}"
        at = at.__cause__ or at.__context__
    return found


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160].rstrip('.')}" if lines else type(error).__name__


def _branches(name: str, node: Any) -> str:
    users = ", ".join(sorted({str(each.target) for each in node.users}))
    return (
        f"{name} has parts that run depending on data ({users or node.target}), which no rule can rewrite; export the "
        "part without it."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence PyTorch's own deprecations and dumps of graphs inside export."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
