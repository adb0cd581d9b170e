"""tools/predict.py as people run it: its answers are -eval's, whoever computes them; what stops it
leaves nothing.
"""

import csv
import functools
import http.server
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import warm
from PIL import Image
from support import photographs
from support.hostile_files import attempt, one_thread
from support.programs import ROOT, assert_none_left, descendants, ranks_of, wait_for

from loading.transforms import video

SLOW = pytest.mark.slow
PREDICT = [sys.executable, str(ROOT / "tools" / "predict.py")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with photographs/ and model.safetensors."""
    root = tmp_path_factory.mktemp("place")
    photographs.write_photographs(root / "photographs")
    photographs.write_weights(root / "model.safetensors")
    return root


def begin(place, *words, command=PREDICT, weights="model.safetensors", **how):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, weights, *map(str, words)], cwd=place, **(streams | how))


def predict(place, *words, stdin=None, **how):
    """(exit status, standard output, standard error)."""
    how = {"command": [warm.python(), PREDICT[1]]} | how
    process = begin(place, *words, stdin=subprocess.PIPE, **how)
    out, err = process.communicate(stdin, timeout=120)
    return process.returncode, out.decode(), err.decode()


def rows(text):
    return list(csv.DictReader(text.splitlines()))


VAL = "photographs/val"


@pytest.mark.smoke
def test_its_accuracy_is_the_evaluations(place, program, tmp_path):
    flags = [
        "-cfg=vit_tiny_patch16_224",
        "-eval",
        "-dataset=folder",
        f"-data_path={place}/photographs",
    ]
    flags += [
        f"-pretrained={place}/model.safetensors",
        "-output=evaluated",
        "-batch_size=4",
        "-o",
        *photographs.MODEL,
    ]
    status, _, err = program("main_single_gpu.py", *flags)
    assert not status, err
    result = json.loads((tmp_path / "evaluated/result.json").read_text())
    status, out, err = predict(place, VAL, "-format", "csv", "-batch_size", 4)
    assert (status, err) == (0, "")
    first = [row for row in rows(out) if row["rank"] == "1"]
    right = [row["class"] == row["name"].split("/")[-2] for row in first]
    assert len(first) == result["num_samples"] == 18
    assert 0 < sum(right) < 18  # else any answer would do
    assert result["acc1"] == pytest.approx(100 * sum(right) / 18)


def test_every_way_of_asking_gives_the_same(place):
    """At one image a batch, whoever computes it: to the last bit, and with the same errors."""
    (place / "none.jpg").touch()
    words = ["--format", "jsonl", "-batch_size=1"]
    plain = predict(place, f"{VAL}/**/*.*g", "none.jpg", "-workers=0", *words)
    files = [json.loads(line)["name"] for line in plain[1].splitlines()]
    assert (plain[0], len(files)) == (1, 19)
    assert predict(place, VAL, "none.jpg", *words, "-ngpus=2") == plain
    assert predict(place, "-", *words, stdin="\0".join(files).encode()) == plain
    (place / "none.jpg").unlink()


@SLOW
def test_a_launchers_processes_give_the_same(place):
    plain = predict(place, VAL, "-format=jsonl", "-batch_size=1")
    (place / "list.txt").write_text(
        "\n".join(json.loads(line)["name"] for line in plain[1].splitlines())
    )
    words = ["-batch_size=1", "--output=launched.jsonl"]
    launcher = [
        sys.executable,
        "-m",
        "paddle.distributed.launch",
        "--devices=0,1",
        "--log_dir=logs",
        PREDICT[1],
    ]
    # On a CPU, Paddle's launcher takes its devices from this variable alone.
    with_two = {"command": launcher, "env": os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"}}
    status, *said = predict(place, "list.txt", *words, **with_two)
    assert (status, (place / "launched.jsonl").read_text()) == (0, plain[1]), said


def test_an_image_that_cant_be_read_is_a_row_and_status_1(place):
    (place / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    words = [f"{VAL}/bridge/0.jpg", "cut.jpg", f"{VAL}/bridge/0.jpg", "-top=1"]
    status, out, err = predict(place, *words, "-format=csv")
    assert (status, err) == (1, "error: 1 of 3 images can't be read; each row shows the reason\n")
    first, cut, last = rows(out)
    assert first["probability"][:8] == last["probability"][:8] != ""
    assert (cut["class"], cut["error"]) == ("", "it is truncated; repair or remove it")
    status, out, err = predict(place, *words, "-output=sheet.png")
    assert (status, out, err) == (
        1,
        "",
        "error: 1 of 3 images can't be read; each picture shows the reason\n",
    )
    assert (place / "sheet.png").read_bytes()[:4] == b"\x89PNG"
    status, out, _ = predict(place, *words)
    assert (status, out.splitlines()[2]) == (1, f"{'cut.jpg':<28}        error  {cut['error']}")


def write_clip(path):
    """A video of 2.5 s whose frames are photographs."""
    cv2 = pytest.importorskip("cv2", reason="OpenCV isn't installed (the extra video)")
    files = sorted((path.parent / VAL).rglob("*.*g"))
    writer = cv2.VideoWriter(
        str(path), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 64)
    )
    for index in range(25):
        photograph = Image.open(files[index % len(files)]).convert("RGB").resize((64, 64))
        writer.write(np.ascontiguousarray(np.asarray(photograph)[:, :, ::-1]))
    writer.release()


@pytest.mark.smoke
def test_frames_of_a_video_are_predicted_as_their_pictures_are(place):
    write_clip(place / "clip.avi")
    for index, seconds in enumerate((0.0, 1.0, 2.0)):
        video.frame(str(place / "clip.avi"), seconds, 10_000).save(place / f"frame{index}.png")
    video._end_own_reader()
    (place / "bad.mp4").write_text("no video")
    frames = [f"frame{index}.png" for index in range(3)]
    words = ["bad.mp4", "clip.avi", f"{VAL}/bridge/0.jpg", "-batch_size=1", "-top=1"]
    status, out, err = predict(place, *words, "-format=csv")
    assert (status, err) == (1, "error: 1 of 5 images can't be read; each row shows the reason\n")
    bad, *found, photograph = rows(out)
    assert (bad["name"], bad["time"]) == ("bad.mp4#0.0", "0.0")
    assert bad["error"].startswith("it isn't a video; AVI, MKV, MOV, MP4 and WebM are supported")
    assert [row["name"] for row in found] == [f"clip.avi#{seconds}.0" for seconds in range(3)]
    assert [row["time"] for row in found] == ["0.0", "1.0", "2.0"]
    assert photograph["time"] == ""
    pictures = rows(predict(place, *frames, *words[3:], "-format=csv")[1])
    assert [row["probability"] for row in found] == [row["probability"] for row in pictures]
    assert len({row["probability"] for row in found}) == 3
    assert "time" not in pictures[0]


@pytest.mark.long
def test_frames_are_the_same_in_every_way_of_asking(place):
    write_clip(place / "clip.avi")
    words = ["clip.avi", "-every=0.5", "-format=jsonl", "-batch_size=1"]
    alone = predict(place, *words, "-workers=0")
    assert predict(place, *words, "-ngpus=2") == alone
    lines = list(map(json.loads, alone[1].splitlines()))
    assert [line["time"] for line in lines] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert predict(place, "clip.avi", "-output=frames.png")[0] == 0
    assert predict(place, "clip.avi", "-output=frames", "-format=pictures")[0] == 0
    assert sorted(os.listdir(place / "frames"))[1] == "2-clip.avi_1.jpg"


def test_urls_are_predicted_as_their_files_are(place):
    handler = functools.partial(QuietHandler, directory=str(place))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/{VAL}"
        words = [f"{url}/bridge/0.jpg", f"{url}/none.jpg", f"{VAL}/bridge/1.png"]
        (place / "urls.txt").write_text(words[1])
        found = predict(place, words[0], "urls.txt", words[2], "-format=csv", "-top=1")
        server.shutdown()
        thread.join()
    status, out, err = found
    assert (status, err) == (1, "error: 1 of 3 images can't be read; each row shows the reason\n")
    first, absent, last = rows(out)
    assert [row["name"] for row in (first, absent, last)] == words
    assert absent["error"] == "the server answers 404 (File not found); check the address"
    files = [f"{VAL}/bridge/0.jpg", f"{VAL}/none.jpg", f"{VAL}/bridge/1.png"]
    (place / VAL / "none.jpg").touch()
    again = rows(predict(place, *files, "-format=csv", "-top=1")[1])
    (place / VAL / "none.jpg").unlink()
    assert [first["probability"], last["probability"]] == [
        again[0]["probability"],
        again[2]["probability"],
    ]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_several_labels_are_those_above_the_threshold(place):
    photographs.write_weights(place / "many.safetensors", "multilabel")
    some, every = (
        [
            json.loads(line)["predictions"]
            for line in predict(place, VAL, *flags, weights="many")[1].splitlines()
        ]
        for flags in (["-format=jsonl", "-threshold=0.55"], ["-format=jsonl", "-threshold=0"])
    )
    assert {len(found) for found in every} == {2}
    assert some == [[one for one in found if one["probability"] >= 0.55] for found in every]
    assert some != every


REFUSED = {
    "-threshold=0.3": "-threshold is for models with several labels per image; use -top",
    "-format=pictures": "-format pictures needs -output: a new folder, or a file that ends in .png or .jpg",
    "-output=none/a.csv": "none/a.csv: there is no folder ",
    "-output=photographs": "photographs: it is a folder, expected a file; choose another",
    "-output=/dev/null": "-output /dev/null: it isn't a regular file; choose another",
    "-output=photographs -format=pictures": "photographs already exists and isn't an empty folder; choose another",
    "none.jpg -output=new.csv": "'none.jpg': there is no such file or folder",
    "-classes=photographs -output=new.csv": "photographs: it isn't a regular file",
    "-every=2": "-every is for videos, and none is given; leave it out",
    "-classes=imagenet1k": "found 1000 class names, but the model has 2 outputs; pass one for each",
    "-o DATA.IMAGE_SIZES 3": "unknown key DATA.IMAGE_SIZES; did you mean DATA.IMAGE_SIZE?",
    "-o TASK multilabel": "the weights are for TASK classification, found TASK multilabel; pass -o TASK classification",
    "-ngpus=99": "NGPUS asks for 99 processes, found",
    "-ngpus=0": "NGPUS asks for 0 processes, expected 1 or more",
    "-output=new.png -tta=five -o DATA.CROP_MODE squash DATA.CROP_PCT 1.0": "an image that is squashed to the size of the crop",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cant_be_is_refused_and_leaves_nothing(place, words, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["predict.py", "model.safetensors", VAL, *words.split()])
    before = sorted(os.listdir(place))

    def asked_for():
        one_thread()
        sys.stdin = None  # pytest's can't be read
        sys.path.insert(0, str(ROOT))
        importlib.import_module("tools.predict").main()

    line = attempt("command line", 0, asked_for)
    assert REFUSED[words] in line
    assert sorted(os.listdir(place)) == before


@pytest.mark.parametrize("tool", ["predict.py", "serve.py"])
def test_weights_without_a_classifier_are_for_features(place, tool):
    photographs.write_weights(place / "features.safetensors", classes=(), outputs=0)
    command = [warm.python(), str(ROOT / "tools" / tool)]
    words = {"predict.py": [VAL], "serve.py": ["-port=0"]}[tool]
    status, _, err = predict(place, *words, command=command, weights="features.safetensors")
    told = "features.safetensors has no classifier: it gives features, not classes; compute its features by tools/features.py"
    assert status
    assert told in err
    assert "Traceback" not in err


def test_a_classifier_that_tells_nothing_apart_is_warned_of(place, program):
    zeros = {"head.weight": np.zeros((2, 16), np.float32), "head.bias": np.zeros(2, np.float32)}
    photographs.write_weights(place / "blind.safetensors", changes=zeros)
    warning = "the weights of its classifier are the same for all classes, so all classes get the same probability"
    status, out, err = predict(place, VAL, "-format=csv", weights="blind.safetensors")
    assert (status, err.count(warning)) == (0, 1)
    assert {row["probability"] for row in rows(out)} == {"0.5"}
    flags = [
        "-cfg=vit_tiny_patch16_224",
        "-eval",
        "-dataset=folder",
        f"-data_path={place}/photographs",
    ]
    flags += [
        f"-pretrained={place}/blind.safetensors",
        "-output=evaluated",
        "-batch_size=4",
        "-o",
        *photographs.MODEL,
    ]
    status, out, err = program("main_single_gpu.py", *flags)
    assert (status, (out + err).count(warning)) == (0, 1)


def test_a_wrong_flag_is_refused(place):
    status, out, err = predict(place, VAL, "-top=0")
    assert (status, out) == (2, "")
    assert (
        err == "error: command line: -top: '0' isn't a number of at least 1; -h lists the options\n"
    )


@pytest.fixture
def endless(place):
    """A list of so many images that whoever stops it comes in time."""
    (place / "endless.txt").write_text(f"{VAL}/bridge/0.jpg\n" * 300_000)
    return "endless.txt"


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        (signal.SIGINT, ["-workers=1"]),
        pytest.param(signal.SIGTERM, ["-workers=1"], marks=SLOW),
        (signal.SIGTERM, ["-workers=0", "-format=pictures"]),
        pytest.param(signal.SIGINT, ["-ngpus=2"], marks=SLOW),
        pytest.param(signal.SIGTERM, ["-ngpus=2"], marks=SLOW),
    ],
)
def test_a_stop_leaves_nothing(place, endless, number, flags):
    process = begin(place, endless, "-output=stopped", *flags, start_new_session=True)
    assert wait_for(
        lambda: [n for n in os.listdir(place) if n.startswith(".stopped") and _grown(place / n)],
        process,
    )
    left = list(descendants(process.pid))
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, b""), err
    assert re.fullmatch(rf"stopped by {number.name}( at step \d+)?\n", err.decode())
    assert not [name for name in os.listdir(place) if "stopped" in name]
    assert_none_left(left)


def _grown(path):
    return len(os.listdir(path)) if path.is_dir() else path.stat().st_size


@SLOW
def test_a_rank_that_dies_ends_the_others(place, endless):
    process = begin(place, endless, "-output=stopped", "-ngpus=2", "-workers=0")
    assert wait_for(
        lambda: [n for n in os.listdir(place) if n.startswith(".stopped") and _grown(place / n)],
        process,
    )
    ranks = ranks_of(process)
    started = time.monotonic()
    os.kill(max(ranks), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - started < 15
    assert (process.returncode, out) == (1, b"")
    assert re.fullmatch(
        r"error: rank \d was killed by SIGKILL \(out of memory\?\) at step \d+\n", err.decode()
    )
    assert not [name for name in os.listdir(place) if "stopped" in name]
    assert_none_left(ranks)


def test_a_reader_that_leaves_ends_it_quietly(place, endless):
    process = begin(place, endless, "-top=1", command=[warm.python(), PREDICT[1]])
    assert process.stdout.readline().split() == [b"image", b"probability", b"class"]
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()


def test_what_cant_be_written_is_told(place):
    with open("/dev/full", "wb") as full:
        process = begin(place, VAL, stdout=full, command=[warm.python(), PREDICT[1]])
        assert (
            process.communicate()[1]
            == b"error: standard output can't be written (No space left on device); free some space\n"
        )
    assert process.returncode == 1


@pytest.mark.parametrize("output", ["list.txt", "photo.png", "link.png", "model.safetensors"])
def test_what_is_read_isnt_replaced(place, tmp_path, output):
    file = sorted((place / VAL).rglob("*.*"))[0]
    shutil.copy(file, tmp_path / "photo.png")
    shutil.copy(place / "model.safetensors", tmp_path)
    (tmp_path / "link.png").symlink_to("photo.png")
    (tmp_path / "list.txt").write_text("photo.png\n")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    status, out, err = predict(tmp_path, "list.txt", "-format=csv", f"-output={output}")
    assert (status, out) == (2, "")
    if output == "link.png":
        assert (
            err
            == f"error: -output {tmp_path}/link.png: it is a link, and links aren't written to; choose another\n"
        )
    else:
        assert err == f"error: {tmp_path / output} is an input as well; choose another output\n"
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
