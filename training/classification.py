"""Classification: images of one class each, trained by a cross-entropy.

An evaluation counts the share of images whose label is the first guess (``acc1``), or one of the
first five (``acc5``). With RETRIEVAL it also ranks the images by how similar their embeddings are
(``training.retrieval``).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn

from config import get_config, with_values
from datasets import ImageDataset
from errors import InputError
from launch.progress import EVALUATING, beat
from loading.label_sets import every_label
from loading.scales import check_scales
from loading.transforms import BatchTransform, Normalize
from loading.transforms.naflex import packing
from models import architecture, build_model, with_switches
from models.base import ImageModel
from models.costs import model_of
from settings.configuration import Configuration
from settings.registry import tasks
from training.embeddings import Embeddings
from training.equal_ranks import load_equal
from training.feature_distillation import FEATURE, LastMap, check_alignment, make_student
from training.losses import (
    CrossEntropy,
    Teacher,
    build_criterion,
    reads_tokens,
)
from training.predictions import Predictions
from training.retrieval import normalised, percentages, retrieval_sums
from training.run import Run
from training.task import MASK, Batch, Metrics, Task, inputs_of, sum_of_each
from utils import all_gather, all_reduce_sum, rank


@tasks.register("classification", metrics="acc1 acc5 mean_class_acc")
class Classification(Task):
    """The task of images of one class each."""

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
        self.embeddings = Embeddings()
        if config.MODEL.NUM_CLASSES < 5:
            self.note = f"acc5 counts the first {config.MODEL.NUM_CLASSES}: there are fewer than five classes"

    def build_network(self) -> ImageModel:
        """Returns the model, with the projection that a feature distillation needs.

        Raises:
            InputError: as of ``build_teacher``; or the loss or RETRIEVAL needs embeddings, and the
                model has several classifiers.
        """
        model = build_model(self.config)
        if self.config.TRAIN.DISTILLATION_TYPE == FEATURE and not self.config.EVAL:
            # The projection has the width of the teacher, which isn't built for this.
            teacher = model_of(_teacher_config(self.config))
            make_student(model, teacher.feature_info[-1]["num_chs"])
        if self.config.RETRIEVAL is not None:
            self.embeddings.watch(model, "RETRIEVAL")
        elif self.config.TRAIN.LOSS == "triplet" and not self.config.EVAL:
            self.embeddings.watch(model, "TRAIN.LOSS triplet")
        return model

    def prepare_data(self, dataset: ImageDataset, mode: str) -> None:
        """Prepares a dataset as every task does.

        Raises:
            InputError: RETRIEVAL is set, and no two validation images have one class.
        """
        super().prepare_data(dataset, mode)
        if mode == "val" and self.config.RETRIEVAL is not None:
            _, counts = np.unique(every_label(dataset.labels), return_counts=True)
            if counts.max() < 2:
                raise InputError(
                    f"RETRIEVAL is {self.config.RETRIEVAL}, but no two of the {len(dataset)} validation"
                    " images have the same class; set it to null"
                )
        if self.config.DATA.NUM_TOKENS is not None:
            dataset.pack(packing(self.config))

    def prepare(self, model: nn.Layer, train: ImageDataset, run: Run) -> None:
        """Builds the transform of batches, and the loss with its teacher.

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
                    f"TRAIN.LOSS is {self.config.TRAIN.LOSS}, but {name} doesn't classify"
                    " patches; choose a"
                    " model that does, such as VOLO"
                )
            model.dense_training = True
            model.mix_token = self.criterion.base.mix

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        images, targets = self.transform(batch, epoch)
        outputs = network(*inputs_of(images, batch))
        if self.config.TRAIN.LOSS == "triplet":
            outputs = (outputs, self.embeddings.last)
        losses = self.criterion(images, outputs, targets)
        logits = outputs[0] if isinstance(outputs, tuple | list) else outputs
        return {"loss": losses, **hits(logits.detach(), targets)}

    def line(self, place: str, metrics: Metrics) -> str:
        """Returns metrics as every task does, followed by two of retrieval."""
        text = super().line(place, metrics)
        if self.config.RETRIEVAL is None or place == "train":
            return text
        recall = f"recall_{self.config.RETRIEVAL[0]}"
        return f"{text}, {recall}: {metrics[recall]:.2f}, mAP: {metrics['mAP']:.2f}"

    def evaluate(self, forward: Callable[..., Any], batches: Iterator[Batch]) -> Metrics:
        """Returns ``loss``, ``acc1``, ``acc5``, ``mean_class_acc``, ``class_acc`` (percent) and
        ``num_samples``; with RETRIEVAL also the metrics of ``training.retrieval``.

        ``class_acc`` is by name, with None for a class without a sample. ``mean_class_acc`` is the
        mean over the other classes. An image of several labels counts for each of them.
        """
        criterion = CrossEntropy()
        outputs = self.config.MODEL.NUM_CLASSES
        # Sums over the samples: loss, acc1, acc5, and their number.
        total = paddle.zeros([4], "float64")
        # By class, its samples that were right and all of them.
        by_class = paddle.zeros([outputs, 2], "float64")
        self.predictions = Predictions()
        # Of this rank's images, with RETRIEVAL.
        embeddings = []
        embedded_labels = []
        for batch in batches:
            logits = forward(*inputs_of(self.normalize(batch["pixels"]), batch))
            labels = batch["labels"]
            if self.config.RETRIEVAL is not None:
                embeddings.append(self.embeddings.last.astype("float32").numpy())
                embedded_labels.append(labels.numpy())
            # Of several labels [B, K] any is right (DATA.LABELS, DATA.CLASSES).
            several = labels.ndim == 2
            if several:
                values = any_of(logits, labels)
            else:
                values = {"loss": criterion(logits, labels)}
                values |= hits(logits, labels)
            values["count"] = paddle.ones_like(values["acc1"])
            total += sum_of_each(values)
            if self.config.REPORT:
                self.predictions.add(**_outcomes(logits, labels))
            right = (values["acc1"] > 0).astype("float64")
            counted = paddle.stack([right, paddle.ones_like(right)], 1)
            if several:
                by_class += paddle.matmul(labels.astype("float64"), counted, transpose_x=True)
            else:
                by_class = paddle.index_add(by_class, labels, 0, counted)
        sums = all_reduce_sum(paddle.concat([total, by_class.flatten()])).numpy()
        loss, acc1, acc5, count = sums[:4].tolist()
        class_acc = [
            100 * float(right / samples) if samples else None
            for right, samples in sums[4:].reshape(-1, 2)
        ]
        names = self.classes or map(str, range(outputs))
        retrieved = {}
        if self.config.RETRIEVAL is not None:
            retrieved = _retrieval(embeddings, embedded_labels, self.config.RETRIEVAL)
        return {
            "loss": loss / count,
            "acc1": acc1 / count,
            "acc5": acc5 / count,
            "mean_class_acc": float(np.mean([acc for acc in class_acc if acc is not None])),
            **retrieved,
            "num_samples": int(count),
            "class_acc": dict(zip(names, class_acc, strict=False)),
        }


def _retrieval(
    embeddings: Sequence[np.ndarray], labels: Sequence[np.ndarray], ks: Sequence[int]
) -> Metrics:
    """Returns the metrics of retrieval in percent, of the images of all ranks.

    Each rank compares its own images with all others. It holds the embeddings of all of them, and
    no more than some millions of similarities at a time.

    Args:
        embeddings, labels: of this rank's batches, [B, D] and [B] each.
        ks: the K of Recall@K.
    """
    by_rank = all_gather((list(embeddings), list(labels)))
    count = sum(map(len, itertools.chain.from_iterable(of_rank for _, of_rank in by_rank)))
    width = max(values.shape[1] for of_rank, _ in by_rank for values in of_rank)
    all_embeddings = np.empty((count, width), np.float32)
    all_labels = np.empty(count, np.int64)
    ranks = len(by_rank)
    # Rank r has evaluated every R-th image from the r-th on (``EvalBatchSampler``). In the data's
    # order, ties don't depend on the number of ranks.
    for r, (of_rank, labels_of_rank) in enumerate(by_rank):
        if of_rank:
            all_embeddings[r::ranks] = normalised(np.concatenate(of_rank))
            all_labels[r::ranks] = np.concatenate(labels_of_rank)
    sums = retrieval_sums(
        all_embeddings, all_labels, np.arange(rank(), count, ranks), ks, lambda: beat(EVALUATING)
    )
    return percentages(all_reduce_sum(paddle.to_tensor(sums)).numpy(), ks)


def hits(logits: paddle.Tensor, targets: paddle.Tensor) -> Batch:
    """Returns which samples are right in the first guess ("acc1") and in the first five ("acc5").

    Each is [B] float32, 100 or 0. With fewer than five classes "acc5" counts all of them. Of equal
    logits the lowest class comes first, and NaN comes before all numbers.

    Args:
        logits: [B, K].
        targets: labels [B], or distributions [B, K], whose largest share counts as the label.
    """
    labels = (targets if targets.ndim == 1 else targets.argmax(1)).unsqueeze(1)
    logits = logits.astype("float32")
    classes = logits.shape[1]
    # The label's place is the number of classes before it, as topk would take any of equal logits.
    # A comparison with NaN is false, so that NaN counts as before the label.
    of_label = paddle.take_along_axis(logits, labels, 1)
    tied = (logits == of_label) & (paddle.arange(classes) >= labels)
    not_before = (logits < of_label) | tied
    place = classes - not_before.astype("int64").sum(1)
    return {"acc1": _percent(place < 1), "acc5": _percent(place < min(5, classes))}


def _percent(right: paddle.Tensor) -> paddle.Tensor:
    return right.astype("float32") * 100


def best_class(logits: paddle.Tensor) -> paddle.Tensor:
    """Returns the class of the highest logit, the lowest of equal ones: [B, K] -> [B] int64."""
    # On a GPU argmax is -1 where all logits are NaN.
    return logits.astype("float32").argmax(1).clip(min=0)


def any_of(logits: paddle.Tensor, labels: paddle.Tensor) -> Batch:
    """Returns the counts of an evaluation in which any of several labels is right, each [B] float32.

    ``acc1`` and ``acc5`` are as in ``hits``. ``loss`` is minus the logarithm of the labels' summed
    probability. With one label for each image all are as usual.

    Args:
        logits: [B, K].
        labels: [B, K] of 0 and 1; at least one is 1 for each image (Beyer et al. 2020,
            arXiv:2006.07159).
    """
    logits = logits.astype("float32")
    of_labels = logits + (labels.astype("float32") - 1) * MASK
    loss = paddle.logsumexp(logits, 1) - paddle.logsumexp(of_labels, 1)
    return {"loss": loss, **hits(logits, best_class(of_labels))}


def _outcomes(logits: paddle.Tensor, labels: paddle.Tensor) -> Batch:
    """Returns the record of each sample: its label, the predicted class and its probability.

    Of several labels the predicted one is kept if it is among them, otherwise the first.
    """
    predicted = best_class(logits)
    logits = logits.astype("float32")
    probability = (logits.max(1) - paddle.logsumexp(logits, 1)).exp()
    if labels.ndim == 2:
        labels = labels.astype("int64")
        right = paddle.take_along_axis(labels, predicted.unsqueeze(1), 1)[:, 0] > 0
        labels = paddle.where(right, predicted, labels.argmax(1))
    return {"label": labels, "predicted": predicted, "probability": probability}


def build_teacher(config: Configuration, run: Run, student: Any) -> Teacher | None:
    """Returns the trained teacher of TRAIN.DISTILLATION_TYPE; None if it isn't set.

    Raises:
        InputError: its weights, its classes or its images don't fit.
    """
    if config.TRAIN.DISTILLATION_TYPE is None:
        return None
    path = config.TRAIN.TEACHER_PATH
    teacher_config = with_switches(_teacher_config(config), path)
    teacher = build_model(teacher_config)
    check_scales(config, teacher)
    report = load_equal(teacher, teacher_config, "teacher", "TRAIN.TEACHER_PATH", path)
    run.info(f"teacher {teacher_config.MODEL.NAME}: {report}")
    # The student's mean and deviation, then the teacher's: images are normalised again for it.
    scales = [
        each.DATA[name]
        for each in (config, teacher_config)
        for name in ("IMAGENET_MEAN", "IMAGENET_STD")
    ]
    if config.TRAIN.DISTILLATION_TYPE == FEATURE:
        check_alignment(student, teacher)
        return Teacher(LastMap(teacher), *scales)
    return Teacher(teacher, *scales)


def _teacher_config(config: Configuration) -> Configuration:
    """Returns the teacher's configuration, for images of the student's size.

    Raises:
        InputError: no teacher is given, or its classes or its images aren't the student's.
    """
    train = config.TRAIN
    if not (train.TEACHER_MODEL and train.TEACHER_PATH):
        raise InputError(
            f"DISTILLATION_TYPE is {train.DISTILLATION_TYPE}, but TEACHER_MODEL is"
            f" {train.TEACHER_MODEL} and TEACHER_PATH {train.TEACHER_PATH};"
            " set the teacher's YAML file and weights, or DISTILLATION_TYPE none"
        )
    teacher = get_config(train.TEACHER_MODEL)
    # An architecture that takes images of any size takes the student's.
    if architecture(teacher).min_image_size:
        teacher = with_values(teacher, DATA__IMAGE_SIZE=config.DATA.IMAGE_SIZE)
    keys = ["MODEL.NUM_CLASSES", "DATA.IMAGE_SIZE", "DATA.IMAGE_CHANNELS"]
    if train.DISTILLATION_TYPE == FEATURE:
        # Features are compared, not classes.
        keys.remove("MODEL.NUM_CLASSES")
    for key in keys:
        section, name = key.split(".")
        of_student = config[section][name]
        of_teacher = teacher[section][name]
        if of_student != of_teacher:
            raise InputError(
                f"the teacher {train.TEACHER_MODEL} has {key} {of_teacher}, the student"
                f" {of_student}; make them equal"
            )
    return teacher
