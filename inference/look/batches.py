"""What a model is fed in training and in evaluation, as pictures: the very pixels, with their labels."""

from collections.abc import Sequence

import numpy as np
import paddle

from datasets import ImageDataset, get_dataloader
from inference.look.draw import Panel, enlarged, shortened
from loading.transforms import BatchTransform, Normalize
from options import Configuration

_LEAST = 0.005  # a share of a label that is told


def training_panels(config: Configuration, dataset: ImageDataset, epoch: int, count: int) -> list[Panel]:
    """Returns the first images of the first batch of an epoch (from 1), of one process, as the loss gets them: cropped,
    augmented, erased, mixed; and their labels with the shares that mixing leaves them.
    """
    loader = get_dataloader(config, dataset, "train")
    loader.batch_sampler.set_epoch(epoch)
    images, targets = BatchTransform(config)(_first(loader), epoch)
    smoothing = config.TRAIN.SMOOTHING if targets.ndim == 2 else 0.0
    shares = _shares(targets[:count].numpy(), config.MODEL.NUM_CLASSES, smoothing)
    pixels = unnormalized(config, images[:count])
    return [Panel(label(row, dataset.classes), enlarged(own)) for own, row in zip(pixels, shares, strict=True)]


def evaluation_panels(config: Configuration, dataset: ImageDataset, count: int) -> list[Panel]:
    """Returns images of an evaluation's first batches, spread over the classes, as the model gets them."""
    normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
    batch = _first(get_dataloader(config, dataset, "val"))
    pixels = unnormalized(config, normalize(batch["pixels"][:count]))
    shares = _shares(batch["labels"][:count].numpy(), config.MODEL.NUM_CLASSES, 0.0)
    return [Panel(label(row, dataset.classes), enlarged(own)) for own, row in zip(pixels, shares, strict=True)]


def _first(loader) -> dict[str, paddle.Tensor]:
    batches = iter(loader)
    batch = next(batches)
    loader.close()
    return batch


def unnormalized(config: Configuration, images: paddle.Tensor) -> np.ndarray:
    """Returns what ``Normalize`` made these images of: [n, C, S, S] float32 -> [n, S, S, C] uint8; what erasing put in,
    or mixing made, is rounded, and cut to 0..255.
    """
    mean, std = (np.asarray(values, np.float64) for values in (config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD))
    found = images.astype("float32").numpy().transpose(0, 2, 3, 1) * std + mean
    return (255 * found).round().clip(0, 255).astype(np.uint8)


def _shares(targets: np.ndarray, classes: int, smoothing: float) -> np.ndarray:
    """Labels [n] or distributions [n, K] -> shares [n, K], without what label smoothing added."""
    if targets.ndim == 1:
        return np.eye(classes)[targets]
    return (targets - smoothing / classes) / (1 - smoothing)


def label(shares: np.ndarray, classes: Sequence[str]) -> str:
    """Returns the classes that have a share, the largest first: "cat 0.70 + dog 0.30"; of one class its name alone."""
    found = [place for place in np.argsort(-shares, kind="stable").tolist() if shares[place] > _LEAST]
    names = [shortened(classes[place] if classes else str(place), 18) for place in found]
    if len(found) == 1:
        return names[0]
    return " +\n".join(f"{name} {shares[place]:.2f}" for name, place in zip(names, found, strict=True))
