"""A program for test_kernels.py. It makes a step of each architecture and a run with each
optimizer, by Paddle's own operators.
"""

import sys

import numpy as np
import paddle
from conftest import TINY, without

import ops
from support.optim_model import OPTIMIZERS
from support.small_models import SMALL_MODELS
from support.training_runs import train

SHORT = [*TINY, "DATA.BATCH_SIZE", "8", "REPORT_FREQ", "1"]
# Options of the run with each optimizer. Together they cover each way to clip, to mix, to erase and
# to average, and each loss.
WITH_OPTIMIZER = {
    "AdamW": ["TRAIN.GRAD_CLIP", "1.0", "TRAIN.MODEL_EMA", "True", "TRAIN.MIXUP_ALPHA", "0.8"],
    "Adam": ["TRAIN.GRAD_CLIP", "0.1", "TRAIN.GRAD_CLIP_MODE", "value", "TRAIN.CUTMIX_ALPHA", "1.0"],
    "SGD": [
        "TRAIN.GRAD_CLIP", "0.1", "TRAIN.GRAD_CLIP_MODE", "agc", "TRAIN.LOSS", "bce", "TRAIN.ACCUM_ITER", "2",
    ],
    "LAMB": ["TRAIN.RANDOM_ERASE_PROB", "0.9", "TRAIN.SMOOTHING", "0.1", "TRAIN.CLASS_WEIGHTS", "auto"],
    "LARS": [
        "TRAIN.RANDOM_ERASE_PROB", "0.9", "TRAIN.RANDOM_ERASE_MODE", "rand", "MODEL.HEAD_BATCH_NORM", "True",
    ],
    "Lion": ["TRAIN.LOSS", "bce", "TRAIN.BCE_TARGET_THRESH", "0.2", "MODEL.DROPPATH", "0.3"],
    "Muon": ["MODEL.QK_NORM", "True", "MODEL.PATCH_DROP", "0.5", "MODEL.DROPOUT", "0.2"],
}  # fmt: skip


def main(output):
    # Without the compiled operators, which are for CPUs.
    ops.enable(False)
    for small in SMALL_MODELS.values():
        model = small()
        images = np.random.default_rng(0).standard_normal((4, 3, *model.image_size), np.float32)
        model(paddle.to_tensor(images)).square().mean().backward()
    for optimizer in OPTIMIZERS:
        options = WITH_OPTIMIZER.get(optimizer, [])
        options = [*without(SHORT, *options[::2]), "TRAIN.OPTIMIZER.NAME", optimizer, *options]
        train(options, f"{output}/{optimizer}", 16)


if __name__ == "__main__":
    main(sys.argv[1])
