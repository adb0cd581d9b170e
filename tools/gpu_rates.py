"""How fast training is on this GPU, for ``tools/doctor.py --gpu``, beside an estimate.

The estimate is UTILISATION x peak / (3 x 2 x multiply-adds of an image's forward pass): a backward pass is worth two
forward ones. The peaks are those of NVIDIA's data sheets, dense. UTILISATION is an assumption: DeiT's authors reached
0.2 (DeiT-B, 2,000 images/s on eight V100, arXiv:2012.12877), with plain attention.
"""

import os
import re
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from tools.gpu_checks import KEPT, Bench, only
from tools.machine import Finding

UTILISATION = 0.3
LEAST = 0.5  # of the estimate: less is worth a look
INPUT_BOUND = 0.2  # share of the time that waits for data, from which on a run says so
REPORT = 10  # steps
MULTIPLY_ADDS = {"vit_small_patch16_224": 4.6e9, "vit_base_patch16_224": 17.6e9}  # of one image's forward pass
SHOWN = {"vit_small_patch16_224": "ViT-S/16", "vit_base_patch16_224": "ViT-B/16"}


class Peak(NamedTuple):
    """TFLOP/s: in half precision with sums in float32, in TF32, and in float32."""

    half: float
    tf32: float
    single: float


PEAKS = {  # by a pattern of the name that the driver gives
    r"H100.*PCIe": Peak(756, 378, 51),
    r"H100": Peak(989, 494, 67),
    r"A100": Peak(312, 156, 19.5),
    r"V100": Peak(125, 15.7, 15.7),
    r"\bT4\b": Peak(65, 8.1, 8.1),
    r"RTX 4090(?! Laptop)": Peak(165, 82.6, 82.6),
    r"RTX 3090(?! Ti)": Peak(71, 35.6, 35.6),
}


def peak(name: str) -> Peak | None:
    """What the table knows of a device, by its name."""
    return next((found for pattern, found in PEAKS.items() if re.search(pattern, name)), None)


def batch_of(memory: float) -> int:
    """The batch to measure with on a device of ``memory`` GB: ViT-S in float32 keeps about 0.2 GB for an image."""
    return next((batch for batch in (256, 128, 64) if memory >= 0.2 * batch), 32)


def rate(bench: Bench) -> Finding:
    """ViT-S/16, -amp, the same batch at each step."""
    return _measured(bench, "vit_small_patch16_224", "rate", amp=True)


def rate_large(bench: Bench) -> Finding:
    """ViT-B/16, -amp, the same batch at each step."""
    return _measured(bench, "vit_base_patch16_224", "rate-large", amp=True, share=2)


def float32(bench: Bench) -> Finding:
    """ViT-S/16 in float32, the same batch at each step."""
    return _measured(bench, "vit_small_patch16_224", "float32", amp=False)


def loader(bench: Bench) -> Finding:
    """ViT-S/16, -amp, with the loader and its recipe's augmentation."""
    batch, name = _sizes(bench, "vit_small_patch16_224")
    report = _reported(bench, "vit_small_patch16_224", "loader", batch, amp=True, kept=False)
    found = f"{name}, {bench.about['precision']}, batch {batch}, loader processes {_workers(bench)}"
    found += f": {_told(report, batch)}; {report['data_wait']:.0%} of the time waits for data"
    if report["data_wait"] > INPUT_BOUND and not bench.rehearsing:
        return False, f"{found}: raise DATA.NUM_WORKERS if there are cores (docs/performance.md)"
    return True, found


def host(bench: Bench) -> Finding:
    """Steps so small that the host is what takes the time."""
    _, name = _sizes(bench, "vit_small_patch16_224")
    seconds = 2 / _reported(bench, "vit_small_patch16_224", "host", 2, amp=True)["images_per_s"]
    return True, f"{name}, batch 2: {1e3 * seconds:.1f} ms a step, about what the host takes for any batch"


def _workers(bench: Bench) -> int:
    return 1 if bench.rehearsing else max(1, min(16, len(os.sched_getaffinity(0)) - 1))


def _sizes(bench: Bench, cfg: str, share: int = 1) -> tuple[int, str]:
    """The batch to measure with, and the model's name."""
    if bench.rehearsing:
        return 4, "a tiny ViT"
    return max(32, batch_of(bench.about["memory"]) // share), SHOWN[cfg]


def _reported(bench: Bench, cfg: str, folder: str, batch: int, amp: bool, kept: bool = True) -> Mapping[str, Any]:
    """The reports of a few steps, the first left out, in one: medians of rates, the largest of the peaks."""
    every = 2 if bench.rehearsing else REPORT
    words = f"{'-amp' if amp else ''} -batch_size={batch} {KEPT} {batch * (4 * every + 1)} REPORT_FREQ {every}"
    words += f" DATA.NUM_WORKERS {_workers(bench)}"
    model = bench.model("vit", folder) if bench.rehearsing else [f"-cfg={cfg}", f"-output={bench.folder / folder}"]
    request = {"jobs": {cfg: [*model, *words.split()]}, "steps": 4 * every, "keep": kept}
    reports = only(bench.ask("train", request))["reports"]
    found = {key: statistics.median(report[key] for report in reports[1:]) for key in ("images_per_s", "data_wait")}
    return found | {"GB": max(report.get("peak_memory_gpu", 0) for report in reports) / 1e3}


def _measured(bench: Bench, cfg: str, folder: str, amp: bool, share: int = 1) -> Finding:
    if bench.rehearsing and folder != "rate":
        return True, 'not rehearsed: the line "rate" is the same'
    batch, name = _sizes(bench, cfg, share)
    report = _reported(bench, cfg, folder, batch, amp)
    found = f"{name}, {bench.about['precision'] if amp else 'float32'}, batch {batch}, kept on the device"
    return judged_rate(found, report, batch, None if bench.rehearsing else expected(bench.about, cfg, amp))


def _told(report: Mapping[str, Any], batch: int) -> str:
    rate, memory = report["images_per_s"], f", {report['GB']:.1f} GB at most" if report["GB"] else ""
    return f"{rate:.0f} images/s, {1e3 * batch / rate:.1f} ms a step{memory}"


def expected(about: Mapping[str, Any], cfg: str, amp: bool) -> tuple[float, str] | None:
    """(images/s that are expected of a device, how that is estimated); None: the table hasn't got it."""
    if not (known := peak(about["name"])):
        return None
    tflops = known.half if amp else known.tf32 if about["tf32"] else known.single
    cost = 6 * MULTIPLY_ADDS[cfg]
    return UTILISATION * tflops * 1e12 / cost, f"{UTILISATION:g} x {tflops:g} TFLOP/s / {cost / 1e9:.0f} GFLOP"


def judged_rate(what: str, report: Mapping[str, Any], batch: int, estimate: tuple[float, str] | None) -> Finding:
    found = f"{what}: {_told(report, batch)}"
    if estimate is None:
        return True, f"{found}; no estimate for this device"
    found += f"; estimate {estimate[0]:.0f} ({estimate[1]})"
    if report["images_per_s"] < LEAST * estimate[0]:
        return False, f"{found}: less than half; is another program on the GPU, or is it hot? Else report this line"
    return True, found
