"""The measurements of ``tools/probe.py``, and their defaults. Importing this file doesn't import Paddle."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from errors import InputError, printable
from loading.label_spaces import some_of

PROBES = ("knn", "logistic", "sgd", "few_shot")


class Probes(NamedTuple):
    """The settings of a measurement.

    Attributes:
        names: some of PROBES.
        ks: the numbers of neighbours; by default those of DINO's paper.
        shots: the numbers of labels a class; empty: those of 1, 5 and 10 that each class has.
        draws: how often the few labels are drawn again.
        seed: of what is held out, of the order of SGD's batches, and of the first draw.
    """

    names: Sequence[str] = PROBES
    ks: Sequence[int] = (10, 20)
    shots: Sequence[int] = ()
    draws: int = 5
    seed: int = 0

    def checked(self, labels: np.ndarray, classes: Sequence[str]) -> "Probes":
        """Returns the probes with their ``shots``, which the training set allows.

        Args:
            labels: of the training images.
            classes: names, or empty.

        Raises:
            InputError: there are too few training images, in all or of a class.
        """
        count = len(labels)
        images = np.bincount(labels, minlength=len(classes))
        names = [*classes]
        if not names:
            # Numbers that no image has needn't be classes.
            names = [str(label) for label in np.flatnonzero(images)]
            images = images[images > 0]
        if count < len(names):
            raise InputError(
                f"the training set has {count} labels for {len(names)} classes; a probe needs at"
                " least one"
                " of each"
            )
        if absent := [name for name, number in zip(names, images, strict=True) if not number]:
            raise InputError(
                f"no training image has the class {some_of(absent)}; a probe needs at least one of"
                " each"
            )
        if "knn" in self.names and max(self.ks) > count:
            raise InputError(
                f"-k is {max(self.ks)}, but the training set has {count} images; lower -k"
            )
        fewest = int(images.min())
        for shots in self.shots:
            if shots > fewest and "few_shot" in self.names:
                name = printable(names[int(images.argmin())])
                plural = "image" if fewest == 1 else "images"
                raise InputError(
                    f"-shots is {shots}, but class '{name}' has only {fewest} training {plural};"
                    " lower -shots"
                )
        if {"logistic", "sgd"} & set(self.names):
            # It imports Paddle.
            from training.probing.linear import held_out

            # For its error alone: the linear classifiers need images that aren't trained on.
            held_out(labels, self.seed)
        shots = self.shots or tuple(number for number in (1, 5, 10) if number <= fewest)
        return self._replace(shots=shots)
