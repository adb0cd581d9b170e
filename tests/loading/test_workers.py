"""The loader's order, its workers and its memory, whatever happens to them."""

import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import paddle
import pytest
import warm
from support.loaders import Numbers, loader_config, training_loader
from support.programs import ROOT, assert_none_left

import loading.workers
from config import get_config, with_values
from errors import InputError, RunError
from loading.samplers import EvalBatchSampler, TrainBatchSampler
from loading.workers import ProcessLoader, on_device
from utils import free_memory


class Multiplying(Numbers):
    """Its samples need a product of matrices that BLAS would share out to threads."""

    def __getitem__(self, key):
        np.dot(*np.ones((2, 1000, 1000)))
        return super().__getitem__(key)


def read(loader, epoch, consumed=0):
    """One pass; its batches are looked at when all have been taken."""
    loader.batch_sampler.set_epoch(epoch, consumed)
    expected = [[index for _, index, _ in keys] for keys in loader.batch_sampler]
    batches = list(loader)
    assert [batch["labels"].tolist() for batch in batches] == expected
    for batch in batches:
        assert batch["pixels"].dtype == paddle.uint8
        assert (batch["pixels"].numpy() == batch["labels"].numpy()[:, None, None, None]).all()
        assert set(batch["epochs"].tolist()) == {epoch}
    return {process for batch in batches for process in batch["processes"].tolist()}


# ---------------------------------------------------------------------- order


@pytest.mark.smoke
@pytest.mark.parametrize(("workers", "prefetch"), [(0, 2), (1, 1), (2, 1), (2, 2), (3, 2)])
def test_passes_follow_each_other_and_their_workers_stay(workers, prefetch):
    loader = training_loader(workers, prefetch)
    assert len(loader) == 5
    first = read(loader, 1)
    assert first == (
        {process.pid for process in loader._workers.processes} if workers else {os.getpid()}
    )
    assert read(loader, 2) == read(loader, 3) == first
    assert bool(read(loader, 5) & first) == (not workers)  # not the pass that was loaded ahead
    assert read(loader, 6, consumed=8) == read(loader, 7)


def test_a_pass_that_is_given_up_leaves_nothing_for_the_next():
    loader = training_loader(2)
    loader.batch_sampler.set_epoch(1)
    next(iter(loader))
    given_up = {process.pid for process in loader._workers.processes}
    assert not read(loader, 2) & given_up  # which also holds the batches to their order


def test_nothing_is_loaded_beyond_the_last_epoch():
    loader = training_loader(1, epochs=2)
    read(loader, 1)
    read(loader, 2)
    assert next(loader._batches, None) is None


def test_evaluations_repeat_themselves_and_one_alone_loads_once():
    for once, then in ((False, 0), (True, None)):
        config = get_config(
            "vit_digits", ["EVAL", str(once), "DATA.NUM_WORKERS", "1", "DATA.IMAGE_SIZE", "2"]
        )
        config.defrost()
        config.DATA.IMAGE_CHANNELS = 3
        loader = ProcessLoader(config, Numbers(), EvalBatchSampler(Numbers(), 3, 1, 2))
        for _ in range(1 if once else 3):
            assert [index for batch in loader for index in batch["labels"].tolist()] == list(
                range(1, 20, 2)
            )
        following = next(loader._batches, None)
        assert (following and then) == then
        assert (following is None) == once


# -------------------------------------------------------------------- workers


def test_a_worker_computes_in_one_thread():
    loader = training_loader(2, dataset=Multiplying())
    for process in read(loader, 1):
        stats = [
            file.read_text().rpartition(")")[2].split()
            for file in Path(f"/proc/{process}/task").glob("*/stat")
        ]
        ticks = [int(user) + int(system) for *_, user, system in (stat[:13] for stat in stats)]
        # OpenBLAS may keep others, which sleep
        assert sum(count > 2 for count in ticks) == 1, ticks


@pytest.mark.smoke
def test_a_worker_that_is_killed_is_named():
    loader = training_loader(2)
    read(loader, 1)
    worker = loader._workers.processes[1].pid
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(
        RunError, match=rf"^loader worker {worker} was killed by SIGKILL; out of memory\?$"
    ):
        for epoch in (2, 3):  # what it had sent already counts
            read(loader, epoch)


def test_a_loader_that_is_dropped_ends_its_workers():
    loader = training_loader(2)
    workers = read(loader, 1)
    del loader
    assert_none_left(workers)


PROGRAM = """
import sys
sys.path[:0] = ["{root}", "{root}/tests"]
import errors
from support.loaders import training_loader
loader = training_loader(2)
loader.batch_sampler.set_epoch(1)
next(iter(loader))
print(*[process.pid for process in loader._workers.processes], flush=True)
{last}
"""


@pytest.mark.parametrize("last", ["sys.stdin.read()", ""])
def test_a_process_leaves_no_worker_and_no_file(last):
    """Killed, or at its end; the memory is in no file, such as those of /dev/shm, that could be
    left.
    """
    command = [warm.python(), "-c", PROGRAM.format(root=ROOT, last=last)]
    streams = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    process = subprocess.Popen(command, env=warm.environment(), **streams)
    workers = [int(number) for number in process.stdout.readline().split()]
    assert len(workers) == 2
    if last:
        assert "/dev/shm" not in Path(f"/proc/{workers[0]}/maps").read_text()
        process.kill()
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == (-signal.SIGKILL if last else 0)
    assert_none_left(workers)


# --------------------------------------------------------------- memory, device


def test_memory_that_is_short_is_an_error_before_anything_starts(monkeypatch):
    monkeypatch.setattr(loading.workers, "free_memory", lambda: 10_000)
    config = loader_config(8, prefetch=2, batch_size=20)
    sampler = TrainBatchSampler(config, Numbers(), 0, 1)
    # one batch: one worker; 3 slots x 20 x 12 bytes x 4
    ProcessLoader(config, Numbers(), sampler, 4)
    monkeypatch.setattr(loading.workers, "free_memory", lambda: 2879)
    with pytest.raises(
        InputError,
        match=r"^3 batches of 20 images for each of 4 processes take 0\.0 GB .* lower DATA\.",
    ):
        ProcessLoader(config, Numbers(), sampler, 4)


def test_free_memory_is_what_the_machine_or_its_container_has():
    total = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert 1e8 < free_memory() < total


def test_free_memory_does_without_a_containers_count_of_files(tmp_path, monkeypatch):
    for name, text in {"max": "100\n", "current": "90\n", "stat": "anon 7\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(
        "utils.Path", lambda path: tmp_path if path == "/sys/fs/cgroup" else Path(path)
    )
    assert free_memory() == 10


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("threaded", [0, 1])
def test_draws_follow_epoch_and_step_and_come_with_their_batch(workers, threaded, monkeypatch):
    monkeypatch.setattr(loading.workers, "num_gpus", lambda: threaded)
    config = loader_config(workers, epochs=3)
    dataset = Numbers()
    config = with_values(config, DATA__DROP_LAST=False, DATA__BATCH_SIZE=6)
    drawn = lambda epoch, step, count: np.full((count, 1), 100 * epoch + step, np.float32)  # noqa: E731
    loader = ProcessLoader(config, dataset, TrainBatchSampler(config, dataset, 0, 1), draw=drawn)
    assert loader.columns == (*dataset.columns, "mixed")
    for epoch, consumed, steps in (
        (1, 0, (1, 2, 3, 4)),
        (2, 0, (1, 2, 3, 4)),
        (2, 12, (3, 4)),
        (3, 0, (1, 2, 3, 4)),
    ):
        loader.batch_sampler.set_epoch(epoch, consumed)
        batches = list(loader)
        assert [batch["mixed"].flatten().tolist() for batch in batches] == [
            [100 * epoch + step] * (2 if step == 4 else 6) for step in steps
        ]
        assert all(set(batch["epochs"].tolist()) == {epoch} for batch in batches)
        # Each of them can be loaded once more, to the bit.
        for step, batch in zip(steps, batches, strict=True):
            names, again = loader.load_again(step)
            assert names == [dataset.name(index) for index in batch["labels"].tolist()]
            assert list(again) == list(loader.columns)
            for name in set(again) - {"processes"}:
                np.testing.assert_array_equal(again[name], batch[name].numpy())
    assert (
        ProcessLoader(config, dataset, TrainBatchSampler(config, dataset, 0, 1)).columns
        == dataset.columns
    )


@pytest.mark.smoke
def test_a_copy_for_the_gpu_lets_other_threads_run_and_shares_nothing():
    interval = sys.getswitchinterval()
    array = np.ones(100_000_000, np.uint8)
    ticks = []
    copies = []

    def tick():
        while len(copies) < 8:
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        while len(copies) < 8:
            start = time.perf_counter()
            loading.workers._copy(array)
            copies.append((start, time.perf_counter()))
    finally:
        copies += [(0, 0)] * 8
        sys.setswitchinterval(interval)
        thread.join()
    quarters = [(start + (end - start) / 4, end - (end - start) / 4) for start, end in copies[:8]]
    # the other thread ran
    assert sum(any(low < moment < high for moment in ticks) for low, high in quarters) >= 4
    copy = loading.workers._copy(array[:4])
    array[:4] = 7
    assert copy.tolist() == [1] * 4
    assert copy.place.is_cpu_place()


def arrays(count, error=None):
    slot = np.empty((2, 2), np.uint8)  # used again and again, as a worker's is
    for number in range(count):
        slot[:] = number
        yield [slot, np.array([number, -number])]
    if error:
        raise error


def test_the_way_to_a_gpu_gives_the_same_batches_and_errors():
    """By the thread of Paddle's loader, here to the CPU."""
    direct, threaded = (list(on_device(arrays(9), threaded)) for threaded in (False, True))
    for number, batch, other in zip(itertools.count(), direct, threaded, strict=False):
        for column, theirs in zip(batch, other, strict=True):
            assert column.dtype == theirs.dtype
            assert column.tolist() == theirs.tolist()
        assert batch[0].tolist() == [[number] * 2] * 2
    assert len(direct) == len(threaded) == 9
    taken = []
    with pytest.raises(RunError, match="no such file"):
        taken.extend(on_device(arrays(3, RunError("no such file")), True))


def test_batches_leave_no_object_behind():
    def lists():
        gc.collect()
        return sum(type(one) is list for one in gc.get_objects())

    def copy(count):
        for _ in on_device(
            ([np.zeros([2, 3], np.uint8), np.zeros(2, np.int64)] for _ in range(count)), False
        ):
            pass

    copy(10)
    before = lists()
    copy(200)
    assert lists() - before < 100


@pytest.mark.parametrize(
    "dtype", ["uint8", "int16", "int32", "int64", "float32", "float64", "bool"]
)
def test_a_column_keeps_its_type_and_values(dtype):
    values = np.arange(-3, 9).astype(dtype).reshape(3, 4)
    ((found,),) = on_device(iter([[values]]), False)
    assert (found.numpy().dtype, found.shape, found.stop_gradient) == (
        np.dtype(dtype),
        [3, 4],
        True,
    )
    np.testing.assert_array_equal(found.numpy(), values)
