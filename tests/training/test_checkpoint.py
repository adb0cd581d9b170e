"""Checkpoints on disk are whole or absent, and are written while the run goes on."""

import errno
import os
import subprocess
import threading

import numpy as np
import paddle
import pytest
from ranks import run_ranks
from safetensors.numpy import load_file

import utils
from config import get_config
from datasets import get_datasets
from errors import InputError, RunError
from models import build_model
from training import engine
from training.checkpoint import Progress, Saver, folder
from training.classification import Classification
from training.optim import LossScaler, ModelEma, build_optimizer
from training.run import Run

STATE = {"epoch": 1, "classes": ["one", "two"]}


def arrays(value=1.0):
    names = (folder.MODEL, folder.EMA, folder.OPTIMIZER)
    return {name: {"a": np.full((2, 3), value, np.float32), "b": np.arange(4)} for name in names}


def write(directory, name="epoch_0001", value=1.0):
    return folder.write_checkpoint(directory, name, arrays(value), STATE)


def entries(directory):
    """Names under a folder of checkpoints, whose links name whole ones."""
    found = {entry.name for entry in directory.iterdir()}
    for link in found & {folder.LAST, folder.BEST}:
        folder.verify(directory / link)
    if folder.BEST_EMA in found:
        assert (directory / folder.BEST_EMA).is_file()
    return found


# --------------------------------------------------------------- the folder


@pytest.mark.smoke
def test_what_is_written_is_found_whole(tmp_path):
    written = write(tmp_path, value=2.0)
    folder.verify(written)
    assert {file.name for file in written.iterdir()} == {*arrays(), "state.json", "SHA256SUMS"}
    assert folder.read_state(written) == STATE
    assert folder.classes_of(tmp_path / "last") == ["one", "two"]
    for name, expected in arrays(2.0).items():
        found = load_file(written / name)
        assert found.keys() == expected.keys()
        for key in expected:
            np.testing.assert_array_equal(found[key], expected[key])
    assert entries(tmp_path) == {"epoch_0001", "last"}
    assert os.readlink(tmp_path / "last") == "epoch_0001"
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=written, check=True, capture_output=True)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, os.unlink])
@pytest.mark.parametrize("name", [folder.MODEL, folder.EMA, folder.OPTIMIZER, folder.STATE])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    written = write(tmp_path)
    damage(written / name)
    what = "can't be read (No such file" if damage is os.unlink else "isn't what was written (its SHA-256 differs)"
    with pytest.raises(InputError) as caught:
        folder.verify(written)
    assert f"{written}: damaged checkpoint: {name} {what}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: None, r"SHA256SUMS can't be read \(FileNotFoundError\)"),
        (lambda text: text.splitlines(True)[0], r"SHA256SUMS has no line for optimizer.safetensors"),
        (lambda text: "".join(text.splitlines(True)[:-1]), r"SHA256SUMS has no line for state.json"),
        (lambda text: "é" + text, r"SHA256SUMS can't be read \(UnicodeDecodeError\)"),
        (lambda text: f"{text}{'0' * 64}  ../other\n", r"SHA256SUMS names a file elsewhere"),
    ],
)
def test_damaged_sums_are_named(tmp_path, change, message):
    sums = write(tmp_path) / folder.SUMS
    text = change(sums.read_text())
    sums.unlink()
    if text is not None:
        sums.write_text(text)
    with pytest.raises(InputError, match=f"damaged checkpoint: {message}"):
        folder.verify(tmp_path / "epoch_0001")


def test_what_is_no_checkpoint_is_told_from_a_damaged_one(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=f"no checkpoint at {path}: expected a folder that holds state.json"):
            folder.verify(path)


@pytest.mark.parametrize(("name", "epoch"), [("MAE-Epoch-12-Loss-0.93", "12"), ("vit", "N")])
def test_weights_in_a_checkpoints_place_are_told_from_nothing(tmp_path, name, epoch):
    """PaddleViT's -resume takes a file, without its ending."""
    file = tmp_path / f"{name}.pdparams"
    file.touch()
    for asked in (file, tmp_path / name):
        with pytest.raises(InputError) as caught:
            folder.verify(asked)
        assert str(caught.value) == (
            f"no checkpoint at {asked}: expected a folder that holds state.json, such as <run>/checkpoints/last; {file}"
            f" is a file: -pretrained takes its weights, and -last_epoch={epoch} goes on with the schedule, without the"
            " optimizer's state"
        )


@pytest.mark.parametrize("failing", range(1, 6))
def test_a_failing_disk_leaves_nothing_and_last_where_it_was(tmp_path, monkeypatch, failing):
    write(tmp_path)
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, "epoch_0002")
    assert len(calls) == failing
    assert entries(tmp_path) == {"epoch_0001", "last"}
    monkeypatch.undo()
    write(tmp_path, "epoch_0002")
    assert os.readlink(tmp_path / "last") == "epoch_0002"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_not_saved(tmp_path, value):
    write(tmp_path)
    files = arrays()
    files[folder.EMA]["a"][1, 2] = value
    with pytest.raises(RunError, match=r"epoch_0002 isn't saved: a of ema.safetensors holds NaN or infinite values"):
        folder.write_checkpoint(tmp_path, "epoch_0002", files, STATE)
    assert entries(tmp_path) == {"epoch_0001", "last"}


def test_checkpoints_are_found_in_the_order_of_training(tmp_path):
    moments = [(0, 0), (0, 64), (9, 0), (9, 999_999_999), (9, 1_000_000_000), (10, 0), (10, 12_800), (10_000, 0)]
    names = [folder.folder_name(*moment) for moment in moments]
    assert names[2:7] == [
        "epoch_0009", "epoch_0010_sample_999999999", "epoch_0010_sample_1000000000", "epoch_0010",
        "epoch_0011_sample_000012800",
    ]  # fmt: skip
    for name in [*reversed(names), ".epoch_0012.77", "damaged_epoch_0012", "epoch_0012.old"]:
        (tmp_path / name).mkdir()
    assert [found.name for found in folder.find_checkpoints(tmp_path)] == names


# (epoch, samples of the next, what is the best) as they are saved, and what stays in the end
@pytest.mark.parametrize(
    ("keep_last", "save_freq", "saved", "kept"),
    [
        (1, 0, [(1, 0, ""), (2, 0, ""), (2, 8, "")], [(2, 8)]),
        (2, 0, [(1, 0, ""), (1, 8, ""), (2, 0, "")], [(1, 8), (2, 0)]),
        (1, 2, [(e, s, "") for e in range(1, 6) for s in (0, 8)], [(2, 0), (4, 0), (5, 8)]),
        (1, 0, [(1, 0, "val"), (2, 0, "ema"), (3, 0, ""), (4, 0, "")], [(1, 0), (2, 0), (4, 0)]),
        (1, 0, [(1, 0, "val ema"), (2, 0, "val"), (3, 0, "ema"), (4, 0, "")], [(2, 0), (3, 0), (4, 0)]),
        (3, 10, [(e, 0, "val") for e in range(1, 12)], [(9, 0), (10, 0), (11, 0)]),
    ],
)
def test_the_last_the_best_and_every_nth_stay(tmp_path, keep_last, save_freq, saved, kept):
    for epoch, samples, best in saved:
        name = folder.folder_name(epoch, samples)
        write(tmp_path, name)
        if "val" in best:
            folder.point(tmp_path / folder.BEST, name)
        if "ema" in best:
            folder.point(tmp_path / folder.BEST_EMA, f"{name}/{folder.EMA}")
        entries(tmp_path)
        folder.remove_superseded(tmp_path, keep_last, save_freq)
        assert os.readlink(tmp_path / "last") == name
    links = {folder.LAST, folder.BEST, folder.BEST_EMA}
    assert entries(tmp_path) - links == {folder.folder_name(*moment) for moment in kept}


# ---------------------------------------------------------------- the saver


class Training:
    """A saver and what it saves."""

    def __init__(self, output, options):
        self.config, self.train, _ = get_datasets(get_config(None, [*options, "OUTPUT", str(output)]))
        utils.seed_everything(0)
        self.model = build_model(self.config)
        self.ema, self.optimizer = ModelEma(self.model, 0.5, False), build_optimizer(self.config, self.model)
        self.run = Run(self.config, self.train.classes)
        self.run.begin()
        parts = {"val": self.model, "ema": self.ema.model}
        self.saver = Saver(self.config, self.run, parts, self.optimizer, LossScaler(False), self.train)

    def update(self, update):
        self.model(paddle.ones([2, 1, 8, 8])).square().sum().backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        self.ema.update(self.model, update)

    def held(self):
        return {
            folder.MODEL: {k: v.numpy().copy() for k, v in self.model.state_dict().items()},
            folder.EMA: {k: v.numpy().copy() for k, v in self.ema.model.state_dict().items()},
            folder.OPTIMIZER: {
                f"{name}/moment1_0": self.optimizer.state_dict()[f"{parameter.name}_moment1_0"].numpy().copy()
                for name, parameter in self.model.named_parameters()
            },
        }

    def assert_saved(self, name, held):
        for file, expected in held.items():
            found = load_file(self.run.checkpoints / name / file)
            for key, value in expected.items():
                value = value if found[key].shape == value.shape else value.T
                same = np.array_equal(found[key], value) or np.array_equal(found[key], value.T)
                assert same, f"{file} {key}"


@pytest.fixture
def held_writing(monkeypatch):
    """Holds writing until it is set; ``begun`` lists the names of what was begun."""
    may, written = threading.Event(), folder.write_checkpoint
    may.begun = []

    def writing(directory, name, *rest):
        may.begun.append(name)
        assert may.wait(60)
        return written(directory, name, *rest)

    monkeypatch.setattr(folder, "write_checkpoint", writing)
    yield may
    may.set()


@pytest.mark.smoke
def test_a_checkpoint_holds_the_state_at_its_step(tmp_path, tiny, held_writing):
    training = Training(tmp_path, tiny)
    training.update(0)
    expected = training.held()
    training.saver.save(Progress(samples=8, step=1))
    training.update(1)
    for file, now in training.held().items():
        assert any(not np.array_equal(now[key], value) for key, value in expected[file].items()), file
    held_writing.set()
    training.saver.wait()
    training.assert_saved("epoch_0001_sample_000000008", expected)
    state = folder.read_state(tmp_path / "checkpoints" / "last")
    assert (state["epoch"], state["samples"], state["step"], state["ranks"], state["format"]) == (0, 8, 1, 1, 2)
    assert (state["images"], state["classes"], state["lr"]) == (1433, training.train.classes, 0.003)
    assert state["config"]["MODEL"]["EMBED_DIM"] == 16


def test_one_checkpoint_is_written_at_a_time(tmp_path, tiny, held_writing):
    saver = Training(tmp_path, tiny).saver
    saver.save(Progress(epoch=1, step=8))
    second = threading.Thread(target=saver.save, args=[Progress(epoch=2, step=16)])
    second.start()
    second.join(0.3)
    assert second.is_alive()
    assert held_writing.begun == ["epoch_0001"]
    held_writing.set()
    second.join(60)
    saver.save(Progress(epoch=2, step=16))  # is there already
    saver.wait()
    assert held_writing.begun == ["epoch_0001", "epoch_0002"]
    assert entries(tmp_path / "checkpoints") == {"epoch_0001", "epoch_0002", "last"}


def fail_once(monkeypatch_target, error):
    """The next checkpoint fails; those after it don't."""
    written = monkeypatch_target.write_checkpoint

    def failing(*args):
        monkeypatch_target.write_checkpoint = written
        raise error

    monkeypatch_target.write_checkpoint = failing


def told_by(output, options, error):
    """What each rank is told of a failure: by ``wait`` twice, after a good save, and by the last ``wait``."""
    training, told = Training(output, options), []

    def wait(**last):
        try:
            told.append(training.saver.wait(**last))
        except RunError as raised:
            told.append(str(raised))

    training.saver.save(Progress(epoch=1, step=8))
    wait()
    for epoch in (2, 3):
        fail_once(folder, error)
        training.saver.save(Progress(epoch=epoch, step=8 * epoch))
        wait(last=epoch == 3)
        if "stop" in options:
            return told
        wait()
        training.saver.save(Progress(epoch=epoch + 2, step=8 * epoch + 16))
        wait()
    return told


def test_a_failure_is_told_once_or_ends_the_run_on_every_rank(tmp_path, tiny):
    full = OSError(errno.ENOSPC, "No space left on device")
    problem = "{} wasn't saved ([Errno 28] No space left on device): free some space; the last whole checkpoint is {}"
    runs = [(told_by, tmp_path / how, [*tiny, "SAVE_ON_ERROR", how], full) for how in ("stop", "continue")]
    nan = RunError("epoch_0002 isn't saved: NaN")
    runs.append((told_by, tmp_path / "nan", [*tiny, "SAVE_ON_ERROR", "stop"], nan))
    for stopped, went_on, not_finite in run_ranks(each, runs):
        assert stopped == [None, problem.format("epoch_0002", f"{tmp_path}/stop/checkpoints/epoch_0001")]
        assert went_on[:4] == [None, None, None, None]
        assert went_on[4] == problem.format("epoch_0003", f"{tmp_path}/continue/checkpoints/epoch_0004")
        assert not_finite == [None, str(nan)]
    log = (tmp_path / "continue" / "log.txt").read_text()
    first = problem.format("epoch_0002", f"{tmp_path}/continue/checkpoints/epoch_0001")
    assert log.count(f"{first}; the run goes on (SAVE_ON_ERROR)") == 1
    assert entries(tmp_path / "continue" / "checkpoints") == {"epoch_0004", "epoch_0005", "last"}


def each(calls):
    return [function(*args) for function, *args in calls]


@pytest.mark.parametrize(
    ("every", "saved", "step", "due"),
    [(0, 0, 100, False), (5, 0, 4, False), (5, 0, 5, True), (5, 5, 9, False), (5, 4, 6, True)],
)
def test_save_steps_counts_multiples_passed(tmp_path, tiny, every, saved, step, due):
    saver = Training(tmp_path, [*tiny, "SAVE_STEPS", str(every)]).saver
    saver.begin(Progress(step=saved))
    assert saver.due(Progress(step=step)) == due


@pytest.mark.parametrize(
    ("metric", "improved", "best"),
    [("acc1", [True, True, False, False], 2), ("loss", [True, True, False, True], 4)],
)
def test_the_best_is_by_the_metric_asked_for(metric, improved, best):
    task, progress, found = Classification(get_config(None, ["BEST_METRIC", metric])), Progress(), []
    for epoch, (acc1, loss) in enumerate([(50.0, 2.0), (60.0, 1.5), (60.0, 1.5), (55.0, 1.0)], 1):
        progress.end_epoch(epoch)
        metrics = {"val": {"acc1": acc1, "loss": loss, "class_acc": {"a": acc1}}}
        found.append(engine._keep_best(task, progress, metrics) == ("val",))
    assert found == improved
    assert (progress.best["val"]["epoch"], progress.best["val"]["checkpoint"]) == (best, f"epoch_000{best}")
    assert "class_acc" not in progress.best["val"]
