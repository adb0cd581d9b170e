"""A small dataset of images with masks, and the options of a small model for it."""

import numpy as np
import paddle
from PIL import Image

from config import get_config
from datasets import get_datasets
from models import build_model

CLASSES = ["wall", "sky", "tree", "nobody"]
# A model of 8 x 8 pixels a patch, for images of any size.
OPTIONS = [
    "TASK", "segmentation", "HEAD.NAME", "linear", "MODEL.NAME", "small", "MODEL.TYPE", "ViT",
    "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "2", "MODEL.NUM_HEADS", "2",
    "MODEL.NUM_CLASSES", "auto", "DATA.DATASET", "masks", "DATA.IMAGE_SIZE", "32",
    "DATA.CROP_MODE", "short", "DATA.NUM_WORKERS", "0",
]  # fmt: skip
TRAINING = [
    *OPTIONS, "DATA.BATCH_SIZE", "4", "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.NUM_EPOCHS", "1",
]  # fmt: skip


def write_masks(root, train=8, val=7, seed=0):
    """Writes noisy pictures of two shapes on a wall, of odd sizes, in the layout of DATASET masks.

    A tenth of each mask's pixels is ignored, and no mask has the last class.
    """
    rng = np.random.default_rng(seed)
    for mode, count in (("train", train), ("val", val)):
        for folder in ("images", "masks"):
            (root / folder / mode).mkdir(parents=True)
        for index in range(count):
            height, width = map(int, rng.integers(9, 60, 2))
            mask = np.zeros((height, width), np.uint8)
            for shape in (1, 2):
                top, left = rng.integers(0, [height, width])
                mask[top : top + height // 2, left : left + width // 2] = shape
            pixels = rng.integers(0, 30, (height, width, 3)) + 100 * mask[:, :, None]
            mask[rng.random(mask.shape) < 0.1] = 255
            for folder, values in (("images", pixels), ("masks", mask)):
                file = root / folder / mode / f"{index}.png"
                Image.fromarray(values.astype(np.uint8)).save(file)
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


def evaluation(root, *options):
    """Returns the configuration of an evaluation of the data in ``root``, and its dataset."""
    config = get_config(
        None, [*OPTIONS, "DATA.DATA_PATH", str(root), "EVAL", "True", *map(str, options)]
    )
    config, _, val = get_datasets(config)
    return config, val


def random_model(config, seed=3):
    """Returns the model of a configuration with random weights, whose answers depend on the image.

    The logits of each class have mean 0 and deviation 1 over images of patches of any brightness.
    """
    paddle.seed(seed)
    model = build_model(config)
    rng = np.random.default_rng(seed)
    for name, value in model.state_dict().items():
        values = rng.normal(0, 0.3, value.shape)
        if name.endswith("_variance"):
            values = 1 + values**2
        value.set_value(values.astype(np.float32))
    model.eval()
    bright = rng.normal(size=(8, 3, 4, 4)).repeat(8, 2).repeat(8, 3)
    with paddle.no_grad():
        logits = model(paddle.to_tensor((bright + rng.normal(size=bright.shape)).astype("float32")))
        classifier = model.decode_head.classifier
        deviation = logits.std([0, 2, 3]).astype("float32")
        classifier.bias.set_value((classifier.bias - logits.mean([0, 2, 3])) / deviation)
        classifier.weight.set_value(classifier.weight / deviation.reshape([-1, 1, 1, 1]))
    return model
