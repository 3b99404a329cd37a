"""stitchd for Python: GPU memory from the daemon of the node, under PyTorch, CuPy or RMM, or by itself.

Importing it imports nothing else: not torch, not the client library. :mod:`stitchd.torch` puts it under PyTorch; ``stitchd run -- python train.py`` does that
without a change of the program.

>>> import stitchd
>>> library = stitchd.library()          # opens nothing yet
>>> address = library.malloc(64 << 20)   # a session with the daemon, and 64 MiB
>>> library.free(address, 64 << 20)
"""

from __future__ import annotations

import contextlib
import threading
from typing import Iterator, Optional

from ._config import Config
from ._library import PHASES, Library, StitchdError, find_library

__all__ = ["Library", "StitchdError", "context", "guarantee", "library", "mark_iteration", "sleep", "tag", "wake", "__version__"]

__version__ = "0.1.0"

_lock = threading.Lock()
_library: Optional[Library] = None


def library() -> Library:
    """The client library of this process, loaded if it is not yet. Raises :class:`StitchdError` where there is none."""
    global _library
    with _lock:
        if _library is None:
            _library = Library(find_library(Config.read().library))
        return _library


@contextlib.contextmanager
def context(
    phase: str = "other", module: Optional[str] = None, microbatch: int = -1, chunk: int = -1, dynamic: bool = False
) -> Iterator[None]:
    """What this thread allocates inside is from there, for plans and recordings.

    ``phase`` is one of ``init``, ``forward``, ``backward``, ``recompute``, ``optimizer`` and ``other``; ``microbatch`` and ``chunk`` (of a model in a virtual pipeline)
    count from 0, and -1 is none; ``dynamic`` says that sizes vary from iteration to iteration. Raises ``KeyError`` for another phase.
    """
    loaded = library()
    loaded.context_push(PHASES[phase], microbatch, chunk, None if module is None else module.encode(), int(dynamic))
    try:
        yield
    finally:
        loaded.context_pop()


@contextlib.contextmanager
def tag(name: str, keep: bool = True) -> Iterator[None]:
    """What this thread allocates inside is under a tag: it lies apart, and :func:`sleep` can give its memory back without the rest. With ``keep`` its contents come back when it is woken."""
    loaded = library()
    loaded.tag_push(name, keep)
    try:
        yield
    finally:
        loaded.tag_pop()


def sleep(tag: Optional[str] = None, keep: Optional[bool] = None) -> int:
    """Gives the memory under a tag, or all that this process has, back to the daemon, and keeps the addresses. Returns how many bytes of device memory went back.

    With ``keep`` the contents are kept in this process's memory, without they are gone; where it is not said it is as :func:`tag` said, and kept for what has no tag. What is queued on the devices is waited for; nobody may use
    the memory until :func:`wake`. Raises :class:`StitchdError` where that cannot be: while a graph is captured, or without a daemon.
    """
    return library().sleep(tag, keep)


def wake(tag: Optional[str] = None, wait: float = 60.0) -> None:
    """Gets memory again for what sleeps, where it was, with what was kept. Raises :class:`StitchdError`, which says who has the memory, where others have it for longer than ``wait`` seconds: then it sleeps on, and can be woken later."""
    library().wake(tag, wait)


def guarantee(size: int, device: int = 0, wait: float = 60.0) -> None:
    """Has this process guaranteed ``size`` bytes of a device, in place of what it is: what it holds up to there comes when it asks, whoever has it then. 0 gives that up.

    Waits up to ``wait`` seconds for the guarantees of others to end. Raises :class:`StitchdError`, which says who is guaranteed what, where that is not enough, or is more than the process's tenant may have.
    """
    library().guarantee(size, device, wait)


def mark_iteration(device: int = -1) -> None:
    """An iteration of the job ends, on one device or on all that the process uses. With ``STITCHD_ADMIT`` this waits until what the next one needs is guaranteed."""
    library().mark_iteration(device)
