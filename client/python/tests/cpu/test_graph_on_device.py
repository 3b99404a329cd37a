"""The fifth list: a training step of a real PyTorch on a pretended device, in the order that `stitchd order` finds and from the plan that `stitchd plan` makes. `STITCHD_TEST_BINARY` names the binary."""

import json
import os
import subprocess
import unittest
from pathlib import Path
from tempfile import TemporaryDirectory

from .on_device import MIB, OnDevice

BINARY = os.environ.get("STITCHD_TEST_BINARY")

#: Attention, convolution, normalisation with running figures, an embedding. Its weights are large beside its activations: what their order is for.
JOB = """
import json, sys, torch
from torch import nn
from torch.nn import functional as F
import stitchd
from stitchd.torch import graph
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))
class Model(nn.Module):
    def __init__(self, width=512, layers=4):
        super().__init__()
        self.words, self.near, self.norm = nn.Embedding(1000, width), nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width)
        self.layers, self.head = nn.Sequential(*(Layer(width) for _ in range(layers))), nn.Linear(width, 1000)
    def forward(self, tokens):
        x = F.relu(self.norm(self.near(self.words(tokens).transpose(1, 2))))
        return self.head(self.layers(x.transpose(1, 2))).flatten(0, 1)
# cuDNN is not on the pretended device.
torch.backends.cudnn.enabled = False
steps, exported, ordered = int(sys.argv[1]), *sys.argv[2:]
model = Model().cuda()
tokens, target = torch.zeros(2, 32, dtype=torch.long, device='cuda'), torch.zeros(64, dtype=torch.long, device='cuda')
step = graph.traced(model, F.cross_entropy, tokens, target)
if exported: json.dump(graph.exported(step.module), open(exported, 'w'))
if ordered:
    order = json.load(open(ordered))['order']
    graph.reorder(step.module, order)
    assert [node['name'] for node in graph.exported(step.module)['nodes']] == order
for _ in range(steps): step(tokens, target).item()
print(json.dumps(stitchd.library().counters(0)))
"""


def tool(*arguments):
    """What a command of the binary says."""
    done = subprocess.run([BINARY, *map(str, arguments), "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def deviations(counters):
    return sum(count for name, count in counters.items() if name.startswith("deviations_"))


@unittest.skipUnless(BINARY, "there is no binary to order and plan with")
class Steps(OnDevice):
    def job(self, steps, exported="", ordered="", **environment):
        """So many steps, each an iteration; what the library counts at the end."""
        # What cuBLAS would have beside an operator is in no graph.
        said, _ = self.said(JOB, str(steps), str(exported), str(ordered), CUBLAS_WORKSPACE_CONFIG=":0:0", **environment)
        return json.loads(said[-1])

    def test_a_step_runs_in_its_order_from_its_plan_without_a_deviation(self):
        with TemporaryDirectory() as folder:
            exported, ordered, plan = (Path(folder) / name for name in ("step.json", "ordered.json", "step.plan"))
            as_given = self.job(3, exported=exported)
            order = tool("order", exported, "-o", ordered)
            self.assertLess(order["peak_bytes"], 0.7 * order["initial_peak_bytes"])

            recorded = self.job(3, ordered=ordered, STITCHD_RECORD=f"{folder}/step.stitchtrace")
            # What a graph says that an order needs is what PyTorch asks for in it, but for what operators have while they run.
            for counters, said in ((as_given, order["initial_peak_bytes"]), (recorded, order["peak_bytes"])):
                self.assertTrue(said <= counters["peak_live_bytes"] < 1.01 * said, (counters, said))

            (trace,) = Path(folder).glob("*.stitchtrace")
            made = tool("plan", trace, "-o", plan)
            self.assertEqual(made["dynamic_requests"], 0)
            tool("plan", "check", plan, trace)

            counters = self.job(5, ordered=ordered, STITCHD_PLAN=str(plan))
            self.assertEqual((deviations(counters), counters["failures"], counters["iterations"]), (0, 0, 4), counters)
            # Of the plan are the first iteration and one that comes again.
            again = sum(count for name, count in recorded.items() if name.startswith("requests_")) - made["static_requests"]
            served = {name: count for name, count in counters.items() if name.startswith("requests_") and count}
            self.assertEqual(served, {"requests_planned": made["static_requests"] + 3 * again}, made)
            # The device holds the plan's pool in whole chunks, and nothing else.
            self.assertEqual(counters["peak_held_bytes"], -(-made["static_pool_bytes"] // (2 * MIB)) * 2 * MIB)
            self.assertLess(counters["peak_held_bytes"], 0.6 * as_given["peak_held_bytes"])

            # In another order the job is not that of the plan, and that is counted.
            self.assertGreater(deviations(self.job(3, STITCHD_PLAN=str(plan))), 0)


if __name__ == "__main__":
    unittest.main()
