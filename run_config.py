"""Which configuration a command line without -cfg means: that of the run it is about, or a script's own."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from errors import InputError
from options import read_yaml

FILE = "config.yaml"  # in a run's folder
AUTO = "auto"


class Choice(NamedTuple):
    """A configuration's file, or its name (None: config.py's defaults), and the line that says why it was taken."""

    file: str | Path | None
    note: str = ""
    of_run: bool = False


def choose(cfg: str | None, default: str | None, own_data: str | None, asked: Mapping[str, str]) -> Choice:
    """Returns the configuration to read.

    ``-cfg`` counts where it is given. Otherwise it is that of the run to go on with (MODEL.RESUME), or of the run whose
    weights are asked for (MODEL.PRETRAINED), or ``default``: in this order.

    Args:
        cfg, default: what -cfg and -default_cfg give.
        own_data: the dataset of ``default``.
        asked: the values of flags and -o, by dotted key.

    Raises:
        InputError: there is no run to go on with, or what is asked for isn't what ``default`` is made for.
    """
    if cfg is not None:
        return Choice(cfg)
    words = {key: value for key, value in asked.items() if str(value).lower() not in ("none", "null")}
    resume, pretrained = words.get("MODEL.RESUME"), words.get("MODEL.PRETRAINED")
    if resume and (found := _resumed(resume, words.get("OUTPUT"))):
        return Choice(found, f"configuration: {found}, of the run that goes on (no -cfg is given)", of_run=True)
    if resume and resume != AUTO:
        raise InputError(f"-resume={resume}: no {FILE} of its run (RUN/checkpoints/...) is there; give -cfg")
    if pretrained and (found := run_file(pretrained)):
        return Choice(
            found, f"configuration: {found}, of the run that -pretrained names (no -cfg is given)", of_run=True
        )
    output = words.get("OUTPUT")
    if resume and output and (default is None or (Path(output) / "checkpoints").exists()):
        raise InputError(f"-resume=auto: no {FILE} in {output} to go on with; give -cfg, as for a first start")
    if default is None:
        return Choice(None)
    for key, flag in (
        ("DATA.DATASET", "-dataset"),
        ("DATA.DATA_PATH", "-data_path"),
        ("MODEL.PRETRAINED", "-pretrained"),
    ):
        if key in words and (key, words[key]) != ("DATA.DATASET", own_data):
            raise InputError(
                f"{flag}={words[key]} needs -cfg, a model for it (python tools/list_models.py lists them);"
                f" {default}, which is trained where nothing is given, is made for {own_data} alone"
            )
    return Choice(default, f"configuration: {default}, for neither -cfg nor a run is given")


def run_file(path: str | os.PathLike) -> Path | None:
    """Returns the configuration of the run that saved ``path``, a checkpoint or a file of one; None: no run did."""
    for place in (Path(os.path.normpath(path)), Path(path).resolve()):
        for folder in place.parents:
            if folder.name == "checkpoints" and (folder.parent / FILE).is_file():
                return folder.parent / FILE
    return None


def _resumed(resume: str, output: str | None) -> Path | None:
    if resume != AUTO:
        return run_file(resume)
    file = Path(output or "") / FILE
    if not output or not file.is_file():
        return None
    if read_yaml(file).get("EVAL"):
        raise InputError(f"{file} is an evaluation's: there is no training to go on with; choose another -output")
    return file
