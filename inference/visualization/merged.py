"""Panels of the patches that a model has merged (``models.layers.merging``)."""

import numpy as np

from errors import InputError
from inference.predictor import Predictor
from inference.visualization.maps import MapOptions, named_panel
from inference.visualization.predicted_image import PredictedImage, model_of
from models.vit import VisionTransformer
from training.pages.panels import Panel

# The colour of the lines between the patches of different tokens.
_LINE = 0


def merging_model(predictor: Predictor) -> VisionTransformer:
    """Returns a predictor's model that merges tokens.

    Raises:
        InputError: the model merges none.
    """
    model = model_of(predictor)
    if not isinstance(model, VisionTransformer):
        raise InputError(
            f"merging isn't defined for {type(model).__name__}: only MODEL.TYPE vit merges tokens"
        )
    if not model.merge_tokens:
        raise InputError(
            "MODEL.MERGE_TOKENS is 0, so no tokens are merged; pass -o MODEL.MERGE_TOKENS N"
        )
    return model


def merged_panels(
    predictor: Predictor, predicted: PredictedImage, options: MapOptions
) -> list[Panel]:
    """Returns the image, and the image with the patches of each token in their mean colour.

    Raises:
        InputError: the model merges no tokens, or has no such block.
    """
    model = merging_model(predictor)
    depth = len(model.blocks)
    block = -1 if options.block is None else options.block
    if not -depth <= block < depth:
        raise InputError(
            f"-block is {block}, but the model has {depth} of them: give 0 to {depth - 1},"
            " or -1 for the last"
        )
    tokens = model.merged_patches(predicted.image, block % depth).numpy()[0]
    # The picture may be enlarged. Pixels after the last patch belong to none.
    times = predicted.base.shape[0] // predicted.image.shape[2]
    side = model.patch_embed.patch_size * times
    drawn = in_mean_colours(predicted.base, tokens, side)
    title = f"{len(np.unique(tokens))} tokens of\n{tokens.size} patches"
    return [named_panel(predicted), Panel(title, drawn)]


def in_mean_colours(picture: np.ndarray, tokens: np.ndarray, side: int) -> np.ndarray:
    """Returns a picture in which the patches of a token have their mean colour, with lines between
    those of different tokens. Pixels after the last patch stay.

    Args:
        picture: [H, W, 3] uint8.
        tokens: the token of each patch, [rows, columns].
        side: pixels of the picture along a patch's side.
    """
    rows, columns = tokens.shape
    height = rows * side
    width = columns * side
    numbers = np.unique(tokens, return_inverse=True)[1].reshape(tokens.shape)
    of_pixels = numbers.repeat(side, 0).repeat(side, 1)
    covered = picture[:height, :width]
    counts = np.bincount(of_pixels.ravel())
    sums = [np.bincount(of_pixels.ravel(), covered[..., channel].ravel()) for channel in range(3)]
    means = np.stack(sums, axis=1) / counts[:, None]
    colours = (means + 0.5).astype(np.uint8)[of_pixels]
    # Patches of two pixels and less would be all lines.
    if side > 2:
        colours[1:][of_pixels[1:] != of_pixels[:-1]] = _LINE
        colours[:, 1:][of_pixels[:, 1:] != of_pixels[:, :-1]] = _LINE
    drawn = picture.copy()
    drawn[:height, :width] = colours
    return drawn
