"""tools/doctor.py --gpu: rehearsed on the CPU, for no GPU is here."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest
import warm
from conftest import ROOT
from support.programs import assert_none_left, descendants, wait_for

import utils
from errors import InputError, RunError
from tools.checks import machine
from tools.gpu import first_steps, probe

REHEARSAL = "rehearsal on a CPU: the results don't apply to a GPU"


def start(folder, *flags, **environment):
    words = [warm.python(), str(ROOT / "tools" / "doctor.py"), *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        words, env=os.environ | {"TMPDIR": str(folder)} | environment, **streams
    )


def end(process):
    printed, errors = process.communicate(timeout=400)
    return process.returncode, printed, errors


@pytest.mark.smoke
def test_without_a_gpu_one_line_says_so(tmp_path):
    status, printed, errors = end(start(tmp_path, "-gpu"))
    assert (status, printed, list(tmp_path.iterdir())) == (2, "", [])
    assert re.fullmatch(
        r"error: --gpu: Paddle \S+, (a CPU build|built for CUDA \S+ and cuDNN \S+), commit \w{10} sees no GPU,"
        r" expected at least one; .* \(docs/guides/gpu\.md\), or rehearse on the CPU with --gpu --rehearse\n",
        errors,
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--rehearse"], "--rehearse and --only need --gpu; add it, or leave them out"),
        (["--gpu", "--rehearse", "-ngpus=0"], "-ngpus is 0, expected -1 (all) or at least 1"),
        (["--gpu", "-cfg=vit_digits_x"], "-cfg has no effect with --gpu; leave it out"),
        (
            ["--gpu"],
            "--gpu starts ranks by itself, but a launcher started this; run python tools/doctor.py --gpu",
        ),
    ],
)
def test_flags_that_would_do_nothing_are_refused(tmp_path, flags, expected):
    launched = {
        "PADDLE_TRAINER_ID": "0",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_TRAINER_ENDPOINTS": "a:1,b:1",
    }
    launched = launched | {"PADDLE_CURRENT_ENDPOINT": "a:1"} if flags == ["--gpu"] else {}
    status, printed, errors = end(start(tmp_path, *flags, **launched))
    assert (status, printed, errors.removeprefix("rank 0: ")) == (2, "", f"error: {expected}\n")


@pytest.mark.smoke
def test_a_check_is_rehearsed(tmp_path):
    status, printed, errors = end(start(tmp_path, "--gpu", "--rehearse", "--only", "flash"))
    assert (status, errors, list(tmp_path.iterdir())) == (0, "", [])
    lines = printed.splitlines()
    assert re.fullmatch(
        rf"first steps on a GPU, \d{{4}}-\d\d-\d\d \d\d:\d\d UTC: {REHEARSAL}", lines[0]
    )
    assert [line.split()[0] for line in lines[1:4]] == ["toolkit", "paddle", "host"]
    assert paddle.__version__ in lines[2]
    assert re.fullmatch(
        r"ok    flash       2 x 50 x 2 x 16, float32, forward and backward: fused \S+ ms, plain \S+ ms; they"
        r" round off \S+ and \S+ of the largest value",
        lines[4],
    )
    assert re.fullmatch(rf"all is well, \d+ s; {REHEARSAL}", lines[5])
    assert len(lines) == 6


@pytest.mark.slow
def test_all_are_rehearsed(tmp_path):
    status, printed, errors = end(start(tmp_path, "--gpu", "--rehearse"))
    found = dict(re.findall(r"^(?:ok|todo) +(\S+) +(.*)$", printed, re.MULTILINE))
    todo = re.findall(r"^todo  (\S+)", printed, re.MULTILINE)
    assert (todo, status, errors, list(tmp_path.iterdir())) == ([], 0, "", []), printed
    assert list(found) == list(first_steps.CHECKS)
    assert found["attention"].startswith(
        "0 of 2 attentions of a ViT under -amp (float32) are fused; none is expected"
    )
    assert found["same-bits"].endswith("the same bits of weights: ViT-S, Swin-T, BEiT-B, ResNet-50")
    assert re.fullmatch(
        r"killed after epoch_0002_sample_\d+, resumed with: the \d\d\d tensors of .*",
        found["resumed"],
    )
    assert "saved after epoch_0001" in found["sharded"]
    assert "between 2 ranks over GLOO" in found["all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGINT, "stopped by SIGINT\n"), (signal.SIGTERM, "stopped by SIGTERM\n")],
)
def test_a_signal_ends_it_and_what_it_started(tmp_path, number, said):
    process = start(tmp_path, "--gpu", "--rehearse", "--only", "sharded")
    wait_for(lambda: list(tmp_path.glob(".toolkit.*/sharded/metrics.jsonl")), process)
    left = list(descendants(process.pid))
    assert len(left) > 2
    process.send_signal(number)
    status, printed, errors = end(process)
    assert (status, errors) == (128 + number, said)
    assert "sharded  " not in printed
    assert_none_left(left)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_one_line_says_so(monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(first_steps.tempfile, "gettempdir", none)
    with pytest.raises(
        InputError, match=r"^No usable .* found in \['/tmp'\]; set TMPDIR to a writable folder"
    ):
        first_steps.main(SimpleNamespace(gpu=True, changed=[]), print)


def test_ctrl_c_while_a_tool_is_imported_is_no_traceback():
    tool = f"import sys; sys.argv[0] = {str(ROOT / 'tools' / 'doctor.py')!r}; import errors; raise KeyboardInterrupt"
    done = subprocess.run([sys.executable, "-c", tool], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


@pytest.mark.smoke
def test_copies_are_counted_by_who_asks_for_them():
    before = paddle.Tensor.item, paddle.tensor.creation._to_tensor_non_static
    with probe.counting_copies() as count:
        for _ in range(3):
            tensor = paddle.to_tensor([1.0, 2.0])
        float(tensor.sum())
        tensor[0].item()
        tensor = tensor * 2 + 1  # nothing
    assert (paddle.Tensor.item, paddle.tensor.creation._to_tensor_non_static) == before
    here = f"{Path(__file__).relative_to(ROOT)}:"
    found = {where.partition(here)[0]: number for where, number in count.items()}
    assert found == {"to_tensor ": 3, "__float__ ": 1, "item ": 1}


@pytest.mark.smoke
def test_attention_operators_have_their_names():
    query = paddle.zeros([1, 2, 1, 8], "float16")
    assert hasattr(paddle._C_ops, "memory_efficient_attention")
    with pytest.raises(Exception, match="flash_attn|not registered|kernel"):  # a CPU has none
        paddle._C_ops.flash_attn(query, query, query, None, None, 0.0, False, False, False, "")


def test_a_check_that_fails_is_a_finding():
    def fail(error):
        def check(bench):
            raise error

        return first_steps.run_check(check, SimpleNamespace())

    assert fail(RunError("rank 1: so")) == (False, "failed: rank 1: so")
    assert fail(KeyError("reports")) == (False, "failed: KeyError: 'reports'")
    assert fail(ValueError("one\n  two")) == (False, "failed: ValueError: one two")


def test_what_paddle_says_of_gpus(monkeypatch):
    kinds = [SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=42_300_000_000)]
    kinds += [SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=15_800_000_000)]
    monkeypatch.setattr(utils, "num_gpus", lambda: 2)
    monkeypatch.setattr(paddle.device.cuda, "get_device_properties", kinds.__getitem__)
    monkeypatch.setattr(paddle.amp, "is_bfloat16_supported", lambda: True)
    monkeypatch.setattr(paddle.device, "get_cudnn_version", lambda: 8907)
    monkeypatch.setattr(paddle.base.core, "get_cublas_switch", lambda: True, raising=False)
    monkeypatch.setattr(
        machine,
        "cuda",
        lambda: (True, "Paddle is built for 11.8, the driver is of 12.4, NCCL 21804"),
    )
    found = probe.about({})
    assert (found["gpus"], found["name"], found["capability"], found["memory"]) == (
        2,
        "NVIDIA A100",
        8.0,
        42.3,
    )
    assert (
        found["cuda"] == "Paddle is built for 11.8, the driver is of 12.4, NCCL 21804; cuDNN 8907"
    )
    first = "1 x NVIDIA A100, compute capability 8.0, 42.3 GB"
    assert found["kinds"] == f"{first}; 1 x Tesla T4, compute capability 7.5, 15.8 GB"
