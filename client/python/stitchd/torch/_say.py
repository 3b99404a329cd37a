"""What the package tells people: one line on standard error, once for each thing, and of the processes of a node by the first alone."""

from __future__ import annotations

import sys
from typing import Set

from .._config import Config

__all__ = ["once", "say"]

_said: Set[str] = set()


def say(text: str) -> None:
    """Says it, unless another process of this node's job does."""
    try:
        if not Config.read().local_rank and sys.stderr is not None:
            print(f"stitchd: {text}", file=sys.stderr, flush=True)
    except Exception:  # noqa: BLE001 - where nobody can be told, nobody is
        pass


def once(text: str) -> None:
    """Says it the first time."""
    if text not in _said:
        _said.add(text)
        say(text)
