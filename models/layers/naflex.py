"""The embedding of patches of images whose sizes and ratios differ (NaFlex).

Images are patches [B, N, P * P * C] with the row and column of each patch [B, N, 2], and which of
them are patches of the image [B, N]. The others fill up shorter images.
"""

from collections.abc import Sequence
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.nn.initializer import Normal

from errors import InputError
from models.layers.graph_sizes import as_tensor, bicubic, is_known, places
from models.layers.layout import concat
from models.layers.linear import Linear
from models.layers.sizes import check_multiples
from settings.configuration import pair

# Added to the scores of what isn't attended to. After the softmax it leaves a weight of 0.
_MASKED = -1e30


class NaFlexEmbed(nn.Layer):
    """Projects patches to tokens, adds positions, and puts class and register tokens before them.

    Positions are resized for each image to its own rows and columns. They are computed from
    ``patch_coord`` on the device, so the host needn't know the sizes. The result is that of timm's
    ``NaFlexEmbeds``.

    Shape: patches [B, N, P * P * C] -> [B, prefix + N, D]; images [B, C, H, W] likewise, with N =
    H / P * W / P.

    Args:
        patch_size: pixels P along a patch's side.
        in_channels: channels C of the images.
        dim: channels D of a token.
        class_token: whether the model has a class token.
        reg_tokens: number of register tokens, after the class token.
        positions: "learn": a position for each place of a grid; "factorized": one for each row and
            one for each column (NaViT, arXiv:2307.06304).
        grid: rows and columns of the positions.
        resize: how they are resized, as ``VisionTransformer``'s ``pos_resize`` in
            ``models/naflexvit.py``. "factorized" ones are always resized linearly.
        keep_ratio: whether they are resized to the square of an image's longer side, of which the
            image takes the upper left part. Otherwise they are resized to its rows and columns.
    """

    pos_embed_layout = "NHWC"

    def __init__(
        self,
        image_size: Sequence[int],
        patch_size: int,
        in_channels: int,
        dim: int,
        class_token: bool,
        reg_tokens: int,
        positions: str,
        grid: int | Sequence[int],
        resize: str,
        keep_ratio: bool,
    ) -> None:
        super().__init__()
        check_multiples(image_size, patch_size, f"PATCH_SIZE {patch_size}")
        self.patch_size = patch_size
        self.grid_size = tuple(side // patch_size for side in image_size)
        self.last_grid = self.grid_size
        self.any_size = True
        self.may_cut = False
        self.factorized = positions == "factorized"
        self.resize = "bilinear" if self.factorized else resize
        self.keep_ratio = keep_ratio
        if class_token:
            self.cls_token = self._make([1, 1, dim], std=1e-6)
        if reg_tokens:
            self.reg_token = self._make([1, reg_tokens, dim], std=1e-6)
        self.proj = Linear(patch_size**2 * in_channels, dim)
        self.pos_grid = pair(grid)
        rows, columns = self.pos_grid
        if self.factorized:
            self.pos_embed_y = self._make([1, rows, dim], std=0.02)
            self.pos_embed_x = self._make([1, columns, dim], std=0.02)
        else:
            self.pos_embed = self._make([1, rows, columns, dim], std=0.02)

    def _make(self, shape: list[int], std: float) -> paddle.Tensor:
        return self.create_parameter(shape, default_initializer=Normal(std=std))

    @property
    def input_sizes(self) -> str:
        """The sizes of images that are taken, in words."""
        return f"images of multiples of {self.patch_size} pixels"

    def cut(self, images: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Returns the patches of images of one size, and their rows and columns.

        Shape: [B, C, H, W] -> [B, N, P * P * C] and [N, 2].

        Raises:
            InputError: H or W isn't a multiple of P.
        """
        size = self.patch_size
        batch, channels, height, width = images.shape
        if is_known(height, width) and (height % size or width % size or not height or not width):
            raise InputError(
                f"the model takes {self.input_sizes}, found {height} x {width}; crop or resize"
                " the images"
            )
        rows = height // size
        columns = width // size
        self.last_grid = (rows, columns)
        patches = images.reshape([batch, channels, rows, size, columns, size])
        patches = patches.transpose([0, 2, 4, 3, 5, 1])
        patches = patches.reshape([batch, rows * columns, size**2 * channels])
        return patches, coordinates(rows, columns)

    def forward(self, patches: paddle.Tensor, patch_coord: paddle.Tensor) -> paddle.Tensor:
        """Returns the tokens.

        Args:
            patch_coord: [B, N, 2], or [N, 2] for all images.
        """
        x = self.proj(patches)
        # Autocast would round the products to half precision.
        with paddle.amp.auto_cast(enable=False):
            if patch_coord.ndim == 3:
                positions = self._positions(patch_coord)
            else:
                # Without ``squeeze`` Paddle Inference would fuse the last product with the sum, and
                # return one image of a batch.
                positions = self._positions(patch_coord.unsqueeze(0)).squeeze(0)
        # In float32 under autocast, too, as the sums of the blocks after it.
        x = x.astype(positions.dtype) + positions
        names = ("cls_token", "reg_token")
        prefix = [getattr(self, name) for name in names if name in self._parameters]
        return concat([*(token.expand([x.shape[0], -1, -1]) for token in prefix), x], axis=1)

    def _positions(self, patch_coord: paddle.Tensor) -> paddle.Tensor:
        """Returns the position of each patch: [B, N, 2] -> [B, N, D]."""
        sides = patch_coord.max(1, keepdim=True) + 1
        if self.keep_ratio:
            sides = sides.max(2, keepdim=True).expand([-1, -1, 2])
        axes = [(patch_coord[:, :, i], sides[:, :, i], self.pos_grid[i]) for i in (0, 1)]
        if self.factorized:
            rows, columns = [weights_of(*axis, self.resize) for axis in axes]
            of_rows = paddle.matmul(rows, self.pos_embed_y)
            return of_rows + paddle.matmul(columns, self.pos_embed_x)
        table = self.pos_embed.reshape([self.pos_grid[0] * self.pos_grid[1], -1])
        if self.resize in ("bilinear", "corners"):
            return self._of_neighbours(table, *[neighbours_of(*axis, self.resize) for axis in axes])
        rows, columns = [weights_of(*axis, self.resize) for axis in axes]
        weights = rows.unsqueeze(3) * columns.unsqueeze(2)
        return paddle.matmul(weights.flatten(2), table)

    def _of_neighbours(
        self, table: paddle.Tensor, rows: tuple[Any, ...], columns: tuple[Any, ...]
    ) -> paddle.Tensor:
        """Returns the positions between the four nearest places of the grid.

        A large grid takes less memory so than by a product with all of its places.
        """
        width = self.pos_grid[1]
        first_row, next_row, row_share = rows
        first_column, next_column, column_share = columns
        row_share = row_share.unsqueeze(2)
        column_share = column_share.unsqueeze(2)
        upper = _between(
            F.embedding(first_row * width + first_column, table),
            F.embedding(first_row * width + next_column, table),
            column_share,
        )
        lower = _between(
            F.embedding(next_row * width + first_column, table),
            F.embedding(next_row * width + next_column, table),
            column_share,
        )
        return _between(upper, lower, row_share)


def _between(first: paddle.Tensor, second: paddle.Tensor, share: paddle.Tensor) -> paddle.Tensor:
    return first * (1 - share) + second * share


def weights_of(place: paddle.Tensor, side: paddle.Tensor, old: int, method: str) -> paddle.Tensor:
    """Returns the weight of each of ``old`` positions for places of resized ones.

    Distances are fractions of whole numbers, which are exact. So the positions of a grid of the
    same size stay as they are, bit for bit.

    Args:
        place: [B, N], from 0 to below side.
        side: [B, 1], the number of resized positions.
        method: "bicubic" or "antialiased": cubic or linear, with a kernel that is stretched where
            positions become fewer, as PyTorch's ``interpolate`` with antialias. "bilinear": linear.

    Returns:
        [B, N, old] float32.
    """
    place = place.astype("int64").unsqueeze(2)
    side = side.astype("int64").unsqueeze(2)
    source = paddle.arange(old, dtype="int64").reshape([1, 1, -1])
    if method == "bilinear":
        at = ((2 * place + 1) * old - side).astype("float32") / (2 * side).astype("float32")
        return (1 - (source.astype("float32") - at.clip(0, old - 1)).abs()).clip(min=0)
    longer = paddle.maximum(side, paddle.full([1, 1, 1], old, "int64"))
    offset = ((2 * source + 1) * side - (2 * place + 1) * old).astype("float32")
    distance = (offset / (2 * longer).astype("float32")).abs()
    weights = bicubic(distance) if method == "bicubic" else (1 - distance).clip(min=0)
    return weights / weights.sum(2, keepdim=True)


def neighbours_of(
    place: paddle.Tensor, side: paddle.Tensor, old: int, method: str
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Returns the two of ``old`` positions that a place lies between, and the share of the second.

    Args:
        place, side: as of ``weights_of``.
        method: "bilinear", or "corners": the first and the last positions stay where they are
            (align_corners).

    Returns:
        each [B, N]: int64, int64 and float32.
    """
    place = place.astype("int64")
    side = side.astype("int64")
    if method == "corners":
        # A single place has the first position.
        above = (place * (old - 1)).astype("float32")
        at = above / (side - 1).clip(min=1).astype("float32")
    else:
        above = ((2 * place + 1) * old - side).astype("float32")
        at = above / (2 * side).astype("float32")
    at = at.clip(0, old - 1)
    first = at.floor()
    share = at - first
    first = first.astype("int64")
    return first, (first + 1).clip(max=old - 1), share


def coordinates(rows: Any, columns: Any) -> paddle.Tensor:
    """Returns (row, column) of each place of a grid, row by row: [rows * columns, 2] int64."""
    if is_known(rows, columns):
        place = paddle.arange(rows * columns, dtype="int64")
    else:
        place = places(rows * columns)
    columns = as_tensor(columns)
    return paddle.stack([place // columns, place % columns], 1)


def packed_coordinates(grids: paddle.Tensor, length: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns ``patch_coord`` and ``patch_valid`` of images whose patches stand row by row.

    Args:
        grids: (rows, columns) of each image, [B, 2].
        length: the number N of patches, those that fill up shorter images among them.

    Returns:
        [B, N, 2] int64, zeros where there is no patch; and [B, N] bool.
    """
    grids = grids.astype("int64")
    place = paddle.arange(length, dtype="int64").unsqueeze(0)
    valid = place < grids[:, :1] * grids[:, 1:]
    coord = paddle.stack([place // grids[:, 1:], place % grids[:, 1:]], 2)
    return coord * valid.astype("int64").unsqueeze(2), valid


def key_mask(valid: paddle.Tensor, prefix: int) -> paddle.Tensor:
    """Returns what is added to attention scores, so that tokens only attend to patches.

    Args:
        valid: which tokens are patches, [B, N].
        prefix: number of tokens before the patches, all of which are attended to.

    Returns:
        [B, prefix + N] float32.
    """
    mask = (1 - valid.astype("float32")) * _MASKED
    if prefix:
        mask = concat([paddle.zeros([mask.shape[0], prefix]), mask], axis=1)
    return mask
