"""The shipped models for other programs, by ``paddle.hub``; FOLDER is this one:

    paddle.hub.list(FOLDER, source="local")
    print(paddle.hub.help(FOLDER, "vit_base_patch16_224", source="local"))
    model = paddle.hub.load(FOLDER, "vit_base_patch16_224", source="local", pretrained=WEIGHTS, num_classes=10)
    predictor = paddle.hub.load(FOLDER, "predictor", source="local", path=CHECKPOINT)

All of it comes from the package ``paddle_vit_toolkit`` (tools/package), which the program may
import from then on: ``from paddle_vit_toolkit.config import get_config``. The program's own
``config``, ``utils`` or ``models`` stay what they are. Each YAML file of a model is an entry: there
is no list to edit.
"""

import hashlib
import importlib.util
import pathlib
import sys
import types
import typing

dependencies = ["paddle", "numpy", "yaml", "yacs", "tqdm"]
_ROOT = pathlib.Path(__file__).resolve().parent
_NAME = "paddle_vit_toolkit"


def _part(name: str) -> types.ModuleType:
    """Returns a module of this repository. Of two copies of it in a process, the second has a
    longer name.
    """
    folder = _ROOT / "tools" / "package"
    if _NAME not in sys.modules and str(folder) not in sys.path:
        # it stays: spawned processes, which unpickle a model, get this path
        sys.path.append(str(folder))
    package = importlib.import_module(_NAME)
    if _ROOT != package.ROOT:
        longer = f"{_NAME}_{hashlib.sha256(str(_ROOT).encode()).hexdigest()[:8]}"
        if longer not in sys.modules:
            spec = importlib.util.spec_from_file_location(longer, folder / _NAME / "__init__.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules[longer] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[longer])
        package = sys.modules[longer]
    return importlib.import_module(f"{package.__name__}.{name}")


class _Model:
    """Makes a shipped model. Its docstring is made when somebody asks for it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, pretrained: str | bool | None = None, **overrides: typing.Any) -> typing.Any:
        return _part("models").create_model(self.__name__, pretrained, **overrides)

    def __getattribute__(self, name: str) -> typing.Any:
        return _text(self.__name__) if name == "__doc__" else object.__getattribute__(self, name)


def _text(name: str) -> str:
    """Returns the docstring of a model's entry."""
    config = _part("config").get_config(name)
    taken = _part("settings.architectures").architecture(config.MODEL.TYPE).arguments
    source = (
        _part("config")
        .find_config(name)
        .read_text(encoding="utf-8")
        .partition("\n")[0]
        .partition(": ")[2]
    )
    data = config.DATA
    classes = config.MODEL.NUM_CLASSES
    height, width = _part("settings.options").pair(data.IMAGE_SIZE)
    shape = f"[B, {data.IMAGE_CHANNELS}, {height}, {width}]"
    lines = [
        source,
        "",
        f"Returns a paddle.nn.Layer, in training mode: images {shape} float32 -> [B, {classes}].",
    ]
    lines += [
        f"Images are (pixels / 255 - {data.IMAGENET_MEAN}) / {data.IMAGENET_STD}, RGB.",
        "",
        "Args:",
    ]
    lines += [
        "    pretrained: weights: a file, a folder or hf-hub:org/name; True: timm's of this name; None: random"
    ]
    lines += [f"    num_classes: outputs; 0: features (default: {classes})"]
    lines += [f"    image_size: pixels, or (height, width) (default: {data.IMAGE_SIZE})"]
    lines += [f"    image_channels: of the images (default: {data.IMAGE_CHANNELS})"]
    for key, argument in sorted(taken.items()):
        word = key.removeprefix("MODEL.")
        lines.append(f"    {word.lower()}: {argument.text} (default: {config.MODEL[word]})")
    return "\n".join(lines)


def predictor(path: str, **arguments: typing.Any) -> typing.Any:
    """Returns a trained checkpoint that answers as ``-eval`` does: predictor(images) -> a
    Prediction for each.

    Args:
        path: a checkpoint's folder or file, or a run's folder (its best checkpoint)
        arguments: cfg, options, classes, batch_size of inference.Predictor
    """
    return _part("inference").Predictor(path, **arguments)


def __getattr__(name: str) -> typing.Any:
    """A model by timm's or PaddleViT's name, which ``paddle.hub.list`` doesn't repeat."""
    own = None if name.startswith("_") else _part("settings.merging").shipped_model(name)
    if own is None:
        raise AttributeError(f"no model {name}")
    return _Model(own)


try:
    globals().update({_name: _Model(_name) for _name in _part("settings.merging").shipped_models()})
except ModuleNotFoundError as _error:
    # of which paddle.hub.load then says more, by ``dependencies``
    print(
        f"{_ROOT}/hubconf.py: no models, because {sys.executable} lacks {_error.name}",
        file=sys.stderr,
    )
