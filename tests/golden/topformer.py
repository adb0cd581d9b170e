"""Reduced TopFormers; run with torch and timm it records them: PYTHONPATH=.:tests python -m
golden.topformer
"""

import numpy as np

from golden.make_names_vit import values

SMALL = {
    "stage_depths": (2, 1, 1, 2),
    "embed_dims": (8, 16, 24, 32),
    "stem_dim": 16,
    "kernel_size": (3, 3, 5, 3, 5, 3),
    "expand_ratio": (1, 4, 3, 3, 6, 6),
    "depth": 2,
    "num_heads": 3,
    "key_dim": 4,
    "num_classes": 5,
}
CASES = {"topformer": SMALL, "topformer_odd": SMALL | {"pool_stride": 1}}
# The second leaves pixels over at each stage.
SIZES = {"topformer": (64, 128), "topformer_odd": (70, 100)}


def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``values``; for batch norms, variances near 0.1 and weights near 1.

    So images change the outputs much, for weights as small as these.
    """
    found = values(name, shape)
    if name.endswith("running_var"):
        found = np.abs(found) / 10 + 0.05
    elif name.endswith("bn.weight"):
        found = found + 1
    return np.asarray(found, np.float32)


if __name__ == "__main__":
    from golden.record import record
    from tools.benchmarks.timm_reference import TopFormer

    for name, sizes in CASES.items():
        model = TopFormer(**sizes)
        record(name, model, SIZES[name], gradients=name == "topformer_odd", array=array)
