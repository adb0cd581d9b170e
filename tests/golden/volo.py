"""Reduced VOLOs; run with torch and timm it records them: PYTHONPATH=tests python -m golden.volo"""

import numpy as np

from golden.make_names_vit import values

SMALL = {
    "layers": (1, 1, 1, 1), "embed_dims": (6, 8, 8, 8), "num_heads": (2, 2, 2, 4), "stem_hidden_dim": 4,
    "patch_size": 4, "num_classes": 5,
}  # fmt: skip
CASES = {
    "volo": SMALL,
    "volo_biased": SMALL
    | {"layers": (2, 1, 1, 2), "qkv_bias": True, "mlp_ratio": (2.5, 3.0, 2.0, 4.0)},
}
SIZES = {"volo": (40, 32), "volo_biased": (24, 32)}
BOX = (1, 0, 4, 3)  # rows 1 to 3, columns 0 to 2 of the 5 x 4 that are swapped


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``values``, positive where it is a variance, and around 1 for a batch norm's weight."""
    found = np.asarray(values(name, shape))
    norm = "patch_embed.conv" in name and name.endswith("weight") and len(shape) == 1
    return np.asarray(
        np.abs(found) + np.float32(0.5)
        if name.endswith("running_var")
        else found + np.float32(norm)
    )


if __name__ == "__main__":
    import torch
    from timm.models import volo

    from golden.record import record, with_formula

    for name, sizes in CASES.items():
        model = volo.VOLO(img_size=SIZES[name], **sizes)
        extra = {}
        if name == "volo":
            volo.rand_bbox = lambda *_, **__: BOX
            model = with_formula(model, array)
            images = torch.from_numpy(array("images", (2, 3, *SIZES[name])))
            for mixed in (False, True):
                with_formula(model, array).train()
                model.mix_token = mixed
                model.beta = 1.0
                # timm leaves out the class token's head
                token, dense, _ = model.forward_train(images)
                end = "mixed" if mixed else "train"
                extra |= {f"logits_{end}": model.head(token), f"dense_{end}": dense}
            loss = sum(
                (extra[key] * torch.from_numpy(array(key, extra[key].shape))).sum()
                for key in list(extra)[2:]
            )
            loss.backward()
            extra |= {
                f"mixed_grad/{key}": p.grad.clone()
                for key, p in model.named_parameters()
                if "network.0" in key
            }
            extra |= {
                f"state/{key}": t.clone()
                for key, t in model.state_dict().items()
                if "running" in key
            }
            model.zero_grad()
            model.mix_token = False
        record(name, model, SIZES[name], gradients=True, extra=extra, array=array)
