"""Puts the allocator in at the first use of CUDA, and not before: launchers, loaders of data and notebooks that never use it never have it.

``torch.cuda`` begins to use CUDA in one place, ``torch._C._cuda_init``, which every way there calls by that name. It is replaced by a function that installs first. In a process that is forked
before its parent has used CUDA the same happens when the child does.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

from .._config import Config
from . import _report
from ._allocator import Unavailable, install
from ._say import say

__all__ = ["arm"]

_BEGIN = "_cuda_init"


def arm(config: Config) -> None:
    """Gets ready. Called when torch is imported, of which not all may be there yet."""
    core = _core()
    begin = getattr(core, _BEGIN, None)
    if begin is None:
        _report.note_reason("this PyTorch has no CUDA and no HIP")
        return
    if getattr(begin, "_is_stitchd", False):
        return
    setattr(core, _BEGIN, _installing(config, begin))


def _installing(config: Config, begin: Callable[[], Any]) -> Callable[[], Any]:
    def cuda_init() -> Any:
        try:
            install()
        except Unavailable as why:
            _stop_or_go_on(config, str(why))
        except Exception as error:  # noqa: BLE001 - the program must go on, whatever this is
            _stop_or_go_on(config, f"this is a bug in stitchd: {error!r}")
        # Not before: where it is required, the next try is not to go on without it.
        setattr(_core(), _BEGIN, begin)
        return begin()

    cuda_init._is_stitchd = True  # type: ignore[attr-defined]
    return cuda_init


def _stop_or_go_on(config: Config, why: str) -> None:
    _report.note_reason(why)
    if config.is_required:
        raise RuntimeError(f"stitchd: {why}; without it this program was not to run (stitchd run --without-daemon stop, or STITCHD_TORCH=require)") from None
    say(f"{why}; this program goes on with PyTorch's own allocator")


def _core() -> Any:
    return sys.modules["torch"]._C
