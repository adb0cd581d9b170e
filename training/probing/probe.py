"""Measures the frozen features of a training every PROBE.FREQ epochs, after an evaluation."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import paddle

from datasets import ImageDataset, get_dataloader
from errors import InputError
from loading.label_sets import LabelSets
from loading.transforms import Normalize
from loading.workers import Loader
from models.base import ImageModel, without_classifier
from settings.configuration import Configuration
from training.probing.collapse import spread_of
from training.probing.features import compute_features
from training.probing.knn import knn_accuracies
from training.run import Run
from training.setup import autocast
from utils import rank, world_size
from weights.layout import encoder_of


class Probe:
    """The probe of a training, which does nothing without PROBE.FREQ.

    The images are prepared as for an evaluation, also where the task's evaluation has views of
    them. Labels are used here even if the task ignores them. Nothing is random or changes the
    training, so a checkpoint has no state of it.

    Args:
        model: the network, not wrapped.
        train: the training set.
        val_loader: the loader of the validation set.

    Attributes:
        note: a line that the run logs at its beginning; "": none.
        images: the number of images that a probe computes.

    Raises:
        InputError: the network has no features, there are fewer training images than neighbours, or
            BEST_METRIC is knn and the images have no labels.
    """

    def __init__(
        self, config: Configuration, model: Any, train: ImageDataset, val_loader: Loader
    ) -> None:
        self.config = config
        self.note = ""
        self.images = 0
        if config.PROBE.FREQ is None:
            return
        if not isinstance(_encoder(model), ImageModel):
            raise InputError(
                f"PROBE.FREQ is set, but the network of TASK {config.TASK} has no features; leave it out"
            )
        self.normalize = Normalize(config.DATA.IMAGENET_MEAN, config.DATA.IMAGENET_STD)
        self.val_loader = val_loader
        self.has_own_loader = bool(val_loader.dataset.views)
        if self.has_own_loader:
            val = val_loader.dataset.as_evaluated(config)
            self.val_loader = get_dataloader(config, val, "val", rank=rank(), ranks=world_size())
        images = SomeImages(train.as_evaluated(config), config.PROBE.IMAGES, config.SEED)
        self.is_labelled = all(map(_has_labels, (train, val_loader.dataset)))
        if not self.is_labelled:
            self.note = (
                "PROBE: the images don't have one label each, so RankMe and the deviation of the"
                " features are measured, but not k-NN"
            )
            if config.BEST_METRIC == "knn":
                raise InputError(
                    "BEST_METRIC is knn, but the images don't have one label each; choose another"
                )
        elif len(images) < config.PROBE.K:
            raise InputError(
                f"PROBE.K is {config.PROBE.K}, but only {len(images)} training images are compared;"
                " lower it, or raise PROBE.IMAGES"
            )
        # It has what the loader reads.
        part: Any = images
        self.loader = get_dataloader(config, part, "val", rank=rank(), ranks=world_size())
        self.images = len(images)
        if self.is_labelled:
            self.images += len(val_loader.dataset)

    def is_due(self, epoch: int, last: float) -> bool:
        """Returns whether an epoch's evaluation is followed by a probe.

        Args:
            last: the last epoch, which is always probed.
        """
        freq = self.config.PROBE.FREQ
        return freq is not None and (epoch % freq == 0 or epoch >= last)

    def measure(
        self, model: Any, batches: Callable[[Loader], Iterable[dict]], run: Run
    ) -> dict[str, float]:
        """Returns ``knn`` (percent), ``rankme`` and ``feature_std`` of a model in evaluation mode.

        All ranks call it, and get the same. A collapse is logged.

        Args:
            batches: returns a pass of a loader.
        """
        encoder = _encoder(model)

        def forward(pixels: paddle.Tensor) -> np.ndarray:
            with paddle.no_grad(), autocast(self.config, evaluation=True):
                return encoder(self.normalize(pixels)).astype("float32").numpy()

        with without_classifier(encoder):
            train = compute_features(forward, self.loader, batches(self.loader))
            # It has begun to load the next pass, which is some epochs away.
            self.loader.close()
            spread = spread_of(train)
            values = {"rankme": spread.rankme, "feature_std": spread.feature_std}
            if self.is_labelled:
                val = compute_features(forward, self.val_loader, batches(self.val_loader))
                if self.has_own_loader:
                    self.val_loader.close()
                k = self.config.PROBE.K
                values["knn"] = knn_accuracies(train, val, [k])[k]
        if spread.warning:
            run.info(f"warning: {spread.warning}")
        return values


class SomeImages(paddle.io.Dataset):
    """A random part of a dataset's images, in their order; always the same ones.

    Args:
        count: the number of images; None, or more than there are: all.
    """

    def __init__(self, dataset: ImageDataset, count: int | None, seed: int) -> None:
        super().__init__()
        self.dataset = dataset
        order = np.arange(len(dataset))
        if count is not None:
            order = np.sort(np.random.default_rng([seed]).permutation(len(dataset))[:count])
        self.order = order
        self.labels = order
        if not isinstance(dataset.labels, LabelSets):
            self.labels = dataset.labels[order]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple:
        return self.dataset[int(self.order[index])]

    def __getattr__(self, name: str) -> Any:
        # What else the loader reads, such as the columns, is the dataset's. A copy has no dataset yet
        # when it is asked for other attributes.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def sample(self, key: int) -> dict[str, Any]:
        return self.dataset.sample(int(self.order[key]))

    def name(self, index: int) -> str:
        return self.dataset.name(int(self.order[index]))


def _encoder(model: Any) -> Any:
    """Returns the model whose features are probed: a network's encoder, or the network itself."""
    encoder = encoder_of(model)
    return model if encoder is None else encoder


def _has_labels(dataset: Any) -> bool:
    """Returns whether each image has one label."""
    return not isinstance(dataset.labels, LabelSets) and bool((dataset.labels >= 0).all())
