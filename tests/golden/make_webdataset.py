"""A shard as the webdataset library writes it: three samples, one of a name that is too long for
tar's own header.

Made with webdataset 1.0.2, Pillow 12.0.0: python tests/golden/make_webdataset.py
"""

import io
from pathlib import Path

import numpy as np
import webdataset
from PIL import Image

FOLDER = Path(__file__).parent

with webdataset.ShardWriter(str(FOLDER / "webdataset-%06d.tar"), maxcount=3, verbose=0) as writer:
    for label, key in enumerate(("b/two", "b/" + "long" * 30, "a")):
        file = io.BytesIO()
        Image.fromarray(np.full((2, 2, 3), 50 * label, np.uint8)).save(file, "PNG")
        writer.write({"__key__": key, "png": file.getvalue(), "cls": label + 5})
