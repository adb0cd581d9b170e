"""tools/replay.py repeats a step bit by bit, names the layer and the sample that spoil it, and saves
the step.
"""

import json
import re
import subprocess

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT, TINY, without
from PIL import Image
from safetensors.numpy import load_file
from support.mask_files import write_masks
from support.sharding import STAGE_1

from config import get_config
from models import build_model, create_model
from training.bad_steps import FILE, batch_file, read_bad_steps
from training.checkpoint.kept import kept_checkpoints
from training.replay import LayerValues, StepValues, Values, report, write_findings
from weights import save_weights

# The image that the sampler takes late in the epoch, when losses are judged.
BAD = 61
# Of TINY, as create_model takes them.
SIZES = {
    "image_size": 8,
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 4.0,
}
OPTIONS = [*TINY, "DATA.BATCH_SIZE", "16", "REPORT_FREQ", "1", "MODEL.DROPOUT", "0.1"]


@pytest.fixture
def replayed(tmp_path):
    """Returns a function that runs a command in ``tmp_path``: (exit status, stdout, stderr)."""

    def run(script, *flags):
        done = subprocess.run(
            [warm.python(), str(ROOT / script), *flags],
            cwd=tmp_path,
            env=warm.environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def logged(run, step):
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["split"] == "train" and record["step"] == step:
            return record
    raise AssertionError(f"step {step} isn't logged")


def logged_loss(run, step):
    return logged(run, step)["loss"]


def shown_loss(out):
    [line] = [line for line in out.splitlines() if line.startswith("step ")]
    return float(line.split("loss ")[1].split()[0])


# Dropout, accumulation, and a learning rate that falls: what a step depends on.
@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_is_that_of_the_run_from_a_checkpoint_and_from_the_beginning(
    replayed, tmp_path, ranks
):
    options = [*OPTIONS, "TRAIN.NUM_EPOCHS", "2", "TRAIN.ACCUM_ITER", "2", "SAVE_FREQ", "1"]
    flags = [f"-ngpus={ranks}", "-output=run", "-o", *options]
    status, _, err = replayed("main_multi_gpu.py", *flags)
    assert status == 0, err
    steps = 89 // ranks
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    for step, where in ((7, "the beginning"), (steps + 5, "epoch_0001")):
        status, out, err = replayed("tools/replay.py", "run", f"-step={step}")
        assert status == 0, err
        assert f"{where}, in {ranks} process" in out
        assert "everything is finite" in out
        assert "samples with the largest losses:\n" in out
        assert shown_loss(out) == pytest.approx(logged_loss(tmp_path / "run", step), rel=2e-6)
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def write_weights(path, first, second):
    """Weights whose second MLP has these values in its first and in its second layer."""
    model = build_model(get_config(None, TINY))
    mlp = model.blocks[1].mlp
    for tensor, value in ((mlp.fc1.weight, first), (mlp.fc1.bias, first), (mlp.fc2.weight, second)):
        tensor.set_value(paddle.full_like(tensor, value))
    save_weights(model, path)


@pytest.mark.smoke
def test_the_layer_that_overflows_is_named_by_default(replayed, tmp_path):
    write_weights(tmp_path / "w.safetensors", 1e20, 1e30)
    flags = ["-pretrained=w.safetensors", "-output=run", "-o", *OPTIONS]
    status, out, err = replayed("main_single_gpu.py", *flags)
    assert status == 1
    assert "the loss is nan at step 1" in err
    assert "python tools/replay.py run -step=1 repeats it, layer by layer" in out + err
    recorded = json.loads((tmp_path / "run" / FILE).read_text())
    assert recorded == [{"step": 1, "epoch": 1, "ranks": 1, "seed": 0, "kind": "not finite"}]
    status, out, err = replayed("tools/replay.py", "run")
    assert status == 0, err
    assert "first non-finite output: blocks.1.mlp" in out
    assert "from finite inputs (largest " in out
    # The table ends there.
    assert "\nblocks.0.mlp" in out
    assert "\nhead " not in out


def write_images(folder):
    """Images of two channels, one of which has values that overflow in the first layer."""
    rng = np.random.default_rng(0)
    for number in range(32):
        for split in ("train", "val"):
            image = rng.random((8, 8, 2), np.float32)
            if (split, number) == ("train", 13):
                image[:] = 3e38
            path = folder / split / "ab"[number % 2] / f"{number}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, image)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_file_of_the_sample_that_overflows_is_named(replayed, tmp_path, ranks):
    write_images(tmp_path / "images")
    options = [
        *OPTIONS,
        *["DATA.IMAGE_CHANNELS", "2", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"],
        *["MODEL.NUM_CLASSES", "2", "DATA.BATCH_SIZE", "4"],
    ]
    flags = ["-dataset=folder", "-data_path=images", f"-ngpus={ranks}", "-output=run"]
    status, _, err = replayed("main_multi_gpu.py", *flags, "-o", *options, "DATA.DATASET", "folder")
    assert status == 1, err
    assert "the loss is nan" in err
    status, out, err = replayed("tools/replay.py", "run")
    assert status == 0, err
    assert "first non-finite output: patch_embed" in out
    assert "of the model's inputs aren't finite (pixels reach 3e+38)\n" in out
    assert f"samples: {tmp_path}/images/train/b/13.npy\n" in out
    assert "the run had another batch" not in out

    # The run itself has saved each rank's batch.
    [record] = read_bad_steps(tmp_path / "run")
    status, _, err = replayed("tools/replay.py", "run", "-output=step")
    assert status == 0, err
    for rank in range(ranks):
        saved = np.load(batch_file(tmp_path / "run", record["step"], rank))
        replayed_batch = np.load(tmp_path / "step" / f"batch_rank{rank}.npz")
        assert set(saved) == {"names", "pixels", "labels"}
        paths = [str(tmp_path / name) for name in saved["names"]]
        assert paths == replayed_batch["names"].tolist()
        for name in ("pixels", "labels"):
            np.testing.assert_array_equal(saved[name], replayed_batch[name])

    # An image of the batch is another one now.
    path = next(path for path in paths if not path.endswith("/13.npy"))
    np.save(path, np.load(path)[::-1])
    status, out, err = replayed("tools/replay.py", "run")
    assert status == 0, err
    assert (
        "the run had another batch: pixels aren't those that it saved, so its data or its"
        " configuration has changed since\n"
    ) in out


@pytest.mark.long
def test_a_step_whose_weights_are_spoilt_is_traced_to_the_update_before(replayed, tmp_path):
    # The second layer multiplies zeros, and its weight decay overflows.
    write_weights(tmp_path / "w.safetensors", 0.0, 1e38)
    options = [*OPTIONS, "TRAIN.BASE_LR", "1e3", "TRAIN.WEIGHT_DECAY", "1e3"]
    flags = ["-pretrained=w.safetensors", "-output=run", "-o", *options]
    status, _, err = replayed("main_single_gpu.py", *flags)
    assert status == 1
    assert "the loss is nan at step 2" in err
    status, out, err = replayed("tools/replay.py", "run")
    assert status == 0, err
    assert "step 1 (epoch 1): loss 2." in out
    assert "before step 2 the weights aren't finite (" in out
    assert "step 1 is shown, whose update made them so" in out
    assert out.endswith("its outputs and gradients are finite: the update itself overflowed\n")


def test_what_cannot_be_repeated_is_one_line(replayed, tmp_path):
    status, _, err = replayed("tools/replay.py", "nothing")
    assert (status, err.count("\n")) == (2, 1)
    assert "nothing has no config.yaml; expected the folder of a training" in err
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("EVAL: True\n")
    status, _, err = replayed("tools/replay.py", "run", "-step=0")
    assert (status, err) == (2, "error: -step is 0, expected 1 or more\n")
    status, _, err = replayed("tools/replay.py", "run")
    assert status == 2
    assert "run is an evaluation, which has no steps; expected a training" in err


def test_a_step_beyond_the_run_and_a_run_without_bad_steps_are_one_line(replayed, tmp_path):
    from config import resolved_yaml

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(resolved_yaml(get_config(None, OPTIONS)))
    status, _, err = replayed("tools/replay.py", "run")
    assert status == 2
    assert f"run has no {FILE}: all its losses were in proportion; pass -step=N" in err
    status, _, err = replayed("tools/replay.py", "run", "-step=90", "-ngpus=1")
    assert (status, err.count("\n")) == (2, 1)
    assert "-step is 90, expected 1 to 89: the steps of the run after its checkpoint" in err


# ------------------------------------------------------------ other tasks, and outliers


def write_table(folder):
    """Grey pictures, and tables of the classes that they show."""
    rng = np.random.default_rng(0)
    for mode in ("train", "val"):
        (folder / mode).mkdir(parents=True)
        rows = ["image,left,right"]
        for number in range(16):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(
                folder / mode / f"{number}.png"
            )
            rows.append(f"{mode}/{number}.png,{number % 2},{number // 2 % 2}")
        (folder / f"{mode}.csv").write_text("\n".join(rows) + "\n")


@pytest.mark.long
@pytest.mark.parametrize("task", ["multilabel", "segmentation"])
def test_a_step_of_another_task_is_that_of_the_run(replayed, tmp_path, task):
    data = tmp_path / "data"
    words = [*without(TINY, "DATA.DATASET", "MODEL.NUM_CLASSES"), "MODEL.NUM_CLASSES", "auto"]
    words += ["TASK", task, "DATA.DATA_PATH", str(data), "DATA.BATCH_SIZE", "4"]
    words += ["REPORT_FREQ", "1", "SAVE_STEPS", "2"]
    if task == "multilabel":
        write_table(data)
        words += ["DATA.DATASET", "multilabel_csv"]
    else:
        write_masks(data)
        words = without(words, "DATA.IMAGE_CHANNELS", "DATA.IMAGENET", "DATA.CROP_PCT")
        words += ["DATA.DATASET", "masks", "HEAD.NAME", "linear", "HEAD.BATCH_NORM", "False"]
        words += ["DATA.CROP_MODE", "short"]
    status, _, err = replayed("main_single_gpu.py", "-output=run", "-o", *words)
    assert status == 0, err
    status, out, err = replayed("tools/replay.py", "run", "-step=3", "-output=step")
    assert status == 0, err
    assert shown_loss(out) == pytest.approx(logged_loss(tmp_path / "run", 3), rel=5e-6)
    columns = np.load(tmp_path / "step" / "batch_rank0.npz")
    assert len(columns["names"]) == len(columns["pixels"]) == len(columns["input_0"]) == 4


def write_spike(folder, bad):
    """128 images of two channels, one of them with values a hundred times those of the others."""
    rng = np.random.default_rng(0)
    for number in range(128):
        image = rng.random((8, 8, 2), np.float32) * (100 if number == bad else 1)
        for split in ("train", "val"):
            path = folder / split / "ab"[number % 2] / f"{number}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, image)


@pytest.mark.long
def test_an_outlier_is_replayed_from_its_kept_checkpoint_and_its_image_is_named(replayed, tmp_path):
    write_spike(tmp_path / "images", BAD)
    options = [
        *without(
            OPTIONS, "MODEL.NUM_CLASSES", "DATA.DATASET", "MODEL.PATCH_SIZE", "DATA.BATCH_SIZE"
        ),
        *["DATA.IMAGE_CHANNELS", "2", "DATA.IMAGENET_MEAN", "0.5", "DATA.IMAGENET_STD", "0.5"],
        *["TASK", "mae", "MODEL.PATCH_SIZE", "2", "METHOD.NORM_TARGET", "False"],
        *["METHOD.DECODER_WIDTH", "8", "METHOD.DECODER_DEPTH", "1", "METHOD.DECODER_HEADS", "2"],
        *["SAVE_STEPS", "5", "KEEP_LAST", "1", "SAVE_FREQ", "0", "DATA.BATCH_SIZE", "2"],
    ]
    flags = ["-dataset=folder", "-data_path=images", "-output=run", "-o", *options]
    status, out, err = replayed("main_single_gpu.py", *flags)
    assert status == 0, err
    [record] = read_bad_steps(tmp_path / "run")
    step = record["step"]
    assert record["kind"] == "outlier"
    [kept] = kept_checkpoints(tmp_path / "run", [step])
    # The newest one may have been in the making. KEEP_LAST has removed the checkpoint itself.
    assert step - 10 <= json.loads((kept / "state.json").read_text())["step"] < step
    assert not (tmp_path / "run" / "checkpoints" / kept.name).exists()
    status, out, err = replayed("tools/replay.py", "run")
    assert status == 0, err
    assert f"from run/bad_steps/step_{step}/{kept.name}, in 1 process\n" in out
    assert shown_loss(out) == pytest.approx(logged_loss(tmp_path / "run", step), rel=5e-6)
    [line] = re.findall(r"samples with the largest losses:\n(.*)", out)
    assert line.endswith(f"/{BAD}.npy")


# ------------------------------------------------------------ the saved step


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_saved_batch_and_weights_have_the_loss_of_the_log(replayed, tmp_path, ranks):
    options = [
        *without(OPTIONS, "MODEL.DROPOUT"),
        "TRAIN.ACCUM_ITER",
        "2",
        "TRAIN.SMOOTHING",
        "0.0",
    ]
    flags = [f"-ngpus={ranks}", "-output=run", "-o", *options]
    status, _, err = replayed("main_multi_gpu.py", *flags)
    assert status == 0, err
    status, out, err = replayed("tools/replay.py", "run", "-step=6", "-output=step")
    assert status == 0, err
    assert out.endswith("\nsaved in step\n")
    batches = [f"batch_rank{rank}.npz" for rank in range(ranks)]
    found = sorted(path.name for path in (tmp_path / "step").iterdir())
    assert found == [*batches, "step.json", "weights.safetensors"]

    model = create_model("vit_digits", str(tmp_path / "step" / "weights.safetensors"), **SIZES)
    model.eval()
    losses = []
    names = []
    for batch in batches:
        columns = np.load(tmp_path / "step" / batch)
        logits = model(paddle.to_tensor(columns["input_0"]))
        labels = paddle.to_tensor(columns["labels"].astype(np.int64))
        losses.append(paddle.nn.functional.cross_entropy(logits, labels, reduction="none").numpy())
        names += columns["names"].tolist()
    assert np.mean(losses) == pytest.approx(logged_loss(tmp_path / "run", 6), abs=1e-5)
    assert len(set(names)) == 16 * ranks

    step = json.loads((tmp_path / "step" / "step.json").read_text())
    np.testing.assert_allclose(step.pop("losses"), losses, atol=1e-5)
    assert step.pop("report")[-6:] == out.splitlines()[-7:-1]
    lr = logged(tmp_path / "run", 6)["lr"]
    assert step == {"step": 6, "epoch": 1, "seed": 0, "ranks": ranks, "lr": lr}
    status, _, err = replayed("tools/replay.py", "run", "-step=6", "-output=step")
    assert (status, err.count("\n")) == (2, 1)
    assert "-output step exists and isn't an empty folder; choose another" in err


@pytest.mark.long
def test_a_step_of_sharded_weights_is_that_of_the_run(replayed, tmp_path):
    options = [*without(OPTIONS, "DATA.BATCH_SIZE"), "DATA.BATCH_SIZE", "64", *STAGE_1]
    options += ["DIST.STRATEGY.sharding_configs.stage", "3", "MODEL.RECOMPUTE", "True"]
    options += ["SAVE_STEPS", "4", "KEEP_LAST", "9"]
    status, _, err = replayed("main_multi_gpu.py", "-ngpus=2", "-output=run", "-o", *options)
    assert status == 0, err
    status, out, err = replayed("tools/replay.py", "run", "-step=5", "-output=step")
    assert status == 0, err
    assert (
        "repeating 1 step from run/checkpoints/epoch_0001_sample_000000512, in 2 processes" in out
    )
    assert shown_loss(out) == pytest.approx(logged_loss(tmp_path / "run", 5), rel=5e-6)
    saved = load_file(tmp_path / "step" / "weights.safetensors")
    checkpoint = tmp_path / "run" / "checkpoints" / "epoch_0001_sample_000000512"
    stored = load_file(checkpoint / "model.safetensors")
    assert saved.keys() == stored.keys()
    for name, array in saved.items():
        np.testing.assert_array_equal(array, stored[name], name)


def test_losses_that_json_has_no_numbers_for_are_texts(tmp_path):
    losses = (float("nan"), float("inf"), -float("inf"), 0.5)
    last = seen(losses=losses, forward=[layer("fc", bad=1, rows=[2])])
    write_findings(tmp_path, get_config(None, TINY), [[seen(4), last]])
    content = json.loads((tmp_path / "step.json").read_text(), parse_constant=pytest.fail)
    assert content["losses"] == [["nan", "inf", "-inf", 0.5]]
    assert content["report"][-1] == "samples: c.jpg"


# ------------------------------------------------------------ the report


def layer(name, bad=0, inputs_bad=0, rows=()):
    output = Values("4x2", -1.0, 2.0, bad, 8, list(rows))
    inputs = Values("4x2", -3.0, 1.0, inputs_bad, 8, [])
    return LayerValues(name, "Layer", output, inputs, None)


def seen(step=5, losses=(1.0, 3.0, 2.0, 0.5), **values):
    names = ["a.jpg", "b.jpg", "c.jpg", "d.jpg"]
    return StepValues(step, 1, names, list(losses), **values)


def last_lines(ranks, count):
    return list(report(ranks))[-count:]


def test_tensors_are_described_by_their_finite_values():
    tensor = paddle.to_tensor([[1.0, float("nan")], [-2.0, 3.0], [float("inf"), 0.0]])
    found = Values.of({"a": tensor, "b": paddle.to_tensor([1])}, 3)
    assert found == Values("3x2", -2.0, 3.0, 2, 6, [0, 2])
    assert found.largest == 3.0
    assert Values.of(tensor, 2).rows == []
    assert Values.of(paddle.to_tensor(float("nan")), 1) == Values("1", 0.0, 0.0, 1, 1, [])
    assert Values.of((), 1).total == 0


def test_the_first_layer_is_named_and_the_samples():
    layers = [layer("fc1"), layer("fc2", bad=2, rows=[1, 3]), layer("", bad=2, inputs_bad=2)]
    assert last_lines([[seen(forward=layers)]], 2) == [
        "first non-finite output: fc2 (Layer), 2 of 8 values, from finite inputs (largest 3)",
        "samples: b.jpg, d.jpg",
    ]


def test_values_that_arise_between_the_layers_of_a_layer_are_its_own():
    layers = [layer("attn.qkv"), layer("attn.proj", bad=8, inputs_bad=8), layer("attn", bad=8)]
    assert last_lines([[seen(forward=layers)]], 1) == [
        "first non-finite output: attn (Layer) before its layer attn.proj, 8 of 8 values,"
        " from finite inputs (largest 3)"
    ]


def test_a_loss_of_finite_outputs_is_the_tasks():
    losses = [1.0, float("inf"), 2.0, 0.5]
    lines = last_lines([[seen(losses=losses, forward=[layer("fc")])]], 2)
    assert lines == [
        "all layers are finite, but the loss isn't: the task computes it from finite outputs",
        "samples: b.jpg",
    ]


def test_a_gradient_is_named_if_the_forward_pass_is_finite():
    backward = [layer("head"), layer("fc", bad=8, rows=[0, 1, 2, 3])]
    steps = seen(forward=[layer("fc")], backward=backward)
    assert last_lines([[steps]], 2) == [
        "first non-finite gradient: of the output of fc (Layer), 8 of 8 values",
        "samples: all 4 of the batch",
    ]
    steps.scaled = True
    assert "in float16 a gradient may overflow: such an update is skipped" in report([[steps]])


def test_the_rank_with_the_values_is_shown_and_the_loss_is_that_of_all():
    bad = seen(losses=(9.0, 9.0, 9.0, 9.0), forward=[layer("fc", bad=1, rows=[2])])
    lines = list(report([[seen()], [bad], [seen()]]))
    assert lines[0] == ("step 5 (epoch 1): loss 4.08333 of 12 samples; rank 1, shown here: 9 of 4")
    assert lines[-1] == "samples: c.jpg"


def test_samples_are_ordered_by_their_losses():
    quiet = seen(losses=(0.1, 0.1, 0.1, 0.1))
    assert last_lines([[quiet], [seen()]], 5) == [
        "samples with the largest losses:",
        "  3  b.jpg",
        "  2  c.jpg",
        "  1  a.jpg",
        "  0.5  d.jpg",
    ]


def test_spoilt_weights_are_traced_to_the_step_that_spoilt_them():
    before = seen(4, forward=[layer("fc")], backward=[layer("fc", bad=1)])
    after = seen(5, losses=[float("nan")] * 4, spoilt_weights=["fc.weight"])
    lines = list(report([[before, after]]))
    assert lines[1] == (
        "before step 5 the weights aren't finite (fc.weight); step 4 is shown, whose update made"
        " them so"
    )
    assert lines[-1].startswith("first non-finite gradient: of the output of fc")
    before.backward = [layer("fc")]
    assert list(report([[before, after]]))[-1] == (
        "its outputs and gradients are finite: the update itself overflowed"
    )
