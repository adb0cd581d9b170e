"""DINO, iBOT and DINOv2 against twenty steps of the authors' code."""

import math

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden import dino as golden
from golden.formula import array, places
from support.small_models import SMALL_MODELS

from config import get_config, with_values
from errors import InputError
from models.pretraining.dino import Dino
from settings.registry import tasks
from training.dino import draw_masks
from training.losses.self_distillation import koleo, sinkhorn_knopp
from training.optim import build_optimizer, clip_gradients, set_weight_decay, weight_decay_at
from training.optim.schedule import cosine_between
from weights.layout import linear_weights


def config_of(case, *options):
    sizes = {"IMAGE_SIZE": golden.SIZE, "IMAGENET_MEAN": [0.0] * 3, "IMAGENET_STD": [1.0] * 3}
    words = ["TASK", "dino", "MODEL.TYPE", "ViT", "MODEL.PATCH_SIZE", str(golden.PATCH)]
    words += [word for key, value in sizes.items() for word in (f"DATA.{key}", str(value))]
    for key, value in golden.VIT.items():
        words += [f"MODEL.{key.upper()}", str(value)]
    method = golden.HEAD | golden.CASES[case] | {"momentum": golden.MOMENTUM}
    method["warmup_teacher_temp"], method["teacher_temp"] = golden.TEMPERATURES
    method["warmup_teacher_temp_epochs"] = golden.WARMUP_TEMPERATURE
    for key, value in method.items():
        words += [f"METHOD.{key.upper()}", str(value)]
    train = {
        "NUM_EPOCHS": golden.EPOCHS,
        "BASE_LR": golden.RATES[0],
        "END_LR": golden.RATES[1],
        "WARMUP_EPOCHS": golden.WARMUP,
        "WARMUP_START_LR": 0.0,
        "WEIGHT_DECAY": golden.DECAYS[0],
        "WEIGHT_DECAY_END": golden.DECAYS[1],
        "GRAD_CLIP": golden.CLIP,
        "GRAD_CLIP_MODE": "parameter",
    }
    for key, value in train.items():
        words += [f"TRAIN.{key}", str(value)]
    return with_values(get_config(None, [*words, *options]), MODEL__NUM_CLASSES=0)


def as_torch(network, name, values):
    """Values of a parameter in torch's layout, or back."""
    return values.T if name in linear_weights(network) else values


def network_of(task):
    """The task's network with the formula's weights, as the reference's."""
    paddle.seed(0)
    network = task.build_network()
    for name, parameter in network.named_parameters():
        own = name.removeprefix("teacher.")
        if not own.endswith(("weight_g", "center")):
            shape = as_torch(network, name, parameter).shape
            values = array(own, tuple(shape))
            parameter.set_value(np.ascontiguousarray(as_torch(network, name, values)))
    network.train()
    return network


def batch_of(step, case):
    whole, local = (paddle.to_tensor(v.transpose(0, 1, 3, 4, 2)) for v in golden.views(step))
    batch = {"pixels": whole, "local": local}
    if golden.CASES[case].get("patch_loss"):
        batch["masked"] = paddle.to_tensor(golden.masks(step))
    return batch


@pytest.mark.smoke
@pytest.mark.parametrize("case", golden.CASES)
def test_twenty_steps_are_the_authors(case):
    expected = dict(np.load(ROOT / "tests" / "golden" / f"dino_{case}.npz"))
    config = config_of(case)
    task = tasks.choose(config)(config)
    network = network_of(task)
    optimizer = build_optimizer(config, network)
    total = golden.EPOCHS * golden.STEPS
    losses = []
    for step in range(total):
        epoch = step // golden.STEPS + 1
        values = task.step(network, batch_of(step, case), epoch)
        assert values["loss"].shape == [golden.IMAGES]
        losses.append(values["loss"].mean().item())
        values["loss"].mean().backward()
        task.before_update(network, epoch)
        clip_gradients(config, network)
        optimizer.set_lr(float(expected["rates"][step]))
        set_weight_decay(optimizer, weight_decay_at(config, step / total))
        optimizer.step()
        optimizer.clear_grad(False)
        task.after_update(network, step / total)
        for name in ("center", "patch_center"):
            if f"centers/{name}" in expected and not task.sinkhorn:
                center = getattr(network, name).numpy()
                np.testing.assert_allclose(
                    center, expected[f"centers/{name}"][step], atol=1e-5, rtol=0
                )
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-5)
    parameters = dict(network.named_parameters())
    compared = 0
    for key, values in expected.items():
        branch, _, name = key.partition("/")
        if branch not in ("student", "teacher"):
            continue
        own = f"teacher.{name}" if branch == "teacher" else name
        found = places(as_torch(network, own, parameters[own].numpy()))
        np.testing.assert_allclose(found, values, atol=1e-5, rtol=0, err_msg=key)
        compared += 1
    frozen_centers = 1 + ("patch_center" in parameters)
    assert compared == len(parameters) - frozen_centers


@pytest.mark.parametrize("name", ["decays", "momenta"])
def test_schedules_are_the_authors(name):
    expected = np.load(ROOT / "tests" / "golden" / "dino_dino.npz")[name]
    config = config_of("dino")
    shares = np.arange(len(expected)) / len(expected)
    if name == "decays":
        found = [weight_decay_at(config, share) for share in shares]
    else:
        found = [cosine_between(golden.MOMENTUM, 1.0, share) for share in shares]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    # The end is reached after the last update.
    assert cosine_between(0.996, 1.0, 1.0) == 1.0


def test_the_last_layer_is_frozen_in_the_first_epochs_alone():
    config = config_of("ibot", "METHOD.SEPARATE_HEAD", "True", "METHOD.FREEZE_LAST_LAYER", "2")
    task = tasks.choose(config)(config)
    network = network_of(task)
    for epoch, frozen in ((1, True), (2, True), (3, False)):
        task.step(network, batch_of(0, "ibot"), epoch)["loss"].sum().backward()
        task.before_update(network, epoch)
        missing = {name for name, p in network.named_parameters() if p.grad is None}
        trained = {
            name for name in missing if not name.startswith(("teacher.", "center", "patch_c"))
        }
        last = {
            f"{head}.last_layer.weight_{part}" for head in ("head", "patch_head") for part in "gv"
        }
        assert trained == (last if frozen else set())
        network.clear_gradients()


@pytest.mark.parametrize("temperature", [0.04, 0.01, 0.003])
def test_sinkhorn_knopp_is_right_with_low_temperatures(temperature):
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(64, 16))
    features = rng.normal(size=16) + 0.05 * rng.normal(size=(20, 16))
    for vectors in (prototypes, features):
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    logits = (features @ prototypes.T).astype(np.float32)
    counted = (np.arange(20) < 17).astype(np.float32)

    # The authors' steps, with numbers that don't overflow.
    highest = logits[:17].max()
    expected = np.exp((logits[:17].astype(np.longdouble) - highest) / temperature)
    for _ in range(3):
        expected /= expected.sum(0)
        expected /= expected.sum(1, keepdims=True)
    found = sinkhorn_knopp(paddle.to_tensor(logits), temperature, paddle.to_tensor(counted))
    np.testing.assert_allclose(found[:17].numpy(), expected.astype(float), atol=1e-6)
    assert not found[17:].numpy().any()


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ([[3.0, 0.0]], [0.0]),  # no other one
        ([[3.0, 0.0], [-1.0, 0.0]], [-math.log(2)] * 2),  # the opposite one is the nearest
        ([[1.0, 0.0], [0.0, 2.0], [0.0, -1.0]], [-math.log(2) / 2] * 3),
        ([[1.0, 1.0], [2.0, 2.0]], [17.539307] * 2),  # the authors', of equal features
        ([[0.0, 0.0], [0.0, 0.0]], [17.539307] * 2),
    ],
)
def test_koleo_at_its_ends(features, expected):
    given = paddle.to_tensor(features, stop_gradient=False)
    values = koleo(given)
    np.testing.assert_allclose(values.numpy(), expected, atol=1e-6)
    values.mean().backward()
    assert given.grad is None or np.isfinite(given.grad.numpy()).all()


def test_the_temperature_warms_up_and_an_evaluation_has_the_last_one():
    config = config_of("dino")
    task = tasks.choose(config)(config)
    found = [task._temperature(epoch) for epoch in (0, 1, 2, 3, 4)]
    np.testing.assert_allclose(found, [0.07, 0.04, 0.07, 0.07, 0.07])


def test_an_evaluation_changes_no_centre_and_no_teacher():
    config = config_of("ibot")
    task = tasks.choose(config)(config)
    network = network_of(task)
    before = {name: t.numpy() for name, t in network.state_dict().items()}
    network.eval()
    with paddle.no_grad():
        task.step(network, batch_of(0, "ibot"), 0)
    assert task._logit_sums == {}
    for name, tensor in network.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name], err_msg=name)


@pytest.mark.parametrize("grid", [(4, 4), (2, 3), (14, 14)])
def test_one_of_the_two_views_is_masked(grid):
    rng = np.random.default_rng(0)
    patches = grid[0] * grid[1]
    masks = np.stack([draw_masks(rng, grid, (0.1, 0.5), 4) for _ in range(400)])
    counts = masks.sum(2)
    assert masks.shape == (400, 2, patches)
    assert ((counts > 0).sum(1) == 1).all()
    assert counts.max() <= max(1, patches // 2)
    # The deviation of the share of first views is 0.025.
    assert (counts[:, 0] > 0).mean() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("kind", ["cait", "crossvit", "pit"])
def test_patches_of_other_transformers_are_refused(kind):
    with pytest.raises(InputError, match="isn't a transformer with one token per"):
        Dino(SMALL_MODELS[kind](num_classes=0), 8, 8, 8, max_masked=4)


def test_heads_read_what_the_pooling_gives():
    paddle.seed(0)
    encoder = SMALL_MODELS["vit"](num_classes=0, global_pool="token_avg")
    network = Dino(encoder, 12, 8, 6, max_masked=2, separate_head=True)
    images = paddle.randn([4, 3, *encoder.image_size])
    patches = encoder.patch_embed.num_patches
    chosen = paddle.ones([2, 2 * patches], "uint8")
    outputs = network(images, None, chosen)
    assert outputs["student"].shape == [2, 2, 12]
    assert outputs["student_patches"].shape == [2, 2, 12]
