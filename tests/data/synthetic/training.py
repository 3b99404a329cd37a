"""Training loops of transformers: micro-batches, lengths, evaluation, adapters, generation."""

from dataclasses import dataclass, replace

from config import WEIGHT_BYTES, random_config
from optimizers import RULES, Gradients, Optimizer
from transformer import Transformer

# Limits of the layers' parameters, so that weights and states fit a device.
MAX_ELEMENTS, MAX_LORA_ELEMENTS = 1.8e9, 6e9
MIN_LAYERS, MAX_LORA_LAYERS = 4, 24
MIN_LENGTH = 64
LORA_RANKS = [8, 16, 64]


def draw_length(lengths, rng, longest, iteration, micro_batch):
    """Tokens of each sequence of a micro-batch; `lengths` is how they vary."""
    match lengths:
        case "fixed":
            return longest
        case "multiples":
            return max(MIN_LENGTH, rng.randint(longest // 8, longest) // 8 * 8)
        case "any":
            return max(MIN_LENGTH, rng.randint(longest // 4, longest))
        case "buckets":
            return longest * rng.choice([2, 3, 4, 6, 8]) // 8
        case "growing":
            return max(MIN_LENGTH, longest // 4 + longest * 3 // 4 * (iteration + 1) // 8)
        case "token-budget":
            return max(MIN_LENGTH, rng.randint(longest // 4, longest) // 8 * 8)
        case "short-third":
            return longest if iteration % 3 else longest * 3 // 4 // 8 * 8
        case "spike":
            return longest if (iteration, micro_batch) == (4, 0) else longest // 2
    raise ValueError(f"no lengths {lengths!r}")


@dataclass(frozen=True)
class Training:
    """How a transformer is trained. What is None is drawn."""

    micro_batches: int = 1
    lengths: str = "fixed"  # see `draw_length`; "token-budget" has more of the shorter sequences
    rule: str | None = None  # of the optimizer
    is_keeping_grads: bool | None = None  # gradients stay from one iteration to the next
    evaluation_period: int = 0  # iterations from one evaluation to the next; 0: none
    has_lora: bool = False  # adapters on frozen weights
    has_average: bool = False  # moving average of the weights
    has_checkpoints: bool = False  # a copy of the weights, every third iteration
    has_rollout: bool = False  # generation before each iteration


class TransformerJob:
    """A transformer and what it is trained with. Random numbers are drawn in a fixed order."""

    def __init__(self, trace, rng, scale, training, changes):
        self.trace, self.rng, self.training = trace, rng, training
        config = limit_layers(random_config(rng, **changes), training)
        self.model = Transformer(trace, rng, config)
        self.model.allocate_weights()
        self.optimizer = Optimizer(
            trace, training.rule or rng.choice(RULES), self.model.trained_elements, WEIGHT_BYTES,
            has_master=rng.random() < 0.4,
        )
        # Longest sequence: unfused attention has no room for the scores of 2,048 tokens.
        self.length = rng.choice([256, 512, 1024] + [2048] * config.has_flash_attention)
        self.batch = max(1, int(rng.choice([4, 8, 16, 32]) * scale))
        self.is_keeping_grads = training.is_keeping_grads
        if self.is_keeping_grads is None:
            self.is_keeping_grads = rng.random() >= 0.7
        self.grads = self.model.new_gradients()
        if training.has_lora:
            self.add_adapters()
        if training.has_average:
            for name, elements in self.model.elements.items():
                trace.alloc(4 * elements, f"{name}.ema")

    def add_adapters(self):
        config, rank, adapters = self.model.config, self.rng.choice(LORA_RANKS), {}
        for layer in self.model.layers:
            for part in ("qkv", "proj", "up", "down"):
                width = config.ffn_width if part == "down" else config.width
                for side in "AB":
                    name = f"{layer.name}.{part}.lora_{side}"
                    adapters[name] = rank * width
                    self.trace.alloc(4 * adapters[name], name)
        self.optimizer.elements = adapters
        self.grads = Gradients(self.trace, adapters, weight_bytes=4, grad_bytes=4)

    def run(self, iterations):
        for iteration in range(iterations):
            self.trace.iteration = iteration
            if self.training.has_rollout:
                generate(self.trace, self.rng, self.model.config, self.batch, self.length)
            self.run_micro_batches(iteration)
            self.update_weights()
            self.run_hooks(iteration)

    def run_micro_batches(self, iteration):
        for micro_batch in range(self.training.micro_batches):
            self.trace.micro_batch = micro_batch
            lengths, batch = self.training.lengths, self.batch
            length = draw_length(lengths, self.rng, self.length, iteration, micro_batch)
            if lengths == "token-budget":
                batch = max(1, self.batch * self.length // length)
            self.model.train(batch, length, self.grads)
        self.trace.micro_batch = ""

    def update_weights(self):
        if self.training.has_lora:
            for name in self.optimizer.elements:
                self.grads.require(name)
        if self.model.config.is_sharded:
            self.grads.free()  # the optimizer is on the host
        else:
            self.optimizer.step(self.grads, self.is_keeping_grads)

    def run_hooks(self, iteration):
        """Runs what follows the optimizer's step: average, checkpoint and evaluation."""
        trace, training, elements = self.trace, self.training, self.model.elements
        if training.has_average:
            for name in elements:
                trace.alloc_and_free(4 * elements[name], f"{name}.ema")
        if training.has_checkpoints and iteration % 3 == 2:
            trace.phase = "other"
            trace.free([trace.alloc(4 * elements[name], f"{name}.save") for name in elements])
        period = training.evaluation_period
        if period and iteration % period == period - 1:
            for _ in range(self.rng.choice([2, 3])):
                self.model.evaluate(2 * self.batch, self.length)


def limit_layers(config, training):
    square = config.width * config.width
    elements = square * config.layers * 12
    if training.has_lora:
        return replace(config, layers=MAX_LORA_LAYERS) if elements > MAX_LORA_ELEMENTS else config
    if elements > MAX_ELEMENTS and not config.is_sharded:
        return replace(config, layers=max(MIN_LAYERS, int(MAX_ELEMENTS / (12 * square))))
    return config


def train_transformer(trace, rng, scale, iterations, training, changes):
    TransformerJob(trace, rng, scale, training, changes).run(iterations)


def generate(trace, rng, config, batch, longest):
    """Generates tokens after a prompt. Keys and values of each layer grow by reallocation."""
    prompt = longest // 4
    steps = rng.randint(24, 40)

    def cache_bytes(tokens):
        return 2 * batch * tokens * config.kv_width

    trace.phase = "other"
    caches = []  # by layer: keys and values
    for index in range(config.layers):
        caches.append([trace.alloc(cache_bytes(prompt), f"layers.{index}.{n}") for n in "kv"])
    for step in range(1, steps):
        x = trace.alloc(2 * batch * config.width, "embed")
        for index, cache in enumerate(caches):
            name = f"layers.{index}"
            qkv = trace.alloc(2 * batch * (config.width + 2 * config.kv_width), f"{name}.qkv")
            for side, part in enumerate("kv"):
                grown = trace.alloc(cache_bytes(prompt + 8 * step), f"{name}.{part}")
                trace.free(cache[side])
                cache[side] = grown
            out = trace.alloc(2 * batch * config.width, f"{name}.attn")
            trace.free(qkv)
            up = trace.alloc(2 * batch * config.ffn_width, f"{name}.up")
            trace.free(out, up)
        logits = trace.alloc(4 * batch * config.vocab, "head")
        trace.alloc_and_free(4 * batch * config.vocab, "head")
        trace.free(logits, x)
    trace.free(*caches)


def train_with_metrics(trace, rng, scale, iterations):
    """Trains while buffers of random sizes are allocated between steps and freed much later."""
    config = random_config(
        rng, width=1024, heads=16, kv_heads=16, layers=12, ffn_width=4096, is_gated=False,
        has_rope=False, has_bias=True, input_stream=7,
    )
    model = Transformer(trace, rng, config)
    model.allocate_weights()
    optimizer = Optimizer(trace, "adamw", model.trained_elements, WEIGHT_BYTES, has_master=True)
    grads = model.new_gradients()
    batch = max(1, int(16 * scale))
    buffers = []
    for iteration in range(iterations):
        trace.iteration = iteration
        for _ in range(3):
            model.train(batch, 512, grads)
            buffers.append(trace.alloc(rng.randint(1, 40) << 20, "metrics"))
            if len(buffers) > 5:
                trace.free(buffers.pop(rng.randrange(len(buffers))))
        optimizer.step(grads)
