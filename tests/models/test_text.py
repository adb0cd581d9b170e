"""Text towers against those of transformers and OpenCLIP (tests/golden/make_text.py)."""

import json
import shutil

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file
from support.programs import ROOT

from errors import InputError
from inference.text.encoder import TextEncoder
from models import text_arguments
from models.text_pretrained import has_text_tower, load_text_tower

GOLDEN = ROOT / "tests" / "golden" / "text"
TEXTS = json.loads((GOLDEN / "strings.json").read_text(encoding="utf-8"))
# The folder of each model, and whose answers it has.
MODELS = {
    "clip": "clip",
    "siglip": "siglip",
    "siglip2": "siglip2",
    "openclip": "openclip",
    "openclip_siglip": "openclip_siglip",
    "big_vision/siglip.npz": "siglip",
}


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    # No published tower has 32 channels.
    monkeypatch.setitem(text_arguments._HEADS, 32, 2)


@pytest.fixture(scope="module")
def answers():
    return np.load(GOLDEN / "answers.npz")


@pytest.fixture
def folder(tmp_path):
    """Copies a model's folder, and returns the copy."""

    def copy(name):
        return shutil.copytree(GOLDEN / name, tmp_path / name)

    return copy


@pytest.mark.smoke
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_are_the_references(name, answers):
    tower, _ = load_text_tower(GOLDEN / name)
    expected = answers[f"{MODELS[name]}/texts"]
    tokens = paddle.to_tensor(answers[f"{MODELS[name]}/tokens"][: len(expected)].astype(np.int64))
    found = tower.normalised(tokens).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-6)
    # The texts differ from each other by more.
    assert expected.std(axis=0).mean() > 0.02


@pytest.mark.parametrize("name", ["clip", "siglip", "openclip"])
def test_a_batch_changes_no_embedding(name):
    encoder = TextEncoder(GOLDEN / name, batch_size=7)
    together = encoder(TEXTS[:30])
    alone = TextEncoder(GOLDEN / name, batch_size=1)
    for place in (0, 9, 29):
        np.testing.assert_allclose(together[place], alone([TEXTS[place]])[0], atol=1e-6)


def test_a_causal_tower_reads_no_token_behind_the_end():
    encoder = TextEncoder(GOLDEN / "clip")
    tokens = encoder.tokenizer(["a cat", ""])
    whole = encoder.tower(paddle.to_tensor(tokens)).numpy()
    ends = encoder._lengths(tokens)
    # Begin and end; a word's tokens between them.
    assert ends[1] == 2
    cut = encoder.tower(paddle.to_tensor(tokens[:, : ends.max()])).numpy()
    np.testing.assert_allclose(cut, whole, atol=1e-5)
    tokens[0, ends[0] :] = 5
    np.testing.assert_allclose(encoder.tower(paddle.to_tensor(tokens)).numpy(), whole, atol=1e-5)


def test_siglip_reads_its_padding():
    encoder = TextEncoder(GOLDEN / "siglip")
    tokens = encoder.tokenizer(["a cat"])
    whole = encoder.tower(paddle.to_tensor(tokens)).numpy()
    tokens[0, -2] = 5
    assert np.abs(encoder.tower(paddle.to_tensor(tokens)).numpy() - whole).max() > 1e-3
    assert (encoder._lengths(tokens) == tokens.shape[1]).all()


def test_scales_are_the_files():
    clip = TextEncoder(GOLDEN / "clip")
    siglip = TextEncoder(GOLDEN / "siglip")
    assert clip.scale == pytest.approx(np.exp(2.6592), rel=1e-5)
    assert clip.bias == 0
    assert (siglip.scale, siglip.bias) == (pytest.approx(np.exp(2.0)), -3.0)


def test_weights_of_one_tower_have_none_of_texts():
    shipped = ROOT / "weights" / "shipped" / "digits.safetensors"
    assert not has_text_tower(shipped)
    with pytest.raises(InputError, match=r"digits\.safetensors: it has no text tower; use w"):
        load_text_tower(shipped)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        (
            "vocab_size",
            1 << 20,
            r"token_embedding.weight is \[1214, 32\], its conf.* \[1048576, 32\]",
        ),
        ("hidden_size", 1 << 20, r"describes \[1214, 1048576\]"),
        ("num_hidden_layers", 3, r"blocks.2.mlp.fc1.weight is missing"),
        ("num_hidden_layers", 1 << 20, r"blocks.2.mlp.fc1.weight is missing"),
        ("num_hidden_layers", 1, r"don't match its configuration \(blocks.1."),
        (
            "intermediate_size",
            65,
            r"fc1.weight is \[64, 32\], its configuration describes \[65, 32\]",
        ),
        ("max_position_embeddings", 25, r"pos_embed is \[1, 24, 32\], .* \[1, 25, 32\]"),
        ("num_attention_heads", 3, r"32 channels and 3 heads: expected a multiple"),
        ("hidden_act", "relu", r"text_config.hidden_act is 'relu', expected one of gelu, "),
        ("layer_norm_eps", 0, r"its text_config.layer_norm_eps is 0, expected a number"),
        ("vocab_size", "many", r"its text_config.vocab_size is 'many', expected a whole number"),
    ],
)
def test_a_configuration_of_another_tower_is_refused(folder, key, value, problem):
    clip = folder("clip")
    config = json.loads((clip / "config.json").read_text())
    config["text_config"][key] = value
    (clip / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=problem):
        load_text_tower(clip)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("pool_type", "first", r"text_cfg.pool_type is 'first', expected argmax, eos or last"),
        ("hf_model_name", "roberta-base", r"text_cfg.hf_model_name is 'roberta-base', only None"),
        ("embed_cls", True, r"text_cfg.embed_cls is True, only False"),
        ("ls_init_value", 1e-4, r"text_cfg.ls_init_value is 0.0001"),
        ("no_causal_mask", 1, r"its text_cfg.no_causal_mask is 1, expected"),
    ],
)
def test_a_tower_of_openclip_that_isnt_here_is_refused(folder, key, value, problem):
    openclip = folder("openclip")
    file = openclip / "open_clip_config.json"
    config = json.loads(file.read_text())
    config["model_cfg"]["text_cfg"][key] = value
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match=problem):
        load_text_tower(openclip)


def test_without_a_configuration_a_tower_is_unknown(folder):
    openclip = folder("openclip")
    (openclip / "open_clip_config.json").unlink()
    with pytest.raises(
        InputError, match="the configuration of its text tower is missing; put the conf"
    ):
        load_text_tower(openclip)


def test_openais_own_file_is_read_by_its_shapes(folder, answers, monkeypatch):
    openclip = folder("openclip")
    arrays = load_file(openclip / "open_clip_model.safetensors")
    # What OpenAI's files hold beside the tensors. Their model has the quick GELU.
    arrays |= {"vocab_size": np.array(1214), "context_length": np.array(24)}
    save_file(arrays, openclip / "clip.safetensors")
    for name in ("open_clip_config.json", "open_clip_model.safetensors"):
        (openclip / name).unlink()
    tower, layout = load_text_tower(openclip / "clip.safetensors")
    assert layout == "openclip"
    assert tower.arguments.act == "quick_gelu"
    assert tower.arguments.num_heads == 2
    assert tower.arguments.pool == "argmax"
    assert not tower.arguments.head_bias


def test_channels_of_unknown_heads_are_refused(monkeypatch):
    monkeypatch.delitem(text_arguments._HEADS, 32)
    with pytest.raises(
        InputError, match="has 32 channels, and its number of heads is unknown; it is known"
    ):
        load_text_tower(GOLDEN / "big_vision" / "siglip.npz")


def test_values_that_arent_finite_are_refused(folder):
    clip = folder("clip")
    arrays = load_file(clip / "model.safetensors")
    arrays["text_projection.weight"][0, 0] = np.nan
    save_file(arrays, clip / "model.safetensors")
    with pytest.raises(InputError, match="1 of the 768 values of text_projection.weight are NaN"):
        load_text_tower(clip)
