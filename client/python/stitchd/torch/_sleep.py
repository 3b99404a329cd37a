"""Sleep and wake under the names that RLHF programs know: a trainer and an engine take turns on one device.

The process's memory is the daemon's while :func:`stitchd.torch.install` or ``stitchd run`` has put it under PyTorch. Tensors stay what they are, at their addresses; while their memory sleeps they must not be touched, graphs not replayed.
"""

from __future__ import annotations

import contextlib
from typing import Iterator, List, Optional, Sequence

from .. import library

__all__ = ["MemorySaver", "memory_saver", "sleep", "wake_up"]


def sleep(level: int = 1) -> int:
    """Gives all memory back, as ``LLM.sleep`` of vLLM does. Returns how many bytes of device memory that was.

    With level 1 the contents of tags that were made with ``keep`` and of what has no tag are kept in this process's memory, and the others' are gone: weights, and a cache. With level 2 everything is gone.

    Raises ``ValueError`` for another level and :class:`stitchd.StitchdError` where it cannot be.
    """
    if level not in (1, 2):
        raise ValueError(f"level is {level}, and can be 1 (keep what is to be kept) or 2 (keep nothing)")
    return library().sleep(None, None if level == 1 else False)


def wake_up(tags: Optional[Sequence[str]] = None, wait: float = 60.0) -> None:
    """Gets memory again for these tags, in this order, or for everything, as ``LLM.wake_up`` of vLLM does. Raises :class:`stitchd.StitchdError` where others have it for longer than ``wait`` seconds."""
    names: List[Optional[str]] = [None] if tags is None else list(tags)
    for name in names:
        library().wake(name, wait)


class MemorySaver:
    """The interface of torch_memory_saver, of which :data:`memory_saver` is the one that there is."""

    @contextlib.contextmanager
    def region(self, tag: str = "default", enable_cpu_backup: bool = False) -> Iterator[None]:
        """What this thread allocates inside can be paused. With ``enable_cpu_backup`` its contents come back when it is resumed."""
        loaded = library()
        loaded.tag_push(tag, enable_cpu_backup)
        try:
            yield
        finally:
            loaded.tag_pop()

    def pause(self, tag: Optional[str] = None) -> int:
        """Gives the memory of a tag, or all, back. Returns how many bytes of device memory that was."""
        return library().sleep(tag)

    def resume(self, tag: Optional[str] = None, wait: float = 60.0) -> None:
        """Gets memory again for a tag, or all that is paused, at the same addresses."""
        library().wake(tag, wait)


memory_saver = MemorySaver()
