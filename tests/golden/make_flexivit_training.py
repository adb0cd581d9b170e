"""A reduced FlexiViT's logits, and the gradients of its embedding's weights through their resizing
to patches of other sizes; run with torch and timm it writes flexivit_training.npz (made with timm
1.0.31, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_flexivit_training.py
"""

from golden.make_flexivit import SMALL

PATCH_SIZES = (8, 12, 16, 24)
# Those of which the gradients are stored, at some places.
NAMES = ("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed", "cls_token")
PLACES = 500

if __name__ == "__main__":
    from pathlib import Path

    import numpy as np
    import torch
    from timm.layers import resample_abs_pos_embed, resample_patch_embed
    from timm.models.vision_transformer import VisionTransformer
    from torch.func import functional_call

    from golden.formula import array, places
    from golden.record import with_formula

    weights = with_formula(VisionTransformer(patch_size=16, **SMALL)).state_dict()
    images = torch.from_numpy(array("images", (2, 3, 48, 48)))
    stored = {}
    for size in PATCH_SIZES:
        leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
        kernel = resample_patch_embed(leaves["patch_embed.proj.weight"], [size, size])
        grid = [48 // size] * 2
        positions = resample_abs_pos_embed(leaves["pos_embed"], grid, num_prefix_tokens=0)
        resized = leaves | {"patch_embed.proj.weight": kernel, "pos_embed": positions}
        model = VisionTransformer(patch_size=size, **SMALL).eval()
        stored[f"{size}/logits"] = functional_call(model, resized, images).detach().numpy()
        # The embedding alone: of gradients through all blocks the last digits are rounding.
        model.forward = lambda x, model=model: model._pos_embed(model.patch_embed(x))
        tokens = functional_call(model, resized, images)
        factors = torch.from_numpy(array("loss", tuple(tokens.shape)))
        (tokens * factors).sum().backward()
        for name in NAMES:
            stored[f"{size}/{name}"] = places(leaves[name].grad.numpy(), PLACES)
    np.savez(Path(__file__).with_name("flexivit_training.npz"), **stored)
