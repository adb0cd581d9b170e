"""Writes NAME.json and NAME.npz beside this file: what reduced segmentation models of PaddleViT
give with weights by ``array``.

PYTHONPATH=tests python tests/golden/make_paddlevit_heads.py PADDLEVIT [NAME ...]

PADDLEVIT is the folder semantic_segmentation of a clone of BR-IDL/PaddleViT; this needs Paddle. The
.json has the names and shapes in the file, the .npz the logits of two images.
"""

import importlib
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

from golden.make_names_vit import values

FOLDER = Path(__file__).parent


def import_from(folder: Path, module: str) -> types.ModuleType:
    """Returns a module of PaddleViT's ``src.models``.

    The files that gather others need Paddle 2.1, so empty packages stand in their place.
    """
    for name in ("src", "src.models", "src.models.backbones", "src.models.decoders", "src.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules.setdefault(name, package)
    sys.modules["src.utils"].load_pretrained_model = None
    return importlib.import_module(f"src.models.{module}")


def array(name: str, shape: tuple[int, ...] | list[int]) -> np.ndarray:
    """Returns ``values``; for batch norms, variances near 0.1 and weights near 1.

    So images change the outputs much, for weights as small as these.
    """
    found = values(name, shape)
    if name.endswith("_variance"):
        return np.abs(found) / 10 + np.float32(0.05)
    if re.search(r"(bn\d*|\.conv\.[23])\.weight$", name) and len(shape) == 1:
        return found + np.float32(1)
    return found


class Segformer(nn.Layer):
    """PaddleViT's ``Segformer``, whose file needs Paddle 2.1."""

    def __init__(self, backbone: nn.Layer, decode_head: nn.Layer) -> None:
        super().__init__()
        self.backbone = backbone
        self.decode_head = decode_head

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return self.decode_head(self.backbone(images))[0]


class TopFormer(nn.Layer):
    """PaddleViT's ``TopFormer``, likewise."""

    def __init__(self, encoder: nn.Layer, decoder: nn.Layer) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return self.decoder(self.encoder(images), images.shape)


def segformer(folder: Path) -> tuple[nn.Layer, tuple[int, int]]:
    mit = import_from(folder, "backbones.mix_transformer").MixVisionTransformer
    head = import_from(folder, "decoders.segformer_head").SegformerHead
    encoder = mit(embed_dims=4, num_layers=[2, 1, 1, 1], num_heads=[1, 2, 3, 4])
    return Segformer(encoder, head([4, 8, 12, 16], 12, 5, False)), (32, 64)


def topformer(folder: Path) -> tuple[nn.Layer, tuple[int, int]]:
    # Paddle's SyncBatchNorm is for GPUs alone, and computes the same in evaluation.
    paddle.nn.SyncBatchNorm = paddle.nn.BatchNorm2D
    trans = types.SimpleNamespace(
        INPUT_CHANNELS=[8, 16, 24, 32],
        OUT_CHANNELS=[None, 24, 24, 24],
        EMBED_OUT_INDICE=[1, 2, 3, 5],
        DECODE_OUT_INDICES=[1, 2, 3],
        INJECTION=True,
        INJECTION_TYPE="multi_sum",
        C2T_STRIDE=2,
        KEY_DIM=4,
        NUM_HEADS=3,
        DEPTH=2,
        MLP_RATIO=2,
        ATTEN_RATIO=2.0,
        ATTEN_DROPOUT=0.0,
        CFGS=[
            [3, 1, 16, 1],
            [3, 4, 8, 2],
            [5, 3, 16, 2],
            [3, 3, 24, 2],
            [5, 6, 32, 2],
            [3, 6, 32, 1],
        ],
    )
    simple = types.SimpleNamespace(
        IN_CHANNELS=[24, 24, 24],
        IN_INDEX=[0, 1, 2],
        INPUT_TRANSFORM="multiple_select",
        CHANNELS=24,
        IS_DW=True,
        DROPOUT_RATIO=0.1,
        ALIGN_CORNERS=False,
    )
    model = types.SimpleNamespace(TRANS=trans, SIMPLE=simple, DROPOUT=0.0, DROP_PATH=0.0)
    data = types.SimpleNamespace(NUM_CLASSES=5)
    config = types.SimpleNamespace(MODEL=model, DATA=data)
    encoder = import_from(folder, "backbones.top_transformer").TopTransformer(config)
    decoder = import_from(folder, "decoders.simple_head").SimpleHead(config)
    return TopFormer(encoder, decoder), (50, 70)


class Trans2Seg(nn.Layer):
    """What PaddleViT's ``Trans2Seg`` computes of its encoder's maps, likewise.

    It takes images, of which it makes such maps.
    """

    def __init__(self, folder: Path, places: int) -> None:
        super().__init__()
        transformers = import_from(folder, "backbones.trans2seg_transformer")
        # The decoder's file reads this from a package that gathers others.
        sys.modules["src.models.backbones"].expand = transformers.expand
        decoders = import_from(folder, "decoders.trans2seg_head")
        sizes = {"embed_dim": 16, "depth": 3, "num_heads": 4, "mlp_ratio": 3.0}
        self.hybrid_embed = decoders.HybridEmbed(24, 16)
        self.transformer_encoder = transformers.TransformerEncoder(num_patches=places, **sizes)
        self.transformer_decoder = transformers.TransformerDecoder(
            nclass=5, decoder_feat_HxW=places, **sizes
        )
        for block in self.transformer_decoder.blocks_decoder:
            # It has 1,024 places there, whatever the images' size.
            block.norm4 = nn.LayerNorm(places)
        options = {"EMBED_DIM": 16, "NUM_HEADS": 4}
        self.cnn_head = decoders.CNNHEAD(options, c1_channels=12, hid_dim=8)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        """Returns the logits before they are resized to the images' size."""
        fine, coarse = trans2seg_maps(images)
        batch, _, height, width = coarse.shape
        _, places = self.transformer_encoder.forward_encoder(self.hybrid_embed(coarse))
        scores = self.transformer_decoder.forward_decoder(places)[-1]
        maps = places.reshape([batch, height, width, -1]).transpose([0, 3, 1, 2])
        expand = sys.modules["src.models.backbones"].expand
        scores = scores.reshape([batch * 5, 4, height, width])
        x = paddle.concat([expand(maps, 5), scores], 1)
        return self.cnn_head(x, fine, 5, batch)


def trans2seg_maps(images: paddle.Tensor) -> list[paddle.Tensor]:
    """Returns maps [B, 12, 18, 18] and [B, 24, 5, 5] that depend on the images."""
    factor = 1 + images.mean([1, 2, 3], keepdim=True)
    batch = images.shape[0]
    return [
        paddle.to_tensor(values(name, (batch, *shape))) * factor
        for name, shape in (("fine", (12, 18, 18)), ("coarse", (24, 5, 5)))
    ]


def trans2seg(folder: Path) -> tuple[nn.Layer, tuple[int, int]]:
    return Trans2Seg(folder, 25), (72, 72)


MODELS = {"segformer": segformer, "topformer": topformer, "trans2seg": trans2seg}


def write(name: str, folder: Path) -> None:
    model, size = MODELS[name](folder)
    model.eval()
    shapes = {}
    for key, tensor in model.state_dict().items():
        shapes[key] = list(tensor.shape)
        tensor.set_value(array(key, tuple(tensor.shape)))
    logits = model(paddle.to_tensor(values("images", (2, 3, *size)))).numpy()
    np.savez_compressed(FOLDER / f"paddlevit_{name}.npz", logits=logits)
    content = {"size": size, "shapes": shapes}
    (FOLDER / f"paddlevit_{name}.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    for name in sys.argv[2:] or MODELS:
        write(name, Path(sys.argv[1]))
