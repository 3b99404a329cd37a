import types

_before, _behind = [], []


def _registered(hooks, hook):
    hooks.append(hook)
    return types.SimpleNamespace(remove=lambda: hooks.remove(hook))


def register_module_forward_pre_hook(hook):
    return _registered(_before, hook)


def register_module_forward_hook(hook, *, always_call=False):
    return _registered(_behind, hook)


class Module:
    def __init__(self):
        self._modules = {}

    def __setattr__(self, name, value):
        if isinstance(value, Module):
            self._modules[name] = value
        object.__setattr__(self, name, value)

    def children(self):
        return iter(self._modules.values())

    def named_modules(self, prefix=""):
        yield prefix, self
        for name, child in self._modules.items():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def modules(self):
        return (module for _, module in self.named_modules())

    def parameters(self):
        return iter([self])

    def __call__(self, *inputs):
        for hook in _before:
            hook(self, inputs)
        output = None
        try:
            output = self.forward(*inputs)
        finally:
            for hook in _behind:
                hook(self, inputs, output)
        return output
