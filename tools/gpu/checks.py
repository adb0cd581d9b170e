"""The checks of ``tools/doctor.py --gpu``: what docs/gpu.md says was never run, run.

A check starts processes (the toolkit's programs, or ``tools/gpu/probe.py``) and returns a finding.
Rehearsed on a CPU, sizes are small, and speed isn't judged.

The estimate of a rate is UTILISATION x peak / (3 x 2 x multiply-adds of an image's forward pass). A
backward pass counts as two forward ones. The peaks are those of NVIDIA's data sheets, dense.
UTILISATION is an assumption: DeiT's authors reached 0.2 (DeiT-B, 2,000 images/s on eight V100,
arXiv:2012.12877), with plain attention.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import RunError
from tools.checks.machine import Finding

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240  # seconds for a check; where all is well, all of them together take ten minutes
FLASH = 8.0  # compute capability from which Paddle has flash attention
WORST = 1e-4  # of the logits' range: float32 on two devices
LEAST_VARIES = 0.01  # of that range, from image to image: else equal logits would say nothing
# of attention, over its largest value
ROUNDING = {"bfloat16": 0.03, "float16": 0.004, "float32": 1e-5}
REPORT = "please report this line"
ALONE = "not tried: it needs two GPUs"

_SMALL = "-o DATA.IMAGE_SIZE 32 MODEL.EMBED_DIM 32"
_TINY = f"{_SMALL} MODEL.DEPTH 2 MODEL.NUM_HEADS 2 MODEL.PATCH_SIZE 8"
_WINDOW = "MODEL.WINDOW_SIZE 4"
MODELS = {  # (the file in configs/, what makes it tiny)
    "ViT-S": ("vit_small_patch16_224", _TINY),
    "ViT-B": ("vit_base_patch16_224", _TINY),
    "Swin-T": (
        "swin_tiny_patch4_window7_224",
        f"{_SMALL} MODEL.STAGE_DEPTHS [2,2] MODEL.NUM_HEADS [1,2] {_WINDOW}",
    ),
    "BEiT-B": ("beit_base_patch16_224", _TINY),
    "ResNet-50": ("resnet50", "-o DATA.IMAGE_SIZE 32 MODEL.DEPTH 18"),
}
# and their number
_SYNTHETIC = "-dataset=synthetic -o TRAIN.WARMUP_EPOCHS 0 TRAIN.NUM_EPOCHS 1 DATA.SYNTHETIC_SIZE"
_DIGITS = "-cfg=vit_digits -batch_size=128 -amp -o DETERMINISTIC True TRAIN.MODEL_EMA True DATA.NUM_WORKERS 2"
_DIGITS += " TRAIN.WARMUP_EPOCHS 1 SAVE_FREQ 1"


@dataclass
class Bench:
    """Where the checks are made: ``about`` is the answer of ``probe.about``; ``folder`` takes
    what they leave.
    """

    folder: Path
    rehearsing: bool
    about: dict[str, Any]
    ngpus: int | None = None
    deadline: float = float("inf")

    def model(self, name: str, folder: str, options: str = "") -> list[str]:
        """The command line of a run of that model in a folder of its own."""
        file, tiny = MODELS[name]
        return [
            f"-cfg={file}",
            f"-output={self.folder / folder}",
            *(tiny * self.rehearsing).split(),
            *options.split(),
        ]

    def ask(self, probe: str, request: Mapping[str, Any], **environment: Any) -> dict[str, Any]:
        """The answer of a probe (``tools/gpu/probe.py``)."""
        printed = self.run("tools/gpu/probe.py", probe, json.dumps(request), **environment)
        return json.loads(printed.splitlines()[-1])

    def train(self, words: list[str], **request: Any) -> dict[str, Any]:
        """The answer of ``probe.train`` for one job.

        Raises:
            RunError: it failed.
        """
        answer = self.ask("train", {"jobs": {"": words}, **request})[""]
        if "error" in answer:
            raise RunError(answer["error"])
        return answer

    def run(
        self, program: str, *words: str, until: Callable[[], Any] | None = None, **environment: str
    ) -> str:
        """Runs a program of the toolkit and returns what it printed; none of its processes is left.

        Args:
            until: as soon as this holds, the program is killed by SIGKILL.

        Raises:
            RunError: it failed, or didn't end in time. Status 1 of the doctor is no failure:
                something is to do.
        """
        environ = (
            os.environ | environment | ({"CUDA_VISIBLE_DEVICES": ""} if self.rehearsing else {})
        )
        streams = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "errors": "replace",
        }
        command = [sys.executable, str(ROOT / program), *words]
        with subprocess.Popen(
            command, cwd=self.folder, env=environ, start_new_session=True, **streams
        ) as process:
            try:
                while not (until and until()):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        printed, errors = process.communicate(timeout=0.002 if until else 0.5)
                        break
                    if time.monotonic() > self.deadline:
                        raise RunError(f"no end within the {LIMIT} s of a check")
                else:
                    return ""
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode > (program == "tools/doctor.py") or process.returncode < 0:
            told = (errors.strip() or "nothing on stderr").splitlines()[-1]
            raise RunError(
                f"{Path(program).name} ended with status {process.returncode}: {told[:240]}"
            )
        return printed


# ------------------------------------------------------------------ attention


def attention(bench: Bench) -> Finding:
    """Whether -amp's attention is Paddle's fused one, in half precision."""
    answer = bench.ask("route", {"words": bench.model("ViT-B", "attention", "-amp")})
    count = answer["attentions"]
    fused = answer["fused"]
    found = f"{fused} of {count} attentions of a ViT under -amp ({answer['precision']}) are fused"
    if fused:
        called = ", ".join(f"{name} {number} times" for name, number in answer["backends"].items())
        found += f", in {', '.join(answer['types'])}; Paddle calls {called or 'no fused kernel'}"
    if bench.about["capability"] < FLASH:
        return not fused, f"{found}; none is expected below compute capability {FLASH:g}"
    right = (
        fused == count
        and answer["types"] == [answer["precision"]]
        and answer["backends"].get("flash_attn")
    )
    return bool(right), found if right else f"{found}; expected all, by flash_attn: {REPORT}"


def flash(bench: Bench) -> Finding:
    """Fused attention beside plain products, in the shape of ViT-B/16."""
    shape, repeats = ([2, 50, 2, 16], 2) if bench.rehearsing else ([64, 197, 12, 64], 20)
    dtype = bench.about["precision"]
    if not bench.rehearsing and bench.about["capability"] < FLASH:
        return (
            True,
            f"not tried: Paddle has none below compute capability {FLASH:g}; the toolkit takes plain products",
        )
    answer = bench.ask("sdpa", {"shape": shape, "dtype": dtype, "repeats": repeats})
    fused = answer["fused"]
    plain = answer["plain"]
    kept = ["" if bench.rehearsing else f" and {way['MB']:.0f} MB kept" for way in (fused, plain)]
    found = f"{' x '.join(map(str, shape))}, {dtype}, forward and backward: fused {fused['ms']:.3g} ms{kept[0]}, plain"
    found += f" {plain['ms']:.3g} ms{kept[1]}; they round off {fused['error']:.1e} and {plain['error']:.1e} of the"
    found += " largest value"
    if fused["error"] > ROUNDING[dtype]:
        return (
            False,
            f"{found}: expected at most {ROUNDING[dtype]:g}; don't train with -amp here, and report this line",
        )
    if not bench.rehearsing and fused["ms"] > plain["ms"]:
        return False, f"{found}; expected the fused one to be faster: {REPORT}"
    return True, found


# ------------------------------------------------------------------- training


def transfers(bench: Bench) -> Finding:
    """Copies between host and device in a training step, with mixup, an average and AdamW."""
    mixed = "TRAIN.MIXUP_ALPHA 0.8 TRAIN.CUTMIX_ALPHA 1.0 TRAIN.MODEL_EMA True REPORT_FREQ 1000"
    job = bench.model("ViT-S", "transfers", f"-batch_size=8 -amp {_SYNTHETIC} 256 {mixed}")
    answer = bench.train(job, steps=16, transfers=True)
    loaded = sum(
        number for where, number in answer["transfers"].items() if " loading/workers.py:" in where
    )
    others = {
        where: number
        for where, number in answer["transfers"].items()
        if " loading/workers.py:" not in where
    }
    found = f"a step brings the {answer['columns']} columns of its batch to the device"
    if loaded <= answer["columns"] and not others:
        return True, f"{found}, and nothing else goes there or back"
    listed = ", ".join(
        f"{number:g} {where}" for where, number in sorted(others.items(), key=lambda item: -item[1])
    )
    return False, f"{found}, and besides {listed or f'{loaded:g} copies by the loader'}; {REPORT}"


def parity(bench: Bench) -> Finding:
    """Logits of the same random weights on the CPU and here, with TF32 off, and as Paddle has it."""
    jobs = {name: bench.model(name, name, "-dataset=synthetic") for name in ("ViT-S", "ResNet-50")}
    request = {"jobs": jobs, "folder": str(bench.folder)}
    cpu = bench.ask("logits", request | {"cpu": True})
    exact = bench.ask("logits", request, NVIDIA_TF32_OVERRIDE="0")
    usual = exact if bench.rehearsing else bench.ask("logits", request)
    told = [
        f"{name} {exact[name]['difference']:.1e} with TF32 off, {usual[name]['difference']:.1e} as Paddle has it"
        for name in cpu
    ]
    found = (
        f"float32 logits beside the CPU's, largest difference over their range: {'; '.join(told)}"
    )
    if any(answer["varies"] < LEAST_VARIES for answer in cpu.values()):
        return False, f"{found}; but they hardly differ from image to image: {REPORT}"
    if max(answer["difference"] for answer in exact.values()) > WORST:
        return False, f"{found}; expected at most {WORST:g} with TF32 off: {REPORT}"
    return True, found


def same_bits(bench: Bench) -> Finding:
    """The same few steps of four kinds of models, in two processes: DETERMINISTIC means the same
    weights.
    """
    batch, steps, flags = (8, 4, ("",)) if bench.rehearsing else (16, 12, ("", " -amp"))
    options = f"-batch_size={batch} {_SYNTHETIC} 512 DETERMINISTIC True DATA.NUM_WORKERS 2 REPORT_FREQ 1000"
    names = [(name, flag) for name in ("ViT-S", "Swin-T", "BEiT-B", "ResNet-50") for flag in flags]
    first, second = (
        bench.ask("train", {"steps": steps, "jobs": {
            f"{name}{flag}": bench.model(name, f"{time}-{name}{flag.strip()}", options + flag) for name, flag in names
        }})
        for time in ("first", "second")
    )  # fmt: skip
    wrong = []
    for name, one in first.items():
        two = second[name]
        if failed := one.get("error") or two.get("error"):
            wrong.append(f"{name} failed ({failed[:120]})")
        elif differ := [key for key, bits in one["weights"].items() if two["weights"][key] != bits]:
            wrong.append(
                f"{name} differs in {len(differ)} of {len(one['weights'])} tensors, such as {differ[0]}"
            )
    found = f"{steps} steps twice with DETERMINISTIC"
    if wrong:
        return False, f"{found}: {'; '.join(wrong)}; {REPORT}"
    return True, f"{found}, the same bits of weights: {', '.join(first)}"


# ------------------------------------------------------------ saved, gone on with


def resume(bench: Bench) -> Finding:
    """A run that is killed by SIGKILL and goes on, beside one that isn't."""
    whole = bench.folder / "whole"
    killed = bench.folder / "killed"
    words = [*_DIGITS.split(), "SAVE_STEPS", "5", "TRAIN.NUM_EPOCHS", "5"]
    bench.run("main_single_gpu.py", *words, f"-output={whole}")
    saved = killed / "checkpoints"
    bench.run(
        "main_single_gpu.py",
        *words,
        f"-output={killed}",
        until=lambda: list(saved.glob("epoch_0002*")),
    )
    if (killed / "result.json").exists():
        return False, "the run that was to be killed had ended already; run this check again"
    newest = max(file.name for file in saved.glob("epoch_*"))
    bench.run("main_single_gpu.py", "-resume=auto", f"-output={killed}")
    return compare_bits(f"killed after {newest}, gone on with", whole, killed)


def sharding(bench: Bench) -> Finding:
    """A run of two ranks that share the optimizer's state out, saved and gone on with."""
    if not bench.rehearsing and bench.about["gpus"] < 2:
        return True, ALONE
    whole = bench.folder / "sharded"
    again = bench.folder / "sharded-again"
    words = [
        *_DIGITS.split(),
        "TRAIN.NUM_EPOCHS",
        "2",
        "DIST.ENGINE",
        "fleet",
        "DIST.STRATEGY.sharding",
        "True",
    ]
    bench.run("main_multi_gpu.py", "-ngpus=2", *words, f"-output={whole}")
    bench.run(
        "main_multi_gpu.py", f"-resume={whole / 'checkpoints' / 'epoch_0001'}", f"-output={again}"
    )
    return compare_bits(
        "fleet's sharding on 2 ranks, saved after epoch_0001, gone on with", whole, again
    )


def compare_bits(what: str, whole: Path, again: Path) -> Finding:
    """Whether two runs' last checkpoints hold the same bits."""
    from safetensors.numpy import load_file

    differ = []
    count = 0
    for file in sorted((whole / "checkpoints" / "last").glob("*.safetensors")):
        one = load_file(file)
        two = load_file(again / "checkpoints" / "last" / file.name)
        count += len({*one, *two})
        differ += [
            f"{file.name} {key}"
            for key in sorted({*one, *two})
            if key not in one or key not in two or one[key].tobytes() != two[key].tobytes()
        ]
    if differ or not count:
        first = f", such as {differ[0]}" if differ else ""
        return (
            False,
            f"{what}: {len(differ)} of {count} tensors differ from the whole run's{first}; {REPORT}",
        )
    return True, f"{what}: the {count} tensors of the whole run, bit by bit"


def all_reduce(bench: Bench) -> Finding:
    """The doctor's own all-reduce, over all GPUs."""
    if not bench.rehearsing and bench.about["gpus"] < 2:
        return True, ALONE
    ranks = bench.ngpus or (2 if bench.rehearsing else bench.about["gpus"])
    printed = bench.run("tools/doctor.py", f"-ngpus={ranks}")
    if not (line := re.search(r"^(ok|todo) +all-reduce +(.*)$", printed, re.MULTILINE)):
        raise RunError(
            f"tools/doctor.py says nothing of an all-reduce: {printed.splitlines()[-1:]}"
        )
    return line[1] == "ok", line[2]


# ----------------------------------------------------------------------- rates

UTILISATION = 0.3
LEAST = 0.5  # of the estimate: less is worth a look
INPUT_BOUND = 0.2  # share of the time that waits for data, from which on a run says so
MULTIPLY_ADDS = {"ViT-S": 4.6e9, "ViT-B": 17.6e9}  # of one image's forward pass
# by a pattern of the driver's name, TFLOP/s: half precision with sums in float32, TF32, float32
PEAKS = {
    r"H100.*PCIe": (756, 378, 51),
    r"H100": (989, 494, 67),
    r"A100": (312, 156, 19.5),
    r"V100": (125, 15.7, 15.7),
    r"\bT4\b": (65, 8.1, 8.1),
    r"RTX 4090(?! Laptop)": (165, 82.6, 82.6),
    r"RTX 3090(?! Ti)": (71, 35.6, 35.6),
}


def rate(bench: Bench, name: str = "ViT-S", amp: bool = True, share: int = 1) -> Finding:
    """Training with one batch that stays on the device; ``share``: of the batch that the memory
    holds.
    """
    if bench.rehearsing and (name, amp) != ("ViT-S", True):
        return True, 'not rehearsed: the line "rate" is the same'
    batch = batch_of(bench, share)
    report, told = _medians(bench, name, batch, amp)
    found = f"{name}, {bench.about['precision'] if amp else 'float32'}, batch {batch}, kept on the device: {told}"
    known = [
        peak for pattern, peak in PEAKS.items() if re.search(pattern, bench.about.get("name", ""))
    ]
    if not known:
        return True, f"{found}; no estimate for this device"
    tflops = known[0][0 if amp else 1 if bench.about["tf32"] else 2]
    cost = 6 * MULTIPLY_ADDS[name]
    estimate = UTILISATION * tflops * 1e12 / cost
    found += (
        f"; estimate {estimate:.0f} ({UTILISATION:g} x {tflops:g} TFLOP/s / {cost / 1e9:.0f} GFLOP)"
    )
    if report["images_per_s"] < LEAST * estimate:
        return (
            False,
            f"{found}: less than half; is another program on the GPU, or is it hot? Else report this line",
        )
    return True, found


def loader(bench: Bench) -> Finding:
    """ViT-S/16, -amp, with the loader and its recipe's augmentation."""
    batch = batch_of(bench)
    report, told = _medians(bench, "ViT-S", batch, amp=True, keep=False)
    found = f"ViT-S, {bench.about['precision']}, batch {batch}, loader processes {_workers(bench)}: {told};"
    found += f" {report['data_wait']:.0%} of the time waits for data"
    if report["data_wait"] > INPUT_BOUND and not bench.rehearsing:
        return False, f"{found}: raise DATA.NUM_WORKERS if there are cores (docs/performance.md)"
    return True, found


def host(bench: Bench) -> Finding:
    """Steps so small that the host is what takes the time."""
    report, _ = _medians(bench, "ViT-S", 2, amp=True)
    return (
        True,
        f"ViT-S, batch 2: {2e3 / report['images_per_s']:.1f} ms a step, about what the host takes for any batch",
    )


def batch_of(bench: Bench, share: int = 1) -> int:
    """The batch to measure with: ViT-S in float32 keeps about 0.2 GB for an image."""
    if bench.rehearsing:
        return 4
    return max(
        32,
        next((batch for batch in (256, 128, 64) if bench.about["memory"] >= 0.2 * batch), 32)
        // share,
    )


def _workers(bench: Bench) -> int:
    return 1 if bench.rehearsing else max(1, min(16, len(os.sched_getaffinity(0)) - 1))


def _medians(
    bench: Bench, name: str, batch: int, amp: bool, keep: bool = True
) -> tuple[dict[str, float], str]:
    """(medians of the reports of a few steps, the first left out; how fast that is, in words)."""
    every = 2 if bench.rehearsing else 10
    words = f"{'-amp ' * amp}-batch_size={batch} {_SYNTHETIC} {batch * (4 * every + 1)} REPORT_FREQ {every}"
    folder = f"rate-{name}-{batch}-{amp}-{keep}"
    job = bench.model(name, folder, f"{words} DATA.NUM_WORKERS {_workers(bench)}")
    reports = bench.train(job, steps=4 * every, keep=keep)["reports"]
    found = {
        key: statistics.median(report[key] for report in reports[1:])
        for key in ("images_per_s", "data_wait")
    }
    told = (
        f"{found['images_per_s']:.0f} images/s, {1e3 * batch / found['images_per_s']:.1f} ms a step"
    )
    if memory := max(report.get("peak_memory_gpu", 0) for report in reports):
        told += f", {memory / 1e3:.1f} GB at most"
    return found, told
