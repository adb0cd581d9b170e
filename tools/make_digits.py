"""Makes a folder of pictures of scikit-learn's handwritten digits, to try the toolkit on.

    python tools/make_digits.py -output pictures
    python tools/predict.py digits pictures/val

The pictures are grey PNG files of 8 x 8 pixels, 1,797 in all, in the layout of -dataset=folder:
train/<digit>/ has 1,433 of them and val/<digit>/ the other 364. These are the images and the split
of -dataset=digits. The bundled weights (digits) weren't trained on the images in val/.
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402  (first: it says what isn't installed)

# isort: split
from PIL import Image  # noqa: E402

from launch.files import making_folder  # noqa: E402
from loading.sources import Split, digits  # noqa: E402
from settings.parser import Parser  # noqa: E402


def write(output: Path) -> str:
    """Writes the pictures to the folder ``output``, all or none. Returns a line for the user.

    Raises:
        InputError: ``output`` exists, or scikit-learn isn't installed.
    """
    if output.exists():
        raise InputError(f"{output} exists; choose another -output, or remove it")
    written: Counter[str] = Counter()
    with making_folder(output) as temporary:
        for mode in ("train", "val"):
            images, labels, classes = digits(Split(mode)).read()
            for number, (image, label) in enumerate(zip(images, labels, strict=True)):
                file = temporary / mode / classes[label] / f"{number:04}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(file)
                written[mode] += 1
    counts = ", ".join(f"{count:,} in {mode}/" for mode, count in written.items())
    return f"{output}: {counts}"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "-output", "--output", required=True, type=Path, help="the folder to create"
    )
    print(write(parser.parse_args().output))


if __name__ == "__main__":
    with reporting():
        main()
