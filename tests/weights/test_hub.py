"""Where weights are: files, folders, the Hub's cache, and timm's configuration beside them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import warm
from conftest import ROOT
from safetensors.numpy import save_file
from support.weight_files import (
    TWO,
    made,
    program,
    write_pickle,
)

from errors import InputError
from weights.adapters import find_adapter
from weights.formats import find_weights, read_config, read_weights
from weights.hub import beside

SETTINGS = json.loads((ROOT / "tests" / "golden" / "config.json").read_text())


def test_the_file_that_a_path_means(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        InputError, match=r"a folder without model\.safetensors or pytorch_model\.bin"
    ):
        find_weights(tmp_path / "folder")
    with pytest.raises(
        InputError,
        match=r"no weights at .*/a: no such file or folder, nor .* \.safetensors, \.pth,",
    ):
        find_weights(tmp_path / "a")
    for name in (".npz", ".pdparams", ".bin", ".pt", ".pth", ".safetensors"):
        (tmp_path / f"a{name}").touch()
        assert (
            find_weights(tmp_path / "a") == find_weights(f"{tmp_path}/a") == tmp_path / f"a{name}"
        )
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / "folder" / name).touch()
        assert find_weights(tmp_path / "folder") == tmp_path / "folder" / name
    for path in ("", ".", "/"):
        with pytest.raises(InputError, match="no weights at"):
            find_weights(path)


@pytest.mark.parametrize("form", SETTINGS)
def test_configurations_are_merged_as_timm_does(tmp_path, form):
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS[form]["file"]))
    made(tmp_path / "model.safetensors", {"a": np.ones(2, np.float32)})
    for config in (
        read_config(tmp_path),
        read_config(tmp_path / "model"),
        read_weights(tmp_path).config,
    ):
        assert {**config, "model_args": config.get("model_args", {})} == {
            **SETTINGS[form]["settings"],
            **({"num_features": 8} if form == "flat" else {}),  # which timm keeps apart
        }


def test_beside_pretrained_cfg_no_other_setting_counts(tmp_path):
    config = {
        "architecture": "a",
        "mean": "no list",
        "crop_pct": 0.5,
        "pretrained_cfg": {"mean": [0.5]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == {"architecture": "a", "mean": [0.5]}


def test_other_configurations(tmp_path):
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"architectures": ["ViTForImageClassification"]}')
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_text("[1]")
    assert read_config(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "can't be read as a configuration of timm's (JSONDecodeError: Expecting value"),
        ("[" * 100_000, "can't be read as a configuration of timm's (RecursionError"),
        ('{"architecture": "a", "x": \xff', "UnicodeDecodeError"),
        ('{"architecture": "a", "architecture": "b"}', "it has the same name twice"),
        ('{"architecture": "a", "mean": [NaN, 0, 0]}', "it contains NaN, which isn't a number"),
        (
            '{"architecture": "a", "crop_pct": 1e999}',
            "it contains the number 1e999, which is too large",
        ),
        ('{"architecture": "a", "x": ' + "9" * 5000 + "}", "it contains a number of 5000 digits"),
        (
            "{}," * 200_000,
            "its content would take more than 64 MiB and more than three times its 600000 bytes",
        ),
        (" " * (4 << 20) + "{}", "it has more than 4194304 bytes"),
    ],
)
def test_a_config_that_is_no_json_of_timms_is_one_line(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError) as caught:
        read_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
    assert message in str(caught.value)
    assert str(caught.value).endswith("; repair it, or remove it and set its keys of DATA by -o")


BAD = {
    "architecture": [3, None, [], "", "a\nb", "x" * 1000],
    "pretrained_cfg": [3, None, [], "a"],
    "model_args": [
        3,
        [],
        "a",
        {"img_size": "a"},
        {"img_size": [1]},
        {"in_chans": -1},
        {"use_naflex": 1},
    ],
    "num_classes": [-1, "a", 1.5, True, 10**30],
    "label_names": ["a", {}, [1], [["a"]]],
    "input_size": [3, [3], [3, 224], [3, 224, -1], [3, 224, 10**9], ["a"] * 3, {}],
    "test_input_size": [224],
    "fixed_input_size": [1, "a"],
    "crop_pct": ["wide", [], {}, -1, 10**30, True],
    "crop_mode": [1, []],
    "interpolation": [1, {}, "a\x1b[2J"],
    "mean": ["abc", 0.5, [], {}, [[1]], [None], ["a"], [1e300], [1e-3] * 65],
    "std": [[0], [-1.0], [1e-300, 1, 1], "abc"],
}


@pytest.mark.parametrize("key", BAD)
def test_a_key_of_another_type_or_range_is_named(tmp_path, key):
    for value in BAD[key]:
        nested = key != "pretrained_cfg" and type(value) is not dict
        for config in ({key: value}, {"pretrained_cfg": {key: value}})[: 1 + nested]:
            (tmp_path / "config.json").write_text(json.dumps({"architecture": "a"} | config))
            with pytest.raises(InputError) as caught:
                read_config(tmp_path)
            assert str(caught.value).isprintable()
            found = str(caught.value).removeprefix(f"{tmp_path}/config.json: ")
            assert found.startswith((f"its {key}", f"its pretrained_cfg.{key}")), found
            assert (
                ", expected a" in found or ", expected three" in found or ", expected true" in found
            ), found


def test_a_config_of_null_tells_nothing(tmp_path):
    config = dict.fromkeys(BAD) | {"architecture": "a", "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == dict.fromkeys(("model_args", "num_classes", "label_names")) | {
        "architecture": "a"
    }


@pytest.mark.parametrize(
    "kind", ["a pipe", "a folder", "a device", "a link to itself", "unreadable"]
)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, kind):
    for name in ("weights.pth", "config.json"):
        file = tmp_path / name
        if kind == "a pipe":
            os.mkfifo(file)
        elif kind == "a folder":
            file.mkdir()
        elif kind == "a device":
            file.symlink_to("/dev/zero")
        elif kind == "a link to itself":
            file.symlink_to(file)
        else:
            file.write_bytes(b"")
    with pytest.raises(InputError, match="no weights at|it is empty"):
        read_weights(tmp_path / "weights.pth")
    with pytest.raises(
        InputError, match="it isn't a regular file|can't be read as a configuration"
    ):
        read_config(tmp_path)


def test_names_that_no_file_can_have(tmp_path):
    for name in ("a\0b", "x" * 300, "x/" * 3000, "\ud800", "a\nb\x1b[2J"):
        with pytest.raises(InputError, match=r"^no weights at ") as caught:
            read_weights(f"{tmp_path}/{name}")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) <= 500


ASK = """
import json, sys
import errors
from weights.formats import read_weights
for name in sys.argv[1:]:
    try:
        read = read_weights(name)
        print(json.dumps([str(read.path), read.arrays["a"].tolist(), read.config]))
    except errors.InputError as error:
        print(json.dumps(str(error)))
"""


def cached(home, name, files, absent=(), revision="main"):
    """Lays out a repository as the Hub's cache does; ``absent`` are files that it is known not to
    have.
    """
    commit = name[0] * 40
    repository = home / "hub" / f"models--org--{name}"
    folders = [
        repository / "refs",
        repository / "snapshots" / commit,
        repository / ".no_exist" / commit,
    ]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / revision).write_text(commit)
    for file in files:
        if file == "config.json":
            config = {"architecture": "vit", "pretrained_cfg": {"mean": [0.5] * 3}}
            (folders[1] / file).write_text(json.dumps(config))
        elif file == "model.safetensors":
            made(folders[1] / file, {"a": np.float32([1])})
        else:
            write_pickle(folders[1] / file, program({"a": TWO}))
    for file in absent:
        (folders[2] / file).touch()
    return folders[1]


def test_weights_of_the_hub_from_its_cache(tmp_path):
    both = cached(tmp_path, "both", ["model.safetensors", "pytorch_model.bin", "config.json"])
    older = cached(tmp_path, "older", ["pytorch_model.bin", "config.json"], revision="v2")
    plain = cached(tmp_path, "plain", ["model.safetensors"], absent=["config.json"])
    cached(tmp_path, "half", ["model.safetensors"])
    neither = [
        "model.safetensors",
        "pytorch_model.bin",
        "open_clip_model.safetensors",
        "open_clip_pytorch_model.bin",
    ]
    cached(tmp_path, "none", [], absent=[*neither, *(f"{name}.index.json" for name in neither)])
    config = {"architecture": "vit", "mean": [0.5] * 3}
    unknown = "can't be downloaded ("
    expected = {
        "hf-hub:org/both": [str(both / "model.safetensors"), [1], config],
        "hf_hub:org/both@main": [str(both / "model.safetensors"), [1], config],
        "hf-hub:org/older@v2": [str(older / "pytorch_model.bin"), [2], config],
        "hf-hub:org/plain": [str(plain / "model.safetensors"), [1], {}],
        "hf-hub:org/none": f"hf-hub:org/none: the repository has neither {' nor '.join(neither)}",
        "hf-hub:org/older": f"hf-hub:org/older: {' or '.join(neither)} {unknown}",
        "hf-hub:org/half": f"hf-hub:org/half: config.json {unknown}",
        "hf-hub:a/b/c": f"hf-hub:a/b/c: model.safetensors {unknown}",
    }
    path = os.pathsep.join(sys.path)
    environment = {
        **warm.environment(),
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": path,
    }
    command = [warm.python(), "-c", ASK, *expected]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    for (name, wanted), line in zip(expected.items(), done.stdout.splitlines(), strict=True):
        answer = json.loads(line)
        assert (answer[: len(wanted)] if isinstance(wanted, str) else answer) == wanted, name


def test_a_runs_folder_stands_for_its_best(tmp_path):
    """For whatever reads weights: of models, teachers, adapters, and what stands beside them."""
    saved = tmp_path / "run" / "checkpoints"
    for name in ("epoch_0001", "epoch_0002"):
        (saved / name).mkdir(parents=True)
        save_file({"a": np.float32([1])}, saved / name / "model.safetensors")
    (saved / "last").symlink_to("epoch_0002")
    message = f"^{tmp_path}/run is the folder of a run without an evaluation so far; its newest weights are {saved}/last$"
    with pytest.raises(InputError, match=message):
        find_weights(tmp_path / "run")
    with pytest.raises(
        InputError,
        match=rf"contains the checkpoints of a run; pass the run's folder, {tmp_path}/run, or",
    ):
        find_weights(saved)
    (saved / "best").symlink_to("epoch_0001")
    for path in (tmp_path / "run", f"{tmp_path}/run/"):
        assert find_weights(path) == find_adapter(path) == saved / "best" / "model.safetensors"
        assert beside(path, "config.json") == saved / "best" / "config.json"
    save_file({"a": np.float32([1])}, saved / "epoch_0001" / "adapter.safetensors")
    assert find_adapter(tmp_path / "run") == saved / "best" / "adapter.safetensors"


def test_the_hub_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it weren't installed
    for ask in (find_weights, read_config, read_weights):
        with pytest.raises(
            InputError, match=r"^hf-hub:a/b: needs huggingface_hub; pip install huggingface_hub=="
        ):
            ask("hf-hub:a/b")
