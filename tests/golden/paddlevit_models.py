"""Reduced models of the families that only PaddleViT has; run with PaddleViT's folder it records
what its own code computes:

    PYTHONPATH=.:tests python -m golden.paddlevit_models PADDLEVIT [CASE ...]

PADDLEVIT is a checkout of BR-IDL/PaddleViT (the files: 5ac7d89, with paddle 3.3.1). A case is a YAML
file in PaddleViT's own keys. paddlevit_step_CASE.npz holds, under PaddleViT's names:

- shapes: the names and shapes of the parameters, as JSON; their values are those of ``array``
- buffer/NAME: the other tensors of its weight file, such as masks
- logits: of IMAGES images in evaluation
- loss and training_logits: of a training step on the same images
- grad/NAME: the gradients of that step
- mean/NAME: the batch norms' running means after it
"""

import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

FOLDER = Path(__file__).parent
IMAGES = 4
CLASSES = 5


class Case(NamedTuple):
    """A reduced model.

    Attributes:
        folder: of its family in PaddleViT's image_classification.
        text: its YAML file. A rate of drop path or dropout has to be 0.
        small: whether its gradients are few enough to be stored.
    """

    folder: str
    text: str
    small: bool = True


CASES = {
    "botnet": Case("BoTNet", """
DATA: {IMAGE_SIZE: 64, FMAP_SIZE: "(4, 4)"}
MODEL: {TYPE: BoTNet, NUM_CLASSES: 5}
""", small=False),
    "convmlp": Case("ConvMLP", """
DATA: {IMAGE_SIZE: 64}
MODEL:
  TYPE: ConvMLP
  NUM_CLASSES: 5
  DROPPATH: 0.0
  MIXER: {BLOCKS: [1, 2, 1], DIMS: [12, 16, 24], MLP_RATIOS: [2, 3, 2], CHANNELS: 8, N_CONV_BLOCKS: 2}
"""),
    "cswin": Case("CSwin", """
DATA: {IMAGE_SIZE: 64}
MODEL:
  TYPE: cswin
  NUM_CLASSES: 5
  DROPPATH: 0.0
  EMBED_DIM: 8
  DEPTHS: [1, 1, 2, 1]
  SPLIT_SIZES: [1, 2, 2, 2]
  NUM_HEADS: [2, 2, 4, 4]
"""),
    "cvt": Case("CvT", """
DATA: {IMAGE_SIZE: 48}
MODEL:
  TYPE: CvT
  NUM_CLASSES: 5
  DIM_EMBED: [8, 16, 32]
  DEPTH: [1, 1, 2]
  NUM_HEADS: [1, 2, 4]
  DROP_PATH_RATE: [0.0, 0.0, 0.0]
"""),
    "cvt_mean": Case("CvT", """
DATA: {IMAGE_SIZE: 36}
MODEL:
  TYPE: CvT
  NUM_CLASSES: 5
  PATCH_SIZE: [5, 2, 3]
  PATCH_STRIDE: [3, 2, 2]
  PATCH_PADDING: [1, 0, 1]
  DIM_EMBED: [8, 8, 16]
  DEPTH: [1, 1, 1]
  NUM_HEADS: [2, 2, 4]
  DROP_PATH_RATE: [0.0, 0.0, 0.0]
  CLS_TOKEN: [False, False, False]
"""),
    "cyclemlp": Case("CycleMLP", """
DATA: {IMAGE_SIZE: 68}
MODEL:
  TYPE: CycleMLP
  NUM_CLASSES: 5
  LAYERS: [1, 1, 2, 1]
  EMBED_DIMS: [8, 12, 16, 20]
  MLP_RATIOS: [2, 3, 2, 2]
"""),
    "ff_only": Case("FF_Only", """
DATA: {IMAGE_SIZE: 224}
MODEL: {TYPE: FF_Only, NUM_CLASSES: 5, EMBED_DIM: 8, LAYERS: 1, DROPPATH: 0.0}
"""),
    "focal": Case("Focal_Transformer", """
DATA: {IMAGE_SIZE: 128}
MODEL:
  TYPE: focal
  NUM_CLASSES: 5
  DROPPATH: 0.0
  FOCAL:
    EMBED_DIM: 8
    DEPTHS: [1, 1, 1, 1]
    NUM_HEADS: [1, 2, 2, 4]
    WINDOW_SIZE: 5
    FOCAL_POOL: fc
    FOCAL_LEVELS: [2, 2, 2, 2]
    FOCAL_WINDOWS: [5, 3, 3, 1]
    EXPAND_SIZES: [2, 1, 1, 1]
"""),
    "focal_conv": Case("Focal_Transformer", """
DATA: {IMAGE_SIZE: 64}
MODEL:
  TYPE: focal
  NUM_CLASSES: 5
  DROPPATH: 0.0
  FOCAL:
    EMBED_DIM: 8
    DEPTHS: [1, 2, 1, 1]
    NUM_HEADS: [1, 2, 2, 4]
    WINDOW_SIZE: 4
    FOCAL_POOL: fc
    FOCAL_STAGES: [1, 2, 3]
    FOCAL_LEVELS: [2, 2, 1, 2]
    FOCAL_WINDOWS: [3, 3, 3, 1]
    EXPAND_SIZES: [1, 2, 0, 1]
    USE_CONV_EMBED: True
"""),
    "hvt": Case("HVT", """
DATA: {IMAGE_SIZE: 48}
MODEL: {TYPE: hvt, NUM_CLASSES: 5, PATCH_SIZE: 8, EMBED_DIM: 24, DEPTH: 3, NUM_HEADS: 3, MLP_RATIO: 2.0,
  POOL_BLOCK_WIDTH: 2, DROPPATH: 0.0}
"""),
    "mobileformer": Case("MobileFormer", """
DATA: {IMAGE_SIZE: 64}
MODEL:
  TYPE: MobileFormer
  NUM_CLASSES: 5
  DROPPATH: 0.0
  MF:
    TOKENS: [3, 16]
    NUM_HEAD: 2
    POINTWISECONV_GROUPS: 2
    STEM: {OUT_CHANNELS: 8}
    LITE_BNECK: {IN_CHANNEL: 8, HIDDEN_CHANNEL: 16, OUT_CHANNEL: 8, STRIED: 1}
    BLOCK:
      IN_CHANNELS: [8, 8, 16]
      HIDDEN_CHANNELS: [16, 16, 32]
      OUT_CHANNELS: [8, 16, 16]
      KERNELS: [3, 3, 3]
      STRIEDS: [2, 2, 2]
      PADDINGS: [1, 1, 1]
    CHANNEL_CONV: {IN_CHANNEL: 16, OUT_CHANNEL: 32}
    HEAD: {IN_CHANNEL: 32, HIDDEN_FEATURE: 24}
"""),
    "replknet": Case("RepLKNet", """
DATA: {IMAGE_SIZE: 64}
MODEL:
  TYPE: RepLKNet
  NUM_CLASSES: 5
  DROPPATH: 0.0
  CHANNELS: [8, 12, 16, 24]
  LAYERS: [1, 1, 2, 1]
  LARGE_KERNEL_SIZES: [13, 9, 7, 5]
  FFN_RATIO: 2.0
"""),
    "replknet_xl": Case("RepLKNet", """
DATA: {IMAGE_SIZE: 64}
MODEL:
  TYPE: RepLKNet
  NUM_CLASSES: 5
  DROPPATH: 0.0
  CHANNELS: [8, 8, 16, 16]
  LAYERS: [1, 1, 1, 1]
  LARGE_KERNEL_SIZES: [9, 9, 9, 5]
  FFN_RATIO: 2.0
  DW_RATIO: 1.5
  SMALL_KERNEL: null
"""),
    "repmlp": Case("RepMLP", """
DATA: {IMAGE_SIZE: 64}
MODEL:
  TYPE: RepMLP
  CHANNELS: [8, 12, 16, 24]
  NUM_BLOCKS: [1, 1, 2, 1]
  HEIGHTS: [16, 8, 4, 2]
  WIDTHS: [16, 8, 4, 2]
  SHARESETS_NUMS: [2, 2, 4, 8]
"""),
    "rest": Case("ResT", """
DATA: {IMAGE_SIZE: 96}
MODEL: {TYPE: ResT, NUM_CLASSES: 5, EMBED_DIMS: [8, 16, 24, 32], NUM_HEADS: [1, 2, 3, 4], DEPTHS: [1, 1, 1, 1]}
"""),
    "rest_plain": Case("ResT", """
DATA: {IMAGE_SIZE: 64}
MODEL: {TYPE: ResT, NUM_CLASSES: 5, EMBED_DIMS: [8, 16, 24, 32], NUM_HEADS: [2, 2, 3, 4], DEPTHS: [1, 2, 1, 1],
  SR_RATIOS: [4, 2, 2, 1], MLP_RATIOS: [4, 3, 2, 4], QKV_BIAS: False, APPLY_TRANSFORM: False}
"""),
    "restv2": Case("ResT", """
DATA: {IMAGE_SIZE: 64}
MODEL: {TYPE: ResT_V2, NUM_CLASSES: 5, EMBED_DIMS: [8, 16, 24, 32], NUM_HEADS: [1, 2, 3, 4], DEPTHS: [1, 2, 1, 1]}
"""),
    "shuffle": Case("Shuffle_Transformer", """
DATA: {IMAGE_SIZE: 96}
MODEL:
  TYPE: shuffle
  NUM_CLASSES: 5
  DROPPATH: 0.0
  TOKEN_DIM: 8
  EMBED_DIM: 32
  STAGE_DEPTHS: [2, 2, 2, 2]
  NUM_HEADS: [1, 2, 1, 2]
  WINDOW_SIZE: 3
  MLP_RATIO: 2.0
"""),
    "t2t_vit": Case("T2T_ViT", """
DATA: {IMAGE_SIZE: 48}
MODEL: {TYPE: T2T-ViT, NUM_CLASSES: 5, EMBED_DIM: 24, DEPTH: 2, NUM_HEADS: 3, MLP_RATIO: 2.0, DROPPATH: 0.0}
"""),
    "t2t_vit_t": Case("T2T_ViT", """
DATA: {IMAGE_SIZE: 32}
MODEL: {TYPE: T2T-ViT, TOKEN_TYPE: transformer, NUM_CLASSES: 5, EMBED_DIM: 24, DEPTH: 2, NUM_HEADS: 3, MLP_RATIO: 2.0,
  QKV_BIAS: False, DROPPATH: 0.0}
"""),
    "topformer": Case("TopFormer", """
DATA: {IMAGE_SIZE: 64}
MODEL:
  TYPE: TopFormer
  NUM_CLASSES: 5
  DROPPATH: 0.0
  CHANNELS: [8, 16, 24, 32]
  EMBED_OUT_INDICE: [1, 2, 3, 5]
  DEPTH: 2
  KEY_DIM: 4
  NUM_HEADS: 3
  C2T_STRIDE: 1
  CFGS: [[3, 1, 16, 1], [3, 4, 8, 2], [5, 3, 16, 2], [3, 3, 24, 2], [5, 6, 32, 2], [3, 6, 32, 1]]
"""),
    "vip": Case("ViP", """
DATA: {IMAGE_SIZE: 56}
MODEL:
  TYPE: ViP
  NUM_CLASSES: 5
  DROPPATH: 0.0
  MIXER:
    PATCH_SIZE: 7
    LAYER: [1, 1, 2, 1]
    EMBED_DIMS: [16, 32, 32, 32]
    MLP_RATIO: [2, 3, 3, 3]
    TRANSITIONS: [True, False, False, False]
    SEGMENT_DIM: [8, 4, 4, 4]
"""),
}  # fmt: skip


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random values for a tensor by its name in PyTorch's files and its shape in Paddle.

    Weights of norms and variances are about 1, other vectors about 0. Matrices and kernels keep the
    variance of their input.
    """
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name == "images":
        # Noise alone would look the same to a layer that averages over places.
        return np.float32(values + 2 * values[:, :, :1, :1])
    if len(shape) < 2:
        ones = 1.0 if name.endswith(("weight", "running_var")) else 0.0
        values = ones + np.clip(values, -2, 2) / 5
    elif name.endswith("weight"):
        fan_in = shape[0] if len(shape) == 2 else np.prod(shape[1:])
        values = values / np.sqrt(fan_in)
    else:
        values = values / 2
    return np.float32(values)


def labels() -> np.ndarray:
    """Returns the labels of the training step."""
    return np.arange(IMAGES) * 2 % CLASSES


def file_name(name: str) -> str:
    """Returns ``weights.layout.file_name``, which the recorder can't import."""
    return name.replace("._mean", ".running_mean").replace("._variance", ".running_var")


def record(name: str, file: str) -> None:
    """Writes the golden file of a case. This process has to be in the family's folder, whose modules
    hide ours of the same names.

    Args:
        file: the case's YAML file.
    """
    import paddle

    from tools.benchmarks.paddlevit_reference import build, convert, without_drops

    config, model = build(Path.cwd(), Path(file))
    for key, tensor in model.named_parameters():
        tensor.set_value(array(file_name(key), tuple(tensor.shape)))
    # In float64, since batch norms over few values would magnify rounding.
    convert(model, "float64")
    paddle.set_default_dtype("float64")
    side = config.DATA.IMAGE_SIZE
    images = paddle.to_tensor(array("images", (IMAGES, 3, side, side)), "float64")
    model.eval()
    with paddle.no_grad():
        arrays = {"logits": model(images)}
    logits = without_drops(model)(images)
    loss = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(labels()))
    loss.backward()
    arrays |= {"training_logits": logits, "loss": loss}
    shapes = {}
    for key, parameter in model.named_parameters():
        shapes[key] = list(parameter.shape)
        if parameter.grad is not None and CASES[name].small:
            arrays[f"grad/{key}"] = parameter.grad
        if key.endswith("._mean") and CASES[name].small:
            arrays[f"mean/{key}"] = parameter
    for key, tensor in model.state_dict().items():
        if key not in shapes:
            arrays[f"buffer/{key}"] = tensor
    np.savez_compressed(
        FOLDER / f"paddlevit_step_{name}.npz",
        shapes=json.dumps(shapes),
        **{key: np.float32(tensor.detach().numpy()) for key, tensor in arrays.items()},
    )
    count = sum(np.prod(shape, dtype=int) for shape in shapes.values())
    print(f"{name}: {len(shapes)} tensors of {count} numbers", flush=True)


def main() -> None:
    """Records each case in a process of its own: all families' modules have the same names."""
    paddlevit = Path(sys.argv[1]).resolve()
    for name in sys.argv[2:] or CASES:
        folder = paddlevit / "image_classification" / CASES[name].folder
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(CASES[name].text)
            file.flush()
            code = f"from golden.paddlevit_models import record; record({name!r}, {file.name!r})"
            path = os.pathsep.join([str(FOLDER.parent), str(FOLDER.parent.parent)])
            environment = os.environ | {"PYTHONPATH": path}
            subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    main()
