"""A graph neural network on sampled neighbourhoods."""

from optimizers import Gradients, Optimizer

LAYERS = 3
NODES = 2.4e6  # of the graph, whose features are on the device
SAMPLED_NODES = 200_000  # inputs of a micro-batch; each layer has a third of the nodes before it
MICRO_BATCHES = 6


class GraphNetwork:
    """Graph convolutions; the first reads the features of the nodes, the others `width` numbers."""

    def __init__(self, trace, width, features):
        self.trace, self.width, self.features = trace, width, features
        self.elements = {f"l.{layer}.w": width * width for layer in range(LAYERS)}

    def input_width(self, layer):
        return self.width if layer else self.features

    def train(self, nodes, edges, grads):
        """`nodes` has the nodes of each layer's input, then those of the output."""
        trace = self.trace
        trace.phase = "forward"
        x = trace.alloc(4 * nodes[0] * self.features, "x")
        saved = []
        for layer in range(LAYERS):
            name, out_bytes = f"l.{layer}", 4 * nodes[layer + 1] * self.width
            edge_index = trace.alloc(16 * edges[layer], name)
            messages = trace.alloc(4 * edges[layer] * self.input_width(layer) // 4, name)
            aggregated = trace.alloc(out_bytes, name)
            trace.free(messages)
            saved.append((edge_index, aggregated, x))
            x = trace.alloc(out_bytes, name)
        trace.phase = "backward"
        gradient = trace.alloc(4 * nodes[LAYERS] * self.width, "loss")
        trace.free(x)
        for layer in reversed(range(LAYERS)):
            name = f"l.{layer}"
            edge_index, aggregated, x = saved[layer]
            aggregated_gradient = trace.alloc(4 * nodes[layer + 1] * self.width, name)
            trace.free(aggregated, gradient)
            grads.add(f"{name}.w")
            messages = trace.alloc(4 * edges[layer] * self.width // 4, name)
            gradient = trace.alloc(4 * nodes[layer] * self.input_width(layer), name)
            trace.free(messages, aggregated_gradient, edge_index, x)
        trace.free(gradient)


def train_graph_network(trace, rng, scale, iterations):
    """Each micro-batch has other nodes and edges, and is followed by an optimizer step."""
    width, features = rng.choice([128, 256, 512]), rng.choice([100, 602])
    trace.alloc(4 * int(NODES * scale) * features, "features")
    model = GraphNetwork(trace, width, features)
    for name, elements in model.elements.items():
        trace.alloc(4 * elements, name)
    optimizer = Optimizer(trace, "adamw", model.elements, weight_bytes=4)
    grads = Gradients(trace, model.elements, weight_bytes=4, grad_bytes=4)
    sampled = int(SAMPLED_NODES * scale)
    for iteration in range(iterations):
        trace.iteration = iteration
        for _ in range(MICRO_BATCHES):
            nodes = [
                int(sampled * (1 + 0.15 * rng.random()) / 3**layer) for layer in range(LAYERS + 1)
            ]
            edges = [count * rng.randint(8, 12) for count in nodes[1:]]
            model.train(nodes, edges, grads)
            optimizer.step(grads, has_clipping=False)
