"""Measures the rate of this machine's matrix products, for tools/benchmark.py. They are computed as
layers do it, by the compiled operators if there are any. The answer is one line: [GFLOP/s] of
float32.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import paddle

import ops
from ops.device import tune_cpu
from tools.benchmarks.rates import calls_rate

SIDE = 2048


def main() -> None:
    tune_cpu(1)
    x = paddle.rand([SIDE, SIDE])
    weight = paddle.rand([SIDE, SIDE])
    bias = paddle.zeros([SIDE])

    def product() -> paddle.Tensor:
        if ops.usable(x):
            return ops.linear(x, weight, bias)
        return paddle.matmul(x, weight)

    products_per_s = calls_rate(product, batch=1, warm_up=3, seconds=2.0)
    print(json.dumps([2 * SIDE**3 / 1e9 * products_per_s]))


if __name__ == "__main__":
    main()
