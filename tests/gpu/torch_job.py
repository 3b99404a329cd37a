#!/usr/bin/env python3
"""One training run for `torch_compare`: a GPT-like model with what makes memory hard, and its losses and figures as one JSON object.

Recomputed layers, accumulation of gradients, a layer of experts that get as many tokens as are sent to them, mixed precision, and copies on a second stream. Everything is seeded, so two runs on
one machine with two allocators must have the same losses, bit by bit. Runs on the CPU, too (`--device cpu`), where there is no allocator to compare.
"""
import argparse
import json
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Experts(nn.Module):
    """Each token goes to one of a few experts: how many each gets is another number in every pass."""

    def __init__(self, width, count):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights = self.router(tokens).float().softmax(-1)
        share, chosen = weights.max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero(as_tuple=True)[0]
            if mine.numel():
                out = out.index_copy(0, mine, (expert(tokens[mine]) * share[mine, None]).to(out.dtype))
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, width, heads, experts):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp = Experts(width, experts) if experts else dense

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.words = nn.Embedding(args.words, args.width)
        self.places = nn.Embedding(args.length, args.width)
        # Every fourth has experts.
        experts = lambda at: args.experts if at % 4 == 3 else 0  # noqa: E731
        self.layers = nn.ModuleList(Layer(args.width, args.width // 64, experts(at)) for at in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.words, bias=False)

    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for at, layer in enumerate(self.layers):
            # Every other one is computed again on the way back.
            x = checkpoint(layer, x, use_reentrant=False) if at % 2 else layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--words", type=int, default=32_000)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, help="so much of the device's memory, and no more")
    parser.add_argument("--out", help="write the JSON here and not to standard output")
    return parser.parse_args()


def main():
    args = arguments()
    has_gpu = args.device == "cuda"
    torch.manual_seed(7)
    # Not with warnings alone: the attention that is fast is deterministic only where everything must be. Memory that nobody has written stays so, as in any job.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if has_gpu:
        torch.backends.cuda.enable_cudnn_sdp(False)
        if args.limit_gib:
            torch.cuda.set_per_process_memory_fraction(args.limit_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    model = Model(args).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    source = torch.Generator().manual_seed(11)
    beside = torch.cuda.Stream() if has_gpu else None
    losses, seconds, live, allocated, reserved = [], [], [], [], []
    for _ in range(args.steps):
        began, total = time.perf_counter(), 0.0
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(args.accumulate):
            tokens = torch.randint(args.words, (args.batch, args.length + 1), generator=source)
            if has_gpu:
                # Copied on a stream of its own; what it lies in is used by both.
                beside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(beside):
                    tokens = tokens.pin_memory().to("cuda", non_blocking=True)
                torch.cuda.current_stream().wait_stream(beside)
                tokens.record_stream(torch.cuda.current_stream())
            with torch.autocast(args.device, dtype=torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:]) / args.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if has_gpu:
            torch.cuda.synchronize()
            # What was asked for is the same under every allocator; what that takes of blocks is not.
            live.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
            allocated.append(torch.cuda.max_memory_allocated())
            reserved.append(torch.cuda.max_memory_reserved())
        losses.append(total.hex())
        seconds.append(time.perf_counter() - began)
    said = json.dumps(
        {
            "losses": losses,
            "seconds": seconds,
            "peak_live_bytes": live,
            "peak_allocated_bytes": allocated,
            "peak_reserved_bytes": reserved,
            "backend": torch.cuda.memory.get_allocator_backend() if has_gpu else None,
            "torch": torch.__version__,
        }
    )
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(said)
    else:
        print(said)


if __name__ == "__main__":
    main()
