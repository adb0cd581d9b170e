"""Sentences that stand for classes, from which a text tower makes a classifier."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from errors import InputError, Unreadable, counted, printable, reading
from inference.text.encoder import TextEncoder
from loading.class_names import UNPRINTABLE
from loading.files import utf8_text
from settings.plain import whole_file

# CLIP's own default (arXiv:2103.00020, section 3.1.4).
TEMPLATES = ("a photo of a {}.",)
_MOST_TEMPLATES = 1000
_LARGEST_FILE = 1 << 20
# The sentences whose embeddings are held at a time.
_SENTENCES = 4096


def read_templates(file: str | Path) -> list[str]:
    """Returns the templates in a text file, one a line, with {} in the place of a class's name.

    Empty lines don't count.

    Raises:
        InputError: it can't be read, or a line isn't a template.
    """
    with reading(file, "a list of templates"):
        lines = utf8_text(whole_file(file, _LARGEST_FILE)).split("\n")
        templates = [line.strip() for line in lines if line.strip()]
        for template in templates:
            if UNPRINTABLE.search(template):
                raise Unreadable(f"its line {printable(template, 60)} has an unprintable character")
            if template.count("{}") != 1:
                raise Unreadable(
                    f"its line {printable(template, 60)} has {template.count('{}')} places for a"
                    " class's name, expected one: {}"
                )
        if not 0 < len(templates) <= _MOST_TEMPLATES:
            raise Unreadable(f"it has {len(templates)} templates, expected 1 to {_MOST_TEMPLATES}")
    return templates


def prompts_of(name: str, templates: Sequence[str]) -> list[str]:
    """Returns the sentences that stand for a class. Underscores in its name become spaces."""
    words = " ".join(name.replace("_", " ").split())
    return [template.replace("{}", words) for template in templates]


class TextClassifier(NamedTuple):
    """A classifier of embeddings of length 1.

    Attributes:
        weights: [D, K].
        biases: [K].
        alike: a line that names classes whose weights are the same; "" if there are none.
        cut: a line about sentences that the text tower doesn't read to their end; "" if there are
            none.
    """

    weights: np.ndarray
    biases: np.ndarray
    alike: str
    cut: str


def text_classifier(
    encoder: TextEncoder, classes: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> TextClassifier:
    """Returns the classifier that texts make.

    A class's vector is the mean of its sentences' embeddings, scaled to length 1 (arXiv:2103.00020,
    section 3.1.4). The logits are those of the model of images and texts for such a vector.

    Raises:
        InputError: as ``TextEncoder``, or the sentences of a class have no direction.
    """
    at_once = max(1, _SENTENCES // len(templates))
    blocks = []
    # The first class that has some tokens, and the classes that have the same.
    known: dict[bytes, int] = {}
    pairs = []
    cut = ""
    for first in range(0, len(classes), at_once):
        names = classes[first : first + at_once]
        sentences = [sentence for name in names for sentence in prompts_of(name, templates)]
        tokens = encoder.tokens(sentences)
        cut = cut or encoder.cut_note(sentences, tokens.is_cut)
        for place, row in enumerate(tokens.numbers.reshape(len(names), -1), first):
            other = known.setdefault(hashlib.sha256(row.tobytes()).digest(), place)
            if other != place:
                pairs.append((classes[other], classes[place]))
        by_class = encoder.embeddings(tokens.numbers).reshape(len(names), len(templates), -1)
        blocks.append(by_class.mean(axis=1, dtype=np.float64))
    means = np.concatenate(blocks)
    lengths = np.linalg.norm(means, axis=1, keepdims=True)
    if not lengths.all():
        name = classes[int(np.flatnonzero(lengths == 0)[0])]
        raise InputError(
            f"the sentences of the class {printable(name, 60)} cancel each other out; use fewer"
        )
    weights = encoder.scale * (means / lengths).T
    biases = np.full(len(classes), encoder.bias, np.float32)
    return TextClassifier(weights.astype(np.float32), biases, _alike(pairs), cut)


def _alike(pairs: Sequence[tuple[str, str]]) -> str:
    """Returns a line about pairs of classes that have the same tokens."""
    if not pairs:
        return ""
    one, other = (printable(name, 60) for name in pairs[0])
    more = f", as {counted(len(pairs) - 1, 'more pair')}" if pairs[1:] else ""
    return f"the classes '{one}' and '{other}' have the same tokens{more}, so they can't be distinguished"
