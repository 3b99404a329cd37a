"""Gradients, and the optimizers that use them: their states, and the temporaries of a step."""

from dataclasses import dataclass, field

from trace import Trace

RULES = ["adamw", "foreach", "foreach_chunk", "sgd", "lion", "adam8", "adafactor", "muon"]

FOREACH_CHUNK = 32  # parameters that `foreach_chunk` updates together
QUANTIZATION_BLOCK = 256  # elements per scale of 8-bit states
# Muon updates smaller parameters as SGD with momentum does.
MIN_MUON_ELEMENTS = (1 << 16) + 1
NEWTON_SCHULZ_STEPS = 5


@dataclass
class Gradients:
    """Gradients of a model's parameters. The first backward pass allocates them."""

    trace: Trace
    elements: dict[str, int]  # by parameter; a parameter that it lacks has no gradient
    weight_bytes: int  # per element
    grad_bytes: int  # per element, unless `require` says otherwise
    requests: dict[str, int] = field(default_factory=dict)  # by parameter

    def add(self, name):
        """Accumulates: a gradient that exists needs a temporary for what is added."""
        if name in self.requests:
            self.trace.alloc_and_free(self.weight_bytes * self.elements[name], name)
        elif name in self.elements:
            self.require(name)

    def require(self, name, grad_bytes=None):
        """Allocates a gradient unless it exists."""
        if name not in self.requests:
            size = (grad_bytes or self.grad_bytes) * self.elements[name]
            self.requests[name] = self.trace.alloc(size, name, is_dynamic=False)

    def free(self):
        self.trace.free(*self.requests.values())
        self.requests.clear()


class Optimizer:
    """Updates parameters by one of `RULES`. States are allocated by the first step and stay.

    `foreach` and `foreach_chunk` are AdamW on all parameters at once or on some of them;
    the other rules update one parameter after another.
    """

    def __init__(self, trace, rule, elements, weight_bytes, has_master=False):
        self.trace, self.rule = trace, rule
        self.elements = elements  # by parameter
        self.weight_bytes = weight_bytes  # per element
        self.has_master = has_master  # fp32 copy of the weights, for `adamw`
        self.initialized = set()  # parameters that have their states

    def step(self, grads, is_keeping_grads=False, has_clipping=True):
        """Updates the parameters that have a gradient."""
        self.trace.phase = "optimizer"
        if has_clipping:
            self.clip(len(grads.requests))
        if self.rule in ("foreach", "foreach_chunk"):
            self.update_together(list(grads.requests))
        else:
            for name in grads.requests:
                self.init_states(name)
                self.update(name, self.elements[name])
        if not is_keeping_grads:
            grads.free()

    def clip(self, count):
        """Computes the norm of each gradient, then the norm of the norms."""
        trace = self.trace
        norms = [trace.alloc(4, "clip") for _ in range(count)]
        stacked = trace.alloc(4 * count, "clip")
        trace.free(norms)
        trace.alloc_and_free(4, "clip")
        total = trace.alloc(4, "clip")
        trace.free(stacked)
        trace.alloc_and_free(4, "clip")
        trace.free(total)

    def init_states(self, name):
        if name not in self.initialized:
            self.initialized.add(name)
            for size in self.state_bytes(self.elements[name]):
                self.trace.alloc(size, name)

    def state_bytes(self, elements):
        """Bytes of each state of a parameter."""
        match self.rule:
            case "foreach":
                return [4 * elements, 4 * elements, 4]  # with a step counter
            case "foreach_chunk":
                return [4 * elements] * 2
            case "adamw":
                return [4 * elements] * (3 if self.has_master else 2)
            case "lion":
                return [self.weight_bytes * elements]
            case "adam8":
                scales = 4 * (elements // QUANTIZATION_BLOCK + 1)
                return [elements, elements, scales, scales]
            case "adafactor":
                rows = max(1, int(elements**0.5))
                return [4 * rows, 4 * (elements // rows + 1)]
            case _:  # sgd, muon: a momentum
                return [4 * elements]

    def update_together(self, names):
        for name in names:
            self.init_states(name)
        count = FOREACH_CHUNK if self.rule == "foreach_chunk" else max(1, len(names))
        for start in range(0, len(names), count):
            chunk = names[start : start + count]
            updates = [self.trace.alloc(4 * self.elements[name], name) for name in chunk]
            denominators = [self.trace.alloc(4 * self.elements[name], name) for name in chunk]
            self.trace.free(updates, denominators)

    def update(self, name, elements):
        trace = self.trace
        if self.rule == "adafactor":
            self.update_factored(name, elements)
        elif self.rule == "muon" and elements >= MIN_MUON_ELEMENTS:
            self.orthogonalize(name, elements)
        elif self.rule == "adam8":
            trace.alloc_and_free(4 * elements, name)
        elif self.rule == "lion":
            trace.alloc_and_free(4 * elements, name)
            trace.alloc_and_free(self.weight_bytes * elements, name)
        else:
            denominator = trace.alloc(4 * elements, name)
            trace.alloc_and_free(4 * elements, name)
            trace.free(denominator)

    def update_factored(self, name, elements):
        trace = self.trace
        squares = trace.alloc(4 * elements, name)
        estimate = trace.alloc(4 * elements, name)
        trace.alloc_and_free(4 * int(elements**0.5), name)
        trace.free(squares)
        update = trace.alloc(4 * elements, name)
        trace.free(estimate, update)

    def orthogonalize(self, name, elements):
        """Newton-Schulz iteration in bf16, on the update as a square matrix."""
        trace, rows = self.trace, int(elements**0.5)
        matrix = trace.alloc(2 * elements, name)
        for _ in range(NEWTON_SCHULZ_STEPS):
            gram = trace.alloc(2 * rows * rows, name)
            polynomial = trace.alloc(2 * rows * rows, name)
            product = trace.alloc(2 * elements, name)
            trace.free(matrix, gram, polynomial)
            matrix = product
        trace.free(matrix)
