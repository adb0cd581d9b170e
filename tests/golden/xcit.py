"""Reduced XCiTs; run with torch and timm it records them: PYTHONPATH=tests python -m golden.xcit"""

import zlib

import numpy as np

SMALL = {"depth": 2, "num_classes": 7}
CASES = {
    "xcit": SMALL
    | {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 16,
        "num_heads": 2,
        "eta": 0.5,
        "tokens_norm": True,
    },
    "xcit_16": SMALL
    | {
        "img_size": (48, 80),
        "patch_size": 16,
        "embed_dim": 24,
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "qkv_bias": False,
    }
    | {"cls_attn_layers": 1, "global_pool": "avg"},
}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random values: factors and variances about 1, biases and means about 0, matrices that
    keep the size of what they read. Larger ones would magnify rounding in timm's gradients.
    """
    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) < 2 or "temperature" in name:
        ones = (
            name.endswith(("weight", "running_var", "_variance", "temperature")) or "gamma" in name
        )
        return np.asarray(np.clip(normal, -2, 2) / 4 + ones, np.float32)
    reads = 1 if name in ("images", "loss") else np.prod(shape[1:])
    return (normal / np.sqrt(reads)).astype(np.float32)


if __name__ == "__main__":
    from timm.models.xcit import Xcit

    from golden.record import record

    for name, sizes in CASES.items():
        record(name, Xcit(**sizes), sizes["img_size"], gradients=True, array=array)
