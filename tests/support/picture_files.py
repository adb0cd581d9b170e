"""Files of every pixel format, with the 8-bit colours that they stand for."""

import io
import struct
import zlib
from typing import NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

# [32, 32, 3] of china.jpg
COLOURS = np.ascontiguousarray(load_sample_images().images[0][150:182, 200:232])
# The same in 16 bits. The low bytes are another picture.
WIDE = COLOURS.astype(np.uint16) * 256 + COLOURS[::-1]


class Picture(NamedTuple):
    """A file and its pixels.

    Attributes:
        colours: [32, 32, 3] uint8.
        grey: [32, 32] uint8, by default the luma of the colours.
    """

    suffix: str
    data: bytes
    colours: np.ndarray
    grey: np.ndarray


def luma(colours: np.ndarray) -> np.ndarray:
    """Returns the luma by ITU-R 601, rounded as Pillow does."""
    return ((colours @ np.array([19595, 38470, 7471]) + 0x8000) >> 16).astype(np.uint8)


GREY = luma(COLOURS)
GREY16 = WIDE[..., 0]


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(pixels: np.ndarray, colour_type: int) -> bytes:
    """Returns a PNG file of 16 bits per channel [H, W, C], which Pillow can't write for colours."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def tiff(
    data: bytes,
    size: tuple[int, int],
    bits: int,
    photometric: int = 1,
    kind: int = 1,
    order: str = "<",
) -> bytes:
    """Returns a TIFF file of one channel.

    Args:
        photometric: 0 if white is zero.
        kind: 1 for unsigned numbers, 2 for signed ones, 3 for floats.
    """
    width, height = size
    tags = {
        256: width,
        257: height,
        258: bits,
        259: 1,
        262: photometric,
        273: 8,
        277: 1,
        278: height,
        279: len(data),
        339: kind,
    }
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(data))
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags.items())
    return head + data + struct.pack(f"{order}H", len(tags)) + entries + bytes(4)


def twelve_bits(pixels: np.ndarray) -> bytes:
    """Packs values of 12 bits, two into three bytes."""
    pairs = pixels.reshape(-1, 2).astype(np.uint32)
    both = (pairs[:, 0] << 12) | pairs[:, 1]
    return np.stack([both >> 16, both >> 8, both], 1).astype(np.uint8).tobytes()


def grey(suffix: str, data: bytes, expected: np.ndarray = GREY16 >> 8) -> Picture:
    expected = expected.astype(np.uint8)
    return Picture(suffix, data, np.repeat(expected[..., None], 3, 2), expected)


def colour(suffix: str, data: bytes, expected: np.ndarray = COLOURS) -> Picture:
    return Picture(suffix, data, expected, luma(expected))


def _pictures() -> dict[str, Picture]:
    image = Image.fromarray(COLOURS)
    little = GREY16.astype("<u2").tobytes()
    big = GREY16.astype(">u2").tobytes()
    size = image.size
    alpha = Image.fromarray(GREY[::-1].copy())
    with_alpha = image.copy()
    with_alpha.putalpha(alpha)
    few = image.quantize(16)
    of_palette = np.array(few.getpalette(), np.uint8).reshape(-1, 3)[np.asarray(few)]
    bits = np.where(GREY > 100, 255, 0).astype(np.uint8)
    cmyk = np.stack([COLOURS[..., 0], COLOURS[..., 1], COLOURS[..., 2], GREY // 2], 2)
    ink = cmyk[..., :3].astype(int)
    black = 255 - cmyk[..., 3:].astype(int)
    shade = ink * black + 128
    of_inks = np.clip(black - ((shade >> 8) + shade >> 8), 0, 255).astype(np.uint8)
    packed_alpha = Image.merge("LA", (Image.fromarray(GREY), alpha))
    maximum = f"P5 {size[0]} {size[1]} "
    return {
        "16-bit PNG": grey(".png", saved(Image.fromarray(GREY16), "PNG")),
        "16-bit TIFF": grey(".tif", tiff(little, size, 16)),
        "16-bit TIFF, big end first": grey(".tif", tiff(big, size, 16, order=">")),
        "16-bit TIFF, compressed": grey(
            ".tif", saved(Image.fromarray(GREY16), "TIFF", compression="tiff_lzw")
        ),
        "16-bit TIFF, white is 0": grey(
            ".tif", tiff(little, size, 16, photometric=0), 255 - (GREY16 >> 8)
        ),
        "12-bit TIFF": grey(".tif", tiff(twelve_bits(GREY16 >> 4), size, 12)),
        "16-bit PGM": grey(".pgm", f"{maximum} 65535\n".encode() + big),
        "10-bit PGM": grey(
            ".pgm", f"{maximum} 1023\n".encode() + (GREY16 >> 6).astype(">u2").tobytes()
        ),
        "16-bit grey and alpha PNG": grey(".png", png(np.stack([GREY16, GREY16[::-1]], 2), 4)),
        "48-bit PNG": colour(".png", png(WIDE, 2)),
        "64-bit PNG": colour(".png", png(np.concatenate([WIDE, WIDE[::-1, :, :1]], 2), 6)),
        "1-bit PNG": grey(".png", saved(Image.fromarray(bits).convert("1"), "PNG"), bits),
        "1-bit TIFF": grey(".tif", saved(Image.fromarray(bits).convert("1"), "TIFF"), bits),
        "grey PNG": grey(".png", saved(Image.fromarray(GREY), "PNG"), GREY),
        "grey and alpha PNG": grey(".png", saved(packed_alpha, "PNG"), GREY),
        "palette PNG": colour(".png", saved(few, "PNG"), of_palette),
        "palette PNG, one clear": colour(".png", saved(few, "PNG", transparency=3), of_palette),
        "palette PNG, half clear": colour(
            ".png", saved(few, "PNG", transparency=bytes(range(0, 256, 16))), of_palette
        ),
        "palette GIF": colour(".gif", saved(few, "GIF"), of_palette),
        "RGBA PNG": colour(".png", saved(with_alpha, "PNG")),
        "RGB PNG, one clear": colour(".png", saved(image, "PNG", transparency=(1, 2, 3))),
        "CMYK TIFF": colour(".tif", saved(Image.fromarray(cmyk, "CMYK"), "TIFF"), of_inks),
        "BMP": colour(".bmp", saved(image, "BMP")),
    }


PICTURES = _pictures()
_FLOATS = (GREY16 / 65535).astype(np.float32)
# Files that are refused, by name: (suffix, file, the kind of its pixels).
UNSCALED = {
    "float TIFF": (".tif", saved(Image.fromarray(_FLOATS), "TIFF"), "floats"),
    "32-bit TIFF": (
        ".tif",
        saved(Image.fromarray(GREY16.astype(np.int32)), "TIFF"),
        "32-bit integers",
    ),
    "signed TIFF": (".tif", tiff(GREY16.tobytes(), (32, 32), 16, kind=2), "32-bit integers"),
    "unsigned 32-bit TIFF": (
        ".tif",
        tiff(GREY16.astype("<u4").tobytes(), (32, 32), 32),
        "32-bit integers",
    ),
}
