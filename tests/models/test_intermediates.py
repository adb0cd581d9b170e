"""What ``forward_intermediates`` gives, of every architecture; tests/support/parity.py holds its
values to timm's.
"""

import numpy as np
import paddle
import pytest
from golden.formula import array
from support.small_models import SMALL_MODELS, small_beit, small_vit

from errors import InputError
from models.base import ImageModel
from weights.layout import sublayer

FIRST_IS_THE_STEMS = {"resnet", "regnet", "mobileone", "botnet", "halonet"}
TOKENS_ALONE = {"cvt", "pit"}  # are the features
CLASS_TOKEN_LAST = {
    "cait",
    "volo",
}  # a class token comes after the intermediates, in blocks that leave the patches alone
# a class token comes after the intermediates, in blocks that change the patches, too
CHANGED_LATER = {"xcit"}
# each stage gives an intermediate of both: the first's come first, and features are a list
BRANCHES = {"crossvit"}


def built(kind):
    """(the small model in evaluation mode, two images that leave pixels over where the architecture
    takes them).
    """
    paddle.seed(0)
    # Else their last norms come after the pooling.
    model = SMALL_MODELS[kind](
        **{"beit": {"global_pool": "token"}, "poolformer": {"fc_norm": False}}.get(kind, {})
    )
    for parameter in getattr(model, "norm", paddle.nn.Identity()).parameters():
        parameter.set_value(parameter + 0.5)  # ResMLP's is the identity at first
    model.eval()
    height, width = model.image_size
    extra = (3, 5) if model.min_image_size else (0, 0)
    return model, paddle.to_tensor(array("images", (2, 3, height + extra[0], width + extra[1])))


def branches(features):
    return features if isinstance(features, list) else [features]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", SMALL_MODELS)
@paddle.no_grad()
def test_an_architecture_gives_its_intermediates(kind):
    model, images = built(kind)
    count = len(model.feature_info)
    features, maps = model.forward_intermediates(images)
    for one, two in zip(branches(features), branches(model.forward_features(images)), strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy())
    assert len(maps) == count > 1
    for info, one in zip(model.feature_info, maps, strict=True):
        assert one.shape[:2] == [2, info["num_chs"]]
        # A window without padding, and LeNet's convolutions, leave out what is at the border.
        for side, places in zip(images.shape[2:], one.shape[2:], strict=True):
            if kind == "hvt" and info["reduction"] > model.patch_embed.patch_size:
                # Pooled tokens are a single row (test_hvt.py).
                continue
            least = side // info["reduction"] - (2 if kind == "lenet" else 1)
            assert least <= places <= -(-side // info["reduction"])
        assert sublayer(model, info["module"]) is not None
    # Indices: the last n, some from either end in any order and twice.
    for indices, chosen in (
        (1, [-1]),
        (count, range(count)),
        ([-1, 0, 0], [0, -1]),
        ((count - 1,), [-1]),
    ):
        found = model.forward_intermediates(images, indices, intermediates_only=True)
        assert len(found) == len(chosen)
        assert all(
            (one.numpy() == maps[i].numpy()).all() for one, i in zip(found, chosen, strict=True)
        )
    # The same as a sequence of places, by timm's name of the option, too.
    for word in ("output_format", "output_fmt"):
        rows = model.forward_intermediates(images, [-1], intermediates_only=True, **{word: "NLC"})[
            0
        ]
        np.testing.assert_array_equal(
            rows.numpy(), maps[-1].flatten(2).transpose([0, 2, 1]).numpy()
        )


@pytest.mark.parametrize("kind", SMALL_MODELS)
@paddle.no_grad()
def test_the_last_norm_leads_to_the_features(kind):
    model, images = built(kind)
    plain = model.forward_intermediates(images, intermediates_only=True)
    features, normed = model.forward_intermediates(images, norm=True)
    changed = [
        bool((one.numpy() != two.numpy()).any()) for one, two in zip(plain, normed, strict=True)
    ]
    count = len(plain)
    last_norm = getattr(model, "norm", paddle.nn.Identity())
    if kind == "crossvit":
        expected = [True] * count  # each branch has a norm
    elif kind in ("coat", "repmlp"):
        expected = [False] * (count - 1) + [True]  # their norms have other names
    elif kind == "volo":
        expected = [False] + [True] * (count - 1)  # all stages but the first have one width
    elif kind in TOKENS_ALONE or isinstance(last_norm, paddle.nn.Identity):
        expected = [False] * count  # PiT's and CvT's norm is of the prefix tokens
    else:
        blocks_of_one_shape = len({tuple(one.shape) for one in plain}) == 1
        expected = [blocks_of_one_shape] * (count - 1) + [True]
    assert changed == expected
    rows = normed[-1].transpose([0, 2, 3, 1]).numpy()
    features = branches(features)[-1]
    if kind in TOKENS_ALONE:
        # CvT's last stage alone has a class token.
        assert features.shape == [2, model.num_prefix_tokens or 1, model.num_features]
        return
    if kind in CHANGED_LATER:
        assert features.shape == [2, 1 + rows.shape[1] * rows.shape[2], model.num_features]
        return
    if kind in CLASS_TOKEN_LAST:
        features = features[:, 1:]
    if features.ndim == 3:
        features = features[:, model.num_prefix_tokens :].reshape(rows.shape)
    elif model.layout == "NCHW":
        features = features.transpose([0, 2, 3, 1])
    np.testing.assert_array_equal(rows, features.numpy())


@pytest.mark.parametrize("kind", SMALL_MODELS)
@paddle.no_grad()
def test_an_early_stop_computes_nothing_beyond(kind, monkeypatch):
    model, images = built(kind)
    calls = []
    through = type(model)._stage
    monkeypatch.setattr(
        type(model), "_stage", lambda self, *given: calls.append(1) or through(self, *given)
    )
    whole = model.forward_intermediates(images, [0], intermediates_only=True)
    assert len(calls) == len(model.feature_info) // (1 + (kind in BRANCHES)) - (
        kind in FIRST_IS_THE_STEMS
    )
    calls.clear()
    features, found = model.forward_intermediates(images, [0], stop_early=True)
    assert len(calls) == (kind not in FIRST_IS_THE_STEMS)
    np.testing.assert_array_equal(found[0].numpy(), whole[0].numpy())
    features = branches(features)[0]
    assert features.shape[0] == 2
    places = 0 if kind == "pit" else paddle.numel(found[0])
    tokens = model.num_prefix_tokens + (kind in ("cait", "xcit"))
    assert paddle.numel(features) == places + 2 * tokens * found[0].shape[1]


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_bad_indices_are_refused_in_a_line(kind):
    model, images = built(kind)
    count = len(model.feature_info)
    name = type(model).__name__
    for indices, message in (
        (0, f"indices is 0, expected how many of the last: 1 to {count} of {name}"),
        (
            count + 1,
            f"indices is {count + 1}, expected how many of the last: 1 to {count} of {name}",
        ),
        ([0, count], f"indices has {count}, {name} has intermediates {-count} to {count - 1}"),
        (
            [-count - 1],
            f"indices has {-count - 1}, {name} has intermediates {-count} to {count - 1}",
        ),
        ([1.0], f"indices has 1.0, {name} has intermediates {-count} to {count - 1}"),
        ([], f"indices is empty, expected numbers of {-count} to {count - 1}, or None for all"),
        ("12", f"indices has '1', {name} has intermediates {-count} to {count - 1}"),
    ):
        with pytest.raises(InputError) as raised:
            model.forward_intermediates(images, indices)
        assert str(raised.value) == message
    with pytest.raises(InputError, match="output_format is 'NHWC', expected 'NCHW' or 'NLC'"):
        model.forward_intermediates(images, output_format="NHWC")


@pytest.mark.parametrize("kind", SMALL_MODELS)
def test_gradients_come_through_the_intermediates(kind):
    model, images = built(kind)
    model.train()
    first = model.forward_intermediates(images, [0], stop_early=True, intermediates_only=True)[0]
    first.square().mean().backward()
    gradient = sublayer(model, model.first_conv).weight.grad
    assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize("small", [small_vit, small_beit])
@paddle.no_grad()
def test_prefix_tokens_are_given_beside_the_maps(small):
    model = small(**({"reg_tokens": 2} if small is small_vit else {}))
    model.eval()
    images = paddle.to_tensor(array("images", (2, 3, *model.image_size)))
    prefix = 3 if small is small_vit else 1
    assert model.num_prefix_tokens == prefix
    features, pairs = model.forward_intermediates(
        images, [-1], norm=True, return_prefix_tokens=True
    )
    [(found, tokens)] = pairs
    assert tokens.shape == [2, prefix, 24]
    rows = paddle.concat([tokens, found.flatten(2).transpose([0, 2, 1])], axis=1)
    np.testing.assert_array_equal(rows.numpy(), features.numpy())
    keys = {"image_features", "image_intermediates", "image_intermediates_prefix"}
    named = model.forward_intermediates(
        images, [-1], norm=True, return_prefix_tokens=True, output_dict=True
    )
    assert named.keys() == keys
    np.testing.assert_array_equal(named["image_intermediates_prefix"][0].numpy(), tokens.numpy())
    np.testing.assert_array_equal(named["image_intermediates"][0].numpy(), found.numpy())
    np.testing.assert_array_equal(named["image_features"].numpy(), features.numpy())
    only = model.forward_intermediates(images, output_dict=True, intermediates_only=True)
    assert only.keys() == {"image_intermediates"}


@paddle.no_grad()
def test_without_prefix_tokens_there_are_maps_alone():
    model, images = built("mixer")
    for one in model.forward_intermediates(
        images, return_prefix_tokens=True, intermediates_only=True
    ):
        assert one.shape == [2, 24, 4, 4]


def test_patches_that_training_leaves_out_make_no_map():
    model, images = built("vit")
    model = small_vit(patch_drop=0.5)
    with pytest.raises(
        InputError, match="8 tokens don't form a map of 4 x 4: PATCH_DROP drops some in training"
    ):
        model.forward_intermediates(images)
    assert model.forward_intermediates(images, [-1], output_format="NLC", intermediates_only=True)[
        0
    ].shape == [
        2,
        8,
        24,
    ]


def test_a_model_that_names_no_features_says_so():
    model = ImageModel(8, 3, 2)
    with pytest.raises(
        InputError, match="ImageModel has no intermediates, because it doesn't define feature_info"
    ):
        model.forward_intermediates(paddle.zeros([1, 3, 8, 8]))
