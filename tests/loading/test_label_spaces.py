"""Which output is which class: by name where names are known, and an error where the numbers don't
agree.
"""

import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import write_images
from PIL import Image
from support.training_runs import train

from config import CONFIG_DIR, get_config, with_values
from datasets import get_datasets
from errors import InputError
from loading.label_spaces import (
    check_evaluation,
    check_pretrained_classes,
    check_training,
    imagenet_places,
    imagenet_synsets,
)
from models import build_model
from settings.configuration import WRITTEN_OUT, value_sources
from training.run import Run
from weights import save_weights

AUTO = "set it with -o MODEL.NUM_CLASSES auto"


def configured(path, *options, cfg=None):
    return get_config(cfg, ["DATA.DATASET", "folder", "DATA.DATA_PATH", str(path), *options])


def evaluation(*options):
    return get_config(None, ["EVAL", "True", *options])


def labelled(classes, labels):
    return SimpleNamespace(classes=list(classes), labels=np.array(labels))


# --------------------------------------------------------------- the numbers


def test_more_outputs_than_classes_are_an_error_unless_the_user_set_them(tmp_path):
    write_images(tmp_path / "train", {"a": 1, "b": 1})
    write_images(tmp_path / "val", {"a": 1, "b": 1})
    told = f"the data has 2 classes, the model 1000 outputs (MODEL.NUM_CLASSES); {AUTO}, or to 1000 if you want that"
    own = tmp_path / "own.yaml"
    own.write_text(
        f"BASE: {CONFIG_DIR}/vit/vit_digits.yaml\nDATA:\n  IMAGE_CHANNELS: 3\nMODEL:\n  NUM_CLASSES: 7\n"
    )
    for mode in ([], ["EVAL", "True"]):
        with pytest.raises(InputError) as error:
            get_datasets(configured(tmp_path, *mode))
        assert str(error.value) == told
        # a shipped file's number
        with pytest.raises(InputError, match="has 2 classes, the model 10 outputs"):
            get_datasets(configured(tmp_path, "DATA.IMAGE_CHANNELS", "3", *mode, cfg="vit_digits"))
        for cfg, options, outputs in ((None, ["MODEL.NUM_CLASSES", "1000"], 1000), (own, [], 7)):
            config, *_, val = get_datasets(configured(tmp_path, *mode, *options, cfg=cfg))
            assert (config.MODEL.NUM_CLASSES, val.classes, val.labels.tolist()) == (
                outputs,
                ["a", "b"],
                [0, 1],
            )
        assert (
            get_datasets(configured(tmp_path, *mode, "MODEL.NUM_CLASSES", "auto"))[
                0
            ].MODEL.NUM_CLASSES
            == 2
        )


def test_a_runs_file_doesnt_make_its_datas_number_one_that_was_meant(tmp_path):
    """With -cfg=RUN/config.yaml, other data's number is asked about; a number that somebody did
    mean stays.
    """
    write_images(tmp_path / "data" / "train", {"a": 1, "b": 1})
    write_images(tmp_path / "data" / "val", {"a": 1, "b": 1})
    for outputs, meant in (("2", False), ("auto", False), ("1000", True)):
        config, *_ = get_datasets(configured(tmp_path / "data", "MODEL.NUM_CLASSES", outputs))
        Run(with_values(config, OUTPUT=str(tmp_path / outputs)), ["a", "b"]).begin()
        again = get_config(tmp_path / outputs / "config.yaml")
        assert (value_sources(again)["MODEL.NUM_CLASSES"].level > WRITTEN_OUT) is meant
        assert (1000 if meant else 2) == get_datasets(again)[0].MODEL.NUM_CLASSES


def test_a_list_of_files_has_labels_that_are_outputs(tmp_path):
    write_images(tmp_path, {"a": 2})
    for mode in ("train", "val"):
        (tmp_path / f"{mode}_list.txt").write_text("a/0.png 0\na/1.png 4\n")
    listed = ["DATA.DATASET", "imagenet2012", "DATA.DATA_PATH", str(tmp_path)]
    config, _, val = get_datasets(get_config(None, [*listed, "EVAL", "True"]))
    assert (config.MODEL.NUM_CLASSES, val.labels.tolist(), config.notes) == (1000, [0, 4], [])
    config, *_ = get_datasets(get_config(None, listed))
    outputs = "the labels are 0..4, but the model has 1000 outputs; check MODEL.NUM_CLASSES"
    gaps = (
        "of 5 classes 3 have no training image (1, 2, 3) and 3 have no validation image (1, 2, 3)"
    )
    assert config.notes == [outputs, gaps]
    assert get_datasets(get_config(None, [*listed, "MODEL.NUM_CLASSES", "1000"]))[0].notes == [gaps]
    assert (
        get_datasets(get_config(None, [*listed, "MODEL.NUM_CLASSES", "auto"]))[0].MODEL.NUM_CLASSES
        == 5
    )


# ----------------------------------------------------------------- ImageNet


def test_imagenets_classes_are_found_by_synset_and_by_name():
    synsets = imagenet_synsets()
    assert (len(synsets), synsets[0], synsets[999]) == (1000, "n01440764", "n15075141")
    assert synsets == sorted(set(synsets))
    expected = {
        "n01440764": 0, "tench": 0, "Tinca tinca": 0, "tench, Tinca tinca": 0, "n02099601-golden_retriever": 207,
        "golden retriever": 207, "golden_retriever": 207, "Golden-Retriever": 207, "n03888257": 701,
        "toilet tissue": 999,
        "cardigan": 474, "Cardigan": 264,  # the knitwear, and the Welsh corgi, as they are written
        "great white shark": 2, "tabby": 281, "horse cart": 603, "French horn": 566,
    }  # fmt: skip
    for name, place in expected.items():
        assert imagenet_places([name]) == ({name: place}, ""), name
    numbers = [str(n) for n in sorted(range(1000), key=str)]
    assert imagenet_places(numbers)[0] == {str(n): n for n in range(1000)}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (
            ["tench", "flower", "n00000001"],
            "not flower, n00000001 (2); name a folder by its synset (n01440764)",
        ),
        (["crane"], "'crane' is n02012849 or n03126707; name the folder by its synset"),
        (
            ["tench", "n01440764"],
            "'tench' and 'n01440764' are the same class, n01440764; make them one folder",
        ),
        (["0", "1"], "not 0, 1 (2)"),
        (list("01234"), "not 0, 1, 2, 3, 4 (5)"),
        (list("012345"), "not 0, 1, 2, 3, 4, ... (6)"),
        (["n014407645"], "not n014407645 (1)"),
    ],
)
def test_what_isnt_one_of_imagenets_classes_is_told(names, problem):
    assert problem in imagenet_places(names)[1]


def test_a_folder_in_imagenets_names_gets_the_models_labels():
    val = labelled(["golden retriever", "tench", "unused"], [0, 1, 1, 0])
    config = check_evaluation(evaluation(), val, None)
    assert val.labels.tolist() == [207, 0, 0, 207]
    assert (len(val.classes), val.classes[207], val.classes[0], val.classes[1]) == (
        1000, "golden retriever", "tench", "n01443537",
    )  # fmt: skip
    assert config.notes == [
        "the data's 2 classes are matched by name with ImageNet-1k's classes: 1000 outputs"
    ]
    whole = labelled(sorted(imagenet_synsets()), range(1000))
    check_evaluation(evaluation(), whole, None)
    assert whole.labels.tolist() == list(range(1000))
    mostly = labelled(["tench", "goldfish", "my cat"], [0, 1, 2])
    with pytest.raises(
        InputError, match=r"most of the data's classes are ImageNet-1k's, but not my cat \(1\)"
    ):
        check_evaluation(evaluation(), mostly, None)
    config = check_evaluation(evaluation("MODEL.NUM_CLASSES", "1000"), mostly, None)  # meant
    assert (mostly.labels.tolist(), config.MODEL.NUM_CLASSES) == ([0, 1, 2], 1000)
    five = labelled(["tench", "goldfish"], [0, 1])
    assert check_evaluation(evaluation("MODEL.NUM_CLASSES", "2"), five, None).MODEL.NUM_CLASSES == 2
    assert five.labels.tolist() == [0, 1]  # a model of two outputs isn't ImageNet's


WEIGHTS = ["MODEL.PRETRAINED", "weights.pdparams", "MODEL.PRETRAINED_CLASSES", "imagenet22k"]


@pytest.mark.parametrize("mode", [[], ["EVAL", "True"]])
def test_imagenet1ks_rows_are_kept_for_imagenet1k_alone(tmp_path, mode):
    kept = "MODEL.PRETRAINED_CLASSES is imagenet22k, which keeps ImageNet-1k's 1000 classes, but the data has "
    instead = "; set it with -o MODEL.PRETRAINED_CLASSES null for a new classifier"
    for part in ("train", "val"):
        write_images(tmp_path / part, {"n01440764": 1, "pear": 1})
    for outputs, found in (("auto", "2 classes"), ("1000", "others: n01440764, pear (2)")):
        with pytest.raises(InputError) as error:
            get_datasets(configured(tmp_path, *mode, *WEIGHTS, "MODEL.NUM_CLASSES", outputs))
        assert str(error.value) == kept + found + instead
        get_datasets(
            configured(
                tmp_path, *mode, *WEIGHTS, "MODEL.NUM_CLASSES", outputs, *WEIGHTS[2:3], "null"
            )
        )
        get_datasets(
            configured(
                tmp_path,
                *mode,
                "MODEL.NUM_CLASSES",
                outputs,
                cfg="swin_base_patch4_window7_224_21k_1k",
            )
        )
    synthetic = ["DATA.DATASET", "synthetic", "DATA.SYNTHETIC_SIZE", "1000", *mode]
    assert get_datasets(get_config(None, [*synthetic, *WEIGHTS]))[0].MODEL.NUM_CLASSES == 1000
    numbers = labelled(sorted(map(str, range(1000))), [0])  # "10" comes after "1": another order
    with pytest.raises(
        InputError, match=r"but the data has others: 0, 1, 10, 100, 101, \.\.\. \(1000\); set"
    ):
        check_pretrained_classes(get_config(None, [*mode, *WEIGHTS]), numbers)
    check_pretrained_classes(get_config(None, [*mode, *WEIGHTS]), labelled(imagenet_synsets(), [0]))
    # a list of files
    check_pretrained_classes(get_config(None, [*mode, *WEIGHTS]), labelled([], [0]))


GREYS = {"n01440764": 0, "n02099601": 60, "n03000684": 120, "n03888257": 180, "tabby": 240}


def greys_model(tmp_path, config, outputs):
    """Saves a ViT whose logit of output k is highest, and by how much, for the grey value
    ``outputs[k]``.
    """
    model = build_model(config)
    model.eval()
    images = [
        np.full((1, 3, 16, 16), (grey / 255 - 0.5) / 0.5, np.float32) for grey in outputs.values()
    ]
    seen = []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numpy()))
    with paddle.no_grad():
        model(paddle.to_tensor(np.concatenate(images)))
    hook.remove()
    (features,) = seen
    classes = config.MODEL.NUM_CLASSES
    logits = np.full((len(outputs), classes), -5.0)
    logits[np.arange(len(outputs)), list(outputs)] = 5.0
    solved = np.linalg.lstsq(features.astype(np.float64), logits, rcond=None)[0]
    model.head.weight.set_value(solved.astype(np.float32))
    model.head.bias.set_value(np.zeros(classes, np.float32))
    save_weights(model, str(tmp_path / "model.safetensors"))


VIT = [
    "DATA.IMAGE_SIZE", "16", "MODEL.PATCH_SIZE", "8", "MODEL.EMBED_DIM", "32", "MODEL.DEPTH", "1",
    "MODEL.NUM_HEADS", "2", "DATA.NUM_WORKERS", "0", "DATA.CROP_PCT", "1.0",
]  # fmt: skip


def test_imagenets_model_is_right_about_a_folder_of_five_synsets(tmp_path, program):
    """A model with known outputs: four of its five classes are those of the folders, over all 1,000
    outputs.
    """
    outputs = {0: 0, 207: 60, 491: 120, 701: 180, 5: 240}  # 281 is the tabby's: 5 is wrong
    greys_model(tmp_path, get_config(None, [*VIT, "MODEL.NUM_CLASSES", "1000"]), outputs)
    for count, (name, grey) in enumerate(GREYS.items(), 1):
        (tmp_path / "data/val" / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (16, 16), (grey,) * 3).save(
                tmp_path / "data/val" / name / f"{index}.png"
            )
    flags = [
        "-eval",
        "-dataset=folder",
        "-data_path=data",
        "-pretrained=model.safetensors",
        "-output=run",
        "-o",
        *VIT,
    ]
    status, printed, errors = program("main_single_gpu.py", *flags)
    assert (status, errors) == (0, "")
    assert (
        "the data's 5 classes are matched by name with ImageNet-1k's classes: 1000 outputs"
        in printed
    )
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["num_samples"], result["acc1"]) == (15, pytest.approx(100 * 10 / 15))
    assert {k: v for k, v in result["class_acc"].items() if v is not None} == {
        "n01440764": 100, "n02099601": 100, "n03000684": 100, "n03888257": 100, "tabby": 0,
    }  # fmt: skip
    assert len(result["class_acc"]) == 1000
    (tmp_path / "data/val/tabby").rename(tmp_path / "data/val/my cat")
    status, _, errors = program("main_single_gpu.py", *flags)
    assert (status, errors.splitlines()) == (2, [
        "error: most of the data's classes are ImageNet-1k's, but not my cat (1); name a folder by its synset"
        " (n01440764) or name (tench)"
    ])  # fmt: skip


# ---------------------------------------------------------- a run's own names


def test_a_runs_names_are_those_of_its_outputs():
    val = labelled(["cat", "dog", "owl"], [0, 2, 2])
    config = check_evaluation(
        evaluation("MODEL.NUM_CLASSES", "auto"), val, ["ant", "cat", "owl", "yak"]
    )
    assert (config.MODEL.NUM_CLASSES, val.labels.tolist(), val.classes) == (
        4,
        [1, 2, 2],
        ["ant", "cat", "owl", "yak"],
    )
    assert config.notes == [
        "the data's 2 classes are matched by name with the weights' classes: 4 outputs"
    ]
    same = labelled(["a", "b"], [0, 1])
    assert check_evaluation(evaluation("MODEL.NUM_CLASSES", "auto"), same, ["a", "b"]).notes == []
    permuted = labelled(["b", "a"], [0, 1])
    check_evaluation(evaluation("MODEL.NUM_CLASSES", "auto"), permuted, ["a", "b"])
    assert permuted.labels.tolist() == [1, 0]
    with pytest.raises(InputError) as error:
        check_evaluation(
            evaluation("MODEL.NUM_CLASSES", "auto"),
            labelled(["a", "c", "d"], [0, 1, 2]),
            ["a", "b"],
        )
    assert str(error.value) == (
        "the weights were trained on the classes a, b (2), the data has others: c, d (2); name the folders like"
        " the weights' classes, or remove the others"
    )
    with pytest.raises(
        InputError, match=f"the weights have 2 classes, the model 1000 outputs .*; {AUTO}"
    ):
        check_evaluation(evaluation(), labelled(["a"], [0]), ["a", "b"])


def test_a_folder_that_lacks_a_class_is_evaluated_by_name(tmp_path, tiny, program):
    """A run on four classes; of its accuracy by class, a folder of the first and third shows just
    these.
    """
    for mode in ("train", "val"):
        for index, name in enumerate("abcd"):
            (tmp_path / "data" / mode / name).mkdir(parents=True)
            for i in range(8):
                Image.new("L", (8, 8), 80 * index + i).save(
                    tmp_path / "data" / mode / name / f"{i}.png"
                )
    for name in "ac":
        (tmp_path / "other" / "val").mkdir(parents=True, exist_ok=True)
        (tmp_path / "other/val" / name).symlink_to(tmp_path / "data/val" / name)
    folder = [
        "DATA.DATASET",
        "folder",
        "DATA.DATA_PATH",
        str(tmp_path / "data"),
        "MODEL.NUM_CLASSES",
        "auto",
    ]
    train(
        [*tiny, *folder, "TRAIN.BASE_LR", "0.01", "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "6"],
        tmp_path / "run",
    )
    trained = json.loads((tmp_path / "run/result.json").read_text())
    flags = [
        "-cfg=run/config.yaml",
        "-eval",
        "-pretrained=run/checkpoints/last",
        "-data_path=other",
        "-output=eval",
    ]
    status, printed, errors = program("main_single_gpu.py", *flags)
    assert (status, errors) == (0, "")
    assert (
        "the data's 2 classes are matched by name with the weights' classes: 4 outputs" in printed
    )
    found = json.loads((tmp_path / "eval/result.json").read_text())
    assert found["class_acc"] == {**trained["class_acc"], "b": None, "d": None}
    assert found["acc1"] == pytest.approx(
        (trained["class_acc"]["a"] + trained["class_acc"]["c"]) / 2
    )
    assert trained["class_acc"]["c"] > 0  # by its place, c would have been b
    (tmp_path / "other/val/c").rename(tmp_path / "other/val/e")
    status, _, errors = program("main_single_gpu.py", *flags[:-1], "-output=refused")
    assert (status, len(errors.splitlines())) == (2, 1)
    assert "trained on the classes a, b, c, d (4), the data has others: e (1)" in errors
    assert not (tmp_path / "refused").exists()


def test_a_validation_folder_may_lack_classes_of_the_training_folder(tmp_path):
    write_images(tmp_path / "train", {"a": 1, "b": 1, "c": 1})
    write_images(tmp_path / "val", {"c": 2})
    config, _, val = get_datasets(configured(tmp_path, "MODEL.NUM_CLASSES", "auto"))
    assert (config.MODEL.NUM_CLASSES, val.labels.tolist()) == (3, [2, 2])


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (["a", "c", "b"], "class 1 is b in one and c in the other"),
        (["a", "b"], "class 2 is c in one and missing in the other"),
    ],
)
def test_validation_images_of_other_classes_are_refused(others, words):
    train, val = (
        SimpleNamespace(classes=classes, labels=np.arange(2))
        for classes in (["a", "b", "c"], others)
    )
    with pytest.raises(InputError, match=f"{words}; use the same classes in the same order"):
        check_training(get_config(), train, val)
