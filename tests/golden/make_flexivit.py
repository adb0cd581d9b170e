"""A reduced FlexiViT's logits at other patch sizes than its weights'; run with torch and timm it
writes flexivit.npz (made with timm 1.0.31, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_flexivit.py
"""

# timm's arguments. The weights are those of patches of 16 x 16.
SMALL = {
    "img_size": 48,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 7,
    "no_embed_class": True,
}
PATCH_SIZES = (8, 12, 16, 24, 48)

if __name__ == "__main__":
    from pathlib import Path

    import numpy as np
    import torch
    from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

    from golden.formula import array
    from golden.record import with_formula

    weights = with_formula(VisionTransformer(patch_size=16, **SMALL)).state_dict()
    images = torch.from_numpy(array("images", (2, 3, 48, 48)))
    logits = {}
    for size in PATCH_SIZES:
        model = VisionTransformer(patch_size=size, **SMALL)
        model.load_state_dict(checkpoint_filter_fn(dict(weights), model))
        with torch.no_grad():
            logits[str(size)] = model.eval()(images).numpy()
    np.savez(Path(__file__).with_name("flexivit.npz"), **logits)
