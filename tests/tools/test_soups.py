"""The greedy soup: the choice against NumPy, and the command on checkpoints of a run."""

import argparse
import itertools
import subprocess

import numpy as np
import pytest
import warm
from conftest import ROOT, TINY
from safetensors.numpy import load_file, save_file

import tools.soups.evaluation
from errors import InputError
from tools.average_checkpoints import choose_greedily
from tools.soups.evaluation import metric_of, words_of
from tools.soups.greedy import Trial, greedy_soup


def run(folder, *words):
    done = subprocess.run(
        [warm.python(), *map(str, words)], cwd=folder, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def reference(metrics, evaluate):
    """Algorithm 1 of arXiv:2203.05482, as the paper writes it down."""
    order = np.argsort(-np.asarray(metrics), kind="stable")
    ingredients = [order[0]]
    for place in order[1:]:
        if evaluate([*ingredients, place]) >= evaluate(ingredients):
            ingredients.append(place)
    return [int(place) for place in ingredients]


def linear_model(seed, candidates=6, images=40):
    """Returns weights of a linear classifier of two classes, and a function of their accuracy."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(images, 3)).astype(np.float32)
    truth = rng.normal(size=3)
    labels = inputs @ truth + rng.normal(size=images) > 0
    weights = (truth + 2 * rng.normal(size=(candidates, 3))).astype(np.float32)
    return weights, lambda weight: 100 * float(((inputs @ weight > 0) == labels).mean())


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_the_papers_algorithm(seed):
    weights, accuracy = linear_model(seed)
    metrics = [accuracy(weight) for weight in weights]

    def evaluate(places):
        return accuracy(weights[places].mean(0))

    trials = list(greedy_soup(metrics, evaluate))
    kept = [trial.candidate for trial in trials if trial.kept]
    assert kept == reference(metrics, evaluate)
    assert sorted(trial.candidate for trial in trials) == list(range(6))
    assert all(trial.own == metrics[trial.candidate] for trial in trials)
    # The soup is never worse than the best candidate, on the images that chose it.
    soups = [trial.soup for trial in trials if trial.kept]
    assert soups[0] == max(metrics)
    assert soups == sorted(soups)


def test_choices_of_all_lengths_are_among_the_twenty_seeds():
    lengths = set()
    for seed in range(20):
        weights, accuracy = linear_model(seed)
        metrics = [accuracy(weight) for weight in weights]
        trials = greedy_soup(metrics, lambda places: accuracy(weights[places].mean(0)))  # noqa: B023
        lengths.add(sum(trial.kept for trial in trials))
    assert {1, 2, 3, 4} <= lengths


def test_ties_one_candidate_and_a_loss():
    asked = []

    def same(places):
        asked.append(places)
        return 90.0

    # Equal ones are tried in the given order, and a mean that is as good is kept.
    assert list(greedy_soup([90.0, 90.0, 80.0], same)) == [
        Trial(0, 90.0, 90.0, True),
        Trial(1, 90.0, 90.0, True),
        Trial(2, 80.0, 90.0, True),
    ]
    assert asked == [[0, 1], [0, 1, 2]]
    asked.clear()
    assert list(greedy_soup([12.5], same)) == [Trial(0, 12.5, 12.5, True)]
    assert asked == []
    assert list(greedy_soup([], same)) == []
    # The lowest loss is first. A higher one of the mean isn't kept, and the next mean is without it.
    losses = {(1, 2): 0.6, (1, 0): 0.4}
    trials = list(greedy_soup([0.9, 0.5, 0.7], lambda places: losses[tuple(places)], lower=True))
    assert trials == [
        Trial(1, 0.5, 0.5, True),
        Trial(2, 0.7, 0.6, False),
        Trial(0, 0.9, 0.4, True),
    ]


@pytest.fixture
def stubbed(monkeypatch):
    """Evaluates the linear model of a seed in place of a process; notes the words of each."""
    noted = []

    def begin(seed):
        weights, accuracy = linear_model(seed, 4)

        def evaluate(file, folder, words):
            noted.append([file.name, *words])
            loaded = load_file(file)
            return {"acc1": accuracy(loaded["w"]), "loss": 1.0, "num_samples": 40}

        monkeypatch.setattr(tools.soups.evaluation, "evaluate", evaluate)
        return weights, accuracy, noted

    return begin


def arguments(**given):
    values = dict.fromkeys(
        ("cfg", "dataset", "data_path", "batch_size_eval", "ngpus", "o", "metric")
    )
    return argparse.Namespace(**{**values, **given})


@pytest.mark.parametrize("seed", range(4))
def test_files_are_chosen_by_the_evaluations_of_their_means(tmp_path, seed, stubbed, capsys):
    weights, accuracy, noted = stubbed(seed)
    files = [tmp_path / f"{place}.safetensors" for place in range(4)]
    for file, weight in zip(files, weights, strict=True):
        save_file({"w": weight, "bn.running_mean": weight}, file)
    (tmp_path / "best").symlink_to(files[1])
    asked = arguments(cfg="vit_digits", ngpus="1", o=["DATA.NUM_WORKERS", "0"])
    chosen = choose_greedily([*files, tmp_path / "best"], asked, tmp_path)

    def evaluate(places):
        return accuracy(np.mean(np.float64(weights[places]), axis=0).astype(np.float32))

    metrics = [accuracy(weight) for weight in weights]
    expected = reference(metrics, evaluate)
    # A link is another name of a file, and no fifth candidate.
    assert [file.resolve() for file in chosen] == [files[place] for place in expected]
    flags = [
        "-cfg=vit_digits",
        "-ngpus=1",
        "-eval",
        "-o",
        "DATA.NUM_WORKERS",
        "0",
        "REPORT",
        "False",
    ]
    assert all(words[1:] == flags for words in noted)
    assert len(noted) == 4 + 3
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 7
    assert told[0].split() == ["checkpoint", "acc1", "with", "it", "kept"]
    assert told[5] == (
        f"acc1 {evaluate(expected):.2f} on 40 images (digits), which were used to choose the checkpoints: expect less"
        " on other images"
    )
    assert told[6].startswith("note: the running statistics of 1 batch norms are averaged, too")


def test_identical_checkpoints_are_all_kept(tmp_path, stubbed, capsys):
    weights, accuracy, _ = stubbed(0)
    files = [tmp_path / f"{place}.safetensors" for place in range(3)]
    for file in files:
        save_file({"w": weights[0]}, file)
    assert choose_greedily(files, arguments(cfg="vit_digits"), tmp_path) == files
    same = f"{accuracy(weights[0]):.2f}"
    rows = [line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == [[same, same, "yes"]] * 3


def test_what_is_missing_is_told_before_an_evaluation(tmp_path, stubbed):
    weights, _, noted = stubbed(0)
    save_file({"w": weights[0]}, tmp_path / "a.safetensors")
    save_file({"v": weights[0]}, tmp_path / "b.safetensors")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(
        InputError, match=r"a.safetensors isn't in the folder of a run, whose config.yaml"
    ):
        words_of(arguments(), files[0])
    with pytest.raises(InputError, match="w is missing in"):
        choose_greedily(files, arguments(cfg="vit_digits"), tmp_path)
    with pytest.raises(InputError, match=r"unknown key DATA.NO"):
        choose_greedily(files[:1], arguments(cfg="vit_digits", o=["DATA.NO", "1"]), tmp_path)
    assert noted == []
    with pytest.raises(InputError, match="^-metric is mAP, expected one of acc1, loss$"):
        choose_greedily(files[:1], arguments(cfg="vit_digits", metric="mAP"), tmp_path)
    assert metric_of({"loss": 1, "acc5": 2, "mIoU": 3}, None) == "acc5"


@pytest.mark.long
def test_the_command_makes_a_soup_of_a_runs_checkpoints(tmp_path):
    words = [*TINY, "SAVE_FREQ", "1", "OUTPUT", "RUN"]
    words[words.index("TRAIN.NUM_EPOCHS") + 1] = "2"
    status, _, errors = run(tmp_path, ROOT / "main_single_gpu.py", "-cfg=vit_digits", "-o", *words)
    assert status == 0, errors
    tool = ROOT / "tools" / "average_checkpoints.py"
    ends = [f"RUN/checkpoints/epoch_000{epoch}" for epoch in (1, 2)]
    status, told, errors = run(
        tmp_path, tool, "--greedy", "-output=soup.safetensors", *ends, "-ngpus=1"
    )
    assert status == 0, errors
    kept = [line.split()[0] for line in told.splitlines()[1:3] if line.endswith("yes")]
    loaded = [load_file(tmp_path / file) for file in kept]
    for name, mean in load_file(tmp_path / "soup.safetensors").items():
        expected = np.mean([np.float64(one[name]) for one in loaded], axis=0).astype(np.float32)
        np.testing.assert_array_equal(mean, expected)
    # The table tells what -eval says of the same files.
    status, said, errors = run(
        tmp_path,
        ROOT / "main_single_gpu.py",
        "-cfg=RUN/config.yaml",
        "-eval",
        "-pretrained=soup.safetensors",
        "-output=evaluated",
    )
    assert status == 0, errors
    row = next(line for line in told.splitlines() if line.startswith("acc1 "))
    assert f"acc1: {row.split()[1]}," in said
    before = sorted(tmp_path.rglob("*"))
    for flags, message in [
        (
            ["-ngpus=1"],
            "error: -ngpus needs --greedy; add that, or leave it out",
        ),
        (["--greedy", "-data_path=absent", "-dataset=folder"], "error: "),
    ]:
        status, _, errors = run(tmp_path, tool, "-output=other.safetensors", *ends, *flags)
        assert (status, errors.count("error: ")) == (2, 1), errors
        assert message in errors
    assert sorted(tmp_path.rglob("*")) == before


def test_every_pair_of_metrics_is_decided_by_the_mean():
    for first, second, mean in itertools.product((50.0, 60.0), (50.0, 60.0), (40.0, 60.0, 70.0)):
        trials = list(greedy_soup([first, second], lambda _, mean=mean: mean))
        assert trials[1].kept == (mean >= max(first, second))
