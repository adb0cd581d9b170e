"""Draws images beside their reconstructions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle
from PIL import Image

from datasets import ImageDataset
from settings.configuration import Configuration
from utils import writing_whole

# Images in a picture.
_SHOWN = 8
# Images whose sides are shorter are enlarged.
_SIDE = 96
_GAP = 4


def shown_columns(dataset: ImageDataset, *names: str) -> list[paddle.Tensor]:
    """Returns columns of up to eight samples, by the names of the columns.

    The samples are spread over the dataset, which may be sorted by classes.
    """
    count = min(_SHOWN, len(dataset))
    indices = np.linspace(0, len(dataset) - 1, count).astype(int).tolist()
    samples = [dataset.sample(index) for index in indices]
    return [paddle.to_tensor(np.stack([sample[name] for sample in samples])) for name in names]


def draw_reconstructions(config: Configuration, rows: Sequence[paddle.Tensor], path: Path) -> None:
    """Draws the images beside each other in each row, and writes the picture as a PNG.

    Images of one or three channels are drawn in their colours, of others only the first channel.

    Args:
        rows: the rows from the top, each of normalised images [B, C, H, W].
        path: a file that is replaced.
    """
    mean = np.reshape(config.DATA.IMAGENET_MEAN, [-1, 1, 1])
    std = np.reshape(config.DATA.IMAGENET_STD, [-1, 1, 1])
    images = np.stack([row.numpy() * std + mean for row in rows])
    if images.shape[2] not in (1, 3):
        images = images[:, :, :1]
    # Values of images that aren't bytes have a range of their own.
    low = min(0.0, images[0].min())
    high = max(1.0, images[0].max())
    levels = ((images.clip(low, high) - low) / (high - low) * 255).round().astype(np.uint8)

    # [rows, B, C, H, W] -> [rows, B, H, W, C], then all in one picture with gaps.
    levels = levels.transpose(0, 1, 3, 4, 2)
    scale = -(-_SIDE // max(levels.shape[2:4]))
    levels = levels.repeat(scale, axis=2).repeat(scale, axis=3)
    gaps = [(0, 0), (0, 0), (0, _GAP), (0, _GAP), (0, 0)]
    levels = np.pad(levels, gaps, constant_values=255)
    lines, count, height, width, channels = levels.shape
    picture = levels.swapaxes(1, 2).reshape(lines * height, count * width, channels)
    with writing_whole(path, "wb") as file:
        Image.fromarray(picture.squeeze(-1) if channels == 1 else picture).save(file, "PNG")
