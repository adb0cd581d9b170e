"""The rate of this machine's matrix products, for tools/benchmark.py: by what the layers use, the
compiled operators if they are there. It answers in one line: [GFLOP/s] of float32.
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
    one = paddle.rand([SIDE, SIDE])
    other = paddle.rand([SIDE, SIDE])
    bias = paddle.zeros([SIDE])
    product = (
        (lambda: ops.linear(one, other, bias))
        if ops.usable(one)
        else lambda: paddle.matmul(one, other)
    )
    print(json.dumps([2 * SIDE**3 / 1e9 * calls_rate(product, 1, 3, 2.0)]))


if __name__ == "__main__":
    main()
