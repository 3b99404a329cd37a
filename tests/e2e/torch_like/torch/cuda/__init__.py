import torch

from . import memory


def is_initialized():
    return torch._C._started


def init():
    if not is_initialized():
        torch._C._cuda_init()


def device_count():
    return 1


class Storage:
    """Memory as long as this object lives, from whatever allocator there is."""

    def __init__(self, size):
        init()
        self._allocator, self.size = torch._C._allocator, size
        self.address = self._allocator.malloc(size, 0, None) if self._allocator else 0

    def free(self):
        if self.address:
            self._allocator.free(self.address, self.size, 0, None)
            self.address = 0
