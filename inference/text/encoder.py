"""Embeds texts in the space of an image tower's outputs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle

from inference.text.tokenizer import find_tokenizer
from models.text_pretrained import load_text_tower


class TextEncoder:
    """A text tower with its tokenizer.

    Args:
        path: weights of images and texts, as ``find_weights`` takes them.
        batch_size: the number of texts that are computed together.

    Attributes:
        tower: the text tower (``models.text.TextTransformer``).
        scale: the factor of cosines.
        bias: what is added to the scaled cosines.

    Raises:
        InputError: the weights hold no text tower, or have no tokenizer beside them.
    """

    def __init__(self, path: str | Path, batch_size: int = 64) -> None:
        self.path = path
        self.batch_size = batch_size
        self.tower, layout = load_text_tower(path)
        self.tokenizer = find_tokenizer(path, self.tower.arguments, layout)
        self.scale = float(np.exp(self.tower.logit_scale.item()))
        self.bias = float(self.tower.logit_bias.item())

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the embeddings of texts, of length 1: [n, D] float32.

        Raises:
            InputError: as ``TextTokenizer``.
        """
        tokens = self.tokenizer(texts)
        lengths = self._lengths(tokens)
        # Texts of similar lengths together: those of a causal tower are cut to the longest.
        order = np.argsort(lengths, kind="stable")
        embeddings = np.empty((len(texts), self.tower.arguments.out_dim), np.float32)
        with paddle.no_grad():
            for first in range(0, len(texts), self.batch_size):
                rows = order[first : first + self.batch_size]
                batch = tokens[rows, : int(lengths[rows].max())]
                embeddings[rows] = self.tower.normalised(paddle.to_tensor(batch)).numpy()
        return embeddings

    def _lengths(self, tokens: np.ndarray) -> np.ndarray:
        """Returns how many tokens of each text its embedding depends on."""
        arguments = self.tower.arguments
        if not arguments.causal or arguments.pool == "last":
            return np.full(len(tokens), tokens.shape[1])
        if arguments.pool == "argmax":
            return tokens.argmax(axis=1) + 1
        ends = (tokens == arguments.eos).argmax(axis=1)
        return ends + 1
