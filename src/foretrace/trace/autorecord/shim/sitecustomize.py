# ruff: noqa: PTH100, PTH118, PTH120, PTH123, UP036
# No pathlib, because every Python that starts would pay for it; and that Python may be an older one.
"""Loaded by every Python that `foretrace record` starts; it waits for PyTorch's optimizers, nothing else.

`foretrace record` puts this file's folder first on PYTHONPATH, so Python imports it at start, in children too
(torchrun's workers, for example). A `sitecustomize` that was there before runs as if this one did not exist.
Standard library only, and syntax that an older Python can read.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from typing import Any


class _WaitForOptimizers:
    """An import hook that acts once, when `torch.optim.optimizer` has just been loaded, and is gone."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            load = loader.exec_module

            def load_and_install(module: Any) -> None:
                load(module)
                _install(module, self.config)

            loader.exec_module = load_and_install
        return spec


def _install(module: Any, config: dict[str, Any]) -> None:
    _report(config, {"state": "imported", "steps": 0, "sentence": ""})
    sessions: list[Any] = []

    def optimizer_stepped(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not sessions:
            sessions.append(_begin(config))
        if sessions[0] is not None:
            sessions[0].optimizer_stepped(optimizer)

    module.register_optimizer_step_post_hook(optimizer_stepped)


def _begin(config: dict[str, Any]) -> Any:
    """Return a session, or None where there can be none: the script must continue in any case."""
    try:
        if sys.version_info < (3, 11):
            version = ".".join(map(str, sys.version_info[:2]))
            raise RuntimeError(f"recording needs Python 3.11 or newer, the script runs in {version}")
        return _session(config)
    except Exception as error:
        _report(config, {"state": "failed", "steps": 1, "sentence": f"nothing was recorded: {error}"})
        sys.stderr.write(f"foretrace: gives up recording, the script continues: {error}\n")
        return None


def _session(config: dict[str, Any]) -> Any:
    # The package is loaded from where the command lives: the script's environment need not have it installed.
    if "foretrace" not in sys.modules:
        place = config["package"]
        spec: Any = importlib.util.spec_from_file_location(
            "foretrace", os.path.join(place, "__init__.py"), submodule_search_locations=[place]
        )
        package = sys.modules["foretrace"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    from foretrace.trace.autorecord.session import Session

    return Session(config)


def _report(config: dict[str, Any], told: dict[str, Any]) -> None:
    try:
        with open(os.path.join(config["status"], f"{os.getpid()}.json"), "w") as file:
            json.dump(told, file)
    except OSError:  # the launcher is gone
        pass


def _run_other(here: str) -> None:
    """Run the next `sitecustomize` on the path, in place of this module."""
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "FORETRACE_RECORD" in os.environ:
    sys.meta_path.insert(0, _WaitForOptimizers(json.loads(os.environ["FORETRACE_RECORD"])))
_run_other(os.path.dirname(os.path.abspath(__file__)))
