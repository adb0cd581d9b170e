"""tools/benchmark.py eval and infer: each side's figures, beside its peers'."""

import json

import paddle
import pytest
from support import benchmark_runs
from support.benchmark_runs import fake_timm

from errors import InputError

benchmark = benchmark_runs.benchmark

pytestmark = pytest.mark.long


def test_evaluation_is_timed_from_batch_to_batch(benchmark, tmp_path):
    fake = fake_timm(tmp_path)
    flags = (
        "--against=timm",
        f"--timm_python={fake}",
        "-repeats=1",
        "--batches=2",
        "-batch_size=2",
        "--timm_modes=eager",
    )
    report, _ = benchmark("eval", "-cfg=vit_digits", *flags)
    request = json.loads((tmp_path / "request.json").read_text())
    expected = {
        "measure": "eval",
        "batches": 2,
        "warm_up": 4,
        "batch_size": 2,
        "amp": False,
        "compile": False,
    }
    assert expected.items() <= request.items()
    assert request["weights"].endswith("/vit_digits.safetensors")  # what ours reads
    assert next(iter(report["figures"])) == "ours, eager"
    assert list(report["figures"])[-1] == "timm, eager"
    for ratio in report["ratios"]:
        assert ratio["values"] == [report["figures"][ratio["of"]]["evaluation"]["values"][0] / 12]


def test_inference_of_each_side_is_beside_its_peers(benchmark, tmp_path):
    fake = fake_timm(tmp_path, told=[4.0])
    flags = (
        "--against=timm",
        f"--timm_python={fake}",
        "-repeats=1",
        "--seconds=0.01",
        "--timm_modes=max-autotune",
    )
    sides = ("--sides", "paddle, float32", "paddle, bfloat16")
    report, printed = benchmark(
        "infer", "-cfg", "vit_digits", "-batch_size", "1", "3", *flags, *sides
    )
    has_bfloat16 = paddle.base.core.supports_bfloat16_fast_performance()
    ours = ["eager", "paddle, float32", *["paddle, bfloat16"] * has_bfloat16]
    theirs = ["timm, max-autotune, float32", "timm, max-autotune, bfloat16"]
    sides = [*(f"ours, {side}" for side in ours), *theirs]
    assert list(report["figures"]) == [
        f"vit_digits, {batch}: {side}" for batch in (1, 3) for side in sides
    ]
    request = json.loads((tmp_path / "request.json").read_text())
    expected = {
        "measure": "infer",
        "batch_size": 3,
        "mode": "max-autotune",
        "bfloat16": True,
        "seconds": 0.01,
    }
    assert expected.items() <= request.items()
    peers = ["float32", "float32", "bfloat16"]
    assert [(ratio["of"], ratio["over"]) for ratio in report["ratios"]] == [
        (f"vit_digits, {batch}: ours, {side}", f"vit_digits, {batch}: timm, max-autotune, {peer}")
        for batch in (1, 3)
        for side, peer in zip(ours, peers, strict=False)
    ]
    for ratio in report["ratios"]:
        assert ratio["values"] == [report["figures"][ratio["of"]]["inference"]["values"][0] / 4]
    assert printed[0] == "infer: one process of 2 threads, 0.01 s a run"
    if not has_bfloat16:
        refused = [line for line in printed if line.startswith("paddle, bfloat16: -precision")]
        assert len(refused) == 1


def test_trained_weights_have_their_accuracy_in_the_table(benchmark):
    pytest.importorskip("nncf")
    sides = ("--sides", "paddle, float32", "openvino, int8_weights")
    flags = ("-repeats=1", "--seconds=0.01", "-pretrained=digits", "-dataset=digits")
    report, printed = benchmark("infer", "-cfg", "vit_digits", "-batch_size", "1", *flags, *sides)
    exports = report["exports"]["vit_digits"]
    assert exports["images"] == {"validation": 364}
    # 362 of 364 images.
    assert exports["shares"]["eager"] == {
        "acc1": pytest.approx(99.4505, abs=1e-3),
        "agreement": 100,
    }
    assert exports["shares"]["paddle, float32"] == exports["shares"]["eager"]
    assert exports["shares"]["openvino, int8_weights"]["agreement"] > 99
    assert exports["made"]["openvino, int8_weights"] < 0.6 * exports["made"]["paddle, float32"]
    assert exports["refused"] == {}
    titles = (
        "| vit_digits | MB | p50 ms, 1 | p95 ms, 1 | images/s, 1 | acc1, 364 images | as eager, % |"
    )
    table = printed[printed.index(titles) :]
    assert table[2].startswith("| eager |  | ")
    assert table[2].endswith(" | 99.45 | 100.00 |")
    figures = report["figures"]["vit_digits, 1: ours, eager"]
    assert 0 < figures["p50"]["median"] <= figures["p95"]["median"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["-data_path=/data"], "-dataset and -data_path measure accuracy, which needs -pretrained"),
        (["-pretrained=digits"], "-pretrained are the weights of one -cfg"),
    ],
)
def test_accuracy_needs_one_trained_model(flags, line, benchmark):
    with pytest.raises(InputError, match=line):
        benchmark("infer", *flags)
