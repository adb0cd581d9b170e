"""Writes costs.json beside this file: what fvcore 0.1.5 counts in timm 1.0.31's model of each
shipped one.

PYTHONPATH=.:tests python tests/golden/make_costs.py [NAME ...]   # with torch, timm, fvcore, yacs; of all: minutes

An entry holds the size of the images [C, H, W], the parameters, fvcore's "flops" (multiply-adds) in
all, how many of these are norms' and pooling's, and its activations. Attention is computed step by
step: fvcore sees no products in the fused operator. Nor does it see convolutions whose padding is
"same" (ConvMixer's): they are added to all figures by its own function, and "unseen" says how many.
"""

import json
import logging
import sys
from pathlib import Path

import torch
from fvcore.nn import ActivationCountAnalysis, FlopCountAnalysis
from fvcore.nn.jit_handles import conv_flop_count, generic_activation_jit, get_shape

from config import get_config, shipped_models
from tools.benchmarks.timm_reference import build, timm
from tools.check_parity import reference

PRODUCTS = {"conv", "linear", "matmul", "einsum", "bmm", "addmm", "baddbmm"}


def same_convolution(inputs: list, outputs: list) -> int:
    return conv_flop_count(get_shape(inputs[0]), get_shape(inputs[1]), get_shape(outputs[0]))


def cost(name: str) -> dict[str, object]:
    config = get_config(name)
    images = [config.DATA.IMAGE_CHANNELS, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_SIZE]
    theirs, options = reference(name)
    options = options | {"num_classes": config.MODEL.NUM_CLASSES, "in_chans": images[0]}
    sized = {"img_size": images[1]} if theirs.startswith("beit") or "_finetune" in name else {}
    model = build(theirs, sized | options).eval().requires_grad_(False)
    image = torch.zeros(1, *images)
    flops = FlopCountAnalysis(model, image)
    activations = ActivationCountAnalysis(model, image)
    flops.set_op_handle("aten::_convolution_mode", same_convolution)
    activations.set_op_handle("aten::_convolution_mode", generic_activation_jit("conv"))
    others = {
        kind: int(count) for kind, count in flops.by_operator().items() if kind not in PRODUCTS
    }
    unseen = others.pop("_convolution_mode", 0)
    found = {
        "timm": theirs,
        "images": images,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    found |= {"flops": int(flops.total()), "unseen": unseen, "of_norms": sum(others.values())}
    return found | {"activations": activations.total()}


if __name__ == "__main__":
    logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
    timm.layers.set_fused_attn(False)
    file = Path(__file__).with_name("costs.json")
    costs = json.loads(file.read_text())
    for name in sys.argv[1:] or shipped_models():
        costs[name] = cost(name)
        print(name, costs[name], flush=True)
        # Each is kept at once, also while other new models aren't counted yet.
        counted = [name for name in shipped_models() if name in costs]
        lines = [f'"{name}": {json.dumps(costs[name])}' for name in counted]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
