"""The readers of published datasets for semantic segmentation, in the layouts they are known by.

Class names are those of MMSegmentation's lists. 255 is ignored in all of them, except as noted
below. Results of PaddleViT are of the same classes.
"""

import os
from pathlib import Path

from loading.class_names import read_class_names
from loading.files import Paths
from loading.lists import open_list
from loading.mask_folders import Pair, as_files, folder_pairs, masks_of
from loading.mask_tables import index_table, plain_table, shifted_table
from loading.sources import Files, Split
from settings.registry import datasets

_NAMES = Path(__file__).with_name("mask_classes")
_PARTS = {"train": "training", "val": "validation"}
_IGNORED = 255
# The two paths of a line of a list of names, and the pair.
_BYTES_PER_PAIR = 400
# The train ids of Cityscapes in the order of its label ids; the other label ids are ignored.
_CITYSCAPES = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_CITYSCAPES_IDS = 34
# COCO-Stuff's maps have 182 indices, of which these aren't classes.
_COCO_STUFF_IDS = 182
_COCO_STUFF_UNUSED = (11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90)


def class_names(dataset: str) -> list[str]:
    """Returns the class names of a published dataset."""
    return read_class_names(_NAMES / f"{dataset}.txt")


@datasets.register(
    "ade20k",
    holds="ADEChallengeData2016: `images/training`, `annotations/training`, and both in `validation`",
    task="segmentation",
    columns="mask",
    val="images/validation",
)
def ade20k(split: Split, *, data_path: str) -> Files:
    """Reads ADE20K's 150 classes of the scene parsing benchmark. Index 0 is ignored."""
    part = _PARTS[split.mode]
    root = Path(data_path)
    pairs = folder_pairs(split, root, f"images/{part}", f"annotations/{part}")
    return as_files(root, pairs, class_names("ade20k"), masks_of(150, shifted_table(150)))


@datasets.register(
    "cityscapes",
    holds="`leftImg8bit/train/<city>/*_leftImg8bit.png` and `gtFine/train/<city>/*_gtFine_labelIds.png`"
    " (or `labelTrainIds`), and both in `val`",
    task="segmentation",
    columns="mask",
    val="leftImg8bit/val",
)
def cityscapes(split: Split, *, data_path: str) -> Files:
    """Reads the 19 classes of Cityscapes that are evaluated, from label ids or train ids."""
    root = Path(data_path)
    masks = f"gtFine/{split.mode}"
    ending = "_gtFine_labelTrainIds"
    table = plain_table(19)
    if not any(root.glob(f"{masks}/*/*{ending}.png")):
        ending = "_gtFine_labelIds"
        indices = dict.fromkeys([*range(_CITYSCAPES_IDS), _IGNORED], _IGNORED)
        indices |= {stored: index for index, stored in enumerate(_CITYSCAPES)}
        table = index_table(indices)
    images = f"leftImg8bit/{split.mode}"
    pairs = folder_pairs(split, root, images, masks, "_leftImg8bit", ending)
    return as_files(root, pairs, class_names("cityscapes"), masks_of(19, table))


@datasets.register(
    "pascal_context",
    holds="VOC2010: `JPEGImages`, `SegmentationClassContext` and `ImageSets/SegmentationContext/train.txt`, `val.txt`;"
    " 60 classes, or 59 with `MODEL.NUM_CLASSES 59`",
    task="segmentation",
    columns="mask",
    val="ImageSets/SegmentationContext/val.txt",
)
def pascal_context(split: Split, *, data_path: str) -> Files:
    """Reads Pascal Context: 59 classes and the background, which is ignored where there are 59.

    Raises:
        InputError: the list or images are missing, or a line isn't a name (which).
    """
    root = Path(data_path)
    file = root / "ImageSets" / "SegmentationContext" / f"{split.mode}.txt"
    names = class_names("pascal_context")
    table = plain_table(60)
    if split.num_classes == 59:
        names = names[1:]
        table = shifted_table(59)
    pairs: list[Pair] = []
    with open_list(file, "pascal_context", bytes_per_line=_BYTES_PER_PAIR) as lines:
        for number, line in lines:
            name = os.fsdecode(line.strip())
            image = f"JPEGImages/{name}.jpg"
            lines.add_path(number, os.fsencode(image))
            pairs.append((image, f"SegmentationClassContext/{name}.png"))
        found = as_files(root, pairs, names, masks_of(len(names), table))
        # A check opens each file anyway.
        if split.problems is None:
            lines.check_files(Paths(image for image, _ in pairs), root)
        return found


@datasets.register(
    "coco_stuff",
    holds="COCO-Stuff 164k: `images/train2017`, `annotations/train2017/*_labelTrainIds.png`"
    " (or the published maps, `*.png`), and both in `val2017`",
    task="segmentation",
    columns="mask",
    val="images/val2017",
)
def coco_stuff(split: Split, *, data_path: str) -> Files:
    """Reads the 171 classes of COCO-Stuff, from train ids or from the indices of the published maps."""
    root = Path(data_path)
    masks = f"annotations/{split.mode}2017"
    ending = "_labelTrainIds"
    table = plain_table(171)
    if not any(root.glob(f"{masks}/*{ending}.png")):
        ending = ""
        used = [index for index in range(_COCO_STUFF_IDS) if index not in _COCO_STUFF_UNUSED]
        table = index_table({stored: index for index, stored in enumerate(used)} | {255: 255})
    pairs = folder_pairs(split, root, f"images/{split.mode}2017", masks, "", ending)
    return as_files(root, pairs, class_names("coco_stuff"), masks_of(171, table))


@datasets.register(
    "trans10k",
    holds="Trans10K_cls12: `train/images`, `train/masks_12/*_mask.png`, and both in `validation`",
    task="segmentation",
    columns="mask",
    val="validation",
)
def trans10k(split: Split, *, data_path: str) -> Files:
    """Reads Trans10K-v2: 11 kinds of transparent things and the background."""
    root = Path(data_path)
    part = "train" if split.mode == "train" else "validation"
    pairs = folder_pairs(split, root, f"{part}/images", f"{part}/masks_12", "", "_mask")
    return as_files(root, pairs, class_names("trans10k"), masks_of(12, plain_table(12)))


@datasets.register(
    "vaihingen",
    holds="ISPRS Vaihingen: `images/training/*.tif`, `annotations/training/*_noBoundary.png`, and both in `validation`",
    task="segmentation",
    columns="mask",
    val="images/validation",
)
def vaihingen(split: Split, *, data_path: str) -> Files:
    """Reads the 6 classes of Vaihingen. Index 0, the boundaries, is ignored."""
    root = Path(data_path)
    part = _PARTS[split.mode]
    images = f"images/{part}"
    pairs = folder_pairs(split, root, images, f"annotations/{part}", "", "_noBoundary")
    return as_files(root, pairs, class_names("vaihingen"), masks_of(6, shifted_table(6)))
