"""Predicts the classes of images with a trained model.

The probabilities are, bit for bit, those that ``-eval`` computes. LeViT and MobileOne are folded
(``ImageModel.inference_model``), and theirs agree up to rounding.
"""

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle

from config import get_config, with_values
from errors import InputError, RunError, printable
from inference import paddlex
from inference.backends import open_export
from inference.calibration.choice import (
    DEFAULT,
    Choice,
    check_one_view,
    rejection_for,
    sets_for,
)
from inference.calibration.conformal import in_set
from inference.calibration.neighbours import read_neighbours
from inference.calibration.rejection import (
    KNN,
    OF_LOGITS,
    SCORES,
    is_rejected,
    knn_distances,
)
from inference.calibration.rejection import score as rejection_score
from inference.export_manifest import Export, is_export, read_export
from inference.maps import PixelMap, WholePictures, maps_in_batches, pixel_map
from inference.pictures import Batch, Picture, Pictures, check_several
from inference.text.encoder import TextEncoder
from inference.text.prompts import TEMPLATES, text_classifier
from inference.text.zero_shot import is_zero_shot, set_classifier, with_text_classes
from inference.tta import Views, pictures, views
from loading.files import Paths
from loading.transforms import Normalize
from models import build_model
from models.base import ImageModel, without_classifier
from models.heads.windows import way_of
from models.pretrained import build_described, patch_size_warning, with_preprocessing
from ops.device import set_device_flags
from settings.configuration import Configuration, explicit_sources, leaves
from settings.tasks import answers_of
from training.checkpoint import (
    Description,
    calibration_of,
    classes_of,
    describe,
    description_of,
    task_of,
    thresholds_of,
)
from training.multilabel_metrics import sigmoid
from training.probing.features import normalised
from training.setup import autocast
from utils import world_size
from weights import load_weights
from weights.hub import best_of_run
from weights.openclip import is_openclip
from weights.transformers import is_projection


class Prediction(NamedTuple):
    """The classes of an image, the most probable one first.

    Attributes:
        name: the image's path, or its number.
        outputs: the numbers of the model's outputs.
        classes: their names; if the model's classes aren't known, the numbers as texts.
        probabilities: from 0 to 1.
        unknown: whether the image is taken for one of something else; None: nobody asked.
        score: the score that says so (``inference.calibration.rejection``); None: nobody asked.
    """

    name: str
    outputs: list[int]
    classes: list[str]
    probabilities: list[float]
    unknown: bool | None = None
    score: float | None = None


class Failure(NamedTuple):
    """An image that can't be read, and the reason in one line."""

    name: str
    error: str


class Predictor:
    """Predicts the classes of images.

    Args:
        path: weights, as ``find_weights`` takes them (a checkpoint's folder or file, a run's folder
            for its best checkpoint, ...), or the folder of an export.
        cfg: the model's YAML file or name; None: the weights describe their model.
        options: keys and values, as after ``-o``.
        classes: the names of the outputs; None: those that the weights have.
        batch_size: the number of images that are computed together.
        templates: of weights of images and texts, the sentences that stand for a class, with {} in
            place of its name. The classes are given, and their names make the classifier.

    Attributes:
        config: the configuration of the model and of its images.
        model: the model for inference (``inference_model``); None for an export.
        task: the TASK that the weights were trained for.
        thresholds: with ``has_several``, the least probability by output; empty: 0.5 for each.
        calibration: what ``tools/calibrate.py`` chose for the weights; None: it wasn't run.
        classes: names by output; empty: they aren't known.
        report: a line that says what was loaded.
        warning: a problem of weights that can still be used; "": none.
        weights: the file that was loaded; None for an export.
        path: the weights as given; for a run's folder its best checkpoint.
        has_classes: whether the outputs are classes; if not, they are features.
        encoder: the text tower that made the classifier; None: the weights had one.

    Raises:
        InputError: the weights can't be read, don't describe their model, or don't fit it.
    """

    # Whether the weights have to hold the model's classifier.
    reads_classifier = True

    def __init__(
        self,
        path: str | Path,
        cfg: str | None = None,
        options: Sequence[str] = (),
        classes: Sequence[str] | None = None,
        batch_size: int = 32,
        templates: Sequence[str] = TEMPLATES,
    ) -> None:
        self.path = path = best_of_run(path)
        options = [*options, "EVAL", "True", "DATA.BATCH_SIZE_EVAL", str(batch_size)]
        export = read_export(path) if is_export(path) else None
        self.encoder = None
        if export is None and is_zero_shot(path, classes):
            self.encoder = TextEncoder(path)
        self.config, description = config_of(path, cfg, options, classes, self.encoder)
        self.task = description.task
        self.classes = list(classes or description.classes)
        self.thresholds = description.thresholds
        self.calibration = description.calibration
        self._check_description()
        set_device_flags(self.config, int(os.environ.get("PADDLE_LOCAL_SIZE", world_size())))
        self.model = None
        self.weights = None
        # Features of training images, which are read when they are needed.
        self._neighbours: np.ndarray | None = None
        self.warning = ""
        if export:
            self._run = open_export(path)
            self.has_classes = not export.features and bool(answers_of(self.task))
            self.report = f"{path}: {description.model}, {export.format}, {export.precision}"
        else:
            self._load(build_model(self.config) if cfg else build_described(self.config, path))
            if self.encoder:
                made = text_classifier(self.encoder, self.classes, templates)
                set_classifier(self.model, made.weights, made.biases)
                warnings = [self.warning, made.alike, made.cut]
                self.warning = "; ".join(filter(None, warnings))
        self._normalize = Normalize(self.config.DATA.IMAGENET_MEAN, self.config.DATA.IMAGENET_STD)

    @property
    def gives_maps(self) -> bool:
        """Returns whether each pixel of an image has a class (TASK segmentation)."""
        return answers_of(self.task) == "pixels"

    @property
    def keeps_sizes(self) -> bool:
        """Returns whether prepared images differ in size, so that a batch has one of them."""
        return self.gives_maps or self.config.DATA.NUM_TOKENS is not None

    @property
    def has_several(self) -> bool:
        """Returns whether an image may have several classes (TASK multilabel). Otherwise its
        probabilities sum up to 1.
        """
        return answers_of(self.task) == "sigmoid"

    def _check_description(self) -> None:
        """Raises InputError if the task, the classes or the thresholds don't fit the model."""
        path = printable(str(self.path))
        is_given = "TASK" in explicit_sources(self.config)
        if self.reads_classifier and is_given and self.task != self.config.TASK:
            raise InputError(
                f"{path}: the weights are for TASK {self.task}, found TASK {self.config.TASK};"
                f" pass -o TASK {self.task}"
            )
        outputs = self.config.MODEL.NUM_CLASSES
        if self.reads_classifier and self.classes and len(self.classes) != outputs:
            raise InputError(
                f"found {len(self.classes)} class names, but the model has {outputs} outputs;"
                " pass one for each"
            )
        if len(self.thresholds) not in (0, outputs):
            raise InputError(
                f"{path} has {len(self.thresholds)} thresholds, but the model has {outputs} outputs"
            )
        for sets in self.calibration.sets if self.calibration else ():
            if len(sets.thresholds) not in (1, outputs):
                raise InputError(
                    f"{path} was calibrated for {len(sets.thresholds)} classes, but the model has"
                    f" {outputs} outputs"
                )

    def _load(self, model: ImageModel) -> None:
        """Loads the weights into ``model``, and prepares it for inference."""
        settings = self.config.MODEL
        allow = list(settings.PRETRAINED_ALLOW or ())
        if self.encoder or not self.reads_classifier:
            allow += [f"{layer}.*" for layer in model.classifier_names()]
        loaded = load_weights(
            model,
            self.path,
            allow=allow,
            classes=settings.PRETRAINED_CLASSES,
            adapter=settings.PRETRAINED_ADAPTER,
        )
        self.report = str(loaded)
        warnings = (loaded.warning, patch_size_warning(self.config, loaded))
        self.warning = "; ".join(filter(None, warnings))
        self.weights = loaded.file
        gives_embeddings = is_projection(loaded.file) or is_openclip(loaded.file)
        has_outputs = bool(settings.NUM_CLASSES) and not gives_embeddings
        self.has_classes = (has_outputs or bool(self.encoder)) and bool(answers_of(self.task))
        model.eval()
        self.model = model.inference_model()

    def __call__(
        self,
        images: Iterable[Picture],
        top: int | None = None,
        threshold: float | None = None,
        **others: Any,
    ) -> list[Prediction]:
        """Returns the prediction of each image.

        Args:
            images: paths, the bytes of files, Pillow images, or arrays, as ``Pictures`` takes them.
            top, threshold, others: see ``choice``.

        Raises:
            InputError: as ``choice``.
            RunError: an image can't be read; the error names it.
        """
        check_several(images)
        predictions = []
        for outcome in self.stream(list(images), top, threshold, workers=0, **others):
            if isinstance(outcome, Failure):
                raise RunError(outcome.error)
            predictions.append(outcome)
        return predictions

    def stream(
        self,
        images: Sequence[Picture] | Paths,
        top: int | None = None,
        threshold: float | None = None,
        workers: int = 2,
        tta: Views = "",
        **others: Any,
    ) -> Iterator[Prediction | Failure]:
        """Yields the prediction of each image in turn.

        The memory that this takes doesn't depend on the number of images.

        Args:
            images, top, threshold, others: see ``__call__``.
            workers: the number of processes that load images; 0: this process loads them.
            tta: the views over which probabilities are averaged: "flip", "five", "ten"
                (``inference.tta``).
        """
        for outcomes in self.predict_batches(images, top, threshold, workers, tta, **others):
            yield from outcomes.values()

    def predict_batches(
        self,
        images: Sequence[Picture] | Paths,
        top: int | None = None,
        threshold: float | None = None,
        workers: int = 2,
        tta: Views = "",
        rank: int = 0,
        ranks: int = 1,
        **others: Any,
    ) -> Iterator[dict[int, Prediction | Failure]]:
        """Yields, for each batch, the predictions by the image's place in ``images``.

        Args:
            images, top, threshold, workers, tta, others: see ``stream``.
            rank, ranks: this process predicts every ``ranks``-th image, beginning with number
                ``rank``.
        """
        self.check_classifier()
        choice = self.choice(top, threshold, **others)
        check_one_view(choice, tta)
        dataset = pictures(self.config, images, tta)
        for batch in self.batches(dataset, workers, rank, ranks):
            by_view = [self.logits(view) for view in views(batch, tta)]
            probabilities = np.mean([self.probabilities(logits) for logits in by_view], 0)
            scores = self.rejection_scores(choice, batch.pixels, by_view[0])
            outcomes = {}
            for row, place in enumerate(batch.places):
                name = dataset.name(place)
                problem = batch.problems[row]
                outcomes[place] = self._outcome(
                    name, problem, probabilities[row], choice, scores[row]
                )
            yield outcomes

    def choice(
        self,
        top: int | None = None,
        threshold: float | None = None,
        coverage: float | None = None,
        reject: float | None = None,
        score: str | None = None,
    ) -> Choice:
        """Returns how classes are chosen.

        Args:
            top, threshold: see ``Choice``.
            coverage: choose a set of classes that contains the right one with this probability; one
                of those that the weights were calibrated for.
            reject: say which images are of something else, with this share of false alarms; one of
                those that the weights were calibrated for.
            score: by which of the rejection's scores; None: "energy".

        Raises:
            InputError: a value isn't one of these, or two of them don't go together.
        """
        if top is not None and (not isinstance(top, int | np.integer) or top < 1):
            raise InputError(f"top is {top!r}, expected a whole number of 1 or more")
        if threshold is not None and not (
            isinstance(threshold, int | float | np.floating) and 0 <= threshold <= 1
        ):
            raise InputError(f"threshold is {threshold!r}, expected a probability from 0 to 1")
        if coverage is not None and top is not None:
            raise InputError("top and coverage both determine the number of classes; leave one out")
        if score is not None and reject is None:
            raise InputError("score has no effect without reject, the rate of false alarms; set it")
        if coverage is not None and self.has_several:
            raise InputError(
                "coverage is for models with one class per image; use -threshold for several"
            )
        score = score or OF_LOGITS[0]
        if score not in SCORES:
            raise InputError(f"score is {score!r}, expected one of {', '.join(SCORES)}")
        path = printable(str(self.path))
        if score == KNN and self.model is None:
            raise InputError(
                f"score {KNN} needs features, but {path} is an export, which only gives logits;"
                f" use {' or '.join(OF_LOGITS)}"
            )
        sets = None
        if coverage is not None:
            sets = sets_for(self.calibration, coverage, path)
        rejection = None
        if reject is not None:
            rejection = rejection_for(self.calibration, reject, score, path)
        return Choice(top, threshold, sets, rejection)

    def rejection_scores(
        self, choice: Choice, pixels: np.ndarray | paddle.Tensor, logits: np.ndarray
    ) -> Sequence[float | None]:
        """Returns the rejection score of each image of a batch; None without rejection.

        Args:
            pixels: [B, H, W, C], as for ``logits``.
            logits: [B, K].
        """
        if choice.rejection is None:
            return [None] * len(logits)
        if choice.rejection.score != KNN:
            return rejection_score(choice.rejection.score, logits, self.has_several).tolist()
        assert self.calibration
        if self._neighbours is None:
            self._neighbours = read_neighbours(self.weights, self.calibration.neighbours_sha256)
        features = normalised(self.features(pixels))
        return knn_distances(features, self._neighbours, self.calibration.neighbours).tolist()

    def features(self, pixels: np.ndarray | paddle.Tensor) -> np.ndarray:
        """Returns the input of the classifier, [B, num_features] float32.

        Args:
            pixels: [B, H, W, C], as for ``logits``.

        Raises:
            InputError: it is an export, which only gives logits.
        """
        if self.model is None:
            raise InputError(f"{printable(str(self.path))} is an export, which only gives logits")
        with without_classifier(self.model):
            return self.logits(pixels)

    def maps(
        self, images: Iterable[Picture], flip: bool = False, workers: int = 0
    ) -> list[PixelMap]:
        """Returns the classes of each image's pixels, in the size of the image (TASK segmentation).

        They are the answers that an evaluation compares with masks.

        Args:
            images: see ``__call__``.
            flip: average over the mirror images, too.
            workers: the number of processes that load images.

        Raises:
            InputError: the model gives no maps.
            RunError: an image can't be read; the error names it.
        """
        check_several(images)
        found = []
        for outcomes in self.predict_maps(list(images), workers, "flip" if flip else ""):
            for outcome in outcomes.values():
                if isinstance(outcome, Failure):
                    raise RunError(outcome.error)
                found.append(outcome)
        return found

    def predict_maps(
        self,
        images: Sequence[Picture] | Paths,
        workers: int = 2,
        tta: Views = "",
        rank: int = 0,
        ranks: int = 1,
    ) -> Iterator[dict[int, PixelMap | Failure]]:
        """Yields, for each image, its map by its place in ``images``.

        Args:
            images, workers, rank, ranks: see ``predict_batches``.
            tta: "" or "flip".

        Raises:
            InputError: the model gives no maps.
        """
        self.check_maps()
        if tta not in ("", "flip"):
            raise InputError(
                f"-tta {tta} crops images, but each pixel needs a class; use -tta flip"
            )
        predict = functools.partial(self.map_of, flip=tta == "flip")
        dataset = WholePictures(self.config, images)
        if not len(dataset):
            return
        config = with_values(self.config, DATA__NUM_WORKERS=workers)
        for place, name, outcome in maps_in_batches(dataset, config, predict, rank, ranks):
            yield {place: Failure(name, outcome) if isinstance(outcome, str) else outcome}

    def map_of(
        self, pixels: paddle.Tensor, name: str, size: tuple[int, int], flip: bool = False
    ) -> PixelMap:
        """Returns the map of a prepared image.

        Args:
            pixels: [1, H, W, C], as ``WholePictures`` prepares them.
            name: of the image, for errors.
            size: (height, width) of the image's file, and of the map.
            flip: see ``maps``.

        Raises:
            RunError: its logits aren't finite, or take more memory than there is.
        """
        method = self.config.METHOD
        way = way_of(self.config, method.SCALES, flip or method.FLIP)
        return pixel_map(self._forward, self._normalize, pixels, name, size, way)

    def check_maps(self) -> None:
        """Raises InputError unless the model predicts a class for each pixel."""
        if not self.gives_maps:
            path = printable(str(self.weights or self.path))
            raise InputError(
                f"{path} was trained by TASK {self.task}, which doesn't classify pixels; use"
                " weights of TASK segmentation"
            )

    def check_text_tower(self) -> None:
        """Raises InputError unless the weights have a text tower."""
        if self.encoder is None:
            raise InputError(
                f"{printable(str(self.path))} has no text tower; use weights of CLIP or SigLIP with"
                " both towers"
            )

    def check_classifier(self) -> None:
        """Raises InputError if the model's outputs are features, or classes of each pixel."""
        if self.gives_maps:
            raise InputError(
                f"{printable(str(self.weights or self.path))} was trained by TASK {self.task}, which"
                " classifies pixels, not images; use tools/predict.py -format masks"
                " or overlays"
            )
        if not self.has_classes:
            path = printable(str(self.weights or self.path))
            reason = "has no classifier: it gives features, not classes"
            if not answers_of(self.task):
                reason = f"was trained by TASK {self.task}, which doesn't predict classes"
            advice = (
                "compute its features by tools/features.py, or train a classifier (-pretrained)"
            )
            if self.weights is None:
                advice = "export a classifier"
            raise InputError(f"{path} {reason}; {advice}")

    def _outcome(
        self,
        name: str,
        problem: str,
        probabilities: np.ndarray,
        choice: Choice,
        score: float | None,
    ) -> Prediction | Failure:
        if problem:
            return Failure(name, problem)
        if not np.isfinite(probabilities).all():
            return Failure(name, f"{printable(name)}: the weights yield non-finite logits for it")
        return self.prediction_of(name, probabilities, choice, score)

    def batches(
        self, pictures: Pictures, workers: int = 2, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """Yields batches of prepared images, of every ``ranks``-th image from number ``rank`` on."""
        if len(pictures):
            config = with_values(self.config, DATA__NUM_WORKERS=workers)
            yield from pictures.batches(config, rank, ranks)

    def pixels(self, image: Picture) -> np.ndarray:
        """Returns an image as the model sees it, [H, W, C], uint8 or float32.

        Raises:
            RunError: it can't be read.
        """
        pixels, _, problem = Pictures(self.config, [image])[0]
        _check_readable(problem)
        return pixels

    def whole_pixels(self, image: Picture) -> tuple[np.ndarray, tuple[int, int]]:
        """Returns an image as a model of maps sees it, [H, W, C], and the (height, width) of its file.

        Raises:
            RunError: it can't be read.
        """
        pixels, _, problem, (height, width) = WholePictures(self.config, [image])[0]
        _check_readable(problem)
        return pixels, (int(height), int(width))

    def logits(self, pixels: np.ndarray | paddle.Tensor) -> np.ndarray:
        """Returns the outputs for prepared images: [B, H, W, C] -> [B, K] float32."""
        pixels = pixels if isinstance(pixels, paddle.Tensor) else paddle.to_tensor(pixels)
        return self._forward(self._normalize(pixels)).numpy()

    def _forward(self, images: paddle.Tensor) -> paddle.Tensor:
        """Returns the outputs for normalised images [B, C, H, W], float32."""
        if self.model is None:
            return paddle.to_tensor(self._run(images.numpy()))
        with paddle.no_grad(), autocast(self.config, evaluation=True):
            return self.model(images).astype("float32")

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Returns the probabilities [B, K] float64: the softmax of an image's logits, or the
        sigmoid of each logit of a multi-label model.
        """
        logits = logits.astype(np.float64)
        # Logits that aren't finite warn here. ``_outcome`` reports them.
        with np.errstate(invalid="ignore"):
            if self.has_several:
                return sigmoid(logits)
            exponentials = np.exp(logits - logits.max(1, keepdims=True))
        return exponentials / exponentials.sum(1, keepdims=True)

    def prediction_of(
        self,
        name: str,
        probabilities: np.ndarray,
        choice: Choice = DEFAULT,
        score: float | None = None,
        classes: Sequence[str] | None = None,
    ) -> Prediction:
        """Returns an image's prediction.

        Args:
            name: the image's name.
            probabilities: of each output [K]. Among equal ones the first output comes first.
            choice: which classes are chosen.
            score: of the image, if ``choice`` has a rejection (``rejection_scores``).
            classes: names by output; None: the model's.
        """
        known = self.classes if classes is None else list(classes)
        order = np.argsort(-probabilities, kind="stable")
        if self.has_several:
            top = choice.top or len(probabilities)
            least = self.thresholds or 0.5
            if choice.threshold is not None:
                least = choice.threshold
            order = order[(probabilities >= least)[order]]
        elif choice.sets:
            top = len(probabilities)
            order = order[in_set(probabilities, choice.sets)[order]]
        else:
            top = choice.top or 5
        outputs = order[:top].tolist()
        names = [known[output] if known else str(output) for output in outputs]
        values = [float(probabilities[output]) for output in outputs]
        unknown = None
        if choice.rejection:
            unknown = is_rejected(score, choice.rejection)
        return Prediction(name, outputs, names, values, unknown, score)


def _check_readable(problem: np.ndarray) -> None:
    """Raises RunError if an item of ``Pictures`` has an error."""
    if problem.any():
        raise RunError(bytes(problem).rstrip(b"\0").decode(errors="ignore"))


def trained_model(path: str | Path, config: Configuration, cfg: str | None = None) -> ImageModel:
    """Returns the trained model in evaluation mode, before any layers are folded.

    Args:
        path: weights; a run's folder isn't resolved (``best_of_run``).
        config: what ``config_of`` returned for them.
        cfg: as given to ``config_of``.

    Raises:
        InputError: the weights can't be read, or don't fit the model.
    """
    model = build_model(config) if cfg else build_described(config, path)
    settings = config.MODEL
    load_weights(
        model,
        path,
        allow=list(settings.PRETRAINED_ALLOW or ()),
        classes=settings.PRETRAINED_CLASSES,
        adapter=settings.PRETRAINED_ADAPTER,
    )
    model.eval()
    return model


def config_of(
    path: str | Path,
    cfg: str | None = None,
    options: Sequence[str] = (),
    classes: Sequence[str] | None = None,
    encoder: TextEncoder | None = None,
) -> tuple[Configuration, Description]:
    """Returns the configuration of a model and its images, and the description of its weights.

    No weights are loaded.

    Args:
        path: weights or an export; a run's folder isn't resolved (``best_of_run``).
        cfg, options, classes: see ``Predictor``.
        encoder: the text tower that makes the classifier; None: the weights have one.

    Raises:
        InputError: as ``Predictor``.
    """
    if is_export(path):
        return _config_of_export(read_export(path), cfg, options)
    return _config_of_weights(str(path), cfg, options, classes, encoder)


def _config_of_weights(
    path: str,
    cfg: str | None,
    options: Sequence[str],
    classes: Sequence[str] | None,
    encoder: TextEncoder | None,
) -> tuple[Configuration, Description]:
    """Returns the configuration of a model and its images, and the description of its weights."""
    if cfg is None:
        description = description_of(path, options)
        if description is None:
            raise InputError(
                f"{printable(path)}: cannot determine the model; pass its YAML file or name by -cfg"
            )
        options = ["MODEL.PRETRAINED", path, *options]
        config = description.to_config(options)
        names = classes or description.classes
        task = description.task
        thresholds = description.thresholds
        calibration = description.calibration
    else:
        config = with_preprocessing(get_config(cfg, [*options, "MODEL.PRETRAINED", path]))
        adapter = config.MODEL.PRETRAINED_ADAPTER
        names = classes or classes_of(path, adapter) or []
        task = task_of(path, adapter) or config.TASK
        thresholds = thresholds_of(path, adapter)
        calibration = calibration_of(path, adapter)
        if config.MODEL.NUM_CLASSES == "auto" and names:
            config = with_values(config, "the classes' names", MODEL__NUM_CLASSES=len(names))
    if encoder:
        config = with_text_classes(config, encoder, len(names))
    return config, describe(config, list(names), task, thresholds, calibration)


def _config_of_export(
    export: Export, cfg: str | None, options: Sequence[str]
) -> tuple[Configuration, Description]:
    """Returns the configuration of an export and its images, and its description.

    Options that would change what the exported graph computes are errors.
    """
    if export.format in paddlex.FORMATS:
        raise InputError(
            f"{export.folder} is an export of -format {export.format}, which returns"
            " probabilities; use the checkpoint that it was made from, or an export of another"
            " format"
        )
    if cfg is not None:
        raise InputError(f"{export.folder} is an export, whose model is known; leave out -cfg")
    made_for = dict(leaves(export.description.to_config()))
    config = export.description.to_config(options)
    for key, value in leaves(config):
        if (key == "AMP" or key in export.description.values) and value != made_for[key]:
            raise InputError(
                f"{export.folder} is an export, made for {key} {made_for[key]}; leave {key} out,"
                " or export again"
            )
    return config, export.description
