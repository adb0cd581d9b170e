"""The side of transformers of ``segmentation`` of tools/benchmark.py, in a process of its own: it
needs torch and transformers, and no Paddle.

The argument is a request as one word of JSON (``tools.benchmarks.segmentation``). ``measure`` is
"train" or "eval". The answer is one line: ``images_per_s`` of each report, and ``peak_memory`` of
this process in MB.
"""

import importlib
import json
import resource
import sys
import time
import types
from typing import Any

import torch  # pyright: ignore[reportMissingImports]: another interpreter runs this

# As in timm_reference.py: torchvision's compiled operators aren't there.
for stub in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
    sys.modules[stub] = types.ModuleType(stub)


def build(request: dict[str, Any]) -> torch.nn.Module:
    """Returns the model with fresh weights."""
    transformers: Any = importlib.import_module("transformers")
    if request["model"] == "segformer_b0_ade20k":
        config = transformers.SegformerConfig(
            num_labels=request["classes"],
            semantic_loss_ignore_index=255,
            drop_path_rate=request["droppath"],
        )
        return transformers.SegformerForSemanticSegmentation(config)
    backbone = transformers.SwinConfig(
        image_size=request["image"][1],
        embed_dim=96,
        depths=[2, 2, 6, 2],
        num_heads=[3, 6, 12, 24],
        window_size=7,
        drop_path_rate=request["droppath"],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.UperNetConfig(
        backbone_config=backbone,
        num_labels=request["classes"],
        auxiliary_in_channels=384,
    )
    return transformers.UperNetForSemanticSegmentation(config)


def measured(request: dict[str, Any]) -> list[float]:
    """Returns [images/s] of each report of ``steps`` steps. A report before them isn't timed."""
    model = build(request)
    mean, std = (255 * torch.tensor(request[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    size = request["image"][1:]
    shape = (request["batch_size"], *request["image"])
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8)
    mask = torch.randint(0, request["classes"], (request["batch_size"], *size))
    optimizer = torch.optim.AdamW(model.parameters(), 6e-5, weight_decay=request["weight_decay"])

    def train() -> None:
        images = pixels.float().sub_(mean).div_(std)
        model(pixel_values=images, labels=mask).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate() -> None:
        images = pixels.float().sub_(mean).div_(std)
        logits = model(pixel_values=images).logits
        logits = torch.nn.functional.interpolate(
            logits, size=size, mode="bilinear", align_corners=False
        )
        logits.argmax(1)

    step = train if request["measure"] == "train" else evaluate
    model.train(request["measure"] == "train")
    rates = []
    for _ in range(1 + request["reports"]):
        started = time.perf_counter()
        for _ in range(request["steps"]):
            step()
        elapsed = time.perf_counter() - started
        rates.append(request["steps"] * request["batch_size"] / elapsed)
    return rates[1:]


def main() -> None:
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    rates = measured(request)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"images_per_s": rates, "peak_memory": peak}))


if __name__ == "__main__":
    main()
