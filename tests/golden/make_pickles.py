"""Writes the weight files weights* and checkpoint* beside this file, by torch (2.13.0) and
safetensors (0.8.0); and config.json, what timm (1.0.31) makes of configurations in its forms. yacs
0.1.8 and omegaconf 2.3.0 were there.

PYTHONPATH=.:tests python tests/golden/make_pickles.py
"""

import argparse
import collections
import copy
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from yacs.config import CfgNode

from golden.stored import DTYPES, SHAPES, values

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(f"torchvision.{name}")
from timm.models._hub import _parse_model_cfg  # noqa: E402

FOLDER = Path(__file__).parent
SETTINGS = {
    "input_size": [3, 224, 224],
    "fixed_input_size": True,
    "mean": [0.5] * 3,
    "num_classes": 1000,
}
CONFIGS = {
    "nested": {
        "architecture": "a",
        "num_classes": 10,
        "label_names": ["x"],
        "pretrained_cfg": SETTINGS,
    },
    "flat": {"architecture": "a", "num_features": 8, "labels": ["x", "y"], **SETTINGS},
    "channels": {"architecture": "a", "model_args": {"in_chans": 1}, "pretrained_cfg": SETTINGS},
    "size": {"architecture": "a", "model_args": {"img_size": 384}, "pretrained_cfg": SETTINGS},
    "dynamic": {
        "architecture": "a",
        "model_args": {"img_size": 384, "dynamic_img_size": True},
        "pretrained_cfg": SETTINGS,
    },
}


def tensors() -> dict[str, torch.Tensor]:
    made = {
        name: torch.from_numpy(values(name)).to(getattr(torch, DTYPES.get(name, "float32")))
        for name in SHAPES
    }
    made["parameter"] = torch.nn.Parameter(made["parameter"])
    made["turned"] = made["turned"].T.contiguous().T
    larger = torch.full((4, 6), 9.0)
    larger[1:3, 2:5:2] = made["slice"]
    made["slice"] = larger[1:3, 2:5:2]
    made["expanded"] = made["expanded"][0].expand(3, 2)
    return made


def checkpoint() -> dict[str, object]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights = collections.OrderedDict(weight=torch.full((2, 3), 0.25), bias=torch.zeros(2))
    return {
        "model": {f"module.{name}": tensor + 1 for name, tensor in weights.items()},
        "model_ema": {f"module.{name}": tensor for name, tensor in weights.items()},
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]).state_dict(),
        "args": argparse.Namespace(
            lr=1e-3, output_dir=Path("out"), device=torch.device("cpu"), dtype=torch.bfloat16
        ),
        "config": CfgNode({"MODEL": CfgNode({"NAME": "swin", "DEPTHS": [2, 2]})}),
        "cfg": OmegaConf.create({"lr": 0.1, "betas": [0.9, 0.95], "nested": {"on": True}}),
        "epoch": 3,
        "best": np.float64(81.5),
        "history": np.arange(4),
        "random": np.random.get_state(),
        "names": {"a", "b"},
    }


def main() -> None:
    for name, content in (("weights", tensors()), ("checkpoint", checkpoint())):
        torch.save(content, FOLDER / f"{name}.pth")
        torch.save(content, FOLDER / f"{name}_legacy.pth", _use_new_zipfile_serialization=False)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors().items()},
        FOLDER / "weights.safetensors",
    )
    merged = {}
    for name, config in CONFIGS.items():
        settings, architecture, arguments = _parse_model_cfg(copy.deepcopy(config), {})
        merged[name] = {
            "file": config,
            "settings": {**settings, "architecture": architecture, "model_args": arguments},
        }
    (FOLDER / "config.json").write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
