"""The task of images that have any number of classes each: a yes or a no for each class, its average precision."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from configs.registry import tasks
from errors import InputError
from options import Configuration
from training.checkpoint import thresholds_of
from training.classification import Classification
from training.figures import average_precision, best_threshold, count_answers, f1, sigmoid
from training.losses import binary_cross_entropy
from training.predictions import Predictions
from training.task import Batch, Metrics
from utils import all_gather, all_reduce_sum

_HALF = 0.5  # the threshold that other toolkits take for every class
_PIECE = 1 << 22  # scores that ranks bring together at a time


@tasks.register("multilabel", metrics="mAP f1_micro f1_macro")
class MultiLabel(Classification):
    """Images of any number of classes each.

    A class's threshold is that of the highest F1 on the validation set. It travels with the weights, and an evaluation
    of them uses it. Weights that have none get 0.5.
    """

    best = "mAP"
    lines: ClassVar[dict[str, str]] = {
        "train": "loss: {loss:.4f}",
        "val": "loss: {loss:.4f}, mAP: {mAP:.2f}, f1_micro: {f1_micro:.2f}, f1_macro: {f1_macro:.2f}",
        "best": "mAP: {mAP:.2f}",
        "result": "mAP: {mAP:.2f}, f1_micro: {f1_micro:.2f}, f1_macro: {f1_macro:.2f}, loss: {loss:.4f}",
    }
    curves: ClassVar[dict[str, str]] = {"loss": "loss", "mAP": "mean average precision (%)", "lr": "learning rate"}

    def __init__(self, config: Configuration, classes: Sequence[str] = ()) -> None:
        super().__init__(config, classes)
        outputs, weights = config.MODEL.NUM_CLASSES, config.MODEL
        told = thresholds_of(weights.PRETRAINED, weights.PRETRAINED_ADAPTER) if config.EVAL else []
        if told and len(told) != outputs:
            raise InputError(f"{config.MODEL.PRETRAINED} has {len(told)} thresholds, the model {outputs} outputs")
        self.thresholds = np.array(told or [_HALF] * outputs) if config.EVAL else None
        which = "the weights' own" if told else "0.5 of each class: the weights have none"
        which = which if config.EVAL else "of the highest F1 on the validation set, chosen anew at each evaluation"
        self.note = f"thresholds: {which}; an evaluation holds {5 * outputs:,} bytes for each image of a process"

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        images, targets = self.transform(batch, epoch)
        return {"loss": self.criterion(images, network(images), targets)}

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns ``loss`` (the classes' mean binary cross-entropy), ``mAP``, ``f1_micro`` and ``f1_macro``, these two
        at 0.5 as well (``_at_half``), in percent, and ``num_samples``; ``class_ap``, ``class_f1``, ``thresholds``.

        ``class_ap`` and ``class_f1`` are by name, None for a class that no image has; ``mAP`` and ``f1_macro`` are the
        means over the others, ``f1_micro`` is of all answers together. ``thresholds`` are by output.
        """
        outputs = self.config.MODEL.NUM_CLASSES
        total, scores, truths = paddle.zeros([2], "float64"), [], []
        for batch in batches:
            logits, truth = forward(self.normalize(batch["pixels"])).astype("float32"), batch["labels"]
            losses = binary_cross_entropy(logits, truth.astype("float32")).mean(1)
            total += paddle.stack([losses, paddle.ones_like(losses)]).astype("float64").sum(1)
            scores.append(logits)
            truths.append(truth)
        loss, count = map(float, all_reduce_sum(total).numpy())
        own = [paddle.concat(rows).numpy() if rows else np.zeros([0, outputs], np.float32) for rows in (scores, truths)]
        found = self._by_class(own[0], own[1].astype(bool), int(count))
        names = list(self.classes or map(str, range(outputs)))
        numbers, thresholds = found.pop("numbers"), found.pop("thresholds")
        self.predictions = self._rows_of(own[0], own[1].astype(bool), np.array(thresholds))
        by_name = {name: dict(zip(names, values, strict=False)) for name, values in found.items()}
        return {"loss": loss / count, **numbers, "num_samples": int(count), **by_name, "thresholds": thresholds}

    def _rows_of(self, scores: np.ndarray, truth: np.ndarray, thresholds: np.ndarray) -> Predictions:
        """Returns the predictions for this rank's images: some rows at a time, as probabilities take 8 bytes."""
        kept = Predictions()
        several = max(1, _PIECE // scores.shape[1])
        for first in range(0, len(scores) if self.config.REPORT else 0, several):
            shares, there = sigmoid(scores[first : first + several]), truth[first : first + several]
            worst = np.abs(shares - there).argmax(1)
            probability = np.take_along_axis(shares, worst[:, None], 1)[:, 0]
            bits = {"truth": np.packbits(there, 1), "told": np.packbits(shares >= thresholds, 1)}
            kept.add(**bits, worst=worst, probability=probability)
        return kept

    def _by_class(self, scores: np.ndarray, truths: np.ndarray, count: int) -> dict[str, Any]:
        """Returns what the logits and truths of all ranks, [rows, K] each, of ``count`` rows in all, come to."""
        outputs, precisions, thresholds, counts, halves = scores.shape[1], [], [], [], []
        several = max(1, _PIECE // max(1, count))
        for first in range(0, outputs, several):
            parts = all_gather([rows[:, first : first + several] for rows in (scores, truths)])
            logits, truth = (np.concatenate(rows) for rows in zip(*parts, strict=True))
            for place, column in enumerate(sigmoid(logits).T):
                there = truth[:, place]
                precisions.append(average_precision(column, there))
                chosen = best_threshold(column, there) if self.thresholds is None else self.thresholds[first + place]
                thresholds.append(float(chosen))
                counts.append(count_answers(column, there, thresholds[-1]))
                halves.append(count_answers(column, there, _HALF))
        numbers = {"mAP": 100 * _mean(precisions)}
        for ending, at in (("", np.array(counts).T), ("_at_half", np.array(halves).T)):
            numbers[f"f1_micro{ending}"] = 100 * float(f1(*at.sum(1)))
            numbers[f"f1_macro{ending}"] = 100 * float(f1(*at)[at[2] > 0].mean())
        each = f1(*np.array(counts).T)
        percent = [None if ap is None else 100 * ap for ap in precisions]
        shares = [None if ap is None else 100 * float(own) for ap, own in zip(precisions, each, strict=True)]
        return {"numbers": numbers, "class_ap": percent, "class_f1": shares, "thresholds": thresholds}

    def description_of(self, metrics: Metrics) -> dict[str, Any]:
        return {"thresholds": metrics["thresholds"]}


def _mean(values: list[float | None]) -> float:
    """The mean of those that there are."""
    return float(np.mean([value for value in values if value is not None]))
