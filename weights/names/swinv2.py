"""The names of tensors in files of Swin Transformer V2."""

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from weights.names import swin
from weights.names.rules import Arrays, drop_key_biases, rename

_TABLE = r"layers\.(\d+)\.blocks\.0\.attn\.relative_coords_table"


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``SwinTransformerV2``.

    Source: microsoft/Swin-Transformer, which merges patches at the end of a stage; timm does so at
    the beginning of the next one. Derived buffers are dropped.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = drop_key_biases(rename(arrays, [(r"\.relative_coords_table$", None)]))
    return swin.timm_names(arrays, layout, wanted)


def switches(arrays: Arrays) -> dict[str, Any]:
    """Returns the windows by which a file's model measures offsets between tokens.

    They are found from the tables of offsets in the authors' files.
    """
    tables = {
        match[1]: array for name, array in arrays.items() if (match := re.fullmatch(_TABLE, name))
    }
    sizes = [_window(tables[str(stage)]) for stage in range(len(tables)) if str(stage) in tables]
    if not sizes or len(sizes) != len(tables) or not all(sizes):
        return {}
    return {"PRETRAINED_WINDOW_SIZES": sizes}


def _window(table: np.ndarray) -> int:
    """Returns the side of the window that is the unit of a table of offsets.

    Args:
        table: [1, 2 H - 1, 2 W - 1, 2]. Its largest offset in rows is
            log8(1 + 8 (H - 1) / (side - 1)).

    Returns:
        the side, or 0 if it is unknown.
    """
    if table.ndim != 4 or table.shape[1] < 3 or not table.size:
        return 0
    largest = table[0, -1, 0, 0]
    if not 0.01 < largest < 10:
        return 0
    return round(1 + 4 * (table.shape[1] - 1) / (8 ** float(largest) - 1))
