"""The parser of command lines."""

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from errors import InputError
from settings.configuration import CONFIG_DIR
from settings.suggestions import nearest

# The toolkit's version. An installed copy has this file, too.
[__version__] = re.findall(
    r'^version = "(.+)"',
    (CONFIG_DIR.parent / "pyproject.toml").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def whole_number(least: int) -> Callable[[str], int]:
    """Returns the type of an argument that is a whole number of at least ``least``."""

    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 1 << 20:
            raise argparse.ArgumentTypeError(f"{text!r} isn't a number of at least {least}")
        return int(text)

    return number


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
        self.add_argument("-h", "--help", action="help", help="print this help and exit")
        version = f"paddle-vit-toolkit {__version__}"
        self.add_argument(
            "--version",
            action="version",
            version=version,
            help="print the version of the toolkit and exit",
        )

    def add_keys(self) -> None:
        """Adds the flag -o, which sets keys and may be given several times (``pairs``)."""
        self.add_argument(
            "-o",
            "--o",
            nargs="+",
            action="extend",
            default=[],
            metavar="KEY VALUE",
            help="set any keys; KEY=VALUE works as well",
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
        raise InputError(f"command line: {message}; -h lists the options")

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
