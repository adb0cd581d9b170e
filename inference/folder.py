"""An exported model's folder: what it tells about itself, and whether its files are those that were
written.

``preprocess.json`` is a weights' description (``training.checkpoint.description``) with more beside
it. Exports of the first release have ``preprocessing.json``, which tells less.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from errors import InputError, Unreadable, printable, reading
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
from training.checkpoint.storage import sha256_of

MANIFEST = "preprocess.json"
EARLIER = "preprocessing.json"
FORMATS = ("paddle", "paddle-legacy", "paddlex", "paddleclas", "onnx", "openvino")
PRECISIONS = ("float32", "float16", "bfloat16", "int8")
ADVICE = "; export the model anew (tools/export_model.py)"
_LONGEST = 16 << 20  # bytes: the names of 21,841 classes take 1.5 million
_SUM = Rule(
    "a SHA-256 per file",
    lambda v: type(v) is dict and 0 < len(v) < 100 and all(map(_is_file, v.items())),
)
_FORM: Form = {
    "format": Rule(f"one of {', '.join(FORMATS)}", lambda value: value in FORMATS),
    "precision": Rule(f"one of {', '.join(PRECISIONS)}", lambda value: value in PRECISIONS),
    "files": _SUM,
    # Earlier releases don't write it.
    "features": FLAG,
}
_EARLIER: Form = {
    "model": Rule("a model's name", is_name),
    # of earlier releases: a square
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
_KEYS = {
    "model": "MODEL.NAME", "num_classes": "MODEL.NUM_CLASSES", "image_size": "DATA.IMAGE_SIZE",
    "channels": "DATA.IMAGE_CHANNELS", "crop_pct": "DATA.CROP_PCT", "crop_mode": "DATA.CROP_MODE",
    "interpolation": "DATA.INTERPOLATION", "mean": "DATA.IMAGENET_MEAN", "std": "DATA.IMAGENET_STD",
}  # fmt: skip


def _is_file(entry: tuple[Any, Any]) -> bool:
    name, total = entry
    return is_name(name, 100) and Path(name).name == name and is_name(total, 64)


class Export(NamedTuple):
    """A folder that ``write_export`` made.

    Attributes:
        format: one of FORMATS.
        precision: one of PRECISIONS.
        description: what the model is, its task and classes, and how its images are prepared.
        files: SHA-256 by name; empty: of an earlier release.
        features: whether the outputs are features, and no classes.
    """

    folder: Path
    format: str
    precision: str
    description: Description
    files: dict[str, str]
    features: bool = False

    def check_files(self) -> None:
        """Holds the folder's files to the sums that they had when they were written.

        Raises:
            InputError: one is missing, or another one now.
        """
        for name, expected in self.files.items():
            with reading(self.folder / name, "a file of an export", ADVICE):
                if sha256_of(self.folder / name) != expected:
                    raise Unreadable("it isn't what was exported: its SHA-256 is another")


def is_export(folder: str | Path) -> bool:
    """Returns whether a path is a folder that an export was written into."""
    # which never raises
    return any(os.path.isfile(os.path.join(folder, name)) for name in (MANIFEST, EARLIER))


def refuse_export(path: str | Path, why: str) -> None:
    """Raises InputError, which ends with ``why``, where a path is an export's folder: before its
    graph is run.
    """
    if is_export(path):
        raise InputError(f"{printable(str(path))} is an export{why}")


def read_export(folder: str | Path) -> Export:
    """Returns what an export's folder tells; of its files nothing else is read.

    Raises:
        InputError: it is no export, or what describes it can't be read.
    """
    folder = Path(folder)
    if not is_export(folder):
        raise InputError(
            f"{folder}: no export: it holds no {MANIFEST}; tools/export_model.py writes such folders"
        )
    name = MANIFEST if (folder / MANIFEST).is_file() else EARLIER
    with reading(folder / name, "the description of an export", ADVICE):
        text = whole_file(folder / name, _LONGEST)
        content = parsed_json(text)
        if name == EARLIER:
            return _of_earlier(folder, content)
        check_form(content, _FORM, tuple(name for name in _FORM if name != "features"))
        described = read_description(text)
        features = content.get("features", False)
        return Export(
            folder, content["format"], content["precision"], described, content["files"], features
        )


def _of_earlier(folder: Path, content: Any) -> Export:
    check_form(content, _EARLIER, tuple(_EARLIER))
    values = {key: content[name] for name, key in _KEYS.items()}
    kind = "paddle" if (folder / "inference.json").is_file() else "paddle-legacy"
    return Export(
        folder,
        kind,
        "float32",
        Description(content["model"], "classification", content["classes"], values),
        {},
    )
