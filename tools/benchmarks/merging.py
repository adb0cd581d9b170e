"""Measures ViT-S/16 with token merging against itself without, on this machine's CPU.

    python tools/benchmarks/merging.py

Evaluation and training of 8 images of 224 x 224 in float32, in turn, nine times each. It prints
images/s, and the median, least and largest ratio.
"""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import launch.startup  # noqa: E402, F401  (signals and streams)
from ops.device import tune_cpu  # noqa: E402

# Before Paddle's import, which reads the variables that this sets.
tune_cpu(1)

# isort: split
import numpy as np  # noqa: E402
import paddle  # noqa: E402

import ops  # noqa: E402
from models import create_model  # noqa: E402

MERGED = 13
IMAGES = 8
ROUNDS = 9


def seconds(merged: int, training: bool, images: paddle.Tensor) -> float:
    """Returns the time of a forward pass, or of a forward and a backward one."""
    model = MODELS[merged]
    if training:
        model.train()
    else:
        model.eval()
    start = time.perf_counter()
    if training:
        model(images).mean().backward()
        model.clear_gradients()
    else:
        with paddle.no_grad():
            model(images)
    return time.perf_counter() - start


ops.load()
MODELS = {
    merged: create_model("vit_small_patch16_224", merge_tokens=merged) for merged in (0, MERGED)
}


def main() -> None:
    images = paddle.randn([IMAGES, 3, 224, 224])
    for training in (False, True):
        times: dict[int, list[float]] = {merged: [] for merged in MODELS}
        for number in range(ROUNDS + 2):
            for merged, found in times.items():
                value = seconds(merged, training, images)
                # The first two warm up.
                if number > 1:
                    found.append(value)
        ratios = [plain / faster for plain, faster in zip(times[0], times[MERGED], strict=True)]
        rates = " and ".join(
            f"{IMAGES / np.median(times[merged]):.1f} images/s with {merged} merged"
            for merged in MODELS
        )
        what = "training" if training else "evaluation"
        print(
            f"{what}: {rates}; ratio {np.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
