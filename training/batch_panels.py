"""The images of a training batch as panels: augmented, erased and mixed, with their labels."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import paddle
from PIL import Image

from loading.transforms import BatchTransform, Normalize, visible
from loading.transforms.naflex import packing
from settings.configuration import Configuration
from settings.needs import float_pixels
from settings.tasks import answers_of, view_columns
from training.pages.names import shorten
from training.pages.panels import Panel, enlarge, overlay
from utils import writing_whole

# The picture of a run's folder that shows them, and its title.
FILE = "training_batch.png"
TITLE = "Training images, augmented"
# Its images. The number is even, because the images of a batch are mixed in pairs.
SHOWN = 8
# Of a task with several views of an image, the images whose views are shown.
_SHOWN_IN_VIEWS = 2
# A class with a smaller share of an image isn't shown.
_LEAST = 0.005


def first_images(batch: Mapping[str, paddle.Tensor]) -> dict[str, paddle.Tensor]:
    """Returns copies of the columns of a batch's first images. No value is copied to the host."""
    return {name: column[:SHOWN].clone() for name, column in batch.items()}


def batch_rows(
    config: Configuration, batch: Mapping[str, paddle.Tensor], epoch: int, classes: Sequence[str]
) -> list[list[Panel]]:
    """Returns the panels of a batch, in rows: those of the views of an image are in a row.

    Args:
        batch: the loader's columns, or the ``first_images`` of them.
        epoch: the epoch, from 1.
        classes: the names of the classes; empty: they have none.
    """
    if views := view_columns(config.TASK):
        return view_rows(batch, views, _SHOWN_IN_VIEWS)
    return [batch_panels(config, batch, epoch, SHOWN, classes)]


def draw_batch(file: Path, rows: Sequence[Sequence[Panel]]) -> None:
    """Draws the panels of a batch.

    Raises:
        OSError: the file can't be written.
    """
    # Matplotlib's import takes a third of a second, and the process that trains doesn't need it.
    from training.pages.sheets import sheet

    with writing_whole(file, "wb") as picture:
        picture.write(sheet(rows, "", columns=4))


def batch_panels(
    config: Configuration,
    batch: Mapping[str, paddle.Tensor],
    epoch: int,
    count: int,
    classes: Sequence[str],
) -> list[Panel]:
    """Returns the first images of a batch, as a process trains on them.

    They are cropped, augmented, erased and mixed. Their titles are the labels with the shares that
    mixing leaves them. A task that reads no labels gets the images without titles, and what it does
    with them itself isn't shown.

    Args:
        batch: the loader's columns by name.
        epoch, classes: as of ``batch_rows``.
        count: the number of images.
    """
    if answers_of(config.TASK) == "pixels":
        return mask_panels(config, batch, count)
    if "labels" not in batch:
        normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        return image_panels(config, normalize(batch["pixels"][:count]))
    images, targets = BatchTransform(config)(dict(batch), epoch)
    targets = targets[:count].numpy()
    outputs = config.MODEL.NUM_CLASSES
    if targets.ndim == 1:
        shares = one_hot(targets, outputs)
    else:
        # Label smoothing is undone.
        smoothing = config.TRAIN.SMOOTHING
        least = smoothing / (2 if answers_of(config.TASK) == "sigmoid" else outputs)
        shares = (targets - least) / (1 - smoothing)
    titles = labels(shares, classes)
    if "grid" not in batch:
        return image_panels(config, images[:count], titles)
    pixels = unnormalize(config, images[:count])
    grids = batch["grid"][:count].numpy()
    return [
        Panel(title, enlarge(packing(config).unpack(patches, grid)))
        for title, patches, grid in zip(titles, pixels, grids, strict=True)
    ]


def view_rows(
    batch: Mapping[str, paddle.Tensor], views: Sequence[str], count: int
) -> list[list[Panel]]:
    """Returns the views of a batch's first images, those of an image in a list.

    Their titles are their column and their number in it.

    Args:
        batch: the loader's columns by name.
        views: the names of the columns that hold views.
        count: the number of images.
    """
    return [
        [
            Panel(f"{name} {number}", enlarge(pixels))
            for name in views
            if name in batch
            for number, pixels in enumerate(batch[name][image].numpy(), 1)
        ]
        for image in range(min(count, len(batch["pixels"])))
    ]


def mask_panels(
    config: Configuration, batch: Mapping[str, paddle.Tensor], count: int
) -> list[Panel]:
    """Returns the first images of a batch under the colours of their masks."""
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    pixels = unnormalize(config, normalize(batch["pixels"][:count]))
    panels = []
    for image, mask in zip(pixels, batch["mask"][:count].numpy(), strict=True):
        shown = image if image.dtype == np.uint8 and image.shape[2] in (1, 3) else visible(image)
        picture = Image.fromarray(shown if shown.shape[2] == 3 else shown[:, :, 0])
        # An evaluation resizes images, and not their masks.
        picture = picture.resize(mask.shape[::-1])
        panels.append(Panel("", enlarge(np.asarray(overlay(picture, mask)))))
    return panels


def one_hot(numbers: np.ndarray, classes: int) -> np.ndarray:
    """Returns labels [n] as shares of classes [n, classes], float32."""
    return (numbers[:, None] == np.arange(classes)).astype(np.float32)


def labels(shares: np.ndarray, classes: Sequence[str]) -> list[str]:
    """Returns the ``label`` of each row of shares [n, classes]."""
    return [label(row, classes) for row in shares]


def image_panels(
    config: Configuration, images: paddle.Tensor, titles: Sequence[str] = ()
) -> list[Panel]:
    """Returns panels of normalised images [n, C, H, W]."""
    pixels = unnormalize(config, images)
    titles = titles or [""] * len(pixels)
    return [Panel(title, enlarge(image)) for title, image in zip(titles, pixels, strict=True)]


def unnormalize(config: Configuration, images: paddle.Tensor) -> np.ndarray:
    """Inverts ``Normalize``: [n, C, H, W] float32 -> [n, H, W, C] uint8, or floats of float images.

    Values that erasing or mixing made are rounded and clipped to 0..255.
    """
    mean = np.asarray(config.DATA.IMAGENET_MEAN, np.float64)
    std = np.asarray(config.DATA.IMAGENET_STD, np.float64)
    pixels = images.astype("float32").numpy().transpose(0, 2, 3, 1) * std + mean
    if float_pixels(config.DATA):
        return pixels
    return (255 * pixels).round().clip(0, 255).astype(np.uint8)


def label(shares: np.ndarray, classes: Sequence[str]) -> str:
    """Returns the classes of an image, the one with the largest share first: "cat 0.70 + dog 0.30".

    The shares are left out if each is 1. A single class has a share, too, if its image was mixed
    with one that has no class.
    """
    order = np.argsort(-shares, kind="stable").tolist()
    shown = [number for number in order if shares[number] > _LEAST]
    names = [shorten(str(classes[number] if classes else number), 18) for number in shown]
    if (shares[shown] > 1 - _LEAST).all():
        return " +\n".join(names)
    return " +\n".join(
        f"{name} {shares[number]:.2f}" for name, number in zip(names, shown, strict=True)
    )
