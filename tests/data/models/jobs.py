"""The jobs. A job's function builds a model and trains it; its docstring is the row of the table.

A job's name seeds its random numbers, so that it has the same batches each time.
"""

import torch
import torch.nn.functional as F
from torch import nn

from layers import BF16, FP32, META, Decoder, LayerConfig, LoRALinear, RMSNorm, floats, tokens
from networks import T5, ConvNeXt, UNet, ViT
from recorder import Recorder
from training import Adam, HostOptimizer, ShardedAdam, pipeline, train

JOBS = {}


def job(function):
    JOBS[function.__name__.replace("_", "-")] = function
    return function


def describe(name):
    return " ".join(JOBS[name].__doc__.split())


def build(make_model, dtype=BF16):
    """Makes a model on the meta device, in its type."""
    torch.set_default_dtype(dtype)
    with META:
        model = make_model()
    torch.set_default_dtype(FP32)
    return Recorder.current.track_modules(model)


def gpt(layers, width, heads, positions, attention="flash"):
    config = LayerConfig(
        width, heads, 4 * width, attention=attention, has_fused_qkv=True, has_bias=True, dropout=0.1
    )
    return build(lambda: Decoder(layers, config, 50257, positions=positions))


def llama_layer(width=4096, heads=32, ffn_width=11008, **options):
    return LayerConfig(
        width, heads, ffn_width, norm=RMSNorm, is_gated=True, activation=F.silu, **options
    )


def llama(layers, config, vocab=32000, **options):
    return Decoder(layers, config, vocab, has_rope=True, **options)


@job
def gpt2_large_adamw(rng):
    """GPT-2 large, unfused attention with dropout, 4 micro-batches of 6 x 1,024, AdamW one tensor
    at a time"""
    model = gpt(36, 1280, 20, 1024, attention="unfused")
    optimizer = Adam(model, is_foreach=False)
    train(lambda step, micro: model(tokens(6, 1024), tokens(6, 1024)), optimizer, 3, 4)


@job
def llama8b_1f1b(rng):
    """Llama-3-8B, pipeline stage 0 of 4 (8 layers), 1F1B, 8 micro-batches of 1 x 2,048, fp32
    gradient buffers"""
    config = llama_layer(kv_heads=8, ffn_width=14336)
    model = build(lambda: llama(8, config, 128256, is_last=False))
    optimizer = Adam(model, is_foreach=False, has_main_grads=True)
    pipeline([model], optimizer, 1, 2048, 4096, steps=4, micro_batches=8, stages=4)


@job
def llama7b_interleaved_full(rng):
    """Llama-2-7B, pipeline stage 0 of 4, interleaved 1F1B (2 chunks of 4 layers), full
    recomputation, 8 micro-batches of 4 x 4,096, fp32 gradient buffers"""

    def chunk(is_first):
        return llama(4, llama_layer(), has_full_recompute=True, is_first=is_first, is_last=False)

    chunks = build(lambda: nn.ModuleList([chunk(True), chunk(False)]))
    optimizer = Adam(chunks, is_foreach=False, has_main_grads=True)
    pipeline(list(chunks), optimizer, 4, 4096, 4096, steps=4, micro_batches=8, stages=4)


@job
def llama1b_selective(rng):
    """Llama with 1.2 billion parameters, unfused attention with selective recomputation,
    4 micro-batches of 2 x 2,048, foreach AdamW"""
    config = llama_layer(2048, 16, 5632, kv_heads=4, attention="selective")
    model = build(lambda: llama(24, config))
    train(lambda step, micro: model(tokens(2, 2048), tokens(2, 2048)), Adam(model), 4, 4)


@job
def llama7b_lora(rng):
    """Llama-2-7B with LoRA of rank 16 on each linear layer of a frozen base, 2 micro-batches of
    2 sequences, each batch padded to a random length from 512 to 1,792 tokens"""
    model = build(lambda: llama(32, llama_layer(linear=LoRALinear)))
    norms = (module for module in model.modules() if isinstance(module, RMSNorm))
    for module in model.embed, model.norm, model.head, *norms:
        module.requires_grad_(False)

    def loss(step, micro):
        length = rng.randrange(512, 1793)
        return model(tokens(2, length), tokens(2, length))

    train(loss, Adam(model), 4, 2)


@job
def llama7b_zero3(rng):
    """Llama-2-7B, ZeRO-3 over 8 ranks with prefetch of the next layer, 2 micro-batches of
    1 x 3,072"""
    with Recorder.current.paused():  # the weights are those in the gathered buffers
        model = build(lambda: llama(32, llama_layer()))
    optimizer = ShardedAdam([model.embed, *model.layers, model.norm, model.head], 8)
    train(lambda step, micro: model(tokens(1, 3072), tokens(1, 3072)), optimizer, 4, 2)


@job
def vit_l16(rng):
    """ViT-L/16, batch 128, dropout 0.1, foreach AdamW; every second batch has 97 images"""
    config = LayerConfig(
        1024, 16, 4096, has_fused_qkv=True, has_bias=True, is_causal=False, dropout=0.1
    )
    model = build(lambda: ViT(24, config, 16, 197))

    def loss(step, micro):
        batch = 97 if step % 2 else 128
        return model(floats(batch, 3, 224, 224, dtype=FP32).to(BF16), tokens(batch))

    train(loss, Adam(model), 6)


@job
def moe_top2(rng):
    """Decoder with 8 experts per layer, top-2 routing, random token counts at each call,
    2 micro-batches of 4 x 2,048"""
    config = llama_layer(1536, 12, 4096, kv_heads=4, expert_rng=rng)
    model = build(lambda: llama(12, config))
    optimizer = Adam(model, is_foreach=False)
    train(lambda step, micro: model(tokens(4, 2048), tokens(4, 2048)), optimizer, 4, 2)


@job
def bert_lengths(rng):
    """BERT-large, masked tokens, unfused attention with dropout, batch 40, each batch padded to a
    length from 96 to 512 tokens"""
    config = LayerConfig(
        1024, 16, 4096, attention="unfused", has_bias=True, is_causal=False, dropout=0.1
    )
    model = build(lambda: Decoder(24, config, 30522, positions=512))

    def loss(step, micro):
        length = rng.choice((512, rng.randrange(96, 513), rng.randrange(96, 513)))
        masked = rng.randrange(length * 5, length * 7)
        bias = floats(40, 1, 1, length)
        return model(tokens(40, length), tokens(masked), bias=bias, pick=tokens(masked))

    train(loss, Adam(model), 6)


@job
def convnext_sizes(rng):
    """ConvNeXt-B in fp32, batch 56, images of a random size from 176 to 251 pixels at each step,
    AdamW, moving average of the weights"""
    model = build(lambda: ConvNeXt((3, 3, 27, 3), (128, 256, 512, 1024)), FP32)
    average = [p.detach().clone() for p in model.parameters()]

    def loss(step, micro):
        size = rng.randrange(176, 252)
        return model(floats(56, 3, size, size, dtype=FP32), tokens(56))

    def update_average(step):
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 1e-4)

    train(loss, Adam(model), 5, after=update_average)


@job
def unet_diffusion(rng):
    """Stable Diffusion 1.5's U-Net, latents in buckets of aspect ratios, 2 micro-batches of 8,
    AdamW, moving average of the weights"""
    model = build(UNet)
    average = [p.detach().float() for p in model.parameters()]

    def loss(step, micro):
        h, w = rng.choice(((64, 64), (64, 64), (48, 80), (80, 48), (56, 72), (72, 56)))
        latents, noise = floats(8, 4, h, w), floats(8, 4, h, w)
        predicted = model(latents + noise, floats(8, 320), floats(8, 77, 768)).float()
        return F.mse_loss(predicted, noise.float())

    def update_average(step):
        for mean, p in zip(average, model.parameters()):
            mean.lerp_(p.detach().float(), 1e-4)

    train(loss, Adam(model), 4, 2, update_average)


@job
def t5_large_targets(rng):
    """T5-large v1.1, unfused attention with relative biases, 3 micro-batches of 8; sources of 512
    tokens, targets of 16 to 230"""
    model = build(lambda: T5(24, 1024, 16, 2816))

    def loss(step, micro):
        return model(tokens(8, 512), tokens(8, int(rng.triangular(16, 230, 60))))

    train(loss, Adam(model, is_foreach=False, has_main_grads=True), 3, 3)


@job
def gpt_eval(rng):
    """GPT with 1.4 billion parameters, fused attention, 4 micro-batches of 4 x 1,024; after each
    step an evaluation of 2 batches of 16 x 1,024 without gradients"""
    model = gpt(24, 2048, 16, 1024)

    @torch.no_grad()
    def evaluate(step):
        for _ in range(2):
            model(tokens(16, 1024), tokens(16, 1024))

    optimizer = Adam(model, has_main_grads=True)
    train(lambda step, micro: model(tokens(4, 1024), tokens(4, 1024)), optimizer, 5, 4, evaluate)


@job
def opt3b_offload(rng):
    """GPT with 2.8 billion parameters, fused attention, optimizer on the host, 3 micro-batches of
    4 sequences packed to 1,024 to 1,536 tokens"""
    model = gpt(32, 2560, 32, 2048)

    def loss(step, micro):
        length = 1024 + 64 * rng.randrange(9)
        return model(tokens(4, length), tokens(4, length))

    train(loss, HostOptimizer(model), 4, 3)
