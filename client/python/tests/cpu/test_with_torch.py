"""The second list: with a real PyTorch, which needs no GPU for what is asked here. The daemon's devices are pretended ones of the same vendor (`STITCHD_TEST_DRIVER`)."""

import os
import subprocess
import sys
import unittest
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
HAS_TORCH = find_spec("torch") is not None

PRELUDE = """
import sys, torch
from torch import nn

class Log:
    def __init__(self): self.lines = []; self.depth = 0
    def context_push(self, phase, microbatch, chunk, module, dynamic):
        self.lines.append((phase, microbatch, (module or b'').decode(), dynamic)); self.depth += 1
    def context_pop(self): self.depth -= 1
    def mark_iteration(self, device): self.lines.append('mark')

from stitchd.torch._context import Hooks
log = Log()
hooks = Hooks(torch, log).install()

class Block(nn.Module):
    def __init__(self): super().__init__(); self.linear = nn.Linear(4, 4)
    def forward(self, x): return torch.relu(self.linear(x))
"""


def python(script, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "STITCHD_TORCH"}
    kept.update({"PYTHONPATH": str(PACKAGE), **environment})
    return subprocess.run([sys.executable, "-c", script], env=kept, capture_output=True, text=True, timeout=300)


@unittest.skipUnless(HAS_TORCH, "there is no PyTorch")
class Context(unittest.TestCase):
    def said(self, script):
        done = python(PRELUDE + script)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()

    def test_phases_micro_batches_modules_and_iterations_with_recomputed_layers(self):
        said = self.said(
            """
from torch.utils.checkpoint import checkpoint
class Model(nn.Module):
    def __init__(self): super().__init__(); self.layers = nn.ModuleList([Block(), Block()])
    def forward(self, x):
        for layer in self.layers: x = checkpoint(layer, x, use_reentrant=False)
        return x.sum()
model = Model(); optimizer = torch.optim.SGD(model.parameters(), lr=.1)
for _ in range(2):
    for _ in range(2): model(torch.ones(2, 4)).backward()
    optimizer.step(); optimizer.zero_grad()
for line in log.lines: print(line)
print(log.depth)
"""
        )
        of_batch = lambda number: [  # noqa: E731
            f"(1, {number}, 'Model', 0)",
            f"(1, {number}, 'layers.0', 0)",
            f"(1, {number}, 'layers.0.linear', 0)",
            f"(1, {number}, 'layers.1', 0)",
            f"(1, {number}, 'layers.1.linear', 0)",
            f"(2, {number}, '', 0)",
            f"(2, {number}, 'Model', 0)",
            f"(2, {number}, 'layers.1', 0)",
            f"(3, {number}, 'layers.1', 0)",
            f"(3, {number}, 'layers.1.linear', 0)",
            f"(2, {number}, 'layers.0', 0)",
            f"(3, {number}, 'layers.0', 0)",
            f"(3, {number}, 'layers.0.linear', 0)",
        ]
        iteration = of_batch(0) + of_batch(1) + ["(4, -1, '', 0)"]
        self.assertEqual(said, iteration + ["mark"] + iteration + ["0"])

    def test_a_forward_pass_that_raises_is_left(self):
        said = self.said(
            """
class Broken(nn.Module):
    def forward(self, x): raise ValueError('on purpose')
class Model(nn.Module):
    def __init__(self): super().__init__(); self.good, self.bad = Block(), Broken()
    def forward(self, x): return self.bad(self.good(x))
model = Model()
for _ in range(3):
    try: model(torch.ones(1, 4))
    except ValueError: pass
print(log.depth, hooks._thread.inside, hooks.microbatch)
"""
        )
        self.assertEqual(said, ["0 [] 0"])

    def test_of_two_optimizers_that_take_turns_an_iteration_has_both(self):
        said = self.said(
            """
a, b = Block(), Block()
first, second = torch.optim.SGD(a.parameters(), lr=.1), torch.optim.SGD(b.parameters(), lr=.1)
for _ in range(6):
    for model, optimizer in ((a, first), (b, second)):
        model(torch.ones(1, 4)).sum().backward(); optimizer.step()
print(log.lines.count('mark'), log.depth)
"""
        )
        # The first of the two ends one before the other is known.
        self.assertEqual(said, ["6 0"])

    def test_an_optimizer_that_steps_no_more_does_not_keep_iterations_from_ending(self):
        said = self.said(
            """
a, b = Block(), Block()
first, second = torch.optim.SGD(a.parameters(), lr=.1), torch.optim.SGD(b.parameters(), lr=.1)
for at in range(200):
    a(torch.ones(1, 4)).sum().backward(); first.step()
    if at < 3: second.step()
print(log.lines.count('mark') > 100, log.depth)
"""
        )
        self.assertEqual(said, ["True 0"])

    def test_what_is_compiled_is_one_graph_and_nobody_is_warned(self):
        said = self.said(
            """
import warnings
warnings.simplefilter('error', UserWarning)
hooks.remove(); hooks.install()
model = nn.Sequential(Block(), Block())
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
for compiled in (torch.compile(model, backend='eager', fullgraph=True), torch.compile(lambda x: model(x), backend='eager', fullgraph=True)):
    for _ in range(3):
        compiled(torch.ones(2, 4)).sum().backward(); optimizer.step()
step = torch.compile(optimizer.step, backend='eager')
step()
print(log.lines.count('mark') >= 2, log.depth, len(torch._dynamo.utils.counters['graph_break']))
"""
        )
        # That one is PyTorch's own, around an optimizer's step.
        self.assertEqual(said, ["True 0 1"])

    def test_the_graph_is_as_it_was_and_everything_can_be_taken_back(self):
        said = self.said(
            """
model = nn.Sequential(Block(), nn.Linear(4, 4))
x = torch.ones(1, 4)
out = model(x)
print(out._base is None, type(out.grad_fn).__name__)
out += 1
out.sum().backward()
hooks.remove()
before = len(log.lines)
model(x).sum().backward()
print(len(log.lines) == before, type(torch.autograd.Variable._execution_engine).__name__)
"""
        )
        self.assertEqual(said, ["True AddmmBackward0", "True _EngineBase"])


@unittest.skipUnless(HAS_TORCH and os.environ.get("STITCHD_LIBRARY"), "there is no PyTorch, or no library")
class Install(unittest.TestCase):
    def said(self, script, **environment):
        done = python(script, **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines(), done.stderr

    def test_it_is_the_allocator_and_answers_what_pytorch_asks(self):
        said, errors = self.said(
            """
import stitchd.torch, torch
made = stitchd.torch.install()
assert stitchd.torch.install() is made
print(torch.cuda.memory.get_allocator_backend(), made.driver)
made.library.malloc(4 << 20)
torch.cuda.is_initialized = torch.cuda.memory.is_initialized = lambda: True
torch.cuda.memory._lazy_init = lambda: None
torch._C._cuda_getDeviceCount = lambda: 2
print(torch.cuda.memory_stats(0)['allocated_bytes.all.current'], torch.cuda.max_memory_allocated(0), torch.cuda.memory_reserved(1))
torch.cuda.reset_peak_memory_stats(0)
print('Allocated memory' in torch.cuda.memory_summary(0), 'Allocated memory' in torch.cuda.memory_summary(1))
print(len(torch.cuda.memory_snapshot()) > 0, sorted(torch.cuda.memory._snapshot()))
torch.backends.cudnn.benchmark = True
print(torch.backends.cudnn.benchmark)
"""
        )
        self.assertEqual(said[:3], ["pluggable cuda", f"{4 << 20} {4 << 20} 0", "True True"])
        self.assertEqual(said[3], "True ['allocator_settings', 'device_traces', 'external_annotations', 'segments']")
        self.assertEqual(said[4], "False")
        self.assertIn("cudnn.benchmark stays off", errors)

    def test_every_figure_that_pytorch_looks_up_is_there(self):
        said, _ = self.said(
            """
import stitchd.torch, torch
from stitchd.torch._statistics import _zero
library = stitchd.torch.install().library
library.malloc(1 << 20)
print(sorted(set(_zero()) ^ set(library.memory_stats(0))))
"""
        )
        self.assertEqual(said, ["[]"])

    def test_without_help_of_the_program_it_is_put_in_at_the_first_use_of_cuda(self):
        script = """
import stitchd._autoload, torch
stitchd._autoload.autoload()
print(torch.cuda.memory.get_allocator_backend())
try: torch.cuda.init()
except Exception as error: print(type(error).__name__)
print(torch.cuda.memory.get_allocator_backend())
"""
        said, errors = self.said(script, STITCHD_TORCH="1")
        self.assertEqual((said[0], said[-1]), ("native", "pluggable"), errors)
        said, errors = self.said(script, STITCHD_TORCH="1", STITCHD_SOCKET="/nowhere/stitchd.sock")
        self.assertEqual((said[0], said[-1]), ("native", "native"))
        lines = [line for line in errors.splitlines() if line.startswith("stitchd:")]
        self.assertEqual(len(lines), 1, errors)
        self.assertIn("no stitchd daemon answers at /nowhere/stitchd.sock", lines[0])
        self.assertIn("goes on with PyTorch's own allocator", lines[0])
        said, _ = self.said(script, STITCHD_TORCH="require", STITCHD_SOCKET="/nowhere/stitchd.sock")
        self.assertEqual(said[1], "RuntimeError")

    def test_a_plan_that_cannot_be_read_is_left_and_told_of(self):
        said, errors = self.said(
            "import stitchd.torch; made = stitchd.torch.install(); print(made.is_following_plans, made.library.malloc(512) > 0)",
            STITCHD_PLAN=__file__,
        )
        self.assertEqual(said, ["False True"])
        self.assertIn("goes on without the plan", errors)

    def test_it_is_refused_where_it_cannot_be_and_nothing_changes(self):
        said, _ = self.said(
            """
import stitchd.torch, torch, stitchd
def refused(what):
    try: stitchd.torch.install()
    except stitchd.torch.Unavailable as why: print(what in str(why), torch.cuda.memory.get_allocator_backend())
real = torch.__version__
torch.__version__ = '2.5.1'; refused('older than 2.6'); torch.__version__ = real
torch.cuda.is_initialized = lambda: True; refused('in use already'); torch.cuda.is_initialized = lambda: False
library = stitchd.library()
other = torch.cuda.memory.CUDAPluggableAllocator(str(library.path), 'stitch_malloc', 'stitch_free')
torch.cuda.memory.change_current_allocator(other); refused("another allocator is in use already ('pluggable')")
"""
        )
        self.assertEqual(said, ["True native", "True native", "True pluggable"])

    def test_memory_of_another_vendor_is_refused(self):
        said, _ = self.said(
            """
import stitchd.torch, torch
torch.version.cuda, torch.version.hip = None, '6.4'
try: stitchd.torch.install()
except stitchd.torch.Unavailable as why: print(why)
"""
        )
        self.assertEqual(said, ["the daemon's memory is of driver 'cuda', and this PyTorch uses 'hip'"])


if __name__ == "__main__":
    unittest.main()
