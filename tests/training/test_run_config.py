"""Which configuration a command without -cfg takes, on data that isn't digits: as README prints the
commands.
"""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, write_images
from support.training_runs import assert_same_run

from config import get_config, resolved_yaml
from errors import InputError
from training.command_line import config_from_arguments, run_file
from training.run import for_others

SMALL = """
DATA: {DATASET: mnist, DATA_PATH: data, BATCH_SIZE: 20, BATCH_SIZE_EVAL: 7, IMAGE_SIZE: 12, IMAGE_CHANNELS: 1,
       IMAGENET_MEAN: 0.25, IMAGENET_STD: 0.5, CROP_PCT: 1.0, NUM_WORKERS: 0}
MODEL: {TYPE: ViT, NAME: small, NUM_CLASSES: auto, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 0, BASE_LR: 3e-3, HFLIP: 0.0}
SAVE_FREQ: 1
"""


def write_mnist(folder: Path, train: int = 100, val: int = 53) -> None:
    """Writes the four files: pictures of 28 x 28 whose brightness follows from their class."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("train", train), ("t10k", val)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = (25 * labels[:, None, None] + rng.integers(0, 20, (count, 28, 28))).astype(
            np.uint8
        )
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = np.array([0x800 + array.ndim, *array.shape], ">u4").tobytes()
            (folder / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))


# ------------------------------------------------------------- the commands themselves


@pytest.fixture
def mnist(tmp_path, program):
    """A run on MNIST's format by run_train_multi.sh, in ``tmp_path``; what it printed."""
    write_mnist(tmp_path / "data")
    (tmp_path / "small.yaml").write_text(SMALL)
    status, printed, errors = program(
        "run_train_multi.sh", "-cfg=small.yaml", "-output=run", "-ngpus=1"
    )
    assert status == 0, errors
    return printed


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


@pytest.mark.smoke
@pytest.mark.slow
def test_a_runs_data_and_model_are_evaluated_and_it_goes_on_without_cfg(tmp_path, program, mnist):
    lines = [line[14:] for line in mnist.splitlines()]
    assert "run: run" in lines
    assert lines[-2].startswith("summary: acc1: ")
    told = "predictions.csv, confusion.csv, report.html"
    names = f"config.yaml, result.json, metrics.jsonl, curves.png, {told}, checkpoints/best, checkpoints/last"
    assert lines[-1] == f"files: {names}"
    trained = result(tmp_path / "run")
    evaluation = ("run_eval_multi.sh", "-eval", "-pretrained=run", "-output=of_best")
    status, printed, errors = program(*evaluation)
    assert status == 0, errors
    assert result(tmp_path / "of_best")["loss"] == pytest.approx(trained["best"]["loss"], abs=1e-4)
    best = tmp_path / "run/checkpoints/best"
    last = {key: trained[key] for key in ("acc1", "loss", "num_samples")}
    of_run = "configuration: run/config.yaml, of the run of -pretrained (no -cfg is given)"
    for number, (script, *flags) in enumerate(
        [
            (
                "run_eval_multi.sh",
                "-cfg=run/config.yaml",
                "-eval",
                "-pretrained=run/checkpoints/last",
            ),
            ("run_eval_multi.sh", "-eval", "-pretrained=run/checkpoints/last"),
            (
                "main_single_gpu.py",
                "-eval",
                "-pretrained=run/checkpoints/epoch_0002/model",
                "-batch_size=5",
            ),
        ]
    ):
        status, printed, errors = program(script, *flags, f"-output={number}")
        assert status == 0, errors
        found = result(tmp_path / str(number))
        assert {key: found[key] for key in last} == {
            key: pytest.approx(value, abs=1e-4) for key, value in last.items()
        }
        assert found["config"]["DATA"]["DATASET"] == "mnist"
        assert (of_run in printed) == (number > 0)
        assert printed.splitlines()[-1][14:] == f"files: config.yaml, result.json, {told}"
    path = get_config(tmp_path / "run/config.yaml").DATA.DATA_PATH
    assert path == str(tmp_path / "data")  # which is found from any folder
    longer = ["-o", "TRAIN.NUM_EPOCHS", "3"]
    for script, file, *flags in (
        (
            "run_train_multi.sh",
            "run/config.yaml",
            "-output=new",
            "-resume=run/checkpoints/epoch_0001",
            "-ngpus=1",
        ),
        ("main_single_gpu.py", "new/config.yaml", "-output=new", "-resume=auto", *longer),
        (
            "run_train_multi.sh",
            "run/config.yaml",
            "-output=run",
            "-resume=auto",
            "-ngpus=1",
            *longer,
        ),
    ):
        status, printed, errors = program(script, *flags)
        assert status == 0, errors
        assert f"configuration: {file}, of the resumed run (no -cfg is given)" in printed
    assert "resumed after epoch 2, from " in printed
    assert "epoch 3/3 step 15: loss: " in printed
    assert_same_run(tmp_path / "run", tmp_path / "new")
    assert best.resolve().parent == tmp_path / "run/checkpoints"


def test_a_script_says_that_it_trains_digits_and_that_other_data_needs_a_model(tmp_path, program):
    write_images(tmp_path / "data" / "train", {"a": 8, "b": 8, "c": 8})
    write_images(tmp_path / "data" / "val", {"a": 1, "b": 1, "c": 1})
    told = "configuration: vit_digits, because neither -cfg nor a run is given"
    one = ["-o", "TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0", "MODEL.DEPTH", "1"]
    status, printed, errors = program("run_train_multi.sh", "-output=run", "-resume=auto", *one)
    assert status == 0, errors
    assert told in printed
    assert "-resume=auto: no checkpoint in " in printed
    status, _, errors = program("run_train_multi.sh", "-dataset=folder")
    assert status == 2
    assert errors == (
        "error: -dataset=folder needs -cfg, the model (python tools/list_models.py lists them);"
        " the default, vit_digits, is for digits only\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "run"]


# ------------------------------------------------------------- every form, by the configuration alone


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder, without its weights."""
    monkeypatch.chdir(tmp_path)
    options = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        "d",
        "DATA.IMAGE_SIZE",
        "48",
        "NGPUS",
        "2",
        "AMP",
        "True",
    ]
    folder = Path("run")
    (folder / "checkpoints" / "epoch_0001").mkdir(parents=True)
    (folder / "checkpoints" / "best").symlink_to("epoch_0001")
    (folder / "checkpoints" / "best_ema.safetensors").symlink_to("epoch_0001/ema.safetensors")
    (folder / "config.yaml").write_text(resolved_yaml(get_config("vit_digits", options)))
    return folder


def of(*flags, program="main_multi_gpu.py"):
    """(data set, image size, processes, notes) that a command line leads to."""
    config = config_from_arguments(program, flags)
    return config.DATA.DATASET, config.DATA.IMAGE_SIZE, config.NGPUS, config.notes


SCRIPT = "-default_cfg=vit_digits"
GOES_ON = ["configuration: run/config.yaml, of the resumed run (no -cfg is given)"]
NAMED = ["configuration: run/config.yaml, of the run of -pretrained (no -cfg is given)"]


@pytest.mark.parametrize("script", [[], [SCRIPT]])
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-output=run", "-resume=auto"], ("folder", 48, 2, GOES_ON)),
        (["-o", "OUTPUT", "run", "MODEL.RESUME", "auto"], ("folder", 48, 2, GOES_ON)),
        (["-output=run/", "-resume=auto", "-ngpus=1"], ("folder", 48, 1, GOES_ON)),
        (["-output=new", "-resume=run/checkpoints/epoch_0001/"], ("folder", 48, 2, GOES_ON)),
        (["-resume=run/checkpoints/best"], ("folder", 48, 2, GOES_ON)),
        (["-resume=run"], ("folder", 48, 2, GOES_ON)),
        (["-output=run", "-resume", "run/"], ("folder", 48, 2, GOES_ON)),
        (["-eval", "-pretrained=run"], ("folder", 48, -1, NAMED)),
        (["-output=run", "-resume=auto", "-image_size=64"], ("folder", 64, 2, GOES_ON)),
        (
            ["-output=run", "-resume=auto", "-o", "DATA.DATASET", "synthetic"],
            ("synthetic", 48, 2, GOES_ON),
        ),
        (["-eval", "-pretrained=run/checkpoints/best"], ("folder", 48, -1, NAMED)),
        (
            ["-eval", "-pretrained=run/checkpoints/epoch_0001/model.safetensors"],
            ("folder", 48, -1, NAMED),
        ),
        (
            ["-eval", "-pretrained=run/checkpoints/best_ema.safetensors", "-ngpus=3"],
            ("folder", 48, 3, NAMED),
        ),
        (["-pretrained=run/checkpoints/best", "-dataset=shards"], ("shards", 48, 2, NAMED)),
        (
            ["-output=new", "-resume=auto", "-pretrained=run/checkpoints/best"],
            ("folder", 48, 2, NAMED),
        ),
        (["-cfg=vit_digits", "-output=run", "-resume=auto"], ("digits", 8, -1, [])),
        (["-cfg=vit_digits", "-eval", "-pretrained=run/checkpoints/best"], ("digits", 8, -1, [])),
    ],
)
def test_the_runs_own_configuration_is_taken(run, script, flags, expected):
    assert of(*script, *flags) == expected


@pytest.mark.parametrize(
    ("flags", "weights"),
    [
        (["-output=run", "-resume=auto"], None),
        (["-output=new", "-resume=run/checkpoints/epoch_0001"], None),
        (["-output=run", "-resume=auto", "-pretrained=other"], "other"),
        (["-output=begun", "-resume=auto"], "gone.npz"),  # nothing was saved there yet
    ],
)
def test_a_run_that_goes_on_does_not_ask_for_its_first_weights(run, flags, weights):
    text = resolved_yaml(
        get_config(
            "vit_digits", ["MODEL.PRETRAINED", "gone.npz", "MODEL.PRETRAINED_ALLOW", "[head.*]"]
        )
    )
    (run / "config.yaml").write_text(text)
    Path("begun").mkdir()
    Path("begun/config.yaml").write_text(text)
    config = config_from_arguments("main_multi_gpu.py", flags)
    assert weights == config.MODEL.PRETRAINED
    assert (weights or "gone.npz") == for_others(config).MODEL.PRETRAINED


def test_one_process_takes_what_several_trained(run):
    assert of("-output=run", "-resume=auto", program="main_single_gpu.py") == (
        "folder",
        48,
        -1,
        GOES_ON,
    )


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["-output=new"],
        ["-output=new", "-resume=auto"],
        ["-dataset=digits", "-resume=none"],
        ["-output=run"],
    ],
)
def test_a_script_trains_digits_where_nothing_is_given(run, flags):
    (run.parent / "new").mkdir()
    told = ["configuration: vit_digits, because neither -cfg nor a run is given"]
    assert of(SCRIPT, *flags) == ("digits", 8, -1, told)


def test_without_a_script_nothing_is_digits(run):
    assert of() == ("imagenet2012", 224, -1, [])


@pytest.mark.parametrize("part", ["checkpoints", "config.yaml"])
def test_resuming_a_part_of_a_run_names_the_run(run, part):
    with pytest.raises(
        InputError,
        match=f"^-resume={run}/{part}: its run has no config.yaml .*; use -resume={run}$",
    ):
        of(SCRIPT, f"-resume={run}/{part}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([SCRIPT, "-data_path=x"], "-data_path is x, but there is no such folder"),
        ([SCRIPT, "-o", "DATA.DATASET", "mnist"], "-dataset=mnist needs -cfg, the model"),
        (
            ["-eval", "-pretrained=evaluated"],
            "-pretrained=evaluated is the folder of a run without checkpoints",
        ),
        (
            [SCRIPT, "-resume=evaluated"],
            "-resume=evaluated: its run has no config.yaml (in RUN, or next",
        ),
        (
            [SCRIPT, "-eval", "-pretrained=hf-hub:a/b"],
            "-pretrained=hf-hub:a/b needs -cfg, the model",
        ),
        ([SCRIPT, "-output=new", "-resume=auto", "-dataset=folder"], "-dataset=folder needs -cfg"),
        (
            ["-output=new", "-resume=auto"],
            "-resume=auto: new has no config.yaml to resume with; pass -cfg",
        ),
        (
            [SCRIPT, "-output=bare", "-resume=auto"],
            "-resume=auto: bare has no config.yaml to resume with; pass -cfg",
        ),
        (
            [SCRIPT, "-resume=bare/checkpoints"],
            "-resume=bare/checkpoints: its run has no config.yaml (in RUN, or",
        ),
        (
            [SCRIPT, "-resume=elsewhere/epoch_0001"],
            "-resume=elsewhere/epoch_0001: no such folder; expected a run",
        ),
        (
            ["-output=evaluated", "-resume=auto"],
            "evaluated/config.yaml is from an evaluation, and evaluation runs can't be",
        ),
    ],
)
def test_what_leaves_no_model_to_take_is_refused(run, flags, message):
    Path("evaluated").mkdir()
    Path("bare/checkpoints").mkdir(parents=True)
    Path("evaluated/config.yaml").write_text(
        resolved_yaml(get_config("vit_digits", ["EVAL", "True"]))
    )
    with pytest.raises(InputError) as caught:
        of(*flags)
    assert str(caught.value).startswith(message)


def test_every_script_leaves_its_default_to_the_program():
    scripts = sorted(ROOT.glob("run_*.sh"))
    assert len(scripts) == 4
    for script in scripts:
        text = script.read_text()
        assert " \\\n-default_cfg=vit_digits \\\n" in text
        assert not any(
            line.startswith(("-cfg", "-dataset", "-data_path")) for line in text.splitlines()
        )
        assert '\n"$@"\n' in text


@pytest.mark.parametrize(
    ("file", "beside"), [("checkpoints/a.pdparams", "other"), ("weights/a.pdparams", ".")]
)
def test_weights_of_no_run_bring_no_configuration(tmp_path, file, beside):
    """A folder of anybody's may be called checkpoints, and a run's folder may hold other weights."""
    (tmp_path / beside).mkdir(exist_ok=True)
    (tmp_path / beside / "config.yaml").write_text("SEED: 1\n")
    assert run_file(tmp_path / file) is None
