"""Datasets and their loaders.

``get_datasets`` reads and checks the data before a model is built. ``get_dataloader`` returns the
batches of a rank. A dataset holds its paths and labels in a few arrays, which the ranks of a
machine share. For ImageNet's 1.3 million files they take 65 MB.
"""

import copy
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, overload

import numpy as np
import paddle
from PIL import Image

from config import with_values
from errors import InputError, RunError, Unreadable, printable
from loading.cache import Decoded, Labels, MappedImages, Sources, cached_images
from loading.files import Paths, contents
from loading.label_sets import LabelSets, are_known, every_label, labels_or_unknown
from loading.label_spaces import (
    absent_classes,
    check_evaluation,
    check_pretrained_classes,
    check_training,
    set_outputs,
)
from loading.layout import nested_classes, one_class, skipped_text
from loading.pair_loader import PairLoader
from loading.real_labels import relabel
from loading.samplers import EvalBatchSampler
from loading.scales import train_sampler
from loading.shards import Shards
from loading.sources import OWN_COLUMNS, Arrays, Drawn, Files, Masks, Split
from loading.subsets import fold_name, note_subset, read_split
from loading.transforms import (
    Broken,
    Encoded,
    EvalTransform,
    Mask,
    Mixup,
    Picture,
    RandomErasing,
    TrainTransform,
    encoded_image,
    image_of,
    largest_file,
    mask_image,
    pixel_dtype,
    pixel_mode,
    readable,
)
from loading.workers import Loader, ProcessLoader, Shapes, Size
from settings.configuration import Configuration, add_note, pair
from settings.paddlevit.programs import instead
from settings.registry import datasets, tasks
from settings.tasks import columns_of, mixes, own_classes, reads

# The version of the decoding, part of a cache's name. It is raised where the same files give other
# pixels (2: 16-bit grey isn't white).
_DECODING = "2"
_Dataset = TypeVar("_Dataset", bound="ImageDataset")

_COLUMN_NAME = re.compile("[a-z][a-z0-9_]*")

# ----------------------------------------------------------------- datasets


class ImageDataset(paddle.io.Dataset):
    """Images with labels, the base class of the datasets below.

    A sample is ``dataset[index]`` or ``dataset[epoch, index, copy]``. A fourth number, or pair of
    numbers, is the size of its pixels, if that isn't IMAGE_SIZE. ``columns`` names its items:

    - "pixels": [H, W, C] uint8 or float32
    - "labels", if TASK needs them: an integer, or [K] uint8 of 0 and 1 where an image has several
      labels
    - "erased", with RANDOM_ERASE_PROB: what the device has to erase
    - "skipped", with DATA.SKIP_BROKEN: the index of an unreadable image that the next one replaced,
      or -1
    - one for each of a source's further columns: a mask [H, W] uint8 or int32, or numbers
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
        self.transform = TrainTransform(config) if train else EvalTransform(config)
        erases = config.TRAIN.RANDOM_ERASE_PROB and reads(config.TASK, "TRAIN.RANDOM_ERASE_PROB")
        self.erasing = RandomErasing(config) if train and erases else None
        # Whether an evaluation has each image at its own size (``keep_sizes``).
        self.keeps_sizes = False
        # The outputs that an evaluation compares; None: all (loading.label_spaces).
        self.compared: np.ndarray | None = None
        self.mode = pixel_mode(config)
        self.channels = config.DATA.IMAGE_CHANNELS
        self.pixel_dtype = np.dtype(pixel_dtype(config))
        self.skip_broken = config.DATA.SKIP_BROKEN and train
        self.draws: dict[str, Callable[[np.random.Generator], np.ndarray]] = {}
        self._drawn_shapes: dict[str, tuple[int, ...]] = {}
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
        return (*self.own_columns, *self.draws)

    def add_columns(self, columns: Mapping[str, Masks | np.ndarray]) -> None:
        """Adds a source's further columns. A sample has those that TASK needs.

        Raises:
            InputError: a column's name is taken, or it has another number of entries than there are images.
        """
        for name, column in columns.items():
            if not _COLUMN_NAME.fullmatch(name) or name in OWN_COLUMNS:
                raise InputError(
                    f"the column '{printable(name)}' needs another name:"
                    " of small letters, digits and _, and not that of another column"
                )
            if isinstance(column, Masks):
                paths = column.paths
                # One block of bytes, which is small to hand over to other processes.
                if not isinstance(paths, Paths | np.ndarray):
                    paths = Paths(paths)
                self.masks[name] = column._replace(paths=paths)
                count = len(paths)
            else:
                self.values[name] = _numbers(name, column)
                count = len(self.values[name])
            if count != len(self):
                raise InputError(f"the column '{name}' has {count} entries for {len(self)} images")
            if name in self.task_columns:
                self.own_columns.append(name)

    def keep_sizes(self) -> None:
        """Lets an evaluation have each image at its own size, in a batch of its own.

        A task that wants this calls it before the loader is made (``Task.prepare_data``).
        """
        if not isinstance(self.transform, EvalTransform):
            raise TypeError("a training's images have one size")
        self.transform.keeps_size = True
        self.keeps_sizes = True

    @property
    def needed_masks(self) -> list[str]:
        """Returns the names of the masks that a sample has."""
        return [name for name in self.masks if name in self.own_columns]

    def shapes(self, size: Size) -> Shapes:
        """Returns (shape, type) of the items that are arrays of one shape, by column.

        A loader's workers share the memory of these. All other items go through pipes, which is
        slower for large ones.

        Args:
            size: (height, width) of the pixels.
        """
        # Images of any size, one at a time, go through the pipes.
        if self.keeps_sizes:
            return {}
        shapes: Shapes = {"pixels": ((*size, self.channels), self.pixel_dtype)}
        for name in self.needed_masks:
            shapes[name] = size, np.dtype(self.masks[name].dtype)
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
                sample = self._transformed(read, rng, *size)
                break
            except RunError as error:
                if not self.skip_broken:
                    raise RunError(f"{error}{self.advice}") from None
                if isinstance(error, Broken):
                    self._broken.add(read)
        else:
            raise RunError(f"none of the {len(self)} training images can be read")
        # Items that aren't columns of this task are left out at the end.
        sample["labels"] = self.labels[read]
        for name, values in self.values.items():
            sample[name] = values[read]
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
        if name in self.own_columns:
            found = "a name that the data's columns have; choose another"
        elif drawn.dtype.kind not in "biuf":
            found = f"{drawn.dtype}, expected numbers"
        elif drawn.shape != shape:
            found = f"{list(drawn.shape)} after {list(shape)}, expected one shape for all samples"
        if found:
            raise RunError(f"the task draws the column {name}: {found}")
        return drawn

    def _transformed(self, index: int, rng: np.random.Generator, *size: int) -> dict[str, Any]:
        """Returns the pixels and the masks of a sample."""
        try:
            picture = self.picture(index)
            names = self.needed_masks
            if not names:
                return {"pixels": self.transform(picture, rng, *size)}
            masks = [self._mask(name, index, picture.size) for name in names]
            pixels, moved = self.transform.with_masks(picture, masks, rng, *size)
            return {"pixels": pixels, **dict(zip(names, moved, strict=True))}
        except Unreadable as error:
            raise Broken(f"{self.name(index)}: {error}; cut or remove it") from None

    def _mask(self, column: str, index: int, size: tuple[int, int]) -> Mask:
        """Returns a mask; raises Broken where it hasn't the ``size`` (width, height) of its image."""
        image = self.mask(column, index)
        if image.size != size:
            found = f"{image.size[0]} x {image.size[1]}"
            advice = "make them of one size"
            # The EXIF of a photograph may turn it, and that of its mask is mostly missing.
            if image.size == size[::-1]:
                advice += ", or change DATA.EXIF_ORIENTATION if the image's EXIF turns it"
            raise Broken(
                f"{self.mask_name(column, index)}: the mask has {found} pixels, its image"
                f" {self.name(index)} {size[0]} x {size[1]}; {advice}"
            )
        return Mask(image, self.masks[column].ignored)

    def generator(self, epoch: int, index: int, copy: int) -> np.random.Generator:
        """Returns the generator that a sample's augmentation is drawn from.

        In an evaluation ``epoch`` and ``copy`` have no effect.
        """
        seeds = [self.seed, epoch if self.train else 0, index]
        if copy and self.train:
            seeds.append(copy)
        return np.random.default_rng(seeds)

    def as_evaluated(self: _Dataset, config: Configuration) -> _Dataset:
        """Returns the same images, prepared as for an evaluation, without masks and drawn columns.

        With DATA.SKIP_BROKEN, unreadable images are still replaced.
        """
        dataset = copy.copy(self)
        dataset.train = False
        dataset.transform = EvalTransform(config)
        dataset.erasing = None
        dataset.draws = {}
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

    def relative_names(self) -> Paths | np.ndarray | None:
        """Returns the images' names, relative to the data's folder; None where they have none."""
        return None


def _numbers(name: str, values: Any) -> np.ndarray:
    """Returns a column's numbers [n, ...]; raises InputError where they are no such array."""
    try:
        numbers = np.asarray(values)
    except ValueError:
        raise InputError(
            f"the values of the column '{name}' differ in shape; they have to be of one"
        ) from None
    if numbers.dtype.kind not in "biuf" or not numbers.ndim:
        raise InputError(f"the column '{name}' has values of {numbers.dtype}, expected numbers")
    return numbers


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
        dtype = np.dtype(self.masks[column].dtype)
        # It is turned by its own EXIF: whoever drew it saw either the stored picture or the turned
        # one, and saved the mask as it was seen.
        return mask_image(data, name, self.most, dtype, self.oriented)

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
        """Raises InputError where files of masks that TASK needs are missing."""
        for column in self.needed_masks:
            missing = [path for path in self.mask_files(column) if not os.path.exists(path)]
            if missing:
                raise InputError(
                    f"{len(missing)} of {len(self)} files of the column '{column}' are missing,"
                    f" the first is {printable(missing[0], len(missing[0]))}"
                )


class ShardDataset(EncodedDataset):
    """Images in tar shards, in the order of their members' names.

    ``tools/make_shards.py`` names the members in the order of the dataset that it packs. So a run
    on the shards computes the same bits as a run on the files.
    """

    def __init__(self, config: Configuration, mode: str, shards: Shards) -> None:
        labels = labels_or_unknown(shards.labels, len(shards.names))
        super().__init__(config, mode, labels, shards.classes)
        self.shards = shards
        self.add_columns(shards.masks())

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
        size: the number of images.
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


def get_dataset(
    config: Configuration,
    mode: str | bool = "train",
    *,
    is_train: bool | None = None,
    alone: bool = False,
    skipped: list[str] | None = None,
    pixels_alone: bool = False,
) -> ImageDataset:
    """Returns the dataset of DATA.DATASET.

    Args:
        mode: "train" (augmented) or "val"; or True or False, as PaddleViT's ``is_train``.
        is_train: PaddleViT's argument, which takes the place of ``mode``.
        alone: with "train": no validation set is needed, so the folders of classes may stand in the
            data's folder itself, without train/.
        skipped: a list that collects the paths of entries that aren't data, such as hidden ones.
        pixels_alone: nothing but pixels will be read, so the data may be of any task, and without
            labels.

    Raises:
        InputError: files are missing, empty or damaged, or a label is outside the range.
    """
    mode = _mode(mode if is_train is None else is_train)
    name = config.DATA.DATASET
    root = Path(config.DATA.DATA_PATH)
    columns = () if pixels_alone else columns_of(config.TASK)
    # Labels that the task doesn't read aren't checked.
    limit = config.MODEL.NUM_CLASSES if "labels" in columns else "auto"
    if limit == 0:
        raise InputError(
            "MODEL.NUM_CLASSES is 0, a model without a classifier; give the classes' number, or auto"
        )
    reader = datasets.choose(config)
    if not pixels_alone:
        _check_task(config, name)
    split = Split(mode, limit, alone=alone, skipped=skipped)
    dataset = _make_dataset(config, mode, read_split(config.DATA, split, reader))
    if not len(dataset):
        raise InputError(f"the {mode} set of '{name}' at {root} is empty")
    if missing := [column for column in columns if column not in dataset.own_columns]:
        raise InputError(
            f"the {mode} set of '{name}' at {root} has no column '{missing[0]}',"
            f" which TASK {config.TASK} needs"
        )
    if "labels" not in columns:
        return dataset
    # Shards have labels or not, whatever their dataset declares.
    if not are_known(dataset.labels):
        raise InputError(_lacks_column(config, f"the {mode} set of '{name}' at {root}", "labels"))
    labels = every_label(dataset.labels)
    low = labels.min()
    high = labels.max()
    # A list of files names no classes.
    known = len(dataset.classes) or (high + 1 if limit == "auto" else limit)
    if low < 0 or high >= known:
        raise InputError(
            f"the {mode} labels of '{name}' at {root} are {low}..{high}, expected 0..{known - 1}"
        )
    # An evaluation may match classes by name, in get_datasets.
    if limit != "auto" and known > limit and not config.EVAL:
        advice = "write -o MODEL.NUM_CLASSES auto"
        if config.MODEL.RESUME:
            advice = (
                "a run goes on with its own data;"
                " -pretrained instead of -resume starts from its weights"
            )
        raise InputError(f"the data has {known} classes, MODEL.NUM_CLASSES is {limit}; {advice}")
    return dataset


def _check_task(config: Configuration, name: str) -> None:
    """Raises InputError if a dataset is for another task, or lacks a column that TASK needs."""
    declared = datasets.components[name].given
    task = declared.get("task", "classification")
    columns = declared.get("columns", "labels").split()
    needed = columns_of(config.TASK)
    # The other tasks take images with any number of labels.
    is_other = {task, config.TASK} == {"classification", "multilabel"}
    if is_other or (needed and task not in ("classification", "multilabel", "any", config.TASK)):
        raise InputError(
            f"DATA.DATASET '{name}' is of TASK {task}, TASK is {config.TASK}; change one of the two"
        )
    if missing := [column for column in needed if column not in columns]:
        raise InputError(_lacks_column(config, f"DATA.DATASET '{name}'", missing[0]))


def _lacks_column(config: Configuration, data: str, column: str) -> str:
    """Returns the error's message about ``data`` without a column that TASK needs."""
    advice = "change one of the two"
    if others := [task for task in tasks.names() if column not in columns_of(task)]:
        advice += f" (TASK {' or '.join(others)} needs none)"
    return f"{data} has no {column}, TASK {config.TASK} needs them; {advice}"


def _make_dataset(
    config: Configuration, mode: str, source: Files | Shards | Arrays | Drawn
) -> ImageDataset:
    """Returns the dataset of what a reader returned. With DATA.CACHE its images are decoded once,
    and then read from the cache.
    """
    annotation = datasets.components[config.DATA.DATASET].returns
    if annotation != type(source).__name__:
        raise TypeError(
            f"{config.DATA.DATASET}'s reader gave {type(source).__name__},"
            f" its annotation says {annotation!r}"
        )
    match source:
        case Drawn():
            return SyntheticDataset(config, mode, source.count)
        case Arrays() if config.DATA.CACHE:
            sources = Sources(lambda: filter(Path.is_file, source.files), fold_name(config.DATA))
            return _cached_dataset(config, mode, sources, source.read)
        case Arrays():
            return ArrayDataset(config, mode, *source.read())
        case Shards():
            dataset: EncodedDataset = ShardDataset(config, mode, source)
        case _:
            root, paths, labels, classes, columns = relabel(source, config)
            dataset = FileDataset(config, mode, root, paths, labels, classes)
            dataset.add_columns(columns)
            dataset.check_masks()
    return _decoded_dataset(config, mode, dataset) if config.DATA.CACHE else dataset


def _cached_dataset(
    config: Configuration, mode: str, sources: Sources, decode: Callable[[], Decoded]
) -> ArrayDataset:
    name = f"{config.DATA.DATASET}-{mode}-{sources.name}"
    images, labels, classes = cached_images(Path(config.DATA.CACHE), name, sources, decode)
    return ArrayDataset(config, mode, images, labels, classes)


def _decoded_dataset(config: Configuration, mode: str, dataset: EncodedDataset) -> ArrayDataset:
    """Returns the images of ``dataset`` from the cache."""
    # All that the pixels and their order depend on goes into the cache's name.
    decoding = _DECODING
    if dataset.oriented:
        decoding += "turned"
    decoding += str(dataset.mode)
    places = dataset.shards.where() if isinstance(dataset, ShardDataset) else b""
    labels = dataset.labels.tobytes()
    sources = Sources(dataset.files, decoding, labels, "\0".join(dataset.classes), places)

    def decode() -> Decoded:
        images = (np.asarray(dataset.image(index)) for index in range(len(dataset)))
        # A cache holds one label for each image, but these may have several.
        return images, np.zeros(len(dataset), np.int64), dataset.classes

    cached = _cached_dataset(config, mode, sources, decode)
    cached.labels = dataset.labels
    cached.names = dataset.relative_names()
    cached.add_columns(dataset.masks | dataset.values)
    for column in dataset.needed_masks:
        cached.cached_masks[column] = _cached_masks(config, mode, dataset, column, decoding)
    return cached


def _cached_masks(
    config: Configuration, mode: str, dataset: EncodedDataset, column: str, decoding: str
) -> MappedImages:
    """Returns the masks of a column from the cache."""
    dtype = dataset.masks[column].dtype
    stored = np.uint16 if dtype == "int32" else np.uint8
    places = dataset.shards.where() if isinstance(dataset, ShardDataset) else b""
    sources = Sources(lambda: dataset.mask_files(column), decoding, column, dtype, places)

    def decode() -> Decoded:
        indices = range(len(dataset))
        masks = (np.asarray(dataset.mask(column, index)).astype(stored) for index in indices)
        return masks, np.zeros(len(dataset), np.int64), []

    name = f"{config.DATA.DATASET}-{mode}-{column}-{sources.name}"
    return cached_images(Path(config.DATA.CACHE), name, sources, decode)[0]


def get_datasets(
    config: Configuration, trained: Sequence[str] | None = None
) -> tuple[Configuration, ImageDataset | None, ImageDataset]:
    """Returns (config with NUM_CLASSES resolved, training set or None under EVAL, validation set).

    Args:
        trained: under EVAL, the class names of the weights' outputs where they are known. The
            validation set's labels and classes are then mapped to these (``label_spaces``).

    Raises:
        InputError: as of ``get_dataset``. Or the validation set has classes that the training set,
            or the weights, lack. Or the model has more outputs than there are classes, and the user
            didn't set their number.
    """
    skipped: list[str] = []
    classes = own_classes(config.TASK)
    if classes is not None:
        return _datasets_of_task(config, classes)
    if config.EVAL:
        val = get_dataset(config, "val", skipped=skipped)
        config = check_evaluation(config, val, trained)
        set_outputs(config, val)
        check_pretrained_classes(config, val)
        note_subset(config, len(val))
        _add_notes(config, [_skipped_note(skipped)])
        return config, None, val
    train = get_dataset(config, "train", skipped=skipped)
    val = get_dataset(config, "val", skipped=skipped)
    _check_several_classes(config, train, val)
    config = check_training(config, train, val)
    set_outputs(config, train, val)
    check_pretrained_classes(config, train)
    absent = "" if isinstance(train, SyntheticDataset) else absent_classes(train, val)
    _add_notes(config, [absent, _nested_note(config, train), _skipped_note(skipped)])
    return config, train, val


def _datasets_of_task(
    config: Configuration, classes: list[str]
) -> tuple[Configuration, ImageDataset | None, ImageDataset]:
    """Returns what ``get_datasets`` does, for a task that doesn't read the data's labels.

    Args:
        classes: the names of the task's outputs, which become those of the datasets.
    """
    skipped: list[str] = []
    train = None if config.EVAL else get_dataset(config, "train", skipped=skipped)
    val = get_dataset(config, "val", skipped=skipped)
    config = with_values(config, f"TASK {config.TASK}", MODEL__NUM_CLASSES=len(classes))
    for dataset in filter(None, (train, val)):
        dataset.classes = classes
    if config.EVAL:
        note_subset(config, len(val))
    _add_notes(config, [_skipped_note(skipped)])
    return config, train, val


def _add_notes(config: Configuration, notes: Sequence[str]) -> None:
    """Adds the notes that aren't empty."""
    for note in filter(None, notes):
        add_note(config, note)


def _nested_note(config: Configuration, train: ImageDataset) -> str:
    """Returns a note about folders that may be several classes; "" if there are none."""
    # Only files are checked; a dataset from DATA.CACHE isn't one of files.
    if config.DATA.DATASET != "folder" or not isinstance(train, FileDataset):
        return ""
    if isinstance(train.labels, LabelSets):
        return ""
    return nested_classes(train.labels, train.classes, train.paths)


def _skipped_note(skipped: list[str]) -> str:
    """Returns a note about entries that aren't data; "" if there are none."""
    # With DATA.VAL_SPLIT the same folder is read for both sets.
    return skipped_text(sorted(set(skipped))) if skipped else ""


def _check_several_classes(config: Configuration, train: ImageDataset, val: ImageDataset) -> None:
    """Raises InputError where all images have the same class, of which a classifier learns nothing."""
    # A student learns from its teacher even from images of one class.
    if config.TASK != "classification" or config.TRAIN.DISTILLATION_TYPE is not None:
        return
    if isinstance(train, SyntheticDataset):
        return
    root: str | Path = ""
    paths: Sequence[str] = ()
    if isinstance(train, FileDataset):
        root = train.root
        paths = train.paths
    present = np.union1d(every_label(train.labels), every_label(val.labels))
    if problem := one_class(present, train.classes, root, paths):
        raise InputError(problem)


# ------------------------------------------------------------------ loader


def _mode(mode: str | bool) -> str:
    """Returns the mode that PaddleViT's ``is_train`` stands for; a mode as it is."""
    if isinstance(mode, bool):
        return "train" if mode else "val"
    return mode


@overload
def get_dataloader(
    config: Configuration,
    dataset: ImageDataset,
    mode: str = "train",
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Loader: ...


@overload
def get_dataloader(
    config: Configuration,
    dataset: ImageDataset,
    mode: str | bool = "train",
    multi_process: bool | None = None,
    *,
    is_train: bool | None = None,
    use_dist_sampler: bool | None = None,
) -> PairLoader: ...


def get_dataloader(
    config: Configuration,
    dataset: ImageDataset,
    mode: str | bool = "train",
    multi_process: bool | None = None,
    *,
    is_train: bool | None = None,
    use_dist_sampler: bool | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Loader | PairLoader:
    """Returns the loader of this rank's batches.

    Args:
        mode: "train" (shuffled) or "val".
        multi_process, is_train, use_dist_sampler: arguments of PaddleViT's releases. With one of
            them, or with a bool as ``mode``, a ``PairLoader`` is returned, which splits the samples
            by rank if one of them says so.
        rank, ranks: the number of this process, and of all processes that share the samples of a
            ``Loader``.

    Raises:
        InputError: there isn't enough memory, DALI isn't installed or can't read the dataset, or a
            key would move the pixels and not their masks.
    """
    paddlevit_arguments = (multi_process, is_train, use_dist_sampler)
    if isinstance(mode, bool) or any(value is not None for value in paddlevit_arguments):
        train = _mode(mode if is_train is None else is_train) == "train"
        return PairLoader(config, dataset, train, split=bool(multi_process or use_dist_sampler))
    _check_columns(config, dataset, mode == "train")
    draw = None
    if mode == "train":
        sampler = train_sampler(config, dataset, rank, ranks)
        if mixes(config):
            draw = functools.partial(Mixup(config).draw, rank=rank, ranks=ranks, sizes=sampler.size)
        if config.DATA.LOADER == "dali":
            if not isinstance(dataset, EncodedDataset):
                kind = "DATA.CACHE" if config.DATA.CACHE else config.DATA.DATASET
                raise InputError(
                    f"DATA.LOADER is 'dali', which decodes files; {kind} gives images; set it to paddle"
                )
            if further := [
                name for name in (*dataset.masks, *dataset.values) if name in dataset.columns
            ]:
                raise InputError(
                    f"DATA.LOADER is 'dali', which reads no column '{further[0]}'; set it to paddle"
                )
            # An optional package, and slow to import.
            from loading.dali import DaliLoader

            return DaliLoader(config, dataset, sampler, draw)
    else:
        batch_size = 1 if dataset.keeps_sizes else config.DATA.BATCH_SIZE_EVAL
        sampler = EvalBatchSampler(dataset, batch_size, rank, ranks)
    # The processes of a machine share its memory.
    local_processes = int(os.environ.get("PADDLE_LOCAL_SIZE", ranks))
    return ProcessLoader(config, dataset, sampler, local_processes, draw)


def _check_columns(config: Configuration, dataset: ImageDataset, train: bool) -> None:
    """Raises InputError where a key would move the pixels and not their masks."""
    if not dataset.needed_masks:
        return
    unmoved = f"and the column '{dataset.needed_masks[0]}' would stay where it is"
    policy = config.TRAIN.AUTO_AUGMENT
    if train and policy and policy.partition("-")[0] != "3a":
        raise InputError(
            f"TRAIN.AUTO_AUGMENT '{policy}' moves pixels, {unmoved};"
            " 3a and COLOR_JITTER change colours alone"
        )
    if not train and config.EVAL and config.DATA.CORRUPTION == "elastic_transform":
        raise InputError(f"DATA.CORRUPTION elastic_transform moves pixels, {unmoved}; leave it out")


def __getattr__(name: str) -> NoReturn:
    """Raises an error for a name of PaddleViT's ``datasets`` that isn't here, with what to use
    instead.
    """
    instead("datasets", name)
