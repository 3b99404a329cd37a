"""A training step as a graph, and back: with a real PyTorch, on the CPU."""

import copy
import random
import unittest
from collections import Counter, defaultdict
from importlib.util import find_spec

HAS_TORCH = find_spec("torch") is not None
if HAS_TORCH:
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from stitchd.torch import graph

    class Net(nn.Module):
        """Convolution, normalisation with running figures, a residual sum, activations in place, views, a tied weight."""

        def __init__(self):
            super().__init__()
            self.one = nn.Conv2d(3, 8, 3, padding=1)
            self.norm = nn.BatchNorm2d(8)
            self.two = nn.Conv2d(8, 8, 3, padding=1)
            self.act = nn.ReLU(inplace=True)
            self.head = nn.Linear(8, 8)
            self.tied = nn.Linear(8, 8)
            self.tied.weight = self.head.weight

        def forward(self, x):
            x = self.act(self.norm(self.one(x)))
            x = self.act(x + self.two(x))
            return self.tied(self.head(x.mean((2, 3)).view(x.shape[0], -1)))

    class Running(nn.Module):
        """Running figures that several look at: of one normalisation that runs twice, by itself; and of samples, whose mean PyTorch takes from copies."""

        def __init__(self):
            super().__init__()
            self.one = nn.Conv2d(3, 4, 3, padding=1)
            self.shared = nn.BatchNorm2d(4)
            self.two = nn.Conv2d(4, 4, 3, padding=1)
            self.samples = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
            self.head = nn.Linear(4, 4)

        def forward(self, x):
            x = self.one(x)
            first, second = self.shared(x), self.shared(self.two(x))
            x = self.samples(first * self.shared.running_mean.sum() + second)
            return self.head((x + self.shared.running_var.view(1, -1, 1, 1)).mean((2, 3)))


    class Again(nn.Module):
        """Layers that are computed again in the backward pass, and constants."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
            self.norm = nn.LayerNorm(6)

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x * torch.tensor(2.0), use_reentrant=False)
            return self.norm(x) + torch.arange(6)


def some_order(exported, module):
    """An order that the graph allows, by chance."""
    after = set(graph._Export(module).after())
    waits = Counter(later for _, later in after)
    follow = defaultdict(list)
    for before, later in sorted(after):
        follow[before].append(later)
    ready = [node["name"] for node in exported["nodes"] if not waits[node["name"]]]
    order = []
    while ready:
        node = ready.pop(random.randrange(len(ready)))
        order.append(node)
        for later in follow[node]:
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    return order


@unittest.skipUnless(HAS_TORCH, "there is no PyTorch")
class GraphTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(1)
        random.seed(1)
        self.model = Net()
        self.inputs, self.target = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])

    def traced(self):
        return graph.traced(self.model, F.cross_entropy, self.inputs, self.target, learning_rate=0.1)

    def state(self):
        return copy.deepcopy(self.model.state_dict())

    def same_in_any_order(self, step, before, times):
        """Two steps come to the same bits in orders by chance; gives their losses."""
        exported = graph.exported(step.module)
        given = [node["name"] for node in exported["nodes"]]
        losses = [step(self.inputs, self.target) for _ in range(2)]
        expected = self.state()
        for _ in range(times):
            order = some_order(exported, step.module)
            self.assertNotEqual(order, given)
            graph.reorder(step.module, order)
            self.model.load_state_dict(before)
            self.assertEqual([step(self.inputs, self.target) for _ in range(2)], losses)
            for name, value in self.state().items():
                self.assertTrue(torch.equal(value, expected[name]), name)
            self.assertEqual([node["name"] for node in graph.exported(step.module)["nodes"]], order)
        return losses

    def test_a_traced_step_does_what_the_model_does(self):
        beside = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(beside.parameters(), lr=0.1)
        step = self.traced()
        before = self.state()
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(beside(self.inputs), self.target)
            loss.backward()
            optimizer.step()
            self.assertTrue(torch.allclose(step(self.inputs, self.target), loss.detach(), atol=1e-6))
        for name, value in beside.state_dict().items():
            self.assertTrue(torch.allclose(self.model.state_dict()[name], value, atol=1e-5), name)
        self.assertFalse(torch.equal(before["one.weight"], self.model.one.weight))

    def test_any_order_that_the_graph_allows_computes_the_same(self):
        before, step = self.state(), self.traced()
        self.same_in_any_order(step, before, 10)

    def test_running_figures_are_read_and_written_in_turn(self):
        self.model = Running()
        before, step = self.state(), self.traced()
        self.same_in_any_order(step, before, 20)
        self.assertFalse(torch.equal(before["samples.running_var"], self.state()["samples.running_var"]))

    def test_constants_and_layers_that_are_computed_again_are_the_models_own(self):
        self.model = Again()
        self.inputs, self.target = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
        before, step = self.state(), self.traced()
        exported = graph.exported(step.module)
        # No second tensor is as large as a weight but what is computed, and each weight is read when it is computed again.
        weights = [f"parameters_{2 * at + 1}" for at in range(3)]
        self.assertFalse([name for name in exported["tensors"] if "_param_constant" in name])
        for weight in weights:
            readers = [node["name"] for node in exported["nodes"] if weight in node["inputs"]]
            self.assertGreaterEqual(len(readers), 3, readers)
        losses = self.same_in_any_order(step, before, 10)
        beside = Again()
        beside.load_state_dict(before)
        optimizer = torch.optim.SGD(beside.parameters(), lr=0.1)
        for loss in losses:
            optimizer.zero_grad()
            own = F.cross_entropy(beside(self.inputs), self.target)
            own.backward()
            optimizer.step()
            self.assertTrue(torch.allclose(loss, own.detach(), atol=1e-6))

    def test_an_operator_without_a_schema_may_overwrite_what_it_is_given(self):
        def doubled(x):
            return x.add_(x)

        operators = torch.fx.Graph()
        x = operators.placeholder("x")
        first, second = operators.call_function(doubled, (x,)), operators.call_function(torch.ops.aten.neg.default, (x,))
        operators.output((first, second))
        for node in (x, first, second):
            node.meta["val"] = torch.empty(4)
        module = torch.fx.GraphModule(nn.Module(), operators)
        order = [node["name"] for node in graph.exported(module)["nodes"]]
        graph.reorder(module, order)
        with self.assertRaises(ValueError):
            graph.reorder(module, order[::-1])

    def test_an_order_that_is_none_is_refused_and_changes_nothing(self):
        step = self.traced()
        order = [node["name"] for node in graph.exported(step.module)["nodes"]]
        for wrong in (order[::-1], order[1:], order + order[:1], [*order[1:], "nobody"]):
            with self.assertRaises(ValueError):
                graph.reorder(step.module, wrong)
        self.assertEqual([node["name"] for node in graph.exported(step.module)["nodes"]], order)

    def test_what_is_written_in_place_is_one_memory_and_comes_after_its_readers(self):
        step = self.traced()
        exported = graph.exported(step.module)
        updates = [node for node in exported["nodes"] if node.get("kind") == "update"]
        # Weights and biases of one, norm, two, head and tied, less a weight that two have; and how many batches the norm has seen.
        self.assertEqual(len(updates), 9 + 1)
        same = {frozenset(pair) for pair in exported["aliases"]}
        made = {name for node in exported["nodes"] for name in node["outputs"]}
        for node in updates:
            given = [name for name in node["inputs"] if name not in made]
            self.assertTrue(any(frozenset((name, node["outputs"][0])) in same for name in given) or node["outputs"][0] in made)
        control = {tuple(pair) for pair in exported["control"]}
        self.assertTrue(any(later in {node["name"] for node in updates} for _, later in control))


if __name__ == "__main__":
    unittest.main()
