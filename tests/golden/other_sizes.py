"""Images of other sizes than the model's; run with torch and timm it records them: PYTHONPATH=tests
python -m golden.other_sizes
"""

from golden import convnext, eva, swin, swinv2, vit, xcit

# The architecture's module, and sizes of images: smaller, larger, and no square.
CASES = {
    "vit": (vit, [(8, 8), (24, 24), (12, 20)]),
    "vit_deit3": (vit, [(8, 8), (12, 20)]),
    "vit_registers": (vit, [(8, 8), (12, 20)]),
    "vit_clip": (vit, [(12, 20)]),
    "vit_gap": (vit, [(8, 8), (20, 12)]),
    "eva": (eva, [(8, 8), (24, 16)]),
    "eva_dinov3": (eva, [(8, 8), (24, 8)]),
    # Maps that are smaller than a window, and a last map of more windows than the model has.
    "swin_padded": (swin, [(12, 20), (40, 36)]),
    "swin_odd": (swin, [(20, 20), (12, 48)]),
    "swinv2": (swinv2, [(16, 32), (40, 36)]),
    "xcit": (xcit, [(16, 16), (29, 48)]),
    "convnext": (convnext, [(32, 32), (37, 96)]),
}


def formula(module):
    """Returns the formula of a module's weights and images."""
    from golden.convolutions import array

    return getattr(module, "array", array)


def key(case: str, size: tuple[int, int]) -> str:
    """Returns the prefix of the names of a case's arrays."""
    return "{}/{}x{}".format(case, *size)


if __name__ == "__main__":
    from functools import partial

    import numpy as np
    import torch
    from timm.layers import LayerNorm
    from timm.models.convnext import ConvNeXt
    from timm.models.eva import Eva
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.swin_transformer_v2 import SwinTransformerV2
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.xcit import Xcit

    from golden.formula import places
    from golden.record import FOLDER, with_formula

    def reference(case: str, module) -> torch.nn.Module:
        options = dict(module.CASES[case])
        if module is vit:
            if case == "vit_clip":
                quick_gelu = options.pop("act")
                options |= {
                    "act_layer": quick_gelu,
                    "norm_layer": partial(torch.nn.LayerNorm, eps=1e-5),
                }
            return VisionTransformer(**options, dynamic_img_size=True)
        if module is eva:
            options["norm_layer"] = partial(LayerNorm, eps=1e-5 if "rope_type" in options else 1e-6)
            return Eva(**options | {"dynamic_img_size": True})
        if module is swin:
            return SwinTransformer(**options, dynamic_img_size=True, strict_img_size=False)
        if module is swinv2:
            return SwinTransformerV2(**options, dynamic_img_size=True, strict_img_size=False)
        return (Xcit if module is xcit else ConvNeXt)(**options)

    arrays = {}
    for case, (module, sizes) in CASES.items():
        array = formula(module)
        model = with_formula(reference(case, module), array)
        for size in sizes:
            images = torch.from_numpy(array("images", (2, 3, *size)))
            model.zero_grad()
            logits = model(images)
            (logits * torch.from_numpy(array("loss", tuple(logits.shape)))).sum().backward()
            prefix = key(case, size)
            arrays[f"{prefix}/logits"] = logits.detach().numpy()
            # Some values of each gradient, and its range.
            gradients = {name: one.grad.numpy() for name, one in model.named_parameters()}
            arrays[f"{prefix}/gradients"] = np.stack([places(one) for one in gradients.values()])
            arrays[f"{prefix}/spans"] = np.array([np.ptp(one) for one in gradients.values()])
        arrays[f"{case}/names"] = np.array(list(gradients))
    np.savez_compressed(FOLDER / "other_sizes.npz", **arrays)
