"""A trained model that answers: from images to classes and probabilities, as ``-eval`` computes
them.

The bits are those of ``-eval``. LeViT and MobileOne are folded (``ImageModel.inference_model``) and
agree to rounding.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle

from config import get_config, with_values
from errors import InputError, RunError, printable
from inference import paddlex
from inference.backends import open_export
from inference.folder import Export, is_export, read_export
from inference.pictures import Batch, Picture, Pictures, check_several
from inference.tta import Views, pictures, views
from loading.files import Paths
from loading.transforms import Normalize
from models import build_model
from models.pretrained import build_described, with_preprocessing
from ops.device import set_device_flags
from settings.options import Configuration, explicit_sources, leaves
from training.checkpoint import (
    Description,
    classes_of,
    describe,
    description_of,
    task_of,
    thresholds_of,
)
from training.engine import autocast
from training.figures import sigmoid
from utils import world_size
from weights import load_weights
from weights.hub import best_of_run
from weights.transformers import is_projection


class Prediction(NamedTuple):
    """What a model says of an image, the most probable class first.

    Attributes:
        name: the image's path, or its place.
        outputs: numbers of the model's outputs.
        classes: their names; of a model whose classes aren't known the numbers.
        probabilities: 0 to 1.
    """

    name: str
    outputs: list[int]
    classes: list[str]
    probabilities: list[float]


class Failure(NamedTuple):
    """An image that can't be read, and why, in one line."""

    name: str
    error: str


class Predictor:
    """Predicts the classes of images.

    Args:
        path: weights: a checkpoint's folder or file, a run's folder (its best checkpoint), or what
            ``find_weights`` takes besides; or the folder of an export.
        cfg: the model's YAML file or name; None: what the weights tell themselves.
        options: keys and values, as after ``-o``.
        classes: the outputs' names; None: what the weights tell.
        batch_size: images that are computed together.

    Attributes:
        config: of the model and its images.
        model: the model made for inference (``inference_model``); None for an exported one.
        task: "classification" (probabilities sum up to 1) or "multilabel" (each by itself).
        thresholds: multilabel: the weights' own, by output; empty: 0.5 serves for each.
        classes: names by output; empty: they aren't known.
        report: what was loaded, in a line.
        warning: what is wrong with weights that can still be used; "": nothing.
        weights: the file that was loaded; None: an export.
        path: the weights as they were given, of a run's folder its best checkpoint.
        has_classes: whether the outputs are classes; False: they are features.

    Raises:
        InputError: the weights can't be read, don't tell what they are of, or don't fit.
    """

    def __init__(
        self,
        path: str | Path,
        cfg: str | None = None,
        options: Sequence[str] = (),
        classes: Sequence[str] | None = None,
        batch_size: int = 32,
    ) -> None:
        self.path = path = best_of_run(path)
        options = [*options, "EVAL", "True", "DATA.BATCH_SIZE_EVAL", str(batch_size)]
        export = read_export(path) if is_export(path) else None
        configured = (
            _config_and_description(str(path), cfg, options, classes)
            if export is None
            else _of_export(export, cfg, options)
        )
        self.config, description = configured
        self.task, self.classes = description.task, list(classes or description.classes)
        if "TASK" in explicit_sources(self.config) and self.task != self.config.TASK:
            found = f"weights of TASK {self.task}, found TASK {self.config.TASK}"
            raise InputError(f"{printable(str(path))}: {found}; give -o TASK {self.task}")
        self.thresholds = description.thresholds
        outputs = self.config.MODEL.NUM_CLASSES
        if self.classes and len(self.classes) != outputs:
            found = f"found {len(self.classes)} names of classes"
            raise InputError(f"{found}, the model has {outputs} outputs; give one for each")
        if len(self.thresholds) not in (0, outputs):
            raise InputError(
                f"{printable(str(path))} tells {len(self.thresholds)} thresholds, the model has {outputs} outputs"
            )
        set_device_flags(self.config, int(os.environ.get("PADDLE_LOCAL_SIZE", world_size())))
        self.model = None
        self.weights = None
        self.warning = ""
        if not export:
            self.model = build_model(self.config) if cfg else build_described(self.config, path)
        if export:
            self._run = open_export(path)
            self.has_classes = not export.features
            self.report = f"{path}: {description.model}, {export.format}, {export.precision}"
        elif self.model is not None:
            settings = self.config.MODEL
            allow = settings.PRETRAINED_ALLOW
            order = settings.PRETRAINED_CLASSES
            adapter = settings.PRETRAINED_ADAPTER
            loaded = load_weights(self.model, path, allow=allow, classes=order, adapter=adapter)
            self.report = str(loaded)
            self.warning = loaded.warning
            self.weights = loaded.file
            self.has_classes = bool(outputs) and not is_projection(loaded.file)
            self.model.eval()
            self.model = self.model.inference_model()
        self._normalize = Normalize(self.config.DATA.IMAGENET_MEAN, self.config.DATA.IMAGENET_STD)

    def __call__(
        self, images: Iterable[Picture], top: int | None = None, threshold: float | None = None
    ) -> list[Prediction]:
        """Returns the prediction of each image.

        Args:
            images: paths, the bytes of files, Pillow's images, or arrays, as of ``Pictures``.
            top: classes per image, at most; None: 5, of a multi-label model all.
            threshold: multi-label: least probability; None: each class's own (``thresholds``).

        Raises:
            RunError: one can't be read; it is named.
        """
        check_several(images)
        found = list(self.stream(list(images), top, threshold, workers=0))
        for answer in found:
            if isinstance(answer, Failure):
                raise RunError(answer.error)
        return found  # pyright: ignore[reportReturnType]: no Failure is left

    def stream(
        self,
        images: Sequence[Picture] | Paths,
        top: int | None = None,
        threshold: float | None = None,
        workers: int = 2,
        tta: Views = "",
    ) -> Iterator[Prediction | Failure]:
        """Yields the prediction of each image in turn; as much memory is taken for many as for a
        few.

        Args:
            images, top, threshold: as of a call.
            workers: processes that load; 0: this one does.
            tta: views over which probabilities are averaged: "flip", "five", "ten"
                (``inference.tta``).
        """
        for answers in self.answers(images, top, threshold, workers, tta):
            yield from answers.values()

    def answers(
        self,
        images: Sequence[Picture] | Paths,
        top: int | None = None,
        threshold: float | None = None,
        workers: int = 2,
        tta: Views = "",
        rank: int = 0,
        ranks: int = 1,
    ) -> Iterator[dict[int, Prediction | Failure]]:
        """Yields, batch by batch, the answers to ``rank``'s share of the images (every
        ``ranks``-th), by their places.

        Args:
            images, top, threshold, workers, tta: as of ``stream``.
        """
        self.check_classifier()
        if top is not None and (not isinstance(top, int | np.integer) or top < 1):
            raise InputError(f"top is {top!r}, expected a whole number of 1 or more")
        if threshold is not None and not (
            isinstance(threshold, int | float | np.floating) and 0 <= threshold <= 1
        ):
            raise InputError(f"threshold is {threshold!r}, expected a probability from 0 to 1")
        asked = pictures(self.config, images, tta)
        for batch in self.batches(asked, workers, rank, ranks):
            shares = np.mean(
                [self.probabilities(self.logits(view)) for view in views(batch, tta)], 0
            )
            yield {
                place: self._answer(asked.name(place), problem, own, top, threshold)
                for place, problem, own in zip(batch.places, batch.problems, shares, strict=True)
            }

    def check_classifier(self) -> None:
        """Raises InputError where the model has no classifier, so that its outputs are features."""
        if not self.has_classes:
            found = f"{printable(str(self.weights or self.path))} has no classifier: it gives features, and no classes"
            raise InputError(
                f"{found}; tools/features.py computes them, or train a classifier (-pretrained)"
            )

    def _answer(
        self, name: str, problem: str, shares: np.ndarray, top: int | None, threshold: float | None
    ) -> Prediction | Failure:
        if not problem and not np.isfinite(shares).all():
            problem = f"{printable(name)}: the weights give no finite logits for it"
        return (
            Failure(name, problem) if problem else self.prediction_of(name, shares, top, threshold)
        )

    def batches(
        self, pictures: Pictures, workers: int = 2, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """Yields the images of ``rank``, prepared, in their order."""
        if len(pictures):
            yield from pictures.batches(
                with_values(self.config, DATA__NUM_WORKERS=workers), rank, ranks
            )

    def pixels(self, image: Picture) -> np.ndarray:
        """Returns an image as the model sees it, [H, W, C], uint8 or float32.

        Raises:
            RunError: it can't be read.
        """
        pictures = Pictures(self.config, [image])
        pixels, _, problem = pictures[0]
        if problem.any():
            raise RunError(bytes(problem).rstrip(b"\0").decode(errors="ignore"))
        return pixels

    def logits(self, pixels: np.ndarray | paddle.Tensor) -> np.ndarray:
        """Returns the outputs for prepared images: [B, H, W, C] -> [B, K] float32."""
        pixels = pixels if isinstance(pixels, paddle.Tensor) else paddle.to_tensor(pixels)
        images = self._normalize(pixels)
        if self.model is None:
            return self._run(images.numpy())
        with paddle.no_grad(), autocast(self.config, evaluation=True):
            return self.model(images).astype("float32").numpy()

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Returns what the outputs mean, [B, K] float64: the softmax over the classes, or each
        output's sigmoid.
        """
        logits = logits.astype(np.float64)
        # of logits that aren't finite: ``_answer`` looks for those
        with np.errstate(invalid="ignore"):
            if self.task == "multilabel":
                return sigmoid(logits)
            shares = np.exp(logits - logits.max(1, keepdims=True))
        return shares / shares.sum(1, keepdims=True)

    def prediction_of(
        self, name: str, shares: np.ndarray, top: int | None = None, threshold: float | None = None
    ) -> Prediction:
        """Returns the prediction that probabilities [K] make; of equal ones the first output comes
        first.
        """
        order = np.argsort(-shares, kind="stable")
        if self.task == "multilabel":
            top = top or len(shares)
            least = self.thresholds or 0.5 if threshold is None else threshold
            order = order[(shares >= least)[order]]
        outputs = order[: top or 5].tolist()
        names = [self.classes[output] if self.classes else str(output) for output in outputs]
        return Prediction(name, outputs, names, [float(shares[output]) for output in outputs])


def _config_and_description(
    path: str, cfg: str | None, options: Sequence[str], classes: Sequence[str] | None
) -> tuple[Configuration, Description]:
    """The configuration of a model and its images, and what its weights are of."""
    if cfg is None:
        told = description_of(path, options)
        if told is None:
            raise InputError(
                f"{printable(path)} doesn't tell what model it is of; give its YAML file or name (-cfg)"
            )
        options = ["MODEL.PRETRAINED", path, *options]
        config = told.to_config(options)
        names = classes or told.classes
        task = told.task
        thresholds = told.thresholds
    else:
        config = with_preprocessing(get_config(cfg, [*options, "MODEL.PRETRAINED", path]))
        adapter = config.MODEL.PRETRAINED_ADAPTER
        names = classes or classes_of(path, adapter) or []
        task = task_of(path, adapter) or config.TASK
        thresholds = thresholds_of(path, adapter)
        if config.MODEL.NUM_CLASSES == "auto" and names:
            config = with_values(config, "the classes' names", MODEL__NUM_CLASSES=len(names))
    return config, describe(config, list(names), task, thresholds)


def _of_export(
    export: Export, cfg: str | None, options: Sequence[str]
) -> tuple[Configuration, Description]:
    """The configuration of an export's images, and what it is; an export computes what it was made
    for.
    """
    if export.format in paddlex.FORMATS:
        found = f"{export.folder} is an export of -format {export.format}, which gives its client probabilities"
        raise InputError(f"{found}; give what it was made from, or an export of another format")
    if cfg is not None:
        raise InputError(
            f"{export.folder} is an export, which tells its model itself; leave out -cfg"
        )
    own = export.description.to_config()
    config = export.description.to_config(options)
    made_for = dict(leaves(own))
    for key, value in leaves(config):
        if (key == "AMP" or key in export.description.values) and value != made_for[key]:
            raise InputError(
                f"{export.folder} is an export, made for {key} {made_for[key]}; leave {key} out, or export anew"
            )
    return config, export.description
