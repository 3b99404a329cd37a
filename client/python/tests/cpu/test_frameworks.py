"""The fourth list: frameworks over PyTorch, each where it is installed, on a pretended device."""

import unittest

from .on_device import OnDevice, has

END = """
from stitchd.torch import _context
hooks = _context.installed()
print(torch.cuda.memory.get_allocator_backend(), hooks.iteration, hooks._thread.inside)
"""

ALONE = """
import os
os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(20000 + os.getpid() % 20000))
import torch
from torch import nn
"""


class Frameworks(OnDevice):
    @unittest.skipUnless(has("transformers", "accelerate", "peft"), "there are no transformers, accelerate and peft")
    def test_the_trainer_of_transformers_with_adapters_and_evaluations(self):
        said, _ = self.said(
            """
import tempfile, torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
model = LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000))
model = get_peft_model(model, LoraConfig(target_modules=['q_proj', 'v_proj']))
class Data(torch.utils.data.Dataset):
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, at): tokens = torch.zeros(64, dtype=torch.long); return dict(input_ids=tokens, labels=tokens)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=6, bf16=True, gradient_checkpointing=True,
                                  report_to=[], eval_strategy='steps', eval_steps=3, save_strategy='no', disable_tqdm=True)
    Trainer(model=model, args=arguments, train_dataset=Data(100), eval_dataset=Data(8)).train()
"""
            + END
        )
        self.assertEqual(said[-1], "pluggable 6 []")

    @unittest.skipUnless(has("accelerate"), "there is no accelerate")
    def test_accelerate_accumulates_and_finds_a_batch_that_fits(self):
        said, _ = self.said(
            """
import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision='bf16')
model = torch.nn.Linear(64, 64)
model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(torch.randn(48, 64), batch_size=4))
for batch in batches:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum()); optimizer.step(); optimizer.zero_grad()
tried = []
@find_executable_batch_size(starting_batch_size=1024)
def fits(size): tried.append(size); return torch.empty(size << 20, dtype=torch.uint8, device='cuda')
fits(); print(tried)
"""
            + END
        )
        self.assertEqual(said[-1], "pluggable 5 []")
        sizes = eval(said[-2])  # noqa: S307 - printed above
        self.assertTrue(sizes[0] == 1024 and 256 <= sizes[-1] < 512, sizes)

    @unittest.skipUnless(has("lightning"), "there is no lightning")
    def test_lightning_whose_steps_call_parts_of_a_module(self):
        said, _ = self.said(
            """
import torch
import lightning
class Module(lightning.LightningModule):
    def __init__(self): super().__init__(); self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    def training_step(self, batch, at): return self.second(torch.relu(self.first(batch[0]))).sum()
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 64)), batch_size=4)
trainer = lightning.Trainer(max_steps=6, accumulate_grad_batches=2, accelerator='gpu', devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
from stitchd.torch import _context
trainer.fit(Module(), data)
print(_context.installed().microbatch, sorted(name.decode() for _, name, _, _ in _context.installed()._names.values()))
"""
            + END
        )
        # The last step's iteration ends with the next forward pass.
        self.assertEqual(said[-2:], ["2 ['Module', 'first', 'second']", "pluggable 5 []"])

    @unittest.skipUnless(has("deepspeed"), "there is no deepspeed")
    def test_deepspeed_whose_optimizers_are_its_own(self):
        for stage in (1, 3):
            with self.subTest(stage=stage):
                said, _ = self.said(
                    ALONE
                    + """
import sys, deepspeed
deepspeed.init_distributed(dist_backend='gloo')
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
config = dict(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2, optimizer=dict(type='AdamW', params=dict(lr=1e-3, torch_adam=True)),
              zero_optimization=dict(stage=int(sys.argv[1]), reduce_bucket_size=10**7), bf16=dict(enabled=True))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(8):
    engine.backward(engine(torch.randn(4, 64, device='cuda', dtype=torch.bfloat16)).sum()); engine.step()
"""
                    + END,
                    str(stage),
                )
                self.assertEqual(said[-1], "pluggable 4 []")

    @unittest.skipUnless(has("megatron.core") if has("megatron") else False, "there is no megatron-core")
    def test_megatron_says_which_micro_batch_a_step_is_of(self):
        said, _ = self.said(
            ALONE
            + """
torch.distributed.init_process_group('gloo')
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from stitchd.torch import _context
parallel_state.initialize_model_parallel(1, 1); model_parallel_cuda_manual_seed(1)
config = TransformerConfig(num_layers=2, hidden_size=128, num_attention_heads=4, use_cpu_initialization=True, pipeline_dtype=torch.float32)
model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=512, max_sequence_length=64).cuda()
optimizer = torch.optim.AdamW(model.parameters())
hooks = _context.installed(); push, seen = hooks._push, set()
hooks._push = lambda *a: (seen.add(a[:2]), push(*a))[1]
def step(batches, model):
    tokens = torch.zeros(2, 64, dtype=torch.long, device='cuda')
    loss = model(tokens, torch.arange(64, device='cuda')[None].expand(2, -1), torch.ones(2, 1, 64, 64, dtype=torch.bool, device='cuda'), labels=tokens)
    return loss, lambda loss: (loss.mean(), {})
for _ in range(3):
    get_forward_backward_func()(forward_step_func=step, data_iterator=iter([0] * 3), model=model, num_microbatches=3, seq_length=64, micro_batch_size=2, forward_only=False)
    optimizer.step(); optimizer.zero_grad()
print(sorted(seen))
"""
            + END
        )
        batches = [(phase, number) for phase in (1, 2) for number in range(3)]
        self.assertEqual(said[-2:], [str(batches + [(4, -1)]), "pluggable 2 []"])

    def test_modules_that_are_sharded_by_pytorch(self):
        for which in ("fsdp1", "fsdp2", "ddp"):
            with self.subTest(which=which):
                said, _ = self.said(
                    ALONE
                    + """
import sys, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.cuda.set_device(0)
if sys.argv[1] == 'ddp': dist.init_process_group('gloo')
else: dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=4)
class Block(nn.Module):
    def __init__(self): super().__init__(); self.linear = nn.Linear(64, 64)
    def forward(self, x): return torch.relu(self.linear(x))
class Model(nn.Module):
    def __init__(self): super().__init__(); self.layers = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for layer in self.layers: x = layer(x)
        return x
model = Model().cuda()
if sys.argv[1] == 'fsdp1':
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=0)
elif sys.argv[1] == 'fsdp2':
    from torch.distributed.fsdp import fully_shard
    for layer in model.layers: fully_shard(layer)
    fully_shard(model)
else: model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    for _ in range(2): model(torch.randn(4, 64, device='cuda')).sum().backward()
    optimizer.step(); optimizer.zero_grad()
from stitchd.torch import _context
print(_context.installed().microbatch)
"""
                    + END,
                    which,
                )
                self.assertEqual(said[-2:], ["2", "pluggable 5 []"])

    @unittest.skipUnless(has("rmm"), "there is no rmm")
    def test_rmm_has_its_memory_from_the_daemon(self):
        said, _ = self.said(
            """
import stitchd, stitchd.rmm
from rmm.pylibrmm.stream import DEFAULT_STREAM
resource, live = stitchd.rmm.resource(), lambda: stitchd.library().counters(0)['live_bytes']
at = resource.allocate(1 << 20, stream=DEFAULT_STREAM); print(live())
resource.deallocate(at, 1 << 20, stream=DEFAULT_STREAM); print(live())
"""
        )
        self.assertEqual(said, [str(1 << 20), "0"])


if __name__ == "__main__":
    unittest.main()
