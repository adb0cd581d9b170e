"""Ranks that have read other data or weights than rank 0 end in one line, before anything is
written.
"""

import functools
import os
import shutil
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import write_images
from safetensors.numpy import load_file, save_file
from support.ranks import run_ranks
from support.starts import SMALL_YAML, start_error

from config import get_config
from datasets import ArrayDataset
from errors import InputError
from loading.files import Paths
from main_multi_gpu import read_datasets
from models import build_model
from tools.make_shards import main as make_shards
from training import equal_ranks
from training.checkpoint import resume
from training.command_line import config_from_arguments
from training.versions import versions
from utils import all_gather, rank
from weights import formats, save_weights
from weights.formats import read_metadata, write_weights

LISTS = ["-dataset=imagenet2012", "-data_path=lists"]
MULTI = ["-dataset=multilabel_list", "-data_path=multi"]
IDX = ["-dataset=mnist", "-data_path=idx"]
SHARDS = ["-dataset=shards", "-data_path=shards"]
CACHED = ["-o", "DATA.CACHE=cache"]
PRETRAINED = ["-pretrained=small.safetensors"]
TASK = ["-o", "TASK=multilabel"]
TEACHER = [
    "-o",
    "TRAIN.DISTILLATION_TYPE=hard",
    "TRAIN.TEACHER_MODEL=teacher.yaml",
    "TRAIN.TEACHER_PATH=t.safetensors",
]
ADAPTER = [*PRETRAINED, "-o", "MODEL.PRETRAINED_ADAPTER=lora/checkpoints/last"]
FLEET = ["-o", "DIST.ENGINE=fleet"]
WITHOUT_LABELS = [
    "-dataset=images",
    "-o",
    "TASK=mae",
    "METHOD.DECODER_WIDTH=16",
    "METHOD.DECODER_HEADS=2",
]
RESUMED = ["-resume=run/checkpoints/epoch_0001"]


def changed(file, tensor, by=1.0):
    """Returns what changes one number of a tensor in a weight file."""

    def change(folder):
        arrays = load_file(folder / file)
        arrays[tensor].flat[0] += by
        save_file(arrays, folder / file, read_metadata(folder / file) or None)

    return change


def edited(file, old, new):
    """Returns what replaces a text in a file."""

    def change(folder):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return change


def unchanged(folder):
    pass


def removed(file):
    return lambda folder: (folder / file).unlink()


def renamed(old, new, *splits):
    def change(folder):
        for split in splits:
            (folder / "data" / split / old).rename(folder / "data" / split / new)

    return change


def few_images(folder):
    shutil.rmtree(folder / "data/val")
    write_images(folder / "data/val", dict.fromkeys("abc", 1), seed=1)


def other_shards(folder):
    """Members have numbers for names: another image is of another size."""
    write_images(folder / "data/val", {"b": 1}, size=9)
    pack(folder)


def pack(folder):
    shutil.rmtree(folder / "shards", ignore_errors=True)
    words = [
        "make_shards.py",
        "-dataset=folder",
        f"-data_path={folder / 'data'}",
        f"-output={folder / 'shards'}",
    ]
    before = sys.argv
    sys.argv = words
    try:
        make_shards()
    finally:
        sys.argv = before


def write_idx(folder, seed=0, label=0):
    """Writes eight images of 8 x 8 as MNIST's files have them, with one label of them to choose."""
    folder.mkdir(exist_ok=True)
    labels = np.array([label, *range(7)], np.uint8)
    for split in ("train", "t10k"):
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 8), np.uint8)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            sizes = np.array(array.shape, ">i4").tobytes()
            (folder / f"{split}-{kind}-ubyte").write_bytes(
                bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
            )


def write_groups(folder, size):
    """Writes a group for each training image: so many of each class."""
    lines = (f"{name}/{i}.png\tg{i // size}\n" for name in "abc" for i in range(16))
    (folder / "groups.txt").write_text("".join(lines))


def stale_cache(folder):
    """A cache of other pixels, whole in itself, is found by the name of the one that would be made."""
    [pixels] = (folder / "cache").glob("folder-val-*.npy")
    images = np.load(pixels)
    images[2] ^= 1
    np.save(pixels, images)
    rest = pixels.with_suffix(".npz")
    np.savez(
        rest,
        **(dict(np.load(rest)) | {"crcs": np.uint32([zlib.crc32(image.data) for image in images])}),
    )


FOLD = ["-data_path=data/train", "-o", "DATA.FOLDS=4"]
WHO = "differ between rank 0 and rank 1: "
BYTES = "(CRC-32 of its pixels"
# Flags (or those of each rank), what is otherwise on rank 1's machine, the message.
DATA = {
    "a renamed class": (
        [],
        renamed("b", "bb", "train", "val"),
        f"the training classes {WHO}number 1 is 'bb' on rank 1, 'b'",
    ),
    "a class that moves": (
        [],
        renamed("a", "z", "train", "val"),
        f"the training classes {WHO}number 0 is 'b' on rank 1, 'a' on",
    ),
    "a missing image": (
        [],
        removed("data/train/b/3.png"),
        f"the training images {WHO}rank 1 has 47, rank 0 has 48; number 25 is 'train/b/4.png' of label 1 on rank 1,"
        " 'train/b/3.png' of label 1 on rank 0; all ranks need the same data",
    ),
    "the last is missing": (
        [],
        removed("data/val/c/1.png"),
        f"the validation images {WHO}rank 1 has 5, rank 0 has 6; number 5 is missing on rank 1, 'val/c/1.png' of",
    ),
    "few": (
        [],
        few_images,
        f"the validation images {WHO}rank 1 has 3, rank 0 has 6; number 1 is 'val/b/0.png' of label",
    ),
    "another order": (
        LISTS,
        edited(
            "lists/train_list.txt",
            "a/0.png 0\n../data/train/a/1.png",
            "a/1.png 0\n../data/train/a/0.png",
        ),
        f"the training images {WHO}number 0 is '../data/train/a/1.png' of label 0 on rank 1, '../data/train/a/0.png'",
    ),
    "other labels": (
        LISTS,
        edited("lists/val_list.txt", "data/val/b/0.png 1", "data/val/b/0.png 2"),
        f"the validation images {WHO}number 2 is '../data/val/b/0.png' of label 2 on rank 1, '../data/val/b/0.png' of",
    ),
    "other names": (
        LISTS,
        edited("lists/classes.txt", "b", "B"),
        f"the training classes {WHO}number 1 is 'B' on rank 1",
    ),
    "several labels": (
        [*MULTI, *TASK],
        edited("multi/val_list.txt", "b/1.png\t1,2", "b/1.png\t1"),
        f"the validation images {WHO}number 3 is '../data/val/b/1.png' of label [1] on rank 1, '../data/val/b/1.png' of"
        " label [1, 2] on rank 0",
    ),
    "shards": (
        SHARDS,
        other_shards,
        f"the validation images {WHO}number 2 is '000000002.png' of label 1 and 3",
    ),
    "arrays": (
        IDX,
        lambda folder: write_idx(folder / "idx", label=4),
        f"the training images {WHO}number 0 is of label 4 {BYTES}",
    ),
    "pixels": (
        IDX,
        lambda folder: write_idx(folder / "idx", seed=1),
        f"the training images {WHO}number 0 is of label 0 {BYTES}",
    ),
    "a cache of arrays": (
        [*IDX, *CACHED],
        lambda folder: write_idx(folder / "idx", label=4),
        f"the training images {WHO}number 0 is of label 4 {BYTES}",
    ),
    "a cache": (
        CACHED,
        renamed("b/1.png", "b/9.png", "val"),
        f"the validation images {WHO}number 3 is 'val/b/9.png' of",
    ),
    "without labels": (
        WITHOUT_LABELS,
        removed("data/val/c/1.png"),
        "rank 1 has 5, rank 0 has 6; number 5 is missing on rank 1, 'val/c/1.png' on rank 0; all ranks need the same",
    ),
    "groups of a fold": (
        [*FOLD, "DATA.FOLD=0", "DATA.SPLIT_GROUPS=groups.txt"],
        lambda folder: write_groups(folder, 4),
        f"the training images {WHO}",
    ),
    "a stale cache": (
        CACHED,
        stale_cache,
        f"the validation images {WHO}names and labels are the same, but not the pixels; all ranks need the same",
    ),
}

# Settings of rank 1 alone, which say when ranks meet or what they gather.
SETTINGS = {
    setting: (
        ([], ["-o", setting]),
        unchanged,
        f"rank 1 has {setting.replace('=', ' ')}, rank 0 has ",
    )
    for setting in (
        "VALIDATE_FREQ=2",
        "REPORT_FREQ=2",
        "SAVE_FREQ=3",
        "SAVE_STEPS=2",
        "SAVE_MINUTES=1.0",
        "KEEP_LAST=1",
        "BEST_METRIC=loss",
        "REPORT=True",
        "SAVE_ON_ERROR=continue",
    )
}
BY_FOLD = ([*FOLD, "DATA.FOLD=0"], [*FOLD, "DATA.FOLD=1"])
SETTINGS["a fold"] = (BY_FOLD, unchanged, "rank 1 has DATA.FOLD 1, rank 0 has 0; start every rank")

MODEL = "rank 1 loaded different values than rank 0 (MODEL.PRETRAINED): "
FILES = "of 1 that differ; rank 1 read small.safetensors, rank 0 read small.safetensors; all ranks need the same file"
RESUME = "rank 1 loaded different values than rank 0 (MODEL.RESUME): "
WEIGHTS = {
    "weights": (
        PRETRAINED,
        changed("small.safetensors", "blocks.0.attn.qkv.weight"),
        f"{MODEL}blocks.0.attn.qkv.weight is the first {FILES}",
    ),
    "positions, which are resized": (
        [*PRETRAINED, "-image_size=12"],
        changed("small.safetensors", "pos_embed", 1e-3),
        f"{MODEL}pos_embed is the first {FILES}",
    ),
    "evaluated weights": (
        ["-eval", *PRETRAINED],
        changed("small.safetensors", "norm.bias"),
        f"{MODEL}norm.bias is the first {FILES}",
    ),
    "an adapter": (
        ADAPTER,
        changed(
            "lora/checkpoints/epoch_0002/adapter.safetensors",
            "base_model.model.blocks.0.attn.qkv.lora_B.weight",
        ),
        "rank 1 loaded different values than rank 0 (MODEL.PRETRAINED): blocks.0.attn.qkv's"
        " product is the first of 1 that differ; rank 1 read small.safetensors and lora/checkpoints/last, rank 0",
    ),
    "a teacher": (
        TEACHER,
        changed("t.safetensors", "head.bias"),
        "rank 1 loaded different values than rank 0 (TRAIN.TEACHER_PATH): head.bias",
    ),
    "a teacher's settings": (
        TEACHER,
        edited("teacher.yaml", "NAME: small", "NAME: small, ACT: quick_gelu"),
        "rank 1 has the teacher's MODEL.ACT quick_gelu, rank 0 has gelu;",
    ),
    "a checkpoint's weights": (
        RESUMED,
        changed("run/checkpoints/epoch_0001/model.safetensors", "head.bias"),
        f"{RESUME}model.safetensors: head.bias is the first of 1 that",
    ),
    "a checkpoint's average": (
        RESUMED,
        changed("run/checkpoints/epoch_0001/ema.safetensors", "head.bias"),
        f"{RESUME}ema.safetensors: head.bias",
    ),
    "a checkpoint's moments": (
        RESUMED,
        changed("run/checkpoints/epoch_0001/optimizer.safetensors", "head.bias/moment1_0"),
        f"{RESUME}optimizer.safetensors: head.bias/moment1_0 is the first of 1",
    ),
    "a checkpoint's rate": (
        RESUMED,
        edited("run/checkpoints/epoch_0001/state.json", '"stale": 0', '"stale": 1'),
        f"{RESUME}state.json is the first of 1",
    ),
    "a flag": (
        (PRETRAINED, []),
        unchanged,
        f"{MODEL}cls_token is the first of 20 that differ; rank 1 read nothing, rank 0 read small.safetensors; all ranks need the same",
    ),
    "a flag of an evaluation": (
        (["-eval", *PRETRAINED], ["-eval"]),
        unchanged,
        f"{MODEL}cls_token is the first of 20 that differ; rank 1 read nothing, rank 0 read small.safetensors; all ranks need the same",
    ),
    "another checkpoint's path": (
        (RESUMED, ["-resume=lora/checkpoints/epoch_0001", "-cfg=run/config.yaml"]),
        unchanged,
        "rank 1 has MODEL.RESUME lora/checkpoints/epoch_0001, rank 0 has run/checkpoints/epoch_0001; start every rank",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of a machine, with data in each form and weights."""
    folder = tmp_path_factory.mktemp("place") / "machine"
    folder.mkdir()
    for split, count in (("train", 16), ("val", 2)):
        write_images(folder / "data" / split, dict.fromkeys("abc", count), size=8, seed=count)
    for name in ("lists", "multi"):
        (folder / name).mkdir()
        (folder / name / "classes.txt").write_text("a\nb\nc\n")
    for split in ("train", "val"):
        paths = sorted(
            (folder / "data" / split).glob("*/*.png"),
            key=lambda path: (path.parent, int(path.stem)),
        )
        rows = [
            (f"../data/{split}/{path.parent.name}/{path.name}", "abc".index(path.parent.name))
            for path in paths
        ]
        (folder / "lists" / f"{split}_list.txt").write_text(
            "".join(f"{path} {label}\n" for path, label in rows)
        )
        several = "".join(f"{path}\t{label}{',2' * (label < 2)}\n" for path, label in rows)
        (folder / "multi" / f"{split}_list.txt").write_text(several)
    write_idx(folder / "idx")
    pack(folder)
    write_groups(folder, 2)
    (folder / "small.yaml").write_text(SMALL_YAML)
    (folder / "teacher.yaml").write_text(SMALL_YAML.replace("auto", "3"))
    return folder


@pytest.fixture(scope="module")
def trained(place):
    """The same folder, with weights, a teacher's, a run and one with an adapter."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(place)
        for name, seed in (("small", 0), ("t", 1)):
            paddle.seed(seed)
            save_weights(build_model(get_config("teacher.yaml")), f"{name}.safetensors")
        ema = ["-o", "TRAIN.MODEL_EMA=True"]
        lora = [*PRETRAINED, "-o", "TRAIN.ADAPTER.NAME=lora", "TRAIN.ADAPTER.RANK=2"]
        for name, flags in (("run", ema), ("lora", lora)):
            assert start_error(["-cfg=small.yaml", f"-output={name}", *flags]) is None
    return place


def restored(own, training, chosen, restore=resume._restore):
    """Goes on from what is in this rank's folder: two machines may have other files at the same
    path.
    """
    return restore(training, Path(own))


def attempts(folder, names, commands, engine):
    """What each command was refused for, in the folder of this rank's machine; it may differ by
    rank.
    """
    # A rank whose file isn't what SHA256SUMS lists refuses it alone.
    formats.check_sum = lambda file: None
    told = []
    for name, flags in zip(names, commands, strict=True):
        os.chdir(folder / name / "machine" if rank() == 1 else folder / "machine")
        own = flags[rank()] if isinstance(flags, tuple) else flags
        config = [] if any(flag.startswith("-resume") for flag in own) else ["-cfg=small.yaml"]
        resume._restore = functools.partial(
            restored, os.path.realpath(RESUMED[0].partition("=")[2])
        )
        told.append(start_error([*config, *own, f"-output={folder}/new/{name}", *engine]))
    return told


def assert_refused(place, tmp_path, cases, ranks, engine=()):
    """Ranks 0 and 2 are in a folder of their own, rank 1 in one that isn't as theirs."""
    shutil.copytree(place, tmp_path / "machine", symlinks=True, copy_function=shutil.copy)
    for name, (_, change, _) in cases.items():
        shutil.copytree(place, tmp_path / name / "machine", symlinks=True)
        if change is not stale_cache:
            change(tmp_path / name / "machine")
    if "a stale cache" in cases:
        for folder in (tmp_path / "machine", tmp_path / "a stale cache/machine"):
            with pytest.MonkeyPatch.context() as patched:
                patched.chdir(folder)
                read_datasets(
                    config_from_arguments("main_multi_gpu.py", ["-cfg=small.yaml", *CACHED])
                )
        stale_cache(folder)
    for told in run_ranks(
        attempts,
        tmp_path,
        list(cases),
        [flags for flags, _, _ in cases.values()],
        engine,
        ranks=ranks,
    ):
        for (name, (_, _, message)), found in zip(cases.items(), told, strict=True):
            assert message in (found or "nothing"), name
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_other_data_on_a_rank_end_all_in_a_line(place, tmp_path):
    assert_refused(place, tmp_path, DATA, 2)


def test_another_setting_of_a_rank_ends_all_in_a_line(place, tmp_path):
    assert_refused(place, tmp_path, SETTINGS, 2)


def with_another(name, version):
    """What a run is refused for if rank 1 has another version."""
    if rank() == 1:
        equal_ranks.versions = lambda: versions() | {name: version}
    try:
        equal_ranks.check_same(get_config("teacher.yaml"))
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("name", ["paddle", "numpy", "toolkit"])
def test_another_version_of_a_rank_ends_all_in_a_line(place, monkeypatch, name):
    monkeypatch.chdir(place)
    line = (
        f"rank 1 has {name} 0.0.9, rank 0 has {versions()[name]}; install the same on every machine"
    )
    assert run_ranks(with_another, name, "0.0.9") == [line] * 2


def test_other_operators_of_a_rank_are_refused():
    """They may have been compiled while the ranks started."""
    compiled = {"operators": "compiled"}
    equal_ranks._check_versions([compiled, compiled])
    line = (
        "rank 1 has operators paddle, rank 0 has compiled; run make ops on every machine, then start"
        " again"
    )
    with pytest.raises(InputError, match=f"^{line}$"):
        equal_ranks._check_versions([compiled, {"operators": "paddle"}])


def with_another_network():
    """Returns the error of a rank whose network has one more block on rank 1."""
    sizes = [4, 2] if rank() == 0 else [4, 2, 2]
    layers = [paddle.nn.Linear(4, size) for size in sizes]
    try:
        equal_ranks.check_network(paddle.nn.Sequential(*layers))
    except InputError as error:
        return str(error)
    return None


def test_another_network_of_a_rank_ends_all_in_a_line():
    line = "rank 1 has the network's 2.weight trained, [4, 2], rank 0 has None; start every rank"
    found = run_ranks(with_another_network)
    assert found[0].startswith(line)
    assert found[0] == found[1]


def test_another_python_of_a_rank_does_not_count(place, monkeypatch):
    monkeypatch.chdir(place)
    assert run_ranks(with_another, "python", "3.9.0") == [None] * 2


@pytest.mark.long
@pytest.mark.smoke
def test_other_weights_on_a_rank_end_all_in_a_line(trained, tmp_path):
    assert_refused(trained, tmp_path, WEIGHTS, 2)


def test_one_of_three_ranks_of_fleet_is_named(trained, tmp_path):
    cases = {name: DATA[name] for name in ("a missing image", "another order")} | {
        "weights": WEIGHTS["weights"]
    }
    assert_refused(trained, tmp_path, cases, 3, FLEET)


def elsewhere(folder, names, commands):
    """What each command was refused for; rank 1 has all in another folder, which was written at
    another time.
    """
    os.chdir(folder / f"machine{rank()}")
    return [
        start_error(
            [
                "-cfg=small.yaml",
                f"-output={folder}/{name}",
                *(flags[rank()] if isinstance(flags, tuple) else flags),
            ]
        )
        for name, flags in zip(names, commands, strict=True)
    ]


def test_where_files_lie_and_how_they_are_written_does_not_count(trained, tmp_path):
    arrays = {
        name: array.astype(np.float16)
        for name, array in load_file(trained / "small.safetensors").items()
    }
    for place in range(2):
        machine = tmp_path / f"machine{place}"
        shutil.copytree(
            trained, machine, symlinks=True, copy_function=shutil.copy2 if place else shutil.copy
        )
        paths = machine / "lists/train_list.txt"
        paths.write_text(paths.read_text().replace("../data/", f"{machine}/lists/../data/"))
    write_weights(tmp_path / "machine0/half.safetensors", arrays)
    arrays = {name: arrays[name].astype(np.float32) for name in reversed(arrays)}
    write_weights(tmp_path / "machine1/half.safetensors", arrays)
    commands = {
        "folder": ["-pretrained=half.safetensors"],
        "lists": [*LISTS, *PRETRAINED],
        "shards": SHARDS,
        "cache": CACHED,
        "adapter": ["-eval", *ADAPTER],
        "teacher": TEACHER,
        "settings": (["-o", "TAG=left", "DIST.TIMEOUT=700"], ["-o", "TAG=right", "TUNE_CPU=False"]),
    }
    assert (
        run_ranks(elsewhere, tmp_path, list(commands), list(commands.values()))
        == [[None] * len(commands)] * 2
    )


# -------------------------------------------------------------------- searches


def searched(count, places):
    """The first item that differs, in how many turns, if rank r has another one at ``places[r]``."""
    values = np.arange(count)
    values[places[rank()]] = -1
    turns = []

    def gather(data):
        turns.append(len(data))
        return all_gather(data)

    equal_ranks.all_gather = gather
    items = equal_ranks._Items("numbers", count, lambda first, last: [values[first:last]], str)
    return equal_ranks._first_difference(items, count), turns


def all_searches(cases):
    return [searched(*case) for case in cases]


def test_every_rank_that_differs_is_named():
    assert equal_ranks._others("abac") == "ranks 1, 3"
    assert equal_ranks._others("aab") == "rank 2"


def test_the_first_difference_is_found_in_few_small_turns():
    cases = [
        (1_281_167, [900_001, 1_281_166, 5000]),
        (3, [2, 1, 2]),
        (300, [299, 299, 299]),
        (1, [[], 0, []]),
    ]
    expected = [(5000, [256, 228, 20]), (1, [3]), (300, [150]), (0, [1])]
    for found in run_ranks(all_searches, cases, ranks=3):
        assert [place for place, _ in found] == [place for place, _ in expected]
        assert [len(turns) for _, turns in found] == [len(turns) for _, turns in expected]
        assert all(size <= 256 for _, turns in found for size in turns)


def test_absolute_paths_lose_the_datas_folder_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = Paths(["data/a.png", f"{tmp_path}/data/b.png", "/elsewhere/c.png", ""])
    assert list(paths.below("data")) == ["data/a.png", "b.png", "/elsewhere/c.png", ""]
    relative = Paths(["a.png", ""])
    assert relative.below("data") is relative
    assert len(Paths([]).below("data")) == 0


def test_an_image_without_a_label_is_shown_without_one():
    labels = np.array([-1, 3])
    named = SimpleNamespace(labels=labels)
    shown = [equal_ranks._shown(named, [b"a.png", b"b.png"], index) for index in (0, 1)]
    assert shown == ["'a.png'", "'b.png' of label 3"]
    pixels = ArrayDataset(get_config(), "val", np.zeros((2, 4, 4, 3), np.uint8), labels, [])
    shown = [equal_ranks._shown(pixels, None, index) for index in (0, 1)]
    crc = f"(CRC-32 of its pixels {zlib.crc32(bytes(48)):08x})"
    assert shown == [f"an image {crc}", f"of label 3 {crc}"]
