"""Draws a model's position embeddings, and its tables of relative position biases."""

import training.pages.plain_matplotlib  # noqa: F401

# isort: split
import numpy as np
import paddle
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from paddle import nn

from errors import InputError
from inference.predictor import Predictor
from inference.visualization.predicted_image import model_of
from models.base import ImageModel
from models.layers.relative import RelativePositionBias
from training.pages.plotting import figure, figure_png

# The most tiles along a side. Of a larger grid, some places are left out.
_TILES = 16
# The most heads and blocks whose tables are drawn.
_HEADS = 12
_BLOCKS = 12


def similarities(model: ImageModel) -> np.ndarray:
    """Returns the cosine similarities of all pairs of places' embeddings: [rows, columns, rows,
    columns].
    """
    pos_embed = model.pos_embed
    # XCiT computes its position embeddings.
    if isinstance(pos_embed, nn.Layer):
        with paddle.no_grad():
            pos_embed = pos_embed(*model.patch_embed.grid_size)
    embedding = pos_embed.numpy()[0].astype(np.float64)
    if model.pos_embed_layout == "NCHW":
        embedding = embedding.transpose(1, 2, 0)
    if model.pos_embed_layout == "NLC":
        patch_embed = model.patch_embed
        # CrossViT has two grids. The first one, of its fine patches, is drawn.
        if isinstance(patch_embed, nn.LayerList):
            patch_embed = patch_embed[0]
        grid = patch_embed.grid_size
        places = embedding[len(embedding) - grid[0] * grid[1] :]
    else:
        grid = embedding.shape[:2]
        places = embedding.reshape(-1, embedding.shape[2])
    places = places / np.maximum(np.linalg.norm(places, axis=1, keepdims=True), 1e-12)
    return (places @ places.T).reshape(*grid, *grid)


def tables(model: ImageModel) -> dict[str, np.ndarray]:
    """Returns the tables of relative positions by layer: [H, 2 rows - 1, 2 columns - 1].

    The entry in the middle is for the distance 0, and one above it for a key below the query. The
    entries of a class token are left out.
    """
    by_layer = {}
    for name, layer in model.named_sublayers():
        if isinstance(layer, RelativePositionBias) and layer.window_size is not None:
            rows, columns = (2 * side - 1 for side in layer.window_size)
            table = layer.table().numpy()[: rows * columns]
            by_layer[name] = table.T.reshape(-1, rows, columns)
    return by_layer


def positions(predictor: Predictor, block: int | None = None) -> bytes:
    """Returns a PNG of position embeddings, as figure 7 of the ViT paper (arXiv:2010.11929), or of
    tables of relative positions.

    Args:
        block: the index of a table; None: the position embeddings, or else all tables.

    Raises:
        InputError: the model has neither, or no such table.
    """
    model = model_of(predictor)
    by_layer = tables(model)
    name = predictor.config.MODEL.NAME
    if getattr(model, "pos_embed", None) is not None and (block is None or not by_layer):
        if block is not None:
            raise InputError(
                "-block is for tables of relative positions, but the model only has position"
                " embeddings"
            )
        return _embedding(similarities(model), f"{name}: cosine similarity of position embeddings")
    if not by_layer:
        raise InputError(
            f"{type(model).__name__} has no position embeddings and no table of relative positions; "
            "positions supports ViT, DeiT, BEiT and Swin"
        )
    chosen = list(by_layer)
    if block is not None:
        if not -len(chosen) <= block < len(chosen):
            raise InputError(
                f"-block is {block}, but the model has {len(chosen)} tables: give 0 to {len(chosen) - 1}"
            )
        chosen = [chosen[block]]
    # Evenly spread, the first and the last one among them.
    indices = sorted({round(index) for index in np.linspace(0, len(chosen) - 1, _BLOCKS)})
    return _tables(
        {chosen[index]: by_layer[chosen[index]][:_HEADS] for index in indices},
        f"{name}: bias by relative position, head by head",
    )


def _embedding(cosines: np.ndarray, title: str) -> bytes:
    """Draws a tile for each place, with its cosine similarity to all places."""
    rows, columns = cosines.shape[:2]
    step = -(-max(rows, columns) // _TILES)
    # The pixels of a small grid are repeated, or the gaps between tiles would be wide.
    times = max(1, 24 // max(rows, columns))
    tiles = cosines[::step, ::step].repeat(times, 2).repeat(times, 3)
    tiles = np.pad(tiles, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    down, across, rows, columns = tiles.shape
    whole = tiles.transpose(0, 2, 1, 3).reshape(down * rows, across * columns)[:-1, :-1]
    drawn = figure(7.4, 5.6 * down / across + 0.7)
    axis = drawn.subplots()
    picture = axis.imshow(whole, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
    axis.set_xticks(
        np.arange(across) * columns + columns / 2 - 1, _numbers(across, step), fontsize=8
    )
    axis.set_yticks(np.arange(down) * rows + rows / 2 - 1, _numbers(down, step), fontsize=8)
    axis.tick_params(length=0)
    axis.set_xlabel("column of the patch")
    axis.set_ylabel("row of the patch")
    axis.set_title(title, fontsize=10)
    drawn.colorbar(
        picture, ax=axis, shrink=0.8, label="cosine similarity to the patch of each tile"
    )
    return figure_png(drawn)


def _numbers(count: int, step: int) -> list[str]:
    return [str(number * step) for number in range(count)]


def _tables(by_layer: dict[str, np.ndarray], title: str) -> bytes:
    """Draws a row for each layer, with a table for each head."""
    heads = max(len(table) for table in by_layer.values())
    drawn = figure(max(5, 1.3 * heads + 1.2), 1.5 * len(by_layer) + 0.9)
    axes = drawn.subplots(len(by_layer), heads, squeeze=False)
    largest = max(float(np.abs(table).max()) for table in by_layer.values()) or 1.0
    for row, (name, table) in zip(axes, by_layer.items(), strict=True):
        for number, axis in enumerate(row):
            if number >= len(table):
                axis.axis("off")
                continue
            axis.imshow(
                table[number], cmap="cividis", vmin=-largest, vmax=largest, interpolation="nearest"
            )
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"head {number}", fontsize=7)
        row[0].set_ylabel(name.removesuffix(".attn"), fontsize=7)
    drawn.suptitle(title, fontsize=10)
    scale = ScalarMappable(Normalize(-largest, largest), "cividis")
    drawn.colorbar(scale, ax=axes, shrink=min(1, 2 / len(by_layer)), label="added to the score")
    return figure_png(drawn)
