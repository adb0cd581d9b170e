"""Writes segformer.npz beside this file: what reduced SegFormers of transformers 5.24.0 (torch
2.13.0) give with weights by ``positive``, on images with odd sides.

PYTHONPATH=tests python tests/golden/make_segformer.py

For the classifier ("classes/") and the segmenter ("masks/") it holds ``logits`` and ``grad/NAME``,
the gradients of sum(logits * values("loss")) under the names in their files. "stage/I" are the
outputs of the encoder's stages, the same in both.
"""

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

from golden.make_names_vit import positive, values  # noqa: E402

SIZES = {
    "depths": [2, 1, 1, 1],
    "hidden_sizes": [4, 8, 12, 16],
    "num_attention_heads": [1, 2, 3, 4],
    "decoder_hidden_size": 12,
    "num_labels": 5,
}
CLASSES = {
    "classes": hf.SegformerForImageClassification,
    "masks": hf.SegformerForSemanticSegmentation,
}
HEIGHT, WIDTH = 70, 45


def named_as_in_a_file(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Returns a model's arrays under the names that ``save_pretrained`` gives them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def with_values(kind: type) -> torch.nn.Module:
    """Returns a model of a class with weights by ``positive``, read from a file."""
    model = kind(hf.SegformerConfig(**SIZES))
    arrays = {
        name: positive(name, array.shape) if array.ndim else array
        for name, array in named_as_in_a_file(model).items()
    }
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        save_file(arrays, Path(folder) / "model.safetensors", {"format": "pt"})
        return kind.from_pretrained(folder).eval()


if __name__ == "__main__":
    images = torch.from_numpy(values("images", (2, 3, HEIGHT, WIDTH)))
    found = {}
    for key, kind in CLASSES.items():
        model = with_values(kind)
        outputs = model(images, output_hidden_states=True)
        loss = torch.from_numpy(values("loss", tuple(outputs.logits.shape)))
        (outputs.logits * loss).sum().backward()
        found[f"{key}/logits"] = outputs.logits.detach().numpy()
        for i, stage in enumerate(outputs.hidden_states):
            found[f"stage/{i}"] = stage.detach().numpy()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        for name, array in named_as_in_a_file(model).items():
            if "running_" not in name and array.ndim:
                found[f"{key}/grad/{name}"] = array
    np.savez_compressed(Path(__file__).with_name("segformer.npz"), **found)
