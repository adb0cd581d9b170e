"""Writes layer_groups.json beside this file: timm's factor on each parameter's rate, with a layer
decay of 0.5 (timm 1.0.31).

PYTHONPATH=tests python tests/golden/make_layer_groups.py
"""

import json
from pathlib import Path

import timm
import torch
from timm.models import (
    beit,
    cait,
    coat,
    convmixer,
    convnext,
    crossvit,
    deit,
    eva,
    hiera,
    levit,
    mlp_mixer,
    pvt_v2,
    regnet,
    swin_transformer,
    vision_transformer,
    xcit,
)
from timm.optim import param_groups_layer_decay

from golden import beit as beits
from golden import cait as caits
from golden import coat as coats
from golden import convmixer as convmixers
from golden import convnext as convnexts
from golden import crossvit as crossvits
from golden import eva as evas
from golden import halonet as halonets
from golden import hiera as hieras
from golden import levit as levits
from golden import mixer as mixers
from golden import mobileone as mobileones
from golden import mobilevit as mobilevits
from golden import pvtv2 as pvts
from golden import regnet as regnets
from golden import swin as swins
from golden import swinv2 as swins2
from golden import tinyvit as tinyvits
from golden import vit as vits
from golden import xcit as xcits

DECAY = 0.5


def models() -> dict[str, torch.nn.Module]:
    """timm's models by the case's name in golden/*.py, the shipped model's, or the architecture's."""
    vit = ("vit", "vit_avg", "vit_deit3", "vit_registers")
    found = {name: vision_transformer.VisionTransformer(**vits.CASES[name]) for name in vit}
    found["vit_distilled"] = deit.VisionTransformerDistilled(**vits.CASES["vit_distilled"])
    for name in ("beit", "beit_shared", "beit_absolute"):
        found[name] = beit.Beit(**beits.CASES[name])
    found["cait"] = cait.Cait(**caits.CASES["cait"])
    found["swin"] = swin_transformer.SwinTransformer(**swins.CASES["swin"])
    for name in ("convnext", "convnext_v2"):
        found[name] = convnext.ConvNeXt(**convnexts.CASES[name])
    found["swinv2"] = timm.models.swin_transformer_v2.SwinTransformerV2(**swins2.CASES["swinv2"])
    found["tinyvit"] = timm.models.tiny_vit.TinyVit(**tinyvits.CASES["tinyvit"])
    found["convnext"] = convnext.ConvNeXt(**convnexts.CASES["convnext"])
    found["pvtv2"] = pvt_v2.PyramidVisionTransformerV2(**pvts.CASES["pvtv2"])
    found["caformer_s18"] = timm.create_model("caformer_s18")
    found["poolformer_s12"] = timm.create_model("poolformer_s12")
    found["mixer"] = mlp_mixer.MlpMixer(**mixers.CASES["mixer"])
    found["regnet"] = regnet.RegNet(regnet.RegNetCfg(**regnets.CASES["regnety"]), num_classes=5)
    found["resnet"] = timm.create_model("resnet18", num_classes=5)
    found["convmixer"] = convmixer.ConvMixer(**convmixers.CASES["convmixer"])
    found["levit"] = levit.LevitDistilled(levits.SIZES["levit"], **levits.CASES["levit"])
    for name in ("coat", "coat_parallel"):
        found[name] = coat.CoaT(**coats.CASES[name])
    found["crossvit"] = crossvit.CrossVit(**crossvits.CASES["crossvit"])
    for name in ("eva", "eva_dinov3"):
        found[name] = eva.Eva(**evas.CASES[name])
    found["xcit"] = xcit.Xcit(**xcits.CASES["xcit"])
    for name in ("hiera", "hiera_windows"):
        found[name] = hiera.Hiera(hieras.SIZES[name], **hieras.CASES[name])
    found["halonet"] = halonets.timms("halonet")
    found["mobileone"] = mobileones.timms("mobileone")
    found["mobilevit"] = mobilevits.timms("mobilevit")
    return found


def scales(model: torch.nn.Module) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=DECAY)
    return {
        names[id(parameter)]: group["lr_scale"] for group in groups for parameter in group["params"]
    }


if __name__ == "__main__":
    lines = [
        f'"{name}": {json.dumps(scales(model), sort_keys=True)}' for name, model in models().items()
    ]
    Path(__file__).with_name("layer_groups.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
