"""Heads on several maps: UPerNet, SETR's, DPT and Segmenter.

tests/models/test_heads_transformers.py compares them with transformers, and
tests/weights/test_names_paddlevit_maps.py with PaddleViT.
"""

import numpy as np
import paddle
import pytest
from support.small_models import small_swin, small_vit

from errors import InputError
from models.heads.base import Maps, quarters
from models.heads.dpt import DPT
from models.heads.segmenter import Segmenter
from models.heads.setr import SETRMLA, SETRPUP, SETRNaive
from models.heads.upernet import UPerNet
from models.layers.windows import in_windows

PLAIN = Maps([8] * 4, [16] * 4, (64, 64), prefix_tokens=1)
STAGES = Maps([4, 8, 12, 16], [4, 8, 16, 32], (64, 64))
# Each head with its maps, and the sides of its logits and of its auxiliary ones for maps of 4 x 4
# places, or of 16, 8, 4 and 2 in stages.
HEADS = {
    "upernet": (UPerNet, STAGES, {"pyramid_channels": 6, "auxiliary_channels": 4}, [16, 4]),
    "upernet_plain": (UPerNet, PLAIN, {"pyramid_channels": 6, "auxiliary_channels": 4}, [16, 4]),
    "setr_naive": (SETRNaive, PLAIN, {"decoder_channels": 6}, [4, 4, 4, 4]),
    "setr_pup": (SETRPUP, PLAIN, {"decoder_channels": 6}, [32, 16, 16, 16, 16]),
    "setr_mla": (SETRMLA, PLAIN, {"decoder_channels": 6, "mla_channels": 4}, [16, 4, 4, 4, 4]),
    "dpt": (DPT, PLAIN, {"neck_channels": (4, 5, 6, 7), "fusion_channels": 6}, [64, 32]),
    "segmenter": (Segmenter, PLAIN, {}, [4]),
}


def head_of(name, **options):
    kind, maps, own, _ = HEADS[name]
    paddle.seed(0)
    return kind(maps, 5, **own | options)


def features_of(name, batch=2):
    _, maps, _, _ = HEADS[name]
    paddle.seed(1)
    features = [
        paddle.randn([batch, channels, 64 // reduction, 64 // reduction])
        for channels, reduction in zip(maps.channels, maps.reductions, strict=True)
    ]
    if name == "dpt":
        return [(feature, paddle.randn([batch, 1, 8])) for feature in features]
    return features


@pytest.mark.parametrize("name", HEADS)
def test_training_adds_the_auxiliary_heads_logits(name):
    head = head_of(name)
    outputs = head(features_of(name))
    outputs = outputs if isinstance(outputs, list) else [outputs]
    assert [output.shape for output in outputs] == [[2, 5, side, side] for side in HEADS[name][3]]
    head.eval()
    assert head(features_of(name)).shape == [2, 5, HEADS[name][3][0], HEADS[name][3][0]]


@pytest.mark.parametrize("name", sorted(HEADS.keys() - {"segmenter"}))
def test_without_auxiliary_heads_there_are_the_heads_own_logits_alone(name):
    head = head_of(name, auxiliary=False)
    outputs = head(features_of(name))
    assert len(outputs if isinstance(outputs, list) else [outputs]) == 1
    assert not [key for key, _ in head.named_parameters() if "auxiliary" in key]
    assert len(head.classifier_names()) == 1


@pytest.mark.parametrize("name", HEADS)
def test_the_loss_reaches_every_parameter(name):
    head = head_of(name)
    outputs = head(features_of(name))
    outputs = outputs if isinstance(outputs, list) else [outputs]
    sum((output**2).mean() for output in outputs).backward()
    for key, parameter in head.named_parameters():
        assert parameter.grad is not None, key
        # A shift before a norm over all that it shifts has no effect: these gradients are rounding.
        assert np.isfinite(parameter.grad.numpy()).all(), key


@pytest.mark.parametrize("name", HEADS)
def test_the_classifiers_are_all_that_depends_on_the_number_of_classes(name):
    kind, maps, own, _ = HEADS[name]
    shapes = [
        {key: parameter.shape for key, parameter in kind(maps, classes, **own).named_parameters()}
        for classes in (5, 7)
    ]
    differing = {key for key in shapes[0] if shapes[0][key] != shapes[1][key]}
    names = kind(maps, 5, **own).classifier_names()
    owners = {key if key in names else key.rpartition(".")[0] for key in differing}
    assert owners == set(names)


@pytest.mark.parametrize("name", ["setr_naive", "setr_pup"])
def test_an_auxiliary_head_reads_its_own_map(name):
    head = head_of(name)
    features = features_of(name)
    before = head(features)
    features[1] = features[1] + paddle.randn(features[1].shape)
    after = head(features)
    changed = [float((b - a).abs().max()) > 1e-4 for b, a in zip(before, after, strict=True)]
    # The head's own logits come from the last map.
    assert changed == [False, False, True, *[False] * (len(before) - 3)]


def test_setr_mla_adds_deeper_maps_to_shallower_ones():
    head = head_of("setr_mla")
    features = features_of("setr_mla")
    before = head(features)
    features[1] = features[1] + paddle.randn(features[1].shape)
    after = head(features)
    changed = [float((b - a).abs().max()) > 1e-4 for b, a in zip(before, after, strict=True)]
    assert changed == [True, True, True, False, False]


def test_upernets_auxiliary_head_reads_the_last_map_but_one():
    head = head_of("upernet", dropout=0.0)
    features = features_of("upernet")
    before = head(features)[1]
    for i in (0, 1, 3):
        features[i] = features[i] + 1
        np.testing.assert_array_equal(head(features)[1].numpy(), before.numpy())
    features[2] = features[2] + paddle.randn(features[2].shape)
    assert float((head(features)[1] - before).abs().max()) > 1e-4


def test_upernet_takes_maps_of_any_sides():
    head = head_of("upernet")
    head.eval()
    sides = [(17, 25), (9, 13), (5, 7), (3, 4)]
    features = [
        paddle.randn([1, channels, *side])
        for channels, side in zip(STAGES.channels, sides, strict=True)
    ]
    assert head(features).shape == [1, 5, 17, 25]


# ------------------------------------------------------- Segmenter


def test_segmenters_logits_are_normalised_cosines():
    """The lengths of places and classes have no effect, and a place's logits have mean 0."""
    head = head_of("segmenter")
    head.eval()
    features = features_of("segmenter")
    logits = head(features).numpy()
    np.testing.assert_allclose(logits.mean(axis=1), 0, atol=1e-5)
    head.proj_patch.set_value(head.proj_patch * 3)
    head.proj_classes.set_value(head.proj_classes / 5)
    np.testing.assert_allclose(head(features).numpy(), logits, atol=1e-4)


def test_segmenters_classes_are_alike():
    """Classes in another order give the same logits in that order."""
    head = head_of("segmenter")
    head.eval()
    paddle.seed(2)
    head.mask_norm.weight.set_value(paddle.rand([5]))
    head.mask_norm.bias.set_value(paddle.rand([5]))
    features = features_of("segmenter")
    logits = head(features).numpy()
    order = [3, 0, 4, 1, 2]
    head.cls_emb.set_value(head.cls_emb.numpy()[:, order])
    head.mask_norm.weight.set_value(head.mask_norm.weight.numpy()[order])
    head.mask_norm.bias.set_value(head.mask_norm.bias.numpy()[order])
    np.testing.assert_allclose(head(features).numpy(), logits[:, order], atol=1e-5)


def test_segmenters_class_embedding_has_no_weight_decay():
    assert head_of("segmenter").no_weight_decay() == {"cls_emb"}


# ------------------------------------------------------- which maps


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (12, [2, 5, 8, 11]),
        (24, [5, 11, 17, 23]),
        (4, [0, 1, 2, 3]),
        (5, [1, 2, 3, 4]),
        (2, [0, 1]),
        (8, [1, 3, 5, 7]),
    ],
)
def test_the_ends_of_an_encoders_quarters(count, expected):
    assert quarters(count) == expected


def test_quarters_of_encoders_are_their_stages_or_blocks():
    stages = small_swin()
    assert quarters(len(stages.feature_info)) == list(range(len(stages.layers)))
    assert quarters(len(small_vit().feature_info)) == list(range(len(small_vit().blocks)))[-4:]


@pytest.mark.parametrize(
    ("kind", "maps", "options", "message"),
    [
        (UPerNet, Maps([8] * 3, [16] * 3, (64, 64)), {}, "names 3 maps of one size, but .* needs"),
        (
            DPT,
            STAGES,
            {},
            r"reads four maps of one size, found 4 .* \[4, 8, 16, 32\] pixels; use a",
        ),
        (DPT, Maps([8] * 3, [16] * 3, (64, 64), 1), {}, "reads four maps of one size, found 3"),
        (
            DPT,
            PLAIN._replace(prefix_tokens=0),
            {},
            "READOUT is project, but the encoder has no cl",
        ),
        (DPT, PLAIN._replace(prefix_tokens=0), {"readout": "add"}, "READOUT is add, but the enc"),
    ],
)
def test_maps_that_a_head_cant_read_are_refused(kind, maps, options, message):
    with pytest.raises(InputError, match=message):
        kind(maps, 5, **options)


def test_dpt_reads_an_encoder_without_a_class_token_if_it_ignores_it():
    head = DPT(PLAIN._replace(prefix_tokens=0), 5, readout="ignore")
    head.eval()
    assert head(features_of("setr_pup")).shape == [2, 5, 64, 64]


# ------------------------------------------------------- windows of padded maps


def numbered(x):
    """A layer that multiplies each token by its number in its window, from 1 on."""
    return x * paddle.arange(1, x.shape[1] + 1, dtype="float32").reshape([1, -1, 1])


def test_padding_first_shifts_windows_of_the_padded_map():
    x = paddle.arange(1, 6, dtype="float32").reshape([1, 1, 5, 1])
    # Padded to 1 2 3 4 5 0, and rolled to 2 3 4 | 5 0 1.
    found = in_windows(x, (1, 3), numbered, (0, 1), pad_first=True)
    assert found.flatten().tolist() == [3, 2, 6, 12, 5]
    # Rolled to 2 3 4 | 5 1, and padded to 2 3 4 | 5 1 0.
    found = in_windows(x, (1, 3), numbered, (0, 1))
    assert found.flatten().tolist() == [2, 2, 6, 12, 5]


@pytest.mark.parametrize(("size", "shift"), [((6, 9), (1, 1)), ((5, 7), (0, 0))])
def test_the_order_has_no_effect_without_padding_or_without_a_shift(size, shift):
    paddle.seed(0)
    x = paddle.randn([2, *size, 3])
    first, then = (
        in_windows(x, (3, 3), numbered, shift, pad_first=pad_first) for pad_first in (True, False)
    )
    np.testing.assert_array_equal(first.numpy(), then.numpy())
