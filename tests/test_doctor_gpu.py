"""tools/doctor.py --gpu: what its checks make of what they find; rehearsed on the CPU, for no GPU is here."""

import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import ROOT
from programs import assert_none_left, descendants, wait_for
from safetensors.numpy import save_file

import utils
from command_line import config_from_arguments
from config import get_config
from errors import RunError
from models import check_keys
from tools import gpu_checks, gpu_first_steps, gpu_probe, gpu_rates, machine

REHEARSAL = "rehearsal on a CPU: says nothing about a GPU"
REPORT = "please report this line"
A100 = {"gpus": 2, "name": "NVIDIA A100-SXM4-80GB", "capability": 8.0, "memory": 85.1, "precision": "bfloat16"}
A100 |= {"paddle": "3.3.1, built for CUDA 12.6 and cuDNN 9.5.1, commit 0123456789", "built": True}
A100 |= {"kinds": "2 x NVIDIA A100-SXM4-80GB, compute capability 8.0, 85.1 GB", "cuda": "NCCL 22502; cuDNN 90501"}


def start(folder, *flags, **environment):
    words = [sys.executable, str(ROOT / "tools" / "doctor.py"), *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=os.environ | {"TMPDIR": str(folder)} | environment, **streams)


def end(process, timeout=400):
    printed, errors = process.communicate(timeout=timeout)
    return process.returncode, printed, errors


# ------------------------------------------------------------------ the program


@pytest.mark.smoke
def test_without_a_gpu_one_line_says_so(tmp_path):
    for flag in ("-gpu", "--gpu"):
        status, printed, errors = end(start(tmp_path, flag))
        assert (status, printed, list(tmp_path.iterdir())) == (2, "", [])
        assert re.fullmatch(
            r"error: --gpu: Paddle \S+, (a CPU build|built for CUDA \S+ and cuDNN \S+), commit \w{10} sees no GPU,"
            r" expected at least one; .* \(docs/gpu\.md\), or rehearse on the CPU with --gpu --rehearse\n",
            errors,
        )


def test_flags_that_would_do_nothing_are_refused(tmp_path):
    apart = "--rehearse and --only go with --gpu; write that, too, or leave them out"
    launched = {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": "a:1,b:1"}
    launched["PADDLE_CURRENT_ENDPOINT"] = "a:1"
    for flags, environment, expected in [
        (["--rehearse"], {}, apart),
        (["--only", "flash"], {}, apart),
        (["--gpu", "-cfg=vit_digits_x"], {}, "-cfg does nothing with --gpu; leave it out"),
        (["--gpu", "-timeout", "3"], {}, "-timeout does nothing with --gpu; leave it out"),
        (
            ["--gpu"],
            launched,
            "--gpu starts ranks by itself, but a launcher started this; run python tools/doctor.py --gpu",
        ),
    ]:
        status, printed, errors = end(start(tmp_path, *flags, **environment))
        assert (status, printed, errors.removeprefix("rank 0: ")) == (2, "", f"error: {expected}\n")


@pytest.mark.smoke
def test_two_checks_are_rehearsed(tmp_path):
    status, printed, errors = end(start(tmp_path, "--gpu", "--rehearse", "--only", "attention", "flash"))
    assert (status, errors, list(tmp_path.iterdir())) == (0, "", [])
    lines = printed.splitlines()
    assert re.fullmatch(rf"first steps on a GPU, \d{{4}}-\d\d-\d\d \d\d:\d\d UTC: {REHEARSAL}", lines[0])
    assert [line.split()[0] for line in lines[1:4]] == ["toolkit", "paddle", "host"]
    assert paddle.__version__ in lines[2]
    assert lines[4] == (
        "ok    attention   0 of 2 attentions of a ViT under -amp (float32) are fused; none is expected below compute"
        " capability 8"
    )
    assert re.fullmatch(
        r"ok    flash       2 x 50 x 2 x 16, float32, forward and backward: fused \S+ ms, plain \S+ ms; errors \S+"
        r" and \S+ of float32's largest",
        lines[5],
    )
    assert re.fullmatch(rf"all is well, \d+ s; {REHEARSAL}", lines[6])
    assert len(lines) == 7


@pytest.mark.slow
def test_all_are_rehearsed(tmp_path):
    status, printed, errors = end(start(tmp_path, "--gpu", "--rehearse"))
    found = dict(re.findall(r"^(?:ok|todo)  (\S+) +(.*)$", printed, re.MULTILINE))
    todo = re.findall(r"^todo  (\S+)", printed, re.MULTILINE)
    assert (todo, status, errors, list(tmp_path.iterdir())) == ([], 0, "", []), printed
    assert list(found) == list(gpu_first_steps.CHECKS)
    assert found["same-bits"].endswith("the same bits of weights: vit, swin, beit, resnet")
    assert re.fullmatch(r"killed after epoch_0002_sample_\d+, gone on with: the \d\d\d tensors of .*", found["resumed"])
    assert "saved after epoch_0001" in found["sharded"]
    assert "between 2 ranks over GLOO" in found["all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted\n"), (signal.SIGTERM, "")])
def test_a_signal_ends_it_and_what_it_started(tmp_path, number, said):
    process = start(tmp_path, "--gpu", "--rehearse", "--only", "sharded")
    wait_for(lambda: list(tmp_path.glob("doctor-*/sharded/metrics.jsonl")), process)
    left = list(descendants(process.pid))
    assert len(left) > 2
    process.send_signal(number)
    status, printed, errors = end(process)
    assert (status, errors) == (128 + number, said)
    assert "sharded  " not in printed
    assert_none_left(left)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------- what is judged


def test_attention():
    right = {
        "attentions": 12,
        "fused": 12,
        "types": ["bfloat16"],
        "backends": {"flash_attn": 12},
        "precision": "bfloat16",
    }
    found = (
        "12 of 12 attentions of a ViT under -amp (bfloat16) are fused, in bfloat16; Paddle calls flash_attn 12 times"
    )
    assert gpu_checks.judged_attention(right, 8.0) == (True, found)
    wrong = f"{found.replace('flash_attn 12 times', 'no fused kernel')}; expected all, by flash_attn: {REPORT}"
    assert gpu_checks.judged_attention(right | {"backends": {}}, 9.0) == (False, wrong)
    plain = right | {"fused": 0, "types": [], "backends": {}}  # as where a bias gives float32
    assert gpu_checks.judged_attention(plain, 8.0) == (
        False,
        f"0 of 12 attentions of a ViT under -amp (bfloat16) are fused; expected all, by flash_attn: {REPORT}",
    )
    assert gpu_checks.judged_attention(plain | {"precision": "float16"}, 7.5)[0]
    assert not gpu_checks.judged_attention(right, 7.5)[0]


def test_flash():
    answer = {"fused": {"ms": 0.51, "MB": 40.0, "error": 0.004}, "plain": {"ms": 2.5, "MB": 200.0, "error": 0.006}}
    found = "64 x 197 x 12 x 64, bfloat16, forward and backward: fused 0.51 ms, plain 2.5 ms, keeping 40 and 200 MB;"
    found += " errors 4.0e-03 and 6.0e-03 of float32's largest"
    shape = [64, 197, 12, 64]
    assert gpu_checks.judged_flash(answer, shape, "bfloat16", False) == (True, found)
    slow = answer | {"plain": answer["plain"] | {"ms": 0.4}}
    assert not gpu_checks.judged_flash(slow, shape, "bfloat16", False)[0]
    assert gpu_checks.judged_flash(slow, shape, "bfloat16", True)[0]
    wrong = answer | {"fused": answer["fused"] | {"error": 0.2}}
    ok, text = gpu_checks.judged_flash(wrong, shape, "bfloat16", False)
    assert (ok, text.endswith("expected at most 0.03; don't train with -amp here, and report this line")) == (
        False,
        True,
    )


def test_transfers():
    found = "a step brings the 3 columns of its batch to the device"
    loaded = {"columns": 3, "transfers": {"to loader.py:212": 3.0}}
    assert gpu_checks.judged_transfers(loaded) == (True, f"{found}, and nothing else goes there or back")
    assert gpu_checks.judged_transfers({"columns": 3, "transfers": {}})[0]  # Paddle's own thread copies them
    more = loaded | {"transfers": {"to loader.py:212": 3.0, "from engine.py:9": 0.5, "to optim/ema.py:42": 152.0}}
    assert gpu_checks.judged_transfers(more) == (
        False,
        f"{found}, and besides 152 to optim/ema.py:42, 0.5 from engine.py:9; {REPORT}",
    )
    assert gpu_checks.judged_transfers({"columns": 1, "transfers": {"to loader.py:212": 2.0}}) == (
        False,
        f"a step brings the 1 columns of its batch to the device, and besides 2 copies by the loader; {REPORT}",
    )


def test_bits():
    one = {"vit": {"weights": {"a": "0", "b": "1"}}, "swin": {"weights": {"a": "0"}}}
    assert gpu_checks.judged_bits(one, one, 4) == (
        True,
        "4 steps twice with DETERMINISTIC, the same bits of weights: vit, swin",
    )
    two = {"vit": {"weights": {"a": "0", "b": "2"}}, "swin": {"error": "RuntimeError: no kernel"}}
    assert gpu_checks.judged_bits(one, two, 4) == (
        False,
        "4 steps twice with DETERMINISTIC: vit differs in 1 of 2 tensors, such as b; swin failed (RuntimeError: no"
        f" kernel); {REPORT}",
    )
    with pytest.raises(RunError, match=r"^RuntimeError: no kernel$"):
        gpu_checks.only({"swin": two["swin"]})


def test_a_resumed_runs_bits(tmp_path):
    for name, value in (("one", 0.0), ("two", 0.0), ("three", -0.0)):
        folder = tmp_path / name / "checkpoints" / "last"
        folder.mkdir(parents=True)
        save_file({"a": np.ones(3, np.float32), "b": np.float32([value])}, folder / "model.safetensors")
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    assert gpu_checks.judged_resume("saved", one, two) == (True, "saved: the 2 tensors of the whole run, bit by bit")
    assert gpu_checks.judged_resume("saved", one, three) == (
        False,
        "saved: 1 of 2 tensors differ from the whole run's, such as model.safetensors b; report this line",
    )
    assert not gpu_checks.judged_resume("saved", tmp_path / "none", tmp_path / "none")[0]


def test_rates_beside_their_estimate():
    known = {
        "NVIDIA A100-SXM4-80GB": (312, 156), "NVIDIA H100 80GB HBM3": (989, 494), "NVIDIA H100 PCIe": (756, 378),
        "Tesla V100-SXM2-16GB": (125, 15.7), "Tesla T4": (65, 8.1), "NVIDIA GeForce RTX 4090": (165, 82.6),
        "NVIDIA GeForce RTX 3090": (71, 35.6), "NVIDIA GeForce RTX 3090 Ti": None, "Quadro T400": None,
    }  # fmt: skip
    assert {name: gpu_rates.peak(name) for name in known} == known
    assert {memory: gpu_rates.batch_of(memory) for memory in (85.1, 42.3, 25.4, 16.9, 8.0)} == {
        85.1: 256, 42.3: 128, 25.4: 64, 16.9: 64, 8.0: 32,
    }  # fmt: skip
    estimate = gpu_rates.expected("NVIDIA A100-SXM4-80GB", "vit_small_patch16_224", amp=True)
    assert estimate == (pytest.approx(0.3 * 312e12 / 27.6e9), "0.3 x 312 TFLOP/s / 28 GFLOP")
    assert gpu_rates.expected("Quadro T400", "vit_small_patch16_224", amp=True) is None
    report = {"images_per_s": 2000.0, "GB": 21.26}
    found = "ViT: 2000 images/s, 128.0 ms a step, 21.3 GB at most"
    assert gpu_rates.judged_rate("ViT", report, 256, None) == (True, f"{found}; no estimate for this device")
    found += "; estimate 3391 (0.3 x 312 TFLOP/s / 28 GFLOP)"
    assert gpu_rates.judged_rate("ViT", report, 256, estimate) == (True, found)
    ok, text = gpu_rates.judged_rate("ViT", report | {"images_per_s": 1000.0}, 256, estimate)
    assert (ok, ": less than half; is another program on the GPU" in text) == (False, True)


def test_the_multiply_adds_are_those_of_the_models():
    for name, found in gpu_rates.MULTIPLY_ADDS.items():
        model = get_config(name).MODEL
        n, d = 197, model.EMBED_DIM
        block = 12 * d * d * n + 2 * n * n * d  # qkv, proj and the MLP; scores and their products with the values
        assert model.DEPTH * block + 196 * 768 * d == pytest.approx(found, rel=0.01)


# ----------------------------------------------- what is asked where there is a GPU


class Recorder(gpu_checks.Bench):
    """A bench whose processes aren't started: it keeps the command lines, and answers what it was given."""

    def ask(self, probe, request, **environment):
        jobs = request.get("jobs") or {"": request.get("words")}
        self.lines += [words for words in jobs.values() if words]
        report = {"images_per_s": 900.0, "data_wait": 0.0, "peak_memory_gpu": 9000.0}
        one = {"reports": [report] * 4, "weights": {"a": "0"}, "columns": 2, "transfers": {}}
        right = {"attentions": 12, "fused": 12, "types": ["bfloat16"], "backends": {"flash_attn": 12}}
        way = {"ms": 1.0, "MB": 1.0, "error": 0.0}
        return {
            "route": right | {"precision": "bfloat16"}, "sdpa": {"fused": way, "plain": way},
            "train": dict.fromkeys(jobs, one), "logits": {"difference": 1e-6, "varies": 0.1},
        }[probe]  # fmt: skip

    def run(self, program, *words):
        self.lines.append(list(words))


def test_command_lines_for_a_gpu_are_accepted(tmp_path):
    bench = Recorder(tmp_path, False, A100)
    bench.lines = []
    found = {}
    for name, check in gpu_first_steps.CHECKS.items():
        if name not in ("resumed", "sharded", "all-reduce"):  # which the rehearsal makes alike
            found[name] = check(bench)
    assert [name for name, (ok, _) in found.items() if not ok] == ["rate"]  # 900 images/s of an A100
    configs = [config_from_arguments("main_single_gpu.py", words) for words in bench.lines]
    for config in configs:
        check_keys(config)
    assert {config.MODEL.NAME for config in configs} >= {"vit_base_patch16_224", "resnet50", "beit_base_patch16_224"}
    assert {config.DATA.IMAGE_SIZE for config in configs} == {224}
    assert sum(config.DETERMINISTIC for config in configs) == 2 * 2 * 4
    assert found["host"] == (True, "ViT-S/16, batch 2: 2.2 ms a step, about what the host takes for any batch")
    assert re.fullmatch(
        r"ViT-S/16, bfloat16, batch 256, loaded by \d+ processes: 900 images/s, 284.4 ms a step, 9.0 GB at most; 0% of"
        r" the time waits for data",
        found["loader"][1],
    )
    one = Recorder(tmp_path, False, A100 | {"gpus": 1})
    assert gpu_checks.sharded(one) == gpu_checks.all_reduce(one) == (True, "not tried: it needs two GPUs")
    old = Recorder(tmp_path, False, A100 | {"capability": 7.5})
    assert gpu_checks.flash(old)[1].startswith("not tried: Paddle has none below compute capability 8")


def test_a_gpus_header(tmp_path):
    lines = gpu_first_steps.header(gpu_checks.Bench(tmp_path, False, A100))
    assert [line.split()[0] for line in lines[1:]] == ["toolkit", "paddle", "gpus", "cuda", "driver", "host"]
    assert lines[3] == "      gpus        2 x NVIDIA A100-SXM4-80GB, compute capability 8.0, 85.1 GB"
    assert gpu_first_steps.no_gpu(A100).endswith(
        "sees no GPU, expected at least one; look at nvidia-smi, the driver and CUDA_VISIBLE_DEVICES (docs/gpu.md), or"
        " rehearse on the CPU with --gpu --rehearse"
    )
    assert "; install paddlepaddle-gpu (docs/gpu.md)" in gpu_first_steps.no_gpu(A100 | {"built": False})


def test_what_paddle_says_of_gpus(monkeypatch):
    kinds = [SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=42_300_000_000)]
    kinds += [SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=15_800_000_000)]
    monkeypatch.setattr(utils, "num_gpus", lambda: 2)
    monkeypatch.setattr(paddle.device.cuda, "get_device_properties", kinds.__getitem__)
    monkeypatch.setattr(paddle.amp, "is_bfloat16_supported", lambda: True)
    monkeypatch.setattr(paddle.device, "get_cudnn_version", lambda: 8907)
    monkeypatch.setattr(machine, "cuda", lambda: (True, "Paddle is built for 11.8, the driver is of 12.4, NCCL 21804"))
    found = gpu_probe.about({})
    assert (found["gpus"], found["name"], found["capability"], found["memory"]) == (2, "NVIDIA A100", 8.0, 42.3)
    assert found["cuda"] == "Paddle is built for 11.8, the driver is of 12.4, NCCL 21804; cuDNN 8907"
    assert set(found["kinds"].split("; ")) == {
        "1 x NVIDIA A100, compute capability 8.0, 42.3 GB",
        "1 x Tesla T4, compute capability 7.5, 15.8 GB",
    }


# -------------------------------------------------------------------- its means


@pytest.mark.smoke
def test_copies_are_counted_by_who_asks_for_them():
    before = paddle.Tensor.item, paddle.tensor.creation._to_tensor_non_static
    with gpu_probe.counted() as count:
        for _ in range(3):
            tensor = paddle.to_tensor([1.0, 2.0])
        float(tensor.sum())
        tensor[0].item(), tensor.tolist(), bool(tensor.any())
        tensor = tensor * 2 + 1  # nothing
    assert (paddle.Tensor.item, paddle.tensor.creation._to_tensor_non_static) == before
    assert sorted(count.values()) == [1, 3, 3]
    to, *read = sorted(count, key=lambda where: not where.startswith("to tests/test_doctor_gpu.py:"))
    assert count[to] == 3
    assert all(where.startswith("from tests/test_doctor_gpu.py:") for where in read)


@pytest.mark.smoke
def test_attention_operators_are_seen():
    names = []
    assert all(hasattr(paddle._C_ops, name) for name in ("flash_attn", "memory_efficient_attention"))
    query = paddle.zeros([1, 2, 1, 8], "float16")
    with (
        gpu_probe.watched(paddle._C_ops, gpu_probe.BACKENDS, lambda name, *_: names.append(name)),
        pytest.raises(Exception, match="flash_attn|not registered|kernel"),  # a CPU has none
    ):
        paddle._C_ops.flash_attn(query, query, query, None, None, 0.0, False, False, False, "")
    assert names == ["flash_attn"]


def test_a_check_that_fails_is_a_finding(tmp_path):
    def fail(error):
        def check(bench):
            raise error

        return gpu_first_steps.made(check, SimpleNamespace())

    assert fail(RunError("rank 1: so")) == (False, "failed: rank 1: so")
    assert fail(KeyError("reports")) == (False, "failed: KeyError: 'reports'")
    assert fail(ValueError("one\n  two")) == (False, "failed: ValueError: one two")


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path):
    bench = gpu_checks.Bench(tmp_path, True, {})
    bench.deadline = time.monotonic() + 1.5
    program = tmp_path / "hang.py"
    program.write_text(
        "import subprocess\nprint(subprocess.Popen(['sleep', '99']).pid, flush=True)\nimport time\ntime.sleep(99)"
    )
    with (
        pytest.raises(RunError, match=r"^no end within the 240 s of a check$"),
        gpu_checks.started([str(program)], bench) as process,
    ):
        child = int(process.stdout.readline())
        gpu_checks.ended(process, bench.deadline)
    assert_none_left([process.pid, child])


def test_what_a_failed_program_said(tmp_path):
    program = tmp_path / "fail.py"
    program.write_text("import sys\nprint('W1122 a banner', file=sys.stderr)\nsys.exit('error: so')")
    bench = gpu_checks.Bench(tmp_path, True, {})
    with pytest.raises(RunError, match=r"^fail\.py ended with status 1: error: so$"):
        bench.run(str(program))
    dump = "Traceback\n  File x\nRuntimeError: out of memory\n\n----\nC++ Traceback\n[Hint: nothing]"
    assert gpu_checks.told_last(dump) == "RuntimeError: out of memory"
    assert gpu_checks.told_last("rank 1: error: so\nlast") == "rank 1: error: so"
    assert gpu_checks.told_last("a\nb\n") == "b"
    assert gpu_checks.told_last("") == "nothing on stderr"
