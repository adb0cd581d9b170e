"""Datasets and their loaders.

``get_datasets`` reads and checks the data before a model is built. ``get_dataloader`` returns the
batches of a rank. The classes of datasets are in ``loading/dataset.py``.
"""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, overload

import numpy as np

from config import is_users, with_values
from errors import InputError, counted
from loading.cache import Decoded, MappedImages, Sources, cached_images
from loading.dataset import (
    ArrayDataset,
    EncodedDataset,
    FileDataset,
    ImageDataset,
    ShardDataset,
    SyntheticDataset,
)
from loading.label_sets import LabelSets, are_known, every_label
from loading.label_spaces import (
    absent_classes,
    check_evaluation,
    check_pretrained_classes,
    check_training,
    set_outputs,
    some_of,
)
from loading.layout import nested_classes, one_class, skipped_text
from loading.pair_loader import PairLoader
from loading.real_labels import relabel
from loading.rows import Rows
from loading.samplers import EvalBatchSampler
from loading.scales import train_sampler
from loading.shards import Shards
from loading.sources import Arrays, Drawn, Split
from loading.subsets import Source, fold_name, note_subset, read_split
from loading.transforms import Mixup
from loading.workers import Loader, ProcessLoader
from settings.configuration import Configuration, add_note
from settings.paddlevit.programs import instead
from settings.registry import datasets, tasks
from settings.tasks import (
    answers_of,
    columns_of,
    dataset_columns,
    mixes,
    own_classes,
    view_columns,
)

# The version of the decoding, part of a cache's name. It is raised where the same files give other
# pixels (2: 16-bit grey isn't white).
_DECODING = "2"
# A note says if more images of a table are unpacked to read one.
_MOST_IMAGES_PER_READ = 32


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
    reads_classes = columns and own_classes(config.TASK) is None
    limit = config.MODEL.NUM_CLASSES if reads_classes else "auto"
    if limit == 0:
        raise InputError(
            "MODEL.NUM_CLASSES is 0, a model without a classifier; set the number of classes, or"
            " auto"
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
                "a run can only be resumed with its own data;"
                " use -pretrained instead of -resume to start from its weights"
            )
        raise InputError(
            f"the data has {known} classes, but MODEL.NUM_CLASSES is {limit}; {advice}"
        )
    return dataset


def _check_task(config: Configuration, name: str) -> None:
    """Raises InputError if a dataset is for another task, or lacks a column that TASK needs."""
    task = datasets.components[name].given.get("task", "classification")
    columns = dataset_columns(name)
    needed = columns_of(config.TASK)
    # The other tasks take images with any number of labels.
    is_other = {task, config.TASK} == {"classification", "multilabel"}
    if is_other or (needed and task not in ("classification", "multilabel", "any", config.TASK)):
        raise InputError(
            f"DATA.DATASET '{name}' is for TASK {task}, but TASK is {config.TASK}; change one of"
            " the two"
        )
    missing = [column for column in needed if column not in columns]
    # With a "*", the files say which further columns there are. Labels have to be declared.
    if "*" in columns:
        missing = [column for column in missing if column == "labels"]
    if missing:
        raise InputError(_lacks_column(config, f"DATA.DATASET '{name}'", missing[0]))


def _lacks_column(config: Configuration, data: str, column: str) -> str:
    """Returns the error's message about ``data`` without a column that TASK needs."""
    advice = "change one of the two"
    if others := [task for task in tasks.names() if column not in columns_of(task)]:
        advice += f" (TASK {' or '.join(others)} needs none)"
    return f"{data} has no {column}, which TASK {config.TASK} needs; {advice}"


def _make_dataset(config: Configuration, mode: str, source: Source) -> ImageDataset:
    """Returns the dataset of what a reader returned. With DATA.CACHE its images are decoded once,
    and then read from the cache.
    """
    annotation = datasets.components[config.DATA.DATASET].returns
    if annotation != type(source).__name__:
        raise TypeError(
            f"{config.DATA.DATASET}'s reader returned {type(source).__name__},"
            f" but is annotated with {annotation!r}"
        )
    match source:
        case Drawn():
            return SyntheticDataset(config, mode, source.count)
        case Arrays() if config.DATA.CACHE:
            sources = Sources(lambda: filter(Path.is_file, source.files), fold_name(config.DATA))
            return _cached_dataset(config, mode, sources, source.read)
        case Arrays():
            return ArrayDataset(config, mode, *source.read())
        case Shards() | Rows():
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
    kind = dataset.masks[column]
    stored = np.uint16 if kind.dtype == "int32" else np.uint8
    places = dataset.shards.where() if isinstance(dataset, ShardDataset) else b""
    # The cache holds class indices, so other classes make another cache.
    table = b"" if kind.table is None else kind.table.to_bytes()
    settings = (decoding, column, kind.dtype, places, table)
    sources = Sources(lambda: dataset.mask_files(column), *settings)

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
    if answers_of(config.TASK) == "pixels":
        return _datasets_of_masks(config, trained)
    if config.EVAL:
        val = get_dataset(config, "val", skipped=skipped)
        config = check_evaluation(config, val, trained)
        set_outputs(config, val)
        check_pretrained_classes(config, val)
        note_subset(config, len(val))
        _add_notes(config, [_skipped_note(skipped), _note_of(val)])
        return config, None, val
    train = get_dataset(config, "train", skipped=skipped)
    val = get_dataset(config, "val", skipped=skipped)
    _check_several_classes(config, train, val)
    config = check_training(config, train, val)
    set_outputs(config, train, val)
    check_pretrained_classes(config, train)
    absent = "" if isinstance(train, SyntheticDataset) else absent_classes(train, val)
    notes = [absent, _nested_note(config, train), _skipped_note(skipped), _slow_note(config, train)]
    _add_notes(config, [*notes, _note_of(val)])
    return config, train, val


def _datasets_of_task(
    config: Configuration, classes: list[str]
) -> tuple[Configuration, ImageDataset | None, ImageDataset]:
    """``get_datasets`` for a task that doesn't read the data's labels.

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


def _datasets_of_masks(
    config: Configuration, trained: Sequence[str] | None
) -> tuple[Configuration, ImageDataset | None, ImageDataset]:
    """``get_datasets`` for a task whose classes are those of masks.

    Raises:
        InputError: the classes of the data, of the weights and of the model aren't the same.
    """
    skipped: list[str] = []
    train = None if config.EVAL else get_dataset(config, "train", skipped=skipped)
    val = get_dataset(config, "val", skipped=skipped)
    for mode, dataset in (("train", train), ("val", val)):
        if dataset is not None:
            _check_labelled_pixels(config, mode, dataset)
    classes = val.classes
    if train and train.classes != classes:
        raise InputError(
            f"the training masks have the classes {some_of(train.classes)}, the validation masks"
            f" {some_of(classes)}; both need the same classes in the same order"
        )
    if trained and classes and list(trained) != classes:
        raise InputError(
            f"the weights were trained for the classes {some_of(trained)}, the masks have"
            f" {some_of(classes)}; use masks of the same classes in the same order"
        )
    outputs = config.MODEL.NUM_CLASSES
    if outputs == "auto":
        count = len(trained or classes)
        if not count:
            raise InputError(
                "MODEL.NUM_CLASSES is 'auto', and neither the masks nor the weights name their"
                " classes; set their number"
            )
        config = with_values(config, "the classes of the masks", MODEL__NUM_CLASSES=count)
    elif classes and len(classes) != outputs:
        if is_users(config, "MODEL.NUM_CLASSES"):
            raise InputError(
                f"MODEL.NUM_CLASSES is {outputs}, but the masks have {len(classes)} classes"
                f" ({some_of(classes)}); write -o MODEL.NUM_CLASSES auto"
            )
        config = with_values(config, "the classes of the masks", MODEL__NUM_CLASSES=len(classes))
    if config.MODEL.NUM_CLASSES == 1:
        only = classes[0] if classes else "MODEL.NUM_CLASSES is 1"
        raise InputError(
            f"the masks have only one class ({only}), so there is nothing to learn;"
            " assign a class to the other pixels as well, such as background"
        )
    if config.EVAL:
        note_subset(config, len(val))
    _add_notes(config, [_skipped_note(skipped)])
    return config, train, val


def _check_labelled_pixels(config: Configuration, mode: str, dataset: ImageDataset) -> None:
    """Raises InputError if all pixels of a set's masks are ignored."""
    for column in dataset.needed_masks:
        if not dataset.has_labelled_pixel(column):
            raise InputError(
                f"the {mode} set of '{config.DATA.DATASET}' at {config.DATA.DATA_PATH} has no pixel"
                f" with a class: all pixels of its {counted(len(dataset), 'mask', 'masks')} are"
                " ignored; correct the masks, or the setting of the ignored values"
            )


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


def _note_of(dataset: ImageDataset) -> str:
    """Returns the note of a table's reader; "" for other datasets."""
    if isinstance(dataset, ShardDataset) and isinstance(dataset.shards, Rows):
        return dataset.shards.note
    return ""


def _slow_note(config: Configuration, train: ImageDataset) -> str:
    """Returns a note about tables that are slow to read in random order; "" for others."""
    if not isinstance(train, ShardDataset) or not isinstance(train.shards, Rows):
        return ""
    images = train.shards.images_per_read()
    groups = train.shards.row_groups_at_once()
    chosen = config.DATA.SHARD_SHUFFLE
    is_fast = chosen is not None and chosen <= groups
    if is_fast or images <= _MOST_IMAGES_PER_READ:
        return ""
    return (
        f"to read one image in random order, {images} are unpacked; -o DATA.SHARD_SHUFFLE {groups}"
        f" reads {groups} row groups at a time, which is faster, and tools/make_shards.py converts the data"
    )


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
        InputError: the batch size is "auto", there isn't enough memory, DALI isn't installed or
            can't read the dataset, or masks can't follow what a key does to the pixels.
    """
    paddlevit_arguments = (multi_process, is_train, use_dist_sampler)
    if isinstance(mode, bool) or any(value is not None for value in paddlevit_arguments):
        train = _mode(mode if is_train is None else is_train) == "train"
        check_batch_size(config, "train" if train else "val")
        return PairLoader(config, dataset, train, split=bool(multi_process or use_dist_sampler))
    check_batch_size(config, mode)
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
                    f"DATA.LOADER is 'dali', which decodes files, but {kind} yields decoded"
                    " images; set it to paddle"
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


def check_batch_size(config: Configuration, mode: str) -> None:
    """Raises InputError if the batch size of a mode, "train" or "val", is still "auto".

    The main programs replace it by a number (``training.batch_size``).
    """
    key = "BATCH_SIZE" if mode == "train" else "BATCH_SIZE_EVAL"
    if config.DATA[key] == "auto":
        raise InputError(
            f"DATA.{key} is 'auto', which only a training or an evaluation replaces by a number;"
            f" pass -o DATA.{key} 32"
        )


def _check_columns(config: Configuration, dataset: ImageDataset, train: bool) -> None:
    """Raises InputError where masks can't follow what the task or a key does to the pixels, or where
    the task has views that it doesn't declare.
    """
    for name in dataset.views:
        if name not in view_columns(config.TASK):
            raise InputError(
                f"TASK {config.TASK} draws views in the column '{name}', which its registration"
                " doesn't name; add it to the keyword views"
            )
    if not dataset.needed_masks:
        return
    if dataset.views:
        raise InputError(
            f"TASK {config.TASK} draws several views of an image, which can't be applied to the"
            " column"
            f" '{dataset.needed_masks[0]}'; remove one of the two"
        )
    policy = config.TRAIN.AUTO_AUGMENT
    if train and policy and policy.partition("-")[0] == "augmix":
        raise InputError(
            f"TRAIN.AUTO_AUGMENT '{policy}' blends shifted copies of an image, which can't be"
            " applied to the"
            f" column '{dataset.needed_masks[0]}'; use another policy"
        )
    if not train and config.EVAL and config.DATA.CORRUPTION == "elastic_transform":
        raise InputError(
            "DATA.CORRUPTION elastic_transform moves pixels, and the column"
            f" '{dataset.needed_masks[0]}' doesn't follow; use another corruption"
        )


def __getattr__(name: str) -> NoReturn:
    """Raises an error for a name of PaddleViT's ``datasets`` that isn't supported, with what to use
    instead.
    """
    instead("datasets", name)
