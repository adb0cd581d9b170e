"""Lists the shipped models: name, parameters, GFLOPs, images, source.

    python tools/list_models.py ["vit_*_384"]
    python tools/list_models.py --keys vit_base_patch16_224

GFLOPs are billions of multiply-adds of one image's forward pass, in linear layers, convolutions and products of
activations, as papers and timm count them. --keys lists the keys of MODEL that the architecture of a model takes.
"""

import argparse
import contextlib
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a tool is run by its path: only tools/ is there to import from

import launch.startup  # noqa: E402, F401  (streams)
from errors import InputError, reported  # noqa: E402


@contextlib.contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Yields the multiply-adds that are computed meanwhile, by kind."""
    import paddle
    from paddle import nn

    macs: Counter[str] = Counter()
    call, linear, matmul = nn.Layer.__call__, nn.functional.linear, paddle.matmul

    def count_convolution(layer: Any, x: Any) -> Any:
        output = call(layer, x)
        macs["convolutions"] += math.prod(output.shape) * math.prod(layer.weight.shape[1:])
        return output

    def count_linear(x: Any, weight: Any, *others: Any, **named: Any) -> Any:
        output = linear(x, weight, *others, **named)
        macs["linear layers"] += math.prod(output.shape) * weight.shape[0]
        return output

    def count_product(x: Any, y: Any, transpose_x: bool = False, transpose_y: bool = False) -> Any:
        output = matmul(x, y, transpose_x, transpose_y)
        macs["products"] += math.prod(output.shape) * x.shape[-2 if transpose_x else -1]
        return output

    with (
        mock.patch.object(nn.Conv2D, "__call__", count_convolution),
        mock.patch("paddle.nn.functional.linear", count_linear),
        mock.patch("paddle.matmul", count_product),
    ):
        yield macs


@contextlib.contextmanager
def _traced() -> Iterator[None]:
    """Models that are built and called meanwhile become a static graph, which computes nothing and has no weights."""
    import numpy as np
    import paddle

    to_tensor = paddle.to_tensor

    def keep_buffer(layer: Any, name: str, tensor: Any, persistable: bool = True) -> None:
        object.__setattr__(layer, name, tensor)  # a graph's tensors aren't taken as buffers

    def constant(data: Any, *others: Any, **named: Any) -> Any:
        # Paddle 2.6 refuses more than 2 ** 20 values in a graph, and Swin's masks at 384 have more. Shapes are enough.
        array = np.asarray(data)
        if array.size > 1 << 20:
            return paddle.zeros(array.shape, array.dtype)
        return to_tensor(data, *others, **named)

    paddle.enable_static()
    try:
        with (
            paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
            mock.patch("paddle.to_tensor", constant),
            mock.patch.object(paddle.nn.Layer, "register_buffer", keep_buffer),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # that a graph's tensors are nowhere
            yield
    finally:
        paddle.disable_static()


def describe(name: str) -> dict[str, Any]:
    """Returns ``name``, ``parameters``, ``macs`` (multiply-adds of one image), ``images`` (C, H, W) and ``source``.

    The model is traced, not run: a fraction of a second.
    """
    import paddle

    from config import find_config
    from models import create_model

    with _traced(), _counted() as macs:
        model = create_model(name)
        model.eval()
        images = (model.in_channels, *model.image_size)
        model(paddle.static.data("images", [1, *images], "float32"))
        parameters = sum(math.prod(parameter.shape) for parameter in model.parameters())
    first = find_config(name).read_text(encoding="utf-8").partition("\n")[0]
    source = first.partition(": ")[2].rstrip(".")
    return {"name": name, "parameters": parameters, "macs": macs.total(), "images": images, "source": source}


def print_keys(name: str) -> None:
    """Prints the keys of MODEL that a model's architecture takes: type, default, its own value, meaning."""
    from config import get_config
    from configs.architectures import architecture

    model = get_config(name).MODEL
    rows = [("key", "takes", "default", "here", "")]
    for key, argument in sorted(architecture(model.TYPE).arguments.items()):
        rows.append((key, argument.takes, argument.default, model[key.removeprefix("MODEL.")], argument.text))
    widths = [max(len(str(row[column])) for row in rows) for column in range(4)]
    for row in rows:
        cells = [f"{cell!s:{width}}" for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="*", help="a shell pattern of names")
    parser.add_argument("-keys", "--keys", metavar="NAME", help="a model, or its YAML file")
    arguments = parser.parse_args()
    pattern = arguments.pattern
    if arguments.keys:
        print_keys(arguments.keys)
        return
    from models import list_models
    from options import nearest_model

    names = list_models(pattern)
    if not names:
        wider = next(
            (f"; did you mean '{wide}'?" for wide in (f"{pattern}*", f"*{pattern}*") if list_models(wide)), None
        )
        wider = wider or nearest_model(pattern, list_models())
        raise InputError(f"no model matches {pattern!r}{wider}; without a pattern all {len(list_models())} are listed")
    width = max(map(len, names))
    print(f"{'name':{width}}  {'parameters':>13}  {'GFLOPs':>7}  {'images':>13}  source")
    for name in names:
        found = describe(name)
        images = "{} x {} x {}".format(*found["images"])
        print(f"{name:{width}}  {found['parameters']:13,}  {found['macs'] / 1e9:7.2f}  {images:>13}  {found['source']}")


if __name__ == "__main__":
    with reported():
        main()
