"""Collectives over two real processes; seeds, files."""

import contextlib
import gc
import logging
import os
import pickle
import subprocess
import sys

import numpy as np
import paddle
import pytest
from support.programs import ROOT
from support.ranks import run_ranks

import utils
from errors import InputError, RunError
from launch.startup import without_collection


def collectives():
    """What each of two ranks sees; asserted in the test."""
    r = utils.rank()
    seen = {}
    seen["sum"] = utils.all_reduce_sum(paddle.to_tensor([1.0, r])).tolist()
    seen["mean"] = utils.all_reduce_mean(paddle.to_tensor([1.0, r])).tolist()
    values = {
        "loss": paddle.to_tensor(1.0 + r),
        "grid": paddle.to_tensor([[r, 2.0], [3.0, 4.0]]),
        "count": paddle.to_tensor([3 * r + 1], dtype="int64"),
    }
    for average in (True, False):
        reduced = utils.reduce_dict(values, average=average)
        seen[f"dict {average}"] = {key: tensor.tolist() for key, tensor in reduced.items()}
    seen["untouched"] = values["loss"].item() == 1.0 + r
    try:
        utils.reduce_dict({f"key{r}": paddle.ones([1])})
    except RunError as error:
        seen["mismatch"] = str(error)
    try:
        utils.reduce_dict({"same": paddle.ones([1 + r])})
    except RunError as error:
        seen["shapes"] = str(error)
    objects = [
        None if r else "",
        {"rank": r, "list": list(range(1000 * r))},
        np.arange(400_000 * (1 + r)),
    ]
    gathered = [utils.all_gather(thing) for thing in objects]
    seen["empty"] = gathered[0]
    seen["dicts"] = [len(thing["list"]) for thing in gathered[1]]
    seen["megabytes"] = [int(thing.sum()) for thing in gathered[2]]
    return seen


@pytest.mark.smoke
def test_collectives_on_two_ranks():
    for seen in run_ranks(collectives):
        assert seen["sum"] == [2.0, 1.0]
        assert seen["mean"] == [1.0, 0.5]
        assert seen["dict True"] == {"loss": 1.5, "grid": [[0.5, 2.0], [3.0, 4.0]], "count": [2.5]}
        assert seen["dict False"] == {"loss": 3.0, "grid": [[1.0, 4.0], [6.0, 8.0]], "count": [5]}
        assert seen["untouched"]
        assert "key0" in seen["mismatch"]
        assert "key1" in seen["mismatch"]
        assert "same" in seen["shapes"]
        assert seen["empty"] == ["", None]
        assert seen["dicts"] == [0, 1000]
        assert seen["megabytes"] == [sum(range(400_000)), sum(range(800_000))]


def exchanged():
    """What this rank got of each rank: its length, whether of the same dtype, values. They are few,
    then many.
    """
    r = utils.rank()
    ranks = range(utils.world_size())
    told = []
    for length in (lambda r: r, lambda r: 3 * (r + 1), lambda r: 400_000 * (2 - r % 2)):
        for kind in (np.float32, np.uint8):
            parts = np.stack([np.full([2, length(r)], 10 * r + other, kind) for other in ranks])
            found = utils.all_to_all(parts, [*map(length, ranks)])
            assert {part.shape[0] for part in found} == {2}
            told.append(
                [(part.shape[1], part.dtype == kind, set(part.ravel().tolist())) for part in found]
            )
    return told


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.smoke), 3, 4])
def test_each_rank_gets_its_own_part_of_all(ranks):
    for own, told in enumerate(run_ranks(exchanged, ranks=ranks)):
        for turn, found in enumerate(told):
            length = [lambda r: r, lambda r: 3 * (r + 1), lambda r: 400_000 * (2 - r % 2)][
                turn // 2
            ]
            assert found == [
                (length(r), True, {10 * r + own} if length(r) else set()) for r in range(ranks)
            ]


def test_collectives_on_one_process():
    tensors = {"a": paddle.to_tensor(3.0), "b": paddle.to_tensor([2], dtype="int64")}
    assert {key: value.tolist() for key, value in utils.reduce_dict(tensors).items()} == {
        "a": 3.0,
        "b": [2.0],
    }
    assert utils.reduce_dict({}) == {}
    assert utils.all_gather("x") == ["x"]


def test_more_processes_than_there_are_is_an_error():
    cores = utils.num_cores()
    assert utils.num_processes(-1) == cores
    assert utils.num_processes(1) == 1
    with pytest.raises(InputError, match=rf"asks for {cores + 6} processes, found {cores} cores"):
        utils.num_processes(cores + 6)
    for none in (0, -2):
        with pytest.raises(
            InputError, match=f"asks for {none} processes, expected 1 or more, or -1 for all"
        ):
            utils.num_processes(none)


def test_average_meter_weighs_by_samples():
    meter = utils.AverageMeter()
    assert meter.avg == 0.0
    meter.update(1.0, 3)
    meter.update(5.0, 1)
    assert (meter.avg, meter.count) == (2.0, 4)


def test_seeding_is_a_function_of_seed_step():
    def draw(seed, step):
        utils.seed_step(seed, step)
        return paddle.rand([4]).tolist()

    assert draw(1, 2) == draw(1, 2)
    assert len({tuple(draw(*pair)) for pair in [(1, 2), (2, 1), (1, 3), (0, 2)]}) == 4
    utils.seed_everything(5)
    first = (np.random.rand(), paddle.rand([1]).item())
    utils.seed_everything(5)
    assert first == (np.random.rand(), paddle.rand([1]).item())


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(ZeroDivisionError), utils.writing_whole(file) as handle:
        handle.write("half")
        raise ZeroDivisionError
    assert file.read_text() == "old"
    with utils.writing_whole(file) as handle:
        handle.write("new")
    assert file.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_free_memory_is_the_least_of_the_machines_and_its_containers(monkeypatch, tmp_path):
    monkeypatch.setattr(utils, "Path", lambda path: tmp_path / path[1:])
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    assert utils.free_memory() == sys.maxsize  # no /proc: unknown
    (group / "memory.current").write_text("20000\n")
    (group / "memory.stat").write_text("anon 5\nfile 7000\ninactive_file 300\nactive_file 700\n")
    for available, limit, free in (
        (30, "40000", 21_000),
        (20, "40000", 20 * 1024),
        (30, "max", 30 * 1024),
    ):
        (tmp_path / "proc" / "meminfo").write_text(
            f"MemTotal: 90 kB\nMemFree: 10 kB\nMemAvailable: {available} kB\n"
        )
        (group / "memory.max").write_text(f"{limit}\n")
        assert utils.free_memory() == free


def test_a_model_may_take_what_is_free_and_swap(monkeypatch, tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "status").write_text("VmData:\t  900 kB\n")
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 30 kB\nSwapFree:  5000 kB\n")
    monkeypatch.setattr(utils, "Path", lambda path: tmp_path / path[1:])
    limits = []
    monkeypatch.setattr(utils.resource, "setrlimit", lambda _, limit: limits.append(limit))
    before = utils.resource.getrlimit(utils.resource.RLIMIT_DATA)
    with utils.within_memory():
        pass
    assert limits == [((900 + 5000 + 30) * 1024, before[1]), before]


def test_a_log_line_holds_nothing_that_a_terminal_acts_on(tmp_path, capsys):
    _, log = utils.get_loggers()
    utils.open_logs(tmp_path)
    log.info("class \x1b[2J\r\u202e犬\nthe next line")
    for text in (capsys.readouterr().out, (tmp_path / "log.txt").read_text(encoding="utf-8")):
        first, second = text.splitlines()
        assert first.endswith(r" class \x1b[2J\r\u202e犬")
        assert second == "the next line"


def test_what_a_stranger_says_as_a_rank_is_not_unpickled(monkeypatch):
    """It has no proof by the run's key; a rank's own words of another turn, or as another rank's,
    have a wrong one.
    """
    monkeypatch.setattr(utils, "world_size", lambda: 2)
    monkeypatch.setattr(utils, "rank", lambda: 0)

    def gather(parts, tensor):
        parts += [tensor, tensor]  # as if rank 1 had said it, too

    monkeypatch.setattr(utils.dist, "all_gather", gather)
    unpickled = []
    loads = pickle.loads
    monkeypatch.setattr(utils.pickle, "loads", lambda data: unpickled.append(data) or loads(data))
    message = (
        "a message claiming to be from rank 1 failed authentication:"
        " it came from another program, or PADDLE_VIT_SECRET differs between the ranks"
    )
    with pytest.raises(RunError, match=f"^{message}$"):
        utils.all_gather("a")
    assert len(unpickled) == 1  # this rank's


def test_a_log_on_a_full_disk_is_told_once_and_ends_nothing(capsys, tmp_path):
    log = logging.Logger("full")
    handler = utils._LogFile(tmp_path / "log.txt")
    handler.setStream(open("/dev/full", "w")).close()  # noqa: SIM115
    log.addHandler(handler)
    log.error("on stderr already")
    for _ in range(2):
        log.info("a line")
    with contextlib.suppress(OSError):
        log.handlers[0].close()
    told = f"{tmp_path}/log.txt: can't be written (No space left on device); the run continues\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("path", ["/x:", ":/x", "/x::/y", ":"])
def test_programs_that_are_started_find_no_library_in_the_current_folder(path):
    environment = {**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": str(ROOT)}
    code = "import os, utils; print(os.environ['LD_LIBRARY_PATH'])"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    entries = found.stdout.splitlines()[-1].split(":")
    assert set(filter(None, path.split(":"))) <= set(entries)
    assert "" not in entries or entries == [""]


def test_the_collector_of_garbage_is_left_as_it_was():
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
