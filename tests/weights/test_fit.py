"""Weights for another patch size, grid, window or number of channels, and what may be missing:
through whole models.
"""

import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from golden.formula import array
from golden.vit import CASES
from safetensors.numpy import load_file, save_file
from support.small_models import small_swin

from config import get_config
from errors import InputError
from models import build_model, create_model
from models.vit import VisionTransformer
from weights import file_arrays, load_weights, save_weights
from weights.fit import BIASES, TABLE, fit_classifiers, fit_sizes, grid_of
from weights.formats import METADATA, write_weights
from weights.resize import resample_patch_kernel, resize_pos_embed, resize_rel_pos_bias_table


def vit(**changes):
    sizes = CASES["vit"] | changes
    return VisionTransformer(image_size=sizes.pop("img_size"), **sizes)


@pytest.fixture
def saved(tmp_path):
    """A ViT of 16 x 16 images in 16 patches, and its file."""
    model = vit()
    save_weights(model, tmp_path / "model.safetensors")
    return model, tmp_path / "model.safetensors"


@pytest.mark.parametrize("grid", [(3, 5), (5, 6)])
def test_a_grid_that_is_no_square(saved, grid):
    source, file = saved
    size = tuple(4 * side for side in grid)
    model = vit(img_size=size)
    report = load_weights(model, file)
    assert report.resized == ["pos_embed resized from 4 x 4 to {} x {}".format(*grid)]
    np.testing.assert_array_equal(
        model.pos_embed.numpy(), resize_pos_embed(source.pos_embed.numpy(), 1, grid)
    )
    assert model(paddle.zeros([1, 3, *size])).shape == [1, 7]


@pytest.mark.parametrize("extra", [0, 3])  # BEiT's three, of the class token
def test_tables_of_relative_positions_are_resized_to_their_layers_window(extra):
    names = [f"{block}.{TABLE}" for block in "abcdefg"]
    windows = dict(zip("abcdefg", [(3, 5), (3, 5), (4, 4), *[(3, 5)] * 4], strict=True))
    model = SimpleNamespace(
        first_conv="stem",
        named_sublayers=list,
        beside_first_conv=(),
        window_side=None,
        **{k: SimpleNamespace(window_size=w) for k, w in windows.items()},
    )
    rows = {block: (2 * height - 1) * (2 * width - 1) for block, (height, width) in windows.items()}
    state = {name: paddle.zeros([rows[name[0]] + extra, 2]) for name in names}
    # c's window stays; the others don't fit
    shapes = [(49, 2), (49, 2), (49, 2), (49, 1), (49, 3), (36, 2), (50, 2)]
    stored = {
        name: array(name, (rows + extra, heads))
        for name, (rows, heads) in zip(names, shapes, strict=True)
    }
    stored["h"] = stored[f"h.{TABLE}"] = np.zeros((49, 2), np.float32)
    arrays = dict(stored)
    assert fit_sizes(model, state, arrays) == [f"2 {TABLE} resized from 4 x 4 to 3 x 5"]
    for name, found in arrays.items():
        resized = name[0] in "ab"
        expected = (
            resize_rel_pos_bias_table(stored[name], (4, 4), (3, 5)) if resized else stored[name]
        )
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize(
    ("weight", "bias", "fresh"),
    [
        ((4, 7), (7,), True),
        ((4, 5), (5,), False),
        ((4, 7), (5,), False),
        ((4, 7), (6,), False),
        ((3, 7), (7,), False),
    ],
)
def test_classifiers_are_left_fresh_if_all_are_of_one_other_number_of_classes(weight, bias, fresh):
    model = SimpleNamespace(num_classes=5, classifier_names=lambda: ("head",))
    state = {"head.weight": paddle.zeros([4, 5]), "head.bias": paddle.zeros([5])}
    arrays = {"head.weight": np.zeros(weight), "head.bias": np.zeros(bias)}
    expected = (list(state), "7 classes in the file, 5 in the model") if fresh else ([], "")
    assert fit_classifiers(model, state, arrays) == expected


@pytest.mark.parametrize(
    ("own", "found", "fresh"),
    [
        # Convolutions, class embeddings, and a class more for what has none.
        ((5, 4, 1, 1), (7, 4, 1, 1), True),
        ((1, 5, 4), (1, 7, 4), True),
        ((4, 6), (4, 8), True),
        ((5, 4, 1, 1), (5, 4, 3, 1), False),
        ((5, 4, 1, 1), (7, 3, 1, 1), False),
        ((5, 4, 1, 1), (7, 4), False),
    ],
)
def test_a_classifier_of_pixels_is_left_fresh_for_other_classes(own, found, fresh):
    model = SimpleNamespace(num_classes=5, classifier_names=lambda: ("head",))
    state = {"head.weight": paddle.zeros(own)}
    expected = (["head.weight"], "7 classes in the file, 5 in the model") if fresh else ([], "")
    assert fit_classifiers(model, state, {"head.weight": np.zeros(found)}) == expected


def test_another_patch_size_resamples_the_kernel(saved):
    source, file = saved
    model = vit(patch_size=8)
    report = load_weights(model, file)
    kernel = source.patch_embed.proj.weight.numpy()
    np.testing.assert_array_equal(
        model.patch_embed.proj.weight.numpy(), resample_patch_kernel(kernel, (8, 8))
    )
    assert report.resized == [
        "patch_embed.proj.weight resampled from 4 x 4 to 8 x 8 pixels",
        "pos_embed resized from 4 x 4 to 2 x 2",
    ]


@pytest.mark.parametrize("channels", [1, 4])
def test_other_channels_see_what_the_colours_saw(saved, channels):
    source, file = saved
    model = vit(in_channels=channels)
    report = load_weights(model, file)
    assert report.resized == [f"patch_embed.proj.weight adapted from 3 channels to {channels}"]
    grey = paddle.to_tensor(array("grey", (2, 1, 16, 16)))
    for layer in (source, model):
        layer.eval()
    expected = source(grey.expand([2, 3, 16, 16])).numpy()
    if channels == 1:
        np.testing.assert_allclose(model(grey).numpy(), expected, atol=1e-5)
    else:  # timm's rule: R, G, B, R, times 3 / 4
        kernel = source.patch_embed.proj.weight.numpy()[:, [0, 1, 2, 0]] * np.float32(0.75)
        np.testing.assert_allclose(model.patch_embed.proj.weight.numpy(), kernel, rtol=1e-6)


def test_a_stem_that_is_no_patch_embedding_keeps_its_kernel(tmp_path):
    model = build_model(get_config("resnet18", ["MODEL.NUM_CLASSES", "3"]))
    save_weights(model, tmp_path / "model.safetensors")
    arrays = load_file(tmp_path / "model.safetensors")
    save_file(
        arrays | {"conv1.weight": np.zeros((64, 3, 3, 3), np.float32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        InputError, match=r"conv1\.weight is \[64, 3, 3, 3\], the model's \[64, 3, 7, 7\]"
    ):
        load_weights(model, tmp_path)


def test_what_may_be_missing_or_unexpected_is_said_by_pattern(saved):
    source, file = saved
    arrays = load_file(file)
    arrays["further.weight"] = arrays.pop("norm.bias")
    arrays["extra.bias"] = np.zeros(3, np.float32)
    save_file(arrays, file)
    model = vit()
    fresh = model.norm.bias.numpy()
    with pytest.raises(InputError, match=r"missing norm\.bias; unexpected .*extra\.bias"):
        load_weights(model, file)
    with pytest.raises(InputError, match=r"model: missing norm\.bias$"):
        load_weights(model, file, allow=["extra.*", "further.*"])
    report = load_weights(model, file, allow=["extra.*", "further.*", "norm.bias"])
    assert (report.missing, sorted(report.unexpected)) == (
        ["norm.bias"],
        ["extra.bias", "further.weight"],
    )
    assert str(report).endswith("; missing norm.bias; unexpected extra.bias, further.weight")
    assert (model.norm.bias.numpy() == fresh).all()
    assert (model.norm.weight.numpy() == source.norm.weight.numpy()).all()
    assert len(report.loaded) == len(model.state_dict()) - 1


def test_another_architectures_weights_are_named_by_their_config(saved, tmp_path):
    _, file = saved
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "vit_mine", "num_classes": 7})
    )
    with pytest.raises(InputError) as caught:
        load_weights(create_model("resnet18"), file)
    text = str(caught.value)
    assert text.startswith(f"{file} (of vit_mine) doesn't fit the model: missing conv1.weight, ")
    assert "; unexpected " in text
    assert "\n" not in text
    assert len(text) < 500


def test_names_of_one_model_with_the_sizes_of_another(saved):
    _, file = saved
    with pytest.raises(
        InputError,
        match=r"cls_token is \[1, 1, 24\], the model's \[1, 1, 48\]; .*; 39 more shapes$",
    ):
        load_weights(vit(embed_dim=48), file)


def test_tensors_that_do_not_go_together_are_an_error_of_the_file(saved):
    _, file = saved
    arrays = load_file(file)
    for extra, message in (
        (
            {"encoder.norm.bias": arrays["norm.bias"]},
            r"norm\.bias both correspond to norm\.bias; remove one",
        ),
        (
            {
                "register_tokens": np.zeros(3, np.float32),
                "cls_token": np.zeros((9, 1, 1), np.float32),
                "pos_embed": np.zeros((1, 5, 9), np.float32),
            },
            r"cls_token and its position are \[9, 1, 1\] and \[1, 1, 9\], expected one shape",
        ),
    ):
        save_file(arrays | extra, file)
        with pytest.raises(
            InputError, match=rf"model\.safetensors: its tensors are inconsistent \(.*{message}"
        ):
            load_weights(vit(), file)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"register_tokens": (3,), "pos_embed": (5,)},
            "can't be read as weights of this model .IndexError",
        ),
        ({"reg_token": (3,)}, "can't be read as weights of this model .IndexError"),
        (
            {"patch_embed.proj.weight": (8, 3, 1 << 40, 0)},
            r"patch_embed\.proj\.weight is \[8, 3, 1099511627776, 0\]",
        ),
        (
            {"patch_embed.proj.weight": (1, 1, 1 << 20, 1)},
            r"patch_embed\.proj\.weight is \[1, 1, 1048576, 1\]",
        ),
        ({"pos_embed": (1, 1, 0)}, r"pos_embed is \[1, 1, 0\], the model's"),
    ],
)
def test_shapes_that_no_such_file_has_are_one_line(saved, extra, message):
    _, file = saved
    arrays = load_file(file) | {name: np.zeros(shape, np.float32) for name, shape in extra.items()}
    write_weights(file, arrays)
    with pytest.raises(InputError, match=rf"model\.safetensors.*{message}"):
        load_weights(vit(), file)


# ------------------------------------------------------ images of two sides


def written(model, file, size):
    """Saves a model's weights, which tell their images' size as a run's do."""
    values = {} if size is None else {"DATA.IMAGE_SIZE": size}
    described = {
        METADATA: json.dumps(
            {"model": "m", "task": "classification", "classes": [], "values": values}
        )
    }
    write_weights(file, file_arrays(model), described)
    return file


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((12, 20), (16, 16)),
        ((20, 12), (12, 20)),
        ((8, 32), (16, 16)),
        ((16, 16), (32, 8)),
        ((36, 8), (12, 28)),
    ],
)
def test_a_files_grid_has_the_shape_of_its_images(tmp_path, old, new):
    source = vit(img_size=old)
    model = vit(img_size=new)
    report = load_weights(model, written(source, tmp_path / "a.safetensors", list(old)))
    grids = [(height // 4, width // 4) for height, width in (old, new)]
    assert report.resized == [
        "pos_embed resized from {} x {} to {} x {}".format(*grids[0], *grids[1])
    ]
    expected = resize_pos_embed(source.pos_embed.numpy(), 1, grids[1], grids[0])
    np.testing.assert_array_equal(model.pos_embed.numpy(), expected)
    same = vit(img_size=old)
    assert not load_weights(same, tmp_path / "a.safetensors").resized
    np.testing.assert_array_equal(same.pos_embed.numpy(), source.pos_embed.numpy())


def test_a_file_that_tells_no_size_is_of_squares_or_of_the_models_images(tmp_path):
    same, other = (
        written(vit(img_size=size), tmp_path / f"{size[0]}.safetensors", None)
        for size in ((8, 32), (12, 20))
    )
    assert not load_weights(vit(img_size=(8, 32)), same).resized
    assert load_weights(vit(img_size=(8, 64)), same).resized == [
        "pos_embed resized from 4 x 4 to 2 x 16"
    ]
    with pytest.raises(InputError, match=r"pos_embed is \[1, 16, 24\], the model's \[1, 17, 24\]"):
        load_weights(vit(), other)


def test_a_grid_of_as_many_places_stays_for_images_of_the_models_size():
    model = SimpleNamespace(
        first_conv="stem",
        named_sublayers=list,
        beside_first_conv=(),
        window_side=None,
        image_size=(16, 16),
        a=SimpleNamespace(window_size=(2, 8)),
    )
    state = {f"a.{BIASES}": paddle.zeros([3, 16])}
    for images, told in (
        ((16, 16), []),
        (None, []),
        ((17, 17), [f"1 {BIASES} resized from 4 x 4 to 2 x 8"]),
    ):
        assert (
            fit_sizes(model, state, {f"a.{BIASES}": np.ones((3, 16), np.float32)}, images) == told
        )


def test_windows_go_from_images_of_two_sides_to_squares_and_back(tmp_path):
    """Swin's windows are no larger than its maps: 4 x 4, 4 x 2, 2 x 1 of images of 32 x 8 at stages
    0, 0 and 2.
    """
    source = small_swin("swin", image_size=(32, 8))
    model = small_swin("swin")
    report = load_weights(model, written(source, tmp_path / "a.safetensors", [32, 8]))
    windows = [block.attn.window_size for stage in source.layers for block in stage.blocks]
    assert windows == [(4, 2), (4, 2), (4, 1), (4, 1), (2, 1)]
    assert report.resized == [
        f"2 {TABLE} resized from 4 x 2 to 4 x 4",
        f"2 {TABLE} resized from 4 x 1 to 4 x 4",
        f"1 {TABLE} resized from 2 x 1 to 2 x 2",
    ]
    tables = [
        [block.attn for stage in one.layers for block in stage.blocks] for one in (source, model)
    ]
    for theirs, own in zip(*tables, strict=True):
        expected = resize_rel_pos_bias_table(
            theirs.relative_position_bias_table.numpy(), theirs.window_size, own.window_size
        )
        np.testing.assert_array_equal(own.relative_position_bias_table.numpy(), expected)
    wide = small_swin("swin", image_size=(32, 64))  # most windows are squares all the same
    report = load_weights(small_swin("swin"), written(wide, tmp_path / "b.safetensors", [32, 64]))
    assert report.resized == [f"1 {TABLE} resized from 2 x 4 to 2 x 2"]


@pytest.mark.parametrize(
    ("count", "shape", "own", "expected"),
    [
        (24, 1.5, (4, 4), (6, 4)),
        (24, 2 / 3, (4, 4), (4, 6)),
        (36, 1.0, (9, 4), (6, 6)),
        (36, None, (9, 4), (9, 4)),
        (36, None, (5, 4), (6, 6)),
        (24, None, (4, 4), None),
        (24, 1.0, (4, 6), None),
        (13, 1.2, (4, 4), None),
        (0, 1.5, (4, 4), None),
        (-1, None, (4, 4), None),
    ],
)
def test_the_grid_of_so_many_places(count, shape, own, expected):
    assert grid_of(count, shape, own) == expected


def test_what_a_file_tells_of_its_images_is_hostile(tmp_path):
    for size in ([0, 4], [4], "4x4", [1 << 40, 1], {"a": 1}, None, [4, 4, 4], True):
        assert not load_weights(vit(), written(vit(), tmp_path / "a.safetensors", size)).resized
