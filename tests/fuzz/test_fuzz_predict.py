"""What anybody may ask about gets an answer or one line, whatever else is asked with it."""

import io
import json
import os

import pytest
from hypothesis import given
from support import forged_images, odd_files, photographs
from support.hostile_files import a_share, attempt, check_line, one_thread

from inference import Failure, Predictor
from inference.prediction_writers import Csv, JsonLines, Out, Table
from loading.files import Paths


@pytest.fixture(scope="module")
def predictor(tmp_path_factory):
    return Predictor(
        photographs.write_weights(tmp_path_factory.mktemp("model") / "model.safetensors"),
        batch_size=16,
    )


def written(answers):
    """Writes the answers in every form; returns the errors by name."""
    file = Out(io.BytesIO(), "it")
    errors = {}
    writers = [
        Csv(file),
        JsonLines(file),
        Table(file, [answer.name for answer in answers], ["a"], 80),
    ]
    for answer in answers:
        for writer in writers:
            writer.write(answer)
        if isinstance(answer, Failure):
            errors[answer.name] = answer.error
            check_line(answer.error)
            assert answer.error
    return errors


def test_hundreds_of_files_are_answered_or_refused_in_turn(predictor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    paths, sound = odd_files.write_all(tmp_path / "in")
    monkeypatch.chdir(tmp_path / "in")
    assert len(paths) > 300

    def answer():
        one_thread()
        answers = list(predictor.stream(Paths(paths), workers=0))
        assert [os.fsencode(each.name) for each in answers] == paths
        (tmp_path / "errors").write_text(json.dumps(written(answers)))

    assert attempt("predict", 100 << 20, answer) == ""  # all of them together
    errors = json.loads((tmp_path / "errors").read_text())
    assert not errors.keys() & odd_files.sound().keys()
    assert odd_files.refused().keys() <= errors.keys()
    others = {
        "folder.jpg",
        "pipe.jpg",
        "socket.jpg",
        "loop.jpg",
        "gone.jpg",
        "zero.jpg",
        "memory.jpg",
        "around",
    }
    assert others <= errors.keys()
    assert len(paths) - len(errors) >= sound
    assert (
        errors["bomb.png"]
        == "bomb.png: it has 65500 x 65500 pixels, DATA.MAX_PIXELS is 100000000; repair or remove it"
    )
    assert errors["heic.jpg"].startswith("heic.jpg: its format is unknown; BMP, GIF, JPEG")
    assert errors["pipe.jpg"] == "pipe.jpg: it isn't a regular file; repair or remove it"
    assert "Too many levels of symbolic links" in errors["loop.jpg"]


def test_what_exif_says_of_its_side_is_left_alone(predictor):
    first, *others = (predictor.pixels(odd_files.turned(number)) for number in (1, 3, 6, 8))
    assert all((other == first).all() for other in others)


@a_share(8)
@given(forged_images.ANY)
def test_an_image_is_answered_or_refused(predictor, data):
    def answer():
        one_thread()
        written(list(predictor.stream([data, data[:50]], workers=0)))

    assert attempt("predict", len(data), answer) == ""
