"""The task of images that have any number of classes each: a yes or a no for each class, its
average precision.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from settings.options import Configuration
from settings.registry import tasks
from training.checkpoint import thresholds_of
from training.classification import Classification
from training.losses import binary_cross_entropy
from training.multilabel_metrics import (
    Ranked,
    average_precision,
    best_threshold,
    count_predictions,
    f1,
    rank_images,
    sigmoid,
)
from training.predictions import Predictions
from training.task import Batch, Metrics
from utils import all_gather, all_reduce_sum, all_to_all, rank, world_size

_HALF = 0.5  # the threshold that other toolkits take for every class
_PIECE = 1 << 22  # scores of all images that a rank holds at a time, besides its own images


@tasks.register("multilabel", metrics="mAP f1_micro f1_macro")
class MultiLabel(Classification):
    """Images of any number of classes each.

    A class's threshold is that of the highest F1 on the validation set. It travels with the
    weights, and an evaluation of them uses it. Weights that have none get 0.5.
    """

    best = "mAP"
    lines: ClassVar[dict[str, str]] = {
        "train": "loss: {loss:.4f}",
        "val": "loss: {loss:.4f}, mAP: {mAP:.2f}, f1_micro: {f1_micro:.2f}, f1_macro: {f1_macro:.2f}",
        "best": "mAP: {mAP:.2f}",
        "result": "mAP: {mAP:.2f}, f1_micro: {f1_micro:.2f}, f1_macro: {f1_macro:.2f}, loss: {loss:.4f}",
    }
    curves: ClassVar[dict[str, str]] = {
        "loss": "loss",
        "mAP": "mean average precision (%)",
        "lr": "learning rate",
    }

    def __init__(self, config: Configuration, classes: Sequence[str] = ()) -> None:
        super().__init__(config, classes)
        outputs = config.MODEL.NUM_CLASSES
        weights = config.MODEL
        told = thresholds_of(weights.PRETRAINED, weights.PRETRAINED_ADAPTER) if config.EVAL else []
        if told and len(told) != outputs:
            raise InputError(
                f"{config.MODEL.PRETRAINED} has {len(told)} thresholds, the model {outputs} outputs"
            )
        self.thresholds = np.array(told or [_HALF] * outputs) if config.EVAL else None
        which = "the weights' own" if told else "0.5 of each class: the weights have none"
        which = (
            which
            if config.EVAL
            else "of the highest F1 on the validation set, chosen anew at each evaluation"
        )
        self.note = f"thresholds: {which}; an evaluation holds {5 * outputs:,} bytes for each image of a process"

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        images, targets = self.transform(batch, epoch)
        return {"loss": self.criterion(images, network(images), targets)}

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns ``loss`` (the classes' mean binary cross-entropy), ``mAP``, ``f1_micro`` and
        ``f1_macro``, these two at 0.5 as well (``_at_half``), in percent, and ``num_samples``;
        ``class_ap``, ``class_f1``, ``thresholds``.

        ``class_ap`` and ``class_f1`` are by name, None for a class that no image has; ``mAP`` and
        ``f1_macro`` are the means over the others, ``f1_micro`` is of all answers together.
        ``thresholds`` are by output.
        """
        outputs = self.config.MODEL.NUM_CLASSES
        total = paddle.zeros([2], "float64")
        scores = []
        truths = []
        for batch in batches:
            logits = forward(self.normalize(batch["pixels"])).astype("float32")
            truth = batch["labels"]
            losses = binary_cross_entropy(logits, truth.astype("float32")).mean(1)
            total += paddle.stack([losses, paddle.ones_like(losses)]).astype("float64").sum(1)
            scores.append(logits)
            truths.append(truth)
        loss, count = map(float, all_reduce_sum(total).numpy())
        # One batch after the other, so that none is held twice for long.
        for place in range(len(scores)):
            scores[place] = scores[place].numpy()
            truths[place] = truths[place].numpy().astype(np.uint8, copy=False)
        if not scores:  # fewer images than ranks
            scores = [np.zeros([0, outputs], np.float32)]
            truths = [np.zeros([0, outputs], np.uint8)]
        found = self._by_class(scores, truths, int(count))
        names = list(self.classes or map(str, range(outputs)))
        numbers = found.pop("numbers")
        thresholds = found.pop("thresholds")
        self.predictions = self._rows_of(scores, truths, np.array(thresholds))
        by_name = {name: dict(zip(names, values, strict=False)) for name, values in found.items()}
        return {
            "loss": loss / count,
            **numbers,
            "num_samples": int(count),
            **by_name,
            "thresholds": thresholds,
        }

    def _rows_of(
        self, scores: list[np.ndarray], truths: list[np.ndarray], thresholds: np.ndarray
    ) -> Predictions:
        """Returns the predictions for this rank's images: a batch at a time, as probabilities take
        8 bytes.
        """
        kept = Predictions()
        for logits, there in zip(scores, truths, strict=True) if self.config.REPORT else ():
            shares = sigmoid(logits)
            worst = np.abs(shares - there).argmax(1)
            probability = np.take_along_axis(shares, worst[:, None], 1)[:, 0]
            bits = {"truth": np.packbits(there, 1), "told": np.packbits(shares >= thresholds, 1)}
            kept.add(**bits, worst=worst, probability=probability)
        return kept

    def _by_class(
        self, scores: list[np.ndarray], truths: list[np.ndarray], count: int
    ) -> dict[str, Any]:
        """Returns the figures of all ranks' images, which are ``count``.

        Each rank computes those of its share of the classes. They depend on no order, so they are
        the same bits for every number of ranks.

        Args:
            scores: this rank's batches of logits, [B, K] each.
            truths: 1 where its images have the classes, else 0, [B, K] each.
        """
        outputs = self.config.MODEL.NUM_CLASSES
        # Classes that a rank holds of all images at a time.
        several = max(1, _PIECE // max(1, count))
        lengths = all_gather(sum(map(len, scores)))
        found = {}
        for first in range(0, outputs, several * world_size()):
            each = min(several, -(-(outputs - first) // world_size()))
            # The first class of each rank. The last ranks may compute some classes that others
            # compute, too.
            begins = [min(first + place * each, outputs - each) for place in range(world_size())]
            logits, truth = (
                _of_all_images(batches, begins, each, lengths) for batches in (scores, truths)
            )
            for label, column, there in zip(
                range(begins[rank()], outputs), logits, truth, strict=False
            ):
                found[label] = self._of_class(label, rank_images(sigmoid(column), there))
        for own in all_gather(found):
            found |= own
        precisions, thresholds, counts, halves = zip(
            *(found[label] for label in range(outputs)), strict=True
        )
        numbers = {"mAP": 100 * _mean(precisions)}
        for ending, at in (("", np.array(counts).T), ("_at_half", np.array(halves).T)):
            numbers[f"f1_micro{ending}"] = 100 * float(f1(*at.sum(1)))
            numbers[f"f1_macro{ending}"] = 100 * float(f1(*at)[at[2] > 0].mean())
        each = f1(*np.array(counts).T)
        percent = [None if ap is None else 100 * ap for ap in precisions]
        shares = [
            None if ap is None else 100 * float(own)
            for ap, own in zip(precisions, each, strict=True)
        ]
        return {
            "numbers": numbers,
            "class_ap": percent,
            "class_f1": shares,
            "thresholds": [*thresholds],
        }

    def _of_class(self, label: int, ranked: Ranked) -> tuple[Any, ...]:
        """Returns a class's average precision, its threshold, the answers at that, and those at
        0.5.
        """
        threshold = (
            best_threshold(ranked) if self.thresholds is None else float(self.thresholds[label])
        )
        return (
            average_precision(ranked),
            threshold,
            count_predictions(ranked, threshold),
            count_predictions(ranked, _HALF),
        )

    def description_of(self, metrics: Metrics) -> dict[str, Any]:
        return {"thresholds": metrics["thresholds"]}


def _of_all_images(
    batches: list[np.ndarray], begins: list[int], each: int, lengths: Sequence[int]
) -> np.ndarray:
    """Returns this rank's classes of all ranks' batches, [each, n]; every rank calls it.

    Args:
        batches: this rank's, [B, K] each.
        begins: each rank's first class.
        each: the number of classes of a rank.
        lengths: each rank's number of images.
    """
    parts = np.empty([len(begins), each, lengths[rank()]], batches[0].dtype)
    for part, begin in zip(parts, begins, strict=True):
        np.concatenate([rows[:, begin : begin + each].T for rows in batches], 1, out=part)
    return np.concatenate(all_to_all(parts, lengths), 1)


def _mean(values: Sequence[float | None]) -> float:
    """The mean of those that there are."""
    return float(np.mean([value for value in values if value is not None]))
