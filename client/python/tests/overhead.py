"""What the hooks cost: `python tests/overhead.py`, with PyTorch, on a CPU, without a daemon."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.update({"STITCHD_WITHOUT_DAEMON": "private", "STITCHD_DRIVER": "host"})

import stitchd  # noqa: E402
import torch  # noqa: E402
from stitchd.torch._context import Hooks  # noqa: E402
from torch import nn  # noqa: E402

MODULES = 1000
PASSES = 20


class Same(nn.Module):
    def forward(self, x):
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Same() for _ in range(MODULES))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def best(step):
    """Microseconds for each of a thousand, in the best of some passes."""
    least = float("inf")
    for _ in range(PASSES):
        began = time.perf_counter()
        step()
        least = min(least, time.perf_counter() - began)
    return least * 1e6 / MODULES


def contexts(library):
    for _ in range(MODULES):
        library.context_push(1, 0, -1, b"layers.0", 0)
        library.context_pop()


def main():
    model, x, library = Model(), torch.ones(1), stitchd.library()
    library.open()
    without = best(lambda: model(x))
    hooks = Hooks(torch, library).install()
    hooked = best(lambda: model(x))
    hooks.remove()
    print(f"a module call: {without:.2f} us without hooks, {hooked:.2f} with, {hooked - without:.2f} for them")
    print(f"a context pushed and popped: {best(lambda: contexts(library)):.2f} us")


if __name__ == "__main__":
    main()
