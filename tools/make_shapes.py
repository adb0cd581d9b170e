"""Makes a small dataset for segmentation: shapes drawn over photographs, with their masks.

    python tools/make_shapes.py -output DIR [--count 320] [--seed 0]

The images are crops of the photographs that scikit-learn bundles (and scikit-image, if it is
installed), with sides of 80 to 160 pixels, as PNG. Up to three circles, triangles and squares of
random colours, sizes and angles lie on each; later ones cover earlier ones. The layout is that of
-dataset=masks, and every fifth image is for validation. The same sources, count, seed and Pillow
make the same bytes.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402  (first: it says what isn't installed)

# isort: split
import numpy as np  # noqa: E402
from PIL import Image, ImageDraw  # noqa: E402

from launch.files import making_folder  # noqa: E402
from settings.parser import Parser  # noqa: E402
from tools.make_photographs import photographs  # noqa: E402

CLASSES = ("background", "circle", "triangle", "square")
_LEAST_SIDE = 80
_MOST_SIDE = 160
_MOST_SHAPES = 3
# Of each five images, the first is for validation.
_VALIDATION = 5


def draw(image: Image.Image, rng: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """Returns a crop of a photograph with shapes on it, and the mask of their classes."""
    width, height = (int(side) for side in rng.integers(_LEAST_SIDE, _MOST_SIDE + 1, 2))
    # A crop of twice to four times the size shows more than a patch of sky.
    share = min(rng.uniform(2, 4), image.width / width, image.height / height)
    # Rounding may leave a little less than 0.
    left = rng.uniform(0, max(0, image.width - share * width))
    top = rng.uniform(0, max(0, image.height - share * height))
    right = min(image.width, left + share * width)
    bottom = min(image.height, top + share * height)
    box = (left, top, right, bottom)
    picture = image.resize((width, height), Image.Resampling.LANCZOS, box)
    mask = Image.new("L", picture.size)
    for _ in range(rng.integers(1, _MOST_SHAPES + 1)):
        label = int(rng.integers(1, len(CLASSES)))
        radius = rng.uniform(0.12, 0.3) * min(width, height)
        centre = rng.uniform(radius / 2, [width - radius / 2, height - radius / 2])
        corners = {"circle": 64, "triangle": 3, "square": 4}[CLASSES[label]]
        angles = rng.uniform(0, 2 * np.pi) + np.arange(corners) * 2 * np.pi / corners
        outline = centre + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
        points = [tuple(point) for point in outline]
        color = tuple(rng.integers(0, 256, 3).tolist())
        ImageDraw.Draw(picture).polygon(points, fill=color)
        ImageDraw.Draw(mask).polygon(points, fill=label)
    return picture, mask


def write(output: Path, count: int, seed: int) -> str:
    """Writes ``count`` images and masks to the folder ``output``, all or none. Returns a line for
    the user.

    Raises:
        InputError: ``output`` exists, ``count`` leaves a part without images, or there are no
            photographs.
    """
    sources = list(photographs().values())
    if output.exists():
        raise InputError(f"{output} exists; choose another -output, or remove it")
    if count < 2:
        raise InputError(f"--count {count}: expected at least 2, one for each part")
    with making_folder(output) as temporary:
        for part in ("train", "val"):
            for kind in ("images", "masks"):
                (temporary / kind / part).mkdir(parents=True)
        (temporary / "classes.txt").write_text("\n".join(CLASSES) + "\n", encoding="utf-8")
        for index in range(count):
            part = "train" if index % _VALIDATION else "val"
            source = sources[index % len(sources)]
            picture, mask = draw(source, np.random.default_rng([seed, index]))
            picture.save(temporary / "images" / part / f"{index:05}.png")
            mask.save(temporary / "masks" / part / f"{index:05}.png")
    return f"{output}: {count} images of {len(CLASSES)} classes ({', '.join(CLASSES)})"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("-output", "--output", required=True, type=Path, help="the folder to make")
    parser.add_argument("-count", "--count", type=int, default=320, help="images")
    parser.add_argument("-seed", "--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write(arguments.output, arguments.count, arguments.seed))


if __name__ == "__main__":
    with reporting():
        main()
