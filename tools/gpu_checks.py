"""The first steps on a GPU, for ``tools/doctor.py --gpu``: what docs/gpu.md says was never run, run.

A check starts processes (the toolkit's programs, or ``tools/gpu_probe.py``) within a time limit, and gives a finding.
A check that fails is a finding, too, and the others go on. Rehearsed on a CPU, sizes are small; speed isn't judged.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errors import RunError
from tools.machine import Finding

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 240  # seconds for a check; the ten minutes are what they take together where all is well
TOO_LONG = f"no end within the {LIMIT} s of a check"
FLASH = 8.0  # compute capability from which Paddle has flash attention
WORST = 1e-4  # of the logits' range: float32 on two devices
LEAST_VARIES = 0.01  # of that range, from image to image: else equal logits would say nothing
ROUNDING = {"bfloat16": 0.03, "float16": 0.004, "float32": 1e-5}  # of attention, over its largest value
# The tiny models of a rehearsal.
_SMALL = "DATA.IMAGE_SIZE 32 MODEL.EMBED_DIM 32"
_TINY = {
    "vit": f"-cfg=vit_small_patch16_224 -o {_SMALL} MODEL.DEPTH 2 MODEL.NUM_HEADS 2 MODEL.PATCH_SIZE 8",
    "swin": f"-cfg=swin_tiny_patch4_window7_224 -o {_SMALL} MODEL.STAGE_DEPTHS [2,2] MODEL.NUM_HEADS [1,2]"
    " MODEL.WINDOW_SIZE 4",
    "beit": f"-cfg=beit_base_patch16_224 -o {_SMALL} MODEL.DEPTH 2 MODEL.NUM_HEADS 2 MODEL.PATCH_SIZE 8",
    "resnet": "-cfg=resnet18 -o DATA.IMAGE_SIZE 32",
}
_FULL = {
    "vit": "-cfg=vit_small_patch16_224",
    "swin": "-cfg=swin_tiny_patch4_window7_224",
    "beit": "-cfg=beit_base_patch16_224",
    "resnet": "-cfg=resnet50",
}
KEPT = "-dataset=synthetic -o TRAIN.WARMUP_EPOCHS 0 TRAIN.NUM_EPOCHS 1 DATA.SYNTHETIC_SIZE"  # and their number


@dataclass
class Bench:
    """Where the checks are made: ``about`` is the answer of ``gpu_probe.about``; ``folder`` takes what they leave."""

    folder: Path
    rehearsing: bool
    about: dict[str, Any]
    ngpus: int | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + LIMIT)

    @property
    def several(self) -> bool:
        return self.rehearsing or self.about["gpus"] > 1

    def model(self, family: str, folder: str, *words: str) -> list[str]:
        """The command line of a run of that family's model in a folder of its own."""
        models = _TINY if self.rehearsing else _FULL
        return [*models[family].split(), f"-output={self.folder / folder}", *" ".join(words).split()]

    def ask(self, probe: str, request: Mapping[str, Any], **environment: str) -> dict[str, Any]:
        """The answer of a probe (``tools/gpu_probe.py``)."""
        with started(["tools/gpu_probe.py", probe, json.dumps(request)], self, **environment) as process:
            return json.loads(ended(process, self.deadline).splitlines()[-1])

    def run(self, program: str, *words: str) -> None:
        """Runs a program of the toolkit to its end."""
        with started([program, *words], self) as process:
            ended(process, self.deadline)


@contextlib.contextmanager
def started(words: list[str], bench: Bench, **environment: str) -> Iterator[subprocess.Popen]:
    """A program of the toolkit in a process group of its own, no process of which outlives the body."""
    environ = os.environ | environment | ({"CUDA_VISIBLE_DEVICES": ""} if bench.rehearsing else {})
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    command = [sys.executable, str(ROOT / words[0]), *words[1:]]
    with subprocess.Popen(command, cwd=bench.folder, env=environ, start_new_session=True, **streams) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ended(process: subprocess.Popen, deadline: float, statuses: tuple[int, ...] = (0,)) -> str:
    """Waits for a program and returns what it printed; ``statuses`` are those that it may end with.

    Raises:
        RunError: it failed, or didn't end in time.
    """
    try:
        printed, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RunError(TOO_LONG) from None
    if process.returncode not in statuses:
        raise RunError(f"{Path(process.args[1]).name} ended with status {process.returncode}: {told_last(errors)}")
    return printed


def told_last(errors: str) -> str:
    """The line of what a program said on stderr that tells most: its own error, or an exception, or the last."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["nothing on stderr"]
    for pattern in (r"(rank \d+: )?error: ", r"(\w+\.)*\w*Error: "):
        if found := [line for line in lines if re.match(pattern, line)]:
            return found[-1][:240]
    return lines[-1][:240]


# ------------------------------------------------------------------ attention


def attention(bench: Bench) -> Finding:
    """Whether -amp's attention is Paddle's fused one, in half precision."""
    full = ["-cfg=vit_base_patch16_224", f"-output={bench.folder / 'attention'}"]
    words = bench.model("vit", "attention") if bench.rehearsing else full
    return judged_attention(bench.ask("route", {"words": [*words, "-amp"]}), bench.about["capability"])


def judged_attention(answer: Mapping[str, Any], capability: float) -> Finding:
    count, fused = answer["attentions"], answer["fused"]
    backends = ", ".join(f"{name} {number} times" for name, number in answer["backends"].items()) or "no fused kernel"
    found = f"{fused} of {count} attentions of a ViT under -amp ({answer['precision']}) are fused"
    if fused:
        found += f", in {', '.join(answer['types'])}; Paddle calls {backends}"
    if capability < FLASH:
        return not fused, f"{found}; none is expected below compute capability {FLASH:g}"
    right = fused == count and answer["types"] == [answer["precision"]] and answer["backends"].get("flash_attn")
    return bool(right), found if right else f"{found}; expected all, by flash_attn: please report this line"


def flash(bench: Bench) -> Finding:
    """Fused attention beside plain products, in the shapes of ViT-B/16."""
    shape, repeats = ([2, 50, 2, 16], 2) if bench.rehearsing else ([64, 197, 12, 64], 20)
    dtype = bench.about["precision"]
    if not bench.rehearsing and bench.about["capability"] < FLASH:
        return True, f"not tried: Paddle has none below compute capability {FLASH:g}; the toolkit takes plain products"
    answer = bench.ask("sdpa", {"shape": shape, "dtype": dtype, "repeats": repeats})
    return judged_flash(answer, shape, dtype, bench.rehearsing)


def judged_flash(answer: Mapping[str, Any], shape: list[int], dtype: str, rehearsing: bool) -> Finding:
    fused, plain = answer["fused"], answer["plain"]
    size = " x ".join(map(str, shape))
    kept = ["" if rehearsing else f" and {way['MB']:.0f} MB kept" for way in (fused, plain)]
    found = f"{size}, {dtype}, forward and backward: fused {fused['ms']:.3g} ms{kept[0]}, plain {plain['ms']:.3g} ms"
    found += f"{kept[1]}; they round off {fused['error']:.1e} and {plain['error']:.1e} of the largest value"
    if fused["error"] > ROUNDING[dtype]:
        return False, f"{found}: expected at most {ROUNDING[dtype]:g}; don't train with -amp here, and report this line"
    if not rehearsing and fused["ms"] > plain["ms"]:
        return False, f"{found}; expected the fused one to be faster: please report this line"
    return True, found


# ------------------------------------------------------------------- training


def transfers(bench: Bench) -> Finding:
    """Copies between host and device in a training step, with mixup, an average and AdamW."""
    mixed = "TRAIN.MIXUP_ALPHA 0.8 TRAIN.CUTMIX_ALPHA 1.0 TRAIN.MODEL_EMA True REPORT_FREQ 1000"
    job = bench.model("vit", "transfers", f"-batch_size=8 -amp {KEPT} 256 {mixed}")
    return judged_transfers(only(bench.ask("train", {"jobs": {"vit": job}, "steps": 16, "transfers": True})))


def judged_transfers(answer: Mapping[str, Any]) -> Finding:
    loaded = sum(number for where, number in answer["transfers"].items() if " loader.py:" in where)
    others = {where: number for where, number in answer["transfers"].items() if " loader.py:" not in where}
    found = f"a step brings the {answer['columns']} columns of its batch to the device"
    if loaded <= answer["columns"] and not others:
        return True, f"{found}, and nothing else goes there or back"
    listed = ", ".join(f"{number:g} {where}" for where, number in sorted(others.items(), key=lambda item: -item[1]))
    return False, f"{found}, and besides {listed or f'{loaded:g} copies by the loader'}; please report this line"


def same_bits(bench: Bench) -> Finding:
    """The same few steps of four kinds of models, in two processes: DETERMINISTIC means the same weights."""
    size, steps = ("-batch_size=8", 4) if bench.rehearsing else ("-batch_size=16", 12)
    precisions = {"": ""} if bench.rehearsing else {"": "", " -amp": "-amp"}

    def trained(time: str) -> dict[str, Any]:
        jobs = {}
        for family in _FULL:
            for shown, flag in precisions.items():
                options = f"{size} {flag} {KEPT} 512 DETERMINISTIC True DATA.NUM_WORKERS 2 REPORT_FREQ 1000"
                jobs[family + shown] = bench.model(family, f"{time}-{family}{flag}", options)
        return bench.ask("train", {"jobs": jobs, "steps": steps})

    return judged_bits(trained("first"), trained("second"), steps)


def judged_bits(first: Mapping[str, Any], second: Mapping[str, Any], steps: int) -> Finding:
    wrong = []
    for name, one in first.items():
        two = second[name]
        if failed := one.get("error") or two.get("error"):
            wrong.append(f"{name} failed ({failed[:120]})")
        elif differ := [key for key, bits in one["weights"].items() if two["weights"][key] != bits]:
            wrong.append(f"{name} differs in {len(differ)} of {len(one['weights'])} tensors, such as {differ[0]}")
    found = f"{steps} steps twice with DETERMINISTIC"
    if wrong:
        return False, f"{found}: {'; '.join(wrong)}; please report this line"
    return True, f"{found}, the same bits of weights: {', '.join(first)}"


def only(answers: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer of the one job.

    Raises:
        RunError: it failed.
    """
    (answer,) = answers.values()
    if "error" in answer:
        raise RunError(answer["error"])
    return answer


# ------------------------------------------------------------ saved, gone on with

_DIGITS = (
    "-cfg=vit_digits -batch_size=128 -amp -o DETERMINISTIC True TRAIN.MODEL_EMA True DATA.NUM_WORKERS 2 SAVE_FREQ 1"
)


def resumed(bench: Bench) -> Finding:
    """A run that is killed by SIGKILL and goes on, beside one that isn't."""
    whole, killed = bench.folder / "whole", bench.folder / "killed"
    words = [*_DIGITS.split(), "SAVE_STEPS", "5", "TRAIN.NUM_EPOCHS", "5", "TRAIN.WARMUP_EPOCHS", "1"]
    bench.run("main_single_gpu.py", *words, f"-output={whole}")
    with started(["main_single_gpu.py", *words, f"-output={killed}"], bench) as process:
        while not list((killed / "checkpoints").glob("epoch_0002*")):
            if process.poll() is not None or time.monotonic() > bench.deadline:
                ended(process, bench.deadline)
                return False, "the run that was to be killed ended before; say so in an issue"
            time.sleep(0.002)
    if (killed / "result.json").exists():
        return False, "the run that was to be killed had ended already; run this check again"
    newest = max(file.name for file in (killed / "checkpoints").glob("epoch_*"))
    bench.run("main_single_gpu.py", "-resume=auto", f"-output={killed}")
    return judged_resume(f"killed after {newest}, gone on with", whole, killed)


def sharded(bench: Bench) -> Finding:
    """A run of two ranks that share the optimizer's state out, saved and gone on with."""
    if not bench.several:
        return True, "not tried: it needs two GPUs"
    whole, again = bench.folder / "sharded", bench.folder / "sharded-again"
    words = [*_DIGITS.split(), "TRAIN.NUM_EPOCHS", "2", "TRAIN.WARMUP_EPOCHS", "1"]
    words += ["DIST.ENGINE", "fleet", "DIST.STRATEGY.sharding", "True"]
    bench.run("main_multi_gpu.py", "-ngpus=2", *words, f"-output={whole}")
    bench.run("main_multi_gpu.py", f"-resume={whole / 'checkpoints' / 'epoch_0001'}", f"-output={again}")
    return judged_resume("fleet's sharding on 2 ranks, saved after epoch_0001, gone on with", whole, again)


def judged_resume(what: str, whole: Path, again: Path) -> Finding:
    """Whether two runs' last checkpoints hold the same bits."""
    from safetensors import safe_open

    differ, count = [], 0
    for file in sorted((whole / "checkpoints" / "last").glob("*.safetensors")):
        with safe_open(file, "np") as one, safe_open(again / "checkpoints" / "last" / file.name, "np") as two:
            for key in sorted({*one.keys(), *two.keys()}):
                count += 1
                if one.get_tensor(key).tobytes() != two.get_tensor(key).tobytes():
                    differ.append(f"{file.name} {key}")
    if differ or not count:
        first = f", such as {min(differ)}" if differ else ""
        return False, f"{what}: {len(differ)} of {count} tensors differ from the whole run's{first}; report this line"
    return True, f"{what}: the {count} tensors of the whole run, bit by bit"


def all_reduce(bench: Bench) -> Finding:
    """The doctor's own all-reduce, over all GPUs."""
    if not bench.several:
        return True, "not tried: it needs two GPUs"
    ranks = bench.ngpus or (2 if bench.rehearsing else bench.about["gpus"])
    with started(["tools/doctor.py", f"-ngpus={ranks}"], bench) as process:
        printed = ended(process, bench.deadline, statuses=(0, 1))
    if not (line := re.search(r"^(ok|todo) +all-reduce +(.*)$", printed, re.MULTILINE)):
        raise RunError(told_last(printed))
    return line[1] == "ok", line[2]


def parity(bench: Bench) -> Finding:
    """Logits of the same random weights on the CPU and here, with TF32 off, and as Paddle has it."""
    jobs = {family: bench.model(family, family, "-dataset=synthetic") for family in ("vit", "resnet")}
    request = {"jobs": jobs, "folder": str(bench.folder), "compiled": bench.rehearsing}
    cpu, exact = bench.ask("logits", request), bench.ask("logits", request, NVIDIA_TF32_OVERRIDE="0")
    usual = exact if bench.rehearsing else bench.ask("logits", request)
    return judged_parity(cpu, exact, usual)


def judged_parity(cpu: Mapping[str, Any], exact: Mapping[str, Any], usual: Mapping[str, Any]) -> Finding:
    told = [
        f"{family} {exact[family]['difference']:.1e} with TF32 off, {usual[family]['difference']:.1e} as Paddle has it"
        for family in cpu
    ]
    found = f"float32 logits beside the CPU's, largest difference over their range: {'; '.join(told)}"
    if any(answer["varies"] < LEAST_VARIES for answer in cpu.values()):
        return False, f"{found}, but they hardly differ from image to image; report this line"
    if max(answer["difference"] for answer in exact.values()) > WORST:
        return False, f"{found}; expected at most {WORST:g} with TF32 off: please report this line"
    return True, found
