"""What is chosen by name: declared where it is defined. CONTRIBUTING's steps are taken literally,
in a copy.
"""

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import warm
from conftest import ROOT, without
from PIL import Image
from safetensors.numpy import load_file
from support.document_commands import snippets
from support.programs import wait_for
from support.training_runs import assert_close, assert_same_run

from config import _KEYS, default_values, get_config
from datasets import get_dataset
from errors import InputError
from settings.keys import Key, Positive, Share
from settings.registry import (
    KINDS,
    Registry,
    check_keys,
    component_keys,
    datasets,
    losses,
    operations,
    schedules,
    tasks,
)
from settings.tasks import check_tasks, is_read_by

# ------------------------------------------------------------- what is here


@pytest.mark.smoke
@pytest.mark.parametrize("kind", [*KINDS, operations], ids=lambda kind: kind.name)
def test_what_the_sources_say_is_what_is_registered(kind):
    for name, said in kind.components.items():
        component, given = kind.load(name)
        parameters = inspect.signature(component).parameters.values()
        words = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert words.keys() == said.keys.keys()
        own = {word: key.default for word, key in said.keys.items() if key}
        assert own == {
            word: list(default) if isinstance(default, tuple) else default
            for word, default in words.items()
            if default is not inspect.Parameter.empty
        }
        assert said.given == {
            word: value for word, value in given.items() if isinstance(value, str | bool)
        }
        assert component.__module__ == said.module
        assert all(key.text for key in said.keys.values() if key)


def test_the_keys_of_components_are_in_the_configuration():
    defaults = default_values()
    assert {key for kind in KINDS for key in kind.readers()} <= set(defaults)
    assert all(defaults[kind.key] in ((None,) if kind.optional else kind.names()) for kind in KINDS)


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_a_dataset_has_a_row_in_its_page(folder):
    """The files that its declaration names are in the row: names and patterns, in code."""
    page = (ROOT / folder / "guides" / "prepare_data.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for name in datasets.names():
        files = set(re.findall("`[^`]+`", datasets.components[name].given["holds"]))
        own = [row for row in rows if f"`{name}`" in row]
        assert any(files <= set(re.findall("`[^`]+`", row)) for row in own), (name, files)


def test_an_unknown_dataset_never_becomes_another_one():
    config = get_config(None, ["DATA.DATASET", "digits"]).clone()
    config.defrost()
    config.DATA.DATASET = "fashion_mnits"
    with pytest.raises(
        InputError, match=r"'fashion_mnits', expected one of .*; did you mean fashion_mnist\?$"
    ):
        get_dataset(config, "train")


def test_a_loss_that_takes_labels_is_refused_with_mixup_by_its_declaration(monkeypatch):
    options = ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.LOSS"]
    message = r"^TRAIN.LOSS is 'cross_entropy', expected .*auto, .*bce, .* or token_label: mixup"
    with pytest.raises(InputError, match=message):
        get_config(None, [*options, "cross_entropy"])
    monkeypatch.setitem(losses.components["bce"].given, "takes", "labels")
    message = r"^TRAIN.LOSS is 'bce', expected (?!.*bce).*auto, .* or token_label: mixup"
    with pytest.raises(InputError, match=message):
        get_config(None, [*options, "bce"])


# ---------------------------------------------------------- what is declared


def registry(tmp_path, monkeypatch, **files):
    monkeypatch.setattr("settings.registry.ROOT", tmp_path)
    for name, text in files.items():
        (tmp_path / "room").mkdir(exist_ok=True)
        (tmp_path / "room" / f"{name}.py").write_text(text)
    return Registry("losses", "TRAIN.LOSS", "room")


def key(name, kind, optional, limits, default, text=""):
    return Key(f"TRAIN.{name}", kind, optional, (), (), limits, None, default, text, ())


def test_a_declaration_is_read_in_each_of_its_forms(tmp_path, monkeypatch):
    forms = (
        '@losses.register("a", "b", takes="labels", scale=lambda: 1)\n@losses.register("c")\n'
        "def a(of, *, plain, whole: int = 3, share: Share = 1, some: Sequence[Positive] = (1, 2.5),\n"
        "      none: Sequence[int] | None = None, word: str | None = 'x') -> Kind:\n"
        '    """Text.\n\n    Args:\n        whole: a number\n        share: one of\n            two lines\n    """\n'
        '@losses.register("d")\nclass D:\n    def __init__(self, of, *, other: Size = 5): ...\n'
        "@unknown.register('e')\n@losses.register\n@plain\ndef e(): ...\n"
    )
    found = registry(tmp_path, monkeypatch, one=forms, two="raise ImportError\n")
    assert found.names() == ("a", "b", "c", "d")
    assert found.names(returns=("Kind",)) == ("a", "b", "c")
    assert found.components["b"].given == {"takes": "labels"}
    assert found.components["a"].module == "room.one"
    assert found.components["a"].keys == {
        "plain": None,
        "whole": key("WHOLE", int, False, None, 3, "a number"),
        "share": key("SHARE", float, False, Share.__metadata__[0], 1.0, "one of two lines"),
        "some": key("SOME", [float], False, Positive.__metadata__[0], [1.0, 2.5]),
        "none": key("NONE", [int], True, None, None),
        "word": key("WORD", str, True, None, "x"),
    }
    assert found.readers()["TRAIN.OTHER"] == ("d",)
    assert type(found.components["a"].keys["share"].default) is float


def test_names_are_in_one_order_whatever_file_has_them(tmp_path, monkeypatch):
    """A new file changes no message about the others."""
    declared = '@losses.register("{}")\ndef loss(of, *, factor: int = 3): ...\n'
    files = {"one": declared.format("beta"), "two": declared.format("Alpha")}
    found = registry(tmp_path, monkeypatch, **files)
    assert found.names() == found.readers()["TRAIN.FACTOR"] == ("Alpha", "beta")


def test_a_components_key_may_have_a_range_of_its_own(tmp_path, monkeypatch):
    text = (
        '@losses.register("a")\ndef a(of, *, power: Annotated[float, between(0.5, 1)] = 1): ...\n'
    )
    declared = registry(tmp_path, monkeypatch, one=text).components["a"].keys["power"]
    assert declared.problem(0.4) == "0.5 to 1"
    assert declared.problem(0.5) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '@losses.register("a")\ndef a(of, *, b=1): ...\n',
            "two.py, line 2: b has no type, which a key needs",
        ),
        (
            '@losses.register("a")\ndef a(of, *, b: Any = 1): ...\n',
            "two.py, line 2: b is Any; the type of a key is one of bool, int, float, str",
        ),
        (
            '@losses.register("a")\ndef a(of, *, b: int.one = 1): ...\n',
            "two.py, line 2: b is int.one; the type of a key is one of bool, int, float, str",
        ),
        (
            '@losses.register("known")\ndef a(of): ...\n',
            "two.py, line 2: room.one registers known, too",
        ),
    ],
)
def test_what_a_declaration_lacks_is_told(tmp_path, monkeypatch, text, message):
    found = registry(
        tmp_path, monkeypatch, one='@losses.register("known")\ndef known(of): ...\n', two=text
    )
    with pytest.raises(InputError, match=re.escape(message)):
        found.names()


def test_a_key_has_one_default(monkeypatch):
    """A file that is added to a room may have the name of a key that another has."""
    assert component_keys()["TRAIN.LR_SCHEDULER.POWER"].range.text == "1e-12 to 1000000"
    component_keys.cache_clear()
    key = schedules.components["poly"].keys["power"]
    monkeypatch.setitem(schedules.components["linear"].keys, "power", key._replace(default=3.0))
    try:
        with pytest.raises(InputError, match=r"POWER has another default elsewhere$"):
            component_keys()
    finally:
        component_keys.cache_clear()


@pytest.mark.parametrize(
    ("word", "has_default", "found"),
    [
        ("powers", False, "POWERS has a default nowhere"),
        ("decay_rate", True, "DECAY_RATE is config.py's, too"),
    ],
)
def test_a_key_is_config_pys_or_a_components(monkeypatch, word, has_default, found):
    shared = {key: None for key in default_values() if key not in component_keys()}
    key = schedules.components["poly"].keys["power"] if has_default else None
    monkeypatch.setitem(schedules.components["linear"].keys, word, key)
    component_keys.cache_clear()
    try:
        with pytest.raises(
            InputError, match=f"^training.optim.schedule: linear's TRAIN.LR_SCHEDULER.{found}$"
        ):
            check_keys(shared)
    finally:
        component_keys.cache_clear()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"answers": "logits"}, "answers is 'logits', expected softmax, sigmoid, pixels or ''"),
        ({"columns": "", "answers": "sigmoid"}, "answers has no effect without classes; leave it"),
        ({"classes": "0 90"}, "classes has no effect, because columns has labels; leave one out"),
        ({"reads": "TRAIN.LOSS"}, "reads has no effect, because columns has labels"),
        (
            {"columns": "", "reads": "TRAIN.MIXUP_ALFA"},
            "reads has 'TRAIN.MIXUP_ALFA', which isn't a key with the need LABELS; did you mean TRAIN.MIXUP_ALPHA?",
        ),
        ({"views": "local"}, "views is 'local', expected pixels among the columns"),
        ({"views": ""}, "views is '', expected pixels among the columns"),
        ({"loss": "moving"}, "loss is 'moving', expected relative"),
        ({"column": ""}, "a keyword is 'column', expected one of columns, classes, "),
        ({"columns": 3}, "columns is 3, expected a text"),
    ],
)
def test_what_a_task_declares_is_checked(monkeypatch, given, message):
    shared = {
        key: declared for key, declared in _KEYS.shared.items() if not key.startswith("METHOD")
    }
    check_tasks(shared)
    new = tasks.components["mae"]._replace(module="training.new", given=given)
    monkeypatch.setitem(tasks.components, "new", new)
    with pytest.raises(InputError) as caught:
        check_tasks(shared)
    assert str(caught.value).startswith(f"training.new: TASK new: {message}")


def test_what_a_task_may_declare(monkeypatch):
    given = {"columns": "", "classes": "0 90", "answers": "sigmoid"}
    given["reads"] = "TRAIN.MIXUP_* TRAIN.FOCAL_GAMMA"
    new = tasks.components["mae"]._replace(given=given)
    monkeypatch.setitem(tasks.components, "new", new)
    check_tasks(_KEYS.shared)
    assert is_read_by("new", "TRAIN.MIXUP_PROB")
    assert not is_read_by("new", "TRAIN.SMOOTHING")


# ------------------------------------------------- CONTRIBUTING's steps, taken

SHOWN = {
    block.partition("\n")[0].removeprefix("# "): block
    for block in snippets("docs/CONTRIBUTING.md", "python")
    if re.match(r"# \S+\.py\n", block)
}
SHOWN_FILES = {
    block.partition("\n")[0].removeprefix("# "): block
    for block in snippets("docs/CONTRIBUTING.md", "yaml")
}
NETWORKS = {
    page: [block for block in snippets(page, "python") if block.startswith("# models/plainnet.py")]
    for page in ("docs/models/index.md", "docs/zh/models/index.md")
}
SHOWN["models/plainnet.py"] = NETWORKS["docs/models/index.md"][0]
CHOSEN = [
    "TRAIN.OPTIMIZER.NAME", "SignSGD", "TRAIN.OPTIMIZER.SIGN_SHARE", "0.5", "TRAIN.LR_SCHEDULER.NAME", "cubic",
    "TRAIN.LR_SCHEDULER.CUBIC_FLOOR", "0.3", "TRAIN.LOSS", "poly", "TRAIN.POLY_EPSILON", "1",
    "TRAIN.AUTO_AUGMENT", "rand-n1-p1-tFog", "DATA.FLOWERS_EVERY", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the toolkit with the files that CONTRIBUTING shows, and pictures for the dataset
    among them.
    """
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(
        ROOT,
        folder / "toolkit",
        ignore=shutil.ignore_patterns(".*", "output", "log*", "docs", "tests", "__pycache__"),
    )
    for name, text in (SHOWN | SHOWN_FILES).items():
        assert not (folder / "toolkit" / name).exists()
        (folder / "toolkit" / name).write_text(text)
    rng = np.random.default_rng(0)
    for mode, count in (("train", 16), ("val", 8)):
        (folder / "data" / mode).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(pixels).save(
                folder / "data" / mode / f"{'rose' if index % 4 < 2 else 'tulip'}-{index}.png"
            )
    return folder


def test_the_files_that_are_shown_pass_the_linter(copy):
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", *SHOWN]
    done = subprocess.run(command, cwd=copy / "toolkit", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def run(copy: Path, *words: str):
    command = [sys.executable if words[0] == "-c" else warm.python(), *words]
    return subprocess.run(
        command, cwd=copy / "toolkit", capture_output=True, text=True, timeout=300
    )


@pytest.mark.smoke
def test_one_of_each_is_added_and_trained_with(copy, tiny):
    assert sorted(SHOWN) == [
        "loading/flowers.py", "loading/transforms/fog.py", "models/plainnet.py", "tools/count_images.py", "training/csv_tracker.py",
        "training/optim/cubic.py", "training/optim/sign.py", "training/poly.py", "training/rotation.py",
    ]  # fmt: skip
    options = [
        *tiny,
        "DATA.DATASET",
        "flowers",
        "DATA.DATA_PATH",
        str(copy / "data"),
        "MODEL.NUM_CLASSES",
        "auto",
    ]
    options += [
        "DATA.BATCH_SIZE",
        "4",
        "TRAIN.NUM_EPOCHS",
        "2",
        "REPORT_FREQ",
        "1",
        "TRAIN.BASE_LR",
        "0.1",
        "TRACKERS",
        "csv",
        *CHOSEN,
    ]
    done = run(copy, "main_single_gpu.py", f"-output={copy / 'run'}", "-o", *options)
    assert (done.returncode, "SignSGD" in done.stdout) == (0, True), done.stderr
    # of 8 every second one
    assert json.loads((copy / "run/result.json").read_text())["num_samples"] == 4
    lines = [json.loads(line) for line in (copy / "run/metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if line["split"] == "train"]
    expected = [0.1 * max(0.3, (1 - update / 4) ** 3) for update in range(4)]
    assert rates == pytest.approx(expected, rel=1e-9)
    tracked = (copy / "run/csv/losses.csv").read_text().splitlines()
    assert [row.rpartition(",")[0] for row in tracked] == [
        f"{line['split']},{line['step']}" for line in lines
    ]
    # The run is evaluated by its own configuration, which has the new keys.
    done = run(
        copy,
        "main_single_gpu.py",
        "-eval",
        f"-pretrained={copy / 'run/checkpoints/last'}",
        f"-output={copy / 'eval'}",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((copy / "eval/result.json").read_text())["num_samples"] == 4
    done = run(
        copy,
        "tools/make_shards.py",
        "-dataset=flowers",
        f"-data_path={copy / 'data'}",
        f"-output={copy / 'shards'}",
    )
    assert "16 train images and 8 val images" in done.stdout, done.stderr
    counted = run(copy, "tools/count_images.py", "-dataset=flowers", f"-data_path={copy / 'data'}")
    assert (counted.stdout, counted.stderr) == ("0 8\n1 8\n", "")


def test_the_configurations_that_are_shown_are_found_by_their_names(copy):
    assert len(SHOWN_FILES) == 2
    for name in SHOWN_FILES:
        code = f"from config import get_config; c = get_config('{Path(name).stem}'); print(c.MODEL.EMBED_DIM)"
        done = run(copy, "-c", code)
        assert done.stdout == ("256\n" if "mini" in name else "384\n"), done.stderr


def test_the_network_of_the_page_of_models_is_trained(copy):
    file = copy / "plainnet_tiny.yaml"
    (text,) = (s for s in snippets("docs/models/index.md", "yaml") if "plainnet" in s)
    file.write_text(text)
    options = ["TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0"]
    data = ["-dataset=flowers", f"-data_path={copy / 'data'}", "-batch_size=4", "-image_size=16"]
    output = copy / "network"
    done = run(
        copy, "main_single_gpu.py", f"-cfg={file}", f"-output={output}", *data, "-o", *options
    )
    assert done.returncode == 0, done.stderr
    # Convolutions of 4 x 4 pixels, from 3 to 16 to 32 channels, and two classes.
    parameters = 16 * (3 * 16 + 1) + 32 * (16 * 16 + 1) + 2 * (32 + 1)
    assert f"plainnet_tiny: {parameters:,} parameters" in done.stdout
    assert json.loads((output / "result.json").read_text())["num_samples"] == 8
    code = """
import paddle
from config import get_config
from models import build_model
model = build_model(get_config({file!r}, ["MODEL.NUM_CLASSES", "2"]))
logits = model(paddle.zeros([2, 3, 32, 64]))
_, outputs = model.forward_intermediates(paddle.zeros([2, 3, 32, 64]))
print([list(each.shape) for each in (logits, *outputs)])
"""
    done = run(copy, "-c", code.format(file=str(file)))
    assert done.stdout == "[[2, 2], [2, 16, 8, 16], [2, 32, 2, 4]]\n", done.stderr


def test_the_chinese_network_differs_by_its_docstring_alone():
    def without_docstring(code: str) -> str:
        return re.sub(r'"""(.*?)"""', "", code, flags=re.S)

    (english,), (chinese,) = NETWORKS.values()
    assert without_docstring(chinese) == without_docstring(english)


ROTATION = [
    "TASK", "rotation", "METHOD.TURNS", "3", "TRAIN.NUM_EPOCHS", "4", "SAVE_STEPS", "7", "REPORT", "False",
    "TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.BASE_LR", "0.1",
]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_the_task_that_is_shown_trains_and_goes_on_after_it_was_killed(copy, tiny, ranks):
    # A task without labels doesn't read the number of classes.
    options = without(tiny, "MODEL.NUM_CLASSES", "TRAIN.NUM_EPOCHS") + ROTATION
    batch = ["DATA.BATCH_SIZE", str(64 // ranks)]

    def command(name: str, *flags: str) -> list[str]:
        output = f"-output={copy / f'{name}_{ranks}'}"
        return ["main_multi_gpu.py", f"-ngpus={ranks}", output, *flags, "-o", *options, *batch]

    done = run(copy, *command("whole"))
    assert done.returncode == 0, done.stderr
    killed = subprocess.Popen(
        [sys.executable, *command("killed")], cwd=copy / "toolkit", start_new_session=True
    )
    folder = copy / f"killed_{ranks}"
    assert wait_for(lambda: any(folder.glob("checkpoints/epoch_*")), killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (folder / "result.json").exists()
    done = run(copy, *command("killed", "-resume=auto"))
    assert done.returncode == 0, done.stderr
    assert_same_run(copy / f"whole_{ranks}", folder)
    result = json.loads((folder / "result.json").read_text())
    assert (result["num_samples"], result["config"]["MODEL"]["NUM_CLASSES"]) == (364, 0)


def test_two_processes_train_the_task_that_is_shown_as_one_does(copy):
    one, two = (
        load_file(copy / f"whole_{ranks}" / "checkpoints" / "last" / "model.safetensors")
        for ranks in (1, 2)
    )
    assert any(name.startswith("encoder.") for name in one)
    assert_close(one, two, atol=1e-5)


REFUSED = [
    (["TASK", "rotatoin"], r"TASK is 'rotatoin', expected one of .*rotation.*; did you mean rotation\?"),
    (["TASK", "rotation", "TRAIN.SMOOTHING", "0.3"], r"SMOOTHING has no effect without TASK classification or fixmatch or multilabel"),
    (["TASK", "rotation", "TRAIN.LOSS", "bce"], r"TRAIN.LOSS has no effect without TASK classification or fixmatch or multilabel"),
    (["TASK", "rotation", "MODEL.NUM_CLASSES", "4"], r"NUM_CLASSES has no effect without TASK classification or fixmatch or multilabel"),
    (["METHOD.TURNS", "3"], r"METHOD.TURNS has no effect without TASK rotation"),
    (["TASK", "rotation", "METHOD.TURNS", "5"], r"METHOD.TURNS is 5, expected 2 to 4"),
    (["DATA.DATASET", "flower"], r"DATA.DATASET is 'flower', expected one of .*flowers, .*; did you mean flowers\?"),
    (["TRAIN.OPTIMIZER.NAME", "SignSDG"], r"NAME is 'SignSDG', expected one of .*SignSGD.*; did you mean SignSGD\?"),
    (["TRAIN.LR_SCHEDULER.NAME", "cubik"], r"NAME is 'cubik', expected one of .*cubic, .*; did you mean cubic\?"),
    (["TRAIN.LOSS", "polly"], r"TRAIN.LOSS is 'polly', expected one of .*poly, .*; did you mean poly\?"),
    (["TRAIN.POLY_EPSILN", "1"], r"command line: unknown key TRAIN.POLY_EPSILN; did you mean TRAIN.POLY_EPSILON\?"),
    (["TRAIN.POLY_EPSILON", "1"], r"command line: TRAIN.POLY_EPSILON has no effect without TRAIN.LOSS poly; leave it"),
    (["TRAIN.LOSS", "poly", "TRAIN.POLY_EPSILON", "no"], r"TRAIN.POLY_EPSILON takes float, found 'no' \(str\)"),
    (["TRAIN.LOSS", "poly", "TRAIN.POLY_EPSILON", "0"], r"TRAIN.POLY_EPSILON is 0.0, expected 1e-12 to 1000000"),
    (["TRAIN.LOSS", "poly", "TRAIN.MIXUP_ALPHA", "1"], r"'poly', expected .*auto, .*bce, .*: mixup and"),
    (["DATA.DATASET", "flowers", "DATA.FLOWERS_EVERY", "0"], r"DATA.FLOWERS_EVERY is 0, expected 1 to 1000000"),
    (["DATA.DATASET", "digits", "DATA.FLOWERS_EVERY", "2"], r"FLOWERS_EVERY has no effect without DATA.DATASET flowers"),
    (["TRAIN.OPTIMIZER.NAME", "SignSGD", "TRAIN.OPTIMIZER.EPS", "1"], r"EPS has no effect without .*NAME Adam or .*AdamW or "),
    (["EVAL", "True", "TRAIN.POLY_EPSILON", "1"], r"TRAIN.POLY_EPSILON has no effect under EVAL"),
]  # fmt: skip


def test_new_names_and_keys_are_checked_before_paddle_is_imported(copy):
    code = (
        "import json, sys\nfrom config import get_config\nfrom errors import InputError\n"
        "for options in json.loads(sys.argv[1]):\n    try: print(get_config(None, options) and 'taken')\n"
        "    except InputError as error: print(error)\n"
        "print('paddle' in sys.modules)\n"
    )
    done = run(copy, "-c", code, json.dumps([options for options, _ in REFUSED] + [CHOSEN[:-2]]))
    *found, taken, imported = done.stdout.splitlines()
    assert (taken, imported) == ("taken", "False"), done.stderr
    for line, (_, message) in zip(found, REFUSED, strict=True):
        assert re.search(message, line)


def test_an_operation_that_there_isnt_is_named(copy):
    done = run(
        copy,
        "main_single_gpu.py",
        f"-output={copy / 'absent'}",
        "-cfg=vit_digits",
        "-o",
        "TRAIN.AUTO_AUGMENT",
        "rand-tFogg",
    )
    assert done.returncode == 2
    assert "in which 'tFogg' is unknown" in done.stderr
    assert done.stderr.strip().endswith("; did you mean Fog?")
    assert not (copy / "absent").exists()
