"""Which GPUs there are, by a stand-in for NVML; CUDA_VISIBLE_DEVICES as Paddle's own functions take
it.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT
from support import launches
from support.launches import LAUNCHER_VARIABLES, TORCHRUN_VARIABLES, printed, start, statuses
from support.ranks import free_ports

from errors import InputError
from launch import devices, launchers, nodes

variables = launches.variables

SELECTED = "FLAGS_selected_gpus"
UUIDS = ["GPU-a0", "GPU-a1", "GPU-b2", "GPU-b3"]
NVML = """
#include <stdlib.h>
#include <string.h>
static char *all(void) { char *found = getenv("STANDIN_GPUS"); return found ? strdup(found) : ""; }
int nvmlInit_v2(void) { return getenv("STANDIN_GPUS") ? 0 : 18; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 0;
    for (char *part = strtok(all(), ","); part; part = strtok(0, ",")) ++*count;
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned place, void **device) { *device = (void *)(size_t)(place + 1); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    char *part = strtok(all(), ",");
    for (size_t place = (size_t)device - 1; place; --place) part = strtok(0, ",");
    strncpy(uuid, part, size);
    return strcmp(part, "lost") ? 0 : 15;
}
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    """The folder of a libnvidia-ml.so.1 that has the GPUs of STANDIN_GPUS; unset, no driver is
    loaded.
    """
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    library = str(folder / "libnvidia-ml.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(folder / "nvml.c")], check=True)
    return folder


@pytest.fixture
def machine(nvml, monkeypatch, tmp_path, variables):
    """Returns a function that gives this process a machine with GPUs, by NVML alone."""
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(devices, "_LIBRARIES", ("libnvidia-ml.no", str(nvml / "libnvidia-ml.so.1")))

    def machine(*uuids, visible=None):
        devices._uuids_by_nvml.cache_clear()
        os.putenv("STANDIN_GPUS", ",".join(uuids))  # for C: os.environ is a copy
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible

    yield machine
    os.unsetenv("STANDIN_GPUS")
    devices._uuids_by_nvml.cache_clear()


def paddle_of(tmp_path, monkeypatch, cuda="11.8"):
    """Lets this Paddle be a build for CUDA, as far as its files tell."""
    build = tmp_path / "paddle" / "version" / "__init__.py"
    build.parent.mkdir(parents=True)
    build.write_text(f"cuda_version     = '{cuda}'\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "paddle")])
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: spec)


def test_gpus_are_counted_where_proc_has_none(nvml, tmp_path):
    """On WSL2 and in some containers: the library is found as any program finds it."""
    count = "from launch import devices; print(devices.gpu_uuids(), devices.num_gpus_of_cuda())"
    for given, expected in (
        ({"STANDIN_GPUS": "GPU-a,lost"}, "['GPU-a', ''] 2"),
        ({"STANDIN_GPUS": "GPU-a,lost", "CUDA_VISIBLE_DEVICES": "1"}, "['GPU-a', ''] 1"),
        ({"STANDIN_GPUS": ""}, "[] 0"),
        ({}, "[] 0"),  # no driver is loaded, and /proc has none
    ):
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        kept |= {"LD_LIBRARY_PATH": str(nvml), "PYTHONPATH": str(ROOT)} | given
        told = subprocess.run(
            [sys.executable, "-c", count], env=kept, cwd=tmp_path, capture_output=True, text=True
        )
        assert (told.stdout.strip(), told.stderr) == (expected, "")


def test_a_library_that_lacks_nvmls_functions_counts_nothing(tmp_path, monkeypatch, machine):
    """A stub of the CUDA toolkit's, say."""
    machine("GPU-a")
    (tmp_path / "stub.c").write_text(
        "int nvmlInit_v2(void) { return 0; } int nvmlShutdown(void) { return 0; }"
    )
    subprocess.run(
        ["gcc", "-shared", "-o", str(tmp_path / "stub.so"), str(tmp_path / "stub.c")], check=True
    )
    monkeypatch.setattr(devices, "_LIBRARIES", (str(tmp_path / "stub.so"),))
    assert devices.gpu_uuids() == []


def test_without_nvml_proc_counts(monkeypatch, tmp_path, machine):
    monkeypatch.setattr(devices, "DRIVER", tmp_path)
    monkeypatch.setattr(devices, "_LIBRARIES", ())
    machine("GPU-z")
    for entry, told in (
        ("0000:65:00.0", "Model:\tA\nGPU UUID:\tGPU-a1\nBus:\t1"),
        ("0000:17:00.0", "GPU UUID:  GPU-a0"),
    ):
        (tmp_path / entry).mkdir()
        (tmp_path / entry / "information").write_text(told)
    (tmp_path / "0000:b3:00.0").mkdir()
    assert devices.gpu_uuids() == ["GPU-a0", "GPU-a1", ""]


def test_launched_ranks_take_nccl_where_nvml_alone_knows_the_gpus(
    machine,
    monkeypatch,
    tmp_path,
    variables,
):
    paddle_of(tmp_path, monkeypatch)
    machine("GPU-a", "GPU-b")
    variables(**TORCHRUN_VARIABLES, LOCAL_WORLD_SIZE=2)
    assert devices.num_gpus_of_paddle() == 2
    assert launchers.is_launched()
    assert os.environ[SELECTED] == "1"
    assert "PADDLE_DISTRI_BACKEND" not in os.environ
    assert devices.selected_gpu() == "GPU-b"


@pytest.mark.parametrize(
    ("visible", "written", "count"),
    [
        (None, None, 4),
        ("0, 1", "0,1", 2),
        (" 3 ,0,2 ", "3,0,2", 3),
        ("0,-1,1", "0", 1),
        ("-1", "", 0),
        ("", "", 0),
        (" ", "", 0),
        ("NoDevFiles", "", 0),
        (",", "", 0),
        ("0,", "0", 1),
        ("00,3", "0,3", 2),
        ("GPU-b2, GPU-a0", "GPU-b2,GPU-a0", 2),
        ("GPU-b3", "GPU-b3", 1),
        ("MIG-GPU-a0/1/0", "MIG-GPU-a0/1/0", 1),
        ("MIG-5c89852c-d268-5c1d", "MIG-5c89852c-d268-5c1d", 1),
    ],
)
def test_what_cuda_shows_is_written_as_paddle_reads_it(machine, visible, written, count):
    machine(*UUIDS, visible=visible)
    assert devices.num_gpus_of_cuda() == count
    devices.check_visible()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == written
    assert devices.num_gpus_of_cuda() == count


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("0,0", "'0,0', which names 0 twice; name each GPU once"),
        ("0,00", "'0,00', which names 0 twice; name each GPU once"),
        ("GPU-b2,2", "'GPU-b2,2', which names GPU-b2 twice; name each GPU once"),
        ("0,,1", "'0,,1', expected numbers from 0"),
        ("\u0663", "'\u0663', expected numbers from 0"),  # three, in Arabic: a number to int
        ("0" * 10_000, f"'{'0' * 100}...', expected numbers from 0"),
        ("-10", "'-10', expected numbers from 0"),
        ("0,4", "'0,4', but there is no GPU 4: this machine has 4 GPUs; nvidia-smi -L lists them"),
        # two begin so
        ("GPU-b", "'GPU-b', but there is no GPU GPU-b: this machine has 4 GPUs; nvidia-smi"),
        ("GPU-c", "'GPU-c', but there is no GPU GPU-c: this machine has 4 GPUs; nvidia-smi"),
        ("MIG-a,MIG-b", "'MIG-a,MIG-b', but CUDA gives a process only one MIG slice; name one"),
        (
            "all",
            "'all', expected numbers from 0 or names that nvidia-smi -L shows .*; unset it for all GPUs, or set",
        ),
        ("0;1", "'0;1', expected numbers from 0"),
        ("-2", "'-2', expected numbers from 0"),
    ],
)
def test_what_cuda_would_not_show_is_refused(machine, visible, message):
    machine(*UUIDS, visible=visible)
    with pytest.raises(InputError, match=f"^CUDA_VISIBLE_DEVICES is {message}"):
        launchers.is_launched()
    with pytest.raises(InputError, match=f"^CUDA_VISIBLE_DEVICES is {message}"):
        nodes.launcher_flags()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_no_gpu_by_minus_one_keeps_paddle_from_asking_cuda():
    """In every program, for errors.py comes before Paddle: CUDA would answer with an error."""
    for given, left in (
        ("-1", "''"),
        (" -1,0", "''"),
        ("0,-1", "'0,-1'"),
        ("-10", "'-10'"),
        ("", "''"),
    ):
        told = [
            sys.executable,
            "-c",
            "import os, errors; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))",
        ]
        kept = os.environ | {"CUDA_VISIBLE_DEVICES": given}
        assert (
            subprocess.run(told, cwd=ROOT, env=kept, capture_output=True, text=True).stdout.strip()
            == left
        )


def test_without_a_driver_names_are_taken_as_they_are(machine):
    """On a CPU, Paddle's launcher counts processes by them."""
    machine(visible="0, 7,GPU-c")
    devices.check_visible()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,7,GPU-c"
    assert (devices.num_gpus_of_cuda(), devices.selected_gpu()) == (0, "")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "visible", ["0, 1", "3 ,1", "GPU-b2, GPU-a0", "GPU-b2,1", " 0,1,2", "0,2,-1,3", None]
)
def test_paddles_own_environment_of_spawned_ranks(machine, monkeypatch, visible):
    """Each rank selects its place among the visible ones, and Paddle reads it back."""
    from paddle.base import core

    spawn = importlib.import_module("paddle.distributed.spawn")
    monkeypatch.setattr(core, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(core, "get_cuda_device_count", lambda: 2, raising=False)
    machine(*UUIDS, visible=visible)
    launchers.is_launched()
    spawn._options_valid_check({})
    ranks = spawn._get_subprocess_env_list(2, {"backend": "nccl"})
    assert [rank[SELECTED] for rank in ranks] == ["0", "1"]
    names = (visible or "0,1").replace(" ", "").split(",")
    for place, rank in enumerate(ranks):
        os.environ.update(rank)
        assert (
            importlib.import_module("paddle.distributed.parallel").ParallelEnv().device_id == place
        )
        assert devices.selected_gpu() == (
            UUIDS[int(names[place])] if names[place].isdecimal() else names[place]
        )


@pytest.mark.smoke
def test_paddles_launcher_numbers_its_ranks_as_the_visible_gpus(machine, variables):
    """What its rank finds: FLAGS_selected_gpus by place, CUDA_VISIBLE_DEVICES whole."""
    from paddle.distributed.launch.context.device import Device

    machine(*UUIDS, visible="GPU-b2,3")
    selected = Device.parse_device().get_selected_devices("3")
    assert selected == ["1"]
    variables(FLAGS_selected_gpus=selected[0])
    devices.check_visible()
    assert devices.selected_gpu() == "GPU-b3"
    for wrong in ("b", "\u00b2", "9" * 5000):
        variables(FLAGS_selected_gpus=wrong)
        with pytest.raises(
            InputError,
            match=f"FLAGS_selected_gpus is '{wrong[:100]}', expected a GPU's number among",
        ):
            devices.selected_gpu()


@pytest.mark.smoke
def test_a_build_for_gpus_that_sees_none_of_them_takes_no_cpu_instead(nvml, tmp_path):
    """As with a driver that is too old. Where Paddle is built for CPUs, nothing is missing."""
    import paddle

    def run(program, **given):
        command = (
            sys.executable,
            str(ROOT / program),
            "-cfg=vit_digits",
            "-output=run",
            "-eval",
            "-pretrained=no",
        )
        run = start(tmp_path, *command, LD_LIBRARY_PATH=nvml, STANDIN_GPUS="GPU-a,GPU-b", **given)
        return statuses(run), printed(run).splitlines()[-1]

    seen = "error: no weights at no"
    line = "error: 2 GPUs are visible, but Paddle finds none; run tools/doctor.py to find the cause; CUDA_VIS"
    for program in ("main_single_gpu.py", "main_multi_gpu.py"):
        status, said = run(program)
        assert status == [2]
        assert said.startswith(line if paddle.device.is_compiled_with_cuda() else seen)
    assert run("main_single_gpu.py", CUDA_VISIBLE_DEVICES="-1")[1].startswith(seen)


MEET = """
import json, sys
from errors import reporting
from launch import devices, launched, launchers, nodes
devices.importlib.util.find_spec = lambda name: type("spec", (), {"submodule_search_locations": [sys.argv[1]]})
with reporting():
    assert launchers.is_launched()
    meeting = launched.meet(20)
    meeting.ready()
    print(json.dumps(devices.selected_gpu()))
"""


@pytest.mark.parametrize(
    ("visible", "told"),
    [
        # One visible GPU each, as SLURM's share; the same name on both, of one GPU and of two
        # (their containers' own).
        ((("GPU-a", "0"), ("GPU-a", "0")), "GPU-a"),
        ((("GPU-a,GPU-b", "GPU-b"), ("GPU-a,GPU-b", "1")), "GPU-b"),
        ((("GPU-a", "0"), ("GPU-b", "0")), None),
        ((("GPU-a,GPU-b", "0"), ("GPU-a,GPU-b", "1")), None),
        ((("GPU-a,GPU-b", None), ("GPU-a,GPU-b", None)), None),
    ],
)
def test_two_ranks_on_one_gpu_are_refused_before_nccl(nvml, tmp_path, visible, told):
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "__init__.py").write_text("cuda_version = '11.8'\n")
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)
    }
    kept |= {
        "LD_LIBRARY_PATH": str(nvml),
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    ranks = []
    for rank, (there, named) in enumerate(visible):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "STANDIN_GPUS": there}
        own |= {"CUDA_VISIBLE_DEVICES": named} if named is not None else {}
        streams = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "cwd": tmp_path,
        }
        ranks.append(
            subprocess.Popen([sys.executable, "-c", MEET, str(tmp_path)], env=kept | own, **streams)
        )
    said = [rank.communicate(timeout=60) for rank in ranks]
    if told is None:
        assert [rank.returncode for rank in ranks] == [0, 0], said
        assert [json.loads(out) for out, _ in said] == ["GPU-a", "GPU-b"]
        return
    line = f"error: ranks 0, 1 on {os.uname().nodename} share one GPU, {told}, but NCCL needs one for each: start one"
    assert [rank.returncode for rank in ranks] == [2, 2], said
    for _, err in said:
        assert err.splitlines()[-1].startswith(line)
        assert "Traceback" not in err
