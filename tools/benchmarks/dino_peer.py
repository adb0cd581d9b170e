"""The authors' side of ``dino`` of tools/benchmark.py, in a process of its own: it needs torch and
torchvision, and no Paddle.

The argument is a request as one word of JSON, and the answer is one line. It calls the functions of
a checkout of facebookresearch/dino (``dino``, its folder): ``main_dino.train_one_epoch``, with its
loss, its multi-crop wrapper, its head and its ViT, on the CPU. With ``measure`` "versions" nothing
is run.
"""

import argparse
import importlib
import itertools
import json
import platform
import resource
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from typing import Any

import torch  # pyright: ignore[reportMissingImports]: another interpreter runs this

# Steps whose views are made before the measurement, which takes them in turns.
MADE = 2


class Views:
    """The batches of one epoch, and the times at which they were asked for."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.steps = request["steps"] * (request["reports"] + 1) + 1
        sizes = [request["size"]] * 2 + [request["local_size"]] * request["locals"]
        self.made = [
            [torch.randint(0, 256, (request["batch_size"], 3, side, side)).byte() for side in sizes]
            for _ in range(MADE)
        ]
        self.range = request["mean"], request["std"]
        self.asked: list[float] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[list[torch.Tensor], None]]:
        mean, std = (255 * torch.tensor(values).view(1, -1, 1, 1) for values in self.range)
        for step in range(self.steps):
            self.asked.append(time.perf_counter())
            views = [view.float().sub_(mean).div_(std) for view in self.made[step % MADE]]
            yield views, None


class Undistributed(torch.nn.Module):
    """Stands for ``DistributedDataParallel``, which has nothing to do in one process."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        return self.module(images)


def train(request: dict[str, Any]) -> list[float]:
    """Returns [images/s] of each report after the first: of ``steps`` steps of ``batch_size``
    images, of which there are 2 + ``locals`` views.
    """
    sys.path.insert(0, request["dino"])
    main_dino: Any = imported("main_dino")
    utils: Any = importlib.import_module("utils")
    # Its loss adds the centre over all processes: one, here.
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        # Everything stays on the CPU.
        torch.Tensor.cuda = lambda tensor, **_: tensor
        torch.cuda.synchronize = lambda *_: None
        utils.MetricLogger.synchronize_between_processes = lambda _: None
        make = main_dino.vits.__dict__[request["model"]]
        networks = []
        for options in ({"drop_path_rate": request["droppath"]}, {}):
            backbone = make(patch_size=request["patch_size"], **options)
            head = main_dino.DINOHead(backbone.embed_dim, request["outputs"])
            networks.append(utils.MultiCropWrapper(backbone, head))
        student, teacher = networks
        teacher.load_state_dict(student.state_dict())
        teacher.requires_grad_(False)
        views = Views(request)
        student = Undistributed(student)
        loss = main_dino.DINOLoss(request["outputs"], 2 + request["locals"], 0.04, 0.04, 0, 100)
        optimizer = torch.optim.AdamW(utils.get_params_groups(student))
        schedules = [[value] * len(views) for value in (5e-4, request["weight_decay"], 0.996)]
        arguments = argparse.Namespace(
            clip_grad=request["clip_grad"], freeze_last_layer=0, epochs=100
        )
        main_dino.train_one_epoch(
            student,
            teacher,
            teacher,
            loss,
            views,
            optimizer,
            *schedules,
            0,
            None,
            arguments,
        )
        torch.distributed.destroy_process_group()
    # The first step of each report but the first one, and the end of the last one.
    starts = views.asked[request["steps"] :: request["steps"]]
    images = request["steps"] * request["batch_size"]
    return [images / (end - start) for start, end in itertools.pairwise(starts)]


def imported(name: str) -> types.ModuleType:
    """Imports a module that imports torchvision."""
    try:
        return importlib.import_module(name)
    except (RuntimeError, ImportError):
        # As in timm_reference.py.
        for missing in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
            del sys.modules[missing]
        for stub in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
            sys.modules[stub] = types.ModuleType(stub)
        return importlib.import_module(name)


def main() -> None:
    request = json.loads(sys.argv[1])
    answer: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if request["measure"] != "versions":
        torch.set_num_threads(request["threads"])
        rates = train(request)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        answer = {"images_per_s": rates, "peak_memory": peak}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
