"""The commands of the documents, and a folder with data in which tests run them."""

import functools
import pickle
import re
import shlex
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import warm
import yaml
from conftest import ROOT
from PIL import Image
from sklearn.datasets import load_sample_images

from settings.values import parse_value
from support.dataset_files import write_idx

# ------------------------------------------------------------ what the documents show

FILES = [
    "README*.md",
    "docs/**/*.md",
    "run_*.sh",
    "main_*.py",
    "examples/*.py",
    "tools/*.py",
    "configs/*/*.yaml",
]
_STARTS = (
    r"(?:[A-Z_]+=\S+ +)*(?:sh run_|bash |cd |sbatch |srun |torchrun |etcd --|pip |sha256sum |/usr/bin/time |\.venv/bin/"
    r"|reference/bin/|make [a-z]|python -m [a-z]|python \S+\.py)"
)
_MAKE = re.compile(r"make (install|train|test|test-\w+|ops|lint|docs|clean)\b")


class Shown(NamedTuple):
    """A command on one line without its comment, and the output that the document shows: of the
    last command of a block, what the ``text`` block right after it holds.
    """

    command: str
    prints: str = ""


def documents() -> Iterator[Path]:
    for pattern in FILES:
        yield from sorted(ROOT.glob(pattern))


def shown_in(file: Path) -> list[Shown]:
    """Returns the commands of a Markdown file (in blocks, after prompts, and as code within a
    line), or those of the comment at a file's head.
    """
    text = file.read_text()
    if file.suffix == ".md":
        return list(shown_in_markdown(text))
    lines = [line for line in _joined(_head(text, file.suffix)) if re.match(_STARTS, line)]
    return [Shown(_plain(line)) for line in lines if _is_command(_plain(line))]


def shown_in_markdown(text: str) -> Iterator[Shown]:
    """Yields the commands of a Markdown text."""
    for command, prints in _blocks_and_spans(text):
        if _is_command(_plain(command)):
            yield Shown(_plain(command), prints)


def _blocks_and_spans(text: str) -> Iterator[Shown]:
    blocks = r"^```(\w*)\n(.*?)^```(?:\n\n?```text\n(.*?)^```)?"
    for kind, block, prints in re.findall(blocks, text, re.M | re.S):
        if kind == "sh":
            *before, last = _joined(block)
            yield from map(Shown, before)
            yield Shown(last, prints)
        elif block.startswith("$ "):
            command, _, prints = block.removeprefix("$ ").partition("\n")
            yield Shown(command, prints)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    codes = (re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose))
    yield from (Shown(code) for code in codes if re.match(_STARTS, code))


def _head(text: str, suffix: str) -> str:
    """Returns a file's docstring or first comment, without the "Train:", "Evaluate:" and so on that
    stand before commands.
    """
    if suffix == ".py":
        found = re.match(r'"""(.*?)"""', text, re.S)
        return found[1] if found else ""
    lines = [line.removeprefix("#") for line in text.splitlines() if line.startswith("#")]
    return "\n".join(re.sub(r"^ (?:Train|Evaluate|Cost|Then): +", "    ", line) for line in lines)


def _joined(text: str) -> list[str]:
    lines = [line.strip() for line in re.sub(r"\\\n\s*", " ", text).splitlines()]
    return [line for line in lines if line and not line.startswith("# ")]


def _plain(command: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\s+(# |\().*", "", command)).strip()


def _is_command(line: str) -> bool:
    return bool(line) and not (line.startswith("make ") and not _MAKE.match(line))


def options_shown(file: Path) -> Iterator[list[str]]:
    """Yields the words of each ``KEY VALUE ...`` in a line of a Markdown file."""
    prose = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.M | re.S)
    for code in re.findall(r"`(?:-o )?([A-Z][A-Z_]+(?:\.\w+)*\s[^`]+)`", prose):
        yield shlex.split(code)


def is_printed(shown: str, printed: str) -> bool:
    """Returns whether the output has all lines of ``shown``, in their order. Numbers may differ;
    ``...`` is any text; runs of spaces are one.
    """
    parts = []
    for line in shown.splitlines():
        if line.strip() == "...":
            continue
        words = re.escape(re.sub(r"\s+", " ", line.strip())).replace(r"\ ", r"\s+")
        words = words.replace(r"\.\.\.", ".*")
        parts.append(r"[^\n]*" + re.sub(r"\d+(?:(?:\\\.|,)\d+)*(?:e-?\d+)?", r"[\\d.,e+-]+", words))
    return re.search(r"[^\n]*\n(?:.*\n)?".join(parts), printed + "\n", re.S) is not None


def files_shown(shown: str) -> list[str]:
    """Returns the paths of a tree that a document shows: ``RUN/``, below it ``├── log.txt  what``."""
    found = []
    folders: list[str] = []
    for line in shown.splitlines():
        match = re.match(r"((?:[│ ]   )*)(?:[├└]── )?(\S+)", line)
        if match is None or match[2] == "...":
            continue
        depth = len(match[1]) // 4 + ("── " in line)
        folders[depth:] = [match[2].rstrip("/")]
        found.append("/".join(folders))
    return found


def is_like(command: str, pattern: str) -> bool:
    """Returns whether the command matches the pattern, in which * is any text."""
    return _compiled(pattern).fullmatch(command) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))))


def snippets(name: str, kind: str) -> list[str]:
    """Returns the blocks of a document of this kind: "python", "yaml", or "" for output."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)
    return [block for found, block in blocks if found == kind]


# ------------------------------------------------------------------------ a desk

REGIONS = ["china_bottom", "china_top", "flower_bottom", "flower_top"]
# How many pictures of each are for validation.
VALIDATION = {
    "flowers": 10,
    "bands": 10,
    "attributes": 10,
    "imagenet": 11,
    "mnist": 12,
    "cifar10": 13,
    "photographs": 14,
}


def crops(count: int, seed: int) -> Iterator[tuple[int, Image.Image]]:
    """Yields (label, picture): crops of the halves of scikit-learn's two photographs, scaled to 36
    x 36 or 36 x 44.
    """
    rng = np.random.default_rng(seed)
    photographs = load_sample_images().images
    for index in range(count):
        label = index % 4
        photograph = photographs[label // 2]
        middle = len(photograph) // 2
        half = photograph[:middle] if label % 2 else photograph[middle:]
        top, left = (rng.integers(0, side - 128) for side in half.shape[:2])
        crop = Image.fromarray(half[top : top + 128, left : left + 128])
        yield label, crop.resize((36 + 8 * (index % 2), 36))


def write_data(folder: Path) -> None:
    """Writes the pictures as folders of classes, as tables of attributes, as ImageNet's lists, as
    MNIST and CIFAR.
    """
    for mode, count in (("train", 24), ("val", 10)):
        for index, (label, crop) in enumerate(crops(count, count)):
            suffix = "jpg" if index % 3 else "png"
            file = folder / "flowers" / mode / REGIONS[label] / f"{index}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            crop.save(file)
    for mode, count in (("train", 24), ("val", 10)):
        for index, (label, crop) in enumerate(crops(count, count)):
            colours = np.asarray(crop, np.float32) / 255
            five = np.concatenate([colours, colours[..., :2] ** 2], 2)
            (folder / "bands" / mode / REGIONS[label]).mkdir(parents=True, exist_ok=True)
            np.save(folder / "bands" / mode / REGIONS[label] / f"{index}.npy", five)
    for mode, count in (("train", 24), ("val", 10)):
        rows = ["image,china,flower,top"]
        for index, (label, crop) in enumerate(crops(count, count)):
            (folder / "attributes" / mode).mkdir(parents=True, exist_ok=True)
            crop.save(folder / "attributes" / mode / f"{index}.jpg")
            rows.append(f"{mode}/{index}.jpg,{1 - label // 2},{label // 2},{label % 2}")
        (folder / "attributes" / f"{mode}.csv").write_text("\n".join(rows))
    for mode, count in (("train", 24), ("val", 11)):
        lines = []
        for index, (label, crop) in enumerate(crops(count, count)):
            name = f"{mode}/n{label:08}/{index} of {count}.JPEG"
            (folder / "imagenet" / name).parent.mkdir(parents=True, exist_ok=True)
            crop.save(folder / "imagenet" / name)
            lines.append(f"{name} {333 * label}\n")
        (folder / "imagenet" / f"{mode}_list.txt").write_text("".join(lines))
    (folder / "mnist").mkdir()
    for mode, count in (("train", 24), ("t10k", 12)):
        labels, images = zip(*crops(count, count), strict=True)
        grey = np.stack([np.asarray(image.convert("L").resize((28, 28))) for image in images])
        write_idx(folder / "mnist" / f"{mode}-images-idx3-ubyte", grey, True)
        write_idx(folder / "mnist" / f"{mode}-labels-idx1-ubyte", np.uint8(labels), True)
    cifar = folder / "cifar10" / "cifar-10-batches-py"
    cifar.mkdir(parents=True)
    for name, count in [(f"data_batch_{part}", 5) for part in range(1, 6)] + [("test_batch", 13)]:
        labels, images = zip(*crops(count, sum(name.encode())), strict=True)
        rows = [np.asarray(image.resize((32, 32))).transpose(2, 0, 1).ravel() for image in images]
        (cifar / name).write_bytes(
            pickle.dumps({b"data": np.stack(rows), b"labels": list(labels)}, 2)
        )
    (cifar / "batches.meta").write_bytes(
        pickle.dumps({b"label_names": [b"class %d" % i for i in range(10)]}, 2)
    )


# Smaller versions of PaddleViT's files of these names.
PADDLEVIT = {
    "SwinTransformer/configs/swin_tiny_patch4_window7_224": "DATA:\n    IMAGE_SIZE: 28\nMODEL:\n    TYPE: swin\n"
    "    NAME: swin_mini\n    PATCH_SIZE: 4\n    EMBED_DIM: 8\n"
    "    NUM_HEADS: [1, 2, 2, 2]\n    STAGE_DEPTHS: [1, 1, 1, 1]\n",
    "DeiT/configs/deit_small_patch16_224": "DATA:\n    IMAGE_SIZE: 32\nMODEL:\n    TYPE: deit\n    NAME: deit_mini\n"
    "    EMBED_DIM: 32\n    DEPTH: 1\n    NUM_HEADS: 2\n    ATTENTION_DROPOUT: 0.1\nTRAIN:\n"
    "    DISTILLATION_TYPE: 'none'\n",
}


class Done(NamedTuple):
    """The result of a command.

    Attributes:
        left: the names of new files and folders.
    """

    printed: str
    errors: str
    left: set[str]


class Desk:
    """A folder that looks like the toolkit's own, with data. Commands run there as documents show
    them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        for entry in ROOT.iterdir():
            if entry.name in ("tools", "examples", "configs") or entry.suffix in (".py", ".sh"):
                (folder / entry.name).symlink_to(entry)
        write_data(folder / "data")
        shutil.copy(ROOT / "tests" / "golden" / "variable_frame_rate.mp4", folder / "clip.mp4")
        # A model of images and texts, and what its documents name.
        shutil.copytree(ROOT / "tests" / "golden" / "text" / "clip", folder / "CLIP")
        (folder / "classes.txt").write_text("rose\ntulip\n")
        (folder / "templates.txt").write_text("a photo of a {}\n{} here\n")
        for name, text in PADDLEVIT.items():
            file = folder / "PaddleViT" / "image_classification" / f"{name}.yaml"
            file.parent.mkdir(parents=True)
            file.write_text(text)

    def type(self, command: str, status: int = 0, timeout: float = 240) -> Done:
        """Runs a line by the shell and asserts its exit status."""
        env = warm.environment()
        if "paddle.distributed.launch" in command:
            # The launcher would take the empty value for one device.
            del env["CUDA_VISIBLE_DEVICES"]
        before = {entry.name for entry in self.folder.iterdir()}
        words = ["sh", "-c", command]
        done = subprocess.run(
            words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == status, f"{command}\n{done.stderr}"
        return Done(
            done.stdout, done.stderr, {entry.name for entry in self.folder.iterdir()} - before
        )

    def python(self, code: str) -> str:
        """Runs a document's Python block as a program beside the toolkit's. Returns its output."""
        (self.folder / "snippet.py").write_text(textwrap.dedent(code))
        path = shlex.quote(f"{ROOT}:{ROOT / 'tools' / 'package'}")
        done = self.type(f"PYTHONPATH={path} python snippet.py")
        assert done.errors == ""
        return done.printed


def asked_for(command: str, flags: dict[str, tuple]) -> dict[str, object]:
    """Returns {key: value} of a command's flags and of its -o options, the last of each."""
    words = shlex.split(command)
    found = {}
    index = 0
    while index < len(words):
        name, _, value = words[index].lstrip("-").partition("=")
        if words[index] == "-o":
            while index + 2 < len(words) and not words[index + 1].startswith("-"):
                found[words[index + 1]] = yaml.safe_load(words[index + 2])
                index += 2
        elif words[index].startswith("-") and name in flags:
            found[flags[name][0]] = parse_value(value) if value else True
        index += 1
    return found
