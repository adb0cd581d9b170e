"""BEiT's pre-training against transformers' and the authors' losses and gradients."""

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.beit_pretraining import EARLY_LAYERS, V2, VOCABULARY, batch
from golden.formula import array
from safetensors.numpy import save_file
from support.small_models import SMALL_MODELS, small_beit

from errors import InputError
from models.beit import Beit
from models.pretraining.beit import BeitPretraining, masked_places
from models.vit import VisionTransformer
from weights import load_weights
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
