"""Frames of videos: which are chosen, their pixels, and what a hostile file may take."""

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from errors import InputError, RunError, Unreadable
from inference.inputs import paths_of
from loading.transforms import video

cv2 = pytest.importorskip("cv2", reason="OpenCV isn't installed (the extra video)")

# H.264 with B-frames, made by PyAV; its frame at TIMES[i] is of the grey level 20 i.
VARIABLE = os.path.join(os.path.dirname(__file__), "../golden/variable_frame_rate.mp4")
TIMES = [0.0, 0.04, 0.08, 0.5, 0.9, 1.0, 1.01, 1.7, 2.4, 2.45, 2.5, 3.999]
MOST = 1_000_000
FORMATS = {"avi": "MJPG", "mp4": "mp4v", "mov": "mp4v", "mkv": "mp4v", "webm": "VP80"}


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    video._end_own_reader()


def write_clip(path, code, frames, rate=10.0):
    height, width = frames[0].shape[:2]
    writer = cv2.VideoWriter(
        str(path), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*code), rate, (width, height)
    )
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[:, :, ::-1]))
    writer.release()


def plain_frames(count=25):
    """Frames in RGB of one colour each, with a square in a corner."""
    frames = []
    for index in range(count):
        frame = np.full((48, 64, 3), (10 * index, 250 - 10 * index, 90), np.uint8)
        frame[:16, :16] = 255, 0, 0
        frames.append(frame)
    return frames


@pytest.mark.parametrize("ending", FORMATS)
def test_the_frames_are_those_that_were_written(ending, tmp_path):
    frames = plain_frames()
    path = str(tmp_path / f"clip.{ending}")
    write_clip(path, FORMATS[ending], frames)
    assert video.frame_times(path, 1.0).tolist() == [0.0, 1.0, 2.0]
    assert video.frame_times(path, 0.25) == pytest.approx(
        [0, 0.3, 0.5, 0.8, 1, 1.3, 1.5, 1.8, 2, 2.3]
    )
    for seconds in (0.0, 0.3, 1.0, 2.4):
        found = np.asarray(video.frame(path, seconds, MOST)).astype(int)
        wanted = frames[round(10 * seconds)]
        assert np.abs(found - wanted).mean() < 8
        assert np.abs(found[20:, 20:] - wanted[20:, 20:]).max() < 16


def test_times_are_the_files_own_in_their_order():
    assert video.frame_times(VARIABLE, 0.001).tolist() == TIMES
    assert video.frame_times(VARIABLE, 1.0).tolist() == [0.0, 1.0, 2.4, 3.999]
    assert video.frame_times(VARIABLE, 0.5).tolist() == [0.0, 0.5, 1.0, 1.7, 2.4, 2.5, 3.999]
    assert video.frame_times(VARIABLE, 100.0).tolist() == [0.0]
    for place in (0, 1, 5, 5, 6, 11, 3):  # also the same again, and one before
        frame = np.asarray(video.frame(VARIABLE, TIMES[place], MOST))
        assert frame.shape == (32, 32, 3)
        assert np.abs(frame.astype(int) - 20 * place).max() <= 2


def test_a_video_is_decoded_by_one_process_which_ends():
    video.frame(VARIABLE, 0.0, MOST)
    first = video._readers[os.getpid()]._process
    video.frame(VARIABLE, 2.5, MOST)
    assert video._readers[os.getpid()]._process is first
    video.frame(VARIABLE, 0.5, MOST)
    assert video._readers[os.getpid()]._process is not first
    assert first.poll() is not None


def test_names_of_frames(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert video.frame_name("a b.MP4", 12) == "a b.MP4#12.0"
    assert video.frame_name("a.mp4", 1 / 3) == "a.mp4#0.333"
    assert video.frame_of("x#1.0/a b.MP4#12.04") == ("x#1.0/a b.MP4", 12.04)
    for other in ("a.mp4", "a.mp4#1", "a.png#1.0", "a.mp4#1.0.png", "a.mp4#-1.0", "#1.0"):
        assert video.frame_of(other) is None
    # A file may have such a name.
    (tmp_path / "a.mp4#1.0").touch()
    assert video.frame_of("a.mp4#1.0") is None


def test_a_video_stands_for_its_frames_among_images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(VARIABLE, "clip.mp4")
    (tmp_path / "a.png").touch()
    (tmp_path / "bad.MOV").write_text("no video")
    (tmp_path / "list.txt").write_text("clip.mp4\nnone.mkv\n")
    frames = ["clip.mp4#0.0", "clip.mp4#2.4"]
    assert list(paths_of(["a.png", "clip.mp4"], every=2.0)) == ["a.png", *frames]
    assert list(paths_of(["*.mp4", "list.txt"], every=2.0)) == [*frames, *frames, "none.mkv"]
    # One that can't be read gets its error where its frame is read.
    assert list(paths_of(["bad.MOV"], every=2.0)) == ["bad.MOV#0.0"]
    # In a folder, only images are searched for.
    assert list(paths_of(["."], every=2.0)) == ["./a.png"]
    assert list(paths_of(["clip.mp4"])) == ["clip.mp4"]
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="videos need OpenCV; pip install opencv-python=="):
        paths_of(["clip.mp4"], every=1.0)


def test_urls_are_only_for_tools_that_store_no_paths():
    assert list(paths_of(["https://a/b.png"], urls=True)) == ["https://a/b.png"]
    with pytest.raises(InputError, match=r"'https://a/b.png': only files are accepted here"):
        paths_of(["https://a/b.png"])


# ------------------------------------------------------------------ hostile ones


def problem(path, seconds=0.0, most=MOST):
    with pytest.raises((Unreadable, RunError)) as caught:
        video.frame(str(path), seconds, most)
    return str(caught.value)


def test_what_is_no_video_or_a_damaged_one_is_a_line(tmp_path):
    data = Path(VARIABLE).read_bytes()
    (tmp_path / "text.mp4").write_text("no video")
    told = "it isn't a video; AVI, MKV, MOV, MP4 and WebM are supported"
    assert problem(tmp_path / "text.mp4") == told
    (tmp_path / "empty.mp4").touch()
    assert problem(tmp_path / "empty.mp4") == told
    (tmp_path / "cut.mp4").write_bytes(data[:500])
    assert problem(tmp_path / "cut.mp4") == "can't be read as a video"
    assert problem(VARIABLE, 0.25) == "it is damaged: the frame can't be decoded"
    assert problem(VARIABLE, 7.0) == "it is damaged: the frame can't be decoded"
    assert problem(VARIABLE, most=1000) == "it has 32 x 32 pixels, DATA.MAX_PIXELS is 1000"
    os.mkfifo(tmp_path / "pipe.mp4")
    assert problem(tmp_path / "pipe.mp4") == "it isn't a regular file"


def test_a_list_of_files_opens_none_of_them(tmp_path, monkeypatch):
    shutil.copy(VARIABLE, tmp_path / "clip.mp4")
    playlist = (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{tmp_path}/clip.mp4\n#EXT-X-ENDLIST\n"
    )
    (tmp_path / "list.mp4").write_text(playlist)
    assert problem(tmp_path / "list.mp4").startswith("it isn't a video")
    # Neither would a file that looks like a video at its start.
    monkeypatch.setattr(video, "_check_format", lambda start: None)
    assert problem(tmp_path / "list.mp4") == "can't be read as a video"
    # The limit on descriptors is what refuses it.
    plain = cv2.VideoCapture(str(tmp_path / "list.mp4"), cv2.CAP_FFMPEG)
    assert plain.isOpened()
    plain.release()


def test_changed_bytes_never_take_the_run_with_them(tmp_path):
    data = bytearray(Path(VARIABLE).read_bytes())
    rng = np.random.default_rng(0)
    path = tmp_path / "changed.mp4"
    outcomes = set()
    for _ in range(12):
        changed = data.copy()
        for place in rng.integers(8, len(data), 12):
            changed[place] = rng.integers(256)
        path.write_bytes(changed)
        start = time.monotonic()
        try:
            for seconds in video.frame_times(str(path), 1.0)[:3]:
                video.frame(str(path), float(seconds), MOST)
            outcomes.add("read")
        except (Unreadable, RunError):
            outcomes.add("refused")
        assert time.monotonic() - start < 20
        video._end_own_reader()
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (signal.SIGXCPU, "decoding it takes too long"),
        (signal.SIGSEGV, "its decoder crashed (exit status -11)"),
    ],
)
def test_a_video_whose_decoder_ended_isnt_decoded_again(ended, told):
    video.frame(VARIABLE, 0.0, MOST)
    process = video._readers[os.getpid()]._process
    os.kill(process.pid, ended)
    process.wait()
    assert problem(VARIABLE, 1.0) == told
    assert problem(VARIABLE, 2.4) == told
    assert video._readers[os.getpid()]._process is process


def test_the_kernel_limits_what_a_video_takes():
    video.frame(VARIABLE, 0.0, MOST)
    process = video._readers[os.getpid()]._process
    limits = {
        line[:25].strip(): int(line[26:].split()[0])
        for line in Path(f"/proc/{process.pid}/limits").read_text().splitlines()
        if line.startswith(("Max cpu time", "Max address space", "Max open files"))
    }
    assert limits["Max cpu time"] <= 13
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
    used = pages * os.sysconf("SC_PAGE_SIZE")
    # 512 MiB and 64 bytes for each of 32 x 32 pixels, above what it had at its start.
    assert used < limits["Max address space"] <= used + (512 << 20) + 64 * 32 * 32
    # The descriptors that are free begin at the limit.
    descriptors = set(map(int, os.listdir(f"/proc/{process.pid}/fd")))
    assert set(range(limits["Max open files"])) <= descriptors
