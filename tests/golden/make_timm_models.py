"""Writes timm_models.json beside this file: the tensors of the models of timm in timm_models.py.

PYTHONPATH=tests python tests/golden/make_timm_models.py        timm 1.0.31, torch 2.13.0

For each case, the names of the tensors and their shapes. The counts of batches are left out.
"""

import json
import sys
import types
from pathlib import Path

from golden.timm_models import CASES


def main() -> None:
    # torchvision's operators don't load beside a CPU torch
    for name in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
    import timm
    import torch

    shapes = {}
    for case, (_, _, name, arguments) in CASES.items():
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=5, **arguments)
        shapes[case] = {
            tensor: list(values.shape)
            for tensor, values in model.state_dict().items()
            if not tensor.endswith("num_batches_tracked")
        }
    Path(__file__).with_suffix("").with_name("timm_models.json").write_text(
        json.dumps(shapes, separators=(",", ":")) + "\n"
    )


if __name__ == "__main__":
    main()
