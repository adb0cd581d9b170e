"""What travels between host and device in a step: the columns of its batch, which the loader sends,
and nothing else.

On a GPU any other copy makes the host wait until all is done that was asked of the device before.
Here each is counted by patching what makes it, in the thread that trains (tools/gpu/probe.py, as
``tools/doctor.py --gpu`` does).
"""

import itertools
from collections import Counter

import numpy as np
import paddle
import pytest
from conftest import without, write_images
from support.optim_model import OPTIMIZERS
from support.training_runs import train

from config import get_config
from datasets import ArrayDataset, get_dataloader, get_datasets
from loading import workers
from models import build_model
from tools.gpu import probe
from training import engine, setup
from training.checkpoint import Progress
from training.classification import Classification
from training.optim import LossScaler, freeze
from training.run import Run

MIXED = ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.CUTMIX_ALPHA", "1.0"]
DROPPED = ["MODEL.DROPPATH", "0.2", "MODEL.DROPOUT", "0.1", "MODEL.ATTENTION_DROPOUT", "0.1"]
CONVMIXER = ["MODEL.TYPE", "ConvMixer", "MODEL.KERNEL_SIZE", "3"]  # convolutions and batch norms
# What changes a step, by its options: none of them may copy anything. A key that changes a step
# belongs here.
STEPS = {
    "plain": [],
    "mixup": ["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.MIXUP_MODE", "pair"],
    "mixup and CutMix": [*MIXED, "TRAIN.MIXUP_MODE", "elem"],
    "CutMix in bounds": ["TRAIN.CUTMIX_MINMAX", "[0.2,0.8]"],
    "erased to noise": ["TRAIN.RANDOM_ERASE_PROB", "0.5"],
    "erased to a colour": ["TRAIN.RANDOM_ERASE_PROB", "0.5", "TRAIN.RANDOM_ERASE_MODE", "rand"],
    "erased to the mean": ["TRAIN.RANDOM_ERASE_PROB", "0.5", "TRAIN.RANDOM_ERASE_MODE", "const"],
    "average": ["TRAIN.MODEL_EMA", "True"],
    **{name: ["TRAIN.OPTIMIZER.NAME", name] for name in OPTIMIZERS},
    "rates by layer": ["TRAIN.LAYER_DECAY", "0.7"],
    "frozen": ["TRAIN.FREEZE", '["patch_embed.*"]'],
    "clipped by norm": ["TRAIN.GRAD_CLIP", "0.1"],
    "clipped by value": ["TRAIN.GRAD_CLIP", "0.1", "TRAIN.GRAD_CLIP_MODE", "value"],
    "clipped by unit": ["TRAIN.GRAD_CLIP", "0.1", "TRAIN.GRAD_CLIP_MODE", "agc"],
    "accumulated": ["TRAIN.ACCUM_ITER", "2"],
    "soft labels": ["TRAIN.LOSS", "soft_target", "TRAIN.SMOOTHING", "0.1"],
    "yes or no": ["TRAIN.LOSS", "bce", "TRAIN.BCE_TARGET_THRESH", "0.2", *MIXED],
    "class weights": ["TRAIN.CLASS_WEIGHTS", "auto", "TRAIN.SMOOTHING", "0.1"],
    "batch norm at the head": ["MODEL.HEAD_BATCH_NORM", "True"],
    "recomputed": ["MODEL.RECOMPUTE", "True", *DROPPED],
    "dropped": DROPPED,
    "patches dropped": ["MODEL.PATCH_DROP", "0.5"],
    "augmented again": ["TRAIN.REPEATED_AUGMENT", "2", "DATA.SAMPLER", "balanced"],
    "registers, scales": [
        "MODEL.REG_TOKENS",
        "2",
        "MODEL.INIT_VALUES",
        "0.1",
        "MODEL.QK_NORM",
        "True",
    ],
    "ConvMixer": CONVMIXER,
}


@pytest.fixture
def transfers(monkeypatch):
    """The running count of copies by what is called and by which file of the toolkit."""
    # the loader's own copies are made in its thread
    monkeypatch.setattr(workers, "num_gpus", lambda: 1)
    with probe.counting_copies() as count:
        yield count


def by_file(counts):
    """Counts without lines' numbers."""
    found = Counter()
    for asked, number in counts.items():
        found[asked.rpartition(":")[0] or asked] += number
    return dict(found)


def of_steps(transfers, options, output, steps=7):
    """What the third and each further step copied; before, the first ones may have made what stays."""
    config, data, val = get_datasets(
        get_config(None, [*options, "DATA.BATCH_SIZE", "4", "OUTPUT", str(output)])
    )
    data = ArrayDataset(
        config, "train", data.images[: 4 * steps], data.labels[: 4 * steps], data.classes
    )
    run = Run(config, val.classes)
    model = build_model(config)
    freeze(config, model)
    training = setup.prepare(Classification(config), model, data, run)
    run.begin()
    run.start_steps(1, steps, 0)
    counts = []
    engine.train_one_epoch(training, Progress(), lambda *_: counts.append(Counter(transfers)))
    return [by_file(after - before) for before, after in itertools.pairwise(counts[1:])]


@pytest.mark.smoke
@pytest.mark.parametrize("step", STEPS)
def test_a_step_copies_nothing_but_its_batch(tmp_path, tiny, transfers, step):
    options = [*without(tiny, *STEPS[step][::2]), *STEPS[step]]
    if step == "ConvMixer":
        options = without(options, "MODEL.NUM_HEADS")
    assert of_steps(transfers, options, tmp_path) == [{}] * 4


def test_the_scale_of_float16_is_read_once_per_update(tmp_path, tiny, transfers, monkeypatch):
    monkeypatch.setattr(setup, "LossScaler", lambda enabled: LossScaler(scale=4.0))
    read = {"item training/optim/gradients.py": 1}
    assert of_steps(transfers, tiny, tmp_path / "1") == [read] * 4
    assert of_steps(transfers, [*tiny, "TRAIN.ACCUM_ITER", "2"], tmp_path / "2") == [
        {},
        read,
        {},
        read,
    ]


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_teacher_copies_nothing(tmp_path, tiny, transfers, kind):
    train([*tiny, "DATA.BATCH_SIZE", "4"], tmp_path / "teacher", 16)
    teacher = tmp_path / "teacher"
    options = [
        "TRAIN.TEACHER_MODEL",
        f"{teacher}/config.yaml",
        "TRAIN.TEACHER_PATH",
        f"{teacher}/checkpoints/last",
    ]
    options += ["TRAIN.DISTILLATION_TYPE", kind, "DATA.IMAGENET_STD", "0.25"]
    assert (
        of_steps(transfers, [*without(tiny, "DATA.IMAGENET_STD"), *options], tmp_path / "run")
        == [{}] * 4
    )


def test_skipped_images_are_fetched_once_per_report(tmp_path, tiny, transfers):
    write_images(tmp_path / "data" / "train", {"a": 26, "b": 26})
    write_images(tmp_path / "data" / "val", {"a": 2, "b": 2})
    for number in range(4):  # in both of the runs' data there are some
        (tmp_path / "data" / "train" / "a" / f"{number}.png").write_bytes(b"")
    options = without(tiny, "DATA.DATASET", "MODEL.NUM_CLASSES")
    options += [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(tmp_path / "data"),
        "MODEL.NUM_CLASSES",
        "2",
    ]
    options += ["DATA.SKIP_BROKEN", "True", "DATA.BATCH_SIZE", "4", "REPORT_FREQ", "100"]
    found = []
    for epochs in ("1", "2"):
        transfers.clear()
        train(
            [*without(options, "TRAIN.NUM_EPOCHS"), "TRAIN.NUM_EPOCHS", epochs], tmp_path / epochs
        )
        found.append(
            {kind: count for kind, count in by_file(transfers).items() if "window.py" in kind}
        )
    assert found[1] == {kind: 2 * count for kind, count in found[0].items()}
    # The losses of the steps, the rows, the norms, the skipped images (for their number and for
    # their names), their sum there and back.
    assert sum(found[0].values()) == 7, found[0]


def test_a_runs_length_changes_no_count(tmp_path, tiny, transfers):
    """The whole loop, with what it asks of signals and the clock."""
    found = []
    for steps in (4, 12):
        transfers.clear()
        train(
            [*tiny, *MIXED, "DATA.BATCH_SIZE", "4", "REPORT_FREQ", "100"],
            tmp_path / str(steps),
            4 * steps,
        )
        found.append(dict(transfers))
    assert found[0] == found[1]


@pytest.mark.smoke
@pytest.mark.parametrize("options", [[], ["MODEL.PATCH_DROP", "0.5", "MODEL.DROPPATH", "0.2"]])
def test_a_step_of_an_evaluation_copies_nothing(tiny, transfers, options):
    config, _, val = get_datasets(get_config(None, [*tiny, *options]))
    model = build_model(config)
    found = []
    for size in (182, 28):
        data = get_config(None, [*tiny, *options, "DATA.BATCH_SIZE_EVAL", str(size)])
        batches = get_dataloader(data, val, "val")
        transfers.clear()
        engine.evaluate(Classification(data), model, batches)
        found.append((len(batches), by_file(transfers)))
    assert [steps for steps, _ in found] == [2, 13]
    once = {"to_tensor loading/transforms/batch.py": 3, "numpy training/classification.py": 1}
    assert found[0][1] == found[1][1] == once


def test_every_way_to_the_host_and_back_is_seen(transfers):
    """Else a Paddle that changed would make the other tests blind."""
    tensor = paddle.ones([2])
    ways = {
        "to_tensor": lambda: paddle.to_tensor([1.0]),
        "numpy": lambda: tensor.numpy(),
        "item": lambda: tensor[0].item(),
        "tolist": lambda: tensor.tolist(),
        "float": lambda: float(tensor[0]),
        "int": lambda: int(tensor[0]),
        "bool": lambda: bool(tensor[0] > 0),
        "array": lambda: np.asarray(tensor),
        "set_value": lambda: tensor.set_value(np.zeros(2, "float32")),
        "assign": lambda: paddle.assign(np.zeros(2, "float32")),
        "mask": lambda: tensor[tensor > 0],
        "masked": lambda: tensor.__setitem__(tensor > 0, 1.0),
        "nonzero": lambda: paddle.nonzero(tensor),
        "where": lambda: paddle.where(tensor > 0),
        "lerp_": lambda: tensor.lerp_(tensor, 0.5),
    }
    for name, way in ways.items():
        transfers.clear()
        way()
        assert transfers.total() >= 1, name
    transfers.clear()
    (
        paddle.full([2], 1.0) * 2.0
        + paddle.arange(2).astype("float32")
        + paddle.zeros_like(tensor).clip(0.0, 1.0)
    )
    assert not transfers
