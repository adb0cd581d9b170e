"""What holds for every architecture: all that is shipped was compared (golden/parity), and trains on two
ranks.
"""

import contextlib
import dataclasses
import inspect
import itertools
import json
import re

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.formula import array
from support.parity import compared
from support.ranks import run_ranks
from support.small_models import SMALL_MODELS

import utils
import weights
from config import get_config, model_files
from errors import InputError
from models import ARCHITECTURES, create_model, list_models
from models.layers.recompute import recompute
from tools.list_models import TABLE, content
from training.optim.groups import layer_scales, within
from weights import file_arrays, load_weights, save_weights
from weights.formats import write_weights
from weights.layout import file_name, sublayer

# with a decay of 0.5
TIMM_SCALES = json.loads((ROOT / "tests" / "golden" / "layer_groups.json").read_text())
PARITY = [(row["model"], row["parameters"], row["difference"]) for row in compared()]


def test_every_architecture_is_tested_here():
    assert SMALL_MODELS.keys() | {"deit"} == ARCHITECTURES.keys()
    assert {get_config(name).MODEL.TYPE.lower() for name in list_models()} == ARCHITECTURES.keys()


def test_every_model_is_in_the_table_of_parity_with_its_parameters():
    """The parameters are counted in each model as its file makes it: ``cost_table.py`` builds a
    file that has changed, the slow part of test_costs.py all of them.
    """
    missing = sorted(set(list_models()) - {name for name, *_ in PARITY})
    assert not missing, (
        f"tests/golden/parity/full.tsv lacks what tools/check_parity.py prints of {missing}"
    )
    assert sorted(name for name, *_ in PARITY) == list_models()
    stored = json.loads(TABLE.read_text())
    assert {file.stem: content(file) for file in model_files()} == {
        name: row["content"] for name, row in stored.items()
    }
    for name, parameters, difference in PARITY:
        # What timm's own float32 differs from its float64 (golden/parity/deep_resnets.tsv).
        own = 1.6e-4 if name == "resnetrs420" else 0
        assert float(difference) <= max(1e-4, 1.1 * own), name
        assert stored[name]["parameters"] == int(parameters.replace(",", "")), name


@pytest.mark.parametrize("case", TIMM_SCALES)
def test_timms_layer_groups_give_timms_rates(case):
    kind, _, variant = case.partition("_")
    of_timm = {"poolformer": {"fc_norm": True}, "resnet": {"depth": 18}}.get(kind, {})
    if case in list_models():
        with paddle.LazyGuard():  # the names are what counts
            model = create_model(case, **of_timm)
    elif variant:
        model = SMALL_MODELS[kind](case)
    else:
        model = SMALL_MODELS[kind](**of_timm)
    config = get_config(None, ["TRAIN.LAYER_DECAY", "0.5", "TRAIN.LAYER_DECAY_GROUPS", "timm"])
    assert layer_scales(config, model) == TIMM_SCALES[case]


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_an_architecture_keeps_its_interface(kind, tmp_path):
    paddle.seed(0)
    model = SMALL_MODELS[kind]()
    assert type(model) is ARCHITECTURES[kind]
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        assert sum(within(name, group) for group in model.layer_groups()) == 1, name
    assert model.no_weight_decay() <= {
        *names,
        "pos_embed",
        "cls_token",
        "dist_token",
        "reg_token",
        "prompt_tokens",
    }
    heads = model.classifier_names()
    assert all(within(f"{head}.weight", model.layer_groups()[-1]) for head in heads)
    for name in names:
        assert sum(within(name, group) for group in model.timm_layer_groups()) == 1, name
    first = sublayer(model, model.first_conv).weight
    # A Linear [in, out] reads windows of pixels, channel by channel.
    channels = first.shape[0] // model.window_side**2 if model.window_side else first.shape[1]
    assert channels == 3
    images = paddle.to_tensor(array("images", (2, 3, *model.image_size)))
    model.eval()
    height, width = model.image_size
    if model.min_image_size:
        assert (
            model.input_sizes
            == f"images of at least {model.min_image_size} x {model.min_image_size}"
        )
        assert model(paddle.zeros([1, 3, height + 1, width + 2])).shape == [1, model.num_classes]
    elif model.resizable and model.patch_embed.any_size:
        side = model.patch_embed.patch_size
        assert model.input_sizes == f"images of multiples of {side} pixels"
        larger = paddle.zeros([1, 3, height + side, width + 2 * side])
        assert model(larger).shape == [1, model.num_classes]
    else:
        assert model.input_sizes == f"images of {height} x {width}"
        with pytest.raises(
            InputError, match=f"the model takes images of {height} x {width}, found 52 x 52"
        ):
            model(paddle.zeros([1, 3, 52, 52]))
    logits = model(images)
    assert logits.shape == [2, model.num_classes]
    np.testing.assert_allclose(
        model.forward_head(model.forward_features(images)).numpy(), logits.numpy(), atol=1e-6
    )
    # Saved, read into a model of other classes whose classifier stays, and into one of the same
    # classes.
    save_weights(model, tmp_path / "model.safetensors")
    other = SMALL_MODELS[kind](num_classes=3)
    fresh = {name: sublayer(other, name).weight.numpy().copy() for name in heads}
    report = load_weights(other, tmp_path, strict=False)
    assert {name.rpartition(".")[0] for name in report.fresh} == set(heads)
    assert all((sublayer(other, name).weight.numpy() == fresh[name]).all() for name in heads)
    assert set(report.loaded) | set(report.fresh) == {
        file_name(name) for name in model.state_dict()
    }
    same = SMALL_MODELS[kind]()
    load_weights(same, tmp_path)
    same.eval()
    assert (same(images).numpy() == logits.numpy()).all()
    model.reset_classifier(0)
    assert model(images).shape == [2, model.num_features]
    for channels in (1, 5):
        other = SMALL_MODELS[kind](in_channels=channels)
        stems = (model.first_conv, *model.beside_first_conv)
        adapted = [f"{name}.weight adapted from 3 channels to {channels}" for name in stems]
        assert load_weights(other, tmp_path).resized == adapted


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_an_array_of_another_rank_is_named(kind, tmp_path, monkeypatch):
    """Each array has another rank as the file is opened: writing a file anew for each took most of
    the time.
    """
    model = SMALL_MODELS[kind]()
    save_weights(model, tmp_path / "a.safetensors")
    names = {tuple(name.split(".")[-2:]): name for name in file_arrays(model)}  # one of each kind
    with weights.open_weights(tmp_path / "a.safetensors") as stored:
        for name, shape in itertools.product(names.values(), ((), (3,), (1, 2, 3, 4, 5))):
            changed = stored.arrays | {name: np.ones(shape, np.float32)}
            opened = contextlib.nullcontext(dataclasses.replace(stored, arrays=changed))
            monkeypatch.setattr(weights, "open_weights", lambda path, opened=opened: opened)
            with pytest.raises(
                InputError, match=rf"a\.safetensors.*{re.escape(name)}|don't go together"
            ):
                load_weights(model, tmp_path / "a.safetensors")


def step_of_each():
    """One training step of each architecture in DataParallel: sums of gradients after it, by
    architecture.
    """
    sums = {}
    for kind, small in SMALL_MODELS.items():
        paddle.seed(0)
        model = small()
        for name in model.classifier_names():  # some begin at zero and would send back nothing
            weight = sublayer(model, name).weight
            weight.set_value(array(name, tuple(weight.shape)))
        paddle.seed(1 + utils.rank())
        network = paddle.DataParallel(model)
        network(paddle.randn([4, 3, *model.image_size])).square().mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if not p.stop_gradient}
        absent = [name for name, gradient in gradients.items() if gradient is None]
        sums[kind] = absent or [float(gradient.abs().sum()) for gradient in gradients.values()]
    return sums


def test_every_architecture_trains_on_two_ranks():
    first, second = run_ranks(step_of_each)
    assert first == second
    for kind, found in first.items():
        assert all(isinstance(value, float) for value in found), f"{kind}: no gradients for {found}"
        assert np.isfinite(found).all()


def test_a_file_with_an_array_of_another_rank_is_refused(tmp_path):
    model = SMALL_MODELS["lenet"]()
    for shape in ((), (3,), (1, 2, 3, 4, 5)):
        arrays = file_arrays(model) | {"features.0.weight": np.ones(shape, np.float32)}
        write_weights(tmp_path / "a.safetensors", arrays)
        with pytest.raises(InputError, match=r"a\.safetensors.*features\.0\.weight"):
            load_weights(model, tmp_path / "a.safetensors")


@pytest.fixture(scope="module")
def others():
    """A model and another, none of which any other architecture's weights fit: each test is refused
    them.
    """
    return {kind: SMALL_MODELS[kind]() for kind in ("resnet", "mixer")}


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_weights_of_another_architecture_say_which(kind, others, tmp_path):
    save_weights(others.get(kind) or SMALL_MODELS[kind](), tmp_path / "model.safetensors")
    other = others["mixer" if kind == "resnet" else "resnet"]
    with pytest.raises(InputError, match=f"; the names of its tensors suggest MODEL.TYPE {kind}$"):
        load_weights(other, tmp_path, strict=False)


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_a_few_steps_lower_the_loss(kind):
    paddle.seed(0)
    model = SMALL_MODELS[kind]()
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=model.parameters())
    images, labels = (
        paddle.to_tensor(array("images", (4, 3, *model.image_size))),
        paddle.to_tensor([0, 1, 2, 1]),
    )
    losses = []
    for _ in range(8):
        losses.append(paddle.nn.functional.cross_entropy(model(images), labels))
        losses[-1].backward()
        optimizer.step()
        optimizer.clear_grad()
    assert float(min(losses[4:])) < 0.97 * float(losses[0])


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
def test_tables_of_relative_positions_fit_another_image(name, tmp_path):
    sizes = (
        {"embed_dim": 24, "num_heads": 3}
        if "beit" in name
        else {"embed_dim": 12, "num_heads": [1, 2, 3, 4]}
    )
    sizes |= {"depth": 1} if "beit" in name else {"stage_depths": [1, 1, 1, 1]}
    window = {} if "beit" in name else {"window_size": 8}
    save_weights(create_model(name, **sizes), tmp_path / "model.safetensors")
    report = load_weights(create_model(name, image_size=256, **sizes, **window), tmp_path)
    from_to = "14 x 14 to 16 x 16" if "beit" in name else "7 x 7 to 8 x 8"
    assert report.resized == [
        f"{1 if 'beit' in name else 4} relative_position_bias_table resized from {from_to}"
    ]


def after_a_step(kind, recompute):
    """A step with all that is random: (gradients, buffers)."""
    taken = inspect.signature(ARCHITECTURES[kind]).parameters
    rates = {"dropout": 0.2, "attention_dropout": 0.2, "droppath": 0.4}
    random = {name: rate for name, rate in rates.items() if name in taken}
    paddle.seed(0)
    model = SMALL_MODELS[kind](recompute=recompute, **random)
    for name in model.classifier_names():
        weight = sublayer(model, name).weight
        weight.set_value(array(name, tuple(weight.shape)))
    paddle.seed(1)
    model(paddle.randn([4, 3, *model.image_size])).square().mean().backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return gradients, {name: buffer.numpy() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("kind", sorted(SMALL_MODELS.keys() - {"lenet"}))
def test_recompute_gives_the_same_gradients_and_statistics(kind, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "models.base.recompute", lambda *args, **named: calls.append(1) or recompute(*args, **named)
    )
    expected = after_a_step(kind, False)
    assert not calls
    found = after_a_step(kind, True)
    assert len(calls) > 1  # one a block
    for one, two in zip(expected, found, strict=True):
        assert one.keys() == two.keys()
        assert all((two[name] == value).all() for name, value in one.items())
