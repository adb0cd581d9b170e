"""Recipes against what their sources say (tests/sources/)."""

import re
import subprocess

import pytest
import yaml
from conftest import ROOT
from support import recipe_sources
from support.recipe_sources import PAGE, page, quotations, sources, values, without_source

from config import get_config, shipped_configs
from models import architecture
from settings.tasks import answers_of, columns_of, view_columns

SOURCES = sources()
NAMES = {file.stem: file for file in shipped_configs()}
SHARED = {"RATE.START", "RATE.PEAK", "RATE.END", "BATCH"} | {
    f"TRAIN.{key}"
    for key in (
        "NUM_EPOCHS", "WARMUP_EPOCHS", "LR_SCHEDULER.NAME", "LR_SCHEDULER.PER_EPOCH", "WEIGHT_DECAY", "DECAY_ALL",
        "OPTIMIZER.NAME", "GRAD_CLIP", "LOSS", "SMOOTHING", "AUTO_AUGMENT", "COLOR_JITTER", "RANDOM_ERASE_PROB",
        "MIXUP_ALPHA", "CUTMIX_ALPHA", "REPEATED_AUGMENT", "MODEL_EMA", "CROP", "INTERPOLATION", "LAYER_DECAY",
    )
} | {f"DATA.{key}" for key in ("IMAGE_SIZE", "CROP_PCT", "INTERPOLATION", "IMAGENET_MEAN", "IMAGENET_STD")}  # fmt: skip


def required(config):
    """The keys that a source has to be asked about: all that a recipe with these values acts by."""
    train = config.TRAIN
    found = set(SHARED)
    if train.OPTIMIZER.NAME in ("SGD", "LARS"):
        found |= {"TRAIN.OPTIMIZER.MOMENTUM"}
    else:
        found |= {"TRAIN.OPTIMIZER.BETAS"} | (
            {"TRAIN.OPTIMIZER.EPS"} if train.OPTIMIZER.NAME != "Lion" else set()
        )
    found |= {"TRAIN.CROP_SCALE"} if train.CROP == "random_resized" else set()
    found |= {"TRAIN.LR_SCALED"} if train.LINEAR_SCALED_LR else set()
    if train.WARMUP_EPOCHS and train.LR_SCHEDULER.NAME in (
        "warmupcosine",
        "cosine",
        "linear",
        "poly",
    ):
        found |= {"TRAIN.LR_SCHEDULER.WARMUP_PREFIX"}
    if "droppath" in architecture(config).__init__.__annotations__:
        found |= {"MODEL.DROPPATH"}
    if "labels" not in columns_of(config.TASK):
        # Such a task reads none of these, and the sources evaluate nothing.
        found -= {
            f"TRAIN.{key}"
            for key in ("LOSS", "SMOOTHING", "RANDOM_ERASE_PROB", "MIXUP_ALPHA", "CUTMIX_ALPHA")
        }
        found -= {"DATA.CROP_PCT", "DATA.INTERPOLATION"}
    if answers_of(config.TASK) == "pixels":
        # Recipes of pixels have keys of their own, and say how they evaluate.
        found -= {f"TRAIN.{key}" for key in ("AUTO_AUGMENT", "COLOR_JITTER", "INTERPOLATION")}
        found |= {"TRAIN.HEAD_LR", "TRAIN.HFLIP", "TRAIN.PHOTOMETRIC", "HEAD.STRIDE"}
        found |= {"DATA.CROP_MODE", "DATA.DATASET", "DATA.INTERPOLATION", "MODEL.NUM_CLASSES"}
        if train.CROP == "scale_jitter":
            found |= {f"TRAIN.{key}" for key in ("CROP_BASE", "CROP_SCALE", "CROP_MAX_CLASS")}
        if train.LR_SCHEDULER.NAME == "poly":
            found |= {"TRAIN.LR_SCHEDULER.POWER"}
        if train.OPTIMIZER.NAME == "SGD":
            found |= {"TRAIN.OPTIMIZER.NESTEROV"}
    if view_columns(config.TASK):
        # Such a task draws views by keys of its own.
        found -= {f"TRAIN.{key}" for key in ("CROP", "CROP_SCALE", "AUTO_AUGMENT", "COLOR_JITTER")}
        found |= {f"METHOD.{key}" for key in ("GLOBAL_SCALE", "COLOR", "GREY", "SOLARIZE")}
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_is_what_its_source_says(name):
    recipe = SOURCES[name]
    found = values(name, recipe.rows["BATCH"].ours)
    assert required(get_config(name)) - set(recipe.rows) == set()
    for key, row in recipe.rows.items():
        assert found[key] == pytest.approx(row.ours, rel=1e-6, abs=1e-12), f"{key} ({row.at})"
        assert row.source == row.ours or row.remark, (
            f"{key} differs from its source without a reason"
        )


@pytest.mark.parametrize("name", SOURCES)
def test_its_head_names_the_batch_and_the_published_accuracy(name):
    head = NAMES[name].read_text().split("\nBASE")[0]
    recipe = SOURCES[name]
    for total in re.findall(r"([\d,]+) = \d+ x \d+", head):
        assert int(total.replace(",", "")) == recipe.rows["BATCH"].ours
    if recipe.accuracy:
        assert re.search(rf"\b{re.escape(str(recipe.accuracy.source))} ?%", head)


# Files that are no paper's: ours, and those that only others build on.
OURS = {
    "vit_digits",
    "lenet",
    "segformer_shapes",
    "cifar10",
    "fashion_mnist",
    "small_data",
    "finetune",
    "mae_vit_digits",
    "simmim_digits",
    "fcmae_digits",
    "beit_digits",
    "dino_digits",
    "moco_digits",
    "fixmatch_digits",
    "tokenizer_digits",
    "tokenizer_convmixer_patch16_224",
    "mae_vit_base_patch16_224_dec1",
}


def test_every_recipe_has_a_source():
    """A file that is the BASE of others is held by them."""
    bases = {
        base for file in NAMES.values() for base in re.findall(r"([\w.]+)\.yaml", _base_of(file))
    }
    ours = {
        name
        for name in NAMES
        if name in OURS or name.startswith(("small_data_", "finetune_vit", "continue_dino_"))
    }
    assert set(SOURCES) - set(NAMES) == set()
    presets = {name for name, file in NAMES.items() if "recipes/finetune.yaml" in _base_of(file)}
    # A variant has its family's recipe, which the rows of another file hold, if it changes nothing
    # but how a batch is shared out, and whether there is a teacher. The head of
    # coat_lite_medium_384 says that its recipe isn't its own.
    held = {_base_of(NAMES[name]) for name in SOURCES}
    variants = {
        name for name, file in NAMES.items() if _base_of(file) in held and not _own_keys(file)
    }
    variants |= {"coat_lite_medium_384"}
    unsourced = set(without_source())
    assert unsourced.isdisjoint(SOURCES)
    found = set(NAMES) - set(SOURCES) - bases - ours - presets - variants
    assert found == unsourced


def test_a_recipe_may_say_that_it_has_no_source_yet(tmp_path, monkeypatch):
    known = without_source()
    file = tmp_path / "new.yaml"
    file.write_text("# A new recipe.\n# Batch 1,024. Source: none yet.\nTRAIN: {NUM_EPOCHS: 9}\n")
    monkeypatch.setattr(recipe_sources, "shipped_configs", lambda: [*shipped_configs(), file])
    assert without_source() == sorted([*known, "new"])
    head = PAGE.read_text().partition("\n## No source yet\n")[0]
    names = ", ".join(f"`{name}`" for name in without_source())
    assert page() == f"{head}\n## No source yet\n\n{names}\n"


def _own_keys(file):
    return set(yaml.safe_load(file.read_text()).get("TRAIN", {})) - {
        "ACCUM_ITER",
        "DISTILLATION_TYPE",
    }


def _base_of(file):
    return "\n".join(re.findall(r"^BASE:.*", file.read_text(), re.MULTILINE))


def test_the_page_shows_the_sources():
    assert PAGE.read_text() == page(), "make it again: tests/support/recipe_sources.py tells how"


def test_the_documents_count_what_there_is():
    rows = [row for recipe in SOURCES.values() for row in recipe.rows.values()]
    equal = sum(row.source == row.ours for row in rows)
    asked = len(list(quotations()))
    told = f"{len(SOURCES)} recipes have {len(rows):,} rows; {equal:,} are equal. {asked:,} quotations were compared"
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert told in text
    assert sum(map(int, re.findall(r"^\| (\d+) \|.*\|$", text, re.MULTILINE))) == len(rows) - equal


def test_quotations_have_a_place():
    for repository, commit, file, first, last, text in quotations():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", f"{repository}@{commit}")
        assert file
        assert 0 < first <= last < first + 40
        assert text.strip()


def test_a_quotation_is_looked_up_at_its_line(tmp_path, monkeypatch):
    clone = tmp_path / "someone+theirs"
    clone.mkdir()
    (clone / "main.py").write_text("first\nlr = 5e-4\nlast\n")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", clone, *words], check=True)
    asked = [
        ("someone/theirs", "HEAD", "main.py", first, last, "lr = 5e-4")
        for first, last in ((2, 2), (1, 3), (3, 3))
    ]
    monkeypatch.setattr(recipe_sources, "quotations", lambda: iter(asked))
    assert recipe_sources.differences(tmp_path) == [
        "someone/theirs@HEAD main.py:3-3 has no 'lr = 5e-4'"
    ]
