"""Swin Transformer V2."""

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from weights.names import swin
from weights.names.rules import Arrays, drop_key_biases, rename

_TABLE = r"layers\.(\d+)\.blocks\.0\.attn\.relative_coords_table"


def timm_names(arrays: Arrays, layout: str, wanted: Collection[str]) -> Arrays:
    """Returns arrays under the names of timm 1.0.31's ``SwinTransformerV2``; derived buffers are
    dropped.

    Source: microsoft/Swin-Transformer, which merges patches at a stage's end; timm does so at the
    next one's beginning.

    Args:
        arrays, layout, wanted: see ``weights.names.timm_names``.
    """
    arrays = drop_key_biases(rename(arrays, [(r"\.relative_coords_table$", None)]))
    return swin.timm_names(arrays, layout, wanted)


def switches(arrays: Arrays) -> dict[str, Any]:
    """Tells by which windows the file's model measures offsets; the authors' files hold the table
    of them.
    """
    tables = {
        match[1]: array for name, array in arrays.items() if (match := re.fullmatch(_TABLE, name))
    }
    sizes = [_window(tables[str(stage)]) for stage in range(len(tables)) if str(stage) in tables]
    return (
        {"PRETRAINED_WINDOW_SIZES": sizes}
        if sizes and len(sizes) == len(tables) and all(sizes)
        else {}
    )


def _window(table: np.ndarray) -> int:
    """Returns the window's side that is the unit of a table [1, 2 H - 1, 2 W - 1, 2]; 0: the table
    doesn't tell.

    Its largest number of rows is log8(1 + 8 (H - 1) / (side - 1)).
    """
    if (
        table.ndim != 4
        or table.shape[1] < 3
        or not table.size
        or not 0.01 < table[0, -1, 0, 0] < 10
    ):
        return 0
    return round(1 + 4 * (table.shape[1] - 1) / (8 ** float(table[0, -1, 0, 0]) - 1))
