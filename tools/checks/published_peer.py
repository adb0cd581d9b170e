"""Runs a published folder by timm and transformers, in another interpreter.

    PYTHON published_peer.py FOLDER IMAGES.npz

The last line that it prints is JSON: for each toolkit its version and its logits of the images, or
the error. It needs torch and timm, and no Paddle. transformers is tried if it is there.
"""

import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from typing import Any

if missing := [name for name in ("numpy", "torch", "timm") if not importlib.util.find_spec(name)]:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}")

import numpy as np
import torch  # pyright: ignore[reportMissingImports]: another interpreter runs this


def imported(name: str) -> Any:
    """Imports timm or transformers.

    torchvision's compiled operators can't be loaded beside a torch without CUDA. Neither needs them.
    """
    try:
        return importlib.import_module(name)
    except (RuntimeError, ImportError):
        for other in [
            other for other in sys.modules if other.partition(".")[0] in (name, "torchvision")
        ]:
            del sys.modules[other]
        for stub in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
            sys.modules[stub] = types.ModuleType(stub)
        return importlib.import_module(name)


def by_timm(folder: str, images: torch.Tensor) -> tuple[str, torch.Tensor]:
    timm = imported("timm")
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    return timm.__version__, model(images)


def by_transformers(folder: str, images: torch.Tensor) -> tuple[str, torch.Tensor]:
    transformers = imported("transformers")
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    return transformers.__version__, model(pixel_values=images).logits


def answer(
    compute: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]], folder: str, images: Any
) -> dict[str, Any]:
    """Returns a toolkit's version and logits, or its error."""
    try:
        with torch.no_grad():
            version, logits = compute(folder, torch.from_numpy(images))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"version": version, "logits": logits.tolist()}


def main() -> None:
    folder, file = sys.argv[1:]
    torch.set_num_threads(1)
    images = np.load(file)["images"]
    answers = {"timm": answer(by_timm, folder, images)}
    if importlib.util.find_spec("transformers"):
        answers["transformers"] = answer(by_transformers, folder, images)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
