"""stitchd under PyTorch.

Three ways, from no code to some:

* ``stitchd run -- python train.py`` (or ``STITCHD_TORCH=1``): nothing in the program; the allocator is put in at the first use of CUDA.
* :func:`install` before the first use of CUDA: the same, from the program.
* :func:`pool`: PyTorch keeps its own allocator, and what is allocated inside lies in memory of the daemon.

And, whatever allocates: :func:`publish` and :func:`attach`, by which several processes use one copy of a module's weights.

What works, what works differently and what does not under the first two is in the package's README, each with the test that shows it.
"""

from __future__ import annotations

from ._allocator import Installation, Unavailable, install, installation
from ._pool import pool
from ._share import SharedModule, attach, publish

__all__ = ["Installation", "SharedModule", "Unavailable", "attach", "install", "installation", "pool", "publish"]
