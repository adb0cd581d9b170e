"""What timm makes of images of two sides; run with torch and timm it writes nonsquare.npz (timm
1.0.31, torch 2.13.0, Pillow 13.0.0).

PYTHONPATH=.:tests python tests/golden/make_nonsquare.py
"""

# (height, width) of the images that a model takes; (width, height) of photographs: of usual shapes,
# narrow, small.
TARGETS = [(96, 64), (64, 96), (109, 73), (73, 109), (224, 160), (35, 256), (8, 16)]
PHOTOGRAPHS = [
    (600, 400),
    (400, 600),
    (640, 480),
    (480, 640),
    (500, 375),
    (333, 500),
    (1920, 1080),
    (97, 31),
    (31, 97),
]
PHOTOGRAPHS += [(1, 1), (1, 7), (13, 2), (100, 100), (2448, 3264), (4032, 3024)]
# A picture's (width, height), the model's (height, width), CROP_MODE, CROP_PCT, INTERPOLATION.
PREPARED = [
    ((60, 40), (12, 8), "center", 0.875, "bicubic"),
    ((60, 40), (8, 12), "center", 0.9, "bilinear"),
    ((41, 60), (8, 12), "center", 0.875, "bicubic"),
    ((20, 14), (24, 33), "center", 1.0, "bicubic"),
    ((60, 40), (12, 8), "squash", 0.875, "bicubic"),
    ((41, 60), (8, 13), "squash", 1.0, "bilinear"),
]
# Weights of square images in a model of others: the case of golden/NAME.py, the square, the others'
# (height, width).
RESIZED = {
    "vit": (16, (12, 20)),
    "swin": (32, (24, 8)),  # windows of 4 x 4, 4 x 2 and 3 x 1, 2 x 1 at the end
    "beit": (16, (12, 20)),
    "eva_subln": (16, (24, 12)),
}


def name(*case: object) -> str:
    """Returns the case's name in nonsquare.npz."""
    return " ".join(map(str, case))


if __name__ == "__main__":
    import sys
    from functools import partial
    from pathlib import Path

    import numpy as np
    import torch
    from timm.data import create_transform
    from timm.data.transforms import ResizeKeepRatio
    from timm.layers import LayerNorm
    from timm.models import beit, eva, swin_transformer, vision_transformer

    from golden import beit as beits
    from golden import convolutions, formula
    from golden import eva as evas
    from golden import swin as swins
    from golden import vit as vits
    from golden.record import with_formula

    arrays = {}
    for target in TARGETS:
        images = (torch.zeros(1).expand(3, height, width) for width, height in PHOTOGRAPHS)
        found = [ResizeKeepRatio.get_params(image, target, 0.0) for image in images]
        arrays[name("sizes", target)] = np.array(found)
    for case in PREPARED:
        size, target, mode, share, kernel = case
        transform = create_transform(
            target, crop_pct=share, crop_mode=mode, interpolation=kernel, normalize=False
        )
        pixels = np.asarray(transform(formula.picture().resize(size)))
        arrays[name(*case)] = pixels.transpose(1, 2, 0)
    made = {
        "vit": lambda size: vision_transformer.VisionTransformer(
            **vits.CASES["vit"] | {"img_size": size}
        ),
        "swin": lambda size: swin_transformer.SwinTransformer(
            **swins.CASES["swin"] | {"img_size": size}
        ),
        "beit": lambda size: beit.Beit(**beits.CASES["beit"] | {"img_size": size}),
        "eva_subln": lambda size: eva.Eva(
            **evas.CASES["eva_subln"] | {"img_size": size},
            norm_layer=partial(LayerNorm, eps=1e-6),
        ),
    }
    for case, (side, size) in RESIZED.items():
        array = convolutions.array if case == "eva_subln" else formula.array
        state = with_formula(made[case](side), array).state_dict()
        model = made[case](size)
        model.load_state_dict(
            sys.modules[type(model).__module__].checkpoint_filter_fn(state, model), strict=False
        )
        with torch.no_grad():
            arrays[case] = model.eval()(torch.from_numpy(array("images", (2, 3, *size)))).numpy()
    np.savez_compressed(Path(__file__).with_name("nonsquare.npz"), **arrays)
