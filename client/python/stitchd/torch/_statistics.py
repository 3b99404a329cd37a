"""``torch.cuda.memory_stats`` and what is built on it, under an allocator of which PyTorch itself knows nothing.

PyTorch's pluggable allocator raises for every question about memory. All of ``torch.cuda.memory`` asks them of functions of ``torch._C``; those are answered from the client library here, so
``memory_summary``, ``max_memory_allocated``, profilers and progress bars work as they are.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, Dict

from .._library import Library, StitchdError
from ._say import once

__all__ = ["install", "nested"]

_KINDS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_POOLS = ("all", "small_pool", "large_pool")
_PARTS = ("current", "peak", "allocated", "freed")
_COUNTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


def _zero() -> Dict[str, int]:
    """The figures of a device on which nothing was allocated: all are there, as programs look them up by name."""
    zero = {f"{kind}.{pool}.{part}": 0 for kind in _KINDS for pool in _POOLS for part in _PARTS}
    zero.update({f"{kind}.{part}": 0 for kind in ("oversize_allocations", "oversize_segments") for part in _PARTS})
    zero.update({name: 0 for name in _COUNTS})
    zero["max_split_size"] = -1
    return zero


def nested(flat: Dict[str, int]) -> Dict[str, Any]:
    """The same figures as PyTorch's core gives them: a dictionary for each part of a name."""
    whole: Dict[str, Any] = {}
    for name, value in flat.items():
        *parts, last = name.split(".")
        inside = whole
        for part in parts:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return whole


def install(torch: Any, library: Library) -> None:
    """Puts the answers in. Those that this PyTorch does not ask are left out."""
    fractions: Dict[int, float] = {}

    def of_device(answer: Callable[[int], Any]) -> Callable[[int], Any]:
        def checked(device: int) -> Any:
            if not 0 <= device < torch._C._cuda_getDeviceCount():
                raise RuntimeError(f"Invalid device argument {device}: did you call init?")
            return answer(device)

        return checked

    original_set_fraction = getattr(torch._C, "_cuda_setMemoryFraction", None)

    stats = of_device(lambda device: nested({**_zero(), **library.memory_stats(device)}))
    reset_peaks = of_device(library.reset_peak_memory_stats)
    reset_sums = of_device(library.reset_accumulated_memory_stats)

    def snapshot(*_: Any, **__: Any) -> Dict[str, Any]:
        count = torch._C._cuda_getDeviceCount()
        segments = [segment for device in range(count) for segment in library.memory_snapshot(device)]
        return {
            "segments": segments,
            "device_traces": [[] for _ in range(count)],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False},
            "external_annotations": [],
        }

    def set_fraction(fraction: float, device: int) -> None:
        if original_set_fraction is not None:
            original_set_fraction(fraction, device)
        fractions[device] = fraction

    answers: Dict[str, Callable[..., Any]] = {
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": reset_sums,
        "_cuda_memorySnapshot": snapshot,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda device: fractions.get(device, 1.0),
        "_accelerator_getDeviceStats": stats,
        "_accelerator_resetPeakStats": reset_peaks,
        "_accelerator_resetAccumulatedStats": reset_sums,
        "_cuda_isHistoryEnabled": lambda: False,
        "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
    }
    for name in ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy"):
        answers[name] = _left_out("torch.cuda.memory._record_memory_history records nothing under stitchd; STITCHD_RECORD=FILE does")
    answers["_cuda_attach_out_of_memory_observer"] = _left_out("observers of out of memory are not called under stitchd")
    for name, answer in answers.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, answer)
    _answer_memory_info(torch, library)
    _keep_cudnn_from_asking(torch)


def _answer_memory_info(torch: Any, library: Library) -> None:
    """What a device has is not what this process may have: others hold memory that the daemon could give to it, and it has a limit."""

    def memory_info(original: Callable[[int], Any]) -> Callable[[int], Any]:
        def answer(device: int) -> Any:
            try:
                return library.memory_info(device)
            except (StitchdError, ctypes.ArgumentError):
                return original(device)

        return answer

    for home, name in ((getattr(torch._C, "_cudart", None), "cudaMemGetInfo"), (torch._C, "_accelerator_getMemoryInfo")):
        original = getattr(home, name, None)
        if original is not None:
            setattr(home, name, memory_info(original))


def _left_out(text: str) -> Callable[..., None]:
    def answer(*_: Any, **__: Any) -> None:
        once(text)

    return answer


def _keep_cudnn_from_asking(torch: Any) -> None:
    """With ``cudnn.benchmark`` PyTorch asks its allocator for the largest free block, which a pluggable one cannot answer: every convolution would raise."""
    set_benchmark = getattr(torch._C, "_set_cudnn_benchmark", None)
    if set_benchmark is None:
        return

    def stay_off(wanted: bool) -> None:
        if wanted:
            once("torch.backends.cudnn.benchmark stays off: PyTorch cannot have it with an allocator of one's own")
        set_benchmark(False)

    if torch._C._get_cudnn_benchmark():
        stay_off(True)
    torch._C._set_cudnn_benchmark = stay_off
    # `torch.backends.cudnn.benchmark` keeps the function that it was made with.
    cudnn = getattr(getattr(torch, "backends", None), "cudnn", None)
    setting: Any = type(cudnn).__dict__.get("benchmark")
    if hasattr(setting, "setter"):
        setting.setter = stay_off
