"""What frameworks know better than hooks that fit all: where their iterations and micro-batches end.

A framework is looked at only if the program has imported it, or when it does: nothing is imported here. Each refinement is small, touches what the framework's own documentation names, and leaves the
general rule in place where that is not there.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict

from . import _context

__all__ = ["install"]


def _transformers(trainer_module: Any) -> None:
    """Hugging Face's Trainer: its callbacks say when a step ends, also where an optimizer's step was left out (overflow)."""
    callback_type, trainer = trainer_module.TrainerCallback, trainer_module.Trainer

    class StitchdCallback(callback_type):  # type: ignore[misc, valid-type]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _end_iteration()

    original = trainer.__init__

    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.add_callback(StitchdCallback())
        _leave_marks_to_framework()

    trainer.__init__ = begin


def _deepspeed(engine_module: Any) -> None:
    """DeepSpeed: its engine steps at the boundary of accumulation only, by optimizers of its own whose hooks may not run."""
    engine = engine_module.DeepSpeedEngine
    original = engine.step

    def step(self: Any, *arguments: Any, **named: Any) -> Any:
        is_boundary = bool(self.is_gradient_accumulation_boundary())
        answer = original(self, *arguments, **named)
        if is_boundary:
            _leave_marks_to_framework()
            _end_iteration()
        return answer

    engine.step = step


def _megatron(schedules: Any) -> None:
    """Megatron-LM: which micro-batch a forward step is of."""
    original = schedules.forward_step

    def forward_step(*arguments: Any, **named: Any) -> Any:
        hooks = _context.installed()
        microbatch = named.get("current_microbatch")
        if hooks is not None and isinstance(microbatch, int):
            hooks.counts_microbatches = False
            hooks.microbatch = microbatch
        return original(*arguments, **named)

    schedules.forward_step = forward_step


def _end_iteration() -> None:
    hooks = _context.installed()
    if hooks is not None:
        hooks.end_iteration()


def _leave_marks_to_framework() -> None:
    hooks = _context.installed()
    if hooks is not None:
        hooks.marks_itself = False


#: Module by whose import a framework is known, and what is done with it then.
REFINEMENTS: Dict[str, Callable[[Any], None]] = {
    "transformers.trainer": _transformers,
    "deepspeed.runtime.engine": _deepspeed,
    "megatron.core.pipeline_parallel.schedules": _megatron,
}


def install() -> None:
    """Refines what is imported already, and the others when they are."""
    for name, refine in REFINEMENTS.items():
        module = sys.modules.get(name)
        if module is not None:
            _try(refine, module)
    waiting = {name for name in REFINEMENTS if name not in sys.modules}
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting))


def _try(refine: Callable[[Any], None], module: Any) -> None:
    try:
        refine(module)
    except Exception:  # noqa: BLE001 - a framework of another version: the general rule is in place
        pass


class _Finder:
    """Sees the modules that are waited for when they are imported, and lets others find them."""

    def __init__(self, waiting: "set[str]") -> None:
        self._waiting = waiting

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._waiting:
            return None
        self._waiting.discard(name)
        if not self._waiting and self in sys.meta_path:
            sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _try(REFINEMENTS[name], module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
