"""Builds a text tower and loads its weights."""

from pathlib import Path
from typing import Any

import numpy as np
import paddle

from errors import InputError, Unreadable, printable, reading
from models.text import TextArguments, TextTransformer
from models.text_arguments import text_arguments
from utils import within_memory
from weights.formats import open_weights
from weights.layout import linear_weights
from weights.names.text import layout_of, tower_names

# Tokens of a text. Published towers read 248 at most.
_LONGEST_CONTEXT = 1024
# Tensors that a file may lack: CLIP has no bias of its logits.
_OPTIONAL = {"logit_bias"}


def has_text_tower(path: str | Path) -> bool:
    """Returns whether a file of weights holds a text tower beside the image tower.

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: the file can't be read.
    """
    with open_weights(path) as stored:
        return bool(layout_of(stored.arrays))


def load_text_tower(path: str | Path) -> tuple[TextTransformer, str]:
    """Returns the text tower in a file of weights, in evaluation mode, and the file's layout
    (``weights.names.text.layout_of``).

    Args:
        path: what ``find_weights`` takes.

    Raises:
        InputError: the file can't be read, has no text tower, or an unsupported one.
    """
    with open_weights(path) as stored, reading(stored.path, "weights of a text tower"):
        layout = layout_of(stored.arrays)
        try:
            arrays = tower_names(stored.arrays)
        except InputError as error:
            raise Unreadable(f"its tensors are inconsistent ({error})") from None
        arguments = text_arguments(path, stored.arrays)
        # Before the tower is built: a few numbers in a small file could describe one that takes all
        # memory.
        _check_shapes(arguments, arrays)
        with within_memory():
            tower = TextTransformer(arguments)
        state = tower.state_dict()
        transposed = linear_weights(tower)
        missing = sorted(state.keys() - arrays.keys() - _OPTIONAL)
        unexpected = sorted(arrays.keys() - state.keys())
        if missing or unexpected:
            listed = printable(", ".join([*missing, *unexpected][:4]))
            raise Unreadable(
                f"the tensors of its text tower don't match its configuration ({listed})"
            )
        with paddle.no_grad():
            for name, tensor in state.items():
                if name not in arrays:
                    continue
                array = arrays[name].T if name in transposed else arrays[name]
                values = np.ascontiguousarray(array, np.float32).reshape(array.shape)
                if list(values.shape) != list(tensor.shape):
                    raise Unreadable(
                        f"its text tower's {name} is {list(values.shape)}, expected"
                        f" {list(tensor.shape)}"
                    )
                tensor.set_value(values)
    tower.eval()
    return tower, layout


def _check_shapes(arguments: TextArguments, arrays: dict[str, Any]) -> None:
    """Raises Unreadable unless texts are short enough, and the largest tensors have the sizes that
    the arguments give them.
    """
    if arguments.context_length > _LONGEST_CONTEXT:
        raise Unreadable(
            f"its texts have {arguments.context_length} tokens, expected {_LONGEST_CONTEXT} at most"
        )
    width = arguments.embed_dim
    expected = {
        "token_embedding.weight": (arguments.vocab_size, width),
        "pos_embed": (1, arguments.context_length, width),
        "head.weight": (arguments.out_dim, width),
    }
    for number in range(arguments.depth):
        expected[f"blocks.{number}.mlp.fc1.weight"] = (arguments.hidden_dim, width)
        expected[f"blocks.{number}.attn.qkv.weight"] = (3 * width, width)
        if f"blocks.{number}.mlp.fc1.weight" not in arrays:
            break
    for name, shape in expected.items():
        found = tuple(arrays[name].shape) if name in arrays else None
        if found != shape:
            what = "missing" if found is None else f"{list(found)}"
            raise Unreadable(
                f"its text tower's {name} is {what}, its configuration describes {list(shape)}"
            )
