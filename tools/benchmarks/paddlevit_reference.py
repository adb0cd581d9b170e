"""PaddleViT's side of tools/check_paddlevit.py, in a process of its own: PaddleViT's modules have
the names of this toolkit's, which it imports none of.

The arguments are one of PaddleViT's YAML files, in its place in a checkout, a folder, and the type
to compute in, float32 or float64. The answer is a line of JSON with ``parameters`` and Paddle's
version. These files are written to the folder:

- weights.pdparams, with random weights
- outputs.npz, with two images and their logits
- with float64, gradients.pdparams, with the gradients of a training step, and zeros for the tensors
  that have none
"""

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn


def build(folder: Path, file: Path) -> tuple[Any, nn.Layer]:
    """Returns PaddleViT's configuration and model of a YAML file.

    Args:
        folder: of the family, within PaddleViT's image_classification.
        file: the YAML file.
    """
    sys.path.insert(0, str(folder))
    settings = importlib.import_module("config")
    config = settings.get_config()
    settings._update_config_from_file(config, str(file))
    # Each program says which function of which module builds its models.
    program = (folder / "main_multi_gpu.py").read_text(encoding="utf-8")
    found = re.findall(r"^from (\w+) import (\w+) as build_model(\w*)$", program, re.MULTILINE)
    functions = {suffix: (module, function) for module, function, suffix in found}
    suffix = "_v2" if config.MODEL.TYPE.lower().endswith("v2") and "_v2" in functions else ""
    module, function = functions[suffix]
    models = importlib.import_module(module)
    mend(models)
    return config, getattr(models, function)(config)


def mend(module: Any) -> None:
    """Mends what stops PaddleViT's own code in a module of models."""

    def split_heads(attention: Any, x: paddle.Tensor) -> paddle.Tensor:
        # PaddleViT's adds a list to a tuple of sizes.
        width = attention.in_dim if attention.skip else attention.dim_head
        return x.reshape([*x.shape[:-1], attention.num_heads, width]).transpose([0, 2, 1, 3])

    def logits(head: Any, feature_map: paddle.Tensor, tokens: paddle.Tensor) -> paddle.Tensor:
        # PaddleViT's returns the logits in training, and their softmax in evaluation.
        x = paddle.concat([head.flatten(head.avg_pool(feature_map)), tokens[:, 0]], axis=-1)
        return head.fc2(head.dropout(head.act(head.fc1(x))))

    if module.__name__ == "t2t_vit":
        module.Attention.transpose_multihead = split_heads
    if module.__name__ == "mobileformer":
        module.Classifier_Head.forward = logits


def batch_norms(model: nn.Layer) -> list[Any]:
    """Returns the batch norms of a model."""
    kind = nn.layer.norm._BatchNormBase
    return [layer for layer in model.sublayers() if isinstance(layer, kind)]


@paddle.no_grad()
def randomise(model: nn.Layer, images: paddle.Tensor) -> None:
    """Gives random values to parameters that start at zero, at one or close to it, and the images'
    statistics to batch norms. So each path of the model affects the logits, and so do the images.
    """
    for name, parameter in model.named_parameters():
        shape = parameter.shape
        if name.endswith(("._mean", "._variance")):
            continue
        if len(shape) <= 1 and name.endswith("weight"):
            # the weight of a norm
            parameter.set_value(paddle.normal(1.0, 0.1, shape))
        elif len(shape) <= 1 and name.endswith("bias"):
            parameter.set_value(paddle.normal(0.0, 0.05, shape))
        elif len(shape) <= 1:
            # layer scale
            parameter.set_value(paddle.uniform(shape, min=0.1, max=1.0))
        elif name.endswith("weight") and len(shape) in (2, 4):
            # Smaller ones would leave nothing of the images; with larger ones, deep models magnify
            # rounding.
            fan_in = shape[0] if len(shape) == 2 else int(np.prod(shape[1:]))
            if float(parameter.std()) < 0.25 * fan_in**-0.5:
                parameter.set_value(paddle.normal(0.0, 0.25 * fan_in**-0.5, shape))
        elif float(parameter.std()) < 5e-3:
            # tokens, tables, classifiers
            parameter.set_value(paddle.normal(0.0, 0.05, shape))
    norms = batch_norms(model)
    # Paddle's momentum is the share of the old statistics.
    momenta = [norm._momentum for norm in norms]
    for norm in norms:
        norm._momentum = 0.02
    if norms:
        model.train()
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm._momentum = momentum
    model.eval()


def convert(model: nn.Layer, dtype: Any) -> None:
    """Converts a model to another type of floats. ``Layer.to`` alone converts tables of whole
    numbers, too.
    """
    tables = [
        (layer, name, tensor)
        for layer in model.sublayers()
        for name, tensor in layer._buffers.items()
        if tensor is not None and "int" in str(tensor.dtype)
    ]
    model.to(dtype=dtype)
    for layer, name, tensor in tables:
        layer._buffers[name] = tensor.astype("int64")


def without_drops(model: nn.Layer) -> nn.Layer:
    """Returns the model in training mode, with no dropout and no stochastic depth."""
    for layer in model.sublayers():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif isinstance(getattr(layer, "drop_prob", None), paddle.Tensor):
            # T2T-ViT's is a buffer.
            layer.drop_prob = paddle.zeros_like(layer.drop_prob)
        elif hasattr(layer, "drop_prob"):
            layer.drop_prob = 0.0
    model.train()
    return model


def gradients(model: nn.Layer, images: paddle.Tensor) -> dict[str, Any]:
    """Returns the gradients of the cross entropy for the labels 0 and 1; zeros for other tensors."""
    logits = without_drops(model)(images)
    nn.functional.cross_entropy(logits, paddle.to_tensor([0, 1])).backward()
    found: dict[str, Any] = {
        name: np.zeros(tensor.shape, np.float32) for name, tensor in model.state_dict().items()
    }
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = np.float32(parameter.grad.numpy())
    return found


def main() -> None:
    file = Path(sys.argv[1]).resolve()
    folder = Path(sys.argv[2])
    dtype: Any = sys.argv[3]
    paddle.seed(0)
    config, model = build(file.parent.parent, file)
    model.eval()
    side = config.DATA.IMAGE_SIZE
    # Noise alone would look the same to a layer that averages over places.
    coarse = nn.functional.interpolate(paddle.randn([2, 3, 4, 4]), [side, side], mode="bilinear")
    images = coarse + 0.3 * paddle.randn([2, 3, side, side])
    randomise(model, images)
    paddle.save(model.state_dict(), str(folder / "weights.pdparams"))
    convert(model, dtype)
    # Some of the models make zeros as they compute.
    paddle.set_default_dtype(dtype)
    images = images.astype(dtype)
    with paddle.no_grad():
        logits = model(images)
    if dtype == "float64":
        paddle.save(gradients(model, images), str(folder / "gradients.pdparams"))
    np.savez(folder / "outputs.npz", images=images.numpy(), logits=logits.numpy())
    statistics = ("._mean", "._variance")
    parameters = sum(
        parameter.size
        for name, parameter in model.named_parameters()
        if not name.endswith(statistics)
    )
    print(json.dumps({"parameters": int(parameters), "paddle": paddle.__version__}))


if __name__ == "__main__":
    main()
