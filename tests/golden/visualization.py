"""Attention weights of timm's models, and class activation maps of the package grad-cam (1.5.7).

Where torch, timm and grad-cam are installed it records them: PYTHONPATH=tests python -m golden.visualization
"""

ATTENTION = ("vit", "vit_registers", "beit", "beit_shared", "swin", "swin_odd", "pvtv2_plain")
CAM = {"vit": 2, "vit_avg": 4, "convnext": 3}  # and the class

if __name__ == "__main__":
    import numpy as np
    import torch
    from pytorch_grad_cam import GradCAM, GradCAMPlusPlus, HiResCAM, LayerCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    from timm.models.beit import Beit
    from timm.models.convnext import ConvNeXt
    from timm.models.pvt_v2 import PyramidVisionTransformerV2
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import VisionTransformer

    from golden import beit, convnext, convolutions, pvtv2, swin, vit
    from golden.formula import array
    from golden.make_names_vit import values
    from golden.record import FOLDER, with_formula

    def built(name):
        """The case's model with the formula's weights, and its first image."""
        by = {"pvt": values, "con": convolutions.array}.get(name[:3], array)
        kind, cases = {
            "vit": (VisionTransformer, vit), "bei": (Beit, beit), "swi": (SwinTransformer, swin),
            "pvt": (PyramidVisionTransformerV2, pvtv2), "con": (ConvNeXt, convnext),
        }[name[:3]]  # fmt: skip
        sizes = cases.CASES[name]
        model = kind(**sizes)
        size = sizes.get("img_size") or cases.SIZES[name]
        height, width = (size, size) if isinstance(size, int) else size
        return with_formula(model, by), torch.from_numpy(by("images", (2, 3, height, width)))[:1]

    arrays = {}
    for name in ATTENTION:
        model, images = built(name)
        drops = {key: layer for key, layer in model.named_modules() if key.endswith("attn_drop")}
        for key, layer in drops.items():
            model.get_submodule(key.rpartition(".")[0]).fused_attn = False
            said = f"attention/{name}/{key.rpartition('.')[0]}"
            layer.register_forward_pre_hook(
                lambda _, x, said=said: arrays.update({said: x[0].detach().numpy()})
            )
        model(images)
    for name, output in CAM.items():
        model, images = built(name)
        if name == "convnext":
            target = model.stages[-1]
            turned = None
        else:
            target = model.blocks[-1].norm1 if name == "vit" else model.norm
            turned = lambda x: x[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)  # noqa: E731
        for kind in (GradCAM, HiResCAM, GradCAMPlusPlus, LayerCAM):
            with kind(model=model, target_layers=[target], reshape_transform=turned) as cam:
                targets = [ClassifierOutputTarget(output)]
                cam(input_tensor=images, targets=targets)
                seen = cam.activations_and_grads
                made = (seen.activations[0].numpy(), seen.gradients[0].numpy())
                found = cam.get_cam_image(images, target, targets, *made, False)
            arrays[f"{kind.__name__.lower()}/{name}"] = np.maximum(found[0], 0)
    np.savez_compressed(FOLDER / "visualization.npz", **arrays)
