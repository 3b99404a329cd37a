"""A small GPT, trained on random tokens: accumulation of gradients, activation checkpointing, mixed precision, an evaluation now and then.

    stitchd run -- python train_gpt.py

Runs on the GPU that torch finds, or on the CPU.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        normed = self.before_attention(x)
        attended, _ = self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)
        x = x + attended
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    def __init__(self, words: int, length: int, width: int, layers: int, heads: int, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.register_buffer("mask", torch.triu(torch.full((length, length), float("-inf")), diagonal=1))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        for layer in self.layers:
            x = checkpoint(layer, x, self.mask, use_reentrant=False) if self.recomputes else layer(x, self.mask)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--evaluate-every", type=int, default=10)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    model = Gpt(32_000, args.length, args.width, args.layers, args.width // 64, args.recompute).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def batch() -> "tuple[torch.Tensor, torch.Tensor]":
        tokens = torch.randint(32_000, (args.batch, args.length + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]

    for step in range(1, args.steps + 1):
        began = time.perf_counter()
        total = 0.0
        for _ in range(args.accumulate):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(*batch()) / args.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if args.evaluate_every and step % args.evaluate_every == 0:
            model.eval()
            with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
                model(*batch())
            model.train()
        words = f"step {step:4}  loss {total:.4f}  {time.perf_counter() - began:.3f} s"
        if device == "cuda":
            peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            words += f"  allocated {peak / 2**30:.2f} GiB  reserved {reserved / 2**30:.2f} GiB"
        print(words, flush=True)


if __name__ == "__main__":
    main()
