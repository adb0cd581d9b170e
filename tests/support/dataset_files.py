"""Small files of public datasets, and the configuration that reads them."""

import gzip
import io
import pickle
import struct
import tarfile

import numpy as np

from config import get_config


def dataset_config(dataset, path="", *options, classes="auto"):
    """The configuration of a dataset with images of 8 x 8."""
    where = [] if dataset in ("digits", "synthetic") else ["DATA.DATA_PATH", str(path)]
    options = ["DATA.DATASET", dataset, *where, "MODEL.NUM_CLASSES", str(classes), *options]
    return get_config(
        None, ["DATA.IMAGE_SIZE", "8", "DATA.CROP_PCT", "1.0", "DATA.NUM_WORKERS", "0", *options]
    )


def cifar_archive(folder, name, directory, members, label_key, meta, evil=False, labels=(0, 1, 1)):
    """Writes an archive as CIFAR's, of three images a file; returns the contents of its files.

    Args:
        label_key: of the labels within a file.
        meta: the name of the file of class names, and their key.
        evil: the files run a command when they are unpickled.
    """
    rng = np.random.default_rng(0)
    contents = {}
    for member in members:
        data = rng.integers(0, 256, (3, 3072), np.uint8)
        contents[member] = {b"data": data, label_key: list(labels)}
    contents[meta[0]] = {meta[1]: [b"zero", b"one"]}
    with tarfile.open(folder / name, "w:gz") as tar:
        for member, content in contents.items():
            payload = b"cos\nsystem\n(S'true'\ntR." if evil else pickle.dumps(content, 2)
            info = tarfile.TarInfo(f"{directory}/{member}")
            info.size = len(payload)
            tar.addfile(info, io.BytesIO(payload))
    return contents


# The name of the archive, of its folder and of the files in it.
CIFAR10 = (
    "cifar-10-python.tar.gz",
    "cifar-10-batches-py",
    [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"],
)
CIFAR100 = ("cifar-100-python.tar.gz", "cifar-100-python", ["train", "test"])


def write_idx(file, array, zipped):
    """Writes an array of bytes as MNIST's files hold it."""
    data = (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )
    if zipped:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(data))
    else:
        file.write_bytes(data)
