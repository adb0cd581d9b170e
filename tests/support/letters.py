"""Draws letters as small as scikit-learn's digits, which a model of digits doesn't know.

    PYTHONPATH=.:tests python tests/support/letters.py FOLDER

They are 8 x 8 pixels, white on black: A to Z and a to z in six fonts of matplotlib's, 312 files.
"""

import string
import sys
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "cmr10")
# Pixels of a letter before it is made small.
_LARGE = 64


def letter(text: str, font: str) -> Image.Image:
    """Returns a letter that fills the height of 8 x 8 pixels, as the digits do."""
    file = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{font}.ttf"
    drawn = Image.new("L", (4 * _LARGE, 4 * _LARGE))
    draw = ImageDraw.Draw(drawn)
    draw.text((_LARGE, _LARGE), text, 255, ImageFont.truetype(str(file), _LARGE))
    cut = drawn.crop(drawn.getbbox())
    width = max(1, min(8, round(8 * cut.width / cut.height)))
    small = cut.resize((width, 8), Image.Resampling.BOX)
    image = Image.new("L", (8, 8))
    image.paste(small, ((8 - width) // 2, 0))
    return image


def write_letters(folder: Path) -> int:
    """Writes all letters into a new folder; returns their number."""
    folder.mkdir()
    count = 0
    for font in FONTS:
        for text in string.ascii_letters:
            letter(text, font).save(folder / f"{count:03}-{font}-{ord(text)}.png")
            count += 1
    return count


if __name__ == "__main__":
    print(write_letters(Path(sys.argv[1])), "letters")
