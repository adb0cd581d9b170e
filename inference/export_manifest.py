"""Reads the manifest of an exported model, and checks the files that it lists.

The manifest is ``preprocess.json`` in the export's folder. It contains the description that weights
have, too (``training.checkpoint.description``), and the format, precision and files of the export.
Exports of the first release have ``preprocessing.json`` instead, with fewer entries.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError, Unreadable, deprecated, printable, reading
from settings.plain import (
    FLAG,
    Form,
    Rule,
    check_form,
    is_list,
    is_name,
    is_real,
    is_whole,
    parsed_json,
    whole_file,
)
from training.checkpoint import Description
from training.checkpoint.description import read_description
from weights.sums import sha256_of

MANIFEST = "preprocess.json"
EARLIER = "preprocessing.json"
FORMATS = ("paddle", "paddle-legacy", "paddlex", "paddleclas", "onnx", "openvino")
PRECISIONS = ("float32", "float16", "bfloat16", "int8", "int8_weights", "int4_weights")
ADVICE = "; export the model again (tools/export_model.py)"
# In bytes. The names of 21,841 classes take 1.5 million.
_LONGEST = 16 << 20


def _are_checksums(value: Any) -> bool:
    if type(value) is not dict or not 0 < len(value) < 100:
        return False
    return all(
        is_name(name, 100) and Path(name).name == name and is_name(checksum, 64)
        for name, checksum in value.items()
    )


_FORM: Form = {
    "format": Rule(f"one of {', '.join(FORMATS)}", lambda value: value in FORMATS),
    "precision": Rule(f"one of {', '.join(PRECISIONS)}", lambda value: value in PRECISIONS),
    "files": Rule("a SHA-256 per file", _are_checksums),
    # Earlier releases don't write it.
    "features": FLAG,
}
_EARLIER: Form = {
    "model": Rule("a model's name", is_name),
    # Images were squares then.
    "image_size": Rule("a size", lambda value: is_whole(value, 1, 1 << 16)),
    "channels": Rule("1 or 3", lambda value: value in (1, 3)),
    "crop_pct": Rule("a share", lambda value: is_real(value, 1e-3, 100)),
    "crop_mode": Rule("a short text", is_name),
    "interpolation": Rule("a short text", is_name),
    "mean": Rule("a number per channel", lambda v: is_list(v, is_real, 1, 3)),
    "std": Rule("a number per channel", lambda v: is_list(v, is_real, 1, 3)),
    "num_classes": Rule("a number of classes", lambda value: is_whole(value, 1, 1 << 24)),
    "classes": Rule(
        "a list of names", lambda value: is_list(value, lambda name: type(name) is str)
    ),
}
# The keys of the configuration that the entries of an earlier release set.
_KEYS = {
    "model": "MODEL.NAME",
    "num_classes": "MODEL.NUM_CLASSES",
    "image_size": "DATA.IMAGE_SIZE",
    "channels": "DATA.IMAGE_CHANNELS",
    "crop_pct": "DATA.CROP_PCT",
    "crop_mode": "DATA.CROP_MODE",
    "interpolation": "DATA.INTERPOLATION",
    "mean": "DATA.IMAGENET_MEAN",
    "std": "DATA.IMAGENET_STD",
}


class Export(NamedTuple):
    """The manifest of an export that ``write_export`` made.

    Attributes:
        folder: the folder of the export.
        format: one of FORMATS.
        precision: one of PRECISIONS.
        description: the model, its task and classes, and how its images are prepared.
        files: SHA-256 by name; empty for exports of the first release.
        features: whether the outputs are features instead of classes.
    """

    folder: Path
    format: str
    precision: str
    description: Description
    files: dict[str, str]
    features: bool = False

    def check_files(self) -> None:
        """Compares the folder's files with the checksums that were recorded when they were written.

        Raises:
            InputError: a file is missing, or was changed.
        """
        for name, expected in self.files.items():
            with reading(self.folder / name, "a file of an export", ADVICE):
                if sha256_of(self.folder / name) != expected:
                    raise Unreadable("its SHA-256 differs from that of the export")


def is_export(folder: str | Path) -> bool:
    """Returns whether a path is the folder of an export."""
    # os.path.isfile never raises, unlike Path.is_file.
    return any(os.path.isfile(os.path.join(folder, name)) for name in (MANIFEST, EARLIER))


def refuse_export(path: str | Path, why: str) -> None:
    """Raises InputError if a path is the folder of an export, before its graph is run.

    Args:
        why: the end of the error.
    """
    if is_export(path):
        raise InputError(f"{printable(str(path))} is an export{why}")


def read_export(folder: str | Path) -> Export:
    """Reads the manifest of an export. The other files aren't read.

    Raises:
        InputError: the folder isn't an export, or its manifest can't be read.
    """
    folder = Path(folder)
    if not is_export(folder):
        raise InputError(
            f"{folder}: it isn't an export of tools/export_model.py: it has no {MANIFEST}"
        )
    name = MANIFEST if (folder / MANIFEST).is_file() else EARLIER
    with reading(folder / name, "the description of an export", ADVICE):
        text = whole_file(folder / name, _LONGEST)
        content = parsed_json(text)
        if name == EARLIER:
            what = f"{printable(str(folder))}: an export with {EARLIER}"
            deprecated(what, "export the model again", since="1.0")
            return _of_earlier(folder, content)
        check_form(content, _FORM, tuple(name for name in _FORM if name != "features"))
        return Export(
            folder=folder,
            format=content["format"],
            precision=content["precision"],
            description=read_description(text),
            files=content["files"],
            features=content.get("features", False),
        )


def _of_earlier(folder: Path, content: Any) -> Export:
    """Returns the manifest of an export of the first release."""
    check_form(content, _EARLIER, tuple(_EARLIER))
    values = {key: content[name] for name, key in _KEYS.items()}
    is_json = (folder / "inference.json").is_file()
    return Export(
        folder=folder,
        format="paddle" if is_json else "paddle-legacy",
        precision="float32",
        description=Description(content["model"], "classification", content["classes"], values),
        files={},
    )
