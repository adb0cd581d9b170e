"""Measures what token merging costs in accuracy, on crops of photographs.

    python tools/benchmarks/merging_accuracy.py [-seeds 3] [-steps 700] [-crops 600]

The photographs are those that scikit-image, scikit-learn and Matplotlib install. Each is a class.
Crops of 32 x 32 pixels get one mean and contrast, and noise, so that the task isn't too easy.
Training crops come from the left 62 % of a photograph, and validation crops from its right 35 %.
A ViT with 64 patches and 6 blocks is trained from each seed twice: without merging, and with 8
patches merged in each block. Both are evaluated with 0 to 32 merged: half of the patches in each
block. It prints acc1: the mean over the seeds, and the lowest and highest.
"""

import argparse
import math
import sys
from importlib.util import find_spec
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
from paddle.nn import functional as F  # noqa: E402
from PIL import Image  # noqa: E402

import ops  # noqa: E402
from errors import InputError, reporting  # noqa: E402
from models.vit import VisionTransformer  # noqa: E402

FOLDERS = {
    "skimage": (
        "data",
        "astronaut.png brick.png camera.png cell.png chelsea.png clock_motion.png coffee.png"
        " coins.png grass.png gravel.png hubble_deep_field.jpg ihc.png moon.png motorcycle_left.png"
        " page.png retina.jpg rocket.jpg text.png",
    ),
    "sklearn": ("datasets/images", "china.jpg flower.jpg"),
    "matplotlib": ("mpl-data/sample_data", "grace_hopper.jpg"),
}
PARTS = {"train": (0.0, 0.62), "val": (0.65, 1.0)}
SIDE = 32
BATCH = 32
# Standard deviation of the noise, whose unit is that of a crop's pixels.
NOISE = 0.2
RATE = 2e-3
MERGED = 8
EVALUATED = (0, 4, 8, 12, 16, 32)


def photographs() -> list[Image.Image]:
    """Returns the photographs."""
    images = []
    for package, (folder, names) in FOLDERS.items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise InputError(f"{package} has the photographs and isn't installed; install it")
        for name in names.split():
            with Image.open(Path(spec.origin).parent / folder / name) as image:
                images.append(image.convert("RGB"))
    return images


def crops(part: str, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``count`` crops of each photograph's part and their classes, without noise:
    [N, 3, SIDE, SIDE] and [N].
    """
    left, right = PARTS[part]
    found = []
    images = photographs()
    for image in images:
        first = left * image.width
        width = (right - left) * image.width
        largest = min(image.height, (PARTS["val"][1] - PARTS["val"][0]) * image.width)
        for _ in range(count):
            side = rng.uniform(0.4, 0.8) * largest
            x = first + rng.uniform(0, width - side)
            y = rng.uniform(0, image.height - side)
            box = (x, y, x + side, y + side)
            crop = image.resize((SIDE, SIDE), Image.Resampling.LANCZOS, box)
            pixels = np.asarray(crop, np.float32)
            found.append((pixels - pixels.mean()) / (pixels.std() + 4))
    classes = np.arange(len(images)).repeat(count)
    return np.stack(found).transpose(0, 3, 1, 2), classes


def with_noise(images: np.ndarray, rng: np.random.Generator) -> paddle.Tensor:
    """Returns the images with noise."""
    noise = rng.normal(scale=NOISE, size=images.shape)
    return paddle.to_tensor((images + noise).astype(np.float32))


def train(
    merged: int, seed: int, steps: int, images: np.ndarray, classes: np.ndarray
) -> VisionTransformer:
    """Returns a model that was trained with ``merged`` patches merged in each block."""
    paddle.seed(seed)
    rng = np.random.default_rng([seed, 1])
    model = VisionTransformer(
        image_size=SIDE,
        patch_size=4,
        num_classes=int(classes.max()) + 1,
        embed_dim=96,
        depth=6,
        num_heads=3,
        merge_tokens=merged,
    )
    model.train()
    optimizer = paddle.optimizer.AdamW(RATE, parameters=model.parameters(), weight_decay=0.05)
    for step in range(steps):
        warm_up = min(1, (step + 1) / 50)
        optimizer.set_lr(RATE * warm_up * 0.5 * (1 + math.cos(math.pi * step / steps)))
        chosen = rng.integers(len(images), size=BATCH)
        batch = images[chosen]
        if rng.random() < 0.5:
            batch = batch[..., ::-1]
        labels = paddle.to_tensor(classes[chosen])
        loss = F.cross_entropy(model(with_noise(batch, rng)), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad(False)
    model.eval()
    return model


@paddle.no_grad()
def accuracy(
    model: VisionTransformer, merged: int, images: np.ndarray, classes: np.ndarray
) -> float:
    """Returns the acc1 with ``merged`` patches merged in each block."""
    model.merge_tokens = merged
    noisy = with_noise(images, np.random.default_rng(0))
    correct = 0
    for start in range(0, len(images), BATCH):
        outputs = model(noisy[start : start + BATCH]).argmax(1).numpy()
        correct += int((outputs == classes[start : start + BATCH]).sum())
    return 100 * correct / len(images)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-seeds", type=int, default=3)
    parser.add_argument("-steps", type=int, default=700)
    parser.add_argument(
        "-crops", type=int, default=600, help="of each photograph; a sixth for the evaluation"
    )
    arguments = parser.parse_args()
    ops.load()
    train_crops = crops("train", arguments.crops, np.random.default_rng(1))
    val_crops = crops("val", -(-arguments.crops // 6), np.random.default_rng(2))
    print(
        f"{len(train_crops[0])} and {len(val_crops[0])} crops of {val_crops[1].max() + 1} classes"
    )
    for trained in (0, MERGED):
        rows = []
        for seed in range(arguments.seeds):
            model = train(trained, seed, arguments.steps, *train_crops)
            rows.append([accuracy(model, merged, *val_crops) for merged in EVALUATED])
            print(
                f"trained with {trained}, seed {seed}: {np.round(rows[-1], 2).tolist()}", flush=True
            )
        for merged, found in zip(EVALUATED, np.transpose(rows), strict=True):
            print(
                f"trained with {trained}, {merged} merged:"
                f" {found.mean():.2f} ({found.min():.2f}, {found.max():.2f})"
            )


if __name__ == "__main__":
    with reporting():
        main()
