"""What the checks of tools/doctor.py --gpu make of what they find, and what they ask where there is a GPU."""

import re
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

import utils
from command_line import config_from_arguments
from config import get_config
from errors import RunError
from models import check_keys
from tools import gpu_checks, gpu_first_steps, gpu_probe, gpu_rates, machine

REPORT = "please report this line"
A100 = {
    "gpus": 2,
    "name": "NVIDIA A100-SXM4-80GB",
    "capability": 8.0,
    "memory": 85.1,
    "precision": "bfloat16",
    "tf32": False,
}
A100 |= {"paddle": "3.3.1, built for CUDA 12.6 and cuDNN 9.5.1, commit 0123456789", "built": True}
A100 |= {"kinds": "2 x NVIDIA A100-SXM4-80GB, compute capability 8.0, 85.1 GB", "cuda": "NCCL 22502; cuDNN 90501"}


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
    found = "64 x 197 x 12 x 64, bfloat16, forward and backward: fused 0.51 ms and 40 MB kept,"
    found += " plain 2.5 ms and 200 MB kept; they round off 4.0e-03 and 6.0e-03 of the largest value"
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


def test_logits_beside_the_cpus():
    right = {"vit": {"difference": 0.0, "varies": 0.1}, "resnet": {"difference": 2e-5, "varies": 0.1}}
    usual = {"vit": {"difference": 1e-3, "varies": 0.1}, "resnet": {"difference": 2e-3, "varies": 0.1}}
    found = (
        "float32 logits beside the CPU's, largest difference over their range: vit 0.0e+00 with TF32 off, 1.0e-03 as"
    )
    found += " Paddle has it; resnet 2.0e-05 with TF32 off, 2.0e-03 as Paddle has it"
    assert gpu_checks.judged_parity(right, right, usual) == (True, found)
    ok, text = gpu_checks.judged_parity(right, usual, usual)
    assert (ok, text.endswith(f"; expected at most 0.0001 with TF32 off: {REPORT}")) == (False, True)
    blind = right | {"vit": {"difference": 0.0, "varies": 1e-4}}
    assert gpu_checks.judged_parity(blind, right, usual) == (
        False,
        f"{found}, but they hardly differ from image to image; report this line",
    )


def test_transfers():
    found = "a step brings the 3 columns of its batch to the device"
    loaded = {"columns": 3, "transfers": {"to_tensor loader.py:212": 3.0}}
    assert gpu_checks.judged_transfers(loaded) == (True, f"{found}, and nothing else goes there or back")
    assert gpu_checks.judged_transfers({"columns": 3, "transfers": {}})[0]  # Paddle's own thread copies them
    more = loaded | {
        "transfers": {"to_tensor loader.py:212": 3.0, "item engine.py:9": 0.5, "to_tensor optim/ema.py:42": 152.0}
    }
    assert gpu_checks.judged_transfers(more) == (
        False,
        f"{found}, and besides 152 to_tensor optim/ema.py:42, 0.5 item engine.py:9; {REPORT}",
    )
    assert gpu_checks.judged_transfers({"columns": 1, "transfers": {"to_tensor loader.py:212": 2.0}}) == (
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
        "NVIDIA A100-SXM4-80GB": (312, 156, 19.5), "NVIDIA H100 80GB HBM3": (989, 494, 67),
        "NVIDIA H100 PCIe": (756, 378, 51), "Tesla V100-SXM2-16GB": (125, 15.7, 15.7),
        "Tesla T4": (65, 8.1, 8.1), "NVIDIA GeForce RTX 4090": (165, 82.6, 82.6),
        "NVIDIA GeForce RTX 3090": (71, 35.6, 35.6), "NVIDIA GeForce RTX 3090 Ti": None, "Quadro T400": None,
    }  # fmt: skip
    assert {name: gpu_rates.peak(name) for name in known} == known
    assert {memory: gpu_rates.batch_of(memory) for memory in (85.1, 42.3, 25.4, 16.9, 8.0)} == {
        85.1: 256, 42.3: 128, 25.4: 64, 16.9: 64, 8.0: 32,
    }  # fmt: skip
    estimate = gpu_rates.expected(A100, "vit_small_patch16_224", amp=True)
    assert estimate == (pytest.approx(0.3 * 312e12 / 27.6e9), "0.3 x 312 TFLOP/s / 28 GFLOP")
    assert gpu_rates.expected(A100, "vit_base_patch16_224", amp=False)[1] == "0.3 x 19.5 TFLOP/s / 106 GFLOP"
    assert gpu_rates.expected(A100 | {"tf32": True}, "vit_base_patch16_224", amp=False)[1].startswith(
        "0.3 x 156 TFLOP/s"
    )
    assert gpu_rates.expected(A100 | {"name": "Quadro T400"}, "vit_small_patch16_224", amp=True) is None
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
            "train": dict.fromkeys(jobs, one), "logits": {name: {"difference": 1e-6, "varies": 0.1} for name in jobs},
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
        r"ViT-S/16, bfloat16, batch 256, loader processes \d+: 900 images/s, 284.4 ms a step, 9.0 GB at most; 0% of"
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
    monkeypatch.setattr(paddle.base.core, "get_cublas_switch", lambda: True, raising=False)
    monkeypatch.setattr(machine, "cuda", lambda: (True, "Paddle is built for 11.8, the driver is of 12.4, NCCL 21804"))
    found = gpu_probe.about({})
    assert (found["gpus"], found["name"], found["capability"], found["memory"]) == (2, "NVIDIA A100", 8.0, 42.3)
    assert found["cuda"] == "Paddle is built for 11.8, the driver is of 12.4, NCCL 21804; cuDNN 8907"
    assert set(found["kinds"].split("; ")) == {
        "1 x NVIDIA A100, compute capability 8.0, 42.3 GB",
        "1 x Tesla T4, compute capability 7.5, 15.8 GB",
    }
