from .modules import module
from .modules.module import Module


class ModuleList(Module):
    def __init__(self, modules=()):
        super().__init__()
        self._modules = {str(at): one for at, one in enumerate(modules)}

    def __iter__(self):
        return iter(self._modules.values())


class Sequential(ModuleList):
    pass
