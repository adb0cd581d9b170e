"""A sweep's file, its points, its folder and its table."""

import csv
import errno
import json
import math
import multiprocessing
import os
import re
import textwrap

import numpy as np
import pytest
from PIL import Image
from support.document_commands import snippets
from support.hostile_files import attempt
from support.programs import ROOT
from support.sweep_sessions import COMMAND, DRAWN, finish, session_of, sweep_of

from errors import InputError, RunError
from tools.sweep import main
from training.command_line import config_from_arguments
from training.sweeps import results
from training.sweeps.points import check, edges, plan_points, read_sweep

# ------------------------------------------------------------------- points


def test_a_grid_has_every_combination_in_the_order_of_the_file(tmp_path):
    sweep = sweep_of(tmp_path)
    rates = ("1e-4", "0.001")
    clips = ("None", "1.0")
    expected = [(rate, clip, "[0.9, 0.99]") for rate in rates for clip in clips]
    assert [tuple(point.values()) for point in plan_points(sweep)] == expected
    assert check(sweep, plan_points(sweep)) == "acc1"
    config = config_from_arguments(
        sweep.program, sweep.arguments("0", plan_points(sweep)[-1], None)
    )
    assert (config.TRAIN.BASE_LR, config.TRAIN.GRAD_CLIP, config.TRAIN.OPTIMIZER.BETAS) == (
        0.001,
        1.0,
        [0.9, 0.99],
    )
    assert config.TRAIN.NUM_EPOCHS == 2
    assert str(tmp_path / "swept" / "0") == config.OUTPUT


def test_random_points_are_of_their_distributions_and_the_first_ones_of_any_number(tmp_path):
    drawn = DRAWN | {"TRAIN.SMOOTHING": {"choice": [0, 0.1, 0.2, 0.3]}}
    few, many = (
        plan_points(sweep_of(tmp_path, keys=drawn, method="random", runs=runs))
        for runs in (5, 2000)
    )
    assert many[:5] == few
    assert plan_points(sweep_of(tmp_path, keys=drawn, method="random", runs=5, seed=1)) != few
    rates, decays = (np.array([float(point[key]) for point in many]) for key in DRAWN)
    # uniform in 0..1: Kolmogorov and Smirnov's bound for 1 in 1,000
    share = (np.log10(np.sort(rates)) + 5) / 4
    for shares in (share, np.sort(decays) / 0.5):
        assert np.abs(shares - (np.arange(2000) + 0.5) / 2000).max() < 1.95 / math.sqrt(2000)
    counts = np.unique([point["TRAIN.SMOOTHING"] for point in many], return_counts=True)
    assert counts[0].tolist() == ["0", "0.1", "0.2", "0.3"]
    assert counts[1].min() > 400
    assert abs(np.corrcoef(np.log(rates), decays)[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"method_": "x"}, "a key is 'method_', expected one of .*; did you mean method?"),
        ({"command": None}, "has no command"),
        ({"keys": {}}, "has no keys"),
        ({"runs": "5"}, "runs is '5', expected int"),
        (
            {"command": "rm -rf /"},
            "command begins with 'rm', expected main_single_gpu.py or main_multi_gpu.py",
        ),
        ({"command": "main_single_gpu.py 'x"}, "command can't be parsed"),
        (
            {"command": f"{COMMAND} --resume=auto"},
            "command has --resume=auto, which the sweep sets",
        ),
        ({"method": "bayes"}, "method is 'bayes', expected one of grid, random, optuna"),
        ({"method": "random"}, "runs is missing"),
        ({"runs": 3}, "a grid runs each point once; leave runs out"),
        ({"keys": DRAWN}, "TRAIN.BASE_LR is an interval, but method grid needs a list of values"),
        ({"keys": {"OUTPUT": ["a"]}}, "OUTPUT is set by the sweep"),
        ({"keys": {"TRAIN.BASE_LR": 0.1}}, "TRAIN.BASE_LR is 0.1, expected a list of values"),
        (
            {"keys": {"TRAIN.BASE_LR": {"loguniform": [1, 2]}}},
            "from is 'loguniform', .*; did you mean log_uniform?",
        ),
        (
            {"keys": {"TRAIN.BASE_LR": {"log_uniform": [0, 2]}}},
            "expected two numbers, the lower one first, above 0",
        ),
        (
            {"keys": {"TRAIN.BASE_LR": {"uniform": [2, 1]}}},
            "expected two numbers, the lower one first",
        ),
        (
            {"keys": {"TRAIN.BASE_LR": {"uniform": ["a", 1]}}},
            "expected two numbers, the lower one first",
        ),
        ({"seeds": [0, 0]}, r"seeds is \[0, 0\], expected different whole numbers from 0"),
        ({"seeds": [-1]}, r"seeds is \[-1\], expected different whole numbers from 0"),
        ({"command": f"{COMMAND} -h"}, "command has -h"),
        ({"command": f"{COMMAND} OUTPUT=here"}, "command has OUTPUT=here, which the sweep sets"),
        ({"command": f"{COMMAND} OUTPUT here"}, "command has OUTPUT, which the sweep sets"),
        ({"keys": {"NGPUS": [1, 2]}}, "NGPUS is set by the sweep"),
        ({"keys": {"SEED": [1, 2, 1]}}, "SEED has a value twice, so the grid would repeat runs"),
        ({"devices": 2}, "devices is 2, but main_single_gpu.py uses one; use main_multi_gpu.py"),
        ({"side_by_side": 0}, "side_by_side is 0, expected 1 to 10000"),
        (
            {"keys": {f"K{n}": list(range(10)) for n in range(5)}},
            "runs is 100000, expected 1 to 10000",
        ),
    ],
)
def test_what_a_file_may_not_say_is_named(content, message, tmp_path):
    with pytest.raises(InputError, match=message):
        sweep_of(tmp_path, **content)


def test_every_configuration_is_read_before_the_first_run(tmp_path, monkeypatch):
    rates = {"TRAIN.BASE_LR": [0.001, "1e-4x"]}
    for keys, message in (
        (
            rates,
            "the run of TRAIN.BASE_LR=1e-4x: command line: TRAIN.BASE_LR takes float, found '1e-4x'",
        ),
        ({"TRAIN.BAS_LR": [1]}, "the run of TRAIN.BAS_LR=1: .*did you mean TRAIN.BASE_LR?"),
        ({"TRAIN.LR_SCHEDULER.POWER": [1.0, 2.0]}, "the run of TRAIN.LR_SCHEDULER.POWER=1.0: "),
    ):
        sweep_of(tmp_path, keys=keys)
        monkeypatch.setattr("sys.argv", ["sweep.py", str(tmp_path / "sweep.yaml")])
        with pytest.raises(InputError, match=message):
            main()
    large = sweep_of(tmp_path, keys={"TRAIN.BASE_LR": [0.001]}, seeds=[0, 2**32])
    with pytest.raises(InputError, match="SEED is 4294967296"):
        check(large, plan_points(large))
    drawn = sweep_of(
        tmp_path, keys={"TRAIN.SMOOTHING": {"uniform": [0, 3]}}, method="random", runs=1
    )
    with pytest.raises(InputError, match="TRAIN.SMOOTHING=3"):
        check(drawn, edges(drawn))
    assert os.listdir(tmp_path) == ["sweep.yaml"]


def test_the_metric_is_the_runs_own_or_one_of_its_task(tmp_path):
    def metric(**content):
        sweep = sweep_of(tmp_path, **content)
        return check(sweep, plan_points(sweep))

    averaged = f"{COMMAND} TRAIN.MODEL_EMA True BEST_METRIC loss"
    assert (metric(), metric(command=averaged), metric(metric="acc5")) == ("acc1", "loss", "acc5")
    assert metric(command=averaged, metric="ema/acc5") == "ema/acc5"
    for name, message in (
        ("ema/acc1", "TRAIN.MODEL_EMA is False"),
        ("mAP", "metric is 'mAP', expected one of acc1"),
    ):
        with pytest.raises(InputError, match=message):
            metric(metric=name)
    for name, keys, message in (
        (
            "ema/acc1",
            {"TRAIN.MODEL_EMA": [True, False]},
            "the run of TRAIN.MODEL_EMA=False: metric is ema/acc1, but",
        ),
        (
            None,
            {"TASK": ["classification", "multilabel"]},
            "the run of TASK=multilabel: metric is 'acc1', expected",
        ),
    ):
        with pytest.raises(InputError, match=message):
            metric(metric=name, keys=keys)


def test_runs_of_dino_are_not_compared_by_a_loss_that_nobody_asked_for(tmp_path):
    """A collapsed run has the lowest one."""
    flags = "METHOD.KOLEO 0.1 PROBE.FREQ 10"
    for command, metric, expected in (
        (flags, "knn", "knn"),
        (flags, "rankme", "rankme"),
        (flags, "loss", "loss"),
        (f"{flags} BEST_METRIC knn", "", "knn"),
        (f"{flags} BEST_METRIC loss", "", "loss"),
    ):
        content = {"metric": metric} if metric else {}
        sweep = sweep_of(
            tmp_path, command=f"main_single_gpu.py -cfg=dino_digits -o {command}", **content
        )
        assert check(sweep, plan_points(sweep)) == expected
    sweep = sweep_of(tmp_path, command=f"main_single_gpu.py -cfg=dino_digits -o {flags}")
    with pytest.raises(
        InputError, match=r"a lower loss of TASK dino doesn't mean a better model; add metric: knn"
    ):
        check(sweep, plan_points(sweep))


def test_a_probes_metric_is_there_whichever_evaluation_is_the_best(tmp_path):
    for flags, message in (
        ("PROBE.FREQ 5", ""),
        ("PROBE.FREQ 10", r"PROBE.FREQ is 10, expected VALIDATE_FREQ \(5\), because metric is knn"),
        ("SEED 0", "metric is 'knn', expected one of acc1"),
        (
            "TASK mae PROBE.FREQ 5 DATA.DATASET images",
            "metric is knn, but DATA.DATASET images has no labels; use rankme",
        ),
    ):
        sweep = sweep_of(tmp_path, command=f"{COMMAND} {flags}", metric="knn")
        if not message:
            assert check(sweep, plan_points(sweep)) == "knn"
            continue
        with pytest.raises(InputError, match=message):
            check(sweep, plan_points(sweep))


def test_the_commands_are_printed_and_nothing_is_done(tmp_path, monkeypatch, capsys):
    sweep_of(tmp_path, keys={"TRAIN.BASE_LR": ["1e-4"]}, seeds=[0, 7], side_by_side=1)
    monkeypatch.setattr("sys.argv", ["sweep.py", str(tmp_path / "sweep.yaml"), "-n"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main() == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("OMP_NUM_THREADS=3 ")
    flags = "-cfg=vit_digits -o TRAIN.NUM_EPOCHS 2 TRAIN.WARMUP_EPOCHS 0"
    where = f"-output={tmp_path}/swept/0000_seed"
    assert first.endswith(
        f"main_single_gpu.py {flags} {where}0 -resume=auto -o TRAIN.BASE_LR=1e-4 SEED=0"
    )
    assert second.endswith(f"{where}7 -resume=auto -o TRAIN.BASE_LR=1e-4 SEED=7")
    assert os.listdir(tmp_path) == ["sweep.yaml"]


@pytest.mark.parametrize("page", ["docs/guides/sweep.md", "tools/sweep.py"])
def test_the_files_that_are_shown_are_sweeps(page, tmp_path):
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^( *command: .*?)(?=\n\S|\n\n)", text, re.M | re.S) if page[0] == "t" else [
        block for block in snippets(page, "yaml") if block.startswith("command:")
    ]  # fmt: skip
    for block in blocks:
        (tmp_path / "rates.yaml").write_text(textwrap.dedent(block))
        sweep = read_sweep(tmp_path / "rates.yaml")
        assert len(plan_points(sweep)) >= 3
        assert check(sweep, plan_points(sweep)) == "acc1"
        assert str(sweep.output) in ("output/rates", "RATES")
    assert blocks


# ------------------------------------------------------------ a sweep's folder


def test_what_is_done_is_not_repeated_and_what_failed_is(tmp_path, monkeypatch, capsys):
    sweep = sweep_of(tmp_path, keys={"TRAIN.BASE_LR": [0.1, 0.01, 0.001]}, seeds=[0, 1])
    lock = results.lock(sweep.output)
    session, ran = session_of(sweep, monkeypatch, fails=["0001_seed0"])
    assert session.run(lock) == 0
    assert ran == [f"000{point}_seed{seed}" for point in range(3) for seed in (0, 1)]
    assert (
        "0001_seed0 TRAIN.BASE_LR=0.01: ended with status 1: error: two" in capsys.readouterr().out
    )
    rows = session.rows
    assert [row.status_text() for row in rows] == [
        "done",
        "done",
        "ended with status 1",
        "done",
        "done",
        "done",
    ]
    assert [row.outcome.value for row in rows if row.outcome] == [86, 86, 89, 90, 90]
    again, ran = session_of(sweep, monkeypatch)
    again.run(lock)
    assert ran == ["0001_seed0"]
    os.close(lock)


def test_the_table_has_means_and_deviations_and_the_best(tmp_path):
    sweep = sweep_of(
        tmp_path, keys={"TRAIN.BASE_LR": [0.1, 0.01], "TRAIN.LOSS": ["auto"]}, seeds=[0, 1, 2]
    )
    for name, value in {"0000_seed0": 50.0, "0000_seed1": 60.0, "0001_seed0": 52.0}.items():
        finish(sweep, name, value)
    rows = results.rows(sweep, plan_points(sweep), "acc1")
    rows[-1] = rows[-1]._replace(status=-9)
    assert results.table(rows, sweep, "acc1").splitlines() == [
        "run   TRAIN.BASE_LR  TRAIN.LOSS  acc1              epoch  status",
        "0000  0.1            auto        55.0000 ± 7.0711  3,3    0000_seed2 not run",
        "0001  0.01           auto        52.0000           3      0001_seed1 not run; 0001_seed2 was killed by SIGKILL"
        " (out of memory?)",
    ]
    assert results.best(rows, sweep, "acc1")[0].name == "0000_seed0"
    losses = results.rows(sweep, plan_points(sweep), "loss")
    assert results.best(losses, sweep, "loss")[0].outcome.value == 1.0
    results.write(rows, sweep, "acc1")
    read = list(csv.DictReader((sweep.output / "sweep.csv").read_text().splitlines()))
    assert [(row["run"], row["SEED"], row["acc1"]) for row in read][:3] == [
        ("0000_seed0", "0", "50.0"), ("0000_seed1", "1", "60.0"), ("0000_seed2", "2", ""),
    ]  # fmt: skip
    with Image.open(sweep.output / "sweep.png") as picture:
        assert picture.width == 960


def test_a_folder_is_of_one_file_which_may_become_longer(tmp_path):
    sweep = sweep_of(tmp_path, keys={"TRAIN.BASE_LR": [0.1, 0.01]})
    sweep.output.mkdir()
    results.record(sweep, plan_points(sweep))
    longer = sweep_of(
        tmp_path, keys={"TRAIN.BASE_LR": [0.1, 0.01, 0.001]}, side_by_side=2, metric="acc5"
    )
    assert results.read_points(longer, plan_points(longer)) == plan_points(sweep)
    for content, message in (
        (
            {"keys": {"TRAIN.BASE_LR": [0.2, 0.01]}},
            "is from a sweep with a different keys; choose another output",
        ),
        (
            {"command": f"{COMMAND} SEED 3", "keys": {"TRAIN.BASE_LR": [0.1, 0.01]}},
            "with a different command",
        ),
    ):
        other = sweep_of(tmp_path, **content)
        with pytest.raises(InputError, match=message):
            results.read_points(other, plan_points(other))


POINTS = {
    "a list": ("[]", "its content is .*, expected a dictionary"),
    "half of it": ("{", r"can't be read as a sweep's points \(JSONDecodeError"),
    "no sweep": ('{"points": []}', "its of is missing, expected a dictionary"),
    "a sweep that is a list": (
        '{"of": [], "points": []}',
        r"its of is \[\], expected a dictionary",
    ),
    "a number of points": (
        '{"of": {}, "points": 3}',
        "its points is 3, expected a list of up to 10000 points",
    ),
    "a value that isn't text": (
        '{"of": {}, "points": [{"a": 1}]}',
        "its points is a list of 1, expected a list of up to",
    ),
    "NaN": ('{"of": {"seed": NaN}, "points": []}', "it contains NaN, which isn't a number"),
    "a number without an end": (
        '{"of": {"seed": 1e999}, "points": []}',
        "it contains the number 1e999, which is too large",
    ),
    "4,000 digits": (
        f'{{"of": {{"seed": {"9" * 4000}}}, "points": []}}',
        "it contains a number of 4000 digits",
    ),
    "the same twice": ('{"of": {}, "of": {}, "points": []}', "it has the same name twice"),
    "too deep": ("[" * 100_000, "can't be read as a sweep's points .RecursionError"),
}


@pytest.mark.parametrize(("text", "message"), POINTS.values(), ids=list(POINTS))
def test_points_that_no_sweep_wrote_are_refused(text, message, tmp_path):
    sweep = sweep_of(tmp_path, keys={"TRAIN.BASE_LR": [0.1, 0.01]})
    sweep.output.mkdir()
    (sweep.output / "sweep.json").write_text(text)
    with pytest.raises(InputError, match=f"sweep.json: {message}.*; remove it to start over"):
        results.read_points(sweep, plan_points(sweep))


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"TRAIN.BASE_LR": "0.0001"}, r"its points\[0\].TRAIN.LOSS is missing"),
        (
            {"TRAIN.BASE_LR": "0.0001", "TRAIN.LOSS": "auto", "OUTPUT": "/x"},
            r"its points\[0\] has OUTPUT, which isn't a key",
        ),
        (
            {"TRAIN.BASE_LR": "0.0001", "TRAIN.LOSS": "other"},
            r"its points\[0\].TRAIN.LOSS is 'other', expected a value from",
        ),
        (
            {"TRAIN.BASE_LR": "1.0", "TRAIN.LOSS": "auto"},
            r"its points\[0\].TRAIN.BASE_LR is '1.0', expected a value from",
        ),
        (
            {"TRAIN.BASE_LR": "0.0_1", "TRAIN.LOSS": "auto"},
            r"TRAIN.BASE_LR is '0.0_1', expected a value from",
        ),
        (
            {"TRAIN.BASE_LR": "nan", "TRAIN.LOSS": "auto"},
            r"TRAIN.BASE_LR is 'nan', expected a value from",
        ),
        (
            {"TRAIN.BASE_LR": "-o", "TRAIN.LOSS": "auto"},
            r"TRAIN.BASE_LR is '-o', expected a value from",
        ),
    ],
)
def test_points_of_optuna_are_the_sweeps(point, message, tmp_path):
    keys = {"TRAIN.BASE_LR": {"log_uniform": ["1e-5", "1e-1"]}, "TRAIN.LOSS": ["auto"]}
    sweep = sweep_of(tmp_path, keys=keys, method="random", runs=3)._replace(method="optuna")
    sweep.output.mkdir()
    points = plan_points(sweep._replace(method="random"))
    results.record(sweep, points)
    assert results.read_points(sweep, []) == points
    results.record(sweep, [point])
    with pytest.raises(InputError, match=f"sweep.json: .*{message}"):
        results.read_points(sweep, [])


EVALUATED = {"acc1": 50.0, "loss": 1.0, "num_samples": 4}
BEST = {"acc1": 60.0, "epoch": 1}
RESULTS = {
    "nothing": ({}, "its loss is missing, expected a number"),
    "no best": (EVALUATED, "its best.acc1 is missing, expected a number"),
    "a best that is a number": (EVALUATED | {"best": 3}, "its best is 3, expected a dictionary"),
    "no accuracy": (
        EVALUATED | {"best": {"epoch": 1}},
        "its best.acc1 is missing, expected a number",
    ),
    "a text": (
        EVALUATED | {"best": BEST | {"acc1": "1_0"}},
        "its best.acc1 is '1_0', expected a number",
    ),
    "a text as an epoch": (
        EVALUATED | {"best": BEST | {"epoch": "1_0"}},
        "its best.epoch is '1_0', expected a number of",
    ),
    "NaN": (
        EVALUATED | {"best": BEST | {"acc1": math.nan}},
        "it contains NaN, which isn't a number",
    ),
    "infinity": (
        EVALUATED | {"best": BEST | {"acc1": math.inf}},
        "it contains Infinity, which isn't a number",
    ),
    "nearly infinite": (
        EVALUATED | {"best": BEST | {"acc1": 1e308}},
        "its best.acc1 is 1e.308, expected a number",
    ),
    "true": (
        EVALUATED | {"best": BEST | {"acc1": True}},
        "its best.acc1 is True, expected a number",
    ),
    "of another metric": (
        EVALUATED | {"best": BEST, "ema": 3},
        "its ema is 3, expected a dictionary",
    ),
}


@pytest.mark.parametrize(("content", "message"), RESULTS.values(), ids=list(RESULTS))
def test_a_result_that_no_run_wrote_is_refused(content, message, tmp_path):
    sweep = sweep_of(tmp_path)
    (sweep.output / "0000").mkdir(parents=True)
    (sweep.output / "0000" / "result.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"result.json: {message}.*; remove it to repeat the run$"):
        results.outcome(sweep, "0000", "acc1")


def test_the_average_has_a_best_of_its_own(tmp_path):
    sweep = sweep_of(tmp_path)
    (sweep.output / "0000").mkdir(parents=True)
    average = EVALUATED | {"best": {"acc1": 70.0, "epoch": 2}}
    (sweep.output / "0000" / "result.json").write_text(
        json.dumps(EVALUATED | {"best": BEST, "ema": average})
    )
    assert results.outcome(sweep, "0000", "acc1") == (60.0, 1)
    assert results.outcome(sweep, "0000", "ema/acc1") == (70.0, 2)


def test_commas_are_no_memory(tmp_path):
    sweep = sweep_of(tmp_path)
    sweep.output.mkdir()
    for file, read in (
        (sweep.output / "sweep.json", lambda: results.read_points(sweep, plan_points(sweep))),
        (sweep.output / "0000" / "result.json", lambda: results.outcome(sweep, "0000", "acc1")),
    ):
        file.parent.mkdir(exist_ok=True)
        file.write_text("[" + "[],[]," * 10_000_000 + "[]]")
        line = attempt(file.name, file.stat().st_size, read)
        assert (
            "its content would take more than 64 MiB and more than three times its 60000004 bytes"
            in line
        )


@pytest.mark.parametrize("name", ["sweep.json", "0000/result.json", "0000.txt", ".lock"])
def test_what_is_no_file_is_not_waited_for(name, tmp_path):
    sweep = sweep_of(tmp_path)
    (sweep.output / "0000").mkdir(parents=True)
    (sweep.output / "sweep.json").write_text("{}")
    (sweep.output / name).unlink(missing_ok=True)
    os.mkfifo(sweep.output / name)
    if name == "0000.txt":
        assert (
            results.last_line(sweep.output / name)
            == "its output can't be read (it isn't a regular file)"
        )
        return
    read = {
        "sweep.json": lambda: results.read_points(sweep, plan_points(sweep)),
        "0000/result.json": lambda: results.outcome(sweep, "0000", "acc1"),
        ".lock": lambda: results.lock(sweep.output),
    }[name]
    with pytest.raises(InputError, match=f"{name}.* isn't a regular file"):
        read()


def locked_elsewhere(output, queue):
    try:
        queue.put(results.lock(output))
    except InputError as error:
        queue.put(str(error))


def test_two_sweeps_in_one_folder_are_refused(tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    output = tmp_path / "swept"
    lock = results.lock(output)
    assert (output / ".lock").read_text() == str(os.getpid())

    def elsewhere():
        process = context.Process(target=locked_elsewhere, args=(output, queue))
        process.start()
        process.join(20)
        return queue.get()

    assert (
        elsewhere()
        == f"{output}: another sweep is using it (process {os.getpid()}); wait for it, or choose another output"
    )
    monkeypatch.setattr(results, "PATIENCE", 0.3)
    # of a sweep that was killed; what it started saves yet
    (output / ".lock").write_text("99999999")
    assert "another sweep is using it (process 99999999)" in elsewhere()
    os.close(lock)
    assert isinstance(elsewhere(), int)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    with pytest.raises(
        InputError, match="mine contains letter, but no sweep; choose another output"
    ):
        results.lock(tmp_path / "mine")


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            InputError,
            match="file.*: can't be used for a sweep \\((File exists|Not a directory)\\)",
        ):
            results.lock(output)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    sweep = sweep_of(tmp_path)
    monkeypatch.setattr("sys.argv", ["sweep.py", str(tmp_path / "sweep.yaml")])
    monkeypatch.setattr(results, "record", full)
    with pytest.raises(
        RunError,
        match=f"{sweep.output} can't be written .No space.*, then the same command continues",
    ):
        main()
