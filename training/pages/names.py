"""Names that pictures show. Matplotlib isn't imported here."""

import unicodedata

from errors import printable


def shorten(text: str, most: int = 24) -> str:
    """Returns a printable text of at most ``most`` letters.

    The middle of a longer text is left out. Wide letters, such as Chinese ones, count twice.
    """
    text = printable(text, len(text))
    width = sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
    # The same share of the letters as of the width.
    limit = most * len(text) // max(1, width)
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}...{text[-limit // 2 + 3 :]}"
