"""Reduced ResTs and ResTv2s; run with torch and a checkout of wofmanaf/ResT it records them (the
files: b9245d3, torch 2.13.0): PYTHONPATH=CHECKOUT:tests python -P -m golden.rest
"""

import numpy as np

from golden import trained

SMALL = {"embed_dims": (8, 16, 24, 32), "num_classes": 5}
CASES = {
    "rest": SMALL
    | {
        "depths": (1, 1, 1, 1),
        "num_heads": (1, 2, 3, 4),
        "qkv_bias": True,
        "apply_transform": True,
    },
    "rest_plain": SMALL
    | {"depths": (1, 2, 1, 1), "num_heads": (2, 2, 4, 4), "sr_ratios": (4, 2, 2, 1)},
    "restv2": SMALL | {"depths": (1, 2, 1, 1), "num_heads": (1, 2, 3, 4)},
}
SIZE = (96, 64)


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``trained.array``; weights of norms are about 0.55, so that attention isn't the mean
    over all keys: what is left of it after the normalisation would be rounding.
    """
    values = trained.array(name, shape) + 0.25 * (len(shape) == 1 and name.endswith("weight"))
    return np.asarray(values, np.float32)


if __name__ == "__main__":
    from golden.authors import record, stand_in_for_timm

    stand_in_for_timm()
    from models.rest_v2 import ResTV2

    from models.rest import ResT

    for name, sizes in CASES.items():
        kind = ResTV2 if name == "restv2" else ResT
        record(name, kind(**sizes), SIZE, array)
