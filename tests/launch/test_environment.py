"""Each launcher's environment, told as Paddle's."""

import importlib.util
import os
import re
import socket
from types import SimpleNamespace

import pytest
from support import launches
from support.launches import LAUNCHER_VARIABLES, TORCHRUN_VARIABLES
from support.ranks import free_ports

from errors import InputError
from launch import devices, launched, launchers, nodes, rendezvous, spawned
from launch.launchers import expand_counts, expand_hosts, is_launched

variables = launches.variables


def told():
    """What ``is_launched`` set."""
    found = {
        name.removeprefix("PADDLE_"): value
        for name, value in os.environ.items()
        if name.startswith("PADDLE_")
    }
    return {name: value for name, value in found.items() if name != "VIT_SECRET_FILE"}


SLURM = {
    "SLURM_JOB_ID": 1234567,
    "SLURM_STEP_ID": 0,
    "SLURM_PROCID": 5,
    "SLURM_NTASKS": 7,
    "SLURM_LOCALID": 1,
}
SLURM |= {"SLURM_NODELIST": "node[09-10]", "SLURM_TASKS_PER_NODE": "4,3"}


@pytest.mark.smoke
def test_torchruns_environment_as_paddles(variables):
    assert not is_launched()
    variables(**TORCHRUN_VARIABLES, LOCAL_WORLD_SIZE=2)
    assert is_launched()
    assert told() == {
        "TRAINER_ID": "3",
        "TRAINERS_NUM": "4",
        "MASTER": "10.0.0.1:29500",
        "LOCAL_RANK": "1",
        "RANK_IN_NODE": "1",
        "LOCAL_SIZE": "2",
        "NNODES": "2",
        "CURRENT_ENDPOINT": "node1:6173",
        "TRAINER_ENDPOINTS": "10.0.0.1:6170,10.0.0.1:6171,node1:6172,node1:6173",
        "DISTRI_BACKEND": "gloo",
    }
    variables(RANK="0")  # Paddle's variables, there by now, come first
    assert is_launched()
    assert told()["TRAINER_ID"] == "3"


def test_torchrun_itself_listens_at_its_port(variables):
    variables(**TORCHRUN_VARIABLES, TORCHELASTIC_USE_AGENT_STORE="True")
    assert is_launched()
    assert told()["MASTER"] == "10.0.0.1:29501"


def test_torchrun_without_a_local_size_takes_the_most_there_can_be(variables):
    variables(**TORCHRUN_VARIABLES)
    assert is_launched()
    assert (told()["LOCAL_SIZE"], told()["NNODES"]) == ("2", "2")


@pytest.mark.smoke
def test_slurms_environment_as_paddles(variables):
    variables(**SLURM)
    assert is_launched()
    hosts = ["node09"] * 4 + ["node10"] * 3
    assert told() == {
        "TRAINER_ID": "5",
        "TRAINERS_NUM": "7",
        "MASTER": "node09:24567",
        "LOCAL_RANK": "1",
        "RANK_IN_NODE": "1",
        "LOCAL_SIZE": "3",
        "NNODES": "2",
        "CURRENT_ENDPOINT": "node10:6175",
        "TRAINER_ENDPOINTS": ",".join(f"{host}:{6170 + rank}" for rank, host in enumerate(hosts)),
        "DISTRI_BACKEND": "gloo",
    }


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"MASTER_PORT": 29500}, {"MASTER": "node09:29500"}),
        ({"MASTER_PORT": 29500, "MASTER_ADDR": "ib-node09"}, {"MASTER": "ib-node09:29500"}),
        ({"SLURM_JOB_ID": 40000}, {"MASTER": "node09:20000"}),
        ({"SLURM_JOB_ID": 49999}, {"MASTER": "node09:29999"}),
        # --distribution=cyclic
        ({"SLURM_NODEID": 0, "SLURM_LOCALID": 2}, {"LOCAL_RANK": "2", "LOCAL_SIZE": "4"}),
        ({"SLURM_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": 4}, {"LOCAL_SIZE": "3"}),
        # the step takes a part of the job
        ({"SLURM_STEP_NODELIST": "node10", "SLURM_STEP_NUM_TASKS": 6, "SLURM_STEP_TASKS_PER_NODE": "6"},
         {"MASTER": "node10:24567", "TRAINERS_NUM": "6", "LOCAL_SIZE": "6", "NNODES": "1"}),
        # the four of them alone, without a job
        ({"SLURM_JOB_ID": "", "SLURM_STEP_ID": "", "SLURM_TASKS_PER_NODE": ""}, {"MASTER": "node09:20000"}),
    ],
)  # fmt: skip
def test_what_else_slurm_may_say(variables, changed, expected):
    variables(**SLURM | changed)
    assert is_launched()
    assert {name: told()[name] for name in expected} == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_STEP_ID": ""},  # sbatch's own shell
        {"SLURM_PROCID": "", "SLURM_LOCALID": "", "SLURM_STEP_ID": ""},  # salloc's
        # its interactive step
        {"SLURM_PROCID": 0, "SLURM_STEP_ID": 4294967290, "SLURM_STEP_NUM_TASKS": 1},
        {"SLURM_PROCID": 0, "SLURM_NTASKS": 1},
    ],
)
def test_a_shell_under_slurm_is_no_task_of_srun(variables, capfd, changed):
    variables(**SLURM | changed)
    assert not is_launched()
    assert not told()
    note = "note: SLURM gave this job 7 tasks, but srun didn't start this process (no SLURM_STEP_ID): it runs on this"
    assert capfd.readouterr().err.startswith(
        "" if changed.get("SLURM_STEP_ID", 0) or len(changed) == 2 else note
    )


def mpi(names, rank, ranks, local_rank, here, **more):
    return dict(zip(names, (rank, ranks, local_rank, here), strict=True)) | more


@pytest.mark.parametrize("names", launchers.MPI)
def test_mpis_environment_as_paddles(variables, names):
    variables(**mpi(names, 1, 3, 1, 3), MASTER_PORT=29500)
    assert is_launched()
    assert told() == {
        "TRAINER_ID": "1",
        "TRAINERS_NUM": "3",
        "MASTER": "127.0.0.1:29500",
        "LOCAL_RANK": "1",
        "RANK_IN_NODE": "1",
        "LOCAL_SIZE": "3",
        "NNODES": "1",
        "CURRENT_ENDPOINT": "127.0.0.1:6171",
        "TRAINER_ENDPOINTS": "127.0.0.1:6170,127.0.0.1:6171,127.0.0.1:6172",
        "DISTRI_BACKEND": "gloo",
    }


def test_mpi_on_two_machines_within_a_slurm_job_and_of_one_rank(variables, capfd):
    openmpi = launchers.MPI[0]
    hydra = launchers.MPI[2]
    # Open MPI starts its remote ranks by srun: its own numbers count, not those of its daemon.
    variables(**SLURM, **mpi(openmpi, 3, 4, 1, 2, PMIX_NAMESPACE="7@1", MASTER_ADDR="node09"))
    assert is_launched()
    expected = {"TRAINER_ID": "3", "TRAINERS_NUM": "4", "LOCAL_SIZE": "2", "NNODES": "2"}
    assert {name: told()[name] for name in expected} == expected
    port = told()["MASTER"]  # from the job's name: the same for all of its ranks
    assert port.startswith("node09:2")
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        del os.environ[name]
    for names in (openmpi, hydra):
        variables(**mpi(names, 0, 1, 0, 1, PMIX_RANK=0))
        assert not is_launched()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", launchers.UNSUPPORTED)
def test_ranks_of_an_unread_launcher_are_told_that_they_are_alone(variables, name, capfd):
    variables(**{name: 3})
    assert not is_launched()
    line = f"note: {name} is 3, which isn't supported: it runs on this machine alone; for one run of all ranks"
    assert capfd.readouterr().err.startswith(line)
    # srun sets PMIX_RANK for a single task, too
    variables(SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=1, SLURM_PROCID=0)
    assert not is_launched()
    variables(SLURM_STEP_ID="", **TORCHRUN_VARIABLES)
    assert is_launched()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            mpi(launchers.MPI[0], 2, 2, 0, 2, PMIX_NAMESPACE=1),
            "OMPI_COMM_WORLD_RANK is 2, expected a number from 0 to 1",
        ),
        (
            mpi(launchers.MPI[0], 1, 4, 1, 2, PMIX_NAMESPACE=1),
            "OMPI_COMM_WORLD_SIZE is 4, OMPI_COMM_WORLD_LOCAL_SIZE is 2: the ranks need MASTER_ADDR",
        ),
        (
            mpi(launchers.MPI[2], 1, 2, 1, 2),
            r"PMI_SIZE is 2, .*: the ranks need MASTER_PORT .* give them to mpirun",
        ),
        (
            mpi(launchers.MPI[2], 1, 4, 1, 2),
            r"the ranks need MASTER_ADDR .* and MASTER_PORT .* -genv NAME VALUE",
        ),
        (
            {"PADDLE_TRAINER_ID": 0},
            "found PADDLE_TRAINER_ID=0, missing PADDLE_TRAINERS_NUM, PADDLE_CURRENT_ENDPOINT",
        ),
        (
            {"RANK": 0, "WORLD_SIZE": 2},
            "found RANK=0, WORLD_SIZE=2, missing LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start",
        ),
        (
            SLURM | {"SLURM_LOCALID": "", "SLURM_NODELIST": ""},
            "missing SLURM_LOCALID, SLURM_STEP_NODELIST or SLURM_NODEL",
        ),
        (
            SLURM | {"SLURM_PROCID": "7"},
            "SLURM_PROCID is 7, expected a number from 0 to 6",
        ),
        (
            SLURM | {"SLURM_NODELIST": "node[3-1]"},
            "SLURM's list of nodes has the range '3-1'; expected one like 01-03",
        ),
        (
            SLURM | {"SLURM_NODELIST": "node[1-3"},
            r"SLURM's list of nodes is 'node\[1-3'; expected one like node\[01-03",
        ),
        (
            SLURM | {"SLURM_TASKS_PER_NODE": "4*2"},
            r"SLURM's tasks per node are '4\*2'; expected a list like 4\(x2\),3",
        ),
        (
            SLURM | {"SLURM_NTASKS": ""},
            "missing SLURM_STEP_NUM_TASKS or SLURM_NTASKS; start with srun",
        ),
        (
            TORCHRUN_VARIABLES | {"RANK": "4", "LOCAL_RANK": 0},
            "^RANK is 4, expected a number from 0 to 3",
        ),
        (
            TORCHRUN_VARIABLES | {"LOCAL_WORLD_SIZE": 1},
            "LOCAL_RANK is 1, expected a number from 0 to 0",
        ),
        (TORCHRUN_VARIABLES | {"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'; expected a whole number"),
        # one, in Arabic
        (TORCHRUN_VARIABLES | {"RANK": "\u0661"}, "RANK is '\u0661'; expected a whole number"),
        (
            TORCHRUN_VARIABLES | {"RANK": "1" * 5000},
            f"RANK is '{'1' * 100}...'; expected a whole number",
        ),
    ],
)
def test_an_environment_that_makes_no_sense(variables, given, message):
    variables(**given)
    with pytest.raises(InputError, match=message):
        is_launched()


PADDLE = {
    "PADDLE_TRAINER_ID": 1,
    "PADDLE_TRAINERS_NUM": 2,
    "PADDLE_LOCAL_RANK": 1,
    "PADDLE_LOCAL_SIZE": 2,
}
PADDLE |= {"PADDLE_CURRENT_ENDPOINT": "b:6171", "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:6170,b:6171"}


@pytest.mark.parametrize(
    ("given", "told", "message"),
    [
        (
            TORCHRUN_VARIABLES | {"RANK": 4},
            ("10.0.0.1:29500", "4", "4"),
            "RANK is 4, expected a number from 0 to 3",
        ),
        (
            TORCHRUN_VARIABLES | {"RANK": "x"},
            ("10.0.0.1:29500", "x", "4"),
            "RANK is 'x'; expected a whole number",
        ),
        (
            TORCHRUN_VARIABLES | {"WORLD_SIZE": 0},
            ("10.0.0.1:29500", "3", "0"),
            "WORLD_SIZE is 0; expected at least 1",
        ),
        (
            TORCHRUN_VARIABLES | {"LOCAL_WORLD_SIZE": 5, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ("10.0.0.1:29501", "3", "4"),
            "LOCAL_WORLD_SIZE is 5, but WORLD_SIZE is 4: a machine can't have more ranks than the run",
        ),
        (
            TORCHRUN_VARIABLES | {"LOCAL_RANK": ""},
            ("10.0.0.1:29500", "3", "4"),
            "a distributed run's environment is incomplete",
        ),
        (
            PADDLE | {"PADDLE_TRAINER_ID": 2},
            ("10.0.0.1:6170", "2", "2"),
            "PADDLE_TRAINER_ID is 2, expected a number",
        ),
        (
            PADDLE | {"PADDLE_TRAINER_ID": -1},
            ("10.0.0.1:6170", "-1", "2"),
            "PADDLE_TRAINER_ID is '-1'; expected a",
        ),
        (
            PADDLE | {"PADDLE_TRAINERS_NUM": 0},
            ("10.0.0.1:6170", "1", "0"),
            "PADDLE_TRAINERS_NUM is 0; expected at",
        ),
        (
            PADDLE | {"PADDLE_MASTER": "a:1", "PADDLE_LOCAL_RANK": 2},
            ("a:1", "1", "2"),
            "PADDLE_LOCAL_RANK is 2, ",
        ),
        (
            PADDLE | {"PADDLE_LOCAL_SIZE": 3},
            ("10.0.0.1:6170", "1", "2"),
            "PADDLE_LOCAL_SIZE is 3, but PADDLE_TRAINERS",
        ),
        (
            SLURM | {"SLURM_PROCID": 7, "MASTER_ADDR": "a", "MASTER_PORT": 1},
            ("a:1", "7", None),
            "SLURM_PROCID is 7, ",
        ),
    ],
)
def test_where_its_numbers_contradict_a_rank_tells_the_others(
    variables, monkeypatch, given, told, message
):
    cancelled = []
    monkeypatch.setattr(rendezvous, "cancel", lambda *arguments: cancelled.append(arguments))
    variables(**given, TORCHELASTIC_RUN_ID="7")
    with pytest.raises(InputError, match=f"^{re.escape(message)}") as caught:
        is_launched()
    job = "1234567 0 7" if "SLURM_PROCID" in given else "7"
    assert cancelled == [(*told, str(caught.value), job, "rank")]


def test_a_masters_address_alone_launches_nothing(variables):
    variables(MASTER_ADDR="10.0.0.1", MASTER_PORT=29500)
    assert not is_launched()


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("gpu-a", ["gpu-a"]),
        ("node[01-03,7],gpu-a", ["node01", "node02", "node03", "node7", "gpu-a"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[8-9]-ib,x", ["r1n8-ib", "r1n9-ib", "r2n8-ib", "r2n9-ib", "x"]),
    ],
)
def test_slurms_list_of_nodes(nodelist, hosts):
    assert expand_hosts(nodelist) == hosts


def test_slurms_tasks_per_node():
    assert expand_counts("4(x2),3") == [4, 4, 3]
    assert expand_counts("1(x3)") == [1, 1, 1]


def test_each_rank_takes_its_gpu_among_the_visible_ones(variables, monkeypatch, tmp_path):
    selected = "FLAGS_selected_gpus"
    build = tmp_path / "paddle" / "version" / "__init__.py"
    build.parent.mkdir(parents=True)
    build.write_text("cuda_version     = '11.8'\n")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "paddle")])
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(devices, "_LIBRARIES", ())
    assert devices.num_gpus_of_paddle() == 0
    for number in range(4):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    for visible, count in ((None, 4), ("0,2", 2), ("GPU-8a, GPU-9b,-1,3", 2), ("", 0), ("3", 1)):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        variables(**{"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {})
        assert devices.num_gpus_of_paddle() == count
    for visible, local_rank, expected in (("0,1,2,3", 3, "3"), ("2", 1, "0")):
        for name in (selected, *map("PADDLE_{}".format, told())):
            os.environ.pop(name, None)
        variables(
            **TORCHRUN_VARIABLES | {"LOCAL_RANK": local_rank},
            LOCAL_WORLD_SIZE=4,
            CUDA_VISIBLE_DEVICES=visible,
        )
        assert is_launched()
        assert os.environ[selected] == expected
        assert "DISTRI_BACKEND" not in told()
    del os.environ[selected]
    variables(PADDLE_LOCAL_RANK=3, CUDA_VISIBLE_DEVICES="0,1")
    with pytest.raises(
        InputError,
        match="local rank 3 has no GPU: only 2 are visible; start at most 2 processes per machine",
    ):
        is_launched()
    build.write_text("cuda_version     = 'False'\n")
    assert devices.num_gpus_of_paddle() == 0


def test_cores_that_slurm_dealt_out_are_not_divided_again(variables, monkeypatch):
    monkeypatch.setattr(devices, "num_cores", lambda: 8)
    variables(**SLURM)
    assert is_launched()
    assert launchers.cores_each(4) == 2
    variables(SLURM_CPUS_PER_TASK=8)
    assert launchers.cores_each(4) == 8
    variables(PADDLE_TRAINERS_NUM=28)  # Paddle's launcher in each task
    assert (launchers.cores_each(4), launchers.cores_each(16)) == (2, 1)


def test_slurms_cores_per_task_hold_without_cgroups(variables, monkeypatch):
    """A task then sees all cores of its machine."""
    monkeypatch.setattr(devices, "num_cores", lambda: 64)
    variables(**SLURM, SLURM_CPUS_PER_TASK=3)
    assert launchers.cores_each(1) == 3  # one process of sbatch's shell
    assert launchers.cores_each(2) == 1  # two that it spawned
    assert is_launched()
    assert launchers.cores_each(3) == 3
    variables(SLURM_CPUS_PER_TASK=128)
    assert launchers.cores_each(3) == 64


def test_only_launchers_that_set_threads_hide_the_users(monkeypatch, tmp_path):
    own = tmp_path / "proc" / "self" / "environ"
    monkeypatch.setattr(launchers, "Path", lambda path: tmp_path / path[1:])
    assert not launchers.set_by_launcher()  # no /proc
    own.parent.mkdir(parents=True)
    for started, expected in (
        (b"PADDLE_TRAINER_ID=0\0A=1", True),
        (b"A=1\0TORCHELASTIC_RUN_ID=none\0", True),
        (b"SLURM_PROCID=0\0OMPI_COMM_WORLD_RANK=0\0RANK=0\0", False),
    ):
        own.write_bytes(started)
        assert launchers.set_by_launcher() is expected


def test_spawned_ranks_meet_at_the_port_that_is_asked_for(variables, monkeypatch):
    variables()
    spawned.prepare_spawn()
    assert "PADDLE_MASTER" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    first = told()["VIT_RUN_KEY"]
    spawned.prepare_spawn()
    assert len(first) == 64
    assert told()["VIT_RUN_KEY"] != first
    with socket.create_server(("127.0.0.1", 0)) as server:
        variables(MASTER_PORT=server.getsockname()[1])
        with pytest.raises(InputError, match="port .* on 127.0.0.1 is taken"):
            spawned.prepare_spawn()
    spawned.prepare_spawn()
    # once more in this process, as in a notebook: it holds the port itself
    spawned.prepare_spawn()
    assert os.environ["PADDLE_MASTER"] == f"127.0.0.1:{os.environ['MASTER_PORT']}"
    monkeypatch.setattr(rendezvous, "ENDING", 0.1)
    # held for this run, though nobody listens
    with pytest.raises(InputError, match="port .* on 127.0.0.1 is taken"):
        rendezvous.check_free(os.environ["PADDLE_MASTER"])
    spawned._claim.close()


def test_the_scripts_flags_for_paddles_elastic_launcher(variables, monkeypatch):
    installed = importlib.util.find_spec
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"etcd://127.0.0.1:{server.getsockname()[1]}"
        variables(NNODES="2:4", MASTER=master, NPROC_PER_NODE=4)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: name == "etcd3" or installed(name)
        )
        assert nodes.launcher_flags() == [
            "--nproc_per_node",
            "4",
            "--master",
            master,
            "--nnodes",
            "2:4",
        ]
    with pytest.raises(
        InputError,
        match=rf"no etcd server answers at MASTER {master} \(Connection refused\); start one",
    ):
        nodes.launcher_flags()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name != "etcd3" and installed(name)
    )
    with pytest.raises(
        InputError,
        match=f"MASTER is {master}, but etcd3 isn't installed; pip install etcd3==",
    ):
        nodes.launcher_flags()


def test_the_scripts_flags_for_paddles_launcher(variables):
    port = free_ports(1)[0]
    variables(NNODES=1, NODE_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=port)
    flags = f"--nproc_per_node {devices.num_cores()} --nnodes 1 --rank 0 --master localhost:{port} --host localhost"
    assert nodes.launcher_flags() == flags.split()
    variables(NODE_RANK=1)
    with pytest.raises(InputError, match="NODE_RANK is 1, expected a number from 0 to 0"):
        nodes.launcher_flags()


def test_between_machines_gloo_and_nccl_take_the_interface_that_reaches_rank_0(
    variables, monkeypatch
):
    meeting = SimpleNamespace(own_address="127.0.0.1", run_key="ab")
    monkeypatch.setattr(rendezvous, "meet", lambda *_, **__: meeting)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    variables(**TORCHRUN_VARIABLES, LOCAL_WORLD_SIZE=4)
    assert is_launched()
    assert launched.meet(1.0) is meeting
    # one machine: NCCL finds its way
    assert [os.environ.get(name) for name in names] == ["lo", None]
    assert (told()["MASTER"], told()["VIT_RUN_KEY"]) == ("127.0.0.1:29500", "ab")
    del os.environ["GLOO_SOCKET_IFNAME"]
    variables(PADDLE_LOCAL_SIZE=2)
    launched.meet(1.0)
    # "=": NCCL takes no other that begins so
    assert [os.environ[name] for name in names] == ["lo", "=lo"]
    variables(GLOO_SOCKET_IFNAME="ib0", NCCL_SOCKET_IFNAME="ib")
    launched.meet(1.0)
    assert [os.environ[name] for name in names] == ["ib0", "ib"]
