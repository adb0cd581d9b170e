"""The program of a worker process. It loads the model, decodes images, and computes batches.

One thread decodes the next batch while another computes. The server starts the program by its path,
with two arguments: the file descriptor of its socket, and what to load, in JSON. The worker ends
when the server ends, for whatever reason. Signals to stop don't reach it: the server blocks them
before it starts this process.
"""

import hashlib
import io
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
    # Python starts with this folder in the path, whose modules would hide others of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)
    from launch.signals import die_with_parent

    # The other imports take a second, in which the server may end.
    die_with_parent()

import numpy as np

from errors import (
    InputError,
    OutOfMemory,
    RunError,
    Unreadable,
    one_line,
    out_of_memory,
    reporting_memory,
)
from inference.calibration.choice import Choice
from inference.inputs import class_names
from inference.map_pictures import mask_image
from inference.maps import areas
from inference.pictures import Pictures
from inference.predictor import Predictor
from inference.serve import messages
from inference.serve.batching import CHOICES
from inference.serve.memory import give_back
from inference.serve.overlay import overlay
from inference.serve.progress import COMPUTING, READING, Progress
from inference.serve.settings import LARGEST
from inference.text.open_classes import OpenClasses, gives_embeddings
from loading.transforms.bands import pixel_mode
from loading.transforms.decode import readable
from loading.transforms.formats import NPY, kind_of, opened_image
from ops.device import set_device_flags
from training.checkpoint import describe
from utils import num_gpus
from weights.sums import sha256_of

# The name that a Predictor gives to an image without a path
_NAME = "image 0"
# The pixels of an image whose memory is given back to the system. Memory for smaller images is soon
# needed again.
_LARGE = 4_000_000


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    settings = messages.head_of(sys.argv[2].encode())
    # The server may have ended before ``die_with_parent``.
    if os.getppid() != settings["server"]:
        os._exit(1)
    try:
        predictor = load(settings)
        named = OpenClasses.of(predictor)
        about = {"model": predictor.config.MODEL.NAME, "task": predictor.task}
        loaded = messages.pack(
            {
                "loaded": about,
                "oriented": predictor.config.DATA.EXIF_ORIENTATION,
                "gives_maps": predictor.gives_maps,
                "keeps_sizes": predictor.keeps_sizes,
                "takes_classes": named is not None,
                "fingerprint": fingerprint(predictor, settings["path"]),
                "warning": predictor.warning,
            }
        )
    except Exception as error:
        if isinstance(error, RunError):
            line = str(error)
            status = error.exit_status
        else:
            traceback.print_exc()
            line = f"{type(error).__name__}: {error}"
            status = 1
        _send(connection, messages.pack({"error": one_line(line), "status": status}))
        os._exit(status)
    _silence_libraries()
    _send(connection, loaded)
    batches: queue.Queue = queue.Queue(1)
    progress = Progress(settings["progress"])
    decoding = threading.Thread(
        target=_decode_batches, args=(predictor, connection, batches, progress), daemon=True
    )
    decoding.start()
    while True:
        head, pixels, files = batches.get()
        progress.begin(COMPUTING, head["id"])
        answers, pictures = answer_batch(predictor, head["parameters"], pixels, files, named)
        _send(connection, messages.pack({"id": head["id"], "answers": answers}, pictures))
        progress.end(COMPUTING)


def _silence_libraries() -> None:
    """Keeps the messages of decoders about damaged files out of the log. libtiff prints a line for each
    of a file's tiles.

    Libraries write to descriptor 2. Python's own errors go to a copy of it, and still appear.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    warnings.simplefilter("ignore")


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        # The server has ended.
        os._exit(0)


def fingerprint(predictor: Predictor, path: str) -> str:
    """Returns a hash of everything that the answers depend on. All workers of a server have to have
    the same one.
    """
    description = describe(
        predictor.config,
        predictor.classes,
        predictor.task,
        predictor.thresholds,
        predictor.calibration,
    )
    sha256 = hashlib.sha256(description.to_json().encode())
    if predictor.model is None:
        for file in sorted(Path(path).iterdir()):
            sha256.update(f"{file.name} {sha256_of(file)}".encode())
    else:
        for name, value in sorted(predictor.model.state_dict().items()):
            sha256.update(name.encode())
            sha256.update(value.numpy().tobytes())
    return sha256.hexdigest()


def load(settings: dict[str, Any]) -> Predictor:
    """Returns the model that a server was started with. Each worker computes on another GPU, in
    turn, or on its share of the cores.
    """
    # At the top of the file, this import would come before ``errors``, which silences a warning of
    # Paddle's.
    import paddle

    if gpus := num_gpus():
        paddle.set_device(f"gpu:{settings['place'] % gpus}")
    options = ["DATA.MAX_PIXELS", str(LARGEST), *settings["options"]]
    classes = settings["classes"] and class_names(settings["classes"])
    predictor = Predictor(
        settings["path"], settings["cfg"], options, classes, settings["batch_size"]
    )
    # Without classes of its own, a model of images and texts takes those of each request.
    if not predictor.gives_maps and not gives_embeddings(predictor):
        predictor.check_classifier()
    set_device_flags(predictor.config, settings["workers"])
    # The first batch takes longer than others.
    predictor.logits(Pictures(predictor.config, []).blank[None])
    return predictor


def _decode_batches(
    predictor: Predictor, connection: socket.socket, batches: queue.Queue, progress: Progress
) -> None:
    """Receives batches, decodes their images, and puts them into ``batches``, until the server
    ends.
    """
    stream: Any = connection.makefile("rb", 1 << 20)
    try:
        while True:
            head, files = messages.read(stream)
            pixels = []
            for place, data in enumerate(files):
                progress.begin(READING, head["id"], place)
                pixels.append(prepare(predictor, data))
            progress.end(READING)
            # An image of /attention is decoded again as it is drawn. It was decoded here only to
            # find out whether it can be.
            is_drawn = any(image["kind"] == "attention" for image in head["parameters"])
            batches.put((head, pixels, files if is_drawn else []))
    except (EOFError, OSError):
        # The server has ended.
        os._exit(0)
    except BaseException:
        # A lack of memory, for example. Without this thread the worker would never answer again.
        traceback.print_exc()
        os._exit(1)


def prepare(predictor: Predictor, data: bytes) -> Any:
    """Returns an image's pixels as the model sees them, or the reason why it can't be read.

    For a model of maps they are a pair with the (height, width) of the map.
    """
    is_large = False
    try:
        with readable(_NAME):
            has_bands = isinstance(pixel_mode(predictor.config), int) and (
                kind_of(data) in (NPY, "TIFF")
            )
        # Pillow doesn't read the size of an image of bands, so its memory is always given back.
        is_large = has_bands or _count_pixels(data, predictor.config.DATA.MAX_PIXELS) > _LARGE
        if predictor.gives_maps:
            return predictor.whole_pixels(data)
        return predictor.pixels(data)
    except RunError as error:
        return str(error).removeprefix(f"{_NAME}: ").removesuffix("; repair or remove it")
    except Exception as error:
        # A mistake of a decoder, which concerns this image alone.
        traceback.print_exc()
        return out_of_memory(error) or f"can't be read ({type(error).__name__})"
    finally:
        if is_large:
            give_back()


def _count_pixels(data: bytes, most: int) -> int:
    """Returns how many pixels an image has.

    Raises:
        RunError: it has more than ``most``; of a WebP, more than half of that. Pillow takes 16
            bytes for each pixel of a WebP, and at most 8 for those of other formats.
    """
    with readable(_NAME):
        image = opened_image(data, most)[0]
        count = image.width * image.height
        if image.format == "WEBP" and count > most // 2:
            size = f"it is a WebP of {image.width} x {image.height} pixels"
            raise Unreadable(f"{size}, at most half of DATA.MAX_PIXELS {most} are allowed")
        return count


def answer_batch(
    predictor: Predictor,
    parameters: list[dict[str, Any]],
    pixels: list[Any],
    files: list[bytes],
    named: OpenClasses | None = None,
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Returns the answer to each image of a batch, and a picture of each, which may be empty.

    ``batching.Answer`` has both for one image.

    Args:
        parameters: of each image's request (``batching.Item``).
        pixels: of each image, what ``prepare`` returns.
        files: of each image, if pictures are drawn; otherwise empty.
        named: takes the classes that requests name; None: the model doesn't.
    """
    if predictor.gives_maps:
        return _answer_maps(predictor, parameters, pixels)
    answers = [{"error": image} if isinstance(image, str) else {} for image in pixels]
    pictures = [b""] * len(answers)
    readable_places = [place for place, image in enumerate(pixels) if not isinstance(image, str)]
    try:
        if files:
            for place in readable_places:
                pictures[place] = overlay(predictor, files[place])
            # It decoded the file once more.
            give_back()
        elif readable_places:
            batch = np.stack([pixels[place] for place in readable_places])
            of_request = [parameters[place].get("classes") for place in readable_places]
            # One of them is of no use where no request needs it.
            embeddings: Any = None
            logits: Any = None
            if named and any(of_request):
                embeddings = named.embeddings(batch)
            if not all(of_request):
                logits = predictor.logits(batch)
            for row, place in enumerate(readable_places):
                rows = slice(row, row + 1)
                try:
                    classes = _classes_of(predictor, named, of_request[row])
                    choice = choice_of(predictor, parameters[place])
                    if named and of_request[row]:
                        own = named.logits(embeddings[rows], classes)
                    else:
                        own = logits[rows]
                except InputError as error:
                    # Other images of the batch belong to other requests.
                    answers[place] = {"refused": str(error)}
                    continue
                [probabilities] = predictor.probabilities(own)
                [score] = predictor.rejection_scores(choice, batch[rows], own)
                answers[place] = _prediction(predictor, probabilities, choice, score, classes)
    except Exception as error:
        line = out_of_memory(error)
        if isinstance(error, RunError):
            line = line or str(error)
        else:
            traceback.print_exc()
            line = line or "the model failed"
        for place in readable_places:
            answers[place] = {"failed": line}
    return answers, pictures


def _answer_maps(
    predictor: Predictor, parameters: list[dict[str, Any]], prepared: list[Any]
) -> tuple[list[dict[str, Any]], list[bytes]]:
    """``answer_batch`` of a model that classifies pixels.

    Images differ in size, so each is computed by itself. One that takes more memory than there is
    has an error of its own.
    """
    answers: list[dict[str, Any]] = []
    pictures = []
    for image, wanted in zip(prepared, parameters, strict=True):
        picture = b""
        if isinstance(image, str):
            answers.append({"error": image})
        else:
            pixels, size = image
            answer, picture = _map_answer(predictor, pixels, size, wanted)
            answers.append(answer)
        pictures.append(picture)
    return answers, pictures


def _map_answer(
    predictor: Predictor, pixels: np.ndarray, size: tuple[int, int], parameters: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    """Returns the areas of an image's classes, and the PNG of its mask if that is wanted."""
    import paddle

    height, width = size
    file = io.BytesIO()
    try:
        with reporting_memory(lambda: f"it has {width} x {height} pixels: send a smaller image"):
            one = predictor.map_of(paddle.to_tensor(pixels[None]), "it", size)
            if parameters["kind"] == "mask":
                mask_image(one.outputs, predictor.config.MODEL.NUM_CLASSES).save(file, "PNG")
            found = areas(one, predictor.classes)
    except OutOfMemory as error:
        # Another image of the request may take less.
        return {"error": str(error)}, b""
    except RunError as error:
        return {"failed": str(error).removeprefix("it: ")}, b""
    except Exception:
        traceback.print_exc()
        return {"failed": "the model failed"}, b""
    finally:
        if height * width > _LARGE:
            give_back()
    top = parameters["top"]
    content = {
        "width": width,
        "height": height,
        "outputs": found.outputs[:top],
        "classes": found.classes[:top],
        "percents": found.percents[:top],
    }
    return content, file.getvalue()


def _classes_of(
    predictor: Predictor, named: OpenClasses | None, of_request: list[str] | None
) -> list[str]:
    """Returns the names of the classes of which a request wants to hear; []: the numbers.

    Raises:
        InputError: the model takes no names of classes, or needs some.
    """
    if of_request and named is None:
        raise InputError(
            "classes is for models of images and texts; this one has fixed classes: leave it out"
        )
    if not of_request and not predictor.has_classes:
        raise InputError("the model has no fixed classes; pass some: classes=red flower,bee")
    return of_request or predictor.classes


def choice_of(predictor: Predictor, parameters: dict[str, Any]) -> Choice:
    """Returns how the classes of a request's images are chosen.

    Raises:
        InputError: the model has no such choice.
    """
    return predictor.choice(**{name: parameters.get(name) for name in CHOICES})


def _prediction(
    predictor: Predictor,
    probabilities: np.ndarray,
    choice: Choice,
    score: float | None,
    classes: list[str],
) -> dict[str, Any]:
    if not np.isfinite(probabilities).all():
        return {"failed": "the model's outputs for it aren't finite"}
    prediction = predictor.prediction_of("", probabilities, choice, score, classes)
    answer = {
        "outputs": prediction.outputs,
        "classes": prediction.classes,
        "probabilities": prediction.probabilities,
    }
    if prediction.unknown is not None:
        answer |= {"unknown": prediction.unknown, "score": prediction.score}
    return answer


if __name__ == "__main__":
    main()
