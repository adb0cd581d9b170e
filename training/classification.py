"""The task of classifiers: pixels and labels, a cross-entropy, hits in the first one and the first
five.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from config import get_config, with_values
from datasets import ImageDataset
from errors import InputError
from loading.scales import check_scales
from loading.transforms import BatchTransform, Normalize
from models import architecture, build_model, with_switches
from models.base import ImageModel
from models.costs import model_of
from settings.options import Configuration
from settings.registry import tasks
from training.equal_ranks import check_loaded, check_teacher
from training.features import FEATURE, LastMap, check_alignment, make_student
from training.losses import CrossEntropy, Teacher, build_criterion, reads_tokens
from training.predictions import Predictions
from training.run import Run
from training.task import MASK, Batch, Metrics, Task, sum_of_each
from utils import all_reduce_sum, world_size
from weights import load_weights


@tasks.register("classification", metrics="acc1 acc5 mean_class_acc")
class Classification(Task):
    """Images of one class each. BEST_METRIC says which checkpoint is the best; auto: ``best``."""

    best = "acc1"
    lines: ClassVar[dict[str, str]] = {
        "train": "loss: {loss:.4f}, acc1: {acc1:.2f}",
        "val": "loss: {loss:.4f}, acc1: {acc1:.2f}, acc5: {acc5:.2f}",
        "best": "acc1: {acc1:.2f}",
        "result": "acc1: {acc1:.2f}, acc5: {acc5:.2f}, mean_class_acc: {mean_class_acc:.2f}, loss: {loss:.4f}",
    }
    curves: ClassVar[dict[str, str]] = {
        "loss": "loss",
        "acc1": "top-1 accuracy (%)",
        "lr": "learning rate",
    }

    def __init__(self, config: Configuration, classes: Sequence[str] = ()) -> None:
        super().__init__(config, classes)
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        if config.MODEL.NUM_CLASSES < 5:
            self.note = (
                f"acc5 counts the first {config.MODEL.NUM_CLASSES}: there are no five classes"
            )

    def prepare(self, model: nn.Layer, train: ImageDataset, run: Run) -> None:
        """Builds the batches' transform and the loss, with its teacher.

        Raises:
            InputError: the teacher or the keys of the loss don't fit.
        """
        teacher = build_teacher(self.config, run, model)
        model.distilled_training = (
            teacher is not None and self.config.TRAIN.DISTILLATION_TYPE != FEATURE
        )
        self.transform = BatchTransform(self.config)
        self.criterion = build_criterion(self.config, train.labels, teacher)
        if reads_tokens(self.criterion.base):
            if not hasattr(model, "dense_training"):
                name = type(model).__name__
                raise InputError(
                    f"TRAIN.LOSS is {self.config.TRAIN.LOSS}, but {name} classifies no patches; choose a"
                    " model that does, such as VOLO"
                )
            model.dense_training = True
            model.mix_token = self.criterion.base.mix

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        images, targets = self.transform(batch, epoch)
        outputs = network(images)
        losses = self.criterion(images, outputs, targets)
        logits = outputs[0] if isinstance(outputs, tuple | list) else outputs
        return {"loss": losses, **hits(logits.detach(), targets)}

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns ``loss``, ``acc1``, ``acc5``, ``mean_class_acc``, ``class_acc`` (percent) and
        ``num_samples``.

        ``class_acc`` is by name, with None for a class without a sample; ``mean_class_acc`` the
        mean over the others. An image of several labels counts for each of them.
        """
        criterion = CrossEntropy()
        outputs = self.config.MODEL.NUM_CLASSES
        total = paddle.zeros([4], "float64")
        by_class = paddle.zeros([outputs, 2], "float64")
        self.predictions = Predictions()
        for batch in batches:
            logits = forward(self.normalize(batch["pixels"]))
            labels = batch["labels"]
            several = labels.ndim == 2  # any of them is right (DATA.LABELS, DATA.CLASSES)
            found = (
                any_of(logits, labels)
                if several
                else {"loss": criterion(logits, labels), **hits(logits, labels)}
            )
            total += sum_of_each(found | {"count": paddle.ones_like(found["acc1"])})
            if self.config.REPORT:
                self.predictions.add(**_outcomes(logits, labels))
            hit = (found["acc1"] > 0).astype("float64")
            counted = paddle.stack([hit, paddle.ones_like(hit)], 1)
            if several:
                by_class += paddle.matmul(labels.astype("float64"), counted, transpose_x=True)
            else:
                by_class = paddle.index_add(by_class, labels, 0, counted)
        reduced = all_reduce_sum(paddle.concat([total, by_class.flatten()])).numpy()
        (count, right, counts) = (reduced[3], *reduced[4:].reshape(-1, 2).T)
        metrics: dict[str, float] = dict(
            zip(("loss", "acc1", "acc5"), (reduced[:3] / count).tolist(), strict=True)
        )
        shares = [100 * float(h / n) if n else None for h, n in zip(right, counts, strict=True)]
        metrics["mean_class_acc"] = float(np.mean([share for share in shares if share is not None]))
        names = self.classes or map(str, range(outputs))
        return metrics | {
            "num_samples": int(count),
            "class_acc": dict(zip(names, shares, strict=False)),
        }

    def score(self, metrics: Metrics) -> float:
        key = self.best if self.config.BEST_METRIC == "auto" else self.config.BEST_METRIC
        return -metrics[key] if key == "loss" else metrics[key]


def hits(logits: paddle.Tensor, targets: paddle.Tensor) -> Batch:
    """Returns, by name, which samples are right in the first guess and in the first five (or all,
    of fewer classes). Each is [B] float32, 100 or 0. Of equal logits the lowest class comes first,
    and NaN comes before all numbers.

    Args:
        targets: labels [B], or distributions [B, K], whose largest share counts as the label.
    """
    labels = (targets if targets.ndim == 1 else targets.argmax(1)).unsqueeze(1)
    logits = logits.astype("float32")
    classes = logits.shape[1]
    # The classes before the label are counted, because topk takes any of equal logits. NaN counts
    # as before it.
    own = paddle.take_along_axis(logits, labels, 1)
    not_before = (logits < own) | ((logits == own) & (paddle.arange(classes) >= labels))
    place = classes - not_before.astype("int64").sum(1)
    return {"acc1": _percent(place < 1), "acc5": _percent(place < min(5, classes))}


def _percent(right: paddle.Tensor) -> paddle.Tensor:
    return right.astype("float32") * 100


def best_class(logits: paddle.Tensor) -> paddle.Tensor:
    """Returns the class of the highest logit, the lowest class of equal ones: logits [B, K] -> [B]
    int64.
    """
    # On a GPU argmax is -1 where all are NaN.
    return logits.astype("float32").argmax(1).clip(min=0)


def any_of(logits: paddle.Tensor, labels: paddle.Tensor) -> Batch:
    """Returns what an evaluation counts if any of several labels is right, each [B] float32.
    ``acc1`` and ``acc5`` are as in ``hits``; ``loss`` is minus the logarithm of the labels'
    probability together. Of one label all are as usual.

    Args:
        labels: [B, K] of 0 and 1; at least one is 1 for each image (Beyer et al. 2020,
            arXiv:2006.07159).
    """
    logits = logits.astype("float32")
    of_labels = logits + (labels.astype("float32") - 1) * MASK
    loss = paddle.logsumexp(logits, 1) - paddle.logsumexp(of_labels, 1)
    return {"loss": loss, **hits(logits, best_class(of_labels))}


def _outcomes(logits: paddle.Tensor, labels: paddle.Tensor) -> Batch:
    """Returns what is kept of samples: of several labels the predicted one, if that is right, or
    else the first.
    """
    predicted = best_class(logits)
    logits = logits.astype("float32")
    probability = (logits.max(1) - paddle.logsumexp(logits, 1)).exp()
    if labels.ndim == 2:
        labels = labels.astype("int64")
        right = paddle.take_along_axis(labels, predicted.unsqueeze(1), 1)[:, 0] > 0
        labels = paddle.where(right, predicted, labels.argmax(1))
    return {"label": labels, "predicted": predicted, "probability": probability}


def add_projection(config: Configuration, model: ImageModel) -> None:
    """Adds the projection that TRAIN.DISTILLATION_TYPE feature needs (``make_student``), before the
    teacher is built.

    Raises:
        InputError: as ``build_teacher``.
    """
    if config.TRAIN.DISTILLATION_TYPE == FEATURE:
        make_student(model, model_of(_teachers(config)).feature_info[-1]["num_chs"])


def build_teacher(config: Configuration, run: Run, student: Any) -> Teacher | None:
    """Returns the trained teacher of TRAIN.DISTILLATION_TYPE, or None without one.

    Raises:
        InputError: its weights, its classes or its images don't fit.
    """
    if config.TRAIN.DISTILLATION_TYPE is None:
        return None
    theirs = _teachers(config)
    path = config.TRAIN.TEACHER_PATH
    theirs = with_switches(theirs, path)
    teacher = build_model(theirs)
    check_scales(config, teacher)
    check_teacher(theirs)
    report = load_weights(teacher, path, checksums=world_size() > 1)
    check_loaded("TRAIN.TEACHER_PATH", report.file, report.checksums)
    run.info(f"teacher {theirs.MODEL.NAME}: {report}")
    scales = [c.DATA[name] for c in (config, theirs) for name in ("IMAGENET_MEAN", "IMAGENET_STD")]
    if config.TRAIN.DISTILLATION_TYPE == FEATURE:
        check_alignment(student, teacher)
        return Teacher(LastMap(teacher), *scales)
    return Teacher(teacher, *scales)


def _teachers(config: Configuration) -> Configuration:
    """The teacher's configuration, for the student's images."""
    train = config.TRAIN
    if not (train.TEACHER_MODEL and train.TEACHER_PATH):
        raise InputError(
            f"DISTILLATION_TYPE is {train.DISTILLATION_TYPE}, but TEACHER_MODEL is {train.TEACHER_MODEL} and"
            f" TEACHER_PATH {train.TEACHER_PATH}; give the teacher's YAML and weights, or set DISTILLATION_TYPE none"
        )
    theirs = get_config(train.TEACHER_MODEL)
    if architecture(theirs).min_image_size:  # it takes images of any size
        theirs = with_values(theirs, DATA__IMAGE_SIZE=config.DATA.IMAGE_SIZE)
    for key, own, other in (
        ("MODEL.NUM_CLASSES", config.MODEL.NUM_CLASSES, theirs.MODEL.NUM_CLASSES),
        ("DATA.IMAGE_SIZE", config.DATA.IMAGE_SIZE, theirs.DATA.IMAGE_SIZE),
        ("DATA.IMAGE_CHANNELS", config.DATA.IMAGE_CHANNELS, theirs.DATA.IMAGE_CHANNELS),
    ):
        if own != other and (key, train.DISTILLATION_TYPE) != ("MODEL.NUM_CLASSES", FEATURE):
            raise InputError(
                f"the teacher {train.TEACHER_MODEL} has {key} {other}, the student {own}; make them equal"
            )
    return theirs
