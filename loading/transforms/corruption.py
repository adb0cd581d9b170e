"""ImageNet-C's corruptions, which are applied while an evaluation reads images.

The corruptions are those of Hendrycks and Dietterich 2019 (arXiv:1903.12261), computed by the
package imagecorruptions-imaug, which is an extra. Only the elastic transform is written here,
because the package's moves pixels of severity 1 and 2 a quarter as far as the authors'
(hendrycks/robustness, make_imagenet_c.py).
"""

import importlib
import io
from typing import Any

import numpy as np
from PIL import Image

from errors import InputError, install, printable
from loading.transforms.decode import EncodedImage
from settings.configuration import Configuration
from settings.corruptions import CORRUPTIONS

# The quality of the JPEGs in which ImageNet-C is published.
_QUALITY = 85
# Of the elastic transform, by severity from 1: the strength and the smoothness of the random field,
# and how far corners are moved, as shares of _UNIT times the side.
_ELASTIC = (
    (2, 0.7, 0.1),
    (2, 0.08, 0.2),
    (0.05, 0.01, 0.02),
    (0.07, 0.01, 0.02),
    (0.12, 0.01, 0.02),
)
# The authors' shares are of 244 pixels, while their images have 224.
_UNIT = 244 / 224
# The corruptions that take a seed. The others draw from NumPy's global generator.
_SEEDED = ("impulse_noise", "glass_blur")


class Corruption:
    """Corrupts pixels by DATA.CORRUPTION at DATA.SEVERITY, then stores them as a JPEG of quality 85.

    ImageNet-C was made in this order, of images of 224 x 224 pixels. The pixels are the model's
    input, [H, W, 3] uint8, before they are normalised.

    What is drawn depends on the sample's generator, the corruption and the severity alone.

    Raises:
        InputError: the package isn't installed, or can't be imported.
    """

    def __init__(self, config: Configuration) -> None:
        self.name = config.DATA.CORRUPTION
        self.severity = config.DATA.SEVERITY
        # A package that is missing is reported now, and not at a worker's first image.
        _library()

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        entropy = [int(rng.integers(1 << 32)), CORRUPTIONS.index(self.name), self.severity]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        state = np.random.get_state()
        np.random.seed(seed)
        try:
            if self.name == "elastic_transform":
                corrupted = _elastic(pixels, self.severity)
            else:
                options = {"seed": seed} if self.name in _SEEDED else {}
                corrupted = _library().corrupt(pixels, self.severity, self.name, **options)
        finally:
            np.random.set_state(state)
        file = io.BytesIO()
        Image.fromarray(corrupted).save(file, "JPEG", quality=_QUALITY, optimize=True)
        image = EncodedImage(file.getvalue(), "RGB", "a corrupted image", pixels.size)
        return np.asarray(image.decode())


def _library() -> Any:
    """Returns the module imagecorruptions; raises InputError if it can't be imported."""
    try:
        return importlib.import_module("imagecorruptions")
    except Exception as error:  # OpenCV's import may also lack libraries of the system
        reason = printable(" ".join(str(error).split()))
        raise InputError(
            f"DATA.CORRUPTION needs imagecorruptions-imaug ({reason}); {install('robustness')}"
        ) from None


def _elastic(pixels: np.ndarray, severity: int) -> np.ndarray:
    """Applies ImageNet-C's elastic transform to pixels [H, W, 3] uint8.

    Three points are moved at random, and the image by the affine map that moves them. Then each
    pixel is moved by a smooth random field. All lengths are shares of the short side; at 224 x 224
    they are the authors'.
    """
    # This import takes a tenth of a second, and most runs don't need it.
    from scipy.ndimage import gaussian_filter, map_coordinates

    height, width = pixels.shape[:2]
    side = min(height, width)
    strength, smoothness, corner = (share * _UNIT * side for share in _ELASTIC[severity - 1])
    points = np.array([width // 2, height // 2]) + side // 3 * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = points + np.random.uniform(-corner, corner, (3, 2))
    # The matrix [3, 2] from (x, y, 1) in the result to (x, y) in the image.
    matrix = np.linalg.solve(np.c_[moved, np.ones(3)], points)
    y, x = np.indices((height, width))
    places = np.stack([x, y, np.ones_like(x)], -1).reshape(-1, 3)
    source_x, source_y = places.dot(matrix).T.reshape(2, height, width)
    channels = [
        map_coordinates(channel, (source_y, source_x), order=1, mode="mirror")
        for channel in np.moveaxis(pixels / 255, 2, 0)
    ]
    fields = np.random.uniform(-1, 1, (2, height, width))
    dx, dy = (
        gaussian_filter(field, smoothness, mode="reflect", truncate=3) * strength
        for field in fields
    )
    channels = [
        map_coordinates(channel, (y + dy, x + dx), order=1, mode="reflect") for channel in channels
    ]
    return (np.clip(np.stack(channels, 2), 0, 1) * 255).astype(np.uint8)
