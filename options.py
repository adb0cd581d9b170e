"""How options are read: YAML files, words of a command line, one coercion for both; what other toolkits call them."""

import argparse
import ast
import difflib
import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

from errors import InputError

# What timm, PaddleClas, PaddleViT and others call a key, as a flag or as a key's last part: by our key, or by the words
# to write. A key's own last part (--num-classes, Global.seed) needs no line.
_FOREIGN = {
    "-cfg={}": "arch arch.name c config m model",
    "BEST_METRIC": "eval_metric",
    "CUDA_VISIBLE_DEVICES={} before the command": "gpus",
    "CUDA_VISIBLE_DEVICES= before the command: its GPUs, or none for a CPU": "device",
    "DATA.BATCH_SIZE": "b",
    "DATA.BATCH_SIZE_EVAL": "dataloader.eval.sampler.batch_size validation_batch_size vb",
    "DATA.DATA_PATH": "data_dir image_root",
    "DATA.IMAGENET_MEAN": "mean",
    "DATA.IMAGENET_STD": "std",
    "DATA.IMAGE_CHANNELS": "in_chans",
    "DATA.IMAGE_SIZE": "img_size input_size",
    "DATA.NUM_WORKERS": "j workers",
    "KEEP_LAST": "checkpoint_hist",
    "MODEL.DROPOUT": "drop",
    "MODEL.DROPPATH": "drop_path drop_path_rate",
    "MODEL.NUM_CLASSES": "class_num nb_classes",
    "MODEL.PRETRAINED": "finetune initial_checkpoint pretrained_model",
    "MODEL.RECOMPUTE True": "grad_checkpointing",
    "MODEL.RESUME": "checkpoints",
    "NGPUS": "nproc_per_node",
    "OUTPUT": "output_dir",
    "REPORT_FREQ": "log_interval print_batch_step print_freq",
    "SAVE_FREQ": "save_interval",
    "TO_STATIC True": "torchcompile",
    "TRAIN.ACCUM_ITER": "grad_accum_steps",
    "TRAIN.AUTO_AUGMENT": "aa",
    "TRAIN.BASE_LR": "learning_rate lr lr_base",
    "TRAIN.CROP_RATIO": "ratio",
    "TRAIN.CROP_SCALE": "scale",
    "TRAIN.CUTMIX_ALPHA": "cutmix",
    "TRAIN.END_LR": "min_lr",
    "TRAIN.GRAD_CLIP": "clip_grad",
    "TRAIN.GRAD_CLIP_MODE": "clip_mode",
    "TRAIN.INTERPOLATION": "train_interpolation",
    "TRAIN.LAST_EPOCH": "start_epoch",
    "TRAIN.LINEAR_SCALED_LR": "lr_base_size",
    "TRAIN.LOSS bce": "bce_loss",
    "TRAIN.LR_SCALING": "lr_base_scale",
    "TRAIN.LR_SCHEDULER.MILESTONES": "decay_milestones",
    "TRAIN.LR_SCHEDULER.NAME": "optimizer.lr.name sched",
    "TRAIN.MIXUP_ALPHA": "mixup",
    "TRAIN.NUM_EPOCHS": "epochs max_epochs",
    "TRAIN.OPTIMIZER.BETAS": "opt_betas",
    "TRAIN.OPTIMIZER.EPS": "opt_eps",
    "TRAIN.OPTIMIZER.NAME": "opt",
    "TRAIN.RANDOM_ERASE_COUNT": "recount",
    "TRAIN.RANDOM_ERASE_MODE": "remode",
    "TRAIN.RANDOM_ERASE_PROB": "reprob",
    "TRAIN.REPEATED_AUGMENT": "aug_repeats",
    "TRAIN.TEACHER_MODEL regnety_160 TRAIN.TEACHER_PATH {}": "teacher_model teacher_model_path",
    "TRAIN.WARMUP_EPOCHS": "warmup_epoch",
    "TRAIN.WARMUP_START_LR": "warmup_lr",
    "TRAIN.WEIGHT_DECAY": "coeff wd",
    "VALIDATE_FREQ": "eval_interval",
    "-cfg=vit_base_patch16_224_finetune -pretrained=FILE: MAE's weights are fine-tuned here, not made": "mae_pretrain",
    "AMP": "use_amp",
}
_MEANT = {name: target for target, names in _FOREIGN.items() for name in names.split()}
# From the names of models in timm, PaddleViT and PaddleClas to those here.
_MODEL_NAMES = (
    (r"^swintransformer_", "swin_"),
    (r"^pvt_v2_", "pvtv2_"),
    (r"_li$", "_linear"),
    (r"_ks\d+_p\d+$", ""),
    (r"^mixer_([bl])[a-z]+_patch(\d+)", r"mixer_\1\2"),
)


class _Parser(argparse.ArgumentParser):
    """Of a wrong command line it makes one line, as every other error is."""

    def error(self, message: str) -> None:
        found = re.match(r"argument (-\w+)\S*: expected .*one argument", message)
        raise InputError(f"command line: {found[1] + ' has no value; -h says what it takes' if found else message}")


def parse_command_line(
    program: str, argv: Sequence[str] | None, flags: Mapping[str, tuple[str, type, str]], defaults: Mapping[str, Any]
) -> argparse.Namespace:
    """Returns what a command line says: ``cfg``, each flag, or None, and ``o``, the list of words after -o.

    A flag may have one dash or two, and dashes for underscores within.

    Args:
        argv: its words; None: the process's.
        flags: (key, type, help) by name.
        defaults: by dotted key.

    Raises:
        InputError: it has flags or words that aren't known; the line says what to write instead.
    """
    parser = _Parser(
        program,
        allow_abbrev=False,
        description="Train or evaluate a Vision Transformer.",
        epilog="Flags may be written with one dash or two. config.py describes every KEY: the epochs are -o"
        " TRAIN.NUM_EPOCHS 100, the learning rate TRAIN.BASE_LR, the classes MODEL.NUM_CLASSES. A flag of timm's,"
        " PaddleClas's or PaddleViT's that isn't here is answered by what to write instead.",
    )
    parser.add_argument("-cfg", "--cfg", metavar="FILE", help="YAML file, or a model's name under configs/")
    default = "the same, where neither -cfg is given nor a run (-resume, -pretrained): what scripts begin with"
    parser.add_argument("-default_cfg", "--default_cfg", metavar="FILE", help=default)
    for flag, (_, kind, text) in flags.items():
        takes = (
            {"nargs": "?", "const": "True", "metavar": "BOOL"} if kind is bool else {"metavar": kind.__name__.upper()}
        )
        parser.add_argument(f"-{flag}", f"--{flag}", help=text, **takes)
    parser.add_argument(
        "-o", "--o", nargs="+", action="extend", default=[], metavar="KEY VALUE", help="any keys; KEY=VALUE as well"
    )
    words = _known_words(
        sys.argv[1:] if argv is None else argv, {key: flag for flag, (key, _, _) in flags.items()}, defaults
    )
    parsed, rest = parser.parse_known_args(words)
    if rest:
        example = "; write -o before KEY=VALUE" if "=" in rest[0] else ""
        raise InputError(f"command line: no flag takes the word {rest[0]!r}{example}")
    return parsed


def _known_words(words: Sequence[str], flag_of: Mapping[str, str], defaults: Mapping[str, Any]) -> list[str]:
    """The words with each flag as the parser spells it; the line for those that aren't known has all of them."""
    known, taken, problems = {"cfg", "default_cfg", "o", "h", "help", *flag_of.values()}, [], []
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.endswith(("\r", "\\")) or (word and not word.strip()):
            raise InputError(
                f"command line: found the word {word!r}; in a script nothing may follow the backslash at a line's end,"
                " the last line has none, and lines don't end as on Windows"
            )
        if not word or (_is_flag(word) and equals and not value):
            before = name or (words[position - 1] if position else "the command")
            raise InputError(
                f"command line: {before} is followed by an empty value; is a variable of the script unset?"
            )
        spelled = name.lstrip("-").replace("-", "_")
        if not _is_flag(word):
            taken.append(word)
        elif spelled in known:
            taken.append(f"-{spelled}{equals}{value}")
        else:
            values = [value] if equals else list(itertools.takewhile(lambda w: not _is_flag(w), words[position + 1 :]))
            instead = _instead(spelled, values, flag_of, defaults) or nearest(
                f"-{spelled}", [f"-{own}" for own in known]
            )
            problems.append(f"unknown flag {name}{instead or '; -h lists the flags, config.py the keys of -o'}")
    if problems:
        raise InputError(f"command line: {'; '.join(problems)}")
    return taken


def _is_flag(word: str) -> bool:
    return bool(re.match(r"--?[^\W\d][^\s=]*(=|$)", word))


def _instead(name: str, values: list[str], flag_of: Mapping[str, str], defaults: Mapping[str, Any]) -> str:
    """What to write instead of a flag of somebody else's: "; write -o TRAIN.NUM_EPOCHS 10", or nothing."""
    meant = _translated(name, defaults)
    if meant is None:
        return ""
    default = defaults.get(meant)
    if isinstance(default, list) and len(values) > 1:
        value = f"[{','.join(values)}]"
    else:  # --input-size 3 224 224
        sizes = list(itertools.takewhile(str.isdecimal, values))
        value = sizes[-1] if sizes else values[0] if values else "True" if isinstance(default, bool) else "VALUE"
    value = shlex.quote(value) if values else value
    if meant in flag_of:
        return f"; write -{flag_of[meant]}" + ("" if isinstance(default, bool) and value == "True" else f"={value}")
    if meant in defaults:
        return f"; write -o {meant} {value}"
    return f"; write {'-o ' if meant.split()[0] in defaults else ''}{meant.format(value)}"


def _translated(name: str, known: Iterable[str]) -> str | None:
    """The key, or the entry of ``_FOREIGN``, that somebody else's flag or dotted key stands for."""
    lower = name.lower().replace("-", "_")
    last = lower.rpartition(".")[2]
    if entry := _MEANT.get(lower) or _MEANT.get(last):
        return entry
    same = [key for key in known if key.lower().rpartition(".")[2] == last]
    return max(same, key=lambda key: difflib.SequenceMatcher(None, key.lower(), lower).ratio(), default=None)


def nearest_key(name: str, known: Iterable[str]) -> str:
    """Returns what to write instead of the dotted key ``name``: "; did you mean TRAIN.NUM_EPOCHS?", or nothing."""
    meant = _translated(name, known)
    if meant is None:
        return nearest(name, known)
    key = meant.split()[0]
    return f"; did you mean {key}?" if key in known else f"; write {meant.format('VALUE')}"


def nearest_model(name: str, known: Iterable[str]) -> str:
    """Returns the shipped model that a name of timm's, PaddleViT's or PaddleClas's means, or the nearest, or nothing.

    Args:
        name: it may be a file's; after a dot timm has the name of weights (``vit_base_patch16_224.augreg_in1k``).
        known: the names of the shipped models.
    """
    name = name.rpartition("/")[2]  # of hf-hub:timm/NAME
    given, _, tag = name.removesuffix(".yaml").removesuffix(".yml").partition(".")
    own = given.lower()
    for theirs, ours in _MODEL_NAMES:
        own = re.sub(theirs, ours, own)
    if own not in known:
        longer = [model for model in sorted(known) if model.startswith(own)]
        return f"; did you mean {longer[0]}?" if longer and own else nearest(own, known)
    return (
        f"; the model is {own}, its weights are -pretrained=hf-hub:timm/{given}.{tag}" if tag else nearest(own, known)
    )


def pairs(words: Sequence[Any], known: Iterable[str]) -> list[tuple[str, Any]]:
    """Returns (key, value) of each option in the words after -o, written KEY VALUE or KEY=VALUE.

    Args:
        words: strings; the value after a KEY may be of any type.
        known: the keys that there are: one in a value's place isn't taken for it.

    Raises:
        InputError: a key has no value.
    """
    found, queue = [], iter(words)
    for word in queue:
        key, equals, value = word.partition("=")
        value = value if equals else next(queue, "=")
        if isinstance(value, str) and not equals and value.partition("=")[0] in known:
            raise InputError(f"command line: {key} has no value: the next word is {value!r}; write {key}=VALUE")
        if value == "=" or (equals and not value):
            raise InputError(f"command line: {word!r} has no value; write {key} VALUE or {key}=VALUE")
        found.append((key, value))
    return found


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises:
        InputError: the file can't be read, isn't YAML or isn't a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read ({error})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a mapping of keys, found {type(content).__name__}")
    return content


def coerce(
    key: str, value: Any, kind: type | list[type] | tuple, optional: bool, words: Iterable[str], source: str
) -> Any:
    """Returns ``value`` in the type of ``key``; a whole number serves as a float, a single value as a list of one.

    Args:
        kind: a type, [type] for a list of it, or (type, [type]) for either.
        optional: whether None is a value.
        words: strings that are values whatever ``kind`` is, such as "auto".
        source: where the value was found, named in errors.

    Raises:
        InputError: the value is of another type.
    """
    if isinstance(value, str) and (kind is not str or value.lower() in ("none", "null")):
        value = parsed(value)
    if (value is None and optional) or (isinstance(value, str) and value in words):
        return value
    is_list = isinstance(value, list | tuple)
    if isinstance(kind, tuple):
        kind = kind[1] if is_list else kind[0]
    item = kind[0] if isinstance(kind, list) else kind
    values = list(value) if isinstance(kind, list) and is_list else [value]
    if all(type(v) is item or (item is float and type(v) is int) for v in values):
        values = [item(v) for v in values]
        return values if isinstance(kind, list) else values[0]
    expected = f"a list of {item.__name__}s" if isinstance(kind, list) else item.__name__
    raise InputError(f"{source}: {key} takes {expected}, found {value!r} ({type(value).__name__})")


def parsed(text: str) -> Any:
    """The value that a word means: on the command line, or in YAML, whose version 1.1 takes 1e-6 for a string."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if text.startswith("[") and text.endswith("]"):  # as Hydra writes words: [head.*,norm.*]
            return [parsed(item.strip()) for item in text[1:-1].split(",")]
        return text


def leaves(node: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every leaf of a tree."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def plain(node: CfgNode) -> dict[str, Any]:
    """Returns a configuration as nested dicts, for JSON."""
    return {key: plain(value) if isinstance(value, CfgNode) else value for key, value in node.items()}


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" for the known name that is nearest, in any case, or nothing."""
    spelled = {other.lower(): other for other in known}
    found = difflib.get_close_matches(name.lower(), list(spelled), 1, 0.5)
    return f"; did you mean {spelled[found[0]]}?" if found else ""
