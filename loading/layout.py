"""The entries of a dataset's folder: which of them aren't data, and descriptions for messages."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from errors import InputError, printable
from loading.class_names import class_name
from settings.registry import datasets

IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".webp",
    ".ppm",
    ".pgm",
    ".tif",
    ".tiff",
    ".gif",
    ".npy",
)
_ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
# What operating systems leave in folders, besides names that begin with a dot. In lower case.
_LEFTOVERS = {
    *("__macosx", "icon\r", "network trash folder", "temporary items"),  # macOS
    *("thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini"),  # Windows
    *("$recycle.bin", "system volume information", "found.000", "found.001"),
    *("@eadir", "@synoresource", "#recycle", "#snapshot", "@tmp"),  # Synology
    *("@recycle", "@recently-snapshot", "@__thumb", "~snapshot"),  # QNAP, NetApp
    *("lost+found", "__pycache__"),
}
# Names of folders that are splits of a dataset, and no classes.
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "eval", "dev"}
# What people call the folders of a dataset's parts. The first name is the usual one.
PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation")}
# Entries of a folder that a description names.
_NAMED = 5


def is_leftover(name: str) -> bool:
    """Returns whether an entry of a folder or an archive isn't data.

    Such an entry is hidden, or an operating system left it there.
    """
    if name.startswith("."):
        return name not in (".", "..")
    return name.lower() in _LEFTOVERS


def is_run(folder: str | Path) -> bool:
    """Returns whether a folder is that of a run, whose pictures aren't data."""
    names = ("config.yaml", "metrics.jsonl")
    return all(os.path.isfile(os.path.join(folder, name)) for name in names)


def skipped_text(skipped: Sequence[str]) -> str:
    """Returns a line about the entries of a dataset's folder that were left out."""
    what = "entry that isn't data" if len(skipped) == 1 else "entries that aren't data"
    count = f"{len(skipped):,}"
    kinds = "hidden or system files, files of runs, links"
    return f"skipped {count} {what} ({kinds}), such as {printable(skipped[0])}"


def is_folder(entry: "os.DirEntry[str]") -> bool:
    """Returns whether an entry is a folder, or a link to one. A link to itself isn't."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def describe_folder(folder: Path) -> str:
    """Returns the contents of a folder in words, such as "the folders cats, dogs and 12 images".

    Entries that aren't data aren't counted. For an empty or a missing folder it is "nothing".
    """
    folders: list[str] = []
    images: list[str] = []
    archives: list[str] = []
    others: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name.lower()
                if is_leftover(entry.name):
                    continue
                if is_folder(entry):
                    folders.append(entry.name)
                elif name.endswith(IMAGE_SUFFIXES):
                    images.append(entry.name)
                elif name.endswith(_ARCHIVES):
                    archives.append(entry.name)
                else:
                    others.append(entry.name)
    except OSError:
        pass
    descriptions = []
    if folders:
        descriptions.append(_listed("folder", folders))
    if images:
        descriptions.append("1 image" if len(images) == 1 else f"{len(images):,} images")
    if archives:
        descriptions.append(_listed("archive", archives))
    if others:
        descriptions.append(_listed("file", others))
    return " and ".join(descriptions) or "nothing"


def _listed(kind: str, names: Sequence[str]) -> str:
    """Returns the names of entries in words, such as "the folders cats, dogs".

    Of many entries, the first ones and their number are given.
    """
    shown = ", ".join(printable(name, 60) for name in sorted(names)[:_NAMED])
    more = f", ... ({len(names):,})" if len(names) > _NAMED else ""
    plural = "" if len(names) == 1 else "s"
    return f"the {kind}{plural} {shown}{more}"


def check_data_path(
    path: str, default: str, unpacked: bool, suffixes: tuple[str, ...] = ()
) -> None:
    """Raises InputError where -data_path isn't a folder with data. The message says what it is.

    Args:
        default: the default of DATA.DATA_PATH.
        unpacked: whether the dataset is read from files, and not from archives.
        suffixes: of files that it may be, besides a folder.
    """
    given = f"-data_path is {printable(path)}"
    if not os.path.exists(path):
        if os.path.lexists(path):
            raise InputError(
                f"{given}, a link to {printable(os.readlink(path))}, which doesn't exist"
            )
        if path == default:
            raise InputError(
                f"-data_path is missing: pass the dataset's folder (the default, {default},"
                " doesn't exist)"
            )
        raise InputError(f"{given}, but there is no such folder{_nearest_folder(path)}")
    if os.path.isfile(path) and suffixes and path.lower().endswith(suffixes):
        return
    if not os.path.isdir(path):
        if path.lower().endswith(_ARCHIVES):
            raise InputError(f"{given}, an archive; unpack it, and give the folder")
        raise InputError(f"{given}, which is a file; give the folder that holds the dataset")
    try:
        names = [name for name in os.listdir(path) if not is_leftover(name)]
    except OSError as error:
        raise InputError(
            f"{given}, which can't be listed ({error.strerror}); give this user access to it"
        ) from None
    if not names:
        raise InputError(f"{given}, an empty folder; give the folder that holds the dataset")
    if unpacked and all(name.lower().endswith(_ARCHIVES) for name in names):
        raise InputError(
            f"{given}, which only contains {describe_folder(Path(path))}; unpack the dataset"
        )


def _nearest_folder(path: str) -> str:
    """Returns a hint about a missing path, which begins with "; "."""
    if path.startswith("~"):
        return "; the shell doesn't expand ~ there: write $HOME instead"
    above = Path(os.path.abspath(path)).parent
    while not above.is_dir():
        above = above.parent
    return f"; {printable(str(above))} holds {describe_folder(above)}"


def part_folder(root: Path, mode: str) -> str:
    """Returns the name of the folder of a part, "train" or "val"; "" if there is no such folder.

    Names such as "valid" count only beside a folder of the other part, because they may be classes.
    """
    present = {
        part: [name for name in names if (root / name).is_dir()] for part, names in PARTS.items()
    }
    has_both = all(present.values())
    return next((name for name in present[mode] if has_both or name == mode), "")


def validation_files(dataset: str, path: str) -> list[Path]:
    """Returns the files, or the folder, of a dataset's own validation images; [] if it has none.

    Args:
        dataset: the name of its format.
        path: its folder.
    """
    root = Path(path)
    patterns = datasets.components[dataset].given.get("val", "").split()
    files = [file for pattern in patterns for file in root.glob(pattern)]
    # A folder "valid" may be a class.
    part = part_folder(root, "val")
    return sorted(
        file
        for file in files
        if file.parent != root or file.name not in PARTS["val"] or file.name == part
    )


def named_as_splits(names: Sequence[str]) -> bool:
    """Returns whether all folders have names of splits, such as "training", and not of classes."""
    return bool(names) and all(name.lower() in _SPLITS for name in names)


def one_class(
    present: np.ndarray, classes: Sequence[str], root: str | Path, paths: Sequence[str]
) -> str:
    """Returns the problem of a dataset whose images all have one class; "" if there are several.

    Args:
        present: the labels that any image has, each once.
        paths: the images' paths, relative to ``root``; empty: they aren't files.
    """
    if len(present) != 1:
        return ""
    name = class_name(classes, int(present[0]))
    below = _below_class(Path(root), paths, name) if len(paths) else ""
    return f"all images have one class, {name}; expected two or more{below}"


def nested_classes(labels: np.ndarray, classes: Sequence[str], paths: Sequence[str]) -> str:
    """Returns a remark about a class whose folders of images may be several classes, or "".

    Such a class has no image in its own folder, but several folders of images, while other classes
    have their images in their own folders. The images of a folder come before those below it, so
    the first and the last image of each class are enough.

    Args:
        labels: of the images, [n].
        paths: the images' paths, relative to the data's folder.
    """
    # Classes without images of their own, with two of their folders.
    nested: list[tuple[str, str, str]] = []
    # Whether any class has images of its own.
    flat = False
    present, first, counts = np.unique(labels, return_index=True, return_counts=True)
    for label, start, count in zip(present.tolist(), first.tolist(), counts.tolist(), strict=True):
        name = class_name(classes, label)
        first_folders = _folders_below(str(paths[start]), name)
        last_folders = _folders_below(str(paths[start + count - 1]), name)
        if first_folders is None or last_folders is None:
            continue
        if not first_folders or not last_folders:
            flat = True
        elif first_folders[0] != last_folders[0]:
            nested.append((name, first_folders[0], last_folders[0]))
    if not (flat and nested):
        return ""
    name, one, other = nested[0]
    several = f" ({len(nested):,} such classes)" if len(nested) > 1 else ""
    return (
        f"the class {name} has no images itself, but folders of images, such as {one} and"
        f" {other}{several};"
        " if these are classes, move them next to it"
    )


def _folders_below(path: str, name: str) -> list[str] | None:
    """Returns the folders of a path below its class's folder; None if it isn't in that folder."""
    *folders, _ = path.split("/")
    return folders[folders.index(name) + 1 :] if name in folders else None


def _below_class(root: Path, paths: Sequence[str], name: str) -> str:
    """Returns what the folder of a dataset's only class holds, and what to do about it.

    It is "" if the class has no folder, as in a list.

    Args:
        paths: the images' paths, relative to ``root``.
        name: the class.
    """
    names = paths[0].split("/")
    if name not in names[:-1]:
        return ""
    depth = names.index(name) + 1
    folder = root.joinpath(*names[:depth])
    below = sorted({path.split("/")[depth] for path in paths if path.count("/") > depth})
    if not below:
        return f"; {folder} holds {describe_folder(folder)}"
    advice = f"pass -data_path={folder}" if depth == 1 else f"move them to {folder.parent}"
    return f"; one level below, {folder} has {_listed('folder', below)}: {advice}"
