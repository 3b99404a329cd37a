"""Transformer layers on meta tensors, and the decoder that most jobs are made of.

Attribute names of modules are part of the traces (column `module`), and their order decides the
order of an optimizer's requests.
"""

from dataclasses import dataclass, replace
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import nn

from recorder import recompute

BF16, FP32, META = torch.bfloat16, torch.float32, torch.device("meta")


def tokens(*shape):
    return torch.empty(shape, dtype=torch.long, device=META)


def floats(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device=META)


def dropout(x, p):
    return torch.native_dropout(x, p, True)[0] if p and torch.is_grad_enabled() else x


def rotate(x, cos, sin):
    """Applies rotary position embeddings."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@dataclass(frozen=True)
class LayerConfig:
    """Shape of a transformer layer."""

    width: int
    heads: int
    ffn_width: int
    kv_heads: int | None = None  # None: as many as heads
    attention: str = "flash"  # or "unfused", or "selective": unfused, and recomputed in backward
    has_fused_qkv: bool = False  # one linear layer for queries, keys and values
    has_bias: bool = False
    has_cross_attention: bool = False
    is_causal: bool = True
    is_gated: bool = False
    activation: Callable = F.gelu
    dropout: float = 0.0
    norm: Callable = nn.LayerNorm
    linear: Callable = nn.Linear
    context_width: int | None = None  # of the memory in cross attention; None: the layer's width
    expert_rng: Any = None  # source of token counts of a mixture of experts; None: one plain MLP


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class LoRALinear(nn.Module):
    """Frozen linear layer with a trained low-rank update."""

    def __init__(self, in_width, out_width, bias=False, rank=16):
        super().__init__()
        self.base = nn.Linear(in_width, out_width, bias=bias).requires_grad_(False)
        self.down = nn.Linear(in_width, rank, bias=False)
        self.up = nn.Linear(rank, out_width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(dropout(x, 0.05))) * 2.0


class FlashAttention(torch.autograd.Function):
    """The tensors that FlashAttention-2 allocates; arguments are (batch, heads, length, size).

    Forward: the output and the fp32 log-sum-exp. Backward: three gradients, and an fp32
    accumulator and a row sum that are freed with the operator.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        out, log_sum_exp = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=FP32)
        ctx.save_for_backward(q, k, v, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, log_sum_exp = ctx.saved_tensors
        row_sum, accumulator = torch.empty_like(log_sum_exp), q.new_empty(q.shape, dtype=FP32)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Attention(nn.Module):
    """Multi-head attention over `x`, or from `x` to a memory of width `context_width`."""

    def __init__(self, config, context_width=None):
        super().__init__()
        self.config, width = config, config.width
        self.kv_heads = config.kv_heads or config.heads
        self.head_size = width // config.heads
        kv_width = self.kv_heads * self.head_size
        if config.has_fused_qkv:
            self.qkv = config.linear(width, width + 2 * kv_width, bias=config.has_bias)
        else:
            self.q = config.linear(width, width, bias=config.has_bias)
            self.k = config.linear(context_width or width, kv_width, bias=config.has_bias)
            self.v = config.linear(context_width or width, kv_width, bias=config.has_bias)
        self.o = config.linear(width, width, bias=config.has_bias)

    def split(self, x, heads):
        return x.view(*x.shape[:2], heads, self.head_size).transpose(1, 2)

    def unfused(self, q, k, v, bias):
        heads = self.config.heads
        if self.kv_heads != heads:
            k, v = (t.repeat_interleave(heads // self.kv_heads, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * self.head_size**-0.5
        if bias is not None:
            scores = scores + bias
        if self.config.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=META).triu(1)
            scores = scores.masked_fill(mask, -1e9)
        return dropout(F.softmax(scores, -1), self.config.dropout) @ v

    def forward(self, x, rope=None, bias=None, memory=None):
        heads = self.config.heads
        if self.config.has_fused_qkv:
            kv_width = self.kv_heads * self.head_size
            q, k, v = self.qkv(x).split((heads * self.head_size, kv_width, kv_width), -1)
        else:
            source = x if memory is None else memory
            q, k, v = self.q(x), self.k(source), self.v(source)
        q, k, v = self.split(q, heads), self.split(k, self.kv_heads), self.split(v, self.kv_heads)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if self.config.attention == "flash":
            y = FlashAttention.apply(q, k, v)
        elif self.config.attention == "selective":
            y = recompute(self.unfused, q, k, v, bias)
        else:
            y = self.unfused(q, k, v, bias)
        return self.o(y.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, width, ffn_width, has_bias=False, is_gated=False, activation=F.gelu,
                 linear=nn.Linear):
        super().__init__()
        self.up = linear(width, ffn_width, bias=has_bias)
        self.down = linear(ffn_width, width, bias=has_bias)
        self.activation = activation
        self.gate = linear(width, ffn_width, bias=has_bias) if is_gated else None

    def forward(self, x):
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Expert(MLP):
    def forward(self, x, rows, weights):
        return super().forward(x.index_select(0, rows)) * (
            weights.reshape(-1).index_select(0, rows)[:, None]
        )


class MoE(nn.Module):
    """Mixture of experts with top-2 routing.

    The number of tokens of each expert is drawn at each call, unevenly.
    """

    def __init__(self, width, ffn_width, rng, experts=8):
        super().__init__()
        self.router, self.rng = nn.Linear(width, experts, bias=False), rng
        self.experts = nn.ModuleList(
            Expert(width, ffn_width, is_gated=True, activation=F.silu) for _ in range(experts)
        )

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = F.softmax(self.router(flat).float(), -1).topk(2, -1)
        weights, order = weights.to(x.dtype), chosen.reshape(-1).argsort()
        shares = [self.rng.gammavariate(4, 1) for _ in self.experts]
        counts = [int(2 * len(flat) * share / sum(shares)) for share in shares]
        out = torch.zeros_like(flat)
        for expert, count in zip(self.experts, counts):
            rows = order[:count] // 2
            out = out.index_add(0, rows, expert(flat, rows, weights)) if count else out
        return out.view_as(x)


class Block(nn.Module):
    """Pre-norm transformer layer; a memory is read by cross attention."""

    def __init__(self, config):
        super().__init__()
        width, self.dropout = config.width, config.dropout
        self.norm1, self.norm2 = config.norm(width), config.norm(width)
        self.attn = Attention(config)
        if config.expert_rng is not None:
            self.mlp = MoE(width, config.ffn_width, config.expert_rng)
        else:
            self.mlp = MLP(width, config.ffn_width, config.has_bias, config.is_gated,
                           config.activation, config.linear)
        if config.has_cross_attention:
            self.norm3 = config.norm(width)
            cross = replace(config, is_causal=False, has_fused_qkv=False)
            self.cross = Attention(cross, config.context_width)

    def forward(self, x, rope=None, bias=None, memory=None):
        x = x + dropout(self.attn(self.norm1(x), rope, bias), self.dropout)
        if memory is not None:
            x = x + dropout(self.cross(self.norm3(x), memory=memory), self.dropout)
        return x + dropout(self.mlp(self.norm2(x)), self.dropout)


class Decoder(nn.Module):
    """Embedding, layers and head, or the part of them that a pipeline stage has.

    The input is tokens, or the output of the previous stage. With labels the output is the loss.
    """

    def __init__(self, layers, config, vocab, positions=0, has_rope=False, has_full_recompute=False,
                 is_first=True, is_last=True):
        super().__init__()
        width = config.width
        self.embed = nn.Embedding(vocab, width) if is_first else None
        self.place = nn.Embedding(positions, width) if positions else None
        self.layers = nn.ModuleList(Block(config) for _ in range(layers))
        self.rope_size = width // config.heads if has_rope else 0
        self.has_full_recompute = has_full_recompute
        if is_last:
            self.norm, self.head = config.norm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x, labels=None, memory=None, bias=None, pick=None):
        """`pick` has the rows that the head sees, which are the masked tokens; None: all rows."""
        if self.embed is not None:
            x = self.embed(x)
        if self.place is not None:
            x = x + self.place(torch.arange(x.shape[1], device=META))
        rope = None
        if self.rope_size:
            rope = tuple(x.new_empty(x.shape[1], self.rope_size) for _ in range(2))
        for layer in self.layers:
            if self.has_full_recompute:
                x = recompute(layer, x, rope, bias, memory)
            else:
                x = layer(x, rope, bias, memory)
        if labels is None:
            return x
        x = self.norm(x)
        if pick is not None:
            x = x.reshape(-1, x.shape[-1]).index_select(0, pick)
        logits = self.head(x).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))
