"""Transforms of a batch, on the device: normalise, erase, mix."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import paddle
from paddle.nn import functional as F

import ops
from loading.transforms.erase import RandomErasing, box_mask
from settings.needs import mixes
from settings.options import Configuration, pair
from settings.registry import losses

_MIXUP_TAG = 0x6D69787570  # keeps the seeds of these draws apart from the samples'


def gives_distributions(config: Configuration) -> bool:
    """Returns whether training targets are [B, K], distributions or a yes or no for each class, not
    labels [B].
    """
    taken = losses.components[config.TRAIN.LOSS].given.get("takes")
    return mixes(config) or config.TASK == "multilabel" or taken == "distributions"


def smooth_one_hot(labels: paddle.Tensor, num_classes: int, smoothing: float) -> paddle.Tensor:
    """Turns labels [B] into distributions [B, K] float32: 1 - smoothing on the label, plus
    smoothing / K everywhere.
    """
    return F.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


class Normalize:
    """Pixels [B, H, W, C] uint8 -> (pixels / 255 - mean) / std as [B, C, H, W] float32; float32:
    not / 255.

    Args:
        mean, std: one value per channel, or one for all, of pixels in 0..1, or in the unit of
            floats.
    """

    def __init__(self, mean: list[float], std: list[float]) -> None:
        scale = 1 / (255 * np.asarray(std))
        shift = -np.asarray(mean) / np.asarray(std)
        self.scale = paddle.to_tensor(scale, dtype="float32").reshape([1, -1, 1, 1])
        self.scale_of_floats = paddle.to_tensor(1 / np.asarray(std), dtype="float32").reshape(
            [1, -1, 1, 1]
        )
        self.shift = paddle.to_tensor(shift, dtype="float32").reshape([1, -1, 1, 1])
        levels = paddle.arange(256, dtype="float32") * self.scale + self.shift
        self.levels = levels.reshape([-1, 256])  # what each of a byte's values becomes, by channel

    def __call__(self, pixels: paddle.Tensor) -> paddle.Tensor:
        if pixels.dtype == paddle.uint8 and ops.usable(self.levels):
            return ops.look_up(pixels, self.levels)
        scale = self.scale if pixels.dtype == paddle.uint8 else self.scale_of_floats
        return pixels.transpose([0, 3, 1, 2]).astype("float32") * scale + self.shift


class BatchTransform:
    """Normalises, erases and mixes a training batch; all that is random came with it, drawn by the
    loader.
    """

    def __init__(self, config: Configuration) -> None:
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        self.erase = RandomErasing(config) if config.TRAIN.RANDOM_ERASE_PROB else None
        self.mixup = Mixup(config) if mixes(config) else None
        self.distributions = gives_distributions(config)
        self.several = config.TASK == "multilabel"
        self.num_classes = config.MODEL.NUM_CLASSES
        self.smoothing = config.TRAIN.SMOOTHING

    def __call__(
        self, batch: dict[str, paddle.Tensor], epoch: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns images [B, C, H, W] float32 and targets: labels [B], or distributions [B, K]
        float32 where ``gives_distributions(config)``.

        Args:
            batch: the loader's columns by their names: "pixels" [B, H, W, C], "labels" [B] int64,
                or of several classes an image [B, K] uint8; "erased", ``RandomErasing.draw`` of
                each sample, where RANDOM_ERASE_PROB isn't 0; "mixed", ``Mixup.draw``, where
                ``mixes(config)``.
            epoch: from 1.
        """
        images = self.normalize(batch["pixels"])
        targets = batch["labels"]
        if self.several:
            targets = targets.astype("float32") * (1 - self.smoothing) + self.smoothing / 2
        elif self.distributions:
            targets = smooth_one_hot(targets, self.num_classes, self.smoothing)
        if self.erase is not None:
            images = self.erase.at(images.shape[2:])(images, batch["erased"])
        if self.mixup is not None and self.mixup.on(epoch):
            images, targets = self.mixup.at(images.shape[2:])(images, targets, batch["mixed"])
        return images, targets


class Mixup:
    """Mixup (Zhang et al. 2017, arXiv:1710.09412) and CutMix (Yun et al. 2019, arXiv:1905.04899),
    with the options and distributions of timm's ``Mixup``.

    CutMix's share is corrected to the area of its box once that is clipped. There are two
    deliberate differences from timm. (a) Sample i is mixed with its neighbour i ^ 1, not with B - 1
    - i. (b) Every draw is made on the host for the whole global batch, from (SEED, epoch, step).
    Each rank takes its part of it. Thus the mixed samples are the same for every number of
    processes. In mode "batch" one draw serves the global batch, where timm's serves one process's.

    The loader draws, and the draws travel to the device with the pixels: a copy within the step
    would hold it up.
    """

    def __init__(self, config: Configuration) -> None:
        train = config.TRAIN
        self.seed, self.size = config.SEED, pair(config.DATA.IMAGE_SIZE)
        self.mode = train.MIXUP_MODE
        self.minmax = train.CUTMIX_MINMAX
        self.off_epoch = train.MIXUP_OFF_EPOCH
        self.mixup_alpha = train.MIXUP_ALPHA
        self.cutmix_alpha = 1.0 if self.minmax else train.CUTMIX_ALPHA
        self.prob = train.MIXUP_PROB
        both = self.mixup_alpha > 0 and self.cutmix_alpha > 0
        self.switch_prob = train.MIXUP_SWITCH_PROB if both else float(self.cutmix_alpha > 0)

    def at(self, size: int | Sequence[int] | None) -> "Mixup":
        """Returns the same for another size of images; None: IMAGE_SIZE."""
        if size is None or pair(size) == self.size:
            return self
        other = copy.copy(self)
        other.size = pair(size)
        return other

    def on(self, epoch: int) -> bool:
        """Returns whether images are mixed in an epoch (from 1): none is after MIXUP_OFF_EPOCH."""
        return not self.off_epoch or epoch <= self.off_epoch

    def draw(
        self,
        epoch: int,
        step: int,
        count: int,
        rank: int = 0,
        ranks: int = 1,
        sizes: Callable[[int, int], int | None] = lambda *_: None,
    ) -> np.ndarray:
        """Returns how to mix a batch: float32 [B, 7].

        A row begins with the number of the other sample. This sample's share of the target follows,
        then its share of the pixels outside of its box. Then comes the box (top, left, bottom,
        right) that it takes from the other, empty without CutMix. The last of an odd number of
        samples stays as it is.

        Args:
            epoch, step: from 1.
            count: B, the samples of this process.
            rank, ranks: of ``ranks`` equal parts of a global batch this process holds the rank-th.
            sizes: (epoch, step) -> the size of the images then; None: IMAGE_SIZE.
        """
        sample = np.arange(count)
        rows = np.zeros((count, 7), np.float32)
        rows[:, 0], rows[:, 1:3] = np.minimum(sample ^ 1, count - 1), 1
        if not self.on(epoch):
            return rows
        draws = 1 if self.mode == "batch" else count * ranks
        rng = np.random.default_rng([self.seed, epoch, step, _MIXUP_TAG])
        lam, boxes = self.at(sizes(epoch, step))._draw(rng, draws)
        if self.mode == "pair":
            sample -= sample % 2  # both take the draw of the first
        drawn = ((rank * count + sample) % draws)[: count - count % 2]
        lam = lam[drawn]
        boxes = boxes[drawn]
        rows[: len(drawn), 1], rows[: len(drawn), 3:] = lam, boxes
        rows[: len(drawn), 2] = np.where(areas(boxes) > 0, 1, lam)
        return rows

    def _draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws lam [count], and boxes [count, 4], which are empty unless CutMix is to be done."""
        mixed = rng.random(count) < self.prob
        cut = rng.random(count) < self.switch_prob
        alpha = np.where(cut, self.cutmix_alpha, self.mixup_alpha)
        lam = np.where(mixed, rng.beta(alpha, alpha), 1.0)
        if self.minmax:
            low, high = (
                np.array([int(side * share) for side in self.size]) for share in self.minmax
            )
            sides = rng.integers(low, np.maximum(high, low + 1), (count, 2))
            start = rng.integers(np.array(self.size) - sides + 1)
            boxes = np.concatenate([start, start + sides], 1)
        else:
            boxes = cutmix_boxes(lam, rng.integers(self.size, size=(count, 2)), self.size)
        boxes[~(mixed & cut)] = 0
        return np.where(mixed & cut, 1 - areas(boxes) / np.prod(self.size), lam), boxes

    def __call__(
        self, images: paddle.Tensor, targets: paddle.Tensor, drawn: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns mixed images [B, C, H, W] and targets [B, K].

        Args:
            images: [B, C, H, W] float32.
            targets: [B, K] float32: of several classes an image, too, each class has the mean by
                the shares.
            drawn: [B, 7] float32: ``draw`` of the batch.
        """
        other = drawn[:, 0].astype("int64")
        share = drawn[:, 1:2]
        targets = targets * share + paddle.gather(targets, other) * (1 - share)
        weight = drawn[:, 2].reshape([-1, 1, 1, 1])
        # else no box is ever drawn; to ask these draws would wait for the device
        if self.cutmix_alpha > 0:
            weight = (1 - box_mask(drawn[:, 3:], self.size).astype("float32")) * weight
        # on a CPU, products of unequal shapes take five times as long
        weight = weight.expand(images.shape)
        return images * weight + paddle.gather(images, other) * (1 - weight), targets


def cutmix_boxes(lam: np.ndarray, centres: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Returns CutMix's boxes [n, 4] (top, left, bottom, right): share 1 - lam of the image, clipped
    at its border.

    Args:
        lam: [n], the share that an image keeps.
        centres: [n, 2] integers, row and column.
        size: (height, width) of the image, in pixels.
    """
    sides = (np.array(size) * np.sqrt(1 - lam)[:, None]).astype(np.int64)
    return np.clip(
        np.concatenate([centres - sides // 2, centres + (sides + 1) // 2], 1), 0, [*size, *size]
    )


def areas(boxes: np.ndarray) -> np.ndarray:
    """Returns the areas [n] of boxes [n, 4] (top, left, bottom, right)."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
