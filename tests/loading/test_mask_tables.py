"""What masks' files hold: tables of indices and colours, 16 bits, values that a table lacks."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from errors import RunError
from loading.mask_tables import (
    MaskTable,
    class_colors,
    index_table,
    mask_kind,
    plain_table,
    shifted_table,
)
from loading.transforms import UnknownValues, mask_image

COLOURS = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0], [1, 2, 3]], np.uint8)


def png(values, **options):
    file = io.BytesIO()
    image = values if isinstance(values, Image.Image) else Image.fromarray(values)
    image.save(file, options.pop("format", "PNG"), **options)
    return file.getvalue()


def read(data, table, dtype=np.uint8):
    return np.asarray(mask_image(data, "m.png", 10**6, np.dtype(dtype), table=table))


def test_indices_become_classes():
    stored = np.array([[0, 1, 150], [150, 255, 7]], np.uint8)
    expected = [[255, 0, 149], [149, 255, 6]]
    np.testing.assert_array_equal(read(png(stored), shifted_table(150)), expected)
    table = index_table({0: 255, 1: 4, 7: 4, 150: 0, 255: 255})
    expected = [[255, 4, 0], [0, 255, 4]]
    found = read(png(stored), table)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.uint8
    palette = Image.fromarray(stored).convert("P")
    palette.putpalette(np.random.default_rng(0).integers(0, 256, 768).astype(np.uint8).tobytes())
    palette.putdata(stored.ravel().tolist())
    np.testing.assert_array_equal(read(png(palette), table), expected)


def test_indices_of_16_bits_become_classes():
    stored = np.array([[0, 299, 65535], [300, 7, 256]], np.uint16)
    table = shifted_table(300)
    found = read(png(stored), table, np.int32)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, [[65535, 298, 65535], [299, 6, 255]])
    # Many ids may stand for few classes.
    table = index_table({0: 0, 299: 1, 65535: 255, 300: 2, 7: 2, 256: 0})
    np.testing.assert_array_equal(read(png(stored), table), [[0, 1, 255], [2, 2, 0]])


def test_how_masks_are_held_follows_from_the_number_of_classes():
    assert mask_kind(255) == ("uint8", 255)
    assert mask_kind(256) == ("int32", 65535)
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    np.testing.assert_array_equal(read(png(values), plain_table(255)), values)
    np.testing.assert_array_equal(read(png(values), plain_table(256), np.int32), values)
    # The ignored index may be one of the classes' own.
    found = read(png(values[:1]), plain_table(16, ignore_index=3))
    np.testing.assert_array_equal(found[0], [0, 1, 2, 255, *range(4, 16)])


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_become_classes(mode):
    drawn = np.random.default_rng(0).integers(0, 4, (30, 40))
    table = MaskTable(COLOURS, [0, 1, 1, 255])
    image = Image.fromarray(COLOURS[drawn])
    if mode == "P":
        # Of a palette the colours count, and not the places in it.
        image = Image.fromarray((drawn + 5).astype(np.uint8))
        image.putpalette(bytes(15) + COLOURS.tobytes())
    image = image.convert(mode)
    assert image.mode == mode
    found = read(png(image), table)
    np.testing.assert_array_equal(found, np.array([0, 1, 1, 255])[drawn])
    assert found.dtype == np.uint8


def test_grey_is_a_colour_too():
    table = MaskTable([[0, 0, 0], [255, 255, 255]], [0, 1])
    values = np.array([[0, 255], [255, 0]], np.uint8)
    np.testing.assert_array_equal(read(png(values), table), values // 255)
    np.testing.assert_array_equal(read(png(values > 0), table), values // 255)


def test_an_unknown_index_is_named_with_its_place():
    stored = np.zeros((20, 30), np.uint8)
    stored[3, 17] = 9
    stored[5, :4] = 200
    message = (
        r"^m.png: it contains the index 9 at x 17, y 3, and 5 pixels of unknown values in total;"
        r" expected 0..4 or 255; add it$"
    )
    with pytest.raises(UnknownValues, match=message):
        read(png(stored), plain_table(5, advice="add it"))
    stored[5] = 0
    with pytest.raises(
        UnknownValues, match="and 1 pixel of unknown values in total; .*; correct th"
    ):
        read(png(stored), plain_table(5))
    # The table of many ranges names some of them.
    table = index_table(dict.fromkeys((0, 1, 2, 4, 6, 10, 11, 20), 0))
    with pytest.raises(UnknownValues, match=r"expected 0..2 or 4 or 6 or 2 more; "):
        read(png(stored), table)


def test_an_unknown_colour_is_named_with_its_place():
    values = np.zeros((20, 30, 3), np.uint8)
    values[19, 29] = [250, 2, 100]
    message = r"the colour 250 2 100 at x 29, y 19, and 1 pixel .*expected one of 4 colours; "
    with pytest.raises(UnknownValues, match=message):
        read(png(values), MaskTable(COLOURS, [0, 1, 1, 255]))


def test_colours_without_a_table_of_them_are_refused():
    values = np.zeros((8, 8, 3), np.uint8)
    message = r"^m.png: it has 3 channels, expected .* \(a colors.txt maps colours to classes"
    with pytest.raises(RunError, match=message):
        read(png(values), plain_table(5))
    table = MaskTable(COLOURS, [0, 1, 1, 255])
    with pytest.raises(RunError, match="^m.png: its mode is I;16, expected a PNG of 8-bit colours"):
        read(png(np.zeros((8, 8), np.uint16)), table)
    with pytest.raises(RunError, match="^m.png: its format is JPEG, expected a PNG"):
        read(png(values, format="JPEG"), table)


def test_a_table_is_handed_over_without_its_lookup():
    table = MaskTable(COLOURS, [0, 1, 1, 255], "add it")
    read(png(COLOURS[None]), table)
    packed = pickle.dumps(table)
    assert len(packed) < 1000
    other = pickle.loads(packed)
    assert other.to_bytes() == table.to_bytes()
    assert other.advice == "add it"
    np.testing.assert_array_equal(read(png(COLOURS[None]), other), [[0, 1, 1, 255]])
    assert MaskTable(COLOURS, [0, 1, 2, 255]).to_bytes() != table.to_bytes()
    assert plain_table(4).is_identity
    assert not shifted_table(4).is_identity
    assert not table.is_identity


def test_class_colors_are_pascal_vocs():
    colors = class_colors(256)
    assert colors.dtype == np.uint8
    assert colors[:9].tolist() == [
        [0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128], [128, 0, 128], [0, 128, 128],
        [128, 128, 128], [64, 0, 0],
    ]  # fmt: skip
    assert colors[20].tolist() == [0, 64, 128]
    assert colors[255].tolist() == [224, 224, 192]
    assert len(np.unique(class_colors(5000), axis=0)) == 5000
    assert class_colors(0).shape == (0, 3)
