"""Samples of labelled and unlabelled images, for trainings on few labels (FixMatch).

``labelled_places`` chooses the images that keep their labels. ``FewLabels`` puts each labelled image
beside several unlabelled ones.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from errors import InputError, RunError, Unreadable, counted
from loading.dataset import ImageDataset
from loading.label_sets import UNKNOWN
from loading.transforms import Broken, Size, TrainTransform, draw_views
from loading.workers import Shapes
from settings.configuration import Configuration

# Part of the seeds, so that these draws differ from others.
_CHOICE_TAG = 0x6C6162656C73
_ORDER_TAG = 0x7061697273


def labelled_places(
    labels: np.ndarray, classes: int, per_class: int | None, seed: int, names: Sequence[str] = ()
) -> np.ndarray:
    """Returns the places of the images that keep their labels, in rising order.

    They are a function of (labels, per_class, seed). With the same seed, those of a smaller number
    are among those of a larger one.

    Args:
        labels: [n] integers from 0 to below ``classes``.
        per_class: how many images of each class keep their labels; None: all of them.
        seed: of the choice.
        names: of the classes, for messages; empty: they have none.

    Raises:
        InputError: a class has fewer images, or none.
    """
    counts = np.bincount(labels, minlength=classes)
    least = int(counts.argmin())
    name = f"'{names[least]}'" if len(names) else str(least)
    if per_class is None:
        if not counts[least]:
            raise InputError(
                f"class {name} has no labelled image, expected at least one; add one,"
                " or remove the class"
            )
        return np.arange(len(labels))
    if counts[least] < per_class:
        found = counted(int(counts[least]), "image", "images")
        raise InputError(
            f"METHOD.LABELS_PER_CLASS is {per_class}, but class {name} has {found}; lower it"
        )
    order = np.random.default_rng([seed, _CHOICE_TAG]).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    # The place of each image among those of its class.
    firsts = np.cumsum(counts) - counts
    place = np.arange(len(labels)) - firsts[labels[by_class]]
    return np.sort(by_class[place < per_class])


class FewLabels(ImageDataset):
    """Samples of a labelled image and ``ratio`` unlabelled ones, in several views.

    The unlabelled images are all training images, without their labels, and then those of
    ``further``. An epoch shows each of them once, in groups of ``ratio``; the last group is filled
    up. Sample g of an epoch has the g-th group. The labelled images take turns: an epoch shows each
    of them equally often, or once more than another. Both orders are drawn by (seed, epoch), and
    the views by (seed, epoch, g, copy).

    A weak view has the training transform's crop, affine jitter and flips. A strong view has all of
    it, and random erasing. The columns are:

    - "pixels": [H, W, C], the labelled image, and "labels", its label
    - "weak" and, with ``strong``, "strong": [ratio, H, W, C], two views of each unlabelled image
    - "true_labels": [ratio], those of the unlabelled images; -1 where they aren't known
    - "erased", with RANDOM_ERASE_PROB: [V, ...], what the device has to erase of the strong views,
      the labelled image's first
    - "skipped", with DATA.SKIP_BROKEN: [1 + ratio], numbers of images that can't be read, or -1

    Args:
        train: the training set.
        labelled: [k], the places of its images that keep their labels.
        ratio: unlabelled images of a sample.
        reads_unlabelled: whether they are read. Otherwise the samples have labelled images alone,
            the same ones, in epochs of the same length.
        strong: whether the unlabelled images have a strong view.
        strong_labelled: whether the labelled image's view is a strong one.
        further: images without labels; None: there are none.
    """

    def __init__(
        self,
        config: Configuration,
        train: ImageDataset,
        labelled: np.ndarray,
        ratio: int,
        *,
        reads_unlabelled: bool,
        strong: bool,
        strong_labelled: bool,
        further: ImageDataset | None = None,
    ) -> None:
        labels: Any = train.labels
        super().__init__(config, "train", labels[labelled], train.classes)
        self.sources = [train] if further is None else [train, further]
        self.labelled = labelled
        self.ratio = ratio
        self.reads_unlabelled = reads_unlabelled
        self.unlabelled = sum(map(len, self.sources))
        self.true_labels = labels
        # It is a training set's.
        strong_view: Any = self.transform
        self.strong_view: TrainTransform = strong_view
        self.weak_view = _weak(strong_view)
        self.labelled_view = self.strong_view if strong_labelled else self.weak_view
        self.strong_labelled = strong_labelled
        self.strong = strong
        self._order: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return -(-self.unlabelled // self.ratio)

    @property
    def columns(self) -> tuple[str, ...]:
        names = ["pixels", "labels"]
        if self.reads_unlabelled:
            names += ["weak", "true_labels"]
            if self.strong:
                names.append("strong")
        if self._erased_views:
            names.append("erased")
        if self.skip_broken:
            names.append("skipped")
        return tuple(names)

    @property
    def _erased_views(self) -> int:
        """The number of a sample's views that are erased."""
        if self.erasing is None:
            return 0
        views = 1 if self.strong_labelled else 0
        if self.reads_unlabelled and self.strong:
            views += self.ratio
        return views

    def shapes(self, size: Size) -> Shapes:
        shape = (*size, self.channels)
        shapes: Shapes = {"pixels": (shape, self.pixel_dtype)}
        for name in ("weak", "strong"):
            if name in self.columns:
                shapes[name] = (self.ratio, *shape), self.pixel_dtype
        return shapes

    def sample(self, key: int | tuple[int, ...]) -> dict[str, Any]:
        epoch, index, copy_number, *size = key if isinstance(key, tuple) else (self.epoch, key, 0)
        unlabelled, labelled = self._orders(epoch)

        def generator(view: int) -> np.random.Generator:
            return self.generator(epoch, index, copy_number, view)

        views = {"pixels": self._sized(self.labelled_view, size)}
        place, found = self._read(self.labelled, labelled[index], views, generator, first=0)
        skipped = [self._skipped(self.labelled[labelled[index]], self.labelled[place])]
        sample: dict[str, Any] = {
            "pixels": found["pixels"],
            "labels": self.labels[place],
        }
        if self.reads_unlabelled:
            views = {"weak": self._sized(self.weak_view, size)}
            if self.strong:
                views["strong"] = self._sized(self.strong_view, size)
            everything = range(self.unlabelled)
            group = unlabelled[index * self.ratio : (index + 1) * self.ratio]
            places = []
            stacked: dict[str, list[np.ndarray]] = {name: [] for name in views}
            for number, wanted in enumerate(group):
                # A view keeps its number, whether there are strong ones or not.
                first = 1 + 2 * number
                place, found = self._read(everything, wanted, views, generator, first=first)
                places.append(place)
                skipped.append(self._skipped(wanted, place))
                for name, pixels in found.items():
                    stacked[name].append(pixels)
            sample |= {name: np.stack(pixels) for name, pixels in stacked.items()}
            known = len(self.true_labels)
            sample["true_labels"] = np.array(
                [self.true_labels[place] if place < known else UNKNOWN for place in places]
            )
        if self._erased_views and self.erasing is not None:
            rng = self.generator(epoch, index, copy_number)
            drawn = [self.erasing.draw(rng, *size) for _ in range(self._erased_views)]
            sample["erased"] = np.stack(drawn)
        sample["skipped"] = np.array(skipped)
        return sample

    def name(self, index: int) -> str:
        """Returns the name of a sample or, after all samples, of an image."""
        if index < len(self):
            return f"sample {index}, of labelled and unlabelled images"
        source, place = self._image(index - len(self))
        return source.name(place)

    def _skipped(self, wanted: Any, read: Any) -> int:
        """Returns the number by which ``name`` knows an image that another one replaced, or -1."""
        return -1 if wanted == read else len(self) + int(wanted)

    def _image(self, number: int) -> tuple[ImageDataset, int]:
        """Returns an unlabelled image: its dataset, and its index there."""
        train = self.sources[0]
        if number < len(train):
            return train, number
        return self.sources[1], number - len(train)

    def _orders(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the unlabelled images of an epoch in their order, [samples * ratio], and the place
        of each sample's labelled one among the labelled ones, [samples].
        """
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch, _ORDER_TAG])
            count = len(self.labelled)
            turns = np.tile(np.arange(count), (-(-len(self) // count), 1))
            labelled = rng.permuted(turns, axis=1).flatten()[: len(self)]
            unlabelled = np.resize(rng.permutation(self.unlabelled), len(self) * self.ratio)
            self._order = epoch, unlabelled, labelled
        return self._order[1:]

    def _sized(self, transform: TrainTransform, size: Sequence[int]) -> TrainTransform:
        """Returns a transform for the size that a sampler asks for, which may be none."""
        return transform.at(*size) if size else transform

    def _read(
        self, places: Sequence[int] | np.ndarray, start: int, views: Any, generator: Any, first: int
    ) -> tuple[int, dict[str, np.ndarray]]:
        """Returns the views of an image, and its place in ``places``.

        With SKIP_BROKEN, this is the next one that can be read.

        Args:
            places: numbers of images among the unlabelled ones.
            start: a place in them.
            views: the transforms of views by name.
            generator: returns the generator of a view by its number.
            first: the number of the first view.

        Raises:
            RunError: it can't be read; with SKIP_BROKEN: none can.
        """
        transforms = {name: [transform] for name, transform in views.items()}
        for step in range(len(places)):
            place = (int(start) + step) % len(places)
            number = int(places[place])
            if number in self._broken:
                continue
            source, index = self._image(number)
            try:
                try:
                    picture = source.picture(index)
                    found = draw_views(picture, transforms, lambda view: generator(first + view))
                except Unreadable as error:
                    name = source.name(index)
                    raise Broken(f"{name}: {error}; crop or remove it") from None
            except RunError as error:
                if not self.skip_broken:
                    raise RunError(f"{error}{source.advice}") from None
                if isinstance(error, Broken):
                    self._broken.add(number)
                continue
            return place, {name: pixels[0] for name, pixels in found.items()}
        raise RunError(f"none of {len(places)} training images can be read")


def _weak(transform: Any) -> TrainTransform:
    """Returns a training transform that changes no colours: crop, affine jitter and flips."""
    weak = copy.copy(transform)
    weak.augment = None
    weak.color_jitter = 0.0
    weak.photometric = False
    return weak
