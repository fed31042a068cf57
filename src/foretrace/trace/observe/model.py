"""`ModelWatch`: models, parameters, gradients and optimizers of a run, found without help from the script.

Optimizers announce themselves through PyTorch's global step hook; the modules that own their parameters are
found among the objects that the garbage collector knows. The order in which gradients become ready and
modules are called is observed during one step that is neither profiled nor timed.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

_MAX_CALLS = 100_000  # of modules in one step; a longer list says nothing that its beginning does not
_DDP_FACTS = (
    "bucket_cap_bytes",
    "bucket_sizes",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "has_rebuilt_buckets",
    "comm_hook",
)


class ModelWatch:
    """Collects what the model is. `optimizer_stepped` is called after every optimizer step, the rest once."""

    def __init__(self) -> None:
        self.missing: list[dict[str, str]] = []
        self._optimizers: list[_Optimizer] = []
        self._handles: list[Any] = []
        self._modules: list[dict[str, Any]] = []
        self._calls: list[int] = []
        self._parameters: list[dict[str, Any]] = []
        self._gradients: list[list[int]] = []
        self._ddp: list[dict[str, Any]] = []
        self._buffers = 0
        self._after_step: list[Callable[[], None]] = []

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Count a step of this optimizer and describe it when it is new."""
        for seen in self._optimizers:
            if seen.ref() is optimizer:
                seen.steps += 1
                return
        self._optimizers.append(_Optimizer(optimizer))

    def begin_step(self) -> None:
        """Find the models and install the hooks of the observed step."""
        self._try("modules", self._find)

    def end_step(self) -> None:
        """Remove the hooks; what they saw stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for action in self._after_step:
            self._try("ddp", action)
        self._after_step.clear()

    def facts(self) -> dict[str, Any]:
        """Return what was found, as plain JSON values."""
        return {
            "optimizers": [{**seen.facts, "steps": seen.steps} for seen in self._optimizers],
            "modules": self._modules,
            "module_calls": self._calls,
            "parameters": self._parameters,
            "buffer_bytes": self._buffers,
            "gradient_order": self._gradients,
            "ddp": self._ddp,
        }

    def _try(self, what: str, action: Callable[[], None]) -> None:
        # Models override anything they like; a fact that cannot be had must not end somebody's training.
        try:
            action()
        except Exception as error:
            self.missing.append({"what": what, "why": f"{type(error).__name__}: {error}"})

    def _find(self) -> None:
        owner = {
            id(parameter): (index, group)
            for index, seen in enumerate(self._optimizers)
            if (optimizer := seen.ref()) is not None
            for group, members in enumerate(optimizer.param_groups)
            for parameter in members["params"]
        }
        for seen in self._optimizers:
            seen.note_state()
        roots = _roots(owner)
        self._buffers = sum(buffer.nbytes for model in roots for buffer in model.buffers())
        module_index: dict[int, int] = {}
        parameters: list[Any] = []
        known: set[int] = set()
        for root, model in enumerate(roots):
            for name, module in model.named_modules():
                module_index[id(module)] = len(self._modules)
                own = sum(p.numel() for p in module.parameters(recurse=False))
                entry = {"root": root, "name": name, "class": type(module).__name__, "parameters": own}
                self._modules.append(entry)
            for name, parameter in model.named_parameters():
                if id(parameter) not in known:
                    known.add(id(parameter))
                    parameters.append(parameter)
                    self._parameters.append(_parameter(root, name, parameter, owner))
        for seen in self._optimizers:  # parameters that no module owns
            if (optimizer := seen.ref()) is not None:
                for parameter in _members(optimizer):
                    if id(parameter) not in known:
                        known.add(id(parameter))
                        parameters.append(parameter)
                        self._parameters.append(_parameter(-1, "", parameter, owner))
        for model in roots:
            for module in model.modules():
                if hasattr(module, "_get_ddp_logging_data"):
                    self._after_step.append(partial(self._describe_ddp, module))
        if any(_compiled(module) for model in roots for module in model.modules()):
            # A hook would change the guards of compiled code and make it compile again.
            why = "the model is compiled; hooks would recompile it"
            self.missing += [{"what": what, "why": why} for what in ("module_calls", "gradient_order")]
            return
        self._try("module_calls", partial(self._watch_calls, module_index))
        self._try("gradient_order", partial(self._watch_gradients, parameters))

    def _watch_calls(self, module_index: dict[int, int]) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        def called(module: Any, _inputs: Any) -> None:
            index = module_index.get(id(module))
            if index is None:  # a loss, or a helper without parameters
                index = module_index[id(module)] = len(self._modules)
                entry = {"root": -1, "name": "", "class": type(module).__name__, "parameters": 0}
                self._modules.append(entry)
            if len(self._calls) < _MAX_CALLS:
                self._calls.append(index)

        self._handles.append(register_module_forward_pre_hook(called))

    def _watch_gradients(self, parameters: list[Any]) -> None:
        start = time.perf_counter_ns()

        def ready(index: int, _parameter: Any) -> None:
            self._gradients.append([index, time.perf_counter_ns() - start])

        for index, parameter in enumerate(parameters):
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(partial(ready, index))
                self._handles.append(handle)

    def _describe_ddp(self, module: Any) -> None:
        data = module._get_ddp_logging_data()
        self._ddp.append({key: data[key] for key in _DDP_FACTS if key in data and _is_plain(data[key])})


class _Optimizer:
    """An optimizer as it was after the first step that was seen."""

    def __init__(self, optimizer: Any) -> None:
        self.ref = weakref.ref(optimizer)
        self.steps = 1
        tensors: dict[str, list[int]] = {}
        with_gradient = 0
        for parameter in _members(optimizer):
            count = tensors.setdefault(str(parameter.dtype).removeprefix("torch."), [0, 0])
            count[0] += 1
            count[1] += parameter.numel()
            with_gradient += parameter.grad is not None
        settings = {k: v for k, v in optimizer.defaults.items() if k != "lr" and _is_plain(v)}
        self.facts: dict[str, Any] = {
            "class": type(optimizer).__name__,
            "module": type(optimizer).__module__,
            "settings": settings,
            "groups": len(optimizer.param_groups),
            "tensors": {dtype: {"count": n, "elements": e} for dtype, (n, e) in tensors.items()},
            "with_gradient": with_gradient,
        }

    def note_state(self) -> None:
        """Keep how many bytes the tensors of its state hold."""
        optimizer = self.ref()
        if optimizer is not None:
            state = (value for entry in optimizer.state.values() for value in entry.values())
            self.facts["state_bytes"] = sum(value.nbytes for value in state if hasattr(value, "nbytes"))


def _members(optimizer: Any) -> Iterable[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _roots(owner: dict[int, tuple[int, int]]) -> list[Any]:
    """Return the outermost modules that hold an optimizer's parameter; without an optimizer, any parameter."""
    from torch.nn import Module

    # type(), not isinstance(): lazy proxies answer isinstance by loading whatever they stand for.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), Module)]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    rank = {parameter: position for position, parameter in enumerate(owner)}
    found = []
    for module in modules:
        if id(module) in inner:
            continue
        positions = [rank.get(id(p), len(rank)) for p in module.parameters()]
        if positions and (not rank or min(positions) < len(rank)):
            found.append((min(positions), module))
    found.sort(key=lambda pair: pair[0])
    return [module for _, module in found]


def _parameter(root: int, name: str, parameter: Any, owner: dict[int, tuple[int, int]]) -> dict[str, Any]:
    optimizer, group = owner.get(id(parameter), (-1, -1))
    return {
        "root": root,
        "name": name,
        "shape": [int(n) for n in parameter.shape],
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "numel": int(parameter.numel()),
        "device": str(parameter.device),
        "trained": bool(parameter.requires_grad),
        "optimizer": optimizer,
        "group": group,
    }


def _compiled(module: Any) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return value - value == 0.0  # neither infinite nor not-a-number
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, str)) or value is None
