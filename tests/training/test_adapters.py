"""Jobs of real Lightning and of the real Hugging Face Trainer as a Training."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.training.adapters import from_lightning, from_trainer

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _loader(batch_size: int = 4) -> Any:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 6, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def _module(**differently: Any) -> Any:
    """A LightningModule that logs; its parts can be replaced."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Regression(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, truth = batch
            loss = torch.nn.functional.mse_loss(self.linear(inputs), truth)
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}

    for name, value in differently.items():
        setattr(Regression, name, value)
    return Regression()


def test_lightning_steps_are_those_of_its_trainer(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    import warnings

    ours, theirs = _module(), _module()
    with warnings.catch_warnings():  # Lightning's advice about workers and logging intervals
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        warnings.filterwarnings("ignore", message=r".*does not have many workers|.*smaller than the logging interval")
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(theirs, _loader())
    trained = from_lightning(ours, _loader())
    assert all(math.isfinite(float(loss)) for loss in trained.steps(4))
    for found, expected in zip(trained.model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(found, expected)
    assert torch.equal(ours.linear.weight, _module().linear.weight)  # the module itself is left alone


def test_lightning_copies_are_independent() -> None:
    training = from_lightning(_module(), _loader(), name="mine", clip_norm=1.0)
    copied = training.copied()
    losses = [float(loss) for loss in training.steps(3)]
    assert [float(loss) for loss in copied.steps(3)] == losses
    assert training.name == "mine"


def test_lightning_optimizers_in_every_form() -> None:
    def pair(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    def alone(self: Any) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def listed(self: Any) -> Any:
        return [{"optimizer": alone(self)}]

    for form in (pair, alone, listed):
        training = from_lightning(_module(configure_optimizers=form), _loader())
        assert [type(each).__name__ for each in training.optimizers] == ["SGD"]
        assert math.isfinite(float(next(training.steps(1))))


def test_lightning_jobs_that_are_not_plain_are_refused() -> None:
    def two(self: Any) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    with pytest.raises(ForetraceError, match="gives 2 optimizers"):
        from_lightning(_module(configure_optimizers=two), _loader())
    with pytest.raises(ForetraceError, match="gives 0 optimizers"):
        from_lightning(_module(configure_optimizers=lambda self: None), _loader())
    by_hand = _module()
    by_hand.automatic_optimization = False
    with pytest.raises(ForetraceError, match="optimizes by hand"):
        from_lightning(by_hand, _loader())
    with pytest.raises(ForetraceError, match="not a Linear"):
        from_lightning(torch.nn.Linear(2, 2), _loader())
    skipping = from_lightning(_module(training_step=lambda self, batch: None), _loader())
    with pytest.raises(ForetraceError, match="returned no loss"):
        next(skipping.steps(1))


def _trainer(folder: Path, **arguments: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    words = torch.randint(32, (16, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": each, "labels": each} for each in words]
    settings: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    settings |= {"lr_scheduler_type": "constant", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    settings |= {"dataloader_pin_memory": False, "save_strategy": "no", "logging_strategy": "no", "seed": 5}
    made = transformers.TrainingArguments(output_dir=str(folder), **(settings | arguments))
    return transformers.Trainer(model=transformers.GPT2LMHeadModel(config), args=made, train_dataset=data)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_steps_are_those_of_the_trainer(tmp_path: Path, accumulated: int) -> None:
    arguments = {"gradient_accumulation_steps": accumulated, "max_grad_norm": 0.1}
    theirs, ours = _trainer(tmp_path, **arguments), _trainer(tmp_path, **arguments)
    _in_order(theirs)
    _in_order(ours)
    theirs.train()
    training = from_trainer(ours)
    assert training.batch_size == 4 * accumulated
    assert training.micro_batches == accumulated
    losses = [float(loss) for loss in training.steps(2)]
    assert all(map(math.isfinite, losses))
    for found, expected in zip(training.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def _in_order(trainer: Any) -> None:
    """Both loaders would shuffle, each in its own way."""
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)


def test_trainer_precision_is_taken_over(tmp_path: Path) -> None:
    training = from_trainer(_trainer(tmp_path, bf16=True))
    seen = []
    training.model.transformer.h[0].mlp.register_forward_hook(lambda *found: seen.append(found[2].dtype))  # type: ignore[union-attr, index]
    assert math.isfinite(float(next(training.steps(1))))
    assert seen == [torch.bfloat16]
    assert training.name == "GPT2LMHeadModel"


def test_trainer_copies_are_independent(tmp_path: Path) -> None:
    training = from_trainer(_trainer(tmp_path)).with_batches(2)
    copied = training.copied()
    losses = [float(loss) for loss in training.steps(3)]
    assert [float(loss) for loss in copied.steps(3)] == losses


def test_what_is_no_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ForetraceError, match="not a Linear"):
        from_trainer(torch.nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match="needs transformers"):
        from_trainer(None)


def test_lightning_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match="pip install lightning"):
        from_lightning(None, [])
