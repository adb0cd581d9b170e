"""Archives and files of MNIST's form that lack something, or have it twice."""

import io
import tarfile

import numpy as np
import pytest
from support.dataset_files import CIFAR10, cifar_archive, dataset_config, write_idx

from datasets import get_dataset
from errors import InputError


def test_an_archive_without_a_file_or_with_one_twice_is_refused(tmp_path):
    """Part of the images, or some of them twice, would train and be counted without a word."""
    archive = CIFAR10[0]
    files = []
    cifar_archive(tmp_path, *CIFAR10, b"labels", ("batches.meta", b"label_names"))
    with tarfile.open(tmp_path / archive) as tar:
        files = [(member, tar.extractfile(member).read()) for member in tar if member.isfile()]
    for kept, message in (
        (files[1:], f"it lacks {files[0][0].name}"),
        ([*files, files[0]], "it contains data_batch_1 twice"),
    ):
        with tarfile.open(tmp_path / archive, "w:gz") as tar:
            for member, data in kept:
                tar.addfile(member, io.BytesIO(data))
        with pytest.raises(InputError, match=message):
            get_dataset(dataset_config("cifar10", tmp_path), "train")


def test_a_set_without_images_or_a_model_without_classes_is_refused(tmp_path):
    write_idx(tmp_path / "t10k-images-idx3-ubyte", np.zeros((0, 28, 28), np.uint8), False)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(0, np.uint8), False)
    with pytest.raises(InputError, match=f"the val set of 'mnist' at {tmp_path} is empty"):
        get_dataset(dataset_config("mnist", tmp_path), "val")
    with pytest.raises(
        InputError, match="MODEL.NUM_CLASSES is 0, a model without a classifier; set the number"
    ):
        get_dataset(dataset_config("digits", tmp_path, "MODEL.NUM_CLASSES", "0"), "val")
