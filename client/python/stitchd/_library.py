"""The client library, ``libstitchd_client.so``, by ctypes: where it is, and its functions with their types.

Independent of the Python ABI and of torch. Functions that may wait for the daemon or the device let other Python threads run meanwhile; the
two that only write down where a thread is (``stitch_context_push`` and ``_pop``) do not, which makes them three times as fast.
"""

from __future__ import annotations

import ctypes
import json
from ctypes import c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

__all__ = ["Library", "Shared", "StitchdError", "find_library", "PHASES"]

NAME = "libstitchd_client.so"

#: Phases of an iteration by the names that traces have for them, and their numbers in ``stitch.h``.
PHASES: Dict[str, int] = {"init": 0, "forward": 1, "backward": 2, "recompute": 3, "optimizer": 4, "other": 5}


class StitchdError(RuntimeError):
    """What was asked of the library failed; the text says what happened and what to do."""


def find_library(named: Optional[str] = None) -> Path:
    """The library's path: the one that is named, else the one inside the package, else the newest that was built in the checkout that the package lies in.

    Raises :class:`StitchdError` where there is none.
    """
    if named is not None:
        path = Path(named)
        if not path.is_file():
            raise StitchdError(f"STITCHD_LIBRARY: there is no file {path}")
        return path.resolve()
    package = Path(__file__).resolve().parent
    installed = package / "lib" / NAME
    if installed.is_file():
        return installed
    built = [package.parents[2] / "target" / kind / NAME for kind in ("release", "debug")] if len(package.parents) > 2 else []
    there = [path for path in built if path.is_file()]
    if not there:
        raise StitchdError(f"{NAME} is not beside the package; build it with `cargo build --release`, or name it by STITCHD_LIBRARY")
    return max(there, key=lambda path: path.stat().st_mtime)


class _Shared(ctypes.Structure):
    # `stitch_shared` of stitch.h.
    _fields_ = [
        ("address", c_void_p),
        ("size", c_size_t),
        ("content", c_size_t),
        ("version", c_uint64),
        ("device", c_int),
        ("writable", c_int),
        ("sealed", c_int),
    ]


class Shared(NamedTuple):
    """Memory that is to be published, or was, by this process or another."""

    #: Where it begins, until it is closed.
    address: int
    #: Its bytes: whole chunks.
    size: int
    #: Bytes that its publisher says mean something; 0 before it is published.
    content: int
    #: A range that is published later has a larger number; 0 before it is published.
    version: int
    #: The ordinal of its device in this process.
    device: int
    #: Whether this process may write it.
    writable: bool
    #: Whether the driver lets nobody write it any more.
    sealed: bool


class Library:
    """The loaded library. One for a process: :func:`stitchd.library`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._waiting = ctypes.CDLL(str(path))
            self._quick = ctypes.PyDLL(str(path))
            self._declare()
        except (OSError, AttributeError) as error:
            raise StitchdError(f"{path} is no client library of this version: {error}") from error

    def _declare(self) -> None:
        def function(of: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found = getattr(of, name)
            found.restype, found.argtypes = result, list(arguments)
            return found  # type: ignore[no-any-return]

        text = (c_int, c_void_p, c_size_t)
        self._malloc = function(self._waiting, "stitch_malloc", c_void_p, c_size_t, c_int, c_void_p)
        self._free = function(self._waiting, "stitch_free", None, c_void_p, c_size_t, c_int, c_void_p)
        self._open = function(self._waiting, "stitch_open", c_int, c_int)
        self._memory_info = function(self._waiting, "stitch_memory_info", c_int, c_int, c_void_p, c_void_p)
        self._driver = function(self._waiting, "stitch_driver", c_char_p)
        self._last_error = function(self._waiting, "stitch_last_error", c_char_p)
        self._mark = function(self._waiting, "stitch_iteration_mark", None, c_int)
        self._guarantee = function(self._waiting, "stitch_guarantee", c_int, c_int, c_size_t, c_uint64)
        self._stats = function(self._waiting, "stitch_memory_stats", c_size_t, *text)
        self._counters = function(self._waiting, "stitch_counters", c_size_t, *text)
        self._snapshot = function(self._waiting, "stitch_memory_snapshot", c_size_t, *text)
        self._reset_peaks = function(self._waiting, "stitch_reset_peak_memory_stats", None, c_int)
        self._reset_sums = function(self._waiting, "stitch_reset_accumulated_memory_stats", None, c_int)
        self._trim = function(self._waiting, "stitch_torch_reset", None)
        self._fraction = function(self._waiting, "stitch_torch_memory_fraction", None, c_double, c_int)
        key = (c_char_p, c_size_t)
        shared = ctypes.POINTER(_Shared)
        self._share_create = function(self._waiting, "stitch_share_create", c_int, c_size_t, c_int, shared)
        self._share_publish = function(
            self._waiting, "stitch_share_publish", c_int, c_void_p, c_char_p, c_size_t, c_uint64, c_int, *key, shared
        )
        self._share_attach = function(self._waiting, "stitch_share_attach", c_int, c_char_p, c_uint64, *key, shared)
        self._share_close = function(self._waiting, "stitch_share_close", c_int, c_void_p)
        self._tag_push = function(self._quick, "stitch_tag_push", c_int, c_char_p, c_int)
        self._tag_pop = function(self._quick, "stitch_tag_pop", None)
        self._sleep = function(self._waiting, "stitch_sleep", c_int, c_char_p, c_int, ctypes.POINTER(c_size_t))
        self._wake = function(self._waiting, "stitch_wake", c_int, c_char_p, c_uint64)
        self.context_push = function(self._quick, "stitch_context_push", None, c_int, c_int, c_int, c_char_p, c_int)
        self.context_pop = function(self._quick, "stitch_context_pop", None)

    def address(self, name: str) -> int:
        """Where a function of the library lies, for whoever wants to be given its address."""
        found = ctypes.cast(getattr(self._waiting, name), c_void_p).value
        if found is None:
            raise StitchdError(f"{self.path} has no {name}")
        return found

    def last_error(self) -> str:
        """Why the last call of this thread failed; empty if none has."""
        return bytes(self._last_error() or b"").decode("utf-8", "replace")

    def open(self, device: int = -1) -> None:
        """Opens the session with the daemon now, and sets a device up unless that is -1. Raises :class:`StitchdError`, which says why."""
        if self._open(device) != 0:
            raise StitchdError(self.last_error())

    def driver(self) -> str:
        """Whose memory the process has: the daemon's driver; empty without a session."""
        return bytes(self._driver() or b"").decode("utf-8", "replace")

    def malloc(self, size: int, device: int = 0, stream: int = 0) -> int:
        """The address of ``size`` new bytes; 0 for none. Raises :class:`StitchdError` when it fails."""
        address = self._malloc(size, device, stream)
        if address is None and size > 0:
            raise StitchdError(self.last_error())
        return address or 0

    def free(self, address: int, size: int, device: int = 0, stream: int = 0) -> None:
        """Gives an allocation back."""
        self._free(address, size, device, stream)

    def mark_iteration(self, device: int = -1) -> None:
        """An iteration of the job ends, on one device or on all."""
        self._mark(device)

    def guarantee(self, size: int, device: int = 0, wait: float = 60.0) -> None:
        """Has this process guaranteed ``size`` bytes of a device, in place of what it is; waits up to ``wait`` seconds for the guarantees of others to end. Raises :class:`StitchdError`, which says who is guaranteed what."""
        if self._guarantee(device, size, max(0, round(wait * 1000))) != 0:
            raise StitchdError(self.last_error())

    def memory_info(self, device: int) -> Tuple[int, int]:
        """Bytes that this process could get on a device beside what it holds, and the most that it may hold there. Raises :class:`StitchdError` when nobody can tell."""
        unused, total = c_size_t(), c_size_t()
        if self._memory_info(device, ctypes.byref(unused), ctypes.byref(total)) != 0:
            raise StitchdError(self.last_error())
        return unused.value, total.value

    def memory_stats(self, device: int) -> Dict[str, int]:
        """Statistics of a device in bytes and numbers, under the names of ``torch.cuda.memory_stats``; empty where nothing was allocated."""
        found = self._text(self._stats, device, "{}")
        return {name: int(value) for name, value in found.items()}

    def counters(self, device: int) -> Dict[str, int]:
        """What the runtime of a device counts, under the names of ``stitchd sessions --json``; empty where nothing was allocated."""
        found = self._text(self._counters, device, "{}")
        return {name: int(value) for name, value in found.items()}

    def memory_snapshot(self, device: int) -> List[Dict[str, Any]]:
        """What lies where, in the shape of ``torch.cuda.memory_snapshot()``."""
        found = self._text(self._snapshot, device, "[]")
        return list(found)

    def reset_peak_memory_stats(self, device: int) -> None:
        """Peaks are counted anew from now on."""
        self._reset_peaks(device)

    def reset_accumulated_memory_stats(self, device: int) -> None:
        """Sums are counted anew from now on."""
        self._reset_sums(device)

    def trim(self) -> None:
        """Gives all idle memory back to the daemon, once the devices have done what is queued."""
        self._trim()

    def set_memory_fraction(self, fraction: float, device: int) -> None:
        """The process holds at most this part of a device's memory from now on."""
        self._fraction(fraction, device)

    def tag_push(self, tag: str, keep: bool) -> None:
        """What this thread allocates from now on is under a tag, whose contents are kept when it sleeps if ``keep`` says so. Raises :class:`StitchdError` when it fails."""
        if self._tag_push(tag.encode(), int(keep)) != 0:
            raise StitchdError(self.last_error())

    def tag_pop(self) -> None:
        """This thread leaves the tag that it pushed last."""
        self._tag_pop()

    def sleep(self, tag: Optional[str] = None, keep: Optional[bool] = None) -> int:
        """Gives the memory of a tag, or all, back to the daemon; addresses stay. Returns how many bytes that were. Raises :class:`StitchdError` when it fails."""
        freed = c_size_t()
        if self._sleep(None if tag is None else tag.encode(), -1 if keep is None else int(keep), ctypes.byref(freed)) != 0:
            raise StitchdError(self.last_error())
        return freed.value

    def wake(self, tag: Optional[str] = None, wait: float = 60.0) -> None:
        """Gets memory again for a tag, or all that sleeps, with what was kept. Raises :class:`StitchdError` where others have it for longer than ``wait`` seconds: then it sleeps on."""
        if self._wake(None if tag is None else tag.encode(), max(0, round(wait * 1000))) != 0:
            raise StitchdError(self.last_error())

    def share_create(self, size: int, device: int = 0) -> Shared:
        """Memory of at least ``size`` bytes to be written and then published. Raises :class:`StitchdError` when it fails."""
        found = _Shared()
        return self._shared(self._share_create(size, device, ctypes.byref(found)), found)

    def share_publish(
        self, range: Shared, name: str, *, content: int, linger: float = 600.0, writable: bool = False, key: Optional[bytes] = None
    ) -> Shared:
        """Publishes what :meth:`share_create` made, for it to outlive its last holder by ``linger`` seconds: at the same address, and no more to be written unless ``writable``. Raises :class:`StitchdError` when it fails."""
        found = _Shared()
        millis = max(0, round(linger * 1000))
        done = self._share_publish(
            range.address, name.encode(), content, millis, int(writable), key, len(key or b""), ctypes.byref(found)
        )
        return self._shared(done, found)

    def share_attach(self, name: str, *, version: int = 0, key: Optional[bytes] = None) -> Shared:
        """Holds a published range, the newest of the name or exactly that one, and maps it. Raises :class:`StitchdError` when it fails."""
        found = _Shared()
        return self._shared(self._share_attach(name.encode(), version, key, len(key or b""), ctypes.byref(found)), found)

    def share_close(self, range: Shared, missing_ok: bool = False) -> None:
        """Unmaps a range: one that was not published is given back, one that was is held no more. Raises :class:`StitchdError` where there is none and ``missing_ok`` is false."""
        if self._share_close(range.address) != 0 and not missing_ok:
            raise StitchdError(self.last_error())

    def _shared(self, done: int, found: _Shared) -> Shared:
        if done != 0:
            raise StitchdError(self.last_error())
        return Shared(
            address=int(found.address or 0),
            size=int(found.size),
            content=int(found.content),
            version=int(found.version),
            device=int(found.device),
            writable=bool(found.writable),
            sealed=bool(found.sealed),
        )

    @staticmethod
    def _text(function: Callable[..., int], device: int, nothing: str) -> Any:
        # What other threads do between two calls may make it longer.
        room = 1 << 14
        while True:
            text = ctypes.create_string_buffer(room)
            length = function(device, text, room)
            if length < room:
                return json.loads(text.value.decode("utf-8", "replace") or nothing)
            room = length + (length >> 2) + 1


