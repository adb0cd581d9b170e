"""tools/compare_runs.py: what sets runs apart, and whether it is more than chance; made runs of few
images.
"""

import re
import sys

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_ind
from support.finished_runs import DRAWN, LABELS, make_run

from errors import InputError
from tools import compare_runs
from training.report.compare import compare, page_of, screen


def test_two_runs_are_compared_on_their_images(tmp_path):
    (one, first), (other, second) = (
        make_run(tmp_path / "a", 0.8),
        make_run(tmp_path / "b", 0.6, draw=1, TRAIN__BASE_LR=0.5),
    )
    found = compare([one, other])
    own = DRAWN[0] < 0.8
    others = DRAWN[1] < 0.6
    alone = int((own & ~others).sum())
    there = int((others & ~own).sum())
    probability = binomtest(alone, alone + there).pvalue
    assert found.verdicts == [
        f"a against b: of 200 images {alone} are right in the first run only, {there} in the second only, McNemar's exact"
        f" test: p = {probability:.3g}; the difference is statistically significant (level 0.05)"
    ]
    assert found.differences == [("TRAIN.BASE_LR", ["0.003", "0.5"])]
    told = screen(found)
    assert re.search(rf"^a +{first:.2f} +0\.2000 +\S+ to \S+ +200 +2 +0$", told, re.M)
    assert re.search(r"^  key +a +b\n  TRAIN.BASE_LR +0.003 +0.5$", told, re.M)
    assert second == pytest.approx(60, abs=10)
    text = page_of(found)
    assert text.count("<img") == 3  # loss, accuracy, rate
    assert f"{probability:.3g}" in text


def test_long_names_and_values_are_cut(tmp_path):
    same = "9" * 150
    folders = [tmp_path / f"{same[:99]}{place}{same[:99]}" for place in (1, 2)] + [
        tmp_path / "_$x$"
    ]
    for folder, rate in zip(folders, (0.1, 0.2, 0.3), strict=True):
        make_run(folder, 0.8, TRAIN__BASE_LR=rate, MODEL__NAME=f"{same}{rate}")
    found = compare(folders)
    cut = f"{same[:30]}...{same[:27]}"
    assert list(found.runs) == [f"{cut} (1)", f"{cut} (2)", "_$x$ (3)"]
    told = screen(found)
    assert max(map(len, told.splitlines())) < 400
    assert re.search(rf"^  MODEL.NAME +{same[:30]}\.\.\.{same[:24]}0\.1  ", told, re.M)
    assert f"{same}0.1" in page_of(found)


def test_runs_of_several_seeds_are_compared_by_their_means(tmp_path):
    runs = [make_run(tmp_path / f"a{n}", 0.7, seed=n, draw=n) for n in range(3)]
    runs += [
        make_run(tmp_path / f"b{n}", 0.75, seed=n, draw=3 + n, TRAIN__BASE_LR=0.5) for n in range(2)
    ]
    found = compare([folder for folder, _ in runs])
    scores = [accuracy for _, accuracy in runs]
    probability = ttest_ind(scores[:3], scores[3:], equal_var=False).pvalue
    [verdict] = found.verdicts
    assert (
        f"mean acc1 {np.mean(scores[:3]):.2f} of 3 runs, {np.mean(scores[3:]):.2f} of 2, Welch's t-test"
        in verdict
    )
    assert (
        f": p = {probability:.3g}; the difference is not statistically significant (level 0.05)"
        in verdict
    )
    spread = f"{np.mean(scores[:3]):.2f} +- {np.std(scores[:3], ddof=1):.2f} (mean and standard deviation) of a0, a1, a2"
    assert f"a0 and 2 more (seeds, folds): acc1 {spread}" in found.spreads()
    three = compare(
        [runs[0][0], runs[3][0], make_run(tmp_path / "c", 0.9, draw=7, TRAIN__BASE_LR=0.1)[0]]
    )
    assert [verdict.partition(":")[0] for verdict in three.verdicts] == [
        "a0 against b0",
        "a0 against c",
    ]
    assert three.verdicts[1].endswith(
        "statistically significant (level 0.025, 0.05 over 2 comparisons)"
    )
    [seeds] = compare([runs[0][0], runs[1][0]]).verdicts
    assert seeds.startswith("a0 against a1: of 200 images ")


def test_folds_are_compared_on_all_their_images(tmp_path):
    folds = [
        make_run(
            tmp_path / f"{name}{n}",
            share,
            draw=n + more,
            DATA__FOLDS=2,
            DATA__FOLD=n,
            TRAIN__BASE_LR=rate,
        )[0]
        for name, share, more, rate in (("a", 0.8, 0, 0.1), ("b", 0.7, 2, 0.2))
        for n in (0, 1)
    ]
    own, others = (
        np.concatenate([DRAWN[first] < share, DRAWN[first + 1] < share])
        for first, share in ((0, 0.8), (2, 0.7))
    )
    for order in (folds, [folds[1], folds[0], folds[2], folds[3]]):
        [verdict] = compare(order).verdicts
        alone = (own & ~others).sum()
        there = (others & ~own).sum()
        assert (
            f": of 400 images {alone} are right in the first run only, {there} in the second only"
            in verdict
        )
    [verdict] = compare([folds[0], folds[3]]).verdicts
    assert verdict.endswith("not tested: they were evaluated on different images or labels")


def test_what_cant_be_compared_says_so(tmp_path):
    one = make_run(tmp_path / "a", 0.8)[0]
    other = make_run(tmp_path / "b", 0.6, TRAIN__BASE_LR=0.5)[0]
    table = other / "predictions.csv"
    text = table.read_text()
    for changed in (
        text.replace("sample 7,", "sample seven,"),
        text.replace(f"7,{LABELS[7]},", f"7,{LABELS[7] + 1},"),
    ):
        table.write_text(changed)
        assert (
            "not tested: they were evaluated on different images or"
            in compare([one, other]).verdicts[0]
        )
    table.unlink()
    assert "not tested: a run has no predictions.csv (REPORT)" in compare([one, other]).verdicts[0]
    with pytest.raises(InputError, match="a run is given twice"):
        compare([one, one.parent / "." / "a"])
    with pytest.raises(
        InputError,
        match="c has TASK multilabel, a has classification; compare runs of the same TASK",
    ):
        compare(
            [
                one,
                make_run(tmp_path / "c", 0.6, task="multilabel", DATA__DATASET="multilabel_csv")[0],
            ]
        )
    same = make_run(tmp_path / "deep" / "a", 0.8, seed=1)[0]
    assert list(compare([one, same]).runs) == [f"{tmp_path.name}/a", "deep/a"]


# ----------------------------------------------------------------- command


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs the tool in this process, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["compare_runs.py", *words])
        compare_runs.main()

    return run


def test_the_command_prints_a_comparison_and_writes_a_page(tmp_path, command, capsys):
    make_run(tmp_path / "a", 0.8)[0].rename(tmp_path / "a\x1b[2J")
    make_run(tmp_path / "b", 0.6, TRAIN__BASE_LR=0.5)
    command("a\x1b[2J", "b", "-output", "out.html")
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed.endswith("out.html is written\n")
    assert "<h1>2 runs: a\\x1b[2J, b</h1>" in (tmp_path / "out.html").read_text()
    command("b")
    assert capsys.readouterr().out == "b/report.html is written\n"
    assert {"report.html", "confusion.csv", "confusion.png"} <= {
        file.name for file in (tmp_path / "b").iterdir()
    }
    assert (tmp_path / "b" / "report.html").read_text().count("<figure") == 24  # digits' pictures


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "a: no result.json; it isn't a run's folder, or the run hasn't finished"),
        (["b", "-output", "out.html"], "for a single run, its own report.html is written"),
        (
            ["b", "a", "-output", "out.pdf"],
            "expected a file that ends in .html, in an existing folder",
        ),
        (["b", "c"], "c/metrics.jsonl: it isn't a regular file; move it away"),
    ],
)
def test_a_wrong_command_is_a_line(tmp_path, command, words, message):
    make_run(tmp_path / "b", 0.6)
    (make_run(tmp_path / "c", 0.6)[0] / "metrics.jsonl").unlink()
    (tmp_path / "c" / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=re.escape(message)):
        command(*words)


def test_a_folder_that_is_no_run_is_one_line(tmp_path, command, capsys):
    with pytest.raises(InputError, match="none: no result.json; it isn't a run's folder"):
        command("none")
    assert capsys.readouterr() == ("", "")
