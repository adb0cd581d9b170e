"""A small model of masks with random weights, and the options of its evaluation."""

import numpy as np
import paddle
from safetensors.numpy import save_file

from config import get_config
from datasets import get_datasets
from models import build_model
from support import mask_files
from training.checkpoint import describe
from weights import file_arrays
from weights.formats import METADATA

CLASSES = [*mask_files.CLASSES, "nobody"]
# A model of 8 x 8 pixels a patch, for images of any size.
OPTIONS = [
    "TASK", "segmentation", "HEAD.NAME", "linear", "MODEL.NAME", "small", "MODEL.TYPE", "ViT",
    "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "2", "MODEL.NUM_HEADS", "2",
    "MODEL.NUM_CLASSES", "auto", "DATA.DATASET", "masks", "DATA.IMAGE_SIZE", "32",
    "DATA.CROP_MODE", "short", "DATA.NUM_WORKERS", "0",
]  # fmt: skip


def write_data(root):
    """Writes images with masks (``mask_files``), and names a class that none of them has."""
    mask_files.write_masks(root, val=7)
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return root


def evaluation(root, *options):
    """Returns the configuration of an evaluation of the data in ``root``, and its dataset."""
    config = get_config(
        None, [*OPTIONS, "DATA.DATA_PATH", str(root), "EVAL", "True", *map(str, options)]
    )
    config, _, val = get_datasets(config)
    return config, val


def random_model(config, seed=11):
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


def save_model(root, file, *options):
    """Saves a model for the data in ``root``, with random weights and its description; returns the
    file.
    """
    config, val = evaluation(root, *options)
    described = describe(config, val.classes, config.TASK).to_json()
    save_file(file_arrays(random_model(config)), file, {METADATA: described})
    return file
