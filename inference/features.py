"""Features of images: what a model's classifier reads, or an intermediate of it, kept in files with
an index.
"""

import io
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import paddle
from paddle import nn

from errors import InputError, Unreadable, open_file, reading
from inference.folder import refuse_export
from inference.pictures import Picture, Pictures
from inference.predictor import Predictor
from loading.files import Paths
from loading.tables import csv_line, csv_rows
from settings.plain import (
    Form,
    Rule,
    check_form,
    is_list,
    is_name,
    is_whole,
    optional,
    parsed_json,
    value_text,
    whole_file,
)
from training.checkpoint.storage import sha256_of
from utils import writing_whole
from weights.formats import files_of
from weights.hub import HUB_PREFIXES

Pool = Literal["avg", "token", "map"]
POOLS = ("avg", "token", "map")
INDEXES = ("csv", "jsonl")
COLUMNS = ("row", "file", "error")
_ANEW = "restore it, or make the features anew (tools/features.py)"
# bytes
_LARGEST_RECORD = 1 << 20
LARGEST_ROW = 20_000
_BLOCK = 4 << 20  # bytes of values that are read at once
_PATH = Rule("a path", lambda value: type(value) is str and 0 < len(value) <= 4096)
_FORM: Form = {
    "checkpoint": _PATH,
    "sha256": Rule("a SHA-256", lambda value: is_name(value, 64)),
    "folder": _PATH,
    "cfg": optional(_PATH),
    "options": Rule(
        "a list of words", lambda value: is_list(value, lambda word: type(word) is str)
    ),
    "layer": optional(Rule("a number", lambda value: type(value) is int)),
    "pool": Rule(f"one of {', '.join(POOLS)}", lambda value: value in POOLS),
    "norm": Rule("true or false", lambda value: type(value) is bool),
    "shape": Rule("two to four sizes", lambda value: is_list(value, is_whole, 2, 4)),
    "offset": Rule("a number of bytes", is_whole),
    # Records of earlier releases don't have it.
    "oriented": Rule("true or false", lambda value: type(value) is bool),
    "index": Rule(f"one of {', '.join(INDEXES)}", lambda value: value in INDEXES),
}


class Rows(NamedTuple):
    """Some images: their names, what is wrong with each ("": nothing), and ``values`` [B, ...], NaN
    where it can't be read.
    """

    names: list[str]
    errors: list[str]
    values: np.ndarray


class Features(Predictor):
    """A predictor whose ``logits`` are features, float32.

    Args:
        path, cfg, options, batch_size: as a ``Predictor``'s.
        layer: place in the model's ``feature_info``, from the end if negative; None: what the
            classifier reads, [B, num_features] (timm's ``forward_head(..., pre_logits=True)``).
        pool: of a layer: "avg": the mean of its places [B, channels]; "token": its class token;
            "map": all places [B, channels, rows, columns].
        norm: the model's last norm is applied to a layer that it fits.

    Raises:
        InputError: as a ``Predictor``'s; the model has no such layer, or no class token.
    """

    def __init__(
        self,
        path: str | Path,
        cfg: str | None = None,
        options: Sequence[str] = (),
        batch_size: int = 32,
        layer: int | None = None,
        pool: Pool = "avg",
        norm: bool = False,
    ) -> None:
        refuse_export(path, ", which gives logits alone; give the checkpoint")
        super().__init__(path, cfg, options, batch_size=batch_size)
        path = str(path) if str(path).startswith(HUB_PREFIXES) else os.path.abspath(path)
        assert self.weights is not None
        total = sha256_of(*files_of(self.weights))
        cfg = os.path.abspath(cfg) if cfg and os.path.isfile(cfg) else cfg
        self.made = {"checkpoint": path, "sha256": total, "cfg": cfg, "options": list(options)}
        self.made |= {"layer": layer, "pool": pool, "norm": norm}
        self.made |= {"oriented": self.config.DATA.EXIF_ORIENTATION}
        if layer is None:
            self.model.reset_classifier(0)
            return
        count = len(self.model.feature_info)
        name = self.config.MODEL.NAME
        if not -count <= layer < count:
            raise InputError(f"-layer is {layer}, {name} has the layers {-count} to {count - 1}")
        if pool == "token" and not hasattr(self.model, "cls_token"):
            raise InputError(f"-pool is token, {name} has no class token; choose avg or map")
        self.model: Any = _Layer(self.model, layer, pool, norm)

    def rows(self, images: Sequence[Picture] | Paths, workers: int = 2) -> Iterator[Rows]:
        """Yields the features of all images in turn; as much memory is taken for many as for a few."""
        pictures = Pictures(self.config, images)
        for batch in self.batches(pictures, workers):
            values = self.logits(batch.pixels)
            values[[bool(problem) for problem in batch.problems]] = np.nan
            yield Rows([pictures.name(place) for place in batch.places], batch.problems, values)


class _Layer(nn.Layer):
    def __init__(self, model: Any, layer: int, pool: Pool, norm: bool) -> None:
        super().__init__()
        self.model = model
        self.layer = layer
        self.pool = pool
        self.norm = norm

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        options = {"norm": self.norm, "stop_early": True, "intermediates_only": True}
        token = self.pool == "token"
        [found] = self.model.forward_intermediates(
            images, [self.layer], return_prefix_tokens=token, **options
        )
        if token:
            return found[1][:, 0]
        return found if self.pool == "map" else found.mean(axis=[2, 3])


def write_features(
    features: Features,
    images: Paths,
    output: Path,
    index: str = "csv",
    workers: int = 2,
    tell: Callable[[int], Any] = int,
) -> dict[str, Any]:
    """Writes the features of ``images``, row by row in their order, and beside them an index and
    how they were made.

    FILE.npy or FILE.safetensors holds float32 [images, ...]; FILE.csv or FILE.jsonl has a row for
    each: ``row``, ``file``, ``error``; relative paths count from this process's folder. Of an image
    with an error the features are NaN. FILE.json is what ``stored_features`` reads. All three are
    written whole or not at all, FILE itself last.

    Args:
        index: "csv" or "jsonl".
        tell: called with how many images were done now.

    Returns:
        ``shape`` of the features, ``failures``, how they were made.

    Raises:
        InputError: another ending, or a file that is there already.
    """
    if output.suffix not in (".npy", ".safetensors"):
        raise InputError(f"{output}: the ending tells what to write; expected .npy or .safetensors")
    rows = output.with_suffix(f".{index}")
    record = output.with_suffix(".json")
    for file in (output, rows, record):
        if os.path.lexists(file):
            raise InputError(f"{file} exists; choose another -output, or remove it")
    if not output.parent.is_dir():
        raise InputError(
            f"{output}: there is no folder {output.parent}; make it, or choose another -output"
        )
    made: dict[str, Any] = features.made | {"folder": os.getcwd(), "index": index, "failures": 0}
    with (
        writing_whole(output, "wb") as values,
        writing_whole(record) as told,
        writing_whole(rows, "wb") as listed,
    ):
        done = 0
        if index == "csv":
            listed.write(_line(index, *COLUMNS))
        for found in features.rows(images, workers):
            if not done:
                made["shape"] = [len(images), *found.values.shape[1:]]
                made["offset"] = values.write(head_of_values(output.suffix, made["shape"]))
            values.write(np.ascontiguousarray(found.values, "<f4").data)
            for name, error in zip(found.names, found.errors, strict=True):
                listed.write(_line(index, done, name, error))
                made["failures"] += bool(error)
                done += 1
            tell(len(found.names))
        json.dump(made, told, indent=1)
    return made


def head_of_values(kind: str, shape: list[int]) -> bytes:
    """Returns what stands before the values, a multiple of 8 bytes."""
    if kind == ".npy":
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
        )
        return file.getvalue()
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * math.prod(shape)]}
    text = json.dumps({"features": entry}).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _line(kind: str, *row: Any) -> bytes:
    """A row of the index. Bytes of a path that are no UTF-8 stay as they are in CSV; JSON has
    Python's surrogates.
    """
    if kind == "jsonl":
        return json.dumps(dict(zip(COLUMNS, row, strict=True))).encode() + b"\n"
    return csv_line(*row).encode(errors="surrogateescape")


class Stored(NamedTuple):
    """What ``write_features`` wrote: ``values`` [n, channels] float32, mapped; ``made``: how, as in
    FILE.json.
    """

    path: Path
    values: np.ndarray
    made: dict[str, Any]
    index: Path

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields all values in turn, [B, channels]; each block takes the place of the one before.

        They are read, for mapped pages would count as this process's memory.

        Raises:
            InputError: they can't be read, or end too early.
        """
        width = self.values.shape[1]
        block = np.empty((max(1, _BLOCK // (4 * max(1, width))), width), "<f4")
        with reading(self.path, "features"), open_file(self.path) as file:
            file.seek(self.made["offset"])
            for first in range(0, len(self.values), len(block)):
                found = block[: len(self.values) - first]
                if file.readinto(found.data.cast("B")) != found.nbytes:
                    raise Unreadable(f"it ends before its row {first + len(found) - 1}; {_ANEW}")
                yield found

    def files(self) -> Iterator[str]:
        """Yields the images' names as the index has them, row by row.

        Raises:
            InputError: the index can't be read, or hasn't these rows in this order.
        """
        count = 0
        with reading(self.index, "an index of features"), open_file(self.index) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_ROW * (len(self.values) + 1):
                raise Unreadable(f"it is larger than {len(self.values)} rows can be")
            text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
            if self.made["index"] == "jsonl":
                rows: Iterator[dict[str, Any]] = (parsed_json(line.encode()) for line in text)
            else:
                table = csv_rows(text)
                head = next(table, [])
                rows = (dict(zip(head, cells, strict=True)) for cells in table)
            for count, row in enumerate(rows, 1):
                if str(row["row"]) != str(count - 1):
                    found = f"its row {count - 1} is numbered {value_text(row['row'])}"
                    raise Unreadable(f"{found}: rows were removed, added or moved; {_ANEW}")
                if type(row["file"]) is not str:
                    raise Unreadable(
                        f"its row {count - 1} has the file {value_text(row['file'])}, expected a text"
                    )
                yield row["file"]
            if count != len(self.values):
                raise Unreadable(
                    f"it has {count} rows, the features have {len(self.values)}; {_ANEW}"
                )


def stored_features(path: Path) -> Stored:
    """Returns pooled features that ``write_features`` wrote.

    Raises:
        InputError: they can't be read, are maps, or aren't what was written.
    """
    record = path.with_suffix(".json")
    with reading(record, "the record of tools/features.py"):
        made = parsed_json(whole_file(record, _LARGEST_RECORD))
        check_form(made, _FORM, tuple(name for name in _FORM if name != "oriented"))
        shape = made["shape"]
        offset = made["offset"]
        if len(shape) != 2:
            raise Unreadable(f"its features are maps {shape}; a search needs them pooled")
    with reading(path, "features"):
        open_file(path).close()  # NumPy would wait for a pipe
        if os.path.getsize(path) != offset + 4 * math.prod(shape):
            raise Unreadable(f"it isn't what {record.name} tells, {shape} of float32")
        values = np.memmap(path, "<f4", "r", offset, tuple(shape))
    return Stored(path, values, made, path.with_suffix(f".{made['index']}"))
