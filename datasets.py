"""Datasets and their loader.

``get_datasets(config)`` validates everything that can be known before a model is built. A dataset holds its paths and
labels in a few arrays, so that handing it to a process costs little: 65 MB for the 1.3 million files of ImageNet.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle
from PIL import Image, UnidentifiedImageError
from yacs.config import CfgNode

import sources
from config import with_values
from errors import InputError, RunError
from loader import Loader, ProcessLoader
from samplers import EvalBatchSampler, TrainBatchSampler
from transforms import EvalTransform, RandomErasing, TrainTransform

# ----------------------------------------------------------------- datasets


class ImageDataset(paddle.io.Dataset):
    """Images with labels. ``dataset[index]`` or ``dataset[epoch, index, copy]`` is (pixels [S, S, C] uint8, label).

    An augmented sample is a pure function of (seed, epoch, index) and, where an epoch holds an image several times, of
    which time it is (``copy``, from 0), whoever loads it. Two items may follow, in this order: with RANDOM_ERASE_PROB
    what the device is to erase; with ``skip_broken`` the index of an image that couldn't be read and was replaced by
    the next one, or -1.

    Args:
        labels: [n] integers.
        classes: names, in the order of labels.
    """

    def __init__(self, config: CfgNode, mode: str, labels: Sequence[int], classes: Sequence[str]) -> None:
        super().__init__()
        train = mode == "train"
        self.labels, self.classes = np.asarray(labels, np.int64), list(classes)
        self.seed = config.SEED
        self.transform = TrainTransform(config) if train else EvalTransform(config)
        self.erasing = RandomErasing(config) if train and config.TRAIN.RANDOM_ERASE_PROB else None
        self.mode = "L" if config.DATA.IMAGE_CHANNELS == 1 else "RGB"
        self.skip_broken = config.DATA.SKIP_BROKEN and train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: int | tuple[int, int, int]) -> tuple:
        epoch, index, copy = key if isinstance(key, tuple) else (0, key, 0)
        skipped = -1
        for read in range(index, index + len(self)):
            read %= len(self)
            try:
                image = self.image(read)
                break
            except RunError:
                if not self.skip_broken:
                    raise
                skipped = index
        else:
            raise RunError(f"none of the {len(self)} training images can be read")
        if image.mode != self.mode:
            image = image.convert(self.mode)
        rng = self.generator(epoch, index, copy)
        sample = [self.transform(image, rng), self.labels[read]]
        if self.erasing is not None:
            sample.append(self.erasing.draw(rng))
        if self.skip_broken:
            sample.append(skipped)
        return tuple(sample)

    def generator(self, epoch: int, index: int, copy: int) -> np.random.Generator:
        """Returns what a sample's augmentation is drawn from."""
        return np.random.default_rng([self.seed, epoch, index, copy] if copy else [self.seed, epoch, index])

    def image(self, index: int) -> Image.Image:
        """Returns the image, decoded; raises RunError, naming it, where that fails."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Returns what a person calls the sample."""
        return f"sample {index}"


class ArrayDataset(ImageDataset):
    """Images in memory: ``images`` [n, H, W] or [n, H, W, 3], uint8."""

    def __init__(self, config: CfgNode, mode: str, images: np.ndarray, labels: Sequence[int], classes: Sequence[str]):
        super().__init__(config, mode, labels, classes)
        self.images = images

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self.images[index])


class EncodedDataset(ImageDataset):
    """Images in an encoded form, such as JPEG: a kind of it says where the bytes are (``data``)."""

    def data(self, index: int) -> bytes:
        """Returns the file of an image; raises OSError where it can't be read."""
        raise NotImplementedError

    def image(self, index: int) -> Image.Image:
        try:
            with Image.open(io.BytesIO(self.data(index))) as image:
                return image.convert(self.mode)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            unknown = isinstance(error, UnidentifiedImageError)  # its text has the buffer's address
            reason = "of no known format" if unknown else " ".join(str(error).split())
            raise RunError(
                f"{self.name(index)}: not readable as an image ({type(error).__name__}: {reason});"
                " repair or remove it, or train with DATA.SKIP_BROKEN True"
            ) from None


class FileDataset(EncodedDataset):
    """Images in files: ``paths`` are relative to ``root`` and kept as one block of bytes with offsets."""

    def __init__(
        self,
        config: CfgNode,
        mode: str,
        root: Path,
        paths: Sequence[str],
        labels: Sequence[int],
        classes: Sequence[str],
    ) -> None:
        super().__init__(config, mode, labels, classes)
        encoded = [os.fsencode(path) for path in paths]
        self.root = str(root)
        self._offsets = np.concatenate([[0], np.cumsum([len(path) for path in encoded], dtype=np.int64)])
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)

    def name(self, index: int) -> str:
        path = self._bytes[self._offsets[index] : self._offsets[index + 1]].tobytes()
        return os.path.join(self.root, os.fsdecode(path))

    def data(self, index: int) -> bytes:
        return Path(self.name(index)).read_bytes()


class SyntheticDataset(ImageDataset):
    """Fixed random images of IMAGE_SIZE, made when they are asked for; sample i has class i modulo the classes."""

    def __init__(self, config: CfgNode, mode: str) -> None:
        count = 1000 if config.MODEL.NUM_CLASSES == "auto" else config.MODEL.NUM_CLASSES
        classes = [str(c) for c in range(count)]
        super().__init__(config, mode, np.arange(config.DATA.SYNTHETIC_SIZE) % count, classes)
        self.shape = (config.DATA.IMAGE_SIZE, config.DATA.IMAGE_SIZE, 3)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(np.random.default_rng([self.seed, index]).integers(0, 256, self.shape, np.uint8))


def get_dataset(config: CfgNode, mode: str) -> ImageDataset:
    """Returns the dataset of DATA.DATASET.

    Args:
        mode: "train" (augmented) or "val".

    Raises:
        InputError: files that are missing, empty or damaged, labels outside the range.
    """
    kind, root, limit = config.DATA.DATASET, Path(config.DATA.DATA_PATH), config.MODEL.NUM_CLASSES
    if kind == "synthetic":
        return SyntheticDataset(config, mode)
    if kind == "imagenet2012":
        return FileDataset(config, mode, root, *sources.read_list(root, mode, limit))
    if kind == "folder":
        dataset = FileDataset(config, mode, root, *sources.read_folder(root, mode))
    else:
        dataset = ArrayDataset(config, mode, *sources.read_archive(kind, root, mode))
    if not len(dataset):
        raise InputError(f"the {mode} set of '{kind}' at {root} is empty")
    low, high, known = dataset.labels.min(), dataset.labels.max(), len(dataset.classes)
    if low < 0 or high >= known:
        raise InputError(f"the {mode} labels of '{kind}' at {root} are {low}..{high}, expected 0..{known - 1}")
    if limit != "auto" and known > limit:
        raise InputError(f"the data has {known} classes, MODEL.NUM_CLASSES is {limit}; set it to 'auto'")
    return dataset


def get_datasets(config: CfgNode) -> tuple[CfgNode, ImageDataset | None, ImageDataset]:
    """Returns (config with NUM_CLASSES resolved, training set or None under EVAL, validation set).

    Raises:
        InputError: as ``get_dataset``, and validation classes that the training set lacks.
    """
    train = None if config.EVAL else get_dataset(config, "train")
    val = get_dataset(config, "val")
    if train is not None:
        unknown = sorted(set(np.unique(val.labels).tolist()) - set(np.unique(train.labels).tolist()))
        if unknown:
            names = ", ".join(_class_name(val, label) for label in unknown[:3])
            raise InputError(
                f"validation has {len(unknown)} classes that no training image has: {names}{'...' * (len(unknown) > 3)}"
            )
    if config.MODEL.NUM_CLASSES == "auto":
        classes = [len(d.classes) or int(d.labels.max()) + 1 for d in (train, val) if d is not None]
        config = with_values(config, MODEL__NUM_CLASSES=max(classes))
    return config, train, val


def _class_name(dataset: ImageDataset, label: int) -> str:
    return dataset.classes[label] if dataset.classes else f"class {label}"


# ------------------------------------------------------------------ loader


def get_dataloader(config: CfgNode, dataset: ImageDataset, mode: str, rank: int = 0, ranks: int = 1) -> Loader:
    """Returns the loader of this rank's batches.

    Raises:
        InputError: memory is short, DALI isn't installed or can't serve the dataset.
    """
    if mode == "train":
        sampler = TrainBatchSampler(config, dataset, rank, ranks)
        if config.DATA.LOADER == "dali":
            if not isinstance(dataset, EncodedDataset):
                raise InputError(f"DATA.LOADER is 'dali', which decodes files; '{config.DATA.DATASET}' has none")
            from loader_dali import DaliLoader  # slow to import, and an extra

            return DaliLoader(config, dataset, sampler)
    else:
        sampler = EvalBatchSampler(dataset, config.DATA.BATCH_SIZE_EVAL, rank, ranks)
    return ProcessLoader(config, dataset, sampler, int(os.environ.get("PADDLE_LOCAL_SIZE", ranks)))
