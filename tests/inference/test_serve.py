"""What a server answers: a Predictor's own predictions, errors image by image, and one line where
it refuses.
"""

import base64
import io
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import paddle
import pytest
import safetensors.numpy
from PIL import Image
from support.servers import CLASSES, form, png_of, write_checkpoint

from inference import Predictor
from inference.serve.compute import _silence_libraries, answer_batch, fingerprint, load, prepare
from inference.serve.overlay import occlusion

JPEG = {"Content-Type": "image/jpeg"}
OCTETS = "application/octet-stream"
JSON = {"Content-Type": "application/json"}
FORM = form(("a", "one.jpg", b"1"), ("a", "two.jpg", b"2"))
KIND = FORM[1]["Content-Type"]


@pytest.mark.smoke
def test_answers_are_a_predictors_to_the_bit(server, checkpoint, photographs):
    predictor = Predictor(checkpoint)
    for photograph in photographs:
        [expected] = predictor([photograph], top=2)
        asked = {
            "raw": (photograph, JPEG),
            "upload": form(("image", "a photograph.jpg", photograph)),
            "json": (json.dumps({"images": [base64.b64encode(photograph).decode()]}), JSON),
        }
        for way, (body, headers) in asked.items():
            status, answer, _ = server.ask("POST", "/predict?top=2", body, headers)
            assert status == 200
            name = "a photograph.jpg" if way == "upload" else "image 0"
            said = {
                "outputs": expected.outputs,
                "classes": expected.classes,
                "probabilities": expected.probabilities,
            }
            model = {"model": predictor.config.MODEL.NAME, "task": "classification"}
            assert answer == model | {"predictions": [{"name": name, **said}]}


def test_images_of_a_request_are_answered_in_their_order_and_a_broken_one_by_itself(
    server, checkpoint, photographs
):
    files = [
        ("a", "1.jpg", photographs[0]),
        ("a", "no.txt", b"text"),
        ("b", "cut.jpg", photographs[0][:4]),
    ]
    files.append(("a", "../../2.png", photographs[1]))
    status, answer, _ = server.ask("POST", "/predict", *form(*files))
    assert status == 200
    found = answer["predictions"]
    assert [one["name"] for one in found] == ["1.jpg", "no.txt", "cut.jpg", "../../2.png"]
    assert found[1]["error"] == "its format is unknown; this server takes GIF, JPEG, PNG, WebP"
    assert found[2] == {"name": "cut.jpg", "error": "it is truncated"}
    expected = Predictor(checkpoint)([photographs[0], photographs[1]])
    for one, other in zip([found[0], found[3]], expected, strict=True):
        assert one["outputs"] == other.outputs
        np.testing.assert_allclose(one["probabilities"], other.probabilities, rtol=1e-5)


def test_where_no_image_can_be_read_the_status_says_so(server, photographs):
    status, answer, _ = server.ask("POST", "/predict", b"%PDF-1.4", JPEG)
    assert status == 422
    assert answer["error"].startswith("image 0: its format is unknown")
    status, answer, _ = server.ask("POST", "/predict", *form(("a", "x", b"1"), ("a", "y", b"2")))
    assert status == 422
    assert answer["error"].startswith("none of the 2 images can be read; x: its format is unknown")
    assert [one["name"] for one in answer["predictions"]] == ["x", "y"]
    status, answer, _ = server.ask("POST", "/predict", png_of(10_000, 10_000), JPEG)
    assert status == 413
    assert answer["error"] == "image 0: it has 10000 x 10000 pixels, DATA.MAX_PIXELS is 50000000"
    status, answer, _ = server.ask("POST", "/attention", b"GIF89a", JPEG)
    assert (status, answer) == (422, {"error": "image 0: it is truncated or damaged"})


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "line"),
    [
        ("/predict?top=0", b"x", JPEG, 422, "top: Input should be greater than or equal to 1"),
        ("/predict?threshold=nan", b"x", JPEG, 422, "threshold: Input should be"),
        ("/predict", b"", JPEG, 400, "the request has no image"),
        (
            "/predict",
            b"x",
            {"Content-Type": "text/plain"},
            415,
            "the Content-Type is text/plain, expected multipart/",
        ),
        (
            "/predict",
            b"x",
            {},
            415,
            "the Content-Type is missing, expected multipart/form-data, application/json or",
        ),
        (
            "/predict",
            b"x",
            JPEG | {"Content-Encoding": "gzip"},
            415,
            "the body is compressed (Content-Encoding)",
        ),
        ("/predict", b"{", JSON, 400, "invalid JSON: Invalid JSON: EOF while parsing"),
        ("/predict", b"{}", JSON, 400, "invalid JSON: images: Field required"),
        (
            "/predict",
            b'{"images": []}',
            JSON,
            400,
            "invalid JSON: images: List should have at least 1 item",
        ),
        ("/predict", b'{"images": [1]}', JSON, 400, "images.0: Input should be a valid string"),
        (
            "/predict",
            b'{"images": ["a"], "top": 1}',
            JSON,
            400,
            "top: Extra inputs are not permitted",
        ),
        ("/predict", b'{"images": ["\xff"]}', JSON, 400, "invalid JSON"),
        ("/predict", b'{"images": ["a-b"]}', JSON, 400, "image 0 isn't in base64"),
        (
            "/predict",
            b'{"images": [%s"YQ=="]}' % (b'"YQ==",' * 8),
            JSON,
            413,
            "9 images, at most 8 are allowed",
        ),
        ("/predict", b"[" * 1000, JSON, 413, "the JSON has more than 8 images"),
        ("/predict", *form(*[("a", "b", b"c")] * 9), 413, "9 images, at most 8 are allowed"),
        ("/predict", *form(*[("a", "b", b"c")] * 20), 413, "more than 8 images"),
        ("/predict", *form(), 400, "the request has no image"),
        (
            "/predict",
            b"x",
            {"Content-Type": "multipart/form-data"},
            400,
            "the form can't be read (Missing boundary",
        ),
        (
            "/predict",
            FORM[0].removesuffix(b"--\r\n"),
            FORM[1],
            400,
            "the form is truncated",
        ),
        (
            "/predict",
            FORM[0][: len(FORM[0]) // 2],
            FORM[1],
            400,
            "the form is truncated",
        ),
        (
            "/predict",
            FORM[0].replace(b"filename=", b"FileName*=UTF-8''"),
            FORM[1],
            400,
            "filename* but no filename",
        ),
        (
            "/predict",
            FORM[0],
            {"Content-Type": f"{KIND}; charset=punycode"},
            400,
            "charset is punycode, expected utf-8",
        ),
        ("/predict/", b"x", JPEG, 404, "Not Found"),
        ("/attention", *form(*[("a", "b", b"c")] * 2), 413, "2 images, at most 1 are allowed"),
    ],
)
def test_what_isnt_taken_is_refused_in_one_line(server, path, body, headers, status, line):
    found, answer, _ = server.ask("POST", path, body, headers)
    assert found == status
    assert list(answer) == ["error"]
    assert line in answer["error"]
    assert len(answer["error"]) <= 500


def test_too_much_is_refused_before_it_is_read(server):
    status, answer, headers = server.ask("POST", "/predict", bytes(5 << 20), JPEG)
    assert (status, headers["connection"]) == (413, "close")
    assert answer["error"] == "the request has 5242880 bytes, at most 4194304 are allowed"
    chunks = (bytes(1 << 16) for _ in range(100))
    # chunked: its length isn't told
    status, answer, _ = server.ask("POST", "/predict", chunks, JPEG)
    assert (status, answer["error"]) == (
        413,
        "the request has more bytes than that, at most 4194304 are allowed",
    )


@pytest.mark.smoke
def test_a_map_is_a_picture_of_what_the_model_sees(server, photographs):
    status, answer, headers = server.ask("POST", "/attention", photographs[0], JPEG)
    assert (status, headers["content-type"]) == (200, "image/png")
    width, height = Image.open(io.BytesIO(answer)).size
    assert width == height >= 224


def test_of_an_exported_model_a_map_shows_what_it_depends_on(checkpoint, photographs):
    predictor = load(told(checkpoint))
    predictor.probabilities = lambda logits: np.stack([logits, 1 - logits], 1)
    predictor.logits = lambda pixels: 0.5 + pixels[:, 0, 0, 0] / 1000.0  # it sees one corner alone
    image = Image.fromarray(np.full((64, 64, 3), 255, np.uint8))
    file = io.BytesIO()
    image.save(file, "PNG")
    pixels = np.asarray(Image.open(io.BytesIO(occlusion(predictor, file.getvalue()))))
    assert pixels.shape == (448, 448, 3)
    assert pixels[10, 10, 0] > pixels[10, 10, 1] + 100  # red there
    assert (pixels[200:, 200:] == 255).all()


def test_paths_that_tell(server):
    assert server.ask("GET", "/health")[:2] == (200, {"status": "alive"})
    assert server.ask("GET", "/ready")[:2] == (200, {"status": "ready", "workers": 1, "waiting": 0})
    status, described, _ = server.ask("GET", "/openapi.json")
    assert {"/predict", "/attention", "/health", "/ready", "/metrics"} == described["paths"].keys()
    takes = described["paths"]["/predict"]["post"]["requestBody"]["content"].keys()
    assert takes == {"multipart/form-data", "application/json", "application/octet-stream"}
    status, page, _ = server.ask("GET", "/docs")
    assert status == 200
    assert b"POST /predict" in page
    assert (
        b"<td>?top=</td><td>number of classes per image; default: 5, multi-label: all</td><td>1 to 100000</td>"
        in page
    )
    assert (
        b"<td>?threshold=</td><td>multi-label: lowest probability; default: the trained threshold</td><td>0 to 1</td>"
        in page
    )
    assert b"<td>application/json</td><td>images</td>" in page
    assert b"None" not in page
    assert b"//" not in page.replace(b"http://127.0.0.1", b"")  # nothing from elsewhere
    assert server.ask("GET", "/no")[:2] == (404, {"error": "Not Found"})
    assert server.ask("BREW", "/predict")[:2] == (405, {"error": "Method Not Allowed"})


def test_generators_of_clients_read_the_description(server):
    """openapi-python-client 0.29.1 was run on it: these are what it needs. A path with several
    kinds of bodies needs another parameter, or its module can't be imported.
    """
    described = server.ask("GET", "/openapi.json")[1]
    schemas = described["components"]["schemas"]
    said = {path: next(iter(methods.values())) for path, methods in described["paths"].items()}
    assert {path: one["operationId"] for path, one in said.items()} == {
        path: path[1:] for path in said
    }
    known = {"application/json", "application/octet-stream", "text/plain"}
    for one in said.values():
        assert known & one["responses"]["200"]["content"].keys()
        bodies = one.get("requestBody", {}).get("content", {})
        assert bodies.keys() <= known | {"multipart/form-data"}
        assert len(bodies) < 2 or one["parameters"]
        for body in bodies.values():
            form = body["schema"]
            assert form.get("format") == "binary" or form["$ref"].rpartition("/")[2] in schemas
        answers = [answer.get("content", {}) for answer in one["responses"].values()]
        assert all(media.get("schema") for answer in answers for media in answer.values())
    assert schemas["Uploads"]["required"] == ["image"]
    assert described["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    # this server has no token: test_serve_life.py
    assert not any("security" in one for one in said.values())


def test_a_map_is_also_plain_bytes(server, photographs):
    for accept, kind in (("image/png", "image/png"), ("*/*", "image/png"), (OCTETS, OCTETS)):
        answer = server.ask(
            "POST", "/attention", photographs[0], {"Content-Type": OCTETS, "Accept": accept}
        )
        assert (answer[0], answer[2]["content-type"], answer[1][:4]) == (200, kind, b"\x89PNG")


def test_metrics_and_log_tell_of_each_request(server, photographs):
    before = {
        name: server.metric(name)
        for name in ("paddle_vit_images_total", "paddle_vit_batch_images_sum")
    }
    server.ask("POST", "/predict", *form(("a", "1", photographs[0]), ("a", "2", b"no")))
    assert server.metric("paddle_vit_images_total") == before["paddle_vit_images_total"] + 2
    assert server.metric("paddle_vit_batch_images_sum") == before["paddle_vit_batch_images_sum"] + 1
    assert server.metric("paddle_vit_workers_ready") == 1
    text = server.ask("GET", "/metrics")[1].decode()
    assert 'paddle_vit_requests_total{path="/predict",status="200"}' in text
    server.ask("GET", "/a%0Ab%1b[31m")
    server.said(r"127\.0\.0\.1 GET /a\\nb\\x1b\[31m 404 ")
    assert server.said(r"127\.0\.0\.1 POST /predict 200 [\d.]+ ms 2 images")


def test_of_a_webp_half_the_pixels_are_read(checkpoint):
    predictor = load(told(checkpoint, options=["DATA.MAX_PIXELS", "20000"]))
    line = "it is a WebP of 101 x 100 pixels, at most half of DATA.MAX_PIXELS 20000 are allowed"
    for width, kind, expected in ((101, "WEBP", line), (101, "PNG", None), (100, "WEBP", None)):
        file = io.BytesIO()
        Image.new("RGB", (width, 100)).save(file, kind)
        found = prepare(predictor, file.getvalue())
        assert found == expected if expected else found.dtype == np.uint8


def test_a_fingerprint_tells_weights_classes_and_preparation(checkpoint, tmp_path):
    def of(file=checkpoint, **more):
        return fingerprint(load(told(file, **more)), str(file))

    other = write_checkpoint(tmp_path / "other.safetensors")
    assert of() == of() == of(other)
    names = tmp_path / "names"
    names.write_text("one\ntwo\nthree\n")
    tensors = safetensors.numpy.load_file(other)
    tensors["head.bias"] = tensors["head.bias"] + np.float32(1e-6)
    sums = {of(), of(classes=str(names)), of(options=["DATA.CROP_PCT", "0.5"])}
    with safetensors.safe_open(other, "numpy") as file:
        safetensors.numpy.save_file(tensors, other, file.metadata())
    assert len(sums | {of(other)}) == 4


def told(checkpoint, **more):
    return {
        "path": str(checkpoint),
        "cfg": None,
        "options": [],
        "classes": None,
        "batch_size": 4,
        "workers": 1,
    } | more


def test_outputs_are_named_by_a_file_and_workers_take_gpus_in_turn(
    checkpoint, tmp_path, photographs, monkeypatch
):
    names = tmp_path / "names"
    chosen = []
    names.write_text("one\ntwo\nthree\n")
    monkeypatch.setattr("inference.serve.compute.num_gpus", lambda: 2)
    monkeypatch.setattr(paddle, "set_device", chosen.append)
    predictors = [load(told(checkpoint, classes=str(names), place=place)) for place in range(3)]
    assert chosen == ["gpu:0", "gpu:1", "gpu:0"]
    asked = {"kind": "predict", "top": 3, "threshold": 0}
    pixels = prepare(predictors[0], photographs[0])
    [answer], _ = answer_batch(predictors[0], [asked], [pixels], [])
    assert answer["classes"] == [("one", "two", "three")[output] for output in answer["outputs"]]


def test_of_a_multilabel_model_classes_above_the_threshold_are_told(tmp_path, photographs):
    checkpoint = write_checkpoint(tmp_path / "many.safetensors", "multilabel")
    predictor = load(told(checkpoint))
    pixels = prepare(predictor, photographs[0])
    shares = predictor.probabilities(predictor.logits(pixels[None]))[0]
    order = np.argsort(-shares)
    asked = [{"kind": "predict", "top": 5, "threshold": share} for share in (shares[order[1]], 1.0)]
    answers, pictures = answer_batch(predictor, asked, [pixels, pixels], [])
    assert [answer["classes"] for answer in answers] == [[CLASSES[order[0]], CLASSES[order[1]]], []]
    assert pictures == [b"", b""]
    predictor.thresholds = [
        float(share) + (-1e-9 if output == order[1] else 1e-9)
        for output, share in enumerate(shares)
    ]
    [answer], _ = answer_batch(
        predictor, [{"kind": "predict", "top": None, "threshold": None}], [pixels], []
    )
    assert answer["classes"] == [CLASSES[order[1]]]  # each class by its own


def test_a_models_own_failure_isnt_an_answer(checkpoint, photographs, monkeypatch, capfd):
    predictor = load(told(checkpoint))
    asked = [{"kind": "predict", "top": 5, "threshold": 0.5}] * 2
    pixels = prepare(predictor, photographs[0])
    monkeypatch.setattr(
        predictor, "logits", lambda pixels: np.full((len(pixels), 3), np.nan, np.float32)
    )
    answers, _ = answer_batch(predictor, asked, ["it is no image", pixels], [])
    assert answers == [
        {"error": "it is no image"},
        {"failed": "the model's outputs for it aren't finite"},
    ]
    monkeypatch.setattr(predictor, "logits", lambda pixels: 1 / 0)
    answers, _ = answer_batch(predictor, asked, ["it is no image", pixels], [])
    assert answers == [{"error": "it is no image"}, {"failed": "the model failed"}]
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_log_has_our_own_lines_and_none_of_a_decoders(tmp_path):
    with open(tmp_path / "log", "wb") as log:
        if (child := os.fork()) == 0:
            os.dup2(log.fileno(), 2)
            _silence_libraries()
            os.write(2, b"a line of libtiff\n" * 6000)
            warnings.warn("a warning of Pillow", stacklevel=1)
            print("our own", file=sys.stderr)
            os._exit(0)
        os.waitpid(child, 0)
    assert (tmp_path / "log").read_text() == "our own\n"


def test_the_http_process_needs_no_paddle(server):
    maps = (f"/proc/{server.process.pid}/maps", f"/proc/{server.workers()[0]}/maps")
    assert ["libpaddle" in Path(name).read_text() for name in maps] == [False, True]
