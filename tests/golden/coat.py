"""Reduced CoaTs; run with torch and timm it records them: PYTHONPATH=tests python -m golden.coat"""

import re

from golden.make_names_vit import values

LITE = {
    "patch_size": 4, "serial_depths": (2, 1, 1, 1), "embed_dims": (8, 8, 16, 16), "mlp_ratios": (3, 2, 2, 2),
    "num_classes": 5,
}  # fmt: skip
CASES = {
    "coat": LITE | {"img_size": (64, 32)},
    "coat_parallel": LITE | {"img_size": (64, 96), "parallel_depth": 2, "embed_dims": (8, 8, 8, 8)},
    "coat_plain": LITE
    | {
        "img_size": (64, 64),
        "num_heads": 4,
        "crpe_window": {5: 1, 3: 3},
        "qkv_bias": False,
        "mlp_ratios": (2, 2, 2, 2),
    },
}
# The second resizes maps of several shapes; the third has windows in another order.


def array(name, shape):
    """``values``, the same ones under all names of a tensor that layers share."""
    name = re.sub(r"^serial_blocks(\d)\.\d+\.(?:factoratt_crpe\.)?(c\w?pe)\.", r"\2\1.", name)
    name = re.sub(r"^parallel_blocks\.\d+\.factoratt_crpe(\d)\.crpe\.", r"crpe\1.", name)
    return values(re.sub(r"\.mlp[34]\.", ".mlp2.", name), shape)


if __name__ == "__main__":
    import torch
    from timm.models.coat import CoaT

    from golden.record import record

    class Recorded(CoaT):
        """``forward_features`` and the features of ``forward_intermediates`` are one tensor: the
        scales' tokens.
        """

        def forward(self, x):
            return self.forward_head(CoaT.forward_features(self, x))

        def forward_features(self, x):
            return joined(CoaT.forward_features(self, x))

        def forward_intermediates(self, *args, **named):
            found = CoaT.forward_intermediates(self, *args, **named)
            return found if isinstance(found, list) else (joined(found[0]), found[1])

    def joined(features):
        return torch.cat(features, 1) if isinstance(features, list) else features

    for name, sizes in CASES.items():
        record(
            name, Recorded(**sizes), sizes["img_size"], gradients=name != "coat_plain", array=array
        )
