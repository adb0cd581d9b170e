"""Transforms of a batch, on the device: normalise, erase, mix."""

import numpy as np
import paddle
from paddle.nn import functional as F
from yacs.config import CfgNode

from transforms.erase import RandomErasing, box_mask

_MIXUP_TAG = 0x6D69787570  # keeps the seeds of these draws apart from the samples'


def mixes(config: CfgNode) -> bool:
    """Returns whether training mixes its images: mixup or CutMix is on."""
    train = config.TRAIN
    return train.MIXUP_ALPHA > 0 or train.CUTMIX_ALPHA > 0 or train.CUTMIX_MINMAX is not None


def gives_distributions(config: CfgNode) -> bool:
    """Returns whether training targets are distributions [B, K] rather than labels [B]."""
    return mixes(config) or config.TRAIN.LOSS == "soft_target"


def smooth_one_hot(labels: paddle.Tensor, num_classes: int, smoothing: float) -> paddle.Tensor:
    """Labels [B] -> distributions [B, K] float32: 1 - smoothing on the label, plus smoothing / K everywhere."""
    return F.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


class Normalize:
    """Pixels [B, S, S, C] uint8 -> (pixels / 255 - mean) / std as [B, C, S, S] float32.

    Args:
        mean, std: one value per channel, or one for all, of pixels in 0..1.
    """

    def __init__(self, mean: list[float], std: list[float]) -> None:
        scale, shift = 1 / (255 * np.asarray(std)), -np.asarray(mean) / np.asarray(std)
        self.scale = paddle.to_tensor(scale, dtype="float32").reshape([1, -1, 1, 1])
        self.shift = paddle.to_tensor(shift, dtype="float32").reshape([1, -1, 1, 1])

    def __call__(self, pixels: paddle.Tensor) -> paddle.Tensor:
        return pixels.transpose([0, 3, 1, 2]).astype("float32") * self.scale + self.shift


class BatchTransform:
    """Normalises, erases and mixes a training batch.

    Args:
        rank, ranks: this process and their number: it holds the rank-th of ``ranks`` equal parts of a global batch.
    """

    def __init__(self, config: CfgNode, rank: int, ranks: int) -> None:
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        self.erase = RandomErasing(config) if config.TRAIN.RANDOM_ERASE_PROB else None
        self.mixup = Mixup(config, rank, ranks) if mixes(config) else None
        self.distributions = gives_distributions(config)
        self.num_classes, self.smoothing = config.MODEL.NUM_CLASSES, config.TRAIN.SMOOTHING

    def __call__(
        self, pixels: paddle.Tensor, labels: paddle.Tensor, erased: paddle.Tensor | None, epoch: int, step: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns images [B, C, S, S] float32 and targets: labels [B], or distributions [B, K] float32 where
        ``gives_distributions(config)``.

        Args:
            pixels: [B, S, S, C] uint8.
            labels: [B] int64.
            erased: ``RandomErasing.draw`` of each sample, where RANDOM_ERASE_PROB isn't 0.
            epoch, step: from 1; with SEED they decide how the batch is mixed.
        """
        images = self.normalize(pixels)
        if self.erase is not None:
            images = self.erase(images, erased)
        if self.mixup is not None:
            return self.mixup(images, labels, epoch, step)
        if self.distributions:
            labels = smooth_one_hot(labels, self.num_classes, self.smoothing)
        return images, labels


class Mixup:
    """Mixup (Zhang et al. 2017, arXiv:1710.09412) and CutMix (Yun et al. 2019, arXiv:1905.04899), with the options and
    distributions of timm's ``Mixup``.

    CutMix's share is corrected to the area of its box once that is clipped. Two deliberate differences from timm:
    (a) sample i is mixed with its neighbour i ^ 1, not with B - 1 - i;
    (b) every draw is made on the host for the whole global batch, from (SEED, epoch, step), and each rank takes its
    part of it. Thus the mixed samples are the same for every number of processes. In mode "batch" one draw serves the
    global batch, where timm's serves one process's.

    Args:
        rank, ranks: rank r holds the positions r * B to r * B + B of a global batch of B * ranks samples.
    """

    def __init__(self, config: CfgNode, rank: int, ranks: int) -> None:
        train = config.TRAIN
        self.seed, self.rank, self.ranks = config.SEED, rank, ranks
        self.mode, self.minmax, self.off_epoch = train.MIXUP_MODE, train.CUTMIX_MINMAX, train.MIXUP_OFF_EPOCH
        self.mixup_alpha, self.cutmix_alpha = train.MIXUP_ALPHA, 1.0 if self.minmax else train.CUTMIX_ALPHA
        self.prob = train.MIXUP_PROB
        both = self.mixup_alpha > 0 and self.cutmix_alpha > 0
        self.switch_prob = train.MIXUP_SWITCH_PROB if both else float(self.cutmix_alpha > 0)
        self.num_classes, self.smoothing = config.MODEL.NUM_CLASSES, train.SMOOTHING

    def __call__(
        self, images: paddle.Tensor, labels: paddle.Tensor, epoch: int, step: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns mixed images [B, C, S, S] and targets [B, K] float32 (smoothed, each row's sum is 1).

        After MIXUP_OFF_EPOCH nothing is mixed. The last of an odd number of samples stays as it is.

        Args:
            images: [B, C, S, S] float32.
            labels: [B] int64.
            epoch, step: from 1.
        """
        targets = smooth_one_hot(labels, self.num_classes, self.smoothing)
        if self.off_epoch and epoch > self.off_epoch:
            return images, targets
        count = images.shape[0]
        draws = 1 if self.mode == "batch" else count * self.ranks
        rng = np.random.default_rng([self.seed, epoch, step, _MIXUP_TAG])
        lam, boxes = self._draw(rng, draws, images.shape[-1])
        sample = np.arange(count)
        if self.mode == "pair":
            sample -= sample % 2  # both take the draw of the first
        drawn = (self.rank * count + sample) % draws
        lam, boxes = lam[drawn], boxes[drawn]
        if count % 2:
            lam[-1], boxes[-1] = 1, 0
        return mix(images, targets, lam, boxes)

    def _draw(self, rng: np.random.Generator, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws lam [count], and boxes [count, 4], which are empty unless CutMix is to be done."""
        mixed, cut = rng.random(count) < self.prob, rng.random(count) < self.switch_prob
        alpha = np.where(cut, self.cutmix_alpha, self.mixup_alpha)
        lam = np.where(mixed, rng.beta(alpha, alpha), 1.0)
        if self.minmax:
            low, high = (int(size * share) for share in self.minmax)
            sides = rng.integers(low, max(high, low + 1), (count, 2))
            start = rng.integers(size - sides + 1)
            boxes = np.concatenate([start, start + sides], 1)
        else:
            boxes = cutmix_boxes(lam, rng.integers(size, size=(count, 2)), size)
        boxes[~(mixed & cut)] = 0
        return np.where(mixed & cut, 1 - areas(boxes) / size**2, lam), boxes


def cutmix_boxes(lam: np.ndarray, centres: np.ndarray, size: int) -> np.ndarray:
    """Returns CutMix's boxes [n, 4] (top, left, bottom, right): share 1 - lam of the image, clipped at its border.

    Args:
        lam: [n], the share that an image keeps.
        centres: [n, 2] integers, row and column.
        size: of the image, in pixels.
    """
    side = (size * np.sqrt(1 - lam)).astype(np.int64)[:, None]
    return np.clip(np.concatenate([centres - side // 2, centres + (side + 1) // 2], 1), 0, size)


def areas(boxes: np.ndarray) -> np.ndarray:
    """Boxes [n, 4] (top, left, bottom, right) -> areas [n]."""
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def mix(
    images: paddle.Tensor, targets: paddle.Tensor, lam: np.ndarray, boxes: np.ndarray
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Mixes each sample i with its neighbour i ^ 1; the last of an odd number has none but itself.

    Args:
        images: [B, C, S, S] float32.
        targets: [B, K] float32.
        lam: [B], a sample's own share: of its target, and of its pixels where its box is empty.
        boxes: [B, 4], what a sample takes from its neighbour instead (top, left, bottom, right).
    """
    count = len(lam)
    neighbour = paddle.to_tensor(np.minimum(np.arange(count) ^ 1, count - 1))
    share = paddle.to_tensor(lam, dtype="float32").unsqueeze(1)
    targets = targets * share + paddle.gather(targets, neighbour) * (1 - share)
    cut = areas(boxes) > 0
    weight = paddle.to_tensor(np.where(cut, 1, lam), dtype="float32").reshape([-1, 1, 1, 1])
    if cut.any():
        inside = box_mask(paddle.to_tensor(boxes, dtype="float32"), images.shape[-1])
        weight = weight * (1 - inside.astype("float32"))
    return images * weight + paddle.gather(images, neighbour) * (1 - weight), targets
