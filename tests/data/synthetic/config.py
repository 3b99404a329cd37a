"""Shapes of transformers, and the sizes that follow from them."""

from dataclasses import dataclass, replace

WEIGHT_BYTES = 2  # per element: bf16

WIDTHS = [768, 1024, 1280, 1536, 2048, 2560, 3072, 4096]
HEAD_WIDTHS = [64, 128]
VOCABULARIES = [30522, 32000, 50257, 50304, 128256, 151936]
LAYER_COUNTS = [8, 12, 16, 24, 32]


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a transformer, and how its training uses memory.

    Stream 0 is the compute stream.
    """

    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    is_gated: bool  # SwiGLU
    vocab: int
    layers: int
    has_flash_attention: bool
    has_dropout: bool
    has_rope: bool
    has_bias: bool
    has_tied_head: bool  # the head's weights are those of the embedding
    loss_chunks: int  # parts of the tokens for which head and loss run one after another
    has_fp32_grads: bool
    recompute_every: int = 0  # 1: all layers are recomputed, 2: every other one, 0: none
    is_sharded: bool = False  # ZeRO-3
    gather_stream: int = 0  # of the gathered weights of ZeRO-3
    input_stream: int = 0  # of the batches, which a loader copies
    offload_stream: int = 0  # of the copies of recomputed layers' inputs; 0: they stay
    experts: int = 0  # per layer; 0: one feed-forward network
    experts_per_token: int = 0
    expert_width: int = 0
    has_dynamic_experts: bool = False  # column `dynamic` marks the experts' requests

    @property
    def kv_width(self):
        return self.width * self.kv_heads // self.heads


def random_config(rng, **changes):
    """Draws a shape, and then replaces the fields in `changes`.

    Replacing afterwards keeps the random numbers the same. Other fields keep their drawn values:
    the feed-forward width is that of the drawn width, not of a replaced one.
    """
    width = rng.choice(WIDTHS)
    heads = width // rng.choice(HEAD_WIDTHS)
    is_gated = rng.random() < 0.5
    config = TransformerConfig(
        width=width,
        heads=heads,
        kv_heads=rng.choice([heads, max(1, heads // 4)]),
        ffn_width=int(width * (rng.choice([8 / 3, 3.5]) if is_gated else 4)) // 64 * 64,
        is_gated=is_gated,
        vocab=rng.choice(VOCABULARIES),
        layers=rng.choice(LAYER_COUNTS),
        has_flash_attention=rng.random() < 0.6,
        has_dropout=rng.random() < 0.35,
        has_rope=is_gated,
        has_bias=not is_gated,
        has_tied_head=rng.random() < 0.5,
        loss_chunks=rng.choice([1, 1, 1, 4]),
        has_fp32_grads=rng.random() < 0.25,
    )
    return replace(config, **changes)


def layer_elements(config):
    """Elements of a layer's parameters, by name."""
    width, ffn = config.width, config.width * config.ffn_width
    qkv_width = width + 2 * config.kv_width
    elements = {"ln1": width, "qkv": width * qkv_width, "proj": width * width, "ln2": width}
    if config.is_gated:
        elements["gate"] = ffn
    elements |= {"up": ffn, "down": ffn}
    if config.has_bias:
        elements |= {"qkv.b": qkv_width, "proj.b": width}
        elements |= {"up.b": config.ffn_width, "down.b": width}
    return elements


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of a micro-batch's activations."""

    tokens: int
    hidden: int
    dropout_mask: int
    statistics: int  # of a normalization
    queries: int
    keys: int
    qkv: int
    ffn: int
    scores: int
    log_sums: int  # of flash attention's softmax


def activation_bytes(config, batch, length):
    tokens = batch * length
    return ActivationBytes(
        tokens=tokens,
        hidden=2 * tokens * config.width,
        dropout_mask=tokens * config.width,
        statistics=4 * tokens,
        queries=2 * tokens * config.width,
        keys=2 * tokens * config.kv_width,
        qkv=2 * tokens * (config.width + 2 * config.kv_width),
        ffn=2 * tokens * config.ffn_width,
        scores=2 * batch * config.heads * length * length,
        log_sums=4 * batch * config.heads * length,
    )
