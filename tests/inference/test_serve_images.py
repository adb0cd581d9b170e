"""Images of every kind, and what only looks like some, are sent to a server: each is answered or
refused in a line.
"""

import io
import random
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images
from support.servers import form, serving

RARE = ("BMP", "PPM", "TIFF")
FORMATS = ["-formats", ",".join(map(str.lower, RARE)), "npy"]  # names between commas, or words


@pytest.fixture(scope="module")
def open_server(checkpoint):
    """A server that takes all formats."""
    with serving(checkpoint, "-max_images=8", *FORMATS, folder=checkpoint.parent) as server:
        yield server.ready()


def encoded(image, kind, **how):
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def kinds():
    photograph = Image.fromarray(load_sample_images().images[0][::4, ::4])
    grey = photograph.convert("L")
    wide = np.asarray(photograph.convert("L")).astype(np.uint16) * 257
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "progressive": encoded(photograph, "JPEG", progressive=True),
        "CMYK": encoded(photograph.convert("CMYK"), "JPEG"),
        "turned": encoded(photograph, "JPEG", exif=turned),
        "grey": encoded(grey, "PNG"),
        "16 bits": encoded(Image.fromarray(wide), "PNG"),
        "palette": encoded(photograph.convert("P"), "PNG"),
        "alpha": encoded(photograph.convert("RGBA"), "PNG"),
        "animated": encoded(
            photograph, "GIF", save_all=True, append_images=[grey.convert("RGB")] * 3
        ),
        "WebP": encoded(photograph, "WEBP"),
        "TIFF": encoded(photograph, "TIFF", compression="tiff_lzw"),
        "BMP": encoded(photograph, "BMP"),
        "PPM": encoded(photograph, "PPM"),
    }


NONE = {
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    "HTML": b"<script>alert(1)</script>",
    "PDF": b"%PDF-1.7\n" + bytes(100),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file",
    "zip": b"PK\3\4" + bytes(100),
    "path": b"/etc/passwd",
    "zeros": bytes(100_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/predict", "/attention"])
def test_what_a_large_image_took_goes_back(checkpoint, tmp_path, path):
    with serving(checkpoint, "-formats=tiff", "-timeout=120", folder=tmp_path) as server:
        [worker] = server.ready().workers()

        def memory():
            text = Path(f"/proc/{worker}/status").read_text()
            # MiB
            return [
                int(re.search(rf"{name}:\s*(\d+)", text)[1]) >> 10 for name in ("VmRSS", "VmHWM")
            ]

        before = memory()[0]
        for kind, side, how in (
            ("PNG", 7000, {}),
            ("TIFF", 7000, {"compression": "tiff_lzw"}),
            ("WEBP", 5000, {}),
        ):
            image = encoded(Image.new("RGBA", (side, side)), kind, **how)
            assert server.ask("POST", path, image, {"Content-Type": "image/png"}, 60)[0] == 200
            now, peak = memory()
            assert (now - before < 100, peak - before < 550) == (True, True), (
                kind,
                before,
                now,
                peak,
            )


def test_kinds_of_images_are_read_and_what_is_none_is_refused(open_server):
    server = open_server
    for name, data in kinds().items():
        status, answer, _ = server.ask("POST", "/predict", *form(("image", name, data)))
        assert (status, answer["predictions"][0]["name"]) == (200, name), answer
        assert sum(answer["predictions"][0]["probabilities"]) == pytest.approx(1)
    for name, data in NONE.items():
        status, answer, _ = server.ask("POST", "/predict", *form(("image", name, data)))
        found = "its format is unknown; this server takes GIF, JPEG, PNG, WebP, BMP, PPM, TIFF, NPY"
        assert (status, answer["error"].removeprefix(f"{name}: ")) == (422, found)


def test_rare_formats_are_refused_before_a_worker_sees_them(server, photographs):
    before = server.metric("paddle_vit_batch_images_sum")
    files = kinds() | {"NPY": b"\x93NUMPY" + bytes(100)}
    for kind in (*RARE, "NPY"):
        line = f"its format is {kind}; this server takes GIF, JPEG, PNG, WebP (to take it: -formats {kind.lower()})"
        status, answer, _ = server.ask(
            "POST", "/predict", files[kind], {"Content-Type": "image/jpeg"}
        )
        assert (status, answer["error"]) == (422, f"image 0: {line}")
        assert answer["predictions"] == [{"name": "image 0", "error": line}]
        status, answer, _ = server.ask(
            "POST", "/attention", files[kind], {"Content-Type": "image/jpeg"}
        )
        assert (status, answer) == (422, {"error": f"image 0: {line}"})
    assert server.metric("paddle_vit_batch_images_sum") == before
    uploads = [
        ("a", "1", files["TIFF"]),
        ("a", "2", photographs[0]),
        ("a", "3", files["BMP"]),
        ("a", "4", b"no"),
    ]
    status, answer, _ = server.ask("POST", "/predict", *form(*uploads))
    found = [one.get("error", "").split(";")[0] for one in answer["predictions"]]
    assert (status, found) == (
        200,
        ["its format is TIFF", "", "its format is BMP", "its format is unknown"],
    )
    assert server.metric("paddle_vit_batch_images_sum") == before + 1
    assert b"<span>GIF, JPEG, PNG, WebP</span>" in server.ask("GET", "/")[1]


def test_damaged_images_end_no_worker(open_server):
    server = open_server
    rng = random.Random(0)
    before = server.memory()
    outcomes = {"read": 0, "refused": 0}
    for name, data in kinds().items():
        damaged = []
        for _ in range(16):
            damaged.append(data[: rng.randrange(len(data))])
            spoilt = bytearray(data)
            for _ in range(rng.choice((1, 10, 100))):
                spoilt[rng.randrange(min(len(data), rng.choice((50, 1000, len(data)))))] = (
                    rng.randrange(256)
                )
            damaged.append(bytes(spoilt))
        for start in range(0, len(damaged), 8):
            files = [("image", name, one) for one in damaged[start : start + 8]]
            status, answer, _ = server.ask("POST", "/predict", *form(*files), timeout=60)
            assert status in (200, 413, 422), answer
            for one in answer["predictions"]:
                outcomes["refused" if "error" in one else "read"] += 1
                assert len(one.get("error", "")) <= 500
                assert "\n" not in one.get("error", "")
    print(f"\ndamaged images: {outcomes}")
    assert sum(outcomes.values()) == 12 * 32
    assert min(outcomes.values()) > 20
    assert server.metric("paddle_vit_worker_restarts_total") == 0
    assert "Traceback" not in server.text("err")
    assert server.memory() - before < 1 << 30
