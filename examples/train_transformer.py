"""Train a small causal language model (pre-norm, gated feed-forward) on generated text.

The text is a noisy repeating pattern, so the loss falls; data costs nothing, everything is compute.
"""

from __future__ import annotations

import argparse
import gc
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.feed_forward = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.feed_forward(self.norm2(x))
        return result


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def text(batch: int, length: int, vocabulary: int) -> Tensor:
    """Counting sequences with one token in ten replaced by noise."""
    start = torch.randint(0, vocabulary, (batch, 1))
    pace = torch.randint(1, 4, (batch, 1))
    tokens = (start + pace * torch.arange(length + 1)) % vocabulary
    noise = torch.randint(0, vocabulary, tokens.shape)
    return torch.where(torch.rand(tokens.shape) < 0.1, noise, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--width", type=int, default=192, help="size of the hidden state")
    parser.add_argument("--layers", type=int, default=4, help="transformer blocks")
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads, 0 for PyTorch's choice")
    parser.add_argument("--fused", action="store_true", help="fused AdamW")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--ddp", action="store_true", help="data parallel; start it with torchrun")
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocabulary = 512
    model: nn.Module = LanguageModel(vocabulary, args.length, args.width, args.layers, args.width // 32).to(device)
    if args.ddp:
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=args.fused)
    begin = time.perf_counter()
    loss = torch.zeros(())
    for _ in range(args.steps):
        tokens = text(args.batch, args.length, vocabulary).to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=args.bf16):
            logits = model(tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - begin
    print(f"{args.steps} steps, {1e3 * seconds / max(args.steps, 1):.1f} ms each, loss {loss.item():.3f}")
    if args.ddp:
        torch.distributed.barrier()  # a rank that leaves early can abort the others
        del model, optimizer  # they hold the process group; one that lives up to the interpreter's end can abort it
        gc.collect()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
