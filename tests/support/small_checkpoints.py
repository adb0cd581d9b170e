"""Small models as checkpoint files, and photographs, for tests of pictures."""

import io

import numpy as np
import paddle
from PIL import Image
from sklearn.datasets import load_sample_images

from config import get_config
from models import build_model
from training.checkpoint import describe
from training.checkpoint.description import METADATA
from weights import file_arrays
from weights.formats import write_weights

SIZES = ["DATA.IMAGE_SIZE", "32", "DATA.CROP_PCT", "0.5", "MODEL.NUM_CLASSES", "2"]
MODELS = {
    "vit_small_patch16_224": ["MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "2",
                              "MODEL.NUM_HEADS", "2"],
    "swin_tiny_patch4_window7_224": [
        "MODEL.EMBED_DIM", "8", "MODEL.STAGE_DEPTHS", "[2, 1]", "MODEL.NUM_HEADS", "[1, 2]", "MODEL.WINDOW_SIZE", "4",
    ],
    "convnext_tiny": ["MODEL.EMBED_DIMS", "[4, 8, 8, 16]", "MODEL.STAGE_DEPTHS", "[1, 1, 1, 1]"],
}  # fmt: skip


def saved(folder, name, classes=("bridge", "flower, red"), options=(), task="classification"):
    """Writes the checkpoint file of a small untrained model; returns its path."""
    paddle.seed(0)
    small = SIZES + MODELS[name] if name in MODELS else []
    config = get_config(name, [*small, *options])
    file = folder / f"{name}.safetensors"
    metadata = {METADATA: describe(config, list(classes), task).to_json()}
    write_weights(file, file_arrays(build_model(config)), metadata)
    return file


def cut(folder):
    """Cuts four crops out of each of two photographs into a folder of each class."""
    for name, photograph in zip(
        ("bridge", "flower, red"), load_sample_images().images, strict=True
    ):
        (folder / name).mkdir()
        for place in range(4):
            Image.fromarray(photograph[40 * place : 40 * place + 200, :300]).save(
                folder / name / f"{place}.png"
            )
    return folder


def opened(data):
    """Returns the pixels [H, W, 3] of a PNG."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
