"""Reduced PoolFormers; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.poolformer
"""

SMALL = {"depths": (1, 2, 1, 1), "dims": (4, 8, 12, 16), "num_classes": 5}
CASES = {"poolformer": SMALL, "poolformer_odd": SMALL | {"depths": (2, 1, 2, 1)}}
# the second leaves pixels over at each downsampling
SIZES = {"poolformer": (64, 64), "poolformer_odd": (59, 74)}

if __name__ == "__main__":
    from timm.layers import GroupNorm1
    from timm.models.metaformer import MetaFormer
    from torch import nn

    from golden.make_names_vit import values
    from golden.record import record

    # As timm's poolformer_s12; the recorded layer scales are the formula's.
    words = {
        "downsample_norm": None,
        "mlp_act": nn.GELU,
        "mlp_bias": True,
        "norm_layers": GroupNorm1,
    }
    words |= {"layer_scale_init_values": 1e-5, "res_scale_init_values": None, "use_mlp_head": False}
    for name, sizes in CASES.items():
        record(
            name,
            MetaFormer(**sizes, **words),
            SIZES[name],
            gradients=name == "poolformer",
            array=values,
        )
