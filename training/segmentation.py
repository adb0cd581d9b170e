"""Semantic segmentation: a class for each pixel of an image.

An evaluation compares the pixels of all masks at the masks' own sizes. It counts them in a
confusion matrix, so its metrics depend on neither the number of processes nor the batch.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

import paddle
from paddle import nn

from datasets import ImageDataset
from errors import reporting_memory
from loading.transforms import Normalize
from models.heads.base import resized
from models.heads.windows import Way, pixel_logits
from settings.configuration import Configuration, pair
from settings.keys import Factor, between
from settings.registry import tasks
from training.losses.pixels import pixel_cross_entropy
from training.losses.targets import class_weights, factors
from training.pixel_metrics import (
    answers_of_strips,
    boundary_metrics,
    count_boundaries,
    count_pairs,
    image_outcome,
    metrics_of,
)
from training.predictions import Predictions
from training.task import Batch, Metrics, Task
from utils import all_gather, all_reduce_sum, within_memory

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
        scales: evaluate each image at these factors of its size, and average the probabilities;
            [0.5, 0.75, 1.0, 1.25, 1.5, 1.75] is usual.
        flip: average over the mirror images, too.
        boundary: evaluate the boundaries' intersection over union as well.
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
        scales: Sequence[Annotated[float, between(0.1, 10)]] = (1.0,),
        flip: bool = False,
        boundary: bool = False,
    ) -> None:
        super().__init__(config, classes)
        self.aux_weight = aux_weight
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        stride = None if config.HEAD.STRIDE is None else pair(config.HEAD.STRIDE)
        self.way = Way(pair(config.DATA.IMAGE_SIZE), stride, scales, flip)
        self.boundary = boundary
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
        ``class_iou`` and ``class_acc`` by name; with METHOD.BOUNDARY ``boundary_iou`` and
        ``class_boundary_iou`` as well.

        They are computed from the pixels of all masks together. A class that neither a mask nor an
        answer has is None in ``class_iou``, and counts in no mean. The same holds for ``class_acc``
        and a class that no mask has.

        Raises:
            RunError: an image takes more memory than there is.
        """
        outputs = self.config.MODEL.NUM_CLASSES
        confusion = paddle.zeros([outputs * outputs], "int64")
        boundaries = paddle.zeros([3, outputs], "int64")
        losses: list[paddle.Tensor] = []
        self.predictions = Predictions()
        for batch in batches:
            mask = batch[MASK].astype("int64")
            with (
                within_memory(),
                reporting_memory(functools.partial(_memory_advice, mask, self.way)),
            ):
                images = self.normalize(batch["pixels"])
                strips = pixel_logits(forward, images, tuple(mask.shape[1:]), self.way)
                answers, of_images = answers_of_strips(strips, mask, self.ignored)
                losses.append(of_images)
                for predicted, classes in zip(answers, mask, strict=True):
                    pairs = count_pairs(predicted, classes, outputs, self.ignored)
                    confusion += pairs
                    if self.config.REPORT:
                        self.predictions.add(**image_outcome(pairs, outputs))
                    if self.boundary:
                        boundaries += count_boundaries(predicted, classes, outputs, self.ignored)
        own = paddle.concat(losses).numpy().tolist() if losses else []
        # The exact sum of all, which doesn't depend on their order.
        everyones = [loss for of_rank in all_gather(own) for loss in of_rank]
        counts = paddle.concat([confusion, boundaries.flatten()])
        sums = all_reduce_sum(counts).numpy()
        matrix = sums[: outputs * outputs].reshape(outputs, outputs)
        if self.config.REPORT:
            self.predictions.confusion = matrix
        names = list(self.classes) or [str(number) for number in range(outputs)]
        metrics = metrics_of(matrix, names)
        if self.boundary:
            metrics |= boundary_metrics(sums[outputs * outputs :].reshape(3, outputs), names)
        loss = math.fsum(everyones) / len(everyones)
        return {"loss": loss, **metrics, "num_samples": len(everyones)}


def _memory_advice(mask: paddle.Tensor, way: Way) -> str:
    """Returns what needs less memory, for the evaluation of an image."""
    height, width = mask.shape[1:]
    smaller = "lower DATA.IMAGE_SIZE with DATA.CROP_MODE short"
    if way.stride is None:
        smaller = f"HEAD.STRIDE computes it in windows, or {smaller}"
    return f"the image's mask has {width} x {height} pixels: {smaller}"
