"""Reduced segmentation models of transformers; ``make_heads.py`` records them."""

import numpy as np

from golden.formula import array

CLASSES = 5
# (height, width) of the images. Swin's and ConvNeXt's maps have odd sides.
SIZES = {
    "upernet_swin": (68, 100),
    "upernet_convnext": (68, 100),
    "upernet_beit": (48, 48),
    "dpt": (64, 64),
    # A grid of 5 x 5, so that the maps' sides don't double.
    "dpt_add": (80, 80),
    "dpt_ignore": (64, 64),
}
# Of images whose positions are resized to more places and to fewer. transformers takes squares alone.
OTHER_SIZES = {"dpt": [(112, 112), (48, 48)]}
SWIN = {
    "patch_size": 4,
    "embed_dim": 4,
    "depths": [1, 2, 1, 1],
    "num_heads": [1, 1, 2, 2],
    "window_size": 3,
    "drop_path_rate": 0.0,
}
CONVNEXT = {
    "patch_size": 4,
    "depths": [1, 1, 2, 1],
    "hidden_sizes": [6, 8, 10, 12],
    "drop_path_rate": 0.0,
}
STAGES = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
PLAIN = {
    "hidden_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "intermediate_size": 24,
}
UPERNET = {"hidden_size": 10, "auxiliary_channels": 6}
DPT = {
    "patch_size": 16,
    "image_size": 64,
    "backbone_out_indices": [0, 1, 3, 4],
    "neck_hidden_sizes": [6, 8, 10, 12],
    "fusion_hidden_size": 10,
}


def images(name: str, size: tuple[int, int] | None = None) -> np.ndarray:
    """Returns a case's two images [2, 3, height, width], which differ much.

    Args:
        size: (height, width); None: as in ``SIZES``.
    """
    values = array("images", (2, 3, *(size or SIZES[name])))
    values[1] = 3 * np.abs(values[1, ::-1])
    return values


def loss_weights(name: str, output: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the factors on an output whose sum is the loss.

    DPT's outputs are large, and factors of mean 0 would cancel out in its gradients.
    """
    return array(output, shape) + np.float32(0.05 if name.startswith("dpt") else 0)
