"""Transforms of a batch, on the device: normalise, erase, mix."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import paddle
from paddle.nn import functional as F

import ops
from loading.transforms.erase import RandomErasing, box_mask
from settings.configuration import Configuration, pair
from settings.registry import losses
from settings.tasks import answers_of, mixes

# Part of the seeds, so that these draws differ from the samples'.
_MIXUP_TAG = 0x6D69787570


def gives_distributions(config: Configuration) -> bool:
    """Returns whether the targets of a training are [B, K], and not labels [B].

    Such targets are distributions, or for each class the share to which it is true.
    """
    takes = losses.components[config.TRAIN.LOSS].given.get("takes")
    several = answers_of(config.TASK) == "sigmoid"
    return mixes(config) or several or takes == "distributions"


def smooth_one_hot(labels: paddle.Tensor, num_classes: int, smoothing: float) -> paddle.Tensor:
    """Returns distributions [B, K] float32 for labels [B].

    They are 1 - smoothing for the label, plus smoothing / K for every class.
    """
    return F.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


class Normalize:
    """Normalises pixels [B, H, W, C], uint8 or float32, to [B, C, H, W] float32.

    The result is (pixels / 255 - mean) / std for uint8, and (pixels - mean) / std for float32.

    Args:
        mean, std: a value for each channel, or one for all. They are those of pixels in 0..1, or of
            the float32 values themselves.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        mean_values = np.asarray(mean)
        std_values = np.asarray(std)

        def by_channel(values: np.ndarray) -> paddle.Tensor:
            return paddle.to_tensor(values, dtype="float32").reshape([1, -1, 1, 1])

        self.scale = by_channel(1 / (255 * std_values))
        self.scale_of_floats = by_channel(1 / std_values)
        self.shift = by_channel(-mean_values / std_values)
        # For each channel, the result of each of a byte's 256 values.
        levels = paddle.arange(256, dtype="float32") * self.scale + self.shift
        self.levels = levels.reshape([-1, 256])

    def __call__(self, pixels: paddle.Tensor) -> paddle.Tensor:
        if pixels.dtype == paddle.uint8 and ops.usable(self.levels):
            return ops.look_up(pixels, self.levels)
        scale = self.scale if pixels.dtype == paddle.uint8 else self.scale_of_floats
        return pixels.transpose([0, 3, 1, 2]).astype("float32") * scale + self.shift


class BatchTransform:
    """Normalises, erases and mixes a training batch on the device.

    Its random numbers were drawn by the loader, and came with the batch.
    """

    def __init__(self, config: Configuration) -> None:
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        self.erase = RandomErasing(config) if config.TRAIN.RANDOM_ERASE_PROB else None
        self.mixup = Mixup(config) if mixes(config) else None
        self.distributions = gives_distributions(config)
        self.is_multilabel = answers_of(config.TASK) == "sigmoid"
        self.num_classes = config.MODEL.NUM_CLASSES
        self.smoothing = config.TRAIN.SMOOTHING

    def __call__(
        self, batch: dict[str, paddle.Tensor], epoch: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns the images and the targets of a batch.

        The images are [B, C, H, W] float32. The targets are labels [B], or [B, K] float32 if
        ``gives_distributions(config)``.

        Args:
            batch: the loader's columns by name:

                - "pixels": [B, H, W, C].
                - "labels": [B] int64, or [B, K] uint8 where an image has several labels.
                - "erased", unless RANDOM_ERASE_PROB is 0: what ``RandomErasing.draw`` returned for
                  each sample.
                - "mixed", where ``mixes(config)``: what ``Mixup.draw`` returned.
            epoch: from 1.
        """
        images = self.normalize(batch["pixels"])
        targets = batch["labels"]
        if self.is_multilabel:
            targets = targets.astype("float32") * (1 - self.smoothing) + self.smoothing / 2
        elif self.distributions:
            targets = smooth_one_hot(targets, self.num_classes, self.smoothing)
        if self.erase is not None:
            images = self.erase.at(images.shape[2:])(images, batch["erased"])
        if self.mixup is not None and self.mixup.on(epoch):
            images, targets = self.mixup.at(images.shape[2:])(images, targets, batch["mixed"])
        return images, targets


class Mixup:
    """Mixup and CutMix, with the options and distributions of timm's ``Mixup``.

    The methods are those of Zhang et al. 2017 (arXiv:1710.09412) and Yun et al. 2019
    (arXiv:1905.04899).

    The share of a CutMix is that of its box after this is clipped at the image's border. Two
    differences from timm are deliberate:

    - Sample i is mixed with its neighbour i ^ 1, not with B - 1 - i.
    - The random numbers of a whole global batch are drawn from (SEED, epoch, step), and each rank
      takes its share of them. So the mixed samples are the same for every number of processes. In
      mode "batch", one draw is for the global batch; timm's is for the batch of one process.

    The loader draws the numbers, which are copied to the device with the pixels. A copy within the
    training step would delay it.
    """

    def __init__(self, config: Configuration) -> None:
        train = config.TRAIN
        self.seed = config.SEED
        self.size = pair(config.DATA.IMAGE_SIZE)
        self.mode = train.MIXUP_MODE
        self.minmax = train.CUTMIX_MINMAX
        self.off_epoch = train.MIXUP_OFF_EPOCH
        self.mixup_alpha = train.MIXUP_ALPHA
        self.cutmix_alpha = 1.0 if self.minmax else train.CUTMIX_ALPHA
        self.prob = train.MIXUP_PROB
        both = self.mixup_alpha > 0 and self.cutmix_alpha > 0
        self.switch_prob = train.MIXUP_SWITCH_PROB if both else float(self.cutmix_alpha > 0)

    def at(self, size: int | Sequence[int] | None) -> "Mixup":
        """Returns this transform for another size of images; None is IMAGE_SIZE."""
        if size is None or pair(size) == self.size:
            return self
        other = copy.copy(self)
        other.size = pair(size)
        return other

    def on(self, epoch: int) -> bool:
        """Returns whether images are mixed in an epoch, which counts from 1.

        None are after MIXUP_OFF_EPOCH.
        """
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

        A row holds, for a sample:

        - the number of the other sample
        - this sample's share of the target
        - this sample's share of the pixels outside of the box
        - the box (top, left, bottom, right) that is taken from the other sample; empty unless
          CutMix was drawn

        The last one of an odd number of samples isn't mixed.

        Args:
            epoch, step: from 1.
            count: B, the samples of this process.
            rank, ranks: this process has the rank-th of ``ranks`` equal shares of a global batch.
            sizes: (epoch, step) -> the size of the images at that step; None is IMAGE_SIZE.
        """
        sample = np.arange(count)
        rows = np.zeros((count, 7), np.float32)
        rows[:, 0] = np.minimum(sample ^ 1, count - 1)
        rows[:, 1:3] = 1
        if not self.on(epoch):
            return rows
        draws = 1 if self.mode == "batch" else count * ranks
        rng = np.random.default_rng([self.seed, epoch, step, _MIXUP_TAG])
        lam, boxes = self.at(sizes(epoch, step))._draw(rng, draws)
        # Both samples of a pair use the draw of the first.
        if self.mode == "pair":
            sample -= sample % 2
        drawn = ((rank * count + sample) % draws)[: count - count % 2]
        lam = lam[drawn]
        boxes = boxes[drawn]
        mixed = rows[: len(drawn)]
        mixed[:, 1] = lam
        mixed[:, 2] = np.where(areas(boxes) > 0, 1, lam)
        mixed[:, 3:] = boxes
        return rows

    def _draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns drawn shares lam [count], and boxes [count, 4].

        The boxes are empty unless CutMix was drawn.
        """
        mixed = rng.random(count) < self.prob
        cut = rng.random(count) < self.switch_prob
        alpha = np.where(cut, self.cutmix_alpha, self.mixup_alpha)
        lam = np.where(mixed, rng.beta(alpha, alpha), 1.0)
        if self.minmax:
            smallest, largest = self.minmax
            low = np.array([int(side * smallest) for side in self.size])
            high = np.array([int(side * largest) for side in self.size])
            sides = rng.integers(low, np.maximum(high, low + 1), (count, 2))
            start = rng.integers(np.array(self.size) - sides + 1)
            boxes = np.concatenate([start, start + sides], 1)
        else:
            boxes = cutmix_boxes(lam, rng.integers(self.size, size=(count, 2)), self.size)
        is_cutmix = mixed & cut
        boxes[~is_cutmix] = 0
        # The box may have been clipped, so its own area counts.
        return np.where(is_cutmix, 1 - areas(boxes) / np.prod(self.size), lam), boxes

    def __call__(
        self, images: paddle.Tensor, targets: paddle.Tensor, drawn: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns mixed images [B, C, H, W] and targets [B, K].

        Args:
            images: [B, C, H, W] float32.
            targets: [B, K] float32, which are averaged by the shares, also where an image has
                several classes.
            drawn: [B, 7] float32: what ``draw`` returned for the batch.
        """
        other = drawn[:, 0].astype("int64")
        share = drawn[:, 1:2]
        targets = targets * share + paddle.gather(targets, other) * (1 - share)
        weight = drawn[:, 2].reshape([-1, 1, 1, 1])
        # Without CutMix all boxes are empty. To look at their values would wait for the device.
        if self.cutmix_alpha > 0:
            weight = (1 - box_mask(drawn[:, 3:], self.size).astype("float32")) * weight
        # On a CPU, products of unequal shapes take five times as long.
        weight = weight.expand(images.shape)
        return images * weight + paddle.gather(images, other) * (1 - weight), targets


def cutmix_boxes(lam: np.ndarray, centres: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Returns CutMix's boxes [n, 4] (top, left, bottom, right).

    A box has the share 1 - lam of the image's area, and is then clipped at its border.

    Args:
        lam: [n], the share that an image keeps.
        centres: [n, 2] integers, row and column.
        size: (height, width) of the image, in pixels.
    """
    sides = (np.array(size) * np.sqrt(1 - lam)[:, None]).astype(np.int64)
    boxes = np.concatenate([centres - sides // 2, centres + (sides + 1) // 2], 1)
    return np.clip(boxes, 0, [*size, *size])


def areas(boxes: np.ndarray) -> np.ndarray:
    """Returns the areas [n] of boxes [n, 4] (top, left, bottom, right)."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
