"""Reduced Hieras; run with torch and timm it records them: PYTHONPATH=tests python -m golden.hiera"""

import numpy as np

from golden import trained

SMALL = {"embed_dim": 4, "num_heads": 1, "stages": (1, 2, 1, 1), "num_classes": 5}
CASES = {
    "hiera": SMALL,
    "hiera_windows": SMALL
    | {
        "abs_win_pos_embed": True,
        "global_pos_size": (5, 6),
        "init_values": 0.5,
        "use_expand_proj": False,
    },
    # As in masked pre-training: the last stage doesn't pool.
    "hiera_masked": SMALL
    | {"q_pool": 2, "mask_unit_attn": (True, True, True, False), "mlp_ratio": 2.0},
}
SIZES = {"hiera": (64, 96), "hiera_windows": (96, 64), "hiera_masked": (64, 96)}
MASK = np.array([[1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1]], bool)  # of 2 x 3 units, and of 3 x 2
TRAINED = ("pos_embed", "patch_embed.proj.weight")  # whose gradients are kept of masked images


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``trained.array``; weights of norms are about 0.9, positions about 1."""
    values = trained.array(name, shape) + 0.6 * (len(shape) == 1 and name.endswith("weight"))
    return np.asarray(values / values.std() if name.startswith("pos_embed") else values, np.float32)


if __name__ == "__main__":
    import torch
    from timm.models.hiera import Hiera

    from golden.record import record, with_formula

    class Rolled(Hiera):
        """timm's, but that tokens of whole images are row by row."""

        def forward_features(self, x, mask=None, return_intermediates=False):
            found = Hiera.forward_features(self, x, mask, return_intermediates)
            return self.rolled(found, len(self.blocks) - 1) if mask is None else found

        def rolled(self, x, block):
            return self.reroll(x, block).flatten(1, 2)

        def forward_intermediates(self, x, indices=None, norm=False, **options):
            found = Hiera.forward_intermediates(self, x, indices=indices, **options)
            if options.get("intermediates_only"):
                return found
            return self.rolled(found[0], self.stage_ends[indices[-1]]), found[1]

        def masked(self, x, mask):
            """Features, unit by unit, and what each stage gives of the units that are kept."""
            features, stages = self.forward_features(x, mask, return_intermediates=True)
            # [B, places of a unit, units, D]
            parts = features.reshape(len(x), -1, mask.sum(1)[0], features.shape[2])
            return {"masked": parts.transpose(1, 2).flatten(1, 2)} | {
                f"stage{i}": one for i, one in enumerate(stages)
            }

    for name, sizes in CASES.items():
        model = with_formula(Rolled(SIZES[name], **sizes), array)
        # timm counts the stages, pooled or not
        for stage, pools in enumerate([0, 1, 2, sizes.get("q_pool", 3)]):
            model.feature_info[stage]["reduction"] = 4 << pools
        images = torch.from_numpy(array("images", (2, 3, *SIZES[name])))
        extra = model.masked(images, torch.from_numpy(MASK))
        loss = (
            extra["masked"] * torch.from_numpy(array("loss", tuple(extra["masked"].shape)))
        ).sum()
        for key in TRAINED:
            [extra[f"masked/{key}"]] = torch.autograd.grad(
                loss, model.get_parameter(key), retain_graph=True
            )
        record(name, model, SIZES[name], gradients=name != "hiera_masked", extra=extra, array=array)
