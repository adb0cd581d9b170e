"""Every operator of a step has a GPU kernel of the type that the step has: by what a build with
GPUs registers.
"""

import os
import re
import subprocess
import sys

import paddle
import pytest
from conftest import ROOT
from paddle.base import core

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not paddle.is_compiled_with_cuda(), reason="a CPU build has no GPU kernels"),
]
REGISTERED = core._get_registered_phi_kernels("function")


def gpu_types(kernel):
    """The types of a kernel's GPU variants: "(GPU, Undefined(AnyLayout), float32)", or GPUDNN,
    cuDNN's.
    """
    keys = (key.strip("()").split(", ") for key in REGISTERED.get(kernel, []))
    return {key[-1] for key in keys if key[0] in ("GPU", "GPUDNN")}


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """{(kernel, type)} of every architecture's step and of every optimizer's run in float32, by
    Paddle's own log.
    """
    # tests import what lowers it
    environment = os.environ | {"GLOG_vmodule": "*api*=6", "GLOG_minloglevel": "0"}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'models'}"
    command = [
        sys.executable,
        str(ROOT / "tests" / "support" / "every_step.py"),
        str(tmp_path_factory.mktemp("runs")),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = r"API kernel key: \[\w+, [\w()]+, (\w+)\]\n[^\n]*\] (\w+)(?: API)? kernel:"
    return {(kernel, dtype) for dtype, kernel in re.findall(lines, done.stderr)}


def test_every_operator_of_a_float32_run_has_a_gpu_kernel(used):
    """From normalising and mixing to the loss, all gradients, clipping, optimizers, averages and
    evaluation.
    """
    assert {
        ("matmul_grad", "float32"),
        ("adamw", "float32"),
        ("lerp", "float32"),
        ("index_add", "float64"),
    } <= used
    missing = {f"{kernel}, {dtype}" for kernel, dtype in used if dtype not in gpu_types(kernel)}
    assert not missing


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_operator_that_autocast_gives_half_has_a_gpu_kernel(dtype):
    names = (ROOT / "tests" / "golden" / "half_operators.txt").read_text().split()
    assert {"matmul_grad", "flash_attn_grad", "conv2d_grad"} < set(names)
    missing = {name for name in names if dtype not in gpu_types(name)}
    assert not missing


def test_flash_attention_has_no_other_types():
    assert gpu_types("flash_attn") == gpu_types("flash_attn_grad") == {"float16", "bfloat16"}


def test_poolings_ordered_gradient_has_no_bfloat16():
    """Why max pooling is in float32 (models/layers/conv.py); if this fails, see whether that can
    go.
    """
    ordered = {
        key.strip("()").split(", ")[-1]
        for key in REGISTERED["pool2d_grad"]
        if key.startswith("(GPUDNN")
    }
    assert ordered == {"float16", "float32", "float64"}


@pytest.mark.parametrize("name", ["FLAGS_cudnn_deterministic", "FLAGS_embedding_deterministic"])
def test_the_flags_that_order_gradients_are_there(name):
    assert name in paddle.get_flags(name)
