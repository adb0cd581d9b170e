"""Writes clip.pt beside this file: a CLIP as OpenAI publishes its own: a traced program, float16
weights. clip.npz has images, and what the image tower makes of them in float32. By torch 2.13.0:

PYTHONPATH=.:tests python tests/golden/make_clip.py
"""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from golden.formula import array

WIDTH = 16
HEADS = 2
OUTPUTS = 6


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)
        layers = OrderedDict(
            c_fc=nn.Linear(WIDTH, 4 * WIDTH), gelu=QuickGELU(), c_proj=nn.Linear(4 * WIDTH, WIDTH)
        )
        self.ln_1, self.mlp, self.ln_2 = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(layers),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x):
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.resblocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.resblocks(x)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 4, 4, bias=False)
        self.class_embedding, self.positional_embedding = (
            nn.Parameter(torch.ones(WIDTH)),
            nn.Parameter(torch.ones(5, WIDTH)),
        )
        self.ln_pre, self.transformer, self.ln_post = (
            nn.LayerNorm(WIDTH),
            Transformer(),
            nn.LayerNorm(WIDTH),
        )
        self.proj = nn.Parameter(torch.ones(WIDTH, OUTPUTS))

    def forward(self, x):
        x = self.conv1(x).flatten(2).permute(2, 0, 1)
        first = self.class_embedding.expand(1, x.shape[1], -1)
        x = torch.cat([first, x]) + self.positional_embedding[:, None]
        return self.ln_post(self.transformer(self.ln_pre(x))[0]) @ self.proj


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.transformer, self.token_embedding = (
            Tower(),
            Transformer(),
            nn.Embedding(7, WIDTH),
        )
        for name, number in (("input_resolution", 8), ("context_length", 4), ("vocab_size", 7)):
            self.register_buffer(name, torch.tensor(number))

    def forward(self, image, text):
        return self.visual(image), self.transformer(self.token_embedding(text))


if __name__ == "__main__":
    model = Clip().eval()
    folder = Path(__file__).parent
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(array(name, tuple(parameter.shape))).half())
        images = torch.from_numpy(array("images", (2, 3, 8, 8)))
        np.savez_compressed(folder / "clip.npz", images=images, outputs=model.visual(images))
        traced = torch.jit.trace(model, (images, torch.zeros(4, 1, dtype=torch.int64)))
        traced.half().save(str(folder / "clip.pt"))
