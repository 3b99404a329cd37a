import ctypes
import types

import torch


class CUDAPluggableAllocator:
    def __init__(self, path, malloc, free):
        library = ctypes.CDLL(path)
        malloc, free = getattr(library, malloc), getattr(library, free)
        malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self.hooks = {}
        setters = "init_fn reset_fn memory_fraction_fn base_alloc_fn record_stream_fn begin_allocate_to_pool end_allocate_to_pool_fn release_pool"
        setting = {f"set_{name}": (lambda address, name=name: self.hooks.update({name: address})) for name in setters.split()}
        self._allocator = types.SimpleNamespace(malloc=malloc, free=free, **setting)

    def allocator(self):
        return self._allocator


def get_allocator_backend():
    return "native" if torch._C._allocator is None else "pluggable"


def change_current_allocator(allocator):
    if torch._C._started or torch._C._allocator is not None:
        raise RuntimeError("Can't swap an already initialized allocator")
    torch._C._allocator = allocator.allocator()
