"""Writes names_eva.json beside this file: EVA-02's and DINOv3's files as other toolkits write them,
and the logits or class tokens that they give there.

With baaivision/EVA (5623d08), facebookresearch/dinov3 (6876159), transformers 5.23.0 and torch
2.13.0. EVA and DINOV3 are folders with the repositories' files:

PYTHONPATH=tests python tests/golden/make_names_eva.py EVA DINOV3

A case holds the names and shapes in the file, what ``values`` doesn't give, and the answers to two
images.
"""

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from golden.make_names_vit import values

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
IMAGES = {"16": (16, 16), "24": (24, 24), "wide": (16, 24)}
COMPUTED = ("periods", "bias_mask", "freqs_cos", "freqs_sin")  # no weights


def eva02(folder: str) -> dict[str, nn.Module]:
    """The authors' fine-tuned models; of xFormers and Apex only what they are without their
    kernels.
    """

    class SwiGLU(nn.Module):
        def __init__(self, in_features: int, hidden_features: int) -> None:
            super().__init__()
            self.w12 = nn.Linear(in_features, 2 * hidden_features)
            self.w3 = nn.Linear(hidden_features, in_features)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, x = self.w12(x).chunk(2, dim=-1)
            return self.w3(nn.functional.silu(gate) * x)

    for name, content in (
        ("xformers", {}),
        ("xformers.ops", {"SwiGLU": SwiGLU}),
        ("apex", {}),
        ("apex.normalization", {"FusedLayerNorm": nn.LayerNorm}),
    ):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    sys.modules["xformers"].ops = sys.modules["xformers.ops"]
    sys.path.insert(0, f"{folder}/EVA-02/asuka")
    from modeling_finetune import VisionTransformer

    def norm(width: int) -> nn.Module:
        return nn.LayerNorm(width, eps=1e-6)

    options = SIZES | {
        "patch_size": 4,
        "num_classes": 7,
        "mlp_ratio": 8 / 3,
        "qkv_bias": True,
        "norm_layer": norm,
    }
    options |= {"rope": True, "pt_hw_seq_len": 4, "intp_freq": True, "use_checkpoint": False}
    sub = {"subln": True, "naiveswiglu": True}
    return {
        "EVA-02 24": VisionTransformer(img_size=24, swiglu=True, **options),
        "EVA-02 subln 16": VisionTransformer(img_size=16, **sub, **options),
    }


def dinov3(folder: str) -> dict[str, nn.Module]:
    """The authors' models with their masked biases, and periods in bfloat16 as in their files."""
    sys.path.insert(0, folder)
    from dinov3.models.vision_transformer import DinoVisionTransformer

    options = SIZES | {
        "patch_size": 4,
        "layerscale_init": 1e-5,
        "norm_layer": "layernormbf16",
        "n_storage_tokens": 2,
    }
    options |= {"mask_k_bias": True, "pos_embed_rope_dtype": "fp32"}
    found = {
        "DINOv3 wide": DinoVisionTransformer(**options),
        "DINOv3 gated 16": DinoVisionTransformer(ffn_layer="swiglu", ffn_ratio=6.0, **options),
    }
    for model in found.values():
        model.init_weights()
        model.rope_embed.periods.data = model.rope_embed.periods.bfloat16().float()
    return found


def transformers() -> dict[str, nn.Module]:
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_register_tokens": 2,
    }
    sizes |= {"patch_size": 4, "intermediate_size": 128}
    gated = {"use_gated_mlp": True, "hidden_act": "silu"}
    return {
        "transformers wide": DINOv3ViTModel(DINOv3ViTConfig(**sizes)),
        "transformers gated 16": DINOv3ViTModel(DINOv3ViTConfig(**sizes | gated)),
    }


@torch.no_grad()
def case(model: nn.Module, size: tuple[int, int]) -> dict[str, Any]:
    """What the file holds, and what the model answers with it."""
    state = model.state_dict()
    computed = {
        name: tensor for name, tensor in state.items() if name.rpartition(".")[2] in COMPUTED
    }
    given = {
        name: torch.from_numpy(values(name, tuple(t.shape)))
        for name, t in state.items()
        if name not in computed
    }
    model.load_state_dict(given | computed)
    answer = model.eval()(torch.from_numpy(values("images", (2, 3, *size))))
    return {
        "size": size,
        "shapes": {name: list(tensor.shape) for name, tensor in given.items()},
        "stored": {
            name: tensor.numpy().round(6).astype(float).round(6).tolist()
            for name, tensor in computed.items()
        },
        "answers": getattr(answer, "pooler_output", answer).tolist(),
    }


if __name__ == "__main__":
    models = eva02(sys.argv[1]) | dinov3(sys.argv[2]) | transformers()
    cases = {name: case(model, IMAGES[name.rpartition(" ")[2]]) for name, model in models.items()}
    Path(__file__).with_name("names_eva.json").write_text(
        json.dumps(cases, separators=(",", ":")) + "\n"
    )
