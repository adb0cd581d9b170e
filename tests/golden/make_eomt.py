"""Writes eomt.npz and eomt.json beside this file: answers, losses and gradients of a small
EomtForUniversalSegmentation in float64 (transformers 5.24.0, torch 2.13.0).

eomt.json has the names and shapes of its tensors, and its configuration. Random points are replaced
by those of ``points``. The loss is that of each image, in a batch of its own.

PYTHONPATH=.:tests python tests/golden/make_eomt.py
"""

import json
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
from transformers import EomtConfig, EomtForUniversalSegmentation  # noqa: E402

from golden.formula import array  # noqa: E402

CLASSES = 5
SIDE = 48
CONFIG = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 8,
    "num_upscale_blocks": 1,
    "num_blocks": 2,
    "num_queries": 6,
    "num_register_tokens": 2,
    "train_num_points": 64,
}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a tensor's values: normal numbers, of a size at which rounding isn't amplified."""
    if name == "attn_mask_probs":
        return np.ones(shape, np.float32)
    if name == "criterion.empty_weight":
        return np.float32([1.0] * (shape[0] - 1) + [0.1])
    normal = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        normal = 0.2 * normal + ("norm" in name and "weight" in name) + ("lambda" in name) * 0.5
    elif "token" in name or "position" in name or name == "query.weight":
        normal = normal * 0.5
    else:
        normal = normal * 1.5 * np.prod(shape[1:]) ** -0.5
    return normal.astype(np.float32)


def points(*shape: int) -> np.ndarray:
    """Returns numbers from 0 to 1 in place of random ones: a function of the shape alone."""
    [shape] = shape if len(shape) == 1 else [shape]
    index = np.arange(1, np.prod(shape) + 1, dtype=np.float64)
    return (index * 0.7548776662466927 % 1).reshape(tuple(shape)).astype(np.float32)


def masks() -> np.ndarray:
    """Returns two masks [2, SIDE, SIDE]: three classes in the first, two in the second."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    first = np.where(rows < 20, 0, np.where(columns < 30, 3, 4))
    second = np.where((rows - 24) ** 2 + (columns - 20) ** 2 < 200, 1, 3)
    return np.stack([first, second]).astype(np.uint8)


def main() -> None:
    # torch's fused attention misreads a mask of float32 beside tensors of float64.
    model = EomtForUniversalSegmentation._from_config(
        EomtConfig(**CONFIG, num_labels=CLASSES), attn_implementation="eager"
    )
    state = model.state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    model.load_state_dict(
        {name: torch.from_numpy(values(name, tuple(shape))) for name, shape in shapes.items()}
    )
    model.double()
    images = torch.from_numpy(array("images", (2, 3, SIDE, SIDE)) * 5).double()
    arrays = {}
    answers = []
    predict = model.predict
    model.predict = lambda tokens: answers.append(predict(tokens)) or answers[-1]

    for mode in ("masked", "plain"):
        answers.clear()
        model.eval()
        model.attn_mask_probs.fill_(float(mode == "masked"))
        with torch.no_grad():
            output = model(images)
        for layer, (mask_logits, class_logits) in enumerate(answers):
            arrays[f"{mode}/masks/{layer}"] = mask_logits.numpy()
            arrays[f"{mode}/classes/{layer}"] = class_logits.numpy()
        resized = F.interpolate(output.masks_queries_logits, (SIDE, SIDE), mode="bilinear")
        classes = output.class_queries_logits.softmax(-1)[..., :-1]
        scores = torch.einsum("bqc,bqhw->bchw", classes, resized.sigmoid())
        arrays[f"{mode}/scores"] = scores.numpy()[:, :, ::3, ::3]

    model.train()
    model.attn_mask_probs.fill_(1.0)
    torch.rand = lambda *shape, **kwargs: torch.from_numpy(points(*shape)).double()
    losses = []
    for image, mask in zip(images.split(1), masks(), strict=True):
        labels = np.unique(mask)
        output = model(
            image,
            mask_labels=[torch.from_numpy((mask == labels[:, None, None]).astype(np.float64))],
            class_labels=[torch.from_numpy(labels).long()],
        )
        output.loss.backward()
        losses.append(output.loss.item())
    for name, parameter in model.named_parameters():
        arrays[f"grad/{name}"] = parameter.grad.numpy()

    arrays = {name: values.astype(np.float32) for name, values in arrays.items()}
    arrays["losses"] = np.array(losses)
    folder = Path(__file__).parent
    np.savez_compressed(folder / "eomt.npz", **arrays)
    config = {**model.config.to_dict(), "architectures": ["EomtForUniversalSegmentation"]}
    text = json.dumps({"config": config, "shapes": shapes})
    (folder / "eomt.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
