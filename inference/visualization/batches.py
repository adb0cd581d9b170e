"""What a model is fed in training and in evaluation, as pictures: the very pixels, with their
labels.
"""

from collections.abc import Sequence

import numpy as np
import paddle

from config import with_values
from datasets import ImageDataset, get_dataloader
from inference.visualization.draw import Panel, enlarge
from loading.transforms import BatchTransform, Normalize
from settings.key_needs import float_pixels
from settings.options import Configuration
from training.pages.figures import shorten

_LEAST = 0.005  # a smaller share of a label isn't shown


def training_panels(
    config: Configuration, dataset: ImageDataset, epoch: int, count: int
) -> list[Panel]:
    """Returns the first images of the first batch of an epoch (from 1), of one process, as the loss
    gets them. They are cropped, augmented, erased and mixed. Also returns their labels with the
    shares that mixing leaves them.

    If the dataset has fewer images than a batch, the batch consists of all of them.
    """
    config = with_values(config, DATA__DROP_LAST=False)
    loader = get_dataloader(config, dataset, "train")
    loader.batch_sampler.set_epoch(epoch)
    batch = next(iter(loader))
    loader.close()
    images, targets = BatchTransform(config)(batch, epoch)
    targets = targets[:count].numpy()
    classes = config.MODEL.NUM_CLASSES
    smoothing = config.TRAIN.SMOOTHING
    least = smoothing / (2 if config.TASK == "multilabel" else classes)
    shares = (
        _one_hot(targets, classes) if targets.ndim == 1 else (targets - least) / (1 - smoothing)
    )
    return _panels(config, images[:count], shares, dataset.classes)


def evaluation_panels(config: Configuration, dataset: ImageDataset, count: int) -> list[Panel]:
    """Returns evaluation images, evenly spread over the dataset, as the model gets them."""
    loader = get_dataloader(config, dataset, "val")
    loader.batch_sampler.indices = (
        np.linspace(0, len(dataset) - 1, min(count, len(dataset))).astype(int).tolist()
    )
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    panels = []
    for batch in loader:
        labels = batch["labels"].numpy()
        shares = (
            _one_hot(labels, config.MODEL.NUM_CLASSES)
            if labels.ndim == 1
            else labels.astype(np.float32)
        )
        panels += _panels(config, normalize(batch["pixels"]), shares, dataset.classes)
    loader.close()
    return panels


def _one_hot(labels: np.ndarray, classes: int) -> np.ndarray:
    return (labels[:, None] == np.arange(classes)).astype(np.float32)


def _panels(
    config: Configuration, images: paddle.Tensor, shares: np.ndarray, classes: Sequence[str]
) -> list[Panel]:
    pixels = unnormalize(config, images)
    return [
        Panel(label(row, classes), enlarge(own)) for own, row in zip(pixels, shares, strict=True)
    ]


def unnormalize(config: Configuration, images: paddle.Tensor) -> np.ndarray:
    """Returns what ``Normalize`` made these images of: [n, C, H, W] float32 -> [n, H, W, C] uint8.
    What erasing or mixing made is rounded and cut to 0..255. Floats stay floats.
    """
    mean, std = (
        np.asarray(values, np.float64)
        for values in (config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    )
    found = images.astype("float32").numpy().transpose(0, 2, 3, 1) * std + mean
    if float_pixels(config.DATA):
        return found
    return (255 * found).round().clip(0, 255).astype(np.uint8)


def label(shares: np.ndarray, classes: Sequence[str]) -> str:
    """Returns the classes that have a share, the largest first: "cat 0.70 + dog 0.30"; names alone,
    where each share is
    1. Mixed with an image of no class, one of one class has a part of it.
    """
    found = [
        place for place in np.argsort(-shares, kind="stable").tolist() if shares[place] > _LEAST
    ]
    names = [shorten(str(classes[place] if classes else place), 18) for place in found]
    if (shares[found] > 1 - _LEAST).all():
        return " +\n".join(names)
    return " +\n".join(
        f"{name} {shares[place]:.2f}" for name, place in zip(names, found, strict=True)
    )
