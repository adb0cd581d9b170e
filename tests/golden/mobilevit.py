"""Reduced MobileViTs; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.mobilevit
"""

from typing import Any

import numpy as np

from golden import trained

SMALL = {
    "embed_dims": (8, 8, 8, 8, 8, 16, 16, 24, 24),
    "hidden_dims": (8, 12, 16),
    "stage_depths": (1, 2, 1),
    "num_classes": 5,
}
CASES = {"mobilevit": SMALL, "mobilevit_odd": SMALL | {"expand_ratio": 2.0}}
# the second's maps of 10 x 5, 5 x 3 and 3 x 2 are stretched
SIZES = {"mobilevit": (64, 64), "mobilevit_odd": (80, 33)}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``trained.array``; weights of norms are about 0.9, else twenty convolutions would
    lose the images.
    """
    return np.asarray(
        trained.array(name, shape) + 0.6 * (len(shape) == 1 and name.endswith("weight")), np.float32
    )


def timms(name: str) -> Any:
    """Returns timm's model of a case."""
    from timm.models.byobnet import ByobNet, ByoModelCfg
    from timm.models.mobilevit import _inverted_residual_block, _mobilevit_block

    case = CASES[name]
    dims = case["embed_dims"]
    ratio = case.get("expand_ratio", 4.0)
    blocks = [
        _inverted_residual_block(d, c, s, ratio) for d, c, s in ((1, dims[1], 1), (3, dims[2], 2))
    ]
    for dim, hidden_dim, depth in zip(
        dims[5:8], case["hidden_dims"], case["stage_depths"], strict=True
    ):
        blocks.append(_mobilevit_block(1, dim, 2, hidden_dim, depth, patch_size=2, br=ratio))
    config = ByoModelCfg(
        blocks=tuple(blocks),
        stem_chs=dims[0],
        stem_type="3x3",
        stem_pool="",
        downsample="",
        act_layer="silu",
        num_features=dims[8],
    )
    return ByobNet(config, num_classes=case["num_classes"])


if __name__ == "__main__":
    from golden.record import record

    for name in CASES:
        record(name, timms(name), SIZES[name], gradients=True, array=array)
