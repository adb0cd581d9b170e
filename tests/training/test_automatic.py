"""The model, the recipe and the settings that are chosen for a dataset without -cfg."""

import sys

import pytest
from conftest import ROOT, write_images

from config import asked_config, get_config, resolved_yaml
from errors import InputError
from loading.recognise import count_training_images
from settings.merging import model_files
from training import automatic
from training.command_line import config_from_arguments

SCRIPT = "-default_cfg=vit_digits"


@pytest.fixture
def flowers(tmp_path):
    """12 images of each of two classes, without validation images."""
    write_images(tmp_path / "flowers", {"daisy": 12, "rose": 12}, size=16)
    return tmp_path / "flowers"


def choose(*flags, program="main_multi_gpu.py"):
    return config_from_arguments(program, [SCRIPT, *flags])


@pytest.mark.parametrize("start", [[SCRIPT], []])
def test_a_folder_alone_is_enough(flowers, start):
    config = config_from_arguments("main_single_gpu.py", [*start, f"-data_path={flowers}"])
    assert config.DATA.DATASET == "folder"
    assert config.DATA.VAL_SPLIT == 0.2
    assert config.MODEL.NUM_CLASSES == "auto"
    assert config.TASK == "classification"
    assert config.MODEL.NAME == "vit_tiny_patch16_224"
    # The recipe is small_data's, over the model's own.
    assert (config.TRAIN.NUM_EPOCHS, config.TRAIN.BASE_LR) == (100, 3e-4)
    # 19 images in at least 8 updates.
    assert config.DATA.BATCH_SIZE == 2
    assert config.notes == [
        "dataset: folder, because there is a folder of images for each class (-dataset changes it)",
        "validation: 20% of the images, because the data has no validation images"
        " (DATA.VAL_SPLIT changes it)",
        "classes: those of the data (MODEL.NUM_CLASSES changes their number)",
        "model and recipe: vit_tiny_patch16_224 with small_data, for 24 images on a CPU, without"
        " weights (-cfg changes it)",
        "batch size: 2 per device, for at least 8 updates an epoch (-batch_size changes it)",
    ]


def test_what_is_named_is_not_chosen(flowers):
    config = choose(
        f"-data_path={flowers}",
        "-dataset=images",
        "-batch_size=3",
        "-o",
        "DATA.VAL_SPLIT",
        "0.5",
        "TRAIN.NUM_EPOCHS",
        "70",
    )
    assert config.DATA.DATASET == "images"
    assert config.DATA.VAL_SPLIT == 0.5
    assert config.DATA.BATCH_SIZE == 3
    assert config.TRAIN.NUM_EPOCHS == 70
    assert config.TASK == "mae"
    assert config.MODEL.NAME == "small_data_mae_vit_small_patch16_224"
    assert [note.partition(":")[0] for note in config.notes] == ["model and recipe"]
    assert choose(f"-data_path={flowers}", "-o", "MODEL.NUM_CLASSES", "2").MODEL.NUM_CLASSES == 2
    assert choose(f"-data_path={flowers}", "-o", "DATA.FOLDS", "3").DATA.VAL_SPLIT is None


def test_a_folder_found_below_takes_the_place_of_the_path(flowers):
    config = choose(f"-data_path={flowers.parent}")
    assert str(flowers) == config.DATA.DATA_PATH
    assert f"data folder: {flowers}, the only folder in {flowers.parent}" in config.notes[1]
    config = choose(f"-data_path={flowers.parent}", "-cfg=deit_small_patch16_224")
    assert str(flowers) == config.DATA.DATA_PATH


def test_a_validation_set_of_its_own_is_taken(flowers):
    for name in ("daisy", "rose"):
        (flowers / "train").mkdir(exist_ok=True)
        (flowers / name).rename(flowers / "train" / name)
    write_images(flowers / "valid", {"daisy": 1, "rose": 1}, size=16)
    config = choose(f"-data_path={flowers}", "-ngpus=1")
    assert config.DATA.VAL_SPLIT is None
    # 24 images in 8 updates are 3 each, of which 2 is a power of two.
    assert config.DATA.BATCH_SIZE == 2


@pytest.mark.parametrize(
    ("images", "gpus", "weights", "files"),
    [
        (1, 0, "", ("vit_tiny_patch16_224", "small_data")),
        (99_999, 0, "", ("vit_tiny_patch16_224", "small_data")),
        (99_999, 2, "", ("small_data_vit_small_patch16_224",)),
        (100_000, 2, "", ("deit_small_patch16_224",)),
        (1, 0, "vit_small_patch16_224", ("finetune_vit_small_patch16_224",)),
        (100_000, 2, "swin_tiny_patch4_window7_224", ("swin_tiny_patch4_window7_224", "finetune")),
        (1, 0, "hf-hub:timm/convnext_tiny.fb_in22k", ("convnext_tiny", "finetune")),
        (1, 0, "hf-hub:me/resnet50.mine@main", ("resnet50", "finetune")),
    ],
)
def test_the_table_of_models(flowers, monkeypatch, images, gpus, weights, files):
    monkeypatch.setattr(automatic, "count_training_images", lambda layout, most: images)
    monkeypatch.setattr(automatic, "num_gpus_of_paddle", lambda: gpus)
    asked = {"DATA.DATA_PATH": str(flowers)}
    if weights:
        asked["MODEL.PRETRAINED"] = weights if ":" in weights else f"hf-hub:timm/{weights}"
    plan = automatic.choose(asked, is_evaluation=False)
    assert plan.files == files
    asked_config(plan.files, plan.options)
    text = (ROOT / "docs/start/choose.md").read_text()
    for name in files:
        if not weights:
            assert name in text, f"docs/start/choose.md doesn't name {name}"


def test_the_table_of_images_without_labels(tmp_path, monkeypatch):
    write_images(tmp_path, {"photos": 3}, size=16)
    asked = {"DATA.DATA_PATH": str(tmp_path / "photos")}
    assert automatic.choose(asked, False).files == ("small_data_mae_vit_small_patch16_224",)
    monkeypatch.setattr(automatic, "count_training_images", lambda layout, most: most)
    assert automatic.choose(asked, False).files == ("mae_vit_base_patch16_224",)
    asked["MODEL.PRETRAINED"] = "hf-hub:timm/vit_small_patch16_dinov3.lvd1689m"
    assert automatic.choose(asked, False).files == ("continue_dino_vit_small_patch16_dinov3",)
    asked["MODEL.PRETRAINED"] = "hf-hub:timm/resnet50.a1_in1k"
    with pytest.raises(InputError, match="no recipe for continuing .* of resnet50; expected"):
        automatic.choose(asked, False)


def test_masks_and_several_labels_choose_their_tasks(tmp_path):
    for name in ("images", "masks"):
        write_images(tmp_path / "plants", {name: 3}, size=16)
    (tmp_path / "plants/classes.txt").write_text("soil\nplant\n")
    config = choose(f"-data_path={tmp_path / 'plants'}")
    assert (config.TASK, config.MODEL.NAME) == ("segmentation", "segformer_shapes")
    assert config.DATA.VAL_SPLIT == 0.2
    write_images(tmp_path / "many", {"images": 3}, size=16)
    lines = "image,cat,dog\nimages/0.png,1,1\nimages/1.png,0,0\nimages/2.png,0,1\n"
    (tmp_path / "many/train.csv").write_text(lines)
    config = choose(f"-data_path={tmp_path / 'many'}")
    assert (config.TASK, config.DATA.DATASET) == ("multilabel", "multilabel_csv")
    assert config.MODEL.NAME == "vit_tiny_patch16_224"


def test_tables_choose_their_task_and_keep_their_split(tmp_path):
    write_images(tmp_path, {"a": 4}, size=16)
    rows = "".join(f"a/{n}.png,x|y,{part}\n" for n, part in enumerate(("train", "val") * 2))
    (tmp_path / "table.csv").write_text("image,label,split\n" + rows)
    config = choose(f"-data_path={tmp_path}")
    assert (config.DATA.DATASET, config.DATA.VAL_SPLIT) == ("csv", None)
    assert config.TASK == "classification"
    config = choose(f"-data_path={tmp_path}", "-o", "DATA.LABEL_SEPARATOR", "bar")
    assert config.TASK == "multilabel"
    (tmp_path / "table.csv").write_text("image,label,cat\na/0.png,x,1\n")
    config = choose(f"-data_path={tmp_path / 'table.csv'}")
    assert config.DATA.VAL_SPLIT == 0.2
    config = choose(f"-data_path={tmp_path}", "-o", "DATA.LABEL_COLUMN", "[cat,label]")
    assert config.TASK == "multilabel"


def test_every_family_of_models_takes_both_recipes():
    families = {}
    for file in model_files():
        families.setdefault(file.parent.name, file.stem)
    assert len(families) > 50
    for model in families.values():
        for recipe in ("finetune", "small_data"):
            config = asked_config((model, recipe), [])
            assert model == config.MODEL.NAME
            assert config.TRAIN.WEIGHT_DECAY == 0.05


def test_a_key_of_an_own_recipe_that_the_model_lacks_stays_an_error(tmp_path):
    (tmp_path / "own.yaml").write_text("BASE: lenet\nMODEL:\n  DROPPATH: 0.1\n")
    with pytest.raises(InputError, match="takes no DROPPATH; leave it out"):
        get_config(tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-data_path=gone"], "-data_path is gone, but there is no such folder"),
        (["-data_path=FLOWERS", "-eval"], "-eval needs -pretrained=WEIGHTS, or -cfg, the model"),
        (
            ["-data_path=FLOWERS", "-pretrained=some.pth"],
            "-pretrained=some.pth doesn't say which model it is of; pass -cfg, the model",
        ),
        (
            ["-data_path=FLOWERS", "-pretrained=vit_digits"],
            "timm has no weights of vit_digits;",
        ),
    ],
)
def test_what_cannot_be_chosen_is_one_line(flowers, monkeypatch, flags, message):
    monkeypatch.chdir(flowers.parent)
    flags = [flag.replace("FLOWERS", "flowers") for flag in flags]
    with pytest.raises(InputError) as caught:
        choose(*flags)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_models_name_means_timms_weights(flowers, monkeypatch):
    monkeypatch.chdir(flowers.parent)
    config = choose("-data_path=flowers", "-pretrained=vit_small_patch16_224")
    hub = "hf-hub:timm/vit_small_patch16_224.augreg_in21k_ft_in1k"
    assert hub == config.MODEL.PRETRAINED
    assert config.TRAIN.LAYER_DECAY == 0.75
    config = choose("-cfg=deit_small_patch16_224", "-pretrained=vit_small_patch16_224.dino")
    assert config.MODEL.PRETRAINED == "hf-hub:timm/vit_small_patch16_224.dino"
    config = choose("-eval", "-pretrained=resnet50", "-data_path=flowers")
    assert config.MODEL.NAME == "resnet50"
    assert config.MODEL.NUM_CLASSES == 1000
    # A file of this name comes first.
    (flowers.parent / "resnet50.pdparams").touch()
    config = choose("-cfg=resnet50", "-pretrained=resnet50")
    assert config.MODEL.PRETRAINED == "resnet50"


def test_a_folder_of_timms_names_its_model(flowers, tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/config.json").write_text('{"architecture": "convnext_tiny"}')
    config = choose(f"-data_path={flowers}", f"-pretrained={tmp_path / 'weights'}")
    assert config.MODEL.NAME == "convnext_tiny"


def test_with_a_cfg_the_format_alone_is_recognised(flowers, tmp_path):
    config = choose("-cfg=deit_small_patch16_224", f"-data_path={flowers}")
    assert config.DATA.DATASET == "folder"
    assert config.DATA.VAL_SPLIT == 0.2
    assert config.MODEL.NUM_CLASSES == "auto"
    assert config.DATA.BATCH_SIZE == get_config("deit_small_patch16_224").DATA.BATCH_SIZE
    # A recipe that names its dataset isn't overruled, and neither is PaddleViT's own layout.
    config = choose("-cfg=cifar10", f"-data_path={flowers}")
    assert config.DATA.DATASET == "cifar10"
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/train_list.txt").write_text("a.jpg 0\n")
    config = choose("-cfg=vit_base_patch16_224", f"-data_path={tmp_path / 'lists'}")
    assert config.DATA.DATASET == "imagenet2012"
    assert config.MODEL.NUM_CLASSES == 1000
    assert config.notes == []


def test_paddle_is_not_imported_for_a_choice(flowers):
    import subprocess

    code = (
        "import sys; from training.command_line import config_from_arguments as read;"
        f"read('main_multi_gpu.py', ['-data_path={flowers}']); print('paddle' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_images_are_counted_no_further_than_the_table_needs(flowers):
    layout = automatic.recognise(str(flowers))
    assert count_training_images(layout, 5) == 5


def test_a_run_is_resumed_by_the_command_that_started_it(flowers, tmp_path):
    outer = tmp_path / "outer"
    outer.mkdir()
    flowers.rename(outer / "flowers")
    command = [f"-data_path={outer}", f"-output={tmp_path / 'run'}", "-resume=auto"]
    config = choose(*command)
    assert str(outer / "flowers") == config.DATA.DATA_PATH
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(resolved_yaml(config))
    resumed = choose(*command)
    assert resumed.DATA.DATA_PATH == config.DATA.DATA_PATH
    assert resumed.notes[-1].startswith(f"data folder: {outer / 'flowers'}, the only folder in ")
    # What isn't that dataset is left to its reader.
    for path in ("gone", tmp_path / "run"):
        resumed = choose(f"-data_path={path}", *command[1:])
        assert str(path) == resumed.DATA.DATA_PATH
    write_images(tmp_path / "masked", {"images": 3, "masks": 3}, size=16)
    resumed = choose(f"-data_path={tmp_path / 'masked'}", *command[1:])
    assert ("folder", str(tmp_path / "masked")) == (resumed.DATA.DATASET, resumed.DATA.DATA_PATH)
