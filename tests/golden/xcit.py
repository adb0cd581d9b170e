"""Reduced XCiTs; run with torch and timm it records them: PYTHONPATH=tests python -m golden.xcit"""

import zlib

import numpy as np

SMALL = {"img_size": 64, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 7}
CASES = {
    "xcit": SMALL | {"eta": 0.5, "tokens_norm": True},
    "xcit_8": SMALL
    | {
        "img_size": (24, 40),
        "patch_size": 8,
        "depth": 3,
        "num_heads": 4,
        "cls_attn_layers": 1,
        "mlp_ratio": 2.0,
        "qkv_bias": False,
    }
    | {"global_pool": "avg"},
}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random values: factors and variances about 1, biases and means about 0, matrices that keep the size of
    what they read. Larger ones would magnify rounding in timm's gradients.
    """
    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) < 2 or "temperature" in name:
        ones = name.endswith(("weight", "running_var", "_variance", "temperature")) or "gamma" in name
        return np.asarray(np.clip(normal, -2, 2) / 4 + ones, np.float32)
    reads = 1 if name in ("images", "loss") else np.prod(shape[1:])
    return (normal / np.sqrt(reads)).astype(np.float32)


if __name__ == "__main__":
    from timm.models.xcit import Xcit

    from golden.record import record

    for name, sizes in CASES.items():
        record(name, Xcit(**sizes), sizes["img_size"], gradients=True, array=array)
