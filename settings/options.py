"""Command lines and configurations: the parser, other toolkits' names of keys, and the tree of
values, which knows where each came from.
"""

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from yacs.config import CfgNode

from errors import InputError

# What timm, PaddleClas, PaddleViT and others call a key, as a flag or as a key's last part: by our
# key, or by the words to write. A key's own last part (--num-classes, Global.seed) needs no line.
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
    "DIST.STRATEGY.fuse_grad_size_in_MB": "last_comm_group_size_mb",
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
    "TRAIN.ACCUM_ITER": "grad_accum_steps gradient_merge k_steps",
    "TRAIN.AUTO_AUGMENT": "aa",
    "TRAIN.BASE_LR": "learning_rate lr lr_base",
    "TRAIN.CROP": "train_crop_mode",
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
    "TRACKERS visualdl": "use_visualdl use_vdl",
    "TRACKERS wandb": "log_wandb use_wandb",
    "TRAIN.WARMUP_EPOCHS": "warmup_epoch",
    "TRAIN.WARMUP_START_LR": "warmup_lr",
    "TRAIN.WEIGHT_DECAY": "coeff wd",
    "VALIDATE_FREQ": "eval_interval",
    "-cfg=vit_base_patch16_224_finetune -pretrained=FILE: MAE's weights are fine-tuned here, not made": "mae_pretrain",
    "AMP": "use_amp",
}
_MEANT = {name: target for target, names in _FOREIGN.items() for name in names.split()}
CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"
# The toolkit's version. An installed copy has this file, too.
[__version__] = re.findall(
    r'^version = "(.+)"',
    (CONFIG_DIR.parent / "pyproject.toml").read_text(encoding="utf-8"),
    re.MULTILINE,
)
# The longest name that is compared with others; the time grows with its square.
_LONGEST_NAME = 200
# From the names of models in timm, PaddleViT and PaddleClas to those here.
_MODEL_NAMES = (
    (r"^swintransformer_", "swin_"),
    (r"^pvt_v2_", "pvtv2_"),
    (r"_li$", "_linear"),
    (r"_ks\d+_p\d+$", ""),
    (r"^mixer_([bl])[a-z]+_patch(\d+)", r"mixer_\1\2"),
    (r"^resnet(\d+)_v([cd])$", r"resnet\1\2"),
    (r"^se_resn", "seresn"),
)


def equivalent_key(name: str, known: Iterable[str]) -> str | None:
    """Returns the key, or the entry of ``_FOREIGN``, that somebody else's flag or dotted key stands
    for, or None.
    """
    lower = name[-_LONGEST_NAME:].lower().replace("-", "_")
    last = lower.rpartition(".")[2]
    if entry := _MEANT.get(lower) or _MEANT.get(last):
        return entry
    same = [key for key in known if key.lower().rpartition(".")[2] == last]
    return max(
        same,
        key=lambda key: difflib.SequenceMatcher(None, key.lower(), lower).ratio(),
        default=None,
    )


def nearest_key(name: str, known: Iterable[str]) -> str:
    """Returns what to write instead of the dotted key ``name``: "; did you mean TRAIN.NUM_EPOCHS?",
    or nothing.
    """
    meant = equivalent_key(name, known)
    if meant is None:
        return nearest(name, known)
    key = meant.split()[0]
    return f"; did you mean {key}?" if key in known else f"; write {meant.format('VALUE')}"


def nearest_model(name: str, known: Iterable[str]) -> str:
    """Returns the shipped model that a name of timm's, PaddleViT's or PaddleClas's means, or the
    nearest, or nothing.

    Args:
        name: it may be a file's; after a dot timm has the name of weights
            (``vit_base_patch16_224.augreg_in1k``).
        known: the names of the shipped models.
    """
    name = name[-_LONGEST_NAME:].rpartition("/")[2]  # of hf-hub:timm/NAME
    given, _, tag = name.removesuffix(".yaml").removesuffix(".yml").partition(".")
    own = given.lower()
    for theirs, ours in _MODEL_NAMES:
        own = re.sub(theirs, ours, own)
    if own not in known:
        longer = [model for model in sorted(known) if model.startswith(own)]
        if longer and own:
            return f"; did you mean {longer[0]}?"
        # Letters before the first number or underscore are a family's: resnet35 isn't regnety_032.
        family = re.split(r"[^a-z]", own)[0]
        return nearest(
            own, [model for model in known if re.split(r"[^a-z]", model)[0] == family] or known
        )
    return (
        f"; the model is {own}, its weights are -pretrained=hf-hub:timm/{given}.{tag}"
        if tag
        else nearest(own, known)
    )


def pairs(words: Sequence[Any], known: Iterable[str]) -> list[tuple[str, Any]]:
    """Returns (key, value) of each option in the words after -o, written KEY VALUE or KEY=VALUE.

    Args:
        words: strings; the value after a KEY may be of any type.
        known: the keys that there are: one in a value's place isn't taken for it.

    Raises:
        InputError: a key has no value.
    """
    found = []
    queue = iter(words)
    for word in queue:
        key, equals, value = word.partition("=")
        value = value if equals else next(queue, "=")
        if isinstance(value, str) and not equals and value.partition("=")[0] in known:
            raise InputError(
                f"command line: {key} has no value: the next word is {value!r}; write {key}=VALUE"
            )
        if value == "=" or (equals and not value):
            raise InputError(
                f"command line: {word!r} has no value; write {key} VALUE or {key}=VALUE"
            )
        found.append((key, value))
    return found


def leaves(node: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """Returns (dotted key, value) of every leaf of a tree."""
    found = []
    for key, value in node.items():
        if isinstance(value, dict):
            found += leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Returns (height, width) of a size given as one number or as two."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def size_text(size: int | Sequence[int]) -> str:
    """Returns a size as a person reads it: "224", or "224 x 160" (height x width)."""
    height, width = pair(size)
    return str(height) if height == width else f"{height} x {width}"


def plain(node: CfgNode) -> dict[str, Any]:
    """Returns a configuration as nested dicts, for JSON."""
    return {
        key: plain(value) if isinstance(value, CfgNode) else value for key, value in node.items()
    }


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" for the known name that is nearest, in any case, or nothing."""
    spelled = {other.lower(): other for other in known}
    found = difflib.get_close_matches(name[:_LONGEST_NAME].lower(), list(spelled), 1, 0.5)
    return f"; did you mean {spelled[found[0]]}?" if found else ""


# ------------------------------------------------- the command line

# The most problems that the error about a command line lists.
_MOST_PROBLEMS = 8


class Parser(argparse.ArgumentParser):
    """The parser of a program's command line.

    A flag may begin with one dash or two, and has dashes or underscores within. It can't be
    shortened, unlike in argparse: ``-pre`` isn't ``-pretrained``, and ``-output=x`` isn't ``-o``
    with a value. Each program has ``-h`` and ``--version``. A wrong command line raises InputError
    instead of printing the usage.

    Args:
        description: printed by -h above the flags: a program's docstring.
        passes_on: leave unknown flags to another parser: ``parse_known_args`` returns them.
        others: names of flags that another parser of this program takes. The error for an unknown
            flag may suggest one.
        settings: further arguments of ``argparse.ArgumentParser``.
    """

    def __init__(
        self,
        description: str | None = None,
        *,
        passes_on: bool = False,
        others: Iterable[str] = (),
        **settings: Any,
    ) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(
            description=description,
            formatter_class=layout,
            allow_abbrev=False,
            add_help=False,
            **settings,
        )
        self.passes_on = passes_on
        self.others = others
        self.add_argument("-h", "--help", action="help", help="print this, and end")
        version = f"paddle-vit-toolkit {__version__}"
        self.add_argument(
            "--version",
            action="version",
            version=version,
            help="print the toolkit's version, and end",
        )

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Returns (what the command line says, the words that no flag takes), as argparse does.

        Raises:
            InputError: it isn't a command line of this program.
        """
        return super().parse_known_args(
            self._spelled(sys.argv[1:] if args is None else args), namespace
        )

    def error(self, message: str) -> NoReturn:
        """Raises InputError with argparse's message, in which a flag has one spelling instead of
        -top/--top.
        """
        message = re.sub(r"(-[\w-]+)/-[\w/-]+", r"\1", message)
        message = message.removeprefix("argument ").replace(
            "the following arguments are required:", "missing:"
        )
        message = re.sub(r"^(-\w+): expected .*one argument$", r"\1 has no value", message)
        raise InputError(f"command line: {message}; -h says what it takes")

    def instead(self, name: str, values: list[str]) -> str:
        """Returns what to write instead of an unknown flag, such as "; did you mean -top?".

        Args:
            name: the flag without dashes in front, with underscores within.
            values: the words that follow it.
        """
        known = self._flags()
        if name.startswith("no_"):
            positive = name.removeprefix("no_")
            switch = self._option_string_actions.get(known.get(positive, ""))
            if switch and switch.nargs == "?":
                return f"; write -{positive}=False"
            if switch and switch.nargs == 0:
                return f"; leave out -{positive}"
        flags = [f"-{flag}" for flag in (*known, *self.others)]
        longer = [flag for flag in flags if flag.startswith(f"-{name}")]
        return f"; did you mean {' or '.join(longer)}?" if longer else nearest(f"-{name}", flags)

    def _flags(self) -> dict[str, str]:
        """Returns argparse's spelling of each flag, by its name without leading dashes."""
        return {plain_flag(option): option for option in self._option_string_actions}

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """Returns the words, with each flag in argparse's spelling."""
        known = self._flags()
        taken: list[str] = []
        problems: list[str] = []
        for position, word in enumerate(words):
            if word == "--" or (self._subparsers and not is_flag(word)):
                taken += words[position:]
                break
            name, equals, value = word.partition("=")
            if not is_flag(word):
                taken.append(word)
            elif option := known.get(plain_flag(name)):
                taken.append(f"{option}{equals}{value}")
            elif self.passes_on:
                taken.append(f"--{plain_flag(name)}{equals}{value}")
            else:
                values = list(
                    itertools.takewhile(lambda word: not is_flag(word), words[position + 1 :])
                )
                advice = self.instead(plain_flag(name), [value] if equals else values)
                problems.append(f"unknown flag {name}{advice or '; -h lists the flags'}")
        if problems:
            raise InputError(f"command line: {'; '.join(problems[:_MOST_PROBLEMS])}")
        return taken


def is_flag(word: str) -> bool:
    """Returns whether a word of a command line looks like a flag; a negative number doesn't."""
    return bool(re.match(r"--?[^\W\d][^\s=]*(=|$)", word))


def plain_flag(word: str) -> str:
    """Returns a flag without dashes in front, and with underscores for those within."""
    return word.lstrip("-").replace("-", "_")


# ------------------------------------------------- where values come from


class Option(NamedTuple):
    """A key's value as the command line gives it."""

    key: str
    value: Any
    by: str = ""  # a flag, or -o


# The level of a value that nobody set, which a resolved configuration has because it has every key.
WRITTEN_OUT = -1
# sources that are no files
COMMAND_LINE = "command line"
WITH_VALUES = "with_values"
# What ``Given.first`` is for a key that -o sets, and how it begins for a key that a flag sets.
# Either names the key.
NAMED = "-o"
FLAG = "flag -"


class Given(NamedTuple):
    """A value that a key was given, and where it came from. Of two levels, the higher one was read
    later.
    """

    level: int
    source: str  # named in errors: a file, or the command line
    first: str = ""  # the flag; or from whom the file had it: a run's file had it from somebody
    value: Any = None

    def text(self) -> str:
        """Returns where the value came from, in words."""
        if self.source in (COMMAND_LINE, WITH_VALUES) or not self.first:
            return self.origin()
        return f"{_short_path(self.source)}, which had it from {self.first}"

    def origin(self) -> str:
        """Returns where it came from first, as a run's file keeps it."""
        return self.first or _short_path(self.source)


def _short_path(source: str) -> str:
    path = Path(source)
    shown = str(path.relative_to(CONFIG_DIR.parent)) if path.is_relative_to(CONFIG_DIR) else source
    return shown if shown.isprintable() else ascii(shown)


_PLAIN = {int, float, str, bool, type(None)}


class Configuration(CfgNode):
    """The tree of all keys, which knows where its values came from; so do its copies and pickles.

    Attributes:
        origins: by dotted key, all that the key was given, the value that holds last; without a key
            that nobody gave.
        notes: lines that the run is to tell once, when it starts, about how its configuration was
            read.
        families: of PaddleViT's, as whose files its files were read.
    """

    def __init__(self) -> None:
        super().__init__()
        # Beside the tree's keys, as yacs keeps its own marks.
        self.__dict__.update(origins={}, notes=[], families=[])

    def clone(self) -> "Configuration":
        """Returns a copy that shares no list and no section with this one; deepcopy takes four
        times as long.
        """
        return _copied(self)

    def put(self, key: str, value: Any, where: Given) -> None:
        """Sets a dotted key, whose value is of its type already."""
        section, _, name = key.rpartition(".")
        node = self
        for part in filter(None, section.split(".")):
            node = node[part]
        node[name] = value
        self.origins.setdefault(key, []).append(where._replace(value=value))


def _copied(value: Any) -> Any:
    if isinstance(value, Given):
        return (
            value._replace(value=_copied(value.value)) if isinstance(value.value, list) else value
        )
    if isinstance(value, CfgNode):
        node = type(value).__new__(type(value))
        node.__dict__.update(_copied(value.__dict__))
        dict.update(node, _copied(dict(value)))
        return node
    # Most values are plain, and a call for each of them would take half of the time.
    if isinstance(value, dict):
        return {key: own if type(own) in _PLAIN else _copied(own) for key, own in value.items()}
    if isinstance(value, (list, set)):
        return type(value)([own if type(own) in _PLAIN else _copied(own) for own in value])
    return value


def value_sources(config: Configuration) -> dict[str, Given]:
    """Returns where the value of each dotted key came from that isn't at its default untouched."""
    return {key: found[-1] for key, found in config.origins.items()}


def is_given(config: Configuration, key: str) -> bool:
    """Returns whether a file, a flag or an option set the dotted key, be it to the default."""
    return key in config.origins


def explicit_sources(config: Configuration) -> dict[str, Given]:
    """Returns ``value_sources`` without what is only written out: what a file, a flag or an option
    set.
    """
    return {key: where for key, where in value_sources(config).items() if where.level > WRITTEN_OUT}


def is_users(config: Configuration, key: str) -> bool:
    """Returns whether the user set the dotted key: the command line, or a YAML file that isn't one
    of configs/.
    """
    where = value_sources(config).get(key)
    return (
        where is not None
        and where.level > WRITTEN_OUT
        and not Path(where.source).is_relative_to(CONFIG_DIR)
    )


def option_keys(config: Configuration) -> set[str]:
    """Returns the keys that a flag or -o names on the command line: what a run that goes on may
    change.
    """
    return {
        key
        for key, found in config.origins.items()
        if any(
            where.source == COMMAND_LINE and where.first.startswith((NAMED, FLAG))
            for where in found
        )
    }


def add_note(config: Configuration, note: str) -> None:
    """Adds a line on how the configuration was read, which the run logs once when it starts."""
    if note not in config.notes:
        config.notes.append(note)


def notes(config: Configuration) -> list[str]:
    """Returns the lines of ``add_note``."""
    return config.notes
