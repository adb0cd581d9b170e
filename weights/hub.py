"""Finds weights: files, folders, runs and names on the Hugging Face Hub.

huggingface_hub is imported only for names on the Hub.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from errors import InputError, install, leads_out, printable, reading
from settings.merging import weights_of_model
from settings.names import WEIGHT_SUFFIXES, tags
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

# The prefixes that timm has for a name on the Hub.
HUB_PREFIXES = ("hf-hub:", "hf_hub:")
# The names of weights in our checkpoints, and in the folders of timm, transformers and OpenCLIP. The
# first one is preferred.
IN_FOLDER = (
    "model.safetensors",
    "pytorch_model.bin",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)
# Weights that come with the toolkit, by name. SHA256SUMS beside them is checked when they are read.
SHIPPED = {"digits": Path(__file__).parent / "shipped" / "digits.safetensors"}
# The ending of the index of weights in several files. It says which file holds which tensor.
INDEX = ".index.json"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # peft's
# The folder of checkpoints in a run's folder, and its links to two of them.
CHECKPOINTS = "checkpoints"
LAST = "last"
BEST = "best"
# If the Hub doesn't answer within _TIMEOUT seconds, it isn't asked again for _PAUSE seconds.
_TIMEOUT = 8
_PAUSE = 30
# By endpoint that didn't answer: the time until which it isn't asked, and the error.
_silent: dict[str, tuple[float, Exception]] = {}
# In bytes. The names and descriptions of the 21,841 classes of ImageNet-22k take 1.5 million.
LONGEST_CONFIG = 4 << 20


def _is_side(value: Any) -> bool:
    return is_whole(value, 1, 1 << 16)


def _is_mean(value: Any) -> bool:
    return is_real(value, -1e3, 1e3)


def _is_std(value: Any) -> bool:
    return is_real(value, 1e-6, 1e3)


_SIZE = Rule("three sizes (channels, height, width)", lambda value: is_list(value, _is_side, 3, 3))
SIDE = Rule("a size, or two", lambda value: _is_side(value) or is_list(value, _is_side, 2, 2))
_NAMES = Rule("a list of names", lambda value: is_list(value, lambda name: type(name) is str))
# The keys of timm's configuration that are used. null stands for a key that isn't given.
_MODEL_ARGS = {
    "img_size": optional(SIDE),
    "in_chans": optional(Rule("a number of channels", _is_side)),
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
    "input_size": optional(_SIZE),
    "test_input_size": optional(_SIZE),
    "min_input_size": optional(_SIZE),
    "fixed_input_size": optional(FLAG),
    "crop_pct": optional(Rule("a share", lambda value: is_real(value, 0, 100))),
    "crop_mode": optional(NAME),
    "interpolation": optional(NAME),
    "mean": optional(Rule("a number per channel", lambda value: is_list(value, _is_mean, 1, 64))),
    "std": optional(
        Rule("a number above 0 per channel", lambda value: is_list(value, _is_std, 1, 64))
    ),
}
# The keys that timm reads beside "pretrained_cfg".
_BESIDE = ("architecture", "model_args", "num_classes", "label_names")


def best_of_run(path: str | Path) -> str | Path:
    """Returns the best checkpoint of a run's folder, the file of weights that the toolkit ships under
    a name, timm's weights on the Hub for the name of a model, and any other path unchanged.

    Raises:
        InputError: the link ``best`` points outside the run's folder. No run makes such a link. Or a
            shipped name is also that of a file or folder here. Or timm has no weights of the model.
    """
    if str(path) in SHIPPED:
        return _shipped_file(str(path))
    if name := weights_of_model(path):
        return name
    best = Path(path) / CHECKPOINTS / BEST
    if leads_out(best):
        raise InputError(
            f"{best}: it is a link to a file outside the run's folder; name that checkpoint"
        )
    return best if os.path.isdir(best) else path


def _shipped_file(name: str) -> Path:
    """Returns the file of weights that the toolkit ships under a name.

    Raises:
        InputError: the current folder has an entry of this name, so either could be meant.
    """
    file = SHIPPED[name]
    for ending in ("", *WEIGHT_SUFFIXES):
        own = Path(f"{name}{ending}").absolute()
        if os.path.lexists(own):
            raise InputError(
                f"{name} is the name of weights that are included in the toolkit, but {own}"
                " exists as well;"
                f" pass {own}, or {file}"
            )
    return file


def find_weights(path: str | Path) -> Path:
    """Returns the file of weights that ``path`` stands for.

    Args:
        path: a file; its name without the ending; a checkpoint's folder; a folder in the layout of
            timm's models on the Hugging Face Hub; a run's folder, which stands for its best
            checkpoint; a name of ``SHIPPED``; or ``hf-hub:org/name[@revision]``, which is
            downloaded; or a model's name, for timm's weights there.

    Returns:
        the file; if the weights are in several files, their index.

    Raises:
        InputError: there is no such file.
    """
    names = [f"{name}{ending}" for name in IN_FOLDER for ending in ("", INDEX)]
    path = best_of_run(path)
    if _is_hub_name(path):
        file = _download(path, tuple(names))
        if file is None:
            raise InputError(f"{path}: the repository has neither {' nor '.join(IN_FOLDER)}")
        return file
    path = Path(path)
    if path.suffix == ".pdopt":
        raise InputError(
            f"{path} is the state of an optimizer; pass its weights,"
            f" {path.with_suffix('.pdparams')}"
        )
    candidates = [path / name for name in names]
    candidates.append(path)
    candidates += [path.parent / (path.name + ending) for ending in WEIGHT_SUFFIXES]
    for file in candidates:
        # os.path.isfile never raises, unlike Path.is_file.
        if os.path.isfile(file):
            return file
    raise InputError(_why_no_weights(path))


def _why_no_weights(path: Path) -> str:
    """Returns the error for a path that has no weights, with advice for what it is instead."""
    if os.path.isfile(path / ".metadata"):
        return (
            f"{path} was written by torch.distributed.checkpoint; its "
            "format_utils.dcp_to_torch_save converts it to a .pth"
        )
    if os.path.isfile(path / ADAPTER_CONFIG):
        advice = f"pass the weights that it was trained on, and -o MODEL.PRETRAINED_ADAPTER {path}"
        return f"{path} has an adapter, not a whole model; {advice}"
    last = path / CHECKPOINTS / LAST
    if os.path.isdir(last):
        return f"{path} is the folder of a run without an evaluation so far; its newest weights are {last}"
    if path.name == CHECKPOINTS and os.path.isdir(path / LAST):
        return (
            f"{path} contains the checkpoints of a run; pass the run's folder, {path.parent}, "
            "or one of them"
        )
    plain, _, tag = path.name.partition(".")
    if tag and str(path) == path.name and (known := tags(plain)):
        return f"timm has no weights {path}; of {plain} it has {', '.join(known)}"
    if os.path.isdir(path):
        reason = f"a folder without {' or '.join(IN_FOLDER)}"
    elif os.path.exists(path):
        reason = "it isn't a regular file"
    else:
        reason = "no such file or folder"
    return f"no weights at {path}: {reason}, nor a file of that name ending in {', '.join(WEIGHT_SUFFIXES)}"


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns timm's config.json beside the weights as one dictionary; {} if there is none.

    Settings of the weights (``input_size``, ``mean``, ``label_names`` ...) stand beside
    ``architecture`` and ``model_args``. timm 1.0.31 merges them in the same way from both forms of
    the file (``timm.models._hub``).

    Args:
        path: what ``find_weights`` takes. Only config.json is read.

    Raises:
        InputError: it can't be read, or a key that is used here has another type or range than in
            timm.
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
        # Other libraries have a config.json, too.
        if type(config) is not dict or "architecture" not in config:
            return {}
        # The old form of the file has its settings at the top level.
        if "pretrained_cfg" not in config and "labels" in config:
            config["label_names"] = config.pop("labels")
        # Beside "pretrained_cfg" timm reads few other settings.
        if "pretrained_cfg" in config:
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
    """Returns the path of the file ``name`` beside weights, whether it exists or not.

    None means that the weights' repository on the Hub has no such file.

    Args:
        path: what ``find_weights`` takes.
    """
    path = best_of_run(path)
    if _is_hub_name(path):
        return _download(path, (name,))
    path = Path(path)
    return (path if os.path.isdir(path) else path.parent) / name


def _with_model_args(config: dict[str, Any]) -> dict[str, Any]:
    """Replaces the sizes of the pretrained weights by those of the arguments that built the model."""
    arguments = config.get("model_args") or {}
    takes_any_size = arguments.get("dynamic_img_size") or arguments.get("use_naflex")
    if takes_any_size or arguments.get("strict_img_size") is False:
        config["fixed_input_size"] = False
    if arguments.get("in_chans") is not None:
        config.setdefault("input_size", [3, 224, 224])
        for key in ("input_size", "test_input_size", "min_input_size"):
            if config.get(key):
                config[key] = [arguments["in_chans"], *config[key][1:]]
    if arguments.get("img_size") is not None and config.get("fixed_input_size"):
        size = arguments["img_size"]
        height, width = (size, size) if isinstance(size, int) else size
        channels = (config.get("input_size") or [3])[0]
        config["input_size"] = [channels, height, width]
    return config


def _is_hub_name(path: str | Path) -> bool:
    """Whether ``path`` is ``hf-hub:org/name[@revision]``."""
    return str(path).startswith(HUB_PREFIXES)


def _download(name: str | Path, filenames: tuple[str, ...]) -> Path | None:
    """Returns the local copy of the first of ``filenames`` that the repository holds, or None.

    The Hub's cache and settings are used (HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN). If the
    Hub doesn't answer, only the cache is searched.

    Raises:
        InputError: huggingface_hub isn't installed, the name is wrong, or the files can't be
            downloaded and aren't in the cache.
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
    revision = revision or None
    absent = None
    for filename in filenames:
        try:
            url = hf_hub_url(repository, filename, revision=revision)
            hub_error = _hub_error(url)
            if isinstance(hub_error, HfHubHTTPError) and hub_error.response.status_code < 500:
                raise hub_error
            return Path(
                hf_hub_download(
                    repository,
                    filename,
                    revision=revision,
                    local_files_only=hub_error is not None,
                )
            )
        except LocalEntryNotFoundError as error:
            # The Hub can't be reached, and the cache has no such file. But the cache may know that
            # the repository has none.
            cached = try_to_load_from_cache(repository, filename, revision=revision)
            if cached is not _CACHED_NO_EXIST:
                absent = hub_error or error
        except EntryNotFoundError:
            continue
        except Exception as error:
            # No such repository, no access, or a wrong name. The class of the error depends on
            # huggingface_hub's version, which uses httpx or requests.
            raise InputError(
                f"{name}: {filename} can't be downloaded ({_first_line(error)})"
            ) from None
    if absent is not None:
        files = " or ".join(filename for filename in filenames if not filename.endswith(INDEX))
        raise InputError(
            f"{name}: {files} can't be downloaded ({_first_line(absent)} from {constants.ENDPOINT}), and isn't in"
            f" {constants.HF_HUB_CACHE}; set HF_ENDPOINT to a mirror, HF_HOME to a filled cache,"
            " or pass a file"
        )
    return None


def _hub_error(url: str) -> Exception | None:
    """Returns the error that requesting a file from the Hub ends in; None if the Hub has the file.

    huggingface_hub itself would try for half a minute, and again for each file. The request runs in
    a thread, because no timeout ends the look-up of a host's address.
    """
    from huggingface_hub import constants, get_hf_file_metadata

    until, last_error = _silent.get(constants.ENDPOINT, (0.0, None))
    if time.monotonic() < until:
        return last_error
    results: list[Exception | None] = []

    def request() -> None:
        try:
            get_hf_file_metadata(url, timeout=_TIMEOUT)
            results.append(None)
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    result = results[0] if results else TimeoutError(f"no answer within {_TIMEOUT} s")
    if result is not None and getattr(result, "response", None) is None:
        _silent[constants.ENDPOINT] = time.monotonic() + _PAUSE, result
    return result


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(lines[0] if lines else type(error).__name__)
