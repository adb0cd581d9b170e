"""BEiT's pre-training against transformers' and the authors' losses and gradients."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.beit_pretraining import EARLY_LAYERS, V2, VOCABULARY, batch
from golden.formula import array
from safetensors.numpy import load_file, save_file
from support.small_models import SMALL_MODELS
from support.transformers_names import transformers_names

from errors import InputError
from models.beit import Beit
from models.pretraining.beit import BeitPretraining, masked_places
from models.vit import VisionTransformer
from weights import file_arrays, load_weights, save_weights
from weights.layout import linear_weights
from weights.names import timm_names

SIZES = {
    "image_size": 16,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 3,
    "num_classes": 0,
}
NETWORKS = {
    "beit_pretraining": {
        "use_abs_pos_emb": False,
        "use_shared_rel_pos_bias": True,
        "init_values": 0.1,
    },
    # transformers' norm is that of the tokens, as it is here.
    "beit_pretraining_absolute": {"use_rel_pos_bias": True, "global_pool": "token"},
    V2: {
        "use_abs_pos_emb": False,
        "use_shared_rel_pos_bias": True,
        "init_values": 0.1,
        "depth": 4,
        "global_pool": "token",
    },
}


def network(name, **options):
    encoder = Beit(**SIZES | NETWORKS[name] | options)
    head_layers = 2 if name == V2 else 0
    return BeitPretraining(encoder, VOCABULARY, 6, EARLY_LAYERS, head_layers)


def golden(name):
    return np.load(ROOT / "tests" / "golden" / f"{name}.npz")


def inputs():
    values = batch()
    return [paddle.to_tensor(values[key]) for key in ("images", "mask", "tokens")]


def from_file(name, folder, model):
    """Loads a file of the reference's names with the formula's weights into the model."""
    stored = golden(name)
    shapes = {
        key.removeprefix("grad/"): stored[key].shape for key in stored if key.startswith("grad/")
    }
    file = folder / "reference.safetensors"
    save_file({key: array(key, shape) for key, shape in shapes.items()}, file)
    return load_weights(model, file)


@pytest.mark.smoke
@pytest.mark.parametrize("name", NETWORKS)
def test_loss_and_every_gradient_are_the_references(tmp_path, name):
    model = network(name)
    from_file(name, tmp_path, model)
    model.eval()
    images, mask, tokens = inputs()
    losses = model(images, mask, tokens)["loss"]
    # The reference takes the mean over all masked patches, not over samples.
    counts = mask.astype("float32").sum(1)
    loss = (losses * counts).sum() / counts.sum()
    stored = golden(name)
    np.testing.assert_allclose(float(loss), stored["loss"], rtol=1e-5)
    loss.backward()
    gradients = {
        key.removeprefix("grad/"): stored[key] for key in stored if key.startswith("grad/")
    }
    names = [key for key, _ in model.named_parameters()]
    expected = timm_names(model.weight_names, gradients, "torch", names)
    found = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    for key in linear_weights(model):
        found[key] = found[key].T
    assert found.keys() == expected.keys()
    least = 2e-2 * max(np.ptp(value) for value in expected.values())
    for key, value in expected.items():
        np.testing.assert_allclose(
            found[key], value, atol=1e-5 * max(np.ptp(value), least), rtol=0, err_msg=key
        )


def test_a_loss_is_the_mean_over_a_samples_masked_patches():
    paddle.seed(0)
    model = network("beit_pretraining")
    images, mask, tokens = inputs()
    values = model(images, mask, tokens)
    features = model._features(images, mask)[0]
    logs = paddle.nn.functional.log_softmax(model.lm_head(features), axis=-1).numpy()
    for sample, masked in enumerate(mask.numpy().astype(bool)):
        expected = -logs[sample, masked, tokens.numpy()[sample, masked]].mean()
        np.testing.assert_allclose(values["loss"].numpy()[sample], expected, rtol=1e-5)
        right = logs[sample, masked].argmax(-1) == tokens.numpy()[sample, masked]
        np.testing.assert_allclose(values["token_acc"].numpy()[sample], 100 * right.mean())


def test_masked_pixels_have_no_effect_and_the_others_have():
    model = network("beit_pretraining")
    images, mask, tokens = inputs()
    before = model(images, mask, tokens)["loss"].numpy()
    # Patch 1 of the first image is masked, patch 0 isn't.
    changed = images.clone()
    changed[0, :, :4, 4:8] = 9.0
    np.testing.assert_array_equal(model(changed, mask, tokens)["loss"].numpy(), before)
    changed[0, :, :4, :4] = 9.0
    assert model(changed, mask, tokens)["loss"].numpy()[0] != before[0]


def test_masked_places_come_first_in_order():
    mask = paddle.to_tensor([[0, 1, 0, 1], [0, 0, 1, 0]], "uint8")
    assert masked_places(mask, 2).tolist() == [[1, 3], [2, 0]]


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_transformers_with_a_token_for_each_patch_are_trained_whole_and_others_refused(kind):
    encoder = SMALL_MODELS[kind](num_classes=0)
    if kind not in ("beit", "eva", "vit"):
        with pytest.raises(InputError, match="use a BEiT, a ViT or an EVA"):
            BeitPretraining(encoder, VOCABULARY, 3)
        return
    model = BeitPretraining(encoder, VOCABULARY, 3, early_layers=1, head_layers=1)
    rows, columns = encoder.patch_embed.grid_size
    mask = paddle.to_tensor(np.arange(rows * columns)[None] < 3).astype("uint8")
    tokens = paddle.zeros([1, rows * columns], "int64")
    model(paddle.randn([1, 3, *encoder.image_size]), mask, tokens)["loss"].sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []


def test_further_blocks_start_as_the_encoders_blocks_of_their_place():
    paddle.seed(0)
    model = BeitPretraining(Beit(**SIZES | {"embed_dim": 96, "droppath": 0.3}), 5, 6, 1, 2)
    for number, block in enumerate(model.cls_pt_layers, start=2):
        assert block.drop_path1.drop_prob == model.encoder.blocks[number - 1].drop_path1.drop_prob
        deviation = 0.02 / (2 * number) ** 0.5
        assert float(block.mlp.fc2.weight.std()) == pytest.approx(deviation, rel=0.05)
        twin = model.encoder.blocks[number - 1].mlp.fc2.weight
        assert np.corrcoef(block.mlp.fc2.weight.numpy().ravel(), twin.numpy().ravel())[0, 1] < 0.1
    names = [parameter.name for parameter in model.parameters()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("early", [0, 2, 3])
def test_blocks_that_are_not_there_are_refused(early):
    with pytest.raises(InputError, match=f"EARLY_LAYERS is {early}, expected 1 to 1"):
        BeitPretraining(Beit(**SIZES), VOCABULARY, 6, early, 2)


def test_a_vit_whose_pooling_reads_the_patches_is_refused():
    encoder = VisionTransformer(**SIZES, global_pool="map")
    with pytest.raises(InputError, match="GLOBAL_POOL is map"):
        BeitPretraining(encoder, VOCABULARY, 6)


def test_an_encoder_alone_reads_the_files(tmp_path):
    for name, options in NETWORKS.items():
        encoder = Beit(**SIZES | options | {"global_pool": "avg"})
        report = from_file(name, tmp_path, encoder)
        assert report.missing == []


def test_weights_are_written_under_the_authors_names_behind_a_prefix(tmp_path):
    model = network(V2)
    from_file(V2, tmp_path, model)
    save_weights(model, tmp_path / "ours.safetensors")
    written = load_file(tmp_path / "ours.safetensors")
    authors = load_file(tmp_path / "reference.safetensors")
    assert {key.removeprefix("encoder.") for key in written} == authors.keys()
    for key, value in written.items():
        np.testing.assert_array_equal(value, authors[key.removeprefix("encoder.")], err_msg=key)
    again = network(V2)
    assert load_weights(again, tmp_path / "ours.safetensors").unexpected == []
    for key, value in again.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), model.state_dict()[key].numpy())


@pytest.mark.parametrize("name", ["beit_pretraining", "beit_pretraining_absolute"])
def test_transformers_names_load_and_come_back(tmp_path, name):
    """No tensor is lost or changed on the way, so its file can be written of ours."""
    model = network(name)
    from_file(name, tmp_path, model)
    expected = load_file(tmp_path / "reference.safetensors")
    back = transformers_names(file_arrays(model), "beit")
    assert back.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(back[key], values, err_msg=key)
