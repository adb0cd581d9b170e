"""Embeds texts in the space of an image tower's outputs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paddle

from errors import InputError, counted, printable
from inference.text.tokenizer import Tokens, find_tokenizer
from models.text_pretrained import load_text_tower

# The logarithm of the factor of cosines. CLIP's ends at that of 100.
_LARGEST_SCALE = 20
# The attention's scores of a batch of texts, in numbers.
_SCORES = 1 << 26


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
        InputError: the weights have no text tower, or have no tokenizer beside them.
    """

    def __init__(self, path: str | Path, batch_size: int = 64) -> None:
        self.path = path
        self.tower, layout = load_text_tower(path)
        self.tokenizer = find_tokenizer(path, self.tower.arguments, layout)
        logarithm = float(self.tower.logit_scale.item())
        if not abs(logarithm) <= _LARGEST_SCALE:
            raise InputError(
                f"{path}: its logit_scale is {logarithm:g}, the logarithm of a factor; expected"
                f" at most {_LARGEST_SCALE}"
            )
        self.scale = float(np.exp(logarithm))
        self.bias = float(self.tower.logit_bias.item())
        # A file says how many heads and tokens there are. CLIP's and SigLIP's fit many times.
        arguments = self.tower.arguments
        scores = arguments.num_heads * arguments.context_length**2
        self.batch_size = max(1, min(batch_size, _SCORES // scores))

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the embeddings of texts, of length 1: [n, D] float32.

        Raises:
            InputError: as ``TextTokenizer``.
        """
        return self.embeddings(self.tokens(texts).numbers)

    def tokens(self, texts: Sequence[str]) -> Tokens:
        """Returns the tokens of texts.

        Raises:
            InputError: as ``TextTokenizer``, or the text tower has no such token.
        """
        tokens = self.tokenizer.read(texts)
        vocabulary = self.tower.arguments.vocab_size
        most = tokens.numbers.max(initial=0)
        if most >= vocabulary:
            raise InputError(
                f"{self.path}: its tokenizer has the token {most}, its text tower"
                f" {vocabulary}; they belong to different models"
            )
        return tokens

    def cut_note(self, texts: Sequence[str], is_cut: np.ndarray) -> str:
        """Returns a line that says which texts are cut; "" if none is.

        Args:
            is_cut: of ``tokens``.
        """
        places = np.flatnonzero(is_cut)
        if not len(places):
            return ""
        length = self.tower.arguments.context_length
        were = "was" if len(places) == 1 else "were"
        return (
            f"the text tower reads {length} tokens, so {counted(len(places), 'text')} {were} cut, the"
            f" first: {printable(texts[int(places[0])], 60)}"
        )

    def embeddings(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the embeddings of texts, of length 1: [n, context_length] -> [n, D] float32.

        Raises:
            InputError: they aren't finite.
        """
        lengths = self._lengths(tokens)
        # Texts of similar lengths together: those of a causal tower are cut to the longest.
        order = np.argsort(lengths, kind="stable")
        embeddings = np.empty((len(tokens), self.tower.arguments.out_dim), np.float32)
        with paddle.no_grad():
            for first in range(0, len(tokens), self.batch_size):
                rows = order[first : first + self.batch_size]
                batch = tokens[rows, : int(lengths[rows].max())]
                embeddings[rows] = self.tower.normalised(paddle.to_tensor(batch)).numpy()
        if not np.isfinite(embeddings).all():
            raise InputError(f"{self.path}: the embeddings of its text tower aren't finite")
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
