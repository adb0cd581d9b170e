"""Pictures of merged patches: their colours, and that a model which merges none is a line."""

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from support.small_checkpoints import opened, saved

from errors import InputError
from inference import Predictor
from inference.visualization.maps import MapOptions
from inference.visualization.merged import in_mean_colours, merged_panels
from inference.visualization.predicted_image import predict_image
from tools.visualize import one_by_one

MERGES = ["MODEL.MERGE_TOKENS", "2"]


def test_patches_of_a_token_have_their_mean_colour():
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (13, 18, 3)).astype(np.uint8)
    tokens = np.array([[7, 7, 2, 2], [2, 9, 9, 7], [2, 2, 2, 0]])
    drawn = in_mean_colours(picture, tokens, 4)
    # A line stands at the left and upper edge of a patch of another token than its neighbour.
    inner = drawn[:12, :16].reshape(3, 4, 4, 4, 3)[:, 1:, :, 1:]
    for token in np.unique(tokens):
        patches = picture[:12, :16].reshape(3, 4, 4, 4, 3).transpose(0, 2, 1, 3, 4)
        mean = patches[tokens == token].reshape(-1, 3).mean(0)
        colours = inner.transpose(0, 2, 1, 3, 4)[tokens == token].reshape(-1, 3)
        assert (colours == np.floor(mean + 0.5)).all()
    # Between patches of one token there is no line, between those of two there is.
    assert (drawn[1:4, 4] == drawn[1, 3]).all()
    assert not drawn[0:4, 8].any()
    assert not drawn[4, 0:4].any()
    # What belongs to no patch stays.
    np.testing.assert_array_equal(drawn[12:], picture[12:])
    np.testing.assert_array_equal(drawn[:, 16:], picture[:, 16:])


def test_each_patch_alone_keeps_its_mean_colour_without_lines():
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    tokens = np.arange(4).reshape(2, 2)
    expected = picture.reshape(2, 2, 2, 2, 3).mean((1, 3)) + 0.5
    drawn = in_mean_colours(picture, tokens, 2)
    np.testing.assert_array_equal(drawn[::2, ::2], expected.astype(np.uint8))
    np.testing.assert_array_equal(drawn[::2, ::2], drawn[1::2, 1::2])


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return saved(folder, "vit_small_patch16_224", options=MERGES)


def test_panels_are_the_image_and_its_tokens(merging):
    predictor = Predictor(merging)
    predicted = predict_image(predictor, load_sample_images().images[0])
    side = predictor.model.patch_embed.patch_size * (
        predicted.base.shape[0] // predictor.model.image_size[0]
    )
    whole = predictor.model.patch_embed.num_patches
    for block, merged in ((0, 2), (None, 2 * len(predictor.model.blocks))):
        options = MapOptions(block=block)
        first, second = merged_panels(predictor, predicted, options)
        np.testing.assert_array_equal(first.image, predicted.base)
        assert second.title == f"{max(whole - merged, 1)} tokens of\n{whole} patches"
        number = (len(predictor.model.blocks) if block is None else 1) - 1
        tokens = predictor.model.merged_patches(predicted.image, number).numpy()[0]
        np.testing.assert_array_equal(second.image, in_mean_colours(predicted.base, tokens, side))


def test_the_tool_draws_them(merging, tmp_path):
    photograph = tmp_path / "photo.png"

    Image.fromarray(load_sample_images().images[0]).save(photograph)
    predictor = Predictor(merging)
    said = one_by_one(
        "merging", predictor, [str(photograph)], MapOptions(), tmp_path / "merged.png"
    )
    assert said == f"{tmp_path / 'merged.png'}: merging of 1 image"
    assert opened((tmp_path / "merged.png").read_bytes()).any()


@pytest.mark.parametrize(
    ("name", "options", "block", "message"),
    [
        ("vit_small_patch16_224", [], None, "MODEL.MERGE_TOKENS is 0, so no tokens are merged; pass -o"),
        ("convnext_tiny", [], None, "merging isn't defined for ConvNeXt: only MODEL.TYPE vit merges"),
        ("vit_small_patch16_224", MERGES, 99, "-block is 99, but the model has "),
    ],
)  # fmt: skip
def test_what_merges_nothing_is_a_line(tmp_path, name, options, block, message):
    predictor = Predictor(saved(tmp_path, name, options=options))
    predicted = predict_image(predictor, load_sample_images().images[0])
    with pytest.raises(InputError, match=message):
        merged_panels(predictor, predicted, MapOptions(block=block))
