"""A finding of a check of data, in words."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from settings.configuration import Configuration

NAMES = {"train": "training", "val": "validation"}
# Examples of each finding.
EXAMPLES = 5


class Finding(NamedTuple):
    """A line about a dataset.

    Attributes:
        text: the line.
        examples: some of the images or classes that it concerns, by name, or errors of images.
        is_error: whether a run with this data would end in an error.
    """

    text: str
    examples: Sequence[str]
    is_error: bool


def stops_a_run(config: Configuration, mode: str, broken: np.ndarray, listed: bool) -> bool:
    """Returns whether a run can't continue without the ``broken`` samples of a split, [n] bool."""
    can_be_left_out = listed or (config.DATA.SKIP_BROKEN and mode == "train")
    return bool(broken.all()) or not can_be_left_out


def with_messages(
    messages: Mapping[int, str], flagged: np.ndarray, text: str, is_error: bool
) -> Finding:
    """Returns a finding about the flagged images or masks, with the messages of some of them."""
    places = np.flatnonzero(flagged)[:EXAMPLES].tolist()
    examples = [messages[place] for place in places if place in messages]
    return Finding(f"{text}: {flagged.sum():,}", examples, is_error)
