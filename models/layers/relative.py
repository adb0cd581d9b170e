"""Relative position bias."""

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal


class RelativePositionBias(nn.Layer):
    """A learnt addend to the attention scores of each head, by where a query is from its key.

    The table and its name are those of timm's Swin (Liu et al. 2021, arXiv:2103.14030) and BEiT
    (arXiv:2106.08254).

    Args:
        window_size: (height, width) of the tokens that attend to each other; None: there is no
            table.
        num_heads: heads H.
        class_token: a class token comes before the window's tokens.
        std: standard deviation of a fresh table.

    Attributes:
        window_size: see above; the table has (2 height - 1) (2 width - 1) rows, and 3 more for a
            class token.
    """

    def __init__(
        self,
        window_size: tuple[int, int] | None,
        num_heads: int,
        class_token: bool = False,
        std: float = 0.0,
    ) -> None:
        super().__init__()
        self.window_size = window_size
        if window_size is not None:
            index = relative_position_index(window_size, class_token)
            self._add_table(int(index.max()) + 1, num_heads, std)
            self.register_buffer(
                "relative_position_index", paddle.to_tensor(index), persistable=False
            )

    def _add_table(self, rows: int, num_heads: int, std: float) -> None:
        """Adds what ``table`` is made of."""
        self.relative_position_bias_table = self.create_parameter(
            [rows, num_heads], default_initializer=Normal(std=std)
        )

    def table(self) -> paddle.Tensor:
        """Returns the bias of each offset: [rows, H]."""
        return self.relative_position_bias_table

    def position_bias(self) -> paddle.Tensor:
        """Returns [H, N, N]: head, query, key; N counts the window's tokens and the class token."""
        # On a GPU the gradient of paddle.gather adds in no order; that of an embedding has an
        # ordered form, which DETERMINISTIC asks for.
        return F.embedding(self.relative_position_index, self.table()).transpose([2, 0, 1])


def relative_position_index(window_size: tuple[int, int], class_token: bool = False) -> np.ndarray:
    """Returns the table's row of each pair of tokens: [N, N], int64, by query and key.

    A query that is dy rows and dx columns after its key has row (dy + height - 1) (2 width - 1) +
    dx + width - 1. A class token, the first, has the last three: to a patch, from a patch, to
    itself.
    """
    height, width = window_size
    y, x = np.divmod(np.arange(height * width), width)
    index = (y[:, None] - y + height - 1) * (2 * width - 1) + x[:, None] - x + width - 1
    if class_token:
        rows = (2 * height - 1) * (2 * width - 1)
        index = np.pad(index, ((1, 0), (1, 0)))
        index[0], index[:, 0], index[0, 0] = rows, rows + 1, rows + 2
    return index


def gather_columns(table: paddle.Tensor, index: paddle.Tensor) -> paddle.Tensor:
    """Returns of a parameter [H, offsets] the columns ``index`` [N, M]: [H, N, M].

    An embedding, as of ``RelativePositionBias``. The factor makes a copy: else the parameter's
    gradient would be a view, which Paddle's DataParallel leaves as it is on each rank.
    """
    return F.embedding(index, (table * 1.0).transpose([1, 0])).transpose([2, 0, 1])


def offset_index(window_size: tuple[int, int]) -> np.ndarray:
    """Returns the column of LeViT's and TinyViT's table of each pair of tokens: [N, N], int64.

    A query that is dy rows and dx columns from its key, on either side, has column |dy| width +
    |dx|.
    """
    height, width = window_size
    y, x = np.divmod(np.arange(height * width), width)
    return abs(y[:, None] - y) * width + abs(x[:, None] - x)
