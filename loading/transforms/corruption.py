"""ImageNet-C's corruptions (Hendrycks and Dietterich 2019, arXiv:1903.12261), made as an evaluation
reads images.

The functions are those of imagecorruptions-imaug, which is an extra. Only the elastic transform is
written anew. The package's own bends images of severity 1 and 2 a quarter as far as the authors'
(hendrycks/robustness, make_imagenet_c.py).
"""

import importlib
import io
from typing import Any

import numpy as np
from PIL import Image

from errors import InputError, install, printable
from loading.transforms.decode import EncodedImage
from settings.corruptions import CORRUPTIONS
from settings.options import Configuration

_QUALITY = 85  # of the JPEGs that ImageNet-C is published as
_ELASTIC = (
    (2, 0.7, 0.1),
    (2, 0.08, 0.2),
    (0.05, 0.01, 0.02),
    (0.07, 0.01, 0.02),
    (0.12, 0.01, 0.02),
)
_UNIT = 244 / 224  # of the side, in which the authors count those
# these take their seed; the others draw from NumPy's global generator
_SEEDED = ("impulse_noise", "glass_blur")


class Corruption:
    """Corrupts pixels [H, W, 3] uint8, as the model would see them, by DATA.CORRUPTION at
    DATA.SEVERITY. Then it applies JPEG of quality 85. ImageNet-C was made in this order; its images
    have 224 x 224 pixels.

    The generator is the sample's: what is drawn follows from SEED, the sample, the corruption and
    the severity.

    Raises:
        InputError: the package isn't installed, or can't be imported.
    """

    def __init__(self, config: Configuration) -> None:
        self.name = config.DATA.CORRUPTION
        self.severity = config.DATA.SEVERITY
        _library()

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        drawn = [int(rng.integers(1 << 32)), CORRUPTIONS.index(self.name), self.severity]
        seed = int(np.random.SeedSequence(drawn).generate_state(1)[0])
        own = {"seed": seed} if self.name in _SEEDED else {}
        others = np.random.get_state()
        np.random.seed(seed)
        try:
            if self.name == "elastic_transform":
                corrupted = _elastic(pixels, self.severity)
            else:
                corrupted = _library().corrupt(pixels, self.severity, self.name, **own)
        finally:
            np.random.set_state(others)
        stored = io.BytesIO()
        Image.fromarray(corrupted).save(stored, "JPEG", quality=_QUALITY, optimize=True)
        return np.asarray(
            EncodedImage(stored.getvalue(), "RGB", "what was corrupted", pixels.size).decode()
        )


def _library() -> Any:
    try:
        return importlib.import_module("imagecorruptions")
    except Exception as error:  # OpenCV's import asks for libraries of the system
        raise InputError(
            f"DATA.CORRUPTION needs imagecorruptions-imaug ({printable(' '.join(str(error).split()))});"
            f" {install('robustness')}"
        ) from None


def _elastic(pixels: np.ndarray, severity: int) -> np.ndarray:
    """Moves three points of an image at random, and all of it by the affine map of them; then each
    pixel by a smooth random field. At 224 x 224 the lengths are the authors'; otherwise they are
    shares of the short side.
    """
    # a tenth of a second that most runs can do without
    from scipy.ndimage import gaussian_filter, map_coordinates

    height, width = pixels.shape[:2]
    side = min(height, width)
    strength, smooth, corner = (share * _UNIT * side for share in _ELASTIC[severity - 1])
    points = np.array([width // 2, height // 2]) + side // 3 * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = points + np.random.uniform(-corner, corner, (3, 2))
    # (x, y, 1) of the result, to (x, y) of the image
    back = np.linalg.solve(np.c_[moved, np.ones(3)], points)
    y, x = np.indices((height, width))
    source_x, source_y = (
        np.stack([x, y, np.ones_like(x)], -1).reshape(-1, 3).dot(back).T.reshape(2, height, width)
    )
    fields = np.random.uniform(-1, 1, (2, height, width))
    dx, dy = (
        gaussian_filter(field, smooth, mode="reflect", truncate=3) * strength for field in fields
    )
    channels = [
        map_coordinates(c, (source_y, source_x), order=1, mode="mirror")
        for c in np.moveaxis(pixels / 255, 2, 0)
    ]
    bent = [
        map_coordinates(channel, (y + dy, x + dx), order=1, mode="reflect") for channel in channels
    ]
    return (np.clip(np.stack(bent, 2), 0, 1) * 255).astype(np.uint8)
