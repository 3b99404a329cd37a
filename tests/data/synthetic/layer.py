"""A transformer layer: the requests of its forward and backward passes.

Sizes follow the operators of a decoder layer in bf16 with fused queries, keys and values. The
activations that forward saves for backward are a stack: backward frees the newest first.
"""

from config import WEIGHT_BYTES

EXPERT_MATRICES = 2  # weight matrices of an expert that have a gradient


class Layer:
    """A layer of a model; its requests have the layer's name before that of their module."""

    def __init__(self, trace, rng, config, index):
        self.trace, self.rng, self.config = trace, rng, config
        self.name = f"layers.{index}"
        self.expert_tokens = []  # by expert, in the last forward pass

    def alloc(self, size, part):
        return self.trace.alloc(size, f"{self.name}.{part}")

    def expert_names(self):
        return [f"{self.name}.experts.{expert}" for expert in range(self.config.experts)]

    def expert_elements(self):
        """Elements of each expert's parameters, by expert."""
        elements = EXPERT_MATRICES * self.config.width * self.config.expert_width
        return dict.fromkeys(self.expert_names(), elements)

    # Forward

    def forward(self, sizes, is_saving=True):
        """Returns the output and the stack of saved activations, which is empty if not saving."""
        saved = [self.alloc(sizes.hidden, "ln1"), self.alloc(sizes.statistics, "ln1")]
        self.attention(sizes, saved)
        out = self.dropout(sizes, saved, self.alloc(sizes.hidden, "proj"), "drop1")
        saved.append(self.alloc(sizes.hidden, "res"))
        self.trace.free(out)
        saved += [self.alloc(sizes.hidden, "ln2"), self.alloc(sizes.statistics, "ln2")]
        out = self.experts(sizes, saved) if self.config.experts else self.ffn(sizes, saved)
        out = self.dropout(sizes, saved, out, "drop2")
        result = self.alloc(sizes.hidden, "res")
        self.trace.free(out)
        if not is_saving:
            self.trace.free(saved)
            saved = []
        return result, saved

    def attention(self, sizes, saved):
        qkv = self.alloc(sizes.qkv, "qkv")
        if self.config.has_rope:
            saved += [self.alloc(sizes.queries, "attn"), self.alloc(sizes.keys, "attn")]
        if self.config.has_flash_attention:
            saved += [qkv, self.alloc(sizes.hidden, "attn")]
            saved += [self.alloc(sizes.log_sums, "attn"), self.alloc(16, "attn")]
            return
        scores = self.alloc(sizes.scores, "attn")
        masked = self.alloc(sizes.scores, "attn")
        self.trace.free(scores)
        probabilities = self.alloc(sizes.scores, "attn")
        self.trace.free(masked)
        if self.config.has_dropout:
            saved += [self.alloc(sizes.scores // 2, "attn"), self.alloc(sizes.scores, "attn")]
        saved += [qkv, probabilities, self.alloc(sizes.hidden, "attn")]

    def dropout(self, sizes, saved, x, part):
        if not self.config.has_dropout:
            return x
        saved.append(self.alloc(sizes.dropout_mask, part))
        out = self.alloc(sizes.hidden, part)
        self.trace.free(x)
        return out

    def ffn(self, sizes, saved):
        saved.append(self.alloc(sizes.ffn, "up"))
        if self.config.is_gated:
            saved += [self.alloc(sizes.ffn, "gate"), self.alloc(sizes.ffn, "act")]
        saved.append(self.alloc(sizes.ffn, "act"))
        return self.alloc(sizes.hidden, "down")

    def experts(self, sizes, saved):
        """Routes the tokens unevenly: the experts' shares are random."""
        trace, config = self.trace, self.config
        logits = self.alloc(4 * sizes.tokens * config.experts, "router")
        saved.append(self.alloc(4 * sizes.tokens * config.experts, "router"))
        routed = sizes.tokens * config.experts_per_token
        saved.append(self.alloc(8 * routed, "router"))
        trace.free(logits)
        shares = [self.rng.random() ** 2 + 0.05 for _ in range(config.experts)]
        total = sum(shares)
        self.expert_tokens = [max(1, int(routed * share / total)) for share in shares]
        out = self.alloc(sizes.hidden, "moe")
        trace.is_dynamic = config.has_dynamic_experts
        for name, tokens in zip(self.expert_names(), self.expert_tokens):
            saved.append(trace.alloc(2 * tokens * config.width, name))
            saved.append(trace.alloc(2 * tokens * config.expert_width, name))
            saved.append(trace.alloc(2 * tokens * config.expert_width, name))
            result = trace.alloc(2 * tokens * config.width, name)
            weighted = trace.alloc(2 * tokens * config.width, name)
            trace.free(result, weighted)
        trace.is_dynamic = False
        return out

    # Backward

    def backward(self, sizes, gradient, saved, grads):
        """Frees the output's gradient and what is saved; returns the input's gradient."""
        trace, saved = self.trace, list(saved)
        dropped = self.dropout_backward(sizes, saved, "drop2")
        ffn_backward = self.experts_backward if self.config.experts else self.ffn_backward
        normed = ffn_backward(sizes, saved, grads)
        trace.free(dropped)
        self.add_grads(grads, "ln2")
        x = self.alloc(sizes.hidden, "ln2")
        self.free_saved(saved, 2)
        trace.free(normed)
        residual = self.alloc(sizes.hidden, "res")
        trace.free(x, gradient)
        self.free_saved(saved, 1)
        dropped = self.dropout_backward(sizes, saved, "drop1")
        self.add_grads(grads, "proj.b", "proj")
        out = self.alloc(sizes.hidden, "proj")
        trace.free(dropped)
        qkv = self.attention_backward(sizes, saved, out)
        self.add_grads(grads, "qkv.b", "qkv")
        normed = self.alloc(sizes.hidden, "qkv")
        trace.free(qkv)
        self.add_grads(grads, "ln1")
        x = self.alloc(sizes.hidden, "ln1")
        trace.free(normed)
        self.free_saved(saved, 2)
        result = self.alloc(sizes.hidden, "res")
        trace.free(x, residual)
        assert not saved, f"{self.name}: {len(saved)} saved activations are left"
        return result

    def free_saved(self, saved, count):
        for _ in range(count):
            self.trace.free(saved.pop())

    def add_grads(self, grads, *parts):
        for part in parts:
            grads.add(f"{self.name}.{part}")

    def dropout_backward(self, sizes, saved, part):
        if not self.config.has_dropout:
            return None
        gradient = self.alloc(sizes.hidden, part)
        self.free_saved(saved, 1)
        return gradient

    def experts_backward(self, sizes, saved, grads):
        trace, config = self.trace, self.config
        trace.is_dynamic = config.has_dynamic_experts
        for name, tokens in reversed(list(zip(self.expert_names(), self.expert_tokens))):
            activation = trace.alloc(2 * tokens * config.expert_width, name)
            self.free_saved(saved, 1)
            up = trace.alloc(2 * tokens * config.expert_width, name)
            trace.free(activation)
            self.free_saved(saved, 1)
            x = trace.alloc(2 * tokens * config.width, name)
            trace.free(up)
            self.free_saved(saved, 1)
            trace.free(x)
            grads.require(name, WEIGHT_BYTES)
        trace.is_dynamic = False
        normed = self.alloc(sizes.hidden, "moe")
        self.free_saved(saved, 2)
        return normed

    def ffn_backward(self, sizes, saved, grads):
        trace = self.trace
        self.add_grads(grads, "down.b", "down")
        activation = self.alloc(sizes.ffn, "down")
        self.free_saved(saved, 1)
        if not self.config.is_gated:
            up = self.alloc(sizes.ffn, "act")
            trace.free(activation)
            self.free_saved(saved, 1)
            self.add_grads(grads, "up.b", "up")
            normed = self.alloc(sizes.hidden, "up")
            trace.free(up)
            return normed
        gate, up = self.alloc(sizes.ffn, "act"), self.alloc(sizes.ffn, "act")
        trace.free(activation)
        self.free_saved(saved, 2)
        self.add_grads(grads, "gate")
        from_gate = self.alloc(sizes.hidden, "gate")
        trace.free(gate)
        self.free_saved(saved, 1)
        self.add_grads(grads, "up")
        normed = self.alloc(sizes.hidden, "up")
        trace.free(up, from_gate)
        return normed

    def attention_backward(self, sizes, saved, gradient):
        """Frees the gradient of the attention's output; returns that of queries, keys, values."""
        trace, config = self.trace, self.config
        if config.has_flash_attention:
            qkv = self.alloc(sizes.qkv, "attn")
            accumulator = self.alloc(2 * sizes.hidden, "attn")  # fp32
            sums = self.alloc(sizes.log_sums, "attn")
            trace.free(accumulator, sums, gradient)
            self.free_saved(saved, 4)
        else:
            probabilities = self.alloc(sizes.scores, "attn")
            self.free_saved(saved, 1)
            masked = self.alloc(sizes.scores, "attn")
            trace.free(probabilities)
            self.free_saved(saved, 1)
            scores = self.alloc(sizes.scores, "attn")
            trace.free(masked)
            if config.has_dropout:
                self.free_saved(saved, 2)
            qkv = self.alloc(sizes.qkv, "attn")
            trace.free(scores, gradient)
            self.free_saved(saved, 1)
        if config.has_rope:
            rotated = self.alloc(sizes.queries, "attn")
            self.free_saved(saved, 2)
            trace.free(rotated)
        return qkv
