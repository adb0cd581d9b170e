"""Semantic segmentation: a class for each pixel of an image.

An evaluation compares the pixels of all masks at the masks' own sizes. It counts them in a
confusion matrix, so its metrics depend on neither the number of processes nor the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from datasets import ImageDataset
from loading.transforms import Normalize
from models.heads.base import resized
from models.heads.windows import maps
from settings.configuration import Configuration, pair
from settings.keys import Factor
from settings.registry import tasks
from training.losses.pixels import pixel_cross_entropy
from training.losses.targets import class_weights, factors
from training.task import Batch, Metrics, Task
from utils import all_reduce_sum

# The column of masks.
MASK = "mask"


@tasks.register(
    "segmentation",
    columns="mask",
    classes="data",
    answers="pixels",
    reads="MODEL.NUM_CLASSES TRAIN.HEAD_LR TRAIN.CLASS_WEIGHTS",
    metrics="mIoU mean_acc pixel_acc",
)
class Segmentation(Task):
    """The task of a class for each pixel.

    Args:
        aux_weight: factor on the loss of each auxiliary head, which is added to the head's own.
    """

    best = "mIoU"
    lines: ClassVar[dict[str, str]] = {
        "train": "loss: {loss:.4f}",
        "val": "loss: {loss:.4f}, mIoU: {mIoU:.2f}, pixel_acc: {pixel_acc:.2f}",
        "best": "mIoU: {mIoU:.2f}",
        "result": "mIoU: {mIoU:.2f}, mean_acc: {mean_acc:.2f}, pixel_acc: {pixel_acc:.2f}, loss: {loss:.4f}",
    }
    curves: ClassVar[dict[str, str]] = {
        "loss": "loss",
        "mIoU": "mean intersection over union (%)",
        "lr": "learning rate",
    }

    def __init__(
        self,
        config: Configuration,
        classes: Sequence[str] = (),
        *,
        aux_weight: Factor = 0.4,
    ) -> None:
        super().__init__(config, classes)
        self.aux_weight = aux_weight
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        self.window = pair(config.DATA.IMAGE_SIZE)
        self.stride = None if config.HEAD.STRIDE is None else pair(config.HEAD.STRIDE)
        self.weight = factors(class_weights(config, None))
        self.ignored = -1

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        super().prepare_data(dataset, mode)
        self.ignored = dataset.masks[MASK].ignored
        if mode == "val":
            dataset.keep_sizes()

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        outputs = network(self.normalize(batch["pixels"]))
        mask = batch[MASK]
        loss, *of_auxiliary_heads = [self._loss(logits, mask) for logits in outputs]
        for auxiliary in of_auxiliary_heads:
            loss = loss + self.aux_weight * auxiliary
        return {"loss": loss}

    def _loss(self, logits: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        """Returns the loss of each image, [B], of logits of any size."""
        return pixel_cross_entropy(resized(logits, mask.shape[1:]), mask, self.ignored, self.weight)

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns ``loss``, ``mIoU``, ``mean_acc``, ``pixel_acc`` (percent), ``num_samples``, and
        ``class_iou`` and ``class_acc`` by name.

        They are computed from the pixels of all masks together. A class that neither a mask nor an
        answer has is None in ``class_iou``, and counts in no mean. The same holds for ``class_acc``
        and a class that no mask has.
        """
        outputs = self.config.MODEL.NUM_CLASSES
        confusion = paddle.zeros([outputs * outputs], "int64")
        total = paddle.zeros([2], "float64")
        for batch in batches:
            mask = batch[MASK]
            images = self.normalize(batch["pixels"])
            logits = maps(forward, images, self.window, self.stride)
            logits = resized(logits.astype("float32"), mask.shape[1:])
            losses = pixel_cross_entropy(logits, mask, self.ignored)
            total += paddle.stack([losses, paddle.ones_like(losses)]).astype("float64").sum(1)
            confusion += count_pairs(logits.argmax(1), mask, outputs, self.ignored)
        loss, count = all_reduce_sum(total).numpy().tolist()
        matrix = all_reduce_sum(confusion).numpy().reshape(outputs, outputs)
        metrics = metrics_of(
            matrix, list(self.classes) or [str(number) for number in range(outputs)]
        )
        return {"loss": loss / count, **metrics, "num_samples": int(count)}


def count_pairs(
    predicted: paddle.Tensor, mask: paddle.Tensor, classes: int, ignored: int
) -> paddle.Tensor:
    """Returns how many pixels have each (class, answer): [classes * classes] int64.

    Args:
        predicted: [B, H, W], the answers.
        mask: [B, H, W], the classes.
        ignored: the index of pixels that aren't counted.
    """
    mask = mask.astype("int64").flatten()
    known = mask != ignored
    pairs = mask * classes + predicted.astype("int64").flatten()
    # Pixels that aren't counted get a place of their own at the end.
    pairs = paddle.where(known, pairs, paddle.full_like(pairs, classes * classes))
    return paddle.bincount(pairs, minlength=classes * classes + 1)[:-1]


def metrics_of(confusion: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Returns what ``Segmentation.evaluate`` does of a confusion matrix [K, K] int64.

    Its rows are classes, its columns answers. Without any pixel all means are 0.
    """
    right = np.diag(confusion)
    of_class = confusion.sum(1)
    union = of_class + confusion.sum(0) - right
    iou = [
        100 * int(hit) / int(all_) if all_ else None for hit, all_ in zip(right, union, strict=True)
    ]
    acc = [
        100 * int(hit) / int(all_) if all_ else None
        for hit, all_ in zip(right, of_class, strict=True)
    ]
    return {
        "mIoU": _mean(iou),
        "mean_acc": _mean(acc),
        "pixel_acc": 100 * int(right.sum()) / max(1, int(confusion.sum())),
        "class_iou": dict(zip(names, iou, strict=True)),
        "class_acc": dict(zip(names, acc, strict=True)),
    }


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else 0.0
