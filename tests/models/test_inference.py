"""Evaluation by Paddle Inference gives the eager model's numbers; what it can't do is an error."""

import json

import paddle
import pytest
from conftest import without
from golden.formula import array
from paddle.jit.dy2static import convert_call_func
from paddle.jit.dy2static.program_translator import FunctionCache
from support.exports import images_for, small_model
from threadpoolctl import threadpool_limits

from config import get_config
from datasets import get_datasets
from errors import InputError
from models import build_model
from models.paddle_inference import Program, difference, export, inference_engine, num_threads
from training import engine
from training.classification import Classification
from training.run import Run
from weights import save_weights

HAS_BFLOAT16 = paddle.base.core.supports_bfloat16_fast_performance()


@pytest.mark.skipif(not HAS_BFLOAT16, reason="the CPU has no bfloat16")
def test_bfloat16_is_near_float32_and_isnt_it(tmp_path):
    model = small_model("vit")
    export(model, tmp_path)
    assert 1e-5 < difference(model, Program(tmp_path, bfloat16=True)) < 0.03
    assert difference(model, Program(tmp_path)) < 1e-5


def test_the_predictor_computes_with_this_processs_threads():
    for threads in (1, 2):
        with threadpool_limits(threads):
            assert num_threads() == threads


@pytest.fixture
def weights(tmp_path, tiny):
    paddle.seed(3)
    model = build_model(get_config(None, tiny))
    model.head.weight.set_value(array("head", (16, 10)))
    save_weights(model, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def result_of(folder):
    result = json.loads((folder / "result.json").read_text())
    return {
        key: result[key]
        for key in ("loss", "acc1", "acc5", "mean_class_acc", "num_samples", "class_acc")
    }


@pytest.mark.smoke
def test_one_process_and_two_give_the_result_of_the_eager_engine(
    weights, tiny, program, tmp_path, monkeypatch
):
    calls = []
    run = Program.__call__
    monkeypatch.setattr(
        Program, "__call__", lambda self, images: calls.append(len(images)) or run(self, images)
    )
    options = [*without(tiny, "TRAIN."), "EVAL", "True", "MODEL.PRETRAINED", str(weights)]
    options += ["DATA.BATCH_SIZE_EVAL", "7"]
    for kind in ("eager", "inference"):
        config, _, val = get_datasets(
            get_config(None, [*options, "EVAL_ENGINE", kind, "OUTPUT", str(tmp_path / kind)])
        )
        task = Classification(config, val.classes)
        engine.evaluate_only(task, task.build_network(), val, Run(config, val.classes))
    assert calls == [4, *[7] * 52]  # the check, and the batches of one engine
    status, printed, errors = program(
        "main_multi_gpu.py", "-output=pair", "-o", *options, "EVAL_ENGINE", "inference"
    )
    assert status == 0, errors
    assert "float32 by Paddle Inference, exported in " in printed
    eager = result_of(tmp_path / "eager")
    assert eager["num_samples"] == 364
    assert 0 < eager["acc1"] < 100
    for other in ("inference", "pair"):
        found = result_of(tmp_path / other)
        assert found.pop("loss") == pytest.approx(eager["loss"], rel=1e-6)
        assert found == {key: value for key, value in eager.items() if key != "loss"}


def test_what_it_cant_do_is_refused(monkeypatch, tmp_path):
    with pytest.raises(
        InputError, match="EVAL_ENGINE has no effect without EVAL True; leave it out"
    ):
        get_config(None, ["EVAL_ENGINE", "inference"])
    config = get_config(None, ["EVAL", "True", "EVAL_ENGINE", "inference", "AMP", "True"])
    monkeypatch.setattr("paddle.base.core.supports_bfloat16_fast_performance", lambda: False)
    with pytest.raises(
        InputError, match="-amp with EVAL_ENGINE inference needs a CPU with bfloat16"
    ):
        inference_engine(config, None, print)
    monkeypatch.setattr("models.paddle_inference.num_gpus", lambda: 2)
    with pytest.raises(InputError, match="EVAL_ENGINE inference runs on CPUs only, found 2 GPUs"):
        inference_engine(config, None, print)


def test_exporting_leaves_the_model_as_it_was_and_prints_nothing(tmp_path, capfd):
    model = small_model("resnet")
    before = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    images = images_for(model)
    expected = model(images).numpy()
    export(model, tmp_path)
    difference(model, Program(tmp_path))
    assert capfd.readouterr() == ("", "")  # Paddle's C++ would tell of ReduceMean
    assert (model(images).numpy() == expected).all()
    assert {
        name: (tensor.numpy() == before[name]).all() for name, tensor in model.state_dict().items()
    } == dict.fromkeys(before, True)


@pytest.mark.smoke
def test_a_method_is_examined_and_converted_once_for_all_layers(tmp_path, monkeypatch):
    model = small_model("vit")
    converted = []
    examined = []
    convert = FunctionCache._convert
    examine = convert_call_func.is_unsupported

    def examine_and_count(func):
        examined.append(type(func) if isinstance(func, paddle.nn.Layer) else func.__qualname__)
        return examine(func)

    monkeypatch.setattr(
        FunctionCache,
        "_convert",
        lambda self, f: converted.append(f.__qualname__) or convert(self, f),
    )
    monkeypatch.setattr("paddle.jit.dy2static.program_translator._FUNCTION_CACHE", FunctionCache())
    monkeypatch.setattr(convert_call_func, "is_unsupported", examine_and_count)
    export(model, tmp_path)
    assert convert_call_func.is_unsupported is examine_and_count  # as it was before the export
    # There are two blocks.
    assert converted.count("Block.forward") == 1
    assert len(converted) == len(set(converted))
    assert examined.count(type(model.blocks[0])) == 1
