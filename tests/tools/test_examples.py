"""The examples: the values they print, held to what this process computes itself. Their workers run
in two ranks of this test's, which saves ten starts of Paddle; the commands as they are typed are
the slow tests'.
"""

import contextlib
import csv
import io
import os
import re
import subprocess
import sys

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT
from support.ranks import free_ports, run_ranks

import utils
from config import get_config
from datasets import get_dataset
from examples import data_parallel_from_scratch, fleet_resnet, gather_predictions, spawn_minimal
from models import build_model
from weights import save_weights

SMALL_RESNET = [
    "--image_size=32",
    "--batch_size=2",
    "--num_samples=9",
    "--epochs=1",
    "--num_workers=0",
    "--report=1",
]
# 37 samples on two ranks, in batches of 5.
GATHERED = ["DATA.DATASET", "synthetic", "DATA.SYNTHETIC_SIZE", "37", "DATA.BATCH_SIZE_EVAL", "5"]


def gather(file, *options):
    config = get_config("vit_digits", ["EVAL", "True", *GATHERED, *options])
    gather_predictions.worker(config, get_dataset(config, "val"), file)


def accuracies():
    """Of fresh weights, on 5 points, on 2 and on 1, of which the second rank has none."""
    paddle.seed(3)
    network = spawn_minimal.build_network()
    points = [spawn_minimal.TRAIN, spawn_minimal.TEST, ([[0.5, -1.0]], [0])]
    return [
        spawn_minimal.compute_accuracy(network, spawn_minimal.Points(*those)) for those in points
    ]


def examples_here(folder):
    """What this rank prints in each example, and what ``accuracies`` says."""
    calls = {
        "by_hand": (data_parallel_from_scratch.worker, (33, 4, 0.05)),
        "spawn": (spawn_minimal.main, (3,)),
        "gather": (gather, (folder / "two.csv",)),
        "fewer samples than ranks": (gather, (folder / "few.csv", "DATA.SYNTHETIC_SIZE", "1")),
        "fleet": (fleet_resnet.train_model, (fleet_resnet.parse(SMALL_RESNET),)),
    }
    printed = {}
    for name, (function, arguments) in calls.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            function(*arguments)
        printed[name] = out.getvalue()
    return printed, accuracies()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, [(printed, accuracies) of each rank])."""
    folder = tmp_path_factory.mktemp("examples")
    return folder, run_ranks(examples_here, folder)


def command(folder, script, *flags, launcher=(), **environment):
    """What an example prints, and what comes on stderr; without CUDA_VISIBLE_DEVICES: the launcher
    takes an empty one for one device.
    """
    environment = {
        key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"
    } | environment
    words = [sys.executable, *launcher, str(ROOT / "examples" / script), *flags]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


# --------------------------------------------------- data_parallel_from_scratch


@pytest.mark.smoke
def test_gradients_summed_by_hand_give_data_parallels_parameters_and_one_processs(ran):
    _, ((printed, _), (other, _)) = ran
    check_by_hand(printed["by_hand"])
    assert other["by_hand"] == ""


@pytest.mark.slow
def test_the_command_by_hand(tmp_path):
    check_by_hand(
        command(tmp_path, "data_parallel_from_scratch.py", "--batch_size=33", "--steps=4")[0]
    )


def check_by_hand(printed):
    lines = printed.splitlines()
    assert lines[0] == "2 processes over GLOO, 4 steps of 16 + 17 images"
    before, after = map(
        float, re.fullmatch(r"loss of the first batch (\S+) -> (\S+)", lines[1]).groups()
    )
    assert 2.3 < before < 3.5  # ln 10, and what random logits add
    assert after < before - 0.3
    differences = {line[:32].strip(): float(line[32:]) for line in lines[3:]}
    assert differences.pop("moved from the start") > 1e-2
    assert differences.keys() == {"by hand - paddle.DataParallel", "by hand - one process"}
    assert max(differences.values()) < 1e-5


# ---------------------------------------------------------------- spawn_minimal


@pytest.mark.smoke
def test_each_rank_prints_its_losses_and_rank_0_alone_the_accuracies(ran):
    check_spawn("".join(printed["spawn"] for printed, _ in ran[1]))


@pytest.mark.slow
def test_the_spawning_command_and_its_port(tmp_path):
    (port,) = free_ports(1)
    printed, errors = command(
        tmp_path, "spawn_minimal.py", MASTER_PORT=str(port), GLOG_minloglevel="0"
    )
    check_spawn(printed)
    assert f"127.0.0.1:{port}" in errors  # Paddle's note on where they met


def check_spawn(printed):
    line = r"\[CPU(\d)\] Epoch: (\d{3})/003 \| Batchsize 002 \| Train/Val Loss: (\d\.\d\d)\n"
    found = {
        (int(rank), int(epoch)): float(loss) for rank, epoch, loss in re.findall(line, printed)
    }
    assert sorted(found) == [(rank, epoch) for rank in (0, 1) for epoch in (1, 2, 3)]
    for rank in (0, 1):
        assert found[rank, 3] < 0.2 < found[rank, 1]
    assert re.findall(r"\[CPU\d\] \w+ accuracy .*", printed) == [
        "[CPU0] Training accuracy 1.0",
        "[CPU0] Test accuracy 1.0",
    ]


def test_two_ranks_tell_the_accuracy_of_one(ran):
    paddle.seed(3)
    network = spawn_minimal.build_network()
    hits = (
        network(paddle.to_tensor(spawn_minimal.TRAIN[0])).argmax(1).numpy()
        == spawn_minimal.TRAIN[1]
    )
    assert 0 < hits.mean() < 1  # else counting twice wouldn't show
    expected = accuracies()
    assert expected[0] == pytest.approx(hits.mean())
    assert [found for _, found in ran[1]] == [expected, expected]


# ----------------------------------------------------------------- fleet_resnet


@pytest.mark.smoke
def test_fleet_trains_alike_on_both_ranks_at_the_rate_of_the_global_batch(ran):
    check_fleet([printed["fleet"] for printed, _ in ran[1]])


@pytest.mark.slow
def test_fleet_under_the_launcher_and_alone(tmp_path):
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node=2", "--log_dir=logs"]
    command(tmp_path, "fleet_resnet.py", *SMALL_RESNET, launcher=launcher)
    logs = [(tmp_path / "logs" / f"workerlog.{rank}").read_text() for rank in (0, 1)]
    check_fleet(logs)
    alone, _ = command(tmp_path, "fleet_resnet.py", *SMALL_RESNET)
    assert "4 steps of 2 x 1 = 2 images an epoch; learning rate 0.000625 to 0.00625\n" in alone
    first = r"\[Epoch 0, batch 0\] .*\n"
    # the same images, and the same weights
    assert re.search(first, alone)[0] == re.search(first, logs[0])[0]
    assert "differ" not in alone


def check_fleet(logs):
    # 9 images and the first again: 5 each, of which 2 batches of 2.
    assert "2 steps of 2 x 2 = 4 images an epoch; learning rate 0.00125 to 0.0125\n" in logs[0]
    line = r"\[Epoch 0, batch (\d)\] loss: (\S+), acc1: (\S+), acc5: (\S+)\n"
    found = [[tuple(map(float, values)) for values in re.findall(line, log)] for log in logs]
    assert [[batch for batch, *_ in of_rank] for of_rank in found] == [[0, 1], [0, 1]]
    images = fleet_resnet.RandomDataset(9, 32, 102)
    paddle.seed(0)
    model = fleet_resnet.ResNet(fleet_resnet.BottleneckBlock, 50, num_classes=102)
    for of_rank, pair in zip(found, ((0, 1), (2, 3)), strict=True):
        pixels, labels = (
            paddle.to_tensor(np.stack(c)) for c in zip(*map(images.__getitem__, pair), strict=True)
        )
        loss = paddle.nn.functional.cross_entropy(model(pixels), labels).item()
        assert of_rank[0][1] == pytest.approx(loss, rel=1e-3)
    assert found[0][0][1] != found[1][0][1]
    assert re.search(r"^parameters of 2 ranks differ by 0.0e\+00$", logs[0], re.MULTILINE)


def test_fleets_rate_is_linear_in_the_global_batch_and_warms_up():
    for batch, peak in ((32, 0.1), (64, 0.2), (8, 0.025)):
        rate = fleet_resnet.learning_rate(0.1, batch, warmup_steps=10)
        rates = []
        for _ in range(12):
            rates.append(rate())
            rate.step()
        np.testing.assert_allclose(rates, [*np.linspace(peak / 10, peak, 11), peak])


# ----------------------------------------------------------- gather_predictions


@pytest.mark.smoke
def test_predictions_of_two_processes_are_those_of_one_in_the_datasets_order(ran, tmp_path, capsys):
    folder, ranks = ran
    gather(tmp_path / "one.csv")
    hits = check_csv(folder / "two.csv", tmp_path / "one.csv")
    assert capsys.readouterr().out == f"{tmp_path}/one.csv: 37 = 37 samples, {hits} right\n"
    assert [printed["gather"] for printed, _ in ranks] == [
        f"{folder}/two.csv: 19 + 18 = 37 samples, {hits} right\n",
        "",
    ]


def test_fewer_samples_than_ranks_are_gathered(ran):
    folder, ranks = ran
    rows = (folder / "few.csv").read_text().splitlines()
    assert (len(rows), rows[1][:4]) == (2, "0,0,")
    assert ranks[0][0]["fewer samples than ranks"].startswith(
        f"{folder}/few.csv: 1 + 0 = 1 samples, "
    )


def test_predictions_are_those_of_the_weights(tmp_path):
    config = get_config("vit_digits", ["EVAL", "True", *GATHERED])
    utils.seed_everything(1)
    model = build_model(config)
    save_weights(model, tmp_path / "model.safetensors")
    gather(tmp_path / "found.csv", "MODEL.PRETRAINED", str(tmp_path / "model.safetensors"))
    model.eval()
    dataset = get_dataset(config, "val")
    pixels = np.stack([dataset[index][0] for index in range(37)]).transpose(0, 3, 1, 2)
    images = (pixels / 255 - 0.5) / 0.5  # vit_digits's mean and deviation
    logits = model(paddle.to_tensor(images, "float32")).numpy()
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = np.loadtxt(tmp_path / "found.csv", delimiter=",", skiprows=1)
    np.testing.assert_array_equal(found[:, 2], logits.argmax(1))
    np.testing.assert_allclose(found[:, 3], shares.max(1), atol=2e-6)


@pytest.mark.slow
def test_the_gathering_command(tmp_path):
    for processes in (1, 2):
        flags = [f"-ngpus={processes}", f"-output={processes}.csv", "-o", *GATHERED]
        command(tmp_path, "gather_predictions.py", *flags)
    check_csv(tmp_path / "2.csv", tmp_path / "1.csv")
    words = [
        warm.python(),
        str(ROOT / "examples" / "gather_predictions.py"),
        "-output=no.csv",
        "-pretrained=absent",
    ]
    done = subprocess.run(
        [*words, "-ngpus=2"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert re.findall("^error: .*", done.stderr, re.MULTILINE)[0].startswith(
        "error: no weights at absent: no such file"
    )
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "no.csv").exists()


def check_csv(two, one):
    """Returns how many predictions are right."""
    tables = [list(csv.reader(file.read_text().splitlines())) for file in (two, one)]
    assert tables[0][0] == tables[1][0] == ["index", "label", "prediction", "probability"]
    two, one = (np.array(table[1:], np.float64) for table in tables)
    np.testing.assert_array_equal(two[:, 0], np.arange(37))
    np.testing.assert_array_equal(two[:, 1], np.arange(37) % 10)
    np.testing.assert_array_equal(two[:, :3], one[:, :3])
    np.testing.assert_allclose(two[:, 3], one[:, 3], atol=2e-6)
    assert len(set(one[:, 2])) > 1
    return int((one[:, 1] == one[:, 2]).sum())


def test_the_file_of_predictions_has_to_be_named():
    words = [warm.python(), str(ROOT / "examples" / "gather_predictions.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (
        2,
        "error: -output is missing: the CSV file to write\n",
    )
