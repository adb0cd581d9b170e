"""Configurations that a stranger wrote: YAML files, chains of them, a run's file, words of the
command line.
"""

import contextlib
import io
import os

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import hostile_files

from config import CONFIG_DIR, get_config, resolved_yaml
from errors import InputError
from settings.configuration import leaves
from settings.values import parse_value
from training.command_line import config_from_arguments

KEYS = sorted(dict(leaves(get_config())))
PADDLEVITS = [
    "MODEL.TRANS.EMBED_DIM",
    "MODEL.DROP_PATH",
    "TRAIN.AUTO_AUGMENT",
    "TRAIN.LR_SCHEDULER.MILESTONES",
    "AMP",
]
NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([10**30, 2**63, -1, 0, 1e308, 0.5, float("nan")])
)
SCALARS = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=12), st.dates(), st.binary(max_size=4)
)
KEY = st.one_of(
    st.sampled_from(KEYS + PADDLEVITS), st.text(max_size=8), SCALARS.filter(lambda key: key == key)
)
VALUES = st.recursive(
    SCALARS,
    lambda of: st.lists(of, max_size=4) | st.dictionaries(KEY, of, max_size=3),
    max_leaves=8,
)
FRAGMENTS = [
    "{", "}", "[", "]", ": ", "- ", "\n", "  ", "&a ", "*a", "<<: ", "? ", "!!int ", "!!timestamp ",
    "!!python/name:os.system ",
    "!!binary ", "!!set ", "!!omap ", "!!float ", "!!bool ", "|\n", ">\n", "'",
    '"', "#", "%YAML 1.1\n", "---\n", "...\n", "\t", "\0",
    "\ufeff", "\r\n", "0x", "1:2:3", "1e400", ".nan", "~", "=", "@", "`", "BASE", "WITHOUT", "GIVEN", "MODEL",
    "TYPE", "ViT", "swin",
    "SEED", "TRAIN", "mine.yaml", "other.yaml", "../", "vit_digits", "9" * 50, "a" * 300,
]  # fmt: skip
CASES = {
    "empty": "", "null": "null", "nan": ".nan", "int": "!!int ''", "timestamp": "!!timestamp abc", "bool": "!!bool x",
    "seed": "SEED: !!int ''", "float": "SEED: !!float x", "base": "BASE: 5", "own": "BASE: mine.yaml", "=": "SEED: =",
    "python": "SEED: !!python/object/apply:os.system [true]", "merge": "A: &a {SEED: 1}\n<<: *a", "set": "!!set {SEED}",
    "twice": "SEED: 1\nSEED: 2", "below": "MODEL: {TYPE: a, TYPE: b}", "dotted": "TRAIN.LOSS: bce\nTRAIN: {LOSS: auto}",
    "keys": "{[a]: 1}", "number": "5: 1", "yes": "yes: 1", "cycle": "SEED: &a [*a]", "cycle2": "MODEL: &a {TRANS: *a}",
    "laughs": "\n".join([f"{b}: &{b} [{f'*{a},' * 9}]" if a else "a: &a [x]" for a, b in zip(" abcdefgh",
    "abcdefghi", strict=True)]),
    "brackets": "[" * 20_000, "maps": "{a: " * 20_000, "dashes": "- " * 20_000, "minus": "SEED: " + "-" * 5000 + "1",
    "digits": "SEED: " + "9" * 5000, "sixty": "SEED: 1" + ":1" * 300_000, "long": f"TAG: {'a' * 900_000}",
    "huge": "#" * 3_000_000, "spaces": " " * 900_000 + "SEED: 1", "commas": "SEED: [" + "," * 900_000,
    "ones": "SEED: [" + "1," * 60_000 + "]", "nul": "TAG: \0", "tab": "MODEL:\n\tTYPE: ViT",
    "path": f"BASE: {'a' * 5000}",
    "folder": "BASE: .", "device": "BASE: /dev/zero", "nulbase": 'BASE: "a\\0b"', "date": "TAG: 2020-01-01",
    "surrogate": 'TAG: "\\ud800"', "escape": 'TAG: "\\e[2J"', "types": "MODEL: {TYPE: 5}",
    "type": "MODEL: {TYPE: [ViT]}",
    "given": "SEED: 1\nGIVEN: {SEED: [0, x], NOSUCH: [0, x]}", "without": "BASE: ''\nWITHOUT: {a: &b [b, 1]}",
    "theirs": "MODEL: {TYPE: swin, TRANS: {EMBED_DIM: [1]}}",
    "teacher": "MODEL: {TYPE: deit}\nTRAIN: {DISTILLATION_TYPE: hard}",
    "augment": "MODEL: {TYPE: deit}\nTRAIN: {RAND_AUGMENT: true, RAND_AUGMENT_MAGNITUDE: 1e99}",
}  # fmt: skip


def read(text, tmp_path, name="mine.yaml", kind="configurations"):
    """Reads a file's configuration, held to the rule; returns the line that refuses it, or ""."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    (tmp_path / name).write_bytes(data)
    return hostile_files.attempt(kind, len(data), lambda: get_config(tmp_path / name))


@pytest.mark.parametrize("name", CASES)
def test_a_strange_file_is_one_line(name, tmp_path):
    line = read(CASES[name], tmp_path)
    assert bool(line) == (name not in ("spaces", "teacher", "augment")), name
    assert not line or "mine.yaml" in line or line.startswith("MODEL.TYPE is ")


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(st.tuples(KEY, VALUES), max_size=4), st.booleans())
def test_keys_with_strange_values(tmp_path_factory, pairs, nested):
    content = {}
    for key, value in pairs:
        node = content
        parts = key.split(".") if nested and isinstance(key, str) else [key]
        for part in parts[:-1]:
            node = node.setdefault(part, {}) if isinstance(node.get(part, {}), dict) else {}
        node[parts[-1]] = value
    with contextlib.suppress(yaml.YAMLError, TypeError):
        read(yaml.dump(content, allow_unicode=True), tmp_path_factory.getbasetemp())


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.sampled_from(KEYS), max_size=25).map("".join))
def test_pieces_of_yaml(tmp_path_factory, text):
    read(text, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("which", ["run", "paddlevit", "recipe"])
def test_a_damaged_file(which, tmp_path):
    config = get_config("vit_digits", ["SEED", "3"])
    found = sorted((CONFIG_DIR / "recipes").glob("*.yaml"))[0]
    whole = {
        "run": resolved_yaml(config),
        "paddlevit": "MODEL:\n  TYPE: swin\n  TRANS: {EMBED_DIM: 96, NUM_HEADS: [3, 6, 12, 24]}\nAMP: false\n",
        "recipe": found.read_text(),
    }[which].encode()
    assert read(whole, tmp_path) == "" or which == "recipe"

    @settings(max_examples=settings().max_examples // 4)
    @given(hostile_files.damaged(whole))
    def damage(data):
        read(data, tmp_path, kind=f"configurations: {which}")

    damage()


@settings(max_examples=settings().max_examples // 4)
@given(
    st.lists(
        st.lists(
            st.sampled_from([0, 1, 2, 3, 4, "", "vit_digits", "absent", ".", 5.0]), max_size=4
        ),
        min_size=5,
        max_size=5,
    )
)
@example([[1, 1], [2, 2], [3, 3], [4, 4], []])
def test_chains_of_base(tmp_path_factory, links):
    folder = tmp_path_factory.mktemp("chain")
    for number, bases in enumerate(links):
        names = [f"{base}.yaml" if type(base) is int else base for base in bases]
        (folder / f"{number}.yaml").write_text(yaml.safe_dump({"BASE": names, "SEED": number}))
    hostile_files.attempt("chains of BASE", 1000, lambda: get_config(folder / "0.yaml"))


def test_a_chain_of_diamonds_and_a_long_one_end(tmp_path):
    for number in range(200):
        names = [f"{number + 1}.yaml"] * 2 if number < 199 else [""]
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump({"BASE": names}))
        (tmp_path / f"long{number}.yaml").write_text(f"BASE: long{number + 1}.yaml\n")
    for first in ("0.yaml", "long0.yaml"):
        line = hostile_files.attempt(
            "chains of BASE", 5000, lambda first=first: get_config(tmp_path / first)
        )
        assert "BASE includes more than 100 files" in line


def test_what_is_no_file_is_one_line(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"")
    os.truncate(tmp_path / "huge.yaml", 1 << 30)
    for path in (
        "pipe.yaml",
        "huge.yaml",
        "/dev/zero",
        ".",
        "a" * 5000,
        "a\0b",
        "\udcff",
        "/dev/stdin",
    ):
        assert hostile_files.attempt(
            "configurations", 100, lambda path=path: get_config(tmp_path / path)
        ), path
    (tmp_path / "bom.yaml").write_bytes("\ufeffSEED: 3\r\n".encode())
    assert get_config(tmp_path / "bom.yaml").SEED == 3
    assert "found UTF-16 at position 0; save it as UTF-8" in read(
        "SEED: 3\n".encode("utf-16"), tmp_path
    )


WORDS = st.one_of(
    st.sampled_from([*KEYS, "-o", "-cfg", "-eval", "-ngpus", "--explain", "--lr", "-output", "-resume", "auto",
    "-h-", "=", "KEY="]),
    st.sampled_from(["{[]: 1}", "-" * 5000 + "1", "[" * 20_000, "(" * 20_000 + ")" * 20_000, "1," * 9000, "9" * 5000,
    "1e400"]),
    st.sampled_from(["a" * 100_000, "-" + "a" * 100_000, "-o=" + "b" * 100_000, "a." * 50_000 + "SEED", "\x1b[2J",
    "\udcff"]),
    st.text(max_size=10), NUMBERS.map(str),
)  # fmt: skip


@settings(max_examples=settings().max_examples // 2)
@given(st.lists(WORDS, max_size=8), st.booleans())
@example(["-o", "SEED", "{[]: 1}"], False)
@example([f"-{'b' * 100_000}{number}" for number in range(50)], False)
def test_words_of_the_command_line(words, options):
    def parse():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            config_from_arguments("main_single_gpu.py", ["-o", *words] if options else words)

    hostile_files.attempt("command lines", sum(map(len, words)), parse)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("3", 3), ("+3", 3), ("-3", -3), ("1_000", 1000), ("0x1f", 31), ("1e-6", 1e-6), (".5", 0.5), ("5.", 5.0),
        ("007", "007"),
        ("true", True), ("None", None), ("[1, 2.5]", [1, 2.5]), ("(1,2)", [1, 2]), ("1,2", [1, 2]), ("[1,]", [1]),
        ("[]", []),
        ("[a.[0-5].*,b]", ["a.[0-5].*", "b"]), ("['a,b', c]", ["a,b", "c"]), ("[[1], [2]]", [[1], [2]]), ("'7'", "7"),
        ("(3)", 3), ("a,b", "a,b"), ("nan", "nan"), ("inf", "inf"), ("1e", "1e"), ("--1", "--1"), ("{1: 2}",
        "{1: 2}"), ("", ""),
        ("[" * 9, "[" * 9), ("None,1", "None,1"),
    ],
)  # fmt: skip
def test_a_word_means(word, value):
    assert parse_value(word) == value
    assert type(parse_value(word)) is type(value)


def test_a_value_that_no_configuration_has_is_named():
    for words, line in {
        ("SEED", "9" * 20): f"command line: SEED takes int, found '{'9' * 20}' (str)",
        (
            "SEED",
            "2147483648",
        ): "command line: SEED is 2147483648, expected a whole number of at most 2147483647",
        (
            "TRAIN.BASE_LR",
            "1e400",
        ): "command line: TRAIN.BASE_LR is inf, expected a number of at most 1e+09",
        (
            "TAG",
            "a\0b",
        ): r"command line: TAG is 'a\x00b', expected text without control characters, found '\x00'",
        (
            "TRAIN.CLASS_WEIGHTS",
            "[0,0]",
        ): "TRAIN.CLASS_WEIGHTS is [0.0, 0.0], expected a value of 1e-6 or more",
        (
            "TRAIN.AFFINE",
            "[-1,0,0]",
        ): "TRAIN.AFFINE is [-1.0, 0.0, 0.0], expected degrees of 0 to 360",
        (
            "MODEL.MLP_RATIO",
            "-1",
        ): "command line: MODEL.MLP_RATIO is -1.0, expected 1e-12 to 1000000",
        (
            "NUM_WORKERS",
            "1",
        ): "command line: unknown key NUM_WORKERS; did you mean DATA.NUM_WORKERS?",
        ("DATA.NUM_WORKERS", "1000000000"): "DATA.NUM_WORKERS is 1000000000, expected 0 to 256",
    }.items():
        with pytest.raises(InputError) as caught:
            get_config(None, words)
        if words[1] != "9" * 20:
            assert str(caught.value).startswith(line)
