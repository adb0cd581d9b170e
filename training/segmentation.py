"""Semantic segmentation: a class for each pixel of an image.

An evaluation compares the pixels of all masks at the masks' own sizes. It counts them in a
confusion matrix, so its metrics depend on neither the number of processes nor the batch.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import paddle
from paddle import nn

import ops
from datasets import ImageDataset
from errors import InputError, reporting_memory
from loading.mask_tables import plain_table
from loading.transforms import Normalize
from models.heads.base import Head
from models.heads.windows import Way, maps, pixel_logits, way_of
from settings.configuration import Configuration
from settings.keys import Factor, InTraining, Share, between
from settings.needs import is_, is_not
from settings.registry import tasks
from training.losses.pixels import PixelLoss
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
from training.run import Run
from training.task import Batch, Metrics, Task
from training.worst_pictures import WorstPictures
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
        aux_weight: weight of each auxiliary head's loss, which is added to the main loss.
        scales: the factors by which images are resized in evaluations; the probabilities are
            averaged. [0.5, 0.75, 1.0, 1.25, 1.5, 1.75] is usual.
        flip: whether evaluations also average over horizontally flipped images.
        boundary: whether evaluations also compute the boundary IoU.
        loss: the loss of a pixel. "cross_entropy": averaged over all labelled pixels. "ohem": over
            the hardest ones only. "focal": easy pixels count less.
        ohem_threshold: "ohem": pixels count whose probability of the correct class is below this.
        ohem_keep: "ohem": the smallest number of an image's pixels that count, the hardest first.
        focal_gamma: "focal": the exponent of 1 minus the probability of the correct class.
        dice: weight of a Dice loss, which is added to each head's loss. 0: none.
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
        aux_weight: Annotated[InTraining[Factor], is_not("HEAD.NAME", "eomt")] = 0.4,
        loss: Annotated[
            InTraining[Literal["cross_entropy", "ohem", "focal"]], is_not("HEAD.NAME", "eomt")
        ] = "cross_entropy",
        ohem_threshold: Annotated[InTraining[Share], is_("METHOD.LOSS", "ohem")] = 0.7,
        ohem_keep: Annotated[
            InTraining[int], between(1, 100_000_000), is_("METHOD.LOSS", "ohem")
        ] = 100_000,
        focal_gamma: Annotated[InTraining[Factor], is_("METHOD.LOSS", "focal")] = 2.0,
        dice: Annotated[InTraining[Factor], is_not("HEAD.NAME", "eomt")] = 0.0,
        scales: Sequence[Annotated[float, between(0.1, 10)]] = (1.0,),
        flip: bool = False,
        boundary: bool = False,
    ) -> None:
        super().__init__(config, classes)
        self.aux_weight = aux_weight
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        self.way = way_of(config, scales, flip)
        self.boundary = boundary
        self.loss = PixelLoss(
            loss,
            factors(class_weights(config, None)),
            ohem_threshold,
            ohem_keep,
            focal_gamma,
            dice,
        )
        self.ignored = -1
        # The head, where it has a loss of its own.
        self.head: Head | None = None

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        super().prepare_data(dataset, mode)
        masks = dataset.masks[MASK]
        self.ignored = masks.ignored
        if masks.table is None:
            # Shards that another program packed: a value that isn't a class has to be an error.
            table = plain_table(self.config.MODEL.NUM_CLASSES, masks.ignored)
            dataset.masks[MASK] = masks._replace(table=table)
        if mode == "val":
            dataset.keep_sizes()

    def prepare(self, model: Any, train: ImageDataset, run: Run) -> None:
        """Takes the loss of a head that has one.

        Raises:
            InputError: the configuration has class weights, which such a loss doesn't read.
        """
        if model.decode_head.has_loss:
            self.head = model.decode_head
            if self.config.TRAIN.CLASS_WEIGHTS is not None:
                raise InputError(
                    f"TRAIN.CLASS_WEIGHTS is set, but HEAD.NAME {self.config.HEAD.NAME} has a loss of"
                    " its own, which doesn't use them; leave it out"
                )

    def after_update(self, model: Any, share: float) -> None:
        model.decode_head.after_update(share)

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        outputs = network(self.normalize(batch["pixels"]))
        mask = batch[MASK]
        if self.head is not None:
            return {"loss": self.head.loss(outputs, mask, self.ignored)}
        loss, *of_auxiliary_heads = [self.loss(logits, mask, self.ignored) for logits in outputs]
        for auxiliary in of_auxiliary_heads:
            loss = loss + self.aux_weight * auxiliary
        return {"loss": loss}

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
        worst = WorstPictures(MASK)
        if self.config.REPORT:
            self.predictions.worst = worst
        for batch in batches:
            mask = batch[MASK].astype("int64")
            with (
                within_memory(),
                reporting_memory(functools.partial(_memory_advice, mask, self.way)),
            ):
                images = self.normalize(batch["pixels"])
                answers, of_images = self._answers(forward, images, mask)
                losses.append(of_images)
                for predicted, classes in zip(answers, mask, strict=True):
                    pairs = count_pairs(predicted, classes, outputs, self.ignored)
                    confusion += pairs
                    if self.config.REPORT:
                        outcome = image_outcome(pairs, outputs)
                        self.predictions.add(**outcome)
                        worst.add(predicted, outcome["mIoU"], outcome["pixels"])
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

    def _answers(
        self, forward: Callable[..., Any], images: paddle.Tensor, mask: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns the answers [B, H, W] int64, and the cross-entropy of each image, [B]."""
        way = self.way
        if way.has_one_view and not way.gives_log_scores and ops.usable(images):
            logits = maps(forward, images, way).astype("float32")
            losses, answers = ops.pixel_answers(logits, mask, self.ignored)
            return answers.astype("int64"), losses
        strips = pixel_logits(forward, images, tuple(mask.shape[1:]), way)
        return answers_of_strips(strips, mask, self.ignored)


def _memory_advice(mask: paddle.Tensor, way: Way) -> str:
    """Returns advice on reducing the memory for the evaluation of an image."""
    height, width = mask.shape[1:]
    smaller = "lower DATA.IMAGE_SIZE with DATA.CROP_MODE short"
    if way.stride is None:
        smaller = f"HEAD.STRIDE computes it in windows, or {smaller}"
    return f"the image's mask has {width} x {height} pixels: {smaller}"
