"""Whole training runs in this process."""

import json
from pathlib import Path

import numpy as np
import pytest
from paddle.distributed.fleet.base import topology
from safetensors.numpy import load_file

import utils
from config import asked_config, default_values
from datasets import ArrayDataset, get_datasets
from errors import InputError
from settings.configuration import NAMED, Option
from settings.parser import pairs
from settings.registry import tasks
from training import engine, parallel
from training.checkpoint import storage
from training.equal_ranks import check_network, check_same
from training.optim import freeze
from training.run import Run
from training.setup import share_batch


def train(options, output, length=None, named=(), draws=False):
    """Trains as main_worker does, on the first ``length`` images, and evaluates on the first 91, an
    odd number; returns a checksum of this rank's weights.

    Args:
        named: options that -o names, which may change what a checkpoint's run had.
        draws: as for ``work``.
    """
    given = [Option(key, value) for key, value in pairs(options, default_values())]
    given += [Option(key, value, NAMED) for key, value in pairs(named, default_values())]
    config, dataset, val = get_datasets(asked_config(None, [*given, Option("OUTPUT", str(output))]))
    if length:
        if not config.EVAL:
            dataset = ArrayDataset(
                config, "train", dataset.images[:length], dataset.labels[:length], dataset.classes
            )
        val = ArrayDataset(config, "val", val.images[:91], val.labels[:91], val.classes)
    model = work(config, dataset, val, draws)
    return float(
        sum(np.abs(p.numpy().astype(np.float64)).sum() for p in model.state_dict().values())
    )


def refused(message, options, output, length=32, named=()):
    """Asserts that training is refused by an error of one line, which contains ``message``."""
    with pytest.raises(InputError) as caught:
        train(options, output, length, named)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def work(config, dataset, val, draws=False):
    """Does what main_worker does in this process; returns the model.

    Args:
        draws: whether curves.png is drawn, which takes as long as all else of a small run; else it
            is an empty file.
    """
    check_same(config, dataset, val)
    config = share_batch(config, utils.world_size())
    run = Run(config, val.classes)
    utils.seed_everything(config.SEED)
    task = tasks.choose(config)(config, val.classes)
    model = task.build_network()
    check_network(model)
    if config.EVAL:
        engine.evaluate_only(task, model, val, run)
        return model
    freeze(config, model)
    if config.DIST.ENGINE == "fleet":
        # Otherwise fleet would keep the first strategy of the process.
        topology._HYBRID_PARALLEL_GROUP = None
        parallel.init(config)
    with pytest.MonkeyPatch.context() as patch:
        if not draws:
            patch.setattr(engine, "plot_curves", lambda metrics, picture, curves: picture.touch())
        engine.fit(task, parallel.wrap_model(config, model), dataset, val, run)
    return model


def weights(output):
    return load_file(Path(output) / "checkpoints" / "last" / "model.safetensors")


def records(output):
    """Returns the lines of metrics.jsonl, without their times and memory."""
    untimed = [
        json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()
    ]
    return [
        {k: v for k, v in r.items() if k not in ("images_per_s", "data_wait", "peak_memory")}
        for r in untimed
    ]


def optimizer_state(checkpoint):
    """Returns the optimizer's state in a checkpoint, whether it is sharded or not."""
    found = {}
    for file in sorted(Path(checkpoint).glob("optimizer*.safetensors")):
        held = load_file(file)
        assert not found.keys() & held.keys()
        found |= held
    return found


def assert_same_run(one, two, without=()):
    """Asserts that the last checkpoints of two runs hold the same bits, and that both metrics.jsonl
    end with the same lines.

    Args:
        without: names of values in metrics.jsonl that aren't compared.
    """
    ends = [Path(run) / "checkpoints" / "last" for run in (one, two)]
    files = [
        {file.name for file in end.iterdir() if not file.name.startswith("optimizer")}
        for end in ends
    ]
    assert files[0] == files[1]
    held = [
        {name: load_file(end / name) for name in files[0] if name.endswith(".safetensors")}
        for end in ends
    ]
    for end, found in zip(ends, held, strict=True):
        found["optimizer"] = optimizer_state(end)
    for name, first in held[0].items():
        second = held[1][name]
        assert first.keys() == second.keys(), name
        for key in first:
            np.testing.assert_array_equal(first[key], second[key], err_msg=f"{name} {key}")
    states = [json.loads((end / "state.json").read_text()) for end in ends]
    for key in ("epoch", "samples", "step", "best", "lr", "scaler", "window"):
        assert states[0][key] == states[1][key], key
    lines = [
        [{k: v for k, v in line.items() if k not in without} for line in records(run)]
        for run in (one, two)
    ]
    assert lines[0][-len(lines[1]) :] == lines[1]


def checkpoint_names(directory):
    """Returns the names in a folder of checkpoints, and asserts that the targets of its links are
    whole.
    """
    found = {entry.name for entry in directory.iterdir()}
    for link in found & {storage.LAST, storage.BEST}:
        storage.verify(directory / link)
    if storage.BEST_EMA in found:
        assert (directory / storage.BEST_EMA).is_file()
    return found


def assert_close(one, two, atol):
    """Asserts that two dicts of arrays have the same names and nearly the same values."""
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], atol=atol, rtol=0, err_msg=name)


# A ResNet-10 on digits.
RESNET_OPTIONS = [
    "MODEL.TYPE", "ResNet", "MODEL.DEPTH", "10", "MODEL.NUM_CLASSES", "10", "DATA.DATASET", "digits",
    "DATA.IMAGE_SIZE", "16", "DATA.IMAGE_CHANNELS", "1", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5",
    "DATA.NUM_WORKERS", "0", "DATA.BATCH_SIZE", "8", "TRAIN.WARMUP_EPOCHS", "0", "TRAIN.NUM_EPOCHS", "1",
    "REPORT", "False",
]  # fmt: skip


SAVE_EVERY_STEP = ["SAVE_STEPS", "1", "KEEP_LAST", "1000"]
