"""Memory of the daemon under PyTorch's own caching: a pool of PyTorch's whose segments come from stitchd."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, List, Optional

import stitchd

from .._library import StitchdError
from ._allocator import Unavailable

__all__ = ["pool"]

#: Allocators live as long as the process: a block may outlast its pool, and is freed through them.
_kept: List[Any] = []


@contextlib.contextmanager
def pool(device: Optional[int] = None) -> Iterator[Any]:
    """What this thread allocates inside lies in memory of the daemon: PyTorch asks for segments of 2 MiB, 20 MiB or more, and cuts them as it always does, with its own statistics, snapshots and out-of-memory error.

    Yields PyTorch's ``MemPool``, which can be used again by ``torch.cuda.use_mem_pool``. Once that is gone, what is freed of its memory goes back to the daemon. Raises :class:`Unavailable` without a daemon, or where the PyTorch has no such pools.

    Backward passes run in other threads and allocate outside. Before PyTorch 2.13 a pool that is in use keeps memory that streams wait for until it is left, so it is for loading models and for
    inference, not for a whole training job.
    """
    import torch

    if not hasattr(torch.cuda, "MemPool"):
        raise Unavailable(f"PyTorch {torch.__version__} has no torch.cuda.MemPool")
    try:
        library = stitchd.library()
        library.open()
    except StitchdError as error:
        raise Unavailable(str(error)) from None
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library.path), "stitch_malloc", "stitch_torch_free_segment")
    made = torch.cuda.MemPool(allocator.allocator())
    _kept.append(allocator)
    with torch.cuda.use_mem_pool(made, device):
        yield made
