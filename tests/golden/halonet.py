"""Reduced HaloNets; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.halonet
"""

import numpy as np

# (blocks, channels, every so many-th attends, heads) of each stage
CASES = {
    "halonet": {
        "stages": ((1, 32, 0, 0), (2, 64, 2, 2), (2, 64, 1, 2), (1, 96, 1, 3)),
        "stem_dim": 16, "block_size": 2, "halo_size": 1, "act": "relu",
    },
    "halonet_silu": {
        "stages": ((2, 32, 2, 4), (2, 64, 2, 2), (1, 64, 1, 2), (1, 64, 0, 0)),
        "stem_dim": 8, "block_size": 4, "halo_size": 3, "act": "silu",
    },
}  # fmt: skip
SIZES = {"halonet": (64, 128), "halonet_silu": (64, 64)}


def array(name, shape):
    """Returns ``trained.array``; weights of norms are about 0.8: more, and attention magnifies
    rounding.
    """
    from golden import trained  # which knows this file's cases

    return np.asarray(
        trained.array(name, shape) + 0.5 * (len(shape) == 1 and name.endswith("weight")), np.float32
    )


def timms(name):
    """timm's model of a case."""
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    case = CASES[name]
    windows = {"block_size": case["block_size"], "halo_size": case["halo_size"]}
    blocks = [
        [
            ByoBlockCfg(
                type="self_attn" if every and (j + 1) % every == 0 else "bottle", d=1, c=dim, s=2 if i else 1, gs=0,
                br=0.25, self_attn_layer="halo", self_attn_kwargs=windows | {"num_heads": heads},
            )
            for j in range(depth)
        ]
        for i, (depth, dim, every, heads) in enumerate(case["stages"])
    ]  # fmt: skip
    config = ByoModelCfg(
        blocks=blocks,
        stem_chs=case["stem_dim"],
        stem_type="tiered",
        stem_pool="maxpool",
        act_layer=case["act"],
    )
    return ByobNet(config, num_classes=5)


if __name__ == "__main__":
    from golden.record import record

    for name in CASES:
        record(name, timms(name), SIZES[name], gradients=True, array=array)
