"""Writes heads_*.npz and heads.json beside this file: what reduced segmentation models of
transformers give with the formula's weights, in float64 (transformers 5.24.0, torch 2.13.0).

PYTHONPATH=tests python tests/golden/make_heads.py

An .npz holds 512 ``places`` each of the ``logits`` of evaluation at the images' size, of
``logits_SIDE`` at ``OTHER_SIZES``, and in training of ``train`` and ``auxiliary`` at their own
sizes. Then the batch norms go on with their running statistics, and grad/NAME are gradients of the
sum of both times ``loss_weights``, by the names in files.

heads.json holds config.json and the tensors' names and shapes, as ``save_pretrained`` writes them.
"""

import json
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch

# torchvision's operators don't load beside a CPU torch
for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
import transformers as hf  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from golden.formula import array, places  # noqa: E402
from golden.heads import (  # noqa: E402
    CLASSES,
    CONVNEXT,
    DPT,
    OTHER_SIZES,
    PLAIN,
    SIZES,
    STAGES,
    SWIN,
    UPERNET,
    images,
    loss_weights,
)

FOLDER = Path(__file__).parent
NUMBER = {"num_labels": CLASSES}


def upernet(backbone, **options):
    config = hf.UperNetConfig(backbone_config=backbone, **UPERNET, **NUMBER, **options)
    return hf.UperNetForSemanticSegmentation(config)


def beit():
    config = hf.BeitConfig(
        **PLAIN,
        **NUMBER,
        image_size=48,
        patch_size=8,
        use_relative_position_bias=True,
        out_indices=[2, 3, 4, 5],
        auxiliary_channels=6,
        drop_path_rate=0.0,
    )
    return hf.BeitForSemanticSegmentation(config)


def dpt(**options):
    config = hf.DPTConfig(**(PLAIN | DPT | NUMBER | options), semantic_classifier_dropout=0.0)
    return hf.DPTForSemanticSegmentation(config)


MODELS = {
    "upernet_swin": lambda: upernet(hf.SwinConfig(**SWIN, **STAGES)),
    "upernet_convnext": lambda: upernet(
        hf.ConvNextConfig(**CONVNEXT, **STAGES), pool_scales=[1, 2, 4], auxiliary_in_channels=10
    ),
    "upernet_beit": beit,
    "dpt": dpt,
    "dpt_add": lambda: dpt(
        readout_type="add", use_batch_norm_in_fusion_residual=True, image_size=80
    ),
    "dpt_ignore": lambda: dpt(readout_type="ignore"),
}


def with_formula(model, folder):
    """Returns the model with the formula's weights, loaded from a file with published names, and
    the file's names and shapes.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    shapes = {name: values.shape for name, values in load_file(file).items()}
    weights = {name: array(name, shape) for name, shape in shapes.items()}
    save_file(weights, file, metadata={"format": "pt"})
    model, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not report["unexpected_keys"], report
    assert not report["missing_keys"], report
    return model, {name: list(shape) for name, shape in shapes.items()}


@torch.no_grad()
def gradients(model):
    """Returns the gradients by the names that the parameters have in files."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.fill_(torch.nan)
        else:
            parameter.copy_(parameter.grad)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    with tempfile.TemporaryDirectory() as folder:
        model.float().save_pretrained(folder)
        arrays = load_file(Path(folder) / "model.safetensors")
    return {name: values for name, values in arrays.items() if not np.isnan(values).any()}


def record(name):
    with tempfile.TemporaryDirectory() as folder:
        model, shapes = with_formula(MODELS[name](), Path(folder))
        config = json.loads((Path(folder) / "config.json").read_text())
    inputs = torch.from_numpy(images(name)).double()
    model.double().eval()
    with torch.no_grad():
        logits = model(inputs).logits
        logits = torch.nn.functional.interpolate(logits, SIZES[name], mode="bilinear")
    others = {}
    for size in OTHER_SIZES.get(name, []):
        with torch.no_grad():
            larger = model(torch.from_numpy(images(name, size)).double()).logits
            larger = torch.nn.functional.interpolate(larger, size, mode="bilinear")
        others[f"logits_{size[0]}"] = places(larger.float().numpy(), 512)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    outputs = {}
    head = model.head if name.startswith("dpt") else model.decode_head
    head.register_forward_hook(lambda layer, inputs, output: outputs.update(train=output))
    model.auxiliary_head.register_forward_hook(
        lambda layer, inputs, output: outputs.update(auxiliary=output)
    )
    model.train()
    with torch.no_grad():
        model(inputs)
    arrays = {key: places(tensor.float().numpy(), 512) for key, tensor in outputs.items()}
    arrays["logits"] = places(logits.float().numpy(), 512)
    arrays |= others
    # The first pass has changed the running statistics.
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.eval()
    model(inputs)
    loss = sum(
        (output * torch.from_numpy(loss_weights(name, key, tuple(output.shape)))).sum()
        for key, output in outputs.items()
    )
    loss.backward()
    arrays |= {f"grad/{key}": values for key, values in gradients(model).items()}
    np.savez_compressed(FOLDER / f"heads_{name}.npz", **arrays)
    return {"config": config, "tensors": shapes}


if __name__ == "__main__":
    written = {name: record(name) for name in MODELS}
    (FOLDER / "heads.json").write_text(json.dumps(written))
