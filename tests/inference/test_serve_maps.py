"""A server of a model with a class for each pixel: its areas and masks are a Predictor's to the bit."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.browser import CHROMIUM, browsing, pictured
from support.mask_models import CLASSES, evaluation, random_model, save_model, write_data
from support.servers import form, png_of, serving

from inference import Predictor
from inference.exporting import write_export
from inference.map_pictures import Folder
from inference.maps import areas
from inference.serve.compute import answer_batch, prepare
from loading.mask_tables import class_colors

JPEG = {"Content-Type": "image/jpeg"}
OCTETS = "application/octet-stream"
TURNED = ["DATA.EXIF_ORIENTATION", "True"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("served_maps"))


@pytest.fixture(scope="module")
def weights(data):
    return save_model(data, data / "model.safetensors", *TURNED)


@pytest.fixture(scope="module")
def segmenter(weights):
    with serving(weights, folder=weights.parent) as server:
        yield server.ready()


@pytest.fixture(scope="module")
def images(data):
    """Files of several sizes, the last one a photograph that its EXIF turns."""
    files = [(data / "images" / "val" / f"{index}.png").read_bytes() for index in range(3)]
    turned = Image.Exif()
    turned[0x0112] = 6
    file = io.BytesIO()
    Image.open(data / "images" / "val" / "3.png").convert("RGB").save(file, "JPEG", exif=turned)
    return [*files, file.getvalue()]


def answer_of(found, classes=CLASSES):
    height, width = found.outputs.shape
    outputs, names, percents = areas(found, classes)[1:]
    sides = {"width": width, "height": height}
    return sides | {"outputs": outputs, "classes": names, "percents": percents}


def check_answers(server, predictor, images, folder):
    """Compares /predict and /mask with the Predictor and with the files of predict.py."""
    expected = predictor.maps(images)
    # The answers differ from image to image, so that the test isn't blind.
    assert len({found.outputs.tobytes() for found in expected}) == len(images)
    assert len({found.outputs.shape for found in expected}) > 1
    uploads = [("image", str(place), data) for place, data in enumerate(images)]
    status, answer, headers = server.ask("POST", "/predict", *form(*uploads))
    assert (status, headers["x-exif-orientation"]) == (200, "true")
    predictions = [{"name": str(n), **answer_of(one)} for n, one in enumerate(expected)]
    assert answer == {"model": "small", "task": "segmentation", "predictions": predictions}
    paths = []
    for place, data in enumerate(images):
        paths.append(str(folder / f"{place}.img"))
        Path(paths[-1]).write_bytes(data)
    writer = Folder("masks", predictor.config, paths, folder / "m", folder / "m", CLASSES)
    for data, found in zip(images, expected, strict=True):
        writer.write(found._replace(name=paths[writer.place]))
        status, answer, headers = server.ask("POST", "/mask", data, JPEG)
        assert (status, headers["content-type"]) == (200, "image/png")
        assert answer == (folder / "m" / f"{writer.place - 1}.png").read_bytes()
        mask = Image.open(io.BytesIO(answer))
        assert mask.mode == "P"
        assert (np.asarray(mask) == found.outputs).all()


@pytest.mark.smoke
def test_areas_and_masks_are_those_of_predictions(segmenter, weights, images, tmp_path):
    check_answers(segmenter, Predictor(weights), images, tmp_path)
    plain = Image.open(io.BytesIO(images[3]))
    mask = Image.open(io.BytesIO(segmenter.ask("POST", "/mask", images[3], JPEG)[1]))
    assert mask.size == plain.size[::-1] != plain.size
    headers = JPEG | {"Accept": OCTETS}
    assert segmenter.ask("POST", "/mask", images[0], headers)[2]["content-type"] == OCTETS


@pytest.mark.long
def test_an_export_is_served(data, images, tmp_path):
    config, val = evaluation(data, *TURNED, "HEAD.STRIDE", "20")
    folder = tmp_path / "export"
    write_export(config, random_model(config), folder, val.classes, "paddle", task=config.TASK)
    with serving(folder, folder=tmp_path) as server:
        check_answers(server.ready(), Predictor(folder), images, tmp_path)
        assert server.ask("POST", "/attention", images[0], JPEG)[0] == 404


def test_an_image_that_cant_be_read_is_an_entry_of_its_own(segmenter, weights, images):
    uploads = [("a", "0", images[0]), ("a", "cut", images[0][:60]), ("a", "1", images[1])]
    status, answer, _ = segmenter.ask("POST", "/predict?top=1", *form(*uploads))
    expected = Predictor(weights).maps(images[:2])
    first, cut, second = answer["predictions"]
    assert status == 200
    assert cut == {
        "name": "cut",
        "error": "can't be read as an image (OSError: image file is truncated)",
    }
    for found, one in ((first, expected[0]), (second, expected[1])):
        assert found["outputs"] == areas(one, CLASSES).outputs[:1]
        assert len(found["classes"]) == len(found["percents"]) == 1
    status, answer, _ = segmenter.ask("POST", "/mask", png_of(10_000, 10_000), JPEG)
    line = "image 0: it has 10000 x 10000 pixels, DATA.MAX_PIXELS is 50000000"
    assert (status, answer) == (413, {"error": line})
    status, answer, _ = segmenter.ask("POST", "/mask", b"text", JPEG)
    assert status == 422
    assert answer["error"].startswith("image 0: its format is unknown")


def test_each_kind_of_model_refuses_the_others_answers(segmenter, server, images):
    status, answer, _ = segmenter.ask("POST", "/attention", images[0], JPEG)
    line = "small classifies pixels and can't explain its answer by a map; use /mask"
    assert (status, answer["error"].startswith(line)) == (404, True)
    status, answer, _ = server.ask("POST", "/mask", images[0], JPEG)
    assert status == 404
    assert answer["error"].endswith("not pixels; use /predict")
    before = server.metric("paddle_vit_batch_images_sum")
    server.ask("POST", "/mask", images[0], JPEG)
    assert server.metric("paddle_vit_batch_images_sum") == before


def test_the_description_is_of_what_the_model_answers(segmenter, server):
    described = segmenter.ask("GET", "/openapi.json")[1]
    assert described["paths"].keys() == {"/predict", "/mask", "/health", "/ready", "/metrics"}
    properties = described["components"]["schemas"]["Predicted"]["properties"].keys()
    assert properties == {
        "name", "width", "height", "outputs", "classes", "percents", "error",
    }  # fmt: skip
    [top] = described["paths"]["/predict"]["post"]["parameters"]
    assert top["name"] == "top"
    shown = segmenter.ask("GET", "/docs")[1].decode()
    assert "/mask" in shown
    assert "/attention" not in shown
    assert "a mask with the class of each pixel" in shown
    properties = server.ask("GET", "/openapi.json")[1]["components"]["schemas"]["Predicted"]
    assert {"width", "percents"}.isdisjoint(properties["properties"])


def test_an_image_that_takes_too_much_memory_gets_a_line(weights, images):
    predictor = Predictor(weights)
    wanted = [{"kind": "mask", "top": 1, "threshold": 0.0}] * 2
    prepared = [prepare(predictor, data) for data in images[:2]]
    height, width = prepared[0][1]
    forward = predictor._forward

    def short(pixels):
        if pixels.shape[2:] == list(prepared[0][0].shape[:2]):
            raise MemoryError("9 GB were requested")
        return forward(pixels)

    predictor._forward = short
    answers, pictures = answer_batch(predictor, wanted, prepared, [])
    line = (
        f"out of memory: 9 GB were requested; it has {width} x {height} pixels: set -o HEAD.STRIDE"
    )
    assert answers[0]["error"].startswith(line)
    assert pictures[0] == b""
    assert answers[1]["percents"]
    assert pictures[1].startswith(b"\x89PNG")
    predictor._forward = lambda pixels: forward(pixels) * np.nan
    answers, _ = answer_batch(predictor, wanted, prepared, [])
    assert answers == [{"failed": "the weights yield non-finite logits for it"}] * 2


# ------------------------------------------------------------------ the page

OF_MASK = "document.getElementById('mask')"
COLOURS = (
    "[...document.querySelectorAll('.square')].map("
    "(one) => one.style.background.match(/\\d+/g).slice(0, 3).map(Number))"
)


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_lays_the_classes_over_the_picture(
    segmenter, browser, weights, images, tmp_path, width
):
    file = tmp_path / "<b>turned.jpg"
    file.write_bytes(images[3])
    browser.said.clear()
    browser.open(f"http://127.0.0.1:{segmenter.port}/", width)
    browser.choose("#file", file)
    browser.wait(f"!{OF_MASK}.hidden && {OF_MASK}.naturalWidth")
    [found] = Predictor(weights).maps([images[3]])
    sides = f"[{OF_MASK}.naturalHeight, {OF_MASK}.naturalWidth]"
    assert browser.value(sides) == list(found.outputs.shape)
    expected = areas(found, CLASSES)
    rows = "[...document.querySelectorAll('#classes .row')].map((one) => one.innerText)"
    for text, name, percent in zip(
        browser.value(rows), expected.classes, expected.percents, strict=True
    ):
        assert text.split("\n") == [name, f"{percent:.1f} %"]
    assert browser.value(COLOURS) == class_colors(4)[expected.outputs].tolist()
    assert browser.value("document.getElementById('said').textContent") == (
        f"Largest: {expected.classes[0]}"
    )
    # Both pictures are in the same place, and turned alike.
    place = "JSON.stringify(document.getElementById('{}').getBoundingClientRect())"
    assert browser.value(place.format("mask")) == browser.value(place.format("shown"))
    assert browser.value("document.getElementById('turn').hidden")
    assert browser.value(f"getComputedStyle({OF_MASK}).opacity") == "0.5"
    reached = []
    for _ in range(3):
        browser.press("Tab", 9)
        reached.append(browser.value("document.activeElement.id || document.activeElement.tagName"))
    assert reached == ["file", "opacity", "A"]
    browser.value("document.getElementById('opacity').focus()")
    browser.press("End", 35)
    assert browser.value(f"getComputedStyle({OF_MASK}).opacity") == "1"
    wider = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not browser.value(wider)
    assert browser.said == []
    pictured(browser, f"mask-{width}")
