"""Run folders that a stranger wrote: a checkpoint's state.json and SHA256SUMS, and whole resumes
from them.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.hostile_files import a_share, attempt, damaged, one_thread
from support.training_runs import train

from training.checkpoint import classes_of, storage
from training.checkpoint.state import read_state
from training.sweeps.points import Distribution, Sweep
from training.sweeps.results import read_points, record, rows, table

OPTIONS = ["DATA.BATCH_SIZE", "16", "SAVE_STEPS", "1", "KEEP_LAST", "9"]
ODD = st.one_of(
    st.none(), st.booleans(), st.text(max_size=8), st.floats(), st.integers(-2, 3), st.binary(max_size=3).map(repr),
    st.sampled_from([10**30, -(10**30), 1 << 48, 1 << 63, 1e308, "epoch_0001", "../..", "a\x1b[2J", "x" * 5000, []]),
)  # fmt: skip
TREES = st.recursive(
    ODD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder, saved at each step, and its options."""
    from conftest import TINY

    path = tmp_path_factory.mktemp("runs") / "run"
    with contextlib.redirect_stdout(io.StringIO()):
        train([*TINY, *OPTIONS], path, 32)
    return path, [*TINY, *OPTIONS]


@pytest.fixture
def checkpoint(run, tmp_path):
    """A copy of the checkpoint within its epoch."""
    within = run[0] / "checkpoints" / "epoch_0001_sample_000000016"
    return shutil.copytree(within, tmp_path / "run" / "checkpoints" / within.name)


EVALUATION = st.fixed_dictionaries(
    {"loss": ODD, "num_samples": ODD},
    optional={
        "acc1": ODD,
        "best": st.fixed_dictionaries({"epoch": ODD}, optional={"acc1": ODD}) | TREES,
    },
)

TOLD = st.dictionaries(st.sampled_from(["of", "points", "x"]), TREES)


def test_a_sweeps_files_are_read_or_refused(tmp_path):
    keys = {"TRAIN.BASE_LR": Distribution([], 1e-4, 1e-2), "TRAIN.LOSS": Distribution(["auto"])}
    sweep = Sweep("main_single_gpu.py", [], keys, "optuna", 3, 0, [], "", None, 1, tmp_path)
    (tmp_path / "0000").mkdir()
    point = {"TRAIN.BASE_LR": "0.001", "TRAIN.LOSS": "auto"}
    record(sweep, [point])
    whole = json.loads((tmp_path / "sweep.json").read_text())
    result = {"loss": 1.0, "num_samples": 4, "best": {"acc1": 50.0, "epoch": 1}}

    def show():
        points = read_points(sweep, [])
        suggested = [
            {key: drawn.value(found[key]) for key, drawn in keys.items()} for found in points
        ]
        assert all(0 < found["TRAIN.BASE_LR"] < 1 for found in suggested)
        assert table(rows(sweep, points, "acc1"), sweep, "acc1")

    def attempt_both(told, evaluated):
        (tmp_path / "sweep.json").write_text(json.dumps(told))
        (tmp_path / "0000" / "result.json").write_text(json.dumps(evaluated))
        return attempt(
            "a sweep's files", sum(file.stat().st_size for file in tmp_path.rglob("*.json")), show
        )

    assert attempt_both(whole, result) == ""

    @a_share(6)
    @given(TOLD, st.lists(st.dictionaries(st.sampled_from([*keys]), ODD)))
    def try_points(told, points):
        attempt_both(whole | told, result)
        attempt_both(whole | {"points": points}, result)

    @a_share(6)
    @given(EVALUATION | TREES)
    def try_result(evaluated):
        attempt_both(whole, evaluated)

    try_points()
    try_result()


def sealed(checkpoint, **files):
    """Writes files of a checkpoint, and the SHA256SUMS that fits."""
    for name, content in files.items():
        (checkpoint / name.replace("_", ".")).write_bytes(content)
    names = sorted(
        file.name for file in checkpoint.iterdir() if file.name != "SHA256SUMS" and file.is_file()
    )
    sums = [
        f"{hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()}  {name}\n"
        for name in names
    ]
    (checkpoint / "SHA256SUMS").write_text("".join(sums))
    return sum(file.stat().st_size for file in checkpoint.iterdir() if file.is_file())


def places(tree, path=()):
    """Yields the paths of a tree's entries."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


@st.composite
def altered(draw, tree):
    """The tree with one to three entries removed, or replaced by another tree."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(sorted(places(tree), key=str)))
        inner = tree
        for key in way:
            inner = inner[key]
        if draw(st.integers(0, 3)):
            inner[last] = draw(TREES)
        else:
            del inner[last]
    return tree


def test_a_state_of_other_values_is_read_or_refused(checkpoint):
    state = json.loads((checkpoint / "state.json").read_text())
    # an earlier release's says nothing
    save_file({"a": np.zeros(1, np.float32)}, checkpoint / "model.safetensors")
    assert attempt("state.json", 1, lambda: read_state(checkpoint)) == ""

    @a_share(2)
    @given(st.data(), st.booleans())
    def try_one(data, by_bytes):
        text = json.dumps(state if by_bytes else data.draw(altered(state))).encode()
        (checkpoint / "state.json").write_bytes(data.draw(damaged(text)) if by_bytes else text)
        attempt("state.json", len(text), lambda: read_state(checkpoint))
        attempt("state.json, classes", len(text), lambda: classes_of(checkpoint))

    try_one()


def test_sums_of_any_lines_are_read_or_refused(checkpoint):
    whole = (checkpoint / "SHA256SUMS").read_bytes()
    size = sealed(checkpoint)
    digests = st.one_of(
        st.just("0" * 64), st.text("0123456789abcdef", max_size=66), st.text(max_size=4)
    )
    names = st.sampled_from(
        [
            "model.safetensors",
            "..",
            "/dev/zero",
            "/etc/passwd",
            "pipe",
            "loop",
            "a\0",
            "",
            "x" * 300,
        ]
    )
    lines = st.lists(
        st.builds(lambda *parts: "".join(parts), digests, st.sampled_from(["  ", " *", " "]), names)
    )
    os.mkfifo(checkpoint / "pipe")
    (checkpoint / "loop").symlink_to("loop")

    @a_share(2)
    @given(st.data(), lines)
    def try_one(data, lines):
        text = "\n".join([*lines, ""]).encode(errors="replace")
        if data.draw(st.booleans()):
            text = data.draw(
                st.sampled_from([whole + text, text + whole, data.draw(damaged(whole))])
            )
        (checkpoint / "SHA256SUMS").write_bytes(text)
        attempt("SHA256SUMS", size + len(text), lambda: storage.verify(checkpoint))

    try_one()


def resumed(run, checkpoint, output):
    """Goes on from a checkpoint by itself, as ``-resume=PATH`` does."""
    one_thread()
    with contextlib.redirect_stdout(io.StringIO()):
        train([*run[1], "MODEL.RESUME", str(checkpoint), "OUTPUT", str(output)], output, 32)


def test_a_run_goes_on_from_a_state_that_passed_or_says_why_not(run, checkpoint, tmp_path):
    state = json.loads((checkpoint / "state.json").read_text())

    @a_share(25)
    @given(altered(state))
    def try_one(tree):
        size = sealed(checkpoint, state_json=json.dumps(tree).encode())
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        line = attempt(
            "resumes", size + (64 << 20), lambda: resumed(run, checkpoint, tmp_path / "out")
        )
        assert not line or not (tmp_path / "out").exists()

    try_one()


WRONG = [
    ("samples", 34, "its samples are 34, expected no more than its 32 images"),
    ("samples", 1 << 40, "its samples are 1099511627776, expected"),
    ("epoch", -1, "its epoch is -1, expected a number of epochs"),
    ("epoch", 7, "it belongs to epoch_0008_sample_000000016; the folder was renamed"),
    ("epoch", 10**30, "its epoch is 1000000000000000000000000000000, expected"),
    ("step", 1.5, "its step is 1.5, expected a number of steps"),
    ("format", True, "its format is True, expected a whole number"),
    ("format", 3, "has format 3, this release reads 1 and 2"),
    ("lr", math.nan, "its lr is nan, expected a learning rate"),
    ("lr", -1, "its lr is -1, expected"),
    ("ranks", 0, "its ranks is 0, expected a number of processes"),
    ("scaler", {}, "its scaler.loss_scale is missing"),
    ("scaler", {"loss_scale": math.inf, "good_updates": 0}, "its scaler.loss_scale is inf"),
    ("versions", {"a": "\x1b[2J"}, "its versions is a dictionary of 1, expected"),
    ("classes", {"a": 1}, "its classes is a dictionary of 1, expected a list of names"),
    (
        "best",
        {"val": {"epoch": 1, "checkpoint": "../../../etc"}},
        "its best is a dictionary of 1, expected",
    ),
    (
        "best",
        {"val": {"epoch": 1, "checkpoint": "epoch_0001"}},
        "can't be read as the state of a run of",
    ),
    (
        "best",
        {"val": {"epoch": 1, "checkpoint": "epoch_0001", "acc1": "9"}},
        "its best is a dictionary of 1, expected",
    ),
    ("window", [{"means": {}, "totals": {}}] * 2, "its window has 2 processes, expected 1"),
    (
        "window",
        [{"means": {"loss": [1]}, "totals": {}}],
        "its window is a list of 1, expected a list of each",
    ),
    (
        "config",
        {"MODEL": {"TYPE": "Nonesuch"}},
        "its configuration is invalid: MODEL.TYPE is 'Nonesuch', expected",
    ),
    ("config", {"TRAIN": {"OPTIMIZER": {"NAME": []}}}, "expected"),
    ("config", [], "its config is [], expected a configuration"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG, ids=range(len(WRONG)))
def test_a_state_that_no_run_writes_is_named(run, checkpoint, tmp_path, key, value, message):
    state = json.loads((checkpoint / "state.json").read_text())
    size = sealed(checkpoint, state_json=json.dumps(state | {key: value}).encode())
    line = attempt("resumes", size + (64 << 20), lambda: resumed(run, checkpoint, tmp_path / "out"))
    assert message in line
    assert str(checkpoint) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "key", ["format", "epoch", "best", "window", "config", "versions", "scaler", "images"]
)
def test_a_state_without_a_key_is_named(checkpoint, key):
    state = json.loads((checkpoint / "state.json").read_text())
    del state[key]
    sealed(checkpoint, state_json=json.dumps(state).encode())
    assert f"state.json: its {key} is missing" in attempt(
        "state.json", 1, lambda: read_state(checkpoint)
    )


MOMENT = "cls_token/moment1_0"
OTHERS = [
    ({MOMENT: np.zeros((2, 3), np.float32)}, "is float32 [2, 3], expected float32 [1, 1, 16]"),
    ({MOMENT: np.zeros((1, 1, 16), np.int32)}, "is int32 [1, 1, 16], expected float32"),
    ({MOMENT: np.full((1, 1, 16), np.nan, np.float32)}, "holds NaN or infinite values"),
    ({"cls_token": np.zeros(3, np.float32)}, "cls_token is float32 [3], expected"),
    ({"a/b/c": np.zeros(3, np.float32)}, "its optimizer state belongs to another model (a)"),
]


@pytest.mark.parametrize(("change", "message"), OTHERS, ids=range(len(OTHERS)))
def test_an_optimizers_state_of_other_shapes_is_named(run, checkpoint, tmp_path, change, message):
    save_file(
        load_file(checkpoint / "optimizer.safetensors") | change,
        checkpoint / "optimizer.safetensors",
    )
    line = attempt(
        "resumes",
        sealed(checkpoint) + (64 << 20),
        lambda: resumed(run, checkpoint, tmp_path / "out"),
    )
    assert message in line
    assert not (tmp_path / "out").exists()
