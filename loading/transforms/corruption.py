"""ImageNet-C's corruptions (Hendrycks and Dietterich 2019, arXiv:1903.12261), made as an evaluation reads images.

The functions are those of imagecorruptions-imaug, which is an extra. Its noise follows from the sample here.
"""

import importlib
import io
from typing import Any

import numpy as np
from PIL import Image

from configs.ranges import CORRUPTIONS
from errors import InputError, shown
from loading.transforms.decode import EncodedImage
from options import Configuration

_QUALITY = 85  # of the JPEGs that ImageNet-C is published as
_SEEDED = ("impulse_noise", "glass_blur")  # these take their seed; the others draw from NumPy's global generator


class Corruption:
    """DATA.CORRUPTION at DATA.SEVERITY, of pixels [S, S, 3] uint8 as the model would see them; then JPEG of quality 85:
    the order in which ImageNet-C was made, whose images have 224 x 224 pixels.

    The generator is the sample's: what is drawn follows from SEED, the sample, the corruption and the severity.

    Raises:
        InputError: the package isn't installed, or can't be imported.
    """

    def __init__(self, config: Configuration) -> None:
        self.name, self.severity = config.DATA.CORRUPTION, config.DATA.SEVERITY
        library()

    def __call__(self, pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        drawn = [int(rng.integers(1 << 32)), CORRUPTIONS.index(self.name), self.severity]
        seed = int(np.random.SeedSequence(drawn).generate_state(1)[0])
        own = {"seed": seed} if self.name in _SEEDED else {}
        others = np.random.get_state()
        np.random.seed(seed)
        try:
            corrupted = library().corrupt(pixels, self.severity, self.name, **own)
        finally:
            np.random.set_state(others)
        stored = io.BytesIO()
        Image.fromarray(corrupted).save(stored, "JPEG", quality=_QUALITY, optimize=True)
        return np.asarray(EncodedImage(stored.getvalue(), "RGB", "what was corrupted", pixels.size).decoded())


def library() -> Any:
    """Returns the package that corrupts; raises InputError where it can't be imported."""
    try:
        return importlib.import_module("imagecorruptions")
    except Exception as error:  # OpenCV's import asks for libraries of the system
        raise InputError(
            f"DATA.CORRUPTION needs imagecorruptions-imaug ({shown(' '.join(str(error).split()))});"
            " pip install -r requirements-robustness.txt"
        ) from None
