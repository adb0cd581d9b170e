"""The shipped configurations: heads that tell how to run them, the sources' numbers, and that they
train.
"""

import json
import math
import re
import shutil
from itertools import takewhile

import numpy as np
import pytest
from conftest import ROOT
from support.dataset_files import CIFAR10, CIFAR100, cifar_archive, write_idx
from support.small_models import SMALL_DEIT_OPTIONS
from support.starts import start_error

from config import find_config, get_config, shipped_configs
from loading.transforms import BatchTransform, TrainTransform
from models import build_model
from settings.configuration import leaves
from training.losses import build_criterion
from training.optim import build_optimizer, build_schedule, freeze, layer_scales
from weights import load_weights, save_weights
from weights.layout import sublayer

FILES = shipped_configs()
RECIPES = [file.stem for file in FILES if file.parent.name == "recipes"]
PAPERS = [
    file.stem
    for file in FILES
    if file.parent.name in ("deit", "deit3", "gmlp", "mae", "mixer", "resmlp")
]
VITS = [file for file in FILES if file.parent.name == "vit" and file.stem != "vit_digits"]
RESNET = "resnet18_fashion_mnist"
OWN_IMAGES = [
    name
    for name in RECIPES
    if name.startswith(("small_data", "finetune")) and "layer_decay" not in name
]


def head(file):
    """The comment that a file begins with."""
    return "\n".join(takewhile(lambda line: line.startswith("#"), file.read_text().splitlines()))


# --------------------------------------------------------------- the files


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_configuration_is_valid_and_its_head_tells_how_to_run_it(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = get_config(file)
    text = head(file)
    assert text.startswith(f"# {file.stem}: ")
    assert re.search(r"^# Train: +\S", text, re.MULTILINE)
    commands = re.findall(r"-cfg=(\S+)", text)
    assert commands or file.stem == "vit_digits"
    assert all(find_config(name).is_file() for name in commands)
    for size in re.findall(r"-image_size=(\d+)", text):
        assert int(size) % config.MODEL.PATCH_SIZE == 0
    # The devices that the head counts make the batch that it names.
    for total, batch, devices, _, accum in re.findall(
        r"([\d,]+) = (\d+) x (\d+) (?:GPUs|devices)( x (\d+) steps)?", text
    ):
        assert (int(batch), int(accum or 1)) == (config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER)
        assert int(total.replace(",", "")) == int(batch) * int(devices) * int(accum or 1)


# ------------------------------------------------------------------ the rates


def rates(config, batch):
    """The rate at the start, after warm-up and at the end."""
    schedule = build_schedule(config, 10, batch)
    late = config.TRAIN.LR_SCHEDULER.PER_EPOCH == "late"
    return [
        schedule(10 * epoch)
        for epoch in (0, config.TRAIN.WARMUP_EPOCHS + late, config.TRAIN.NUM_EPOCHS + late)
    ]


def fallen(base, end, share):
    """A cosine's rate after that share of the run, from base to end."""
    return end + (base - end) * 0.5 * (1 + math.cos(math.pi * share))


@pytest.mark.parametrize("name", OWN_IMAGES)
def test_a_recipe_for_ones_own_images_is_in_proportion(name):
    config = get_config(name)
    assert (config.MODEL.NUM_CLASSES, config.DATA.BATCH_SIZE) == ("auto", 64)
    assert config.TRAIN.WARMUP_EPOCHS * 10 == config.TRAIN.NUM_EPOCHS
    peak = 2e-4 if name.startswith("finetune") else 3e-4
    assert rates(config, 64) == pytest.approx([1e-6, peak, 0])
    assert rates(config, 1024)[1] == pytest.approx(4 * peak)
    assert (0.75 if name.startswith("finetune") else None) == config.TRAIN.LAYER_DECAY


@pytest.mark.parametrize("file", VITS, ids=lambda file: file.stem)
def test_a_recipe_over_a_vits_file_takes_back_that_ones_own(tmp_path, file):
    """Only the network and the size of its images are left of AugReg's, the paper's and
    fine-tuning's settings.
    """
    sizes = "".join(line for line in file.read_text().splitlines(True) if not line.startswith("#"))
    sizes = sizes.split("TRAIN:")[0].replace(re.search("BASE: .*", sizes)[0], 'BASE: ""')
    (tmp_path / "sizes.yaml").write_text(sizes)
    for name in ("finetune", "small_data"):
        found = []
        for model in (file, tmp_path / "sizes.yaml"):
            (tmp_path / "over.yaml").write_text(f"BASE: ['{model}', '{name}']\n")
            found.append(dict(leaves(get_config(tmp_path / "over.yaml"))))
        changed = {key for key in found[0] if found[0][key] != found[1][key]} - {"BASE"}
        assert changed == set(), name


def test_rates_follow_the_batch_where_the_source_scales_them():
    for name, batch, peak in (
        # 5e-4 x batch / 512; the lowest stays
        ("deit_small_patch16_224", 256, fallen(2.5e-4, 1e-5, 5 / 300)),
        ("deit_base_patch16_384", 64, fallen(6.25e-7, 5e-6, 5 / 30)),
        ("finetune_layer_decay", 256, 5e-4),
        ("linear_probe", 256, 3.0),
        ("mae_linear_probe", 256, 0.1),
        ("transfer_pets", 512, fallen(3e-4, 1e-5, 0.03)),
        ("deit3_base_patch16_224", 256, fallen(3e-3, 1e-5, 5 / 800)),
        ("augreg_vit_base_patch16_224", 1024, 1e-3),
        ("vit_base_patch16_224", 1024, 1e-3),
        ("vit_huge_patch14_224", 1024, 3e-3),
        ("vit_large_patch16_384", 64, 0.01),
        ("cifar10", 512, 2e-3),
    ):
        assert rates(get_config(name), batch)[1] == pytest.approx(peak)


# ------------------------------------------------------------------ they train

PYRAMIDS = {
    "swin_22k_": [
        "MODEL.EMBED_DIM",
        "8",
        "MODEL.NUM_HEADS",
        "[1,1,1,1]",
        "MODEL.NUM_CLASSES",
        "10",
    ],
    "convnext_22k_": ["MODEL.EMBED_DIMS", "[4,4,4,4]", "MODEL.NUM_CLASSES", "10"],
    "replknet_22k": ["MODEL.EMBED_DIMS", "[4,4,4,4]", "MODEL.NUM_CLASSES", "10"],
}


@pytest.mark.parametrize("name", sorted({*RECIPES, *PAPERS} - {RESNET}))
def test_a_recipe_builds_all_that_trains(name):
    headless = name.startswith(("gmlp", "mixer", "resmlp"))
    small = [*SMALL_DEIT_OPTIONS[:2], *SMALL_DEIT_OPTIONS[4:]] if headless else SMALL_DEIT_OPTIONS
    small = next((sizes for start, sizes in PYRAMIDS.items() if name.startswith(start)), small)
    config = get_config(name, [*small, "TRAIN.DISTILLATION_TYPE", "null"])
    model = build_model(config)
    frozen = freeze(config, model)
    build_optimizer(config, model)
    TrainTransform(config), BatchTransform(config), build_criterion(config)
    head = sublayer(model, model.classifier_names()[0])
    scales, (weight, _) = (
        layer_scales(config, model),
        [parameter.numpy() for parameter in head.parameters()],
    )
    if name == "finetune_layer_decay":
        depth = config.MODEL.DEPTH
        found = [
            scales[key]
            for key in ("pos_embed", "blocks.0.attn.qkv.weight", "fc_norm.weight", "head.weight")
        ]
        assert found == pytest.approx([0.65 ** (depth + 1), 0.65**depth, 1, 1])
        assert weight.std() == pytest.approx(2e-5, rel=0.2)
    elif config.TRAIN.LAYER_DECAY is None:
        assert set(scales.values()) == {1.0}
    if name.startswith(("augreg", "vit_small", "vit_base_patch16_384_cifar")):
        assert not weight.any()
        bias = config.MODEL.HEAD_INIT_BIAS
        assert bias == (-6.9 if name.startswith("augreg") else 0)
        assert (model.head.bias.numpy() == np.float32(bias)).all()
    if "linear_probe" in name:
        head = "head.1" if name.startswith("mae") else "head"
        assert weight.std() == pytest.approx(0.01, rel=0.2)
        assert {key for key, _ in model.named_parameters()} - set(frozen) == {
            f"{head}.weight",
            f"{head}.bias",
        }
    elif not config.TRAIN.FREEZE:
        assert not frozen


@pytest.mark.parametrize(
    ("first", "size", "second", "grids"),
    [
        ("deit3_base_patch16_224", 192, "deit3_finetune_base", "12 x 12 to 14 x 14"),
        ("deit3_huge_patch14_224", 154, "deit3_finetune_huge", "11 x 11 to 16 x 16"),
        (
            "deit_base_distilled_patch16_224",
            224,
            "deit_base_distilled_patch16_384",
            "14 x 14 to 24 x 24",
        ),
    ],
)
def test_a_second_step_takes_the_weights_of_the_first(tmp_path, first, size, second, grids):
    small = [*SMALL_DEIT_OPTIONS, "MODEL.DEPTH", "1"]
    save_weights(
        build_model(get_config(first, [*small, "DATA.IMAGE_SIZE", str(size)])),
        tmp_path / "model.safetensors",
    )
    report = load_weights(build_model(get_config(second, small)), tmp_path, strict=False)
    assert report.resized == [f"pos_embed resized from {grids}"]


SHORT = ["-output=run", "-batch_size=8", "-o", "TRAIN.NUM_EPOCHS", "1", "TRAIN.WARMUP_EPOCHS", "0"]
SHORT += ["DATA.NUM_WORKERS", "0", "MODEL.DEPTH", "1", "REPORT", "False"]


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Returns a function that trains with a recipe for an epoch in ``tmp_path``: (its first
    training record, its result).
    """
    monkeypatch.chdir(tmp_path)

    def train(*flags):
        assert start_error([*flags[:2], *SHORT, *flags[2:]]) is None
        record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        assert 0 < record["loss"] < 3 * math.log(10)
        return record, result

    return train


@pytest.mark.parametrize(
    ("cfg", "model"), [("cifar10", "vit_cifar10"), ("transfer_cifar10", "vit_base_patch16_224")]
)
def test_cifar10_trains_on_its_original_archive(tmp_path, trained, cfg, model):
    cifar_archive(tmp_path, *CIFAR10, b"labels", ("batches.meta", b"label_names"))
    record, result = trained(f"-cfg={cfg}", "-data_path=.", *SMALL_DEIT_OPTIONS)
    assert record["samples"] == 8  # of 15
    assert (result["model"], result["num_samples"]) == (model, 3)


@pytest.mark.parametrize(
    ("classes", "archive", "label", "meta"),
    [
        ("10", CIFAR10, b"labels", ("batches.meta", b"label_names")),
        ("100", CIFAR100, b"fine_labels", ("meta", b"fine_label_names")),
    ],
)
def test_a_vit_is_fine_tuned_on_cifar(tmp_path, trained, classes, archive, label, meta):
    cifar_archive(tmp_path, *archive, label, meta)
    name = f"vit_base_patch16_384_cifar{classes}"
    small = [*SMALL_DEIT_OPTIONS[:-1], classes, "DATA.IMAGE_SIZE", "32", "DATA.BATCH_SIZE", "2"]
    flags = [f"-cfg={name}", "-data_path=.", *small]
    record, result = trained(*flags)
    start = math.log(int(classes))  # its classifier starts at zero
    assert 0.8 * start < record["loss"] < start + 1e-4
    assert (result["model"], result["config"]["DATA"]["CROP_MODE"]) == (name, "squash")


@pytest.mark.smoke
def test_fashion_mnist_trains_on_its_original_files(tmp_path, trained):
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 20), ("t10k", 5)):
        write_idx(
            tmp_path / f"{prefix}-images-idx3-ubyte",
            rng.integers(0, 256, (count, 28, 28), np.uint8),
            True,
        )
        write_idx(
            tmp_path / f"{prefix}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10, True
        )
    for cfg, model, depth, samples in (
        ("fashion_mnist", "vit_fashion_mnist", "1", 16),
        (RESNET, RESNET, "10", 20),
    ):
        record, result = trained(f"-cfg={cfg}", "-data_path=.", "MODEL.DEPTH", depth)
        assert record["samples"] == samples  # of 20: d2l's keeps the last batch
        assert (result["model"], result["num_samples"]) == (model, 5)
        shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("name", ["deit_small_patch16_224", "deit3_small_patch16_224"])
def test_whole_recipes_train(trained, name):
    small = [*SMALL_DEIT_OPTIONS, "DATA.SYNTHETIC_SIZE", "16", "DATA.IMAGE_SIZE", "32"]
    record, result = trained(f"-cfg={name}", "-dataset=synthetic", *small)
    assert record["samples"] == 16
    assert result["config"]["TRAIN"]["AUTO_AUGMENT"] == get_config(name).TRAIN.AUTO_AUGMENT


def test_a_distilled_model_asks_for_its_teacher(program):
    status, _, errors = program(
        "main_single_gpu.py", "-cfg=deit_tiny_distilled_patch16_224", "-dataset=synthetic", *SHORT
    )
    assert status == 2
    assert (
        "error: DISTILLATION_TYPE is hard, but TEACHER_MODEL is regnety_160 and TEACHER_PATH None"
        in errors
    )
