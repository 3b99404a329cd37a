"""The third list: a real PyTorch on a device. On one that is pretended, what it asks of the allocator is what it asks on a real one, and what it computes is not. The daemon has 512 MiB of the device."""

import unittest

from .on_device import MIB, OnDevice, has

PRELUDE = """
import gc, sys, torch
from torch import nn
MIB = 1 << 20
library = lambda: __import__('stitchd').library()
held = lambda: library().counters(0).get('held_bytes', 0)
def empty(mib): return torch.empty(mib * MIB, dtype=torch.uint8, device='cuda')
"""

MODEL = """
class Experts(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.router, self.experts = nn.Linear(width, count), nn.ModuleList(nn.Linear(width, width) for _ in range(count))
    def forward(self, x):
        # Kernels do nothing here, so who goes where is said by the CPU.
        parts = torch.randint(1, 64, (len(self.experts),)).tolist()
        weights = self.router(x)
        flat = x.flatten(0, 1)
        return x + weights.sum() + sum(expert(flat[:part]).sum() for expert, part in zip(self.experts, parts))
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention, self.experts = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True), Experts(width, 4)
    def forward(self, x):
        y = self.norm(x)
        return self.experts(x + self.attention(y, y, y, need_weights=False)[0])
class Model(nn.Module):
    def __init__(self, recomputes, width=256, layers=4):
        super().__init__()
        self.recomputes = recomputes
        self.words, self.layers, self.head = nn.Embedding(1000, width), nn.ModuleList(Layer(width) for _ in range(layers)), nn.Linear(width, 1000)
    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.recomputes == 'reentrant') if self.recomputes else layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
def train(steps, recomputes='', accumulate=2):
    import torch.utils.checkpoint
    torch.manual_seed(1)
    model = Model(recomputes).cuda()
    optimizer, scaler, side = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler('cuda'), torch.cuda.Stream()
    figures = []
    for step in range(steps):
        for _ in range(accumulate):
            with torch.cuda.stream(side): tokens = torch.zeros(8, 64, dtype=torch.long).cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            tokens.record_stream(torch.cuda.current_stream())
            with torch.autocast('cuda', dtype=torch.float16): loss = model(tokens)
            scaler.scale(loss).backward()
        scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
        figures.append((torch.cuda.memory_stats()['requested_bytes.all.current'], torch.cuda.memory_stats()['requested_bytes.all.peak'], torch.cuda.memory_reserved()))
    return figures
"""


class Memory(OnDevice):
    def test_figures_are_pytorchs_and_know_the_limit(self):
        said, _ = self.said(
            PRELUDE
            + """
print(torch.cuda.mem_get_info() == torch.accelerator.get_memory_info() == (512 * MIB, 512 * MIB), torch.cuda.memory.get_allocator_backend())
x = empty(100); small = torch.empty(100, device='cuda')
print(torch.cuda.memory_allocated() == 100 * MIB + 512, torch.cuda.memory_reserved() == held(), torch.cuda.mem_get_info()[0] == 512 * MIB - held())
part = 256 * MIB / torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(part)
print(torch.cuda.get_per_process_memory_fraction() == part, abs(torch.cuda.mem_get_info()[1] - 256 * MIB) <= MIB)
del x; torch.cuda.reset_peak_memory_stats()
print(torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()['allocated_bytes.all.freed'] == 100 * MIB)
print('CUDA OOMs: 0' in torch.cuda.memory_summary(), torch.cuda.memory_reserved() > 100 * MIB)
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved() == held() == 2 * MIB)
"""
        )
        self.assertEqual(said, ["True pluggable", "True True True", "True True", "512 True", "True True", "True"])

    def test_want_of_memory_is_pytorchs_own_error_and_the_program_goes_on(self):
        said, _ = self.said(
            PRELUDE
            + """
x = empty(300)
for _ in range(2):
    try: empty(300)
    except torch.OutOfMemoryError as error: print(str(error).splitlines()[0][:78])
try: torch.zeros(300 * MIB, device='cuda')
except torch.cuda.OutOfMemoryError as error: print('also from an operator')
from torch import nn
try: nn.Linear(10000, 10000).cuda()
except RuntimeError as error: print(type(error).__name__)
del x
print(empty(300).shape, torch.cuda.memory_stats()['num_ooms'])
"""
        )
        first = "CUDA out of memory. stitchd: out of memory: 300.0 MiB asked for; this process"
        self.assertEqual([line[: len(first)] for line in said[:2]], [first, first])
        self.assertEqual(said[2:], ["also from an operator", "OutOfMemoryError", f"torch.Size([{300 * MIB}]) 4"])

    def test_what_another_stream_uses_is_not_reused_before_it_is_done(self):
        said, _ = self.said(
            PRELUDE
            + """
import ctypes, os
pretended = os.environ.get('STITCHD_DRIVER_LIBRARY')
driver = pretended and ctypes.CDLL(pretended)
side, stall = torch.cuda.Stream(), ctypes.c_uint64()
x = empty(64); at = x.data_ptr()
if pretended:
    assert driver.standin_stall(0, ctypes.c_uint64(side.cuda_stream), ctypes.byref(stall)) == 0
else:
    # Some two seconds of a real device.
    with torch.cuda.stream(side): torch.cuda._sleep(4 * 10**9)
x.record_stream(side); del x
y = empty(64); print(y.data_ptr() == at)
if pretended: assert driver.standin_resume(stall) == 0
side.synchronize()
z = empty(64); print(z.data_ptr() == at)
"""
        )
        self.assertEqual(said, ["False", "True"])

    def test_snapshots_are_read_by_pytorchs_own_summary(self):
        said, errors = self.said(
            PRELUDE
            + """
import pickle, tempfile
from torch.cuda import _memory_viz
kept = [empty(mib) for mib in (1, 3, 40, 100)]; del kept[1]
torch.cuda.memory._record_memory_history()
with tempfile.NamedTemporaryFile() as file:
    torch.cuda.memory._dump_snapshot(file.name)
    snapshot = pickle.load(open(file.name, 'rb'))
print(sum(segment['total_size'] for segment in snapshot['segments']) == held())
print('Allocator State History' in _memory_viz.segment_plot(snapshot), 'total_allocated: 141.0MiB' in _memory_viz.segsum(snapshot))
"""
        )
        self.assertEqual(said, ["True", "True True"])
        self.assertIn("STITCHD_RECORD=FILE does", errors)

    def test_a_pool_of_pytorchs_lies_in_memory_of_the_daemon_until_it_is_gone(self):
        said, _ = self.said(
            PRELUDE
            + """
import stitchd.torch
before = empty(8)
with stitchd.torch.pool() as pool:
    x, small = empty(64), torch.empty(100, device='cuda')
print(torch.cuda.memory.get_allocator_backend(), held() // MIB, torch.cuda.memory_allocated() // MIB)
with torch.cuda.use_mem_pool(pool): y = empty(30)
print(held() // MIB)
del x, y, pool; gc.collect(); torch.cuda.empty_cache()
print(held() // MIB)
del small; gc.collect(); torch.cuda.empty_cache()
print(held() // MIB)
try:
    with stitchd.torch.pool(): empty(600)
except torch.OutOfMemoryError as error: print('out of memory')
""",
            STITCHD_TORCH="0",
        )
        self.assertEqual(said, ["native 66 72", "96", "2", "0", "out of memory"])


class Graphs(OnDevice):
    def test_a_captured_graph_keeps_its_memory_until_it_is_gone(self):
        said, _ = self.said(
            PRELUDE
            + """
x = torch.ones(MIB, device='cuda')
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): y = x * 2; scratch = y + 1; of_graph = scratch.data_ptr(); del scratch
others = [empty(4) for _ in range(8)]
print(any(at.data_ptr() <= of_graph < at.data_ptr() + 4 * MIB for at in others))
graph.replay()
second = torch.cuda.CUDAGraph()
with torch.cuda.graph(second, pool=graph.pool()): z = x + 1
second.replay(); before = held()
del y, z, graph, second; gc.collect(); torch.cuda.empty_cache()
print(held() < before, torch.cuda.memory_allocated() == 36 * MIB)
model = nn.Linear(256, 256).cuda()
graphed = torch.cuda.make_graphed_callables(model, (torch.randn(8, 256, device='cuda', requires_grad=True),))
graphed(torch.randn(8, 256, device='cuda', requires_grad=True)).sum().backward()
print(model.weight.grad is not None)
"""
        )
        self.assertEqual(said, ["False", "True True", "True"])

    def test_what_reduce_overhead_captures_is_captured_without_trees(self):
        said, _ = self.said(
            PRELUDE
            + """
empty(1)
import torch._inductor.config as config
from torch._inductor.compile_fx import cudagraphify_impl
print(config.triton.cudagraph_trees)
static = torch.ones(MIB, device='cuda')
run = cudagraphify_impl(lambda inputs: [inputs[0] + inputs[1], inputs[1] * 2], [static, torch.ones(MIB, device='cuda')], [0])
for _ in range(3): out = run([static, torch.ones(MIB, device='cuda')])
print([one.shape[0] == MIB for one in out])
"""
        )
        self.assertEqual(said, ["False", "[True, True]"])

    def test_pytorch_itself_refuses_pools_and_sharing_between_processes(self):
        said, _ = self.said(
            PRELUDE
            + """
for what in (torch.cuda.MemPool, lambda: empty(1)._typed_storage()._share_cuda_()):
    try: what()
    except RuntimeError as error: print('does not yet support' in str(error))
"""
        )
        self.assertEqual(said, ["True", "True"])


class Processes(OnDevice):
    def test_spawned_and_forked_processes_have_sessions_of_their_own(self):
        said, _ = self.said(
            PRELUDE
            + """
import os
def child(write): x = empty(8); os.write(write, torch.cuda.memory.get_allocator_backend().encode() + b' '); os._exit(0)
read, write = os.pipe()
pid = os.fork()
if pid == 0: child(write)
os.waitpid(pid, 0)
x = empty(4)
pid = os.fork()
if pid == 0:
    try: empty(4)
    except RuntimeError as error: os.write(write, b'refused' if 'forked' in str(error) else str(error).encode())
    os._exit(0)
os.waitpid(pid, 0)
print(os.read(read, 1000).decode(), empty(4).shape[0] == 4 * MIB)
"""
        )
        self.assertEqual(said, ["pluggable refused True"])

    def test_workers_that_load_data_use_no_memory_of_the_device(self):
        said, _ = self.said(
            PRELUDE
            + """
from torch.utils.data import DataLoader
batches = DataLoader(torch.arange(64.), batch_size=8, num_workers=2, pin_memory=True)
print(sum(batch.cuda(non_blocking=True).numel() for batch in batches), torch.cuda.memory_allocated() <= 1024)
"""
        )
        self.assertEqual(said, ["64 True"])


#: A second process attaches what the first has published, and says what it sees.
READER = '''
import sys, torch, stitchd.torch
from torch import nn
with torch.device('meta'): model = nn.Linear(64, 64)
shared = stitchd.torch.attach('linear')
shared.load_into(model)
print(model.weight.device, model.weight.cpu().sum().item(), torch.cuda.memory_allocated(), shared.sealed)
'''


class Shares(OnDevice):
    def test_a_published_module_lies_once_on_the_device(self):
        said, _ = self.said(
            PRELUDE
            + f"""
import os, subprocess, stitchd.torch
torch.manual_seed(3)
model = nn.Linear(64, 64)
total = model.weight.sum().item()
model = model.cuda()
published = stitchd.torch.publish(model, 'linear', use=True)
print(model.weight.device, model.weight.cpu().sum().item() == total, published.sealed)
said = subprocess.run([sys.executable, '-W', 'ignore', '-c', {READER!r}], capture_output=True, text=True)
print(said.stdout.strip() == f'cuda:0 {{total}} 0 False', said.stdout, said.stderr)
model = None
published.close()
"""
        )
        self.assertEqual(said[0], "cuda:0 True False")
        self.assertTrue(said[1].startswith("True"), said)


class Sleeps(OnDevice):
    def test_tensors_come_back_at_their_addresses(self):
        said, _ = self.said(
            PRELUDE
            + """
import stitchd, stitchd.torch
kept = torch.arange(1 << 20).cuda()
with stitchd.tag('kv_cache', keep=False): cache = empty(64)
at = kept.data_ptr(), cache.data_ptr()
freed = stitchd.torch.sleep(level=1)
print(freed >= 72 * MIB, held() == 0)
try: empty(1)
except RuntimeError as error: print('asleep' in str(error))
stitchd.torch.wake_up()
print(torch.equal(kept.cpu(), torch.arange(1 << 20)), at == (kept.data_ptr(), cache.data_ptr()))
del kept, cache
"""
        )
        self.assertEqual(said, ["True True", "True", "True True"])


class Training(OnDevice):
    def test_a_training_run_with_all_that_is_asked_for_is_what_it_is_without(self):
        # Recompute, accumulation, experts, mixed precision, two streams: the same tensors live, step by step.
        for recomputes in ("", "reentrant", "non-reentrant"):
            with self.subTest(recomputes=recomputes):
                script = PRELUDE + MODEL + f"\nfor live, peak, _ in train(8, {recomputes!r}): print(live, peak)\nfrom stitchd.torch import _context\nhooks = _context.installed()\nprint(hooks and (hooks.iteration, hooks._thread.inside))"
                own, _ = self.said(script, STITCHD_TORCH="0")
                ours, _ = self.said(script, STITCHD_PLAN="auto")
                self.assertEqual(ours[:-1], own[:-1])
                self.assertEqual(ours[-1], "(7, [])")

    def test_a_plan_made_ahead_holds_what_is_live(self):
        script = PRELUDE + MODEL + "\ntrain(6)\nprint(library().counters(0))"
        said, _ = self.said(script, STITCHD_PLAN="auto")
        counters = eval(said[-1])  # noqa: S307 - printed by the line above
        self.assertEqual(counters["plans_installed"], 1, counters)
        self.assertGreater(counters["requests_planned"], 0)
        self.assertEqual(counters["failures"], 0)

    def test_steps_that_are_left_out_or_compiled_end_iterations(self):
        said, _ = self.said(
            PRELUDE
            + """
model = nn.Linear(64, 64).cuda()
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler('cuda')
from stitchd.torch import _context
hooks = _context.installed()
turn = iter(range(100))
type(scaler)._maybe_opt_step = lambda self, optimizer, state, *a, **k: optimizer.step() if next(turn) % 2 else None
def backward(): model(torch.randn(8, 64, device='cuda')).sum().backward()
for _ in range(8):
    scaler.scale(model(torch.randn(8, 64, device='cuda')).sum()).backward(); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
backward(); print(hooks.iteration)
optimizer = torch.optim.AdamW(model.parameters())
step = torch.compile(optimizer.step, backend='eager')
for _ in range(5): step(); optimizer.zero_grad(); backward()
print(hooks.iteration)
"""
        )
        self.assertEqual(said, ["8", "13"])

    def test_passes_that_no_optimizer_steps_by_end_no_iteration(self):
        said, _ = self.said(
            PRELUDE
            + """
model = nn.Linear(3, 1).cuda(); optimizer = torch.optim.SGD(model.parameters(), lr=.1); x = torch.ones(2, 3, device='cuda', requires_grad=True)
from stitchd.torch import _context
for _ in range(10):
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
    torch.autograd.grad(model(x).sum(), x)
print(_context.installed().iteration)
"""
        )
        self.assertEqual(said, ["10"])

    def test_what_a_hostile_reading_found_stays_found(self):
        said, errors = self.said(
            PRELUDE
            + """
import dataclasses, warnings
from stitchd.torch import _context
empty(1)
hooks = _context.installed()
class Takes(torch.optim.SGD):
    def step(self, model, closure=None): return len(list(model.parameters()))
model = nn.Linear(2, 2); print(Takes(model.parameters(), lr=.1).step(model))
class Calls(nn.Module):
    def __init__(self): super().__init__(); self.net = nn.Linear(2, 2)
    def parameters(self, recurse=True): self.net(torch.ones(1, 2)); return super().parameters(recurse)
    def forward(self, x): return self.net(x)
print(Calls()(torch.ones(1, 2)).shape)
class Left(nn.Module):
    def __init__(self): super().__init__(); self.big = nn.Linear(2048, 2048)
    def forward(self, x): self.big(x); raise KeyboardInterrupt
left = Left().cuda()
# What an operator has for itself, on a device that computes.
torch.ones(2, 2, device='cuda') @ torch.ones(2, 2, device='cuda'); there = torch.cuda.memory_allocated() - 16 * MIB
try: left(torch.ones(2, 2048, device='cuda'))
except KeyboardInterrupt: pass
del left; gc.collect(); print(torch.cuda.memory_allocated() - there <= 12 * MIB)
kept = nn.Linear(2, 2)(torch.ones(1, 2)); same = nn.Dropout().eval()
for _ in range(100): same(kept)
print(len(kept._backward_hooks or {}))
@dataclasses.dataclass(**({'slots': True} if sys.version_info >= (3, 10) else {}))
class Out: x: torch.Tensor
class Slots(nn.Module):
    def __init__(self): super().__init__(); self.net = nn.Linear(2, 2)
    def forward(self, x): return Out(self.net(x))
before = hooks.microbatch; Slots()(torch.ones(1, 2)); print(hooks.microbatch - before)
class Opaque:
    __slots__ = ('param_groups', 'state')
    def __init__(self, of): self.param_groups, self.state = [{'params': list(of)}], {}
    def step(self): return 7
print(torch.amp.GradScaler('cpu', enabled=False).step(Opaque(model.parameters())))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter('always'); torch.compile(nn.Linear(2, 2), backend='eager')(torch.ones(1, 2))
print([one for one in seen if 'global hooks' in str(one.message)])
for wrong in (lambda: torch.cuda.memory_stats(9), lambda: torch.cuda.reset_peak_memory_stats(9)):
    try: wrong()
    except RuntimeError: print('refused')
seen = []
class Looks(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None): seen.append(function.__name__); return function(*args, **(kwargs or {}))
net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()); x = torch.ones(1, 2)
with Looks(): net(x)
print(seen)
"""
        )
        self.assertEqual(said[:4], ["2", "torch.Size([1, 2])", "True", "1"], errors)
        self.assertEqual(said[4:], ["1", "7", "[]", "refused", "refused", "['linear', 'relu']"], errors)
        self.assertNotIn("a hook failed, and plans know less of this job for it: AttributeError", errors)

    def test_a_closure_is_no_part_of_the_step_that_calls_it(self):
        said, _ = self.said(
            PRELUDE
            + """
model = nn.Linear(64, 64).cuda(); empty(1)
from stitchd.torch import _context
hooks = _context.installed(); push, phases = hooks._push, []
hooks._push = lambda *a: (phases.append(a[0]), push(*a))[1]
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
def closure():
    optimizer.zero_grad(); loss = model(torch.randn(8, 64, device='cuda')).sum(); loss.backward(); return loss
for _ in range(3): optimizer.step(closure)
print([phase for at, phase in enumerate(phases) if at == 0 or phases[at - 1] != phase], hooks.iteration)
"""
        )
        # Optimizer, forward, backward, and the step behind them.
        self.assertEqual(said, ["[4, 1, 2, 4, 1, 2, 4, 1, 2, 4] 2"])


if __name__ == "__main__":
    unittest.main()
