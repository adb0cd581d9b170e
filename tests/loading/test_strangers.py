"""What readers of data sets accept that a stranger wrote, and what they refuse, in which words."""

import io
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from conftest import write_images
from PIL import Image
from support import forged_images
from support.dataset_files import dataset_config
from support.hostile_files import attempt
from support.structured_images import webp_of_sets

from datasets import get_dataset, get_datasets
from errors import InputError, RunError
from loading.transforms import EncodedImage, formats
from loading.transforms.isolated import decode_isolated

MOST = 10**8


def opened(data, most=MOST):
    return EncodedImage(data, "RGB", "x.jpg", most)


def webp(*chunks):
    content = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content)) + content


def canvas(flags=0, width=32, height=24):
    """The length and the content of a VP8X chunk."""
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return struct.pack("<II", 10, flags) + sides


def tiff(more, content):
    """A grey TIFF of 4 x 4 pixels, with ``more`` tags and some bytes before its directory."""
    tags = [
        (256, 3, 1, 4), (257, 3, 1, 4), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1),
        (273, 4, 1, 8), (277, 3, 1, 1), (278, 3, 1, 4), (279, 4, 1, 16), *more,
    ]  # fmt: skip
    return (
        b"II*\0"
        + struct.pack("<I", 8 + len(content))
        + content
        + forged_images.directory(sorted(tags))
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            lambda: forged_images.png(12000, 12000),
            r"it has 12000 x 12000 pixels, DATA.MAX_PIXELS is 100000000; repair",
        ),
        (
            lambda: forged_images.with_scans(4000, 3000, 200),
            "it has 4000 x 3000 pixels in more than 83 scans: decoding them takes too long",
        ),
        # Each scan passes over whole blocks, however narrow the image is; and each takes time of
        # its own.
        (
            lambda: forged_images.with_scans(1, 50_000, 3000),
            "it has 1 x 50000 pixels in more than 1000 scans",
        ),
        (
            lambda: forged_images.with_scans(8, 8, 1) + b"\xff\xda\0\x08" * 5000,
            "it has 8 x 8 pixels in more than 1000 scans",
        ),
        (lambda: b"GIF89a" + bytes(7) + b"!\xfe\0" * 20_000, "it has too many parts"),
        (lambda: b"GIF89a" + bytes(7) + b"!\xfe" + b"\x01x" * 20_000, "it has too many parts"),
        (lambda: b"P6\n#" + b"x" * 400_000 + b"\n1 1\n255\nabc", "reading it takes too long"),
        (
            lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n",
            r"its format is unknown; BMP, GIF, JPEG, PNG, PPM, TIFF and WebP are supported",
        ),
        (lambda: b"DDS " + bytes(200), r"its format is unknown"),
        (
            lambda: forged_images.png(1, 49_000_000, pixels=forged_images.black(1, 100)),
            "it has 1 x 49000000 pixels, at most 1000000",
        ),
        (
            lambda: forged_images.png(
                8, 8, forged_images.chunk(b"PLTE", bytes(1000)), pixels=forged_images.black(8, 8)
            ),
            "its chunk PLTE has 1000 bytes, at most 768 are allowed",
        ),
        (lambda: webp(b"VP8X" + canvas(), b"none\0\0\0\0" * 20_000), "it has too many parts"),
        (
            lambda: tiff([(282, 5, 30_000, 8)], bytes(240_000)),
            "its tags have more than 500000 values",
        ),
        (
            lambda: b"\xff\xd8"
            + forged_images.segment(0xE1) * 20_000
            + forged_images.saved("JPEG")[2:],
            "it has too many parts",
        ),
    ],
)
def test_an_image_that_costs_too_much_is_refused_by_its_header(data, message):
    with pytest.raises(RunError, match=f"^x.jpg: .*{message}"):
        opened(data())


def test_the_key_bounds_pixels_whatever_pillows_limit_is():
    whole = forged_images.saved("PNG")  # of 32 x 24
    assert opened(whole, 768).decode().size == (32, 24)
    with pytest.raises(RunError, match="it has 32 x 24 pixels, DATA.MAX_PIXELS is 767;"):
        opened(whole, 767)
    # Pillow alone refuses it
    assert opened(forged_images.png(20000, 10000), 200_000_000).size == (20000, 10000)


@pytest.mark.parametrize("kind", sorted(forged_images.WHOLE))
def test_without_its_notes_a_file_has_the_same_pixels(kind):
    data = forged_images.WHOLE[kind]
    with Image.open(io.BytesIO(data)) as image:
        expected = image.convert("RGB")
    assert opened(data).decode().tobytes() == expected.tobytes()


def test_chunks_and_frames_in_number_do_not_reach_the_decoder():
    """libwebp takes memory for each of them."""
    still = forged_images.WHOLE["lossless"]
    unknown = b"none\0\0\0\0" * 50_000
    image = still[12:]
    frame = bytes(6) + struct.pack("<I", 31)[:3] + struct.pack("<I", 23)[:3] + bytes(4) + image
    shown = b"ANMF" + struct.pack("<I", len(frame)) + frame
    hidden = b"ANMF" + struct.pack("<I", len(frame + unknown)) + frame + unknown
    moving = b"VP8X" + canvas(2), b"ANIM" + struct.pack("<I", 6) + bytes(6)
    for data in (
        still + unknown,
        webp(image, unknown),
        webp(b"VP8X" + canvas(0x2C), b"ICCP\0\0\0\0", image, unknown, b"EXIF\0\0\0\0"),
        webp(*moving, shown, unknown),
        webp(*moving, shown * 5000),
        webp(*moving, hidden),
    ):
        read = opened(data)
        assert len(read._data) < len(still) + 100
        assert read.decode().tobytes() == forged_images.PICTURE.tobytes()


@pytest.mark.parametrize("kind", ["WebP", "lossless", "animated"])
def test_a_webp_that_is_cut_short_is_refused(kind):
    whole = forged_images.WHOLE[kind]
    message = "^x.jpg: (can't be read as an image|its WEBP header is damaged)"
    for length in (len(whole) - 2, len(whole) // 2 + 4, 31, 21, 16):
        with pytest.raises(RunError, match=message):
            opened(whole[:length]).decode()


@pytest.mark.parametrize("alpha", [False, True])
def test_a_set_of_codes_for_each_block_of_a_webp_takes_little(alpha):
    data = webp_of_sets(1024, 65_536, alpha)
    line = attempt("WebP", len(data), lambda: opened(data).decode(), pixels=1024 * 1024)
    assert "decoding it takes more than" in line or "failed to read next frame" in line
    plain = webp_of_sets(1024, 100, alpha)
    assert attempt("WebP", len(plain), lambda: opened(plain).decode(), pixels=1024 * 1024) == ""


@pytest.mark.parametrize("disposal", range(8))
def test_a_gif_is_not_filled_before_its_size_is_known(disposal):
    sides = struct.pack("<HH", 65_535, 65_535)
    head = b"GIF89a" + sides + b"\xf7\0\0" + bytes(range(256)) * 3
    data = (
        head
        + b"!\xf9\4"
        + bytes([disposal << 2 | 1])
        + bytes(4)
        + b","
        + bytes(4)
        + sides
        + b"\0\x08\1\0\0;"
    )
    assert "65535 x 65535 pixels" in attempt("GIF", len(data), lambda: opened(data))


def test_xmp_in_number_is_copied_once():
    data = tiff([(700, 1, 1 << 24, 8)] * 50_000, bytes(1 << 24))
    assert attempt("TIFF", len(data), lambda: opened(data).decode()) == ""


def test_libraries_tell_nothing_of_a_strangers_file():
    several_heights = tiff([(257, 3, 2, 0x00040004)], bytes(100))
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (4L, 4L), }\n"
    array = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + bytes(16)
    code = "import errors; from loading.transforms import EncodedImage, bands_of\n"
    code += f"EncodedImage({several_heights!r}, 'RGB', 'x', 100).decode()\n"
    code += f"bands_of({array!r}, 1, 'x', 100)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_notes_are_left_out(monkeypatch):
    exif = Image.Exif()
    text = "notes " * 1000
    exif[0x010E] = text
    monkeypatch.setattr(Image.Exif, "load", None)  # what Pillow would take them apart by
    for kind in ("JPEG", "PNG", "TIFF"):
        data = forged_images.saved(kind, exif=exif)
        image = opened(data)
        assert len(data) > 6000
        assert kind == "TIFF" or text.encode() not in image._data
        assert "exif" not in image._image.info
        if kind != "TIFF":
            assert image.decode().size == (32, 24)


def test_a_narrow_image_is_refused_before_it_is_enlarged(tmp_path):
    write_images(tmp_path / "train", {"a": 2})
    (tmp_path / "train/a/1.png").write_bytes(
        forged_images.saved("PNG", Image.new("L", (1, 20_000)))
    )
    os.rename(tmp_path / "train", tmp_path / "val")
    data = get_dataset(
        dataset_config("folder", tmp_path, "DATA.IMAGE_SIZE", "100", "DATA.MAX_PIXELS", "1000000"),
        "val",
    )
    with pytest.raises(
        RunError,
        match=r"val/a/1.png: it has 1 x 20000 pixels, resized 100 x 2000000: more than .*it$",
    ):
        data[1]


def test_what_cannot_be_decoded_is_tried_once(tmp_path, monkeypatch):
    write_images(tmp_path / "train", {"a": 4})
    (tmp_path / "train/a/1.png").write_bytes(b"broken")
    (tmp_path / "train/a/2.png").unlink()
    (tmp_path / "train/a/2.png").mkdir()  # of which a disk could be the reason
    data = get_dataset(dataset_config("folder", tmp_path, "DATA.SKIP_BROKEN", "True"), "train")
    data.paths = type(data.paths)([f"train/a/{number}.png" for number in range(4)])
    data.labels = np.zeros(4, np.int64)
    read = []
    whole = data.data
    monkeypatch.setattr(data, "data", lambda index: (read.append(index), whole(index))[1])
    assert [data[1][-1], data[1][-1], data[3][-1]] == [1, 1, -1]
    assert read == [1, 2, 3, 2, 3, 3]


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_a_list_may_have_tabs_a_bom_and_windows_line_ends(tmp_path, start):
    write_images(tmp_path / "train", {"a b": 2})
    lines = start + b"train/a b/0.png\t0\r\n\r\n  train/a b/1.png  1  \r\n"
    for mode in ("train", "val"):
        (tmp_path / f"{mode}_list.txt").write_bytes(lines)
    _, train, _ = get_datasets(dataset_config("imagenet2012", tmp_path))
    assert [train.paths[0], train.paths[1]] == ["train/a b/0.png", "train/a b/1.png"]
    assert train.labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"a.jpg " + b"9" * 30, r"line 1: label 9{30} is outside 0\.\.9999999"),
        (b"a.jpg 10000000", r"line 1: label 10000000 is outside 0\.\.9999999"),
        (b"a\0b.jpg 1", "line 1: its path contains a NUL character"),
        (b"\xff\xfea\0 \0001\0", "it is UTF-16; save it as UTF-8"),
        (
            b"a.jpg,1",
            "line 1: expected a path, then a label, which is a whole number; found 'a.jpg,1'",
        ),
        (b"a.jpg \xd9\xa1", "line 1: expected a path, then a label"),
        (b"caf\xe9.jpg 1", r"1 of 1 files are missing, the first is .*caf\\udce9.jpg"),
    ],
)
def test_a_list_that_is_none_says_why(tmp_path, line, message):
    (tmp_path / "train_list.txt").write_bytes(line)
    with pytest.raises(InputError, match=f"train_list.txt[:,] .*{message}"):
        get_dataset(dataset_config("imagenet2012", tmp_path), "train")


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path, monkeypatch):
    write_images(tmp_path / "train", {"a": 1, "a/deep": 1})
    whole = os.scandir

    def scandir(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(
        InputError,
        match=r"train: its folder '.*/train/a/deep' can't be listed \(Permission denied\);",
    ):
        get_dataset(dataset_config("folder", tmp_path), "train")


def test_a_film_behind_a_progressive_photograph_counts_as_no_scans():
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 800, 3), np.uint8)).save(
        file, "JPEG", progressive=True
    )
    film = np.random.default_rng(1).bytes(4_000_000)
    assert film.count(b"\xff\xda") > 40
    assert opened(file.getvalue() + film, 1_000_000).decode().size == (800, 600)


def test_a_large_png_is_decoded_where_it_can_be_stopped(monkeypatch):
    decoded = []
    monkeypatch.setattr(formats, "_LARGE_PNG", 1000)
    monkeypatch.setattr(
        formats,
        "decode_isolated",
        lambda data, *told: decoded.append(told) or decode_isolated(data, *told),
    )
    noise = np.random.default_rng(0).integers(0, 256, (30, 20, 3), np.uint8)
    for image in (
        Image.fromarray(noise),
        Image.fromarray(noise[..., 0]),
        Image.fromarray(noise).quantize(256),
    ):
        data = forged_images.saved("PNG", image)
        assert len(data) > 600
        np.testing.assert_array_equal(opened(data).decode(), np.asarray(image.convert("RGB")))
    # The grey one is a small file.
    assert decoded == [("PNG", (20, 30))] * 2
