"""Names that the authors give Hiera's tensors, fine-tuned and masked pre-training's, and positions
for other images.

golden/names_hiera.json was made by hand: the authors' modules, reduced, with the weights of
golden/hiera.py under their names.
"""

import json
import pickle

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.hiera import MASK, array
from support.small_models import small_hiera

from errors import InputError
from weights import load_weights, save_weights
from weights.formats import write_weights
from weights.layout import file_name
from weights.resize import bicubic_matrix

CASES = json.loads((ROOT / "tests" / "golden" / "names_hiera.json").read_text())


def arrays_of(case):
    return {name: array(name, tuple(shape)) for name, shape in CASES[case]["shapes"].items()}


def images_of(model):
    return paddle.to_tensor(array("images", (2, 3, *model.image_size)))


@pytest.mark.smoke
def test_the_authors_files_give_their_logits(tmp_path):
    write_weights(tmp_path / "a.safetensors", arrays_of("fine-tuned"))
    model = small_hiera()
    assert load_weights(model, tmp_path / "a.safetensors").changes == []
    model.eval()
    logits = model(images_of(model)).numpy()
    expected = np.array(CASES["fine-tuned"]["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.ptp(expected), rtol=0)


@pytest.mark.smoke
def test_masked_pre_trainings_encoder_goes_on_with_a_fresh_classifier(tmp_path):
    """The encoder of q_pool 2 gives the authors' stages of masked images; the classifier of q_pool
    3 starts afresh.
    """
    arrays = arrays_of("pre-trained")
    (tmp_path / "mae.pdparams").write_bytes(
        pickle.dumps({"epoch": 7, "model_state": arrays}, protocol=4)
    )
    with pytest.raises(InputError, match=r"missing head\.fc\.weight, head\.fc\.bias"):
        load_weights(small_hiera(), tmp_path / "mae.pdparams")
    write_weights(tmp_path / "mae.safetensors", arrays)
    models = small_hiera(), small_hiera(q_pool=2)
    for model in models:
        report = load_weights(model, tmp_path / "mae.safetensors", strict=False)
        assert report.changes == [
            "classifier initialised randomly: none in the file, 5 in the model"
        ]
        fresh = {file_name(name) for name in model.state_dict()} - set(report.loaded)
        assert fresh == {"head.fc.weight", "head.fc.bias"}
        np.testing.assert_array_equal(model.head.norm.weight.numpy(), arrays["encoder_norm.weight"])
        model.eval()
    _, stages = models[1].forward_features(
        images_of(models[1]), paddle.to_tensor(MASK), return_intermediates=True
    )
    expected = np.array(CASES["pre-trained"]["last_stage"])
    np.testing.assert_allclose(stages[-1].numpy(), expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_positions_fit_other_images(tmp_path):
    model = small_hiera(image_size=64)
    save_weights(model, tmp_path / "a.safetensors")
    other = small_hiera()
    assert load_weights(other, tmp_path / "a.safetensors").resized == [
        "pos_embed resized from 16 x 16 to 16 x 24"
    ]
    expected = bicubic_matrix(16, 24) @ model.pos_embed.numpy().reshape(16, 16, 4)
    np.testing.assert_allclose(other.pos_embed.numpy()[0], expected.reshape(-1, 4), atol=1e-6)
    windows = small_hiera("hiera_windows")
    larger = small_hiera("hiera_windows", image_size=(128, 96), global_pos_size=(5, 12))
    save_weights(windows, tmp_path / "b.safetensors")
    assert load_weights(larger, tmp_path / "b.safetensors").resized == [
        "pos_embed resized from 5 x 6 to 5 x 12"
    ]
    np.testing.assert_array_equal(larger.pos_embed_win.numpy(), windows.pos_embed_win.numpy())
