"""What frameworks know better than hooks that fit all: where their iterations and micro-batches end.

A framework is looked at only if the program has imported it, or when it does: nothing is imported here. Each refinement is small, touches what the framework's own documentation names, and leaves the
general rule in place where that is not there.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from typing import Any, Callable, Dict

from . import _context

__all__ = ["install"]


def _transformers(trainer_module: Any) -> None:
    """Hugging Face's Trainer: its callbacks say when a step ends, also where an optimizer's step was left out (overflow)."""
    callback_type, trainer = trainer_module.TrainerCallback, trainer_module.Trainer

    class StitchdCallback(callback_type):  # type: ignore[misc, valid-type]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            _leave_marks_to_framework(True)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            _end_iteration()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            _leave_marks_to_framework(False)

        def __reduce__(self) -> Any:
            # A trainer that is pickled has one of its base in its place, which does nothing.
            return (callback_type, ())

    original = trainer.__init__

    @functools.wraps(original)
    def begin(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.add_callback(StitchdCallback())

    trainer.__init__ = begin
    train = trainer.train

    @functools.wraps(train)
    def to_the_end(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return train(self, *arguments, **named)
        finally:
            # Callbacks do not hear of a training that raises.
            _leave_marks_to_framework(False)

    trainer.train = to_the_end


def _deepspeed(engine_module: Any) -> None:
    """DeepSpeed: its engine steps at the boundary of accumulation only, by optimizers of its own whose hooks may not run."""
    engine = engine_module.DeepSpeedEngine
    original = engine.step

    @functools.wraps(original)
    def step(self: Any, *arguments: Any, **named: Any) -> Any:
        is_boundary = bool(self.is_gradient_accumulation_boundary())
        answer = original(self, *arguments, **named)
        if is_boundary:
            _leave_marks_to_framework(True)
            _end_iteration()
        return answer

    engine.step = step


def _grad_scaler(scaler_module: Any) -> None:
    """PyTorch's scaler of gradients: a step that it leaves out, as a gradient was no number, is a step of the job all the same."""
    scaler = scaler_module.GradScaler
    original = scaler.step

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        answer = original(self, optimizer, *arguments, **named)
        hooks = _context.installed()
        if hooks is not None:
            _context.quietly(hooks.note_step, optimizer)
        return answer

    scaler.step = step


def _lightning(strategy_module: Any) -> None:
    """Lightning: a training step is one micro-batch, whatever modules it calls, and they have their names in its module."""
    strategy = strategy_module.Strategy
    original = strategy.training_step

    @functools.wraps(original)
    def training_step(self: Any, *arguments: Any, **named: Any) -> Any:
        hooks, module = _context.installed(), self.lightning_module
        if hooks is None or module is None:
            return original(self, *arguments, **named)
        with hooks.within(module):
            return original(self, *arguments, **named)

    strategy.training_step = training_step


def _inductor(config: Any) -> None:
    """``torch.compile(mode="reduce-overhead")``: its trees of graphs ask the allocator to go back to an earlier state of a pool, which PyTorch does not pass on to a pluggable one. Without them each graph is captured by itself."""
    config.triton.cudagraph_trees = False


def _megatron(schedules: Any) -> None:
    """Megatron-LM: which micro-batch a forward step is of."""
    original = schedules.forward_step

    @functools.wraps(original)
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
        _context.quietly(hooks.end_iteration)


def _leave_marks_to_framework(does: bool) -> None:
    hooks = _context.installed()
    if hooks is not None:
        hooks.marks_itself = not does


#: Module by whose import a framework is known, and what is done with it then.
REFINEMENTS: Dict[str, Callable[[Any], None]] = {
    "torch.amp.grad_scaler": _grad_scaler,
    "torch._inductor.config": _inductor,
    "transformers.trainer": _transformers,
    "deepspeed.runtime.engine": _deepspeed,
    "lightning.pytorch.strategies.strategy": _lightning,
    "pytorch_lightning.strategies.strategy": _lightning,
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
    """Sees the modules that are waited for when they are imported, and lets others find them. What goes wrong here is as if it were not there."""

    def __init__(self, waiting: "set[str]") -> None:
        self._waiting = waiting
        self._is_inside = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._waiting or getattr(self._is_inside, "name", None) == name:
            return None
        self._is_inside.name = name
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                loader: Any = _Loader(spec.loader, REFINEMENTS[name])
                spec.loader = loader
            return spec
        except Exception:  # noqa: BLE001 - whoever is next finds it, or says why not
            return None
        finally:
            self._is_inside.name = None


class _Loader:
    """A loader, with something done behind it."""

    def __init__(self, loader: Any, refine: Callable[[Any], None]) -> None:
        self._stitchd_loader, self._stitchd_refine = loader, refine

    def create_module(self, spec: Any) -> Any:
        create = getattr(self._stitchd_loader, "create_module", None)
        return create(spec) if create is not None else None

    def exec_module(self, module: Any) -> None:
        self._stitchd_loader.exec_module(module)
        _try(self._stitchd_refine, module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_stitchd"):
            raise AttributeError(name)
        return getattr(self._stitchd_loader, name)
