"""Reduced CrossViTs; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.crossvit
"""

SMALL = {"embed_dim": (8, 12), "num_heads": (2, 3), "mlp_ratio": (2, 3), "num_classes": 5}
CASES = {
    "crossvit": SMALL
    | {
        "img_size": (30, 60),
        "img_scale": (1.0, 0.8),
        "patch_size": (6, 8),
        "depth": ((1, 2, 0), (1, 2, 0)),
    },
    # both images are enlarged; as many blocks in both branches
    "crossvit_dagger": SMALL
    | {
        "img_size": (40, 60),
        "img_scale": (1.2, 1.6),
        "depth": ((1, 1, 0), (1, 1, 0)),
        "multi_conv": True,
    }
    | {"patch_size": (12, 16)},
    "crossvit_crop": SMALL
    | {
        "img_size": (30, 60),
        "img_scale": (1.0, 0.8),
        "patch_size": (6, 8),
        "depth": ((1, 2, 0), (1, 2, 0)),
    }
    | {"crop_scale": True, "global_pool": "avg", "qkv_bias": False},
}

if __name__ == "__main__":
    import torch
    from timm.models.crossvit import CrossVit

    from golden.make_names_vit import values
    from golden.record import record

    class Recorded(CrossVit):
        """``forward_features`` and the features of ``forward_intermediates`` are one tensor: both
        branches' tokens.
        """

        def forward(self, x):
            return self.forward_head(CrossVit.forward_features(self, x))

        def forward_features(self, x):
            return joined(CrossVit.forward_features(self, x))

        def forward_intermediates(self, *args, **named):
            found = CrossVit.forward_intermediates(self, *args, **named)
            return found if named.get("intermediates_only") else (joined(found[0]), found[1])

    def joined(features):
        return torch.cat([one.flatten(1) for one in features], 1)

    for name, sizes in CASES.items():
        record(name, Recorded(**sizes), sizes["img_size"], gradients=True, array=values)
