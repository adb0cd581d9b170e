"""Writes schedule.npz and ema.npz: curves of timm's schedulers and its moving average (timm 1.0.31,
torch 2.13.0).

PYTHONPATH=.:tests python tests/golden/make_schedule.py
"""

from pathlib import Path

import numpy as np
import torch
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler, StepLRScheduler
from timm.scheduler.wsd_lr import WSDLRScheduler
from timm.utils import ModelEmaV3

from golden.formula import array

# 12 epochs of 5 updates, 2 of warm-up and 2 of cool-down
WARMUP = 10
TOTAL = 60
COOLDOWN = 10


def curves() -> dict[str, np.ndarray]:
    common = {"warmup_t": WARMUP, "warmup_lr_init": 0.01, "t_in_epochs": False}
    falling = {
        **common,
        "t_initial": TOTAL - WARMUP - COOLDOWN,
        "lr_min": 0.002,
        "warmup_prefix": True,
    }
    phases = {**common, "t_initial": TOTAL - WARMUP - COOLDOWN, "lr_min": 0.002}
    steps = {**common, "decay_rate": 0.3, "warmup_prefix": False}
    schedulers = {
        "cosine": (CosineLRScheduler, falling),
        "from_start": (
            CosineLRScheduler,
            {**falling, "t_initial": TOTAL - COOLDOWN, "warmup_prefix": False},
        ),
        "linear": (PolyLRScheduler, {**falling, "power": 1.0}),
        "poly": (PolyLRScheduler, {**falling, "power": 0.9}),
        "wsd": (WSDLRScheduler, {**phases, "decay_t": 15}),
        "wsd_linear": (WSDLRScheduler, {**phases, "decay_t": 8, "decay_fn": "linear"}),  # a fifth
        "step": (StepLRScheduler, {**steps, "decay_t": 15}),
        # timm's milestone m takes effect at m - 1: epochs 4 and 7 begin at updates 20 and 35
        "multistep": (MultiStepLRScheduler, {**steps, "decay_t": [21, 36]}),
    }
    found = {}
    for name, (scheduler, arguments) in schedulers.items():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        schedule = scheduler(optimizer, **arguments)
        found[name] = np.array([schedule._get_lr(update)[0] for update in range(TOTAL + 1)])
        if name == "from_start":  # in epochs, as timm's script calls it by default
            by_epoch = {"t_initial": 10, "warmup_t": 2, "warmup_lr_init": 0.01, "lr_min": 0.002}
            schedule = scheduler(optimizer, **by_epoch)
            found["epochs"] = np.array(
                [schedule._get_lr(update // 5)[0] for update in range(TOTAL + 1)]
            )
    return found


def averages(warmup: bool) -> np.ndarray:
    model = torch.nn.Linear(3, 2)
    values = [(array(f"weight{i}", (2, 3)), array(f"bias{i}", (2,))) for i in range(11)]

    def set_to(index: int) -> None:
        for parameter, value in zip(model.parameters(), values[index], strict=True):
            parameter.data = torch.from_numpy(value.copy())

    set_to(0)
    ema = ModelEmaV3(model, decay=0.7, use_warmup=warmup)
    found = []
    for step in range(1, 11):  # as timm's training script counts
        set_to(step)
        ema.update(model, step=step)
        found.append(np.concatenate([p.detach().numpy().ravel() for p in ema.module.parameters()]))
    return np.stack(found)


if __name__ == "__main__":
    here = Path(__file__).parent
    np.savez(here / "schedule.npz", **curves())
    np.savez(here / "ema.npz", plain=averages(False), warmup=averages(True))
