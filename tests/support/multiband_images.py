"""Images of many channels, as files."""

import io

import numpy as np
import tifffile

from inference.fidelity import crops

UNITS = {"uint8": 255, "uint16": 65535, "float32": 1}
FIVE = [
    "DATA.IMAGE_CHANNELS",
    "5",
    "DATA.IMAGENET_MEAN",
    "[0.1,0.2,0.3,0.4,0.5]",
    "DATA.IMAGENET_STD",
    "0.2",
]
MOST = 10**6


def bands(dtype="uint16", channels=5, seed=0):
    """Returns a photograph's crop with more channels [H, W, C]. Floats may be negative."""
    colours = np.asarray(crops(1, seed)[0])[:60, :80].astype(np.float64) / 255
    values = np.stack([colours[..., c % 3] ** (1 + c // 3) for c in range(channels)], 2)
    if dtype == "float32":
        return ((values - 0.5) * 7).astype(dtype)
    return (values * UNITS[dtype]).round().astype(dtype)


def tiff(values, **options):
    given = {"photometric": "minisblack", "metadata": None} | options
    if values.ndim == 3 and given.setdefault("planarconfig", "contig") == "separate":
        values = np.moveaxis(values, 2, 0)
    tifffile.imwrite(file := io.BytesIO(), values, **given)
    return file.getvalue()


def npy(values, version=None):
    np.lib.format.write_array(file := io.BytesIO(), values, version)
    return file.getvalue()


def saved(image, kind):
    image.save(file := io.BytesIO(), kind)
    return file.getvalue()
