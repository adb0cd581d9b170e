"""From one's own run to other classes, as somebody does it who knows nothing but the run's folder."""

from pathlib import Path

import pytest
from conftest import write_images
from support.training_runs import work

from config import get_config, shipped_configs
from datasets import get_datasets
from errors import InputError
from training.command_line import config_from_arguments, weights_recipe

SMALL = [
    "DATA.IMAGE_SIZE=8", "DATA.NUM_WORKERS=0", "DATA.BATCH_SIZE=4", "MODEL.PATCH_SIZE=4", "MODEL.EMBED_DIM=16",
    "MODEL.DEPTH=1", "MODEL.NUM_HEADS=2", "TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0", "REPORT=False", "NGPUS=1",
]  # fmt: skip
FOLDER = ["-dataset=folder", "-data_path=A"]


def typed(*words):
    """Does what main_single_gpu.py does with a command line; returns the run's log."""
    config = config_from_arguments("main_single_gpu.py", words)
    work(*get_datasets(config))
    return Path(config.OUTPUT, "log.txt").read_text()


@pytest.fixture
def own_run(tmp_path, monkeypatch):
    """RUN, which learnt the classes a, b and c of A; besides, other data."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "A", dict.fromkeys("abc", 8))
    write_images(tmp_path / "more", dict.fromkeys("uvwx", 8))
    write_images(tmp_path / "others", dict.fromkeys("xyz", 8))
    for mode in ("train", "val"):
        write_images(tmp_path / "split" / mode, dict.fromkeys("pqrs", 4))
    typed(
        "-cfg=small_data_vit_small_patch16_224",
        *FOLDER,
        "-output=RUN",
        "-o",
        *SMALL,
        "DATA.VAL_SPLIT=0.25",
    )


def refused(*words):
    with pytest.raises(InputError) as caught:
        typed(*words)
    return str(caught.value)


def test_other_classes_are_counted_and_the_classifier_is_told_of(own_run):
    fresh = "classifier initialised randomly: 3 classes in the file, 4 in the model"
    kept = "the classifier was trained for the classes a, b, c (3); it is trained further for x, y, z (3)"
    more = typed("-pretrained=RUN", "-data_path=more", "-output=1")
    assert f"tensors loaded from RUN/checkpoints/best/model.safetensors; {fresh}" in more
    others = typed("-pretrained=RUN", "-data_path=others", "-output=2")
    assert kept in others
    same = typed("-pretrained=RUN", "-output=3")
    assert kept not in more
    assert fresh not in others
    assert fresh not in same
    assert "the classifier was trained for" not in same
    split = ["-pretrained=RUN", "-data_path=split"]
    line = refused(*split, "-output=4")
    there = "split/val exists, but DATA.VAL_SPLIT 0.25 makes another validation set"
    assert line == f"{there}; use -o DATA.VAL_SPLIT null to evaluate on it"
    assert fresh in typed(*split, "-output=4", "-o", "DATA.VAL_SPLIT", "null")
    recipe = [
        "-cfg=finetune_vit_small_patch16_224",
        "-dataset=folder",
        "-o",
        *SMALL,
        "DATA.VAL_SPLIT=0.25",
    ]
    assert fresh in typed(*recipe, "-pretrained=RUN", "-data_path=more", "-output=5")


def test_what_is_said_counts_and_what_cannot_be_names_its_whole_mend(own_run):
    more = ["-pretrained=RUN", "-data_path=more"]
    line = refused(*more, "-output=1", "-o", "MODEL.NUM_CLASSES", "3")
    assert (
        line
        == "the data has 4 classes, but MODEL.NUM_CLASSES is 3; write -o MODEL.NUM_CLASSES auto"
    )
    assert (
        config_from_arguments("test", [*more, "-o", "MODEL.NUM_CLASSES", "7"]).MODEL.NUM_CLASSES
        == 7
    )
    assert config_from_arguments("test", ["-pretrained=RUN"]).MODEL.NUM_CLASSES == 3
    assert config_from_arguments("test", [*more, "-eval"]).MODEL.NUM_CLASSES == 3
    longer = ["-output=2", "-o", "TRAIN.NUM_EPOCHS=2"]
    wanted = "a run can only be resumed with its own data; use -pretrained instead of -resume to start from its weights"
    assert refused("-resume=RUN", "-data_path=more", *longer).endswith(
        f"MODEL.NUM_CLASSES is 3; {wanted}"
    )
    of_others = refused("-resume=RUN", "-data_path=others", *longer)
    assert of_others.endswith(
        "the data has x, y, z (3); use its own data, or start from its weights with -pretrained"
    )
    write_images(Path("fewer"), dict.fromkeys("abc", 4))
    line = refused("-resume=RUN", "-data_path=fewer", *longer)
    assert line.endswith(
        "the data has 9; use its own data, or start from its weights with -pretrained"
    )
    assert refused("-resume=RUN", "-output=2").endswith(
        "NUM_EPOCHS is 1; raise it with -o TRAIN.NUM_EPOCHS N"
    )
    assert not Path("2").exists()


def test_a_recipe_for_trained_weights_warns_where_it_gets_none(own_run, tmp_path):
    def warnings(*words):
        return [
            note
            for note in config_from_arguments("test", words).notes
            if note.startswith("warning: ")
        ]

    for recipe in (
        "finetune_vit_small_patch16_224",
        "vit_base_patch16_224_finetune",
        "eva02_base_patch14_448",
    ):
        [line] = warnings(f"-cfg={recipe}", *FOLDER)
        assert line.startswith("warning: ")
        assert line.endswith(
            "none are given: the model starts from random values; pass -pretrained=FILE"
        )
        assert not warnings(f"-cfg={recipe}", *FOLDER, "-pretrained=RUN")
        assert not warnings(f"-cfg={recipe}", *FOLDER, "-resume=RUN")
        assert not warnings(f"-cfg={recipe}", *FOLDER, "-eval", "-pretrained=RUN")
        assert warnings(f"-cfg={recipe}", *FOLDER, "-resume=auto", "-output=new")
    Path("own.yaml").write_text(
        "BASE: [vit_tiny_patch16_224, finetune]\nTRAIN: {NUM_EPOCHS: 3, WARMUP_EPOCHS: 0}\n"
    )
    assert warnings("-cfg=own.yaml", *FOLDER)[0].startswith(
        "warning: finetune is a recipe for fine-tuning pretrained weights"
    )
    for scratch in ("vit_digits", "small_data_vit_small_patch16_224", "deit_small_patch16_224"):
        assert not warnings(f"-cfg={scratch}")
    assert not warnings("-pretrained=RUN")


def test_whatever_is_called_a_fine_tuning_is_known_as_one():
    for file in shipped_configs():
        if any(word in file.stem for word in ("finetune", "linear_probe", "transfer")):
            assert weights_recipe(get_config(file)), file.stem
