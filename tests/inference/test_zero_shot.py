"""Classifiers that a text tower makes: their logits, the command, and every use of them."""

import json
import shutil
import subprocess
import urllib.parse

import numpy as np
import paddle
import pytest
import warm
from PIL import Image
from support.programs import ROOT
from support.servers import Served

from errors import InputError
from inference import Predictor
from inference.backends import RUNNERS, STEMS
from inference.exporting import write_export
from inference.text import prompts
from inference.text.encoder import TextEncoder
from inference.text.exporting import write_text_export
from inference.text.names import check_classes
from inference.text.open_classes import OpenClasses
from inference.text.prompts import prompts_of, read_templates, text_classifier
from models import text_arguments
from tools.average_checkpoints import average
from training.checkpoint import description_of
from weights.formats import open_weights

GOLDEN = ROOT / "tests" / "golden" / "text"
TEXTS = json.loads((GOLDEN / "strings.json").read_text(encoding="utf-8"))
# Places of texts that may be names of classes.
PLACES = [place for place, text in enumerate(TEXTS[:64]) if text.strip() and text.isprintable()]
CLASSES = ["a cat", "red_flower", "\u4e2d\u6587"]


def command(tool, place, *words):
    """(exit status, standard output, standard error)."""
    done = subprocess.run(
        [warm.python(), str(ROOT / tool), *map(str, words)],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def answers():
    return np.load(GOLDEN / "answers.npz")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of pictures in two classes, their names in classes.txt, and a classifier of them."""
    root = tmp_path_factory.mktemp("place")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a cat", "red_flower"):
            folder = root / "data" / split / name
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = rng.integers(0, 256, (40, 48, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
    (root / "templates.txt").write_text("a photo of a {}.\n\n{} on a table\n")
    words = ["-data_path", "data", "-templates", "templates.txt", "-output", "made"]
    status, out, err = command("tools/zero_shot.py", root, GOLDEN / "clip", *words)
    assert (status, err) == (0, "")
    assert out == "made: clip, 2 classes of 2 sentences each\n"
    return root


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["clip", "siglip", "siglip2", "openclip"])
def test_logits_are_the_references(name, answers):
    names = [TEXTS[number] for number in PLACES]
    predictor = Predictor(GOLDEN / name, classes=names, templates=["{}"])
    images = paddle.to_tensor(answers["image"])
    expected = answers[f"{name}/logits"][:, PLACES]
    # Underscores of names become spaces.
    same = [column for column, text in enumerate(names) if " ".join(text.split()) == text]
    same = [column for column in same if "_" not in names[column]]
    assert len(same) > 40
    found = predictor._forward(images).numpy()
    np.testing.assert_allclose(found[:, same], expected[:, same], atol=1e-5)
    assert np.ptp(expected, axis=1).min() > 0.05


def test_logits_of_big_visions_file_are_its_programs(answers, monkeypatch):
    monkeypatch.setitem(text_arguments._HEADS, 32, 2)
    sizes = {
        "DATA.IMAGE_SIZE": 32, "MODEL.PATCH_SIZE": 8, "MODEL.EMBED_DIM": 48, "MODEL.DEPTH": 2,
        "MODEL.NUM_HEADS": 3, "MODEL.MLP_RATIO": 2.0,
    }  # fmt: skip
    options = [str(word) for pair in sizes.items() for word in pair]
    places = [TEXTS.index(text) for text in ("a photo of a cat.", "caf\u00e9", "\u4e2d\u6587")]
    predictor = Predictor(
        GOLDEN / "big_vision" / "siglip.npz",
        "vit_base_patch16_siglip_224",
        options,
        [TEXTS[place] for place in places],
        templates=["{}"],
    )
    found = predictor._forward(paddle.to_tensor(answers["image"])).numpy()
    # The values, and the approximation of GELU, are those of transformers' SigLIP.
    np.testing.assert_allclose(found, answers["siglip/logits"][:, places], atol=1e-5)
    # Without classes, too: a server and a search compare the image tower's own outputs.
    alone = Predictor(
        predictor.path, "vit_base_patch16_siglip_224", [*options, "MODEL.NUM_CLASSES", "0"]
    )
    embeddings = alone._forward(paddle.to_tensor(answers["image"])).numpy()
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    np.testing.assert_allclose(embeddings, answers["siglip/images"], atol=2e-6)


def test_openclips_siglip_is_timms_model():
    description = description_of(GOLDEN / "openclip_siglip")
    assert description.model == "vit_base_patch16_siglip_224"
    assert description.values["MODEL.GLOBAL_POOL"] == "map"
    assert description.values["MODEL.NUM_CLASSES"] == 0
    assert description.values["DATA.IMAGE_SIZE"] == 32
    assert description.values["DATA.CROP_MODE"] == "squash"
    assert description.values["DATA.IMAGENET_MEAN"] == [0.5] * 3


def test_a_class_is_the_mean_of_its_sentences():
    encoder = TextEncoder(GOLDEN / "siglip")
    templates = ["a {}", "the {} here", "{}"]
    weights, biases, *_ = text_classifier(encoder, CLASSES, templates)
    assert weights.shape == (48, 3)
    assert (biases == -3.0).all()
    for column, name in enumerate(CLASSES):
        vectors = encoder(prompts_of(name, templates)).astype(np.float64)
        mean = vectors.mean(axis=0)
        expected = np.exp(2.0) * mean / np.linalg.norm(mean)
        np.testing.assert_allclose(weights[:, column], expected, atol=1e-5)


def test_many_classes_are_embedded_part_by_part(monkeypatch):
    encoder = TextEncoder(GOLDEN / "clip")
    whole = text_classifier(encoder, CLASSES, ["a {}", "{}"]).weights
    monkeypatch.setattr(prompts, "_SENTENCES", 3)
    parts = text_classifier(encoder, CLASSES, ["a {}", "{}"]).weights
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    # Pairs of classes are found across parts, too.
    alike = text_classifier(encoder, ["a", "b", "c", "d", "a"], ["{}"]).alike
    assert alike == "the classes 'a' and 'a' have the same tokens, so they can't be distinguished"


# CLIP's and SigLIP's rules say what a token is. A cut sentence may lack its class.
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "classes", "templates", "are_alike", "cut"),
    [
        ("clip", ["red_flower", "red flower"], ["a {}"], True, 0),
        ("clip", ["caf\u00e9", "cafe\u0301"], ["a {}"], True, 0),
        ("clip", ["A cat", "a cat"], ["a {}"], True, 0),
        ("clip", ["a-cat", "a cat"], ["a {}"], False, 0),
        ("siglip", ["a cat.", "a cat"], ["a {}"], True, 0),
        ("clip", ["a cat", "a dog"], ["word " * 30 + "{}"], True, 2),
        ("clip", ["a cat", "a dog"], ["{}" + " word" * 30, "{}"], False, 2),
    ],
)
def test_classes_that_no_image_tells_apart_are_named(name, classes, templates, are_alike, cut):
    made = text_classifier(TextEncoder(GOLDEN / name), classes, templates)
    assert bool(made.alike) is are_alike
    if are_alike:
        assert f"'{classes[0]}' and '{classes[1]}'" in made.alike
        np.testing.assert_allclose(made.weights[:, 0], made.weights[:, 1], atol=1e-5)
    else:
        assert np.abs(made.weights[:, 0] - made.weights[:, 1]).max() > 1e-3
    assert made.cut.startswith(
        f"the text tower reads 24 tokens, so {cut} texts were" if cut else ""
    )
    assert bool(made.cut) is bool(cut)


def test_classes_that_no_image_tells_apart_are_a_warning_or_refused(place, tmp_path):
    (tmp_path / "c.txt").write_text("red flower\nred_flower\n")
    words = ["-classes", "c.txt", "-output", "made"]
    status, _, err = command("tools/zero_shot.py", tmp_path, GOLDEN / "clip", *words)
    assert status == 0
    assert err.startswith("warning: the classes 'red flower' and 'red_flower' have the same tokens")
    image = place / "data" / "val" / "a cat" / "0.png"
    words = [GOLDEN / "clip", image, "-classes", "c.txt"]
    status, out, err = command("tools/predict.py", tmp_path, *words)
    assert status == 0
    assert "have the same tokens" in err
    assert out.count("50.00 %") == 2
    # A request names its classes itself.
    named = OpenClasses(Predictor(GOLDEN / "clip"))
    with pytest.raises(InputError, match="have the same tokens.*; leave one out"):
        named.logits(np.ones((1, 24), np.float32), ["red flower", "red_flower"])


def test_a_text_tower_that_isnt_finite_is_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(GOLDEN / "clip", tmp_path / "clip")
    arrays = load_file(folder / "model.safetensors")
    arrays["text_projection.weight"][:] = 3e38
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(InputError, match="the embeddings of its text tower aren't finite"):
        text_classifier(TextEncoder(folder), CLASSES)


def test_a_file_doesnt_say_how_much_memory_is_taken(tmp_path):
    from safetensors.numpy import load_file, save_file

    encoder = TextEncoder(GOLDEN / "clip")
    assert encoder.batch_size == 64
    folder = shutil.copytree(GOLDEN / "clip", tmp_path / "clip")
    arrays = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    name = "text_model.embeddings.position_embedding.weight"
    positions = arrays[name]

    def with_tokens(count):
        arrays[name] = np.resize(positions, (count, positions.shape[1]))
        arrays["text_model.embeddings.position_ids"] = np.arange(count)[None]
        save_file(arrays, folder / "model.safetensors")
        config["text_config"]["max_position_embeddings"] = count
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    assert TextEncoder(with_tokens(1024)).batch_size == 64 // encoder.tower.arguments.num_heads
    with pytest.raises(InputError, match="its texts have 1025 tokens, expected 1024 at most"):
        TextEncoder(with_tokens(1025))


def test_a_name_takes_the_place_in_a_sentence():
    assert prompts_of("red__flower ", ["a {}.", "{}{"]) == ["a red flower.", "red flower{"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a photo\n", "its line a photo has 0 places for a class's name, expected one: {}"),
        ("{} and {}\n", r"has 2 places"),
        ("\n \n", "it has 0 templates, expected 1 to 1000"),
        ("{}\n" * 1001, "it has 1001 templates"),
        ("a {}\x0bb {}\n", "has an unprintable character"),
        ("a {}\u2028b {}\n", "has an unprintable character"),
    ],
)
def test_templates_that_cant_be_read_are_refused(tmp_path, text, problem):
    (tmp_path / "t.txt").write_text(text)
    with pytest.raises(InputError, match=problem):
        read_templates(tmp_path / "t.txt")


def test_templates_of_other_systems_are_the_same(tmp_path):
    for number, data in enumerate((b"a {}.\nthe {}\n", b"\xef\xbb\xbfa {}.\r\n\r\n the {} \r\n")):
        (tmp_path / f"{number}.txt").write_bytes(data)
        assert read_templates(tmp_path / f"{number}.txt") == ["a {}.", "the {}"]
    (tmp_path / "utf16.txt").write_text("a {}", encoding="utf-16")
    with pytest.raises(InputError, match="it is UTF-16; save it as UTF-8"):
        read_templates(tmp_path / "utf16.txt")


def test_a_multilabel_classifier_gives_a_sigmoid_to_each_class(answers):
    options = ["TASK", "multilabel"]
    predictor = Predictor(GOLDEN / "siglip", options=options, classes=CLASSES)
    logits = predictor._forward(paddle.to_tensor(answers["image"])).numpy()
    expected = 1 / (1 + np.exp(-logits.astype(np.float64)))
    np.testing.assert_allclose(predictor.probabilities(logits), expected, atol=1e-12)


def test_weights_of_an_image_tower_take_no_other_classes():
    with pytest.raises(InputError, match="found 3 class names, but the model has 10 outputs"):
        Predictor("digits", classes=CLASSES)


def test_the_folder_is_an_ordinary_classifier(place):
    description = description_of(place / "made")
    assert description.classes == ["a cat", "red_flower"]
    assert description.values["MODEL.NECK_DIM"] == 24
    assert description.values["MODEL.NECK_NORM"] is True
    image = place / "data" / "val" / "a cat" / "0.png"
    templates = read_templates(place / "templates.txt")
    at_once = Predictor(GOLDEN / "clip", classes=["a cat", "red_flower"], templates=templates)
    assert Predictor(place / "made")([image]) == at_once([image])


@pytest.mark.long
def test_evaluation_training_and_wise_ft(place):
    status, _, err = command(
        "main_single_gpu.py", place, "-eval", "-pretrained=made", "-output=evaluated"
    )
    assert (status, err) == (0, "")
    result = json.loads((place / "evaluated" / "result.json").read_text())
    images = sorted((place / "data" / "val").glob("*/*.png"))
    predictions = Predictor(place / "made")(images)
    hits = [
        one.classes[0] == image.parent.name for one, image in zip(predictions, images, strict=True)
    ]
    assert result["num_samples"] == 16
    assert result["acc1"] == pytest.approx(100 * np.mean(hits))

    # A linear probe and LoRA, from the classifier of texts.
    for name, options in (
        ("probe", ["TRAIN.FREEZE", "backbone"]),
        ("lora", ["TRAIN.ADAPTER.NAME", "lora", "TRAIN.ADAPTER.RANK", "2"]),
    ):
        epochs = ["TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0", "DATA.BATCH_SIZE", "4"]
        status, out, err = command(
            "main_single_gpu.py",
            place,
            "-pretrained=made",
            f"-output={name}",
            "-o",
            *epochs,
            *options,
        )
        assert (status, err) == (0, "")
        assert "classifier initialised randomly" not in out
    with open_weights(place / "made") as before, open_weights(place / "probe") as after:
        assert (np.asarray(before.arrays["blocks.0.mlp.fc1.weight"])
                == np.asarray(after.arrays["blocks.0.mlp.fc1.weight"])).all()  # fmt: skip
        head = [np.asarray(each.arrays["head.weight"]) for each in (before, after)]
        assert 0 < np.abs(head[0] - head[1]).max() < 0.1 * np.abs(head[0]).max()

    words = ["-weights", "0.25", "0.75", "-output", "wise.safetensors"]
    status, out, err = command(
        "tools/average_checkpoints.py", place, *words, "made", "probe/checkpoints/last"
    )
    assert (status, err) == (0, "")
    with open_weights(place / "wise.safetensors") as stored:
        expected = 0.25 * head[0] + 0.75 * head[1]
        np.testing.assert_allclose(np.asarray(stored.arrays["head.weight"]), expected, atol=1e-6)
    assert Predictor(place / "wise.safetensors").classes == ["a cat", "red_flower"]


def test_a_weighted_mean_is_computed_in_float64(tmp_path):
    from weights.formats import write_weights

    for number, value in enumerate((1.0, 3.0, 5.0)):
        write_weights(tmp_path / f"{number}.safetensors", {"a": np.full(3, value, np.float32)})
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    with average(files, [0.5, 0.25, 0.25]) as arrays:
        assert np.asarray(arrays["a"]).tolist() == [2.5] * 3
    with average(files, [0.0, 0.0, 1.0]) as arrays:
        assert np.asarray(arrays["a"]).tolist() == [5.0] * 3


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-weights", "0.5"], "-weights has 1 number, expected one for each of the 2 checkpoints"),
        (
            ["-weights", "0.5", "0.6"],
            "-weights are 0.5, 0.6, expected non-negative numbers that add up",
        ),
        (["-weights", "1.5", "-0.5"], "-weights are 1.5, -0.5, expected non-negative numbers"),
        (["-weights", "0.5", "0.5", "--greedy"], "-weights and --greedy can't be combined"),
    ],
)
def test_shares_that_dont_fit_are_refused(tmp_path, words, problem):
    # The numbers end at the next flag.
    flags = [*words, "-output", "x.safetensors", "a", "b"]
    status, _, err = command("tools/average_checkpoints.py", tmp_path, *flags)
    assert status == 2
    assert problem in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_an_exported_classifier_answers_alike(place, tmp_path, kind):
    pytest.importorskip("paddle2onnx", reason="the extra export isn't installed")
    predictor = Predictor(place / "made")
    classes = predictor.classes
    write_export(predictor.config, predictor.model, tmp_path / kind, classes, kind=kind)
    image = place / "data" / "val" / "a cat" / "0.png"
    [expected] = predictor([image])
    [found] = Predictor(tmp_path / kind)([image])
    assert found.classes == expected.classes
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)


@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_an_exported_text_tower_answers_alike(tmp_path, answers, name, kind):
    if kind != "paddle":
        pytest.importorskip("paddle2onnx", reason="the extra export isn't installed")
    target = tmp_path / "text"
    assert write_text_export(GOLDEN / name, target, kind) < 1e-5
    settings = json.loads((target / "text.json").read_text())
    assert settings["channels"] == answers[f"{name}/texts"].shape[1]
    for file in settings["tokenizer"]["files"].values():
        assert (target / file).is_file()
    tokens = answers[f"{name}/tokens"][:64].astype(np.int64)
    found = RUNNERS[kind](target, STEMS[kind], "float32")(tokens)
    np.testing.assert_allclose(found, answers[f"{name}/texts"], atol=1e-5)


def test_the_approximation_of_gelu_stays_one_in_onnx(tmp_path, answers):
    pytest.importorskip("paddle2onnx", reason="the extra export isn't installed")
    # paddle2onnx makes the exact GELU of Paddle's operator, which is 1e-4 off.
    predictor = Predictor(GOLDEN / "siglip", classes=CLASSES)
    write_export(predictor.config, predictor.model, tmp_path / "onnx", CLASSES, kind="onnx")
    images = answers["image"]
    found = RUNNERS["onnx"](tmp_path / "onnx", "model", "float32")(images)
    expected = predictor._forward(paddle.to_tensor(images)).numpy()
    np.testing.assert_allclose(found, expected, atol=5e-6)


def test_classes_of_a_call_answer_as_a_classifier_of_them():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    for name in ("clip", "siglip"):
        named = OpenClasses(Predictor(GOLDEN / name))
        found = named.logits(named.embeddings(pixels), CLASSES)
        with_classes = Predictor(GOLDEN / name, classes=CLASSES)
        np.testing.assert_allclose(found, with_classes.logits(pixels), atol=2e-6)
        # Other classes, of a predictor that has some.
        again = OpenClasses(with_classes)
        np.testing.assert_allclose(
            again.logits(again.embeddings(pixels), CLASSES), found, atol=2e-6
        )
        one = again.logits(again.embeddings(pixels), CLASSES[1:2])
        np.testing.assert_allclose(one[:, 0], found[:, 1], atol=2e-6)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([], "found 0 classes, expected 1 to 100"),
        (["a"] * 101, "found 101 classes"),
        (["a", " "], "a class's name has 1 character, expected 1 to 200"),
        (["b" * 201], "a class's name has 201 characters, expected 1 to 200"),
        (["a", "a"], "a class occurs twice"),
    ],
)
def test_names_that_a_call_doesnt_take(names, problem):
    with pytest.raises(InputError, match=problem):
        check_classes(names)


def test_a_server_takes_the_classes_of_a_request(place, tmp_path):
    image = (place / "data" / "val" / "a cat" / "0.png").read_bytes()

    def post(server, query=""):
        return server.ask("POST", f"/predict{query}", image, {"Content-Type": "image/png"})[:2]

    def named(*classes):
        return "?classes=" + urllib.parse.quote(",".join(classes))

    server = Served(GOLDEN / "clip", folder=tmp_path).ready()
    try:
        status, answer = post(server, named(*CLASSES))
        assert status == 200
        [found] = answer["predictions"]
        [expected] = Predictor(GOLDEN / "clip", classes=CLASSES)([image])
        assert found["classes"] == expected.classes
        np.testing.assert_allclose(found["probabilities"], expected.probabilities, atol=1e-6)
        # Spaces around a name don't count.
        assert post(server, "?classes=%20a%20cat%20,red_flower,%E4%B8%AD%E6%96%87")[1] == answer
        status, answer = post(server)
        assert status == 422
        assert answer["error"] == (
            "the model has no fixed classes; pass some: classes=red flower,bee"
        )
        assert post(server, named("a", "a"))[0] == 422
        assert post(server, "?classes=")[0] == 422
        assert post(server, named("x" * 9000))[0] == 422
        assert b'id="names">' in server.ask("GET", "/")[1]
        paths = server.ask("GET", "/openapi.json")[1]["paths"]
        assert "classes" in [one["name"] for one in paths["/predict"]["post"]["parameters"]]
    finally:
        server.end()


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_text_finds_images(place, tmp_path, name):
    folder = place / "data" / "val"
    where = ["-checkpoint", GOLDEN / name]
    status, out, err = command("tools/search.py", tmp_path, "a cat", folder, *where, "-top", 16)
    assert (status, err) == (0, "")
    images = sorted(folder.glob("*/*.png"))
    named = OpenClasses(Predictor(GOLDEN / name))
    pixels = np.stack([named.predictor.pixels(image) for image in images])
    cosines = named.embeddings(pixels) @ named.encoder(["a cat"])[0]
    rows = [line.split(None, 1) for line in out.splitlines()[1:]]
    found = {path: float(cosine) for cosine, path in rows}
    assert found.keys() == set(map(str, images))
    for image, cosine in zip(images, cosines, strict=True):
        assert found[str(image)] == pytest.approx(cosine, abs=1e-4)

    # The same from an index; a grid has no tile for the text.
    words = ["-index", "i.index", folder, *where, "-pool", "embedding"]
    assert command("tools/search.py", tmp_path, *words)[0] == 0
    again = command("tools/search.py", tmp_path, "a cat", "i.index", "-top", 16, "-grid", "g.png")
    assert again[1] == out
    with Image.open(tmp_path / "g.png") as grid:
        assert grid.width > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["a cat", "data", "-checkpoint", "digits"],
            "-pool embedding is for weights of CLIP and Sig",
        ),
        (["a.png", "data", "-checkpoint", "clip"], "a.png"),
        (["a cat", "data", "-checkpoint", "clip", "-layer", "0"], "without -layer"),
    ],
)
def test_texts_that_cant_be_searched_for(place, words, problem):
    words = [str(GOLDEN / "clip") if word == "clip" else word for word in words]
    status, _, err = command("tools/search.py", place, *words)
    assert status == 2
    assert problem in err
    assert err.count("\n") == 1


def test_a_text_that_is_cut_is_named_and_an_index_keeps_its_pool(place, tmp_path):
    words = ["-index", "i.index", place / "data" / "val", "-checkpoint", GOLDEN / "clip"]
    assert command("tools/search.py", tmp_path, *words, "-pool", "embedding")[0] == 0
    text = "word " * 40
    status, _, err = command("tools/search.py", tmp_path, text, "a cat", "i.index")
    assert status == 0
    assert err.startswith("the text tower reads 24 tokens, so 1 text was cut, the first: word word")
    # The same command adds what is new. Another -pool would do nothing.
    status, out, _ = command("tools/search.py", tmp_path, *words, "-pool", "embedding")
    assert (status, out) == (0, "i.index: 0 images added, 16 known, 0 can't be read\n")
    words = ["-index", "j.index", place / "data" / "val" / "a cat", "-checkpoint", GOLDEN / "clip"]
    assert command("tools/search.py", tmp_path, *words)[0] == 0
    words = ["-index", "j.index", place / "data" / "val", "-pool", "embedding"]
    status, _, err = command("tools/search.py", tmp_path, *words)
    assert status == 2
    assert "-pool is embedding, but the features were made with avg; leave it out, or make" in err
    status, _, err = command("tools/search.py", tmp_path, "a", "j.index", "-pool", "embedding")
    assert status == 2
    assert "-pool is embedding, but the features were made with avg" in err


def test_the_text_tower_is_read_once_for_all_texts(place, monkeypatch):
    from inference import feature_store
    from inference.search import of_text

    made = []
    real = feature_store.TextEncoder
    monkeypatch.setattr(feature_store, "TextEncoder", lambda path: made.append(path) or real(path))
    features = feature_store.FeatureExtractor(GOLDEN / "clip", pool="embedding")
    of_text(features, "a cat")
    of_text(features, "a dog")
    assert len(made) == 1


def test_an_index_without_embeddings_takes_no_texts(place, tmp_path):
    words = ["-index", "i.index", place / "data" / "val", "-checkpoint", GOLDEN / "clip"]
    assert command("tools/search.py", tmp_path, *words)[0] == 0
    status, _, err = command("tools/search.py", tmp_path, "a cat", "i.index")
    assert status == 2
    assert (
        "a cat isn't a file, and texts can only be compared with embeddings of CLIP and SigLIP"
        in err
    )


def test_the_command_predicts_named_classes(place):
    image = place / "data" / "val" / "a cat" / "0.png"
    words = [image, "-classes", "classes.txt", "-templates", "templates.txt", "-format", "jsonl"]
    status, out, err = command("tools/predict.py", place, GOLDEN / "siglip2", *words)
    assert (status, err) == (0, "")
    templates = read_templates(place / "templates.txt")
    [expected] = Predictor(GOLDEN / "siglip2", classes=CLASSES, templates=templates)([image])
    rows = json.loads(out)["predictions"]
    assert [row["class"] for row in rows] == expected.classes
    assert [row["probability"] for row in rows] == expected.probabilities


@pytest.mark.parametrize(
    ("tool", "words", "problem"),
    [
        (
            "zero_shot",
            ["clip", "-output", "x"],
            "the classes are missing: pass either -classes FILE, or -data_p",
        ),
        (
            "zero_shot",
            ["digits", "-classes", "classes.txt", "-output", "x"],
            "found 3 class names",
        ),
        ("zero_shot", ["clip", "-classes", "none.txt", "-output", "x"], "none.txt"),
        (
            "zero_shot",
            ["clip", "-classes", "classes.txt", "-output", "data"],
            "-output data exists",
        ),
        (
            "predict",
            ["digits", "data", "-templates", "templates.txt"],
            "has no text tower; use w",
        ),
        ("export_model", ["-pretrained=digits", "-output=x", "-tower=text"], "has no text tower"),
        (
            "export_model",
            ["-pretrained=clip", "-output=x", "-tower=text", "-format=paddlex"],
            "-format paddlex isn't supported for text towers; use paddle, onnx, openvino",
        ),
        (
            "export_model",
            ["-pretrained=clip", "-output=x", "-tower=text", "-format=onnx", "-precision=int8"],
            "-tower text doesn't support -precision int8; leave it out",
        ),
    ],
)
def test_wrong_commands_are_one_line(place, tool, words, problem):
    words = [str(GOLDEN / "clip") if word == "clip" else word for word in words]
    words = [word.replace("=clip", f"={GOLDEN / 'clip'}") for word in words]
    status, _, err = command(f"tools/{tool}.py", place, *words)
    assert status == 2
    assert problem in err
    assert err.count("\n") == 1
    assert not (place / "x").exists()
