"""A job of some iterations in memory of whatever allocator there is: two layers keep what the way back needs."""

import sys
import time

import torch
from torch import nn

MIB = 1 << 20


class Layer(nn.Module):
    def __init__(self, mib):
        super().__init__()
        self.mib = mib

    def forward(self, kept):
        scratch = torch.cuda.Storage(self.mib * MIB)
        kept.append(torch.cuda.Storage(3 * self.mib * MIB + 512))
        scratch.free()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(3), Layer(5)])

    def forward(self, kept):
        for layer in self.layers:
            layer(kept)


def main(iterations, seconds):
    model, optimizer = Model(), torch.optim.Optimizer()
    weights = torch.cuda.Storage(8 * MIB)
    for _ in range(iterations):
        kept = []
        model(kept)
        for storage in reversed(kept):
            storage.free()
        optimizer.step()
        time.sleep(seconds)
    print("served" if weights.address else "own allocator", torch._C._allocator is not None)


main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0)
