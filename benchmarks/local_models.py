"""Models that are not in the zoo, for `local.py`: configurations of transformers, and networks of our own.

Each is a function without arguments that gives a Training; `MODELS` names those to score. They were written before any
was run or predicted, and nothing was changed after. `CHOSEN` are others, on which rules were chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training


class Ready:
    """Two batches that lie in memory."""

    def __init__(self, *batches: Any) -> None:
        self.batches, self.batch_size = batches, len(batches[0][0])

    def __iter__(self) -> Any:
        return iter(self.batches)


def _training(
    name: str, model: nn.Module, make: Callable[[], Any], loss: Callable[[nn.Module, Any], Tensor], kind: str = "adamw"
) -> Training:
    weights = model.parameters()
    optimizer: Any = (
        torch.optim.AdamW(weights, lr=1e-4) if kind == "adamw" else torch.optim.SGD(weights, lr=1e-3, momentum=0.9)
    )
    return Training(name=name, model=model, optimizers=(optimizer,), loader=Ready(make(), make()), loss=loss)


def _labels(count: int, classes: int) -> Tensor:
    return torch.randint(classes, (count,))


def _classified(model: nn.Module, batch: Any) -> Tensor:
    found = model(batch[0])
    return functional.cross_entropy(getattr(found, "logits", found), batch[1])


def distilbert() -> Training:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=4096, dim=192, n_layers=3, n_heads=6, hidden_dim=768, num_labels=4)
    return _training(
        "distilbert", DistilBertForSequenceClassification(config),
        lambda: (torch.randint(4096, (8, 96)), _labels(8, 4)), _classified,
    )  # fmt: skip


def vit() -> Training:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768,
                       image_size=96, patch_size=16, num_labels=50)  # fmt: skip
    return _training(
        "vit", ViTForImageClassification(config), lambda: (torch.randn(16, 3, 96, 96), _labels(16, 50)), _classified
    )


def _next_word(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0]).logits
    return functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())


def _words(vocabulary: int, count: int, length: int) -> Callable[[], Any]:
    return lambda: (torch.randint(vocabulary, (count, length)), torch.randint(vocabulary, (count, length)))


def opt() -> Training:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=3000, hidden_size=192, num_hidden_layers=3, ffn_dim=768, num_attention_heads=6,
                       max_position_embeddings=128, word_embed_proj_dim=192)  # fmt: skip
    return _training("opt", OPTForCausalLM(config), _words(3000, 6, 96), _next_word)


def t5() -> Training:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=2000, d_model=160, d_kv=32, d_ff=512, num_layers=2, num_heads=5)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores = model(input_ids=batch[0], decoder_input_ids=batch[1]).logits
        return functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())

    return _training("t5", T5ForConditionalGeneration(config), _words(2000, 8, 48), loss)


def convnext() -> Training:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 3, 2], image_size=64, num_labels=20)
    return _training(
        "convnext", ConvNextForImageClassification(config), lambda: (torch.randn(8, 3, 64, 64), _labels(8, 20)),
        _classified,
    )  # fmt: skip


def unet() -> Training:
    """Three scales, skip connections, transposed convolutions, group normalisation."""

    def block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([block(3, 24), block(24, 48), block(48, 96)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(96, 48, 2, 2), nn.ConvTranspose2d(48, 24, 2, 2)])
            self.join = nn.ModuleList([block(96, 48), block(48, 24)])
            self.out = nn.Conv2d(24, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for i, down in enumerate(self.down):
                x = down(x if not i else functional.max_pool2d(x, 2))
                kept.append(x)
            for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
                x = join(torch.cat([up(x), skip], dim=1))
            found: Tensor = self.out(x)
            return found

    return _training(
        "unet", UNet(), lambda: (torch.randn(6, 3, 64, 64), torch.randint(2, (6, 64, 64))), _classified, "sgd"
    )


def mixer() -> Training:
    """MLP-Mixer: products along patches and along channels in turn."""

    class Mixing(nn.Module):
        def __init__(self, patches: int, width: int) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.across = nn.Sequential(nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches))
            self.along = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.across(self.first(x).transpose(1, 2)).transpose(1, 2)
            found: Tensor = x + self.along(self.second(x))
            return found

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 144, 8, 8)
            self.body = nn.Sequential(*[Mixing(64, 144) for _ in range(5)])
            self.out = nn.Linear(144, 30)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.body(self.patch(x).flatten(2).transpose(1, 2)).mean(1))
            return found

    return _training("mixer", Mixer(), lambda: (torch.randn(12, 3, 64, 64), _labels(12, 30)), _classified)


def wavenet() -> Training:
    """Gated, dilated convolutions over time."""

    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begin = nn.Conv1d(1, 48, 1)
            self.gates = nn.ModuleList([nn.Conv1d(48, 96, 2, dilation=2**i) for i in range(7)])
            self.mix = nn.ModuleList([nn.Conv1d(48, 48, 1) for _ in range(7)])
            self.end = nn.Conv1d(48, 64, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.begin(x)
            for i, (gate, mix) in enumerate(zip(self.gates, self.mix, strict=True)):
                a, b = gate(functional.pad(x, (2**i, 0))).chunk(2, dim=1)
                x = x + mix(torch.tanh(a) * torch.sigmoid(b))
            found: Tensor = self.end(torch.relu(x))
            return found

    return _training("wavenet", WaveNet(), lambda: (torch.randn(4, 1, 1024), torch.randint(64, (4, 1024))), _classified)


def autoencoder() -> Training:
    """Wide products and little else."""
    widths = (784, 512, 256, 32, 256, 512, 784)
    layers = [each for a, b in pairwise(widths) for each in (nn.Linear(a, b), nn.ReLU())]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[0])

    return _training("autoencoder", nn.Sequential(*layers[:-1]), lambda: (torch.rand(128, 784),), loss)


def residual() -> Training:
    """Residual blocks of convolutions and batch normalisation, as image models have them."""

    class Residual(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Sequential(nn.Conv2d(a, outputs, 3, by, 1, bias=False), nn.BatchNorm2d(outputs))
                for a, by in ((inputs, stride), (outputs, 1))
            )
            self.aside = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.second(torch.relu(self.first(x))) + self.aside(x))

    widths = (24, 24, 48, 48, 96, 96, 192)
    blocks = [Residual(a, b, 1 + (b > a)) for a, b in pairwise(widths)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 10))
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), *blocks, *head)
    return _training("residual", model, lambda: (torch.randn(12, 3, 32, 32), _labels(12, 10)), _classified, "sgd")


def separable() -> Training:
    """Convolutions per channel between ones per point, batch normalisation after each."""

    def block(a: int, b: int) -> nn.Module:
        inner = 4 * a
        return nn.Sequential(
            nn.Conv2d(a, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish(),
            nn.Conv2d(inner, inner, 3, 1 + (b > a), 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.Hardswish(),
            nn.Conv2d(inner, b, 1, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip

    widths = (16, 24, 24, 40, 40, 40, 80, 80, 80)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 10))
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), *[block(a, b) for a, b in pairwise(widths)], *head)
    return _training("separable", model, lambda: (torch.randn(12, 3, 48, 48), _labels(12, 10)), _classified)


def branches() -> Training:
    """Branches of one-sided convolutions beside an average over windows, joined again and again."""

    def unit(a: int, b: int, size: Any, stride: int = 1, padding: Any = 0) -> nn.Module:
        convolution = nn.Conv2d(a, b, size, stride, padding, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(b, eps=1e-3), nn.ReLU())

    class Mixed(nn.Module):
        def __init__(self, a: int, w: int) -> None:
            super().__init__()
            self.ways = nn.ModuleList([
                unit(a, w, 1),
                nn.Sequential(unit(a, w, 1), unit(w, w, (1, 5), 1, (0, 2)), unit(w, w, (5, 1), 1, (2, 0))),
                nn.Sequential(unit(a, w, 1), unit(w, w, 3, 1, 1), unit(w, w, 3, 1, 1)),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), unit(a, w, 1)),
            ])  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([way(x) for way in self.ways], 1)

    widths = (12, 16, 20, 24, 24, 28, 28)
    mixed = [Mixed(a, w) for a, w in zip((24, *(4 * w for w in widths)), widths, strict=False)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(112, 40))
    model = nn.Sequential(unit(3, 16, 3, 2, 1), unit(16, 24, 3, 1, 1), nn.MaxPool2d(3, 2), *mixed, *head)
    return _training("branches", model, lambda: (torch.randn(10, 3, 64, 64), _labels(10, 40)), _classified, "sgd")


def blobs() -> Training:
    """Pictures drawn within the step: exponentials of squared distances, some of whose values are denormal."""
    head = (nn.Flatten(), nn.Linear(2400, 64), nn.ReLU(), nn.Linear(64, 3))
    model = nn.Sequential(nn.Conv2d(2, 12, 5, 2), nn.ReLU(), nn.Conv2d(12, 24, 3, 2), nn.ReLU(), *head)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        line, total = torch.linspace(-1, 1, 48), torch.zeros(())
        for tick in range(6):
            place = batch[0] + 0.03 * tick
            apart = (line[None, None, :] - place[:, 0, None, None]).square()
            apart = apart + (line[None, :, None] - place[:, 1, None, None]).square()
            found = model(torch.stack([torch.exp(-90 * apart), torch.exp(-30 * apart)], 1))
            total = total + (found - place).square().mean()
        return total

    return _training("blobs", model, lambda: (torch.rand(10, 3) * 1.6 - 0.8,), loss)


def rollout() -> Training:
    """A controller in the loop with a simulated pendulum: a thousand different small calls, differentiated through."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        state, total = batch[0], torch.zeros(())
        for _ in range(40):
            angle, speed = state.unbind(1)
            push = model(torch.stack([angle.sin(), angle.cos(), speed], 1)).squeeze(1).clamp(-2.0, 2.0)
            total = total + (angle.square() + 0.1 * speed.square() + 0.001 * push**2).mean()
            speed = torch.where(speed.abs() < 8, speed + 0.05 * (15 * angle.sin() + 3 * push), 0.9 * speed)
            state = torch.stack([angle + 0.05 * speed, speed], dim=1)
        return total / 40

    model = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return _training("rollout", model, lambda: (torch.randn(16, 2),), loss)


def albert() -> Training:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(vocab_size=3000, embedding_size=64, hidden_size=192, num_hidden_layers=4, num_labels=5,
                          num_attention_heads=6, intermediate_size=640)  # fmt: skip
    model = AlbertForSequenceClassification(config)
    return _training("albert", model, lambda: (torch.randint(3000, (8, 80)), _labels(8, 5)), _classified)


def neox() -> Training:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(vocab_size=2500, hidden_size=160, num_hidden_layers=4, num_attention_heads=5,
                           intermediate_size=640, max_position_embeddings=128)  # fmt: skip
    return _training("neox", GPTNeoXForCausalLM(config), _words(2500, 6, 88), _next_word)


def segformer() -> Training:
    from transformers import SegformerConfig, SegformerForImageClassification

    config = SegformerConfig(hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], num_labels=20)
    model = SegformerForImageClassification(config)
    return _training("segformer", model, lambda: (torch.randn(8, 3, 96, 96), _labels(8, 20)), _classified)


def dense() -> Training:
    """Every layer reads what all before it in its block made."""

    class Block(nn.Module):
        def __init__(self, inputs: int, growth: int, depth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList([
                nn.Sequential(nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, growth, 3, padding=1, bias=False))
                for a in range(inputs, inputs + growth * depth, growth)
            ])  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.cat([x, layer(x)], 1)
            return x

    parts = (nn.Conv2d(3, 24, 3, padding=1), Block(24, 12, 6), nn.Conv2d(96, 48, 1), nn.AvgPool2d(2), Block(48, 12, 6))
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(120, 10))
    return _training("dense", model, lambda: (torch.randn(8, 3, 32, 32), _labels(8, 10)), _classified, "sgd")


def gru() -> Training:
    """A recurrent network of two layers over words, its last state classified."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(5000, 96), nn.Linear(128, 8)
            self.body = nn.GRU(96, 128, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.body(self.words(x))[0][:, -1])
            return found

    return _training("gru", Recurrent(), lambda: (torch.randint(5000, (16, 40)), _labels(16, 8)), _classified)


def swinv2() -> Training:
    from transformers import Swinv2Config, Swinv2ForImageClassification

    config = Swinv2Config(image_size=64, embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=8, num_labels=10)
    model = Swinv2ForImageClassification(config)
    return _training("swinv2", model, lambda: (torch.randn(6, 3, 64, 64), _labels(6, 10)), _classified)


def electra() -> Training:
    from transformers import ElectraConfig, ElectraForSequenceClassification

    config = ElectraConfig(vocab_size=2500, embedding_size=64, hidden_size=128, num_hidden_layers=4, num_labels=3,
                           num_attention_heads=4, intermediate_size=512)  # fmt: skip
    model = ElectraForSequenceClassification(config)
    return _training("electra", model, lambda: (torch.randint(2500, (10, 72)), _labels(10, 3)), _classified)


def deit() -> Training:
    from transformers import DeiTConfig, DeiTForImageClassification

    config = DeiTConfig(hidden_size=144, num_hidden_layers=5, num_attention_heads=3, intermediate_size=576,
                        image_size=80, patch_size=16, num_labels=12)  # fmt: skip
    model = DeiTForImageClassification(config)
    return _training("deit", model, lambda: (torch.randn(12, 3, 80, 80), _labels(12, 12)), _classified)


def volume() -> Training:
    """Convolutions in three dimensions."""

    def block(a: int, b: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv3d(a, b, 3, stride, 1, bias=False), nn.BatchNorm3d(b), nn.ReLU())

    parts = (block(2, 12, 1), block(12, 24, 2), block(24, 24, 1), nn.MaxPool3d(2), block(24, 48, 1))
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(48, 6))
    return _training("volume", model, lambda: (torch.randn(4, 2, 12, 24, 24), _labels(4, 6)), _classified)


def padded() -> Training:
    """Attention over sequences of different lengths, padding masked by a large negative number."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(2000, 128), nn.Linear(128, 9)
            self.inner = nn.ModuleList([nn.Linear(128, 384) for _ in range(3)])
            self.outer = nn.ModuleList([nn.Linear(128, 128) for _ in range(3)])
            self.norm = nn.ModuleList([nn.LayerNorm(128) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            away = (x == 0)[:, None, None, :] * -95.0
            x = self.words(x)
            for inner, outer, norm in zip(self.inner, self.outer, self.norm, strict=True):
                q, k, v = inner(norm(x)).unflatten(2, (3, 4, 32)).permute(2, 0, 3, 1, 4)
                scores = functional.dropout((q @ k.transpose(2, 3) / 5.7 + away).softmax(-1), 0.1, self.training)
                x = x + outer((scores @ v).transpose(1, 2).flatten(2))
            found: Tensor = self.out(x.mean(1))
            return found

    def make() -> Any:
        lengths = torch.randint(20, 80, (12, 1))
        return torch.randint(1, 2000, (12, 80)) * (torch.arange(80) < lengths), _labels(12, 9)

    return _training("padded", Padded(), make, _classified)


def bart() -> Training:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(vocab_size=2000, d_model=160, encoder_layers=2, decoder_layers=2, encoder_attention_heads=5,
                        decoder_attention_heads=5, encoder_ffn_dim=512, decoder_ffn_dim=512)  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores = model(input_ids=batch[0], decoder_input_ids=batch[1]).logits
        return functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())

    return _training("bart", BartForConditionalGeneration(config), _words(2000, 6, 56), loss)


def swin() -> Training:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(image_size=96, embed_dim=32, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=6)
    model = SwinForImageClassification(config)
    return _training("swin", model, lambda: (torch.randn(8, 3, 96, 96), _labels(8, 2)), _classified)


def regnet() -> Training:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(embedding_size=24, hidden_sizes=[24, 56, 152, 368], depths=[1, 2, 3, 2], groups_width=8)
    model = RegNetForImageClassification(config)
    return _training("regnet", model, lambda: (torch.randn(8, 3, 96, 96), _labels(8, 2)), _classified, "sgd")


def points() -> Training:
    """Clouds of points: the same small layers for each, the greatest of every channel, then layers of the whole."""

    class Cloud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (3, 64, 64, 128, 512)
            self.each = nn.Sequential(
                *[part for a, b in pairwise(widths) for part in (nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())]
            )
            self.whole = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 10))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.whole(self.each(x).max(2).values)
            return found

    return _training("points", Cloud(), lambda: (torch.randn(16, 3, 512), _labels(16, 10)), _classified)


def flow() -> Training:
    """Couplings of a normalising flow: small networks scale and shift one half of the numbers by the other."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList([
                nn.Sequential(
                    nn.Linear(32, 192), nn.LeakyReLU(), nn.Linear(192, 192), nn.LeakyReLU(), nn.Linear(192, 64)
                )
                for _ in range(8)
            ])  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(len(x))
            for net in self.nets:
                a, b = x.chunk(2, 1)
                scale, shift = net(a).chunk(2, 1)
                scale = torch.tanh(scale)
                x = torch.cat([b * scale.exp() + shift, a], 1)
                total = total + scale.sum(1)
            return (0.5 * x.square().sum(1) - total).mean()

    return _training("flow", Flow(), lambda: (torch.randn(256, 64),), lambda model, batch: model(batch[0]))


def mobilevit() -> Training:
    from transformers import MobileViTConfig, MobileViTForImageClassification

    config = MobileViTConfig(image_size=64, hidden_sizes=[48, 64, 80], num_labels=10,
                             neck_hidden_sizes=[16, 16, 24, 32, 40, 48, 160])  # fmt: skip
    model = MobileViTForImageClassification(config)
    return _training("mobilevit", model, lambda: (torch.randn(10, 3, 64, 64), _labels(10, 10)), _classified)


def gptj() -> Training:
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(vocab_size=2200, n_embd=144, n_layer=4, n_head=4, rotary_dim=16, n_positions=128)
    return _training("gptj", GPTJForCausalLM(config), _words(2200, 7, 80), _next_word)


def squeezebert() -> Training:
    from transformers import SqueezeBertConfig, SqueezeBertForSequenceClassification

    config = SqueezeBertConfig(vocab_size=2400, embedding_size=144, hidden_size=144, num_hidden_layers=4, num_labels=4,
                               num_attention_heads=4, intermediate_size=432)  # fmt: skip
    model = SqueezeBertForSequenceClassification(config)
    return _training("squeezebert", model, lambda: (torch.randint(2400, (9, 64)), _labels(9, 4)), _classified)


def siamese() -> Training:
    """Pairs of pictures, encoded by one network and drawn together or apart."""

    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(4, b), nn.GELU(), nn.Conv2d(b, b, 3, 1, 1))

    parts = (block(1, 16), block(16, 32), block(32, 64), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 48))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        first, second, same = batch
        apart: Tensor = (functional.normalize(model(first)) - functional.normalize(model(second))).square().sum(1)
        each: Tensor = same * apart + (1 - same) * functional.relu(0.5 - apart)
        return each.mean()

    def make() -> Any:
        return torch.randn(12, 1, 56, 56), torch.randn(12, 1, 56, 56), torch.randint(2, (12,)).float()

    return _training("siamese", nn.Sequential(*parts), make, loss)


MODELS = {each.__name__: each for each in (distilbert, vit, opt, t5, convnext, unet, mixer, wavenet, autoencoder)}
CHOSEN = {
    each.__name__: each
    for each in (
        residual, separable, branches, blobs, rollout, albert, neox, segformer, dense, gru,
        swinv2, electra, deit, volume, padded,
    )
}  # with these the rules were chosen  # fmt: skip
UNSEEN = {each.__name__: each for each in (bart, swin, regnet, points, flow)}  # that one set of rules was scored on
NEW = {each.__name__: each for each in (mobilevit, gptj, squeezebert, siamese)}  # that none was
