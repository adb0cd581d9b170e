"""Writes moco.npz beside this file: a small training by the pseudo-code of MoCo v3
(arXiv:2104.02057, algorithm 1), in torch and float64, on one process with the whole batch.

PYTHONPATH=tests python tests/golden/make_moco.py        timm 1.0.31, torch 2.13.0

Weights and images are those of ``weight`` and ``views_of``. The file has the loss of each step
(loss), the share of queries that found their key (accuracy), gradients of the first step
(grad/NAME) and the tensors after the last one (end/NAME), by the names of ``models.pretraining.moco``.
"""

import copy
import math
import sys
import types
import zlib
from pathlib import Path

import numpy as np

STEPS = 20
BATCH = 16
SIZE = 8
HIDDEN = 24
OUTPUTS = 8
# The mean of the patches: fresh class tokens are almost equal, and batch norm magnifies their rounding.
VIT = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "global_pool": "avg"}
RATE = 0.002
TEMPERATURE = 0.2
MOMENTUM = 0.9


def random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns normally distributed numbers, the same for each name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.normal(size=shape).astype(np.float32)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a tensor of the state; the momentum encoder's parameters differ from the encoder's."""
    if name.endswith("running_mean"):
        return np.zeros(shape, np.float32)
    if name.endswith("running_var"):
        return np.ones(shape, np.float32)
    is_scale = name.endswith("weight") and len(shape) == 1
    return random(name, shape) / 4 + np.float32(is_scale)


def views_of(step: int) -> np.ndarray:
    """Returns the normalised views of a step, [BATCH, 2, 3, SIZE, SIZE]."""
    images = random(f"images {step}", (BATCH, 1, 3, SIZE, SIZE))
    return images + random(f"noise {step}", (BATCH, 2, 3, SIZE, SIZE)) / 2


def main() -> None:
    # torchvision's operators don't load beside a CPU torch
    for name in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
    import timm
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.set_default_dtype(torch.float64)

    def mlp(*widths: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for index in range(len(widths) - 1):
            is_last = index == len(widths) - 2
            layers.append(nn.Linear(widths[index], widths[index + 1], bias=False))
            layers.append(nn.BatchNorm1d(widths[index + 1], affine=not is_last))
            if not is_last:
                layers.append(nn.ReLU())
        return nn.Sequential(*layers)

    encoder = timm.models.VisionTransformer(img_size=SIZE, num_classes=0, **VIT)
    base = nn.ModuleDict(
        {"encoder": encoder, "projector": mlp(VIT["embed_dim"], HIDDEN, HIDDEN, OUTPUTS)}
    )
    network = nn.ModuleDict(
        {
            **base,
            "predictor": mlp(OUTPUTS, HIDDEN, OUTPUTS),
            "momentum": copy.deepcopy(base),
        }
    )
    network.load_state_dict(
        {
            name: torch.from_numpy(weight(name, tuple(tensor.shape)))
            for name, tensor in network.state_dict().items()
            if tensor.ndim
        },
        # The counts of batches stay as they are.
        strict=False,
    )
    base = {name: network[name] for name in ("encoder", "projector")}
    frozen = [*network["momentum"].parameters(), encoder.pos_embed]
    for parameter in frozen:
        parameter.requires_grad = False
    network.train()
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, RATE)

    def contrast(queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).T
        labels = torch.arange(len(queries))
        loss = 2 * TEMPERATURE * F.cross_entropy(logits / TEMPERATURE, labels)
        return loss, (logits.argmax(1) == labels).double().mean()

    arrays: dict[str, np.ndarray] = {}
    losses = []
    accuracies = []
    for step in range(STEPS):
        views = torch.from_numpy(views_of(step)).double().unbind(1)
        queries = [network["predictor"](base["projector"](base["encoder"](view))) for view in views]
        with torch.no_grad():
            momentum = network["momentum"]
            keys = [momentum["projector"](momentum["encoder"](view)) for view in views]
        one, found_one = contrast(queries[0], keys[1])
        two, found_two = contrast(queries[1], keys[0])
        optimizer.zero_grad()
        (one + two).backward()
        if step == 0:
            for name, parameter in network.named_parameters():
                if parameter.grad is not None:
                    arrays[f"grad/{name}"] = parameter.grad.numpy().copy()
        optimizer.step()
        share = 1 - (1 - MOMENTUM) * (1 + math.cos(math.pi * step / STEPS)) / 2
        with torch.no_grad():
            followed = dict(network.named_parameters())
            for name, kept in momentum.named_parameters():
                kept.mul_(share).add_(followed[name], alpha=1 - share)
        losses.append((one + two).item())
        accuracies.append(50 * (found_one + found_two).item())
    arrays |= {"loss": np.array(losses), "accuracy": np.array(accuracies)}
    arrays |= {
        f"end/{name}": tensor.numpy()
        for name, tensor in network.state_dict().items()
        if tensor.ndim
    }
    stored = {name: array.astype(np.float32) for name, array in arrays.items()}
    np.savez_compressed(Path(__file__).with_name("moco.npz"), **stored)


if __name__ == "__main__":
    main()
