"""The program of a worker process: it loads the model, decodes images, computes batches, and answers.

A thread decodes the next batch while this one computes. The server starts the program by its path,
with two arguments: its socket's file descriptor, and what to load, in JSON. It ends when the server
ends, for whatever reason. Signals to stop don't reach it: the server blocks them before it starts
this process.
"""

import hashlib
import os
import queue
import socket
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # not this folder: its names are the package's
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)
    from launch.signals import die_with_parent

    die_with_parent()  # before the other imports, which take a second

import numpy as np

from errors import RunError, Unreadable, one_line, out_of_memory
from inference.inputs import class_names
from inference.pictures import Pictures
from inference.predictor import Predictor
from inference.serve import messages
from inference.serve.memory import give_back
from inference.serve.overlay import overlay
from inference.serve.progress import COMPUTING, READING, Progress
from inference.serve.settings import LARGEST
from loading.transforms.bands import pixel_mode
from loading.transforms.decode import readable
from loading.transforms.formats import NPY, kind_of, opened_image
from ops.device import set_device_flags
from training.checkpoint import describe
from training.checkpoint.storage import sha256_of
from utils import num_gpus

_OURS = "image 0: "  # what a Predictor calls an image without a path
_LARGE = 4_000_000  # pixels of an image whose memory goes back: less is soon needed for others


def main() -> None:
    end = socket.socket(fileno=int(sys.argv[1]))
    told = messages.head_of(sys.argv[2].encode())
    if os.getppid() != told["server"]:  # it was gone before ``die_with_parent``
        os._exit(1)
    try:
        predictor = load(told)
        loaded = {"model": predictor.config.MODEL.NAME, "task": predictor.task}
        oriented = predictor.config.DATA.EXIF_ORIENTATION
        total = fingerprint(predictor, told["path"])
        loaded = {
            "loaded": loaded,
            "oriented": oriented,
            "sum": total,
            "warning": predictor.warning,
        }
        loaded = messages.pack(loaded)
    except Exception as error:
        if not isinstance(error, RunError):
            traceback.print_exc()
        said = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        _send(
            end,
            messages.pack({"error": one_line(said), "status": getattr(error, "exit_status", 1)}),
        )
        os._exit(getattr(error, "exit_status", 1))
    _silence_libraries()
    _send(end, loaded)
    batches: queue.Queue = queue.Queue(1)
    progress = Progress(told["progress"])
    threading.Thread(target=_decode, args=(predictor, end, batches, progress), daemon=True).start()
    while True:
        head, pixels, parts = batches.get()
        progress.begin(COMPUTING, head["id"])
        answers, pictures = answer_batch(predictor, head["asked"], pixels, parts)
        _send(end, messages.pack({"id": head["id"], "answers": answers}, pictures))
        progress.end(COMPUTING)


def _silence_libraries() -> None:
    """Keeps what decoders say of damaged files out of the log: libtiff has a line for each of a
    file's tiles.

    They write to descriptor 2. Python's own errors are still told.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    warnings.simplefilter("ignore")


def _send(end: socket.socket, data: bytes) -> None:
    try:
        end.sendall(data)
    except OSError:  # the server has gone
        os._exit(0)


def fingerprint(predictor: Predictor, path: str) -> str:
    """Returns a hash of everything that the answers depend on. All workers of a server have to have
    the same one.
    """
    told = describe(predictor.config, predictor.classes, predictor.task, predictor.thresholds)
    total = hashlib.sha256(told.to_json().encode())
    if predictor.model is None:
        for file in sorted(Path(path).iterdir()):
            total.update(f"{file.name} {sha256_of(file)}".encode())
    else:
        for name, value in sorted(predictor.model.state_dict().items()):
            total.update(name.encode())
            total.update(value.numpy().tobytes())
    return total.hexdigest()


def load(told: dict[str, Any]) -> Predictor:
    """Returns the model that a server was started with; it computes on a GPU, in turn, or its share
    of the cores.
    """
    import paddle  # not before errors, which silences a warning of its import

    if gpus := num_gpus():
        paddle.set_device(f"gpu:{told['place'] % gpus}")
    options = ["DATA.MAX_PIXELS", str(LARGEST), *told["options"]]
    classes = told["classes"] and class_names(told["classes"])
    predictor = Predictor(told["path"], told["cfg"], options, classes, told["batch_size"])
    predictor.check_classifier()
    set_device_flags(predictor.config, told["workers"])
    predictor.logits(Pictures(predictor.config, []).blank[None])  # the first time is slow
    return predictor


def _decode(
    predictor: Predictor, end: socket.socket, batches: queue.Queue, progress: Progress
) -> None:
    file: Any = end.makefile("rb", 1 << 20)
    try:
        while True:
            head, parts = messages.read(file)
            maps = [asked["kind"] == "attention" for asked in head["asked"]]
            # A map's picture is decoded where it is drawn: here only whether it can be is found
            # out.
            pixels = []
            for place, part in enumerate(parts):
                progress.begin(READING, head["id"], place)
                pixels.append(prepare(predictor, part))
            progress.end(READING)
            batches.put((head, pixels, parts if any(maps) else []))
    except (EOFError, OSError):  # the server has gone
        os._exit(0)
    except BaseException:  # such as a lack of memory: without this thread the process would be deaf
        traceback.print_exc()
        os._exit(1)


def prepare(predictor: Predictor, data: bytes) -> np.ndarray | str:
    """Returns an image's pixels as the model sees them, or what is wrong with it, in one line."""
    large = False
    try:
        with readable(_OURS.removesuffix(": ")):
            full = isinstance(pixel_mode(predictor.config), int) and kind_of(data) in (NPY, "TIFF")
        large = full or _size(data, predictor.config.DATA.MAX_PIXELS) > _LARGE
        return predictor.pixels(data)
    except RunError as error:
        return str(error).removeprefix(_OURS).removesuffix("; repair or remove it")
    except Exception as error:  # a decoder's mistake: this image's alone
        traceback.print_exc()
        return out_of_memory(error) or f"can't be read ({type(error).__name__})"
    finally:
        if large:
            give_back()


def _size(data: bytes, most: int) -> int:
    """Returns an image's pixels. Of a WebP's Pillow takes 16 bytes for each, of others' 8 at most."""
    with readable(_OURS.removesuffix(": ")):
        image = opened_image(data, most)[0]
        if image.format == "WEBP" and image.width * image.height > most // 2:
            found = f"it is a WebP of {image.width} x {image.height} pixels"
            raise Unreadable(f"{found}, at most half of DATA.MAX_PIXELS {most} are read")
        return image.width * image.height


def answer_batch(
    predictor: Predictor,
    asked: list[dict[str, Any]],
    pixels: list[np.ndarray | str],
    parts: list[bytes],
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Returns what is said of each image of a batch, and a picture of each, which may be empty."""
    answers = [{"error": found} if isinstance(found, str) else {} for found in pixels]
    pictures = [b""] * len(answers)
    good = [place for place, found in enumerate(pixels) if not isinstance(found, str)]
    try:
        if parts:
            for place in good:
                pictures[place] = overlay(predictor, parts[place])
            give_back()  # of its picture, which is decoded anew
        elif good:
            shares = predictor.probabilities(
                predictor.logits(np.stack([pixels[place] for place in good]))
            )
            for place, row in zip(good, shares, strict=True):
                answers[place] = _answer_of(predictor, row, asked[place])
    except Exception as error:
        if not isinstance(error, RunError):
            traceback.print_exc()
        line = out_of_memory(error) or (
            str(error) if isinstance(error, RunError) else "the model failed"
        )
        for place in good:
            answers[place] = {"failed": line}
    return answers, pictures


def _answer_of(predictor: Predictor, shares: np.ndarray, asked: dict[str, Any]) -> dict[str, Any]:
    if not np.isfinite(shares).all():
        return {"failed": "the model's outputs for it aren't finite"}
    found = predictor.prediction_of("", shares, asked["top"], asked["threshold"])
    return {
        "outputs": found.outputs,
        "classes": found.classes,
        "probabilities": found.probabilities,
    }


if __name__ == "__main__":
    main()
