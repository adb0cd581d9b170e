"""Panels of the images that a model gets in training and in evaluation, with their labels."""

import numpy as np
import paddle

from config import with_values
from datasets import ImageDataset, get_dataloader
from loading.transforms import Normalize
from settings.configuration import Configuration
from settings.tasks import answers_of
from training.batch_panels import (
    batch_panels,
    image_panels,
    labels,
    mask_panels,
    one_hot,
    view_rows,
)
from training.pages.panels import Panel


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
    return batch_panels(config, batch, epoch, count, dataset.classes)


def view_panels(
    config: Configuration, dataset: ImageDataset, epoch: int, count: int
) -> list[list[Panel]]:
    """Returns the views of the first images of an epoch's first batch, those of an image in a list.

    Their titles are their column and their number in it.

    Args:
        dataset: has ``views``.
        epoch, count: as of ``training_panels``.
    """
    return view_rows(_first_batch(config, dataset, epoch), list(dataset.views), count)


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
            panels += mask_panels(config, batch, 1)
            continue
        titles = ()
        if "labels" in batch:
            shares = batch["labels"].numpy()
            if shares.ndim == 1:
                shares = one_hot(shares, config.MODEL.NUM_CLASSES)
            titles = labels(shares.astype(np.float32), dataset.classes)
        panels += image_panels(config, normalize(batch["pixels"]), titles)
    loader.close()
    return panels
