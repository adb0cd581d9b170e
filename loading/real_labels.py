"""ReaL: several labels for each of ImageNet's validation images (DATA.LABELS).

Beyer et al. 2020 (arXiv:2006.07159) labelled the images again. An image has any number of labels.
"""

import re
from pathlib import Path

import numpy as np

from errors import InputError, Unreadable, printable, reading
from loading.label_sets import LabelSets
from loading.label_spaces import imagenet_synsets
from loading.sources import Files
from settings.configuration import Configuration
from settings.plain import is_list, is_whole, parsed_json, value_text, whole_file

# The name of a validation image. Images are numbered from 1.
_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")
# Bytes of the file of labels. real.json has 388,478.
_LARGEST_FILE = 1 << 24


def relabel(source: Files, config: Configuration) -> Files:
    """Returns the images of an evaluation with the labels of the file DATA.LABELS.

    The labels are ImageNet-1k's classes. Those of image n are entry n - 1 of the file's list. An
    image whose entry is empty is left out. Without DATA.LABELS, and in a training, the images are
    returned as they are.

    Raises:
        InputError: the file can't be read as such a list, an image isn't named as a validation
            image, or it has no entry.
    """
    file = config.DATA.LABELS
    if not (file and config.EVAL):
        return source
    entries = _entries(file)
    places = []
    sets = []
    for place, path in enumerate(source.paths):
        match = _NAME.fullmatch(Path(path).name)
        number = int(match[1]) if match else 0
        if not 0 < number <= len(entries):
            reason = "its name isn't like ILSVRC2012_val_00000001.JPEG"
            if number:
                reason = f"there are {len(entries)}"
            raise InputError(
                f"{printable(path)}: DATA.LABELS {printable(file)} has no entry for it: {reason}"
            )
        if labels := sorted(set(entries[number - 1])):
            places.append(place)
            sets.append(labels)
    if not sets:
        raise InputError(
            f"{printable(file)}: no image of {printable(str(source.root))} has a label in it"
        )
    label_sets = LabelSets(np.concatenate(sets), np.cumsum([0, *map(len, sets)]))
    labelled = source.at_places(np.array(places))
    return labelled._replace(labels=label_sets, classes=imagenet_synsets())


def _entries(file: str) -> list[list[int]]:
    """Returns the labels of each image from a file of ReaL's labels."""

    def is_entry(value: object) -> bool:
        return is_list(value, lambda label: is_whole(label, 0, 999))

    advice = "; DATA.LABELS takes real.json of google-research/reassessed-imagenet"
    with reading(printable(file), "ReaL's labels", advice):
        entries = parsed_json(whole_file(file, _LARGEST_FILE))
        if not is_list(entries, is_entry):
            raise Unreadable(
                f"it is {value_text(entries)}, expected a list of lists of classes, 0 to 999"
            )
    return entries
