"""Serves a trained model over HTTP.

    python tools/serve.py CHECKPOINT|EXPORT [-port 8000] [-workers 1] [-batch_size 32] [-o KEY VALUE ...]

The page at / takes an image in a browser. Programs use /predict (POST: uploads, or base64 in JSON),
/attention (a picture of where the model looks), /docs, /openapi.json, /health, /ready and /metrics.
A model of TASK segmentation has /mask (a PNG of the pixels' classes) instead of /attention.
The server accepts connections from this machine only, unless -host is set. With -token_file or
PADDLE_VIT_TOKEN, each request needs the token.
"""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, install, open_file, reading, reporting  # noqa: E402
from settings.parser import Parser  # noqa: E402

# The packages of the extra "serve", by the names under which they are imported.
_EXTRA = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
# The fewest characters of a token.
_MIN_TOKEN = 16


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "path", help="a checkpoint's or run's folder, a weight file, or an export's folder"
    )

    def flag(name: str, default: object, kind: type, text: str) -> None:
        parser.add_argument(
            f"-{name}", f"--{name}", default=default, type=kind, help=f"{text} (%(default)s)"
        )

    parser.add_argument(
        "-cfg",
        "--cfg",
        metavar="MODEL",
        help="the model's YAML file or name, if the weights don't name it",
    )
    names = "names of the model's outputs, one per line, or imagenet1k"
    parser.add_argument("-classes", "--classes", metavar="FILE", help=names)
    flag("host", "127.0.0.1", str, "address to listen on; 0.0.0.0: all")
    flag("port", 8000, int, "port; 0: a free one, which is printed")
    flag("workers", 1, int, "number of processes, each with its own copy of the model")
    flag("batch_size", 32, int, "maximum of images per batch")
    flag("max_delay_ms", 5.0, float, "how long an image waits for others to form a batch")
    flag("max_queue", 256, int, "maximum of waiting images; more requests get 429")
    flag("max_images", 64, int, "maximum of images per request")
    flag("max_request_mb", 32.0, float, "maximum size of a request in MiB")
    flag("timeout", 30.0, float, "seconds until a request gets 504")
    formats = "formats to accept besides GIF, JPEG, PNG and WebP: bmp, npy, ppm, tiff"
    parser.add_argument(
        "-formats", "--formats", nargs="+", default=[], metavar="NAME", help=formats
    )
    parser.add_argument(
        "-token_file",
        "--token_file",
        metavar="FILE",
        help="file with the token that each request needs",
    )
    parser.add_argument("-quiet", "--quiet", action="store_true", help="don't log requests")
    parser.add_keys()
    arguments = vars(parser.parse_args())
    arguments["formats"] = ",".join(arguments["formats"]).split(",") if arguments["formats"] else []
    if lacking := [name for name in _EXTRA if not importlib.util.find_spec(name)]:
        raise InputError(f"{sys.executable} lacks {', '.join(lacking)}; {install('serve')}")
    from inference.serve import Settings, serve

    token = _token(arguments.pop("token_file"))
    sys.exit(serve(Settings(options=arguments.pop("o"), token=token, **arguments)))


def _token(file: str | None) -> str | None:
    """Returns the token of the file, or of PADDLE_VIT_TOKEN, or None.

    Raises:
        InputError: the file can't be read, or the token is too short.
    """
    if file is None and "PADDLE_VIT_TOKEN" not in os.environ:
        return None
    where = "PADDLE_VIT_TOKEN" if file is None else file
    text = os.environ.get("PADDLE_VIT_TOKEN", "")
    if file is not None:
        with reading(file, "a token"), open_file(file) as stream:
            text = stream.read(4096).decode()
    token = text.strip()
    is_plain = token.isascii() and token.isprintable() and " " not in token
    if len(token) < _MIN_TOKEN or not is_plain:
        expected = f"{_MIN_TOKEN} printable ASCII characters or more, without spaces"
        raise InputError(f"{where} holds a token of {len(token)} characters, expected {expected}")
    return token


if __name__ == "__main__":
    with reporting():
        main()
