"""Calibrates a trained classifier on held-out images, and writes it into a new folder.

The images are divided into three parts, so that none judges what it chose:

- a quarter scales the logits, and tunes the scores of prediction sets;
- a quarter chooses the thresholds of sets and rejections;
- a half is reported on.

With the runs of a cross-validation (DATA.FOLDS), the first part are all images that each of these
runs didn't train on. The others are then halves of the validation set.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from config import with_values
from datasets import ImageDataset, get_dataloader, get_dataset, get_datasets
from errors import InputError, RunError, printable
from inference.calibration import conformal, neighbours, rejection, scaling
from inference.calibration.folding import fold
from inference.calibration.scaling import Scaling
from inference.export_manifest import refuse_export
from inference.fidelity import photographs
from inference.inputs import paths_of
from inference.pictures import Pictures
from inference.predictor import Predictor, trained_model
from inference.run_data import data_config, data_keys
from launch.files import making_folder
from loading.files import Paths
from settings.configuration import Configuration
from settings.tasks import answers_of, dataset_columns
from training.checkpoint import describe
from training.checkpoint.calibration import Calibration, PredictionSets, Rejection
from training.checkpoint.description import METADATA
from training.command_line import run_file
from training.multilabel_metrics import sigmoid
from training.probing.features import normalised
from utils import writing_whole
from weights import file_arrays
from weights.formats import write_weights
from weights.hub import best_of_run

WEIGHTS = "model.safetensors"
FIGURES = "calibration.json"
REPORT = "report.html"
# Training images at most whose features are stored for the score "knn".
_MOST_NEIGHBOURS = 10_000
# Images of each part at least.
_LEAST = 10


@dataclass(frozen=True)
class Settings:
    """The result of a calibration.

    Attributes:
        scaling: one of ``scaling.KINDS``, or "auto": what cross-validation chooses.
        coverages: the coverages for which sets are prepared.
        by_class: whether each class has a threshold of its own, so that the coverage holds for the
            images of each class.
        false_alarms: the shares of false alarms for which rejections are prepared.
        k: the neighbour whose distance is the score "knn"; 0: without this score.
        seed: of the division into parts.
    """

    scaling: str = "auto"
    coverages: Sequence[float] = (0.8, 0.9, 0.95, 0.99)
    by_class: bool = False
    false_alarms: Sequence[float] = (0.01, 0.05, 0.1)
    k: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Answers:
    """The outputs of a model for labelled images.

    Attributes:
        logits: [n, K].
        labels: [n] classes, or [n, K] of 0 and 1.
        features: [n, channels] of length 1; None: they weren't needed.
    """

    logits: np.ndarray
    labels: np.ndarray
    features: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: np.ndarray) -> "Answers":
        """Returns some of the images."""
        features = None if self.features is None else self.features[rows]
        return Answers(self.logits[rows], self.labels[rows], features)


class Parts(NamedTuple):
    """The held-out images: those that fit the scaling, those that choose thresholds, and those that
    are reported on.
    """

    fitting: Answers
    choosing: Answers
    reported: Answers


def parts_of(answers: Answers, out_of_fold: Answers | None, seed: int) -> Parts:
    """Divides held-out images at random.

    Args:
        answers: for the validation set.
        out_of_fold: for the images that runs of a cross-validation didn't train on; None: a quarter
            of the validation set takes their place.
        seed: of the division.

    Raises:
        InputError: there are too few images.
    """
    order = np.random.default_rng(seed).permutation(len(answers))
    half = len(order) // 2
    chosen = order[:half]
    quarter = 0 if out_of_fold else half // 2
    parts = Parts(
        out_of_fold or answers.at(chosen[:quarter]),
        answers.at(chosen[quarter:]),
        answers.at(order[half:]),
    )
    least = min(len(part) for part in parts)
    if least < _LEAST:
        raise InputError(
            f"there are {len(answers)} validation images, too few for a calibration: a part"
            " would have"
            f" {least}, expected {_LEAST} or more"
        )
    return parts


class Calibrator:
    """A model with the data that calibrate it.

    Args:
        path: weights, as ``Predictor`` takes them; no export.
        cfg, options, batch_size: see ``Predictor``.
        data: keys of the data with their values; empty: those of the run that saved the weights.
        workers: the number of processes that load images.
        after_batch: called with the number of images of each batch.

    Attributes:
        predictor: computes the model.

    Raises:
        InputError: the weights can't be used, their model gives no class of an image, or there is no
            such data.
    """

    def __init__(
        self,
        path: str | Path,
        cfg: str | None = None,
        options: Sequence[str] = (),
        data: Sequence[tuple[str, Any]] = (),
        batch_size: int = 32,
        workers: int = 2,
        after_batch: Callable[[int], Any] = int,
    ) -> None:
        refuse_export(
            path, ", whose weights can't be changed; use the checkpoint that it was made from"
        )
        self.path = best_of_run(path)
        self.cfg = cfg
        self.options = list(options)
        self.data = list(data)
        self.workers = workers
        self.after_batch = after_batch
        self.predictor = Predictor(self.path, cfg, options, batch_size=batch_size)
        self.predictor.check_classifier()
        if self.predictor.calibration:
            raise InputError(
                f"{printable(str(self.path))} is already calibrated; use the weights that it was"
                " made from"
            )
        self.config = self._data_config(self.path, self.data)

    def _data_config(self, weights: str | Path, data: Sequence[tuple[str, Any]]) -> Configuration:
        """Returns the configuration of a run's data, prepared for this model."""
        predictor = self.predictor
        keys = data_keys(weights, data, "a calibration needs labelled images")
        config = data_config(predictor.config, keys)
        if "labels" not in dataset_columns(config.DATA.DATASET):
            raise InputError(
                f"the images of '{config.DATA.DATASET}' have no labels, which a calibration needs"
            )
        if answers_of(config.TASK) != answers_of(predictor.task):
            raise InputError(
                f"the images of '{config.DATA.DATASET}' are for TASK {config.TASK}, the weights for"
                f" TASK {predictor.task}; use images for that task"
            )
        return with_values(
            config,
            MODEL__NUM_CLASSES=predictor.config.MODEL.NUM_CLASSES,
            DATA__BATCH_SIZE_EVAL=predictor.config.DATA.BATCH_SIZE_EVAL,
            DATA__NUM_WORKERS=self.workers,
        )

    def validation(self, needs_features: bool) -> Answers:
        """Returns the answers for the validation set."""
        return self._answers(self.predictor, self.config, needs_features)

    def out_of_fold(self, runs: Sequence[str | Path]) -> Answers:
        """Returns the answers of the runs of a cross-validation, each for its own validation set.

        Raises:
            InputError: a run isn't one of a cross-validation, or two of them have the same fold.
        """
        answers = []
        seen: dict[tuple[Any, ...], Any] = {}
        for run in runs:
            if run_file(best_of_run(run)) is None:
                raise InputError(
                    f"{printable(str(run))} isn't the folder of a run; pass the runs of the folds"
                )
            predictor = Predictor(run, options=self.options, batch_size=self._batch_size())
            if predictor.classes != self.predictor.classes or predictor.task != self.predictor.task:
                raise InputError(
                    f"{printable(str(run))} has different classes than {printable(str(self.path))}"
                )
            config = self._data_config(best_of_run(run), [])
            data = config.DATA
            if data.FOLDS is None:
                raise InputError(
                    f"{printable(str(run))} isn't a run of a cross-validation (DATA.FOLDS isn't"
                    " set)"
                )
            fold = (data.FOLDS, data.SPLIT_SEED, data.FOLD)
            if fold in seen or (seen and fold[:2] != next(iter(seen))[:2]):
                raise InputError(
                    f"{printable(str(run))} is fold {fold[2]} of {fold[0]} (seed {fold[1]});"
                    f" expected another fold than {printable(str([*seen.values()]))}"
                )
            seen[fold] = str(run)
            answers.append(self._answers(predictor, config, needs_features=False))
        logits = np.concatenate([one.logits for one in answers])
        labels = np.concatenate([one.labels for one in answers])
        return Answers(logits, labels, None)

    def _batch_size(self) -> int:
        return self.predictor.config.DATA.BATCH_SIZE_EVAL

    def _answers(
        self, predictor: Predictor, config: Configuration, needs_features: bool
    ) -> Answers:
        """Returns a model's answers for the validation set of a configuration."""
        config = with_values(config, EVAL=True)
        config, _, dataset = get_datasets(config, predictor.classes)
        labels = []
        logits = []
        features = []
        for batch in self._batches(config, dataset):
            logits.append(predictor.logits(batch["pixels"]))
            labels.append(batch["labels"].numpy())
            if needs_features:
                features.append(normalised(predictor.features(batch["pixels"])))
        found = np.concatenate(labels)
        if found.ndim == 2 and not predictor.has_several:
            raise InputError(
                "an image of this set has several labels, but a calibration needs one per image"
            )
        answers = Answers(
            np.concatenate(logits), found, np.concatenate(features) if features else None
        )
        if not np.isfinite(answers.logits).all():
            raise RunError(f"{printable(str(predictor.path))}: the weights yield non-finite logits")
        return answers

    def _batches(
        self, config: Configuration, dataset: ImageDataset, step: int = 1
    ) -> Iterator[dict[str, Any]]:
        """Yields batches of every ``step``-th image."""
        # A calibration isn't a training, so errors of images give no advice for one.
        dataset.advice = ""
        for batch in get_dataloader(config, dataset, "val", ranks=step):
            yield batch
            self.after_batch(len(batch["pixels"]))

    def bank(self) -> np.ndarray:
        """Returns features of training images, [m, channels] of length 1: at most 10,000, evenly
        over the set.
        """
        dataset = get_dataset(self.config, "train").as_evaluated(self.config)
        step = -(-len(dataset) // _MOST_NEIGHBOURS)
        features = [
            normalised(self.predictor.features(batch["pixels"]))
            for batch in self._batches(self.config, dataset, step)
        ]
        return np.concatenate(features)

    def outside(self, paths: Paths, needs_features: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns logits and features of pictures of other things.

        Raises:
            RunError: one can't be read.
        """
        pictures = Pictures(self.predictor.config, paths)
        logits = []
        features = []
        for batch in self.predictor.batches(pictures, self.workers):
            for problem in batch.problems:
                if problem:
                    raise RunError(problem)
            logits.append(self.predictor.logits(batch.pixels))
            if needs_features:
                features.append(normalised(self.predictor.features(batch.pixels)))
            self.after_batch(len(batch.places))
        return np.concatenate(logits), np.concatenate(features) if features else None


def chosen_scaling(fitting: Answers, kind: str, seed: int) -> tuple[Scaling, dict[str, float]]:
    """Returns the scaling of a kind, and the cross-validated loss of each kind if that chose it.

    Args:
        kind: one of ``scaling.KINDS``, or "auto".
        seed: of the cross-validation.
    """
    if kind == "auto":
        return scaling.choose(fitting.logits, fitting.labels, seed)
    return scaling.fit(fitting.logits, fitting.labels, kind), {}


def prediction_sets(
    fitting: Answers, choosing: Answers, coverages: Sequence[float], by_class: bool
) -> list[PredictionSets]:
    """Returns how sets are chosen for each coverage.

    Args:
        fitting: scaled answers that tune the scores.
        choosing: scaled answers that choose the thresholds.
        by_class: whether each class has a threshold of its own.
    """
    tuning = probabilities_of(fitting)
    probabilities = probabilities_of(choosing)
    labels = choosing.labels
    found = []
    for coverage in coverages:
        penalty, rank = conformal.tune(tuning, fitting.labels, coverage)
        scores = conformal.scores(probabilities, penalty, rank)
        of_label = np.take_along_axis(scores, labels[:, None], 1)[:, 0]
        if by_class:
            classes = probabilities.shape[1]
            thresholds = conformal.quantiles_by_class(of_label, labels, classes, coverage)
        else:
            thresholds = [conformal.quantile(of_label, coverage)]
        finite = [None if value == np.inf else value for value in thresholds]
        found.append(PredictionSets(coverage, penalty, rank, finite))
    return found


def rejections(scores: Mapping[str, np.ndarray], false_alarms: Sequence[float]) -> list[Rejection]:
    """Returns the threshold of each score for each share of false alarms.

    Args:
        scores: of pictures of the model's classes, by name of the score.
    """
    found = []
    for name, values in scores.items():
        for false_alarm in false_alarms:
            threshold = conformal.quantile(values, 1 - false_alarm)
            stored = None if threshold == np.inf else threshold
            found.append(Rejection(name, false_alarm, stored))
    return found


def probabilities_of(answers: Answers) -> np.ndarray:
    """Returns the probabilities, [n, K] float64, of one class or of several for each image."""
    logits = answers.logits.astype(np.float64)
    if answers.labels.ndim == 2:
        return sigmoid(logits)
    return np.exp(logits - np.logaddexp.reduce(logits, 1)[:, None])


class Outcome(NamedTuple):
    """A calibration and the data for its evaluation.

    Attributes:
        calibration: what is stored with the weights.
        losses: the cross-validated loss of each kind of scaling; {}: one kind was asked for.
        parts: the held-out images, not scaled.
        scaled: the same, scaled.
        known: the scores of the reported images, by name of the score.
        outside: the scores of other pictures, by folder and by name of the score.
    """

    calibration: Calibration
    losses: dict[str, float]
    parts: Parts
    scaled: Parts
    known: dict[str, np.ndarray]
    outside: dict[str, dict[str, np.ndarray]]


def calibrate(
    calibrator: Calibrator,
    settings: Settings,
    runs: Sequence[str | Path] = (),
    folders: Sequence[str] = (),
) -> tuple[Outcome, Scaling, np.ndarray | None]:
    """Calibrates a model. Nothing is written.

    Args:
        runs: of a cross-validation, whose out-of-fold answers fit the scaling.
        folders: of pictures of other things.

    Returns:
        The outcome, the scaling, and the features of training images for the score "knn"; None:
        without this score.
    """
    predictor = calibrator.predictor
    # Before anything is computed.
    pictures = {folder: paths_of([folder]) for folder in folders}
    bank = calibrator.bank() if settings.k else None
    if bank is not None and len(bank) < settings.k:
        raise InputError(
            f"-k is {settings.k}, but there are only {len(bank)} training images; lower it"
        )
    answers = calibrator.validation(needs_features=bank is not None)
    out_of_fold = calibrator.out_of_fold(runs) if runs else None
    parts = parts_of(answers, out_of_fold, settings.seed)
    scale, losses = chosen_scaling(parts.fitting, settings.scaling, settings.seed)
    scaled = Parts(*(replace(part, logits=scale(part.logits)) for part in parts))

    def scores(logits: np.ndarray, features: np.ndarray | None) -> dict[str, np.ndarray]:
        found = {
            name: rejection.score(name, logits, predictor.has_several)
            for name in rejection.OF_LOGITS
        }
        if bank is not None and features is not None:
            found[rejection.KNN] = rejection.knn_distances(features, bank, settings.k)
        return found

    sets = []
    if not predictor.has_several:
        sets = prediction_sets(
            scaled.fitting, scaled.choosing, settings.coverages, settings.by_class
        )
    chosen = scores(scaled.choosing.logits, scaled.choosing.features)
    outside = {}
    for folder, paths in pictures.items():
        logits, features = calibrator.outside(paths, needs_features=bank is not None)
        outside[folder] = scores(scale(logits), features)
    calibration = Calibration(
        scaling=scale.kind,
        scale=scale.scale.tolist(),
        shift=scale.shift.tolist(),
        images=len(parts.fitting) + len(parts.choosing),
        sets=sets,
        rejections=rejections(chosen, settings.false_alarms),
        neighbours=settings.k,
    )
    known = scores(scaled.reported.logits, scaled.reported.features)
    return Outcome(calibration, losses, parts, scaled, known, outside), scale, bank


def write(
    calibrator: Calibrator,
    outcome: Outcome,
    scale: Scaling,
    bank: np.ndarray | None,
    target: Path,
    figures: dict[str, Any],
    page: str,
) -> None:
    """Writes calibrated weights and the measurements into a new folder, whole or not at all.

    Args:
        outcome, scale, bank: what ``calibrate`` returned.
        figures: become calibration.json.
        page: becomes report.html.

    Raises:
        InputError: the model's logits can't be scaled by its classifiers.
    """
    predictor = calibrator.predictor
    model = trained_model(calibrator.path, predictor.config, calibrator.cfg)
    if scale.kind != "none":
        fold(model, scale, photographs(predictor.config, count=4))
    thresholds = predictor.thresholds
    if predictor.has_several and scale.kind != "none":
        before = thresholds or [0.5] * predictor.config.MODEL.NUM_CLASSES
        thresholds = scaling.scaled_thresholds(np.array(before), scale).tolist()
    calibration = outcome.calibration
    with making_folder(target) as folder:
        if bank is not None:
            digest = neighbours.write_neighbours(folder, bank)
            calibration = replace(calibration, neighbours_sha256=digest)
        description = describe(
            predictor.config, predictor.classes, predictor.task, thresholds, calibration
        )
        write_weights(folder / WEIGHTS, file_arrays(model), {METADATA: description.to_json()})
        for name, text in ((FIGURES, json.dumps(figures, indent=1) + "\n"), (REPORT, page)):
            with writing_whole(folder / name) as file:
                file.write(text)
