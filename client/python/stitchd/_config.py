"""What the environment says: the one place of the package that reads it.

===========================  =====================================================================================
``STITCHD_TORCH``            ``1``: PyTorch's allocator is replaced at the first use of CUDA, and PyTorch keeps its own where that cannot
                             be; ``require``: the program stops there instead; unset, empty or ``0``: nothing is done
``STITCHD_LIBRARY``          the client library, if it is not where it was installed
``STITCHD_REPORTS``          a directory in which each process leaves its figures (``stitchd run`` sets it)
===========================  =====================================================================================

What the library itself reads (``STITCHD_SOCKET``, ``STITCHD_PLAN``, ``STITCHD_RECORD`` …) is described with it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Mapping, Optional

__all__ = ["Config", "drop_plan"]


@dataclass(frozen=True)
class Config:
    """What was asked for from outside of the program."""

    is_on: bool = False
    """PyTorch's allocator is to be replaced without the program's help."""
    is_required: bool = False
    """Without it the program is not to go on."""
    library: Optional[str] = None
    """Path of the client library."""
    reports: Optional[str] = None
    """Directory for the figures of each process."""
    plan: Optional[str] = None
    """A plan file, or ``auto``, or none: the library reads it itself."""
    rank: Optional[int] = None
    """Which process of its job this is, if its launcher says so."""
    local_rank: Optional[int] = None
    """Which one on this node."""

    @staticmethod
    def read(environment: Optional[Mapping[str, str]] = None) -> "Config":
        """Reads it. What makes no sense counts as off, and never raises."""
        of = os.environ if environment is None else environment
        mode = of.get("STITCHD_TORCH", "").strip().lower()
        return Config(
            is_on=mode in ("1", "on", "true", "require"),
            is_required=mode == "require",
            library=of.get("STITCHD_LIBRARY") or None,
            reports=of.get("STITCHD_REPORTS") or None,
            plan=None if of.get("STITCHD_PLAN") == "none" else of.get("STITCHD_PLAN") or None,
            rank=_number(of.get("RANK")),
            local_rank=_number(of.get("LOCAL_RANK")),
        )


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and text.isdecimal() else None


def drop_plan() -> None:
    """The process goes on without the plan that its environment names."""
    os.environ.pop("STITCHD_PLAN", None)
