"""A small ViT whose tokens and matches are far from equal."""

import numpy as np
import paddle

from models.vit import VisionTransformer


def small(**options):
    arguments = {
        "image_size": 24,
        "patch_size": 4,
        "num_classes": 5,
        "embed_dim": 24,
        "depth": 4,
        "num_heads": 3,
        **options,
    }
    paddle.seed(1)
    model = VisionTransformer(**arguments)
    for parameter in model.parameters():
        parameter.set_value(paddle.randn(parameter.shape) * 0.2 + (parameter.ndim == 1) * 0.5)
    model.eval()
    return model


def images(count=3, size=24):
    return paddle.to_tensor(
        np.random.default_rng(0).standard_normal((count, 3, size, size)).astype(np.float32)
    )
