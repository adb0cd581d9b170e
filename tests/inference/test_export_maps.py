"""Exports of models of TASK segmentation: their classes are the eager model's."""

import sys

import numpy as np
import pytest
from support.mask_models import OPTIONS, evaluation, random_model, save_model, write_data

from errors import InputError, RunError
from inference import Predictor
from inference.exporting import write_export
from inference.map_fidelity import compare_maps
from models.heads import graph_resize
from models.heads.base import resized


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("maps"))


def images_of(data):
    return [str(data / "images" / "val" / f"{index}.png") for index in range(7)]


def exported(data, folder, kind, *options, **settings):
    config, val = evaluation(data, *options)
    write_export(
        config, random_model(config), folder, val.classes, kind, task=config.TASK, **settings
    )
    return folder


@pytest.mark.long
@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
@pytest.mark.parametrize(
    "options",
    [
        ["HEAD.STRIDE", "20"],
        ["DATA.CROP_MODE", "squash", "DATA.CROP_PCT", "1.0"],
        # A graph of any size.
        [],
    ],
)
def test_a_vits_graph_gives_the_maps_of_its_weights(data, tmp_path, kind, options):
    folder = exported(data, tmp_path / "export", kind, *options)
    weights = save_model(data, tmp_path / "model.safetensors", *options)
    expected = Predictor(weights).maps(images_of(data), flip=True)
    predictor = Predictor(folder)
    assert "segmentation" in (folder / "preprocess.json").read_text()
    same = 0
    for one, other in zip(predictor.maps(images_of(data), flip=True), expected, strict=True):
        assert one.outputs.shape == other.outputs.shape
        same += (one.outputs == other.outputs).sum()
    assert same >= 0.9999 * sum(other.outputs.size for other in expected)
    with pytest.raises(InputError, match="classifies pixels, not images"):
        predictor(images_of(data))


CONVOLUTIONS = [
    "MODEL.TYPE", "ConvNeXt", "MODEL.STAGE_DEPTHS", "[1, 1, 1, 1]",
    "MODEL.EMBED_DIMS", "[8, 8, 8, 8]", "HEAD.INDICES", "[1]",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
def test_a_graph_of_convolutions_takes_images_of_any_size(data, tmp_path, kind, monkeypatch):
    from support import mask_models

    plain = [
        word
        for place, word in enumerate(OPTIONS)
        if (OPTIONS[place - place % 2]).rpartition(".")[2]
        not in ("TYPE", "PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS")
    ]
    monkeypatch.setattr(mask_models, "OPTIONS", [*plain, *CONVOLUTIONS])
    folder = exported(data, tmp_path / "export", kind)
    weights = save_model(data, tmp_path / "model.safetensors")
    expected = Predictor(weights).maps(images_of(data))
    same = 0
    for one, other in zip(Predictor(folder).maps(images_of(data)), expected, strict=True):
        same += (one.outputs == other.outputs).sum()
    assert same >= 0.9999 * sum(other.outputs.size for other in expected)


def test_what_can_not_be_exported_is_refused(data, tmp_path):
    with pytest.raises(InputError, match="int8 isn't supported for TASK segmentation"):
        exported(data, tmp_path / "export", "onnx", "HEAD.STRIDE", "20", precision="int8")
    assert [file.name for file in tmp_path.iterdir()] == []


def test_a_package_that_is_missing_is_named_for_images_of_any_size_too(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match="^(onnx isn't installed|paddle2onnx, which writes)"):
        exported(data, tmp_path / "export", "onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"), [("METHOD.SCALES", "[0.75, 1.25]"), ("METHOD.FLIP", "True")]
)
def test_views_that_an_export_would_not_have_are_refused(key, value, data, tmp_path):
    with pytest.raises(InputError, match=rf"^{key} is .*, expected .* for an export"):
        exported(data, tmp_path / "export", "paddle", key, value)
    assert not list(tmp_path.iterdir())


@pytest.mark.smoke
def test_an_export_that_computes_otherwise_is_an_error(data):
    config, _ = evaluation(data, "HEAD.STRIDE", "20")
    model = random_model(config)

    def runner(images):
        import paddle

        with paddle.no_grad():
            logits = model(paddle.to_tensor(images)).numpy()
        logits[:, 0, 0, :3] += 0.01 * np.ptp(logits)
        return logits

    with pytest.raises(
        RunError, match="the exported model differs from the eager one: on photographs"
    ):
        compare_maps(config, model, runner, "float32", 0.8)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(13, 17), (26, 50), (5, 7), (13, 40)])
def test_the_resize_of_a_graph_is_that_of_eager_layers(size, align_corners):
    import paddle

    rng = np.random.default_rng(0)
    maps = paddle.to_tensor(rng.normal(size=(2, 3, 13, 17)).astype(np.float32))
    found = graph_resize.resized_in_graph(maps, size, align_corners).numpy()
    np.testing.assert_allclose(found, resized(maps, size, align_corners).numpy(), atol=5e-6)
    # The same of sides that are known only when a graph is run.
    sides = [paddle.to_tensor([side]) for side in size]
    again = graph_resize.resized_in_graph(maps, sides, align_corners).numpy()
    np.testing.assert_allclose(again, found, atol=1e-6)
