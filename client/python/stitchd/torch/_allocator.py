"""Makes the client library the allocator of this process's CUDA tensors, by PyTorch's own pluggable allocator."""

from __future__ import annotations

import atexit
import ctypes
import re
import threading
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import Any, Callable, List, Optional, Tuple

import stitchd

from .._config import Config, drop_plan
from .._library import Library, StitchdError
from ._say import say

__all__ = ["Installation", "Unavailable", "install", "installation", "OLDEST"]

#: The oldest PyTorch whose allocator border is known here.
OLDEST: Tuple[int, int] = (2, 6)

#: Setters of PyTorch's allocator object, and the function of the library that each is given.
HOOKS = {
    "set_init_fn": "stitch_torch_init",
    "set_reset_fn": "stitch_torch_reset",
    "set_memory_fraction_fn": "stitch_torch_memory_fraction",
    "set_base_alloc_fn": "stitch_torch_base_alloc",
    "set_record_stream_fn": "stitch_torch_record_stream",
    "set_begin_allocate_to_pool": "stitch_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "stitch_torch_end_allocate_to_pool",
    "set_release_pool": "stitch_torch_release_pool",
}


class Unavailable(StitchdError):
    """The allocator cannot be put in here; the text says why. Nothing has changed."""


@dataclass
class Installation:
    """What is installed in this process."""

    library: Library
    """The client library."""
    driver: str
    """Whose memory it has: ``cuda`` or ``hip``."""
    is_following_plans: bool
    """The environment named a plan, or ``auto``."""
    allocator: Any = field(repr=False, default=None)
    """PyTorch's object, which lives as long as the process."""


_lock = threading.Lock()
_installed: Optional[Installation] = None


def installation() -> Optional[Installation]:
    """What is installed, if anything is."""
    return _installed


def install(*, hooks: bool = True) -> Installation:
    """Puts the allocator in. To be called before the first use of CUDA; a second call changes nothing and answers the same.

    ``hooks``: modules, backward passes and optimizers say where the job is, so that plans know, and iterations are marked where an optimizer has stepped.

    Raises :class:`Unavailable` where it cannot be: no daemon (unless ``STITCHD_WITHOUT_DAEMON=private``), CUDA in use already, another allocator, a PyTorch that is too old.
    """
    global _installed
    with _lock:
        if _installed is None:
            _installed = _install(hooks)
        return _installed


def _install(hooks: bool) -> Installation:
    import torch

    _check(torch)
    try:
        library = stitchd.library()
        has_plan = _open(library)
    except StitchdError as error:
        raise Unavailable(str(error)) from None
    driver = library.driver()
    needed = "hip" if torch.version.hip else "cuda"
    if driver != needed:
        raise Unavailable(f"the daemon's memory is of driver '{driver}', and this PyTorch uses '{needed}'")
    made = Installation(library, driver, has_plan, _allocator(torch, library))
    try:
        torch.cuda.memory.change_current_allocator(made.allocator)
    except RuntimeError as error:
        raise Unavailable(f"PyTorch takes no other allocator any more: {error}") from None
    _around(torch, library, hooks)
    return made


def _around(torch: Any, library: Library, hooks: bool) -> None:
    """What PyTorch's users rely on beside allocations. The allocator is in: whatever fails here is told, and the program goes on."""
    from . import _context, _frameworks, _report, _statistics

    steps: List[Callable[[], object]] = [lambda: _statistics.install(torch, library), lambda: _report.begin(library)]
    if hooks:
        steps += [lambda: _context.install(torch, library), _frameworks.install]
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the program must go on, whatever this is
            say(f"a part of it cannot be put into this PyTorch {torch.__version__}: {error!r}")
    atexit.register(_report.end)
    # A process of multiprocessing that was forked ends without what is registered there.
    Finalize(None, _report.end, exitpriority=0)


def _check(torch: Any) -> None:
    version = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    if version is None or (int(version[1]), int(version[2])) < OLDEST:
        raise Unavailable(f"PyTorch {torch.__version__} is older than {OLDEST[0]}.{OLDEST[1]}")
    if not (torch.version.cuda or torch.version.hip):
        raise Unavailable("this PyTorch has no CUDA and no HIP")
    if torch.cuda.is_initialized():
        raise Unavailable("CUDA is in use already: install before the first tensor on a GPU")
    backend = torch.cuda.memory.get_allocator_backend()
    if backend != "native":
        raise Unavailable(f"another allocator is in use already ('{backend}')")


def _open(library: Library) -> bool:
    """Opens the session; whether a plan is followed. One that cannot be read is told of, and left."""
    has_plan = Config.read().plan is not None
    try:
        library.open()
    except StitchdError as error:
        if not str(error).startswith("STITCHD_PLAN"):
            raise
        say(f"{error}; this program goes on without the plan")
        drop_plan()
        has_plan = False
        library.open()
    return has_plan


def _allocator(torch: Any, library: Library) -> Any:
    allocator: Any = torch.cuda.memory.CUDAPluggableAllocator(str(library.path), "stitch_torch_malloc", "stitch_free")
    inner: Any = allocator.allocator()
    for setter, name in HOOKS.items():
        getattr(inner, setter)(library.address(name))
    # PyTorch's own handle of the library must not be the last: it is needed as long as tensors are.
    allocator._stitchd_keeps = ctypes.CDLL(str(library.path))
    return allocator
