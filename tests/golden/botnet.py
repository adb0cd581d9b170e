"""Reduced BoTNets; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.botnet
"""

from golden.halonet import array

# (blocks, channels, every so many-th attends, heads) of each stage
CASES = {
    "botnet": {
        "stages": ((1, 32, 0, 0), (2, 64, 2, 2), (2, 64, 1, 2), (1, 96, 1, 3)),
        "stem_dim": 16, "act": "relu",
    },
    "botnet_silu": {
        "stages": ((2, 32, 2, 4), (2, 64, 2, 2), (1, 64, 1, 2), (1, 64, 0, 0)),
        "stem_dim": 8, "act": "silu",
    },
}  # fmt: skip
SIZES = {"botnet": 64, "botnet_silu": 32}


def timms(name):
    """timm's model of a case."""
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    case = CASES[name]
    blocks = [
        [
            ByoBlockCfg(
                type="self_attn" if every and (j + 1) % every == 0 else "bottle", d=1, c=dim, s=2 if i else 1, gs=0,
                br=0.25, self_attn_layer="bottleneck", self_attn_kwargs={"num_heads": heads},
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
        fixed_input_size=True,
    )
    return ByobNet(config, num_classes=5, img_size=SIZES[name])


if __name__ == "__main__":
    from golden.record import record

    for name in CASES:
        record(name, timms(name), SIZES[name], gradients=True, array=array)
