"""Computes features of images, stores them in a file with an index, and reads them again.

The features are the input of a model's classifier, or one of the model's intermediates.
"""

import functools
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

from errors import InputError, Unreadable, open_file, printable, reading
from inference.export_manifest import refuse_export
from inference.pictures import Picture, Pictures
from inference.predictor import Predictor
from inference.text.encoder import TextEncoder
from loading.files import Paths
from loading.tables import csv_line, csv_rows
from models.text_pretrained import has_text_tower
from settings.merging import weights_of_model
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
from utils import writing_whole
from weights.formats import files_of
from weights.hub import HUB_PREFIXES, SHIPPED
from weights.sums import sha256_of

Pool = Literal["avg", "token", "both", "map", "embedding"]
POOLS = ("avg", "token", "both", "map", "embedding")
INDEXES = ("csv", "jsonl")
COLUMNS = ("row", "file", "error")
_ADVICE = "restore it, or make the features again (tools/features.py)"
# In bytes: the size of FILE.json, and of a row of the index, at most.
_LARGEST_RECORD = 1 << 20
LARGEST_ROW = 20_000
# The bytes of values that are read at once.
_BLOCK = 4 << 20
_PATH = Rule("a path", lambda value: type(value) is str and 0 < len(value) <= 4096)
FORM: Form = {
    "checkpoint": _PATH,
    "sha256": Rule("a SHA-256", lambda value: is_name(value, 64)),
    # A name below it is never taken for a URL.
    "folder": Rule("an absolute path", lambda value: _PATH.holds(value) and value[0] == "/"),
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
    """The features of some images.

    Attributes:
        names: the images' names.
        errors: the error of each image, in one line; "": none.
        values: [B, ...] float32, NaN for images that can't be read.
    """

    names: list[str]
    errors: list[str]
    values: np.ndarray


class FeatureExtractor(Predictor):
    """A predictor whose ``logits`` are features, in float32.

    Args:
        path, cfg, options, batch_size: see ``Predictor``.
        layer: an index of the model's ``feature_info``; None: the input of the classifier,
            [B, num_features] (timm's ``forward_head(..., pre_logits=True)``).
        pool: what is returned of a layer: "avg": the mean over its places [B, channels]; "token":
            its class token [B, channels]; "both": the token, then the mean [B, 2 * channels];
            "map": all places [B, channels, rows, columns]; None: "token" if the classifier reads
            the class token alone, else "avg". "embedding", without a layer: what texts are compared
            with, of weights of images and texts.
        norm: whether the model's last norm is applied to a layer that it fits.

    Attributes:
        made: how the features are made; the record in FILE.json.

    Raises:
        InputError: as ``Predictor``; or the model has no such layer, or no class token.
    """

    reads_classifier = False

    def __init__(
        self,
        path: str | Path,
        cfg: str | None = None,
        options: Sequence[str] = (),
        batch_size: int = 32,
        layer: int | None = None,
        pool: Pool | None = "avg",
        norm: bool = False,
    ) -> None:
        refuse_export(path, ", which only gives logits; use the checkpoint")
        super().__init__(path, cfg, options, batch_size=batch_size)
        if self.config.HEAD.NAME is not None:
            raise InputError(
                f"{printable(str(path))} is a segmentation model, which has no features of whole"
                " images; pass the YAML file of its encoder (-cfg)"
            )
        # A search may run in another folder, so the paths are absolute.
        named = weights_of_model(path) or path
        if str(path) in SHIPPED:
            named = self.path
        path = named if str(named).startswith(HUB_PREFIXES) else os.path.abspath(named)
        if cfg and os.path.isfile(cfg):
            cfg = os.path.abspath(cfg)
        assert self.weights is not None
        # CaiT's class token, and that of others, comes after the layers.
        has_token = self.model.num_prefix_tokens > 0 and hasattr(self.model, "cls_token")
        if pool is None:
            reads_token = getattr(self.model, "global_pool", None) == "token"
            pool = "token" if reads_token and has_token else "avg"
        self.made = {
            "checkpoint": str(path),
            "sha256": sha256_of(*files_of(self.weights)),
            "cfg": cfg,
            "options": list(options),
            "layer": layer,
            "pool": pool,
            "norm": norm,
            "oriented": self.config.DATA.EXIF_ORIENTATION,
        }
        if pool == "embedding":
            # The projection of CLIP is the model's classifier.
            if layer is not None or not has_text_tower(self.path):
                raise InputError(
                    "-pool embedding is for weights of CLIP and SigLIP with both towers, without -layer"
                )
            return
        if layer is None:
            self.model.reset_classifier(0)
            return
        count = len(self.model.feature_info)
        name = self.config.MODEL.NAME
        if not -count <= layer < count:
            raise InputError(
                f"-layer is {layer}, but {name} has the layers {-count} to {count - 1}"
            )
        if pool in ("token", "both") and not has_token:
            raise InputError(
                f"-pool is {pool}, but the layers of {name} have no class token; use avg"
            )
        self.model: Any = _Layer(self.model, layer, pool, norm)

    @functools.cached_property
    def text_encoder(self) -> TextEncoder:
        """The text encoder, whose embeddings "embedding" features are compared with.

        Raises:
            InputError: as ``TextEncoder``.
        """
        return TextEncoder(self.path)

    def rows(self, images: Sequence[Picture] | Paths, workers: int = 2) -> Iterator[Rows]:
        """Yields the features of all images, batch by batch, in their order."""
        pictures = Pictures(self.config, images)
        for batch in self.batches(pictures, workers):
            values = self.logits(batch.pixels)
            values[[bool(problem) for problem in batch.problems]] = np.nan
            yield Rows([pictures.name(place) for place in batch.places], batch.problems, values)


class _Layer(nn.Layer):
    """A model's layer, pooled. Shape: images [B, C, H, W] -> [B, channels], or a map."""

    def __init__(self, model: Any, layer: int, pool: Pool, norm: bool) -> None:
        super().__init__()
        self.model = model
        self.layer = layer
        self.pool = pool
        self.norm = norm

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        options = {"norm": self.norm, "stop_early": True, "intermediates_only": True}
        has_token = self.pool in ("token", "both")
        [output] = self.model.forward_intermediates(
            images, [self.layer], return_prefix_tokens=has_token, **options
        )
        if has_token:
            places, prefix_tokens = output
            token = prefix_tokens[:, 0]
            if self.pool == "token":
                return token
            return paddle.concat([token, places.mean(axis=[2, 3])], axis=1)
        if self.pool == "map":
            return output
        return output.mean(axis=[2, 3])


def write_features(
    features: FeatureExtractor,
    images: Paths,
    output: Path,
    index: str = "csv",
    workers: int = 2,
    tell: Callable[[int], Any] = int,
) -> dict[str, Any]:
    """Writes the features of ``images`` to a file, an index, and a record of how they were made.

    FILE.npy or FILE.safetensors holds float32 [images, ...]; an image that can't be read has NaN.
    The index, FILE.csv or FILE.jsonl, has a row for each image: ``row``, ``file``, ``error``. Its
    relative paths start at the current folder. FILE.json is the record, which ``open_features``
    reads. Each is written whole or not at all, FILE itself last.

    Args:
        output: FILE.npy or FILE.safetensors.
        index: "csv" or "jsonl".
        tell: called with the number of images of each batch that is done.

    Returns:
        the record, with the features' ``shape`` and the number of ``failures``.

    Raises:
        InputError: the file has another ending, or one of the files exists already.
    """
    if output.suffix not in (".npy", ".safetensors"):
        raise InputError(f"{output}: unknown file ending; expected .npy or .safetensors")
    rows = output.with_suffix(f".{index}")
    record = output.with_suffix(".json")
    for file in (output, rows, record):
        if os.path.lexists(file):
            raise InputError(f"{file} exists; choose another -output, or remove it")
    if not output.parent.is_dir():
        raise InputError(
            f"{output}: there is no folder {output.parent}; create it, or choose another -output"
        )
    made: dict[str, Any] = features.made | {"folder": os.getcwd(), "index": index, "failures": 0}
    with (
        writing_whole(output, "wb") as values_file,
        writing_whole(record) as record_file,
        writing_whole(rows, "wb") as index_file,
    ):
        done = 0
        if index == "csv":
            index_file.write(_line(index, *COLUMNS))
        for batch in features.rows(images, workers):
            # The shape is known after the first batch.
            if not done:
                made["shape"] = [len(images), *batch.values.shape[1:]]
                made["offset"] = values_file.write(array_header(output.suffix, made["shape"]))
            values_file.write(np.ascontiguousarray(batch.values, "<f4").data)
            for name, error in zip(batch.names, batch.errors, strict=True):
                index_file.write(_line(index, done, name, error))
                made["failures"] += bool(error)
                done += 1
            tell(len(batch.names))
        json.dump(made, record_file, indent=1)
    return made


def array_header(kind: str, shape: list[int]) -> bytes:
    """Returns the header of a .npy or .safetensors file, whose size is a multiple of 8 bytes."""
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
    """Returns a row of the index.

    Bytes of a path that aren't UTF-8 are written unchanged to CSV, and as Python's surrogate
    escapes to JSON.
    """
    if kind == "jsonl":
        return json.dumps(dict(zip(COLUMNS, row, strict=True))).encode() + b"\n"
    return csv_line(*row).encode(errors="surrogateescape")


class StoredFeatures(NamedTuple):
    """Features that ``write_features`` wrote.

    Attributes:
        path: FILE.npy or FILE.safetensors.
        values: [n, channels] float32, memory-mapped.
        made: the record in FILE.json.
        index: FILE.csv or FILE.jsonl.
    """

    path: Path
    values: np.ndarray
    made: dict[str, Any]
    index: Path

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields all values in blocks [B, channels]; each block overwrites the one before.

        The blocks are read from the file. Pages of a memory-mapped file would count as this
        process's memory.

        Raises:
            InputError: the file can't be read, or ends too early.
        """
        width = self.values.shape[1]
        block = np.empty((max(1, _BLOCK // (4 * max(1, width))), width), "<f4")
        with reading(self.path, "features"), open_file(self.path) as file:
            file.seek(self.made["offset"])
            for first in range(0, len(self.values), len(block)):
                rows = block[: len(self.values) - first]
                if file.readinto(rows.data.cast("B")) != rows.nbytes:
                    raise Unreadable(
                        f"it is truncated before row {first + len(rows) - 1}; {_ADVICE}"
                    )
                yield rows

    def files(self) -> Iterator[str]:
        """Yields the images' names in the index, row by row.

        Raises:
            InputError: the index can't be read, or its rows aren't those of the features.
        """
        count = 0
        with reading(self.index, "an index of features"), open_file(self.index) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_ROW * (len(self.values) + 1):
                raise Unreadable(f"it is too large for {len(self.values)} rows")
            text = io.TextIOWrapper(file, "utf-8", "surrogateescape", newline="")
            if self.made["index"] == "jsonl":
                rows: Iterator[dict[str, Any]] = (parsed_json(line.encode()) for line in text)
            else:
                table = csv_rows(text)
                head = next(table, [])
                rows = (dict(zip(head, cells, strict=True)) for cells in table)
            for count, row in enumerate(rows, 1):
                if str(row["row"]) != str(count - 1):
                    problem = f"its row {count - 1} has the number {value_text(row['row'])}"
                    raise Unreadable(f"{problem}: rows were removed, added or moved; {_ADVICE}")
                if type(row["file"]) is not str:
                    raise Unreadable(
                        f"its row {count - 1} has the file {value_text(row['file'])}, expected a text"
                    )
                yield row["file"]
            if count != len(self.values):
                raise Unreadable(
                    f"it has {count} rows, the features have {len(self.values)}; {_ADVICE}"
                )


def open_features(path: Path) -> StoredFeatures:
    """Opens pooled features that ``write_features`` wrote.

    Raises:
        InputError: they can't be read, aren't pooled, or were changed since they were written.
    """
    record = path.with_suffix(".json")
    with reading(record, "the record of tools/features.py"):
        made = parsed_json(whole_file(record, _LARGEST_RECORD))
        check_form(made, FORM, tuple(name for name in FORM if name != "oriented"))
        shape = made["shape"]
        offset = made["offset"]
        if len(shape) != 2:
            raise Unreadable(f"its features are maps {shape}; a search needs them pooled")
    with reading(path, "features"):
        # open_file refuses a pipe, for which NumPy would wait.
        open_file(path).close()
        if os.path.getsize(path) != offset + 4 * math.prod(shape):
            raise Unreadable(f"it doesn't match {record.name}: expected {shape} of float32")
        values = np.memmap(path, "<f4", "r", offset, tuple(shape))
    return StoredFeatures(path, values, made, path.with_suffix(f".{made['index']}"))
