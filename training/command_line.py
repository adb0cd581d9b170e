"""The command line of main_*.py: its flags, its configuration, and answers to unknown flags.

Without -cfg the configuration is that of the run that the command is about, or a script's own.
"""

import argparse
import functools
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from config import (
    FromFile,
    asked_config,
    default_values,
    explain,
    get_config,
    shipped_configs,
)
from errors import InputError, printable
from settings.configuration import (
    CONFIG_DIR,
    FLAG,
    NAMED,
    Configuration,
    Option,
    add_note,
    is_given,
    value_sources,
)
from settings.documents import read_yaml
from settings.merging import SIZE, weights_of_model
from settings.parser import Parser, is_flag, pairs
from settings.registry import datasets
from settings.suggestions import equivalent_key

# The name of a run's configuration within its folder.
FILE = "config.yaml"
_WEIGHT_FILE = "model.safetensors"
AUTO = "auto"
# What -mae_pretrain trains if nothing else names a model, as in PaddleViT.
MAE = "mae_vit_base_patch16_224"
# The origin of MODEL.PRETRAINED in a run that is resumed: the file it began with may be gone.
CHECKPOINT = "the checkpoint, which contains the weights"


class Flag(NamedTuple):
    """A flag that sets a key.

    Attributes:
        key: the dotted key.
        kind: the type of its value.
        help: what -h prints.
    """

    key: str
    kind: type
    help: str


FLAGS = {
    "dataset": Flag(
        "DATA.DATASET",
        str,
        "format of the dataset (default: recognised in -data_path): one of "
        + ", ".join(datasets.names()),
    ),
    "data_path": Flag(
        "DATA.DATA_PATH", str, "the dataset's folder; without -cfg, a model is chosen for it"
    ),
    "output": Flag("OUTPUT", str, "the run's folder (default: output/<train|eval>-<model>-<time>)"),
    "batch_size": Flag(
        "DATA.BATCH_SIZE",
        int,
        "training samples per device, or auto; with -eval, evaluation samples",
    ),
    "batch_size_eval": Flag("DATA.BATCH_SIZE_EVAL", int, "evaluation samples per device"),
    "image_size": Flag(
        "DATA.IMAGE_SIZE", str, "image size in pixels: a side, or height x width such as 224x160"
    ),
    "accum_iter": Flag("TRAIN.ACCUM_ITER", int, "gradient accumulation: steps per update"),
    "pretrained": Flag(
        "MODEL.PRETRAINED",
        str,
        "weights to start from or to evaluate: a file, a run's folder, hf-hub:..., a model's name",
    ),
    "resume": Flag(
        "MODEL.RESUME",
        str,
        "checkpoint or run to resume; auto: the newest checkpoint in -output, if any",
    ),
    "last_epoch": Flag(
        "TRAIN.LAST_EPOCH",
        int,
        "the last epoch that is already done; a resumed run reads it from its checkpoint",
    ),
    "ngpus": Flag(
        "NGPUS", int, "number of processes; -1: one per visible GPU, or without a GPU one per core"
    ),
    "profile": Flag(
        "PROFILE",
        int,
        "number of training steps to profile: a Chrome trace, and a table in the log",
    ),
    "eval": Flag("EVAL", bool, "evaluate only"),
    "amp": Flag("AMP", bool, "mixed precision; evaluations stay in float32 (AMP_EVAL)"),
}


def config_from_arguments(
    program: str,
    argv: Sequence[str] | None = None,
    own: Iterable[str] = (),
    read: dict[Any, FromFile] | None = None,
) -> Configuration:
    """Returns the frozen configuration that a command line asks for.

    Args:
        argv: its words; None: the process's.
        own: names of flags that the program takes itself. The error for an unknown flag may suggest
            one of them.
        read: as ``asked_config``'s: the files of one configuration are read once for many command
            lines.
    """
    read = {} if read is None else read
    arguments = parse_command_line(program, argv, own)
    given = {flag: getattr(arguments, flag) for flag in FLAGS}
    flags = [
        Option(FLAGS[flag].key, value, f"{FLAG}{flag}")
        for flag, value in given.items()
        if value is not None
    ]
    named = [Option(key, value, NAMED) for key, value in pairs(arguments.o, default_values())]
    flags = list(map(_with_weights, flags))
    named = list(map(_with_weights, named))
    asked = {option.key: option.value for option in (*flags, *named)}
    default = arguments.default_cfg if arguments.cfg is None else None
    if arguments.mae_pretrain:
        choice = _choose_mae(arguments.cfg, asked)
    else:
        choice = choose(arguments.cfg, default, default and get_config(default).DATA.DATASET, asked)
    if choice.of_run and "OUTPUT" not in asked:
        # Another user may have written the file: it doesn't say where this command writes.
        where = "this command"
        flags.append(Option("OUTPUT", None, where))
        if "SAVE" not in asked:
            flags.append(Option("SAVE", default_values()["SAVE"], where))
    if choice.of_run and _has_weights(asked):
        flags.append(Option("MODEL.PRETRAINED", None, CHECKPOINT))
    chosen = list(choice.options)
    config = asked_config(choice.file, _in_order(chosen, [*flags, *named]), read)
    if arguments.mae_pretrain and config.TASK != "mae":
        raise InputError(
            f"{FLAG}mae_pretrain needs a configuration of TASK mae, but TASK is {config.TASK}"
            f" in {choice.file}; use one of TASK mae, such as -cfg={MAE}, or PaddleViT's file with"
            " MODEL.MAE_PRETRAIN: True"
        )
    before = len(flags), len(chosen)
    notes = list(choice.notes)
    options, lines = _for_dataset(program, config, choice, asked)
    chosen += options
    notes += lines
    other_base = (
        asked.keys() & _WEIGHTS == {"MODEL.PRETRAINED"}
        and len(config.origins["MODEL.PRETRAINED"]) > 1
    )
    if config.MODEL.PRETRAINED_ADAPTER and other_base:
        flags.append(
            Option("MODEL.PRETRAINED_ADAPTER", None, "-pretrained instead of the adapter's base")
        )
    other_data = asked.keys() & {"DATA.DATASET", "DATA.DATA_PATH"}
    fine_tunes = choice.of_run and not (config.EVAL or config.MODEL.RESUME)
    if fine_tunes and other_data and "MODEL.NUM_CLASSES" not in asked:
        flags.append(
            Option(
                "MODEL.NUM_CLASSES",
                "auto",
                "-pretrained of a run whose data may have other classes",
            )
        )
    if choice.of_run and (config.EVAL or program == "main_single_gpu.py") and "NGPUS" not in asked:
        flags.append(Option("NGPUS", -1, "this command, which counts the devices"))
    # The guide's evaluation command gives -batch_size alone; it is the evaluation's batch there.
    if config.EVAL and arguments.batch_size is not None and arguments.batch_size_eval is None:
        flags.append(
            Option(
                "DATA.BATCH_SIZE_EVAL", arguments.batch_size, f"{FLAG}batch_size, because of -eval"
            )
        )
    if (len(flags), len(chosen)) != before:
        config = asked_config(choice.file, _in_order(chosen, [*flags, *named]), read)
    for note in notes:
        add_note(config, note)
    recipe = weights_recipe(config)
    if recipe and not (config.EVAL or config.MODEL.PRETRAINED or _has_weights(asked)):
        add_note(
            config,
            f"warning: {recipe} is a recipe for fine-tuning pretrained weights, but none are"
            " given: the model starts"
            " from random values; pass -pretrained=FILE",
        )
    if arguments.explain:
        print(explain(config, arguments.explain))
        raise SystemExit(0)
    return config


def _with_weights(option: Option) -> Option:
    """Returns an option in which the name of a model, as weights, is the name of timm's on the Hub."""
    if option.key != "MODEL.PRETRAINED" or not isinstance(option.value, str):
        return option
    return option._replace(value=weights_of_model(option.value) or option.value)


def _in_order(chosen: Sequence[Option], given: Sequence[Option]) -> list[Option]:
    """Returns options in the order in which they are set: those that were chosen for a dataset, flags
    and -o. A folder that was found below -data_path takes its place.
    """
    named = {option.key for option in given}
    first = [option for option in chosen if option.key not in named]
    last = [option for option in chosen if option.key in named]
    return [*first, *given, *last]


def _for_dataset(
    program: str, config: Configuration, choice: "Choice", asked: Mapping[str, Any]
) -> tuple[list[Option], list[str]]:
    """Returns the options that follow from the dataset and the configuration, and lines of the log."""
    path = asked.get("DATA.DATA_PATH")
    if not path:
        return [], []
    from training import automatic

    if choice.of_run:
        plan = automatic.data_of_run(config, asked)
        return plan.options, plan.notes
    if choice.images and not asked.keys() & {"DATA.BATCH_SIZE", "DATA.GLOBAL_BATCH"}:
        processes = 1 if program == "main_single_gpu.py" else automatic.num_processes(config)
        return automatic.smaller_batch(config, choice.images, processes)
    is_known = choice.images or is_given(config, "DATA.DATASET")
    if is_known or not os.path.isdir(path):
        return [], []
    plan = automatic.data_of_recipe(config, asked)
    return plan.options, plan.notes


_WEIGHTS = {"MODEL.PRETRAINED", "MODEL.PRETRAINED_ADAPTER"}


class Choice(NamedTuple):
    """The configuration to read.

    Attributes:
        file: its file or its name, or the names of several; None: config.py's defaults.
        notes: lines for the log that say why it was chosen.
        of_run: whether it is a run's own.
        options: values over those of the file, which flags and -o override.
        images: the number of training images that it was chosen for; 0: it wasn't chosen for a
            dataset.
    """

    file: str | Path | tuple[str, ...] | None
    notes: Sequence[str] = ()
    of_run: bool = False
    options: Sequence[Option] = ()
    images: int = 0


def choose(
    cfg: str | None, default: str | None, own_data: str | None, asked: Mapping[str, str]
) -> Choice:
    """Returns the configuration to read.

    ``-cfg`` comes first. Then comes the configuration of the run that is resumed (MODEL.RESUME), or
    of the run whose weights are loaded (MODEL.PRETRAINED). With a dataset in -data_path, it is
    chosen for this dataset (``automatic``). Otherwise it is ``default``.

    Args:
        cfg, default: what -cfg and -default_cfg give.
        own_data: the dataset of ``default``.
        asked: the values of flags and -o, by dotted key.

    Raises:
        InputError: there is no run to resume, or ``default`` isn't made for what was
            requested.
    """
    if cfg is not None:
        return Choice(cfg)
    words = {
        key: value for key, value in asked.items() if str(value).lower() not in ("none", "null")
    }
    resume = words.get("MODEL.RESUME")
    pretrained = words.get("MODEL.PRETRAINED")
    if resume and (file := _resumed_run(resume, words.get("OUTPUT"))):
        note = f"configuration: {file}, of the resumed run (no -cfg is given)"
        return Choice(file, [note], of_run=True)
    if resume and resume != AUTO:
        if not os.path.lexists(resume):
            raise InputError(
                f"-resume={resume}: no such folder; expected a run's folder, or one of its"
                " checkpoints"
            )
        run = Path(resume).parent
        advice = f"use -resume={run}" if (run / FILE).is_file() else "pass -cfg"
        raise InputError(
            f"-resume={resume}: its run has no {FILE} (in RUN, or next to RUN/checkpoints);"
            f" {advice}"
        )
    if pretrained and (file := run_file(pretrained)):
        note = f"configuration: {file}, of the run of -pretrained (no -cfg is given)"
        return Choice(file, [note], of_run=True)
    if pretrained and (Path(pretrained) / FILE).is_file():
        raise InputError(
            f"-pretrained={pretrained} is the folder of a run without checkpoints; expected weights"
        )
    output = words.get("OUTPUT")
    is_chosen = _is_chosen(words, default)
    starts_anew = is_chosen or default is not None
    if resume and output and (not starts_anew or (Path(output) / "checkpoints").exists()):
        raise InputError(
            f"-resume=auto: {output} has no {FILE} to resume with; pass -cfg to start a new run"
        )
    if is_chosen:
        # Most commands don't need it, and it imports NumPy.
        from training import automatic

        plan = automatic.choose(words, str(words.get("EVAL")).lower() == "true")
        return Choice(plan.files, plan.notes, options=plan.options, images=plan.images)
    if default is None:
        return Choice(None)
    for key, flag in (
        ("DATA.DATASET", "-dataset"),
        ("DATA.DATA_PATH", "-data_path"),
        ("MODEL.PRETRAINED", "-pretrained"),
    ):
        if key in words and (key, words[key]) != ("DATA.DATASET", own_data):
            raise InputError(
                f"{flag}={words[key]} needs -cfg, the model (python tools/list_models.py lists"
                " them);"
                f" the default, {default}, is for {own_data} only"
            )
    return Choice(default, [f"configuration: {default}, because neither -cfg nor a run is given"])


def _is_chosen(words: Mapping[str, str], default: str | None) -> bool:
    """Returns whether the model and the recipe are chosen for the dataset in -data_path.

    Without a ``default``, keys of MODEL on the command line change the model of config.py.
    """
    others = ("MODEL.PRETRAINED", "MODEL.RESUME", "MODEL.NUM_CLASSES")
    names_model = any(key.startswith("MODEL.") and key not in others for key in words)
    return "DATA.DATA_PATH" in words and (default is not None or not names_model)


def _choose_mae(cfg: str | None, asked: Mapping[str, str]) -> Choice:
    """Returns the configuration to read with PaddleViT's flag -mae_pretrain.

    The name of a model means MAE's pre-training of this model. Other files are read as they are.

    Args:
        cfg, asked: see ``choose``.

    Raises:
        InputError: as ``choose``.
    """
    words = {key: value for key, value in asked.items() if key != "DATA.DATA_PATH"}
    choice = choose(cfg, None, None, words)
    if choice.of_run or (cfg is not None and os.path.isfile(cfg)):
        return choice
    name = MAE if cfg is None else f"mae_{Path(cfg).stem}"
    if not shipped_configs(name):
        return choice
    return Choice(name, [f"configuration: {name}, because of {FLAG}mae_pretrain"])


def run_file(path: str | os.PathLike) -> Path | None:
    """Returns the file with a run's configuration; None if ``path`` doesn't belong to a run.

    Args:
        path: the run's folder, a checkpoint, or a file of one; or a folder of weights that holds
            a configuration, too (tools/zero_shot.py).
    """
    folder = Path(path)
    holds_weights = os.path.isdir(folder / "checkpoints") or os.path.isfile(folder / _WEIGHT_FILE)
    if os.path.isfile(folder / FILE) and holds_weights:
        return folder / FILE
    for place in (Path(os.path.normpath(path)), Path(path).resolve()):
        for folder in place.parents:
            if folder.name == "checkpoints" and (folder.parent / FILE).is_file():
                return folder.parent / FILE
    return None


def weights_recipe(config: Configuration) -> str:
    """Returns the name of the shipped recipe that sets keys of TRAIN and is for weights that were
    trained before.

    Its file says so: the command behind "# Train:" has ``-pretrained``. It is "" if there is no
    such recipe.
    """
    sources = {
        where.source: None
        for key, where in value_sources(config).items()
        if key.startswith("TRAIN.")
    }
    return next((Path(source).stem for source in sources if _needs_weights(source)), "")


@functools.cache
def _needs_weights(source: str) -> bool:
    """Returns whether a shipped file of values says that its command has -pretrained."""
    file = Path(source)
    if not file.is_relative_to(CONFIG_DIR):
        return False
    return bool(re.search(r"^# Train:.* -pretrained=", file.read_text("utf-8"), re.M))


def _resumed_run(resume: str, output: str | None) -> Path | None:
    if resume != AUTO:
        return run_file(resume)
    file = Path(output or "") / FILE
    if not output or not file.is_file():
        return None
    if read_yaml(file).get("EVAL"):
        raise InputError(
            f"{file} is from an evaluation, and evaluation runs can't be resumed; choose another"
            " -output"
        )
    return file


def _has_weights(asked: Mapping[str, str]) -> bool:
    """Returns whether a resumed run takes its weights from a checkpoint, not from MODEL.PRETRAINED."""
    resume = asked.get("MODEL.RESUME")
    if not resume or "MODEL.PRETRAINED" in asked:
        return False
    return resume != AUTO or any(Path(asked.get("OUTPUT", ""), "checkpoints").glob("epoch_*"))


class _Parser(Parser):
    """The parser of main_*.py, which knows the keys of -o and what other toolkits call them.

    Args:
        settings: arguments of ``Parser``.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__("Train or evaluate a Vision Transformer.", **settings)

    def instead(self, name: str, values: list[str]) -> str:
        flag_of = {flag.key: name for name, flag in FLAGS.items()}
        found = _instead(name, values, flag_of, default_values()) or super().instead(name, values)
        return found or "; -h lists the flags, config.py the keys of -o"


@functools.cache
def _parser(program: str, own: tuple[str, ...]) -> _Parser:
    parser = _Parser(
        prog=program,
        others=own,
        epilog="Flags may be written with one dash or two. Any other setting is a key of -o, such as"
        " -o TRAIN.NUM_EPOCHS 100 TRAIN.BASE_LR 1e-3 MODEL.NUM_CLASSES 10. config.py describes the"
        " keys of all runs, --explain KEY prints one of them, and python tools/list_models.py --keys"
        " NAME lists the keys of a model's architecture. For a flag of timm, PaddleClas or"
        " PaddleViT, the error message says what to write instead.",
    )
    parser.add_argument(
        "-cfg", "--cfg", metavar="FILE", help="YAML file, or a model's name under configs/"
    )
    default = (
        "configuration if neither -cfg nor a run (-resume, -pretrained) nor -data_path is given; for"
        " scripts"
    )
    parser.add_argument("-default_cfg", "--default_cfg", metavar="FILE", help=default)
    for name, flag in FLAGS.items():
        takes: dict[str, Any] = {"metavar": flag.kind.__name__.upper()}
        if flag.kind is bool:
            takes = {"nargs": "?", "const": "True", "metavar": "BOOL"}
        parser.add_argument(f"-{name}", f"--{name}", help=flag.help, **takes)
    parser.add_argument(
        "-mae_pretrain",
        "--mae_pretrain",
        action="store_true",
        help="as in PaddleViT: pre-train the model of -cfg by MAE (TASK mae)",
    )
    parser.add_keys()
    parser.add_argument(
        "-explain",
        "--explain",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="print where the values of keys came from, and exit",
    )
    return parser


def parse_command_line(
    program: str, argv: Sequence[str] | None, own: Iterable[str] = ()
) -> argparse.Namespace:
    """Returns the values of a command line's flags, or None, and in ``o`` the words after -o.

    A flag may have one dash or two, and dashes for underscores within.

    Args:
        argv: its words; None: the process's.
        own: as ``config_from_arguments`` takes them.

    Raises:
        InputError: it has flags or words that aren't known; the line says what to write instead.
    """
    words = sys.argv[1:] if argv is None else argv
    _check_words(words)
    parsed, rest = _parser(program, tuple(own)).parse_known_args(words)
    if rest:
        example = "; write -o before KEY=VALUE" if "=" in rest[0] else ""
        if os.path.isdir(rest[0]):
            example = f"; write -data_path={printable(rest[0])} if it is a dataset"
        # Word processors make such dashes of hyphens.
        dashes = ("\u2010", "\u2011", "\u2012", "\u2013", "\u2014", "\u2015", "\u2212")
        if rest[0].startswith(dashes):
            example = "; it begins with a typographic dash; write a plain -"
        raise InputError(f"command line: unexpected argument {rest[0]!r}{example}")
    return parsed


def _check_words(words: Sequence[str]) -> None:
    """Raises InputError for the usual mistakes of scripts.

    These are wrongly continued lines, line ends of Windows, and variables that aren't set.
    """
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.endswith(("\r", "\\")) or (word and not word.strip()):
            raise InputError(
                f"command line: unexpected argument {word!r}; in a script, nothing may follow"
                " the backslash"
                " at a line's end, the last line has none, and Windows line endings don't work"
            )
        if not word or (is_flag(word) and equals and not value):
            before = name or (words[position - 1] if position else "the command")
            raise InputError(
                f"command line: {before} has an empty value; is a variable of the script unset?"
            )


def _instead(
    name: str, values: list[str], flag_of: Mapping[str, str], defaults: Mapping[str, Any]
) -> str:
    """Returns what to write instead of another toolkit's flag, or "".

    For example, it is "; write -o TRAIN.NUM_EPOCHS 10".
    """
    # A key, or a text with a place for the value.
    meant = equivalent_key(name, defaults)
    if meant is None:
        return ""
    default = defaults.get(meant)
    if not values:
        value = "True" if isinstance(default, bool) else "VALUE"
    elif isinstance(default, list) and len(values) > 1:
        value = shlex.quote(f"[{','.join(values)}]")
    else:
        # An image size may be channels, height and width: --input-size 3 224 160.
        sizes = list(itertools.takewhile(str.isdecimal, values))[-2:]
        if meant != SIZE or len(set(sizes)) < 2:
            sizes = sizes[-1:]
        value = shlex.quote("x".join(sizes) or values[0])
    if meant in flag_of:
        flag = f"; write -{flag_of[meant]}"
        return flag if isinstance(default, bool) and value == "True" else f"{flag}={value}"
    if meant in defaults:
        return f"; write -o {meant} {value}"
    option = "-o " if meant.split()[0] in defaults else ""
    return f"; write {option}{meant.format(value)}"
