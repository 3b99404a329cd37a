"""Models that are more than one decoder: ViT, ConvNeXt, a diffusion U-Net and T5.

Attribute names of modules are part of the traces, as in `layers`.
"""

import torch
import torch.nn.functional as F
from torch import nn

from layers import META, MLP, Block, Decoder, LayerConfig, RMSNorm, tokens


class ViT(nn.Module):
    """Vision transformer with a class token; `places` counts the patches and that token."""

    def __init__(self, layers, config, patch, places):
        super().__init__()
        width = config.width
        self.patch, self.head = nn.Conv2d(3, width, patch, patch), nn.Linear(width, 1000)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.zeros(1, places, width))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Block(config) for _ in range(layers))

    def forward(self, x, labels):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.place
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]).float(), labels)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution and MLP, with layer scale and stochastic depth."""

    def __init__(self, width, drop):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = MLP(width, 4 * width, has_bias=True)
        self.scale, self.keep = nn.Parameter(torch.ones(width)), 1 - drop

    def forward(self, x):
        y = self.mlp(self.norm(self.conv(x).permute(0, 2, 3, 1)))
        y = (y * self.scale).permute(0, 3, 1, 2)
        mask = torch.empty(len(x), 1, 1, 1, dtype=x.dtype, device=META)
        return x + y * mask.bernoulli_(self.keep).div_(self.keep)


class ConvNeXt(nn.Module):
    def __init__(self, depths, widths):
        super().__init__()
        self.stages = nn.ModuleList()
        for i, (depth, width) in enumerate(zip(depths, widths)):
            down = nn.Conv2d(widths[i - 1], width, 2, 2) if i else nn.Conv2d(3, width, 4, 4)
            blocks = (ConvNeXtBlock(width, 0.1) for _ in range(depth))
            self.stages.append(nn.Sequential(down, *blocks))
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)

    def forward(self, x, labels):
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.head(self.norm(x.mean((2, 3)))).float(), labels)


class ResidualBlock(nn.Module):
    """Two convolutions, with the time embedding added between them."""

    def __init__(self, in_width, out_width):
        super().__init__()
        self.norm1 = nn.GroupNorm(32, in_width)
        self.conv1 = nn.Conv2d(in_width, out_width, 3, padding=1)
        self.time = nn.Linear(1280, out_width)
        self.norm2 = nn.GroupNorm(32, out_width)
        self.conv2 = nn.Conv2d(out_width, out_width, 3, padding=1)
        is_wider = in_width != out_width
        self.skip = nn.Conv2d(in_width, out_width, 1) if is_wider else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class SpatialTransformer(nn.Module):
    """Transformer layer over the pixels of a feature map, with cross attention to the text."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.block = Block(LayerConfig(
            width, heads=8, ffn_width=4 * width, is_gated=True, is_causal=False,
            has_cross_attention=True, context_width=768,
        ))

    def forward(self, x, text):
        y = self.enter(self.norm(x))
        flat = self.block(y.flatten(2).transpose(1, 2), memory=text)
        return x + self.leave(flat.transpose(1, 2).reshape(y.shape))


class UNet(nn.Module):
    """Stable Diffusion's U-Net: three levels with attention and one without it.

    Skip connections lead from each layer on the way down to its counterpart on the way up.
    """

    def __init__(self, base=320, multipliers=(1, 2, 4, 4)):
        super().__init__()
        last = len(multipliers) - 1
        self.time = nn.Sequential(nn.Linear(base, 1280), nn.SiLU(), nn.Linear(1280, 1280))
        self.enter = nn.Conv2d(4, base, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()

        def level(in_width, out_width, has_attention):
            parts = [ResidualBlock(in_width, out_width)]
            if has_attention:
                parts.append(SpatialTransformer(out_width))
            return nn.ModuleList(parts)

        width, skips = base, [base]
        for i, multiplier in enumerate(multipliers):
            for _ in range(2):
                self.down.append(level(width, base * multiplier, i < last))
                width = base * multiplier
                skips.append(width)
            if i < last:
                self.down.append(nn.Conv2d(width, width, 3, 2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList([
            ResidualBlock(width, width), SpatialTransformer(width), ResidualBlock(width, width),
        ])
        for i, multiplier in reversed(list(enumerate(multipliers))):
            for _ in range(3):
                self.up.append(level(width + skips.pop(), base * multiplier, i < last))
                width = base * multiplier
            if i:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.leave = nn.GroupNorm(32, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x, time, text):
        time, x = self.time(time), self.enter(x)
        skips = [x]
        for part in self.down:
            x = self.run(part, x, time, text)
            skips.append(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, time), text), time)
        for part in self.up:
            if isinstance(part, nn.Conv2d):
                x = part(F.interpolate(x, scale_factor=2))
            else:
                x = self.run(part, torch.cat((x, skips.pop()), 1), time, text)
        return self.leave(F.silu(self.norm(x)))

    @staticmethod
    def run(part, x, time, text):
        if isinstance(part, nn.Conv2d):
            return part(x)
        x = part[0](x, time)
        return part[1](x, text) if len(part) > 1 else x


class T5(nn.Module):
    """Encoder and decoder, each with one table of relative position biases for its layers."""

    def __init__(self, layers, width, heads, ffn_width, vocab=32128):
        super().__init__()
        shared = dict(norm=RMSNorm, attention="unfused", dropout=0.1, is_gated=True)
        encoder = LayerConfig(width, heads, ffn_width, is_causal=False, **shared)
        decoder = LayerConfig(width, heads, ffn_width, has_cross_attention=True, **shared)
        self.encoder = Decoder(layers, encoder, vocab, is_last=False)
        self.decoder = Decoder(layers, decoder, vocab)
        self.near, self.far = nn.Embedding(32, heads), nn.Embedding(32, heads)

    def forward(self, source, target):
        def bias(table, length):
            return table(tokens(length, length)).permute(2, 0, 1)[None]

        memory = self.encoder(source, bias=bias(self.near, source.shape[1]))
        return self.decoder(
            target, target, memory=memory, bias=bias(self.far, target.shape[1])
        )
