"""Checkpoints of sharded runs: each rank writes its share, and any number of ranks goes on from
them.
"""

import errno
import json
import os
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import paddle.distributed as dist
import pytest
from safetensors.numpy import load_file, save_file
from support.optim_model import whole_state
from support.ranks import run_ranks
from support.sharding import STAGE_1, STAGE_2
from support.training_runs import (
    assert_close,
    assert_same_run,
    checkpoint_names,
    optimizer_state,
    refused,
    train,
    weights,
)

import utils
from config import get_config
from errors import InputError, RunError
from models import build_model
from tools import merge_checkpoint
from training import parallel
from training.checkpoint import saver, storage
from training.checkpoint.restore import load_checkpoint
from training.checkpoint.state import newest_whole
from training.optim import build_optimizer

RECIPE = [
    "DATA.BATCH_SIZE",
    "8",
    "TRAIN.OPTIMIZER.EPS",
    "1e-3",
    "TRAIN.MODEL_EMA",
    "True",
    "SAVE_STEPS",
    "1",
]
SHARES = ["optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors"]

# ------------------------------------------------------------------- written


def train_each(runs):
    for options, output, length in runs:
        train(options, output, length)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny):
    """A run of two ranks with sharding, and the same one without."""
    output = tmp_path_factory.mktemp("runs")
    options = [*tiny, *RECIPE, "KEEP_LAST", "2"]
    run_ranks(
        train_each,
        [([*options, *STAGE_2], output / "sharded", 64), (options, output / "plain", 64)],
    )
    return output


@pytest.fixture(scope="module")
def tiny():
    from conftest import TINY

    return TINY


@pytest.mark.smoke
def test_each_rank_writes_its_share_and_an_index_says_what_is_where(trained):
    checkpoints = trained / "sharded" / "checkpoints"
    last = checkpoints / "last"
    names = {
        "model.safetensors",
        "ema.safetensors",
        "state.json",
        "SHA256SUMS",
        storage.INDEX,
        *SHARES,
    }
    assert {file.name for file in last.iterdir()} == names
    subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=last,
        check=True,
        capture_output=True,
    )
    assert {line.split()[1] for line in (last / "SHA256SUMS").read_text().splitlines()} == names - {
        "SHA256SUMS"
    }
    index = json.loads((last / storage.INDEX).read_text())
    held = [load_file(last / share) for share in SHARES]
    assert index["weight_map"] == {
        key: share for share, own in zip(SHARES, held, strict=True) for key in own
    }
    assert index["metadata"] == {"shares": 2}
    sizes = [sum(array.size for array in own.values()) for own in held]
    assert min(sizes) > 0.4 * sum(sizes)
    # What is superseded is removed, with its shares.
    assert checkpoint_names(checkpoints) == {
        "epoch_0001",
        "epoch_0001_sample_000000048",
        "last",
        "best",
        "best_ema.safetensors",
    }
    assert [
        file.name for file in (trained / "plain" / "checkpoints" / "last").glob("optimizer*")
    ] == [storage.OPTIMIZER]
    assert_same_run(trained / "plain", trained / "sharded")
    assert "saved epoch_0001: " in (trained / "sharded" / "log_1.txt").read_text()


def states_of(outputs, options):
    """The state that this many ranks have together after each checkpoint was loaded, on rank 0."""
    config = get_config(None, options)
    if utils.world_size() > 1:
        parallel.init(config)
    found = []
    for output in outputs:
        model = build_model(config)
        optimizer = parallel.wrap_optimizer(config, build_optimizer(config, model))
        load_checkpoint(output / "checkpoints" / "last", model, optimizer)
        found.append(whole_state(model, optimizer))
    return found


def test_a_sharded_checkpoint_is_loaded_whole_by_one_rank_and_by_two(trained, tiny):
    outputs = [trained / "sharded", trained / "plain"]
    expected = optimizer_state(trained / "plain" / "checkpoints" / "last")
    alone = states_of(outputs, [*tiny, "TRAIN.MODEL_EMA", "True"])
    together = run_ranks(states_of, outputs, [*tiny, *STAGE_1])[0]
    for found in (*alone, *together):
        assert_close(found, expected, atol=0)


@pytest.mark.slow
def test_any_number_of_ranks_goes_on_from_any_other(tmp_path, tiny):
    """The batch is that of all ranks together, so that all runs take the same samples in each
    update.
    """
    short = [
        *tiny,
        "TRAIN.OPTIMIZER.EPS",
        "1e-3",
        "DATA.GLOBAL_BATCH",
        "24",
        "SAVE_STEPS",
        "1",
        "KEEP_LAST",
        "9",
    ]
    middle = "checkpoints/epoch_0001_sample_000000024"
    counts = (1, 2, 3, 4)
    for ranks in counts:
        options = [*short, *STAGE_1] if ranks > 1 else short
        run_ranks(train_each, [(options, tmp_path / str(ranks), 96)], ranks=ranks)
    for ranks in counts:
        runs = []
        for other in counts:
            words = [
                *short,
                *(STAGE_1 if ranks > 1 else []),
                "MODEL.RESUME",
                str(tmp_path / str(other) / middle),
            ]
            runs.append((words, tmp_path / f"{ranks}-from-{other}", 96))
        run_ranks(train_each, runs, ranks=ranks)
        for _, output, _ in runs:
            assert_close(weights(output), weights(tmp_path / "1"), atol=1e-5)
            last = output / "checkpoints" / "last"
            assert_close(
                optimizer_state(last),
                optimizer_state(tmp_path / "1" / "checkpoints" / "last"),
                atol=1e-5,
            )
            shares = sorted(file.name for file in last.glob("optimizer-*"))
            assert shares == (
                [storage.share_name(owner, ranks) for owner in range(ranks)] if ranks > 1 else []
            )


# ----------------------------------------------------------------- not written


def train_where_rank_1_fails(error, runs):
    """What this rank is told by each run, where rank 1 can't write the second checkpoint."""
    written = storage.write_share
    told = []
    for options, output in runs:
        count = []

        def failing(begun, name, arrays, count=count):
            count.append(name)
            if len(count) == 2:
                if error is None:
                    arrays = {key: array * np.nan for key, array in arrays.items()}
                else:
                    (begun / SHARES[1]).write_bytes(b"half")
                    raise error
            written(begun, name, arrays)

        storage.write_share = failing
        try:
            train(options, output, 64)
            told.append("")
        except RunError as raised:
            told.append(str(raised))
    return told


def test_a_share_that_a_rank_may_not_write_is_saved_beside_the_run(tmp_path, tiny):
    error = PermissionError(errno.EACCES, "Permission denied")
    options = [*tiny, *RECIPE, *STAGE_1, "KEEP_LAST", "9"]
    first, second = run_ranks(train_where_rank_1_fails, error, [(options, tmp_path / "run")])
    name = "epoch_0001_sample_000000032"
    saved = tmp_path / "run-saved" / "checkpoints" / name
    assert first == second
    assert first == [
        f"{name} wasn't saved ([Errno 13] Permission denied): give this user access to it; it is saved in {saved};"
        " resume from there with a new -output"
    ]
    assert set(storage.verify(saved)) == {file.name for file in saved.iterdir()}
    assert checkpoint_names(tmp_path / "run" / "checkpoints") == {
        "epoch_0001_sample_000000016",
        "last",
    }
    train([*tiny, *RECIPE, "MODEL.RESUME", str(saved)], tmp_path / "next", 64)
    assert newest_whole(tmp_path / "next" / "checkpoints").name == "epoch_0001"


def collectives_of_a_save(options, output):
    """How often a rank meets the others in each save of a run."""
    saved = saver.Saver.save
    gathered = dist.all_gather
    counts = []

    def counting(*args):
        counts[-1:] = [counts[-1] + 1] if counts else []
        return gathered(*args)

    def saving(*args, **kwargs):
        counts.append(0)
        saved(*args, **kwargs)
        found.append(counts.pop())

    found: list[int] = []
    saver.Saver.save, dist.all_gather = saving, counting
    train(options, output, 96)
    return found


def test_ranks_meet_as_often_in_a_save_however_many_they_are(tmp_path, tiny):
    for ranks in (2, 3):
        options = [*tiny, *STAGE_1, "DATA.BATCH_SIZE", "8"]
        told = run_ranks(collectives_of_a_save, options, tmp_path / str(ranks), ranks=ranks)
        # That the last save is done, and where this one goes: a size and a content each.
        assert told == [[4]] * ranks


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), None], ids=["full", "nan"]
)
def test_a_share_that_cant_be_written_leaves_no_checkpoint(tmp_path, tiny, error):
    options = [*tiny, *RECIPE, *STAGE_1, "KEEP_LAST", "9"]
    runs = [([*options, "SAVE_ON_ERROR", how], tmp_path / how) for how in ("stop", "continue")]
    first, second = run_ranks(train_where_rank_1_fails, error, runs)
    assert first == second
    stopped, went_on = first
    name = "epoch_0001_sample_000000032"
    checkpoints = tmp_path / "stop" / "checkpoints"
    assert checkpoint_names(checkpoints) == {"epoch_0001_sample_000000016", "last"}
    assert newest_whole(checkpoints) == checkpoints / "epoch_0001_sample_000000016"
    if error is None:
        assert f"{name} isn't saved: " in stopped
        assert f" of {SHARES[1]} holds NaN or infinite values" in stopped
        assert went_on == stopped
        return
    assert stopped == (
        f"{name} wasn't saved ([Errno 28] No space left on device): free some space; the last complete checkpoint is"
        f" {checkpoints}/epoch_0001_sample_000000016"
    )
    assert went_on == ""
    assert (tmp_path / "continue" / "log.txt").read_text().count(
        "; the run continues (SAVE_ON_ERROR)"
    ) == 1
    assert not (tmp_path / "continue" / "checkpoints" / name).exists()
    assert newest_whole(tmp_path / "continue" / "checkpoints").name == "epoch_0001"


def test_what_a_killed_run_had_begun_is_no_checkpoint_and_is_removed(trained, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(trained / "sharded" / "checkpoints", checkpoints, symlinks=True)
    begun = checkpoints / ".epoch_0002.4194304.0123abcd"  # of a process that is no more
    begun.mkdir()
    for name in (storage.MODEL, *SHARES, f"{SHARES[1]}.sum"):
        (begun / name).write_bytes(b"half")
    strange = checkpoints / ".epoch_0003.4194304.0123abcd"
    strange.mkdir()
    (strange / "optimizer-1-of-2.safetensors").write_bytes(b"a user's own")
    assert newest_whole(checkpoints).name == "epoch_0001"
    assert storage.remove_leftovers(checkpoints) == [strange.name]
    assert not begun.exists()


def train_elsewhere(output):
    """What a rank is told that isn't where rank 0 is."""
    if utils.rank():
        os.chdir(output / "elsewhere")
    else:
        os.chdir(output / "here")
    from conftest import TINY

    try:
        train([*TINY, *RECIPE, *STAGE_1], Path("run"), 64)
    except InputError as error:
        return str(error)


def test_a_folder_that_a_rank_doesnt_see_is_refused_before_it_is_made(tmp_path):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    told = run_ranks(train_elsewhere, tmp_path)
    line = "rank 1 can't access run, where it has to write its share of the optimizer's state"
    assert (
        told == [f"{line} (DIST.STRATEGY.sharding); choose an -output that all machines share"] * 2
    )
    assert [list((tmp_path / name).iterdir()) for name in ("here", "elsewhere")] == [[], []]


# ------------------------------------------------------------------ untruthful


def changed_index(change):
    """Changes the index of a checkpoint by a function of its content."""

    def act(checkpoint):
        index = json.loads((checkpoint / storage.INDEX).read_text())
        change(index)
        (checkpoint / storage.INDEX).write_text(json.dumps(index))

    return act


def changed_share(change):
    """Changes the tensors of the second share."""

    def act(checkpoint):
        file = checkpoint / SHARES[1]
        held = load_file(file)
        change(held, load_file(checkpoint / SHARES[0]))
        file.unlink()
        save_file(held, file)

    return act


def link(to):
    def act(checkpoint):
        (checkpoint / SHARES[1]).unlink()
        (checkpoint / SHARES[1]).symlink_to(to)

    return act


def moved(index):
    """The index has the first share's tensors in the second."""
    index["weight_map"] = dict.fromkeys(index["weight_map"], SHARES[1])


def some_key(held):
    return next(key for key in held if key.endswith("moment1_0"))


LIES = {
    "a share that isn't there": (
        lambda c: (c / SHARES[0]).unlink(),
        f"{SHARES[0]}: can't be read as a file",
    ),
    "more shares than files": (
        changed_index(lambda index: index["metadata"].update(shares=8000)),
        "lists .* in optimizer-0000.-of-00002.safetensors, which isn't one of its 8000 shares",
    ),
    "a number of shares that isn't one": (
        changed_index(lambda index: index["metadata"].update(shares="2")),
        "its metadata is a dictionary of 1, expected a dictionary with a number of shares from 2 to 8192",
    ),
    "endless shares": (
        changed_index(lambda i: i["metadata"].update(shares=10**12)),
        "expected a dictionary with a number of shares",
    ),
    "a file outside": (
        changed_index(lambda index: index["weight_map"].update({"a/b": "../../other.safetensors"})),
        r"it lists a/b in \.\./\.\./other\.safetensors, which isn't one of its 2 shares",
    ),
    "no map": (changed_index(lambda index: index.pop("weight_map")), "weight_map is missing"),
    "a map that is a list": (
        changed_index(lambda i: i.update(weight_map=[1])),
        "weight_map is .*, expected tensors",
    ),
    "a name twice": (
        lambda c: (c / storage.INDEX).write_text('{"metadata": {}, "metadata": {}}'),
        f"{storage.INDEX}: ",
    ),
    "tensors elsewhere": (
        changed_index(moved),
        f"{SHARES[0]} contains .*, which {storage.INDEX} doesn't list for it",
    ),
    "a tensor that isn't there": (
        changed_index(
            lambda index: index["weight_map"].update({"norm.weight/moment9_0": SHARES[0]})
        ),
        f"{SHARES[0]} lacks norm.weight/moment9_0, which {storage.INDEX} lists for it",
    ),
    "a tensor twice": (
        changed_share(lambda held, other: held.update({some_key(other): other[some_key(other)]})),
        f"{SHARES[1]} contains .*/moment1_0, which {storage.INDEX} doesn't list for it",
    ),
    "a tensor of another shape": (
        changed_share(
            lambda held, _: held.update({some_key(held): np.zeros((3, 5, 7), np.float32)})
        ),
        rf"{SHARES[1]}: .*/moment1_0 is float32 \[3, 5, 7\], expected float32",
    ),
    "a tensor that isn't finite": (
        changed_share(lambda held, _: held.update({some_key(held): held[some_key(held)] * np.inf})),
        rf"{SHARES[1]}: .*/moment1_0 holds NaN or infinite values",
    ),
    "a share that is no tensors": (
        lambda c: (c / SHARES[1]).write_bytes(b"hello" * 100),
        f"{SHARES[1]}: it",
    ),
    "a link to a device": (link("/dev/zero"), f"{SHARES[1]}: it isn't a regular file"),
    "a link to nothing": (link("/nowhere"), f"{SHARES[1]}: can't be read as a file"),
    "a link to a text": (link("/etc/hostname"), f"{SHARES[1]}: can't be read as tensors"),
    "both kinds": (
        lambda c: save_file(optimizer_state(c), c / storage.OPTIMIZER),
        "it lists optimizer.safetensors, which isn't a share of this checkpoint",
    ),
    "a share of another number": (
        lambda c: shutil.copy(c / SHARES[1], c / "optimizer-00003-of-00003.safetensors"),
        "it lists optimizer-00003-of-00003.safetensors, which isn't a share",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_shares_that_lie_are_one_line(trained, tmp_path, tiny, name):
    """With checksums that are right, as a stranger would write them."""
    lie, message = LIES[name]
    checkpoint = tmp_path / "epoch_0001"
    shutil.copytree(trained / "sharded" / "checkpoints" / "epoch_0001", checkpoint)
    lie(checkpoint)
    lines = [
        f"{storage.sha256_of(file)}  {file.name}\n"
        for file in sorted(checkpoint.iterdir())
        if file.name != storage.SUMS and file.is_file()
    ]
    for share in SHARES:
        if not any(share in line for line in lines):
            lines.append(f"{'0' * 64}  {share}\n")
    (checkpoint / storage.SUMS).write_text("".join(lines))
    config = get_config(None, [*tiny, "TRAIN.MODEL_EMA", "True"])
    model = build_model(config)
    with pytest.raises(InputError, match=message) as caught:
        storage.verify(checkpoint)
        load_checkpoint(checkpoint, model, build_optimizer(config, model))
    assert "\n" not in str(caught.value)
    assert (Path("/etc/hostname").read_text().strip() or "-") not in str(caught.value).replace(
        str(tmp_path), ""
    )


@pytest.mark.parametrize("missing", [storage.INDEX, SHARES[0], SHARES[1]])
def test_sums_have_a_line_for_each_share(trained, tmp_path, missing):
    checkpoint = tmp_path / "epoch_0001"
    shutil.copytree(trained / "sharded" / "checkpoints" / "epoch_0001", checkpoint)
    lines = (checkpoint / storage.SUMS).read_text().splitlines(keepends=True)
    (checkpoint / storage.SUMS).write_text(
        "".join(line for line in lines if f" {missing}\n" not in line)
    )
    expected = storage.OPTIMIZER if missing == storage.INDEX else missing
    with pytest.raises(InputError, match=f"SHA256SUMS: it doesn't list {expected}"):
        storage.verify(checkpoint)


@pytest.mark.parametrize("damaged", [storage.INDEX, *SHARES])
def test_a_damaged_share_isnt_gone_on_from(trained, tmp_path, tiny, damaged):
    run = tmp_path / "run"
    shutil.copytree(trained / "sharded", run, symlinks=True)
    file = run / "checkpoints" / "epoch_0001" / damaged
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    options = [*tiny, *RECIPE, "MODEL.RESUME", str(run / "checkpoints" / "epoch_0001")]
    told = f"damaged checkpoint: {damaged}: its content has changed (its SHA-256 differs)"
    refused(told, options, tmp_path / "new", 64)
    assert newest_whole(run / "checkpoints").name == "epoch_0001_sample_000000048"


# --------------------------------------------------------------------- merged


def test_a_sharded_checkpoint_is_written_anew_as_one(trained, tmp_path, tiny, monkeypatch, capsys):
    last = trained / "sharded" / "checkpoints" / "last"
    merged = tmp_path / "epoch_0001"
    monkeypatch.setattr("sys.argv", ["merge_checkpoint.py", str(last), str(merged)])
    merge_checkpoint.main()
    expected = optimizer_state(last)
    assert capsys.readouterr().out == (
        f"{merged}: {len(expected)} tensors of 2 shares in optimizer.safetensors; from {last}\n"
    )
    storage.verify(merged)
    assert {file.name for file in merged.iterdir()} == {file.name for file in last.iterdir()} - {
        storage.INDEX,
        *SHARES,
    } | {storage.OPTIMIZER}
    assert_close(load_file(merged / storage.OPTIMIZER), expected, atol=0)
    told = merge_checkpoint.merge(trained / "sharded", tmp_path / "of the run")
    assert told.endswith(f"from {newest_whole(trained / 'sharded' / 'checkpoints')}")
    assert (tmp_path / "of the run" / storage.SUMS).read_bytes() == (
        merged / storage.SUMS
    ).read_bytes()
    assert (merged / storage.MODEL).read_bytes() == (last / storage.MODEL).read_bytes()
    for output, resumed in (("one", merged), ("shares", last)):
        resume = ["MODEL.RESUME", str(resumed), "TRAIN.NUM_EPOCHS", "2"]
        train([*tiny, *RECIPE], tmp_path / output, 64, named=resume)
    assert_same_run(tmp_path / "one", tmp_path / "shares")


def test_a_merge_holds_one_tensor_at_a_time(tmp_path):
    source = tmp_path / "epoch_0001"
    target = tmp_path / "merged"
    source.mkdir()
    random = np.random.default_rng(0)
    held = [
        {f"{name}{rank}": random.standard_normal((1 << 20,), np.float32) for name in "abcde"}
        for rank in range(4)
    ]
    files = {storage.share_name(rank, 4): own for rank, own in enumerate(held)}
    files[storage.MODEL] = {"weight": random.standard_normal((8 << 20,), np.float32)}
    contents = {**files, storage.STATE: b"{}", storage.INDEX: storage.index_of(held)}
    sums = [storage.write_file(source / name, content) for name, content in contents.items()]
    storage.write_file(source / storage.SUMS, "".join(sums).encode())
    tracemalloc.start()
    merge_checkpoint.merge(source, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20  # of 112 MiB; the buffer in which the index is read has 16
    storage.write_file(
        tmp_path / "expected", {name: array for own in held for name, array in own.items()}
    )
    assert (target / storage.OPTIMIZER).read_bytes() == (tmp_path / "expected").read_bytes()
    assert (target / storage.MODEL).read_bytes() == (source / storage.MODEL).read_bytes()


def test_what_cant_be_merged_is_one_line_and_leaves_nothing(trained, tmp_path):
    sharded, plain = (trained / name / "checkpoints" / "last" for name in ("sharded", "plain"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for source, target, message in (
        (
            plain,
            tmp_path / "new",
            "the optimizer's state is a single file already; there is nothing to merge",
        ),
        (sharded, tmp_path, f"{tmp_path} already exists; choose another folder"),
        (sharded, tmp_path / "dangling", "dangling already exists; choose another folder"),
        (sharded, sharded / "new", "new is inside the checkpoint; choose a folder outside it"),
        (tmp_path, tmp_path / "new", f"no checkpoint at {tmp_path}: "),
    ):
        with pytest.raises(InputError, match=message):
            merge_checkpoint.merge(source, target)
        assert [path.name for path in tmp_path.iterdir()] == ["dangling"]
