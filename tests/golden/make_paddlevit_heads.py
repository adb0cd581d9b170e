"""Writes NAME.json and NAME.npz beside this file: what reduced segmentation models of PaddleViT
give with weights by ``array``.

PYTHONPATH=tests python tests/golden/make_paddlevit_heads.py PADDLEVIT [NAME ...]

PADDLEVIT is the folder semantic_segmentation of a clone of BR-IDL/PaddleViT; this needs Paddle. The
.json has the names and shapes in the file, the .npz the logits of two images.
"""

import importlib
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

from golden.make_names_vit import values

FOLDER = Path(__file__).parent


def import_from(folder: Path, module: str) -> types.ModuleType:
    """Returns a module of PaddleViT's ``src.models``.

    The files that gather others need Paddle 2.1, so empty packages stand in their place.
    """
    for name in ("src", "src.models", "src.models.backbones", "src.models.decoders", "src.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules.setdefault(name, package)
    sys.modules["src.utils"].load_pretrained_model = None
    return importlib.import_module(f"src.models.{module}")


def array(name: str, shape: tuple[int, ...] | list[int]) -> np.ndarray:
    """Returns ``values``; for batch norms, variances near 0.1 and weights near 1.

    So images change the outputs much, for weights as small as these.
    """
    found = values(name, shape)
    if name.endswith("_variance"):
        return np.abs(found) / 10 + np.float32(0.05)
    if re.search(r"bn\d*\.weight$", name):
        return found + np.float32(1)
    return found


class Joined(nn.Layer):
    """An encoder and a head under the names that PaddleViT's models have them."""

    def __init__(self, names: tuple[str, str], encoder: nn.Layer, head: nn.Layer) -> None:
        super().__init__()
        self.names = names
        for name, layer in zip(names, (encoder, head), strict=True):
            self.add_sublayer(name, layer)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        encoder, head = (getattr(self, name) for name in self.names)
        return head(encoder(images))[0]


def segformer(folder: Path) -> tuple[nn.Layer, tuple[int, int]]:
    mit = import_from(folder, "backbones.mix_transformer").MixVisionTransformer
    head = import_from(folder, "decoders.segformer_head").SegformerHead
    encoder = mit(embed_dims=4, num_layers=[2, 1, 1, 1], num_heads=[1, 2, 3, 4])
    return Joined(("backbone", "decode_head"), encoder, head([4, 8, 12, 16], 12, 5, False)), (
        32,
        64,
    )


MODELS = {"segformer": segformer}


def write(name: str, folder: Path) -> None:
    model, size = MODELS[name](folder)
    model.eval()
    shapes = {}
    for key, tensor in model.state_dict().items():
        shapes[key] = list(tensor.shape)
        tensor.set_value(array(key, tuple(tensor.shape)))
    logits = model(paddle.to_tensor(values("images", (2, 3, *size)))).numpy()
    np.savez_compressed(FOLDER / f"paddlevit_{name}.npz", logits=logits)
    content = {"size": size, "shapes": shapes}
    (FOLDER / f"paddlevit_{name}.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    for name in sys.argv[2:] or MODELS:
        write(name, Path(sys.argv[1]))
