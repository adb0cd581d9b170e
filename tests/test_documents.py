"""Every command of the documents, typed as it stands there, on pictures that aren't digits.

``documents.yaml`` says how each is typed: what stands for its placeholders, and what is appended to
make it small. A command that is neither there nor in a configuration's head makes
``test_every_command_is_known`` fail: say there how to run it, or why it can't be run.
"""

import csv
import functools
import importlib.util
import io
import json
import re
import shlex

import numpy as np
import pytest
import yaml
from conftest import ROOT
from safetensors.numpy import load_file
from support.document_commands import (
    REGIONS,
    VALIDATION,
    Desk,
    asked_for,
    documents,
    files_shown,
    is_like,
    is_printed,
    options_shown,
    shown_in,
    snippets,
)
from support.ranks import free_ports

import tools.benchmark
import tools.check_parity
from config import default_values, find_config, get_config, shipped_configs
from errors import InputError
from models import create_model
from settings import merging
from settings.configuration import leaves
from tools.package import docs_tables
from training.command_line import FLAGS, config_from_arguments
from weights import save_weights

TABLE = yaml.safe_load((ROOT / "tests" / "documents.yaml").read_text())
CASES = TABLE["cases"]
SHOWN = {file: shown_in(file) for file in documents()}
# tests/test_family_pages.py checks the commands of these pages.
FAMILIES = {
    ROOT / "docs" / folder / f"{page}.md"
    for folder in ("models", "zh/models")
    for page in docs_tables.pages().values()
}
COMMANDS = list(dict.fromkeys(shown.command for of_file in SHOWN.values() for shown in of_file))


def is_of_a_head(command):
    return re.match(r"(python main_\w+_gpu\.py|sh run_train_multi\.sh) -cfg=", command) is not None


def lacks(name):
    """Returns the first package that a case, or one that has to be done before it, lacks; or ""."""
    while name:
        package = CASES[name].get("package")
        if package and not importlib.util.find_spec(package):
            return package
        name = CASES[name].get("needs")
    return ""


def parameters():
    for name in CASES:
        marks = [getattr(pytest.mark, mark) for mark in ("slow", "smoke") if name in TABLE[mark]]
        yield pytest.param(name, marks=marks, id=name)


# --------------------------------------------------------------------- what is known


def test_every_command_is_known():
    patterns = [case["shown"] for case in CASES.values()] + TABLE["parsed"] + list(TABLE["not run"])
    unknown = {
        str(file.relative_to(ROOT)): shown.command
        for file, of_file in SHOWN.items()
        for shown in of_file
        if not any(is_like(shown.command, pattern) for pattern in patterns)
        and not (file.suffix == ".yaml" and is_of_a_head(shown.command))
        and file not in FAMILIES
        and not shown.prints.startswith("error: ")
    }
    assert unknown == {}
    assert [
        pattern
        for pattern in patterns
        if not any(is_like(command, pattern) for command in COMMANDS)
    ] == []
    assert {*TABLE["slow"], *TABLE["smoke"]} <= CASES.keys()
    assert len(COMMANDS) > 150  # most of them of configurations' heads


def test_each_guide_shows_what_a_command_prints():
    guides = {file for file in SHOWN if file.parent in (ROOT / "docs/guides", ROOT / "docs/start")}
    silent = {file.name for file in guides if not any(shown.prints for shown in SHOWN[file])}
    assert silent == {"slurm.md"}  # a cluster prints it
    assert len(guides) > 30


def test_what_isnt_run_has_a_reason_that_holds():
    for pattern, reason in TABLE["not run"].items():
        assert all((ROOT / file).is_file() for file in re.findall(r"tests/\S+\.py", reason)), (
            pattern
        )
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {command.split()[1] for command in COMMANDS if command.startswith("make ")} <= targets
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = {name for command in COMMANDS for name in re.findall(r"\[([\w,]+)\]\"", command)}
    assert len(extras) > 3
    for name in {name for listed in extras for name in listed.split(",")}:
        assert re.search(rf"^{name} = \[", project, re.M), name


def test_every_key_that_is_named_exists():
    known = default_values().keys()
    sections = {key[:dot] for key in known for dot, letter in enumerate(key) if letter == "."}
    unknown = {}
    for file in documents():
        # The pages for users of PaddleViT name PaddleViT's own keys.
        text = file.read_text() if file.suffix == ".md" and "paddlevit" not in file.stem else ""
        for key in re.findall(r"\b(?:DATA|MODEL|TRAIN|DIST)(?:\.\w+)+", text):
            # with what an unknown key is told
            shown = {"TRAIN.BASELR", "DIST.STRATEGY.gradient_merge"}
            if key not in known | sections | shown:
                unknown.setdefault(file.name, []).append(key)
    assert unknown == {}


def test_every_option_that_is_shown_is_taken():
    known = {key for key, _ in leaves(get_config())}
    checked = 0
    refused = []
    for file in [file for file in documents() if file.suffix == ".md"]:
        for words in options_shown(file):
            if words[0] not in known or words[1] == "N":
                continue
            checked += 1
            # A task of masks needs a head.
            others = []
            if words == ["TASK", "segmentation"]:
                others = ["HEAD.NAME", "linear", "DATA.CROP_MODE", "short"]
            try:
                get_config(None, ["OUTPUT", "RUN", *words, *others])
            except InputError as error:
                # the text around it names the other key
                if f"{words[0]} has no effect without " not in str(error):
                    refused.append((file.name, words, str(error)))
    assert refused == []
    assert checked > 30


# --------------------------------------------------------------------- typed and run


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    desk = Desk(tmp_path_factory.mktemp("desk"))
    desk.done = {}
    return desk


def typed(case):
    """The one command that the documents show so, with its placeholders replaced, and with the
    flags.
    """
    (command,) = [command for command in COMMANDS if is_like(command, case["shown"])]
    for placeholder, value in {**case.get("swaps", {}), **TABLE["everywhere"]}.items():
        command = command.replace(placeholder, value)
    command = re.sub(r"[\[\]]", "", command)  # what may be left out isn't
    ports = [str(port) for port in free_ports(1)]
    flags = case.get("flags", "").format(**TABLE["flags"])
    if "run" in case and "-output" not in f"{command} {flags}":
        flags += f" -output={case['run']}"
    return re.sub(r"\bPORT ", f"{ports[0]} ", f"{command} {flags}").strip()


def carried_out(desk, name):
    """Types a case's command, after what it needs; returns what came of it. Each is done once."""
    case = CASES[name]
    if name not in desk.done:
        if "needs" in case:
            carried_out(desk, case["needs"])
        line = typed(case)
        words = " && ".join(filter(None, (case.get("before", "").format(**TABLE["flags"]), line)))
        if re.search(r"RANK=K|--rank K", line):  # on each machine
            first, second = (re.sub(r"(RANK=|--rank )K", rf"\g<1>{rank}", line) for rank in "01")
            words = f"({first}) & {second}; status=$?; wait $! && exit $status"
        desk.done[name] = desk.type(words), line
    return desk.done[name]


@pytest.mark.smoke
def test_output_is_compared_line_by_line_with_any_numbers():
    printed = "epoch 1: loss 2.31, acc1: 12.50\nsaved\nepoch 2: loss 1.9e-3\n"
    assert is_printed("epoch 9: loss 0.1, acc1: 99\n...\nepoch 10: loss 7\n", printed)
    assert is_printed("epoch 1: ..., acc1: 3\n", printed)
    assert not is_printed("epoch 2: loss 1\nepoch 1: loss 1\nsaved\n", printed)
    assert not is_printed("epochs 1\n", printed)
    tree = (
        "RUN/\n├── log.txt        what it printed\n└── checkpoints/\n    ├── best/\n    └── ...\n"
    )
    assert files_shown(tree) == ["RUN", "RUN/log.txt", "RUN/checkpoints", "RUN/checkpoints/best"]


@pytest.mark.parametrize("name", parameters())
def test_a_command_does_what_its_text_says(desk, name):
    if package := lacks(name):
        pytest.skip(f"{package} isn't installed")
    case = CASES[name]
    done, line = carried_out(desk, name)
    assert done.errors == "" or "loud" in case
    assert done.left - {"RUN", "AGAIN"} <= {case.get("run"), *case.get("leaves", [])}
    assert all(text in done.printed for text in case.get("says", []))
    result = None
    if "run" in case:
        result = read(desk, f"{case['run']}/result.json")
        config = dict(leaves(result["config"]))
        for key, value in asked_for(line, FLAGS).items():
            assert value == "auto" or config[key] in (value, [value]), key
        known = VALIDATION | {"synthetic": config["DATA.SYNTHETIC_SIZE"]}
        assert result["num_samples"] == case.get("samples", known.get(case["data"]))
        assert case["data"] in (config["DATA.DATASET"], *config["DATA.DATA_PATH"].split("/"))
    for prints in outputs(case):
        if "── " in prints:
            folder = prints.partition("/")[0]
            named = [
                path.replace(folder, case.get("run", folder), 1) for path in files_shown(prints)
            ]
            assert [path for path in named if not list(desk.folder.glob(path))] == []
        else:
            assert is_printed(prints, done.printed), f"{prints}\n--- was printed:\n{done.printed}"
    if "check" in case:
        CHECKS[case["check"]](desk, done, result, case)


def outputs(case):
    """Returns what the documents show of a case's output: lines, or a tree of files."""
    shown = {each for of_file in SHOWN.values() for each in of_file}
    return [each.prints for each in shown if each.prints and is_like(each.command, case["shown"])]


def read(desk, name):
    return json.loads((desk.folder / name).read_text())


def equals_the_runs_own(desk, done, result, case):
    run = "swin" if result["model"] == "swin_mini" else "RUN"
    best = read(desk, f"{run}/result.json")["best"]
    assert result["loss"] == pytest.approx(best["loss"], abs=1e-5)
    assert result["acc1"] == best["acc1"]
    assert result["weights"].startswith(
        "RUN/checkpoints/best" if run == "RUN" else "./swin_tiny_patch4_window7_224.pdp"
    )


def trains_the_folders_classes(desk, done, result, case):
    assert read(desk, f"{case['run']}/classes.json") == REGIONS
    assert list(result["class_acc"]) == REGIONS
    assert result["config"]["MODEL"]["NUM_CLASSES"] == 4
    assert f"samples: 10, time: {result['seconds']:.1f} s, run: {case['run']}\n" in done.printed
    assert ((desk.folder / case["run"] / "checkpoints/best_ema.safetensors").exists()) == (
        result["config"]["TRAIN"]["MODEL_EMA"]
    )


def moves_the_classifier_alone(desk, done, result, case):
    before = load_file(desk.folder / "RUN/checkpoints/best/model.safetensors")
    after = load_file(desk.folder / "frozen/checkpoints/last/model.safetensors")
    assert {name for name in after if not np.array_equal(before[name], after[name])} == {
        "head.weight",
        "head.bias",
    }


def goes_on(desk, done, result, case):
    records = [
        json.loads(line)
        for line in (desk.folder / case["run"] / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(r["epoch"], r["step"]) for r in records if r["split"] == "train"][-1] == (3, 18)
    trains_the_folders_classes(desk, done, result, case)


def averages(desk, done, result, case):
    ends = [
        load_file(desk.folder / f"RUN/checkpoints/epoch_000{n}/model.safetensors") for n in (1, 2)
    ]
    for name, mean in load_file(desk.folder / "averaged.safetensors").items():
        np.testing.assert_allclose(mean, (ends[0][name] + ends[1][name]) / 2, rtol=1e-5, atol=1e-7)


def publishes(desk, done, result, case):
    folder = desk.folder / "flowers-vit"
    for name, values in load_file(folder / "model.safetensors").items():
        run = load_file(desk.folder / "RUN/checkpoints/best/model.safetensors")
        np.testing.assert_array_equal(values, run[name])
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert (
        json.loads((folder / "config.json").read_text())["architecture"] == "vit_small_patch16_224"
    )


def converts_back(desk, done, result, case):
    kept = load_file(desk.folder / "base/checkpoints/best/model.safetensors")
    found = load_file(desk.folder / "model.safetensors")
    assert kept.keys() == found.keys()
    assert all(np.array_equal(kept[name], found[name]) for name in kept)


def predicts_each_once(desk, done, result, case):
    rows = list(csv.DictReader(io.StringIO((desk.folder / "predictions.csv").read_text())))
    assert [int(row["index"]) for row in rows] == list(range(10))
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert right * 10 == pytest.approx(read(desk, "RUN/result.json")["best"]["acc1"])
    assert done.printed.endswith(f"predictions.csv: 5 + 5 = 10 samples, {right} right\n")


def evaluates_the_same(desk, done, result, case):
    """As its head says: "the same with -eval -pretrained=RUN/checkpoints/best"."""
    (line,) = [line for of_case, line in desk.done.values() if of_case is done]
    run = case["run"]
    line = line.partition(" -o ")[0]
    desk.type(f"{line} -eval -pretrained={run}/checkpoints/best -output={run}_evaluated")
    found = read(desk, f"{run}_evaluated/result.json")
    assert [found[key] for key in ("acc1", "num_samples")] == [
        result["best"]["acc1"],
        result["num_samples"],
    ]
    assert found["loss"] == pytest.approx(result["best"]["loss"], abs=1e-5)


def repeats_its_thresholds(desk, done, result, case):
    best = read(desk, "LABELS/result.json")["best"]
    assert [result[name] for name in ("mAP", "f1_micro")] == [
        best[name] for name in ("mAP", "f1_micro")
    ]


def answers_above_its_thresholds(desk, done, result, case):
    thresholds = read(desk, "LABELS/result.json")["thresholds"]
    rows = list(csv.DictReader(io.StringIO((desk.folder / "labels.csv").read_text())))
    assert len({row["name"] for row in rows}) == 10
    assert {row["class"] for row in rows} <= {"", "china", "flower", "top"}
    assert all(
        float(row["probability"]) >= thresholds[int(row["output"])] for row in rows if row["class"]
    )


def lists_swin(desk, done, result, case):
    names = [line.split()[0] for line in done.printed.splitlines() if line.startswith("swin")]
    assert sorted(names) == sorted(file.stem for file in (ROOT / "configs").glob("swin*/*.yaml"))
    assert re.search(r"^swin_tiny_patch4_window7_224 +28,288,354 ", done.printed, re.M)


def names_every_flag(desk, done, result, case):
    assert all(re.search(rf"\[-{flag} ", done.printed) for flag in FLAGS)


CHECKS = {
    function.__name__: function
    for function in (
        *(
            equals_the_runs_own,
            trains_the_folders_classes,
            moves_the_classifier_alone,
            goes_on,
            averages,
        ),
        *(converts_back, evaluates_the_same, predicts_each_once, lists_swin, names_every_flag),
        *(repeats_its_thresholds, answers_above_its_thresholds, publishes),
    )
}


def test_an_error_is_the_one_that_is_shown(desk):
    shown = {
        shown
        for of_file in SHOWN.values()
        for shown in of_file
        if shown.prints.startswith("error: ")
    }
    assert len(shown) == 2
    for command, prints in shown:
        done = desk.type(command, status=2)
        assert (done.printed, done.errors, done.left) == ("", prints, set())


# ------------------------------------------------------------------------ tried alone


def test_the_heads_commands_are_of_their_own_files(monkeypatch):
    """Each is read as the program reads it; its model's file is the head's own, or is made from it."""
    # Each command would list configs/ anew.
    monkeypatch.setattr(merging, "shipped_configs", functools.cache(shipped_configs))
    checked = 0
    for file, of_file in SHOWN.items():
        for command in [
            shown.command
            for shown in of_file
            if file.suffix == ".yaml" and is_of_a_head(shown.command)
        ]:
            words = shlex.split(command)
            config = config_from_arguments(words[1], words[2:])
            given = [
                word
                for word in words[2:]
                if "TEACHER" not in word and not word.startswith("regnety")
            ]
            # "without -o TRAIN.TEACHER_PATH", the heads say
            given = given[:-1] if given[-1] == "-o" else given
            assert config_from_arguments(
                words[1], [*given, "-eval", "-pretrained=RUN/checkpoints/best"]
            ).EVAL
            wanted = asked_for(command, FLAGS)
            found = dict(leaves(config))
            assert {key: found[key] for key in wanted} == wanted
            if "imagenet" in command:
                assert config.DATA.DATASET == "imagenet2012"
            assert (config.DATA.DATASET == "digits") == ("digits" in file.stem)
            named = find_config(words[2].removeprefix("-cfg=")).resolve()
            # What a pre-trained encoder is for has a recipe of its own.
            begins_with_it = file.parent.name == "pretrain" and "-pretrained=RUN" in command
            assert begins_with_it or file in made_from(named), (file, command)
            checked += 1
    assert checked > 90
    assert {file for file in shipped_configs() if not SHOWN[file]} == set()


def test_a_heads_evaluation_names_the_weights_that_the_training_made():
    """The training's own ``-pretrained=FILE`` is where it starts: evaluated, it would say nothing
    of the training.
    """
    evaluations = 0
    for file in shipped_configs():
        head = "\n".join(re.findall("^#.*", file.read_text(encoding="utf-8"), re.M))
        starts_from_a_file = re.search("^# (?:Train|Then): .*-pretrained=FILE", head, re.M)
        accepted = r"-pretrained=RUN" if starts_from_a_file else r"-pretrained=(?:RUN|FILE)"
        for line in re.findall("^# Evaluate: .*", head, re.M):
            evaluations += 1
            assert re.search(accepted, line), (file.name, line)
    assert evaluations > 300


def test_what_the_documents_count_is_counted():
    for page in ("guides/distributed.md", "zh/guides/distributed.md"):
        text = (ROOT / "docs" / page).read_text()
        restarts = re.search(
            r"`DIST.MAX_RESTART (\d+)`.*?restart \d of (\d+) \(DIST.MAX_RESTART\)", text, re.S
        )
        assert restarts[1] == restarts[2], page
        libraries = re.search(r"^ok    libraries   (.*)", text, re.M)[1]
        pinned = (ROOT / "requirements.txt").read_text()
        for library in ("numpy", "simplejpeg"):
            version = re.search(rf"^{library}==([\d.]+)", pinned, re.M)[1]
            assert f"{library} {version}" in libraries, page


@functools.cache
def made_from(file):
    base = yaml.safe_load(file.read_text()).get("BASE") or []
    below = [
        (file.parent / name).resolve()
        for name in ([base] if isinstance(base, str) else base)
        if name
    ]
    return [file, *(ancestor for parent in below for ancestor in made_from(parent))]


def test_the_own_images_recipe_is_in_proportion_to_the_run():
    (command,) = [c for c in COMMANDS if is_like(c, CASES["own"]["shown"])]
    config = config_from_arguments("main_multi_gpu.py", shlex.split(command)[2:])
    assert config.TRAIN.WARMUP_EPOCHS <= config.TRAIN.NUM_EPOCHS / 10
    assert config.TRAIN.LINEAR_SCALED_LR or config.TRAIN.BASE_LR <= 1e-3


def test_the_measuring_commands_are_accepted(monkeypatch):
    called = []
    for what, (_, defaults) in tools.benchmark._SUBJECTS.items():
        monkeypatch.setitem(tools.benchmark._SUBJECTS, what, (called.append, defaults))
    monkeypatch.setattr(tools.check_parity, "compare", called.append, raising=False)
    shown = [c for c in COMMANDS if is_like(c, "python tools/benchmark.py *")]
    for command in shown:
        for text in (
            re.sub(r" \[[^\]]*\]", "", command),
            re.sub(r"[\[\]]", "", command).replace("default|", ""),
        ):
            words = shlex.split(
                re.sub(r"(?<=cfg[= ])NAME( \.\.\.)?", "vit_digits", text.replace("=B ", "=8 "))
            )
            words = [{"SUBJECT": "search", "...": "sweep"}.get(word, word) for word in words]
            monkeypatch.setattr("sys.argv", words[1:])
            tools.benchmark.main()
            if called[-1].what == "growth":
                continue
            for cfg in called[-1].cfg if isinstance(called[-1].cfg, list) else [called[-1].cfg]:
                get_config(cfg, called[-1].o)
    assert len(called) == 2 * len(shown) > 20


# -------------------------------------------------------------------------- snippets


def test_the_models_snippet_prints_them(desk):
    code = next(s for s in snippets("docs/models/index.md", "python") if "list_models" in s)
    printed = desk.python(
        code + "print(list(model.head.weight.shape), model.patch_embed.grid_size)"
    )
    names, of_segmentation, shape = printed.strip().split("\n")
    files = sorted((ROOT / "configs" / "segmentation").glob("segformer_*.yaml"))
    assert of_segmentation == str([file.stem for file in files])
    assert names == str(
        [
            name
            for name in sorted(f.stem for f in shipped_configs())
            if re.match(r"vit_.*_384$", name)
        ]
    )
    assert shape == "[768, 10] (14, 10)"


def test_weights_snippet_prints_what_the_document_says(desk):
    model = create_model("vit_tiny_patch16_224")
    save_weights(model, desk.folder / "model_of_1000.safetensors")
    desk.type("python tools/convert_weights.py model_of_1000.safetensors vit_tiny_patch16_224.npz"
              " -cfg=vit_tiny_patch16_224")  # fmt: skip
    (code,) = snippets("docs/models/weights.md", "python")
    assert desk.python(code) == snippets("docs/models/weights.md", "text")[1]


def test_distributeds_strategy_is_a_configuration(tmp_path):
    for name in ("docs/guides/distributed.md", "docs/zh/guides/distributed.md"):
        (text,) = snippets(name, "yaml")
        (tmp_path / "strategy.yaml").write_text(text)
        config = get_config(tmp_path / "strategy.yaml")
        assert config.DIST.ENGINE == "fleet"
        assert (config.DIST.STRATEGY.sharding, config.DIST.STRATEGY.sharding_configs.stage) == (
            True,
            1,
        )
