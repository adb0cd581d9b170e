"""ReaL: the labels that Beyer et al. 2020 (arXiv:2006.07159) gave ImageNet's validation images, any
number each.
"""

import re
from pathlib import Path

import numpy as np

from errors import InputError, Unreadable, printable, reading
from loading.files import Paths
from loading.label_sets import LabelSets
from loading.label_spaces import imagenet_synsets
from loading.sources import Files
from settings.options import Configuration
from settings.plain import is_list, is_whole, parsed_json, value_text, whole_file

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})\.\w+")  # a validation image's name, from 1 on
_MOST = 1 << 24  # bytes; real.json has 388,478


def relabel(source: Files, config: Configuration) -> Files:
    """Returns an evaluation's images with the labels of DATA.LABELS, which are ImageNet-1k's
    outputs, or as they are.

    Image n's are entry n - 1 of a list. An image whose entry is empty isn't counted: it is left
    out.

    Raises:
        InputError: the file can't be read as such a list; an image hasn't a validation image's
            name, or no entry.
    """
    file = config.DATA.LABELS
    if not (file and config.EVAL):
        return source
    with reading(
        printable(file),
        "ReaL's labels",
        "; DATA.LABELS takes real.json of google-research/reassessed-imagenet",
    ):
        entries = parsed_json(whole_file(file, _MOST))
        if not is_list(
            entries, lambda entry: is_list(entry, lambda label: is_whole(label, 0, 999))
        ):
            raise Unreadable(
                f"it is {value_text(entries)}, expected a list of lists of classes, 0 to 999"
            )
    paths = []
    sets = []
    for path in source.paths:
        found = _NUMBER.fullmatch(Path(path).name)
        number = int(found[1]) if found else 0
        if not 0 < number <= len(entries):
            lacks = (
                f"there are {len(entries)}"
                if number
                else "it isn't called ILSVRC2012_val_00000001.JPEG"
            )
            raise InputError(
                f"{printable(path)}: DATA.LABELS {printable(file)} has no entry for it: {lacks}"
            )
        if entry := sorted(set(entries[number - 1])):
            paths.append(path)
            sets.append(entry)
    if not sets:
        raise InputError(
            f"{printable(file)}: no image of {printable(str(source.root))} has a label in it"
        )
    labels = LabelSets(np.concatenate(sets), np.cumsum([0, *map(len, sets)]))
    return Files(source.root, Paths(paths), labels, imagenet_synsets())
