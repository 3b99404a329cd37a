"""Training loops and optimizers.

Sends, receives, gathers and reductions between ranks are the buffers that they need; no other rank
exists. References that the loops drop (`del`) free their storages at that point of the trace.
"""

import torch

from layers import FP32, floats, tokens
from recorder import Recorder


class Adam:
    """AdamW on fp32 master weights, with gradient clipping.

    With main gradients, each gradient is added to a permanent fp32 buffer as soon as it exists.
    Without them, gradients have the model's type and are freed by the optimizer step.
    """

    def __init__(self, model, is_foreach=True, has_main_grads=False):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().requires_grad_() for p in self.params]
        self.adam = torch.optim.AdamW(self.masters, foreach=is_foreach)
        self.has_main_grads = has_main_grads
        for p in self.params if has_main_grads else ():
            p.main_grad = torch.zeros_like(p, dtype=FP32)
            p.register_post_accumulate_grad_hook(self.accumulate)

    def accumulate(self, p):
        p.main_grad.add_(p.grad)
        p.grad = None

    @torch.no_grad()
    def step(self):
        with Recorder.current.section("optimizer", ""):
            for p, master in zip(self.params, self.masters):
                if self.has_main_grads:
                    master.grad = p.main_grad
                else:
                    master.grad = None if p.grad is None else p.grad.float()
                p.grad = None
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.adam.step()
            for p, master in zip(self.params, self.masters):
                p.copy_(master)
                master.grad = None
                if self.has_main_grads:
                    p.main_grad.zero_()


class ShardedAdam:
    """ZeRO-3: each rank keeps a shard of the weights, gradients and optimizer states.

    The weights of a layer are gathered into one buffer before use, together with those of the next
    layer, and freed after it. Gradients are reduced layer by layer; an fp32 shard of them stays.
    """

    def __init__(self, layers, ranks):
        self.layers, self.ranks = layers, ranks
        self.gathered, self.grads = {}, {}  # by layer: weights, and parameters with a gradient
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        self.shards = [floats(-(-size // ranks)) for size in sizes]
        self.masters = [shard.float().requires_grad_() for shard in self.shards]
        self.adam = torch.optim.AdamW(self.masters, foreach=True)
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, i=i: self.gather(i, i + 1))
            layer.register_forward_hook(lambda *_, i=i: self.release(i))
            layer.register_full_backward_pre_hook(lambda *_, i=i: self.gather(i, i - 1))
            for p in layer.parameters():
                p.register_post_accumulate_grad_hook(lambda p, i=i: self.reduce(p, i))

    def gather(self, layer, next_layer):
        for i in (layer, next_layer):
            if 0 <= i < len(self.layers) and i not in self.gathered:
                self.gathered[i] = floats(self.shards[i].numel() * self.ranks)

    def release(self, i):
        del self.gathered[i]  # returns None: the result of a forward hook replaces the output

    def reduce(self, p, i):
        """Takes the gradient of a parameter of layer `i`, and reduces those of a complete layer."""
        self.grads.setdefault(i, []).append(p)
        if len(self.grads[i]) == len(list(self.layers[i].parameters())):
            self.gathered.pop(i, None)
            bucket = floats(self.shards[i].numel() * self.ranks)
            for p in self.grads.pop(i):
                bucket[: p.numel()].copy_(p.grad.view(-1))
                p.grad = None
            shard = torch.empty_like(self.shards[i])
            del bucket
            master = self.masters[i]
            master.grad = shard.float() if master.grad is None else master.grad.add_(shard)

    @torch.no_grad()
    def step(self):
        with Recorder.current.section("optimizer", ""):
            self.gathered.clear()
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.adam.step()
            for shard, master in zip(self.shards, self.masters):
                shard.copy_(master)
                master.grad = None


class HostOptimizer:
    """The device's part of an optimizer on the host.

    Each gradient is copied to fp32, sent, and freed as soon as it exists. The step receives the new
    weights, one tensor at a time.
    """

    def __init__(self, model):
        self.params = list(model.parameters())
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.send)

    @staticmethod
    def send(p):
        sent = p.grad.float()
        p.grad = None
        del sent

    @torch.no_grad()
    def step(self):
        with Recorder.current.section("optimizer", ""):
            for p in self.params:
                p.copy_(torch.empty_like(p, dtype=FP32))


def train(loss, optimizer, steps, micro_batches=1, after=None):
    """Runs `steps` iterations: `loss(step, micro_batch)` is a forward, `after(step)` their end."""
    recorder = Recorder.current
    for step in range(steps):
        for micro_batch in range(micro_batches):
            with recorder.section("forward", micro_batch):
                value = loss(step, micro_batch)
            with recorder.section("backward", micro_batch):
                value.backward()
                del value
        optimizer.step()
        if after is not None:
            with recorder.section("other"):
                after(step)
        recorder.end_iteration()


def pipeline(chunks, optimizer, batch, length, width, steps, micro_batches, stages):
    """Runs the 1F1B schedule of stage 0 of `stages`, interleaved if it has several model chunks.

    The first chunk takes tokens, the others receive the output of the last stage. Gradients of all
    outputs are received.
    """
    recorder = Recorder.current
    n, total = len(chunks), len(chunks) * micro_batches
    warm_up = stages - 1 if n == 1 else 2 * (stages - 1) + (n - 1) * stages

    def place(k):
        """Chunk and micro-batch of the schedule's slot `k`."""
        return k // stages % n, k // (stages * n) * stages + k % stages

    for _ in range(steps):
        pending = {}  # input and output of the forwards whose backward is still to run
        for k in range(total + warm_up):
            if k < total:
                chunk, micro_batch = place(k)
                with recorder.section("forward", micro_batch):
                    if chunk == 0:
                        x = tokens(batch, length)
                    else:
                        x = floats(batch, length, width).requires_grad_()
                    pending[chunk, micro_batch] = x, chunks[chunk](x)
                    del x
            if k >= warm_up:
                chunk, micro_batch = place(k - warm_up)
                chunk = n - 1 - chunk
                with recorder.section("backward", micro_batch):
                    x, out = pending.pop((chunk, micro_batch))
                    torch.autograd.backward(out, torch.empty_like(out))
                    del x, out
        optimizer.step()
        recorder.end_iteration()
