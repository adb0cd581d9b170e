"""Reduced HVTs; run with torch and a checkout of ziplab/HVT it records them (the files: f32cc1c,
torch 2.13.0): PYTHONPATH=CHECKOUT:tests python -P -m golden.hvt
"""

from golden.trained import array

SMALL = {"embed_dim": 24, "num_heads": 3, "mlp_ratio": 2.0, "qkv_bias": True, "num_classes": 5}
CASES = {
    "hvt": SMALL | {"depth": 3, "pool_block_width": 2, "pool_kernel_size": 3},
    # An even kernel, and a length after which a token is left over.
    "hvt_even": SMALL | {"depth": 2, "pool_block_width": 1, "pool_kernel_size": 2},
}
SIZE = (48, 32)
PATCH = 8


if __name__ == "__main__":
    import sys
    from functools import partial
    from types import ModuleType, SimpleNamespace

    from torch import nn

    from golden.authors import record, stand_in_for_timm

    stand_in_for_timm()
    # The authors' models read the command line's arguments.
    params = ModuleType("params")
    params.args = SimpleNamespace()
    sys.modules["params"] = params
    import models

    for name, sizes in CASES.items():
        options = dict(sizes)
        for key in ("pool_block_width", "pool_kernel_size"):
            setattr(params.args, key, options.pop(key))
        norm = partial(nn.LayerNorm, eps=1e-6)
        record(name, models.HVT(SIZE, PATCH, norm_layer=norm, **options), SIZE, array)
