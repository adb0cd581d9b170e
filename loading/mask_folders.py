"""The readers of images with masks: two folders of the same names, and lists of pairs.

``segmentation_sets.py`` reads published datasets with these readers.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from errors import InputError, Unreadable, open_file, printable, reading
from loading.class_names import FILE, check_name, names_beside
from loading.files import Paths, not_utf8
from loading.layout import IMAGE_SUFFIXES, PARTS, describe_folder
from loading.lists import TextList, line_allowance, numbered_lines, open_list
from loading.mask_tables import MOST_MASK_CLASSES, MaskTable, mask_kind, plain_table
from loading.sources import Files, Masks, Split, images_below
from settings.keys import between
from settings.registry import datasets

# The file that says which class a colour stands for.
COLORS = "colors.txt"
# Names of folders that people give to images and to masks.
_IMAGES = ("images", "img_dir")
_MASKS = ("masks", "annotations", "labels", "ann_dir")
_BYTES_PER_COLOUR = 300
# What the path of a line's mask takes besides its own bytes.
_BYTES_PER_MASK = 64

# Paths of an image and of its mask, relative to the dataset's folder.
Pair = tuple[str, str]


# --------------------------------------------------------------------- pairs


def as_files(root: Path, pairs: Sequence[Pair], names: Sequence[str], masks: Masks) -> Files:
    """Returns pairs as a reader returns them.

    Args:
        names: of the classes, in the order of their indices; empty where none are known.
        masks: what they hold, without their paths.
    """
    column = masks._replace(paths=Paths(mask for _, mask in pairs))
    return Files(root, Paths(image for image, _ in pairs), None, names, {"mask": column})


def masks_of(classes: int, table: MaskTable) -> Masks:
    """Returns what masks of so many classes hold, without their paths."""
    kind = mask_kind(classes)
    return Masks((), kind.ignored, kind.dtype, table)


def folder_pairs(
    split: Split,
    root: Path,
    images: str,
    masks: str,
    image_ending: str = "",
    mask_ending: str = "",
) -> list[Pair]:
    """Returns the images of a folder and the masks of another, paired by their paths within these.

    Args:
        images, masks: the folders, relative to ``root``.
        image_ending, mask_ending: what the names of files end in before the dot, such as
            "_leftImg8bit". It is left out of the comparison; other files aren't part of the data.

    Raises:
        InputError: a folder is missing or has no such file, or an image or a mask has no partner.
            A check continues with the pairs that there are.
    """
    image_of = _by_stem(split, root, images, image_ending, "images")
    mask_of = _by_stem(split, root, masks, mask_ending, "masks")
    _check_partners(split, root, image_of, mask_of, "images have no mask", masks)
    _check_partners(split, root, mask_of, image_of, "masks have no image", images)
    pairs = [(path, mask_of[stem]) for stem, path in image_of.items() if stem in mask_of]
    if not pairs:
        raise InputError(f"{root}: no image in {images}/ has a mask of its name in {masks}/")
    return pairs


def _by_stem(split: Split, root: Path, folder: str, ending: str, what: str) -> dict[str, str]:
    """Returns the paths of a folder's images by their names without folder, ending and suffix.

    Args:
        what: they are, for messages.
    """
    if not (root / folder).is_dir():
        above = (root / folder).parent
        raise InputError(
            f"{root / folder}: there is no such folder of {what}; {above} contains"
            f" {describe_folder(above)}"
        )
    paths: dict[str, str] = {}
    with reading(root / folder, f"a folder of {what}"):
        for path in images_below(root, folder, split.skip):
            name = os.path.splitext(path[len(folder) + 1 :])[0]
            if not name.endswith(ending):
                continue
            stem = name.removesuffix(ending)
            if stem in paths:
                raise Unreadable(
                    f"{paths[stem]} and {path} only differ in their suffix; remove one"
                )
            paths[stem] = path
    if not paths:
        named = f" *{ending}" if ending else ""
        raise InputError(
            f"{root / folder}: no {what}{named} in it or below it; they end in"
            f" {' '.join(IMAGE_SUFFIXES)}; it contains {describe_folder(root / folder)}"
        )
    return paths


def _check_partners(
    split: Split,
    root: Path,
    paths: dict[str, str],
    partners: dict[str, str],
    problem: str,
    folder: str,
) -> None:
    """Refuses files without a partner of the same name.

    Args:
        paths, partners: by name.
        folder: of the partners.
    """
    alone = [path for stem, path in paths.items() if stem not in partners]
    if not alone:
        return
    first = os.path.splitext(os.path.basename(alone[0]))[0]
    likely = next((path for stem, path in partners.items() if first in stem), "")
    if likely:
        advice = f"{likely} may belong to it: give both the same name"
    else:
        advice = "add or remove files"
    split.refuse(
        f"{len(alone):,} of {len(paths):,} {problem} of their name in {root / folder},"
        f" the first is {printable(alone[0])}; {advice}"
    )


# ------------------------------------------------------------------- classes


def declared_classes(
    split: Split, root: Path, ignore_index: int | Literal["auto"]
) -> tuple[list[str], Masks]:
    """Returns the names of a dataset's classes, and what its masks hold, without their paths.

    They are in classes.txt or colors.txt. Without these, MODEL.NUM_CLASSES is the number of classes.

    Args:
        ignore_index: DATA.IGNORE_INDEX.

    Raises:
        InputError: a file can't be read, both are there, or the number of classes is unknown.
            A check continues with any indices.
    """
    names = names_beside(root)
    if os.path.lexists(root / COLORS):
        if names:
            raise InputError(
                f"{root}: both {FILE} and {COLORS} exist, but {COLORS}, for masks of colours, has"
                " names as well: remove one"
            )
        if ignore_index != "auto":
            raise InputError(
                f"DATA.IGNORE_INDEX is {ignore_index}, but masks have the colours in"
                f" {root / COLORS}; leave it out (there, a line without a name is an ignored"
                " colour)"
            )
        return read_colors(root / COLORS)
    advice = f"add its class to {root / FILE}, or change DATA.IGNORE_INDEX"
    count = len(names)
    if not count:
        advice = "raise MODEL.NUM_CLASSES, or change DATA.IGNORE_INDEX"
        count = 0 if split.num_classes == "auto" else split.num_classes
    if count > MOST_MASK_CLASSES:
        raise InputError(
            f"{root}: masks of {count} classes, expected up to {MOST_MASK_CLASSES};"
            f" check {FILE} or MODEL.NUM_CLASSES"
        )
    if not count:
        split.refuse(
            f"{root}: the classes of the masks are unknown; write their names to"
            f" {root / FILE}, one per line in the order of the indices, or set MODEL.NUM_CLASSES"
        )
        # A check shows which indices there are.
        return [], Masks((), ignored=255 if ignore_index == "auto" else ignore_index, dtype="int32")
    stored = None if ignore_index == "auto" else ignore_index
    return names, masks_of(count, plain_table(count, stored, advice))


def read_colors(file: Path) -> tuple[list[str], Masks]:
    """Returns the class names in a list of colours, and what masks of these colours hold.

    Each line is ``R G B NAME``, as in CamVid's label_colors.txt. Several colours may have the same
    name. A colour without a name is ignored. The classes are in the order of the lines.

    Raises:
        InputError: it can't be read, or a line is wrong (which).
    """
    colours: dict[tuple[int, ...], str] = {}
    with (
        reading(file, "colours of classes", "; each line is R G B NAME"),
        open_file(file) as opened,
    ):
        line_allowance(opened, _BYTES_PER_COLOUR)
        for number, line in numbered_lines(opened):
            try:
                text = line.decode()
            except UnicodeDecodeError:
                raise not_utf8(number) from None
            words = text.split(None, 3)
            if not words:
                continue
            values = [int(word) for word in words[:3] if word.isdecimal() and len(word) <= 3]
            if len(values) < 3 or max(values) > 255:
                quoted = printable(text, 60)
                raise Unreadable(
                    f"line {number}: expected three numbers up to 255 and a name; found '{quoted}'"
                )
            name = words[3].strip() if len(words) > 3 else ""
            if name:
                check_name(name, f"line {number}")
            if colours.setdefault(tuple(values), name) != name:
                raise Unreadable(f"line {number}: the colour already has another name")
        names = list(dict.fromkeys(name for name in colours.values() if name))
        if not names or len(colours) > MOST_MASK_CLASSES:
            raise Unreadable(
                f"it has {len(names)} classes in {len(colours)} colours, expected at least 1 in"
                f" {MOST_MASK_CLASSES} at most"
            )
    ignored = mask_kind(len(names)).ignored
    index_of = {name: index for index, name in enumerate(names)} | {"": ignored}
    indices = [index_of[name] for name in colours.values()]
    table = MaskTable(np.array(list(colours), np.uint8), indices, f"add it to {file}")
    return names, masks_of(len(names), table)


def colors_text(names: Sequence[str], table: MaskTable) -> str:
    """Returns the text of a list of colours, of which ``read_colors`` makes the same table."""
    lines = []
    for colour, index in zip(table.stored.tolist(), table.indices.tolist(), strict=True):
        name = names[index] if index < len(names) else ""
        lines.append(f"{' '.join(map(str, colour))} {name}".rstrip() + "\n")
    return "".join(lines)


# ------------------------------------------------------------------- readers


@datasets.register(
    "masks",
    holds="`images/train/**` and masks of the same names in `masks/train/**`, and both in `val`"
    " (or `train/images`, `train/masks`); without parts, to evaluate, or with `DATA.VAL_SPLIT`."
    " `classes.txt`: a name a line; for masks of colours `colors.txt`: `R G B NAME`",
    task="segmentation",
    columns="mask",
    val="images/val images/valid images/validation img_dir/val img_dir/valid img_dir/validation"
    " val/images valid/images validation/images",
)
def masks(
    split: Split,
    *,
    data_path: str,
    ignore_index: Annotated[int, between(0, 65535)] | Literal["auto"] = "auto",
) -> Files:
    """Reads images and masks of the same names in two folders.

    Args:
        ignore_index: the value of ignored pixels in masks. auto: 255, or 65535 with more than
            255 classes.

    Raises:
        InputError: a folder is missing, an image or a mask has no partner, or the classes are
            unknown.
    """
    root = Path(data_path)
    images, its_masks = _folders(root, split)
    pairs = folder_pairs(split, root, images, its_masks)
    return as_files(root, pairs, *declared_classes(split, root, ignore_index))


def _folders(root: Path, split: Split) -> Pair:
    """Returns the folder of a part's images and that of its masks, relative to ``root``."""
    images = _first(root, _IMAGES)
    if not images:
        part = _first(root, PARTS[split.mode])
        if not part and not any(_first(root, names) for names in PARTS.values()):
            raise InputError(
                f"{root}: no images/; DATASET masks needs images/ and masks/ under -data_path;"
                f" it contains {describe_folder(root)}"
            )
        if not part:
            raise InputError(_no_part(root, split))
        images = _first(root / part, _IMAGES) or _IMAGES[0]
        its_masks = _first(root / part, _MASKS) or _MASKS[0]
        return f"{part}/{images}", f"{part}/{its_masks}"
    its_masks = _first(root, _MASKS) or _MASKS[0]
    if not any(_first(root / images, names) for names in PARTS.values()):
        # All images are one part. An evaluation takes them, a check takes them for training images.
        is_check = split.problems is not None
        needs_parts = split.mode == "val" if is_check else split.mode == "train"
        if needs_parts and not split.alone:
            raise InputError(_no_part(root / images, split._replace(mode="val")))
        return images, its_masks
    part = _first(root / images, PARTS[split.mode])
    if not part:
        raise InputError(_no_part(root / images, split))
    its_part = _first(root / its_masks, PARTS[split.mode]) or part
    return f"{images}/{part}", f"{its_masks}/{its_part}"


def has_masks(root: Path) -> bool:
    """Returns whether a folder has a folder of images and one of masks, for ``masks`` to read."""
    return bool(_folder_of_images(root))


def training_images(root: Path) -> Path:
    """Returns the folder of the training images of ``masks``."""
    images = root / _folder_of_images(root)
    return images / _first(images, PARTS["train"])


def _folder_of_images(root: Path) -> str:
    """Returns the folder of all images, or of the training images, that has masks as well; "" if
    there is none.
    """
    parts = [name for names in PARTS.values() for name in names]
    for part in ("", *parts):
        images = _first(root / part, _IMAGES)
        if images and _first(root / part, _MASKS):
            return os.path.join(part, images)
    return ""


def _first(folder: Path, names: Sequence[str]) -> str:
    """Returns the first of the names that is a folder in ``folder``, or ""."""
    return next((name for name in names if (folder / name).is_dir()), "")


def _no_part(folder: Path, split: Split) -> str:
    """Returns the error's message about data without a part."""
    advice = "give it that folder"
    if split.mode == "val":
        advice = "DATA.VAL_SPLIT 0.1 puts a tenth of the images aside for validation"
    return f"{folder}: there is no {split.mode}/ in it; {advice}"


@datasets.register(
    "masks_list",
    holds="`train_list.txt` and `val_list.txt`: on each line the path of an image, a TAB or a space,"
    " and the path of its mask; `classes.txt` or `colors.txt`",
    task="segmentation",
    columns="mask",
    val="val_list.txt",
)
def masks_list(
    split: Split,
    *,
    data_path: str,
    ignore_index: Annotated[int, between(0, 65535)] | Literal["auto"] = "auto",
) -> Files:
    """Reads the pairs of an image and its mask in ``<mode>_list.txt``.

    Args:
        ignore_index: the value of ignored pixels in masks. auto: 255, or 65535 with more than
            255 classes.

    Raises:
        InputError: the list or files are missing, a line isn't a pair (which), or the classes are
            unknown.
    """
    root = Path(data_path)
    file = root / f"{split.mode}_list.txt"
    names, column = declared_classes(split, root, ignore_index)
    with open_list(file, "masks_list", bytes_per_line=_BYTES_PER_MASK) as lines:
        masks_of_images: list[bytes] = []
        paths = Paths(_list_pairs(lines, split, masks_of_images))
        if not len(paths):
            raise InputError(f"{file}: the list is empty")
        # A check opens each file anyway.
        if split.problems is None:
            lines.check_files(paths)
        column = column._replace(paths=Paths(masks_of_images))
        return Files(root, paths, None, names, {"mask": column})


def _list_pairs(lines: TextList, split: Split, masks_of_images: list[bytes]) -> Iterator[bytes]:
    """Yields the paths of a list's images, and appends those of their masks."""
    for number, line in lines:
        # Paths that hold spaces need a TAB between them.
        words = [word.strip() for word in line.split(b"\t")] if b"\t" in line else line.split()
        if not any(words):
            continue
        if len(words) != 2 or not all(words):
            split.refuse(
                lines.unexpected(number, "the path of an image, a TAB, the path of its mask", line)
            )
            continue
        try:
            path = lines.add_path(number, words[0])
        except InputError as error:
            split.refuse(str(error))
            continue
        masks_of_images.append(words[1])
        yield path
