"""Relative position biases of attention scores."""

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal


class RelativePositionBias(nn.Layer):
    """A learnt bias of attention scores for each head and each offset between query and key.

    The table and its name are those of Swin (Liu et al. 2021, arXiv:2103.14030) and BEiT
    (arXiv:2106.08254) in timm.

    Args:
        window_size: (height, width) of the tokens that attend to each other; None: there is no
            table.
        num_heads: heads H.
        class_token: whether a class token comes before the tokens of the window.
        std: standard deviation of a fresh table.

    Attributes:
        relative_position_bias_table: [rows, H]. There are (2 height - 1) (2 width - 1) rows, and 3
            more with a class token.
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
        """Adds the parameters from which ``table`` is computed."""
        self.relative_position_bias_table = self.create_parameter(
            [rows, num_heads], default_initializer=Normal(std=std)
        )

    def table(self) -> paddle.Tensor:
        """Returns the bias of each offset: [rows, H]."""
        return self.relative_position_bias_table

    def position_bias(self) -> paddle.Tensor:
        """Returns the bias of each head, query and key: [H, N, N], the class token included."""
        # On a GPU, the gradient of paddle.gather adds in no fixed order. That of an embedding does
        # where DETERMINISTIC is set.
        return F.embedding(self.relative_position_index, self.table()).transpose([2, 0, 1])


def relative_position_index(window_size: tuple[int, int], class_token: bool = False) -> np.ndarray:
    """Returns the row of the table for each query and key: [N, N], int64.

    For a query that is dy rows and dx columns after its key, it is (dy + height - 1) (2 width - 1)
    + dx + width - 1. The class token, which comes first, has the last three rows: one for its
    attention to patches, one for that of patches to it, one for that to itself.
    """
    height, width = window_size
    y, x = np.divmod(np.arange(height * width), width)
    index = (y[:, None] - y + height - 1) * (2 * width - 1) + x[:, None] - x + width - 1
    if class_token:
        rows = (2 * height - 1) * (2 * width - 1)
        index = np.pad(index, ((1, 0), (1, 0)))
        index[0] = rows
        index[:, 0] = rows + 1
        index[0, 0] = rows + 2
    return index


def gather_columns(table: paddle.Tensor, index: paddle.Tensor) -> paddle.Tensor:
    """Returns the columns ``index`` [N, M] of a parameter [H, offsets]: [H, N, M]."""
    # An embedding, for the reason in RelativePositionBias. The factor makes a copy. Without it, the
    # gradient of the parameter would be a view, which DataParallel doesn't average.
    return F.embedding(index, (table * 1.0).transpose([1, 0])).transpose([2, 0, 1])


def offset_index(window_size: tuple[int, int]) -> np.ndarray:
    """Returns the column of TinyViT's ``attention_biases`` for each query and key: [N, N], int64.

    For a query that is dy rows and dx columns from its key, it is |dy| width + |dx|.
    """
    height, width = window_size
    y, x = np.divmod(np.arange(height * width), width)
    return abs(y[:, None] - y) * width + abs(x[:, None] - x)
