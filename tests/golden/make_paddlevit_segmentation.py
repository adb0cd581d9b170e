"""Writes paddlevit_segmentation.npz: logits of PaddleViT's own models for segmentation.

    PYTHONPATH=tests python tests/golden/make_paddlevit_segmentation.py PADDLEVIT/semantic_segmentation

It needs Paddle and PaddleViT (BR-IDL/PaddleViT, 5ac7d89). Synchronised batch norm, which has no
kernel for CPUs, is replaced by batch norm; both compute the same in evaluation.
"""

import argparse
import json
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import paddle

from golden.paddlevit_segmentation import FILES, array, images, places


def main(root: str) -> None:
    # Its modules import names that newer releases of Paddle don't have, and don't use them.
    for name in ("paddle.fluid", "paddle.fluid.layers", "paddle.fluid.layers.nn"):
        module = types.ModuleType(name)
        module.size = None
        sys.modules.setdefault(name, module)
    paddle.nn.SyncBatchNorm = paddle.nn.BatchNorm2D
    sys.path[0] = root
    from src.models import get_model

    from config import get_config, update_config

    recorded = {}
    for name, text in FILES.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.yaml"
            file.write_text(text)
            config = update_config(get_config(), argparse.Namespace(cfg=str(file)))
        model = get_model(config)
        state = model.state_dict()
        weights = {key: array(key, value.shape) for key, value in state.items()}
        # Tables that follow from sizes keep their values.
        model.set_state_dict({key: value for key, value in weights.items() if value is not None})
        model.eval()
        with paddle.no_grad():
            logits = model(paddle.to_tensor(images(config.DATA.CROP_SIZE[0])))[0].numpy()
        shapes = {key: value.shape for key, value in state.items()}
        recorded[f"{name}.shapes"] = np.array(json.dumps(shapes))
        recorded[name] = places(logits)
        difference = np.abs(logits[0] - logits[1]).max() / np.abs(logits).max()
        print(name, len(shapes), logits.shape, np.abs(logits).max(), difference)
    np.savez_compressed(Path(__file__).with_name("paddlevit_segmentation.npz"), **recorded)


if __name__ == "__main__":
    main(sys.argv[1])
