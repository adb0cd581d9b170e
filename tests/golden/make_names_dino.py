"""Writes names_dino.json beside this file: the checkpoints of DINO, iBOT and DINOv2, and what their
authors' student and teacher make of two images (torch 2.13.0, timm 1.0.31).

PYTHONPATH=.:tests python tests/golden/make_names_dino.py DINO IBOT DINOV2

The arguments are clones of facebookresearch/dino at 7c446df, of bytedance/ibot at da316d8 and of
facebookresearch/dinov2 at b8931f7.

A case holds the names and shapes of a checkpoint, whose values are those of ``checkpoint``: "parts"
are its dictionaries. "student" and "teacher" are the logits
[2, K] of both images, "student_patches" and "teacher_patches" those of all patches [2, N, K]. The
student sees the patches of ``MASK`` as mask tokens, where there are such.
"""

import numpy as np

from golden.make_names_vit import IMAGES, values

# Rows and columns of 4 x 4 patches, the same in both images.
MASK = np.add.outer(np.arange(4), 2 * np.arange(4)) % 3 == 0
VIT = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
HEAD = {"in_dim": 24, "out_dim": 10, "hidden_dim": 16, "bottleneck_dim": 12}


def checkpoint(parts: dict[str, dict[str, list[int]]], shared: bool) -> dict:
    """Returns the arrays of a checkpoint by part and name.

    Args:
        parts: the shapes.
        shared: whether the heads for images and for patches are one, under two names.
    """

    def array(part: str, name: str, shape: list[int]) -> np.ndarray:
        if shared:
            name = name.replace("last_layer2.", "last_layer.")
        return values(f"{part}.{name}", shape)

    return {
        part: {name: array(part, name, shape) for name, shape in shapes.items()}
        for part, shapes in parts.items()
    }


if __name__ == "__main__":
    import json
    import sys
    import types
    from collections.abc import Callable
    from pathlib import Path

    # torchvision's operators don't load beside a CPU torch.
    for module in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{module}"] = types.ModuleType(module)
    import torch
    from torch import nn

    DINO, IBOT, DINOV2 = sys.argv[1:]
    images = torch.from_numpy(IMAGES).double()
    masks = torch.from_numpy(MASK)[None].repeat(2, 1, 1)
    cases = {}

    def authors(folder: str, *modules: str) -> list[types.ModuleType]:
        """Imports modules of a clone; those of another one have the same names."""
        for name in ("utils", "models", "vision_transformer"):
            for module in [key for key in sys.modules if key.partition(".")[0] == name]:
                del sys.modules[module]
        sys.path.insert(0, folder)
        imported = [__import__(name, fromlist=["*"]) for name in modules]
        sys.path.remove(folder)
        return imported

    def filled(
        part: str, module: nn.Module, prefix: str = "", shared: bool = False
    ) -> dict[str, list[int]]:
        """Gives a module its values, and returns its names and shapes in the checkpoint."""
        shapes = {f"{prefix}{key}": list(each.shape) for key, each in module.state_dict().items()}
        arrays = checkpoint({part: shapes}, shared)[part]
        tensors = {key.removeprefix(prefix): torch.from_numpy(a) for key, a in arrays.items()}
        module.load_state_dict(tensors)
        module.double().eval()
        return shapes

    def record(case: str, parts: dict, **outputs: torch.Tensor | None) -> None:
        given = {key: each.tolist() for key, each in outputs.items() if each is not None}
        cases[case] = {"parts": parts, **given}

    def branch(backbone: nn.Module, **heads: nn.Module) -> nn.ModuleDict:
        return nn.ModuleDict({"backbone": backbone, **heads})

    vits, _ = authors(DINO, "vision_transformer", "utils")

    def dino() -> nn.ModuleDict:
        vit = vits.VisionTransformer([16], qkv_bias=True, norm_layer=norm, **VIT)
        return branch(vit, head=vits.DINOHead(**HEAD))

    norm: Callable[[int], nn.Module] = lambda width: nn.LayerNorm(width, eps=1e-6)  # noqa: E731
    student, teacher = dino(), dino()
    parts = {
        "student": filled("student", student, "module."),
        "teacher": filled("teacher", teacher),
        "dino_loss": {"center": [1, 10]},
    }
    logits = [each["head"](each["backbone"](images)) for each in (student, teacher)]
    record("DINO", parts, student=logits[0], teacher=logits[1])

    vits, heads = authors(IBOT, "models.vision_transformer", "models.head")
    for shared in (True, False):

        def ibot(**options: bool) -> nn.ModuleDict:
            vit = vits.VisionTransformer(
                [16], qkv_bias=True, return_all_tokens=True, **VIT, **options
            )
            head = heads.iBOTHead(**HEAD, patch_out_dim=10, shared_head=shared)  # noqa: B023
            return branch(vit, head=head)

        student, teacher = ibot(masked_im_modeling=True), ibot()
        parts = {
            "student": filled("student", student, "module.", shared),
            "teacher": filled("teacher", teacher, shared=shared),
            "ibot_loss": {"center": [1, 10], "center2": [1, 1, 10]},
        }
        tokens = student["backbone"](images, mask=masks)
        ours, patches = student["head"](tokens)
        theirs, seen = teacher["head"](teacher["backbone"](images))
        record(
            f"iBOT, {'one head' if shared else 'two heads'}",
            parts,
            student=ours,
            student_patches=patches,
            teacher=theirs,
            teacher_patches=seen,
        )

    vits, layers = authors(DINOV2, "dinov2.models.vision_transformer", "dinov2.layers")
    for name, registers, separate in (("", 0, True), (", registers", 2, False)):

        def dinov2() -> nn.ModuleDict:
            vit = vits.DinoVisionTransformer(
                16,
                init_values=0.1,
                block_chunks=2,
                num_register_tokens=registers,  # noqa: B023
                **VIT,
            )
            names = ("dino_head", "ibot_head") if separate else ("dino_head",)  # noqa: B023
            return branch(vit, **{key: layers.DINOHead(**HEAD) for key in names})

        model = nn.ModuleDict({"student": dinov2(), "teacher": dinov2()})
        parts = {"model": filled("model", model)}
        parts["model"] |= {"dino_loss.center": [1, 10], "ibot_patch_loss.center": [1, 1, 10]}
        outputs = {}
        for each, given in (("student", masks.flatten(1)), ("teacher", None)):
            features = model[each]["backbone"].forward_features(images, given)
            patch_head = model[each]["ibot_head" if separate else "dino_head"]
            outputs[each] = model[each]["dino_head"](features["x_norm_clstoken"])
            outputs[f"{each}_patches"] = patch_head(features["x_norm_patchtokens"])
        record(f"DINOv2{name}", parts, **outputs)

    Path(__file__).with_name("names_dino.json").write_text(
        json.dumps(cases, separators=(",", ":")) + "\n"
    )
