"""Multi-label classification: images of any number of classes each.

The model answers yes or no for each class. An evaluation measures each class's average precision,
and F1 at its threshold.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import paddle
from paddle import nn

from errors import InputError
from settings.configuration import Configuration
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
from training.task import Batch, Metrics, inputs_of
from utils import all_gather, all_reduce_sum, all_to_all, rank, world_size

# The threshold that other toolkits take for every class.
_HALF = 0.5
# The most scores of all images that a rank holds at a time, besides those of its own images.
_MOST_SCORES = 1 << 22


class _ClassMetrics(NamedTuple):
    """The metrics of one class in an evaluation.

    Args:
        precision: its average precision; None: no image has the class.
        threshold: the probability from which on the answer is a yes.
        answers: what ``multilabel_metrics.count_predictions`` returns at the threshold.
        answers_at_half: the same at 0.5.
    """

    precision: float | None
    threshold: float
    answers: Any
    answers_at_half: Any


@tasks.register("multilabel", metrics="mAP f1_micro f1_macro", answers="sigmoid")
class MultiLabel(Classification):
    """The task of images of any number of classes each.

    A class's threshold is that of the highest F1 on the validation set. It is stored with the
    weights, and an evaluation of them uses it. With weights that have none it is 0.5.
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
        # By output; None: they are chosen again at each evaluation of a training.
        self.thresholds: np.ndarray | None = None
        origin = "of the highest F1 on the validation set, chosen at each evaluation"
        if config.EVAL and config.MODEL.PRETRAINED:
            stored = thresholds_of(config.MODEL.PRETRAINED, config.MODEL.PRETRAINED_ADAPTER)
            if stored and len(stored) != outputs:
                raise InputError(
                    f"{config.MODEL.PRETRAINED} has {len(stored)} thresholds,"
                    f" the model {outputs} outputs"
                )
            self.thresholds = np.array(stored or [_HALF] * outputs)
            origin = (
                "the weights' own"
                if stored
                else "0.5 for each class (the weights have no thresholds)"
            )
        self.note = (
            f"thresholds: {origin};"
            f" an evaluation takes {5 * outputs:,} bytes per image in each process"
        )

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        images, targets = self.transform(batch, epoch)
        return {"loss": self.criterion(images, network(*inputs_of(images, batch)), targets)}

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns ``loss`` (the classes' mean binary cross-entropy), ``mAP``, ``f1_micro`` and
        ``f1_macro`` in percent, the last two at 0.5 as well (``_at_half``), and ``num_samples``;
        also ``class_ap``, ``class_f1`` and ``thresholds``.

        ``class_ap`` and ``class_f1`` are by name, with None for a class that no image has. ``mAP``
        and ``f1_macro`` are the means over the other classes, and ``f1_micro`` is of all answers
        together. ``thresholds`` are by output.
        """
        outputs = self.config.MODEL.NUM_CLASSES
        total = paddle.zeros([2], "float64")
        scores = []
        truths = []
        for batch in batches:
            images = self.normalize(batch["pixels"])
            logits = forward(*inputs_of(images, batch)).astype("float32")
            truth = batch["labels"]
            losses = binary_cross_entropy(logits, truth.astype("float32")).mean(1)
            total += paddle.stack([losses, paddle.ones_like(losses)]).astype("float64").sum(1)
            scores.append(logits)
            truths.append(truth)
        loss, count = map(float, all_reduce_sum(total).numpy())
        # One batch is copied after the other, so that none is held twice for long.
        for place in range(len(scores)):
            scores[place] = scores[place].numpy()
            truths[place] = truths[place].numpy().astype(np.uint8, copy=False)
        if not scores:
            # There are fewer images than ranks.
            scores = [np.zeros([0, outputs], np.float32)]
            truths = [np.zeros([0, outputs], np.uint8)]
        over_classes, by_class, thresholds = self._metrics_of(scores, truths, int(count))
        self.predictions = self._rows_of(scores, truths, np.array(thresholds))
        names = list(self.classes or map(str, range(outputs)))
        by_name = {
            metric: dict(zip(names, values, strict=False)) for metric, values in by_class.items()
        }
        return {
            "loss": loss / count,
            **over_classes,
            "num_samples": int(count),
            **by_name,
            "thresholds": thresholds,
        }

    def _rows_of(
        self, scores: list[np.ndarray], truths: list[np.ndarray], thresholds: np.ndarray
    ) -> Predictions:
        """Returns the predictions for this rank's images; none without REPORT.

        They are made a batch at a time, because probabilities take 8 bytes.
        """
        predictions = Predictions()
        if not self.config.REPORT:
            return predictions
        for logits, truth in zip(scores, truths, strict=True):
            probabilities = sigmoid(logits)
            worst = np.abs(probabilities - truth).argmax(1)
            probability = np.take_along_axis(probabilities, worst[:, None], 1)[:, 0]
            predictions.add(
                truth=np.packbits(truth, 1),
                told=np.packbits(probabilities >= thresholds, 1),
                worst=worst,
                probability=probability,
            )
        return predictions

    def _metrics_of(
        self, scores: list[np.ndarray], truths: list[np.ndarray], count: int
    ) -> tuple[dict[str, float], dict[str, list[float | None]], list[float]]:
        """Returns the metrics of all ranks' images, which are ``count``.

        Each rank computes those of its share of the classes. They depend on no order of the images,
        so they are the same bits for every number of ranks.

        Args:
            scores: this rank's batches of logits, [B, K] each.
            truths: 1 where its images have the classes, else 0, [B, K] each.

        Returns:
            (metrics over all classes by name, lists by class of metrics by name, thresholds).
        """
        outputs = self.config.MODEL.NUM_CLASSES
        # The classes that a rank can hold of all images at a time.
        most_classes = max(1, _MOST_SCORES // max(1, count))
        lengths = all_gather(sum(map(len, scores)))
        by_label: dict[int, tuple] = {}
        for first in range(0, outputs, most_classes * world_size()):
            each = min(most_classes, -(-(outputs - first) // world_size()))
            # The first class of each rank. The last ranks may compute some classes that others
            # compute, too.
            begins = [min(first + place * each, outputs - each) for place in range(world_size())]
            logits = _of_all_images(scores, begins, each, lengths)
            truth = _of_all_images(truths, begins, each, lengths)
            for label, row, true in zip(
                range(begins[rank()], outputs), logits, truth, strict=False
            ):
                # A plain tuple, as only plain values are sent between ranks.
                by_label[label] = tuple(self._of_class(label, rank_images(sigmoid(row), true)))
        for gathered in all_gather(by_label):
            by_label |= gathered
        classes = [_ClassMetrics(*by_label[label]) for label in range(outputs)]

        precisions = [of_class.precision for of_class in classes]
        answers = np.array([of_class.answers for of_class in classes]).T
        answers_at_half = np.array([of_class.answers_at_half for of_class in classes]).T
        over_classes = {"mAP": 100 * _mean(precisions)}
        for suffix, counts in (("", answers), ("_at_half", answers_at_half)):
            over_classes[f"f1_micro{suffix}"] = 100 * float(f1(*counts.sum(1)))
            over_classes[f"f1_macro{suffix}"] = 100 * float(f1(*counts)[counts[2] > 0].mean())
        by_class = {
            "class_ap": [None if ap is None else 100 * ap for ap in precisions],
            "class_f1": [
                None if ap is None else 100 * float(value)
                for ap, value in zip(precisions, f1(*answers), strict=True)
            ],
        }
        return over_classes, by_class, [of_class.threshold for of_class in classes]

    def _of_class(self, label: int, ranked: Ranked) -> _ClassMetrics:
        fixed = self.thresholds
        threshold = best_threshold(ranked) if fixed is None else float(fixed[label])
        return _ClassMetrics(
            precision=average_precision(ranked),
            threshold=threshold,
            answers=count_predictions(ranked, threshold),
            answers_at_half=count_predictions(ranked, _HALF),
        )

    def description_of(self, metrics: Metrics) -> dict[str, Any]:
        return {"thresholds": metrics["thresholds"]}


def _of_all_images(
    batches: list[np.ndarray], begins: list[int], each: int, lengths: Sequence[int]
) -> np.ndarray:
    """Returns the values of this rank's classes for all ranks' images, [each, n].

    Every rank calls it.

    Args:
        batches: this rank's, [B, K] each.
        begins: each rank's first class.
        each: the number of classes of a rank.
        lengths: each rank's number of images.
    """
    for_ranks = np.empty([len(begins), each, lengths[rank()]], batches[0].dtype)
    for target, begin in zip(for_ranks, begins, strict=True):
        columns = [batch[:, begin : begin + each].T for batch in batches]
        np.concatenate(columns, 1, out=target)
    return np.concatenate(all_to_all(for_ranks, lengths), 1)


def _mean(values: Sequence[float | None]) -> float:
    """Returns the mean of those that aren't None."""
    return float(np.mean([value for value in values if value is not None]))
