"""Make the recordings in this folder: small training runs of the examples, recorded by foretrace itself.

    python tests/data/make.py

`cnn` has module events, input sizes and a data loader in the training process; `recommender` is an optimizer-bound
step before, `recommender-fused` the same job after AdamW was fused. `decode` is a small decoder, one token per step,
and `decode-draft` a draft for it. `decode-heads` is a decoder of transformers with eight heads a layer after a prompt,
with the shapes of its attention.
"""

from __future__ import annotations

import gzip
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import foretrace as ft

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "examples")]

import train_cnn  # noqa: E402  the example's folder must be on the path first
import train_recommender  # noqa: E402


def cnn(folder: Path) -> None:
    model = train_cnn.Net(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(train_cnn.Pictures(1000, 32), batch_size=2)
    with ft.record(folder, active=2, wait=3, memory=False) as recorder:
        for pictures, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pictures), labels).backward()
            optimizer.step()
            recorder.step()
            if recorder.over:
                break


def recommender(folder: Path, *, fused: bool) -> None:
    model = train_recommender.Recommender(16, 2, 400, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    loader = DataLoader(train_recommender.Clicks(1000, 16, 2, 400), batch_size=8)
    criterion = torch.nn.BCEWithLogitsLoss()
    with ft.record(folder, active=3, wait=4, memory=False, modules=False) as recorder:
        for dense, sparse, clicked in loader:
            optimizer.zero_grad()
            criterion(model(dense, sparse), clicked).backward()
            optimizer.step()
            recorder.step()
            if recorder.over:
                break


def decode(folder: Path, *, layers: int) -> None:
    from reproductions.speculative.decoder import Cached, Decoder, DecoderShape
    from reproductions.speculative.decoding import Dice

    target, dice = Cached(Decoder(DecoderShape(layers=layers, width=64)).requires_grad_(False)), Dice(0)
    target.feed(list(b"def decode(self) -> bytes:"))
    token = 0
    with ft.record(folder, active=3, wait=4, memory=False) as recorder:
        while not recorder.over:
            token = dice.draw(target.feed([token])[-1])
            recorder.step()


def heads(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from decode import decoding

    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, attn_implementation="sdpa",
    )  # fmt: skip
    job = decoding(LlamaForCausalLM(config), torch.randint(3, 256, (1, 1024)))
    with ft.record(folder, active=3, wait=4, memory=False) as recorder:
        while not recorder.over:
            job.step(next(iter(job.loader)))
            recorder.step()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in (
            ("cnn", cnn),
            ("recommender", lambda folder: recommender(folder, fused=False)),
            ("recommender-fused", lambda folder: recommender(folder, fused=True)),
            ("decode", lambda folder: decode(folder, layers=4)),
            ("decode-draft", lambda folder: decode(folder, layers=1)),
            ("decode-heads", heads),
        ):
            folder = Path(scratch) / name
            make(folder)
            (recorded,) = folder.iterdir()
            target = HERE / f"{name}.json.gz"
            target.write_bytes(gzip.compress(gzip.decompress(recorded.read_bytes()), 9, mtime=0))
            print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
