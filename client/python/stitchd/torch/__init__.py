"""stitchd under PyTorch.

Three ways, from no code to some:

* ``stitchd run -- python train.py`` (or ``STITCHD_TORCH=1``): nothing in the program; the allocator is put in at the first use of CUDA.
* :func:`install` before the first use of CUDA: the same, from the program.
* :func:`pool`: PyTorch keeps its own allocator, and what is allocated inside lies in memory of the daemon.

Memory that goes back while a model is not used, and comes again at the same addresses: :func:`sleep` and :func:`wake_up` as vLLM has them, :data:`memory_saver` as torch_memory_saver does. And, whatever allocates: :func:`publish` and :func:`attach`, by which several processes use one copy of a module's weights.

What works, what works differently and what does not under the first two is in the package's README, each with the test that shows it.
"""

from __future__ import annotations

from ._allocator import Installation, Unavailable, install, installation
from ._pool import pool
from ._share import SharedModule, attach, publish
from ._sleep import MemorySaver, memory_saver, sleep, wake_up

__all__ = [
    "Installation",
    "MemorySaver",
    "SharedModule",
    "Unavailable",
    "attach",
    "install",
    "installation",
    "memory_saver",
    "pool",
    "publish",
    "sleep",
    "wake_up",
]
