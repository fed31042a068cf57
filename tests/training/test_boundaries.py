"""Compressed activations between two real processes that share a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foretrace.errors import NotApplicableError
from foretrace.techniques.distributed.model_parallel_compression import ModelParallelCompression
from foretrace.training.batches import Resident
from foretrace.training.compression import boundaries
from foretrace.training.compression.boundaries import ActivationCodec, Receiver, Sender
from foretrace.training.compression.settings import Boundary
from foretrace.training.training import Training
from tests.gloo_workers import together

BOUNDARIES = (
    Boundary(method="none"),
    Boundary(method="autoencoder", share=0.5),
    Boundary(method="topk", share=0.3),
    Boundary(method="randomk", share=0.5),
    Boundary(method="quantise", bits=8),
    Boundary(method="quantise", bits=4),
)


def pipeline(rank: int) -> list[list[float]]:
    """Losses of the second stage for every kind of boundary; the first one returns empty lists."""
    found = []
    for boundary in BOUNDARIES:
        torch.manual_seed(0)
        x, target = torch.randn(32, 16), torch.randn(16, 4)
        y = torch.tanh(x @ target)
        first, second = nn.Sequential(nn.Linear(16, 24), nn.Tanh()), nn.Sequential(nn.Linear(24, 4))
        end: Any = Sender(boundary, 24, to=1) if rank == 0 else Receiver(boundary, 24, sender=0)
        mine = [*(first if rank == 0 else second).parameters(), *end.parameters()]
        optimizer = torch.optim.SGD(mine, lr=0.3) if mine else None
        losses = []
        for _ in range(40):
            if rank == 0:
                end(first(x)).backward()
            else:
                loss = (second(end(torch.Size((32, 24)))) - y).square().mean()
                loss.backward()
                losses.append(loss.item())
            assert optimizer is not None
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    return found


def test_a_pipeline_of_two_trains_across_every_boundary() -> None:
    _, found = together(pipeline, 2)
    for boundary, losses in zip(BOUNDARIES, found, strict=True):
        assert losses[-1] < 0.7 * losses[0], f"{boundary}: {losses[0]:.3g} -> {losses[-1]:.3g}"
    assert abs(found[4][-1] - found[0][-1]) < 0.1 * found[0][-1], "8 bit is as good as none"


def transformer(layers: int = 2) -> Training:
    """Two encoder layers and a head, without dropout; 4 batches of 8 sequences."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(16, 4))
    batches = tuple((torch.randn(8, 6, 16), torch.randn(8, 6, 4)) for _ in range(4))
    return Training(
        name="transformer",
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.05),),
        loader=Resident(made=batches, batch_size=8, source=batches),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )


def tensor_parallel(rank: int) -> list[tuple[list[float], Tensor]]:
    found = []
    for boundary in BOUNDARIES:
        technique = ModelParallelCompression(
            method=boundary.method, share=boundary.share, bits=boundary.bits, workers=2, depth="last-half"
        )
        treated = technique.apply(transformer())
        losses = [float(each) for each in treated.steps(24)]
        found.append((losses, treated.model[1].weight.detach().clone()))  # type: ignore[index]
    return found


def test_a_tensor_parallel_pair_computes_what_one_process_does() -> None:
    alone = transformer()
    expected = [float(each) for each in alone.steps(24)]
    first, second = together(tensor_parallel, 2)
    for boundary, (losses, weight), (_, other) in zip(BOUNDARIES, first, second, strict=True):
        torch.testing.assert_close(weight, other)
        assert losses[-1] < losses[0], boundary
        if boundary.method == "none":
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=1e-5)
        if boundary.method == "quantise" and boundary.bits == 8:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.05, atol=0.01)


def test_parts_of_a_divided_layer_are_trained_as_the_whole_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "same_start", lambda model: None)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    training = transformer()
    named = dict(training.model.named_parameters())
    groups = [{name for name in named if name.endswith(end)} for end in ("weight", "bias")]
    optimizer = torch.optim.SGD([{"params": [named[each] for each in names]} for names in groups], lr=0.1)
    autoencoder = Boundary(method="autoencoder", share=0.5)
    boundaries.divided(replace(training, optimizers=(optimizer,)), autoencoder, 2, all_layers=True, name="")
    now = {id(each): name for name, each in training.model.named_parameters()}
    weights, biases = ({now[id(each)] for each in group["params"]} for group in optimizer.param_groups)
    assert biases == groups[1]
    assert weights == groups[0] | {each for each in now.values() if each.endswith(("encoder", "decoder"))}
    assert len(now) == len(weights | biases)


def test_an_auto_encoder_starts_as_a_projection() -> None:
    codec = ActivationCodec(Boundary(method="autoencoder", share=0.25), 32)
    assert codec.encoder.shape == (32, 8)
    both = codec.encoder @ codec.decoder
    torch.testing.assert_close(both @ both, both, rtol=1e-4, atol=1e-5)


def test_no_process_group_is_said() -> None:
    with pytest.raises(NotApplicableError, match=r"^model-parallel-compression: there is no process group.*[.]$"):
        ModelParallelCompression(method="quantise").apply(transformer())
    with pytest.raises(NotApplicableError, match=r"no pipeline is built"):
        ModelParallelCompression(method="quantise", where="pipeline").apply(transformer())
