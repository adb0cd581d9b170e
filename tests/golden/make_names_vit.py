"""A ViT's files as other toolkits write them, and the logits that they give there.

names_vit_timm.json: files that timm reads; made with timm 1.0.31, torch 2.13.0 by
PYTHONPATH=.:tests python tests/golden/make_names_vit.py

names_vit.json: PaddleViT's. Made by hand: the model files of BR-IDL/PaddleViT at the commits that
the cases name (ViT/transformer.py, ViT/vit.py, DeiT/model.py, DeiT/deit.py, MAE/transformer.py)
with weights and images by ``values``.

A case holds the names and shapes in the file, its layout, the model's options, and the logits of
two images.
"""

import zlib

import numpy as np

# images of 16 x 16
SIZES = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7}


def values(name: str, shape: tuple[int, ...] | list[int]) -> np.ndarray:
    """Returns float32 values that depend on name and shape alone, around 1 for the weight of a
    norm.
    """
    ones = name.endswith("scale") or ("norm" in name and name.endswith("weight"))
    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return (0.3 * normal + ones).astype(np.float32)


def positive(name: str, shape: tuple[int, ...] | list[int]) -> np.ndarray:
    """Returns ``values``, of a batch norm's variance 1 more than their size."""
    found = values(name, shape)
    return np.abs(found) + 1 if name.endswith("running_var") else found


IMAGES = values("images", (2, 3, 16, 16))


def google_shapes() -> dict[str, list[int]]:
    """Returns names and shapes in the file of Google's ViT."""
    shapes = {"cls": [1, 1, 24], "Transformer/posembed_input/pos_embedding": [1, 17, 24]}
    dense = {"embedding": [4, 4, 3, 24], "head": [24, 7]}
    norms = ["Transformer/encoder_norm"]
    for block in ("Transformer/encoderblock_0", "Transformer/encoderblock_1"):
        attention = f"{block}/MultiHeadDotProductAttention_1"
        dense |= {f"{block}/MlpBlock_3/Dense_0": [24, 96], f"{block}/MlpBlock_3/Dense_1": [96, 24]}
        dense |= {f"{attention}/out": [3, 8, 24]}
        for part in ("query", "key", "value"):
            shapes |= {f"{attention}/{part}/kernel": [24, 3, 8], f"{attention}/{part}/bias": [3, 8]}
        norms += [f"{block}/LayerNorm_0", f"{block}/LayerNorm_2"]
    for name, shape in dense.items():
        shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[-1:]}
    return shapes | {f"{name}/{leaf}": [24] for name in norms for leaf in ("scale", "bias")}


def siglip_shapes(stacked: bool) -> dict[str, list[int]]:
    """Returns names and shapes in big_vision's file of SigLIP; ``stacked``: with all blocks in one
    array.
    """
    shapes = {
        "params/t": [1],
        "params/txt/head/bias": [24],
        "params/img/MAPHead_0/probe": [1, 1, 24],
    }
    words = {"Attention_1": "Attention_0", "MlpBlock_3": "MlpBlock_0", "LayerNorm_2": "LayerNorm_1"}
    for name, shape in google_shapes().items():
        if name != "cls":
            for old, new in words.items():
                name = name.replace(old, new)
            name = f"params/img/{name}".replace("Transformer/posembed_input/", "")
            block = "Transformer/encoderblock_0/"
            first = "Transformer/encoderblock_1" not in name
            if block in name:
                head = name.replace(block, "MAPHead_0/")
                shapes |= {head: shape} if "LayerNorm_1" not in name else {}
            if first or not stacked:
                shapes[name.replace("encoderblock_0", "encoderblock") if stacked else name] = (
                    [2, *shape] if stacked and block in name else shape
                )
    return shapes | {"params/img/pos_embedding": [1, 16, 24]}


if __name__ == "__main__":
    import json
    import tempfile
    from pathlib import Path

    import torch
    from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

    cases = {}

    def record(
        case: str, options: dict, changes: dict[str, str | list[int]], google: dict | None = None
    ) -> None:
        """Adds a case; ``changes`` turn timm's names: words and what the file has, names and
        shapes; or ``google``.
        """
        model = VisionTransformer(img_size=16, **SIZES, **options).eval()
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        for ours, theirs in changes.items():
            if isinstance(theirs, str):
                shapes = {name.replace(ours, theirs): shape for name, shape in shapes.items()}
            else:
                shapes[ours] = theirs
        if google:
            shapes = google
            with tempfile.TemporaryDirectory() as folder:
                np.savez(
                    f"{folder}/weights.npz",
                    **{name: values(name, shape) for name, shape in shapes.items()},
                )
                model.load_pretrained(f"{folder}/weights.npz")
        else:
            state = {name: torch.from_numpy(values(name, shape)) for name, shape in shapes.items()}
            model.load_state_dict(checkpoint_filter_fn(state, model, adapt_layer_scale=True))
        layout = "jax" if google else "torch"
        logits = model(torch.from_numpy(IMAGES)).tolist()
        cases[case] = {"layout": layout, "model": options, "logits": logits, "shapes": shapes}

    scaled = {"init_values": 0.1, "no_embed_class": True}
    dinov2 = {"reg_token": "register_tokens", "mask_token": [1, 24], "pos_embed": [1, 17, 24]}
    record("Google", {}, {}, google_shapes())
    for stacked in (False, True):
        options = {"class_token": False, "global_pool": "map"}
        record(f"SigLIP{' stacked' * stacked}", options, {}, siglip_shapes(stacked))
    record("DeiT-III", scaled, {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"})
    record("DINOv2", scaled | {"reg_tokens": 3}, dinov2)
    record("linear patches", {}, {"patch_embed.proj.weight": [24, 48]})
    Path(__file__).with_name("names_vit_timm.json").write_text(
        json.dumps(cases, separators=(",", ":")) + "\n"
    )
