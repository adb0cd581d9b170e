"""Exports a text tower with its tokenizer into a folder, which is whole or absent."""

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from errors import InputError, RunError
from inference import formats
from inference.backends import RUNNERS, STEMS, import_extra
from inference.text.encoder import TextEncoder
from launch.files import making_folder, writing_whole
from models.paddle_inference import PROGRAM, save_program
from models.text import TextTransformer

# The largest difference of an embedding's channels, whose squares add up to 1.
TOLERANCE = 1e-5
KINDS = ("paddle", "onnx", "openvino")
SETTINGS = "text.json"


class NormalisedText(nn.Layer):
    """The layer that an export computes: tokens [B, L] int64 -> embeddings [B, D] of length 1."""

    def __init__(self, tower: TextTransformer) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.tower.normalised(tokens)


def write_text_export(path: str | Path, target: Path, kind: str = "onnx") -> float:
    """Writes the text tower of weights into a new folder.

    The folder has the graph, from tokens [B, L] int64 to embeddings [B, D] float32 of length 1; the
    tokenizer's files; and text.json: how texts become tokens, the scale of the cosines with images'
    embeddings, and what is added to them.

    Args:
        path: what ``find_weights`` takes.
        kind: one of KINDS.

    Returns:
        the largest difference from the eager tower's embeddings.

    Raises:
        InputError: the weights have no text tower, or it can't be exported so.
        RunError: the export's embeddings differ from the tower's.
    """
    if kind not in KINDS:
        raise InputError(f"-format {kind} isn't supported for text towers; use {', '.join(KINDS)}")
    encoder = TextEncoder(path)
    layer = NormalisedText(encoder.tower)
    layer.eval()
    length = encoder.tower.arguments.context_length
    inputs = paddle.static.InputSpec([None, length], "int64", "tokens")
    with making_folder(target) as folder, tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = Path(name)
        if kind == "paddle":
            save_program(layer, folder / PROGRAM, inputs)
        else:
            graph = formats.onnx_of(layer, scratch, inputs, "embeddings")
            graph = formats.simplify(graph, scratch)
            if kind == "onnx":
                import_extra("onnx").save(graph, str(folder / f"{STEMS[kind]}.onnx"))
            else:
                converted = formats.openvino_of(graph, scratch)
                formats.save_openvino(converted, folder / f"{STEMS[kind]}.xml", half=False)
        difference = _difference(encoder, layer, RUNNERS[kind](folder, STEMS[kind], "float32"))
        if not difference <= TOLERANCE:
            raise RunError(
                f"the export's embeddings differ from the tower's by {difference:.2g}, expected"
                f" {TOLERANCE:g} at most; use another -format"
            )
        files = {role: Path(file).name for role, file in encoder.tokenizer.files.items()}
        for file in encoder.tokenizer.files.values():
            shutil.copyfile(file, folder / Path(file).name)
        settings: dict[str, Any] = {
            "format": kind,
            "tokenizer": asdict(encoder.tokenizer) | {"files": files},
            "scale": encoder.scale,
            "bias": encoder.bias,
            "channels": encoder.tower.arguments.out_dim,
        }
        with writing_whole(folder / SETTINGS) as file:
            json.dump(settings, file, indent=2)
    return difference


def _difference(encoder: TextEncoder, layer: nn.Layer, run: Any) -> float:
    """Returns the largest difference of the channels of some texts' embeddings."""
    texts = ["", "a photo of a cat.", "the word photo " * 40]
    tokens = encoder.tokenizer(texts)
    with paddle.no_grad():
        expected = layer(paddle.to_tensor(tokens)).numpy()
    return float(np.abs(run(tokens) - expected).max())
