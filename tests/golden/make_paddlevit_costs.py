"""Adds to costs.json, beside this file, what PaddleViT's own models cost: those that timm lacks.

PYTHONPATH=.:tests python tests/golden/make_paddlevit_costs.py PADDLEVIT NAME ...

PADDLEVIT is a checkout of BR-IDL/PaddleViT. Its model is called with one image, and
``models.costs`` counts what its layers do.
"""

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import paddle

FILE = Path(__file__).with_name("costs.json")
# Parameters of PaddleViT's that the authors' models don't have, or don't train.
FOREIGN = re.compile(
    r"t2t_vit\.(pos_embed|patch_embed\.attn\d\.w)|shuffle_transformer\..*\.qkv\.bias"
)


def counted(file: Path) -> dict[str, object]:
    """Returns the entry of one of PaddleViT's YAML files. Afterwards, modules of this toolkit can't
    be imported any more: PaddleViT's have the same names.
    """
    costs = importlib.import_module("models.costs")
    reference = importlib.import_module("tools.benchmarks.paddlevit_reference")
    for name in ("config", "datasets", "utils"):
        sys.modules.pop(name, None)
    counter = costs._Counter()
    deformed = paddle.vision.ops.deform_conv2d

    def count_deformed(x: Any, offset: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        """CycleMLP's Linears are such convolutions in PaddleViT."""
        output = deformed(x, offset, weight, *args, **kwargs)
        return counter._product(output, math.prod(weight.shape[1:]))

    with mock.patch("paddle.vision.ops.deform_conv2d", count_deformed):
        config, model = reference.build(file.parent.parent, file)
    model.eval()
    images = [3, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_SIZE]
    with paddle.no_grad(), counter, mock.patch("paddle.mm", paddle.matmul):
        model(paddle.zeros([1, *images]))
        layers = list(counter.layers(model))
    norms = {
        name
        for name, layer in model.named_sublayers()
        if isinstance(layer, (paddle.nn.LayerNorm, paddle.nn.GroupNorm, paddle.nn.BatchNorm2D))
    }
    # Paddle's batch norms have their statistics among their parameters.
    others = sum(2 * norm._num_features for norm in reference.batch_norms(model))
    for name, parameter in model.named_parameters():
        if FOREIGN.fullmatch(f"{type(model).__module__}.{name}"):
            others += parameter.size
    return {
        "PaddleViT": file.stem,
        "images": images,
        "parameters": sum(layer.parameters for layer in layers) - others,
        "flops": sum(layer.macs for layer in layers),
        "unseen": 0,
        "of_norms": sum(layer.macs for layer in layers if layer.name in norms),
        "activations": sum(layer.activations for layer in layers),
    }


def main() -> None:
    """Counts each model in a process of its own."""
    from config import find_config, shipped_models
    from settings.names import names

    paddlevit = Path(sys.argv[1]).resolve()
    costs = json.loads(FILE.read_text())
    for name in sys.argv[2:]:
        theirs = names(find_config(name))["PaddleViT"]
        [file] = paddlevit.glob(f"image_classification/*/configs/{theirs}.yaml")
        done = subprocess.run(
            [sys.executable, __file__, "--count", str(file)], stdout=subprocess.PIPE, check=True
        )
        costs[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, costs[name], flush=True)
    counted_names = [name for name in shipped_models() if name in costs]
    lines = [f'"{name}": {json.dumps(costs[name])}' for name in counted_names]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1] == "--count":
        print(json.dumps(counted(Path(sys.argv[2]))))
    else:
        main()
