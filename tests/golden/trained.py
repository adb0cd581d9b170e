"""Networks with batch norm after a few steps of training; run with torch and timm it records them:
PYTHONPATH=tests python -m golden.trained
"""

import zlib
from collections.abc import Callable

import numpy as np

from golden import convmixer, halonet, levit, mobileone, regnet, resnet, xcit

STEPS = 3
RATE = 1e-2
MOMENTUM = 0.9
BATCH = 8
CASES = {
    "resnet18": (32, 32),  # the last stage is 1 x 1: n is the batch
    "bottleneck": (40, 33),
    "regnety": regnet.SIZES["regnety"],
    "regnetx": regnet.SIZES["regnetx"],
    "convmixer": convmixer.SIZES["convmixer"],
    "levit": levit.SIZES["levit"],
    "halonet_silu": halonet.SIZES["halonet_silu"],
    "mobileone": mobileone.SIZES["mobileone"],
    "mobileone_se": mobileone.SIZES["mobileone_se"],
    "tinyvit": (64, 64),
    "xcit": (32, 32),
    "mobilevit": (64, 64),
}
BOTTLENECK = (1, 1, 1, 1)  # blocks: ResNet-50's 16 magnify rounding too much
MOST = 24  # channels that are kept of a norm


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random values that keep a deep network's channels apart: the formula's waves would
    cancel out, and steps would magnify what is left. A norm's weight and a variance are about 1, a
    convolution's variance is 2 / fan in.
    """
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) < 2:
        ones = 0.3 * name.endswith("weight") + name.endswith("running_var")
        values = np.clip(values, -2, 2) / 10 + ones
    elif name != "images":
        values *= np.sqrt(2 / np.prod(shape[1:]))
    return np.asarray(values, np.float32)


def array_of(case: str) -> Callable[[str, tuple[int, ...]], np.ndarray]:
    """Returns what makes a case's weights. In LeViT's, norms' weights are about 0.7, and the images
    have means: hard swish halves what is small, and the mean over tokens would leave nothing of the
    images. HaloNet's are alike, and its queries small: attention to single places would magnify
    rounding. MobileOne's blocks have no shortcut, and norms of 0.3 would let little pass: theirs
    are 1. TinyViT's are 0.6: with norms of 0.9 steps would magnify rounding. XCiT's are those of
    its own cases.
    """
    if case == "xcit":
        return xcit.array
    more = {"levit": 0.4, "halonet_silu": 0.4, "tinyvit": 0.3, "mobilevit": 0.6} | dict.fromkeys(
        mobileone.CASES, 0.7
    )

    def loud(name: str, shape: tuple[int, ...]) -> np.ndarray:
        means = name == "images" and case in ("levit", "halonet_silu")
        added = array(name, (*shape[:-2], 1, 1)) if means else 0.0
        if len(shape) == 1 and name.endswith("weight"):
            added = more[case]
        quiet = 0.3 if ".self_attn.q." in name or name.endswith("_rel") else 1.0
        return np.asarray(quiet * array(name, shape) + added, np.float32)

    return loud if case in more else array


def batches(case: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the images [8, 3, H, W] and labels of each step, and a batch to evaluate."""
    images = array_of(case)("images", (STEPS + 1, BATCH, 3, *CASES[case]))
    return [
        (batch, (np.arange(BATCH) * (step + 2) + step) % 5) for step, batch in enumerate(images)
    ]


if __name__ == "__main__":
    import timm
    import torch
    from timm.models.convmixer import ConvMixer
    from timm.models.levit import LevitDistilled
    from timm.models.regnet import RegNet, RegNetCfg
    from timm.models.tiny_vit import TinyVit
    from timm.models.xcit import Xcit

    from golden import mobilevit, tinyvit
    from golden.record import FOLDER, with_formula

    def build(name: str) -> torch.nn.Module:
        if name.startswith("regnet"):
            return RegNet(RegNetCfg(**regnet.CASES[name]), num_classes=5)
        if name in mobileone.CASES:
            return mobileone.timms(name)
        if name in halonet.CASES:
            return halonet.timms(name)
        if name == "mobilevit":
            return mobilevit.timms(name)
        if name == "convmixer":
            return ConvMixer(**convmixer.CASES[name])
        if name == "levit":
            return LevitDistilled(levit.SIZES[name], **levit.CASES[name])
        if name == "tinyvit":
            return TinyVit(**tinyvit.CASES[name], drop_path_rate=0.0)
        if name == "xcit":
            return Xcit(**xcit.CASES[name])
        if name == "bottleneck":
            return timm.models.resnet.ResNet(
                timm.models.resnet.Bottleneck, BOTTLENECK, num_classes=5
            )
        return timm.create_model(name, **resnet.CASES[name])

    arrays = {}
    for name in CASES:
        model = with_formula(build(name), array_of(name)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        *training, (images, _) = batches(name)
        for batch, labels in training:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                model(torch.from_numpy(batch)), torch.from_numpy(labels)
            ).backward()
            optimizer.step()
        with torch.no_grad():
            arrays[f"{name}/logits"] = model.eval()(torch.from_numpy(images))
        for key, tensor in model.state_dict().items():
            if "running_" in key:
                arrays[f"{name}/{key}"] = tensor[:MOST]
    np.savez_compressed(
        FOLDER / "trained.npz", **{key: tensor.numpy() for key, tensor in arrays.items()}
    )
