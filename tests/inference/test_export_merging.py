"""Exports of ViTs with each pooling, with and without token merging, give the eager logits."""

import numpy as np
import paddle
import pytest
from support.merging import images, small

from errors import InputError
from inference import formats
from inference.backends import RUNNERS
from models.paddle_inference import inputs_of, save_program


@pytest.mark.long
@pytest.mark.parametrize("merged", [0, 4])
@pytest.mark.parametrize("pool", ["token", "avg", "map"])
@pytest.mark.parametrize("kind", ["paddle", "onnx", "openvino"])
def test_exports_merge_the_same_tokens(kind, pool, merged, tmp_path):
    model = small(merge_tokens=merged, global_pool=pool, reg_tokens=1)
    inputs = inputs_of(model)
    if kind == "paddle":
        save_program(model, tmp_path / "inference", inputs)
        run = RUNNERS[kind](tmp_path, "inference", "float32")
    else:
        onnx = pytest.importorskip("onnx", reason="the extra export isn't installed")
        graph = formats.simplify(formats.onnx_of(model, tmp_path, inputs, "logits"), tmp_path)
        if kind == "onnx":
            onnx.save(graph, str(tmp_path / "model.onnx"))
        else:
            whole = formats.openvino_of(graph, tmp_path)
            formats.save_openvino(whole, tmp_path / "model.xml", half=False)
        run = RUNNERS[kind](tmp_path, "model", "float32")
    # another batch than any that was traced; the last image's patches are all equal
    batch = images(5).numpy()
    batch[4] = 0.5
    with paddle.no_grad():
        expected = model(paddle.to_tensor(batch)).numpy()
    other = small(merge_tokens=4 - merged, global_pool=pool, reg_tokens=1)
    assert np.abs(other(paddle.to_tensor(batch)).numpy() - expected).max() > 1e-3
    np.testing.assert_allclose(run(batch), expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_a_graph_of_any_size_is_refused(tmp_path):
    model = small(merge_tokens=4)
    model.take_other_sizes()
    inputs = paddle.static.InputSpec([None, 3, None, None], "float32", "images")
    with pytest.raises(InputError, match="MERGE_TOKENS is 4, expected 0 in a graph"):
        save_program(model, tmp_path / "inference", inputs)
