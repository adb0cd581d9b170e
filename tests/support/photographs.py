"""Photographs in two classes and a small model of them, for tests of predictions and servers."""

import numpy as np
import paddle
from PIL import Image
from safetensors.numpy import save_file
from sklearn.datasets import load_sample_images

from config import get_config
from models import build_model
from training.checkpoint import describe
from training.checkpoint.description import METADATA

CLASSES = ("bridge", 'flower, "red"')
MODEL = [
    "MODEL.NUM_CLASSES", "2", "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "2",
    "MODEL.NUM_HEADS", "2", "DATA.IMAGE_SIZE", "32", "DATA.CROP_PCT", "0.8",
]  # fmt: skip


def write_photographs(root, count=9):
    """Writes crops of two photographs as train/ and val/<class>/<n>.jpg and .png."""
    for label, photograph in enumerate(load_sample_images().images):
        for place in range(count):
            for split in ("train", "val"):
                folder = root / split / CLASSES[label]
                folder.mkdir(parents=True, exist_ok=True)
                crop = Image.fromarray(photograph[20 * place :, 30 * place : 300 + 25 * place])
                crop.save(folder / f"{place}.{('jpg', 'png')[place % 2]}")
    return root


def write_weights(file, task="classification", classes=CLASSES, outputs=2, changes=None):
    """Writes the random weights of a small ViT with its description.

    Args:
        outputs: of the classifier, 0 for none.
        changes: arrays that replace others.
    """
    paddle.seed(2)
    config = get_config(None, [*MODEL, "MODEL.NUM_CLASSES", str(outputs)])
    rng = np.random.default_rng(3)
    arrays = {name: value.numpy() for name, value in build_model(config).state_dict().items()}
    arrays = {
        name: (value + rng.normal(0, 0.1, value.shape)).astype(np.float32)
        for name, value in arrays.items()
    }
    arrays = {
        name: np.ascontiguousarray(value.T) if _linear(name, value) else value
        for name, value in arrays.items()
    }
    save_file(
        arrays | (changes or {}), file, {METADATA: describe(config, list(classes), task).to_json()}
    )
    return file


def _linear(name, value):
    return value.ndim == 2 and name.endswith(".weight")
