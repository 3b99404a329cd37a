"""Stands for PyTorch where there is none: what the package `stitchd` touches, with the same names and in the same order, over nothing but ctypes. "CUDA" begins at the first allocation, and whatever
allocator was put in by then serves."""

import sys
import types
from importlib.metadata import entry_points

__version__ = "2.11.0+standin"
version = types.SimpleNamespace(cuda="13.0", hip=None)


class Tensor:
    pass


_C = types.ModuleType("torch._C")
_C._started = False
_C._allocator = None


def _begin():
    _C._started = True


def _refuse(*_):
    raise RuntimeError("CUDAPluggableAllocator does not yet support this")


_C._cuda_init = _begin
_C._cuda_getDeviceCount = lambda: 1
_C._current_graph_task_id = lambda: -1
_C._get_cudnn_benchmark = lambda: False
_C._set_cudnn_benchmark = lambda wanted: None
for name in ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats", "_cuda_memorySnapshot", "_cuda_record_memory_history"):
    setattr(_C, name, _refuse)
sys.modules["torch._C"] = _C

compiler = types.SimpleNamespace(is_compiling=lambda: False)
autograd = types.SimpleNamespace(Variable=types.SimpleNamespace(_execution_engine=object()))


def is_grad_enabled():
    return True


from . import cuda, nn, optim  # noqa: E402

# As the last lines of PyTorch's own package.
for extension in entry_points(group="torch.backends"):
    extension.load()()
