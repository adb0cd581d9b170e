"""A server that several files of tests ask."""

import io

import pytest
from PIL import Image
from served import serving, write_checkpoint
from sklearn.datasets import load_sample_images


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("served") / "tiny.safetensors")


@pytest.fixture(scope="session")
def server(checkpoint):
    with serving(checkpoint, "-max_images=8", "-max_request_mb=4", folder=checkpoint.parent) as server:
        yield server.ready()


@pytest.fixture(scope="session")
def photographs():
    """Image files: two photographs as JPEG and PNG."""
    files = []
    for photograph, kind in zip(load_sample_images().images, ("JPEG", "PNG"), strict=True):
        file = io.BytesIO()
        Image.fromarray(photograph[::2, ::2]).save(file, kind)
        files.append(file.getvalue())
    return files
