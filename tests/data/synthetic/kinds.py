"""The kinds of jobs, by name. A kind and a seed decide a job."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from graph import train_graph_network
from trace import Trace
from training import Training, train_transformer, train_with_metrics
from vision import train_convnet, train_gan

GIB = 1 << 30
ITERATIONS = 8
# The batch is scaled until the peak of live bytes is between these limits, if that is possible.
PEAK_BYTES = (1 * GIB, 60 * GIB)
MIN_SCALE = 1 / 64
MAX_ATTEMPTS = 14


@dataclass(frozen=True)
class Kind:
    description: str
    run: Callable  # with a trace, random numbers, the scale of the batch, and iterations


def transformer(description, training=Training(), **changes):
    """A kind of transformer; `changes` replace parts of the drawn shape."""
    return Kind(description, partial(train_transformer, training=training, changes=changes))


def convnet(description, **options):
    return Kind(description, partial(train_convnet, **options))


DENSE = {
    "dense": transformer("One micro-batch of a fixed length"),
    "dense-accum": transformer("Four micro-batches per iteration", Training(micro_batches=4)),
    "dense-keepgrad": transformer(
        "Gradients stay from one iteration to the next",
        Training(is_keeping_grads=True, micro_batches=2),
    ),
    "recomp": transformer("Full recomputation", recompute_every=1),
    "recomp-half": transformer(
        "Recomputation of every other layer", Training(micro_batches=2), recompute_every=2
    ),
    "foreach": transformer("AdamW on all parameters at once", Training(rule="foreach")),
    "adafactor": transformer("Adafactor", Training(rule="adafactor")),
    "muon": transformer("Muon", Training(rule="muon", micro_batches=2)),
    "adam8": transformer("Adam with 8-bit states", Training(rule="adam8")),
}

LENGTHS = {
    "len8": transformer("Lengths that are multiples of 8", Training(lengths="multiples")),
    "len1": transformer("Lengths of any number", Training(lengths="any", micro_batches=2)),
    "bucket": transformer("Lengths of five buckets", Training(lengths="buckets")),
    "grow": transformer("Lengths that grow", Training(lengths="growing")),
    "tokens": transformer(
        "Random lengths, with more sequences where they are short",
        Training(lengths="token-budget", micro_batches=2),
    ),
    "last": transformer(
        "Shorter sequences in every third iteration", Training(lengths="short-third")
    ),
    "spike": transformer("One micro-batch of twice the length", Training(lengths="spike")),
    "len-recomp": transformer(
        "Random lengths with full recomputation", Training(lengths="multiples"), recompute_every=1
    ),
    "len-unfused": transformer(
        "Random lengths with unfused attention and dropout", Training(lengths="multiples"),
        has_flash_attention=False, has_dropout=True,
    ),
}

EXPERTS = {
    "moe": transformer(
        "8 experts, 2 per token", experts=8, experts_per_token=2, expert_width=1408, layers=8
    ),
    "moe64": transformer(
        "64 experts, 6 per token", experts=64, experts_per_token=6, expert_width=512, layers=6
    ),
    "moe-dyn": transformer(
        "16 experts, 4 per token, whose requests are marked as dynamic", Training(micro_batches=2),
        experts=16, experts_per_token=4, expert_width=768, layers=8, has_dynamic_experts=True,
    ),
}

SHARDED = {
    "zero3": transformer(
        "ZeRO-3 on the compute stream", is_sharded=True, recompute_every=1, width=4096, heads=32,
        kv_heads=8, layers=24,
    ),
    "zero3-streams": transformer(
        "ZeRO-3 on a side stream", Training(micro_batches=2), is_sharded=True, gather_stream=3,
        recompute_every=1, width=4096, heads=32, kv_heads=32, layers=24,
    ),
    "zero3-norecomp": transformer(
        "ZeRO-3 on a side stream, without recomputation", is_sharded=True, gather_stream=3,
        width=2048, heads=16, kv_heads=16, layers=24,
    ),
}

ADAPTERS = {
    "lora": transformer("LoRA", Training(has_lora=True, rule="adamw")),
    "lora-len": transformer(
        "LoRA with random lengths", Training(has_lora=True, rule="adamw", lengths="multiples")
    ),
    "lora-recomp": transformer(
        "LoRA with random lengths and full recomputation",
        Training(has_lora=True, rule="adam8", lengths="multiples", micro_batches=2),
        recompute_every=1,
    ),
}

LOOPS = {
    "eval": transformer("Evaluation at every second iteration", Training(evaluation_period=2)),
    "eval3": transformer(
        "Evaluation at every third iteration, lengths of five buckets",
        Training(evaluation_period=3, lengths="buckets"),
    ),
    "ema": transformer("Moving average of the weights", Training(has_average=True)),
    "ckpt": transformer("Copy of the weights for a checkpoint", Training(has_checkpoints=True)),
    "rl": transformer(
        "Generation before each iteration, random lengths",
        Training(has_rollout=True, lengths="multiples"),
    ),
    "rl-fixed": transformer("Generation before each iteration", Training(has_rollout=True)),
    "prefetch": transformer(
        "Batches on a side stream", Training(micro_batches=2), input_stream=5
    ),
    "offload": transformer(
        "Activations offloaded on a side stream", Training(micro_batches=2), recompute_every=1,
        offload_stream=4,
    ),
    "offload-len": transformer(
        "Activations offloaded on a side stream, random lengths", Training(lengths="multiples"),
        recompute_every=1, offload_stream=4,
    ),
}

OTHERS = {
    "vision": convnet("Convolutional network"),
    "vision-multi": convnet("Square images of six sizes", sizes="scales"),
    "vision-rand": convnet("Images of random sizes", sizes="random"),
    "vision-aspect": convnet(
        "Images of four aspect ratios, moving average of the weights", sizes="aspects",
        has_average=True,
    ),
    "vision-eval": convnet("Evaluation at every second iteration", evaluation_period=2),
    "vision-accum": convnet(
        "Three micro-batches, each with images of one of six sizes", sizes="scales",
        micro_batches=3,
    ),
    "gan": Kind("Generator and discriminator", train_gan),
    "gnn": Kind("Graph network on sampled neighbourhoods", train_graph_network),
    "frag": Kind("Buffers of random sizes that outlive their iteration", train_with_metrics),
}

KINDS = DENSE | LENGTHS | EXPERTS | SHARDED | ADAPTERS | LOOPS | OTHERS


def make(kind, seed, iterations=ITERATIONS):
    """Runs a job and returns its trace and the scale of its batch."""
    lowest, highest = PEAK_BYTES
    scale = 1.0
    for _ in range(MAX_ATTEMPTS):
        trace = Trace()
        # Each attempt draws the same numbers, so that only the batch differs.
        KINDS[kind].run(trace, random.Random(f"{kind}/{seed}"), scale, iterations)
        used_scale = scale
        if trace.peak_bytes < lowest:
            scale *= 2
        elif trace.peak_bytes > highest and scale > MIN_SCALE:
            scale /= 2
        else:
            break
    return trace, used_scale
