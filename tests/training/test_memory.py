"""Memory that runs out, and GPUs that can't be used: one line for Paddle's page."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import ROOT
from support.launches import MAIN, printed, start, statuses
from support.ranks import free_ports

from config import get_config
from errors import RunError, gpu_failure, out_of_memory, reporting_memory
from launch import progress
from loading.workers import _load
from main_multi_gpu import memory_advice

# As Paddle's sources put them: allocation/cuda_allocator.cc, auto_growth_best_fit and naive
# allocators; enforce.h.
GPU = """

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
0   void phi::MatmulKernel<float, phi::GPUContext>()

----------------------
Error Message Summary:
----------------------
ResourceExhaustedError:

Out of memory error on GPU 3. Cannot allocate 1.507813GB memory on GPU 3, {}available memory is only 412.625000MB.

Please check whether there is any other process using GPU 3.
1. If yes, please stop them, or start PaddlePaddle on another GPU.
2. If no, please decrease the batch size of your model.
 (at /paddle/paddle/fluid/memory/allocation/cuda_allocator.cc:86)
"""
CUBLAS = "(External) CUBLAS error(3). \n  [Hint: 'CUBLAS_STATUS_ALLOC_FAILED'. Resource allocation failed inside.]"
CUDNN = (
    "(External) CUDNN error(2), CUDNN_STATUS_ALLOC_FAILED. \n  [Hint: ...] (at /paddle/conv.cu:97)"
)
CUDA = "(External) CUDA error({}), {}. \n  [Hint: 'cudaError...'. This indicates ...] (at /paddle/gpu_info.cc:133)"
TWO = CUDA.format(2, "out of memory")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            MemoryError(GPU.format("38.912345GB memory has been allocated and ")),
            "GPU 3 is out of memory: 1.50GB were requested, 38.91GB are in use, 412.62MB are free",
        ),
        (
            MemoryError(GPU.format("")),
            "GPU 3 is out of memory: 1.50GB were requested, 412.62MB are free",
        ),
        (
            MemoryError(GPU.replace("GPU 3", "stand_in:1").format("")),
            "stand_in:1 is out of memory: 1.50GB were requested, 412.62MB are free",
        ),
        (FileNotFoundError(2, "No such file", "CUDA error(2), out of memory.jpg"), ""),
        (RunError("what: Out of memory error on GPU 0"), ""),
        (OSError(CUBLAS), "the GPU is out of memory (CUBLAS_STATUS_ALLOC_FAILED)"),
        (OSError(CUDNN), "the GPU is out of memory (CUDNN_STATUS_ALLOC_FAILED)"),
        (OSError(TWO), "the GPU is out of memory (CUDA error(2), out of memory)"),
        (OSError(12, "Cannot allocate memory"), "out of memory: [Errno 12] Cannot allocate memory"),
        (MemoryError(), "out of memory"),
        (
            MemoryError("(ResourceExhausted) No pinned memory. \n  [Hint: so]"),
            "out of memory: No pinned memory. ",
        ),
        (
            MemoryError("\n\n---\nC++ Traceback\n---\nResourceExhaustedError: No more.\n"),
            "out of memory: No more.",
        ),
        (ValueError("out of memory"), ""),
        (OSError("(External) CUBLAS error(13). \n  [Hint: 'CUBLAS_STATUS_EXECUTION_FAILED'.]"), ""),
    ],
)
def test_what_paddle_says_on_a_gpu(error, line):
    assert out_of_memory(error) == line


@pytest.mark.parametrize(
    ("number", "text", "advice"),
    [
        (
            35,
            "CUDA driver version is insufficient for CUDA runtime version",
            "install a newer driver, or a Paddle that",
        ),
        (
            46,
            "all CUDA-capable devices are busy or unavailable",
            "another process uses the GPU exclusively: end it, or",
        ),
        (
            100,
            "no CUDA-capable device is detected",
            "set CUDA_VISIBLE_DEVICES to GPUs that nvidia-smi -L lists",
        ),
        (
            209,
            "no kernel image is available for execution on the device",
            "this Paddle isn't built for the",
        ),
    ],
)
def test_gpus_that_cant_be_used(number, text, advice):
    found = gpu_failure(OSError(CUDA.format(number, text)))
    assert found.startswith(f"the GPU can't be used: {text} (CUDA error {number}); {advice}")
    assert gpu_failure(OSError(CUDA.format(700, "an illegal memory access was encountered"))) == ""


@pytest.mark.smoke
def test_what_runs_out_on_a_cpu():
    """The real thing: Paddle's allocator, NumPy's, and in a loader's worker."""
    with pytest.raises(RunError) as caught, reporting_memory(lambda: "lower it"):
        paddle.empty([1 << 50])
    assert str(caught.value) == "out of memory: 4,194,304.00GB were requested; lower it"
    assert (caught.value.exit_status, caught.value.shared) == (1, False)
    big = SimpleNamespace(__getitem__=None, columns=())
    kind = type("Big", (), {"__getitem__": lambda self, key: np.empty(1 << 55), "columns": ()})
    for dataset in (kind(), big):
        error = _load(dataset, [0], {})
        told = r"out of memory: Unable to allocate .* for an array with shape \(36028797018963968,\) .*"
        assert re.fullmatch(told if dataset is not big else "", out_of_memory(error))
    with pytest.raises(TypeError, match="so"), reporting_memory(lambda: ""):
        raise TypeError("so")


def test_what_to_do_about_it(monkeypatch, tmp_path):
    monkeypatch.setattr(progress, "_doing", progress.COMPUTING)

    def told(*words, directory=None):
        return memory_advice(get_config(None, words), directory)

    assert told("EVAL", "True") == "lower -batch_size_eval (now 64)"
    assert told("EVAL", "True", "DATA.BATCH_SIZE_EVAL", "1").startswith(
        "the batch is a single image already: lower -image_"
    )
    assert told("DATA.BATCH_SIZE", "1").startswith(
        "the batch is a single image already: lower -image_size, or use a"
    )
    monkeypatch.setattr(progress, "_doing", progress.STARTING)
    assert told("EVAL", "True").startswith(
        "the model alone needs more memory than there is: use a smaller model"
    )
    assert told().startswith("the model alone needs more memory than there is: use a smaller model")
    progress.beat(progress.COMPUTING)
    both = "lower -batch_size (now 256) and raise -accum_iter (now 1) by the same factor"
    assert told() == f"{both}; or set MODEL.RECOMPUTE True"
    assert told("MODEL.RECOMPUTE", "True", directory=tmp_path) == both
    assert told("DATA.GLOBAL_BATCH", "64", "TO_STATIC", "True").startswith(
        "lower DATA.GLOBAL_BATCH (now 64) and raise"
    )
    (tmp_path / "checkpoints" / "epoch_0001").mkdir(parents=True)
    goes_on = f"-resume=auto -output={tmp_path} continues with it from the last checkpoint"
    progress.beat(progress.EVALUATING)
    assert told(directory=tmp_path) == f"lower -batch_size_eval (now 64); {goes_on}"
    progress.beat(progress.LOADING)
    assert told("MODEL.RECOMPUTE", "True", directory=tmp_path) == f"{both}; {goes_on}"
    assert told("EVAL", "True", directory=tmp_path) == "lower -batch_size_eval (now 64)"


FULL = """
import main_multi_gpu, errors, pathlib, time

before = main_multi_gpu.import_paddle

def with_little_memory():
    before()
    import paddle, utils
    from training import engine
    update = engine._update

    def full(training, number, epoch):
        if number == 3 and utils.rank() == 1 and training.config.DATA.BATCH_SIZE > 8:
            while not any(pathlib.Path("run/checkpoints").glob("epoch_*")):  # it is being written
                time.sleep(0.01)
            paddle.empty([1 << 50])
        return update(training, number, epoch)

    engine._update = full

main_multi_gpu.import_paddle = with_little_memory
with errors.reporting():
    main_multi_gpu.main()
"""


@pytest.mark.long
@pytest.mark.smoke
def test_one_of_two_ranks_runs_out_of_memory_and_the_run_goes_on_with_smaller_batches(tmp_path):
    (tmp_path / "full.py").write_text(FULL)
    flags = [
        "-output=run",
        "-cfg=vit_digits",
        "-resume=auto",
        "-o",
        "TRAIN.NUM_EPOCHS",
        "1",
        "TRAIN.WARMUP_EPOCHS",
        "0",
    ]
    flags += ["MODEL.DEPTH", "2", "SAVE_STEPS", "2"]

    def run(*sizes):
        common = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "PYTHONPATH": ROOT}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
        command = (sys.executable, "full.py", *sizes, *flags)
        return [
            start(tmp_path, *command, RANK=rank, LOCAL_RANK=rank, **common) for rank in range(2)
        ]

    ranks = run("-batch_size=16")
    assert statuses(*ranks) == [1, 1]
    line = "rank 1: error: out of memory: 4,194,304.00GB were requested; lower -batch_size (now 16) and raise -accum_iter"
    line += " (now 1) by the same factor; or set MODEL.RECOMPUTE True; -resume=auto -output=run continues with it from the"
    assert f"\n{line} last checkpoint\n" in printed(*ranks)
    assert "Traceback" not in printed(*ranks)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("epoch_*")] == [
        "epoch_0001_sample_000000064"
    ]
    ranks = run("-batch_size=8", "-accum_iter=2")
    assert statuses(*ranks) == [0, 0], printed(*ranks)
    assert "summary: acc1" in printed(*ranks)


def test_a_model_too_large_for_this_machine(tmp_path):
    process = start(
        tmp_path,
        MAIN[0],
        str(ROOT / "main_single_gpu.py"),
        "-cfg=vit_digits",
        "-o",
        "MODEL.EMBED_DIM=983040",
    )
    assert statuses(process) == [1]
    line = "error: out of memory: 10,800.00GB were requested; the model alone needs more memory than there is: use a smaller"
    assert printed(process).splitlines()[-1].startswith(line)
    assert not (tmp_path / "output").exists()
