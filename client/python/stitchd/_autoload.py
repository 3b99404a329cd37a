"""What PyTorch calls at the end of ``import torch`` (entry point group ``torch.backends``).

It runs in every process that imports torch: launchers, loaders of data, notebooks. So it does nothing unless ``STITCHD_TORCH`` asks for it, then only gets ready for the
first use of CUDA, and never raises: an exception here would make ``import torch`` fail.
"""

from __future__ import annotations

__all__ = ["autoload"]


def autoload() -> None:
    """Gets ready, if the environment says so."""
    try:
        from ._config import Config

        config = Config.read()
        if not config.is_on:
            return
        from .torch import _arm

        _arm.arm(config)
    except Exception as error:  # noqa: BLE001 - the program must go on, whatever this is
        try:
            from .torch._say import say

            say(f"PyTorch keeps its own allocator: {error!r}")
        except Exception:  # noqa: BLE001
            pass
