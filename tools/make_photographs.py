"""Makes a dataset of photographs for measuring loaders, with the size and detail of ImageNet's.

    python tools/make_photographs.py -output DIR [--count 512] [--seed 0]

The images are crops of the photographs that scikit-learn bundles (china, flower), and scikit-image
if it is installed (the extra ``benchmark``). They are scaled to about 500 x 375, half of them are
mirrored, and they are JPEG files of quality 90. The layout is that of -dataset=folder. Each
photograph is a class, and every eighth crop is for validation. The same sources, count, seed and
Pillow make the same bytes.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402  (first: it says what isn't installed)

# isort: split
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from launch.files import making_folder  # noqa: E402
from settings.parser import Parser  # noqa: E402

_BUNDLED = {
    "sklearn": ("datasets/images", ("china.jpg", "flower.jpg")),
    "skimage": (
        "data",
        ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg"),
    ),
}
_WIDTH = 500
_HEIGHT = 375
_QUALITY = 90


def photographs() -> dict[str, Image.Image]:
    """Returns the bundled photographs by name, RGB.

    Raises:
        InputError: scikit-learn isn't installed.
    """
    images = {}
    for package, (folder, names) in _BUNDLED.items():
        # Importing the package would take a second, and only a few files of it are needed.
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        for name in names:
            with Image.open(Path(spec.submodule_search_locations[0]) / folder / name) as image:
                images[Path(name).stem] = image.convert("RGB")
    if "china" not in images:
        raise InputError("the photographs are part of scikit-learn; pip install scikit-learn")
    return images


def crop(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Returns a random crop, scaled to about 500 x 375, mirrored or not.

    Its sides are at least four fifths of the largest that fit the image.
    """
    width, height = (round(side * rng.uniform(0.9, 1.1)) for side in (_WIDTH, _HEIGHT))
    share = rng.uniform(0.8, 1) * min(image.width / width, image.height / height)
    left = rng.uniform(0, image.width - share * width)
    top = rng.uniform(0, image.height - share * height)
    box = (left, top, left + share * width, top + share * height)
    image = image.resize((width, height), Image.Resampling.LANCZOS, box)
    if rng.random() < 0.5:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def write(output: Path, count: int, seed: int) -> str:
    """Writes ``count`` images to the folder ``output``, all or none. Returns a line for the user.

    Raises:
        InputError: ``output`` exists, ``count`` leaves a class without images, or there are no
            photographs.
    """
    sources = photographs()
    if output.exists():
        raise InputError(f"{output} exists; choose another -output, or remove it")
    if count < 2 * len(sources):
        raise InputError(
            f"--count {count}: expected at least {2 * len(sources)}, two of each of the photographs"
        )
    size = 0
    with making_folder(output) as temporary:
        for index in range(count):
            place, label = divmod(index, len(sources))
            name = list(sources)[label]
            file = temporary / ("val" if place % 8 == 0 else "train") / name / f"{place:05}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            crop(sources[name], np.random.default_rng([seed, index])).save(file, quality=_QUALITY)
            size += file.stat().st_size
    return (
        f"{output}: {count} images of {len(sources)} photographs, {size / count / 1000:.0f} kB each"
    )


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "-output", "--output", required=True, type=Path, help="the folder to create"
    )
    parser.add_argument(
        "-count", "--count", type=int, default=512, help="number of images; default: %(default)s"
    )
    parser.add_argument("-seed", "--seed", type=int, default=0, help="random seed; default: 0")
    arguments = parser.parse_args()
    print(write(arguments.output, arguments.count, arguments.seed))


if __name__ == "__main__":
    with reporting():
        main()
