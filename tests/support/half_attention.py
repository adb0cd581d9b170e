"""A program for test_bfloat16.py. It computes attention of bfloat16 factors, with the instructions
of the CPU that its environment allows.
"""

import sys

import numpy as np
import paddle

import ops


def normal(*shape):
    """Normal random numbers, the same for the same sum of sides."""
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def attention_with_gradient():
    """The output of attention and its gradient, in one row. No side is a multiple of a tile's."""
    qkv = paddle.to_tensor(normal(2, 83, 3 * 5 * 40).astype(np.float32), stop_gradient=False)
    with ops.bfloat16_products(enabled=True):
        output = ops.attention([qkv], 5, 40, 0.15)
    grad = paddle.to_tensor(normal(*output.shape).astype(np.float32))
    return np.concatenate(
        [output.numpy().ravel(), paddle.grad([output], [qkv], [grad])[0].numpy().ravel()]
    )


if __name__ == "__main__":
    assert ops.load()
    np.save(sys.argv[1], attention_with_gradient())
