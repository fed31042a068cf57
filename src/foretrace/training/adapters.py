"""A `Training` from a job that is written for Lightning or for the Hugging Face Trainer.

    training = from_lightning(module, loader)
    training = from_trainer(trainer)

What makes a step is taken over: model, loss, optimizer, batches, precision, accumulation, clipping. What surrounds the
steps is not: logging, checkpoints, callbacks, learning-rate schedules (the rate stays as the optimizer begins).
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from foretrace.errors import ForetraceError, needing
from foretrace.training.batches import Batch, Batches
from foretrace.training.training import Context, Training

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def from_lightning(module: Any, loader: Batches, *, name: str = "", clip_norm: float = 0.0) -> Training:
    """Return a LightningModule as a Training: `training_step` is its model's forward, `configure_optimizers` its
    optimizer.

    The training works on a copy of the module, whose `log` and `log_dict` do nothing, since there is no
    `lightning.Trainer`; `batch_idx` is always 0, and hooks around a step are not called. `clip_norm` is the Trainer's
    `gradient_clip_val`.

    Raises ForetraceError for a module that optimizes by hand or has several optimizers, MissingExtraError where
    Lightning is not installed.
    """
    if not isinstance(module, _lightning_modules()):
        raise ForetraceError(f"from_lightning takes a LightningModule, not a {type(module).__name__}.")
    if not module.automatic_optimization:
        raise ForetraceError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization = False), which needs Lightning's "
            "Trainer; build a Training with run=, a function of one step, instead."
        )
    copied = copy.deepcopy(module)
    copied.log = copied.log_dict = _unlogged
    optimizers = _optimizers(copied.configure_optimizers())
    if len(optimizers) != 1:
        raise ForetraceError(
            f"configure_optimizers of {type(module).__name__} gives {len(optimizers)} optimizers; automatic "
            "optimization has exactly one."
        )
    return Training(
        name=name or type(module).__name__,
        model=_stepping(copied),
        optimizers=tuple(optimizers),
        loader=loader,
        loss=_forward,
        device=str(module.device),
        clip_norm=clip_norm,
    )


def from_trainer(trainer: Any, *, name: str = "") -> Training:
    """Return a `transformers.Trainer` as a Training, with its model, data collator, sampler, optimizer and
    `compute_loss`.

    `bf16`, `fp16`, `gradient_accumulation_steps` and `max_grad_norm` of its arguments are kept: a batch is what one
    update is made of. The model is the trainer's own, not a copy.

    Raises ForetraceError for what is no Trainer or uses several devices, MissingExtraError where transformers is not
    installed.
    """
    with needing("from_trainer"):
        import torch
        from transformers import Trainer
    if not isinstance(trainer, Trainer):
        raise ForetraceError(f"from_trainer takes a transformers.Trainer, not a {type(trainer).__name__}.")
    job: Any = trainer
    arguments = job.args
    if arguments.n_gpu > 1 or arguments.world_size > 1:
        raise ForetraceError("the Trainer uses several devices; make it with one (CUDA_VISIBLE_DEVICES=0).")
    accumulated = arguments.gradient_accumulation_steps
    loader = job.get_train_dataloader()
    if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        # an incomplete batch could not be cut into equal parts
        loader = _plain(loader, arguments.train_batch_size * accumulated, drop_last=accumulated > 1)
    elif accumulated > 1:
        raise ForetraceError("gradient accumulation over an iterable dataset cannot be taken over; set it to 1.")
    job.create_optimizer()
    device = torch.device(arguments.device).type
    precision = torch.bfloat16 if arguments.bf16 else torch.float16 if arguments.fp16 else None
    contexts: tuple[Context, ...] = ()
    if precision is not None:
        contexts = (partial(torch.autocast, device, precision),)
    return Training(
        name=name or type(job.model).__name__,
        model=job.model,
        optimizers=(job.optimizer,),
        loader=loader,
        loss=partial(_computed, job),
        device=str(arguments.device),
        around_forward=contexts,
        micro_batches=accumulated,
        scaler=torch.amp.GradScaler(device) if arguments.fp16 else None,
        clip_norm=arguments.max_grad_norm or 0.0,
    )


def _plain(loader: Any, batch_size: int, *, drop_last: bool) -> Batches:
    """Return a torch DataLoader in place of the one that accelerate wrapped: techniques change its settings."""
    from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

    names = ("collate_fn", "num_workers", "pin_memory", "worker_init_fn", "persistent_workers")
    settings: dict[str, Any] = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, RandomSampler):
        settings |= {"shuffle": True, "generator": sampler.generator}
    elif not isinstance(sampler, SequentialSampler):
        settings["sampler"] = sampler
    drop_last = drop_last or bool(getattr(loader.batch_sampler, "drop_last", False))
    return DataLoader(loader.dataset, batch_size=batch_size, drop_last=drop_last, **settings)


def _computed(trainer: Any, model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = trainer.compute_loss(model, dict(batch))  # a copy, since it may take labels out
    return loss


def _forward(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def _unlogged(*_: Any, **__: Any) -> None:
    """Replace a LightningModule's log, which warns where there is no Trainer."""


def _stepping(module: Any) -> nn.Module:
    """Return a module whose forward is `training_step`, so that whatever is done to a model is done to the
    whole step.
    """
    from torch import nn

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.indexed = "batch_idx" in inspect.signature(module.training_step).parameters

        def forward(self, batch: Batch) -> Tensor:
            step = self.module.training_step
            found = step(batch, batch_idx=0) if self.indexed else step(batch)
            loss: Tensor | None = found["loss"] if isinstance(found, dict) else found
            if loss is None:
                raise ForetraceError(
                    f"training_step of {type(self.module).__name__} returned no loss; let it return a loss every step."
                )
            return loss

    return Stepping()


def _lightning_modules() -> tuple[type[Any], ...]:
    """Return LightningModule of `lightning` and of `pytorch_lightning`, whichever are there."""
    found: list[type[Any]] = []
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(__import__(package, fromlist=["LightningModule"]).LightningModule)
        except ModuleNotFoundError:
            continue
    if not found:
        with needing("from_lightning"):
            import lightning.pytorch  # noqa: F401  (fails, as above)
    return tuple(found)


def _optimizers(configured: Any) -> list[Optimizer]:
    """Return optimizers out of everything that configure_optimizers may return, without their schedules."""
    from torch.optim import Optimizer

    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, dict):
        return _optimizers(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)):
        if len(configured) == 2 and all(isinstance(each, (list, tuple)) for each in configured):
            return _optimizers(configured[0])  # optimizers, then schedules
        return [found for each in configured for found in _optimizers(each)]
    return []
