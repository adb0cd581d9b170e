"""A run writes, replaces and removes within its folder what runs made, and nothing else."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import yaml
from conftest import TINY
from PIL import Image
from support.programs import ROOT
from support.training_runs import refused, train

from config import find_config, get_config
from errors import InputError
from launch.spawned import without_current_folder
from tools import compare_runs
from training import tracking
from training.checkpoint import storage
from training.checkpoint.storage import remove_checkpoint, remove_leftovers, remove_superseded
from training.command_line import config_from_arguments
from training.run import FILES, Run
from training.tracking import MADE, Follower

OWN = [name for name in FILES if "/" not in name]
OWN += [
    ".lock",
    ".lock_trackers",
    "classes.json",
    "confusion.png",
    "log.txt",
    "log_0.txt",
    "log_17.txt",
]
OWN += [".trackers", "log_trackers.txt"]


def held(path):
    """What lies below a folder: links as such, and files' content."""
    found = {}
    for place, folders, files in os.walk(path):
        for name in (*folders, *files):
            entry = os.path.join(place, name)
            if os.path.islink(entry):
                found[entry] = os.readlink(entry)
            elif os.path.isfile(entry):
                found[entry] = Path(entry).read_bytes()
            else:
                found[entry] = None
    return found


def line_of(output, *options):
    """The error of a run that is to begin in a folder."""
    with pytest.raises(InputError) as caught:
        Run(get_config("vit_digits", ["OUTPUT", str(output), *options]), ["a"]).begin()
    return str(caught.value)


# ------------------------------------------------------------------- links, folders and others' files


@pytest.mark.parametrize("name", OWN)
def test_a_link_or_a_folder_in_the_place_of_a_file_is_a_line_before_the_run(name, tmp_path):
    outside = tmp_path / "outside"
    run = tmp_path / "run"
    outside.write_text("before")
    run.mkdir()
    if name != ".lock":
        (run / ".lock").write_text("process 1 on there")
    (run / name).symlink_to(outside)
    before = held(tmp_path)
    for options in ([], ["MODEL.RESUME", "auto"], ["EVAL", "True"]):
        told = line_of(run, *options)
        assert told.startswith(
            f"{run / name}: it is a link, and links aren't written to; move it away, or choose"
        )
    (run / name).unlink()
    (run / name).mkdir()
    assert line_of(run).startswith(
        f"{run / name}: it is a folder, expected a file; move it away, or choose another"
    )
    (run / name).rmdir()
    (run / name).symlink_to(outside)
    assert held(tmp_path) == before


def test_a_run_that_was_backed_up_by_hard_links_goes_on_and_leaves_the_backup(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "MODEL.RESUME", "auto"]
    run = tmp_path / "run"
    train(options, run, 32)
    shutil.copytree(run, tmp_path / "backup", symlinks=True, copy_function=os.link)
    before = {
        path: what for path, what in held(tmp_path / "backup").items() if not path.endswith(".lock")
    }
    train([*options, "TRAIN.NUM_EPOCHS", "2"], run, 32, named=("TRAIN.NUM_EPOCHS", "2"))
    assert {
        path: what for path, what in held(tmp_path / "backup").items() if not path.endswith(".lock")
    } == before
    assert (run / "log.txt").read_bytes().startswith((tmp_path / "backup/log.txt").read_bytes())
    assert len((run / "log.txt").read_bytes()) > len((tmp_path / "backup/log.txt").read_bytes())


@pytest.mark.parametrize("name", ["checkpoints", "bad_steps"])
def test_checkpoints_that_lie_elsewhere_are_refused(tmp_path, name):
    (tmp_path / "home").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "home")
    for options in ([], ["MODEL.RESUME", "auto"]):
        told = line_of(tmp_path / "run", *options)
        assert told == (
            f"{tmp_path}/run/{name} is a link, expected a folder;"
            " move its target here, or make -output the link"
        )
    assert held(tmp_path / "home") == {}


def test_a_folder_of_somebody_elses_files_is_no_run(tmp_path):
    advice = "which no run wrote; move it away, or choose another -output"
    for name in ("config.yaml", "classes.json", "report.html", "predictions.csv"):
        (tmp_path / name).write_text("mine")
        for options in ([], ["MODEL.RESUME", "auto"], ["EVAL", "True"]):
            assert line_of(tmp_path, *options) == f"{tmp_path} contains {name}, {advice}"
        assert held(tmp_path) == {str(tmp_path / name): b"mine"}
        (tmp_path / name).unlink()
    # A log is added to: SLURM writes some by these names, and other machines' ranks do.
    for name in ("log.txt", "log_48213.txt", "data.csv"):
        (tmp_path / name).write_text("mine\n")
    Run(get_config("vit_digits", ["OUTPUT", str(tmp_path)]), ["a"]).begin()
    assert (tmp_path / "data.csv").read_text() == "mine\n"
    assert (tmp_path / "log.txt").read_text().startswith("mine\n")


def test_a_lock_of_another_program_is_left_alone(tmp_path):
    (tmp_path / ".lock").write_text("#!/bin/sh\n")
    told = "can't lock the run's folder (it belongs to another program, and isn't a lock); move it away, or choose another -output"
    assert line_of(tmp_path) == f"{tmp_path}: {told}"
    assert (tmp_path / ".lock").read_text() == "#!/bin/sh\n"


def test_a_runs_folder_may_be_a_users_link(tmp_path, tiny):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    train([*tiny, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 32)
    assert {"config.yaml", "log.txt", "checkpoints", "result.json"} <= set(
        os.listdir(tmp_path / "disk")
    )


# ----------------------------------------------------------------------------- what is removed


def test_a_run_that_goes_on_removes_what_killed_runs_began_and_nothing_else(tmp_path, tiny, capsys):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "MODEL.RESUME", "auto"]
    train(options, tmp_path, 32)
    checkpoints = tmp_path / "checkpoints"
    gone = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
    )
    dead = int(gone.stdout)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/model.safetensors").write_text("mine")
    for name in (".git", ".ssh", f".epoch_0003.{dead}"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "id").write_text("mine")
    for name in (".gitignore", ".bashrc", f".epoch_0004.{dead}", f".notes.{dead}"):
        (checkpoints / name).write_text("mine")
    (checkpoints / f".epoch_0005.{dead}").symlink_to(tmp_path / "outside")
    (checkpoints / f".epoch_0006.{os.getppid()}.01234567").mkdir()
    kept = sorted(name for name in os.listdir(checkpoints) if name.startswith("."))
    others = held(tmp_path / "outside") | {
        path: what for path, what in held(checkpoints).items() if "/." in path
    }
    for name in (f".epoch_0007.{dead}", f".epoch_0008_sample_000000016.{dead}.89abcdef"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_text("half")
    (checkpoints / f".last.{dead}.89abcdef").symlink_to("epoch_0007")
    (tmp_path / f".config.yaml.{dead}.89abcdef").write_text("half")
    capsys.readouterr()
    train([*options, "TRAIN.NUM_EPOCHS", "2"], tmp_path, 32, named=("TRAIN.NUM_EPOCHS", "2"))
    told = capsys.readouterr().out
    assert sorted(name for name in os.listdir(checkpoints) if name.startswith(".")) == kept
    found = held(tmp_path / "outside") | {
        path: what for path, what in held(checkpoints).items() if "/." in path
    }
    assert found == others
    assert not (tmp_path / f".config.yaml.{dead}.89abcdef").exists()
    assert f"{checkpoints} also contains .bashrc, " in told
    assert "which no run wrote; they are kept" in told


def checkpoint(path):
    path.mkdir()
    for name in (storage.MODEL, storage.OPTIMIZER, storage.STATE, storage.SUMS):
        (path / name).touch()
    return path


def test_a_checkpoint_that_holds_something_else_stays(tmp_path):
    for epoch in range(1, 6):
        checkpoint(tmp_path / f"epoch_{epoch:04}")
    (tmp_path / "epoch_0002" / "notes.txt").write_text("mine")
    (tmp_path / "epoch_0003" / storage.EMA).mkdir()
    (tmp_path / "last").symlink_to("epoch_0005")
    found = storage.find_checkpoints(tmp_path)
    later, left = remove_superseded(tmp_path, found, 1, 0)
    assert left == ["epoch_0002", "epoch_0003"]
    assert later == [found[1], found[2], found[4]]
    assert sorted(os.listdir(tmp_path)) == ["epoch_0002", "epoch_0003", "epoch_0005", "last"]
    assert len(os.listdir(tmp_path / "epoch_0002")) == 5
    (tmp_path / "link").symlink_to("epoch_0005")
    assert not remove_checkpoint(tmp_path / "link")
    assert (tmp_path / "epoch_0005" / storage.MODEL).exists()
    assert remove_leftovers(tmp_path) == []


def test_damaged_checkpoints_are_set_aside_beside_those_of_before(tmp_path, tiny):
    options = [
        *tiny,
        "DATA.BATCH_SIZE",
        "16",
        "SAVE_FREQ",
        "1",
        "TRAIN.NUM_EPOCHS",
        "2",
        "MODEL.RESUME",
        "auto",
    ]
    train(options, tmp_path, 32)
    checkpoints = tmp_path / "checkpoints"
    for time in (1, 2):
        (checkpoints / "epoch_0002" / "state.json").write_text(f"{time}")
        train(options, tmp_path, 32)
    found = [
        (checkpoints / name / "state.json").read_text()
        for name in ("damaged_epoch_0002", "damaged_epoch_0002-2")
    ]
    assert found == ["1", "2"]


@pytest.mark.parametrize("link", storage.LINKS)
def test_a_file_in_the_place_of_a_link_is_not_replaced(link, tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "MODEL.RESUME", "auto"]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / link).write_text("mine")
    expected = f"checkpoints/{link} is a file, expected a link to one of its checkpoints; remove it"
    refused(expected, options, tmp_path, 32)
    assert (tmp_path / "checkpoints" / link).read_text() == "mine"
    with pytest.raises(FileExistsError, match="it isn't a link to a checkpoint"):
        storage.replace_link(tmp_path / "checkpoints" / link, "epoch_0001")


def test_a_trackers_folder_that_no_run_made_stays(tmp_path, monkeypatch):
    from support.tracker_files import FailingTracker

    monkeypatch.setattr(
        tracking.trackers, "registered", dict.fromkeys(("odd", "even"), (FailingTracker, {}))
    )
    (tmp_path / "config.yaml").write_text("{SEED: 1}")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "events").touch()
    (tmp_path / MADE).write_text("odd\n")
    (tmp_path / "odd").symlink_to("outside")
    (tmp_path / "even").mkdir()
    (tmp_path / "even/notes.txt").write_text("mine")
    said = []
    Follower(tmp_path, ["odd", "even"], said.append)
    line = "TRACKERS: {0} is turned off (RunError: {1}/{0} doesn't belong to the trackers of this run; move it away); the run continues"
    assert said == [line.format(name, tmp_path) for name in ("odd", "even")]
    assert os.listdir(tmp_path / "outside") == ["events"]
    assert (tmp_path / "even/notes.txt").read_text() == "mine"


def test_a_report_that_is_written_again_writes_into_the_runs_folder_alone(tmp_path, tiny):
    train([*tiny, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 32)
    file = tmp_path / "run/config.yaml"
    written = file.read_text()
    file.write_text(written.replace("CACHE: null", f"CACHE: {tmp_path}/cache"))
    assert file.read_text() != written
    before = held(tmp_path).keys()
    compare_runs.write_report_again(tmp_path / "run")
    assert held(tmp_path).keys() == before | {str(tmp_path / "run/report.html")}


# ------------------------------------------------------------------------- what a stranger's folder says


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """A run's folder."""
    place = tmp_path_factory.mktemp("strangers")
    train([*TINY, "DATA.BATCH_SIZE", "16", "DATA.NUM_WORKERS", "0"], place / "run", 32)
    return place / "run"


@pytest.mark.parametrize("line", ["OUTPUT: {0}/else", "SAVE: {0}/else", "MODEL.NAME: ../../else/x"])
@pytest.mark.parametrize("flag", ["-pretrained={}", "-resume={}"])
def test_a_runs_file_does_not_say_where_a_command_writes(
    line, flag, strangers, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(strangers, "run", symlinks=True)
    key, _, value = line.format(tmp_path).partition(": ")
    content = yaml.safe_load(Path("run/config.yaml").read_text())
    place = content["MODEL"] if key.startswith("MODEL.") else content
    place[key.rpartition(".")[2]] = value
    Path("run/config.yaml").write_text(yaml.safe_dump(content))
    config = config_from_arguments(
        "main_single_gpu.py", [flag.format("run"), "-eval"][: 1 + ("pre" in flag)]
    )
    Run(config, ["a"]).begin()
    assert sorted(os.listdir(tmp_path)) == ["output", "run"]
    [made] = os.listdir("output")
    assert re.fullmatch(r"(eval|train)-(\.\._\.\._else_x|vit_base_patch16_224)-[0-9-]+", made)
    assert {"config.yaml", "log.txt"} <= set(os.listdir(f"output/{made}"))


def test_a_lock_that_nobody_signed_makes_no_run(tmp_path):
    for name in (".lock", "checkpoints/", "metrics.jsonl"):
        folder_ = tmp_path / name.strip("./")
        folder_.mkdir()
        (folder_ / "config.yaml").write_text("mine")
        (folder_ / name).mkdir() if name.endswith("/") else (folder_ / name).write_text("")
        for options in (["EVAL", "True"], ["MODEL.RESUME", "auto"]):
            assert line_of(folder_, *options).startswith(
                f"{folder_} contains config.yaml, which no run"
            )
        assert (folder_ / "config.yaml").read_text() == "mine"


def test_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "run").symlink_to("absent")
    assert "can't create the run's folder (it is a broken link)" in line_of(tmp_path / "run")


MODULES = (
    "socket",
    "secrets",
    "random",
    "pickle",
    "runpy",
    "selectors",
    "signal",
    "queue",
    "config",
    "utils",
    "launch",
)


@pytest.mark.parametrize(
    "words",
    [
        ["tools/predict.py", "{run}", "image.png", "-ngpus=2", "-output=answers.csv"],
        ["main_multi_gpu.py", "-eval", "-pretrained={run}", "-ngpus=2", "-output=evaluated"],
        pytest.param(["tools/doctor.py", "-ngpus=2"], marks=pytest.mark.long),
        pytest.param(["tools/model_info.py", "vit_digits"], marks=pytest.mark.long),
        ["tools/compare_runs.py", "{run}"],
    ],
)
def test_modules_and_settings_in_the_current_folder_do_not_count(words, strangers, tmp_path):
    shutil.copytree(strangers, tmp_path / "run", symlinks=True)
    Image.new("L", (8, 8)).save(tmp_path / "image.png")
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        )
    (tmp_path / "latex").write_text(f"#!/bin/sh\necho latex >> {tmp_path}/ran\nexit 1\n")
    (tmp_path / "latex").chmod(0o755)
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [
        sys.executable,
        str(ROOT / words[0]),
        *(word.format(run="run") for word in words[1:]),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=120
    )
    assert not (tmp_path / "ran").exists()
    assert done.returncode == 0, done.stderr


def test_a_spawned_process_works_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with without_current_folder():
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        # No function of this file, whose imports would take the process two seconds.
        asked = pool.submit(os.getcwd)
    with pool:
        assert asked.result() == str(tmp_path)
    assert os.getcwd() == str(tmp_path)


def test_a_tracker_of_an_earlier_release_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **how: None)
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "visualdl").mkdir()
    (tmp_path / ".lock_trackers").write_text("4711")
    assert tracking.TrackerProcess(["tensorboard"]).begin(tmp_path) == ""
    assert (tmp_path / MADE).read_text() == "tensorboard\n"
    for name in (MADE, ".lock_trackers"):
        (tmp_path / name).unlink()
    assert tracking.TrackerProcess(["tensorboard"]).begin(tmp_path) == ""
    assert (tmp_path / MADE).read_text() == ""


def test_a_matplotlibrc_that_is_no_settings_is_not_read(tmp_path):
    """All that draw import Matplotlib by this module; the test above starts a command that does."""
    drawing = "from training.pages.plotting import figure, figure_png; figure_png(figure(1, 1))"
    command = [sys.executable, "-c", drawing]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for make in (
        os.mkfifo,
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.symlink_to("/dev/zero"),
    ):
        make(tmp_path / "matplotlibrc")
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        (tmp_path / "matplotlibrc").unlink()


def test_a_models_name_is_no_file_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("vit_digits", "resnet50", "resnet50.a1_in1k"):
        Path(name).write_text("SAVE: elsewhere")
        assert find_config(name).is_relative_to(ROOT)
        assert get_config(name).SAVE == "./output"
        assert get_config(f"./{name}").SAVE == "elsewhere"
    assert get_config("resnet50.a1_in1k").DATA.CROP_PCT == 0.95
    for name in ("mine", "vit_digits.yaml"):
        Path(name).write_text("SAVE: elsewhere")
        assert get_config(name).SAVE == "elsewhere"


def test_a_checkpoints_folder_that_became_a_link_is_not_written_through(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(OSError, match="it is a link, expected a folder"):
        storage.write_checkpoint(tmp_path / "checkpoints", "epoch_0001", {}, {}, {})
    assert not any(elsewhere.iterdir())
