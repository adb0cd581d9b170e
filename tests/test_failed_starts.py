"""A start that fails leaves no folder, and changes nothing in the one it was given: neither a byte
nor a time.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_images
from support.launches import printed, statuses, torchrun
from support.ranks import free_ports, run_ranks
from support.starts import SMALL_YAML, start_error

import main_single_gpu
from config import get_config
from errors import InputError
from training.run import Run
from utils import rank

CFG = "-cfg=small.yaml"
AUTO = "-resume=auto"
# What a new folder is refused for: flags, and the message.
NEW = [
    ([CFG, "-data_path=nowhere"], "-data_path is nowhere, but there is no such folder"),
    ([CFG, "-pretrained=nowhere"], "no weights at nowhere"),
    (
        [CFG, "-pretrained=run/checkpoints/last", "-o", "MODEL.DEPTH", "2"],
        "doesn't fit the model: missing blocks.1.",
    ),
    ([CFG, "-batch_size=99"], "48 training images don't fill one global batch of 99 x"),
    ([CFG, "-accum_iter=99"], "TRAIN.ACCUM_ITER is 99, but an epoch has only"),
    ([CFG, "-o", "TRAIN.FREEZE", "bloks.*"], "TRAIN.FREEZE: 'bloks.*' matches no parameter"),
    ([CFG, "-o", "TRAIN.DISTILLATION_TYPE", "hard"], "TEACHER_MODEL is None"),
    (
        [
            CFG,
            "-o",
            "TRAIN.DISTILLATION_TYPE",
            "hard",
            "TRAIN.TEACHER_MODEL",
            "teacher.yaml",
            "TRAIN.TEACHER_PATH",
            "no",
        ],
        "no weights at no",
    ),
    ([CFG, "-resume=nowhere"], "no checkpoint at"),
    (["-resume=run/checkpoints/last"], "epoch 2 is completed"),
    (
        ["-resume=run/checkpoints/epoch_0001", "-image_size=12"],
        "it is a checkpoint of another model (pos_embed resized from 2 x 2 to 3 x 3)",
    ),
    (
        ["-resume=run/checkpoints/epoch_0001", "-data_path=more"],
        "its run had 48 training images, but the data has 60",
    ),
    (
        ["-resume=run/checkpoints/epoch_0001", "-last_epoch=2"],
        "TRAIN.LAST_EPOCH is 2, but the checkpoint's last",
    ),
    (
        ["-resume=damaged/checkpoints/epoch_0001"],
        "damaged checkpoint: model.safetensors: can't be read",
    ),
    ([CFG, "-eval"], "-eval needs -pretrained FILE"),
    (
        ["-eval", "-pretrained=run/checkpoints/epoch_0009"],
        "no weights at run/checkpoints/epoch_0009",
    ),
    (
        ["-eval", "-pretrained=run/checkpoints/last", "-data_path=others"],
        "the weights were trained on the classes a, b",
    ),
]
# What the folder of a run is refused for.
OWN = [
    ([CFG], "already contains a run; resume it with -resume"),
    (
        [AUTO, "-image_size=12"],
        "it is a checkpoint of another model (pos_embed resized from 2 x 2 to 3 x 3)",
    ),
    ([AUTO, "-pretrained=nowhere"], "no weights at nowhere"),
    ([AUTO, "-accum_iter=99"], "TRAIN.ACCUM_ITER is 99, but an epoch has only"),
    ([AUTO, "-batch_size=99"], "48 training images don't fill one global batch of 99 x"),
    ([AUTO, "-last_epoch=1"], "TRAIN.LAST_EPOCH is 1, but the checkpoint's last epoch is 2"),
    ([AUTO, "-data_path=more"], "its run had 48 training images, but the data has 60"),
    ([AUTO, "-o", "TRAIN.NUM_EPOCHS", "1"], "epoch 2 is completed and TRAIN.NUM_EPOCHS is 1"),
    ([AUTO, "-o", "MODEL.DEPTH", "2"], "epoch_0002/model.safetensors doesn't fit the model"),
    (
        ["-resume=run/checkpoints/epoch_0001"],
        "later checkpoints are in the same folder (epoch_0002)",
    ),
    (["-resume=other/checkpoints/epoch_0001"], "run/checkpoints contains another run than"),
    (["-eval", "-pretrained=run/checkpoints/last"], "already contains a run"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data of three classes and the folders of two runs, one of them damaged after it
    was copied.
    """
    folder = tmp_path_factory.mktemp("place")
    for name, count in (("data", 16), ("more", 20), ("others", 4)):
        classes = {f"{'other' * (name == 'others')}{letter}": count for letter in "abc"}
        write_images(folder / name / "train", classes)
        write_images(folder / name / "val", dict.fromkeys(classes, 2), seed=1)
    (folder / "small.yaml").write_text(SMALL_YAML)
    (folder / "teacher.yaml").write_text(SMALL_YAML.replace("auto", "3"))
    before = os.getcwd()
    os.chdir(folder)
    try:
        for name, seed in (("run", "0"), ("other", "1")):
            assert start_error([CFG, f"-output={name}", "-o", "SEED", seed]) is None
    finally:
        os.chdir(before)
    shutil.copytree(folder / "run", folder / "damaged", symlinks=True)
    for file in (folder / "damaged" / "checkpoints").glob("epoch_*/model.safetensors"):
        file.unlink()
    return folder


def held(folder):
    """What is in a folder: bytes, links and times, by path."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        content = os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        digest = hashlib.sha256(repr(content).encode()).hexdigest()
        found[str(path)] = digest, path.lstat().st_mtime_ns
    return found


def attempts(folder, commands):
    """[(refused for, whether anything in ``folder`` changed)] of one start after the other."""
    os.chdir(folder)
    told = []
    before = held(".")
    for flags in commands:
        told.append((start_error(flags), held(".") != before))
    return told


def assert_refused(folder, cases, commands, ranks, monkeypatch):
    monkeypatch.chdir(folder)
    for found in run_ranks(attempts, folder, commands, ranks=ranks):
        for (flags, message), (told, changed) in zip(cases, found, strict=True):
            assert message in (told or "nothing"), flags
            assert not changed, flags


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_a_start_that_fails_leaves_no_folder(place, ranks, monkeypatch):
    commands = [[*flags, "-output=new/folder"] for flags, _ in NEW]
    assert_refused(place, NEW, commands, ranks, monkeypatch)
    commands = [flags for flags, _ in NEW]  # nor one under output/
    assert_refused(place, NEW, commands, ranks, monkeypatch)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke)])
def test_a_start_that_fails_changes_no_run(place, ranks, monkeypatch):
    cases = [*OWN, ([AUTO, "-output=damaged"], "none of its 2 checkpoints is complete")]
    assert_refused(
        place, cases, [["-output=run", *flags] for flags, _ in cases], ranks, monkeypatch
    )


def test_a_rank_that_fails_alone_leaves_no_folder(place, tmp_path):
    shutil.copy(place / "small.yaml", tmp_path)
    shutil.copytree(place / "data", tmp_path / "data")
    port = free_ports(1)[0]
    flags = [CFG, "-output=new"]
    started = [
        torchrun(tmp_path, 1, port, *flags, "-pretrained=nowhere"),
        torchrun(tmp_path, 0, port, *flags),
    ]
    assert statuses(*started) == [2, 2]
    assert "error: no weights at nowhere" in printed(*started)
    assert not (tmp_path / "new").exists()


def refusal(folders, flags):
    """What this rank's start in its folder, with its flags, was refused for."""
    os.chdir(folders[rank()])
    return start_error(flags[rank()])


def test_ranks_that_were_told_different_things_end_in_a_line(place, tmp_path):
    flags = [[CFG, f"-output={tmp_path}/new", f"-image_size={size}"] for size in (12, 8)]
    found = run_ranks(refusal, [place, place], flags)
    assert found[0] == found[1]
    assert found[0].startswith(
        "rank 1 has DATA.IMAGE_SIZE 8, rank 0 has 12; start every rank with the same flags, and"
    )
    assert not (tmp_path / "new").exists()


IMAGES = "the validation images differ between rank 0 and rank 1: rank 1 has 5, rank 0 has 6; number 3 is 'val/c/0.png'"
VALUES = "rank 1 loaded different values than rank 0 (MODEL.PRETRAINED): "


@pytest.fixture
def machines(place, tmp_path):
    return [shutil.copytree(place, tmp_path / str(number), symlinks=True) for number in range(2)]


def test_ranks_whose_machines_hold_other_images_end_in_a_line(machines, tmp_path):
    (machines[1] / "data/val/b/1.png").unlink()
    port = free_ports(1)[0]
    flags = [CFG, f"-output={tmp_path}/new"]
    started = [torchrun(machines[number], number, port, *flags, HOME=tmp_path) for number in (1, 0)]
    assert statuses(*started) == [2, 2]
    assert printed(*started).count(f"error: {IMAGES}") == 1
    assert not (tmp_path / "new").exists()


def test_ranks_whose_machines_hold_other_evaluated_weights_end_in_a_line(machines, tmp_path):
    shutil.rmtree(machines[1] / "run")
    (machines[1] / "other").rename(machines[1] / "run")
    flags = [CFG, f"-output={tmp_path}/new", "-eval", "-pretrained=run/checkpoints/last"]
    found = run_ranks(refusal, machines, [flags, flags])
    assert found[0] == found[1]
    assert found[0].startswith(VALUES)
    assert not (tmp_path / "new").exists()


# ----------------------------------------------------------------- the folder and its lock

HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "r+")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_which_another_run_writes_is_not_touched(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("small.yaml", "data", "run"):
        copy = shutil.copytree if (place / name).is_dir() else shutil.copy
        copy(place / name, tmp_path / name)
    shutil.rmtree("run/checkpoints")
    shutil.copytree(place / "run" / "checkpoints", "run/checkpoints", symlinks=True)
    Path("run/.lock").write_text("process 4711 on there")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, "run/.lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "locked\n"
        before = held("run")
        for flags in ([CFG], [AUTO]):
            message = "run: another run is using it (process 4711 on there); wait for it, or choose another -output"
            assert start_error(["-output=run", *flags]) == message
        assert held("run") == before
        other.stdin.close()
    assert start_error(["-output=run", AUTO, "-o", "TRAIN.NUM_EPOCHS", "3"]) is None
    assert Path("run/.lock").read_text().startswith(f"process {os.getpid()} on ")


def run_in(output, *options):
    return Run(get_config("vit_digits", ["OUTPUT", str(output), *options]), ["a"])


def test_a_folder_that_another_run_took_meanwhile_is_left_to_it(tmp_path):
    first = run_in(tmp_path / "run")
    second = run_in(tmp_path / "run")
    going_on = run_in(tmp_path / "run", "MODEL.RESUME", "auto")
    assert not (tmp_path / "run").exists()
    first.begin()
    (tmp_path / "run" / "metrics.jsonl").touch()
    before = held(tmp_path / "run")
    with pytest.raises(InputError, match="already contains a run"):
        second.begin()
    with pytest.raises(
        InputError, match="run: another run used it in the meantime; repeat the command"
    ):
        going_on.begin()
    assert held(tmp_path / "run") == before


def test_two_runs_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda *_: "then")
    runs = [Run(get_config("vit_digits", ["SAVE", str(tmp_path / "output")]), []) for _ in range(3)]
    assert list(tmp_path.iterdir()) == []
    for run in runs:
        run.begin()
    names = [run.directory.name for run in runs]
    assert names == ["train-vit_digits-then", "train-vit_digits-then-1", "train-vit_digits-then-2"]
    assert [run.checkpoints.parent for run in runs] == [
        tmp_path / "output" / name for name in names
    ]


def test_what_was_told_before_the_folder_was_made_is_in_its_log(tmp_path, capsys):
    run = run_in(tmp_path / "run")
    run.info("told early")
    run.local.info("this rank's own")
    assert "told early\n" in capsys.readouterr().out
    run.begin()
    run.info("told late")
    lines = [
        line[14:]
        for line in (tmp_path / "run" / "log.txt").read_text().splitlines()
        if line[:1].isdigit()
    ]
    assert lines == [
        "configuration, where it isn't the default:",
        "told early",
        f"run: {run.directory}",
        "told late",
    ]
    assert (tmp_path / "run" / "log_0.txt").read_text()[14:] == "this rank's own\n"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "file",
            r"file: can't create the run's folder \(file is a file\); choose another with -output",
        ),
        ("file/in/it", r"file/in/it: can't create the run's folder \(.*file is a file\); choose"),
        (
            "x" * 300,
            r"OUTPUT is 'x+\.\.\.x+', expected a path of at most 3500 bytes, with names of at most 200",
        ),
    ],
)
def test_a_folder_that_can_not_be_is_refused_at_once(tmp_path, monkeypatch, output, message):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(InputError, match=message):
        run_in(output)


def test_a_single_process_that_was_launched_several_times_is_refused(monkeypatch, tiny):
    """Each would train by itself, and write into the same folder."""
    monkeypatch.setattr("sys.argv", ["main_single_gpu.py", "-o", *tiny])
    monkeypatch.setattr(main_single_gpu.launchers, "is_launched", lambda: True)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    with pytest.raises(
        InputError,
        match="runs one process, but a launcher started several; launch main_multi_gpu.py",
    ):
        main_single_gpu.main()
