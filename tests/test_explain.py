"""Where values come from: what a configuration knows, what a run's config.yaml keeps, and what
--explain prints.
"""

import copy
import pickle
import re
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

from config import default_values, explain, get_config, resolved_yaml, with_values
from errors import InputError
from settings.configuration import leaves, option_keys, value_sources
from settings.keys import meanings
from settings.registry import optimizers
from training.command_line import config_from_arguments
from training.run import for_others


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "BASE: ''\nTRAIN: {BASE_LR: 0.5, MIXUP_ALPHA: 0.8, MIXUP_PROB: 0.9}\n"
    )
    (tmp_path / "own.yaml").write_text("BASE: base.yaml\nTRAIN: {BASE_LR: 0.25}\n")
    return tmp_path / "own.yaml"


def of(*words):
    return config_from_arguments("main_multi_gpu.py", words)


def told(config, key):
    return value_sources(config)[key].text()


# ----------------------------------------------------- what a configuration knows


def test_each_value_knows_its_source_and_what_it_replaced(recipe):
    config = of(
        f"-cfg={recipe}", "-batch_size=8", "-o", "TRAIN.BASE_LR", "0.1", "TRAIN.BASE_LR=0.2"
    )
    assert [
        (where.value, where.level, where.text()) for where in config.origins["TRAIN.BASE_LR"]
    ] == [
        (0.5, 0, str(recipe.with_name("base.yaml"))),
        (0.25, 1, str(recipe)),
        (0.1, 2, "-o"),
        (0.2, 2, "-o"),
    ]
    assert told(config, "DATA.BATCH_SIZE") == "flag -batch_size"
    assert told(get_config("vit_digits"), "MODEL.DEPTH") == "configs/vit/vit_digits.yaml"
    assert told(get_config(None, ["SEED", "3"]), "SEED") == "command line"
    assert "SEED" not in value_sources(config)
    assert option_keys(config) == {"TRAIN.BASE_LR", "DATA.BATCH_SIZE"}
    assert (
        told(of("-eval", "-batch_size=4"), "DATA.BATCH_SIZE_EVAL")
        == "flag -batch_size, because of -eval"
    )


def test_copies_and_pickles_know_it_and_do_not_share_it(recipe):
    config = of(f"-cfg={recipe}")
    for same in (config.clone(), pickle.loads(pickle.dumps(config)), with_values(config)):
        assert (same, same.origins, type(same)) == (config, config.origins, type(config))
    changed = with_values(config, "the data", TRAIN__BASE_LR=1)
    assert (told(changed, "TRAIN.BASE_LR"), value_sources(changed)["TRAIN.BASE_LR"].value) == (
        "the data",
        1.0,
    )
    assert told(config, "TRAIN.BASE_LR") == str(recipe)
    changed.notes.append("one")
    assert (config.notes, get_config().notes, get_config().origins) == ([], [], {})


def test_a_copy_shares_no_section_and_no_list():
    config = get_config("vit_digits", ["TRAIN.OPTIMIZER.BETAS", "[0.8, 0.9]"])
    changed = config.clone()
    deep = copy.deepcopy(config)
    assert (changed, changed.__dict__) == (deep, deep.__dict__)
    assert changed.is_frozen()
    changed.defrost()
    changed.TRAIN.OPTIMIZER.BETAS[0] = 0.1
    changed.TRAIN.OPTIMIZER.NAME = "other"
    changed.origins["TRAIN.OPTIMIZER.BETAS"][-1].value[0] = 0.1
    changed.origins["SEED"] = []
    changed.notes.append("a line")
    assert (config, config.__dict__) == (deep, deep.__dict__)


def test_a_file_of_paddlevits_tells_its_own_values_from_its_familys(tmp_path):
    # 300 is the family's, too
    text = "MODEL: {TYPE: swin, DROP_PATH: 0.5}\nTRAIN: {BASE_LR: 0.1, NUM_EPOCHS: 300}\n"
    (tmp_path / "swin.yaml").write_text(text)
    config = get_config(tmp_path / "swin.yaml")
    family = f"{tmp_path}/swin.yaml, which took it from PaddleViT's defaults (configs/paddlevit/swin_2021.yaml)"
    for key, source in (
        ("MODEL.DROPPATH", str(tmp_path / "swin.yaml")),
        ("TRAIN.BASE_LR", str(tmp_path / "swin.yaml")),
        ("TRAIN.NUM_EPOCHS", str(tmp_path / "swin.yaml")),
        ("TRAIN.WEIGHT_DECAY", family),
        ("TRAIN.AUTO_AUGMENT", family),
    ):
        assert told(config, key) == source


# -------------------------------------------------------------- a run's config.yaml


def test_a_runs_file_keeps_the_first_source_however_often_it_goes_on(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = of(
        f"-cfg={recipe}",
        "-data_path=d",
        "-dataset=folder",
        "-o",
        "SEED=3",
        "TRAIN.NUM_EPOCHS",
        "40",
    )
    config = with_values(config, "the number of classes that the data has", MODEL__NUM_CLASSES=7)
    (tmp_path / "run" / "checkpoints" / "epoch_0001").mkdir(parents=True)
    file = tmp_path / "run" / "config.yaml"
    for _ in range(3):
        file.write_text(resolved_yaml(for_others(config)))
        config = of("-output=run", "-resume=auto")
        for key, first in (
            ("SEED", "-o"),
            ("DATA.DATA_PATH", "flag -data_path"),
            ("TRAIN.BASE_LR", str(recipe)),
            ("TRAIN.MIXUP_PROB", f"{recipe.with_name('base.yaml')}"),
            ("MODEL.NUM_CLASSES", "the number of classes that the data has"),
            ("TRAIN.HFLIP", "the defaults"),
        ):
            assert told(config, key) == f"{file}, which took it from {first}"
        levels = {
            key: value_sources(config)[key].level
            for key in ("SEED", "TRAIN.BASE_LR", "TRAIN.MIXUP_PROB", "TRAIN.HFLIP")
        }
        assert levels == {"SEED": 2, "TRAIN.BASE_LR": 1, "TRAIN.MIXUP_PROB": 0, "TRAIN.HFLIP": -1}
        # what another command named isn't meant to change now
        assert option_keys(config) == {"MODEL.RESUME", "OUTPUT"}
        assert str(tmp_path / "d") == config.DATA.DATA_PATH


def test_a_runs_keys_are_listed_as_often_however_many_were_given(tmp_path, monkeypatch):
    listed = {}
    words = [
        "SEED=1",
        "TRAIN.BASE_LR=0.1",
        "TRAIN.WEIGHT_DECAY=0.1",
        "TRAIN.HFLIP=0.1",
        "SAVE_FREQ=3",
    ]
    for given in (1, 5):
        (tmp_path / "config.yaml").write_text(resolved_yaml(get_config(None, words[:given])))
        calls = []
        with monkeypatch.context() as patch:
            patch.setattr(
                "settings.merging.leaves",
                lambda *of, calls=calls: [calls.append(of), leaves(*of)][1],
            )
            get_config(tmp_path / "config.yaml")
        listed[given] = len(calls)
    assert listed[1] == listed[5]


def test_the_weights_that_a_run_began_with_keep_their_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints" / "epoch_0001").mkdir(parents=True)
    file = tmp_path / "run" / "config.yaml"
    file.write_text(resolved_yaml(of("-cfg=vit_digits", "-pretrained=gone.npz")))
    for _ in range(2):
        config = of("-output=run", "-resume=auto")
        assert (config.MODEL.PRETRAINED, told(config, "MODEL.PRETRAINED")) == (
            None,
            "the checkpoint, which contains the weights",
        )
        file.write_text(resolved_yaml(for_others(config)))
        again = get_config(file)
        assert again.MODEL.PRETRAINED == "gone.npz"
        assert told(again, "MODEL.PRETRAINED") == f"{file}, which took it from flag -pretrained"


@pytest.mark.parametrize("release", ["levels", "nothing"])
def test_the_files_of_earlier_releases_are_taken(recipe, tmp_path, release):
    tree = yaml.safe_load(resolved_yaml(for_others(get_config(recipe))))
    sources = tree.pop("GIVEN")
    if release == "levels":
        tree["GIVEN"] = {key: level for key, (level, _) in sources.items() if level >= 0}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    config = get_config(file)
    assert config == for_others(get_config(recipe))
    assert told(config, "TRAIN.BASE_LR") == str(file)
    assert told(config, "TRAIN.HFLIP") == f"{file}, which took it from the defaults"
    assert value_sources(config)["TRAIN.BASE_LR"].level == (1 if release == "levels" else -1)


@pytest.mark.parametrize(
    "source",
    ["[0]", "[0, a, b]", "[-2, a]", "[-1, '']", "[1000, a]", "[true, a]", "[0, 3]", "[0, [a]]", "[a, 0]", "{a: 0}",
     r'[0, "a\nb"]', r'[0, "\e[2J"]', f"[0, {'a' * 5001}]"],
)  # fmt: skip
def test_a_source_that_no_run_wrote_is_one_line(tmp_path, source):
    (tmp_path / "config.yaml").write_text(f"GIVEN: {{SEED: {source}}}\nSEED: 1\n")
    with pytest.raises(InputError) as caught:
        get_config(tmp_path / "config.yaml")
    expected = r"config.yaml: GIVEN is .{1,200}, expected the \{key: \[level, source\]\} that a run wrote; remove it"
    assert re.search(rf"{expected}$", str(caught.value))
    assert str(caught.value).isprintable()


def test_a_source_of_another_kind_is_kept_readable(tmp_path):
    folder = tmp_path / "a\nb: [1, 2]"
    folder.mkdir()
    (folder / "own.yaml").write_text("SEED: 3\n")
    (tmp_path / "config.yaml").write_text(resolved_yaml(get_config(folder / "own.yaml")))
    assert told(get_config(tmp_path / "config.yaml"), "SEED").endswith(r"/a\nb: [1, 2]/own.yaml'")


# ------------------------------------------------------------------------ --explain


def test_what_is_printed_of_a_key(recipe, capsys):
    flags = [
        f"-cfg={recipe}",
        "-o",
        "TRAIN.BASE_LR",
        "0.1",
        "TRAIN.MIXUP_ALPHA",
        "0",
        "--explain",
        "TRAIN.BASE_LR",
    ]
    with pytest.raises(SystemExit) as end:
        of(*flags, "-explain", "TRAIN.MIXUP_PROB", "seed")
    assert end.value.code == 0
    assert (
        capsys.readouterr().out
        == f"""\
TRAIN.BASE_LR: 0.1
  from     -o
  over     0.25, from {recipe}
  over     0.5, from {recipe.with_name("base.yaml")}
  means    The highest learning rate, reached when warm-up ends.
  default  0.003
  effect   none under EVAL
  here     has an effect

TRAIN.MIXUP_PROB: 0.9
  from     {recipe.with_name("base.yaml")}
  means    The probability that mixup or CutMix is applied to a batch, a pair or an image (MIXUP_MODE).
  default  1.0
  effect   none under EVAL, or without TASK classification or fixmatch or multilabel, or without TRAIN.MIXUP_ALPHA or TRAIN.CUTMIX_ALPHA above 0, or TRAIN.CUTMIX_MINMAX
  here     no effect without TRAIN.MIXUP_ALPHA or TRAIN.CUTMIX_ALPHA above 0, or TRAIN.CUTMIX_MINMAX

SEED: 0
  from     the default
  means    The random seed of the initial weights, the order of images and their augmentation.
  default  0
  here     has an effect
"""
    )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (
            "TRAIN.OPTIMIZER",
            [key for key in default_values() if key.startswith("TRAIN.OPTIMIZER.")],
        ),
        ("DIST.STRATEGY.sharding", ["DIST.STRATEGY.sharding"]),
        ("*WARMUP*LR*", ["TRAIN.WARMUP_START_LR"]),
        ("data.crop_???", ["DATA.CROP_PCT"]),
        ("*", list(dict(leaves(get_config())))),
    ],
)
def test_a_section_and_a_pattern_stand_for_their_keys(name, keys):
    text = explain(get_config(), [name, keys[0]])
    assert re.findall(r"^(\S+):", text, re.M) == keys


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("TRAIN.BASELR", "command line: unknown key TRAIN.BASELR; did you mean TRAIN.BASE_LR?"),
        ("lr", "command line: unknown key lr; did you mean TRAIN.BASE_LR?"),
        ("XYZ*", "command line: unknown key XYZ*"),
        ("MODEL.WINDOW_SIZE", "command line: ViT takes no WINDOW_SIZE"),
        (
            "TRAIN.OPTIMIZER.",
            "command line: unknown key TRAIN.OPTIMIZER.; did you mean TRAIN.OPTIMIZER.EPS?",
        ),
    ],
)
def test_an_unknown_key_is_the_usual_line(name, message):
    with pytest.raises(InputError) as caught:
        of("--explain", "SEED", name)
    assert str(caught.value) == message


@pytest.mark.parametrize("script", ["main_single_gpu.py", "main_multi_gpu.py"])
def test_it_imports_no_paddle_and_leaves_nothing(script, tmp_path):
    code = (
        f"import sys, runpy; sys.argv = ['{script}', '-cfg=vit_digits', '-output=run', '--explain', 'MODEL.DEPTH']\n"
        f"try: runpy.run_path('{ROOT / script}', run_name='__main__')\n"
        "except SystemExit as end: sys.exit(end.code or ('paddle' in sys.modules) * 3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("MODEL.DEPTH: 4\n  from     configs/vit/vit_digits.yaml\n")
    assert not list(tmp_path.iterdir())


def test_every_key_has_a_meaning():
    """config.py's in its comments, those of components and architectures where they are defined."""
    found = meanings((ROOT / "config.py").read_text())
    told = explain(get_config(), ["*"])
    assert re.findall(r"^(\S+):.*\n  from.*\n  default", told, re.M) == []
    assert found["BASE"].startswith(
        "YAML files that this one is based on; later ones override earlier ones."
    )
    assert found["TRAIN.LR_SCHEDULER.PER_EPOCH"].endswith(
        'or at the start of the epoch before ("late", DeiT and PVT).'
    )
    assert (
        found["SEED"]
        == "The random seed of the initial weights, the order of images and their augmentation."
    )


def test_a_key_that_chooses_a_component_lists_those_that_there_are():
    names = ", ".join(optimizers.names())
    assert f"\n  one of   {names}\n" in explain(get_config(), ["TRAIN.OPTIMIZER.NAME"])
    assert "one of" not in explain(get_config(), ["SEED", "MODEL.TYPE"])
