"""Decoders without a limit of their own, in another process: the same pixels, and nothing worse
than an error.
"""

import os
import signal
import threading
import time

import numpy as np
import pytest
from PIL import Image
from support import forged_images
from support.structured_images import bmp

from errors import RunError, Unreadable
from loading.transforms import EncodedImage, isolated
from loading.transforms.decode import Broken
from loading.transforms.isolated import decode_isolated

SIZE = forged_images.PICTURE.size


def pixels(data, mode="RGB"):
    return np.asarray(EncodedImage(data, mode, "file", 1_000_000).decode())


def own_process():
    return isolated._own_process()._process.pid


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB"])
@pytest.mark.parametrize(
    "compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "lzma", "zstd"]
)
def test_a_packed_tiff_has_pillows_pixels(mode, compression):
    image = (
        forged_images.PICTURE.convert("P").convert("PA")
        if mode == "PA"
        else forged_images.PICTURE.convert(mode)
    )
    data = forged_images.saved("TIFF", image, compression=compression)
    with Image.open(forged_images.io.BytesIO(data)) as opened:
        expected = np.asarray(opened.convert("RGB"))
    assert (pixels(data) == expected).all()


def test_run_lengths_of_bmp_are_read():
    # Two rows from below: 3 of colour 1 and 1 of colour 0; one that is skipped, 2 of colour 1, 1 of
    # colour 0.
    data = bytearray(bmp(4, 2, b"\3\1\1\0\0\0\0\2\1\0\2\1\1\0\0\1"))
    data[14 + 40 + 4 : 14 + 40 + 8] = b"\xff\xff\xff\0"  # colour 1 is white
    assert (pixels(bytes(data), "L") == [[0, 255, 255, 0], [255, 255, 255, 0]]).all()


def test_text_of_ppm_is_read():
    assert (pixels(b"P2 #a\n2 2 # b\n15\n0 15 # c\n15\n0\n", "L") == [[0, 255], [255, 0]]).all()


def test_one_process_serves_many_files_and_threads():
    """Also the one that a thread has started, which has ended."""
    files = [
        forged_images.saved("TIFF", Image.new("L", (9, 9), level), compression="tiff_lzw")
        for level in range(40)
    ]
    isolated._end_own_process()
    seen = {}

    def decode(level):
        seen[level] = pixels(files[level], "L").mean()

    def together(levels):
        threads = [threading.Thread(target=decode, args=(level,)) for level in levels]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together(range(20))
    process = own_process()
    together(range(20, 40))
    assert seen == {level: level for level in range(40)}
    assert own_process() == process


def killing(monkeypatch, number, times):
    """Has a signal end the process that is asked, ``times`` times."""
    answer = isolated._Process.answer
    left = [times]

    def killed(self, *args):
        if left[0]:
            left[0] -= 1
            os.kill(self._process.pid, signal.SIGSTOP)
            os.kill(self._process.pid, number)
            os.kill(self._process.pid, signal.SIGCONT)
        return answer(self, *args)

    monkeypatch.setattr(isolated._Process, "answer", killed)


@pytest.mark.parametrize(
    ("number", "times", "error", "message"),
    [
        (signal.SIGSEGV, 1, Unreadable, r"its decoder crashed \(exit status -11\)"),
        (
            signal.SIGKILL,
            2,
            RunError,
            "the process that decodes images was killed by SIGKILL; out of memory?",
        ),
    ],
)
def test_a_crash_is_an_error_and_the_next_file_is_read(monkeypatch, number, times, error, message):
    data = forged_images.saved("TIFF", compression="tiff_lzw")
    pixels(data)
    process = own_process()
    killing(monkeypatch, number, times)
    with pytest.raises(error, match=message):
        decode_isolated(data, "TIFF", SIZE)
    assert (pixels(data) == np.asarray(forged_images.PICTURE)).all()
    assert own_process() != process


def test_a_process_that_was_killed_once_is_replaced_at_once(monkeypatch):
    killing(monkeypatch, signal.SIGKILL, 1)
    assert (
        pixels(forged_images.saved("TIFF", compression="tiff_lzw"))
        == np.asarray(forged_images.PICTURE)
    ).all()


def test_a_process_that_cannot_be_started_is_no_fault_of_the_image(monkeypatch):
    isolated._end_own_process()
    monkeypatch.setattr(isolated.sys, "executable", "/absent")
    with pytest.raises(
        RunError, match="a process that decodes images can't be started .*No such file"
    ) as found:
        pixels(forged_images.saved("TIFF", compression="tiff_lzw"))
    assert not isinstance(found.value, Broken)


def test_an_idle_process_that_was_killed_is_replaced():
    data = forged_images.saved("TIFF", compression="tiff_lzw")
    pixels(data)
    os.kill(own_process(), signal.SIGKILL)
    time.sleep(0.2)
    assert (pixels(data) == np.asarray(forged_images.PICTURE)).all()


def _ignore():
    return signal.signal(signal.SIGXCPU, signal.SIG_IGN)


def _block():
    return signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXCPU])


@pytest.mark.parametrize("prepare", [lambda: None, _ignore, _block])
def test_time_is_limited_whatever_the_process_does_with_signals(monkeypatch, prepare):
    monkeypatch.setattr(isolated, "_SECONDS", 1)
    isolated._end_own_process()
    # By the limit on CPU time, not by the clock.
    monkeypatch.setattr(isolated, "_WALL_CLOCK_FACTOR", 1000)
    handler = signal.getsignal(signal.SIGXCPU)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    prepare()
    try:
        with pytest.raises(Unreadable, match="decoding it takes longer than 1 s"):
            decode_isolated(b"P3\n1 1 255\n" + b"#\n" * (1 << 22) + b"1 2 3", "PPM", (1, 1))
    finally:
        signal.signal(signal.SIGXCPU, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_machine_that_stands_still_is_waited_for_but_not_for_ever(monkeypatch):
    data = forged_images.saved("TIFF", compression="tiff_lzw")
    pixels(data)
    monkeypatch.setattr(isolated, "_WALL_CLOCK_FACTOR", 0.05)
    os.kill(own_process(), signal.SIGSTOP)
    with pytest.raises(Unreadable, match="decoding it takes longer than 4 s"):
        decode_isolated(data, "TIFF", SIZE)


def test_memory_is_limited():
    with pytest.raises(Unreadable, match="decoding it takes more than 94 MiB"):
        decode_isolated(bmp(1_000_000, 1, b"\0\2\xff\xff"), "BMP", (1_000_000, 1))


def test_an_interrupted_wait_leaves_no_answer_for_the_next(monkeypatch):
    first = forged_images.saved("TIFF", Image.new("L", (9, 9), 1), compression="tiff_lzw")
    second = forged_images.saved("TIFF", Image.new("L", (9, 9), 2), compression="tiff_lzw")
    pixels(first)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(isolated, "_read", interrupted)
        pixels(first)
    assert pixels(second, "L").mean() == 2


def test_a_forked_process_has_its_own_which_ends_with_it():
    data = forged_images.saved("TIFF", compression="tiff_lzw")
    pixels(data)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        pixels(data)
        os.write(writer, str(own_process()).encode())
        signal.pause()
    of_child = int(os.read(reader, 100))
    assert of_child != own_process()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{of_child}"):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert (pixels(data) == np.asarray(forged_images.PICTURE)).all()
