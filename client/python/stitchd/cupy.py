"""stitchd under CuPy: :func:`install` makes it the allocator of CuPy's arrays."""

from __future__ import annotations

import stitchd

__all__ = ["install"]


def install() -> None:
    """From now on CuPy's arrays on this process's devices lie in memory of the daemon. Raises :class:`stitchd.StitchdError` without one."""
    import cupy

    library = stitchd.library()
    library.open()
    malloc = lambda size, device: library.malloc(size, device, cupy.cuda.get_current_stream().ptr)  # noqa: E731
    free = lambda address, device: library.free(address, 0, device, cupy.cuda.get_current_stream().ptr)  # noqa: E731
    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(malloc, free).malloc)
