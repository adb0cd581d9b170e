"""FixMatch (Sohn et al. 2020, arXiv:2001.07685) and pseudo-labels (Lee 2013): classification with few
labels and many images.

What the model says of an unlabelled image becomes its label, if the model is sure. With FixMatch,
the label is taken from a weak view of the image, and learnt on a strong one.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import paddle
from paddle import nn

from config import with_values
from datasets import ImageDataset, get_dataset
from errors import InputError
from loading.few_labels import FewLabels, labelled_places
from loading.label_sets import LabelSets
from loading.transforms import RandomErasing
from settings.configuration import Configuration, leaves
from settings.keys import (
    Factor,
    FilePath,
    InTraining,
    Number,
    Share,
    Size,
    WholeEpochs,
    above_zero,
    is_set,
)
from settings.registry import tasks
from training.classification import Classification, best_class, hits
from training.equal_ranks import check_images
from training.losses import build_criterion
from training.losses.softmax import label_losses, log_softmax
from training.run import Run
from training.task import Batch
from utils import world_size

# What the values of keys that other tasks read may be here.
_ALLOWED = {
    "TRAIN.MIXUP_ALPHA": (0.0,),
    "TRAIN.CUTMIX_ALPHA": (0.0,),
    "TRAIN.CUTMIX_MINMAX": (None,),
    "TRAIN.LOSS": ("auto", "cross_entropy"),
    "TRAIN.DISTILLATION_TYPE": (None,),
    "TRAIN.REPEATED_AUGMENT": (1,),
    "DATA.SAMPLER": ("shuffle",),
    "DATA.SHUFFLE_MODE": ("global",),
    "DATA.SHARD_SHUFFLE": (None,),
    "DATA.LOADER": ("paddle",),
}


@tasks.register("fixmatch", metrics="acc1 acc5 mean_class_acc")
class FixMatch(Classification):
    """The task of classifying images of which few have labels.

    A sample is one labelled image and ``unlabelled_ratio`` unlabelled ones: DATA.BATCH_SIZE counts
    the labelled ones. All training images are among the unlabelled ones, those with labels, too. An
    epoch shows each unlabelled image once (``loading.few_labels``).

    A weak view of an image has the crop, AFFINE and the flips of TRAIN. A strong view also has
    AUTO_AUGMENT, COLOR_JITTER, PHOTOMETRIC and random erasing. One forward pass computes all views,
    so that a batch norm sees all of them. The evaluation is that of classification.

    Args:
        labels_per_class: number of images of each class that keep their labels. The other images
            are used without labels. None: all keep them.
        labels_seed: random seed of the choice of images that keep their labels. It is independent
            of SEED.
        unlabelled: a folder of additional images without labels, which is searched recursively.
            None: no such images.
        unlabelled_ratio: number of unlabelled images per labelled image in a step (mu in the
            paper).
        threshold: the probability that a prediction needs to be used as a label (tau in the paper).
        unlabelled_weight: weight of the loss of unlabelled images. 0: they aren't read, and only
            the labelled images are trained on, with the same number of updates.
        ramp_epochs: number of epochs in which the weight of unlabelled images rises from 0 to
            UNLABELLED_WEIGHT (Lee 2013). 0: it is constant.
        pseudo_labels: what predicts the pseudo-labels. "model": the model in training. "average":
            the moving average of its weights (TRAIN.MODEL_EMA).
        strong_view: whether pseudo-labels are learnt on a strongly augmented view, as in FixMatch.
            Otherwise they are learnt on the weakly augmented view from which they were predicted.
        strong_labelled: whether labelled images are strongly augmented. Otherwise they are weakly
            augmented.
    """

    lines: ClassVar[dict[str, str]] = {
        **Classification.lines,
        "train": "loss: {loss:.4f}, acc1: {acc1:.2f}, mask: {mask:.1f}",
    }
    curves: ClassVar[dict[str, str]] = {
        "loss": "loss",
        "acc1": "top-1 accuracy (%)",
        "mask": "images above the threshold (%)",
        "lr": "learning rate",
    }

    def __init__(
        self,
        config: Configuration,
        classes: Sequence[str] = (),
        *,
        labels_per_class: InTraining[Size] | None = None,
        labels_seed: Annotated[InTraining[Number], is_set("METHOD.LABELS_PER_CLASS")] = 0,
        unlabelled: InTraining[FilePath] | None = None,
        unlabelled_ratio: InTraining[Size] = 7,
        threshold: Annotated[InTraining[Share], above_zero("METHOD.UNLABELLED_WEIGHT")] = 0.95,
        unlabelled_weight: InTraining[Factor] = 1.0,
        ramp_epochs: Annotated[InTraining[WholeEpochs], above_zero("METHOD.UNLABELLED_WEIGHT")] = 0,
        pseudo_labels: Annotated[
            InTraining[Literal["model", "average"]], above_zero("METHOD.UNLABELLED_WEIGHT")
        ] = "model",
        strong_view: Annotated[InTraining[bool], above_zero("METHOD.UNLABELLED_WEIGHT")] = True,
        strong_labelled: InTraining[bool] = False,
    ) -> None:
        super().__init__(config, classes)
        self.labels_per_class = labels_per_class
        self.labels_seed = labels_seed
        self.folder = unlabelled
        self.ratio = unlabelled_ratio
        self.threshold = threshold
        self.weight = unlabelled_weight
        self.ramp_epochs = ramp_epochs
        self.from_average = pseudo_labels == "average"
        self.strong_view = strong_view and unlabelled_weight > 0
        self.strong_labelled = strong_labelled
        if not config.EVAL:
            self._check()

    def _check(self) -> None:
        """Raises InputError if keys of a training contradict the task or each other."""
        config = self.config
        values = dict(leaves(config))
        for key, allowed in _ALLOWED.items():
            if values[key] not in allowed:
                expected = " or ".join(map(str, allowed))
                raise InputError(
                    f"{key} is {values[key]}, expected {expected} with TASK {config.TASK}"
                )
        if self.labels_per_class is None and self.folder is None:
            raise InputError(
                f"TASK {config.TASK} needs images without labels: METHOD.UNLABELLED names a folder of"
                " them, METHOD.LABELS_PER_CLASS hides all but a few labels"
            )
        if self.weight and self.from_average and not config.TRAIN.MODEL_EMA:
            raise InputError(
                "METHOD.PSEUDO_LABELS is average, which needs TRAIN.MODEL_EMA True, found False"
            )
        if self.labels_per_class is not None and config.BEST_METRIC == "knn":
            raise InputError(
                "BEST_METRIC is knn, which reads the labels that METHOD.LABELS_PER_CLASS hides;"
                " choose another"
            )
        train = config.TRAIN
        changes = {
            "TRAIN.AUTO_AUGMENT": train.AUTO_AUGMENT,
            "TRAIN.COLOR_JITTER": train.COLOR_JITTER,
            "TRAIN.PHOTOMETRIC": train.PHOTOMETRIC,
            "TRAIN.RANDOM_ERASE_PROB": train.RANDOM_ERASE_PROB,
        }
        has_strong = self.strong_view or self.strong_labelled
        if has_strong and not any(changes.values()):
            raise InputError(
                f"a strong view differs from a weak one by {', '.join(changes)}, but none of"
                " them is"
                " set; set one, or METHOD.STRONG_VIEW False"
            )
        given = next((key for key, value in changes.items() if value), None)
        if given is not None and not has_strong:
            raise InputError(
                f"{given} is {changes[given]}, but no strong view is used (METHOD.STRONG_VIEW,"
                " METHOD.STRONG_LABELLED, METHOD.UNLABELLED_WEIGHT); leave it out"
            )

    def prepare(self, model: nn.Layer, train: ImageDataset, run: Run) -> None:
        """Chooses the labelled images, reads the unlabelled ones, and builds the loss.

        Raises:
            InputError: a class has too few labelled images, an image has several labels, or an epoch
                is shorter than a step.
        """
        config = self.config
        if isinstance(train.labels, LabelSets):
            raise InputError(
                f"images have several labels, but TASK {config.TASK} needs one label per image"
            )
        classes = config.MODEL.NUM_CLASSES
        labelled = labelled_places(
            train.labels, classes, self.labels_per_class, self.labels_seed, train.classes
        )
        self.few_labels = FewLabels(
            config,
            train,
            labelled,
            self.ratio,
            reads_unlabelled=self.weight > 0,
            strong=self.strong_view,
            strong_labelled=self.strong_labelled,
            further=self._further_images(),
        )
        count = len(self.few_labels)
        batch = config.DATA.BATCH_SIZE * world_size()
        if config.DATA.DROP_LAST and count < batch:
            raise InputError(
                f"{self.few_labels.unlabelled} unlabelled images make {count} samples with"
                f" METHOD.UNLABELLED_RATIO {self.ratio}, less than one global batch of {batch}; lower"
                " the batch size or the ratio, or set DATA.DROP_LAST False"
            )
        self.erase = RandomErasing(config) if config.TRAIN.RANDOM_ERASE_PROB else None
        self.criterion = build_criterion(config, self.few_labels.labels)
        run.info(
            f"{len(labelled):,} labelled images of {classes} classes;"
            f" {self.few_labels.unlabelled:,} unlabelled ones, {self.ratio} in each of the"
            f" {count:,} samples of an epoch"
        )

    def _further_images(self) -> ImageDataset | None:
        """Returns the images of METHOD.UNLABELLED; None: there are none.

        Raises:
            InputError: the folder can't be read, has no images, or other ones on another rank.
        """
        if self.folder is None:
            return None
        config = with_values(
            self.config,
            "METHOD.UNLABELLED",
            DATA__DATASET="images",
            DATA__DATA_PATH=self.folder,
            DATA__VAL_SPLIT=None,
            DATA__FOLDS=None,
        )
        images = get_dataset(config, "train", alone=True, pixels_alone=True)
        check_images(images, "unlabelled")
        return images

    def samples(self, train: ImageDataset) -> ImageDataset:
        return self.few_labels

    def step(self, network: nn.Layer, batch: Batch, epoch: int) -> Batch:
        views = self._views(batch)
        if not self.weight:
            logits = _logits(network(views["pixels"]))
            losses = self.criterion(views["pixels"], logits, batch["labels"])
            return {
                "loss": losses,
                "mask": paddle.zeros_like(losses),
                **hits(logits.detach(), batch["labels"]),
            }
        count = len(views["pixels"])
        names = ["pixels", "weak", "strong"]
        if self.from_average and self.strong_view:
            names.remove("weak")
        if not self.strong_view:
            names.remove("strong")
        # The labelled images come first, the ones that learn from pseudo-labels last.
        logits = _logits(network(paddle.concat([views[name] for name in names])))
        of_labelled = logits[:count]
        of_unlabelled = logits[-count * self.ratio :]
        if self.from_average:
            with paddle.no_grad():
                predicted = _logits(self.average(views["weak"]))
        else:
            predicted = logits[count : count * (1 + self.ratio)].detach()
        # The losses are in float32, under autocast, too.
        with paddle.amp.auto_cast(enable=False):
            losses = self.criterion(views["pixels"], of_labelled, batch["labels"])
            pseudo = pseudo_label_losses(predicted, of_unlabelled, self.threshold)
        if self.folder is None:
            right = best_class(predicted) == batch["true_labels"].flatten()
            pseudo["mask_right"] = pseudo["mask"] * right.astype("float32")
        values = {name: of_each.reshape([count, -1]).mean(1) for name, of_each in pseudo.items()}
        return {
            "loss": losses + self.weight_at(epoch) * values["unlabelled_loss"],
            "labelled_loss": losses,
            **values,
            **hits(of_labelled.detach(), batch["labels"]),
        }

    def weight_at(self, epoch: int) -> float:
        """Returns the weight of the unlabelled images' loss in an epoch, from 1."""
        if not self.ramp_epochs:
            return self.weight
        return self.weight * min(1.0, (epoch - 1) / self.ramp_epochs)

    def _views(self, batch: Batch) -> Batch:
        """Returns the normalised views by the name of their column, [B, C, H, W] or [B * ratio, C, H,
        W], with boxes of the strong ones erased.
        """
        views = {"pixels": self.normalize(batch["pixels"])}
        for name in ("weak", "strong"):
            if name in batch:
                views[name] = self.normalize(batch[name].flatten(0, 1))
        if self.erase is not None:
            drawn = batch["erased"]
            erase = self.erase.at(views["pixels"].shape[2:])
            if self.strong_labelled:
                views["pixels"] = erase(views["pixels"], drawn[:, 0])
            if "strong" in views:
                views["strong"] = erase(views["strong"], drawn[:, -self.ratio :].flatten(0, 1))
        return views


def pseudo_label_losses(predicted: paddle.Tensor, logits: paddle.Tensor, threshold: float) -> Batch:
    """Returns "unlabelled_loss" and "mask" of each image, [N] float32.

    The pseudo-label is the class of the highest probability, the lowest of equal ones. Where that
    probability is at least the threshold, the loss is the cross-entropy of the pseudo-label, and the
    mask is 100 (percent). Otherwise both are 0.

    Args:
        predicted: logits [N, K] that give the pseudo-labels; they get no gradient.
        logits: [N, K], to which the loss belongs.
    """
    predicted = predicted.detach().astype("float32")
    labels = best_class(predicted)
    is_sure = log_softmax(predicted).max(1).exp() >= threshold
    losses = label_losses(logits, labels)
    return {
        "unlabelled_loss": paddle.where(is_sure, losses, paddle.zeros_like(losses)),
        "mask": is_sure.astype("float32") * 100,
    }


def _logits(outputs: Any) -> paddle.Tensor:
    """Returns the logits of a model's outputs, of which others may follow them in training."""
    return outputs[0] if isinstance(outputs, tuple | list) else outputs
