"""Weights from which a pre-training starts: a model's, another method's, and those for other images."""

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file
from support.small_models import SMALL_MODELS

from errors import InputError
from models.pretraining.beit import BeitPretraining
from models.pretraining.fcmae import ConvolutionalMaskedAutoencoder
from models.pretraining.mae import MaskedAutoencoder
from models.pretraining.simmim import SimMIM
from models.pretraining.tokenizer import Tokenizer
from models.vit import VisionTransformer
from weights import file_arrays, load_weights, save_weights


def vit(num_classes=0, image_size=16, **options):
    return VisionTransformer(
        image_size, 4, num_classes=num_classes, embed_dim=16, depth=2, num_heads=2, **options
    )


def small(kind):
    def make(num_classes=0, **options):
        return SMALL_MODELS[kind](num_classes=num_classes, **options)

    return make


def beit_v2(encoder):
    return BeitPretraining(encoder, vocabulary=8, max_masked=2, early_layers=1, head_layers=1)


def tokenizer(encoder):
    return Tokenizer(encoder, 8, 4, "gumbel", 8, 1, 2)


OF_TOKENIZER = "codebook, encode_task_layer, decoder, decode_task_layer"
# The network, its model's constructor, and what starts at random.
NETWORKS = {
    "mae": (
        lambda encoder: MaskedAutoencoder(encoder, 0.75, 8, 1, 2),
        vit,
        "mask_token, decoder_embed, decoder_blocks, decoder_norm, decoder_pred",
    ),
    "simmim of a ViT": (lambda encoder: SimMIM(encoder, 8), vit, "mask_token, decoder"),
    "simmim of a Swin": (SimMIM, small("swin"), "mask_token, decoder"),
    "beit": (
        lambda encoder: BeitPretraining(encoder, 8, 2),
        small("beit"),
        "mask_token, lm_head",
    ),
    "beit v2": (beit_v2, small("beit"), "mask_token, lm_head, cls_pt_layers"),
    "fcmae": (
        ConvolutionalMaskedAutoencoder,
        small("convnext"),
        "mask_token, proj, decoder, pred",
    ),
    "tokenizer": (tokenizer, small("convmixer"), OF_TOKENIZER),
    "tokenizer of a ViT": (tokenizer, vit, OF_TOKENIZER),
}


@pytest.mark.parametrize("method", NETWORKS)
def test_a_models_weights_are_the_encoders_and_the_rest_is_named(tmp_path, method):
    build, make, fresh = NETWORKS[method]
    paddle.seed(1)
    model = make(num_classes=7)
    save_weights(model, tmp_path / "model.safetensors")
    heads = tuple(f"{name}." for name in model.classifier_names())
    arrays = {
        name: array for name, array in file_arrays(model).items() if not name.startswith(heads)
    }
    network = build(make())
    before = file_arrays(network)
    report = load_weights(network, tmp_path / "model.safetensors", strict=False)
    after = file_arrays(network)
    for name, array in after.items():
        expected = arrays.pop(name.removeprefix("encoder."), before[name])
        assert (array == expected).all(), name
    assert not arrays
    assert report.notes[0].startswith(
        f"the file's tensors are the encoder's; {fresh} are initialised randomly"
    )
    assert report.notes[-1].startswith("ignored, because the model has no classes: head")
    assert "\n" not in str(report)
    assert set(report.loaded) == {name for name in after if name.startswith("encoder.")}
    # An evaluation needs the whole network.
    with pytest.raises(InputError, match="missing "):
        load_weights(network, tmp_path / "model.safetensors")


@pytest.mark.parametrize("method", NETWORKS)
def test_a_network_that_lacks_a_tensor_of_its_own_is_refused(tmp_path, method):
    build, make, _ = NETWORKS[method]
    network = build(make())
    save_weights(network, tmp_path / "whole.safetensors")
    assert not load_weights(network, tmp_path / "whole.safetensors", strict=False).notes
    arrays = load_file(tmp_path / "whole.safetensors")
    *_, lost = [name for name in arrays if not name.startswith("encoder.") and name != "mask_token"]
    del arrays[lost]
    save_file(arrays, tmp_path / "lacks.safetensors")
    with pytest.raises(InputError, match=f"doesn't fit the model: missing {lost}$"):
        load_weights(network, tmp_path / "lacks.safetensors", strict=False)


def test_another_methods_network_gives_its_encoder(tmp_path):
    save_weights(SimMIM(vit(), 8), tmp_path / "simmim.safetensors")
    network = MaskedAutoencoder(vit(), 0.75, 8, 1, 2)
    report = load_weights(network, tmp_path / "simmim.safetensors", strict=False)
    assert report.notes[1] == "left out: 2 tensors of decoder, 1 of mask_token"
    assert "decoder_pred are initialised randomly; not trained: pos_embed" in report.notes[0]
    stored = load_file(tmp_path / "simmim.safetensors")
    positions = network.encoder.pos_embed
    np.testing.assert_array_equal(positions.numpy(), stored["encoder.pos_embed"])
    assert positions.stop_gradient


def test_a_mask_token_alone_is_no_decoder(tmp_path):
    """DINOv2's models have one."""
    arrays = file_arrays(vit()) | {"mask_token": np.ones((1, 16), np.float32)}
    save_file(arrays, tmp_path / "dino.safetensors")
    network = MaskedAutoencoder(vit(), 0.75, 8, 1, 2)
    report = load_weights(network, tmp_path / "dino.safetensors", strict=False)
    assert "left out: 1 tensor of mask_token" in report.notes


def test_a_model_of_another_architecture_is_refused(tmp_path):
    save_weights(small("swin")(num_classes=3), tmp_path / "swin.safetensors")
    with pytest.raises(
        InputError, match="doesn't fit the model: missing cls_token.*suggest MODEL.TYPE swin"
    ):
        network = MaskedAutoencoder(vit(), 0.75, 8, 1, 2)
        load_weights(network, tmp_path / "swin.safetensors", strict=False)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("method", ["mae", "simmim of a ViT", "beit v2", "tokenizer of a ViT"])
def test_a_network_of_another_image_size_has_its_positions_resized(tmp_path, method, strict):
    build, make, _ = NETWORKS[method]
    own = make()
    size = own.image_size[0]
    network = build(own)
    save_weights(network, tmp_path / "whole.safetensors")
    larger = make(image_size=2 * size)
    other = build(larger)
    report = load_weights(other, tmp_path / "whole.safetensors", strict=strict)
    assert len(report.loaded) == len(file_arrays(other))
    assert report.resized
    # A model's own weights are resized in the same way.
    save_weights(own, tmp_path / "model.safetensors")
    alone = make(image_size=2 * size)
    load_weights(alone, tmp_path / "model.safetensors", strict=False)
    for name, array in file_arrays(alone).items():
        np.testing.assert_array_equal(file_arrays(other)[f"encoder.{name}"], array, err_msg=name)
