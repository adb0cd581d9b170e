"""Labels of images that have any number of classes each."""

import hashlib
from collections.abc import Sequence
from typing import overload

import numpy as np

# The label of an image that has none.
UNKNOWN = -1


class LabelSets:
    """A set of labels for each of n images.

    ``sets[i]`` is [outputs] uint8, with 1 for each label of image i. Four bytes are held for each
    label.

    Args:
        labels: [m] integers, the labels of all images, one after the other. An image has each of
            its labels once.
        ends: [n + 1] integers; those of image i are labels[ends[i]:ends[i + 1]].

    Attributes:
        outputs: the number of classes; ``label_spaces`` sets it to the model's.
    """

    def __init__(
        self, labels: Sequence[int] | np.ndarray, ends: Sequence[int] | np.ndarray
    ) -> None:
        self.labels = np.asarray(labels, np.int32)
        self.ends = np.asarray(ends, np.int64)
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
        """Returns bytes that differ where the sets do."""
        return self.ends.tobytes() + self.labels.tobytes()


def labels_or_unknown(labels: np.ndarray | LabelSets | None, count: int) -> np.ndarray | LabelSets:
    """Returns the labels of ``count`` images; where they are None, UNKNOWN for each image."""
    return np.full(count, UNKNOWN, np.int64) if labels is None else labels


def are_known(labels: np.ndarray | LabelSets) -> bool:
    """Returns whether images have labels."""
    return isinstance(labels, LabelSets) or not len(labels) or bool((labels != UNKNOWN).any())


def every_label(labels: Sequence[int] | np.ndarray | LabelSets) -> np.ndarray:
    """Returns the labels of all images, one after the other."""
    return labels.labels if isinstance(labels, LabelSets) else np.asarray(labels)


@overload
def take_labels(labels: np.ndarray | LabelSets, places: np.ndarray) -> np.ndarray | LabelSets: ...


@overload
def take_labels(labels: None, places: np.ndarray) -> None: ...


def take_labels(
    labels: np.ndarray | LabelSets | None, places: np.ndarray
) -> np.ndarray | LabelSets | None:
    """Returns the labels of the images at ``places`` [k]; None where there are none."""
    if labels is None:
        return None
    if isinstance(labels, LabelSets):
        return labels.at_places(places)
    # A reader may return a list.
    return np.asarray(labels)[places]


def rarest(labels: Sequence[int] | np.ndarray | LabelSets) -> np.ndarray:
    """Returns one label of each image, [n].

    Of several labels, it is the one that the fewest images have. An image without labels gets the
    number after the last label.
    """
    if not isinstance(labels, LabelSets):
        return np.asarray(labels)
    totals = np.bincount(labels.labels)
    images = np.repeat(np.arange(len(labels)), np.diff(labels.ends))
    order = np.argsort(-totals[labels.labels], kind="stable")
    result = np.full(len(labels), len(totals))
    # The rarest label of an image comes last, and replaces the others.
    result[images[order]] = labels.labels[order]
    return result


def label_groups(labels: np.ndarray | LabelSets) -> np.ndarray:
    """Returns a number for each image, [n], which is equal where the labels are.

    A set of labels is hashed to 63 bits.
    """
    if not isinstance(labels, LabelSets):
        return labels
    sets = (np.sort(labels.of(index)).tobytes() for index in range(len(labels)))
    digests = (hashlib.blake2b(content, digest_size=8).digest() for content in sets)
    return np.array([int.from_bytes(digest, "big") >> 1 for digest in digests], np.int64)
