#!/usr/bin/env python3
"""Writes a training trace whose sizes change at every step: a decoder of GPT-2 medium's shape, each step with sequences of another length.

    python3 tests/data/varying.py > varying.csv

Sizes and lifetimes by formula, from what each operator of a plain PyTorch decoder (fp16, unfused attention, AdamW with fp32 state) keeps for its
backward pass. Lengths come from a fixed list, so that every run writes the same bytes. No module says that its sizes vary: that is to be found out.
"""

import sys

LAYERS, HIDDEN, HEADS, VOCABULARY, BATCH = 24, 1024, 16, 50304, 4
LENGTHS = [712, 968, 424, 856, 1024, 296, 640, 904, 520, 776, 1000, 360]
WEIGHTS = {
    "attn.qkv": 3 * HIDDEN * HIDDEN, "attn.proj": HIDDEN * HIDDEN, "mlp.up": 4 * HIDDEN * HIDDEN,
    "mlp.down": 4 * HIDDEN * HIDDEN, "ln1": 2 * HIDDEN, "ln2": 2 * HIDDEN,
}


class Writer:
    def __init__(self, out):
        self.out, self.tick, self.made = out, 0, 0
        self.iteration, self.phase = 0, "init"
        out.write("tick,event,id,bytes,stream,iteration,phase,microbatch,chunk,module,dynamic\n")

    def row(self, event, number, size, module):
        self.tick += 1
        dynamic = "0" if event == "alloc" else ""
        self.out.write(f"{self.tick},{event},{number},{size},0,{self.iteration},{self.phase},,,{module},{dynamic}\n")

    def alloc(self, size, module):
        number, self.made = self.made, self.made + 1
        self.row("alloc", number, int(size), module)
        return number, module

    def free(self, *live):
        for number, module in live:
            self.row("free", number, "", module)


def step(w, length, states, parameters):
    tokens = BATCH * length
    width, scores = 2 * tokens * HIDDEN, 2 * BATCH * HEADS * length * length
    w.phase, kept = "forward", []
    inputs = w.alloc(8 * tokens, "data")
    x = w.alloc(width, "embed")
    for layer in range(LAYERS):
        name = f"layers.{layer}"
        at = lambda module: f"{name}.{module}"
        saved = [x]
        normed = w.alloc(width, at("ln1"))
        saved += [normed, w.alloc(4 * tokens, at("ln1")), w.alloc(4 * tokens, at("ln1"))]
        qkv = w.alloc(3 * width, at("attn.qkv"))
        raw = w.alloc(scores, at("attn"))
        masked = w.alloc(scores, at("attn"))
        w.free(raw)
        soft = w.alloc(scores, at("attn"))
        w.free(masked)
        mixed = w.alloc(width, at("attn"))
        out = w.alloc(width, at("attn.proj"))
        saved += [qkv, soft, mixed, w.alloc(tokens * HIDDEN, at("attn.drop"))]
        y = w.alloc(width, name)
        w.free(out)
        normed = w.alloc(width, at("ln2"))
        saved += [y, normed, w.alloc(4 * tokens, at("ln2")), w.alloc(4 * tokens, at("ln2"))]
        up = w.alloc(4 * width, at("mlp.up"))
        gelu = w.alloc(4 * width, at("mlp.act"))
        down = w.alloc(width, at("mlp.down"))
        saved += [up, gelu, w.alloc(tokens * HIDDEN, at("mlp.drop"))]
        x = w.alloc(width, name)
        w.free(down)
        kept.append(saved)
    logits = w.alloc(2 * tokens * VOCABULARY, "head")
    full = w.alloc(4 * tokens * VOCABULARY, "loss")
    w.phase = "backward"
    grad = w.alloc(4 * tokens * VOCABULARY, "loss")
    w.free(full)
    half = w.alloc(2 * tokens * VOCABULARY, "head")
    w.free(grad, logits)
    gradients = {"head": w.alloc(2 * VOCABULARY * HIDDEN, "head")}
    flow = w.alloc(width, "head")
    w.free(half, x)
    for layer in reversed(range(LAYERS)):
        name, saved = f"layers.{layer}", kept[layer]
        at = lambda module: f"{name}.{module}"
        x, n1, m1, r1, qkv, soft, mixed, drop, y, n2, m2, r2, up, gelu, drop2 = saved
        for module, wide, gone in [("mlp.down", 4, [drop2, gelu]), ("mlp.up", 1, [up, n2]), ("ln2", 1, [m2, r2, y])]:
            gradients[at(module)] = w.alloc(2 * WEIGHTS[module], at(module))
            back = w.alloc(wide * width, at(module))
            w.free(flow, *gone)
            flow = back
        gradients[at("attn.proj")] = w.alloc(2 * WEIGHTS["attn.proj"], at("attn.proj"))
        back = w.alloc(width, at("attn.proj"))
        w.free(drop, mixed)
        wide = w.alloc(scores, at("attn"))
        narrow = w.alloc(scores, at("attn"))
        w.free(wide, soft)
        three = w.alloc(3 * width, at("attn"))
        w.free(narrow, back, qkv)
        gradients[at("attn.qkv")] = w.alloc(2 * WEIGHTS["attn.qkv"], at("attn.qkv"))
        back = w.alloc(width, at("attn.qkv"))
        w.free(three, n1)
        gradients[at("ln1")] = w.alloc(2 * WEIGHTS["ln1"], at("ln1"))
        total = w.alloc(width, at("ln1"))
        w.free(flow, back, m1, r1, x)
        flow = total
    w.free(flow, inputs)
    w.phase = "optimizer"
    for module, gradient in gradients.items():
        if module not in states:
            states[module] = [w.alloc(4 * parameters[module], module) for _ in range(3)]
        w.free(w.alloc(4 * parameters[module], module), gradient)


def main():
    w = Writer(sys.stdout)
    parameters = {"head": VOCABULARY * HIDDEN}
    for layer in range(LAYERS):
        parameters.update({f"layers.{layer}.{module}": count for module, count in WEIGHTS.items()})
    for module, count in parameters.items():
        w.alloc(2 * count, module)
    states = {}
    for w.iteration, length in enumerate(LENGTHS):
        step(w, length, states, parameters)


main()
