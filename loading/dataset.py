"""Dataset classes, whose samples have pixels, labels and further columns.

A dataset holds its paths and labels in a few arrays, which the ranks of a machine share. For
ImageNet's 1.3 million files they take 65 MB. ``datasets.get_dataset`` makes the one that a
configuration asks for.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import paddle
from PIL import Image

from errors import InputError, RunError, Unreadable, printable
from loading.cache import Labels, MappedImages
from loading.files import Paths, contents
from loading.label_sets import LabelSets, labels_or_unknown
from loading.rows import Rows
from loading.shards import Shards
from loading.sources import Masks, checked_columns
from loading.transforms import (
    Broken,
    Encoded,
    EvalTransform,
    Mask,
    Picture,
    RandomErasing,
    Size,
    ViewTransform,
    check_mask_size,
    draw_views,
    encoded_image,
    image_of,
    largest_file,
    mask_image,
    pixel_dtype,
    pixel_mode,
    readable,
)
from loading.transforms.naflex import Packing, eval_transform, train_transform
from loading.workers import Shapes
from settings.configuration import Configuration, pair
from settings.tasks import columns_of, is_read_by

_Dataset = TypeVar("_Dataset", bound="ImageDataset")


class ImageDataset(paddle.io.Dataset):
    """Images with labels, the base class of the datasets below.

    A sample is ``dataset[index]`` or ``dataset[epoch, index, copy]``. A fourth number, or pair of
    numbers, is the size of its pixels, if that isn't IMAGE_SIZE. ``columns`` names its items:

    - "pixels": [H, W, C] uint8 or float32; with ``views`` [V, H, W, C]
    - "labels", if TASK needs them: an integer, or [K] uint8 of 0 and 1 where an image has several
      labels
    - "erased", with RANDOM_ERASE_PROB: what the device has to erase
    - "grid", after ``pack``: the rows and columns of the image's patches, [2] int32
    - "skipped", with DATA.SKIP_BROKEN: the index of an unreadable image that the next one replaced,
      or -1
    - one for each of a source's further columns: a mask [H, W] uint8 or int32, or numbers
    - one for each further column of ``views``
    - one for each of ``draws``

    An augmented sample is a pure function of (seed, epoch, index), whichever process loads it. If
    an epoch holds an image several times, ``copy`` counts these from 0, and is part of the seed.
    In an evaluation a sample is a function of (seed, index) alone.

    ``paddle.io.DataLoader`` asks for ``dataset[index]``. That is the sample of epoch
    ``dataset.epoch``: set it before each pass, or all passes get the same augmentation.

    Args:
        labels: [n] integers, or a set of labels for each image; UNKNOWN for images without labels
            (``loading.label_sets``).
        classes: names, in the order of labels.

    Attributes:
        own_columns: the names of a sample's items without those of ``draws``: the columns that TASK
            needs. Other masks aren't read.
        draws: functions of a sample's generator by the name of their column. Each is called after
            the sample's transform, in the mapping's order, and returns an array of one shape.
            Entries have to be added before a loader is made.
        views: transforms that each give one view of an image, by the column that holds the views,
            [V, H, W, C]. Those of a column have one size. "pixels" is one of the columns, and
            replaces the one view that there is without. Views are numbered over all columns. View v
            is drawn by (seed, epoch, index, copy, v), however many there are; the image is decoded
            once. To be set before a loader is made.
    """

    def __init__(
        self, config: Configuration, mode: str, labels: Labels, classes: Sequence[str]
    ) -> None:
        super().__init__()
        train = mode == "train"
        self.train = train
        self.labels = labels if isinstance(labels, LabelSets) else np.asarray(labels, np.int64)
        self.classes = list(classes)
        self.seed = config.SEED
        self.epoch = 0
        self.transform = train_transform(config) if train else eval_transform(config)
        erases = config.TRAIN.RANDOM_ERASE_PROB and is_read_by(
            config.TASK, "TRAIN.RANDOM_ERASE_PROB"
        )
        self.erasing = RandomErasing(config) if train and erases else None
        # Whether an evaluation's images and masks differ in size (``keep_sizes``).
        self.keeps_sizes = config.DATA.NUM_TOKENS is not None and not train
        # How images become patches (``pack``); None: they stay images.
        self.packing: Packing | None = None
        # The outputs that an evaluation compares; None: all (loading.label_spaces).
        self.compared: np.ndarray | None = None
        self.mode = pixel_mode(config)
        self.channels = config.DATA.IMAGE_CHANNELS
        self.pixel_dtype = np.dtype(pixel_dtype(config))
        self.skip_broken = config.DATA.SKIP_BROKEN and train
        self.draws: dict[str, Callable[[np.random.Generator], np.ndarray]] = {}
        self._drawn_shapes: dict[str, tuple[int, ...]] = {}
        self.views: dict[str, list[ViewTransform]] = {}
        # The source's further columns.
        self.masks: dict[str, Masks] = {}
        self.values: dict[str, np.ndarray] = {}
        self.task_columns = columns_of(config.TASK)
        self.own_columns = ["pixels"]
        if "labels" in self.task_columns:
            self.own_columns.append("labels")
        if self.erasing is not None:
            self.own_columns.append("erased")
        if self.skip_broken:
            self.own_columns.append("skipped")
        # The images that this process needn't try to decode again.
        self._broken: set[int] = set()
        # An evaluation skips nothing.
        self.advice = ", or train with DATA.SKIP_BROKEN True" if train else ""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the names of a sample's items."""
        further = [name for name in self.views if name not in self.own_columns]
        return (*self.own_columns, *further, *self.draws)

    def add_columns(self, columns: Mapping[str, Masks | np.ndarray]) -> None:
        """Adds a source's further columns. A sample has those that TASK needs.

        Raises:
            InputError: as of ``loading.sources.checked_columns``.
        """
        for name, column in checked_columns(columns, len(self)).items():
            if isinstance(column, Masks):
                self.masks[name] = column
            else:
                self.values[name] = column
            if name in self.task_columns:
                self.own_columns.append(name)

    def keep_sizes(self) -> None:
        """Lets an evaluation have each image in a batch of its own, whole, and with masks as they
        are stored.

        DATA.CROP_MODE says how the image is resized. A task that wants this calls it before the
        loader is made (``Task.prepare_data``).
        """
        if not isinstance(self.transform, EvalTransform):
            raise TypeError("training images have one size")
        self.transform.keeps_masks = True
        self.keeps_sizes = True

    def pack(self, packing: Packing) -> None:
        """Makes samples patches of one shape, [N, P * P, C], for images of any aspect ratio.

        A column "grid" [2] int32 holds the rows and columns of each image's patches. A task that
        reads it calls this before the loader is made (``Task.prepare_data``). To others, images
        with DATA.NUM_TOKENS come alone in their batches, as images.
        """
        self.packing = packing
        self.keeps_sizes = False
        if "grid" not in self.own_columns:
            self.own_columns.append("grid")

    @property
    def needed_masks(self) -> list[str]:
        """Returns the names of the masks that a sample has."""
        return [name for name in self.masks if name in self.own_columns]

    def shapes(self, size: Size) -> Shapes:
        """Returns (shape, type) of the items that are arrays of one shape, by column.

        A loader's workers share the memory of these. All other items go through pipes, which is
        slower for large ones.

        Args:
            size: (height, width) of the pixels, or (patches, any number) of packed ones. Views have
                sizes of their own.
        """
        # Images of any size, one at a time, go through the pipes.
        if self.keeps_sizes:
            return {}
        if self.packing is not None:
            size = self.packing._replace(length=size[0]).size
        shapes: Shapes = {"pixels": ((*size, self.channels), self.pixel_dtype)}
        for name in self.needed_masks:
            shapes[name] = size, np.dtype(self.masks[name].dtype)
        for name, views in self.views.items():
            shapes[name] = (len(views), *views[0].size, self.channels), self.pixel_dtype
        return shapes

    def __getitem__(self, key: int | tuple[int, ...]) -> tuple:
        sample = self.sample(key)
        return tuple(sample[name] for name in self.columns)

    def sample(self, key: int | tuple[int, ...]) -> dict[str, Any]:
        """Returns a sample's items by the names of their columns."""
        epoch, index, copy, *size = key if isinstance(key, tuple) else (self.epoch, key, 0)
        # With SKIP_BROKEN, the next image that can be read takes an unreadable one's place.
        for read in range(index, index + len(self)):
            read %= len(self)
            if read in self._broken:
                continue
            rng = self.generator(epoch, index, copy)
            try:
                transformed = self._transformed(read, (epoch, index, copy), rng, *size)
                break
            except RunError as error:
                if not self.skip_broken:
                    raise RunError(f"{error}{self.advice}") from None
                if isinstance(error, Broken):
                    self._broken.add(read)
        else:
            raise RunError(f"none of the {len(self)} training images can be read")
        # Items that aren't columns of this task are left out at the end.
        sample: dict[str, Any] = {name: values[read] for name, values in self.values.items()}
        sample |= transformed
        sample["labels"] = self.labels[read]
        if self.skip_broken:
            sample["skipped"] = -1 if read == index else index
        return sample | self.drawn(rng, *size)

    def drawn(self, rng: np.random.Generator, *size: int) -> dict[str, np.ndarray]:
        """Returns the columns of a sample that are drawn after its transform."""
        columns = {}
        if self.erasing is not None:
            columns["erased"] = self.erasing.draw(rng, *size)
        for name, draw in self.draws.items():
            columns[name] = self._checked(name, np.asarray(draw(rng)))
        return columns

    def _checked(self, name: str, drawn: np.ndarray) -> np.ndarray:
        """Returns what a function of ``draws`` returned.

        Raises:
            RunError: no column can be made of it.
        """
        shape = self._drawn_shapes.setdefault(name, drawn.shape)
        found = ""
        if name in self.own_columns or name in self.views:
            found = "a name of a column of the data; choose another"
        elif drawn.dtype.kind not in "biuf":
            found = f"{drawn.dtype}, expected numbers"
        elif drawn.shape != shape:
            found = f"{list(drawn.shape)} after {list(shape)}, expected one shape for all samples"
        if found:
            raise RunError(f"the task's column {name} has {found}")
        return drawn

    def _transformed(
        self, index: int, drawn_by: tuple[int, int, int], rng: np.random.Generator, *size: int
    ) -> dict[str, Any]:
        """Returns the pixels and the masks of a sample, or its views.

        Args:
            index: of the image that is read.
            drawn_by: (epoch, index, copy) of the sample.
            rng: the sample's generator.
        """
        try:
            picture = self.picture(index)
            if self.views:
                generator = functools.partial(self.generator, *drawn_by)
                return draw_views(picture, self.views, generator)
            names = self.needed_masks
            if not names:
                pixels = self.transform(picture, rng, *size)
                if self.packing is None:
                    return {"pixels": pixels}
                length = size[0] if size else self.packing.length
                patches, grid = self.packing._replace(length=length).pack(pixels)
                return {"pixels": patches, "grid": grid}
            masks = [self._mask(name, index, picture.size) for name in names]
            pixels, moved = self.transform.with_masks(picture, masks, rng, *size)
            return {"pixels": pixels, **dict(zip(names, moved, strict=True))}
        except Unreadable as error:
            raise Broken(f"{self.name(index)}: {error}; crop or remove it") from None

    def _mask(self, column: str, index: int, size: tuple[int, int]) -> Mask:
        """Returns a mask; raises Broken where it hasn't the ``size`` (width, height) of its image."""
        image = self.mask(column, index)
        check_mask_size(image, self.mask_name(column, index), size, self.name(index))
        return Mask(image, self.masks[column].ignored)

    def generator(
        self, epoch: int, index: int, copy: int, view: int | None = None
    ) -> np.random.Generator:
        """Returns the generator that a sample's augmentation is drawn from, or that of one view.

        In an evaluation ``epoch`` and ``copy`` have no effect.
        """
        seeds = [self.seed, epoch if self.train else 0, index]
        if copy and self.train:
            seeds.append(copy)
        # Zeros at the end of the seeds change nothing, so the view's number isn't one of them.
        key = () if view is None else (view,)
        return np.random.default_rng(np.random.SeedSequence(seeds, spawn_key=key))

    def as_evaluated(self: _Dataset, config: Configuration) -> _Dataset:
        """Returns the same images, prepared as for an evaluation, without masks, views and drawn columns.

        With DATA.SKIP_BROKEN, unreadable images are still replaced.
        """
        dataset = copy.copy(self)
        dataset.train = False
        dataset.transform = eval_transform(config)
        dataset.keeps_sizes = config.DATA.NUM_TOKENS is not None
        dataset.packing = None
        dataset.erasing = None
        dataset.draws = {}
        dataset.views = {}
        kept = ("pixels", "labels", "skipped")
        dataset.own_columns = [name for name in self.own_columns if name in kept]
        return dataset

    def image(self, index: int) -> Picture:
        """Returns the image, decoded in full; raises RunError with its name where that fails."""
        raise NotImplementedError

    def picture(self, index: int) -> Picture:
        """Returns the image for the transform, which decodes it if it is still encoded.

        Both raise RunError where the image can't be read.
        """
        return self.image(index)

    def name(self, index: int) -> str:
        """Returns the sample's name in messages, such as its path."""
        return f"sample {index}"

    def mask(self, column: str, index: int) -> Image.Image:
        """Returns the mask of an image; raises RunError with its name where it can't be read."""
        raise NotImplementedError

    def mask_name(self, column: str, index: int) -> str:
        """Returns the name of an image's mask in messages."""
        return f"{column} of {self.name(index)}"

    def has_labelled_pixel(self, column: str) -> bool:
        """Returns whether any pixel of a column's masks has a class.

        Masks are decoded until one has such a pixel, mostly the first. They are taken in a random
        order, because those without may be neighbours.

        Raises:
            InputError: a mask can't be read.
        """
        ignored = self.masks[column].ignored
        for index in np.random.default_rng(0).permutation(len(self)):
            try:
                mask = self.mask(column, int(index))
            except RunError as error:
                if not self.skip_broken:
                    raise InputError(str(error)) from None
                continue
            if (np.asarray(mask) != ignored).any():
                return True
        return False

    def relative_names(self) -> Paths | np.ndarray | None:
        """Returns the images' names, relative to the data's folder; None where they have none."""
        return None


class ArrayDataset(ImageDataset):
    """Decoded images in memory.

    Args:
        images: [n, H, W] or [n, H, W, 3] uint8; from a cache also images of other channels and
            types (``Bands``).
    """

    def __init__(
        self,
        config: Configuration,
        mode: str,
        images: np.ndarray | MappedImages,
        labels: Labels,
        classes: Sequence[str],
    ) -> None:
        super().__init__(config, mode, labels, classes)
        self.images = images
        # DATA.SKIP_BROKEN is for images that are still to be decoded.
        self.advice = ""
        # Names of the files that a cache was made from.
        self.names: Paths | np.ndarray | None = None
        # The masks of a cache, by column.
        self.cached_masks: dict[str, MappedImages] = {}

    def image(self, index: int) -> Picture:
        return image_of(self.images[index], self.mode)

    def mask(self, column: str, index: int) -> Image.Image:
        return Image.fromarray(self.cached_masks[column][index].astype(self.masks[column].dtype))

    def relative_names(self) -> Paths | np.ndarray | None:
        return self.names


class EncodedDataset(ImageDataset):
    """Images in an encoded form, such as JPEG. Subclasses return the bytes (``data``).

    An evaluation takes the pixels that Pillow decodes, unless DATA.FAST_EVAL is set.
    """

    def __init__(
        self, config: Configuration, mode: str, labels: Labels, classes: Sequence[str]
    ) -> None:
        super().__init__(config, mode, labels, classes)
        self.exact = mode != "train" and not config.DATA.FAST_EVAL
        self.most = config.DATA.MAX_PIXELS
        self.oriented = config.DATA.EXIF_ORIENTATION

    def as_evaluated(self: _Dataset, config: Configuration) -> _Dataset:
        dataset: Any = ImageDataset.as_evaluated(self, config)
        dataset.exact = not config.DATA.FAST_EVAL
        return dataset

    def data(self, index: int) -> bytes:
        """Returns an image's encoded bytes; raises OSError, Unreadable or RunError where they can't
        be read.
        """
        raise NotImplementedError

    def files(self) -> Iterable[str]:
        """Returns the paths of the files that the images are read from."""
        raise NotImplementedError

    def mask_data(self, column: str, index: int) -> bytes:
        """Returns a mask's encoded bytes; raises what ``data`` does."""
        raise NotImplementedError

    def mask_files(self, column: str) -> Iterable[str]:
        """Returns the paths of the files that a column's masks are read from."""
        raise NotImplementedError

    def mask(self, column: str, index: int) -> Image.Image:
        name = self.mask_name(column, index)
        with readable(name, RunError):
            data = self.mask_data(column, index)
        kind = self.masks[column]
        # It is turned by its own EXIF: whoever drew it saw either the stored picture or the turned
        # one, and saved the mask as it was seen.
        return mask_image(data, name, self.most, np.dtype(kind.dtype), self.oriented, kind.table)

    def image(self, index: int) -> Picture:
        return self._encoded_image(index).decode()

    def picture(self, index: int) -> Picture:
        return self._encoded_image(index)

    def _encoded_image(self, index: int) -> Encoded:
        name = self.name(index)
        # A RunError, which isn't remembered as Broken is: the disk may do better next time.
        with readable(name, RunError):
            data = self.data(index)
        return encoded_image(data, self.mode, name, self.most, self.oriented, self.exact)


class FileDataset(EncodedDataset):
    """Images in files: ``paths`` are relative to ``root``."""

    def __init__(
        self,
        config: Configuration,
        mode: str,
        root: Path,
        paths: Sequence[str],
        labels: np.ndarray | LabelSets | None,
        classes: Sequence[str],
    ) -> None:
        super().__init__(config, mode, labels_or_unknown(labels, len(paths)), classes)
        self.root = str(root)
        self.paths = paths if isinstance(paths, Paths) else Paths(paths)

    def name(self, index: int) -> str:
        path = self.path(index)
        return printable(path, len(path))

    def path(self, index: int) -> str:
        """Returns an image's path."""
        return os.path.join(self.root, self.paths[index])

    def relative_names(self) -> Paths:
        return self.paths.below(self.root)

    def data(self, index: int) -> bytes:
        return contents(self.path(index), largest_file(self.most))

    def files(self) -> Iterable[str]:
        return map(self.path, range(len(self)))

    def mask_path(self, column: str, index: int) -> str:
        """Returns the path of an image's mask."""
        return os.path.join(self.root, self.masks[column].paths[index])

    def mask_name(self, column: str, index: int) -> str:
        path = self.mask_path(column, index)
        return printable(path, len(path))

    def mask_data(self, column: str, index: int) -> bytes:
        return contents(self.mask_path(column, index), largest_file(self.most))

    def mask_files(self, column: str) -> Iterable[str]:
        return (self.mask_path(column, index) for index in range(len(self)))

    def check_masks(self) -> None:
        """Raises InputError where files of masks that TASK needs are missing, or the first is wrong."""
        for column in self.needed_masks:
            missing = [path for path in self.mask_files(column) if not os.path.exists(path)]
            if missing:
                raise InputError(
                    f"{len(missing)} of {len(self)} files of the column '{column}' are missing,"
                    f" the first is {printable(missing[0], len(missing[0]))}"
                )
            # If masks aren't what the dataset expects, such as colours, mostly all of them are so.
            if not self.skip_broken and len(self):
                try:
                    self.mask(column, 0)
                except RunError as error:
                    raise InputError(str(error)) from None


class ShardDataset(EncodedDataset):
    """Images in tar shards, in the order of their members' names; or in the rows of tables, in
    their order.

    ``tools/make_shards.py`` names the members in the order of the dataset that it packs. So a run
    on the shards computes the same bits as a run on the files.
    """

    def __init__(self, config: Configuration, mode: str, shards: Shards | Rows) -> None:
        labels = labels_or_unknown(shards.labels, len(shards.names))
        super().__init__(config, mode, labels, shards.classes)
        self.shards = shards
        self.add_columns(shards.columns())

    def name(self, index: int) -> str:
        return self.shards.name(index)

    def relative_names(self) -> np.ndarray:
        return self.shards.names

    def data(self, index: int) -> bytes:
        return self.shards.read(index, largest_file(self.most))

    def files(self) -> Iterable[str]:
        return self.shards.files

    def mask_name(self, column: str, index: int) -> str:
        return self.shards.name(index, column)

    def mask_data(self, column: str, index: int) -> bytes:
        return self.shards.read(index, largest_file(self.most), column)

    def mask_files(self, column: str) -> Iterable[str]:
        return self.shards.files


class SyntheticDataset(ImageDataset):
    """Fixed random images of IMAGE_SIZE, drawn when they are read.

    Sample i is of class i modulo the number of classes.

    Args:
        size: the number of generated images.
    """

    def __init__(self, config: Configuration, mode: str, size: int) -> None:
        count = 1000 if config.MODEL.NUM_CLASSES == "auto" else config.MODEL.NUM_CLASSES
        super().__init__(config, mode, np.arange(size) % count, [str(c) for c in range(count)])
        # Grey images are converted from RGB ones, as those of files are.
        channels = 3 if isinstance(self.mode, str) else self.mode
        self.shape = (*pair(config.DATA.IMAGE_SIZE), channels)

    def image(self, index: int) -> Picture:
        rng = np.random.default_rng([self.seed, index])
        return image_of(rng.integers(0, 256, self.shape, np.uint8), self.mode)
