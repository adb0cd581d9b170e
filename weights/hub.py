"""Where weights are: files, folders, and names on the Hugging Face Hub, for which alone
huggingface_hub is imported.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from errors import InputError, install, leads_out, printable, reading
from settings.plain import (
    FLAG,
    NAME,
    Rule,
    check_form,
    is_list,
    is_name,
    is_real,
    is_whole,
    optional,
    parsed_json,
    whole_file,
)

HUB_PREFIXES = ("hf-hub:", "hf_hub:")  # timm's ways of writing it
ENDINGS = (".safetensors", ".pth", ".pt", ".bin", ".pdparams", ".npz")
# of our checkpoints and of timm's folders, the better first
IN_FOLDER = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # of weights in several files: which tensor is in which
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # of peft
CHECKPOINTS = "checkpoints"  # in a run's folder
# links in it, to two of the checkpoints
LAST = "last"
BEST = "best"
_ANSWER = 8  # seconds in which the Hub has to answer
_SILENT = 30  # seconds for which it isn't asked again if it didn't answer
# Endpoints that didn't answer: until when they aren't asked, and the error.
_silent: dict[str, tuple[float, Exception]] = {}
# bytes; one that names and describes the 21,841 classes of ImageNet-22k has 1.5 million
LONGEST_CONFIG = 4 << 20

_SIZE = Rule(
    "three sizes (channels, height, width)",
    lambda v: is_list(v, lambda n: is_whole(n, 1, 1 << 16), 3, 3),
)
SIDE = Rule(
    "a size, or two",
    lambda v: is_whole(v, 1, 1 << 16) or is_list(v, lambda n: is_whole(n, 1, 1 << 16), 2, 2),
)
_NAMES = Rule("a list of names", lambda value: is_list(value, lambda name: type(name) is str))
# What is used of timm's configuration; null stands for what isn't given.
_MODEL_ARGS = {
    "img_size": optional(SIDE),
    "in_chans": optional(Rule("a number of channels", lambda value: is_whole(value, 1, 1 << 16))),
    "dynamic_img_size": optional(FLAG),
    "strict_img_size": optional(FLAG),
    "use_naflex": optional(FLAG),
}
_SETTINGS = {
    "architecture": Rule("a model's name", is_name),
    "model_args": optional(Rule("a dictionary", lambda value: type(value) is dict)),
    "num_classes": optional(Rule("a number of classes", lambda value: is_whole(value, 0, 1 << 24))),
    "label_names": optional(_NAMES),
    "tag": optional(Rule("a text", lambda value: type(value) is str)),
    **dict.fromkeys(("input_size", "test_input_size", "min_input_size"), optional(_SIZE)),
    "fixed_input_size": optional(FLAG),
    "crop_pct": optional(Rule("a share", lambda value: is_real(value, 0, 100))),
    "crop_mode": optional(NAME),
    "interpolation": optional(NAME),
    "mean": optional(
        Rule("a number per channel", lambda v: is_list(v, lambda n: is_real(n, -1e3, 1e3), 1, 64))
    ),
    "std": optional(
        Rule(
            "a number above 0 per channel",
            lambda v: is_list(v, lambda n: is_real(n, 1e-6, 1e3), 1, 64),
        )
    ),
}
_BESIDE = ("architecture", "model_args", "num_classes", "label_names")


def best_of_run(path: str | Path) -> str | Path:
    """Returns the best checkpoint for a run's folder, and any other path as it is.

    Raises:
        InputError: ``best`` leads out of the run's folder, in which a run doesn't make it.
    """
    best = Path(path) / CHECKPOINTS / BEST
    if leads_out(best):
        raise InputError(
            f"{best}: it is a link out of the run's folder; name the checkpoint that it leads to"
        )
    return best if os.path.isdir(best) else path


def find_weights(path: str | Path) -> Path:
    """Returns the file that ``path`` means: itself, itself with its ending, the model in a folder,
    or a download.

    Args:
        path: a file, its name without the ending, a checkpoint's folder, a folder in the layout of
            timm's models on the Hugging Face Hub, or ``hf-hub:org/name[@revision]``. A run's folder
            stands for its best checkpoint. Of weights in several files it returns the index.

    Raises:
        InputError: there is none.
    """
    if _is_hub_name(path):
        found = _download(
            path, tuple(f"{name}{ending}" for name in IN_FOLDER for ending in ("", INDEX))
        )
        if found is None:
            raise InputError(f"{path}: the repository holds neither {' nor '.join(IN_FOLDER)}")
        return found
    path = Path(best_of_run(path))
    if path.suffix == ".pdopt":
        raise InputError(
            f"{path} is an optimizer's state; give its weights, {path.with_suffix('.pdparams')}"
        )
    inside = [f"{name}{ending}" for name in IN_FOLDER for ending in ("", INDEX)]
    candidates = (
        [path / name for name in inside]
        + [path]
        + [path.parent / (path.name + end) for end in ENDINGS]
    )
    # never raises, unlike Path's
    found = next((file for file in candidates if os.path.isfile(file)), None)
    if found is None and os.path.isfile(path / ".metadata"):
        writer = "torch.distributed.checkpoint"
        raise InputError(
            f"{path} was written by {writer}; its format_utils.dcp_to_torch_save makes a .pth of it"
        )
    if found is None and os.path.isfile(path / ADAPTER_CONFIG):
        advice = f"give the weights that it was trained on, and -o MODEL.PRETRAINED_ADAPTER {path}"
        raise InputError(f"{path} holds an adapter, no whole model; {advice}")
    if found is None:
        where = (
            f"a folder without {' or '.join(IN_FOLDER)}"
            if os.path.isdir(path)
            else "no such file or folder"
        )
        if os.path.exists(path) and not os.path.isdir(path):
            where = "it is no regular file"
        last = path / CHECKPOINTS / LAST
        if os.path.isdir(last):
            raise InputError(
                f"{path} is the folder of a run that wasn't evaluated yet; its newest weights are {last}"
            )
        if path.name == CHECKPOINTS and os.path.isdir(path / LAST):
            raise InputError(
                f"{path} holds the checkpoints of a run; give the run's folder, {path.parent}, or one of them"
            )
        raise InputError(
            f"no weights at {path}: {where}, nor a file of that name with {', '.join(ENDINGS)}"
        )
    return found


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns what ``config.json`` beside the weights says in timm's keys: one dictionary; {} if
    there is none.

    Settings of the weights (``input_size``, ``mean``, ``label_names`` ...) stand beside
    ``architecture`` and ``model_args``, as timm 1.0.31 merges them from either form of the file
    (``timm.models._hub``).

    Args:
        path: what ``find_weights`` takes; nothing but config.json is read.

    Raises:
        InputError: it can't be read, or a key that is used here has another type or range than
            timm's.
    """
    file = beside(path, CONFIG)
    if file is None or not os.path.lexists(file):
        return {}
    with reading(
        file,
        "a configuration of timm's",
        "; repair it, or remove it and set its keys of DATA by -o",
    ):
        config = parsed_json(whole_file(file, LONGEST_CONFIG))
        if type(config) is not dict or "architecture" not in config:  # another library's
            return {}
        if "pretrained_cfg" not in config and "labels" in config:  # the old form
            config["label_names"] = config.pop("labels")
        if "pretrained_cfg" in config:  # beside it, timm reads no other setting
            config = {
                key: value
                for key, value in config.items()
                if key not in _SETTINGS or key in _BESIDE
            }
        settings = config.pop("pretrained_cfg", {})
        check_form(settings, _SETTINGS, where="pretrained_cfg.")
        config = {**settings, **config}
        check_form(config, _SETTINGS)
        check_form(config.get("model_args") or {}, _MODEL_ARGS, where="model_args.")
        return _with_model_args(config)


def beside(path: str | Path, name: str) -> Path | None:
    """Returns where the file ``name`` beside weights is, or would be; None: their repository on the
    Hub hasn't got it.

    Args:
        path: what ``find_weights`` takes.
    """
    if _is_hub_name(path):
        return _download(path, (name,))
    path = Path(best_of_run(path))
    return (path if os.path.isdir(path) else path.parent) / name


def _with_model_args(config: dict[str, Any]) -> dict[str, Any]:
    """Lets the arguments that built the model correct the sizes that the weights it started from
    had.
    """
    made = config.get("model_args") or {}
    if (
        made.get("dynamic_img_size")
        or made.get("strict_img_size") is False
        or made.get("use_naflex")
    ):
        config["fixed_input_size"] = False
    if made.get("in_chans") is not None:
        config.setdefault("input_size", [3, 224, 224])
        for key in ("input_size", "test_input_size", "min_input_size"):
            if config.get(key):
                config[key] = [made["in_chans"], *config[key][1:]]
    if made.get("img_size") is not None and config.get("fixed_input_size"):
        size = made["img_size"]
        channels = (config.get("input_size") or [3])[0]
        config["input_size"] = [channels, *([size, size] if isinstance(size, int) else size)]
    return config


def _is_hub_name(path: str | Path) -> bool:
    """Whether ``path`` is ``hf-hub:org/name[@revision]``."""
    return str(path).startswith(HUB_PREFIXES)


def _download(name: str | Path, filenames: tuple[str, ...]) -> Path | None:
    """Returns the local copy of the first of ``filenames`` that the repository holds; None if it
    holds none.

    The Hub's cache is used, and its settings (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN). If
    the Hub doesn't answer, only the cache is searched.

    Raises:
        InputError: huggingface_hub isn't installed, the name is wrong, or the files can't be had.
    """
    try:
        from huggingface_hub import (
            _CACHED_NO_EXIST,
            constants,
            hf_hub_download,
            hf_hub_url,
            try_to_load_from_cache,
        )
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
        )
    except ImportError:
        raise InputError(f"{name}: needs huggingface_hub; {install('hub')}") from None
    repository, _, revision = str(name).partition(":")[2].partition("@")
    absent = None
    for filename in filenames:
        try:
            url = hf_hub_url(repository, filename, revision=revision or None)
            trouble = _trouble(url)
            if isinstance(trouble, HfHubHTTPError) and trouble.response.status_code < 500:
                raise trouble
            local = trouble is not None
            return Path(
                hf_hub_download(
                    repository, filename, revision=revision or None, local_files_only=local
                )
            )
        except LocalEntryNotFoundError as error:
            # offline, and not in the cache, which may know that it doesn't exist
            if (
                try_to_load_from_cache(repository, filename, revision=revision or None)
                is not _CACHED_NO_EXIST
            ):
                absent = trouble or error
        except EntryNotFoundError:
            continue
        except Exception as error:
            # of httpx or requests, by its version: no such repository, no access, a wrong name
            raise InputError(
                f"{name}: {filename} can't be downloaded ({_first_line(error)})"
            ) from None
    if absent is not None:
        files = " or ".join(filename for filename in filenames if not filename.endswith(INDEX))
        raise InputError(
            f"{name}: {files} can't be downloaded ({_first_line(absent)} from {constants.ENDPOINT}), and isn't in"
            f" {constants.HF_HUB_CACHE}; set HF_ENDPOINT to a mirror, HF_HOME to a filled cache, or give a file"
        )
    return None


def _trouble(url: str) -> Exception | None:
    """Returns the error with which the Hub refuses a file, or which reaching it ends in; None if it
    gives the file.

    The Hub's own library would try for half a minute, and again for each file. The Hub is asked in
    a thread, because no timeout ends the search for a host's address.
    """
    from huggingface_hub import constants, get_hf_file_metadata

    until, trouble = _silent.get(constants.ENDPOINT, (0.0, None))
    if time.monotonic() < until:
        return trouble
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(url, timeout=_ANSWER)
            answers.append(None)
        except Exception as error:
            answers.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER)
    answer = answers[0] if answers else TimeoutError(f"no answer within {_ANSWER} s")
    if answer is not None and getattr(answer, "response", None) is None:
        _silent[constants.ENDPOINT] = time.monotonic() + _SILENT, answer
    return answer


def _first_line(error: Exception) -> str:
    return printable(
        next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
    )
