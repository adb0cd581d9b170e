"""Views are averaged as the formula says, after the softmax."""

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from support import photographs

from errors import InputError
from inference import Failure, Predictor

PHOTOGRAPH = np.ascontiguousarray(load_sample_images().images[1][:260, :400])


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    return Predictor(
        photographs.write_weights(tmp_path_factory.mktemp("model") / "model.safetensors"),
        batch_size=3,
    )


def crops():
    """The five, by Pillow: 32 / 0.8 is 40, so the photograph becomes 61 x 40."""
    resized = Image.fromarray(PHOTOGRAPH).resize((61, 40), Image.Resampling.BICUBIC)
    places = [(round(29 / 2), 4), (0, 0), (29, 0), (0, 8), (29, 8)]
    return np.stack([np.asarray(resized.crop((x, y, x + 32, y + 32))) for x, y in places])


@pytest.mark.parametrize("tta", ["", "flip", "five", "ten"])
def test_probabilities_are_the_views_mean(predictor, tta):
    views = crops()[: 5 if tta in ("five", "ten") else 1]
    if tta in ("flip", "ten"):
        views = np.concatenate([views, views[:, :, ::-1]])
    logits = predictor.logits(np.ascontiguousarray(views)).astype(np.float64)
    expected = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True)).mean(0)
    [found] = predictor.stream([PHOTOGRAPH], tta=tta, workers=0)
    np.testing.assert_allclose(found.probabilities, expected[found.outputs], rtol=1e-5)
    assert sum(found.probabilities) == pytest.approx(1)
    if tta:
        plain = predictor([PHOTOGRAPH])[0].probabilities
        assert abs(plain[0] - found.probabilities[0]) > 1e-4


@pytest.mark.parametrize("workers", [0, 1])
def test_what_cant_be_read_stays_in_its_place(predictor, workers, tmp_path):
    Image.fromarray(PHOTOGRAPH).save(tmp_path / "a.png")
    files = [str(tmp_path / "a.png"), str(tmp_path / "none.png")] * 4
    answers = list(predictor.stream(files, tta="ten", workers=workers))
    assert [answer.name for answer in answers] == files
    assert [isinstance(answer, Failure) for answer in answers] == [False, True] * 4
    np.testing.assert_allclose(answers[0].probabilities, answers[6].probabilities, rtol=1e-5)


def test_one_crop_isnt_five(tmp_path):
    options = ["DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0"]
    predictor = Predictor(
        photographs.write_weights(tmp_path / "model.safetensors"), options=options
    )
    with pytest.raises(
        InputError,
        match="an image that is squashed to the size of the crop has only one crop; use -tta flip",
    ):
        list(predictor.stream([PHOTOGRAPH], tta="five"))


def test_a_padded_image_has_one_crop(tmp_path):
    predictor = Predictor(
        photographs.write_weights(tmp_path / "model.safetensors"),
        options=["DATA.CROP_PCT", "1.15"],
    )
    with pytest.raises(InputError, match="images are smaller than the crop, which can't be moved"):
        list(predictor.stream([PHOTOGRAPH], tta="ten"))
    assert len(list(predictor.stream([PHOTOGRAPH], tta="flip"))) == 1
