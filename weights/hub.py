"""Where weights are: files, folders, and names on the Hugging Face Hub, for which alone huggingface_hub is imported."""

import json
from pathlib import Path
from typing import Any

from errors import InputError

HUB_PREFIXES = ("hf-hub:", "hf_hub:")  # timm's ways of writing it
ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".pdparams", ".npz")
IN_FOLDER = ("model.safetensors", "pytorch_model.bin")  # of our checkpoints and of timm's folders, the better first
CONFIG = "config.json"


def find_weights(path: str | Path) -> Path:
    """Returns the file that ``path`` means: itself, itself with its ending, the model in a folder, or a download.

    Args:
        path: a file, its name without the ending, a checkpoint's folder, a folder in the layout of timm's models on the
            Hugging Face Hub, or ``hf-hub:org/name[@revision]``.

    Raises:
        InputError: there is none.
    """
    if _is_hub_name(path):
        found = _download(path, IN_FOLDER)
        if found is None:
            raise InputError(f"{path}: the repository holds neither {' nor '.join(IN_FOLDER)}")
        return found
    path = Path(path)
    if path.suffix == ".pdopt":
        raise InputError(f"{path}: an optimizer's state; its weights are in {path.with_suffix('.pdparams')}")
    candidates = [path / name for name in IN_FOLDER] + [path] + [path.parent / (path.name + end) for end in ENDINGS]
    found = next((file for file in candidates if file.is_file()), None)
    if found is None:
        where = f"a folder without {' or '.join(IN_FOLDER)}" if path.is_dir() else "no such file or folder"
        raise InputError(f"no weights at {path}: {where}, nor a file of that name with {', '.join(ENDINGS)}")
    return found


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns what ``config.json`` beside the weights says in timm's keys: one dictionary; {} if there is none.

    Settings of the weights (``input_size``, ``mean``, ``label_names`` ...) stand beside ``architecture`` and
    ``model_args``, as timm 1.0.31 merges them from either form of the file (``timm.models._hub``).

    Args:
        path: what ``find_weights`` takes; nothing but config.json is read.

    Raises:
        InputError: it can't be read.
    """
    if _is_hub_name(path):
        file = _download(path, (CONFIG,))
    else:
        file = (Path(path) if Path(path).is_dir() else Path(path).parent) / CONFIG
    if file is None or not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if "architecture" not in config:  # another library's
            return {}
        if "pretrained_cfg" not in config and "labels" in config:  # the old form
            config["label_names"] = config.pop("labels")
        return _with_model_args({**config.pop("pretrained_cfg", {}), **config})
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise InputError(f"{file}: not a configuration of timm's ({type(error).__name__}: {error})") from None


def _with_model_args(config: dict[str, Any]) -> dict[str, Any]:
    """Lets the arguments that built the model correct the sizes that the weights it started from had."""
    made = config.get("model_args") or {}
    if made.get("dynamic_img_size") or made.get("strict_img_size") is False or made.get("use_naflex"):
        config["fixed_input_size"] = False
    if made.get("in_chans") is not None:
        config.setdefault("input_size", [3, 224, 224])
        for key in ("input_size", "test_input_size", "min_input_size"):
            if config.get(key):
                config[key] = [made["in_chans"], *config[key][1:]]
    if made.get("img_size") is not None and config.get("fixed_input_size"):
        size = made["img_size"]
        config["input_size"] = [config["input_size"][0], *([size, size] if isinstance(size, int) else size)]
    return config


def _is_hub_name(path: str | Path) -> bool:
    """Whether ``path`` is ``hf-hub:org/name[@revision]``."""
    return str(path).startswith(HUB_PREFIXES)


def _download(name: str | Path, filenames: tuple[str, ...]) -> Path | None:
    """Returns the local copy of the first of ``filenames`` that the repository holds; None if it holds none.

    The Hub's cache is used, and its settings (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN).

    Raises:
        InputError: huggingface_hub isn't installed, the name is wrong, or the files can't be had.
    """
    try:
        from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise InputError(f"{name}: needs huggingface_hub; pip install huggingface_hub") from None
    repository, _, revision = str(name).partition(":")[2].partition("@")
    unreachable = None
    for filename in filenames:
        try:
            return Path(hf_hub_download(repository, filename, revision=revision or None))
        except LocalEntryNotFoundError as error:  # offline, and not in the cache, which may know that it doesn't exist
            if try_to_load_from_cache(repository, filename, revision=revision or None) is not _CACHED_NO_EXIST:
                unreachable = error
        except EntryNotFoundError:
            continue
        except Exception as error:  # of httpx or requests, by its version: no such repository, no access, a wrong name
            raise InputError(f"{name}: {filename} can't be had ({_first_line(error)})") from None
    if unreachable is not None:
        files = " or ".join(filenames)
        raise InputError(f"{name}: {files} can't be had ({_first_line(unreachable)})") from None
    return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
