"""Pre-training by MoCo v3: views, runs on any number of processes, evaluations and frozen patches."""

import json

import numpy as np
import paddle
import pytest
from conftest import without
from safetensors.numpy import save_file
from support.ranks import run_ranks
from support.training_runs import assert_close, assert_same_run, records, refused, train, weights

import utils
from config import get_config
from datasets import get_datasets
from models import build_model
from settings.registry import tasks
from training import moco
from training.moco import contrast
from weights import load_weights

METHOD = [
    *("METHOD.PROJECTOR_WIDTH", "24", "METHOD.PROJECTOR_OUTPUTS", "8"),
    *("METHOD.COLOR", "0", "METHOD.BLUR", "[0,0,0]", "METHOD.SOLARIZE", "0"),
]


@pytest.fixture
def options(tiny):
    """Options of a small training; the encoder has no classifier."""
    return [*without(tiny, "MODEL.NUM_CLASSES"), "TASK", "moco", *METHOD]


def reference(queries, keys, first, temperature):
    """Returns the losses and the found keys [B] by the paper's formula, in NumPy and float64."""
    losses = 0
    found = 0
    places = first + np.arange(queries.shape[1])
    for view in (0, 1):
        similarities = queries[view].astype(np.float64) @ keys[1 - view].T / temperature
        of_own = similarities[np.arange(len(places)), places]
        largest = similarities.max(axis=1)
        total = np.log(np.exp(similarities - largest[:, None]).sum(axis=1)) + largest
        losses = losses + 2 * temperature * (total - of_own)
        found = found + 50 * (similarities.argmax(axis=1) == places)
    return losses, found


def unit(rng, *shape):
    values = rng.normal(size=shape)
    return (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.smoke
@pytest.mark.parametrize("temperature", [0.2, 0.005])
@pytest.mark.parametrize("first", [0, 3, 5])
def test_the_contrast_is_the_papers(first, temperature):
    rng = np.random.default_rng(first)
    keys = unit(rng, 2, 8, 6)
    queries = keys[::-1, first : first + 3] + 0.6 * unit(rng, 2, 3, 6)
    queries /= np.linalg.norm(queries, axis=-1, keepdims=True)
    losses, found = reference(queries, keys, first, temperature)
    values = contrast(paddle.to_tensor(queries), paddle.to_tensor(keys), first, temperature)
    np.testing.assert_allclose(values["loss"].numpy(), losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values["contrast_acc"].numpy(), found)


def test_equal_keys_are_found_by_chance():
    same = paddle.full([2, 4, 9], 1 / 3)
    values = contrast(same, same, 0, 0.2)
    np.testing.assert_allclose(values["loss"].numpy(), 4 * 0.2 * np.log(4), rtol=1e-6)
    assert values["contrast_acc"].numpy().tolist() == [100, 0, 0, 0]
    alone = contrast(same[:, :1], same[:, :1], 0, 0.2)
    assert [alone[name].item() for name in ("loss", "contrast_acc")] == [0, 100]


def train_all(runs):
    for run in runs:
        train(*run)


@pytest.mark.smoke
def test_a_run_is_resumed_in_the_same_bits_and_is_the_same_on_two_processes(tmp_path, options):
    options += ["DATA.GLOBAL_BATCH", "16", "SAVE_STEPS", "1", "KEEP_LAST", "9"]
    # Fresh class tokens are almost equal for all images. Batch norm would magnify their rounding.
    options += ["MODEL.GLOBAL_POOL", "avg", "TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.BASE_LR", "0.01"]

    def runs(name):
        middle = str(tmp_path / name / "checkpoints" / "epoch_0001_sample_000000016")
        resumed = [*options, "MODEL.RESUME", middle]
        return [(options, tmp_path / name, 48), (resumed, tmp_path / f"{name}_resumed", 48)]

    train_all(runs("one"))
    run_ranks(train_all, runs("two"))
    for name in ("one", "two"):
        assert_same_run(tmp_path / name, tmp_path / f"{name}_resumed")
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert_close(one, two, atol=1e-5)
    assert {"momentum.encoder.cls_token", "predictor.1.running_var"} < one.keys()
    last = [records(tmp_path / name)[-1] for name in ("one", "two")]
    assert last[0]["loss"] == pytest.approx(last[1]["loss"], abs=1e-5)
    assert last[0]["contrast_acc"] == pytest.approx(last[1]["contrast_acc"], abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("sharding", [False, True])
def test_gradients_that_are_sent_during_the_backward_pass_are_the_same(tmp_path, options, sharding):
    """Batch norm's collectives come between those of the gradients, in one order on all ranks."""
    options += ["MODEL.GLOBAL_POOL", "avg", "DATA.GLOBAL_BATCH", "16"]
    options += ["TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.BASE_LR", "0.01"]
    fleet = ["DIST.ENGINE", "fleet"]
    if sharding:
        fleet += ["DIST.STRATEGY.sharding", "True", "DIST.STRATEGY.sharding_configs.stage", "2"]
    train(options, tmp_path / "one", 48)
    run_ranks(train, [*options, *fleet], tmp_path / "two", 48)
    assert_close(*(weights(tmp_path / name) for name in ("one", "two")), atol=1e-5)


def evaluated(path, options, output):
    evaluation = ["EVAL", "True", "MODEL.PRETRAINED", str(path)]
    train([*without(options, "TRAIN."), *evaluation], output, 48)


def test_an_evaluation_is_the_same_however_the_images_are_shared_out(
    tmp_path, options, monkeypatch
):
    train([*options, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 48)
    path = tmp_path / "run" / "checkpoints" / "best"
    results = []
    for batch, ranks, at_once in (("32", 1, 2**24), ("5", 1, 200), ("16", 2, 2**24)):
        output = tmp_path / f"{batch}_{ranks}"
        monkeypatch.setattr(moco, "SIMILARITIES", at_once)
        given = [*options, "DATA.BATCH_SIZE_EVAL", batch]
        run_ranks(evaluated, path, given, output, ranks=ranks)
        results.append(json.loads((output / "result.json").read_text()))
    assert [result["num_samples"] for result in results] == [91] * 3
    for name in ("loss", "contrast_acc"):
        trained = records(tmp_path / "run")[-1][name]
        assert [result[name] for result in results] == pytest.approx([trained] * 3, abs=1e-5)

    # the paper's formula, over all validation images
    config, _, val = get_datasets(get_config(None, options))
    task = tasks.choose(config)(config)
    network = task.build_network()
    task.prepare_data(val, "val")
    load_weights(network, path)
    network.eval()
    pixels = np.stack([val.sample(index)["pixels"] for index in range(91)])
    assert pixels.shape == (91, 2, 8, 8, 1)
    queries, keys = network(task._views({"pixels": paddle.to_tensor(pixels)}))
    losses, found = reference(queries.numpy(), keys.numpy(), 0, 0.2)
    assert results[0]["loss"] == pytest.approx(losses.mean(), abs=1e-5)
    assert results[0]["contrast_acc"] == pytest.approx(found.mean(), abs=1e-4)


def test_frozen_patches_and_positions_stay_and_the_momentum_follows(tmp_path, options):
    frozen = ["TRAIN.FREEZE", "['encoder.patch_embed.*']", "TRAIN.WEIGHT_DECAY", "0.5"]
    train([*options, *frozen, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 48)
    trained = weights(tmp_path / "run")
    config = get_config(None, options)
    utils.seed_everything(config.SEED)
    begin = tasks.choose(config)(config).build_network().state_dict()
    for name in ("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed"):
        for encoder in ("encoder", "momentum.encoder"):
            found = trained[f"{encoder}.{name}"]
            np.testing.assert_allclose(found, begin[f"encoder.{name}"].numpy(), atol=1e-7)
    for name in ("encoder.blocks.0.norm1.weight", "projector.1.weight", "encoder.cls_token"):
        first = begin[name].numpy()
        moved = np.abs(trained[name] - first).mean()
        followed = np.abs(trained[f"momentum.{name}"] - first).mean()
        # The momentum of three updates, 0.99 and more, leaves them a hundredth of the way.
        assert 0 < followed < 0.05 * moved
    # Both normalise by their batches.
    for layer in ("projector.7", "momentum.projector.7", "predictor.4"):
        assert trained[f"{layer}.running_mean"].any()


def test_a_training_starts_from_a_models_weights_or_a_runs(tmp_path, options):
    train([*options, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 48)
    before = weights(tmp_path / "run")
    prefix = "encoder."
    model = {name.removeprefix(prefix): t for name, t in before.items() if name.startswith(prefix)}
    save_file(model, tmp_path / "model.safetensors")
    name = "encoder.blocks.1.mlp.fc1.weight"
    momentum = f"momentum.{name}"
    assert np.abs(before[momentum] - before[name]).max() > 1e-6
    # Nothing is trained.
    still = ["TRAIN.BASE_LR", "0", "TRAIN.END_LR", "0", "DATA.BATCH_SIZE", "16"]
    for source, expected in (("run/checkpoints/last", momentum), ("model.safetensors", name)):
        path = ["MODEL.PRETRAINED", str(tmp_path / source)]
        train([*options, *still, *path, "METHOD.MOMENTUM", "0.999"], tmp_path / expected, 48)
        after = weights(tmp_path / expected)
        np.testing.assert_array_equal(after[name], before[name])
        # It goes on by less than a hundredth of the way.
        limit = 0.01 * np.abs(before[momentum] - before[name]).max()
        np.testing.assert_allclose(after[momentum], before[expected], atol=limit)


def test_a_classifier_takes_the_encoder_alone(tmp_path, options, tiny):
    train([*options, "DATA.BATCH_SIZE", "16"], tmp_path / "run", 48)
    trained = weights(tmp_path / "run")
    model = build_model(get_config(None, [*without(tiny, "TRAIN.")]))
    report = load_weights(model, tmp_path / "run" / "checkpoints" / "last", strict=False)
    for name, tensor in model.state_dict().items():
        if "head" not in name and tensor.ndim == 1:
            np.testing.assert_array_equal(tensor.numpy(), trained[f"encoder.{name}"])
    assert "left out: " in str(report)


def test_what_does_not_fit_is_one_line(tmp_path, options):
    for changes, message in (
        (["TRAIN.MODEL_EMA", "True"], "the momentum encoder of TASK moco is the average of the we"),
        (["MODEL.EMBED_DIM", "18"], "EMBED_DIM is 18, expected a multiple of 4"),
        (["METHOD.MOMENTUM", "1.5"], "METHOD.MOMENTUM is 1.5, expected 0 <= value < 1"),
        (["METHOD.MASK_RATIO", "0.5"], "METHOD.MASK_RATIO"),
        (["TRAIN.SMOOTHING", "0.1"], "TRAIN.SMOOTHING has no effect without TASK"),
        (["TRAIN.CROP_SCALE", "[0.5,1]"], "TRAIN.CROP_SCALE has no effect"),
    ):
        refused(message, [*options, *changes], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_of_one_image_is_refused_before_the_first_step(tmp_path, options):
    for batch, drop_last, images in (("16", "False", 33), ("1", "True", 33), ("16", "False", 1)):
        changes = ["DATA.BATCH_SIZE", batch, "DATA.DROP_LAST", drop_last]
        message = (
            f"with {images} images the last batch of {batch} has one; change -batch_size, or set"
        )
        refused(message, [*options, *changes], tmp_path / "run", images)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_last_batch_of_two_images_trains(tmp_path, options):
    options += ["DATA.BATCH_SIZE", "16", "DATA.DROP_LAST", "False"]
    train(options, tmp_path / "one", 34)
    # One image of each process.
    run_ranks(train, [*options, "DATA.BATCH_SIZE", "8"], tmp_path / "two", 34)
    for name in ("one", "two"):
        assert np.isfinite(records(tmp_path / name)[-1]["loss"])
