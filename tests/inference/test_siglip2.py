"""SigLIP 2's NaFlex towers, as transformers' Siglip2Model has them: images of any ratio, and texts."""

import json
import shutil

import numpy as np
import paddle
import pytest
from PIL import Image
from support.programs import ROOT

from inference import Predictor
from models.layers.naflex import packed_coordinates
from training.checkpoint import description_of

GOLDEN = ROOT / "tests" / "golden"
TEXTS = json.loads((GOLDEN / "text" / "strings.json").read_text(encoding="utf-8"))
# Places of texts that a file of classes may have, and that stay as they are.
PLACES = [
    place
    for place, text in enumerate(TEXTS[:20])
    if text.isprintable() and " ".join(text.split()) == text != "" and "_" not in text
]


@pytest.fixture
def weights(tmp_path):
    """The golden weights, with SigLIP 2's tokenizer."""
    folder = tmp_path / "siglip2"
    shutil.copytree(GOLDEN / "text" / "siglip2_naflex", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "text" / "siglip2" / name, folder)
    return folder


@pytest.mark.smoke
def test_logits_of_images_of_any_ratio_are_transformers(weights):
    names = [TEXTS[place] for place in PLACES]
    assert len(names) > 8
    predictor = Predictor(weights, classes=names, templates=["{}"])
    with np.load(GOLDEN / "siglip2_naflex.npz") as answers:
        patches, grids, logits = (answers[name] for name in ("patches", "grids", "logits"))
    expected = logits[:, PLACES]
    assert np.ptp(expected, axis=0).min() > 0.05
    coord, valid = packed_coordinates(paddle.to_tensor(grids), patches.shape[1])
    found = predictor.model(paddle.to_tensor(patches), coord, valid).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_embeddings_of_the_image_tower_are_transformers(weights):
    predictor = Predictor(weights)
    with np.load(GOLDEN / "siglip2_naflex.npz") as answers:
        patches, grids, images = (answers[name] for name in ("patches", "grids", "images"))
    coord, valid = packed_coordinates(paddle.to_tensor(grids), patches.shape[1])
    found = predictor.model(paddle.to_tensor(patches), coord, valid).numpy()
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found, images, atol=2e-6)


def test_images_keep_their_ratio_as_the_preprocessor_says(weights):
    description = description_of(weights)
    assert description.values["MODEL.TYPE"] == "NaFlexViT"
    assert description.values["DATA.NUM_TOKENS"] == 24
    assert description.values["DATA.INTERPOLATION"] == "bilinear"
    assert description.values["MODEL.POS_GRID"] == 4
    predictor = Predictor(weights, classes=["a cat", "a dog"])
    pixels = np.random.default_rng(0).integers(0, 256, (40, 90, 3)).astype(np.uint8)
    # 3 rows of 7 patches: of 4 pixels each.
    assert predictor.pixels(Image.fromarray(pixels)).shape == (12, 28, 3)
    [prediction] = predictor([Image.fromarray(pixels)])
    assert set(prediction.classes) == {"a cat", "a dog"}


def test_a_preprocessor_without_a_number_has_transformers_default(weights):
    (weights / "preprocessor_config.json").unlink()
    assert description_of(weights).values["DATA.NUM_TOKENS"] == 256
