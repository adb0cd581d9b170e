"""Programs written against PaddleViT's own modules: what its names do here, and what is said for
those that aren't.

PaddleViT's own tests of ``config``, ``datasets`` and ``utils`` (image_classification/MAE/tests) are
such programs.
"""

import importlib.util
import logging
import pickle
import subprocess
import sys
from argparse import Namespace

import numpy as np
import paddle
import pytest
from paddle.io import DataLoader, DistributedBatchSampler
from support.document_commands import snippets
from support.programs import ROOT
from support.ranks import run_ranks

import datasets
import utils
from config import get_config, update_config
from datasets import get_dataloader, get_dataset
from errors import InputError
from loading.transforms import BatchTransform

FLAGS = {
    "cfg": None, "dataset": "cifar10", "batch_size": 128, "image_size": 256, "ngpus": None, "data_path": "/cifar10/",
    "eval": True, "pretrained": "weights", "resume": None, "last_epoch": None,
}  # fmt: skip

# ------------------------------------------------------------ config


def test_update_config_takes_a_programs_flags():
    config = update_config(get_config(), Namespace(**FLAGS))
    data = config.DATA
    assert (data.DATASET, data.BATCH_SIZE, data.BATCH_SIZE_EVAL, data.IMAGE_SIZE) == (
        "cifar10",
        128,
        128,
        256,
    )
    assert (data.DATA_PATH, config.EVAL, config.MODEL.PRETRAINED) == ("/cifar10/", True, "weights")
    config.NGPUS = 4  # PaddleViT's main sets it, from -1
    assert config.NGPUS == 4
    assert get_config() == get_config()
    assert get_config().DATA.BATCH_SIZE == 256  # update_config changes a copy


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            {"eval": False, "batch_size_eval": 7, "amp": True, "output": "out"},
            (128, 7, True, "out"),
        ),
        (
            {"eval": False, "batch_size": 0, "image_size": "", "amp": None},
            (256, 64, False, "./output"),
        ),
        ({"eval": True, "batch_size_eval": 7, "amp": True}, (128, 7, False, "./output")),
    ],
)
def test_flags_mean_what_paddlevits_mean(flags, expected):
    config = update_config(get_config(), Namespace(**FLAGS | {"pretrained": None} | flags))
    found = (config.DATA.BATCH_SIZE, config.DATA.BATCH_SIZE_EVAL, config.AMP, config.SAVE)
    assert found == expected


def test_update_config_reads_a_file_and_checks_all(tmp_path):
    (tmp_path / "theirs.yaml").write_text(
        "DATA: {IMAGE_SIZE: 384, CROP_PCT: 1.0}\nMODEL:\n  TYPE: swin\n  NAME: mine\n  TRANS: {WINDOW_SIZE: 12}\n"
        "TRAIN: {BASE_LR: 0.25}\n"
    )
    flags = FLAGS | {
        "cfg": tmp_path / "theirs.yaml",
        "image_size": None,
        "eval": False,
        "pretrained": None,
    }
    config = update_config(get_config(), Namespace(**flags))
    assert (config.DATA.IMAGE_SIZE, config.DATA.CROP_PCT, config.TRAIN.BASE_LR) == (384, 1.0, 0.25)
    assert "is read as PaddleViT's" in config.notes[0]
    assert (config.MODEL.TRANS.WINDOW_SIZE, config.MODEL.TRANS.STAGE_DEPTHS) == (12, [2, 2, 6, 2])
    with pytest.raises(InputError, match=r"flag -image_size: .*DATA.IMAGE_SIZE|DATA.IMAGE_SIZE"):
        update_config(get_config(), Namespace(image_size=-3))
    with pytest.raises(InputError, match="no configuration file absent"):
        update_config(get_config(), Namespace(cfg="absent"))


def test_a_models_keys_are_read_by_paddlevits_names():
    model = get_config("vit_base_patch16_224").MODEL
    trans = model.TRANS
    assert (trans.PATCH_SIZE, trans.EMBED_DIM, trans.MLP_RATIO, trans.DEPTH, trans.NUM_HEADS) == (
        16,
        768,
        4.0,
        12,
        12,
    )
    assert (trans.QKV_BIAS, trans.HIDDEN_SIZE, trans.NUM_LAYERS, trans.ENCODER.DEPTH) == (
        True,
        768,
        12,
        12,
    )
    assert model.DROP_PATH == model.DROPPATH
    stages = get_config("pvtv2_b0").MODEL.TRANS
    assert (stages.EMBED_DIM, stages.STAGE_DEPTHS) == ([32, 64, 160, 256], [2, 2, 2, 2])
    assert get_config("mixer_b16_224").MODEL.MIXER.NUM_LAYERS == 12
    copied = pickle.loads(pickle.dumps(get_config("pvtv2_b0")))
    assert copied == copied.clone() == get_config("pvtv2_b0")
    assert copied.clone().MODEL.TRANS.EMBED_DIM == [32, 64, 160, 256]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "MODEL.TRANS.QK_SCALE",
            "no key MODEL.TRANS.QK_SCALE; docs/migrate/paddlevit.md lists the keys that replace PaddleViT's",
        ),
        (
            "MODEL.TRANS.IN_CHANNELS",
            "no key MODEL.TRANS.IN_CHANNELS; in this toolkit it is DATA.IMAGE_CHANNELS",
        ),
        ("MODEL.TRANS.DEPHT", "no key MODEL.TRANS.DEPHT; did you mean MODEL.DEPTH?"),
        (
            "TRAIN.RAND_AUGMENT",
            "no key TRAIN.RAND_AUGMENT; docs/migrate/paddlevit.md lists the keys that replace PaddleViT's",
        ),
        ("TRAIN.BASELR", "no key TRAIN.BASELR; did you mean TRAIN.BASE_LR?"),
        ("DATA.IMAGESIZE", "no key DATA.IMAGESIZE; did you mean DATA.IMAGE_SIZE?"),
    ],
)
def test_a_key_that_is_not_here_says_what_is(key, message):
    value = get_config()
    with pytest.raises(AttributeError) as error:
        for part in key.split("."):
            value = getattr(value, part)
    assert str(error.value) == message


def test_a_models_keys_are_set_by_their_own_names():
    config = update_config(get_config(), Namespace())
    with pytest.raises(
        AttributeError, match=r"MODEL.TRANS.NUM_LAYERS can only be read; set MODEL.DEPTH"
    ):
        config.MODEL.TRANS.NUM_LAYERS = 3


def test_star_imports_bring_what_programs_take():
    names = {}
    exec("from config import *\nfrom datasets import *\nfrom utils import *", names)
    wanted = "get_config update_config get_dataset get_dataloader AverageMeter get_logger write_log all_reduce_mean"
    assert set(wanted.split()) <= names.keys()


# ---------------------------------------------------------- datasets


def digits(*options):
    words = [
        "DATA.DATASET",
        "digits",
        "DATA.IMAGE_SIZE",
        "8",
        "DATA.CROP_PCT",
        "1.0",
        "DATA.NUM_WORKERS",
        "0",
    ]
    return get_config(None, [*words, "DATA.BATCH_SIZE", "64", "MODEL.NUM_CLASSES", "10", *options])


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [0, 2])
def test_paddles_own_loader_takes_a_dataset(workers):
    """As PaddleViT's guide of several GPUs shows it: a DataLoader of a dataset and a
    DistributedBatchSampler.
    """
    config = digits("TRAIN.AFFINE", "[10.0,0.1,0.1]")
    dataset = get_dataset(config, mode="train")
    assert isinstance(dataset, paddle.io.Dataset)

    def epoch(rank):
        sampler = DistributedBatchSampler(
            dataset, batch_size=32, num_replicas=2, rank=rank, shuffle=True
        )
        sampler.set_epoch(dataset.epoch)
        return list(DataLoader(dataset, batch_sampler=sampler, num_workers=workers))

    seen = [batch for rank in range(2) for batch in epoch(rank)]
    assert {(str(pixels.dtype)[-5:], str(labels.dtype)[-5:]) for pixels, labels in seen} == {
        ("uint8", "int64")
    }
    assert seen[0][0].shape == [32, 8, 8, 3]
    labels = np.concatenate([labels.numpy() for _, labels in seen])
    assert len(labels) == len(dataset) + 1  # Paddle's sampler fills the ranks' parts up
    assert (np.bincount(labels) - np.bincount(dataset.labels)).sum() == 1
    pixels = {image.tobytes() for batch, _ in seen for image in batch.numpy()}
    assert pixels == {dataset[index][0].tobytes() for index in range(len(dataset))}
    dataset.epoch = 1  # another epoch has other augmentation
    others = {image.tobytes() for batch, _ in epoch(0) for image in batch.numpy()}
    assert others <= {dataset[1, index, 0][0].tobytes() for index in range(len(dataset))}
    assert len(others & pixels) < len(others) / 4


def test_the_pages_program_runs():
    (code,) = snippets("docs/migrate/paddlevit.md", "python")
    names = {}
    exec(code, names)
    assert names["images"].shape[1:] == [1, 8, 8]
    assert names["dataset"].epoch == 1


def normalised(config, dataset, indices, epoch=0):
    batch = [dataset[epoch, index, 0] for index in indices]
    columns = {
        name: paddle.to_tensor(np.stack([sample[i] for sample in batch]))
        for i, name in enumerate(dataset.columns)
    }
    return BatchTransform(config)(columns, epoch)


@pytest.mark.parametrize("call", [("val", False), (False,)])
def test_paddlevits_loader_gives_normalised_images_and_labels(call):
    config = digits("EVAL", "True", "DATA.BATCH_SIZE_EVAL", "100")
    val = get_dataset(config, "val")
    loader = get_dataloader(config, val, *call)
    assert len(loader) == 4
    images, labels = next(iter(loader))
    expected = normalised(config, val, range(100))
    assert images.shape == [100, 3, 8, 8]
    assert np.array_equal(images.numpy(), expected[0].numpy())
    assert np.array_equal(labels.numpy(), expected[1].numpy())
    assert sum(len(batch[0]) for batch in get_dataloader(config, val, is_train=False)) == len(val)
    assert get_dataset(config, False).transform.__class__ is val.transform.__class__
    assert get_dataset(config, is_train=False).labels.tolist() == val.labels.tolist()


def test_paddlevits_loader_erases_and_augments_each_epoch_anew():
    config = digits(
        "TRAIN.RANDOM_ERASE_PROB", "1.0", "TRAIN.HFLIP", "0.0", "TRAIN.CROP_SCALE", "[0.5,1.0]"
    )
    train = get_dataset(config, is_train=True)
    loader = get_dataloader(config, train, mode="train", multi_process=True)
    loader.batch_sampler.shuffle = False
    for epoch in range(2):
        images, labels = [paddle.concat(column).numpy() for column in zip(*loader)]  # noqa: B905
        assert len(images) == len(train) // 64 * 64  # the last one isn't full
        expected = normalised(config, train, range(128), epoch)
        np.testing.assert_array_equal(images[:128], expected[0].numpy())
        assert labels[:128].tolist() == expected[1].tolist()


@pytest.mark.parametrize(
    "option",
    [
        "DATA.LOADER=dali",
        "DATA.MULTI_SCALE=[8,16]",
        "DATA.SAMPLER=balanced",
        "TRAIN.REPEATED_AUGMENT=3",
    ],
)
def test_paddlevits_loader_refuses_what_it_cant_do(option):
    config = digits(option)
    train = get_dataset(config, "train")
    key = option.partition("=")[0]
    with pytest.raises(
        InputError,
        match=f"PaddleViT's loader doesn't support {key}; leave it out, or call get_dataloader with",
    ):
        get_dataloader(config, train, "train", True)
    get_dataloader(config, train, "val", True)
    keep = digits("DATA.DROP_LAST=False")
    # batches of 64 of 1,437 images
    assert len(get_dataloader(keep, get_dataset(keep, "train"), True)) == 23


def rank_of_two():
    config = digits("EVAL", "True")
    val = get_dataset(config, "val")
    loaders = [
        get_dataloader(config, val, is_train=False, use_dist_sampler=split)
        for split in (True, False)
    ]
    parts = [[label for _, labels in loader for label in labels.tolist()] for loader in loaders]
    return *parts, utils.all_reduce_mean(2 + utils.rank())


def test_paddlevits_loader_splits_among_the_ranks_if_asked_to():
    labels = get_dataset(digits("EVAL", "True"), "val").labels.tolist()
    (first, whole, mean), (second, again, _) = run_ranks(rank_of_two)
    assert whole == again == labels
    assert len(first) == len(second) == len(labels) / 2
    assert sorted(first + second) == sorted(labels)
    assert mean == 2.5  # of numbers, as PaddleViT's


# ------------------------------------------------------------- utils


@pytest.mark.parametrize("warmup", [0, 10])
def test_the_scheduler_warms_up_and_follows_a_cosine(warmup):
    arguments = {"learning_rate": 0.1, "warmup_start_lr": 1e-5, "start_lr": 0.1, "end_lr": 1e-3}
    made = utils.WarmupCosineScheduler(**arguments, warmup_epochs=warmup, total_epochs=100)
    lr = paddle.optimizer.lr
    expected = lr.CosineAnnealingDecay(0.1, T_max=100 - warmup, eta_min=1e-3)
    if warmup:
        expected = lr.LinearWarmup(expected, warmup_steps=warmup, start_lr=1e-5, end_lr=0.1)
    for _ in range(100):
        np.testing.assert_allclose(made(), expected(), rtol=1e-6)
        made.step()
        expected.step()
    resumed = utils.WarmupCosineScheduler(
        **arguments, warmup_epochs=warmup, total_epochs=100, last_epoch=99
    )
    assert resumed.get_lr() == pytest.approx(1e-3)
    assert (
        paddle.optimizer.SGD(resumed, parameters=[paddle.create_parameter([1], "float32")]).get_lr()
        == resumed()
    )


def test_names_are_kept_from_weight_decay():
    exclude = utils.get_exclude_from_weight_decay_fn(["bias", "pos_embed"])
    assert [exclude(name) for name in ("a.weight", "a.bias", "pos_embed")] == [True, False, False]
    assert utils.get_exclude_from_weight_decay_fn([]) is None


def test_biases_and_named_parameters_keep_their_values_under_decay():
    model = paddle.nn.Sequential(
        paddle.nn.Linear(4, 4), paddle.nn.LayerNorm(4), paddle.nn.Linear(4, 4)
    )
    for parameter in model.parameters():
        parameter.set_value(paddle.ones_like(parameter))
        parameter.grad = paddle.zeros_like(parameter)
    keeps = utils.skip_weight_decay_fn(model, ["2.weight"])
    adam = paddle.optimizer.AdamW(
        0.1, parameters=model.parameters(), weight_decay=0.5, apply_decay_param_fun=keeps
    )
    adam.step()
    assert [name for name, p in model.named_parameters() if p.numpy().flat[0] != 1] == ["0.weight"]
    assert keeps("0.weight")
    assert utils.skip_weight_decay_fn(model, [], False) is None
    assert utils.skip_weight_decay_fn(model, ["0.bias"], False)("1.weight")


def test_meters_means_and_logs(tmp_path):
    meter = utils.AverageMeter()
    for value in range(1, 101):
        meter.update(value, 1)
    assert (meter.avg, meter.cnt, meter.sum) == (50.5, 100, 5050)
    meter.reset()
    assert (meter.avg, meter.cnt) == (0, 0)
    assert utils.all_reduce_mean(3) == 3.0
    local, main = utils.get_logger(str(tmp_path))
    utils.write_log(local, main, "mine", "all")
    utils.write_log(local, None, "careful", level="warning")
    assert (tmp_path / "log_0.txt").read_text().splitlines()[1].endswith("careful")
    assert (tmp_path / "log.txt").read_text().endswith(" all\n")
    for logger in (local, main):
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
    assert logging.getLogger("local") is local


# --------------------------------------------- names that aren't here


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (
            datasets,
            "ImageNet2012Dataset",
            "datasets.get_dataset(config, mode), with DATA.DATASET imagenet2012",
        ),
        (datasets, "get_train_transforms_deit", "loading.transforms.TrainTransform(config)"),
        (datasets, "get_val_transforms", "loading.transforms.EvalTransform(config)"),
        (
            utils,
            "cosine_scheduler",
            "training.optim.build_schedule(config, updates_per_epoch, effective_batch)",
        ),
    ],
)
def test_a_name_says_what_to_write(module, name, instead):
    with pytest.raises(ImportError) as error:
        exec(f"from {module.__name__} import {name}")
    assert str(error.value) == (
        f"{module.__name__} has no {name}; for PaddleViT's, write {instead}: docs/migrate/paddlevit.md"
    )
    written = instead.partition("(")[0].rpartition(".")
    assert hasattr(importlib.import_module(written[0]), written[2])
    with pytest.raises(ImportError, match="cannot import name 'nonesuch'"):
        exec(f"from {module.__name__} import nonesuch")
    assert not hasattr(module, "nonesuch")


def test_a_module_says_what_to_write():
    for name in (
        "losses",
        "mixup",
        "model_ema",
        "droppath",
        "augment",
        "random_erasing",
        "swin",
        "vit",
    ):
        with pytest.raises(
            ModuleNotFoundError,
            match=f"No module named '{name}'; for PaddleViT's, .*docs/migrate/paddlevit",
        ):
            importlib.import_module(name)
    exec("from training.losses import CrossEntropy, SoftTargetCrossEntropy, Teacher")
    exec(
        "from models.layers import DropPath\nfrom loading.transforms import BatchTransform, Mixup, RandomErasing"
    )
    exec(
        "from training.optim import ModelEma, build_optimizer, build_schedule\nfrom models import build_model"
    )
    assert importlib.util.find_spec("nonesuch") is None


def test_another_programs_modules_stay_its_own(tmp_path):
    (tmp_path / "losses.py").write_text("answer = 42\n")
    code = "import config, losses; print(losses.answer)"
    found = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": f"{ROOT}:{tmp_path}"}, capture_output=True
    )
    assert found.stdout == b"42\n"
