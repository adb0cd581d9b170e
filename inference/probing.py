"""Evaluates the frozen features of trained weights (``tools/probe.py``)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from config import with_values
from datasets import ImageDataset, get_dataloader, get_datasets
from errors import InputError, printable
from inference.export_manifest import is_export, read_export
from inference.feature_store import FeatureExtractor, Pool
from inference.predictor import Predictor, config_of
from inference.probes import Probes
from inference.run_data import data_config, data_keys
from launch.progress import EVALUATING, beat
from ops.device import trim_buffers
from settings.configuration import Configuration
from settings.tasks import dataset_columns
from training.probing import collapse, knn, linear
from training.probing.features import Features, compute_features
from training.probing.linear import Labelled
from training.task import Batch
from utils import rank, world_size
from weights.hub import best_of_run


class Model(NamedTuple):
    """The model whose features are probed, as its command line names it.

    Attributes:
        path, cfg, options, batch_size: see ``Predictor``.
        layer: see ``FeatureExtractor``; None: the classifier's input, or the last layer if ``pool``
            is given.
        pool: see ``FeatureExtractor``. None: what the classifier reads.
    """

    path: str
    cfg: str | None = None
    options: Sequence[str] = ()
    batch_size: int = 32
    layer: int | None = None
    pool: Pool | None = None

    def extractor(self) -> Predictor:
        """Returns the predictor whose ``logits`` are the features.

        Raises:
            InputError: as ``FeatureExtractor``; or an export gives no features, or no layers.
        """
        if is_export(self.path):
            if not read_export(self.path).features:
                raise InputError(
                    f"{printable(self.path)} is an export, which gives logits but no features; use"
                    " the checkpoint that it was made from"
                )
            if self.layer is not None or self.pool is not None:
                raise InputError(
                    f"{printable(self.path)} is an export, which only gives its features; leave out"
                    " -layer and -pool, or use the checkpoint that it was made from"
                )
            return Predictor(self.path, self.cfg, self.options, batch_size=self.batch_size)
        if self.layer is None and self.pool is None:
            return FeatureExtractor(self.path, self.cfg, self.options, self.batch_size)
        layer = -1 if self.layer is None else self.layer
        return FeatureExtractor(
            self.path, self.cfg, self.options, self.batch_size, layer, self.pool, norm=True
        )


def read_sets(
    model: Model, data: Sequence[tuple[str, Any]], workers: int
) -> tuple[Configuration, ImageDataset, ImageDataset]:
    """Returns (configuration, training set, validation set), prepared as for an evaluation.

    No weights are loaded.

    Args:
        data: keys of the data and their values; empty: the data of the run that saved the weights.
        workers: the number of processes that load images.

    Raises:
        InputError: there is no such data, it has no labels or several an image, or as
            ``get_datasets``.
    """
    path = best_of_run(model.path)
    config, _ = config_of(path, model.cfg, [*model.options, "EVAL", "True"])
    file = None if is_export(path) else path
    config = data_config(
        config, data_keys(file, data, "a probe needs labelled images", has_validation=True)
    )
    config = with_values(config, DATA__BATCH_SIZE_EVAL=model.batch_size, DATA__NUM_WORKERS=workers)
    if "labels" not in dataset_columns(config.DATA.DATASET):
        raise InputError(
            f"the images of '{config.DATA.DATASET}' have no labels, but a probe needs one per image"
        )
    if config.TASK != "classification":
        raise InputError(
            f"the images of '{config.DATA.DATASET}' have several labels, but a probe needs one"
            " per image"
        )
    config, train, val = get_datasets(config)
    assert train is not None
    for dataset in (train, val):
        # A probe isn't a training, so its errors give no advice for one.
        dataset.advice = ""
    return config, train.as_evaluated(config), val


def measure(
    model: Model,
    config: Configuration,
    train: ImageDataset,
    val: ImageDataset,
    probes: Probes,
    after_batch: Callable[[int], Any] = int,
) -> dict[str, Any]:
    """Returns the evaluation of the features; every rank calls it.

    k-NN, RankMe and the deviation are computed by all ranks, the linear classifiers by rank 0. On
    other ranks the result lacks these.

    Args:
        config, train, val: what ``read_sets`` returned.
        after_batch: called with the number of images of each batch.

    Raises:
        InputError: the features can't be had (``Model.extractor``).
        RunError: an image can't be read, or a feature isn't finite.
    """
    extractor = model.extractor()
    sets = [_features(extractor, config, dataset, after_batch) for dataset in (train, val)]
    trained, validated = sets
    spread = collapse.spread_of(trained)
    result: dict[str, Any] = {
        "weights": str(extractor.path),
        "model": extractor.config.MODEL.NAME,
        "features": getattr(extractor, "made", None),
        "channels": spread.channels,
        "train_images": spread.images,
        "val_images": len(val),
        "classes": len(np.unique(trained.labels)),
        "seed": probes.seed,
        "rankme": spread.rankme,
        "feature_std": spread.feature_std,
        "healthy_feature_std": spread.healthy,
        "warning": spread.warning,
    }
    if "knn" in probes.names:
        accuracies = knn.knn_accuracies(trained, validated, probes.ks)
        result["knn"] = {str(k): accuracy for k, accuracy in accuracies.items()}
    if not set(probes.names) - {"knn"}:
        return result
    train_rows, val_rows = (Labelled(*features.gathered()) for features in sets)
    if rank():
        return result
    linear.standardise(train_rows.values, val_rows.values)
    if "logistic" in probes.names:
        result["logistic"] = linear.logistic_probe(train_rows, val_rows, probes.seed)
    if "sgd" in probes.names:
        result["sgd"] = linear.sgd_probe(train_rows, val_rows, probes.seed)
    if "few_shot" in probes.names:
        seeds = range(probes.seed, probes.seed + probes.draws)
        result["few_shot"] = {
            str(shots): linear.few_shot_probe(train_rows, val_rows, shots, seeds)
            for shots in probes.shots
        }
    return result


def _features(
    extractor: Predictor,
    config: Configuration,
    dataset: ImageDataset,
    after_batch: Callable[[int], Any],
) -> Features:
    loader = get_dataloader(config, dataset, "val", rank=rank(), ranks=world_size())

    def batches() -> Iterator[Batch]:
        for batch in loader:
            beat(EVALUATING)
            yield batch
            trim_buffers()
            after_batch(len(batch["pixels"]))

    return compute_features(extractor.logits, loader, batches())


def table(result: dict[str, Any]) -> str:
    """Returns a result of ``measure`` as lines of text, percentages of the validation images."""
    lines = []
    for k, accuracy in result.get("knn", {}).items():
        lines.append((f"k-NN, k {k}", f"{accuracy:.2f}"))
    if logistic := result.get("logistic"):
        note = "" if logistic["converged"] else ", not converged"
        lines.append(
            (f"logistic regression, C {logistic['C']:g}{note}", f"{logistic['accuracy']:.2f}")
        )
    if sgd := result.get("sgd"):
        lines.append((f"linear by SGD, learning rate {sgd['rate']:g}", f"{sgd['accuracy']:.2f}"))
    for shots, few in result.get("few_shot", {}).items():
        plural = "" if shots == "1" else "s"
        lines.append(
            (f"{shots} label{plural} a class", f"{few['mean']:.2f} +- {few['deviation']:.2f}")
        )
    lines.append((f"RankMe, of {result['channels']}", f"{result['rankme']:.2f}"))
    healthy = result["healthy_feature_std"]
    lines.append((f"deviation, healthy {healthy:.4f}", f"{result['feature_std']:.4f}"))
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in lines)
