"""Writes peft.npz beside this file: a ViT's weights, folders that peft saved for it, and the logits
that it computes.

By peft 0.21.2, torch 2.13.0 and timm 1.0.31:

PYTHONPATH=.:tests python tests/golden/make_peft.py
"""

import tempfile
from pathlib import Path

import numpy as np
import peft
import timm
import torch
from safetensors.numpy import load_file

PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["qkv"]}
KINDS = {
    "plain": {},
    "float16": {},
    "a classifier": {"modules_to_save": ["head"]},
    "a norm": {"modules_to_save": ["norm", "head"]},
    "a pattern": {"target_modules": r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.fc1)"},
    "all Linears": {"target_modules": "all-linear"},
    "the classifier itself": {"target_modules": ["qkv", "head"]},
    "biases of targets": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
    "rsLoRA": {"use_rslora": True},
    "one block": {"layers_to_transform": [1], "layers_pattern": "blocks"},
    "all but one": {"exclude_modules": ["blocks.0.attn.qkv"]},
    "a large rank": {"r": 40},
    "a Gaussian start": {"init_lora_weights": "gaussian"},
    "an orthogonal start": {"init_lora_weights": "orthogonal"},
    "refused: DoRA": {"use_dora": True},
    "refused: a rank by layer": {"rank_pattern": {"blocks.0.attn.qkv": 2}},
    "refused: a scale by layer": {"alpha_pattern": {"blocks.0.attn.qkv": 2}},
    "refused: a convolution": {"target_modules": ["proj"]},
    "refused: a factor's bias": {"lora_bias": True},
    "refused: PiSSA": {"init_lora_weights": "pissa"},
    "refused: OLoRA": {"init_lora_weights": "olora"},
}


def vit():
    sizes = {"depth": 2, "embed_dim": 24, "num_heads": 3, "img_size": 32, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **sizes)


def main():
    torch.manual_seed(0)
    base = vit()
    for parameter in base.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1
    weights = {name: tensor.numpy().copy() for name, tensor in base.state_dict().items()}
    images = torch.randn(2, 3, 32, 32)
    kept = {f"base/{name}": array for name, array in weights.items()} | {"images": images.numpy()}
    for kind, options in KINDS.items():
        torch.manual_seed(1)
        model = vit()
        model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        model = peft.get_peft_model(model, peft.LoraConfig(**(PLAIN | options))).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.1
        model = model.half() if kind == "float16" else model
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            stored = load_file(f"{folder}/adapter_model.safetensors")
            text = Path(folder, "adapter_config.json").read_text()
        with torch.no_grad():
            kept[f"{kind}/logits"] = model.float()(images).numpy()
        kept[f"{kind}/config"] = np.array(text)
        kept |= {f"{kind}/tensors/{name}": array for name, array in stored.items()}
    np.savez_compressed(Path(__file__).with_name("peft.npz"), **kept)


if __name__ == "__main__":
    main()
