"""Writes names_transformers.json beside this file: reduced models of transformers, as its own
``save_pretrained`` writes them, and what they give with weights by ``positive`` (transformers
5.24.0, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_names_transformers.py

A case holds the names and shapes in the file, config.json, and the logits of two images, or the
features where the class has no classifier. transformers_kinds.json has each kind's classes, and the
keys of its configuration with their defaults.
"""

import copy
import importlib
import json
import sys
import tempfile
import types
from pathlib import Path

import torch

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
import transformers as hf  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from golden.make_names_vit import positive, values  # noqa: E402

VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 16,
    "patch_size": 4,
}
WIDE = VIT | {"intermediate_size": 48}
PACKED = {key: value for key, value in WIDE.items() if key != "image_size"} | {"num_patches": 16}
CLASSES = {"num_labels": 7}
TEXT = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 9,
}
TEXT |= {"max_position_embeddings": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
STAGES = {"depths": [1, 2, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
CASES = {
    "vit": (hf.ViTConfig(**WIDE, **CLASSES), hf.ViTForImageClassification),
    "vit_multilabel": (
        hf.ViTConfig(**WIDE, **CLASSES, problem_type="multi_label_classification", qkv_bias=False),
        hf.ViTForImageClassification,
    ),
    "vit_model": (hf.ViTConfig(**WIDE), hf.ViTModel),
    "vit_mae": (hf.ViTMAEConfig(**WIDE, mask_ratio=0.0), hf.ViTMAEForPreTraining),
    "vit_masked": (hf.ViTConfig(**WIDE, encoder_stride=4), hf.ViTForMaskedImageModeling),
    "deit": (hf.DeiTConfig(**WIDE, **CLASSES), hf.DeiTForImageClassificationWithTeacher),
    "deit_alone": (hf.DeiTConfig(**WIDE, **CLASSES), hf.DeiTForImageClassification),
    "deit_model": (hf.DeiTConfig(**WIDE), hf.DeiTModel),
    "deit_masked": (hf.DeiTConfig(**WIDE, encoder_stride=4), hf.DeiTForMaskedImageModeling),
    "beit": (
        hf.BeitConfig(**WIDE, **CLASSES, use_relative_position_bias=True),
        hf.BeitForImageClassification,
    ),
    "beit_token": (
        hf.BeitConfig(
            **WIDE,
            **CLASSES,
            use_mean_pooling=False,
            use_shared_relative_position_bias=True,
            use_absolute_position_embeddings=True,
            layer_scale_init_value=0.0,
        ),
        hf.BeitForImageClassification,
    ),
    "beit_model": (hf.BeitConfig(**WIDE), hf.BeitModel),
    "beit_masked": (hf.BeitConfig(**WIDE, use_mask_token=True), hf.BeitForMaskedImageModeling),
    "dinov2_classes": (hf.Dinov2Config(**VIT, **CLASSES), hf.Dinov2ForImageClassification),
    "dinov2": (hf.Dinov2Config(**VIT, layerscale_value=0.5), hf.Dinov2Model),
    "dinov2_with_registers": (
        hf.Dinov2WithRegistersConfig(**VIT, use_swiglu_ffn=True, num_register_tokens=2),
        hf.Dinov2WithRegistersModel,
    ),
    "dinov2_with_registers_classes": (
        hf.Dinov2WithRegistersConfig(**VIT, **CLASSES, num_register_tokens=2),
        hf.Dinov2WithRegistersForImageClassification,
    ),
    "dinov3": (
        hf.DINOv3ViTConfig(**WIDE, num_register_tokens=4, layerscale_value=0.5),
        hf.DINOv3ViTModel,
    ),
    "dinov3_gated": (
        hf.DINOv3ViTConfig(
            **WIDE, use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False
        ),
        hf.DINOv3ViTModel,
    ),
    "clip_whole": (
        hf.CLIPConfig(vision_config=WIDE, text_config=TEXT, projection_dim=7),
        hf.CLIPModel,
    ),
    "clip_model": (hf.CLIPVisionConfig(**WIDE), hf.CLIPVisionModel),
    "clip_classes": (
        hf.CLIPConfig(vision_config=WIDE, text_config=TEXT, **CLASSES),
        hf.CLIPForImageClassification,
    ),
    "siglip_whole": (hf.SiglipConfig(vision_config=WIDE, text_config=TEXT), hf.SiglipModel),
    "siglip_headless": (hf.SiglipVisionConfig(**WIDE, vision_use_head=False), hf.SiglipVisionModel),
    "siglip_classes": (
        hf.SiglipConfig(vision_config=WIDE, text_config=TEXT, **CLASSES),
        hf.SiglipForImageClassification,
    ),
    "siglip2_whole": (hf.Siglip2Config(vision_config=PACKED, text_config=TEXT), hf.Siglip2Model),
    "siglip2_headless": (
        hf.Siglip2VisionConfig(**PACKED, vision_use_head=False),
        hf.Siglip2VisionModel,
    ),
    "siglip2_classes": (
        hf.Siglip2Config(vision_config=PACKED, text_config=TEXT, **CLASSES),
        hf.Siglip2ForImageClassification,
    ),
    "siglip2": (hf.Siglip2VisionConfig(**PACKED), hf.Siglip2VisionModel),
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
        hf.PvtV2Config(
            image_size=64,
            **STAGES,
            num_attention_heads=[1, 2, 2, 4],
            mlp_ratios=[4, 4, 2, 2],
            **CLASSES,
        ),
        hf.PvtV2ForImageClassification,
    ),
    "segformer": (
        hf.SegformerConfig(
            depths=[2, 1, 1, 1],
            hidden_sizes=[8, 12, 24, 32],
            num_attention_heads=[1, 2, 2, 4],
            sr_ratios=[4, 3, 2, 1],
            mlp_ratios=[2, 3, 4, 2],
            **CLASSES,
        ),
        hf.SegformerForImageClassification,
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
            image_size=64,
            hidden_sizes=[8, 8, 12],
            neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 24],
            **CLASSES,
        ),
        hf.MobileViTForImageClassification,
    ),
    "convnext": (hf.ConvNextConfig(**STAGES, **CLASSES), hf.ConvNextForImageClassification),
    "convnextv2": (hf.ConvNextV2Config(**STAGES, **CLASSES), hf.ConvNextV2ForImageClassification),
    "resnet": (
        hf.ResNetConfig(
            **CLASSES, depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic"
        ),
        hf.ResNetForImageClassification,
    ),
    "regnet": (
        hf.RegNetConfig(
            embedding_size=32,
            depths=[1, 2, 1, 1],
            hidden_sizes=[8, 16, 24, 32],
            groups_width=8,
            **CLASSES,
        ),
        hf.RegNetForImageClassification,
    ),
}


# The same with the class without a classifier, and LeViT's without a teacher.
for name, model in {
    "swin": hf.SwinModel,
    "swinv2": hf.Swinv2Model,
    "hiera": hf.HieraModel,
    "levit": hf.LevitModel,
    "pvt_v2": hf.PvtV2Model,
    "segformer": hf.SegformerModel,
    "mobilevit": hf.MobileViTModel,
    "convnext": hf.ConvNextModel,
    "convnextv2": hf.ConvNextV2Model,
}.items():
    CASES[f"{name}_model"] = (CASES[name][0], model)
for name, model in {
    "swin": hf.SwinForMaskedImageModeling,
    "swinv2": hf.Swinv2ForMaskedImageModeling,
}.items():
    CASES[f"{name}_masked"] = (CASES[name][0], model)
CASES["levit_alone"] = (CASES["levit"][0], hf.LevitForImageClassification)


def packed(images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns square images as patches, with their mask and their rows and columns."""
    side = VIT["patch_size"]
    batch, channels, height, width = images.shape
    rows = height // side
    columns = width // side
    patches = images.reshape(batch, channels, rows, side, columns, side)
    patches = patches.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, -1)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(batch, rows * columns, dtype=torch.int64),
        "spatial_shapes": torch.tensor([[rows, columns]] * batch),
    }


def answers(model: torch.nn.Module, images: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Returns what the model gives: logits, CLIP's projection, or what a classifier of its encoder
    would read.
    """
    name = type(model).__name__
    if name in ("CLIPModel", "SiglipModel"):
        return "image_embeds", model.get_image_features(pixel_values=images).pooler_output
    if name == "Siglip2Model":
        return "image_embeds", model.get_image_features(**packed(images)).pooler_output
    # the tokens that the two classifiers read
    if name.startswith("DeiT") and "ImageClassification" not in name:
        return "features", getattr(model, "deit", model)(images).last_hidden_state[:, :2].mean(1)
    if name.startswith("ViT") and "ImageClassification" not in name:  # its pooler is left out
        return "features", getattr(model, "vit", model)(images).last_hidden_state[:, 0]
    if name == "BeitForMaskedImageModeling":
        return "features", model.layernorm(model.beit(images).last_hidden_state[:, 1:].mean(1))
    if name in ("SwinForMaskedImageModeling", "Swinv2ForMaskedImageModeling"):
        return "features", model.base_model(images).last_hidden_state.mean(1)
    outputs = model(**packed(images)) if name.startswith("Siglip2") else model(images)
    for key in ("logits", "image_embeds", "pooler_output"):
        if outputs.get(key) is not None:
            return key if outputs[key].shape[-1] == 7 else "features", outputs[key].flatten(1)
    tokens = outputs.last_hidden_state
    return "features", tokens.mean((2, 3)) if tokens.ndim == 4 else tokens.mean(1)


def case(config: object, model: type) -> dict[str, object]:
    size = getattr(getattr(config, "vision_config", config), "image_size", 64)
    size = size[0] if isinstance(size, (list, tuple)) else size
    if config.model_type.startswith("siglip2"):
        size = VIT["image_size"]
    config = copy.deepcopy(config)  # LeViT's model changes it
    with tempfile.TemporaryDirectory() as folder:
        model(config).save_pretrained(folder)
        file = Path(folder) / "model.safetensors"
        arrays = {
            name: positive(name, array.shape)
            for name, array in load_file(file).items()
            if array.ndim
        }
        save_file(load_file(file) | arrays, file, {"format": "pt"})
        images = torch.from_numpy(values("images", (2, 3, size, size)))
        with torch.no_grad():
            # MobileViT's processor turns channels round, to blue, green, red.
            images = images.flip(1) if "MobileViT" in str(model) else images
            of, outputs = answers(model.from_pretrained(folder).eval(), images)
        shapes = {
            name: list(array.shape)
            for name, array in arrays.items()
            if not name.startswith("text_")
        }
        kept = json.loads((Path(folder) / "config.json").read_text())
    return {"config": kept, "size": size, "of": of, "outputs": outputs.tolist(), "shapes": shapes}


# Models with heads for segmentation, which golden/make_heads.py records.
WITH_HEADS = (
    (
        hf.UperNetConfig(
            backbone_config=hf.SwinConfig(out_features=["stage1", "stage2", "stage3", "stage4"])
        ),
        hf.UperNetForSemanticSegmentation,
    ),
    (hf.DPTConfig(), hf.DPTForSemanticSegmentation),
)


def kinds() -> dict[str, object]:
    """Returns, by model_type, its public classes and the keys of its configuration with their
    defaults.
    """
    found = {}
    common = set(hf.PreTrainedConfig().to_dict())
    # EoMT's case is golden/make_eomt.py.
    eomt = (hf.EomtConfig(), hf.EomtForUniversalSegmentation)
    for config, model in (*CASES.values(), *WITH_HEADS, eomt):
        module = importlib.import_module(model.__module__)
        classes = [
            name
            for name in module.__all__
            if not any(word in name for word in ("PreTrained", "Text", "DecodeHead", "Layer"))
        ]
        towers = [config, getattr(config, "vision_config", config)]
        for kind in {tower.model_type: type(tower) for tower in towers}.values():
            # No model here has UPerNet's default backbone.
            default = config if kind is hf.UperNetConfig else kind()
            defaults = {key: value for key, value in default.to_dict().items() if key not in common}
            found[kind.model_type] = {"classes": sorted(classes), "keys": defaults}
    return found


def write(name: str, entries: dict[str, object]) -> None:
    lines = [f'"{key}": {json.dumps(entry)}' for key, entry in entries.items()]
    Path(__file__).with_name(name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write("names_transformers.json", {name: case(*pair) for name, pair in CASES.items()})
    write("transformers_kinds.json", kinds())
