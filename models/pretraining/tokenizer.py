"""The tokenizers whose tokens BEiT predicts: a discrete VAE (Ramesh et al. 2021, arXiv:2102.12092),
as BEiT (arXiv:2106.08254) has it, and vector quantisation, as in BEiT v2 (arXiv:2208.06366).
"""

import math
from typing import Any, Literal

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

from errors import InputError
from models.base import ImageModel
from models.beit import Beit
from models.layers import Linear, init_linear
from models.layers.batch_norm import keeping_statistics
from models.pretraining import codebook
from models.pretraining.network import PretrainingNetwork, check_heads
from weights.names import tokenizer as names

Quantizer = Literal["gumbel", "nearest"]
# The prime of ``gumbel_noise``, whose square fits into 64 bits, and the distance of two numbers.
_MODULUS = 2**31 - 1
_STEP = 1_103_515_245
_FACTORS = (48_271, 69_621, 39_373)


class Tokenizer(PretrainingNetwork):
    """Maps images to a grid of tokens, and tokens back to pixels or to a teacher's features.

    - "gumbel": an encoder's features become logits over the vocabulary. In training, a code is the
      sum of all codes, weighted by the softmax of the logits with Gumbel noise. Otherwise it is the
      code with the highest logit.
    - "nearest": features are projected to the codes' width, and replaced by the code with the
      smallest angle. The gradient passes as if they weren't. The codes have no gradient: they
      follow their features (``init_codes``, ``update_codes``).

    The decoder is a BEiT whose patches are the codes. With "nearest", names of parameters are those
    of BEiT v2's authors, but for the codes.

    Args:
        encoder: a model with a map of features.
        vocabulary: the number of codes.
        code_dim: the width of a code.
        quantizer: "gumbel" or "nearest".
        decoder_width, decoder_depth, decoder_heads: channels, blocks and heads of the decoder.
        outputs: numbers that the decoder returns for each token; None: its pixels.
        kmeans: "nearest": whether the codes are 0 until ``init_codes``; else they are random.

    Attributes:
        grid: rows and columns of tokens.
        decodes_pixels: whether the decoder's outputs are pixels, and not a teacher's features.

    Raises:
        InputError: an encoder without a map, images that aren't a multiple of its places, or a width
            that isn't a multiple of the heads.
    """

    weight_names = names

    def __init__(
        self,
        encoder: ImageModel,
        vocabulary: int,
        code_dim: int,
        quantizer: Quantizer,
        decoder_width: int,
        decoder_depth: int,
        decoder_heads: int,
        outputs: int | None = None,
        kmeans: bool = False,
    ) -> None:
        super().__init__(encoder)
        check_heads(decoder_width, decoder_heads)
        self.grid, side = grid_of(encoder)
        self.vocabulary = vocabulary
        self.quantizer = quantizer
        width = encoder.num_features
        codes = [vocabulary, code_dim]
        if quantizer == "gumbel":
            self.encode_task_layer = nn.Sequential(Linear(width, vocabulary))
            self.codebook = self.create_parameter(codes, default_initializer=Normal(std=1.0))
        else:
            self.encode_task_layer = nn.Sequential(
                Linear(width, width), nn.Tanh(), Linear(width, code_dim)
            )
            start = paddle.zeros(codes) if kmeans else paddle.randn(codes)
            self.register_buffer("codebook", F.normalize(start, axis=-1))
        self.decoder = Beit(
            image_size=self.grid,
            patch_size=1,
            in_channels=code_dim,
            num_classes=0,
            embed_dim=decoder_width,
            depth=decoder_depth,
            num_heads=decoder_heads,
        )
        self.decodes_pixels = outputs is None
        outputs = outputs or side * side * encoder.in_channels
        self.decode_task_layer = nn.Sequential(
            Linear(decoder_width, decoder_width), nn.Tanh(), Linear(decoder_width, outputs)
        )
        self.encode_task_layer.apply(init_linear)
        self.decode_task_layer.apply(init_linear)
        _freeze_unread(encoder)
        self._check_places()

    def forward(
        self,
        images: paddle.Tensor,
        targets: paddle.Tensor | None = None,
        seeds: paddle.Tensor | None = None,
        temperature: float = 1.0,
    ) -> dict[str, paddle.Tensor]:
        """Returns values of each sample, [B] float32, and ``tokens`` [B, tokens] int64. With "nearest"
        the features [B, tokens, code_dim] that became these tokens are among them, as ``features``.

        "reconstruction" is the mean squared error of pixels, or 1 minus the cosine of features.
        "kl" is the divergence of the logits' distribution from a uniform one, the mean over tokens,
        in nats. "quantisation" is the mean squared distance of features and codes, in which the
        features move.

        Args:
            images: [B, C, H, W], normalised.
            targets: features [B, tokens, outputs]; None: the pixels of ``images``.
            seeds: [B] int64, the samples' seeds for Gumbel noise; None: the highest logit is taken.
            temperature: of the softmax with noise.
        """
        features = self._logits_or_features(images)
        if self.quantizer == "gumbel":
            tokens = features.argmax(-1)
            values = {"kl": _divergence(features)}
            if seeds is None:
                codes = F.embedding(tokens, self.codebook)
            else:
                noise = gumbel_noise(seeds, features.shape[1:])
                shares = F.softmax((features + noise) / temperature, axis=-1)
                codes = paddle.matmul(shares, self.codebook)
        else:
            tokens = codebook.nearest(features, self._codes())
            codes = self.codes(tokens)
            distances = (features - codes) ** 2
            values = {"quantisation": distances.mean([1, 2]), "features": features.detach()}
            codes = features + (codes - features).detach()
        decoded = self.decode(codes)
        if targets is None:
            errors = (decoded - self.patches(images)) ** 2
            values["reconstruction"] = errors.mean([1, 2])
        else:
            similarity = F.cosine_similarity(decoded, targets.astype("float32"), axis=-1)
            values["reconstruction"] = 1 - similarity.mean(1)
        return {"tokens": tokens, **values}

    def tokens(self, images: paddle.Tensor) -> paddle.Tensor:
        """Returns the tokens of normalised images [B, C, H, W]: [B, tokens] int64, row by row."""
        features = self._logits_or_features(images)
        return (
            features.argmax(-1)
            if self.quantizer == "gumbel"
            else codebook.nearest(features, self._codes())
        )

    @paddle.no_grad()
    def init_codes(self, images: paddle.Tensor, seed: int) -> None:
        """Sets the codes of "nearest" to the means of k-means on the features of all processes'
        images, unless they are set already.

        Args:
            images: this process's, [B, C, H, W], normalised.
            seed: of the features that k-means begins with.
        """
        if self.codebook.any():
            return
        with keeping_statistics(self):
            features = self._logits_or_features(images).flatten(0, 1)
        first = codebook.sampled(features, self.vocabulary, np.random.default_rng(seed))
        self.codebook.set_value(codebook.kmeans(features, first))

    @paddle.no_grad()
    def update_codes(self, features: paddle.Tensor, tokens: paddle.Tensor, decay: float) -> None:
        """Updates the codes of "nearest", which are moving averages of the features of all processes.

        Args:
            features, tokens: this process's, as ``forward`` returns them.
            decay: of the moving average.
        """
        codes = codebook.updated(self.codebook, features.flatten(0, 1), tokens.flatten(), decay)
        paddle.assign(codes, self.codebook)

    def codes(self, tokens: paddle.Tensor) -> paddle.Tensor:
        """Returns the codes of tokens [B, tokens]: [B, tokens, code_dim]."""
        return F.embedding(tokens, self._codes())

    def decode(self, codes: paddle.Tensor) -> paddle.Tensor:
        """Returns the output of the decoder for codes [B, tokens, code_dim]: [B, tokens, outputs]
        float32.
        """
        maps = codes.transpose([0, 2, 1]).reshape([codes.shape[0], -1, *self.grid])
        decoder = self.decoder
        features = decoder.fc_norm(decoder.forward_features(maps))
        return self.decode_task_layer(features[:, decoder.num_prefix_tokens :]).astype("float32")

    def patches(self, images: paddle.Tensor) -> paddle.Tensor:
        """Returns the pixels of each token: [B, C, H, W] -> [B, tokens, pixels * C]."""
        batch, channels, height, width = images.shape
        rows, columns = self.grid
        split = images.reshape([batch, channels, rows, height // rows, columns, width // columns])
        return split.transpose([0, 2, 4, 3, 5, 1]).reshape([batch, rows * columns, -1])

    def pictures(self, patches: paddle.Tensor) -> paddle.Tensor:
        """Returns the images of ``patches``: [B, tokens, pixels * C] -> [B, C, H, W]."""
        rows, columns = self.grid
        height = self.image_size[0] // rows
        width = self.image_size[1] // columns
        split = patches.reshape([-1, rows, columns, height, width, self.in_channels])
        return split.transpose([0, 5, 1, 3, 2, 4]).reshape([-1, self.in_channels, *self.image_size])

    def no_weight_decay(self) -> set[str]:
        others = {f"decoder.{name}" for name in self.decoder.no_weight_decay()}
        return super().no_weight_decay() | others | {"codebook"}

    @paddle.no_grad()
    def _check_places(self) -> None:
        """Raises InputError unless the encoder's features are those of the places."""
        self.eval()
        images: Any = paddle.zeros([1, self.in_channels, *self.image_size])
        rows, columns = self.grid
        if self._features(images).shape[1] != rows * columns:
            raise without_map(self.encoder)
        self.train()

    def _codes(self) -> paddle.Tensor:
        """Returns the codes, [vocabulary, code_dim]; those of "nearest" have the length 1."""
        # An average of the weights (TRAIN.MODEL_EMA) has shorter ones.
        return F.normalize(self.codebook, axis=-1) if self.quantizer == "nearest" else self.codebook

    def _logits_or_features(self, images: paddle.Tensor) -> paddle.Tensor:
        """Returns the input of the quantizer, float32: the logits [B, tokens, vocabulary] of "gumbel", or
        the features [B, tokens, code_dim] of "nearest", of length 1.
        """
        outputs = self.encode_task_layer(self._features(images)).astype("float32")
        return outputs if self.quantizer == "gumbel" else F.normalize(outputs, axis=-1)

    def _features(self, images: paddle.Tensor) -> paddle.Tensor:
        """Returns the encoder's normalised features: [B, tokens, D]."""
        features = self.encoder.forward_features(images)
        # A classifier has this norm after its pooling; here it normalises each place.
        norm = getattr(self.encoder, "fc_norm", None)
        if isinstance(norm, nn.Layer):
            features = norm(features)
        return self.encoder._as_map(features, "NLC")


def gumbel_noise(seeds: paddle.Tensor, shape: list[int]) -> paddle.Tensor:
    """Returns noise of the standard Gumbel distribution, a pure function of each sample's seed.

    The device's own generator would give other numbers with another number of processes.

    Args:
        seeds: [B] int64, from 0 to 2 ** 31 - 2.

    Returns:
        [B, *shape] float32.
    """
    # Paddle computes integers and numbers of Python in float32, in a graph and in Paddle 2.6. So the
    # constants are tensors.
    constants = paddle.to_tensor([1, _MODULUS, _STEP, *_FACTORS], dtype="int64")
    one, modulus, step, *factors = constants
    index = paddle.arange(math.prod(shape), dtype="int64")
    seeds = seeds.unsqueeze(1)
    state = (seeds + index * step) % modulus
    # Polynomials modulo a prime; each round adds the seed again, so that the numbers of two seeds
    # aren't the same ones in another order.
    for factor in factors:
        state = (state * state % modulus + (state + seeds + one) * factor) % modulus
    uniform = (state.astype("float64") + 0.5) / _MODULUS
    noise = -(-uniform.log()).log()
    return noise.astype("float32").reshape([seeds.shape[0], *shape])


def _divergence(logits: paddle.Tensor) -> paddle.Tensor:
    """Returns the divergence of softmax(logits) from a uniform distribution: [B, N, V] -> [B]."""
    logits = logits.astype("float32")
    # Paddle's own log_softmax takes minutes for 100,000 codes on a CPU, and ends at -64 there.
    logs = logits - paddle.logsumexp(logits, axis=-1, keepdim=True)
    return ((logs.exp() * logs).sum(-1) + math.log(logits.shape[-1])).mean(1)


def grid_of(encoder: ImageModel) -> tuple[tuple[int, int], int]:
    """Returns rows and columns of the encoder's last map, and the pixels along a place's side.

    Raises:
        InputError: it has no map, or the image's size isn't a multiple of a place.
    """
    # A class token that joins after the last map is read by layers that a tokenizer wouldn't train.
    joins_late = hasattr(encoder, "cls_token") and not encoder.num_prefix_tokens
    infos = encoder.feature_info
    has_map = encoder.ends_in_map and not joins_late and bool(infos)
    if not has_map or infos[-1]["num_chs"] != encoder.num_features:
        raise without_map(encoder)
    side = encoder.feature_info[-1]["reduction"]
    height, width = encoder.image_size
    if height % side or width % side:
        raise InputError(
            f"IMAGE_SIZE is {height} x {width}, expected multiples of {side}: a token of"
            f" {type(encoder).__name__} covers {side} x {side} pixels"
        )
    return (height // side, width // side), side


def without_map(encoder: ImageModel) -> InputError:
    """Returns the error of an encoder whose last features aren't a map."""
    name = type(encoder).__name__
    return InputError(
        f"TASK is tokenizer, but {name} has no map of last features; use a ViT or a ConvMixer"
    )


def _freeze_unread(encoder: ImageModel) -> None:
    """Freezes parameters that only a classifier uses, such as those of a norm after the pooling."""
    heads = {name.partition(".")[0] for name in encoder.classifier_names()}
    for name, parameter in encoder.named_parameters():
        if name.partition(".")[0] in heads:
            parameter.stop_gradient = True
