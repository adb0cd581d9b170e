"""-batch_size=auto: the largest batch that fits, found once and never changed on resume."""

import itertools
import os
import resource
import signal

import pytest
from support.training_runs import train, work

from config import get_config, resolved_yaml, with_values
from datasets import get_dataloader, get_datasets
from errors import InputError, OutOfMemory
from main_multi_gpu import read_datasets
from settings.configuration import value_sources
from training import batch_size, step_memory
from training.batch_size import agree_on_batch_sizes, largest_that_fits, most_for_epoch
from training.classification import Classification
from training.step_memory import StepMemory
from utils import process_memory

AUTO = ["DATA.BATCH_SIZE", "auto"]
MIB = 1 << 20


def linear(fixed, each, asked=None, fails_at=None):
    """A measurement in MiB that grows by equal steps, and runs out of memory from a size on."""

    def measure(size):
        if asked is not None:
            asked.append(size)
        return None if fails_at and size >= fails_at else (fixed + each * size) * MIB

    return measure


@pytest.mark.parametrize(
    ("fixed", "each", "most", "limit", "size"),
    [
        (500, 60, 128, 20_000, 128),
        (500, 60, 128, 500 + 60 * 64, 64),  # it just fits
        (500, 60, 128, 500 + 60 * 64 - 1, 32),
        (500, 60, 16, 20_000, 16),
        (500, 60, 128, 700, 2),
        (500, 60, 128, 619, None),
        (500, 60, 1, 560, 1),
        (500, 60, 1, 559, None),
        (500, 0, 64, 501, 64),
        (100, 0.001, 128, 1000, 128),
    ],
)
def test_the_largest_batch_on_a_cpu_is_extrapolated(fixed, each, most, limit, size):
    assert largest_that_fits(linear(fixed, each), most, limit * MIB) == size


def test_sizes_on_a_cpu_are_measured_until_memory_has_grown_or_time_is_up():
    asked = []
    assert largest_that_fits(linear(500, 60, asked), 128, 20_000 * MIB) == 128
    assert asked == [2, 4, 8]
    asked.clear()
    assert largest_that_fits(linear(500, 1, asked), 128, 20_000 * MIB, seconds=0) == 128
    assert asked == [2, 4]
    # A size that runs out of memory ends it, however much was free.
    assert largest_that_fits(linear(1, 1, fails_at=16), 128, 20_000 * MIB) == 8
    assert largest_that_fits(linear(1, 1, fails_at=2), 128, 20_000 * MIB) is None


def test_sizes_on_a_gpu_are_tried_until_memory_runs_out():
    asked = []
    assert largest_that_fits(linear(500, 60, asked, fails_at=256), 1024, None, seconds=0) == 128
    assert asked == [2, 4, 8, 16, 32, 64, 128, 256]
    assert largest_that_fits(linear(500, 60), 1024, None) == 1024
    assert largest_that_fits(linear(500, 60, fails_at=2), 1024, None) is None


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ([], 2),
        (["DATA.MULTI_SCALE", "[128,224]"], 2),
        (["DATA.MULTI_SCALE", "[224,256]"], 4),
        (["DATA.MULTI_SCALE", "[224,448]"], 8),
        (["DATA.MULTI_SCALE", "[56,112]"], 2),
        (["DATA.MULTI_SCALE", "[224,448]", "DATA.SCALE_SCHEDULE", "progressive"], 2),
    ],
)
def test_the_first_size_has_two_of_the_largest_images(words, first):
    config = get_config(None, [*AUTO, *words])
    assert batch_size._first(config) == first
    asked = []
    largest_that_fits(linear(1, 1, asked), 16, 99 * MIB, batch_size._first(config))
    assert asked[0] == first


@pytest.mark.parametrize(("schedule", "count"), [("mixed", 2), ("progressive", 8)])
def test_steps_with_the_largest_images_are_measured(tiny, schedule, count):
    words = ["DATA.MULTI_SCALE", "[16,8,12]", "DATA.SCALE_SCHEDULE", schedule]
    config, dataset, _ = get_datasets(get_config(None, [*tiny, *words, "TRAIN.NUM_EPOCHS", "3"]))
    config = step_memory.with_size(step_memory._measured(config), 8)
    loader = get_dataloader(config, dataset, "train")
    loader.batch_sampler.set_epoch(3)
    shapes = {tuple(batch["pixels"].shape) for batch in itertools.islice(loader, 20)}
    assert shapes == {(count, 16, 16, 1)}


def test_memory_is_measured_though_the_loss_is_not_finite(tiny, monkeypatch):
    config, dataset, val = get_datasets(get_config(None, [*tiny, "REPORT_FREQ", "1"]))
    _, run_batches = step_memory._training(config, dataset, val.classes)
    monkeypatch.setattr(Classification, "step", not_finite)
    run_batches(4)


def not_finite(task, network, batch, epoch):
    loss = network(batch["pixels"].astype("float32").transpose([0, 3, 1, 2])).sum(1)
    return {"loss": loss * float("nan")}


@pytest.mark.parametrize(
    ("samples", "batches", "most"),
    [
        (200, 1, 16),
        (1433, 2, 64),
        (1_281_167, 8, 16384),
        (30, 1, 8),
        (30, 3, 4),
        (200, 4, 4),
        (8, 1, 8),
        (5, 1, 4),
        (1, 1, 1),
        (3, 4, 1),
        (64, 16, 1),
    ],
)
def test_an_epoch_keeps_eight_updates_of_eight_images(samples, batches, most):
    assert most_for_epoch(samples, batches) == most


class Measured:
    """Takes the place of ``StepMemory``: memory that grows by equal steps."""

    ready = step_memory.Ready(1433, None)
    fixed, each = 100, 10

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __call__(self, size):
        return (self.fixed + self.each * size) * MIB


@pytest.fixture
def measured(monkeypatch):
    """Replaces the process that measures; returns a function that sets the free memory in MiB."""
    monkeypatch.setattr(batch_size, "StepMemory", Measured)
    monkeypatch.delenv("PADDLE_LOCAL_SIZE", raising=False)
    return lambda free: monkeypatch.setattr(batch_size, "free_memory", lambda: free * MIB)


@pytest.mark.parametrize(
    ("words", "free", "ranks", "size", "told"),
    [
        ([], 9999, 1, 128, "the most that auto takes on a CPU; -batch_size sets another, TRAIN"),
        ([], 9999, 2, 64, "so that an epoch of 1,433 images has at least 8 updates; -batch"),
        ([], 600, 1, 32, "the largest power of two whose training step fits in 0.5 GB, 80% of the"),
        ([], 1200, 2, 32, "fits in 0.5 GB, 80% of the free memory for 2 processes"),
        (["TRAIN.LINEAR_SCALED_LR", "512"], 9999, 1, 128, "TRAIN.LINEAR_SCALED_LR scales the"),
        (["TRAIN.MIXUP_ALPHA", "0.8"], 160, 1, 2, "fits in 0.1 GB"),
        ([], 140, 1, 1, "fits in 0.1 GB"),
    ],
)
def test_the_number_its_reason_and_where_it_came_from(
    tiny, measured, words, free, ranks, size, told
):
    measured(free)
    config, _, _ = read_datasets(get_config(None, [*tiny, *AUTO, *words]), ranks)
    assert (size, 64) == (config.DATA.BATCH_SIZE, config.DATA.BATCH_SIZE_EVAL)
    assert f"batch size: {size} per device, " in config.notes[-1]
    assert told in config.notes[-1]
    reason = value_sources(config)["DATA.BATCH_SIZE"].text()
    assert reason.startswith("auto: ")
    assert f"BATCH_SIZE: {size}\n" in resolved_yaml(config)
    assert reason in resolved_yaml(config).replace("\n    ", " ")


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_the_limit_of_a_process_counts_as_memory(tiny, measured, monkeypatch, kind):
    """An address space of 600 MiB more, as by ulimit -v, is as good as 600 MiB of memory."""
    field = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}[kind]
    measured(9999)
    soft = process_memory(field) + 600 * MIB
    given = resource.getrlimit
    which = getattr(resource, kind)
    monkeypatch.setattr(
        resource, "getrlimit", lambda limit: (soft, soft) if limit == which else given(limit)
    )
    # It is that of each process, however many there are.
    for ranks in (1, 2):
        config, _, _ = read_datasets(get_config(None, [*tiny, *AUTO]), ranks)
        assert config.DATA.BATCH_SIZE == 32
        said = "fits in 0.5 GB, 80% of what the limit of a process leaves (ulimit -v, -d); -batch"
        assert said in config.notes[-1]


def test_a_step_that_fits_with_no_batch_is_one_line(tiny, measured):
    measured(120)
    message = (
        "the smallest batch of the training step takes more than 0.1 GB, 80% of the free memory"
    )
    for words in ([], ["TRAIN.MIXUP_ALPHA", "0.8"]):
        with pytest.raises(OutOfMemory, match=message):
            read_datasets(get_config(None, [*tiny, *AUTO, *words]))


def test_the_evaluations_batch_is_the_trainings(tiny, measured):
    measured(600)
    both = [*tiny, *AUTO, "DATA.BATCH_SIZE_EVAL", "auto"]
    config, _, _ = read_datasets(get_config(None, both))
    assert (config.DATA.BATCH_SIZE, config.DATA.BATCH_SIZE_EVAL) == (32, 32)
    words = [*tiny, "DATA.BATCH_SIZE", "24", "DATA.BATCH_SIZE_EVAL", "auto"]
    config, _, _ = read_datasets(get_config(None, words))
    assert (config.DATA.BATCH_SIZE, config.DATA.BATCH_SIZE_EVAL) == (24, 24)


def test_auto_is_refused_with_a_global_batch_and_where_nothing_replaces_it(tiny):
    with pytest.raises(InputError, match=r"DATA.BATCH_SIZE has no effect with DATA.GLOBAL_BATCH"):
        get_config(None, [*AUTO, "DATA.GLOBAL_BATCH", "64"])
    config, dataset, val = get_datasets(get_config(None, [*tiny, *AUTO, "OUTPUT", "nowhere"]))
    message = "DATA.BATCH_SIZE is 'auto', which only a training or an evaluation replaces"
    for refused in (
        lambda: get_dataloader(config, dataset, "train"),
        lambda: get_dataloader(config, dataset, True),
        lambda: work(config, dataset, val),
    ):
        with pytest.raises(InputError, match=message):
            refused()


def test_a_resumed_run_keeps_its_number(tiny, tmp_path, monkeypatch):
    run = tmp_path / "run"
    train([*tiny, "DATA.BATCH_SIZE", "24"], run, 48)
    # Nothing is measured.
    monkeypatch.delattr(batch_size, "_find")
    for resume in ("auto", str(run), str(run / "checkpoints" / "last")):
        words = [*tiny, *AUTO, "OUTPUT", str(run), "MODEL.RESUME", resume]
        config, _, _ = read_datasets(get_config(None, words), 2)
        assert config.DATA.BATCH_SIZE == 24
        assert "a resumed run keeps it; -batch_size sets another" in config.notes[-1]
    with pytest.raises(InputError, match="no checkpoint at nowhere"):
        read_datasets(get_config(None, [*tiny, *AUTO, "MODEL.RESUME", "nowhere"]))


def test_auto_starts_a_new_run_where_there_is_no_checkpoint(tiny, tmp_path, measured):
    measured(600)
    words = [*tiny, *AUTO, "OUTPUT", str(tmp_path), "MODEL.RESUME", "auto"]
    config, _, _ = read_datasets(get_config(None, words))
    assert config.DATA.BATCH_SIZE == 32


def test_machines_take_the_smallest_number_that_one_of_them_found(tiny, measured, monkeypatch):
    measured(600)
    found, _, _ = read_datasets(get_config(None, [*tiny, *AUTO]))
    written = get_config(None, [*tiny, "DATA.BATCH_SIZE", "32"])
    monkeypatch.setattr(batch_size, "world_size", lambda: 2)
    for others, size in ((16, 16), (32, 32), (64, 32)):
        monkeypatch.setattr(batch_size, "all_gather", lambda own, n=others: [own, (n, own[1])])
        assert size == agree_on_batch_sizes(found).DATA.BATCH_SIZE
        # ``check_same`` refuses numbers that users wrote differently.
        assert agree_on_batch_sizes(written).DATA.BATCH_SIZE == 32
    monkeypatch.setattr(batch_size, "all_gather", lambda own: [own, (16, own[1])])
    assert "the machine with the least memory" in agree_on_batch_sizes(found).notes[-1]
    monkeypatch.setattr(batch_size, "world_size", lambda: 1)
    assert agree_on_batch_sizes(found) is found


@pytest.mark.long
@pytest.mark.smoke
def test_the_memory_of_real_steps(tiny):
    """Memory grows with the batch, and running out of it, or being killed for it, is an answer."""
    words = [*tiny, "DATA.BATCH_SIZE", "2", "MODEL.EMBED_DIM", "256", "MODEL.PATCH_SIZE", "1"]
    config, dataset, val = get_datasets(get_config(None, words))
    with StepMemory(config, dataset, val.classes) as memory:
        assert memory.ready == step_memory.Ready(len(dataset), None)
        small, large = memory(4), memory(64)
        # Each token keeps more than ten times its width for the backward pass.
        assert large - small > 60 * 64 * 256 * 4 * 10
        pid = memory._process.pid
        resource.prlimit(pid, resource.RLIMIT_DATA, (1, resource.RLIM_INFINITY))
        assert memory(256) is None
    assert not os.path.exists(f"/proc/{pid}")
    with StepMemory(config, dataset, val.classes) as memory:
        os.kill(memory._process.pid, signal.SIGKILL)
        assert memory(2) is None
    wrong = with_values(config, MODEL__PRETRAINED="nothing")
    with pytest.raises(InputError, match="no weights at nothing"), StepMemory(wrong, dataset, []):
        pass
    assert process_memory("VmHWM") >= process_memory("VmRSS") > MIB
