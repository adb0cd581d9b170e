"""Tar shards: the tool that packs them, the index, their reader, damage, and orders that keep to a
few at a time.
"""

import io
import os
import pickle
import shutil
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import warm
from conftest import ROOT, write_images
from PIL import Image

from config import get_config
from datasets import get_dataloader, get_dataset, get_datasets
from errors import InputError, RunError
from loading.samplers import TrainBatchSampler
from tools.make_shards import main


def configured(kind, path, *options):
    options = [
        "DATA.DATASET",
        kind,
        "DATA.DATA_PATH",
        str(path),
        "MODEL.NUM_CLASSES",
        "auto",
        *options,
    ]
    return get_config(
        None, ["DATA.IMAGE_SIZE", "8", "DATA.NUM_WORKERS", "0", "DATA.BATCH_SIZE", "4", *options]
    )


@pytest.fixture
def packer(tmp_path, monkeypatch):
    """Returns a function that runs the tool in ``tmp_path`` and in this process: Paddle's import
    takes seconds.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["make_shards.py", *map(str, arguments)])
        main()

    return run


def make_shards(folder, *arguments):
    command = [warm.python(), str(ROOT / "tools" / "make_shards.py"), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder of images ``in``, 24 for training, and its shards ``out``, of five images each."""
    root = tmp_path_factory.mktemp("packed")
    write_images(root / "in/train", {"a.b c": 10, "d": 14})
    write_images(root / "in/val", {"a.b c": 3, "d": 4}, seed=1)
    status, printed, errors = make_shards(
        root, "-dataset=folder", "-data_path=in", "--output", "out", "--shard_size=5", "--workers=2"
    )
    assert (status, errors) == (0, "")
    assert printed.startswith("out: 24 train images and 7 val images in 7 shards, 0.")
    return root


@pytest.fixture
def out(packed, tmp_path):
    """The shards, to be damaged."""
    return shutil.copytree(packed / "out", tmp_path / "shards")


# ------------------------------------------------------------------- packing


def test_the_shards_hold_the_images_files_and_checksums(packed):
    out = packed / "out"
    files = {}
    for file in sorted(out.glob("train-*.tar")):
        assert file.stat().st_size % tarfile.RECORDSIZE == 0
        with tarfile.open(file) as tar:
            members = tar.getmembers()
            assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {
                (0, 0, 0, "")
            }
            files |= {member.name: tar.extractfile(member).read() for member in members}
    paths = (out / "train.txt").read_text().splitlines()
    assert len(paths) == 24
    assert len(files) == 48
    for index, path in enumerate(paths):
        assert files[f"{index:09d}.png"] == (packed / "in" / path).read_bytes()
        assert files[f"{index:09d}.cls"] == b"%d" % path.startswith("train/d/")
    # Packed in a random order: the shards are mixtures.
    first = [int(name[:9]) for name in list(files)[:10:2]]
    assert first != sorted(first)
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=out, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.count(": OK\n")) == (0, len(list(out.iterdir())) - 1)


def test_the_same_files_and_options_give_the_same_bytes(packed, tmp_path, packer):
    flags = ("-dataset=folder", f"-data_path={packed / 'in'}", "-shard_size=5", "-workers=1")
    packer(*flags, "-output=same")
    packer(*flags, "-output=other", "-seed=1", "-modes", "train")
    contents = [
        (folder / "SHA256SUMS").read_text() for folder in (packed / "out", tmp_path / "same")
    ]
    assert contents[0] == contents[1]
    assert (tmp_path / "other" / "train-000000.tar").read_bytes() != (
        packed / "out/train-000000.tar"
    ).read_bytes()
    assert not list((tmp_path / "other").glob("val*"))


@pytest.mark.smoke
def test_training_on_shards_is_bit_by_bit_training_on_the_files(packed):
    options = (
        "TRAIN.AUTO_AUGMENT",
        "rand-m9",
        "DATA.NUM_WORKERS",
        "2",
        "DATA.BATCH_SIZE_EVAL",
        "3",
    )
    seen = []
    for kind, path in (("folder", packed / "in"), ("shards", packed / "out")):
        config, *datasets = get_datasets(configured(kind, path, *options))
        assert config.MODEL.NUM_CLASSES == 2
        assert datasets[0].classes == ["a.b c", "d"]
        seen.append([])
        for mode, dataset in zip(
            ("train", "val"), pickle.loads(pickle.dumps(datasets)), strict=True
        ):
            for rank in range(2):
                loader = get_dataloader(config, dataset, mode, rank=rank, ranks=2)
                seen[-1] += [
                    column.numpy().tobytes() for batch in loader for column in batch.values()
                ]
    # images and labels: three steps of each rank; 4 + 3 images by threes
    assert len(seen[0]) == 2 * (2 * 3 + 2 + 1)
    assert seen[0] == seen[1]


def test_a_list_is_packed_too_and_larger_images_are_reduced(tmp_path, packer):
    rng = np.random.default_rng(0)
    kinds = {"0.JPEG": (12, 20), "1.png": (30, 10), "2.jpg": (6, 7), "3.png": (8, 8)}
    for name, size in kinds.items():
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).convert(
            "L" if name == "1.png" else "RGB"
        ).save(tmp_path / name)
    (tmp_path / "train_list.txt").write_text(
        "".join(f"{name} {label + 3}\n" for label, name in enumerate(kinds))
    )
    flags = (
        "-dataset=imagenet2012",
        "-data_path=.",
        "-modes=train",
        "-resize=8",
        "-quality=90",
        "-shard_size=1KB",
    )
    packer(*flags, "-output=new/out")
    data = get_dataset(configured("shards", tmp_path / "new/out"), "train")
    assert (data.labels.tolist(), data.classes) == ([3, 4, 5, 6], [])
    assert [data.name(index)[-13:] for index in range(4)] == [
        f"{i:09d}.{k}" for i, k in enumerate(("jpg", "png") * 2)
    ]
    assert [Image.open(io.BytesIO(data.data(index))).size for index in range(4)] == [
        (13, 8),
        (8, 24),
        (7, 6),
        (8, 8),
    ]
    assert [data.data(index) for index in (2, 3)] == [
        (tmp_path / name).read_bytes() for name in ("2.jpg", "3.png")
    ]
    reduced = Image.open(tmp_path / "1.png").resize((8, 24), Image.Resampling.BICUBIC)
    assert Image.open(io.BytesIO(data.data(1))).tobytes() == reduced.tobytes()
    file = io.BytesIO()
    Image.open(tmp_path / "0.JPEG").resize((13, 8), Image.Resampling.BICUBIC).save(
        file, "JPEG", quality=90
    )
    assert data.data(0) == file.getvalue()


def test_what_cannot_be_packed_is_one_line_and_leaves_nothing(tmp_path, packer, capfd):
    write_images(tmp_path / "in/train", {"a": 3})
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    base = ("-dataset=folder", "-data_path=in", "-modes=train")
    for flags, message in [
        (
            ("-output=full",),
            "-output full already exists and isn't an empty folder; choose another",
        ),
        (("-output=out", "-modes=val"), "in/val: no class folders"),
        (
            ("-output=out", "-shard_size=0"),
            "'0' is neither a number of images nor a size such as 1000MB",
        ),
        (("-output=out", "-shard_size=5XB"), "'5XB' is neither"),
        (("-output=out", "-quality=101"), "command line: --quality is 101"),
        (("-output=out", "-resize=-3"), "'-3' isn't a number of at least 1"),
        (("-output=out", "-dataset=cifar10"), "invalid choice: 'cifar10'"),
    ]:
        with pytest.raises(InputError) as caught:
            packer(*base, *flags)
        assert message in str(caught.value)
        assert capfd.readouterr().err == ""
    (tmp_path / "in/train/a/1.png").write_bytes(b"\x89PNG broken")
    status, printed, errors = make_shards(tmp_path, *base, "-output=out")
    assert (status, printed, errors.count("\n")) == (2, "", 1), errors
    assert errors.startswith("error: in/train/a/1.png: its format is unknown; BMP")
    # One that has a header, but can't be decoded, is found when it is resized.
    file = tmp_path / "in/train/a/1.png"
    file.write_bytes((tmp_path / "in/train/a/0.png").read_bytes()[:100])
    with pytest.raises(InputError, match="^in/train/a/1.png: can't be read as an image"):
        packer(*base, "-output=out", "-resize=4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "in"]


# ------------------------------------------------------- the index, and damage


def test_a_missing_index_is_made_anew(packed, out, capfd):
    expected = dict(np.load(out / "train.index.npz"))
    (out / "train.index.npz").unlink()
    data = get_dataset(configured("shards", out), "train")
    assert (
        "train.index.npz is missing: reading the headers of 5 shards; class names"
        in capfd.readouterr().out
    )
    assert data.classes == []
    made = dict(np.load(out / "train.index.npz"))
    assert made.keys() == expected.keys()
    for field in made.keys() - {"classes"}:
        assert made[field].tolist() == expected[field].tolist()
    original = get_dataset(configured("folder", packed / "in"), "train")
    assert [data.data(i) for i in range(24)] == [original.data(i) for i in range(24)]
    assert get_dataset(configured("shards", out), "train").name(3) == data.name(3)
    assert capfd.readouterr().out == ""
    with pytest.raises(
        InputError, match=r"the train labels of 'shards' at .* are 0\.\.1, expected 0\.\.0"
    ):
        get_dataset(configured("shards", out, "MODEL.NUM_CLASSES", "1"), "train")


def test_an_index_that_cannot_be_kept_serves_this_start(out, capfd, monkeypatch):
    (out / "train.index.npz").unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("loading.shards.write_index", full)
    assert len(get_dataset(configured("shards", out), "train")) == 24
    assert "train.index.npz: can't be written (No space left on device)" in capfd.readouterr().out


def test_shards_of_the_webdataset_library_are_read(tmp_path):
    shutil.copy(ROOT / "tests/golden/webdataset-000000.tar", tmp_path / "val-0.tar")
    data = get_dataset(configured("shards", tmp_path), "val")
    assert [data.name(i).partition(".tar: ")[2] for i in range(3)] == [
        "a.png",
        f"b/{'long' * 30}.png",
        "b/two.png",
    ]
    assert data.labels.tolist() == [7, 6, 5]
    assert [np.asarray(data.image(i)).tolist() for i in range(3)] == [
        [[[50 * k] * 3] * 2] * 2 for k in (2, 1, 0)
    ]


def tar_of(file, *members):
    with tarfile.open(file, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (
            [("a.jpg", b"x"), ("b.jpg", b"x"), ("b.cls", b"1")],
            r"train-0.tar: a has an image but no .cls, its label \(samples like this: 1\)",
        ),
        ([("a.cls", b"1")], r"train-0.tar: a has a label but no image \(samples like this: 1\)"),
        (
            [("a.jpg", b"x"), ("a.cls", b"cat")],
            r"train-0.tar: its a.cls is 'cat', expected a number from 0 to 9999999",
        ),
        ([("a.jpg", b"x"), ("a.png", b"x"), ("a.cls", b"1")], r"a has two images"),
        ([("notes.txt", b"x")], r"train-0.tar: no image in any of 1 shards"),
    ],
)
def test_shards_that_hold_no_samples_say_which(tmp_path, members, message):
    tar_of(tmp_path / "train-0.tar", *members)
    with pytest.raises(InputError, match=message):
        get_dataset(configured("shards", tmp_path), "train")


def test_shards_that_are_missing_or_changed_are_named_at_the_start(out, tmp_path):
    def found(message, folder=out):
        with pytest.raises(InputError, match=message):
            get_dataset(configured("shards", folder), "train")

    found(r"no train-\*.tar; DATASET shards needs them under -data_path$", tmp_path)
    (tmp_path / "train-0.tar.gz").touch()
    found(r"train-0.tar.gz is compressed: unpack it", tmp_path)
    file = out / "train-000002.tar"
    index = out / "train.index.npz"
    whole = file.read_bytes()
    file.write_bytes(whole + bytes(512))
    found(
        rf"train-000002.tar has {len(whole) + 512} bytes, in train.index.npz it has {len(whole)} bytes; restore it"
    )
    file.unlink()
    found(r"train-000002.tar is absent, in train.index.npz it has \d+ bytes")
    file.write_bytes(whole)
    shutil.copy(file, out / "train-000009.tar")
    found(r"train-000009.tar has \d+ bytes, in train.index.npz it is absent")
    (out / "train-000009.tar").unlink()
    content = bytearray(index.read_bytes())
    content[len(content) // 4] ^= 1
    index.write_bytes(content)
    found(r"train.index.npz: can't be read as an index \(.*\); restore it, or remove it")
    index.unlink()
    # Without an index: a shard that is cut between two members, in a header, or in a member; a
    # header that is damaged.
    with tarfile.open(file) as tar:
        member = tar.getmembers()[4]
    for damaged in (
        whole[: member.offset],
        whole[: member.offset + 100],
        whole[: member.offset_data + 9],
    ):
        file.write_bytes(damaged)
        found(
            r"train-000002.tar: (damaged or truncated at byte|can't be read as an .* tar shard \(.*unexpected)"
        )
    changed = bytearray(whole)
    changed[member.offset + 3] ^= 1
    file.write_bytes(changed)
    found(rf"train-000002.tar: damaged or truncated at byte {member.offset}")


def test_damage_that_is_met_while_training_names_shard_and_member(packed, out):
    data = get_dataset(configured("shards", out), "train")
    shard = data.shards.shard[7]
    file = data.shards.files[shard]
    start = int(data.shards.offsets[7])
    with open(file, "r+b") as raw:
        raw.seek(start - 512)
        raw.write(b"000000070.png")  # another member's name, of the same sum of bytes
    tolerant = get_dataset(configured("shards", out, "DATA.SKIP_BROKEN", "True"), "train")
    name = rf"train-00000{shard}.tar: 000000007.png"
    with pytest.raises(
        RunError,
        match=rf"{name}: not where .* \(found another header\); restore .*, or train with",
    ):
        data[7]
    assert tolerant[7][-1] == 7
    shutil.copy(packed / "out" / os.path.basename(file), out / "restored")
    os.replace(out / "restored", file)
    # not by a descriptor of the damaged file
    whole = get_dataset(configured("shards", out), "train")
    assert whole[7][1] == whole.labels[7]
    os.truncate(file, start + 10)
    with pytest.raises(RunError, match=rf"{name}: .* \(the shard ends \d+ bytes early\)"):
        whole[7]


# --------------------------------------------------------------------- orders


class Shardless(list):
    """What the sampler needs of a dataset: as many samples as entries, each in the shard that the
    entry says.
    """

    shards = property(lambda self: type("Shards", (), {"shard": np.array(self)}))


def order(shards, together, ranks=1, epoch=1, consumed=0):
    options = [
        "DATA.SHARD_SHUFFLE",
        together,
        "DATA.BATCH_SIZE",
        12 // ranks,
        "DATA.DROP_LAST",
        "False",
    ]
    config = configured("shards", "", *options)
    samplers = [TrainBatchSampler(config, Shardless(shards), rank, ranks) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch, consumed)
    return [
        index for step in zip(*samplers, strict=True) for batch in step for _, index, _ in batch
    ]


SHARDS = np.random.default_rng(0).permutation(np.arange(480) // 24)  # 20 shards of 24


def test_shard_shuffle_is_a_permutation_for_any_number_of_ranks_and_goes_on():
    base = order(SHARDS, 3)
    assert sorted(base) == list(range(480))
    assert order(SHARDS, 3, ranks=2) == order(SHARDS, 3, ranks=4) == base
    assert order(SHARDS, 3, epoch=2) != base
    assert order(SHARDS, 3, ranks=2, consumed=96) == base[96:]


@pytest.mark.parametrize("together", [1, 3, 20, 50])
def test_shard_shuffle_mixes_so_many_shards_at_a_time_in_random_order(together):
    groups = []
    for start in range(0, 480, 24 * together):
        taken = order(SHARDS, together)[start : start + 24 * together]
        found = SHARDS[taken]
        assert taken != sorted(taken)
        groups.append(set(found.tolist()))
        assert len(groups[-1]) == min(together, 20 - start // 24)
        assert (np.diff(found) == 0).mean() < 2 / len(groups[-1])  # drawn among all of them
    assert set.union(*groups) == set(range(20))
    assert together > 10 or sorted(groups, key=min) != groups or max(groups[0]) > together


def test_keys_that_would_do_nothing_are_refused():
    for kind, options, message in [
        (
            "folder",
            ("DATA.SHARD_SHUFFLE", "3"),
            r"DATA.SHARD_SHUFFLE has no effect without DATA.DATASET hf_dataset or parquet or shards; leave",
        ),
        (
            "shards",
            ("DATA.SHARD_SHUFFLE", "3", "DATA.SAMPLER", "balanced"),
            r"no effect without DATA.SAMPLER shuffle",
        ),
        (
            "shards",
            ("DATA.SHARD_SHUFFLE", "3", "DATA.CACHE", "x"),
            r"SHARD_SHUFFLE has no effect with DATA.CACHE; leave",
        ),
        (
            "folder",
            ("DATA.FAST_EVAL", "True", "DATA.CACHE", "x"),
            r"FAST_EVAL has no effect with DATA.CACHE; leave",
        ),
        (
            "shards",
            ("DATA.SHARD_SHUFFLE", "0"),
            r"DATA.SHARD_SHUFFLE is 0, expected 1 to 2147483647",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            configured(kind, "", *options)
