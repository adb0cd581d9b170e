"""The networks of BEiT (Bao et al. 2021, arXiv:2106.08254) and BEiT v2 (Peng et al. 2022,
arXiv:2208.06366).

They predict the tokens of masked patches. The names of parameters are the authors', but for the
encoder's prefix.
"""

import copy

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal
from paddle.utils import unique_name

from errors import InputError
from models.base import ImageModel
from models.beit import Beit
from models.eva import Eva
from models.layers.init import init_branches
from models.layers.linear import Linear
from models.pretraining.network import (
    PretrainingNetwork,
    at_places,
    enlarged,
    masked_patches,
    masked_places,
)
from models.vit import VisionTransformer
from weights.names import beit_pretraining as names


class BeitPretraining(PretrainingNetwork):
    """An encoder that sees a mask token in place of each masked patch, and a head for the tokens.

    With ``head_layers`` it is BEiT v2's: further blocks read the class token of the last block
    and the patches of an earlier one, and predict the same tokens through the same norm and head.
    What the earlier patches lack has to come through the class token.

    Args:
        encoder: a transformer with one token for each patch: BEiT, ViT or EVA.
        vocabulary: number of different tokens.
        max_masked: how many patches of an image may be masked at most.
        early_layers: the number of the block, counted from 1, whose patches the additional blocks
            of HEAD_LAYERS read.
        head_layers: the number of further blocks; 0: BEiT's own training.

    Raises:
        InputError: another encoder, or blocks that it doesn't have.
    """

    weight_names = names
    input_tokens = ("mask_token",)

    def __init__(
        self,
        encoder: ImageModel,
        vocabulary: int,
        max_masked: int,
        early_layers: int = 0,
        head_layers: int = 0,
    ) -> None:
        super().__init__(encoder)
        _check_encoder(encoder, early_layers, head_layers)
        width = encoder.num_features
        self.max_masked = max_masked
        self.early_layers = early_layers
        self.mask_token = self.create_parameter([1, 1, width], default_initializer=Normal(std=0.02))
        self.lm_head = Linear(width, vocabulary)
        Normal(std=0.02)(self.lm_head.weight)
        self.cls_pt_layers = nn.LayerList()
        if head_layers:
            # Blocks of the same places, with their rates of drop path and weights of their own.
            places = slice(early_layers, early_layers + head_layers)
            self.cls_pt_layers.extend([copy.deepcopy(block) for block in encoder.blocks[places]])
            # Checkpoints tell optimizer states apart by these names; a copy's begins as its source's.
            for parameter in self.cls_pt_layers.parameters():
                parameter.name = f"{unique_name.generate('cls_pt_layers')}.w_0"
            self.cls_pt_layers.apply(encoder._init_weights)
            if isinstance(encoder, Beit):
                init_branches(self.cls_pt_layers, first=early_layers + 1)

    def forward(
        self, images: paddle.Tensor, masked: paddle.Tensor, tokens: paddle.Tensor
    ) -> dict[str, paddle.Tensor]:
        """Returns values of each sample, [B] float32.

        "loss" is the mean cross-entropy over the masked patches; with further blocks the sum of
        both predictions'. "token_acc" is the percentage of masked patches whose token is predicted.

        Args:
            images: [B, C, H, W], normalised.
            masked: [B, patches], 1 where a patch is masked, else 0.
            tokens: [B, patches] int64, the tokens of all patches.
        """
        # Paddle 2.6 takes no uint8 in a graph.
        masked = masked.astype("float32")
        places = masked_places(masked, self.max_masked)
        counted = paddle.take_along_axis(masked, places, 1)
        targets = paddle.take_along_axis(tokens, places, 1)
        features = self._features(images, masked)
        predictions = [self.lm_head(at_places(each, places)).astype("float32") for each in features]
        losses = [F.cross_entropy(each, targets, reduction="none") for each in predictions]
        loss = paddle.stack([each.reshape(targets.shape) for each in losses]).sum(0)
        right = (predictions[0].detach().argmax(-1) == targets).astype("float32") * 100
        return {"loss": _mean(loss, counted), "token_acc": _mean(right, counted)}

    @paddle.no_grad()
    def predict(self, images: paddle.Tensor, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns the predicted tokens of all patches, [B, patches] int64.

        Args:
            images, masked: as in ``forward``.
        """
        return self.lm_head(self._features(images, masked)[0]).argmax(-1)

    def values_of_pixels(self, values: paddle.Tensor) -> paddle.Tensor:
        """Gives each pixel the value of its patch: [B, patches] -> [B, 1, H, W] float32."""
        patch_embed = self.encoder.patch_embed
        values = values.astype("float32").reshape([-1, *patch_embed.grid_size])
        return enlarged(values, patch_embed.patch_size).unsqueeze(1)

    def _features(self, images: paddle.Tensor, masked: paddle.Tensor) -> list[paddle.Tensor]:
        """Returns the normalised patches [B, patches, D] of the last block, and with further blocks
        theirs.
        """
        encoder = self.encoder
        x = self._embed(images, masked)
        shared = encoder._shared()
        stages = list(encoder._stages())
        for stage in stages[: self.early_layers]:
            x = encoder._stage(stage, x, shared)
        early = x
        for stage in stages[self.early_layers :]:
            x = encoder._stage(stage, x, shared)
        prefix = encoder.num_prefix_tokens
        outputs = [x]
        if len(self.cls_pt_layers):
            y = paddle.concat([x[:, :prefix], early[:, prefix:]], axis=1)
            # Paddle's graphs take no zip(strict=...).
            for index, block in enumerate(self.cls_pt_layers):
                # A ViT's stage is a block with its prompts.
                stage = stages[self.early_layers + index]
                replaced = (block, *stage[1:]) if isinstance(stage, tuple) else block
                y = encoder._stage(replaced, y, shared)
            outputs.append(y)
        # One of the two is a norm, the other one does nothing.
        return [encoder.fc_norm(encoder.norm(each))[:, prefix:] for each in outputs]

    def _embed(self, images: paddle.Tensor, masked: paddle.Tensor) -> paddle.Tensor:
        """Returns the encoder's embedding, with the mask token in place of masked patches."""
        with masked_patches(self.encoder.patch_embed, masked, self.mask_token):
            return self.encoder._embed(images)


def _mean(values: paddle.Tensor, counted: paddle.Tensor) -> paddle.Tensor:
    """Returns the mean of each sample's counted values, [B, K] -> [B]."""
    return (values * counted).sum(1) / counted.sum(1).clip(min=1)


def _check_encoder(encoder: ImageModel, early_layers: int, head_layers: int) -> None:
    """Raises InputError if BEiT's training can't take the encoder."""
    name = type(encoder).__name__
    if not isinstance(encoder, VisionTransformer | Eva | Beit):
        raise InputError(
            f"TASK is beit, but {name} isn't a transformer with one token per patch; use a"
            " BEiT, a ViT or an EVA"
        )
    depth = len(encoder.blocks)
    if head_layers and not 0 < early_layers <= depth - head_layers:
        raise InputError(
            f"METHOD.EARLY_LAYERS is {early_layers}, expected 1 to {depth - head_layers} ({depth}"
            f" blocks minus METHOD.HEAD_LAYERS {head_layers})"
        )
