"""Pictures have room for their words, whatever shape the images have, whatever the names and their
alphabet are.
"""

import itertools

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager
from matplotlib.text import Text
from PIL import Image
from support.small_checkpoints import saved

from inference import Predictor, captions
from inference.visualization import embeddings
from inference.visualization.maps import MapOptions, cam_panels
from inference.visualization.predicted_image import predict_image
from training.pages import fonts, panels, sheets
from training.pages.names import shorten
from training.pages.panels import Panel, enlarge
from training.pages.sheets import sheet


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    options = ["DATA.IMAGE_CHANNELS", "3"]
    return Predictor(
        saved(tmp_path_factory.mktemp("model"), "vit_small_patch16_224", options=options)
    )


@pytest.fixture
def figures(monkeypatch):
    """The figures that are made from now on."""
    made = []
    write = sheets.figure_png
    for module in (sheets, embeddings):
        monkeypatch.setattr(module, "figure_png", lambda drawn: made.append(drawn) or write(drawn))
    return made


def boxes(figure):
    """Where a figure's words and images lie, in pixels; all of them within it."""
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    words = [text.get_window_extent() for text in texts]
    images = [axis.get_window_extent() for axis in figure.axes]
    for box in [*words, *images]:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    for one, other in itertools.combinations(words, 2):
        assert not one.overlaps(other)
    assert not any(word.overlaps(image) for word in words for image in images)
    return words, images


SHAPES = {
    "landscape": [(60, 90)],
    "portrait": [(90, 60)],
    "mixed": [(60, 90), (900, 300), (100, 800), (100, 100)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("columns", [2, 5, 13])
def test_words_have_room_of_their_own(shapes, columns, figures):
    rows = []
    for height, width in shapes:
        image = np.zeros((height, width, 3), np.uint8)
        rows.append(
            [
                Panel("a_photograph.jpg\nflower (93%)", image),
                *[Panel("a head", image)] * (columns - 1),
            ]
        )
    title = "vit_small_patch16_224: attention of the class and distillation tokens, block 11 (12 blocks, from 0)"
    sheet(
        rows, title, "attention, from 0 to the highest value in its panel (at least twice the mean)"
    )
    _, images = boxes(figures[0])
    assert len(images) == columns * len(shapes) + 1
    for (height, width), own in zip(shapes, images[::columns], strict=False):
        # nothing is stretched
        assert own.height / own.width == pytest.approx(height / width, rel=0.02)


def test_a_thin_image_is_enlarged_within_bounds():
    for height, width in ((2, 6000), (6000, 2), (1, 100), (8, 8), (3, 200)):
        found = enlarge(np.zeros((height, width), np.uint8))
        assert max(found.shape) <= max(panels.LONGEST, height, width)
        assert found.shape[0] * width == found.shape[1] * height
    assert enlarge(np.zeros((8, 8), np.uint8)).shape == (224, 224, 3)


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("size", [(6000, 2), (2, 6000), (1, 30)])
def test_of_a_thin_original_something_is_seen(predictor, mode, size):
    image = np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    told = Predictor(predictor.weights, options=["DATA.CROP_MODE", mode])
    seen = predict_image(told, Image.fromarray(image), original=True)
    assert max(seen.base.shape) <= panels.LONGEST
    assert max(seen.base.shape[:2]) <= 8 * min(seen.base.shape[:2])
    left, top, right, bottom = seen.box
    assert min(right - left, bottom - top) > 20
    if mode == "center":
        assert right - left == pytest.approx(bottom - top, rel=0.02)
    drawn = cam_panels(told, seen, MapOptions(method="gradcam"))[1].image
    assert drawn.shape == seen.base.shape


def test_names_that_begin_alike_differ():
    assert [shorten(name) for name in ("short", "x" * 24, "a" * 20 + "_left_wing")] == [
        "short", "x" * 24, "aaaaaaaaaaaa...left_wing",
    ]  # fmt: skip
    assert shorten("中" * 12) == "中" * 12
    assert (
        shorten("中" * 9 + "国" * 9) == "中" * 6 + "..." + "国" * 3
    )  # each as wide as two letters
    assert shorten("new\nline") == "new\\nline"


def test_many_long_classes_leave_the_plot_its_room(predictor, figures, monkeypatch):
    classes = [
        f"{number:02} a very long name of a flower that goes on and on" for number in range(38)
    ]
    places = np.random.default_rng(0).normal(size=(38, 2))
    monkeypatch.setattr(embeddings, "plane", lambda *_: places)
    monkeypatch.setattr(
        embeddings, "pooled_features", lambda *_: (np.zeros((38, 16)), np.full((38, 2), 0.5))
    )
    embeddings.embeddings(predictor, ["a.jpg"] * 38, classes)
    [figure] = figures
    _, [plot] = boxes(figure)
    assert plot.width > 0.6 * figure.bbox.width
    told = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert told == [*(shorten(name) for name in classes[:24]), "... and 14 more"]


def test_letters_are_drawn_by_a_font_that_has_them(tmp_path, monkeypatch, figures, capsys):
    monkeypatch.setattr(fonts, "_warned", [])
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [*font_manager.fontManager.ttflist])
    panels = [[Panel("图a.jpg", np.full((9, 9, 3), 255, np.uint8))]]

    def drawn():
        fonts._installed_fonts.cache_clear()
        tile = captions.tile("", 200, "图a.jpg", [("1 %", "图")], 1)
        return np.asarray(tile)[200:], sheet(panels, "a title")

    monkeypatch.setattr(fonts, "_FAMILIES", ("DejaVu Sans", "Tiny CJK"))
    without = drawn()
    said = "the fonts of this machine lack the letter 图 (U+56FE): a box is drawn instead; install a font such as Noto Sans CJK\n"
    assert capsys.readouterr().err == said  # once
    font_manager.fontManager.addfont(tiny_font(tmp_path / "tiny.ttf"))
    found = drawn()
    fonts._installed_fonts.cache_clear()
    assert capsys.readouterr().err == ""
    assert figures[1].texts[0].get_fontfamily() == ["DejaVu Sans", "Tiny CJK"]
    assert (found[0] != without[0]).any()
    assert found[1] != without[1]
    black = (found[0][19:] < 40).all(2)  # the letter is a filled square, 10 pixels wide
    assert black.any(0).sum() >= 10
    assert black.sum(0).max() >= 10


def tiny_font(file):
    """A font with letters for ".agjp", and one for 图, which is a filled square."""
    pen = TTGlyphPen(None)
    pen.moveTo((50, 0))
    for corner in ((50, 800), (950, 800), (950, 0)):
        pen.lineTo(corner)
    pen.closePath()
    glyph = pen.glyph()
    font = FontBuilder(1000, isTTF=True)
    names = {ord(letter): f"letter{ord(letter)}" for letter in ".agjp图"}
    font.setupGlyphOrder([".notdef", *names.values()])
    font.setupCharacterMap(names)
    font.setupGlyf(dict.fromkeys([".notdef", *names.values()], glyph))
    font.setupHorizontalMetrics(dict.fromkeys([".notdef", *names.values()], (1000, 50)))
    font.setupHorizontalHeader(ascent=900, descent=-100)
    font.setupNameTable({"familyName": "Tiny CJK", "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(file)
    return str(file)
