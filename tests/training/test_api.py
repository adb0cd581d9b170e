"""Training and evaluation from Python: the values of the command line, errors, and what becomes of a
run whose caller is interrupted or killed.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY
from support import programs
from support.training_runs import records

from config import leaves
from errors import InputError
from training.api import KEYWORDS, command_words, evaluate, train
from training.checkpoint import storage
from training.command_line import FLAGS, config_from_arguments

OPTIONS = dict(zip(TINY[::2], TINY[1::2], strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training of one epoch: (the run, what was shown, its folder's parent)."""
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.chdir(folder)
        # As Paddle's import in a notebook does: the run shall not take it for the user's wish.
        patch.setenv("OMP_NUM_THREADS", "1")
        run = train(output="RUN", ngpus=1, options=OPTIONS)
    return run, shown.getvalue(), folder


@pytest.mark.long
def test_training_computes_what_the_command_line_computes(trained, program):
    """Every record and every metric, in numbers; the lines are those of the command line, too."""
    run, shown, folder = trained
    words = ["-ngpus=1", f"-output={folder}/TYPED", "-o", *TINY]
    status, typed, _ = program("main_multi_gpu.py", "-default_cfg=vit_digits", *words)
    assert status == 0
    assert records(run.folder) == records(folder / "TYPED")
    expected = json.loads((folder / "TYPED" / "result.json").read_text())
    metrics = ("acc1", "acc5", "mean_class_acc", "loss", "class_acc", "best", "num_samples")
    assert [run.result[name] for name in metrics] == [expected[name] for name in metrics]
    first_words = [
        [line.split()[2 if line[0].isdigit() else 0] for line in lines.splitlines()]
        for lines in (shown, typed)
    ]
    assert first_words[0] == first_words[1]


@pytest.mark.smoke
def test_a_run_has_its_folder_its_result_its_weights_and_its_records(trained):
    run, shown, folder = trained
    assert run.folder == folder / "RUN"
    assert run.result == json.loads((folder / "RUN" / "result.json").read_text())
    assert run.weights == folder / "RUN" / "checkpoints" / "best"
    assert [(record["split"], record["epoch"]) for record in run.metrics()] == [
        ("train", 1),
        ("val", 1),
    ]
    assert run.metrics()[1]["acc1"] == pytest.approx(run.result["acc1"], abs=1e-5)
    assert repr(run).startswith(f"RunResult('{folder}/RUN', acc1={run.result['acc1']}, acc5=")
    assert f"acc1: {run.result['acc1']:.2f}" in shown.splitlines()[-2]
    assert "(OMP_NUM_THREADS)" not in shown


@pytest.mark.long
def test_an_evaluation_on_two_processes_gives_the_trainings_metrics(trained, capsys, monkeypatch):
    run, _, folder = trained
    monkeypatch.chdir(folder)
    evaluation = evaluate(pretrained=run.folder, ngpus=2, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert evaluation.folder.parent == folder / "output"
    assert evaluation.folder.name.startswith("eval-vit_digits-")
    assert evaluation.result["acc1"] == run.result["best"]["acc1"]
    assert evaluation.result["class_acc"] == run.result["class_acc"]
    assert evaluation.result["loss"] == pytest.approx(run.result["best"]["loss"], abs=1e-5)
    assert evaluation.weights is None
    assert evaluation.metrics() == []


def test_a_second_training_in_the_same_folder_is_refused_and_changes_nothing(trained, capsys):
    """By the run itself, in its own words, which are raised and not shown."""
    run, _, _ = trained
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    message = (
        f"{run.folder} already contains a run; resume it with -resume, or choose another -output"
    )
    with pytest.raises(InputError) as caught:
        train(output=run.folder, ngpus=1, options=OPTIONS)
    assert str(caught.value) == message
    assert capsys.readouterr() == ("", "")
    assert {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("keywords", "options", "message"),
    [
        ({"epochs": 3}, {}, "train has no keyword epochs; write TRAIN__NUM_EPOCHS=VALUE"),
        ({"img_size": 3}, {}, "train has no keyword img_size; write image_size=VALUE"),
        ({"data_pth": "x"}, {}, "train has no keyword data_pth; did you mean data_path?"),
        ({"zzz": 1}, {}, "train has no keyword zzz"),
        ({"eval": True}, {}, "train sets EVAL itself; call train or evaluate"),
        ({}, {"EVAL": True}, "train sets EVAL itself; call train or evaluate"),
        (
            {"SEED": 1},
            {"SEED": 2},
            "train: SEED is a keyword and in options; leave one out",
        ),
        (
            {},
            {"SEED=1": 2},
            "train: options has 'SEED=1', expected a key such as TRAIN.NUM_EPOCHS",
        ),
        (
            {"SEED": {}},
            {},
            "SEED is {}, expected None, True, False, a number, a text, or a list",
        ),
        (
            {"cfg": "a\0"},
            {},
            "cfg is 'a\\x00', which contains a NUL character; remove it",
        ),
        (
            {"TRACKERS": ["'\""]},
            {},
            "TRACKERS has an item '\\'\"', which contains both kinds of quotes",
        ),
    ],
)
def test_a_wrong_keyword_or_value_is_one_line_before_anything_starts(keywords, options, message):
    with pytest.raises(InputError) as caught:
        train(options=options, **keywords)
    assert str(caught.value) == message


def test_an_unknown_key_is_the_command_lines_error(capsys):
    with pytest.raises(InputError, match=r"^command line: unknown key TRAIN\.NUM_EPOHCS; did you"):
        evaluate(TRAIN__NUM_EPOHCS=3)
    assert capsys.readouterr() == ("", "")


def test_every_flag_of_one_value_is_a_keyword():
    assert set(KEYWORDS) == {"cfg", *FLAGS} - {"eval"}
    words = command_words("train", dict.fromkeys(KEYWORDS), {})
    assert words == []


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("OUTPUT", None, None),
        ("OUTPUT", "-a b=c 'd' \"e\" $f", "-a b=c 'd' \"e\" $f"),
        ("OUTPUT", Path("a") / "花", "a/花"),
        ("TAG", "10", "10"),
        ("AMP", True, True),
        ("SEED", np.int64(7), 7),
        ("TRAIN.BASE_LR", 1e-05, 1e-05),
        ("TRAIN.BASE_LR", np.float32(0.5), 0.5),
        ("TRAIN.CROP_SCALE", (0.25, 1), [0.25, 1.0]),
        ("DATA.IMAGE_SIZE", [224, 160], [224, 160]),
        ("TRACKERS", ["visualdl"], ["visualdl"]),
        ("TRACKERS", None, None),
        ("DATA.DATA_PATH", "it's, [here]", "it's, [here]"),
    ],
)
def test_python_values_become_the_keys_values(key, value, expected):
    others = {"MODEL.NUM_CLASSES": 5} | ({"DATA.DATASET": "folder"} if "DATA_" in key else {})
    words = command_words("train", {key.replace(".", "__"): value}, others)
    found = dict(leaves(config_from_arguments("main_multi_gpu.py", words)))[key]
    assert found == expected
    assert type(found) is type(expected)


def test_a_keys_last_part_may_have_small_letters():
    words = command_words("train", {"DIST__STRATEGY__fuse_grad_size_in_MB": 16}, {})
    assert words == ["-o", "DIST.STRATEGY.fuse_grad_size_in_MB=16"]


@pytest.mark.parametrize(("keyword", "value"), [("data_path", "-a b"), ("output", Path("x=y"))])
def test_flags_take_texts_as_they_are(keyword, value):
    words = command_words(
        "train", {keyword: value, "dataset": "folder", "MODEL__NUM_CLASSES": 5}, {}
    )
    found = dict(leaves(config_from_arguments("main_multi_gpu.py", words)))
    assert found[FLAGS[keyword].key] == str(value)


# No ``if __name__ == "__main__"``, in a thread or not; modules of the toolkit's names stand beside it.
PROGRAM = """
    import sys, threading
    from paddle_vit_toolkit import train

    def work():
        try:
            train(output="RUN", ngpus=2, options={options!r} | {{"TRAIN.NUM_EPOCHS": 4000, "REPORT_FREQ": 1}})
        except KeyboardInterrupt as error:
            print("interrupted:", error, flush=True)

    {start}
"""


def start(folder, start):
    """Starts a program that trains for long, and waits until it shows the first step."""
    (folder / "program.py").write_text(
        textwrap.dedent(PROGRAM).format(options=OPTIONS, start=start)
    )
    (folder / "utils.py").write_text("raise SystemExit('the wrong one')")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools" / "package")}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environment,
        start_new_session=True,
        **streams,
    )
    programs.started.append(process)
    for line in process.stdout:
        if " step 1: " in line:
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.long
def test_an_interrupt_saves_and_is_raised(tmp_path):
    """Once, though a terminal or a kernel sends it to the whole process group."""
    process = start(tmp_path, "work()")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    [line] = err.splitlines()
    assert line.startswith("stopped by SIGINT after step ")
    assert line.endswith("; -resume=auto -output=RUN continues from there")
    storage.verify(tmp_path / line.partition(", saved in ")[2].partition(";")[0])
    assert out.splitlines()[-1] == f"interrupted: {line}"


@pytest.mark.long
def test_a_run_in_a_thread_ends_saved_when_its_caller_is_killed(tmp_path):
    process = start(tmp_path, "threading.Thread(target=work).start()")
    pids = programs.descendants(process.pid)
    assert len([parent for parent, _ in pids.values() if parent != process.pid]) >= 2
    process.kill()
    process.communicate()
    try:
        programs.assert_none_left(pids)
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    storage.verify(tmp_path / "RUN" / "checkpoints" / "last")
