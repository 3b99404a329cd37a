"""A decoder: embedding, layers, head and loss, with recomputation, offloading and ZeRO-3."""

from config import WEIGHT_BYTES, activation_bytes, layer_elements
from layer import Layer
from optimizers import Gradients

CUBLAS_WORKSPACE = 8_519_680
RANKS = 8  # of ZeRO-3
INPUTS = 3  # token numbers, positions and labels


class Transformer:
    """A model on one device: what its weights and its passes allocate."""

    def __init__(self, trace, rng, config):
        self.trace, self.config = trace, config
        self.layers = [Layer(trace, rng, config, index) for index in range(config.layers)]
        self.layer_elements = layer_elements(config)
        self.elements = {"embed": config.vocab * config.width}  # by parameter
        for layer in self.layers:
            for name, elements in self.layer_elements.items():
                self.elements[f"{layer.name}.{name}"] = elements
        self.elements["norm"] = config.width
        if not config.has_tied_head:
            self.elements["head"] = config.vocab * config.width
        # Experts have gradients and optimizer states, but the trace leaves out their weights.
        self.trained_elements = dict(self.elements)
        for layer in self.layers:
            self.trained_elements |= layer.expert_elements()

    def allocate_weights(self):
        """Allocates the weights, or their shards of ZeRO-3, and the workspace of cuBLAS."""
        if self.config.is_sharded:
            for layer in self.layers:
                self.trace.alloc(4 * sum(self.layer_elements.values()) // RANKS, layer.name)
        else:
            for name, elements in self.elements.items():
                self.trace.alloc(WEIGHT_BYTES * elements, name)
        self.trace.alloc(CUBLAS_WORKSPACE, "cublas")

    def new_gradients(self):
        grad_bytes = 4 if self.config.has_fp32_grads else WEIGHT_BYTES
        return Gradients(self.trace, self.trained_elements, WEIGHT_BYTES, grad_bytes)

    def train(self, batch, length, grads):
        """Runs forward and backward of a micro-batch."""
        trace = self.trace
        sizes = activation_bytes(self.config, batch, length)
        trace.phase = "forward"
        inputs = self.load_inputs(sizes)
        x, saved = self.run_layers(sizes, is_training=True)
        gradient = self.loss(sizes, x, grads)
        gradient = self.run_layers_backward(sizes, gradient, saved, grads)
        if not self.config.has_tied_head:
            grads.add("embed")
        trace.free(gradient, inputs)

    def evaluate(self, batch, length):
        """Runs forward without gradients. One chunk of the loss stands for all of them."""
        trace, config = self.trace, self.config
        sizes = activation_bytes(config, batch, length)
        trace.phase = "other"
        inputs = self.load_inputs(sizes)
        x, _ = self.run_layers(sizes, is_training=False)
        normed = trace.alloc(sizes.hidden, "norm")
        statistics = trace.alloc(sizes.statistics, "norm")
        elements = sizes.tokens * config.vocab
        logits = trace.alloc(2 * elements // config.loss_chunks, "head")
        converted = trace.alloc(4 * elements // config.loss_chunks, "loss")
        trace.free(logits)
        trace.alloc_and_free(sizes.statistics, "loss")
        trace.free(converted, normed, statistics, x, inputs)

    def load_inputs(self, sizes):
        stream = self.config.input_stream
        inputs = [self.trace.alloc(8 * sizes.tokens, "data", stream) for _ in range(INPUTS)]
        for request in inputs if stream else ():
            self.trace.record_stream(request, 0)
        return inputs

    def run_layers(self, sizes, is_training):
        """Returns the last layer's output and, by layer, its input and its saved activations.

        The saved activations of a layer that backward recomputes are None, and so is its input
        while it is offloaded.
        """
        trace, config = self.trace, self.config
        x = trace.alloc(sizes.hidden, "embed")
        saved_by_layer = []
        gathered_next = self.gather(0)
        for index, layer in enumerate(self.layers):
            gathered, gathered_next = gathered_next, self.gather(index + 1)
            recomputes = config.recompute_every and index % config.recompute_every == 0
            layer_input = x
            x, saved = layer.forward(sizes, is_saving=is_training and not recomputes)
            trace.free(gathered)
            if not is_training:
                trace.free(layer_input)
                continue
            if config.offload_stream and recomputes:
                trace.record_stream(layer_input, config.offload_stream)
                trace.free(layer_input)
                layer_input = None
            saved_by_layer.append((layer_input, None if recomputes else saved))
        return x, saved_by_layer

    def loss(self, sizes, x, grads):
        """Runs the head and the loss, forward and backward, and returns the gradient of `x`."""
        trace, config = self.trace, self.config
        normed = trace.alloc(sizes.hidden, "norm")
        statistics = trace.alloc(sizes.statistics, "norm")
        chunks = config.loss_chunks
        gradient = trace.alloc(sizes.hidden, "norm") if chunks > 1 else None
        for chunk in range(chunks):
            tokens = sizes.tokens // chunks
            logits = trace.alloc(2 * tokens * config.vocab, "head")
            converted = trace.alloc(4 * tokens * config.vocab, "loss")
            trace.alloc_and_free(4 * tokens, "loss")
            loss = trace.alloc(4, "loss")
            if chunk == chunks - 1:
                trace.phase = "backward"
            converted_gradient = trace.alloc(4 * tokens * config.vocab, "loss")
            trace.free(converted)
            logits_gradient = trace.alloc(2 * tokens * config.vocab, "head")
            trace.free(converted_gradient, logits)
            grads.add("embed" if config.has_tied_head else "head")
            chunk_gradient = trace.alloc(2 * tokens * config.width, "head")
            trace.free(logits_gradient, loss)
            if chunks > 1:
                trace.free(chunk_gradient)  # copied to `gradient`
            else:
                gradient = chunk_gradient
        x_gradient = trace.alloc(sizes.hidden, "norm")
        trace.free(gradient, normed, statistics, x)
        return x_gradient

    def run_layers_backward(self, sizes, gradient, saved_by_layer, grads):
        trace, config = self.trace, self.config
        gathered_next = self.gather(config.layers - 1)
        for index, layer in reversed(list(enumerate(self.layers))):
            gathered, gathered_next = gathered_next, self.gather(index - 1)
            layer_input, saved = saved_by_layer[index]
            if layer_input is None:
                layer_input = trace.alloc(sizes.hidden, f"{layer.name}.off", config.offload_stream)
                trace.record_stream(layer_input, 0)
            recomputed = None
            if saved is None:
                trace.phase = "recompute"
                recomputed, saved = layer.forward(sizes)
                trace.phase = "backward"
            if config.is_sharded:
                gradient = self.sharded_backward(layer, sizes, gradient, saved)
            else:
                gradient = layer.backward(sizes, gradient, saved, grads)
            trace.free(recomputed, gathered, layer_input)
        return gradient

    # ZeRO-3

    def gather(self, index):
        """Gathers the weights of a layer into one buffer; None if there is nothing to gather."""
        if not self.config.is_sharded or not 0 <= index < self.config.layers:
            return None
        stream = self.config.gather_stream
        size = WEIGHT_BYTES * sum(self.layer_elements.values())
        gathered = self.trace.alloc(size, f"{self.layers[index].name}.gather", stream)
        if stream:
            self.trace.record_stream(gathered, 0)
        return gathered

    def sharded_backward(self, layer, sizes, gradient, saved):
        """Runs a layer's backward and reduces its gradients to the rank's shard of them."""
        trace, stream = self.trace, self.config.gather_stream
        grads = self.new_gradients()
        gradient = layer.backward(sizes, gradient, saved, grads)
        size, module = WEIGHT_BYTES * sum(self.layer_elements.values()), f"{layer.name}.rs"
        bucket = trace.alloc(size, module, stream)
        shard = trace.alloc(size // RANKS, module, stream)
        for request in grads.requests.values() if stream else ():
            trace.record_stream(request, stream)
        grads.free()
        trace.free(bucket, shard)
        return gradient
