"""Parquet tables and saved datasets, as Hugging Face's ``datasets`` writes them, by pyarrow alone."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

NAMES = ["rose", "aster", "tulip"]
CLASS_LABEL = {"_type": "ClassLabel", "names": NAMES}
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(seed, side=8):
    """Returns the bytes of a random picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def image_table(count, first=0, label=None, features=None, **columns):
    """Returns a table of ``count`` pictures with labels 0, 1, 2, 0 and so on.

    Args:
        first: the seed of the first picture.
        label: the label column in place of these.
        features: what datasets says of the columns; None: an image and class labels.
        columns: further ones.
    """
    if features is None:
        features = {"image": {"_type": "Image"}, "label": CLASS_LABEL}
    pictures = [{"bytes": png(first + i), "path": f"{first + i}.png"} for i in range(count)]
    label = [i % 3 for i in range(count)] if label is None else label
    table = pa.table({"image": pa.array(pictures, IMAGE_TYPE), "label": label, **columns})
    info = {"info": {"features": features}}
    return table.replace_schema_metadata({"huggingface": json.dumps(info)})


def write_parquet(file, table, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(table, file, **options)


def write_saved(folder, *tables, rows=4, compression=None):
    """Writes a folder as ``save_to_disk`` does: a file for each table, in batches of ``rows``."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"data-{i:05d}-of-{len(tables):05d}.arrow" for i in range(len(tables))]
    options = pa.ipc.IpcWriteOptions(compression=compression)
    for name, table in zip(files, tables, strict=True):
        with pa.ipc.new_stream(str(folder / name), table.schema, options=options) as stream:
            stream.write_table(table, max_chunksize=rows)
    state = {"_data_files": [{"filename": name} for name in files], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    info = json.loads(tables[0].schema.metadata[b"huggingface"])["info"]
    (folder / "dataset_info.json").write_text(json.dumps(info))
