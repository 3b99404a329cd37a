"""Recorder of allocation traces: turns the operators of a PyTorch job on meta tensors into rows.

The meta device has shapes, autograd and optimizers, but no memory, so an operator on tensors of any
size runs at once. A storage that the recorder has not seen before is an `alloc` row. The storage's
destruction is its `free` row. Lifetimes are therefore those of autograd and of Python's references.
Views share their storage and add no row. Sizes are those of the storages, without rounding.

Workspaces inside kernels are not tensors. These formulas stand for them:

* cuBLAS: 8,519,680 bytes from the first matrix multiplication to the end of the process;
* convolution: the bytes of input and weight, at most 256 MiB; backward takes twice as much;
* backward of an embedding: 32 bytes per index, for sorting the indices.

The last two are freed right after their operator. `layers.FlashAttention` has the formula of fused
attention. The module of an operator in a backward pass comes from private functions of autograd,
as they are in PyTorch 2.15.
"""

import bisect
import contextlib
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

HEADER = "tick,event,id,bytes,stream,iteration,phase,microbatch,chunk,module,dynamic"
MATRIX_MULTIPLICATIONS = {"mm", "addmm", "bmm", "baddbmm"}
CUBLAS_WORKSPACE = 8_519_680
MAX_CONVOLUTION_WORKSPACE = 256 << 20
SORT_BYTES_PER_INDEX = 32
# Gradient accumulation nodes have sequence numbers above this one, whatever their module.
MAX_SEQUENCE_NUMBER = 1 << 62


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the job that runs inside it."""

    current = None  # the recorder of the running job

    def __init__(self):
        super().__init__()
        self.rows = []
        self.tick = 0
        self.next_id = 0
        self.request_ids = {}  # by storage address; None if allocated while recording was paused
        self.is_recording = True
        self.has_cublas_workspace = False
        self.iteration, self.phase, self.micro_batch = 0, "init", ""
        self.module_stack = []  # names of the modules whose forward is running
        # Sequence number of autograd at each entry to and exit from a module, in ascending order,
        # and the module that runs from there on.
        self.boundaries, self.boundary_modules = [], []
        self.last_module = ""  # module of the last autograd node that had a sequence number

    def current_module(self):
        """Name of the module that the running operator belongs to, in forward or in backward."""
        node = torch._C._current_autograd_node()
        if self.module_stack or node is None:
            return self.module_stack[-1] if self.module_stack else ""
        number = node._sequence_nr()
        if number < MAX_SEQUENCE_NUMBER:  # else gradient accumulation, for the node before it
            at = bisect.bisect_right(self.boundaries, number) - 1
            self.last_module = self.boundary_modules[at] if at >= 0 else ""
        return self.last_module

    def add_row(self, event, request_id, size=""):
        module = self.current_module()
        dynamic = ("1" if "experts" in module else "0") if event == "alloc" else ""
        position = f"{self.iteration},{self.phase},{self.micro_batch},"
        self.rows.append(f"{self.tick},{event},{request_id},{size},0,{position},{module},{dynamic}")

    def add_alloc(self, size):
        self.add_row("alloc", self.next_id, size)
        self.next_id += 1
        return self.next_id - 1

    def add_free(self, storage_address):
        """Finalizer of a storage."""
        request_id = self.request_ids.pop(storage_address)
        if request_id is not None and self.is_recording:
            self.add_row("free", request_id)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.tick += 1
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self.track_storage(tensor.untyped_storage())
        if self.is_recording:
            self.add_workspace(func.overloadpacket.__name__, args)
        return out

    def track_storage(self, storage):
        address = storage._cdata
        if storage.nbytes() and address not in self.request_ids:
            is_recording = self.is_recording
            self.request_ids[address] = self.add_alloc(storage.nbytes()) if is_recording else None
            weakref.finalize(storage, self.add_free, address).atexit = False

    def add_workspace(self, operator, args):
        size = 0
        if operator in MATRIX_MULTIPLICATIONS and not self.has_cublas_workspace:
            self.has_cublas_workspace = True
            self.add_alloc(CUBLAS_WORKSPACE)
        elif operator in ("convolution", "convolution_backward"):
            # The first argument of the backward operator is the gradient of the output.
            is_backward = operator == "convolution_backward"
            operands = args[is_backward : is_backward + 2]
            size = sum(tensor.numel() * tensor.element_size() for tensor in operands)
            size = min(size, MAX_CONVOLUTION_WORKSPACE) << is_backward
        elif operator == "embedding_dense_backward":
            size = SORT_BYTES_PER_INDEX * args[1].numel()
        if size:
            self.add_row("free", self.add_alloc(size))

    @contextlib.contextmanager
    def section(self, phase, micro_batch=None):
        """Sets the phase, and the micro-batch unless None, of the rows inside."""
        before, depth = (self.phase, self.micro_batch), len(self.module_stack)
        self.phase = phase
        self.micro_batch = self.micro_batch if micro_batch is None else micro_batch
        try:
            yield
        finally:
            # Recomputation ends with an exception, which leaves modules without their exit hook.
            (self.phase, self.micro_batch), self.module_stack[depth:] = before, []

    @contextlib.contextmanager
    def paused(self):
        """Storages that are allocated inside get no rows, neither now nor when they are freed."""
        self.is_recording = False
        try:
            yield
        finally:
            self.is_recording = True

    def add_boundary(self):
        self.boundaries.append(torch.autograd._get_sequence_nr())
        self.boundary_modules.append(self.module_stack[-1] if self.module_stack else "")

    def track_modules(self, model, root="model"):
        """Hooks the modules of `model`, so that rows name them; returns the model."""

        def enter(name):
            self.module_stack.append(name)
            self.add_boundary()

        def leave(*_):
            self.module_stack.pop()
            self.add_boundary()

        for name, module in model.named_modules():
            full_name = f"{root}.{name}" if name else root
            module.register_forward_pre_hook(lambda *_, name=full_name: enter(name))
            module.register_forward_hook(leave)
        return model

    def end_iteration(self):
        self.tick += 1
        self.rows.append(f"{self.tick},mark,,,,{self.iteration},,,,,")
        self.iteration += 1

    def text(self):
        """The trace as CSV, up to the last mark: the job's own teardown follows it."""
        while ",mark," not in self.rows[-1]:
            self.rows.pop()
        return "\n".join([HEADER, *self.rows, ""])


def recompute(function, *args):
    """Calls `function`, keeps only its arguments, and calls it again in the backward pass."""
    calls = []

    def run(*inner):
        with Recorder.current.section("recompute") if calls else contextlib.nullcontext():
            calls.append(1)
            return function(*inner)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
