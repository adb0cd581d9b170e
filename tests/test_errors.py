"""What ends a process: its one line, its exit status, and whether somebody foresaw it."""

import errno
import os

import pytest

import errors
from errors import InputError, Unreadable, open_file, reading
from launch import devices
from settings.documents import read_yaml
from weights import find_weights
from weights.formats import open_weights

FULL = OSError(errno.ENOSPC, "No space left on device", "run/log.txt")
CUDA = "(External) CUDA error(100), no CUDA-capable device is detected. \n  [Hint: 'cudaErrorNoDevice']"
FAILED_PIPE = OSError(errno.EPIPE, "Broken pipe")


@pytest.fixture
def ended(monkeypatch):
    """Returns a function: (status, text, unforeseen) by which an error ends a rank of so many."""

    def end(status, text, failed, unforeseen=False):
        raise SystemExit((status, text, unforeseen))

    def of(error, ranks=1):
        monkeypatch.setenv("PADDLE_TRAINER_ID", "1" if ranks > 1 else "0")
        monkeypatch.setenv("PADDLE_TRAINERS_NUM", str(ranks))
        with pytest.raises(SystemExit) as caught, errors.reporting():
            raise error
        return caught.value.code

    monkeypatch.setattr(errors, "_end", end)
    monkeypatch.setattr(errors.time, "sleep", lambda _: None)
    return of


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (errors.InputError("a.yaml: wrong"), 2, "error: a.yaml: wrong"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            FULL,
            1,
            "error: [Errno 28] No space left on device: 'run/log.txt'; free some space, then continue with -resume=auto",
        ),
        (
            MemoryError("5 GB"),
            1,
            "error: out of memory: 5 GB; use smaller batches, or end other processes that use it",
        ),
        (
            OSError(CUDA),
            1,
            "error: the GPU can't be used: no CUDA-capable device is detected (CUDA error 100); "
            "set CUDA_VISIBLE_DEVICES to GPUs that nvidia-smi -L lists, or unset it",
        ),
        (
            OSError(errno.EMFILE, "Too many open files", "a.jpg"),
            1,
            "error: Too many open files: raise the limit on open files (ulimit -n)",
        ),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "a.csv"),
            2,
            "error: a.csv: File name too long; choose another path",
        ),
        (
            OSError(errno.ENOTDIR, "Not a directory", "a.csv/b"),
            2,
            "error: a.csv/b: Not a directory; choose another path",
        ),
        (
            RuntimeError("Symlink loop from 'a'"),
            2,
            "error: Symlink loop from 'a'; choose another path",
        ),
        (
            OSError(errno.ENOTDIR, "Not a directory", os.path.expanduser("~/.cache/paddle")),
            2,
            f"error: Paddle can't create {os.path.expanduser('~/.cache')} (Not a directory); "
            "set HOME to a writable folder",
        ),
        (
            RuntimeError("can't start new thread"),
            1,
            "error: can't start new thread: raise the limit on this user's processes (ulimit -u)",
        ),
    ],
)
def test_what_can_be_said_in_a_line_is(ended, error, status, line):
    assert ended(error) == (status, line, False)
    speaker = "" if status in (2, 130) else "rank 1: "  # which all ranks say alike
    assert ended(error, ranks=2) == (status, f"{speaker}{line}", False)


def test_what_nobody_foresaw_is_told_with_its_traceback(ended):
    for error in (ValueError("strange"), FAILED_PIPE, RuntimeError("Too few")):
        status, text, unforeseen = ended(error, ranks=2)
        assert (status, unforeseen) == (1, True)
        assert text.startswith("rank 1: Traceback (most recent call last):\n")
        assert text.endswith(f"\n{type(error).__name__}: {error}\n")


def test_a_package_that_is_missing_is_named_and_one_that_is_not_ours_is_a_traceback(
    ended, monkeypatch
):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in ("yaml", "yacs") else name
    )
    status, line, _ = ended(ModuleNotFoundError("No module named 'yaml'", name="yaml"))
    assert status == 2
    assert line.startswith("error: ")
    assert {"yaml", "yacs"} == {
        name for name in errors.NEEDED if name in line.partition(" lacks ")[2].partition(";")[0]
    }
    assert ended(ModuleNotFoundError("No module named 'mine'", name="mine"))[2]


def test_gpus_that_paddle_does_not_see_are_no_silent_run_on_the_cpu(monkeypatch):
    monkeypatch.setattr(devices, "num_gpus_of_paddle", lambda: 2)
    with pytest.raises(
        errors.InputError, match="^2 GPUs are visible, but Paddle finds none; run tools/doctor.py"
    ):
        devices.check_seen(0)
    devices.check_seen(2)
    monkeypatch.setattr(devices, "num_gpus_of_paddle", lambda: 0)
    devices.check_seen(0)


@pytest.mark.parametrize("kind", [Unreadable, InputError, ValueError])
def test_nothing_is_quoted_of_a_file_that_a_link_leads_to(tmp_path, kind):
    (tmp_path / "private").write_text("secret")
    (tmp_path / "run").mkdir()
    own = tmp_path / "run" / "own"
    link = tmp_path / "run" / "link"
    own.write_text("secret")
    link.symlink_to("../private")
    (tmp_path / "run" / "inside").symlink_to("own")
    for path, quoted in ((own, True), (tmp_path / "run" / "inside", True), (link, False)):
        with (
            pytest.raises(InputError) as caught,
            reading("its file", "a list"),
            open_file(path) as file,
        ):
            raise kind(f"found '{file.read().decode()}'")
        assert ("secret" in str(caught.value)) == quoted
    assert str(caught.value).startswith(
        "its file: can't be read as a list (it is a link to a file outside its folder: name that "
    )


def test_a_configuration_that_a_link_leads_to_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "private.yaml").write_text("token: secret\n")
    (tmp_path / "run" / "config.yaml").symlink_to("../private.yaml")
    with pytest.raises(
        InputError,
        match="run/config.yaml: it is a link to a file outside its folder; name that file",
    ):
        read_yaml(tmp_path / "run" / "config.yaml")


def test_links_of_hugging_faces_cache_keep_their_errors(tmp_path):
    blob = tmp_path / "models--x" / "blobs" / "1"
    file = tmp_path / "models--x" / "snapshots" / "main" / "model.safetensors"
    for path in (blob, file):
        path.parent.mkdir(parents=True)
    blob.write_bytes(b"nothing")
    file.symlink_to("../../blobs/1")
    with pytest.raises(InputError, match="it starts with b'nothing'"), open_weights(file):
        pass


def test_a_configuration_that_the_user_names_may_be_a_link(tmp_path):
    (tmp_path / "own.yaml").write_text("TRAIN: {NUM_EPOCHS: 7}\n")
    folder = tmp_path / "linked"
    folder.mkdir()
    (folder / "mine.yaml").symlink_to(tmp_path / "own.yaml")
    assert read_yaml(folder / "mine.yaml") == {"TRAIN": {"NUM_EPOCHS": 7}}
    (folder / "config.yaml").symlink_to(tmp_path / "own.yaml")
    with pytest.raises(InputError, match="it is a link to a file outside its folder"):
        read_yaml(folder / "config.yaml")


def test_a_best_checkpoint_outside_of_the_run_is_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.json").write_text('{"architecture": "x", "num_classes": "token=hunter2"}')
    (secret / "model.safetensors").touch()
    run = tmp_path / "run" / "checkpoints"
    run.mkdir(parents=True)
    (run / "best").symlink_to(secret)
    with pytest.raises(
        InputError, match="best: it is a link to a file outside the run's folder"
    ) as found:
        find_weights(run.parent)
    assert "hunter2" not in str(found.value)


def test_what_is_deprecated_is_said_once_with_its_end_and_its_replacement(capsys, monkeypatch):
    line = "-old is deprecated since version 1.8 and will be removed in version 1.10; use -new"
    for _ in range(2):
        errors.deprecated("-old", "use -new", since="1.8")
    assert capsys.readouterr() == ("", f"warning: {line}\n")
    # as a part of the package, within another program
    monkeypatch.setattr(errors, "__name__", "paddle_vit_toolkit.errors")
    errors.deprecated.cache_clear()
    with pytest.warns(FutureWarning) as caught:
        errors.deprecated("-old", "use -new", since="1.8")
    assert [str(warning.message) for warning in caught] == [line]


def test_a_noun_is_in_the_singular_for_one_alone():
    assert [errors.counted(count, "image") for count in (0, 1, 2)] == [
        "0 images",
        "1 image",
        "2 images",
    ]
    assert errors.counted(1, "process", "processes") == "1 process"
    assert errors.counted(3, "process", "processes") == "3 processes"
