"""Where the job is, told to the library as it goes: phase, micro-batch, module and iteration, by hooks that leave the graph as it is.

=============  ======================================================================================================
forward        global hooks around every module's ``forward``; within a backward pass that is *recompute*
backward       a hook on the outputs of the root module and of its layers (what stands in a ``ModuleList`` or ``Sequential``): it runs in the thread that
               goes backward, when the gradient of that output is there; and a proxy of the autograd engine for the thread that asks for it
optimizer      the global hooks around ``step``, without a closure that it calls
micro-batch    one for each forward pass of a root module with gradients; its backward pass has the same number, however late it comes
iteration      ends where a forward pass begins after every optimizer that the job has used has stepped; a step that a scaler of gradients leaves out, or that is seen by
               its ``zero_grad`` alone (as one that is compiled), is one, too
=============  ======================================================================================================

Hooks on modules' gradients (``register_full_backward_hook``) are not used: they make views of outputs, which some training programs refuse.

Everything is per thread but the iteration; what is written into the library is per thread there, too. Nothing here raises into the program: a hook that fails is told of once, and the job goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from .._library import PHASES, Library
from ._say import once

__all__ = ["Hooks", "install", "installed", "quietly"]

_FORWARD = PHASES["forward"]
_BACKWARD = PHASES["backward"]
_RECOMPUTE = PHASES["recompute"]
_OPTIMIZER = PHASES["optimizer"]

#: So many steps may go by without one of the known optimizers before it counts as gone.
_STEPS_WITHOUT = 64

#: As deep as outputs are searched for tensors.
_DEPTH_MAX = 4


#: A module, its name, and whether it is a layer.
_Known = Tuple["weakref.ref[Any]", bytes, bool]

#: Beside a node of a graph: its tensor is watched.
_WATCHED = "stitchd"

#: So many parts of an output are looked at for a tensor.
_PARTS_MAX = 64


class _Thread(threading.local):
    """Of each thread: the modules that it is in, whether a backward context is open, and of which micro-batch the last was."""

    def __init__(self) -> None:
        # By weak references: a pass that is left by an interrupt has nobody who takes them out.
        self.inside: List["weakref.ref[Any]"] = []
        # The outermost is a framework's, which calls parts of it and perhaps itself.
        self.is_within = False
        self.is_backward_open = False
        self.is_step_open = False
        # A closure of the step goes forward and backward; what comes behind it is the step's again.
        self.is_step_suspended = False
        self.backward_of = 0


class Hooks:
    """All that is registered; :meth:`remove` takes it back."""

    def __init__(self, torch: Any, library: Library, on_iteration: Optional[Callable[[int], None]] = None) -> None:
        self._torch = torch
        self._push = library.context_push
        self._pop = library.context_pop
        self._mark = library.mark_iteration
        self._on_iteration = on_iteration
        self._thread = _Thread()
        # By identity, with the module itself: a number may come again when that is gone.
        self._names: Dict[int, _Known] = {}
        self._task = torch._C._current_graph_task_id
        self._grad = torch.is_grad_enabled
        # The program's own code may run under it: a signal's, a destructor's.
        self._lock = threading.RLock()
        # By identity, as some compare by other things.
        self._known: Dict[int, "weakref.ref[Any]"] = {}
        self._stepped: Dict[int, "weakref.ref[Any]"] = {}
        self._seen: Dict[int, "weakref.ref[Any]"] = {}
        # Roots that have been learned from, and whether they have parameters: a loss function has none, and is no pass of its own.
        self._roots: Dict[int, Tuple["weakref.ref[Any]", bool]] = {}
        self._names_before = 0
        self._steps_without = 0
        self._is_due = False
        self._is_backward_unanswered = False
        self._removers: List[Callable[[], None]] = []
        self.iteration = 0
        self.microbatch = 0
        """The number that the next forward pass of a root module has."""
        self.marks_itself = True
        """A framework that knows better when iterations end sets this to false, and calls :meth:`end_iteration`."""
        self.counts_microbatches = True
        """The same of micro-batches."""

    def install(self) -> "Hooks":
        """Registers everything."""
        from torch.nn.modules import module as modules
        from torch.optim import optimizer as optimizers

        # Of what is compiled the modules are no more than a part of a graph, and hooks would break it: the compiler knows this question and its answer.
        is_compiling = self._torch.compiler.is_compiling

        def enter(module: Any, inputs: Any) -> None:
            if not is_compiling():
                quietly(self._enter, module)

        def leave(module: Any, inputs: Any, output: Any) -> None:
            if not is_compiling():
                quietly(self._leave, module, output)

        def before_step(optimizer: Any, *_: Any) -> None:
            if not is_compiling():
                quietly(self._before_step, optimizer)

        def after_step(optimizer: Any, *_: Any) -> None:
            if not is_compiling():
                quietly(self._after_step, optimizer)

        self._say_nothing_of_compiled_modules(modules)
        handles = [
            modules.register_module_forward_pre_hook(enter),
            # A forward pass that raises is left, too: so end the recomputed ones of checkpoints that have all that they need.
            modules.register_module_forward_hook(leave, always_call=True),
            optimizers.register_optimizer_step_pre_hook(before_step),
            optimizers.register_optimizer_step_post_hook(after_step),
        ]
        self._removers += [handle.remove for handle in handles]
        # Who held it is not in the child.
        os.register_at_fork(after_in_child=self._renew_lock)
        self._watch_zero_grad(optimizers.Optimizer, is_compiling)
        variable = self._torch.autograd.Variable
        engine = variable._execution_engine
        variable._execution_engine = _Engine(engine, self)

        def put_back() -> None:
            variable._execution_engine = engine

        self._removers.append(put_back)
        return self

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def remove(self) -> None:
        """Takes all of it back."""
        while self._removers:
            self._removers.pop()()

    # Forward

    def _enter(self, module: Any) -> None:
        thread = self._thread
        is_recompute = self._task() != -1
        if thread.inside and not is_recompute and not thread.is_within:
            # By identity, as some compare by other things.
            outermost = thread.inside[0]()
            if outermost is None or outermost is module:
                # The pass before was left by an interrupt.
                self._leave_all()
        is_root = not thread.inside
        if is_root and not is_recompute:
            if thread.is_step_open:
                self._close_step()
                thread.is_step_suspended = True
            if self._is_due and self.marks_itself:
                self.end_iteration(is_wanted=lambda: self._is_due)
            if self._root(module) is None:
                self._learn(module)
        known = self._known_as(module) or self._learn_one(module, None, False)
        _, name, _ = known
        if is_recompute:
            self._push(_RECOMPUTE, thread.backward_of, -1, name, 0)
        else:
            self._push(_FORWARD, self.microbatch, -1, name, 0)
        thread.inside.append(weakref.ref(module))

    def _leave(self, module: Any, output: Any) -> None:
        thread = self._thread
        inside = thread.inside
        if not inside or inside[-1]() is not module and not any(one() is module for one in inside):
            return
        # What was called without hooks behind it is left with it.
        while inside:
            self._pop()
            if inside.pop()() is module:
                break
        if not self._grad() or self._task() != -1:
            return
        is_root = not inside
        _, name, is_layer = self._known_as(module) or self._learn_one(module, None, False)
        microbatch = self.microbatch
        root = self._root(module) if is_root else None
        if root is not None and root[1] and self.counts_microbatches and output is not None:
            self.microbatch += 1
        if is_root or is_layer:
            # Who looks at what is done with tensors is not to see this.
            with self._torch._C.DisableTorchFunction():
                self._watch(output, microbatch, name)

    @contextlib.contextmanager
    def within(self, module: Any) -> Iterator[None]:
        """What is called inside is a forward pass of this module, which is not called itself."""
        quietly(self._enter, module)
        self._thread.is_within = True
        try:
            yield
        finally:
            self._thread.is_within = False
            quietly(self._leave, module, True)

    def _leave_all(self) -> None:
        while self._thread.inside:
            self._thread.inside.pop()
            self._pop()

    def _known_as(self, module: Any) -> Optional[_Known]:
        known = self._names.get(id(module))
        return known if known is not None and known[0]() is module else None

    def _root(self, module: Any) -> Optional[Tuple["weakref.ref[Any]", bool]]:
        root = self._roots.get(id(module))
        return root if root is not None and root[0]() is module else None

    def _learn(self, root: Any) -> None:
        """Names of all modules below a root, when it is first called as one, and which are layers. What was known from a smaller one has its longer name from then on."""
        containers = (self._torch.nn.ModuleList, self._torch.nn.Sequential)
        # First of all, so that what the program's own functions call below does not come here again.
        self._roots[id(root)] = (weakref.ref(root), True)
        has_parameters = next(iter(root.parameters()), None) is not None
        layers = {id(child) for part in root.modules() if isinstance(part, containers) for child in part.children()}
        named = list(root.named_modules())
        with self._lock:
            self._roots[id(root)] = (weakref.ref(root), has_parameters)
            for name, module in named:
                known = self._known_as(module)
                if known is None or len(known[1]) < len(name):
                    self._learn_one(module, name, id(module) in layers)
            if len(self._names) > 2 * self._names_before + 1024:
                # Roots come and go; what is known of those that are gone need not be.
                self._names = {at: known for at, known in list(self._names.items()) if known[0]() is not None}
                self._roots = {at: known for at, known in list(self._roots.items()) if known[0]() is not None}
                self._names_before = len(self._names)

    def _learn_one(self, module: Any, name: Optional[str], is_layer: bool) -> _Known:
        """A module by its name in its root, or by its class where it lies in no root that was seen."""
        known = (weakref.ref(module), (name or type(module).__name__).encode("utf-8", "replace"), is_layer)
        self._names[id(module)] = known
        return known

    # Backward

    def _watch(self, output: Any, microbatch: int, name: bytes) -> None:
        """The gradient of the first tensor of an output says that the backward pass is there."""
        tensor = _first_tensor(self._torch, output, _DEPTH_MAX, [_PARTS_MAX])
        if tensor is None:
            return
        # A tensor that comes again and again, as one that is kept does, has one hook.
        known = tensor.grad_fn.metadata
        if known.get(_WATCHED):
            return
        known[_WATCHED] = True

        def reached(_gradient: Any) -> None:
            quietly(self._go_backward, microbatch, name)

        # Who saves the tensor is not warned of it.
        reached.__torch_unserializable__ = True  # type: ignore[attr-defined]
        tensor.register_hook(reached)

    def _go_backward(self, microbatch: int, name: bytes) -> None:
        thread = self._thread
        if thread.inside:
            # A recomputed forward pass of this thread is not left by that.
            return
        if thread.is_backward_open:
            self._pop()
        self._push(_BACKWARD, microbatch, -1, name, 0)
        thread.is_backward_open, thread.backward_of = True, microbatch

    def begin_backward(self, accumulates: bool = True) -> None:
        """This thread asks for a backward pass, which may run in it or in others; it `accumulates` what an optimizer steps by, or is for its own sake."""
        thread = self._thread
        # Within another pass, as a checkpoint's own, it is of the same.
        if self._task() == -1:
            self._is_backward_unanswered |= accumulates
            thread.backward_of = max(self.microbatch - 1, 0) if self.counts_microbatches else self.microbatch
        self._push(_BACKWARD, thread.backward_of, -1, None, 0)

    def end_backward(self, was_open: bool) -> None:
        """It is over."""
        thread = self._thread
        if thread.is_backward_open and not was_open:
            self._pop()
            thread.is_backward_open = False
        self._pop()
        if thread.is_step_suspended and self._task() == -1:
            self._open_step()

    def is_backward_open(self) -> bool:
        """Whether this thread has a backward context of its own open."""
        return self._thread.is_backward_open

    # Optimizer

    def _before_step(self, optimizer: Any) -> None:
        thread = self._thread
        self._close_step()
        thread.is_step_suspended = False
        self._seen[id(optimizer)] = weakref.ref(optimizer)
        # Nobody steps within a forward pass: what is open there was left by an interrupt.
        self._leave_all()
        self._open_step()

    def _open_step(self) -> None:
        if not self._thread.is_step_open:
            self._push(_OPTIMIZER, -1, -1, None, 0)
            self._thread.is_step_open = True

    def _say_nothing_of_compiled_modules(self, modules: Any) -> None:
        """PyTorch warns that hooks for all modules also run for the compiled whole: these are made for that, and those of the program it is still warned of."""
        original = getattr(modules, "_has_any_global_hook", None)
        if original is None:
            return

        def has_any_of_the_program() -> bool:
            of_forward = (modules._global_forward_pre_hooks, modules._global_forward_hooks)
            return bool(modules._global_backward_pre_hooks or modules._global_backward_hooks or any(len(hooks) > 1 for hooks in of_forward))

        modules._has_any_global_hook = has_any_of_the_program

        def put_back() -> None:
            modules._has_any_global_hook = original

        self._removers.append(put_back)

    def _watch_zero_grad(self, optimizer_type: Any, is_compiling: Callable[[], bool]) -> None:
        """Gradients that are cleared after a backward pass, and no step seen since then: the step is one that no hook sees, because it is compiled or the optimizer's own."""
        original = optimizer_type.zero_grad

        @functools.wraps(original)
        def zero_grad(optimizer: Any, *arguments: Any, **named: Any) -> Any:
            if not is_compiling() and self._is_backward_unanswered and not self._has_been_seen(optimizer):
                quietly(self._after_step, optimizer)
            return original(optimizer, *arguments, **named)

        optimizer_type.zero_grad = zero_grad

        def put_back() -> None:
            optimizer_type.zero_grad = original

        self._removers.append(put_back)

    def _has_been_seen(self, optimizer: Any) -> bool:
        """A hook has seen it step: then one sees each of its steps."""
        seen = self._seen.get(id(optimizer))
        return seen is not None and seen() is optimizer

    def note_step(self, optimizer: Any) -> None:
        """An optimizer has had its turn, though it may not have stepped: a scaler of gradients has found what is no number."""
        if id(optimizer) not in self._stepped:
            self._after_step(optimizer)

    def _close_step(self) -> None:
        """A step that raised has no hook behind it."""
        if self._thread.is_step_open:
            self._thread.is_step_open = False
            self._pop()

    def _after_step(self, optimizer: Any) -> None:
        self._close_step()
        self._thread.is_step_suspended = False
        self._is_backward_unanswered = False
        with self._lock:
            comes_again = id(optimizer) in self._stepped
            self._known = {at: one for at, one in self._known.items() if one() is not None}
            self._known[id(optimizer)] = self._stepped[id(optimizer)] = weakref.ref(optimizer)
            if all(at in self._stepped for at in self._known):
                self._is_due = True
            elif comes_again:
                self._steps_without += 1
                if self._steps_without >= _STEPS_WITHOUT:
                    self._known = dict(self._stepped)
                    self._is_due = True

    def end_iteration(self, is_wanted: Optional[Callable[[], bool]] = None) -> None:
        """An iteration of the job has ended; or it has if that is still so when no other thread says it."""
        with self._lock:
            if is_wanted is not None and not is_wanted():
                return
            self._is_due = False
            self._stepped = {}
            self._steps_without = 0
            self.microbatch = 0
            self.iteration += 1
            iteration = self.iteration
        self._mark(-1)
        if self._on_iteration is not None:
            self._on_iteration(iteration)


class _Engine:
    """The autograd engine, with a word before and after each pass. Everything else is the engine's own."""

    def __init__(self, engine: Any, hooks: Hooks) -> None:
        self._stitchd_engine = engine
        self._stitchd_hooks = hooks

    def run_backward(self, *arguments: Any, **named: Any) -> Any:
        hooks = self._stitchd_hooks
        was_open = hooks.is_backward_open()
        quietly(hooks.begin_backward, bool(named.get("accumulate_grad", True)))
        try:
            return self._stitchd_engine.run_backward(*arguments, **named)
        finally:
            quietly(hooks.end_backward, was_open)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_stitchd"):
            raise AttributeError(name)
        return getattr(self._stitchd_engine, name)


def _first_tensor(torch: Any, output: Any, depth: int, left: List[int]) -> Any:
    """The first tensor in an output that a gradient goes back through, among so many parts."""
    left[0] -= 1
    if isinstance(output, torch.Tensor):
        return output if output.requires_grad and output.grad_fn is not None else None
    if depth == 0 or left[0] <= 0:
        return None
    if isinstance(output, dict):
        parts: Any = output.values()
    elif isinstance(output, (list, tuple)):
        parts = output
    else:
        is_data = dataclasses.is_dataclass(output) and not isinstance(output, type)
        parts = [getattr(output, field.name, None) for field in dataclasses.fields(output)] if is_data else ()
    for part in parts:
        if left[0] <= 0:
            return None
        found = _first_tensor(torch, part, depth - 1, left)
        if found is not None:
            return found
    return None


def quietly(hook: Callable[..., None], *arguments: Any) -> None:
    """The program is not to suffer for what plans would like to know."""
    try:
        hook(*arguments)
    except Exception as error:  # noqa: BLE001
        once(f"a hook failed, and plans know less of this job for it: {type(error).__name__}")


_installed: Optional[Hooks] = None


def install(torch: Any, library: Library) -> Hooks:
    """Registers the hooks of this process, once."""
    global _installed
    if _installed is None:
        from . import _report

        _installed = Hooks(torch, library, _report.at_iteration).install()
    return _installed


def installed() -> Optional[Hooks]:
    """Those of this process."""
    return _installed
