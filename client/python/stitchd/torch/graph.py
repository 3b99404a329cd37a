"""A training step as a graph for `stitchd order`, and back: the step in the order that was found.

    step = graph.traced(model, loss, inputs, target)         # an fx.GraphModule: forward, backward and update
    json.dump(graph.exported(step.module), open("step.json", "w"))
    # stitchd order step.json -o ordered.json
    graph.reorder(step.module, json.load(open("ordered.json"))["order"])
    step(inputs, target)                                     # trains the model, one step

Nothing is computed while it is traced: tensors are shapes. What an operator overwrites (a weight in its update, an activation in
place) is the same memory in the graph, and whoever reads the old value comes before, whoever reads the new one after.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Iterable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten

from . import _context

__all__ = ["Step", "exported", "reorder", "traced"]


class Step:
    """A traced training step of a model: calling it with inputs and target trains the model once and gives the loss.

    Each call is an iteration of the job, for plans and recordings: one ends where the next begins. A loss that is still held there is
    memory that no plan has: take its number (`.item()`).
    """

    def __init__(self, module: fx.GraphModule, parameters: list, buffers: list) -> None:
        #: The operators, in the order in which they run.
        self.module = module
        self._parameters = parameters
        self._buffers = buffers

    def __call__(self, inputs: Any, target: torch.Tensor) -> torch.Tensor:
        """One step: the model's parameters and buffers are changed in place."""
        with torch.no_grad():
            loss = self.module(self._parameters, self._buffers, inputs, target)
        hooks = _context.installed()
        if hooks is not None:
            # Its updates are what an optimizer's step is elsewhere.
            _context.quietly(hooks.note_step, self)
        return loss


def traced(
    model: torch.nn.Module,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    inputs: Any,
    target: torch.Tensor,
    learning_rate: float = 1e-3,
) -> Step:
    """The training step of a model with plain gradient descent: forward, loss, backward, then every parameter is updated in place.

    `inputs` and `target` are tensors of the shapes that the step is to have (on the device "meta" they need no memory). The operators are those
    of the device that the model lies on, and the step runs there: PyTorch has others for attention on a GPU than on the CPU.
    """
    names = [name for name, _ in model.named_parameters()]
    buffer_names = [name for name, _ in model.named_buffers()]
    parameters = [parameter for _, parameter in model.named_parameters()]
    buffers = [buffer for _, buffer in model.named_buffers()]

    def step(parameters, buffers, inputs, target):
        state = dict(zip(names, parameters)) | dict(zip(buffer_names, buffers))
        given = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        if not wanted:
            raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
        passes = _Passes(model, lambda result: loss(result, target), wanted)
        state = {f"model.{name}": tensor for name, tensor in state.items()}
        value, gradients = torch.func.functional_call(passes, state, tuple(given))
        with torch.no_grad():
            for parameter, gradient in zip(wanted, gradients):
                if gradient is not None:
                    parameter.add_(gradient, alpha=-learning_rate)
        return value.detach()

    device = _device(parameters + buffers)
    # The backward pass of a GPU's operators in this thread, too: it is the one that is looked at.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.autograd.set_multithreading_enabled(False):
        as_shape = lambda value: torch.utils._pytree.tree_map(  # noqa: E731
            lambda leaf: _fake(mode, leaf, device) if isinstance(leaf, torch.Tensor) else leaf, value
        )
        module = make_fx(step, tracing_mode="real")(
            as_shape(parameters), as_shape(buffers), as_shape(inputs), as_shape(target)
        )
    _refuse_strangers(module, parameters + buffers)
    _drop_unused(module)
    return Step(module, parameters, buffers)


class _Passes(torch.nn.Module):
    """Forward and backward pass in one call: layers that are computed again find the state that the model was given."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[Any], torch.Tensor], wanted: list[torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.wanted = wanted

    def forward(self, *inputs: Any) -> tuple:
        value = self.loss(self.model(*inputs))
        return value, torch.autograd.grad(value, self.wanted, allow_unused=True)


def _device(tensors: list[torch.Tensor]) -> torch.device:
    """Where the first lies that lies anywhere."""
    return next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor without memory where this one lies; one that lies nowhere is thought to be on `device`."""
    with mode:
        where = device if tensor.is_meta else tensor.device
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
    return shape.requires_grad_(tensor.requires_grad)


def _refuse_strangers(module: fx.GraphModule, state: list[torch.Tensor]) -> None:
    """A parameter that the trace took for a constant is read whenever the order says, updated or not."""
    own = {id(tensor) for tensor in state}
    for node in module.graph.nodes:
        if node.op == "get_attr" and id(operator.attrgetter(str(node.target))(module)) in own:
            raise ValueError(f"'{node.target}' is the model's own state, and is read past the model: no order of that is safe")


def _drop_unused(module: fx.GraphModule) -> None:
    """Views that nobody looks at, and detached copies of nothing: they cost nothing, and are in the way of whoever reads the graph."""
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users and not _writes(node) and not _makes_memory(node):
            module.graph.erase_node(node)
    module.recompile()


def exported(module: fx.GraphModule) -> dict:
    """The graph of a traced module, as `stitchd order` reads it: tensors with their bytes, operators, which tensors are the same memory."""
    return _Export(module).graph()


def reorder(module: fx.GraphModule, order: Iterable[str]) -> None:
    """Has the operators of a module run in this order: the names of its nodes, each once.

    Raises ValueError where the names are not those of the module, or an operator would run before what it reads is there.
    """
    nodes = {node.name: node for node in module.graph.nodes if _is_operator(node)}
    order = list(order)
    if sorted(order) != sorted(nodes):
        missing, unknown = sorted(set(nodes) - set(order)), sorted(set(order) - set(nodes))
        raise ValueError(
            f"the order names {len(order)} operators and the module has {len(nodes)}: "
            f"missing {missing[:3]}, unknown {unknown[:3]}, or one is there twice"
        )
    after = _Export(module).after()
    place = {name: at for at, name in enumerate(order)}
    for before, later in after:
        if place[before] > place[later]:
            raise ValueError(f"'{later}' would run before '{before}', which it has to follow")
    # Behind whatever is no operator: what is given comes first, what is returned last.
    first = next(node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr"))
    # Constants stand where they are read first, and are there from the start.
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        if node is not first:
            first.prepend(node)
    with module.graph.inserting_before(first):
        anchor = module.graph.call_function(operator.add, (0, 0))
    last = anchor
    for name in order:
        for node in [nodes[name], *_parts(nodes[name])]:
            last.append(node)
            last = node
    module.graph.erase_node(anchor)
    module.graph.lint()
    module.recompile()


def _is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _parts(node: fx.Node) -> list[fx.Node]:
    """The nodes that take an operator's several results apart: they are no operators."""
    parts = [user for user in node.users if user.op == "call_function" and user.target is operator.getitem]
    return [part for direct in parts for part in [direct, *_parts(direct)]]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


#: Normalisations that change the running figures that they are given, in training, and whose schemas do not say so.
_CHANGE_RUNNING = {
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
    "aten::batch_norm_update_stats",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::native_batch_norm",
}


def _written(node: fx.Node) -> list[fx.Node]:
    """What an operator overwrites, by its schema; all that it is given, where there is none that says."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return list(node.all_input_nodes)
    given = {
        argument.name: node.args[at] if at < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        for at, argument in enumerate(schema.arguments)
    }
    written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    if schema.name in _CHANGE_RUNNING and given.get("training", True):
        written += ["running_mean", "running_var"]
    return [leaf for name in written for leaf in tree_flatten(given[name])[0] if isinstance(leaf, fx.Node)]


def _writes(node: fx.Node) -> bool:
    return bool(_written(node))


def _storages(node: fx.Node) -> list:
    return [tensor.untyped_storage() for tensor in _tensors(node.meta.get("val"))]


def _makes_memory(node: fx.Node) -> bool:
    theirs = {id(storage._cdata) for argument in node.all_input_nodes for storage in _storages(argument)}
    return any(id(storage._cdata) not in theirs for storage in _storages(node))


class _Export:
    """What is known of each node's memory."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.nodes = [node for node in module.graph.nodes if _is_operator(node)]
        #: By storage: the tensor that stands for it, and how large it is.
        self.tensors: dict[str, int] = {}
        self.aliases: list[list[str]] = []
        self.first: dict[int, str] = {}
        #: By node: the names of the tensors that it gives.
        self.gives: dict[fx.Node, list[str]] = {}
        self.described: list[dict] = []
        self.control: set[tuple[str, str]] = set()
        self._look()

    def graph(self) -> dict:
        return {
            "tensors": self.tensors,
            "nodes": self.described,
            "control": sorted(list(pair) for pair in self.control),
            "aliases": self.aliases,
        }

    def after(self) -> list[tuple[str, str]]:
        """Who has to run after whom."""
        maker = {name: node["name"] for node in self.described for name in node["outputs"]}
        reads = ((maker[name], node["name"]) for node in self.described for name in node["inputs"] if name in maker)
        return [*reads, *self.control]

    def _name(self, name: str, storage: Any) -> str:
        """A tensor of this name in that memory."""
        self.tensors[name] = storage.nbytes()
        first = self.first.setdefault(storage._cdata, name)
        if first != name:
            self.aliases.append([first, name])
        return name

    def _results(self, node: fx.Node) -> list[str]:
        tensors = _tensors(node.meta.get("val"))
        names = [node.name] if len(tensors) == 1 else [f"{node.name}.{at}" for at in range(len(tensors))]
        return [self._name(name, tensor.untyped_storage()) for name, tensor in zip(names, tensors)]

    def _look(self) -> None:
        #: Who wrote each memory last, and who has read it since.
        writer: dict[int, str] = {}
        readers: dict[int, set[str]] = {}
        parameters = set()
        for node in self.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                value = node.meta.get("val")
                if value is None and node.op == "get_attr":
                    value = operator.attrgetter(str(node.target))(self.module)
                    node.meta["val"] = value
                self.gives[node] = self._results(node)
                parameters.update(storage._cdata for storage in _storages(node))
            elif node.op == "call_function" and node.target is operator.getitem:
                source, at = node.args[0], node.args[1]
                self.gives[node] = self._part(source, at, node)
            elif _is_operator(node):
                reads = {storage._cdata for argument in node.all_input_nodes for storage in _storages(argument)}
                writes = {storage._cdata for argument in _written(node) for storage in _storages(argument)}
                inputs = dict.fromkeys(name for argument in node.all_input_nodes for name in self.gives[argument])
                for memory in reads:
                    if memory in writer and writer[memory] != node.name:
                        self.control.add((writer[memory], node.name))
                for memory in writes:
                    self.control.update((reader, node.name) for reader in readers.get(memory, ()) if reader != node.name)
                    writer[memory], readers[memory] = node.name, set()
                for memory in reads:
                    readers.setdefault(memory, set()).add(node.name)
                self.gives[node] = self._results(node)
                described = {"name": node.name, "inputs": list(inputs), "outputs": self.gives[node]}
                # What is changed and not given back is kept in turn by the pairs above.
                if writes & parameters & {storage._cdata for storage in _storages(node)}:
                    described["kind"] = "update"
                self.described.append(described)

    def _part(self, source: fx.Node, at: Any, node: fx.Node) -> list[str]:
        """Which of an operator's results this is: no tensor of its own."""
        mine = {id(tensor) for tensor in _tensors(node.meta.get("val"))}
        storages = {storage._cdata for storage in _storages(node)}
        names = self.gives[source]
        tensors = _tensors(source.meta.get("val"))
        exact = [name for name, tensor in zip(names, tensors) if id(tensor) in mine]
        return exact or [
            name for name, tensor in zip(names, tensors) if tensor.untyped_storage()._cdata in storages
        ]
