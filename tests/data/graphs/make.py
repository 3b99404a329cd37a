"""Makes the graphs of this directory: one training step (forward, loss, backward, plain gradient descent) of each model that the OLLA
paper measures, at batch sizes 1 and 32, as PyTorch traces it. No weights are needed and nothing is computed.

    pip install torch torchvision zstandard
    PYTHONPATH=client/python python tests/data/graphs/make.py tests/data/graphs
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
import zstandard

from stitchd.torch import graph

IMAGE = (3, 224, 224)


class Tokens(torch.nn.Module):
    """A transformer encoder over tokens, with a head over the vocabulary or over some classes."""

    def __init__(self, vocabulary, width, heads, inner, layers, positions, classes):
        super().__init__()
        self.words = torch.nn.Embedding(vocabulary, width)
        self.places = torch.nn.Embedding(positions, width)
        layer = torch.nn.TransformerEncoderLayer(width, heads, inner, activation="gelu", batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, classes)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.words(tokens) + self.places(places))
        return self.head(hidden[:, 0])


class Translator(torch.nn.Module):
    """The transformer of "Attention Is All You Need", base size."""

    def __init__(self, vocabulary=37_000, width=512):
        super().__init__()
        self.words = torch.nn.Embedding(vocabulary, width)
        self.transformer = torch.nn.Transformer(width, 8, 6, 6, 2048, batch_first=True)
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, source, target):
        hidden = self.transformer(self.words(source), self.words(target))
        return self.head(hidden).flatten(0, 1)


def image(name, shape=IMAGE, **more):
    make = getattr(torchvision.models.video if name == "r3d_18" else torchvision.models, name)
    return lambda batch: (make(weights=None, **more), torch.empty(batch, *shape), classes(batch))


def classes(*shape):
    return torch.empty(*shape, dtype=torch.long)


MODELS = {
    "alexnet": image("alexnet"),
    "vgg16": image("vgg16"),
    "googlenet": image("googlenet", init_weights=False, aux_logits=False),
    "resnet18": image("resnet18"),
    "resnet50": image("resnet50"),
    "resnet3d-18": image("r3d_18", shape=(3, 16, 112, 112)),
    "mobilenet-v2": image("mobilenet_v2"),
    "mnasnet-1.0": image("mnasnet1_0"),
    "efficientnet-b0": image("efficientnet_b0"),
    "vit-b16": image("vit_b_16"),
    "xlm-r-base": lambda batch: (
        Tokens(250_002, 768, 12, 3072, 12, 514, 2),
        classes(batch, 128),
        classes(batch),
    ),
    "transformer": lambda batch: (Translator(), (classes(batch, 64), classes(batch, 64)), classes(batch * 64)),
}


def main(directory):
    for name, make in MODELS.items():
        for batch in (1, 32):
            with torch.device("meta"):
                model, inputs, target = make(batch)
            step = graph.traced(model, F.cross_entropy, inputs, target)
            exported = graph.exported(step.module)
            text = json.dumps(exported, separators=(",", ":"))
            path = Path(directory) / f"{name}-{batch}.json.zst"
            path.write_bytes(zstandard.ZstdCompressor(level=19).compress(text.encode()))
            sizes = exported["tensors"].values()
            print(f"{path.name}: {len(exported['nodes'])} nodes, {len(sizes)} tensors, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
