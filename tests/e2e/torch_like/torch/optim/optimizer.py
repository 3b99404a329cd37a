import types

_before, _behind = [], []


def _registered(hooks, hook):
    hooks.append(hook)
    return types.SimpleNamespace(remove=lambda: hooks.remove(hook))


def register_optimizer_step_pre_hook(hook):
    return _registered(_before, hook)


def register_optimizer_step_post_hook(hook):
    return _registered(_behind, hook)


class Optimizer:
    def step(self):
        for hook in _before:
            hook(self, (), {})
        for hook in _behind:
            hook(self, (), {})
