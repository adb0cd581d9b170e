"""examples/cpp: the program gives the logits of ``open_export``, bit for bit."""

import csv
import io
import os
import shutil
import subprocess
import sys

import numpy as np
import paddle
import pytest
from conftest import ROOT
from PIL import Image
from support import exports
from support.exports import exported

from inference.backends import open_export
from inference.fidelity import crops
from inference.predictor import Predictor

pytest.importorskip("openvino", reason="the extra export isn't installed")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++"),
]
temporary = exports.temporary
weights = exports.weights


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Returns the built program, and the endings of the files that it reads."""
    file = tmp_path_factory.mktemp("cpp") / "classify"
    command = ["make", "-f", f"{ROOT}/examples/cpp/Makefile", f"PYTHON={sys.executable}"]
    done = subprocess.run([*command, f"OUTPUT={file}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    decoders = {"png": "-DHAS_PNG", "jpg": "-DHAS_JPEG"}
    return file, ["ppm", *(name for name, flag in decoders.items() if flag in done.stdout)]


def pictures(folder, endings):
    """Writes pictures of many sizes and kinds; returns their files."""
    photographs = crops(6)
    made = {f"photograph{number}": photograph for number, photograph in enumerate(photographs)}
    made["grey"] = photographs[0].convert("L")
    made["pixel"] = photographs[1].resize((1, 1))
    made["same"] = photographs[1].resize((35, 35))
    # Pillow resizes it in another order.
    made["strip"] = photographs[2].resize((2, 700))
    made["wide"] = photographs[3].resize((900, 3))
    made["large"] = photographs[4].resize((2000, 1501))
    files = []
    for ending in endings:
        for name, picture in made.items():
            files.append(folder / f"{name}.{ending}")
            picture.save(files[-1])
    if "png" in endings:
        wide = np.random.default_rng(0).integers(0, 65536, (50, 70)).astype(np.uint16)
        others = {
            "alpha": photographs[2].convert("RGBA"),
            "palette": photographs[2].convert("P"),
            "bits": photographs[2].convert("1"),
            "wide16": Image.fromarray(wide),
        }
        for name, picture in others.items():
            files.append(folder / f"{name}.png")
            picture.save(files[-1])
    if "jpg" in endings:
        files += [folder / "progressive.jpg", folder / "full_colours.jpg"]
        photographs[5].save(files[-2], progressive=True)
        photographs[5].save(files[-1], subsampling=0, quality=95)
    return files


def run(program, *words):
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    return done.returncode, done.stderr, list(csv.DictReader(io.StringIO(done.stdout)))


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("float32", []),
        ("int8_weights", ["DATA.CROP_MODE", "squash", "DATA.INTERPOLATION", "bilinear"]),
        # Smaller than the crop, and with sides that aren't equal.
        ("float32", ["DATA.IMAGE_SIZE", "[24,40]", "DATA.CROP_PCT", "0.77"]),
        ("float32", ["DATA.CROP_PCT", "1.3", "DATA.IMAGENET_STD", "[0.3,0.2,0.1]"]),
    ],
)
def test_the_programs_logits_are_pythons(program, precision, options, weights, tmp_path):
    if "int8" in precision:
        pytest.importorskip("nncf")
    file, endings = program
    folder = tmp_path / "export"
    exported((weights[0], [*weights[1], *options]), folder, "openvino", precision)
    files = pictures(tmp_path, endings)
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    status, problem, rows = run(file, folder, "-top", 5, "-threads", threads, *files)
    assert (status, problem, len(rows)) == (0, "", 5 * len(files))
    predictor = Predictor(folder)
    runner = open_export(folder)
    for place, picture in enumerate(files):
        pixels = predictor.pixels(str(picture))
        images = predictor._normalize(paddle.to_tensor(pixels[None])).numpy()
        logits = runner(images)[0]
        found = rows[5 * place : 5 * place + 5]
        assert {row["name"] for row in found} == {str(picture)}
        outputs = [int(row["output"]) for row in found]
        assert outputs == np.argsort(-logits, kind="stable").tolist()
        mine = np.array([row["logit"] for row in found], np.float32)
        assert mine.tobytes() == logits[outputs].tobytes(), picture
        [answer] = predictor([str(picture)], top=5)
        assert [row["class"] for row in found] == answer.classes
        np.testing.assert_allclose(
            [float(row["probability"]) for row in found], answer.probabilities, rtol=1e-14
        )


def test_names_with_commas_and_quotes_are_fields(program, weights, tmp_path):
    file, _ = program
    folder = tmp_path / "export"
    exported(weights, folder, "openvino")
    classes = (folder / "labels.txt").read_text().splitlines()
    classes[0] = 'a "cat", black'
    (folder / "labels.txt").write_text("\n".join(classes) + "\n")
    (tmp_path / "a,b.ppm").write_bytes(b"P6 1 1 255\n123")
    status, problem, rows = run(file, folder, "-top", 99, tmp_path / "a,b.ppm")
    assert (status, problem) == (0, "")
    assert {row["class"] for row in rows} == set(classes)
    assert {row["name"] for row in rows} == {f"{tmp_path}/a,b.ppm"}


def test_a_strip_whose_resized_side_is_beyond_32_bits_is_refused(program, weights, tmp_path):
    file, _ = program
    folder = tmp_path / "export"
    options = ["DATA.IMAGE_SIZE", "128", "DATA.CROP_PCT", "1"]
    exported((weights[0], [*weights[1], *options]), folder, "openvino")
    # 128 times its height is 128 more than 2^32.
    rows = (1 << 25) + 1
    with open(tmp_path / "strip.pgm", "wb") as stream:
        stream.write(b"P5 1 %d 255\n" % rows)
        stream.truncate(stream.tell() + rows)
    status, problem, _ = run(file, folder, tmp_path / "strip.pgm")
    assert (status, problem) == (2, "error: expected an image of 1 to 100 million pixels\n")


def test_what_the_program_cant_do_is_refused_in_a_line(program, weights, tmp_path):
    file, _ = program
    folder = tmp_path / "export"
    exported(weights, folder, "openvino")
    assert run(file, folder)[:2] == (
        2,
        "error: expected EXPORT [-top N] [-threads N] IMAGE ...\n",
    )
    (tmp_path / "text.ppm").write_bytes(b"P6 9 9 255\n1234")
    expected = f"error: {tmp_path}/text.ppm: the file ends before its pixels do\n"
    assert run(file, folder, tmp_path / "text.ppm")[:2] == (2, expected)
    # Pixels as text.
    for kind in ("P2", "P3", "P4"):
        (tmp_path / "other.ppm").write_text(f"{kind}\n4 4\n255\n" + "1 " * 100)
        expected = f"error: {tmp_path}/other.ppm: expected P5 or P6 of 8 bits, without comments\n"
        assert run(file, folder, tmp_path / "other.ppm")[:2] == (2, expected)
    for word in ("x", "0", "-1", "99999999999"):
        status, err, _ = run(file, folder, "-top", word, tmp_path / "other.ppm")
        assert (status, err) == (2, f"error: found {word}, expected a number from 1 to 999999\n")
    (tmp_path / "notes.txt").write_text("words")
    assert run(file, folder, tmp_path / "notes.txt")[:2] == (
        2,
        f"error: {tmp_path}/notes.txt: it is of no format that this program was built with\n",
    )
    manifest = (folder / "preprocess.json").read_text()
    changed = manifest.replace('"DATA.FAST_EVAL": false', '"DATA.FAST_EVAL": true')
    (folder / "preprocess.json").write_text(changed)
    assert run(file, folder, tmp_path / "notes.txt")[:2] == (
        2,
        "error: DATA.FAST_EVAL is true, expected false; use tools/predict.py\n",
    )
