"""The tables that the site's pages have instead of a comment ``<!-- generated: KIND WORDS -->``.

They are made of data in the repository whenever the site is built (``make docs``):

- ``zoo``: all models;
- ``family FOLDERS``: the models of these folders of configs/, and timm's names of the family;
- ``timm_names``: how many of timm's names are available;
- ``parity NAME``: a table of tests/golden/parity;
- ``costs``: multiply-adds beside fvcore's counts;
- ``recipe_sources``: what the sources of the recipes say (tests/sources).

Names of models lead to their YAML files if the site knows where these are (``repo_url``), and to
the page of their family otherwise.
"""

import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support import (  # pyright: ignore[reportMissingImports]
    cost_table,
    recipe_sources,
    timm_names,
)

from config import model_files
from errors import InputError
from settings.names import hub_weights, names
from tools.list_models import TABLE

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "docs" / "models"
PARITY = ROOT / "tests" / "golden" / "parity"
MARKER = re.compile(r"^<!-- generated: ([\w /]+?) -->$", re.M)
HEADS = {
    "Model": "模型",
    "acc1 (%)": "acc1（%）",
    "Image": "图像尺寸",
    "Parameters (M)": "参数量（M）",
    "GMACs": "GMACs",
    "Weights": "权重",
    "Name in timm": "timm 中的名称",
}

ACCURACY_NOTE = {
    "en": (
        "*acc1* is top-1 on ImageNet-1k, as published for the weights in the last column, or by the"
        " authors if there are none. It isn't a result of the recipe in the YAML file."
    ),
    "zh": (
        "acc1 是 ImageNet-1k 的 top-1 准确率：最后一列权重的公布值，没有权重时为论文作者的公布值，"
        "不是用 YAML 文件中的训练方案得到的结果。"
    ),
}
SUFFIX_NOTE = {
    "en": "`_21k_1k`: the recipe that fine-tunes weights of ImageNet-22k on ImageNet-1k.",
    "zh": "`_21k_1k`：在 ImageNet-1k 上微调 ImageNet-22k 权重的训练方案。",
}


class Model(NamedTuple):
    """A row of the zoo.

    Attributes:
        accuracy: the published one on ImageNet-1k, in percent; None: there is none.
        measured_at: the side of its images, where it isn't the model's; 0: it is.
        images: height and width.
        weights: of timm, where -pretrained finds them; "": timm has none.
        timm: the name that timm gives the model; "": timm lacks it.
    """

    name: str
    file: Path
    accuracy: float | None
    measured_at: int
    images: tuple[int, int]
    parameters: int
    macs: int
    weights: str
    timm: str


@functools.cache
def models() -> list[Model]:
    """Returns all models, by their names."""
    costs = json.loads(TABLE.read_text(encoding="utf-8"))
    sources = recipe_sources.sources()
    found = []
    for file in sorted(model_files(), key=lambda file: file.stem):
        name = file.stem
        timm = names(file).get("timm", "").partition(".")[0]
        tag, side, accuracy = cost_table.PUBLISHED.get(name, ("", 0, None))
        if accuracy is None and name in sources and sources[name].accuracy:
            accuracy = sources[name].accuracy.source
        row = costs[name]
        _, height, width = row["images"]
        found.append(
            Model(
                name,
                file,
                accuracy,
                0 if side in (0, height) else side,
                (height, width),
                row["parameters"],
                row["macs"],
                _weights(f"{timm}.{tag}" if tag else name, file) if timm else "",
                timm,
            )
        )
    return found


def _weights(name: str, file: Path) -> str:
    try:
        return hub_weights(name, file)
    except InputError:
        return ""


@functools.cache
def pages() -> dict[str, str]:
    """Returns the page of each folder of configs/, by its name in docs/models."""
    return {
        folder: page.stem
        for page in sorted(MODELS.glob("*.md"))
        for found in MARKER.finditer(page.read_text(encoding="utf-8"))
        if found[1].startswith("family ")
        for folder in found[1].split()[1:]
    }


def filled(markdown: str, page: str, repository: bool) -> str:
    """Returns a page with a table for each comment.

    Args:
        page: its path in the repository.
        repository: whether links may lead to files that aren't pages.

    Raises:
        KeyError: a comment has a kind or a name that isn't known.
    """
    chinese = page.startswith("docs/zh/")
    up = "../" * page.count("/")

    def linked(model: Model) -> str:
        if repository:
            return f"[{model.name}]({up}{model.file.relative_to(ROOT)})"
        return f"[{model.name}]({pages()[model.file.parent.name]}.md)"

    def made(found: re.Match[str]) -> str:
        kind, *words = found[1].split()
        if kind == "zoo":
            rows = [(linked(model), *_cells(model), _name_in_timm(model)) for model in models()]
            return f'<div class="models zoo" markdown>\n\n{_table(_heads(HEADS, chinese), rows)}\n</div>'
        if kind == "family":
            chosen = [model for model in models() if model.file.parent.name in words]
            heads = [*HEADS][:-1]
            shown = [(linked(m) if repository else m.name, *_cells(m)) for m in chosen]
            table = _table(_heads(heads, chinese), shown)
            notes = _notes(chosen, chinese)
            timm = _of_timm(words, chinese)
            return f'{notes}\n\n<div class="models" markdown>\n\n{table}\n</div>\n\n{timm}'
        if kind == "timm_names":
            return _all_of_timm(chinese)
        evidence = {
            "parity": lambda: _table(*_read(words[0])),
            "costs": _costs,
            "recipe_sources": recipe_sources.tables,
        }[kind]()
        # Searches would find each key and model there first.
        return f"<div data-search-exclude markdown>\n\n{evidence}\n</div>"

    return MARKER.sub(made, markdown)


def _heads(heads: Iterable[str], chinese: bool) -> list[str]:
    return [HEADS[head] if chinese else head for head in heads]


def _cells(model: Model) -> tuple[str, ...]:
    height, width = model.images
    accuracy = "" if model.accuracy is None else f"{model.accuracy:.1f}"
    return (
        f"{accuracy} @{model.measured_at}" if model.measured_at else accuracy,
        str(height) if height == width else f"{height} x {width}",
        f"{model.parameters / 1e6:,.{1 if model.parameters > 1e6 else 3}f}",
        f"{model.macs / 1e9:,.{2 if model.macs > 1e7 else 5}f}",
        f"`{model.weights}`" if model.weights else "",
    )


def _name_in_timm(model: Model) -> str:
    return "=" if model.timm == model.name else model.timm


def _notes(chosen: Sequence[Model], chinese: bool) -> str:
    """Returns the notes above a family's table: whose accuracies it has, and what a suffix means."""
    notes = []
    language = "zh" if chinese else "en"
    if any(model.accuracy is not None for model in chosen):
        notes.append(ACCURACY_NOTE[language])
    if any(model.name.endswith("_21k_1k") for model in chosen):
        notes.append(SUFFIX_NOTE[language])
    return ("" if chinese else " ").join(notes)


def _of_timm(folders: Sequence[str], chinese: bool) -> str:
    """Returns how many of timm's names of a family are available, and the others."""
    available, missing = timm_names.of_page(folders, pages()[folders[0]])
    total = len(available) + len(missing)
    listed = (", ", "、")[chinese].join(f"`{name}`" for name in missing)
    if chinese:
        if not total:
            return "timm 1.0.31 中没有该系列。"
        said = f"timm 1.0.31 中该系列有 {total} 个模型名称，"
        if not missing:
            return f"{said}已全部支持。"
        return f"{said}已支持 {len(available)} 个。尚未支持：{listed}。"
    if not total:
        return "timm 1.0.31 doesn't have this family."
    said = f"timm 1.0.31 has {total} names of this family; {len(available)} are available."
    return f"{said} Not available: {listed}." if missing else said


def _all_of_timm(chinese: bool) -> str:
    available, total = timm_names.count()
    if chinese:
        said = f"timm 1.0.31 中这些系列共有 {total} 个模型名称，已支持 {available} 个。"
        return f"{said}各系列页面列出尚未支持的模型。"
    return (
        f"timm 1.0.31 has {total} names of these families, of which {available} are available. "
        "The page of a family lists the others."
    )


def _read(name: str) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and the rows of a file of tests/golden/parity."""
    lines = (PARITY / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    heads, *rows = [line.split("\t") for line in lines]
    return heads, rows


def _costs() -> str:
    rows = []
    for model in models():
        reference = cost_table.REFERENCE[model.name]["flops"]
        difference = 100 * cost_table.difference(model.macs, model.name)
        figures = (f"{model.macs / 1e9:,.3f}", f"{reference / 1e9:,.3f}", f"{difference:+.2f} %")
        rows.append((model.name, *figures))
    return _table(["model", "GMACs", "fvcore's", "difference"], rows)


def _table(heads: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
