"""Command lines of every program and tool: what argparse would take for something else is refused
in one line.
"""

import importlib
import sys

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from errors import InputError
from settings.parser import Parser, __version__, is_flag, plain_flag
from training.command_line import config_from_arguments

MAIN = "main_multi_gpu"
FILES = [*(ROOT / "tools").glob("*.py"), *(ROOT / "examples").glob("*.py")]
USERS = [file for file in FILES if "Parser(__doc__" in file.read_text()]
# Those that parse below __main__ don't let a test in; they take Parser as the others do.
IMPORTED = sorted(
    f"{file.parent.name}.{file.stem}" for file in USERS if "def main(" in file.read_text()
)
PROGRAMS = [MAIN, *(name for name in IMPORTED if not name.startswith("examples."))]
PASS_ON = {"tools.find_lr", "tools.robustness", "tools.show_batch"}  # to the parser of main_*.py
SUBCOMMANDS = {"tools.benchmark"}
# Words that a stranger may put between flags.
STRANGE = [
    "",
    " ",
    "-",
    "--",
    "---",
    "x",
    "-1",
    "1e-3",
    "a=b",
    "=",
    "-=x",
    "--=",
    "é",
    "-é",
    "-é=1",
    "train",
    "\x1b",
]
HELP = {"h", "help", "version"}


class Parsed(Exception):
    """Takes the place of what a program does once it has understood its command line."""


def read(name, *words):
    """Returns (parser, what argparse made of the words, or None where the program ended with its
    help).

    Raises:
        InputError: the program refuses them.
    """
    seen = []
    original = Parser.parse_known_args

    def parse(parser, args=None, namespace=None):
        seen.append(parser)
        result = original(parser, args, namespace)
        if parser is seen[0]:
            raise Parsed(result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_known_args", parse)
        patch.setattr(sys, "argv", [name, *words])
        try:
            if name == MAIN:
                config_from_arguments(name, words)
            else:
                importlib.import_module(name).main()
        except Parsed as parsed:
            return seen[0], parsed.args[0]
        except SystemExit:  # after -h; a wrong command line is an InputError
            return seen[0], None
    raise AssertionError("the program went on")


def refused(name, *words):
    with pytest.raises(InputError) as caught:
        read(name, *words)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("command line: ")
    return line


def flags_of(name):
    """The flags that a program's own parser has, by their names without dashes in front."""
    parser, _ = read(name, "-h")
    return {plain_flag(option): action for option, action in parser._option_string_actions.items()}


def test_every_tool_is_tried():
    assert {f"tools.{file.stem}" for file in (ROOT / "tools").glob("*.py")} < set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_and_version_are_there(name, capsys):
    for spelling in ("-h", "--h", "-help", "--help"):
        assert read(name, spelling)[1] is None
        assert capsys.readouterr().out.startswith("usage: ")
    for spelling in ("-version", "--version"):
        assert read(name, spelling)[1] is None
        assert capsys.readouterr().out == f"paddle-vit-toolkit {__version__}\n"


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_flag_is_the_beginning_of_another(name, capsys):
    known = flags_of(name)
    for flag in known:
        for length in range(1, len(flag)):
            start = flag[:length]
            if start in known:
                continue
            for word in (f"-{start}", f"--{start}", f"-{start}=1"):
                if name in PASS_ON:
                    own = plain_flag(word.partition("=")[0])
                    _, found = outcome(name, word)
                    assert found is None or any(
                        plain_flag(w.partition("=")[0]) == own for w in found[1]
                    ), word
                else:
                    assert f"unknown flag {word.partition('=')[0]}" in refused(name, word), word
    capsys.readouterr()


def outcome(name, *words):
    """As ``read``, but a refusal is a line: (line, None)."""
    try:
        return "", read(name, *words)[1]
    except InputError as error:
        return str(error), None


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - PASS_ON))
def test_an_unknown_flag_names_the_nearest(name, capsys):
    for flag, action in flags_of(name).items():
        if len(flag) > 3:
            assert f"-{flag}" in refused(name, f"--{flag[:-1]}"), flag
            line = refused(name, f"--no-{flag}".replace("_", "-"))
            wanted = {0: f"leave out -{flag}", "?": f"write -{flag}=False"}.get(
                action.nargs, "unknown flag"
            )
            assert wanted in line, flag
    capsys.readouterr()


def test_a_flag_of_two_parsers_is_named_by_the_second():
    with pytest.raises(
        InputError, match=r"^command line: unknown flag --update; did you mean -updates\?$"
    ):
        config_from_arguments("tools/find_lr.py", ["--update", "3"], {"updates": 400})


SHARES = ("coverage", "false_alarms")


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_flag_means_the_same_in_every_spelling(name, capsys):
    parser, _ = read(name, "-h")
    for action in parser._actions:
        action.required = False
    flags = [
        action for action in parser._actions if action.option_strings and action.dest not in HELP
    ]
    for action in list(parser._positionals._group_actions):
        parser._actions.remove(action)
    for action in flags:
        value = next(iter(action.choices)) if action.choices else "1"
        # The names of probes, separated by commas.
        value = "knn" if action.dest == "probes" else value
        # A share between 0 and 1.
        value = "0.5" if name == "tools.calibrate" and action.dest in SHARES else value
        found = []
        for option in action.option_strings:
            flag = plain_flag(option)
            for spelled in {
                f"-{flag}",
                f"--{flag}",
                f"--{flag.replace('_', '-')}",
                f"-{flag.replace('_', '-')}",
            }:
                lines = (
                    [[spelled]] if action.nargs == 0 else [[spelled, value], [f"{spelled}={value}"]]
                )
                found += [getattr(parser.parse_args(line), action.dest) for line in lines]
        assert all(one == found[0] for one in found), action.dest
        assert found[0] not in (None, [], action.default) or value in str(found[0]), action.dest
    capsys.readouterr()


@given(st.data())
def test_strange_words_are_understood_or_one_line(data):
    name = data.draw(st.sampled_from(PROGRAMS))
    known = sorted(set(flags_of(name)) - HELP)
    flag = st.builds(
        lambda dashes, flag, cut, end: dashes + flag[: len(flag) - cut] + end,
        st.sampled_from(["-", "--", "---", "-no_", "--no-", "−"]),
        st.sampled_from(known or ["none"]),
        st.sampled_from([0, 0, 1, 3]),
        st.sampled_from(["", "", "=", "=1", "=x", "=-1", "==", " ", "5"]),
    )
    words = data.draw(
        st.lists(st.one_of(flag, st.sampled_from(STRANGE), st.text(max_size=6)), max_size=6)
    )
    line, found = outcome(name, *words)
    assert "\n" not in line
    if found is None or name in PASS_ON | SUBCOMMANDS:
        return
    before = words[: words.index("--")] if "--" in words else words
    assert {plain_flag(word.partition("=")[0]) for word in before if is_flag(word)} <= {
        *known,
        *HELP,
    }
