"""Makes a small real dataset for segmentation from the pictures that scikit-image bundles.

    python examples/scikit_image_masks.py DIR

The masks are made by the thresholds of scikit-image's own examples: coins, the two stains of a
tissue (colour deconvolution), and ink on a page. So they have the errors of thresholds. Tiles
from the left two thirds of each picture are for training, those of the right third for validation.
"""

import sys
from pathlib import Path

# Python only looks in examples/, the folder of this program.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# First: these handle broken streams, and report packages that aren't installed.
import launch.startup  # noqa: F401
from errors import reporting

# isort: split
import numpy as np
from PIL import Image
from scipy import ndimage
from skimage import color, data, filters, morphology

from launch.files import making_folder
from settings.parser import Parser

CLASSES = ("background", "coin", "nucleus", "stain", "ink")
TILE = 96
# Tiles of a part overlap by half.
STEP = 48


def coins() -> tuple[np.ndarray, np.ndarray]:
    """Returns (picture, mask): coins are brighter than their surroundings, and have no holes."""
    picture = data.coins()
    bright = filters.gaussian(picture, 1.5, preserve_range=True)
    bright = bright > filters.threshold_local(bright, 301, offset=-12)
    filled = ndimage.binary_fill_holes(morphology.closing(bright, morphology.disk(3)))
    return picture, 1 * morphology.opening(filled, morphology.disk(5))


def tissue() -> tuple[np.ndarray, np.ndarray]:
    """Returns (picture, mask) of stained tissue: haematoxylin stains nuclei, DAB a protein."""
    picture = data.immunohistochemistry()
    stains = color.rgb2hed(picture)
    smooth = [filters.gaussian(stains[:, :, place], 1) for place in (0, 2)]
    nucleus, brown = (stain > filters.threshold_otsu(stain) for stain in smooth)
    return picture, np.where(brown, 3, 2 * nucleus)


def page() -> tuple[np.ndarray, np.ndarray]:
    """Returns (picture, mask): ink is darker than Sauvola's threshold."""
    picture = data.page()
    return picture, 4 * (picture < filters.threshold_sauvola(picture, 25))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("target", metavar="DIR", type=Path, help="the folder to create")
    target = parser.parse_args().target
    count = 0
    with making_folder(target) as folder:
        for part in ("train", "val"):
            for kind in ("images", "masks"):
                (folder / kind / part).mkdir(parents=True)
        (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
        for source in (coins, tissue, page):
            picture, mask = source()
            border = round(mask.shape[1] * 2 / 3)
            for part, first, last in (("train", 0, border), ("val", border, mask.shape[1])):
                for top in range(0, mask.shape[0] - TILE + 1, STEP):
                    for left in range(first, last - TILE + 1, STEP):
                        tile = slice(top, top + TILE), slice(left, left + TILE)
                        name = f"{part}/{source.__name__}_{top:03}_{left:03}.png"
                        Image.fromarray(picture[tile]).save(folder / "images" / name)
                        Image.fromarray(mask[tile].astype(np.uint8)).save(folder / "masks" / name)
                        count += 1
    print(f"{target}: {count} tiles of {TILE} x {TILE} with masks of {len(CLASSES)} classes")


if __name__ == "__main__":
    with reporting():
        main()
