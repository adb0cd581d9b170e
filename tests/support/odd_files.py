"""Image files of every kind, intact and damaged, and files that are no images."""

import io
import os
import random
import socket
import struct

import numpy as np
from PIL import Image, features

from support import forged_images, picture_files

COLOURS = Image.fromarray(picture_files.COLOURS)
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
PDF = b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation):
    """A JPEG file whose EXIF data turns it by 90 degrees."""
    exif = Image.Exif()
    exif[274] = orientation
    return saved(COLOURS, "JPEG", exif=exif)


def sound():
    """Returns {name: file} of images that an evaluation can read."""
    frames = {"save_all": True, "append_images": [COLOURS.rotate(90)], "duration": 50}
    found = {
        f"{name.replace(' ', '_').replace(',', '')}{p.suffix}": p.data
        for name, p in picture_files.PICTURES.items()
    }
    found |= {f"{name.replace(' ', '_')}.jpg": data for name, data in forged_images.WHOLE.items()}
    found |= {f"turned_{number}.jpg": turned(number) for number in (2, 3, 6, 8)}
    found |= {
        f"animated.{kind}": saved(COLOURS, name, **frames)
        for kind, name in (("gif", "GIF"), ("png", "PNG"))
    }
    found["animated.webp"] = saved(COLOURS, "WEBP", **frames)
    found["cmyk_inverted.jpg"] = saved(COLOURS.convert("CMYK"), "JPEG", quality=90)
    found["one_pixel.png"] = saved(Image.new("RGB", (1, 1)), "PNG")
    found["narrow.png"] = saved(Image.new("RGB", (1, 900)), "PNG")
    return found


def refused():
    """Returns {name: file} of images that are refused with a reason."""
    found = {
        f"unscaled_{n}{suffix}": data
        for n, (suffix, data, _) in enumerate(picture_files.UNSCALED.values())
    }
    found |= {
        "a.svg": SVG,
        "svg.png": SVG,
        "a.pdf": PDF,
        "pdf.jpg": PDF,
        "text.jpg": b"hello\n" * 99,
        "empty.jpg": b"",
    }
    found |= {
        "zeros.png": bytes(5000),
        "bomb.png": forged_images.png(65_500, 65_500, pixels=forged_images.black(1, 99)),
    }
    found |= {
        "html.gif": b"<!doctype html><title>404</title>",
        "eps.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\nshowpage\n",
    }
    found["bomb.jpg"] = with_size(saved(COLOURS, "JPEG"), 65_500)
    found["bomb.gif"] = (
        saved(COLOURS.quantize(16), "GIF")[:6] + struct.pack("<HH", 65_500, 65_500) + bytes(3)
    )
    found["bomb.bmp"] = saved(COLOURS, "BMP")[:18] + struct.pack("<ii", 65_500, 65_500) + bytes(40)
    found["bomb.ppm"] = b"P6 65500 65500 255\n" + bytes(99)
    found["bomb.tif"] = picture_files.tiff(bytes(99), (65_500, 65_500), 8)
    found["negative.bmp"] = (
        saved(COLOURS, "BMP")[:18] + struct.pack("<ii", -32, -(1 << 31)) + bytes(40)
    )
    if features.check("avif"):
        found["a.avif"] = found["avif.jpg"] = saved(COLOURS, "AVIF")
    try:
        import pillow_heif
    except ImportError:
        return found
    file = io.BytesIO()
    pillow_heif.from_pillow(COLOURS).save(file)
    return found | {"a.heic": file.getvalue(), "heic.jpg": file.getvalue()}


def with_size(jpeg, side):
    place = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:place] + struct.pack(">HH", side, side) + jpeg[place + 4 :]


def spoilt(seed=0):
    """Returns {name: file} of intact images that are cut, have changed bytes, or get another
    suffix.
    """
    rng = random.Random(seed)
    found = {}
    for name, data in sound().items():
        stem, suffix = os.path.splitext(name)
        found |= {
            f"{stem}-{share}{suffix}": data[: len(data) * share // 100] for share in (5, 50, 90)
        }
        found[f"{stem}-mistyped{'.png' if suffix != '.png' else '.bmp'}"] = data
        for turn in range(3):
            changed = bytearray(data)
            for _ in range(1 + 3 * turn):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            found[f"{stem}-changed{turn}{suffix}"] = bytes(changed)
    return found


def write_all(folder):
    """Writes all of these and files that are no images.

    Returns the paths as bytes, and the number of intact images.
    """
    whole = sound()
    for name, data in (whole | refused() | spoilt()).items():
        (folder / name).write_bytes(data)
    for name in (
        b"line\nbreak.jpg",
        b"\x1b[31mred\x07.jpg",
        b"\xff\xfe.jpg",
        b"a,\"b'.jpg",
        b"-o.jpg",
        b"x" * 250 + b".jpg",
    ):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(whole["BMP.bmp"])
    (folder / "folder.jpg").mkdir()
    os.mkfifo(folder / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listening:
        # The name of a socket may have 107 characters, which a whole path may exceed.
        os.chdir(folder)
        listening.bind("socket.jpg")
    for name, target in (
        ("loop.jpg", "loop.jpg"),
        ("gone.jpg", "none"),
        ("zero.jpg", "/dev/zero"),
        ("tty.jpg", "/dev/tty"),
    ):
        (folder / name).symlink_to(target)
    (folder / "memory.jpg").symlink_to("/proc/self/mem")
    (folder / "around").symlink_to(".")
    noise = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
    (folder / "noise.jpg").write_bytes(b"\xff\xd8\xff\xe0" + noise)
    return sorted(os.listdir(os.fsencode(folder))), len(whole) + 6
