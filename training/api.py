"""Training and evaluation from Python, as the command line does them.

    from paddle_vit_toolkit import evaluate, train

    run = train(data_path="/data/flowers")
    print(run.folder, run.result["acc1"], evaluate(pretrained=run.folder))

A run is a process of its own (``launch.caller``), so that a notebook can be interrupted, keeps its
memory and its GPUs, and can start one run after another. Paddle isn't imported here.
"""

import numbers
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import default_values
from errors import InputError
from launch.caller import call
from settings.configuration import CONFIG_DIR
from settings.suggestions import equivalent_key, nearest
from settings.values import quoted
from training.command_line import FLAGS
from training.curves import records
from training.results import METRIC_TITLES, read_result

_PROGRAM = CONFIG_DIR.parent / "main_multi_gpu.py"
# The flags of main_multi_gpu.py that are keywords: those of one value. ``evaluate`` is -eval.
KEYWORDS = ("cfg", *(flag for flag in FLAGS if flag != "eval"))


@dataclass(frozen=True)
class RunResult:
    """A run that has come to its end.

    Attributes:
        folder: its folder, as an absolute path.
        result: the content of result.json: the last evaluation, such as ``result["acc1"]`` in
            percent. After a training, ``result["best"]`` has the best evaluation.
    """

    folder: Path
    result: dict[str, Any]

    @property
    def weights(self) -> Path | None:
        """Returns the folder of the best checkpoint; None after an evaluation."""
        best = self.folder / "checkpoints" / "best"
        return best if best.exists() else None

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the records of metrics.jsonl: one for each report of the training, with ``split``
        "train", and one for each evaluation, with ``split`` "val". An evaluation has none.

        Raises:
            InputError: the file can't be read.
        """
        file = self.folder / "metrics.jsonl"
        return [record for _, record in records(file)] if file.exists() else []

    def __repr__(self) -> str:
        values = [f"{name}={self.result[name]}" for name in METRIC_TITLES if name in self.result]
        return f"RunResult({', '.join([repr(str(self.folder)), *values])})"


def train(
    cfg: str | os.PathLike[str] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **keywords: Any,
) -> RunResult:
    """Trains as ``paddle-vit train`` does, and returns the run.

    Relative paths are relative to the current folder. An interrupt stops the run with its state
    saved; ``resume`` continues it.

    Args:
        cfg: a model's YAML file or name; None: as the command line chooses without ``-cfg``.
        options: values of any keys: ``{"TRAIN.NUM_EPOCHS": 10}``.
        quiet: don't show what the run logs. Warnings are shown.
        keywords: flags of the command line, such as ``data_path``, ``output`` or ``ngpus``, and keys
            with ``__`` for each dot: ``TRAIN__NUM_EPOCHS=10``. A flag of None isn't passed.

    Raises:
        InputError: a wrong keyword, value or input.
        RunError: a failure inside the run.
        KeyboardInterrupt: the run was interrupted; the message says how to continue.
    """
    return _run("train", [], cfg, options, quiet, keywords)


def evaluate(
    cfg: str | os.PathLike[str] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **keywords: Any,
) -> RunResult:
    """Evaluates as ``paddle-vit eval`` does, and returns the evaluation's run, which has a folder of
    its own.

    Args:
        cfg: a model's YAML file or name; None: that of the weights.
        options, quiet, keywords: as for ``train``. ``pretrained`` names the weights, or a run's
            folder for its best ones.

    Raises:
        InputError, RunError, KeyboardInterrupt: as ``train``.
    """
    return _run("evaluate", ["-eval"], cfg, options, quiet, keywords)


def _run(
    function: str,
    flags: list[str],
    cfg: str | os.PathLike[str] | None,
    options: Mapping[str, Any] | None,
    quiet: bool,
    keywords: Mapping[str, Any],
) -> RunResult:
    """Runs main_multi_gpu.py.

    Args:
        function: the function that was called, by its name.
        flags: those that it passes itself.
    """
    words = command_words(function, {"cfg": cfg, **keywords}, options or {})
    # An interpreter that another program contains has no path.
    python = sys.executable or "python3"
    folder = call([python, str(_PROGRAM), "-default_cfg=vit_digits", *flags, *words], quiet)
    return RunResult(folder, read_result(folder, "; was it changed?"))


def command_words(
    function: str, keywords: Mapping[str, Any], options: Mapping[str, Any]
) -> list[str]:
    """Returns the words of a command line.

    Args:
        function: the name for errors.
        keywords, options: as for ``train``; ``cfg`` among the keywords.

    Raises:
        InputError: there is no such keyword, a key is named twice, or a value has no text.
    """
    if "EVAL" in {*keywords, *options} or "eval" in keywords:
        raise InputError(f"{function} sets EVAL itself; call train or evaluate")
    words = []
    values = {}
    for name, value in keywords.items():
        if name in KEYWORDS:
            if value is not None:
                words.append(f"-{name}={_text(name, value)}")
        # A key's last part may have small letters: DIST__STRATEGY__fuse_grad_size_in_MB.
        elif name.partition("__")[0].isupper():
            values[name.replace("__", ".")] = value
        else:
            raise InputError(f"{function} has no keyword {name}{_instead(name)}")
    for key, value in options.items():
        if not re.fullmatch(r"\w+(\.\w+)*", str(key)):
            raise InputError(
                f"{function}: options has {quoted(key)}, expected a key such as TRAIN.NUM_EPOCHS"
            )
        if key in values:
            raise InputError(f"{function}: {key} is a keyword and in options; leave one out")
        values[key] = value
    if values:
        words += ["-o", *(f"{key}={_text(key, value)}" for key, value in values.items())]
    return words


def _instead(name: str) -> str:
    """Returns what to write instead of an unknown keyword: "; write TRAIN__NUM_EPOCHS=VALUE"."""
    defaults = default_values()
    key = equivalent_key(name, defaults)
    if key not in defaults:
        return nearest(name, KEYWORDS)
    flags = [flag for flag in KEYWORDS if flag in FLAGS and FLAGS[flag].key == key]
    keyword = flags[0] if flags else key.replace(".", "__")
    return f"; write {keyword}=VALUE"


def _text(name: str, value: Any, in_list: bool = False) -> str:
    """Returns a value as the command line takes it.

    Args:
        name: of the keyword or key, for errors.
        in_list: whether it is an item of a list, where a string has quotes.
    """
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(name, item, in_list=True) for item in value)}]"
    if not isinstance(value, str | os.PathLike):
        raise InputError(
            f"{name} is {quoted(value)}, expected None, True, False, a number, a text, or a list"
        )
    text = os.fsdecode(value)
    if "\0" in text:
        raise InputError(f"{name} is {quoted(text)}, which contains a NUL character; remove it")
    if not in_list:
        return text
    quote = '"' if "'" in text else "'"
    if quote in text:
        raise InputError(f"{name} has an item {quoted(text)}, which contains both kinds of quotes")
    return f"{quote}{text}{quote}"
