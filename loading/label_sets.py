"""The labels of images that have any number of classes each."""

import hashlib
from collections.abc import Sequence

import numpy as np


class LabelSets:
    """The classes of each of n images, as 0 and 1: ``sets[i]`` is [outputs] uint8. Four bytes per
    label are held.

    Args:
        labels: [m] integers, image after image, each one once for an image.
        ends: [n + 1] integers, from 0 on: those of image i are labels[ends[i]:ends[i + 1]].

    Attributes:
        outputs: classes; ``label_spaces`` sets how many the model has.
    """

    def __init__(
        self, labels: Sequence[int] | np.ndarray, ends: Sequence[int] | np.ndarray
    ) -> None:
        self.labels, self.ends = np.asarray(labels, np.int32), np.asarray(ends, np.int64)
        self.outputs = int(self.labels.max(initial=-1)) + 1

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        row = np.zeros(self.outputs, np.uint8)
        row[self.of(index)] = 1
        return row

    def of(self, index: int) -> np.ndarray:
        """Returns the labels of an image."""
        return self.labels[self.ends[index] : self.ends[index + 1]]

    def at_places(self, places: np.ndarray) -> "LabelSets":
        """Returns the sets of the images at ``places`` [k]."""
        counts = np.diff(self.ends)[places]
        ends = np.concatenate([[0], np.cumsum(counts)])
        sources = np.repeat(self.ends[:-1][places] - ends[:-1], counts) + np.arange(ends[-1])
        return LabelSets(self.labels[sources], ends)

    def map_labels(self, places: np.ndarray) -> "LabelSets":
        """Returns the sets whose label is ``places[label]``."""
        return LabelSets(places[self.labels], self.ends)

    def tobytes(self) -> bytes:
        """Returns what tells these sets from others."""
        return self.ends.tobytes() + self.labels.tobytes()


def every_label(labels: Sequence[int] | np.ndarray | LabelSets) -> np.ndarray:
    """Returns the labels of all images, one after the other."""
    return labels.labels if isinstance(labels, LabelSets) else np.asarray(labels)


def take_labels(labels: np.ndarray | LabelSets, places: np.ndarray) -> np.ndarray | LabelSets:
    """Returns the labels of the images at ``places`` [k]."""
    return labels.at_places(places) if isinstance(labels, LabelSets) else labels[places]


def rarest(labels: Sequence[int] | np.ndarray | LabelSets) -> np.ndarray:
    """Returns one label of each image, [n]. Of several labels it is the one that the fewest images
    have. An image without any gets the number after the last label.
    """
    if not isinstance(labels, LabelSets):
        return np.asarray(labels)
    totals = np.bincount(labels.labels)
    images = np.repeat(np.arange(len(labels)), np.diff(labels.ends))
    order = np.argsort(-totals[labels.labels], kind="stable")
    found = np.full(len(labels), len(totals))
    found[images[order]] = labels.labels[order]  # the last one of an image counts
    return found


def kinds(labels: np.ndarray | LabelSets) -> np.ndarray:
    """Returns a number of each image, [n], the same where the label is, or the set of labels."""
    if not isinstance(labels, LabelSets):
        return labels
    sets = (np.sort(labels.of(index)).tobytes() for index in range(len(labels)))
    sums = (hashlib.blake2b(own, digest_size=8).digest() for own in sets)
    return np.array([int.from_bytes(each, "big") >> 1 for each in sums], np.int64)
