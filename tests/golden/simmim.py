"""Reduced networks of SimMIM; run with torch, transformers and timm it records their losses,
predictions and gradients (transformers 5.24.0, timm 1.0.31, torch 2.13.0):

PYTHONPATH=tests python -m golden.simmim FOLDER

The networks are transformers', and those of the authors' code. FOLDER is a clone of
microsoft/SimMIM at d3e29bc.
"""

import numpy as np

from golden import trained

# Pixels along an image's side, and mask units there: one for each patch, or for 2 x 2 patches.
SIZES = {
    "simmim_vit": (16, 4),
    "simmim_swin": (32, 4),
    "simmim_swinv2": (32, 8),
    "simmim_authors_vit": (16, 2),
    "simmim_authors_swin": (32, 4),
}
PATCH = 4
VIT = {"embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2.0}
SHARED_BIAS = {"init_values": 0.1, "use_abs_pos_emb": False, "use_shared_rel_pos_bias": True}
SWIN = {"embed_dim": 8, "num_heads": [1, 2], "window_size": 4}
DEPTHS = [2, 2]


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``trained.array``; weights of norms are about 0.9."""
    is_norm = len(shape) == 1 and name.endswith("weight")
    return np.asarray(trained.array(name, shape) + (0.6 if is_norm else 0.0), np.float32)


def images_of(case: str) -> np.ndarray:
    side, _ = SIZES[case]
    return array("images", (2, 3, side, side))


def masked(case: str) -> np.ndarray:
    """Returns the mask of two images, [2, units, units]: three fifths of each, rounded up."""
    _, side = SIZES[case]
    order = np.argsort(array(f"{case} mask", (2, side**2)), axis=1)
    mask = np.zeros((2, side**2), bool)
    np.put_along_axis(mask, order[:, : -(-3 * side**2 // 5)], True, axis=1)
    return mask.reshape(2, side, side)


if __name__ == "__main__":
    import sys
    import tempfile
    import types
    from pathlib import Path

    # torchvision's operators don't load beside a CPU torch.
    for module in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{module}"] = types.ModuleType(module)
    import torch
    import transformers as hf
    from safetensors.numpy import load_file, save_file

    from golden.record import FOLDER

    sys.path.insert(0, sys.argv[1])
    from models import simmim as authors

    def by_patch(case: str) -> torch.Tensor:
        side, units = SIZES[case]
        repeats = side // PATCH // units
        return torch.from_numpy(masked(case).repeat(repeats, axis=1).repeat(repeats, axis=2))

    def write(case: str, loss: torch.Tensor, gradients: dict[str, np.ndarray], **more) -> None:
        gradients = {f"grad/{name}": gradient for name, gradient in gradients.items()}
        np.savez_compressed(FOLDER / f"{case}.npz", loss=loss.detach().numpy(), **gradients, **more)

    def in_a_file(model: hf.PreTrainedModel, folder: str) -> dict[str, np.ndarray]:
        """Returns the model's parameters under the names that they have in its files."""
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")

    def record_transformers(case: str, model: hf.PreTrainedModel) -> None:
        with tempfile.TemporaryDirectory() as folder:
            shapes = {name: values.shape for name, values in in_a_file(model, folder).items()}
            weights = {name: array(name, shape) for name, shape in shapes.items()}
            save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            # In float64, so that the rounding is ours alone.
            model = type(model).from_pretrained(folder).eval().double()
            images = torch.from_numpy(images_of(case)).double()
            output = model(images, bool_masked_pos=by_patch(case).flatten(1))
            output.loss.backward()
            for parameter in model.parameters():
                parameter.data = parameter.grad
            gradients = in_a_file(model.float(), folder)
        reconstruction = output.reconstruction.detach().float().numpy()
        write(case, output.loss, gradients, reconstruction=reconstruction)

    def record_authors(case: str, encoder: torch.nn.Module, stride: int) -> None:
        model = authors.SimMIM(encoder, stride).eval().double()
        for name, parameter in model.named_parameters():
            parameter.data = torch.from_numpy(array(name, tuple(parameter.shape))).double()
        loss = model(torch.from_numpy(images_of(case)).double(), by_patch(case))
        loss.backward()
        gradients = {name: each.grad.float().numpy() for name, each in model.named_parameters()}
        write(case, loss, gradients)

    vit = hf.ViTConfig(
        hidden_size=VIT["embed_dim"],
        num_hidden_layers=VIT["depth"],
        num_attention_heads=VIT["num_heads"],
        intermediate_size=int(VIT["embed_dim"] * VIT["mlp_ratio"]),
        layer_norm_eps=1e-6,
        image_size=16,
        patch_size=PATCH,
        encoder_stride=PATCH,
    )
    swin = SWIN | {"depths": DEPTHS, "image_size": 32, "patch_size": PATCH, "encoder_stride": 8}
    record_transformers("simmim_vit", hf.ViTForMaskedImageModeling(vit))
    record_transformers("simmim_swin", hf.SwinForMaskedImageModeling(hf.SwinConfig(**swin)))
    record_transformers("simmim_swinv2", hf.Swinv2ForMaskedImageModeling(hf.Swinv2Config(**swin)))

    sizes = {"patch_size": PATCH, "num_classes": 0, "drop_path_rate": 0.0}
    encoder = authors.VisionTransformerForSimMIM(
        img_size=16,
        **sizes,
        **VIT,
        **SHARED_BIAS,
        qkv_bias=True,
        use_mean_pooling=False,
        norm_layer=lambda width: torch.nn.LayerNorm(width, eps=1e-6),
    )
    record_authors("simmim_authors_vit", encoder, PATCH)
    encoder = authors.SwinTransformerForSimMIM(img_size=32, depths=DEPTHS, **sizes, **SWIN)
    record_authors("simmim_authors_swin", encoder, 8)
