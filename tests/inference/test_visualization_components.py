"""Principal components of features: the foreground and its colours, and the largest attention."""

import numpy as np
import paddle
import pytest
from sklearn.datasets import load_sample_images
from sklearn.decomposition import PCA
from support.small_checkpoints import cut, saved
from support.small_models import SMALL_MODELS

from errors import InputError
from inference import Predictor
from inference.visualization.components import foreground, otsu
from inference.visualization.draw import to_colours
from inference.visualization.maps import (
    MapOptions,
    attention_panels,
    cam_panels,
    feature_panels,
    largest_part,
    named_panel,
    title_of,
)
from inference.visualization.predicted_image import predict_image
from models import create_model
from models.pretraining.dino import Dino
from models.vit import VisionTransformer
from weights import save_weights


def scaled(values):
    low, high = np.quantile(values, [0.01, 0.99], axis=0)
    return np.clip((values - low) / (high - low), 0, 1)


def photographed():
    """Returns maps of an object in the middle of two images, with noise, and where it is."""
    rng = np.random.default_rng(0)
    maps, inside = [], []
    for shape in ((8, 8), (6, 9)):
        is_object = np.zeros(shape, bool)
        is_object[2:-2, 2:-2] = True
        values = rng.normal(0, (1, 0.9, 0.8, 0.7, 0.1), (*shape, 5))
        values[is_object] += (-20, 0, 0, 0, 0)
        maps.append(values)
        inside.append(is_object)
    return maps, inside


@pytest.mark.smoke
def test_the_foreground_and_its_colours_are_scikit_learns_components():
    maps, inside = photographed()
    firsts, colours = foreground(maps)
    assert [first.shape for first in firsts] == [(8, 8), (6, 9)]
    assert [drawn.shape for drawn in colours] == [(8, 8, 3), (6, 9, 3)]
    flat = np.concatenate([values.reshape(-1, 5) for values in maps])
    values = PCA(4).fit_transform(flat)
    is_object = np.concatenate([each.ravel() for each in inside])
    # The object isn't at the edges, so it has the large values.
    first = values[:, 0] * np.sign(values[is_object, 0].mean())
    found = np.concatenate([each.ravel() for each in firsts])
    np.testing.assert_allclose(found, scaled(first), atol=1e-9)
    drawn = np.concatenate([each.reshape(-1, 3) for each in colours])
    assert not drawn[~is_object].any()
    # The colours are those of the object's places. A component's sign is free.
    for channel in range(3):
        component = values[is_object, 1 + channel]
        ways = [scaled(component), scaled(-component)]
        distances = [np.abs(drawn[is_object, channel] - way).max() for way in ways]
        assert min(distances) < 1e-9


def test_a_threshold_of_0_shows_all_places():
    maps, _ = photographed()
    _, colours = foreground(maps, 0.0)
    shown = np.concatenate([each.reshape(-1, 3) for each in colours])
    assert shown.any(1).mean() > 0.95
    flat = np.concatenate([values.reshape(-1, 5) for values in maps])
    expected = np.sort(scaled(PCA(4).fit_transform(flat)[:, 1:]).std(0))
    np.testing.assert_allclose(np.sort(shown.std(0)), expected, rtol=1e-6)
    firsts, colours = foreground(maps, 1.0)
    for first, drawn in zip(firsts, colours, strict=True):
        assert (drawn.any(-1) <= (first == 1)).all()


def test_maps_without_variation_or_with_few_channels_are_drawn():
    firsts, colours = foreground([np.ones((3, 3, 2)), np.ones((1, 2, 2))])
    assert not any(each.any() for each in (*firsts, *colours))
    rng = np.random.default_rng(1)
    firsts, colours = foreground([rng.normal(size=(4, 4, 2))])
    assert firsts[0].max() == 1
    assert not colours[0][:, :, 1:].any()
    # A single row is nothing but edges.
    firsts, _ = foreground([rng.normal(size=(1, 6, 5))])
    assert firsts[0].shape == (1, 6)


def test_otsu_parts_values_best():
    rng = np.random.default_rng(2)
    values = np.concatenate([rng.normal(0, 1, 300), rng.normal(6, 1, 100)])
    ordered = np.sort(values)
    scores = []
    for count in range(1, 400):
        low, high = ordered[:count], ordered[count:]
        scores.append(len(low) * len(high) * (high.mean() - low.mean()) ** 2)
    assert otsu(values.reshape(20, 20)) == ordered[1 + int(np.argmax(scores))]
    assert 2 < otsu(values) < 4
    assert otsu(np.array([0.0, 0, 0, 1])) == 1
    assert otsu(np.array([0.5, 0.5])) == 0.5
    assert otsu(np.array([0.5])) == 0.5


@pytest.mark.parametrize("mass", [0.6, 0.1, 1.0])
def test_the_largest_part_has_the_mass(mass):
    values = np.random.default_rng(3).random((5, 4)).astype(np.float32)
    found = largest_part(values, mass)
    kept = found > 0
    assert (found[kept] == values[kept]).all()
    if mass < 1:
        assert values[kept].min() > values[~kept].max()
    assert found.sum() >= mass * values.sum() * (1 - 1e-6)
    # One place less wouldn't have it.
    assert found.sum() - values[kept].min() < mass * values.sum()
    assert (largest_part(np.eye(2, dtype=np.float32), 0.5) == [[0, 0], [0, 1]]).all()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    return cut(tmp_path_factory.mktemp("photographs"))


def test_the_panels_of_the_foreground(tmp_path, photographs):
    predictor = Predictor(saved(tmp_path, "vit_small_patch16_224"))
    seen = [predict_image(predictor, photographs / "bridge" / f"{n}.png") for n in range(2)]
    options = MapOptions(method="foreground")
    rows = feature_panels(predictor, seen, options)
    assert [[panel.title for panel in row[1:]] for row in rows] == [
        ["first component", "the next three"]
    ] * 2
    model = predictor.model
    with paddle.no_grad():
        maps = [
            model.forward_intermediates(each.image, 1, norm=True, intermediates_only=True)[0]
            for each in seen
        ]
    firsts, colours = foreground([each.numpy()[0].transpose(1, 2, 0) for each in maps])
    for row, first, drawn in zip(rows, firsts, colours, strict=True):
        side = row[1].image.shape[0] // first.shape[0]
        middle = slice(side // 2, None, side)
        np.testing.assert_allclose(
            row[1].image[middle, middle] / 255, to_colours(first), atol=0.003
        )
        np.testing.assert_allclose(row[2].image[middle, middle] / 255, drawn, atol=0.003)
    title, label = title_of("features", predictor, options)
    last = model.feature_info[-1]["module"]
    assert title.endswith(f"the first principal component, and the next three as colours, {last}")
    assert not label


@pytest.mark.parametrize("kind", ["convnext", "swin", "xcit"])
def test_the_foreground_of_any_model(kind):
    model = SMALL_MODELS[kind]()
    model.eval()
    images = paddle.rand([2, model.in_channels, *model.image_size])
    [last] = model.forward_intermediates(images, 1, norm=True, intermediates_only=True)
    firsts, colours = foreground(list(last.numpy().transpose(0, 2, 3, 1)))
    assert len(firsts) == len(colours) == 2
    assert all(np.isfinite(each).all() for each in (*firsts, *colours))


def test_attention_of_a_dino_runs_teacher(tmp_path):
    paddle.seed(0)
    encoder = VisionTransformer(32, 8, num_classes=0, embed_dim=16, depth=2, num_heads=2)
    network = Dino(encoder, 10, 16, 12)
    for parameter in network.parameters():
        parameter.set_value(paddle.randn(parameter.shape))
    save_weights(network, tmp_path / "run.safetensors")
    save_weights(network.teacher.encoder, tmp_path / "teacher.safetensors")
    (tmp_path / "small.yaml").write_text(
        "BASE: ''\nDATA: {IMAGE_SIZE: 32}\nMODEL: {TYPE: ViT, NAME: small, NUM_CLASSES: 0,"
        " PATCH_SIZE: 8, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2}\n"
    )
    photograph = load_sample_images().images[0]
    drawn = []
    for file in ("run", "teacher"):
        predictor = Predictor(tmp_path / f"{file}.safetensors", str(tmp_path / "small.yaml"))
        seen = predict_image(predictor, photograph)
        drawn.append(attention_panels(predictor, seen, MapOptions(mass=0.6)))
    assert [panel.title for panel in drawn[0][1:]] == ["mean of the heads", "head 0", "head 1"]
    for one, other in zip(*drawn, strict=True):
        assert (one.image == other.image).all()
    assert "its largest 60%" in title_of("attention", predictor, MapOptions(mass=0.6))[0]


def test_a_model_without_classes_is_drawn_without_them(tmp_path):
    model = create_model("vit_digits", num_classes=0)
    save_weights(model, tmp_path / "model.safetensors")
    predictor = Predictor(tmp_path / "model.safetensors", "vit_digits", ["MODEL.NUM_CLASSES", "0"])
    seen = predict_image(predictor, np.zeros([8, 8, 3], np.uint8))
    assert named_panel(seen).title == "image 0\n"
    with pytest.raises(InputError, match="use attention"):
        cam_panels(predictor, seen, MapOptions(method="gradcam"))
