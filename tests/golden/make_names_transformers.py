"""Writes names_transformers.json beside this file: reduced models of transformers, as its own ``save_pretrained``
writes them, and what they give with weights by ``positive`` (transformers 5.23.0, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_names_transformers.py

A case holds the names and shapes in the file, config.json, and the logits of two images, or the pooled features where
the model has no classifier.
"""

import json
import sys
import tempfile
import types
from pathlib import Path

import torch

for name in ("_meta_registrations", "_autograd_registrations"):  # torchvision's operators don't load beside a CPU torch
    sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
import transformers as hf  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from golden.make_names_vit import positive, values  # noqa: E402

VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 16, "patch_size": 4}
WIDE = VIT | {"intermediate_size": 48}
CLASSES = {"num_labels": 7}
STAGES = {"depths": [1, 2, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
CASES = {
    "vit": (hf.ViTConfig(**WIDE, **CLASSES), hf.ViTForImageClassification),
    "deit": (hf.DeiTConfig(**WIDE, **CLASSES), hf.DeiTForImageClassificationWithTeacher),
    "beit": (hf.BeitConfig(**WIDE, **CLASSES, use_relative_position_bias=True), hf.BeitForImageClassification),
    "dinov2": (hf.Dinov2Config(**VIT, layerscale_value=0.5), hf.Dinov2Model),
    "dinov2_with_registers": (
        hf.Dinov2WithRegistersConfig(**VIT, use_swiglu_ffn=True, num_register_tokens=2),
        hf.Dinov2WithRegistersModel,
    ),
    "clip": (hf.CLIPVisionConfig(**WIDE, projection_dim=7), hf.CLIPVisionModelWithProjection),
    "siglip": (hf.SiglipVisionConfig(**WIDE), hf.SiglipVisionModel),
    "swin": (
        hf.SwinConfig(
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1, 1, 1],
            num_heads=[1, 2, 2, 4],
            window_size=2,
            **CLASSES,
        ),
        hf.SwinForImageClassification,
    ),
    "pvt_v2": (
        hf.PvtV2Config(image_size=64, **STAGES, num_attention_heads=[1, 2, 2, 4], mlp_ratios=[4, 4, 2, 2], **CLASSES),
        hf.PvtV2ForImageClassification,
    ),
    "hiera": (
        hf.HieraConfig(embed_dim=4, image_size=[64, 64], depths=[1, 2, 1, 1], **CLASSES),
        hf.HieraForImageClassification,
    ),
    "swinv2": (
        hf.Swinv2Config(
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1, 1, 1],
            num_heads=[1, 2, 2, 4],
            window_size=2,
            pretrained_window_sizes=[4, 4, 2, 2],
            **CLASSES,
        ),
        hf.Swinv2ForImageClassification,
    ),
    "levit": (
        hf.LevitConfig(
            image_size=64,
            hidden_sizes=[16, 32, 48],
            num_attention_heads=[2, 3, 2],
            depths=[1, 2, 1],
            key_dim=[8, 8, 8],
            **CLASSES,
        ),
        hf.LevitForImageClassificationWithTeacher,
    ),
    "poolformer": (hf.PoolFormerConfig(**STAGES, **CLASSES), hf.PoolFormerForImageClassification),
    "mobilevit": (
        hf.MobileViTConfig(
            image_size=64, hidden_sizes=[8, 8, 12], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 24], **CLASSES
        ),
        hf.MobileViTForImageClassification,
    ),
    "convnext": (hf.ConvNextConfig(**STAGES, **CLASSES), hf.ConvNextForImageClassification),
    "convnextv2": (hf.ConvNextV2Config(**STAGES, **CLASSES), hf.ConvNextV2ForImageClassification),
    "resnet": (
        hf.ResNetConfig(**CLASSES, depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic"),
        hf.ResNetForImageClassification,
    ),
    "regnet": (
        hf.RegNetConfig(
            embedding_size=32, depths=[1, 2, 1, 1], hidden_sizes=[8, 16, 24, 32], groups_width=8, **CLASSES
        ),
        hf.RegNetForImageClassification,
    ),
}


def case(config: object, model: type) -> dict[str, object]:
    size = getattr(config, "image_size", 64)
    size = size[0] if isinstance(size, (list, tuple)) else size
    with tempfile.TemporaryDirectory() as folder:
        model(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        arrays = {name: positive(name, array.shape) for name, array in load_file(file).items() if array.ndim}
        save_file(load_file(file) | arrays, file, {"format": "pt"})
        images = torch.from_numpy(values("images", (2, 3, size, size)))
        with torch.no_grad():
            # MobileViT's processor turns channels round, to blue, green, red.
            outputs = model.from_pretrained(folder).eval()(images.flip(1) if "MobileViT" in str(model) else images)
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        kept = json.loads((Path(folder) / "config.json").read_text())
    for key in ("logits", "image_embeds", "pooler_output"):
        if key in outputs:
            return {"config": kept, "size": size, "of": key, "outputs": outputs[key].tolist(), "shapes": shapes}
    raise ValueError(f"{model} gives {list(outputs)}")


if __name__ == "__main__":
    lines = [f'"{name}": {json.dumps(case(*pair))}' for name, pair in CASES.items()]
    Path(__file__).with_name("names_transformers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
