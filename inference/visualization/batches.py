"""Panels of the images that a model gets in training and in evaluation, with their labels."""

from collections.abc import Sequence

import numpy as np
import paddle
from PIL import Image

from config import with_values
from datasets import ImageDataset, get_dataloader
from inference.map_pictures import overlay
from inference.visualization.draw import Panel, enlarge
from loading.transforms import BatchTransform, Normalize, visible
from loading.transforms.naflex import packing
from settings.configuration import Configuration
from settings.needs import float_pixels
from settings.tasks import answers_of
from training.pages.plotting import shorten

# A class with a smaller share of an image isn't shown.
_LEAST = 0.005


def training_panels(
    config: Configuration, dataset: ImageDataset, epoch: int, count: int
) -> list[Panel]:
    """Returns the first images of an epoch's first batch, as a single process trains on them.

    They are cropped, augmented, erased and mixed. Their titles are the labels with the shares that
    mixing leaves them. A task that reads no labels gets the images without titles, and what it does
    with them itself isn't shown. If the dataset has fewer images than a batch, the batch has all of
    them.

    Args:
        epoch: the epoch, from 1.
        count: the number of images.
    """
    batch = _first_batch(config, dataset, epoch)
    if answers_of(config.TASK) == "pixels":
        return _mask_panels(config, batch, count)
    if "labels" not in batch:
        normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        return _panels(config, normalize(batch["pixels"][:count]))
    images, targets = BatchTransform(config)(batch, epoch)
    targets = targets[:count].numpy()
    classes = config.MODEL.NUM_CLASSES
    if targets.ndim == 1:
        shares = _one_hot(targets, classes)
    else:
        # Label smoothing is undone.
        smoothing = config.TRAIN.SMOOTHING
        least = smoothing / (2 if answers_of(config.TASK) == "sigmoid" else classes)
        shares = (targets - least) / (1 - smoothing)
    titles = _titles(shares, dataset.classes)
    if "grid" not in batch:
        return _panels(config, images[:count], titles)
    pixels = unnormalize(config, images[:count])
    grids = batch["grid"][:count].numpy()
    return [
        Panel(title, enlarge(packing(config).unpack(patches, grid)))
        for title, patches, grid in zip(titles, pixels, grids, strict=True)
    ]


def view_panels(
    config: Configuration, dataset: ImageDataset, epoch: int, count: int
) -> list[list[Panel]]:
    """Returns the views of the first images of an epoch's first batch, those of an image in a list.

    Their titles are their column and their number in it.

    Args:
        dataset: has ``views``.
        epoch, count: as of ``training_panels``.
    """
    batch = _first_batch(config, dataset, epoch)
    return [
        [
            Panel(f"{name} {number}", enlarge(pixels))
            for name in dataset.views
            for number, pixels in enumerate(batch[name][image].numpy(), 1)
        ]
        for image in range(min(count, len(batch["pixels"])))
    ]


def _first_batch(
    config: Configuration, dataset: ImageDataset, epoch: int
) -> dict[str, paddle.Tensor]:
    config = with_values(config, DATA__DROP_LAST=False)
    loader = get_dataloader(config, dataset, "train")
    loader.batch_sampler.set_epoch(epoch)
    batch = next(iter(loader))
    loader.close()
    return batch


def evaluation_panels(config: Configuration, dataset: ImageDataset, count: int) -> list[Panel]:
    """Returns ``count`` evaluation images, evenly spread over the dataset, as the model gets them."""
    loader = get_dataloader(config, dataset, "val")
    indices = np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int)
    loader.batch_sampler.indices = indices.tolist()
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    panels = []
    for batch in loader:
        if answers_of(config.TASK) == "pixels":
            panels += _mask_panels(config, batch, 1)
            continue
        titles = ()
        if "labels" in batch:
            labels = batch["labels"].numpy()
            if labels.ndim == 1:
                labels = _one_hot(labels, config.MODEL.NUM_CLASSES)
            titles = _titles(labels.astype(np.float32), dataset.classes)
        panels += _panels(config, normalize(batch["pixels"]), titles)
    loader.close()
    return panels


def _mask_panels(config: Configuration, batch: dict[str, paddle.Tensor], count: int) -> list[Panel]:
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


def _one_hot(labels: np.ndarray, classes: int) -> np.ndarray:
    return (labels[:, None] == np.arange(classes)).astype(np.float32)


def _titles(shares: np.ndarray, classes: Sequence[str]) -> list[str]:
    return [label(row, classes) for row in shares]


def _panels(
    config: Configuration, images: paddle.Tensor, titles: Sequence[str] = ()
) -> list[Panel]:
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
    labels = [label for label in order if shares[label] > _LEAST]
    names = [shorten(str(classes[label] if classes else label), 18) for label in labels]
    if (shares[labels] > 1 - _LEAST).all():
        return " +\n".join(names)
    return " +\n".join(
        f"{name} {shares[label]:.2f}" for name, label in zip(names, labels, strict=True)
    )
