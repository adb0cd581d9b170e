"""Makes a small dataset for segmentation: patterned shapes over photographs, with their masks.

    python tools/make_shapes.py -output DIR [--count 1000] [--seed 0]

The images are crops of the photographs that scikit-learn bundles (and scikit-image, if it is
installed), with sides of 80 to 160 pixels, as PNG. Up to three shapes of random colours, sizes and
angles lie on each: circles, triangles and squares; later ones cover earlier ones. Their class is
their pattern: stripes, checks or dots. The layout is that of -dataset=masks, and every fifth image
is for validation. The same sources, count, seed and Pillow make the same bytes.
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

CLASSES = ("background", "stripes", "checks", "dots")
# The corners of a triangle, a square, and of what looks like a circle.
_CORNERS = (3, 4, 64)
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
    picture = image.resize((width, height), Image.Resampling.LANCZOS, (left, top, right, bottom))
    mask = Image.new("L", picture.size)
    for _ in range(rng.integers(1, _MOST_SHAPES + 1)):
        label = int(rng.integers(1, len(CLASSES)))
        shape = Image.new("1", picture.size)
        ImageDraw.Draw(shape).polygon(outline(width, height, rng), fill=1)
        picture.paste(pattern(CLASSES[label], width, height, rng), mask=shape)
        mask.paste(label, mask=shape)
    return picture, mask


def outline(width: int, height: int, rng: np.random.Generator) -> list[tuple[float, float]]:
    """Returns the corners of a random shape in an image of ``width`` x ``height``."""
    radius = rng.uniform(0.2, 0.4) * min(width, height)
    centre = rng.uniform(radius / 2, [width - radius / 2, height - radius / 2])
    corners = rng.choice(_CORNERS)
    angles = rng.uniform(0, 2 * np.pi) + np.arange(corners) * 2 * np.pi / corners
    points = centre + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
    return [(float(x), float(y)) for x, y in points]


def pattern(name: str, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """Returns an image of a pattern in two random colours, slightly turned."""
    angle = rng.uniform(-0.3, 0.3)
    period = rng.uniform(6, 9)
    y, x = np.mgrid[:height, :width] / period
    along = x * np.cos(angle) + y * np.sin(angle)
    across = y * np.cos(angle) - x * np.sin(angle)
    if name == "stripes":
        is_dark = along % 1 < 0.5
    elif name == "checks":
        is_dark = (along % 1 < 0.5) != (across % 1 < 0.5)
    else:
        is_dark = (along % 1 - 0.5) ** 2 + (across % 1 - 0.5) ** 2 < 0.3**2
    dark = rng.integers(0, 128, 3)
    light = rng.integers(128, 256, 3)
    return Image.fromarray(np.where(is_dark[:, :, None], dark, light).astype(np.uint8))


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
    parser.add_argument(
        "-output", "--output", required=True, type=Path, help="the folder to create"
    )
    parser.add_argument(
        "-count", "--count", type=int, default=1000, help="number of images; default: %(default)s"
    )
    parser.add_argument("-seed", "--seed", type=int, default=0, help="random seed; default: 0")
    arguments = parser.parse_args()
    print(write(arguments.output, arguments.count, arguments.seed))


if __name__ == "__main__":
    with reporting():
        main()
