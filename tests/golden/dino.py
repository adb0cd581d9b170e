"""Twenty steps of DINO, iBOT and DINOv2 on a small ViT, as their authors' code computes them.

With the paths of facebookresearch/dino and facebookresearch/dinov2 (Apache 2.0, at the commits
7c446df and b8931f7; torch 2.13.0, timm 1.0.31) this records the losses, centres, schedules and
parameters:

    PYTHONPATH=tests python -m golden.dino dino dinov2

The authors' heads, losses, schedules, groups and clipping are used. The encoder is timm's, whose
positions fit images of any size.
"""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from golden.formula import array, places

IMAGES = 4
SIZE = 32
LOCAL_SIZE = 16
LOCAL_VIEWS = 3
PATCH = 8
# Keys without a bias: it has no gradient but rounding, which AdamW would enlarge.
VIT = {"embed_dim": 24, "depth": 2, "num_heads": 3, "qkv_bias": False}
EPOCHS = 4
STEPS = 5
# The largest number of masked patches of an image.
MAX_MASKED = 8
HEAD = {"prototypes": 40, "head_width": 48, "head_outputs": 16}
# (weight decay, at the end), (learning rate, at the end), epochs of warm-up.
DECAYS = (0.04, 0.4)
RATES = (1e-3, 1e-5)
WARMUP = 1
MOMENTUM = 0.9
# (teacher's temperature at first, later), epochs between.
TEMPERATURES = (0.04, 0.07)
WARMUP_TEMPERATURE = 2
CLIP = 0.3
# What differs, as keys of METHOD.
CASES: dict[str, dict[str, Any]] = {
    "dino": {},
    "dino_free_lengths": {"norm_last_layer": False},
    "ibot": {"norm_last_layer": False, "patch_loss": 1.0},
    "dinov2": {
        "norm_last_layer": False,
        "patch_loss": 1.0,
        "separate_head": True,
        "koleo": 0.1,
        "centering": "sinkhorn_knopp",
    },
}


def views(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the global views [B, 2, 3, H, W] and the local ones [B, L, 3, h, w] of a step."""
    whole = 3 * array(f"global {step}", (IMAGES, 2, 3, SIZE, SIZE))
    local = 3 * array(f"local {step}", (IMAGES, LOCAL_VIEWS, 3, LOCAL_SIZE, LOCAL_SIZE))
    # Images of one formula differ too little: noise tells them apart.
    noise = np.random.RandomState(step)
    whole += noise.standard_normal(whole.shape).astype(np.float32)
    local += noise.standard_normal(local.shape).astype(np.float32)
    return whole, local


def masks(step: int) -> np.ndarray:
    """Returns the masks of a step, [B, 2, patches] uint8: one view of each image has masked patches."""
    rng = np.random.RandomState(1000 + step)
    masked = np.zeros((IMAGES, 2, (SIZE // PATCH) ** 2), np.uint8)
    for image in range(IMAGES):
        count = rng.randint(1, MAX_MASKED + 1)
        masked[image, rng.randint(2), rng.permutation(masked.shape[2])[:count]] = 1
    return masked


class Branch:
    """A student or a teacher of torch: an encoder with its heads."""

    def __init__(self, case: dict[str, Any], head: Any) -> None:
        import torch
        from timm.models.vision_transformer import VisionTransformer

        encoder = VisionTransformer(
            img_size=SIZE, patch_size=PATCH, num_classes=0, dynamic_img_size=True, **VIT
        )
        layers = {"encoder": encoder, "head": head()}
        if case.get("separate_head"):
            layers["patch_head"] = head()
        self.layers = torch.nn.ModuleDict(layers)
        if case.get("patch_loss"):
            self.layers.mask_token = torch.nn.Parameter(torch.zeros(1, 1, VIT["embed_dim"]))
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                if not name.endswith("weight_g"):
                    parameter.copy_(torch.from_numpy(array(name, tuple(parameter.shape))))

    def tokens(self, images: Any, masked: Any = None) -> Any:
        """Returns the normalised tokens of images, some of whose patches [B, N] are masked."""

        def replace(_: Any, __: Any, patches: Any) -> Any:
            hidden = masked.reshape(patches.shape[:-1]).unsqueeze(-1)
            return patches * (1 - hidden) + self.layers.mask_token.reshape(-1) * hidden

        encoder = self.layers["encoder"]
        if masked is None:
            return encoder.forward_features(images)
        hook = encoder.patch_embed.register_forward_hook(replace)
        tokens = encoder.forward_features(images)
        hook.remove()
        return tokens

    def patch_logits(self, tokens: Any, chosen: Any) -> Any:
        head = self.layers["patch_head" if "patch_head" in self.layers else "head"]
        return head(tokens[:, 1:].flatten(0, 1)[chosen])


class Losses:
    """The authors' losses of a step, put together as their training does it."""

    def __init__(self, case: dict[str, Any]) -> None:
        from dinov2.loss import DINOLoss, KoLeoLoss, iBOTPatchLoss
        from main_dino import DINOLoss as FirstDINOLoss

        self.case = case
        self.sinkhorn = case.get("centering") == "sinkhorn_knopp"
        self.koleo = KoLeoLoss()
        self.patches = iBOTPatchLoss(HEAD["prototypes"])
        self.of_images = DINOLoss(HEAD["prototypes"])
        self.first = FirstDINOLoss(
            HEAD["prototypes"], 2 + LOCAL_VIEWS, *TEMPERATURES, WARMUP_TEMPERATURE, EPOCHS
        )

    def centers(self) -> dict[str, np.ndarray]:
        if not self.case.get("patch_loss"):
            return {"center": self.first.center[0].numpy()}
        self.of_images.apply_center_update()
        self.patches.apply_center_update()
        return {
            "center": self.of_images.center[0].numpy(),
            "patch_center": self.patches.center[0, 0].numpy(),
        }

    def loss(self, student: Branch, teacher: Branch, step: int, epoch: int) -> Any:
        import torch

        # The views one after the other, as the authors have them.
        whole, local = (torch.from_numpy(v.swapaxes(0, 1).copy()) for v in views(step))
        whole, local = whole.flatten(0, 1), local.flatten(0, 1)
        masked = None
        if self.case.get("patch_loss"):
            masked = torch.from_numpy(masks(step).swapaxes(0, 1).copy()).flatten(0, 1).float()
        student_tokens = student.tokens(whole, masked)
        local_tokens = student.tokens(local)
        head = student.layers["head"]
        with torch.no_grad():
            teacher_tokens = teacher.tokens(whole)
            teacher_logits = teacher.layers["head"](teacher_tokens[:, 0])
        class_tokens = student_tokens[:, 0]
        if masked is None:
            logits = head(torch.cat([class_tokens, local_tokens[:, 0]]))
            return self.first(logits, teacher_logits, epoch)

        temperature = self.first.teacher_temp_schedule[epoch]
        chosen = masked.flatten().nonzero().flatten()
        with torch.no_grad():
            patch_logits = teacher.patch_logits(teacher_tokens, chosen)
            if self.sinkhorn:
                targets = self.of_images.sinkhorn_knopp_teacher(teacher_logits, temperature)
                count = torch.tensor(len(chosen))
                patch_targets = self.patches.sinkhorn_knopp_teacher(
                    patch_logits, temperature, count
                )
            else:
                targets = self.of_images.softmax_center_teacher(teacher_logits, temperature)
                self.of_images.update_center(teacher_logits)
                # The authors' mean of the patches is over the second axis.
                patch_logits = patch_logits.unsqueeze(0)
                patch_targets = self.patches.softmax_center_teacher(patch_logits, temperature)[0]
                self.patches.update_center(patch_logits)
        first, second = targets.chunk(2)
        pairs = 2 * (1 + LOCAL_VIEWS)
        of_global = self.of_images([head(class_tokens)], [torch.cat([second, first])])
        of_local = self.of_images(head(local_tokens[:, 0]).chunk(LOCAL_VIEWS), [first, second])
        loss = (2 * of_global + of_local) / pairs
        of_patches = self.patches.forward_masked(
            student.patch_logits(student_tokens, chosen), patch_targets, masked.bool()
        )
        loss = loss + self.case["patch_loss"] * of_patches
        if weight := self.case.get("koleo"):
            loss = loss + weight * sum(self.koleo(tokens) for tokens in class_tokens.chunk(2))
        return loss


def record(name: str, case: dict[str, Any]) -> None:
    import torch
    from dinov2.layers.dino_head import DINOHead as SecondHead

    import utils as authors

    def head() -> Any:
        sizes = {"hidden_dim": HEAD["head_width"], "bottleneck_dim": HEAD["head_outputs"]}
        if case.get("patch_loss"):
            return SecondHead(VIT["embed_dim"], HEAD["prototypes"], **sizes)
        from vision_transformer import DINOHead

        fixed = case.get("norm_last_layer", True)
        return DINOHead(VIT["embed_dim"], HEAD["prototypes"], norm_last_layer=fixed, **sizes)

    student = Branch(case, head)
    teacher = Branch(case, head)
    losses = Losses(case)
    optimizer = torch.optim.AdamW(authors.get_params_groups(student.layers))
    rates = authors.cosine_scheduler(*RATES, EPOCHS, STEPS, warmup_epochs=WARMUP)
    decays = authors.cosine_scheduler(*DECAYS, EPOCHS, STEPS)
    momenta = authors.cosine_scheduler(MOMENTUM, 1, EPOCHS, STEPS)
    recorded: dict[str, Any] = {"rates": rates, "decays": decays, "momenta": momenta}
    recorded["losses"] = []
    centers: dict[str, list[np.ndarray]] = {}
    for step in range(EPOCHS * STEPS):
        epoch = step // STEPS
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = rates[step]
            if index == 0:
                group["weight_decay"] = decays[step]
        loss = losses.loss(student, teacher, step, epoch)
        optimizer.zero_grad()
        loss.backward()
        authors.clip_gradients(student.layers, CLIP)
        authors.cancel_gradients_last_layer(epoch, student.layers, 1)
        optimizer.step()
        with torch.no_grad():
            own = dict(student.layers.named_parameters())
            for key, parameter in teacher.layers.named_parameters():
                parameter.mul_(momenta[step]).add_((1 - momenta[step]) * own[key])
        recorded["losses"].append(loss.item())
        for key, center in losses.centers().items():
            centers.setdefault(key, []).append(center.copy())
    recorded |= {f"centers/{key}": np.stack(values) for key, values in centers.items()}
    for branch, layers in (("student", student.layers), ("teacher", teacher.layers)):
        for key, parameter in layers.named_parameters():
            # The teacher's images aren't masked.
            if (branch, key) == ("teacher", "mask_token"):
                continue
            recorded[f"{branch}/{key}"] = places(parameter.detach().numpy())
    np.savez_compressed(Path(__file__).with_name(f"dino_{name}.npz"), **recorded)


if __name__ == "__main__":
    # torchvision's operators don't load beside a CPU torch.
    for module in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{module}"] = types.ModuleType(module)
    sys.path[:0] = sys.argv[1:3]
    import torch.distributed

    torch.distributed.init_process_group("gloo", "tcp://127.0.0.1:29517", rank=0, world_size=1)
    for name, case in CASES.items():
        record(name, case)
