"""A sharded run's folder is moved, removed or full at each moment of a save, on either rank:
nothing is lost.
"""

import re
import shutil
import sys
import time
from pathlib import Path

import paddle
import pytest
from paddle.distributed.fleet.base import topology
from support.ranks import run_ranks
from support.sharding import STAGE_1

import utils
from config import get_config
from datasets import get_datasets
from errors import RunError
from models import build_model
from training import parallel
from training.checkpoint import Progress, Saver, storage
from training.checkpoint.state import newest_whole, read_state
from training.optim import LossScaler, build_optimizer
from training.run import Run

CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink")
_hook = {"moment": None}


def call_at(moment, action):
    """Calls ``action`` before this process's ``moment``-th change of a checkpoint from now on.
    Returns what tells whether it did.
    """

    def look(event, paths):
        if event in CHANGES and isinstance(paths[0], (str, Path)) and "epoch_" in str(paths[0]):
            state["left"] -= 1
            if state["left"] == 0:
                action()

    state = {"left": moment}
    if _hook["moment"] is None:  # a hook stays as long as its process
        sys.addaudithook(lambda event, args, hook=_hook: hook["moment"](event, args))
    _hook["moment"] = look
    return lambda: state["left"] <= 0


def run_moved(run):
    run.rename(run.with_name("moved"))


def run_removed(run):
    shutil.rmtree(run, ignore_errors=True)


def checkpoints_moved(run):
    (run / "checkpoints").rename(run / "moved")


def begun_removed(run):
    for begun in (run / "checkpoints").glob(".epoch_0003*"):
        shutil.rmtree(begun, ignore_errors=True)


def save_at_each_moment(options, output, fault, faulty, slow):
    """What each rank is told by the save of a third epoch, with a fault at each moment on the rank
    ``faulty``.

    Args:
        slow: the rank whose writing begins late.
    """
    config, train, _ = get_datasets(get_config(None, options))
    if utils.world_size() > 1:
        topology._HYBRID_PARALLEL_GROUP = None
        parallel.init(config)
    model = build_model(config)
    optimizer = parallel.wrap_optimizer(config, build_optimizer(config, model))
    for parameter in model.parameters():
        parameter.grad = paddle.ones_like(parameter)
    parallel.reduce_gradients(model, optimizer)
    optimizer.step()
    optimizer.clear_grad()
    told = []
    moment = 0
    fired = True
    while fired:
        moment += 1
        place = output / str(moment)
        given = get_config(None, [*options, "OUTPUT", str(place / "run")])
        run = Run(given, train.classes)
        run.begin()
        saver = Saver(given, run, {"val": model}, optimizer, LossScaler(False), train)
        for epoch in (1, 2):
            saver.save(Progress(epoch=epoch, step=epoch))
        saver.wait()
        started = time.monotonic()
        if utils.rank() == faulty:
            done = call_at(moment, lambda path=place / "run": fault(path))
        else:
            done = call_at(1, lambda: time.sleep(0.2 * (utils.rank() == slow)))
        try:
            saver.save(Progress(epoch=3, step=3), improved=("val",))
            saver.wait(last=True)
            told.append("")
        except RunError as error:
            told.append(str(error))
        assert time.monotonic() - started < 10
        fired = utils.all_gather(done())[faulty]
        _hook["moment"] = lambda event, args: None
    return told


def assert_whole(checkpoint, ranks):
    assert checkpoint.name == "epoch_0003"
    names = set(storage.verify(checkpoint))
    assert {file.name for file in checkpoint.iterdir()} == names
    assert {storage.share_name(owner, ranks) for owner in range(ranks)} <= names or ranks == 1
    assert read_state(checkpoint)["epoch"] == 3


SAVED = re.compile(
    r"epoch_0003 wasn't saved \(.*\): its folder was moved or removed; restore it;"
    r" it is saved in (\S+); resume from there with a new -output"
)


FAULTS = [run_moved, run_removed, checkpoints_moved, begun_removed]


RANKS = [(0, 1), (1, 0), *(pytest.param(place, place, marks=pytest.mark.slow) for place in (0, 1))]


@pytest.mark.parametrize(("faulty", "slow"), RANKS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_lost_at_any_moment_of_a_save_loses_nothing(tmp_path, tiny, fault, faulty, slow):
    options = [*tiny, *STAGE_1, "KEEP_LAST", "1", "SAVE_FREQ", "0"]
    first, second = run_ranks(save_at_each_moment, options, tmp_path, fault, faulty, slow)
    assert first == second
    assert_nothing_lost(tmp_path, fault, first, 2)
    assert len(first) > (12 if faulty == 0 else 3)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_lost_at_any_moment_of_one_ranks_save_loses_nothing(tmp_path, tiny, fault):
    told = save_at_each_moment([*tiny, "KEEP_LAST", "1", "SAVE_FREQ", "0"], tmp_path, fault, 0, 0)
    assert_nothing_lost(tmp_path, fault, told, 1)
    assert len(told) > 12


def assert_nothing_lost(output, fault, first, ranks):
    """Each save of the third epoch was made where the run is or, as was ``told``, beside it."""
    assert first[-1] == ""  # without a fault
    for moment, told in enumerate(first, 1):
        place = output / str(moment)
        if told:
            assert fault is not run_moved, told
            assert_whole(Path(SAVED.fullmatch(told)[1]), ranks)
            assert Path(SAVED.fullmatch(told)[1]).parent == place / "run-saved" / "checkpoints"
            continue
        kept = (
            place
            / ("moved" if fault is run_moved and moment < len(first) else "run")
            / "checkpoints"
        )
        if fault is checkpoints_moved and not kept.exists():
            kept = place / "run" / "moved"  # all was written
        assert_whole(newest_whole(kept), ranks)
        assert [(kept / link).resolve().name for link in (storage.LAST, storage.BEST)] == [
            "epoch_0003"
        ] * 2
        assert not list(kept.glob(".*"))
        assert not (place / "run").exists() or kept.is_relative_to(place / "run")
