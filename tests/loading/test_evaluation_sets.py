"""What evaluation sets have for labels: class maps, ReaL's, the layouts of downloads; what corrupts
their images.
"""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import write_images
from PIL import Image

from config import get_config
from datasets import get_datasets
from errors import InputError
from loading.class_names import read_class_map
from loading.label_sets import LabelSets
from loading.label_spaces import check_evaluation, imagenet_synsets
from loading.transforms import EvalTransform
from loading.transforms.corruption import Corruption, _elastic
from settings.corruptions import BENCHMARK

SYNSETS = imagenet_synsets()


def asked(*options, path=None):
    data = ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(path)] if path else []
    return get_config(None, ["EVAL", "True", *data, *options])


def labelled(classes, labels):
    return SimpleNamespace(classes=list(classes), labels=np.array(labels), compared=None)


# ---------------------------------------------------------------- the outputs


def test_a_folder_of_classes_alone_is_evaluated_and_only_evaluated(tmp_path):
    write_images(tmp_path, {SYNSETS[7]: 2, SYNSETS[3]: 1})
    (tmp_path / "README.txt").write_text("as ImageNet-A's\n")
    config, _, val = get_datasets(asked("DATA.CLASSES", "present", path=tmp_path))
    assert (val.labels.tolist(), val.compared.tolist()) == ([3, 7, 7], [3, 7])
    assert config.notes == [
        "the data's 2 classes are matched by name with ImageNet-1k's classes: 1000 outputs",
        "DATA.CLASSES: 2 of the model's 1000 outputs are compared",
    ]
    assert get_datasets(asked(path=tmp_path))[2].compared is None
    with pytest.raises(InputError, match=f"{tmp_path}/train: no class folders"):
        get_datasets(get_config(None, ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(tmp_path)]))


def test_folders_of_numbers_are_the_numbers_not_their_order():
    """ImageNetV2's 0 to 999, which are sorted as texts: 0, 1, 10, 100, 101 and so on."""
    names = sorted(map(str, range(1000)))
    val = labelled(names, np.arange(1000))
    check_evaluation(asked("DATA.CLASSES", "present"), val, None)
    assert val.labels.tolist() == [int(name) for name in names] != list(range(1000))
    with pytest.raises(
        InputError, match="^DATA.CLASSES needs the class names of the outputs, which"
    ):
        check_evaluation(
            asked("DATA.CLASSES", "present"), labelled(names[:200], np.arange(200)), None
        )


def test_a_file_maps_the_datas_classes_to_outputs(tmp_path):
    file = tmp_path / "map.txt"
    file.write_text(
        f"\ufeffcat\t281\t{SYNSETS[282]}\r\nfish\ttench\n{SYNSETS[9]}\nnever seen\t999\n", "utf-8"
    )
    config = asked("DATA.CLASSES", str(file))
    val = labelled(["cat", "fish", SYNSETS[9]], [2, 0, 1, 0])
    config = check_evaluation(config, val, None)
    assert isinstance(val.labels, LabelSets)
    assert [val.labels.of(i).tolist() for i in range(4)] == [[9], [281, 282], [0], [281, 282]]
    assert val.compared.tolist() == [0, 9, 281, 282, 999]
    assert (val.classes, config.notes[-1]) == (
        SYNSETS,
        "DATA.CLASSES: 5 of the model's 1000 outputs are compared",
    )
    file.write_text("cat\tb\nfish\t0\n")
    for outputs, trained in (
        (["MODEL.NUM_CLASSES", "auto"], ["a", "b", "c"]),
        (["MODEL.NUM_CLASSES", "3"], None),
    ):
        file.write_text("cat\tb\nfish\t0\n" if trained else "cat\t1\nfish\t0\n")
        val = labelled(["cat", "fish"], [1, 0, 0])
        assert (
            check_evaluation(
                asked("DATA.CLASSES", str(file), *outputs), val, trained
            ).MODEL.NUM_CLASSES
            == 3
        )
        assert (val.labels.tolist(), val.compared.tolist()) == ([0, 1, 1], [0, 1])
        assert val.classes == (trained or ["0", "1", "2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fish\t1\n", "map.txt: it lacks classes of the data: cat, dog"),
        (
            "cat\t1000\ndog\t2\n",
            "map.txt: '1000' is neither the name nor the number of an output; the model has 1000: n01440764, ",
        ),
        (
            "cat\tcrane\ndog\t2\n",
            "map.txt: 'crane' is the name of several outputs; the model has 1000",
        ),
        ("cat\t-1\ndog\t2\n", "map.txt: '-1' is neither the name nor the number of an output"),
        ("cat\t\ndog\t2\n", "map.txt: its line 1 is '', expected a class's name"),
        ("cat\t1\ncat\t2\ndog\t2\n", "map.txt: it has the class 'cat' twice"),
        ("\x00", "map.txt: its line 1 is "),
        (None, "map.txt: can't be read as classes and their outputs"),
    ],
)
def test_a_map_that_says_nothing_or_too_much_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "map.txt").write_text(text)
    with pytest.raises(InputError) as caught:
        check_evaluation(
            asked("DATA.CLASSES", str(tmp_path / "map.txt")), labelled(["cat", "dog"], [0, 1]), None
        )
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_map_reads_its_columns(tmp_path):
    (tmp_path / "m").write_text("a, b\t1\t2\nc\n")
    assert read_class_map(tmp_path / "m") == {"a, b": ["1", "2"], "c": ["c"]}


def test_a_model_of_other_outputs_is_refused_unless_a_map_says_which(tmp_path):
    for options, data in (
        (["MODEL.NUM_CLASSES", "21841"], labelled(SYNSETS[:2], [0, 1])),
        (["MODEL.NUM_CLASSES", "auto"], labelled(SYNSETS[:2], [0, 1])),
    ):
        with pytest.raises(
            InputError,
            match=r"aren't known for this model: MODEL.NUM_CLASSES is (21841|auto), .*; set DATA.CLASSES to a",
        ):
            check_evaluation(asked("DATA.CLASSES", "present", *options), data, None)
    with pytest.raises(InputError, match="the weights were trained on the classes a, b, c"):
        auto = asked("DATA.CLASSES", "present", "MODEL.NUM_CLASSES", "auto")
        check_evaluation(auto, labelled(SYNSETS[:2], [0, 1]), ["a", "b", "c"])
    (tmp_path / "map").write_text("x\t3\n")
    for options, data in (
        (["MODEL.NUM_CLASSES", "auto"], labelled(["x"], [0])),
        ([], labelled([], [0])),
    ):
        with pytest.raises(InputError, match="maps classes to outputs, which isn't possible with"):
            check_evaluation(asked("DATA.CLASSES", str(tmp_path / "map"), *options), data, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["TASK", "multilabel", "DATA.DATASET", "multilabel_csv", "DATA.CLASSES", "present"],
            "CLASSES is 'present', ex",
        ),
        (
            ["DATA.LABELS", "a", "DATA.CLASSES", "b"],
            "DATA.CLASSES is 'b', expected None or present with DATA.LABELS",
        ),
        (
            ["DATA.DATASET", "digits", "DATA.LABELS", "a"],
            "DATA.LABELS has no effect without DATA.DATASET ",
        ),
        (
            ["DATA.CORRUPTION", "fog", "DATA.IMAGE_SIZE", "31"],
            "IMAGE_SIZE is 31, expected 32 or more with DATA.CORR",
        ),
        (["DATA.CORRUPTION", "fogg"], "'fogg', expected one of .* did you mean fog?"),
        (
            ["DATA.CORRUPTION", "fog", "DATA.SEVERITY", "6"],
            "DATA.SEVERITY is 6, expected one of 1, 2, 3, 4, 5",
        ),
        (["DATA.SEVERITY", "1"], "DATA.SEVERITY has no effect without DATA.CORRUPTION"),
        (
            ["EVAL", "False", "DATA.CORRUPTION", "fog"],
            "DATA.CORRUPTION has no effect without EVAL True",
        ),
    ],
)
def test_keys_that_dont_fit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        get_config(None, ["EVAL", "True", *options])


# ---------------------------------------------------------------- ReaL's labels


def validation_images(root, numbers):
    for number in numbers:
        folder = root / "val" / SYNSETS[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / f"ILSVRC2012_val_{number:08}.JPEG")


def test_real_labels_go_by_the_images_numbers(tmp_path):
    validation_images(tmp_path, [1, 2, 3, 10])
    entries = [[5], [], [7, 1, 7], *[[0]] * 6, [999]]
    (tmp_path / "real.json").write_text(json.dumps(entries))
    labels = ["DATA.LABELS", str(tmp_path / "real.json")]
    _, _, val = get_datasets(asked(*labels, "DATA.CLASSES", "present", path=tmp_path))
    names = [val.name(index).rpartition("_")[2] for index in range(len(val))]
    found = {name: val.labels.of(index).tolist() for index, name in enumerate(names)}
    assert found == {"00000010.JPEG": [999], "00000001.JPEG": [5], "00000003.JPEG": [1, 7]}
    assert (val.labels.outputs, val[0][1].sum(), val.classes) == (1000, 1, SYNSETS)
    assert val.compared.tolist() == [1, 5, 7, 999]
    names = SYNSETS[::-1]  # weights that have their classes in another order
    val = get_datasets(asked(*labels, path=tmp_path), names)[2]
    assert sorted(sorted(val.labels.of(index)) for index in range(3)) == [[0], [992, 998], [994]]
    with pytest.raises(
        InputError,
        match="the data has 1000 classes, the model 200 outputs|aren't known for this model",
    ):
        get_datasets(asked(*labels, "MODEL.NUM_CLASSES", "200", path=tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[0]]",
            r"ILSVRC2012_val_00000010.JPEG: DATA.LABELS .* has no entry for it: there are 1$",
        ),
        (json.dumps([[]] * 10), r"real.json: no image of .* has a label in it$"),
        (
            "[[1000]]",
            r"real.json: it is a list of 1, expected a list of lists of classes, 0 to 999; DATA.LABELS takes",
        ),
        ("[1]", r"real.json: it is \[1\], expected a list of lists"),
        ('{"a": 1}', r"real.json: it is a dictionary of 1, expected"),
        ("[" * 100_000, r"real.json: can't be read as ReaL's labels \(Recursion"),
        ("", r"real.json: can't be read as ReaL's labels \(JSONDecodeError"),
        (None, r"real.json: can't be read as ReaL's labels \(FileNotFoundError"),
    ],
    ids=map(str, range(8)),
)
def test_labels_that_dont_fit_are_refused(tmp_path, text, message):
    validation_images(tmp_path, [10])
    if text is not None:
        (tmp_path / "real.json").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        get_datasets(asked("DATA.LABELS", str(tmp_path / "real.json"), path=tmp_path))
    assert "\n" not in str(caught.value)


def test_an_image_of_another_name_has_no_real_label(tmp_path):
    write_images(tmp_path / "val", {"a": 1})
    (tmp_path / "real.json").write_text("[[0]]")
    with pytest.raises(
        InputError,
        match=r"val/a/0.png: .* for it: its name isn't like ILSVRC2012_val_00000001.JPEG$",
    ):
        get_datasets(asked("DATA.LABELS", str(tmp_path / "real.json"), path=tmp_path))


# ---------------------------------------------------------------- corruptions


def picture(size=48):
    across = np.linspace(0, 255, size)
    return Image.fromarray(
        np.stack(np.broadcast_arrays(across, across[:, None], 255 - across), 2).astype(np.uint8)
    )


def corrupted(name, severity=3, sample=0, seed=0):
    config = asked("DATA.IMAGE_SIZE", "40", "DATA.CORRUPTION", name, "DATA.SEVERITY", str(severity))
    return EvalTransform(config)(picture(), np.random.default_rng([seed, 0, sample]))


def test_noise_follows_from_the_sample_and_the_corruption(monkeypatch):
    """The resized and cropped pixels are corrupted, then stored as JPEG of quality 85."""
    calls = []

    def corrupt(pixels, severity, name, **more):
        calls.append((severity, name, more.get("seed") is not None))
        drawn = np.random.default_rng(more["seed"]) if more else np.random
        return np.clip(pixels + drawn.normal(size=pixels.shape) * 9, 0, 255).astype(np.uint8)

    monkeypatch.setitem(sys.modules, "imagecorruptions", SimpleNamespace(corrupt=corrupt))
    np.random.seed(5)
    plain = EvalTransform(asked("DATA.IMAGE_SIZE", "40"))(picture())
    for name in ("snow", "glass_blur", "impulse_noise"):
        first = corrupted(name)
        others = np.random.get_state()[1]
        np.testing.assert_array_equal(first, corrupted(name))
        for other in ({"severity": 4}, {"sample": 1}, {"seed": 1}):
            assert (first != corrupted(name, **other)).mean() > 0.3
        assert first.shape == plain.shape
        assert 1 < np.abs(first.astype(int) - plain).mean() < 9
        # nobody else's numbers change
        np.testing.assert_array_equal(np.random.get_state()[1], others)
    assert set(calls) == {
        (s, n, n != "snow") for s in (3, 4) for n in ("snow", "glass_blur", "impulse_noise")
    }
    assert np.random.random() == np.random.RandomState(5).random_sample()
    monkeypatch.setitem(
        sys.modules, "imagecorruptions", SimpleNamespace(corrupt=lambda pixels, *_: pixels)
    )
    stored = io.BytesIO()
    Image.fromarray(plain).save(stored, "JPEG", quality=85, optimize=True)
    np.testing.assert_array_equal(corrupted("fog"), np.asarray(Image.open(stored)))


# What make_imagenet_c.py of hendrycks/robustness makes of the picture below after
# np.random.seed(7), with scikit-image 0.25.2 and OpenCV 4.11: red and blue at each 61st pixel from
# (20, 20) on.
ELASTIC = {
    1: [[17, 66, 149, 234, 6, 76, 160, 243, 2, 85, 170, 253, 12, 96, 179, 244],
        [119, 122, 179, 68, 162, 69, 198, 112, 123, 180, 64, 113, 74, 196, 111, 130]],
    2: [[74, 34, 117, 228, 38, 51, 140, 246, 28, 76, 173, 227, 10, 111, 210, 199],
        [170, 140, 105, 44, 216, 165, 139, 134, 90, 185, 61, 132, 83, 164, 83, 74]],
    5: [[18, 88, 161, 231, 16, 86, 161, 233, 18, 92, 158, 238, 23, 93, 164, 238],
        [130, 120, 132, 126, 197, 33, 218, 55, 102, 158, 96, 154, 43, 220, 44, 180]],
}  # fmt: skip


def test_an_elastic_transform_is_the_authors():
    across = np.linspace(0, 255, 224)
    waves = 128 + 100 * np.sin(across / 20) * np.cos(across[:, None] / 15)
    pixels = np.stack(np.broadcast_arrays(across, across[:, None], waves), 2).astype(np.uint8)
    for severity, (red, blue) in ELASTIC.items():
        np.random.seed(7)
        found = _elastic(pixels, severity)[20::61, 20::61].reshape(16, 3).astype(int)
        assert np.abs(found[:, 0] - red).max() <= 1
        assert np.abs(found[:, 2] - blue).max() <= 1


def test_an_elastic_transform_bends_images_of_two_sides():
    """In the middle as the square of the short side would be: the same shares, the same three
    points.
    """
    across = np.linspace(0, 255, 96)
    pixels = np.stack(np.broadcast_arrays(across, across[:48, None], 255 - across), 2).astype(
        np.uint8
    )
    for image in (pixels, pixels.swapaxes(0, 1)):
        np.random.seed(7)
        bent = _elastic(image, 4)
        assert bent.shape == image.shape
        inner = np.s_[16:-16, 16:-16]
        # of 255: a few pixels at most
        assert 0.5 < np.abs(bent[inner].astype(int) - image[inner]).mean() < 12


def test_a_package_that_isnt_there_is_told_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(
        InputError,
        match=r"^DATA.CORRUPTION needs imagecorruptions-imaug \(.*\); pip install imagecorruptions-imaug==",
    ):
        Corruption(asked("DATA.CORRUPTION", "fog"))


def test_colours_in_full_depth_arent_corrupted():
    with pytest.raises(
        InputError,
        match=r"^DATA.IMAGE_DTYPE is 'float32', expected auto with DATA.CORRUPTION, which needs 8-b",
    ):
        asked("DATA.CORRUPTION", "fog", "DATA.IMAGE_DTYPE", "float32")


def test_the_package_corrupts_more_at_each_severity():
    pytest.importorskip("imagecorruptions")
    plain = EvalTransform(asked("DATA.IMAGE_SIZE", "40"))(picture()).astype(int)
    for name in set(BENCHMARK) - {"elastic_transform"}:  # the authors' bends most at severity 2
        first, last = (corrupted(name, severity) for severity in (1, 5))
        np.testing.assert_array_equal(last, corrupted(name, 5))
        assert first.shape == plain.shape, name
        assert np.abs(first - plain).mean() < np.abs(last - plain).mean() * 1.05, name
    x = plain / 255  # the paper's contrast: towards each channel's mean
    expected = (x - x.mean((0, 1))) * 0.05 + x.mean((0, 1))
    assert np.abs(corrupted("contrast", 5) / 255 - expected).max() < 0.05
    noise = corrupted("gaussian_noise", 1).astype(int) - plain
    assert 10 < noise.std() < 22  # 0.08 of 255 is 20; clipped, and smoothed by JPEG
