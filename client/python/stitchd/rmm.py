"""stitchd under RMM: :func:`resource` is a memory resource for ``rmm.mr.set_current_device_resource``."""

from __future__ import annotations

from typing import Any

import stitchd

__all__ = ["resource"]


def resource(device: int = 0) -> Any:
    """A memory resource of RMM whose memory is the daemon's. Raises :class:`stitchd.StitchdError` without one."""
    import rmm

    library = stitchd.library()
    library.open()
    return rmm.mr.CallbackMemoryResource(
        lambda size, stream: library.malloc(size, device, _handle(stream)),
        lambda address, size, stream: library.free(address, size, device, _handle(stream)),
    )


def _handle(stream: Any) -> int:
    """The raw handle of one of RMM's streams."""
    _, handle = stream.__cuda_stream__()
    return int(handle)
