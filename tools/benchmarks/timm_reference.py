"""timm's side of tools/check_parity.py, in a process of its own: it needs torch and timm, and no
Paddle.

Each line of the input is a JSON object: ``model`` (timm's name, or one of OTHERS), ``options`` (of
its constructor), ``images`` (C, H, W) and ``folder``. It writes two files to the folder. One is
weights.safetensors, with random weights. The other one is outputs.npz, with images, logits,
features (the classifier's input), and intermediates by their number. The answer is a line with
``parameters``, ``info`` (channels and reduction of each intermediate) and the versions.
"""

import functools
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

if missing := [
    name for name in ("numpy", "torch", "timm", "safetensors") if not importlib.util.find_spec(name)
]:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}")

import numpy as np
import torch  # pyright: ignore[reportMissingImports]: another interpreter runs this
from safetensors.torch import save_file

try:
    import timm  # pyright: ignore[reportMissingImports]: likewise
except (RuntimeError, ImportError):
    # torchvision's compiled operators can't be loaded beside a torch without CUDA. timm doesn't
    # need them.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
        del sys.modules[name]
    for name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
        sys.modules[name] = types.ModuleType(name)
    timm = importlib.import_module("timm")


def lenet(in_chans: int, num_classes: int, **_: Any) -> torch.nn.Module:
    """Returns ``paddle.vision``'s LeNet-5."""
    nn = torch.nn
    model = nn.Module()
    convolutions = [
        nn.Conv2d(in_chans, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
    ]
    model.features = nn.Sequential(*convolutions, nn.ReLU(), nn.MaxPool2d(2))
    model.fc = nn.Sequential(nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, num_classes))
    model.forward = lambda x: model.fc(model.features(x).flatten(1))
    return model


def mit(depths: tuple[int, ...], width: int) -> Callable[..., torch.nn.Module]:
    """Returns the function that builds a Mix Transformer of SegFormer.

    Its layers are those of timm's PVTv2, which has wider MLPs in the first two stages.
    """
    pvt = importlib.import_module("timm.models.pvt_v2")
    sizes = {
        "depths": depths,
        "embed_dims": (width, 2 * width, 5 * width, 8 * width),
        "num_heads": (1, 2, 5, 8),
        "mlp_ratios": 4,
    }
    return functools.partial(pvt.PyramidVisionTransformerV2, **sizes)


class ConvNorm(torch.nn.Module):
    """A convolution without a bias, batch norm, and an activation if one is given."""

    def __init__(
        self, in_dim: int, dim: int, kernel_size: int, act: Any = None, **options: Any
    ) -> None:
        super().__init__()
        padding = kernel_size // 2
        self.conv = torch.nn.Conv2d(
            in_dim, dim, kernel_size, padding=padding, bias=False, **options
        )
        self.bn = torch.nn.BatchNorm2d(dim)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.conv(x))
        return x if self.act is None else self.act(x)


class InvertedResidual(torch.nn.Module):
    def __init__(self, in_dim: int, dim: int, kernel_size: int, stride: int, expand: int) -> None:
        super().__init__()
        relu = torch.nn.functional.relu
        mid_dim = in_dim * expand
        self.residual = stride == 1 and in_dim == dim
        self.conv1_1x1 = torch.nn.Identity()
        if expand != 1:
            self.conv1_1x1 = ConvNorm(in_dim, mid_dim, 1, relu)
        self.conv2_kxk = ConvNorm(
            mid_dim, mid_dim, kernel_size, relu, stride=stride, groups=mid_dim
        )
        self.conv3_1x1 = ConvNorm(mid_dim, dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.conv3_1x1(self.conv2_kxk(self.conv1_1x1(x)))
        return x + branch if self.residual else branch


class TopFormerBlock(torch.nn.Module):
    """TopFormer's block of attention and MLP, both by convolutions; scores aren't scaled."""

    def __init__(self, dim: int, key_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attn = torch.nn.Module()
        self.attn.q = ConvNorm(dim, num_heads * key_dim, 1)
        self.attn.k = ConvNorm(dim, num_heads * key_dim, 1)
        self.attn.v = ConvNorm(dim, 2 * num_heads * key_dim, 1)
        self.attn.proj = ConvNorm(2 * num_heads * key_dim, dim, 1)
        self.mlp = torch.nn.Module()
        self.mlp.fc1 = ConvNorm(dim, 2 * dim, 1)
        self.mlp.dwconv = torch.nn.Conv2d(2 * dim, 2 * dim, 3, padding=1, groups=2 * dim)
        self.mlp.fc2 = ConvNorm(2 * dim, dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        relu6 = torch.nn.functional.relu6
        attn, mlp = self.attn, self.mlp
        q, k, v = (
            layer(x).flatten(2).unflatten(1, (self.num_heads, -1))
            for layer in (attn.q, attn.k, attn.v)
        )
        weights = (q.transpose(2, 3) @ k).softmax(-1)
        heads = (weights @ v.transpose(2, 3)).transpose(2, 3)
        x = x + attn.proj(relu6(heads.reshape(len(x), -1, *x.shape[2:])))
        return x + mlp.fc2(relu6(mlp.dwconv(mlp.fc1(x))))


class TopFormer(torch.nn.Module):
    """TopFormer's encoder, with a classifier, under our names and with our arguments."""

    def __init__(
        self,
        stage_depths: tuple[int, ...],
        embed_dims: tuple[int, ...],
        kernel_size: tuple[int, ...],
        expand_ratio: tuple[int, ...],
        num_heads: int,
        in_chans: int = 3,
        num_classes: int = 1000,
        stem_dim: int = 16,
        depth: int = 4,
        key_dim: int = 16,
        pool_stride: int = 2,
    ) -> None:
        super().__init__()
        nn = torch.nn
        self.pool_stride = pool_stride
        self.stem = ConvNorm(in_chans, stem_dim, 3, nn.functional.relu, stride=2)
        sizes = zip(kernel_size, expand_ratio, strict=True)
        in_dim = stem_dim
        self.stages = nn.ModuleList()
        for i, (count, dim) in enumerate(zip(stage_depths, embed_dims, strict=True)):
            stage = []
            for j in range(count):
                first = i == 0 and j == 0
                halves = j == 1 if i == 0 else j == 0
                out_dim = stem_dim if first else dim
                kernel, expand = next(sizes)
                stage.append(InvertedResidual(in_dim, out_dim, kernel, 1 + halves, expand))
                in_dim = out_dim
            self.stages.append(nn.Sequential(*stage))
        self.num_features = sum(embed_dims)
        blocks = [TopFormerBlock(self.num_features, key_dim, num_heads) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential()
        self.head.bn = nn.BatchNorm1d(self.num_features)
        self.head.linear = nn.Linear(self.num_features, num_classes)
        self.feature_info = [
            {"num_chs": dim, "reduction": reduction}
            for dim, reduction in zip(
                (*embed_dims, self.num_features), (4, 8, 16, 32, 32 * pool_stride), strict=True
            )
        ]

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: Any = None,
        norm: bool = False,
        stop_early: bool = False,
        intermediates_only: bool = False,
    ) -> Any:
        x = self.stem(x)
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        size = [-(-side // self.pool_stride) for side in x.shape[2:]]
        pooled = [torch.nn.functional.adaptive_avg_pool2d(each, size) for each in maps]
        maps.append(self.blocks(torch.cat(pooled, 1)))
        if intermediates_only:
            return maps
        last = max(indices) if stop_early and indices else -1
        return maps[last], maps

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_intermediates(x)[0]

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = x.mean((2, 3))
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def topformer(
    stage_depths: tuple[int, ...], embed_dims: tuple[int, ...], num_heads: int
) -> Callable[..., torch.nn.Module]:
    """Returns the function that builds a TopFormer as ImageNet's images need it."""
    return functools.partial(
        TopFormer,
        stage_depths,
        embed_dims,
        kernel_size=(3, 3, 3, 5, 5, 3, 3, 5, 5, 3)[: sum(stage_depths)],
        expand_ratio=(1, 4, 3, 3, 3, 3, 3, 6, 6, 6)[: sum(stage_depths)],
        num_heads=num_heads,
        pool_stride=1,
    )


# Models that timm lacks, by our names: functions of timm's arguments, with the layers and the names
# of the authors' code. Features and intermediates are compared where a model has timm's methods
# ``forward_features``, ``forward_head`` and ``forward_intermediates``, and ``feature_info``.
OTHERS = {
    "lenet": lenet,
    "mit_b0": mit((2, 2, 2, 2), 32),
    "mit_b1": mit((2, 2, 2, 2), 64),
    "mit_b2": mit((3, 4, 6, 3), 64),
    "mit_b3": mit((3, 4, 18, 3), 64),
    "mit_b4": mit((3, 8, 27, 3), 64),
    "mit_b5": mit((3, 6, 40, 3), 64),
    "topformer_base": topformer((3, 2, 2, 3), (32, 64, 128, 160), 8),
    "topformer_small": topformer((3, 2, 2, 3), (24, 48, 96, 128), 6),
    "topformer_tiny": topformer((3, 2, 2, 2), (16, 32, 64, 96), 4),
}


def build(name: str, options: dict[str, Any]) -> torch.nn.Module:
    """Returns timm's model, or one of ``OTHERS``."""
    if name in OTHERS:
        return OTHERS[name](**options)
    return timm.create_model(name, **options)


@torch.no_grad()
def randomise(model: torch.nn.Module, images: torch.Tensor) -> None:
    """Gives random values to tensors that start at zero, at one or close to it, and the images'
    statistics to batch norm. So each path of the model affects the logits, and so do the images.
    """
    for name, tensor in model.state_dict().items():
        if "running_" in name:
            continue
        if tensor.is_floating_point() and tensor.ndim <= 1:
            if name.endswith("weight"):
                # the weight of a norm
                tensor.normal_(1, 0.1)
            elif name.endswith("bias"):
                tensor.normal_(0, 0.05)
            else:
                # layer scale
                tensor.uniform_(0.1, 1)
        elif tensor.is_floating_point() and tensor.std() < 5e-3:
            # tokens, tables, gates, classifiers
            tensor.normal_(0, 0.05)
    norms = [
        layer
        for layer in model.modules()
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
    ]
    for norm in norms:
        # With a momentum of 1, ConvMixer's 32 blocks magnify timm's own rounding to 5e-4, measured
        # against float64.
        norm.momentum = 0.98
    if norms:
        model.train()(images)
        model.eval()


def outputs(model: torch.nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the features that the classifier reads, and the intermediates after the last norm.
    For a model without them (LeNet) it returns an empty dict.
    """
    if not hasattr(model, "forward_intermediates"):
        return {}
    try:
        features, maps = model.forward_intermediates(images, norm=True)
    except AssertionError:
        # Hiera has no norm before the pooling, and accepts no ``norm=True``.
        features, maps = model.forward_intermediates(images)
    pooled = model.forward_head(features, pre_logits=True)
    return {"features": pooled, **{str(i): features for i, features in enumerate(maps)}}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        torch.manual_seed(0)
        model = build(request["model"], request["options"]).eval()
        channels, height, width = request["images"]
        # Noise alone would look the same to a layer that averages over places.
        coarse = torch.nn.functional.interpolate(
            torch.randn(2, channels, 4, 4), (height, width), mode="bilinear"
        )
        images = coarse + 0.3 * torch.randn(2, channels, height, width)
        randomise(model, images)
        with torch.no_grad():
            logits = model(images)
            kept = outputs(model, images)
        # Layers of CoaT share tensors, which save_file refuses, so each name gets a copy.
        weights = {name: t.clone().contiguous() for name, t in model.state_dict().items()}
        save_file(weights, folder / "weights.safetensors")
        tensors = {"images": images, "logits": logits, **kept}
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        np.savez(folder / "outputs.npz", **arrays)
        feature_info = getattr(model, "feature_info", ())
        answer = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "timm": timm.__version__,
            "info": [(stage["num_chs"], stage["reduction"]) for stage in feature_info],
            "torch": torch.__version__,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
