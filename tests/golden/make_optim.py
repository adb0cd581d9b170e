"""Writes optim.npz and layer_scales.json beside this file (made with torch 2.13.0, timm 1.0.31).

PYTHONPATH=.:tests python tests/golden/make_optim.py
"""

import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

import golden.optim_problem as given
from golden.formula import array

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(f"torchvision.{name}")
import timm  # noqa: E402
from timm.optim import Lamb, Lion, param_groups_layer_decay  # noqa: E402
from timm.utils import dispatch_clip_grad  # noqa: E402

# torch's Muon rounds to bfloat16, which Paddle has no product for on a CPU: compare in float32.
torch.Tensor.bfloat16 = torch.Tensor.clone


def optimizers(case: str, groups: dict[str, dict]) -> list[torch.optim.Optimizer]:
    name, *nesterov = case.split()
    adam = {"betas": given.BETAS, "eps": given.EPS}
    sgd = {"momentum": given.MOMENTUM, "nesterov": bool(nesterov)}
    if name == "Muon":
        matrices = [group for name, group in groups.items() if len(given.SHAPES[name]) == 2]
        others = [group for name, group in groups.items() if len(given.SHAPES[name]) != 2]
        return [
            torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **sgd),
            torch.optim.AdamW(others, **adam),
        ]
    groups = list(groups.values())
    if name == "SGD":
        return [torch.optim.SGD(groups, **sgd)]
    if name == "LAMB":
        return [Lamb(groups, max_grad_norm=None, **adam)]  # clipping is a step of its own
    return (
        [Lion(groups, betas=given.BETAS)]
        if name == "Lion"
        else [getattr(torch.optim, name)(groups, **adam)]
    )


def set_gradients(parameters: dict[str, torch.Tensor], step: int) -> None:
    for name, gradient in given.gradients(step).items():
        parameters[name].grad = torch.from_numpy(gradient)


def given_parameters() -> dict[str, torch.nn.Parameter]:
    return {
        name: torch.nn.Parameter(torch.from_numpy(array(name, shape)))
        for name, shape in given.SHAPES.items()
    }


def trained(case: str, end: float, late: dict[str, int]) -> dict[str, np.ndarray]:
    """The parameters after STEPS steps, whose weight decay goes along a cosine to ``end``.

    A parameter in ``late`` has no gradient before that step.
    """
    parameters = given_parameters()
    groups = {
        name: {"params": [p], "decays": name in given.DECAYED, "scale": given.SCALES[name]}
        for name, p in parameters.items()
    }
    chosen = optimizers(case, groups)
    for step in range(given.STEPS):
        set_gradients(parameters, step)
        for name, first in late.items():
            if step < first:
                parameters[name].grad = None
        cosine = np.cos(np.pi * step / given.STEPS)
        decay = float(end + 0.5 * (given.WEIGHT_DECAY - end) * (1 + cosine))
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = given.rate(step) * group["scale"]
                group["weight_decay"] = decay * group["decays"]
            optimizer.step()
            for group in optimizer.param_groups:
                if all(p.grad is None for p in group["params"]):
                    # timm's LAMB counts steps without a gradient, too; torch's optimizers don't
                    group.pop("step", None)
    return {name: p.detach().numpy() for name, p in parameters.items()}


def clip_each(parameters: list[torch.Tensor], limit: float) -> None:
    """Scales each gradient to a norm of ``limit`` at most, as DINO's utils.py."""
    for p in parameters:
        factor = limit / (p.grad.norm() + 1e-6)
        if factor < 1:
            p.grad *= factor


def main() -> None:
    results = {}
    for case in given.CASES:
        kinds = {
            "": (given.WEIGHT_DECAY, {}),
            "decay ": (given.WEIGHT_DECAY_END, {}),
            "late ": (given.WEIGHT_DECAY, given.LATE),
        }
        for kind, arguments in kinds.items():
            arrays = trained(case, *arguments)
            results |= {f"{kind}{case}/{name}": value for name, value in arrays.items()}
    for mode, limit in given.CLIPS.items():
        parameters = given_parameters()
        set_gradients(parameters, 0)
        # as timm.models.model_parameters
        clipped = list(parameters.values())[: -2 if mode == "agc" else None]
        if mode == "parameter":
            clip_each(clipped, limit)
        else:
            dispatch_clip_grad(clipped, limit, mode)
        results |= {f"{mode}/{name}": p.grad.numpy() for name, p in parameters.items()}
    set_gradients(parameters, 0)
    results["norm"] = torch.nn.utils.get_total_norm([p.grad for p in parameters.values()]).numpy()
    results["loss_scales"] = np.array(loss_scales())
    np.savez(Path(__file__).with_name("optim.npz"), **results)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=0.75)
    scales = {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
    Path(__file__).with_name("layer_scales.json").write_text(
        json.dumps(scales, indent=0, sort_keys=True) + "\n"
    )


def loss_scales() -> list[float]:
    """The scale after each update of OVERFLOWS."""
    parameter = torch.nn.Parameter(torch.ones(1))
    scales = []
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    optimizer = torch.optim.SGD([parameter], 0.1)
    for overflow in given.OVERFLOWS:
        scaler.scale((parameter * (float("inf") if overflow else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


if __name__ == "__main__":
    main()
