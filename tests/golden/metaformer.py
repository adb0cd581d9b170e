"""Reduced CAFormers, ConvFormers and PoolFormers V2; run with torch and timm it records them:
PYTHONPATH=tests python -m golden.metaformer
"""

import numpy as np

from golden.make_names_vit import values

SMALL = {"depths": (1, 2, 1, 1), "dims": (4, 8, 64, 32), "num_classes": 5}
# CAFormer, ConvFormer, PoolFormer V2
CASES = {"metaformer": SMALL, "metaformer_conv": SMALL | {"dims": (4, 8, 12, 16)}}
CASES["metaformer_pool"] = CASES["metaformer_conv"]
# The first and the last leave pixels over at each downsampling.
SIZES = {"metaformer": (51, 66), "metaformer_conv": (64, 64), "metaformer_pool": (59, 74)}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``values``; each number of a StarReLU is about 1, else its squares would leave
    little.
    """
    return np.asarray(values(name, shape) + (shape == (1,) or "res_scale" in name), np.float32)


if __name__ == "__main__":
    import sys
    import types

    # torchvision's operators don't load beside a CPU torch.
    for module in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{module}"] = types.ModuleType(module)
    from timm.models.metaformer import (
        Attention,
        GroupNorm1NoBias,
        LayerNorm2dNoBias,
        LayerNormNoBias,
        MetaFormer,
        Pooling,
        SepConv,
    )

    from golden.record import FOLDER, record

    mixers = {"metaformer": [SepConv, SepConv, Attention, Attention], "metaformer_conv": SepConv}
    mixers["metaformer_pool"] = Pooling
    norms = {
        "metaformer": [LayerNorm2dNoBias] * 2 + [LayerNormNoBias] * 2,
        "metaformer_conv": LayerNorm2dNoBias,
    }
    norms["metaformer_pool"] = GroupNorm1NoBias
    for name, sizes in CASES.items():
        options = {
            "token_mixers": mixers[name],
            "norm_layers": norms[name],
            "use_mlp_head": "pool" not in name,
        }
        model = MetaFormer(**sizes, **options)
        record(name, model, SIZES[name], gradients=True, array=array, double=name == "metaformer")
        # A StarReLU's two gradients are sums over a whole map, where most cancels out: a test of
        # their own has a wider tolerance.
        stored = np.load(FOLDER / f"{name}.npz")
        renamed = {
            key.replace("grad/", "sum/") if stored[key].shape == (1,) else key: stored[key]
            for key in stored
        }
        np.savez_compressed(FOLDER / f"{name}.npz", **renamed)
