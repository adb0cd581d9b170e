"""The checks of ``tools/doctor.py --gpu``. They run what docs/evidence/untested.md lists.

A check starts processes (the toolkit's programs, or ``tools/gpu/probe.py``) and returns a finding.
On a CPU (``--rehearse``), sizes are small, and speed isn't judged.

A training rate is compared with an estimate, in images per second: UTILISATION x peak / (3 x 2 x
multiply-adds of an image's forward pass). The factor 3 is for the backward pass, which costs as
much as two forward passes. The factor 2 is for a multiplication and an addition. The peaks are
those of NVIDIA's data sheets for dense matrices. UTILISATION is an assumption: DeiT's authors
reached 0.2 (DeiT-B, 2,000 images/s on eight V100, arXiv:2012.12877), with plain attention.
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
# seconds that a check may take; without problems, all checks together take ten minutes
LIMIT = 240
# the compute capability from which Paddle has flash attention
FLASH_CAPABILITY = 8.0
# The largest difference between float32 logits of two devices, over the range of the logits.
MAX_DIFFERENCE = 1e-4
# How much logits have to vary from image to image, over their range. If they hardly vary, equal
# logits prove nothing.
MIN_VARIATION = 0.01
# The largest rounding error of attention, over its largest value.
ROUNDING = {"bfloat16": 0.03, "float16": 0.004, "float32": 1e-5}
REPORT = "please report this line"
NEEDS_TWO = "not tried: it needs two GPUs"

_SMALL = "-o DATA.IMAGE_SIZE 32 MODEL.EMBED_DIM 32"
_TINY = f"{_SMALL} MODEL.DEPTH 2 MODEL.NUM_HEADS 2 MODEL.PATCH_SIZE 8"
_WINDOW = "MODEL.WINDOW_SIZE 4"
# By name: the file in configs/, and the options that make the model tiny.
MODELS = {
    "ViT-S": ("vit_small_patch16_224", _TINY),
    "ViT-B": ("vit_base_patch16_224", _TINY),
    "Swin-T": (
        "swin_tiny_patch4_window7_224",
        f"{_SMALL} MODEL.STAGE_DEPTHS [2,2] MODEL.NUM_HEADS [1,2] {_WINDOW}",
    ),
    "BEiT-B": ("beit_base_patch16_224", _TINY),
    "ResNet-50": ("resnet50", "-o DATA.IMAGE_SIZE 32 MODEL.DEPTH 18"),
}
# The number of images follows.
_SYNTHETIC = "-dataset=synthetic -o TRAIN.WARMUP_EPOCHS 0 TRAIN.NUM_EPOCHS 1 DATA.SYNTHETIC_SIZE"
_DIGITS = (
    "-cfg=vit_digits -batch_size=128 -amp -o DETERMINISTIC True TRAIN.MODEL_EMA True"
    " DATA.NUM_WORKERS 2 TRAIN.WARMUP_EPOCHS 1 SAVE_FREQ 1"
)


@dataclass
class Bench:
    """The place where checks are made.

    Attributes:
        folder: for the files of the checks.
        rehearsing: whether they are rehearsed on a CPU.
        about: the answer of ``probe.about``.
        ngpus: the number of ranks for the all-reduce; None: one for each GPU.
        deadline: when the check has to end, by ``time.monotonic``.
    """

    folder: Path
    rehearsing: bool
    about: dict[str, Any]
    ngpus: int | None = None
    deadline: float = float("inf")

    def model(self, name: str, folder: str, options: str = "") -> list[str]:
        """Returns the command line of a run of that model in a folder of its own."""
        file, tiny = MODELS[name]
        words = [f"-cfg={file}", f"-output={self.folder / folder}"]
        if self.rehearsing:
            words += tiny.split()
        return words + options.split()

    def ask(self, probe: str, request: Mapping[str, Any], **environment: Any) -> dict[str, Any]:
        """Returns the answer of a probe (``tools/gpu/probe.py``)."""
        printed = self.run("tools/gpu/probe.py", probe, json.dumps(request), **environment)
        return json.loads(printed.splitlines()[-1])

    def train(self, words: list[str], **request: Any) -> dict[str, Any]:
        """Returns the answer of ``probe.train`` for one job.

        Raises:
            RunError: the job failed.
        """
        answer = self.ask("train", {"jobs": {"": words}, **request})[""]
        if "error" in answer:
            raise RunError(answer["error"])
        return answer

    def run(
        self, program: str, *words: str, until: Callable[[], Any] | None = None, **environment: str
    ) -> str:
        """Runs a program of the toolkit and returns what it printed. All of its processes have
        ended.

        Args:
            until: as soon as this returns true, the program is killed by SIGKILL, and "" is
                returned.

        Raises:
            RunError: the program failed, or didn't end in time. The doctor's exit status 1 isn't a
                failure: it has found something to do.
        """
        environ = os.environ | environment
        if self.rehearsing:
            environ["CUDA_VISIBLE_DEVICES"] = ""
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
                        raise RunError(f"not finished within {LIMIT} s")
                else:
                    return ""
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        is_doctor = program == "tools/doctor.py"
        if process.returncode not in ((0, 1) if is_doctor else (0,)):
            last_line = (errors.strip() or "nothing on stderr").splitlines()[-1]
            raise RunError(
                f"{Path(program).name} ended with status {process.returncode}: {last_line[:240]}"
            )
        return printed


# ------------------------------------------------------------------ attention


def attention(bench: Bench) -> Finding:
    """Checks that attention under -amp is Paddle's fused kernel, in half precision."""
    answer = bench.ask("route", {"words": bench.model("ViT-B", "attention", "-amp")})
    count = answer["attentions"]
    fused = answer["fused"]
    found = f"{fused} of {count} attentions of a ViT under -amp ({answer['precision']}) are fused"
    if fused:
        called = ", ".join(f"{name} {number} times" for name, number in answer["backends"].items())
        found += f", in {', '.join(answer['types'])}; Paddle calls {called or 'no fused kernel'}"
    if bench.about["capability"] < FLASH_CAPABILITY:
        return not fused, f"{found}; none is expected below compute capability {FLASH_CAPABILITY:g}"
    is_half = answer["types"] == [answer["precision"]]
    if fused == count and is_half and answer["backends"].get("flash_attn"):
        return True, found
    return False, f"{found}; expected all, by flash_attn: {REPORT}"


def flash(bench: Bench) -> Finding:
    """Checks time, memory and rounding of fused attention beside those of plain products, in the
    shape of ViT-B/16.
    """
    # batch, length, heads, channels of a head
    shape = [64, 197, 12, 64]
    repeats = 20
    if bench.rehearsing:
        shape = [2, 50, 2, 16]
        repeats = 2
    elif bench.about["capability"] < FLASH_CAPABILITY:
        reason = f"Paddle has none below compute capability {FLASH_CAPABILITY:g}"
        return True, f"not tried: {reason}; the toolkit takes plain products"
    dtype = bench.about["precision"]
    answer = bench.ask("sdpa", {"shape": shape, "dtype": dtype, "repeats": repeats})
    fused = answer["fused"]
    plain = answer["plain"]

    def cost(way: dict[str, float]) -> str:
        # A CPU doesn't report how much is kept.
        memory = "" if bench.rehearsing else f" and {way['MB']:.0f} MB kept"
        return f"{way['ms']:.3g} ms{memory}"

    found = (
        f"{' x '.join(map(str, shape))}, {dtype}, forward and backward:"
        f" fused {cost(fused)}, plain {cost(plain)};"
        f" they round off {fused['error']:.1e} and {plain['error']:.1e} of the largest value"
    )
    if fused["error"] > ROUNDING[dtype]:
        limit = f"expected at most {ROUNDING[dtype]:g}"
        return False, f"{found}: {limit}; don't train with -amp here, and report this line"
    if not bench.rehearsing and fused["ms"] > plain["ms"]:
        return False, f"{found}; expected the fused one to be faster: {REPORT}"
    return True, found


# ------------------------------------------------------------------- training


def transfers(bench: Bench) -> Finding:
    """Checks that a training step copies nothing between host and device but its batch, with mixup,
    an average of the weights and AdamW.
    """
    mixed = "TRAIN.MIXUP_ALPHA 0.8 TRAIN.CUTMIX_ALPHA 1.0 TRAIN.MODEL_EMA True REPORT_FREQ 1000"
    job = bench.model("ViT-S", "transfers", f"-batch_size=8 -amp {_SYNTHETIC} 256 {mixed}")
    answer = bench.train(job, steps=16, transfers=True)
    loaded = 0
    others = {}
    for where, number in answer["transfers"].items():
        if " loading/workers.py:" in where:
            loaded += number
        else:
            others[where] = number
    found = f"a step brings the {answer['columns']} columns of its batch to the device"
    if loaded <= answer["columns"] and not others:
        return True, f"{found}, and copies nothing else to or from the device"
    most_first = sorted(others.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{number:g} {where}" for where, number in most_first)
    if not others:
        listed = f"{loaded:g} copies by the loader"
    return False, f"{found}, and besides {listed}; {REPORT}"


def parity(bench: Bench) -> Finding:
    """Checks that the same random weights give the same logits on the CPU and on the device. It
    compares them with TF32 off, and also with Paddle's own setting.
    """
    jobs = {name: bench.model(name, name, "-dataset=synthetic") for name in ("ViT-S", "ResNet-50")}
    request = {"jobs": jobs, "folder": str(bench.folder)}
    cpu = bench.ask("logits", request | {"cpu": True})
    exact = bench.ask("logits", request, NVIDIA_TF32_OVERRIDE="0")
    usual = exact if bench.rehearsing else bench.ask("logits", request)
    differences = [
        f"{name} {exact[name]['difference']:.1e} with TF32 off,"
        f" {usual[name]['difference']:.1e} as Paddle has it"
        for name in cpu
    ]
    found = "float32 logits beside the CPU's, largest difference over their range: "
    found += "; ".join(differences)
    if any(answer["varies"] < MIN_VARIATION for answer in cpu.values()):
        return False, f"{found}; but they hardly differ from image to image: {REPORT}"
    if max(answer["difference"] for answer in exact.values()) > MAX_DIFFERENCE:
        return False, f"{found}; expected at most {MAX_DIFFERENCE:g} with TF32 off: {REPORT}"
    return True, found


def same_bits(bench: Bench) -> Finding:
    """Checks that DETERMINISTIC gives the same weights after the same few steps, which four kinds
    of models make in two processes.
    """
    batch = 16
    steps = 12
    flags = ["", " -amp"]
    if bench.rehearsing:
        batch = 8
        steps = 4
        flags = [""]
    options = (
        f"-batch_size={batch} {_SYNTHETIC} 512 DETERMINISTIC True DATA.NUM_WORKERS 2"
        " REPORT_FREQ 1000"
    )
    names = [(name, flag) for name in ("ViT-S", "Swin-T", "BEiT-B", "ResNet-50") for flag in flags]

    def train(time: str) -> dict[str, Any]:
        jobs = {}
        for name, flag in names:
            folder = f"{time}-{name}{flag.strip()}"
            jobs[f"{name}{flag}"] = bench.model(name, folder, options + flag)
        return bench.ask("train", {"steps": steps, "jobs": jobs})

    first = train("first")
    second = train("second")
    wrong = []
    for name in first:
        error = first[name].get("error") or second[name].get("error")
        if error:
            wrong.append(f"{name} failed ({error[:120]})")
            continue
        weights = first[name]["weights"]
        different = [key for key in weights if weights[key] != second[name]["weights"][key]]
        if different:
            counts = f"{len(different)} of {len(weights)} tensors"
            wrong.append(f"{name} differs in {counts}, such as {different[0]}")
    found = f"{steps} steps twice with DETERMINISTIC"
    if wrong:
        return False, f"{found}: {'; '.join(wrong)}; {REPORT}"
    return True, f"{found}, the same bits of weights: {', '.join(first)}"


# ------------------------------------------------------------ saved and resumed


def resume(bench: Bench) -> Finding:
    """Checks that a run that is killed and resumed ends with the weights of one that isn't."""
    whole = bench.folder / "whole"
    killed = bench.folder / "killed"
    words = [*_DIGITS.split(), "SAVE_STEPS", "5", "TRAIN.NUM_EPOCHS", "5"]
    bench.run("main_single_gpu.py", *words, f"-output={whole}")
    saved = killed / "checkpoints"

    def is_in_second_epoch() -> bool:
        return any(saved.glob("epoch_0002*"))

    bench.run("main_single_gpu.py", *words, f"-output={killed}", until=is_in_second_epoch)
    if (killed / "result.json").exists():
        return False, "the run that was to be killed had ended already; run this check again"
    newest = max(file.name for file in saved.glob("epoch_*"))
    bench.run("main_single_gpu.py", "-resume=auto", f"-output={killed}")
    return compare_bits(f"killed after {newest}, resumed with", whole, killed)


def sharding(bench: Bench) -> Finding:
    """Checks that a run of two ranks with a sharded optimizer state, saved and resumed, ends with
    the weights of one that isn't interrupted.
    """
    if not bench.rehearsing and bench.about["gpus"] < 2:
        return True, NEEDS_TWO
    whole = bench.folder / "sharded"
    again = bench.folder / "sharded-again"
    options = f"{_DIGITS} TRAIN.NUM_EPOCHS 2 DIST.ENGINE fleet DIST.STRATEGY.sharding True"
    bench.run("main_multi_gpu.py", "-ngpus=2", *options.split(), f"-output={whole}")
    checkpoint = whole / "checkpoints" / "epoch_0001"
    bench.run("main_multi_gpu.py", f"-resume={checkpoint}", f"-output={again}")
    what = "fleet's sharding on 2 ranks, saved after epoch_0001, resumed with"
    return compare_bits(what, whole, again)


def compare_bits(what: str, whole: Path, again: Path) -> Finding:
    """Checks that the last checkpoints of two runs hold the same bits.

    Args:
        what: describes the second run.
        whole, again: the directories of the runs.
    """
    from safetensors.numpy import load_file

    different = []
    count = 0
    for file in sorted((whole / "checkpoints" / "last").glob("*.safetensors")):
        expected = load_file(file)
        resumed = load_file(again / "checkpoints" / "last" / file.name)
        for key in sorted({*expected, *resumed}):
            count += 1
            in_both = key in expected and key in resumed
            if not in_both or expected[key].tobytes() != resumed[key].tobytes():
                different.append(f"{file.name} {key}")
    if different or not count:
        example = f", such as {different[0]}" if different else ""
        counts = f"{len(different)} of {count} tensors"
        return False, f"{what}: {counts} differ from the whole run's{example}; {REPORT}"
    return True, f"{what}: the {count} tensors of the whole run, bit by bit"


def all_reduce(bench: Bench) -> Finding:
    """Checks an all-reduce over all GPUs, by the doctor itself."""
    if not bench.rehearsing and bench.about["gpus"] < 2:
        return True, NEEDS_TWO
    ranks = bench.ngpus or (2 if bench.rehearsing else bench.about["gpus"])
    printed = bench.run("tools/doctor.py", f"-ngpus={ranks}")
    if not (line := re.search(r"^(ok|todo) +all-reduce +(.*)$", printed, re.MULTILINE)):
        raise RunError(f"tools/doctor.py doesn't report an all-reduce: {printed.splitlines()[-1:]}")
    return line[1] == "ok", line[2]


# ----------------------------------------------------------------------- rates

UTILISATION = 0.3
# The share of the estimate below which a rate is reported as slow.
MIN_SHARE = 0.5
# The share of the time that waits for data, above which the loader is reported as slow.
INPUT_BOUND = 0.2
# of one image's forward pass
MULTIPLY_ADDS = {"ViT-S": 4.6e9, "ViT-B": 17.6e9}
# TFLOP/s by a pattern of the driver's name: half precision with sums in float32, TF32, float32.
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
    """Compares the rate of training with its estimate. One batch stays on the device for all steps.

    Args:
        share: divides the batch, for a model that needs more memory than ViT-S.
    """
    if bench.rehearsing and (name, amp) != ("ViT-S", True):
        return True, 'not rehearsed: the line "rate" is the same'
    batch = batch_of(bench, share)
    report, speed = _medians(bench, name, batch, amp)
    precision = bench.about["precision"] if amp else "float32"
    found = f"{name}, {precision}, batch {batch}, kept on the device: {speed}"
    device = bench.about.get("name", "")
    peaks = next((peaks for pattern, peaks in PEAKS.items() if re.search(pattern, device)), None)
    if not peaks:
        return True, f"{found}; no estimate for this device"
    half, tf32, float32 = peaks
    if amp:
        tflops = half
    elif bench.about["tf32"]:
        tflops = tf32
    else:
        tflops = float32
    cost = 3 * 2 * MULTIPLY_ADDS[name]
    estimate = UTILISATION * tflops * 1e12 / cost
    formula = f"{UTILISATION:g} x {tflops:g} TFLOP/s / {cost / 1e9:.0f} GFLOP"
    found += f"; estimate {estimate:.0f} ({formula})"
    if report["images_per_s"] < MIN_SHARE * estimate:
        advice = "is another program on the GPU, or is it hot? Else report this line"
        return False, f"{found}: less than half; {advice}"
    return True, found


def loader(bench: Bench) -> Finding:
    """Checks that the loader keeps up with training: ViT-S/16 under -amp, with the augmentation of
    its recipe.
    """
    batch = batch_of(bench)
    report, speed = _medians(bench, "ViT-S", batch, amp=True, keep=False)
    found = (
        f"ViT-S, {bench.about['precision']}, batch {batch}, loader processes {_workers(bench)}:"
        f" {speed}; {report['data_wait']:.0%} of the time waits for data"
    )
    if report["data_wait"] > INPUT_BOUND and not bench.rehearsing:
        return (
            False,
            f"{found}: raise DATA.NUM_WORKERS if there are cores (docs/evidence/performance.md)",
        )
    return True, found


def host(bench: Bench) -> Finding:
    """Measures the time that the host takes for a step, with a batch so small that the GPU takes
    less.
    """
    batch = 2
    report, _ = _medians(bench, "ViT-S", batch, amp=True)
    milliseconds = 1e3 * batch / report["images_per_s"]
    step = f"ViT-S, batch {batch}: {milliseconds:.1f} ms a step"
    return True, f"{step}, about what the host takes for any batch"


def batch_of(bench: Bench, share: int = 1) -> int:
    """Returns the size of a batch that fits the device's memory: ViT-S in float32 keeps about 0.2
    GB for an image.

    Args:
        share: divides the batch, for a model that needs more.
    """
    if bench.rehearsing:
        return 4
    fitting = [batch for batch in (256, 128, 64) if bench.about["memory"] >= 0.2 * batch]
    largest = fitting[0] if fitting else 32
    return max(32, largest // share)


def _workers(bench: Bench) -> int:
    return 1 if bench.rehearsing else max(1, min(16, len(os.sched_getaffinity(0)) - 1))


def _medians(
    bench: Bench, name: str, batch: int, amp: bool, keep: bool = True
) -> tuple[dict[str, float], str]:
    """Trains for a few steps. Returns the medians of all reports but the first, and words that say
    how fast training was.

    Args:
        keep: whether one batch is kept on the device for all steps.
    """
    report_freq = 2 if bench.rehearsing else 10
    steps = 4 * report_freq
    options = f"-batch_size={batch} {_SYNTHETIC} {batch * (steps + 1)} REPORT_FREQ {report_freq}"
    if amp:
        options = f"-amp {options}"
    folder = f"rate-{name}-{batch}-{amp}-{keep}"
    job = bench.model(name, folder, f"{options} DATA.NUM_WORKERS {_workers(bench)}")
    reports = bench.train(job, steps=steps, keep=keep)["reports"]
    medians = {
        key: statistics.median(report[key] for report in reports[1:])
        for key in ("images_per_s", "data_wait")
    }
    rate = medians["images_per_s"]
    speed = f"{rate:.0f} images/s, {1e3 * batch / rate:.1f} ms a step"
    if memory := max(report.get("peak_memory_gpu", 0) for report in reports):
        speed += f", {memory / 1e3:.1f} GB at most"
    return medians, speed
