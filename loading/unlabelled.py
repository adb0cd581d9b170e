"""The readers of images without labels: folders at any depth, and lists of paths."""

import os
from collections.abc import Iterator
from pathlib import Path

from errors import InputError, reading
from loading.files import Paths
from loading.layout import (
    IMAGE_SUFFIXES,
    describe_folder,
    is_folder,
    is_leftover,
    part_folder,
)
from loading.lists import TextList, open_list
from loading.sources import Files, Split, check_no_parts, images_below
from settings.registry import datasets


@datasets.register(
    "images",
    holds="images without labels at any depth: `train/**`, `val/**`; or `**`, to evaluate, or with `DATA.VAL_SPLIT`",
    task="any",
    columns="",
    val="val valid validation",
)
def images(split: Split, *, data_path: str) -> Files:
    """Reads all images of a folder and below it, whatever its folders are called.

    With a val/ in it, these are the images of train/ for training, and those of val/ for validation.

    Raises:
        InputError: there is no image, a folder can't be listed, or a training needs a val/.
    """
    root = Path(data_path)
    validation = part_folder(root, "val")
    below = "."
    if validation:
        below = part_folder(root, split.mode) or split.mode
    needs = "; DATASET images needs a folder of images under -data_path"
    with reading(root / below, "a folder of images", needs):
        if below == ".":
            _check_one_part(root, split)
        elif not (root / below).is_dir():
            raise InputError(
                f"{root}: there is no train/ beside {validation}/; move the training images into it"
                f" (-data_path={root / validation} uses the images of {validation}/ only)"
            )
        paths = Paths(images_below(root, below, split.skip))
        if not len(paths):
            raise InputError(
                f"{root / below}: no image in it or below it; images end in"
                f" {' '.join(IMAGE_SUFFIXES)}; it contains {describe_folder(root / below)}"
                " (links to folders aren't followed)"
            )
        return Files(root, paths, None, [])


def _check_one_part(root: Path, split: Split) -> None:
    """Checks a folder without a val/.

    Raises:
        InputError: a validation set is needed; or its folders are parts, or whole datasets.
    """
    with os.scandir(root) as entries:
        names = sorted(
            entry.name for entry in entries if is_folder(entry) and not is_leftover(entry.name)
        )
    if names != ["train"]:
        check_no_parts(root, names, "images")
    # An evaluation takes all images, a check takes them for training images.
    is_check = split.problems is not None
    needs_part = split.mode == "val" if is_check else split.mode == "train"
    if needs_part and not split.alone:
        split_off = "DATA.VAL_SPLIT 0.1 puts a tenth of the images aside for validation"
        raise InputError(f"{root}: there is no val/ in it; {split_off}")


@datasets.register(
    "images_list",
    holds="`train_list.txt` and `val_list.txt`: a path on each line, without a label",
    task="any",
    columns="",
    val="val_list.txt",
)
def images_list(split: Split, *, data_path: str) -> Files:
    """Reads the paths in ``<mode>_list.txt``.

    Raises:
        InputError: the list or files are missing, or a line can't be a path (which).
    """
    root = Path(data_path)
    file = root / f"{split.mode}_list.txt"
    with open_list(file, "images_list") as lines:
        paths = Paths(_list_paths(lines, split))
        if not len(paths):
            raise InputError(f"{file}: the list is empty")
        # A check opens each file anyway.
        if split.problems is None:
            lines.check_files(paths)
        return Files(root, paths, None, [])


def _list_paths(lines: TextList, split: Split) -> Iterator[bytes]:
    """Yields the paths of a list."""
    for number, line in lines:
        path = line.strip()
        if not path:
            continue
        try:
            yield lines.add_path(number, path)
        except InputError as error:
            split.refuse(str(error))
