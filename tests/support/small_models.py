"""Small models of every architecture, with the sizes that tests/golden records.

Each function builds the model of a case of ``golden/<architecture>.py`` and takes the constructor's
arguments that differ from the case. timm's names of arguments are translated to ours.
``SMALL_MODELS`` has the functions by MODEL.TYPE.
"""

from golden import (
    beit,
    botnet,
    cait,
    coat,
    convmixer,
    convnext,
    crossvit,
    eva,
    halonet,
    hiera,
    hvt,
    levit,
    metaformer,
    mixer,
    mobileone,
    mobilevit,
    naflexvit,
    pit,
    poolformer,
    pvtv2,
    regnet,
    rest,
    swin,
    swinv2,
    t2t_vit,
    tinyvit,
    topformer,
    vit,
    volo,
    xcit,
)
from paddle import nn
from paddle.nn.initializer import Normal

from models.beit import Beit
from models.botnet import BoTNet
from models.cait import Cait
from models.coat import CoaT
from models.convmixer import ConvMixer
from models.convmlp import ConvMLP
from models.convnext import ConvNeXt
from models.crossvit import CrossViT
from models.cswin import CSwin
from models.cvt import CvT
from models.cyclemlp import CycleMLP
from models.eva import Eva
from models.ff_only import FeedForwardOnly
from models.focal import FocalTransformer
from models.gmlp import GMlp
from models.halonet import HaloNet
from models.hiera import Hiera
from models.hvt import HVT
from models.layers.init import fan_in, init_convolution
from models.lenet import LeNet
from models.levit import LeViT
from models.metaformer import MetaFormer
from models.mixer import MlpMixer
from models.mobileformer import MobileFormer
from models.mobileone import MobileOne
from models.mobilevit import MobileViT
from models.naflexvit import NaFlexVit
from models.pit import PoolingVisionTransformer
from models.poolformer import PoolFormer
from models.pvtv2 import PyramidVisionTransformerV2
from models.regnet import RegNet
from models.replknet import RepLKNet
from models.repmlp import RepMLPNet
from models.repmlp_resnet import RepMLPResNet
from models.resmlp import ResMlp
from models.resnet import ResNet
from models.rest import ResT, ResTv2
from models.shuffle import ShuffleTransformer
from models.swin import SwinTransformer
from models.swinv2 import SwinTransformerV2
from models.t2t_vit import T2TViT
from models.tinyvit import TinyViT
from models.topformer import TopFormer
from models.vip import VisionPermutator
from models.vit import VisionTransformer
from models.volo import VOLO
from models.xcit import XCiT

MIXERS = {"mixer": MlpMixer, "gmlp": GMlp, "resmlp": ResMlp}
REGNET_DEPTHS = (1, 1, 2, 1)
REGNET_DIMS = {"regnety": (8, 16, 24, 48), "regnetx": (8, 16, 32, 48)}


def _renamed(case, **our_names):
    return {our_names.get(name, name): value for name, value in case.items()}


def _enlarged(model):
    """Returns a model after multiplying the weights of its Linears and convolutions by ten: with as
    few channels as here, the architecture's own would let little of the images through.
    """
    for layer in model.sublayers():
        if isinstance(layer, nn.Linear | nn.Conv2D):
            layer.weight.set_value(10 * layer.weight)
    return model


def small_beit(case="beit", **changes):
    return Beit(**_renamed(beit.CASES[case], img_size="image_size") | changes)


def small_botnet(case="botnet", **changes):
    """The residual branches have an effect from the start, unlike the architecture's default."""
    options = dict(botnet.CASES[case])
    keys = ("stage_depths", "embed_dims", "attention_every", "num_heads")
    options |= dict(zip(keys, map(list, zip(*options.pop("stages"), strict=True)), strict=True))
    options |= {"image_size": botnet.SIZES[case], "num_classes": 5, "zero_init_last": False}
    return BoTNet(**options | changes)


def small_cait(case="cait", **changes):
    return Cait(**_renamed(cait.CASES[case], img_size="image_size") | changes)


def small_coat(case="coat", **changes):
    options = _renamed(
        coat.CASES[case],
        img_size="image_size",
        mlp_ratios="mlp_ratio",
        serial_depths="stage_depths",
    )
    options.pop("patch_size", None)
    if "crpe_window" in options:
        windows = options["crpe_window"].items()
        options["crpe_window"] = [side for side, heads in windows for _ in range(heads)]
    return CoaT(**options | changes)


def small_convmixer(case="convmixer", **changes):
    options = _renamed(convmixer.CASES[case], dim="embed_dim")
    return ConvMixer(convmixer.SIZES[case], **options | changes)


def small_convmlp(**changes):
    options = {
        "image_size": 64,
        "num_classes": 5,
        "stage_depths": (1, 2, 1),
        "embed_dims": (12, 16, 24),
        "mlp_ratio": (2, 3, 2),
        "stem_dim": 8,
    }
    return ConvMLP(**options | changes)


def small_convnext(case="convnext", **changes):
    options = _renamed(
        convnext.CASES[case],
        depths="stage_depths",
        dims="embed_dims",
        ls_init_value="init_values",
    )
    if "norm_eps" in options:
        options["head_norm_eps"] = options["norm_eps"]
    return ConvNeXt(convnext.SIZES[case], **options | changes)


def small_crossvit(case="crossvit", **changes):
    options = _renamed(
        crossvit.CASES[case],
        img_size="image_size",
        img_scale="image_scales",
        embed_dim="embed_dims",
    )
    # timm's depth: (layers of each branch, layers of the fusion) for each stage
    stages = options["depth"]
    options |= {"depth": len(stages), "branch_depths": stages[0][:2]}
    return CrossViT(**options | changes)


def small_cswin(**changes):
    """The stripes don't divide the maps of the first and the third stage."""
    options = {
        "image_size": 64,
        "num_classes": 5,
        "embed_dim": 8,
        "stage_depths": (1, 1, 2, 1),
        "split_sizes": (5, 2, 3, 2),
        "num_heads": (2, 2, 4, 4),
    }
    return CSwin(**options | changes)


def small_cyclemlp(**changes):
    options = {
        "image_size": 64,
        "num_classes": 5,
        "stage_depths": (1, 1, 2, 1),
        "embed_dims": (8, 12, 16, 20),
        "mlp_ratio": (2, 3, 2, 2),
    }
    return CycleMLP(**options | changes)


def small_cvt(**changes):
    options = {
        "image_size": 48,
        "num_classes": 5,
        "stage_depths": (1, 1, 2),
        "embed_dims": (8, 16, 24),
        "num_heads": (1, 2, 3),
    }
    return CvT(**options | changes)


def small_eva(case="eva", **changes):
    options = _renamed(
        eva.CASES[case],
        img_size="image_size",
        num_reg_tokens="reg_tokens",
        use_fc_norm="fc_norm",
    )
    if options.pop("rope_rotate_half", False):
        options["norm_eps"] = 1e-5
    del options["use_rot_pos_emb"]
    return Eva(**options | changes)


def small_ff_only(**changes):
    sizes = {"image_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_classes": 5}
    return FeedForwardOnly(**sizes | changes)


def small_focal(**changes):
    """The windows don't divide the maps of the first stages; the last ones have a window each."""
    options = {
        "image_size": 64,
        "num_classes": 5,
        "embed_dim": 8,
        "stage_depths": (1, 1, 1, 1),
        "num_heads": (1, 2, 2, 4),
        "window_size": 5,
        "expand_sizes": (2, 1, 1, 1),
        "focal_windows": (3, 3, 1, 1),
    }
    return FocalTransformer(**options | changes)


def small_gmlp(case="gmlp", **changes):
    return small_mixer(case, **changes)


def small_halonet(case="halonet", **changes):
    """The residual branches have an effect from the start, unlike the architecture's default."""
    options = dict(halonet.CASES[case])
    keys = ("stage_depths", "embed_dims", "attention_every", "num_heads")
    options |= dict(zip(keys, map(list, zip(*options.pop("stages"), strict=True)), strict=True))
    options |= {"image_size": halonet.SIZES[case], "num_classes": 5, "zero_init_last": False}
    return HaloNet(**options | changes)


def small_hiera(case="hiera", **changes):
    options = _renamed(hiera.CASES[case], stages="stage_depths")
    options.pop("abs_win_pos_embed", None)
    return Hiera(**{"image_size": hiera.SIZES[case]} | options | changes)


def small_hvt(case="hvt", **changes):
    return HVT(**{"image_size": hvt.SIZE, "patch_size": hvt.PATCH} | hvt.CASES[case] | changes)


def small_lenet(**changes):
    return LeNet(**{"in_channels": 3} | changes)


def small_levit(case="levit", **changes):
    options = _renamed(
        levit.CASES[case], depth="stage_depths", embed_dim="embed_dims", act_layer="act"
    )
    return LeViT(levit.SIZES[case], **{"distilled": case == "levit"} | options | changes)


def small_metaformer(case="metaformer", **changes):
    options = _renamed(metaformer.CASES[case], depths="stage_depths", dims="embed_dims")
    options |= {
        "image_size": metaformer.SIZES[case],
        "attention_stages": 2 if case == "metaformer" else 0,
    }
    if case == "metaformer_pool":
        options |= {"token_mixer": "pool", "mlp_head": False}
    return MetaFormer(**options | changes)


def small_mixer(case="mixer", **changes):
    """The MLP-Mixer, the gMLP or the ResMLP of a case."""
    options = _renamed(mixer.CASES[case], img_size="image_size", num_blocks="depth")
    return MIXERS[case.partition("_")[0]](**options | changes)


def small_mobileformer(**changes):
    """Its weights keep variances: PaddleViT's leave too little of an image before training."""
    sizes = {
        "stem_dim": 8,
        "lite_dims": (16, 8),
        "embed_dims": (8, 16, 16),
        "hidden_dims": (16, 16, 32),
        "strides": (1, 2, 2),
        "conv_groups": 2,
        "token_dim": 16,
        "num_heads": 2,
        "last_dim": 32,
        "head_dim": 24,
    }
    model = MobileFormer(**{"image_size": 64, "num_classes": 5} | sizes | changes)
    for layer in model.sublayers():
        if isinstance(layer, (nn.Conv2D, nn.Linear)):
            Normal(std=1.5 * fan_in(layer) ** -0.5)(layer.weight)
    return model


def small_mobileone(case="mobileone", **changes):
    options = _renamed(
        mobileone.CASES[case], d="stage_depths", dims="embed_dims", branches="num_branches"
    )
    options["use_se"] = bool(options.pop("se"))
    return MobileOne(mobileone.SIZES[case], **options | {"num_classes": 5} | changes)


def small_mobilevit(case="mobilevit", **changes):
    options = {"image_size": mobilevit.SIZES[case]} | mobilevit.CASES[case]
    return MobileViT(**options | changes)


def small_naflexvit(case="naflexvit", **changes):
    return NaFlexVit(**naflexvit.our_names(naflexvit.CASES[case]) | changes)


def small_pit(case="pit", **changes):
    options = _renamed(pit.CASES[case], depth="stage_depths", heads="num_heads")
    return PoolingVisionTransformer(**{"image_size": pit.SIZES[case]} | options | changes)


def small_poolformer(case="poolformer", **changes):
    options = _renamed(poolformer.CASES[case], depths="stage_depths", dims="embed_dims")
    options = {"image_size": poolformer.SIZES[case], "fc_norm": True} | options
    return PoolFormer(**options | changes)


def small_pvtv2(case="pvtv2", **changes):
    options = _renamed(
        pvtv2.CASES[case], depths="stage_depths", sr_ratios="sr_ratio", mlp_ratios="mlp_ratio"
    )
    return PyramidVisionTransformerV2(**{"image_size": pvtv2.SIZES[case]} | options | changes)


def small_regnet(case="regnety", **changes):
    options = {
        "stage_depths": REGNET_DEPTHS,
        "embed_dims": REGNET_DIMS[case],
        "num_classes": 5,
        "group_width": regnet.CASES[case]["group_size"],
        "se_ratio": regnet.CASES[case]["se_ratio"],
    }
    return RegNet(regnet.SIZES[case], **options | changes)


def small_repmlp(**changes):
    """The convolutions start louder than the authors': images have an effect without training."""
    options = {
        "image_size": 64,
        "num_classes": 5,
        "stage_depths": (1, 1, 2, 1),
        "embed_dims": (8, 12, 16, 24),
        "sharesets_nums": (1, 2, 4, 8),
    }
    return RepMLPNet(**options | changes).apply(init_convolution)


def small_repmlp_resnet(**changes):
    options = {
        "image_size": 64,
        "num_classes": 5,
        "stage_depths": (1, 2, 2, 1),
        "embed_dims": (16, 32, 64, 64),
        "part_size": 4,
        "fc3_groups": 2,
    }
    return RepMLPResNet(**options | changes).apply(init_convolution)


def small_replknet(**changes):
    """The convolutions start louder than the authors': images have an effect without training."""
    options = {
        "image_size": 64,
        "num_classes": 5,
        "stage_depths": (1, 1, 2, 1),
        "embed_dims": (8, 12, 16, 24),
        "large_kernel_sizes": (13, 9, 7, 5),
        "small_kernel": 5,
        "ffn_ratio": 2.0,
    }
    return RepLKNet(**options | changes).apply(init_convolution)


def small_resmlp(case="resmlp", **changes):
    return small_mixer(case, **changes)


def small_resnet(**changes):
    return ResNet(**{"image_size": 33, "depth": 10, "num_classes": 5} | changes)


def small_rest(case="rest", **changes):
    """Attention is normalised: with weights of 0.02 it would be rounding."""
    options = {"qkv_bias": False, "apply_transform": False, **rest.CASES[case]}
    options = _renamed(options, depths="stage_depths", sr_ratios="sr_ratio")
    return _enlarged(ResT(**{"image_size": rest.SIZE} | options | changes))


def small_restv2(case="restv2", **changes):
    options = _renamed(rest.CASES[case], depths="stage_depths", sr_ratios="sr_ratio")
    return ResTv2(**{"image_size": rest.SIZE} | options | changes)


def small_shuffle(**changes):
    options = {
        "image_size": 96,
        "num_classes": 5,
        "token_dim": 8,
        "embed_dim": 32,
        "stage_depths": (2, 2, 2, 2),
        "num_heads": (1, 2, 1, 2),
        "window_size": 3,
        "mlp_ratio": 0.5,
    }
    return ShuffleTransformer(**options | changes)


def small_swin(case="swin", **changes):
    options = _renamed(swin.CASES[case], img_size="image_size", depths="stage_depths")
    return SwinTransformer(**options | changes)


def small_swinv2(case="swinv2", **changes):
    options = _renamed(swinv2.CASES[case], img_size="image_size", depths="stage_depths")
    return SwinTransformerV2(**options | changes)


def small_t2t_vit(case="t2t_vit", **changes):
    """The first norm takes away the images' size, so that weights of 0.02 would hide them."""
    options = _renamed(t2t_vit.CASES[case], tokens_type="token_type")
    return _enlarged(T2TViT(**{"image_size": t2t_vit.SIZE} | options | changes))


def small_tinyvit(case="tinyvit", **changes):
    options = _renamed(tinyvit.CASES[case], depths="stage_depths")
    return TinyViT(tinyvit.SIZES[case], **options | changes)


def small_topformer(case="topformer", **changes):
    sizes = {"image_size": topformer.SIZES[case]} | topformer.CASES[case]
    return TopFormer(**sizes | changes)


def small_vip(**changes):
    sizes = {
        "stage_depths": (1, 1, 2, 1),
        "embed_dims": (16, 32, 32, 32),
        "mlp_ratio": (2, 3, 3, 3),
    }
    return VisionPermutator(**{"image_size": 56, "num_classes": 5} | sizes | changes)


def small_vit(case="vit", **changes):
    options = _renamed(vit.CASES[case], img_size="image_size")
    options["distilled"] = case == "vit_distilled"
    if case == "vit_registers":
        # timm's default; ours with pre_norm is CLIP's
        options["norm_eps"] = 1e-6
    return VisionTransformer(**options | changes)


def small_volo(case="volo", **changes):
    options = _renamed(volo.CASES[case], layers="stage_depths")
    return VOLO(**{"image_size": volo.SIZES[case]} | options | changes)


def small_xcit(case="xcit", **changes):
    # tokens_norm: timm's default
    options = {"tokens_norm": False} | _renamed(
        xcit.CASES[case],
        img_size="image_size",
        eta="init_values",
        cls_attn_layers="depth_token_only",
    )
    return XCiT(**options | changes)


def small_pyramid(kind, case, **changes):
    """The PVTv2 or the PoolFormer whose computation is that of a toolkit.

    Args:
        case: of ``golden/names_pvtv2.json`` or ``golden/names_poolformer.json``.
    """
    if kind == "poolformer":
        return small_poolformer(**{"fc_norm": False} | changes)
    if "MiT" in case:
        return small_pvtv2(**{"mlp_ratio": 4, "norm_eps": 1e-5} | changes)
    # timm's and the authors' PVTv2 take the constructor's default
    norm_eps = 1e-6 if "PaddleViT" in case else None
    size = "pvtv2_linear" if "linear" in case else "pvtv2"
    return small_pvtv2(size, **{"norm_eps": norm_eps} | changes)


SMALL_MODELS = {
    name.removeprefix("small_"): function
    for name, function in list(globals().items())
    if name.startswith("small_") and name != "small_pyramid"
}


SMALL_DEIT_OPTIONS = [
    "MODEL.EMBED_DIM",
    "24",
    "MODEL.NUM_HEADS",
    "3",
    "MODEL.MLP_RATIO",
    "1",
    "MODEL.NUM_CLASSES",
    "10",
]
