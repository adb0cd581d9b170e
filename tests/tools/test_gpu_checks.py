"""What the checks of tools/doctor.py --gpu make of what they find, and ask: their processes'
answers are put in.
"""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.programs import assert_none_left

from config import get_config
from errors import RunError
from tools.gpu import checks, first_steps
from training.command_line import config_from_arguments

REPORT = "please report this line"
A100 = {
    "gpus": 2,
    "name": "NVIDIA A100-SXM4-80GB",
    "capability": 8.0,
    "memory": 85.1,
    "precision": "bfloat16",
}
A100 |= {
    "paddle": "3.3.1, built for CUDA 12.6 and cuDNN 9.5.1, commit 0123456789",
    "built": True,
    "tf32": False,
}
A100 |= {
    "kinds": "2 x NVIDIA A100-SXM4-80GB, compute capability 8.0, 85.1 GB",
    "cuda": "NCCL 22502; cuDNN 90501",
}


def test_a_program_that_hangs_or_fails(tmp_path):
    bench = checks.Bench(tmp_path, True, {}, deadline=time.monotonic() + 1)
    program = tmp_path / "program.py"
    told = tmp_path / "told"
    program.write_text(
        f"import subprocess, time\nopen({str(told)!r}, 'w').write(f\"{{subprocess.Popen(['sleep', '99']).pid}}.\")\n"
        "time.sleep(99)"
    )
    with pytest.raises(RunError, match=r"^not finished within 240 s$"):
        bench.run(str(program))
    assert_none_left([int(told.read_text()[:-1])])
    told.unlink()
    bench.deadline += 60
    assert (
        bench.run(str(program), until=lambda: told.exists() and told.read_text().endswith("."))
        == ""
    )
    assert_none_left([int(told.read_text()[:-1])])
    program.write_text(
        "import sys\nprint('W1122 a banner', file=sys.stderr)\nsys.exit('error: so')"
    )
    with pytest.raises(RunError, match=r"^program\.py ended with status 1: error: so$"):
        bench.run(str(program))


class Answers(checks.Bench):
    """A bench whose processes aren't started: it keeps the command lines, and gives the answers
    that were put in.
    """

    def __init__(self, folder=Path("none"), about=(), **answers):
        super().__init__(folder, False, A100 | dict(about))
        self.answers = answers
        self.lines = []

    def ask(self, probe, request, **environment):
        jobs = request.get("jobs") or {"": request.get("words")}
        self.lines += [words for words in jobs.values() if words]
        answer = self.answers[probe]
        answer = answer.pop(0) if isinstance(answer, list) else answer
        return dict.fromkeys(jobs, answer) if probe == "train" and "vit" not in answer else answer


ROUTE = {
    "attentions": 12,
    "fused": 12,
    "types": ["bfloat16"],
    "backends": {"flash_attn": 12},
    "precision": "bfloat16",
}
SDPA = {
    "fused": {"ms": 0.51, "MB": 40.0, "error": 0.004},
    "plain": {"ms": 2.5, "MB": 200.0, "error": 0.006},
}
REPORTS = {"reports": [{"images_per_s": 2000.0, "data_wait": 0.0, "peak_memory_gpu": 21260.0}] * 4}
STEPS = {
    "columns": 3,
    "transfers": {"to_tensor loading/workers.py:212": 3.0},
    "weights": {"a": "0", "b": "1"},
}
RIGHT = {
    "ViT-S": {"difference": 0.0, "varies": 0.1},
    "ResNet-50": {"difference": 2e-5, "varies": 0.1},
}
USUAL = {
    "ViT-S": {"difference": 1e-3, "varies": 0.1},
    "ResNet-50": {"difference": 2e-3, "varies": 0.1},
}


def test_attention():
    def found(capability=8.0, **other):
        return checks.attention(Answers(about={"capability": capability}, route=ROUTE | other))

    told = "12 of 12 attentions of a ViT under -amp (bfloat16) are fused, in bfloat16; Paddle calls"
    assert found() == (True, f"{told} flash_attn 12 times")
    assert found(9.0, backends={}) == (
        False,
        f"{told} no fused kernel; expected all, by flash_attn: {REPORT}",
    )
    plain = {"fused": 0, "types": [], "backends": {}}  # as where a bias gives float32
    assert found(**plain) == (
        False,
        f"0 of 12 attentions of a ViT under -amp (bfloat16) are fused; expected all, by flash_attn: {REPORT}",
    )
    assert found(7.5, **plain)[0]
    assert not found(7.5)[0]


def test_flash():
    def found(**other):
        return checks.flash(Answers(sdpa=SDPA | other))

    told = "64 x 197 x 12 x 64, bfloat16, forward and backward: fused 0.51 ms and 40 MB kept,"
    told += " plain 2.5 ms and 200 MB kept; they round off 4.0e-03 and 6.0e-03 of the largest value"
    assert found() == (True, told)
    ok, text = found(plain=SDPA["plain"] | {"ms": 0.4})
    assert (ok, text.endswith(f"; expected the fused one to be faster: {REPORT}")) == (False, True)
    ok, text = found(fused=SDPA["fused"] | {"error": 0.2})
    assert not ok
    assert text.endswith("expected at most 0.03; don't train with -amp here, and report this line")
    assert checks.flash(Answers(about={"capability": 7.5}))[1].startswith(
        "not tried: Paddle has none below"
    )


def test_logits_beside_the_cpus():
    told = "float32 logits beside the CPU's, largest difference over their range: ViT-S 0.0e+00 with TF32 off,"
    told += " 1.0e-03 as Paddle has it; ResNet-50 2.0e-05 with TF32 off, 2.0e-03 as Paddle has it"
    assert checks.parity(Answers(logits=[RIGHT, RIGHT, USUAL])) == (True, told)
    ok, text = checks.parity(Answers(logits=[RIGHT, USUAL, USUAL]))
    assert (ok, text.endswith(f"; expected at most 0.0001 with TF32 off: {REPORT}")) == (
        False,
        True,
    )
    blind = RIGHT | {"ViT-S": {"difference": 0.0, "varies": 1e-4}}
    assert checks.parity(Answers(logits=[blind, RIGHT, USUAL])) == (
        False,
        f"{told}; but they hardly differ from image to image: {REPORT}",
    )


@pytest.mark.parametrize(
    ("columns", "transfers", "told"),
    [
        (
            3,
            {"to_tensor loading/workers.py:212": 3.0},
            ", and copies nothing else to or from the device",
        ),
        (
            3,
            {},
            ", and copies nothing else to or from the device",
        ),  # Paddle's own thread copies them
        (
            3,
            {
                "to_tensor loading/workers.py:212": 3.0,
                "item training/engine.py:9": 0.5,
                "to_tensor training/optim/ema.py:42": 152.0,
            },
            f", and besides 152 to_tensor training/optim/ema.py:42, 0.5 item training/engine.py:9; {REPORT}",
        ),
        (
            1,
            {"to_tensor loading/workers.py:212": 2.0},
            f", and besides 2 copies by the loader; {REPORT}",
        ),
    ],
)
def test_transfers(columns, transfers, told):
    found = checks.transfers(Answers(train={"columns": columns, "transfers": transfers}))
    assert found == (
        "nothing else" in told,
        f"a step brings the {columns} columns of its batch to the device{told}",
    )


def test_bits():
    one = {"vit": {"weights": {"a": "0", "b": "1"}}, "swin": {"weights": {"a": "0"}}}
    found = "12 steps twice with DETERMINISTIC"
    assert checks.same_bits(Answers(train=one)) == (
        True,
        f"{found}, the same bits of weights: vit, swin",
    )
    two = {"vit": {"weights": {"a": "0", "b": "2"}}, "swin": {"error": "RuntimeError: no kernel"}}
    assert checks.same_bits(Answers(train=[one, two])) == (
        False,
        f"{found}: vit differs in 1 of 2 tensors, such as b; swin failed (RuntimeError: no kernel); {REPORT}",
    )
    with pytest.raises(RunError, match=r"^RuntimeError: no kernel$"):
        checks.transfers(Answers(train=two["swin"]))


def test_a_resumed_runs_bits(tmp_path):
    for name, value in (("one", 0.0), ("two", 0.0), ("three", -0.0)):
        folder = tmp_path / name / "checkpoints" / "last"
        folder.mkdir(parents=True)
        save_file(
            {"a": np.ones(3, np.float32), "b": np.float32([value])}, folder / "model.safetensors"
        )
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    assert checks.compare_bits("saved", one, two) == (
        True,
        "saved: the 2 tensors of the whole run, bit by bit",
    )
    told = (
        f"saved: 1 of 2 tensors differ from the whole run's, such as model.safetensors b; {REPORT}"
    )
    assert checks.compare_bits("saved", one, three) == (False, told)
    assert not checks.compare_bits("saved", tmp_path / "none", tmp_path / "none")[0]


def test_rates_beside_their_estimate():
    for name, expected in {
        "NVIDIA A100-SXM4-80GB": 312, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "Tesla V100-SXM2": 125,
        "Tesla T4": 65, "NVIDIA GeForce RTX 4090": 165, "NVIDIA GeForce RTX 3090": 71,
        "NVIDIA GeForce RTX 3090 Ti": None, "Quadro T400": None,
    }.items():  # fmt: skip
        told = checks.rate(Answers(about={"name": name}, train=REPORTS))[1]
        assert (
            f"(0.3 x {expected} TFLOP/s / 28 GFLOP)"
            if expected
            else "; no estimate for this device"
        ) in told
    batches = {85.1: 256, 42.3: 128, 25.4: 64, 16.9: 64, 8.0: 32}
    assert {
        memory: checks.batch_of(Answers(about={"memory": memory})) for memory in batches
    } == batches
    found = "ViT-S, bfloat16, batch 256, kept on the device: 2000 images/s, 128.0 ms a step, 21.3 GB at most"
    found += "; estimate 3391 (0.3 x 312 TFLOP/s / 28 GFLOP)"
    assert checks.rate(Answers(train=REPORTS)) == (True, found)
    slow = {"reports": [REPORTS["reports"][0] | {"images_per_s": 1000.0}] * 4}
    ok, text = checks.rate(Answers(train=slow))
    assert (ok, ": less than half; is another program on the GPU" in text) == (False, True)
    for tf32, tflops in ((True, "156"), (False, "19.5")):
        text = checks.rate(Answers(about={"tf32": tf32}, train=REPORTS), "ViT-B", amp=False)[1]
        assert f"(0.3 x {tflops} TFLOP/s / 106 GFLOP)" in text


def test_the_multiply_adds_are_those_of_the_models():
    for name, found in checks.MULTIPLY_ADDS.items():
        model = get_config(checks.MODELS[name][0]).MODEL
        n = 197
        d = model.EMBED_DIM
        # qkv, proj and the MLP; scores and their products with the values
        block = 12 * d * d * n + 2 * n * n * d
        assert model.DEPTH * block + 196 * 768 * d == pytest.approx(found, rel=0.01)


def test_command_lines_for_a_gpu_are_accepted(tmp_path):
    bench = Answers(tmp_path, route=ROUTE, sdpa=SDPA, logits=RIGHT, train=REPORTS | STEPS)
    others = ("resumed", "sharded", "all-reduce")  # which the rehearsal makes alike
    found = {name: check(bench) for name, check in first_steps.CHECKS.items() if name not in others}
    assert {name: text for name, (ok, text) in found.items() if not ok} == {}
    configs = [config_from_arguments("main_single_gpu.py", words) for words in bench.lines]
    assert {config.MODEL.NAME for config in configs} == {file for file, _ in checks.MODELS.values()}
    assert {config.DATA.IMAGE_SIZE for config in configs} == {224}
    assert sum(config.DETERMINISTIC for config in configs) == 2 * 2 * 4
    assert found["host"] == (
        True,
        "ViT-S, batch 2: 1.0 ms a step, about what the host takes for any batch",
    )
    told = r"ViT-S, bfloat16, batch 256, loader processes \d+: 2000 images/s, 128.0 ms a step, 21.3 GB at most; 0% of"
    assert re.fullmatch(rf"{told} the time waits for data", found["loader"][1])
    one = Answers(tmp_path, about={"gpus": 1})
    assert checks.sharding(one) == checks.all_reduce(one) == (True, "not tried: it needs two GPUs")


def test_a_gpus_header(tmp_path):
    lines = first_steps.header(Answers())
    assert [line.split()[0] for line in lines[1:]] == [
        "toolkit",
        "paddle",
        "gpus",
        "cuda",
        "driver",
        "host",
    ]
    assert (
        lines[3] == "      gpus        2 x NVIDIA A100-SXM4-80GB, compute capability 8.0, 85.1 GB"
    )
    assert (
        "; check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES (docs/guides/gpu.md)"
        in first_steps.no_gpu(A100)
    )
    assert "; install paddlepaddle-gpu (docs/guides/gpu.md)" in first_steps.no_gpu(
        A100 | {"built": False}
    )
