"""The commands on the pages of the families (docs/models): of the family's models, and accepted.

They are read as the programs read them and not run. The weights that they name are those of the
page's table, or the head of the model's YAML file names them.
"""

import ast
import functools
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT
from support.document_commands import asked_for, shown_in, snippets

import tools.probe
from config import find_config, get_config, model_files, shipped_configs
from settings import merging
from settings.configuration import leaves
from settings.names import hub_weights, matching_file
from tools.package import docs_tables
from training.command_line import FLAGS, config_from_arguments

# {page: its folders of configs/}
FAMILIES = {}
for _folder, _page in docs_tables.pages().items():
    FAMILIES.setdefault(_page, set()).add(_folder)
# Their encoders are shown with a head as well.
WITH_SEGMENTATION = {"mit", "topformer"}
SCRIPTS = {"run_train_multi.sh": [], "run_eval_multi.sh": ["-eval"]}


@pytest.fixture(scope="module", autouse=True)
def _read_once():
    """Each command would list configs/ anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "shipped_configs", functools.cache(shipped_configs))
        yield


@pytest.mark.parametrize("page", sorted(FAMILIES))
def test_a_familys_commands_are_of_its_models(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = FAMILIES[page] | ({"segmentation"} if page in WITH_SEGMENTATION else set())
    published = published_weights(FAMILIES[page])
    programs = []
    weights = set()
    outputs = {None}
    for command in [shown.command for shown in shown_in(ROOT / f"docs/models/{page}.md")]:
        if written := re.fullmatch(r'echo "(.+)" > (\w+\.yaml)', command):
            Path(written[2]).write_text(written[1])
            continue
        _, program, *words = shlex.split(command)
        programs.append(program)
        if program == "tools/probe.py":
            monkeypatch.setattr("sys.argv", [program, *words])
            weights.add(tools.probe.parsed_arguments().weights)
        elif words != ["-eval", "-pretrained=RUN/checkpoints/best"]:
            config = checked(program, words, folders)
            weights.add(config.MODEL.PRETRAINED)
            outputs.add(config.OUTPUT)
    assert "run_train_multi.sh" in programs
    assert len(programs) > 1
    assert weights - outputs <= published
    assert bool(weights - outputs) == bool(published)


@pytest.mark.parametrize("folder", ["docs/models", "docs/zh/models"])
def test_a_recipes_batch_is_that_of_its_file(folder):
    """A comment above a training on ImageNet says which batch its recipe is for."""
    checked = []
    for page in FAMILIES:
        text = (ROOT / folder / f"{page}.md").read_text(encoding="utf-8")
        for comment, name in re.findall(
            r"^# (.*)\nsh run_train_multi\.sh -cfg=(\S+) \\\n    -dataset=imagenet2012", text, re.M
        ):
            form = (
                r".*\(batch ([\d,]+) = (\d+) GPUs x (\d+)(?: x (\d+) steps)?\)"
                if folder == "docs/models"
                else r".*（批大小 ([\d,]+) = (\d+) 块 GPU x (\d+)(?: x (\d+) 步)?）"
            )
            written = re.fullmatch(form, comment)
            assert written, (page, comment)
            config = get_config(name)
            batch, gpus, size, steps = (
                int((group or "1").replace(",", "")) for group in written.groups()
            )
            assert (size, steps) == (config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER), page
            assert gpus * size * steps == batch, page
            head = re.search(r"^# Batch: +([\d,]+) = ", find_config(name).read_text(), re.M)
            source = head[1].replace(",", "") if head else config.TRAIN.RECIPE_BATCH
            assert batch == int(source), page
            checked.append(page)
    assert len(checked) > 30


def published_weights(folders):
    """Returns the weights in the table of a family, and those of transformers that heads name."""
    models = [model for model in docs_tables.models() if model.file.parent.name in folders]
    found = {model.weights for model in models if model.weights}
    for model in models:
        head = model.file.read_text(encoding="utf-8")
        for name in re.findall(r"transformers' \(([\w-]+/[\w-]+)\)", head):
            found.add(f"hf-hub:{name}")
    return found


def checked(program, words, folders):
    """Returns a command's configuration, which has what the command names and is of a family."""
    config = config_from_arguments("main_multi_gpu.py", SCRIPTS[program] + words)
    wanted = asked_for(shlex.join(words), FLAGS)
    found = dict(leaves(config))
    assert {key: found[key] for key in wanted} == wanted
    named = words[0].removeprefix("-cfg=")
    assert Path(named).is_file() or config.MODEL.NAME in named
    assert find_config(config.MODEL.NAME).parent.name in folders
    return config


@pytest.mark.parametrize("folder", ["docs/models", "docs/zh/models"])
def test_a_family_is_built_in_python_by_one_of_its_names(folder):
    for page, folders in FAMILIES.items():
        [code] = snippets(f"{folder}/{page}.md", "python")
        [call] = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
        assert ast.unparse(call.func) == "create_model"
        assert "from models import create_model\n" in code
        name = ast.literal_eval(call.args[0])
        file = matching_file(name, model_files())
        assert file.parent.name in folders, page
        given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        assert given.keys() <= {"pretrained", "num_classes"}
        if given.get("pretrained") is True:
            text = (ROOT / folder / f"{page}.md").read_text(encoding="utf-8")
            assert hub_weights(name, file) in re.split(r"[\s=]", text), page
