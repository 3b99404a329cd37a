"""Convolutional networks: a residual classifier, and a generator with its discriminator."""

import math

from optimizers import Gradients, Optimizer

MIB = 1 << 20
CHANNELS = [[64, 128, 256, 512], [96, 192, 384, 768], [128, 256, 512, 1024]]
DEPTHS = [[2, 2, 2, 2], [3, 4, 6, 3], [3, 3, 9, 3], [3, 3, 27, 3]]
WORKSPACES_MIB = [0.5, 4, 17.3, 64]
CLASSES = 1000
EVALUATION_BATCHES = 3

# Height and width of a micro-batch's images, by random numbers and the side of a square.
IMAGE_SIZES = {
    "fixed": lambda rng, side: (side, side),
    "scales": lambda rng, side: (side * rng.choice([5, 6, 7, 8, 9, 10]) // 8,) * 2,
    "random": lambda rng, side: (
        rng.randint(side * 5 // 8, side), rng.randint(side * 5 // 8, side)
    ),
    "aspects": lambda rng, side: rng.choice([
        (side, side), (side * 3 // 4, side * 4 // 3), (side * 4 // 3, side * 3 // 4),
        (side // 2, side * 2),
    ]),
}


class ConvNet:
    """Residual classifier of four stages, with activations of `element_bytes` per number."""

    def __init__(self, trace, rng, channels, depths, element_bytes, has_bottleneck):
        self.trace, self.rng, self.channels = trace, rng, channels
        self.element_bytes, self.has_bottleneck = element_bytes, has_bottleneck
        self.stages = [
            [f"stages.{stage}.blocks.{block}" for block in range(depth)]
            for stage, depth in enumerate(depths)
        ]
        self.workspaces = {}  # bytes of convolutions' workspaces, by stage
        self.elements = {}  # by parameter
        for width, blocks in zip(channels, self.stages):
            for name in blocks:
                self.elements[f"{name}.conv1"] = width * width * (1 if has_bottleneck else 9)
                self.elements[f"{name}.bn1"] = 2 * width
                self.elements[f"{name}.conv2"] = width * width * 9
                self.elements[f"{name}.bn2"] = 2 * width
                if has_bottleneck:
                    self.elements[f"{name}.conv3"] = width * 4 * width
        self.elements["fc"] = channels[-1] * CLASSES

    def workspace(self, stage):
        # A number is drawn at each call, though only the first one of a stage counts: the later
        # random numbers of the job follow from it.
        size = int(self.rng.choice(WORKSPACES_MIB) * MIB)
        return self.workspaces.setdefault(stage, size)

    def forward_block(self, name, x, width, size, workspace):
        """Returns the output and the stack of what backward uses, with the input at its bottom."""
        trace = self.trace
        saved = [x]
        for conv, norm, factor in (("conv1", "bn1", 1), ("conv2", "bn2", 2)):
            scratch = trace.alloc(workspace * factor, f"{name}.{conv}")
            saved.append(trace.alloc(size, f"{name}.{conv}"))
            trace.free(scratch)
            saved.append(trace.alloc(size, f"{name}.{norm}"))
            saved.append(trace.alloc(8 * width, f"{name}.{norm}"))
        if self.has_bottleneck:
            saved.append(trace.alloc(4 * size, f"{name}.conv3"))
        return trace.alloc(size, f"{name}.add"), saved

    def forward(self, batch, height, width, is_training):
        """Returns the last output, and for each block its name, activation bytes and stack."""
        trace, blocks = self.trace, []
        x = trace.alloc(batch * 3 * height * width * 4, "data")
        height, width = math.ceil(height / 4), math.ceil(width / 4)
        for stage, channels in enumerate(self.channels):
            if stage:
                height, width = max(1, height // 2), max(1, width // 2)
            size = batch * channels * height * width * self.element_bytes
            for name in self.stages[stage]:
                workspace = self.workspace(stage)
                out, saved = self.forward_block(name, x, channels, size, workspace)
                if is_training:
                    blocks.append((name, size, workspace, saved))
                else:
                    trace.free(saved)
                x = out
        return x, blocks

    def head(self, batch):
        """Returns the pooled activations, the logits and the loss."""
        pooled = self.trace.alloc(batch * self.channels[-1] * 4, "pool")
        return pooled, self.trace.alloc(batch * CLASSES * 4, "fc"), self.trace.alloc(4, "loss")

    def train(self, batch, height, width, grads):
        trace = self.trace
        trace.phase = "forward"
        x, blocks = self.forward(batch, height, width, is_training=True)
        pooled, logits, loss = self.head(batch)
        trace.phase = "backward"
        logits_gradient = trace.alloc(batch * CLASSES * 4, "loss")
        trace.free(logits, loss)
        grads.require("fc")
        _, last_size, _, _ = blocks[-1]
        gradient = trace.alloc(last_size, "pool")
        trace.free(logits_gradient, pooled, x)
        for name, size, workspace, saved in reversed(blocks):
            gradient = self.backward_block(name, size, workspace, saved, gradient, grads)
        trace.free(gradient)

    def backward_block(self, name, size, workspace, saved, gradient, grads):
        trace = self.trace
        if self.has_bottleneck:
            reduced = trace.alloc(size, f"{name}.conv3")
            trace.free(saved.pop())
            grads.require(f"{name}.conv3")
            trace.free(gradient)
            gradient = reduced
        from_norm2 = trace.alloc(size, f"{name}.bn2")
        trace.free(saved.pop(), saved.pop())
        scratch = trace.alloc(workspace * 3, f"{name}.conv2")
        grads.require(f"{name}.conv2")
        from_conv2 = trace.alloc(size, f"{name}.conv2")
        trace.free(scratch, from_norm2, saved.pop())
        from_norm1 = trace.alloc(size, f"{name}.bn1")
        trace.free(from_conv2, saved.pop(), saved.pop())
        grads.require(f"{name}.conv1")
        from_conv1 = trace.alloc(size, f"{name}.conv1")
        trace.free(from_norm1, saved.pop())
        result = trace.alloc(size, f"{name}.add")
        trace.free(from_conv1, gradient, saved.pop())
        return result

    def evaluate(self, batch, side):
        self.trace.phase = "other"
        x, _ = self.forward(batch, side, side, is_training=False)
        self.trace.free(x, *self.head(batch))


def train_convnet(
    trace, rng, scale, iterations, sizes="fixed", evaluation_period=0, has_average=False,
    micro_batches=1,
):
    channels, depths = rng.choice(CHANNELS), rng.choice(DEPTHS)
    batch = max(1, int(rng.choice([16, 32, 64, 128]) * scale))
    side = rng.choice([192, 224, 256, 384])
    element_bytes = rng.choice([2, 4])
    rule = rng.choice(["sgd", "adamw", "foreach", "lion"])
    model = ConvNet(trace, rng, channels, depths, element_bytes, rng.random() < 0.5)
    elements = model.elements
    for name in elements:
        trace.alloc(4 * elements[name], name)
    optimizer = Optimizer(trace, rule, elements, weight_bytes=4)
    grads = Gradients(trace, elements, weight_bytes=4, grad_bytes=4)
    for name in elements if has_average else ():
        trace.alloc(4 * elements[name], name)
    for iteration in range(iterations):
        trace.iteration = iteration
        for _ in range(micro_batches):
            height, width = IMAGE_SIZES[sizes](rng, side)
            model.train(batch, height, width, grads)
        optimizer.step(grads, has_clipping=False)
        for name in elements if has_average else ():
            trace.alloc_and_free(4 * elements[name], name)
        if evaluation_period and iteration % evaluation_period == evaluation_period - 1:
            for _ in range(EVALUATION_BATCHES):
                model.evaluate(2 * batch, side)


class Ladder:
    """Convolutions that double the side of an image at each level, or halve it."""

    def __init__(self, trace, name, levels, channels, batch, is_growing):
        self.trace, self.name, self.levels = trace, name, levels
        self.channels, self.batch, self.is_growing = channels, batch, is_growing
        self.elements = {}  # by parameter
        for level in range(levels):
            depth = level if is_growing else levels - level
            self.elements[f"{name}.{level}.conv"] = self.channels_at(depth) ** 2 * 9

    def channels_at(self, depth):
        return self.channels >> min(depth // 2, 3)

    def forward(self):
        """Returns for each level its parameter, activation bytes and saved activations."""
        trace, levels = self.trace, []
        for level in range(self.levels):
            depth = level if self.is_growing else self.levels - 1 - level
            size = self.batch * self.channels_at(depth) * (8 << depth) ** 2 * 4
            name = f"{self.name}.{level}"
            saved = [trace.alloc(size, name), trace.alloc(size, name)]
            levels.append((f"{name}.conv", size, saved))
            trace.alloc_and_free(size // 2 + 512, f"{name}.w")
        return levels

    def backward(self, levels, grads=None):
        """Runs backward; without `grads` only the input's gradient is computed."""
        trace = self.trace
        _, last_size, _ = levels[-1]
        gradient = trace.alloc(last_size, "g")
        for name, size, saved in reversed(levels):
            trace.free(saved.pop())
            result = trace.alloc(size, name)
            trace.free(saved.pop(), gradient)
            gradient = result
            if grads is not None:
                grads.add(name)
        trace.free(gradient)


def train_gan(trace, rng, scale, iterations):
    """Trains a discriminator, with a penalty at each fourth step, and then the generator."""
    batch = max(1, int(16 * scale))
    channels = rng.choice([256, 512])
    levels = int(math.log2(rng.choice([128, 256]))) - 2
    generator = Ladder(trace, "g", levels, channels, batch, is_growing=True)
    discriminator = Ladder(trace, "d", levels, channels, batch, is_growing=False)
    for model in (generator, discriminator):
        for name, elements in model.elements.items():
            trace.alloc(4 * elements, name)
    generator_optimizer = Optimizer(trace, "adamw", generator.elements, weight_bytes=4)
    discriminator_optimizer = Optimizer(trace, "foreach", discriminator.elements, weight_bytes=4)
    generator_grads = Gradients(trace, generator.elements, 4, 4)
    discriminator_grads = Gradients(trace, discriminator.elements, 4, 4)
    for iteration in range(iterations):
        trace.iteration, trace.phase = iteration, "forward"
        for _, _, saved in generator.forward():
            trace.free(saved)
        for _ in range(2):  # real images, generated images
            discriminator.backward(discriminator.forward(), discriminator_grads)
        if iteration % 4 == 0:
            first, second = discriminator.forward(), discriminator.forward()
            discriminator.backward(second, discriminator_grads)
            discriminator.backward(first, discriminator_grads)
        discriminator_optimizer.step(discriminator_grads, has_clipping=False)
        trace.phase = "other"
        images, scores = generator.forward(), discriminator.forward()
        discriminator.backward(scores)
        generator.backward(images, generator_grads)
        generator_optimizer.step(generator_grads, has_clipping=False)
