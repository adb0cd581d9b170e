"""A run that can't go on says why not in one line, and changes nothing."""

import os
import shutil

import numpy as np
import pytest
from conftest import without
from safetensors.numpy import save_file
from support.optim_model import OPTIMIZERS
from support.training_runs import SAVE_EVERY_STEP, refused, train, work

from config import get_config
from datasets import ArrayDataset, get_datasets
from errors import InputError
from models import build_model
from models.layers.batch_norm import BatchNorm2D
from settings.configuration import option_keys
from training.checkpoint import storage
from training.checkpoint.restore import load_checkpoint, restore_statistics
from training.command_line import FLAGS, config_from_arguments
from training.optim import build_optimizer
from weights import save_weights


def test_what_is_not_the_runs_own_is_refused(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "TRAIN.NUM_EPOCHS", "2", *SAVE_EVERY_STEP]
    train(options, tmp_path / "run", 32)
    checkpoints = tmp_path / "run" / "checkpoints"
    last, first = str(checkpoints / "last"), str(checkpoints / "epoch_0001")
    refused("already contains a run; resume it with -resume", options, tmp_path / "run")
    refused(
        "epoch 2 is completed and TRAIN.NUM_EPOCHS is 2",
        [*options, "MODEL.RESUME", last],
        tmp_path / "a",
    )
    refused("no checkpoint at", [*options, "MODEL.RESUME", str(tmp_path)], tmp_path / "b")
    late = [*options, "MODEL.RESUME", first, "TRAIN.LAST_EPOCH", "2"]
    refused("TRAIN.LAST_EPOCH is 2, but the checkpoint's last epoch is 1", late, tmp_path / "c")
    refused(
        "its run had 32 training images, but the data has 48",
        [*options, "MODEL.RESUME", first],
        tmp_path / "d",
        48,
    )
    message = "later checkpoints are in the same folder (epoch_0002_sample_000000016, epoch_0002)"
    refused(message, [*options, "MODEL.RESUME", first], tmp_path / "run")
    train(options, tmp_path / "other", 32)
    refused("contains another run than", [*options, "MODEL.RESUME", last], tmp_path / "other")
    with pytest.raises(InputError, match="MODEL.RESUME is 'auto', expected -output with it"):
        get_config(None, ["MODEL.RESUME", "auto"])


def test_a_run_of_another_task_or_without_the_best_metric_is_refused(tmp_path, tiny):
    shared = ["DATA.BATCH_SIZE", "16", "TRAIN.NUM_EPOCHS", "2", *SAVE_EVERY_STEP]
    labelled = [*tiny, *shared]
    unlabelled = [*without(tiny, "MODEL.NUM_CLASSES"), "TASK", "simmim", "METHOD.MASK_PATCH", "4"]
    unlabelled += shared
    for name, options in (("labelled", labelled), ("unlabelled", unlabelled)):
        train(options, tmp_path / name, 32)
    for name, task, options in (
        ("unlabelled", "simmim, found TASK classification", labelled),
        ("labelled", "classification, found TASK simmim", unlabelled),
    ):
        resumed = ["MODEL.RESUME", str(tmp_path / name / "checkpoints" / "epoch_0001")]
        refused(
            f"epoch_0001 is from a run of TASK {task}; keep", [*options, *resumed], tmp_path / "a"
        )
    probed = ["PROBE.FREQ", "1", "BEST_METRIC", "knn"]
    probed += ["MODEL.RESUME", str(tmp_path / "unlabelled" / "checkpoints" / "epoch_0001")]
    message = "BEST_METRIC is knn, which the best evaluation of"
    refused(message, [*unlabelled, *probed], tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_settings_that_changed_are_listed_unless_they_are_named(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "TRAIN.NUM_EPOCHS", "2", *SAVE_EVERY_STEP]
    train(options, tmp_path / "run", 32)
    resumed = ["MODEL.RESUME", str(tmp_path / "run" / "checkpoints" / "epoch_0001")]
    changed = ["TRAIN.BASE_LR", "0.5", "SEED", "3", "TRAIN.HFLIP", "0.0"]
    message = (
        "epoch_0001 was trained with other settings: SEED 0 -> 3, TRAIN.BASE_LR 0.003 -> 0.5, TRAIN.HFLIP 0.5 -> 0.0;"
        " keep them, or set what you want to change with a flag or -o KEY VALUE"
    )
    refused(message, [*options, *resumed, *changed], tmp_path / "a")
    free = [
        "DATA.BATCH_SIZE",
        "8",
        "DATA.BATCH_SIZE_EVAL",
        "7",
        "TRAIN.ACCUM_ITER",
        "2",
        "TAG",
        "b",
        "SAVE_STEPS",
        "0",
    ]
    free += ["DATA.NUM_WORKERS", "1", "DATA.PREFETCH", "1"]
    train([*options, *resumed, *free], tmp_path / "b", 32)
    flags = ["-image_size=12", f"-resume={resumed[1]}"]
    config = config_from_arguments("main_multi_gpu.py", [*flags, "-o", *options[2:], *changed])
    assert option_keys(config) >= {"TRAIN.BASE_LR", "SEED", "TRAIN.HFLIP"}
    assert "DATA.IMAGE_SIZE" in option_keys(config)
    assert "DATA.BATCH_SIZE_EVAL" not in option_keys(config)


def test_every_flag_names_what_changes_and_the_log_repeats_it(tmp_path, tiny):
    values = {
        "dataset": "folder",
        "image_size": "32",
        "amp": "True",
        "eval": "True",
        "data_path": "d",
    }
    for flag, (key, _, _) in FLAGS.items():
        config = config_from_arguments(
            "test", ["-cfg=finetune", f"-{flag}={values.get(flag, '1')}"]
        )
        assert option_keys(config) == {key}
    options = [*tiny, "DATA.BATCH_SIZE", "16"]
    train(options, tmp_path / "run", 32)
    last = str(tmp_path / "run" / "checkpoints" / "last")
    words = [*options, "MODEL.RESUME", last, "TRAIN.NUM_EPOCHS", "2"]
    config = config_from_arguments("test", ["-amp", f"-output={tmp_path / 'amp'}", "-o", *words])
    _, dataset, val = get_datasets(config)
    dataset = ArrayDataset(
        config, "train", dataset.images[:32], dataset.labels[:32], dataset.classes
    )
    work(config, dataset, val)
    lines = (tmp_path / "amp" / "log.txt").read_text()
    assert "changed by the command line: AMP False -> True" in lines
    assert "changed by the command line: TRAIN.NUM_EPOCHS 1 -> 2" in lines


def test_a_runs_folder_stands_for_its_newest_whole_checkpoint(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "KEEP_LAST", "9", "SAVE_FREQ", "1"]
    train([*options, "TRAIN.NUM_EPOCHS", "2"], tmp_path / "run", 32)
    saved = tmp_path / "run" / "checkpoints"
    resumed = [*options, "TRAIN.NUM_EPOCHS", "3", "MODEL.RESUME", str(tmp_path / "run")]
    named = ["TRAIN.NUM_EPOCHS", "3"]
    train(resumed, tmp_path / "a", 32, named)
    assert (
        f"resumed after epoch 2, from {saved / 'epoch_0002'}"
        in (tmp_path / "a" / "log.txt").read_text()
    )
    (saved / "epoch_0002" / "state.json").write_text("{}")
    train(resumed, tmp_path / "b", 32, named)
    log = (tmp_path / "b" / "log.txt").read_text()
    assert f"{saved / 'epoch_0002'}: damaged checkpoint: state.json" in log
    assert f"resumed after epoch 1, from {saved / 'epoch_0001'}" in log
    train(resumed, tmp_path / "run", 32, named)  # in its own folder, as -resume=auto
    assert sorted(place.name for place in saved.iterdir() if not place.is_symlink()) == [
        "damaged_epoch_0002", "epoch_0001", "epoch_0002", "epoch_0003",
    ]  # fmt: skip
    for file in saved.glob("epoch_*/state.json"):
        file.write_text("{}")
    refused("none of its 3 checkpoints is complete", resumed, tmp_path / "c", 32, named)
    empty = tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    message = f"-resume={empty}: {empty / 'checkpoints'} contains no checkpoint to resume from"
    refused(message, [*options, "MODEL.RESUME", str(empty)], tmp_path / "d")


def test_another_model_is_refused(tmp_path, tiny):
    train([*tiny, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 32)
    last = tmp_path / "run" / "checkpoints" / "last"
    for other, message in (
        (["MODEL.DEPTH", "1"], r"doesn't fit the model: unexpected blocks.1"),
        (
            ["DATA.IMAGE_SIZE", "12"],
            r"it is a checkpoint of another model \(pos_embed resized from 2 x 2 to 3 x 3\)",
        ),
    ):
        model = build_model(get_config(None, [*tiny, *other]))
        with pytest.raises(InputError, match=message):
            load_checkpoint(last, model, build_optimizer(get_config(), model))


# Optimizers that keep what Adam keeps.
MOMENTS_OF_ADAM = ("AdamW", "LAMB")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adam"])
def test_another_optimizer_goes_on_only_where_it_keeps_the_same_moments(tmp_path, tiny, name):
    options = [*tiny, "DATA.BATCH_SIZE", "16", "TRAIN.OPTIMIZER.NAME"]
    train([*options, "Adam"], tmp_path / "run", 32)
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    words = [
        *options,
        name,
        "OUTPUT",
        str(tmp_path / "run"),
        "MODEL.RESUME",
        "auto",
        "TRAIN.NUM_EPOCHS",
        "2",
    ]
    longer = config_from_arguments("main_multi_gpu.py", ["-o", *words])
    _, dataset, val = get_datasets(longer)
    dataset = ArrayDataset(
        longer, "train", dataset.images[:32], dataset.labels[:32], dataset.classes
    )
    if name in MOMENTS_OF_ADAM:
        work(longer, dataset, val)
        return
    with pytest.raises(
        InputError, match=f"has the optimizer state of Adam, which {name} can't use; keep TRAIN.OPT"
    ):
        work(longer, dataset, val)
    assert before == {
        file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()
    }


def test_a_parameter_that_did_not_train_is_named(tmp_path, tiny):
    train([*tiny, "DATA.BATCH_SIZE", "16", "TRAIN.FREEZE", "backbone"], tmp_path / "run", 32)
    model = build_model(get_config(None, tiny))
    message = r"cls_token wasn't trained in its run and has no optimizer state \(\d+ such parameters\); leave TRAIN.FREEZE"
    with pytest.raises(InputError, match=message):
        load_checkpoint(
            tmp_path / "run" / "checkpoints" / "last", model, build_optimizer(get_config(), model)
        )


def test_data_of_other_classes_are_refused(tmp_path, tiny):
    train([*tiny, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 32)
    resumed = [
        *tiny,
        "DATA.BATCH_SIZE",
        "16",
        "MODEL.RESUME",
        str(tmp_path / "run" / "checkpoints" / "last"),
    ]
    config, dataset, val = get_datasets(
        get_config(None, [*resumed, "OUTPUT", str(tmp_path / "new")])
    )
    val.classes = ["zero", *val.classes[1:]]
    dataset = ArrayDataset(config, "train", dataset.images[:32], dataset.labels[:32], val.classes)
    with pytest.raises(
        InputError,
        match=r"its run had the classes 0, 1, 2, 3, 4, ... \(10\), but the data has zero, 1, 2",
    ):
        work(config, dataset, val)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("link", ["last", "best"])
def test_a_folder_in_a_links_place_is_named_before_anything_changes(tmp_path, tiny, link):
    """As in a copy that followed the links."""
    options = [*tiny, "DATA.BATCH_SIZE", "16", *SAVE_EVERY_STEP]
    train(options, tmp_path / "run", 32)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / link).unlink()
    shutil.copytree(checkpoints / "epoch_0001", checkpoints / link)
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    resumed = [*options, "TRAIN.NUM_EPOCHS", "2", "MODEL.RESUME", "auto"]
    message = (
        f"{checkpoints / link} is a folder, expected a link to one of its checkpoints; remove it"
    )
    refused(message, resumed, tmp_path / "run")
    assert before == {
        file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()
    }


def test_auto_sets_aside_what_has_another_epochs_name(tmp_path, tiny, capsys):
    options = [*tiny, "DATA.BATCH_SIZE", "16", *SAVE_EVERY_STEP]
    train(options, tmp_path / "run", 32)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "epoch_0001").rename(checkpoints / "epoch_9999999999")
    (checkpoints / "epoch_0007").symlink_to("/etc")
    (checkpoints / "epoch_0008").symlink_to("epoch_0008")
    os.mkfifo(checkpoints / "epoch_0009")
    train([*options, "MODEL.RESUME", "auto"], tmp_path / "run", 32)
    told = capsys.readouterr().out
    message = "epoch_9999999999: damaged checkpoint: state.json: it belongs to epoch_0001; the folder was renamed\n"
    assert message in told
    assert "resumed after epoch 0, 16 samples into the next" in told
    assert (checkpoints / "last").resolve() == checkpoints / "epoch_0001"
    aside = {path.name for path in checkpoints.glob("damaged_*")}
    assert aside == {f"damaged_epoch_{number}" for number in ("0007", "0008", "0009", "9999999999")}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "norm.weight/moment1_0",
            np.full(16, np.nan, np.float32),
            "norm.weight/moment1_0 holds NaN or infinite values",
        ),
        (
            "other.weight/moment1_0",
            np.zeros(16, np.float32),
            r"belongs to another model \(other.weight\)",
        ),
        (
            "norm.weight/moment1_0",
            np.zeros(8, np.float32),
            r"is float32 \[8\], expected float32 \[16\]; use another",
        ),
        (
            "norm.weight/moment1_0",
            np.zeros(16, np.int32),
            r"is int32 \[16\], expected float32 \[16\]; use another",
        ),
    ],
)
def test_moments_that_are_not_the_models_are_refused(tmp_path, tiny, key, value, message):
    model = build_model(get_config(None, tiny))
    save_weights(model, tmp_path / storage.MODEL)
    save_file({key: value}, tmp_path / storage.OPTIMIZER)
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path, model, build_optimizer(get_config(), model))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, "missing"),
        ({"mean": np.zeros(2, np.float32)}, r"\[2\]"),
        ({"mean": np.full(3, np.inf)}, r"\[3\]"),
    ],
)
def test_statistics_that_are_not_the_models_are_refused(tmp_path, found, told):
    layer = BatchNorm2D(3)
    whole = {"0/val/_mean": np.float32([1, 2, 3]), "0/val/_variance": np.float32([4, 5, 6])}
    save_file(whole, tmp_path / storage.STATISTICS)
    restore_statistics(tmp_path, {"val": layer})
    assert (layer._mean.tolist(), layer._variance.tolist()) == ([1, 2, 3], [4, 5, 6])
    del whole["0/val/_mean"]
    save_file(
        whole | {f"0/val/_{name}": value for name, value in found.items()},
        tmp_path / storage.STATISTICS,
    )
    with pytest.raises(
        InputError, match=rf"0/val/_mean is {told}, expected \[3\] and finite numbers"
    ):
        restore_statistics(tmp_path, {"val": layer})
