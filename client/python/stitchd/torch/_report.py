"""The figures that a process leaves for ``stitchd run``: a small file, written anew now and then at the end of an iteration, and at the end of the process.

Nothing is written where nobody has said where (``STITCHD_REPORTS``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from .._config import Config
from .._library import Library

__all__ = ["at_iteration", "begin", "end", "note_reason"]

#: Seconds between two reports.
EVERY = 2.0

_library: Optional[Library] = None
_pid = 0
_reason: Optional[str] = None
_written = 0.0
_iteration = 0


def begin(library: Library) -> None:
    """The allocator is in."""
    global _library, _pid
    _library, _pid = library, os.getpid()
    _write()


def note_reason(why: str) -> None:
    """It is not, and why."""
    global _reason
    _reason = why
    _write()


def at_iteration(iteration: int) -> None:
    """An iteration has ended."""
    global _iteration
    _iteration = iteration
    # The first ones tell how the job begins.
    if iteration <= 8 or time.monotonic() - _written >= EVERY:
        _write()


def end() -> None:
    """The process ends: the one that began, and no child of it."""
    if _library is not None and os.getpid() == _pid:
        _write(is_over=True)


def _devices(library: Library) -> List[Dict[str, Any]]:
    torch = sys.modules.get("torch")
    count = torch.cuda.device_count() if torch is not None and _reason is None else 0
    found = ((device, library.counters(device)) for device in range(count))
    return [{"device": device, "counters": counters} for device, counters in found if counters]


def _write(is_over: bool = False) -> None:
    try:
        _write_down(is_over)
    except Exception:  # noqa: BLE001 - whoever wanted it sees that it is missing; the program is not to suffer for it
        pass


def _write_down(is_over: bool) -> None:
    global _written
    config = Config.read()
    if config.reports is None:
        return
    _written = time.monotonic()
    report = {
        "pid": os.getpid(),
        "rank": config.rank,
        "program": os.path.basename(str(sys.argv[0])) if getattr(sys, "argv", None) else "",
        "torch": str(getattr(sys.modules.get("torch"), "__version__", "")) or None,
        "reason": _reason,
        "iterations": _iteration,
        "is_over": is_over,
        "plan": config.plan,
        "devices": _devices(_library) if _library is not None else [],
    }
    path = Path(config.reports) / f"{os.getpid()}.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(report), encoding="utf-8")
    beside.replace(path)
