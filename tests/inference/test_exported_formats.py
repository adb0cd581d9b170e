"""Every architecture gives its eager logits in each format that it is exported to."""

import numpy as np
import paddle
import pytest
from support.exports import EXPORTED_KINDS, images_for, small_model

from inference import formats
from inference.backends import OnnxRuntime, OpenVino
from models.paddle_inference import Program, export, inputs_of


@pytest.fixture(scope="module", params=EXPORTED_KINDS)
def exported_model(request, tmp_path_factory):
    """A model, the folder of its program, images, and their eager logits."""
    model = small_model(request.param)
    images = images_for(model)
    expected = model(images).numpy()
    folder = tmp_path_factory.mktemp(request.param)
    export(model, folder)
    return model, folder, images, expected


@pytest.mark.smoke
def test_every_architecture_gives_the_eager_logits(exported_model):
    _, folder, images, expected = exported_model
    span = np.ptp(expected)
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3 * span  # the images matter
    predictor = Program(folder)
    for count in (3, 1):
        np.testing.assert_allclose(
            predictor(images[:count]).numpy(), expected[:count], atol=1e-5 * span, rtol=0
        )


def test_every_architecture_runs_with_paddles_default_passes(exported_model):
    """PaddleX, PaddleClas and other programs delete no pass; one of oneDNN's used to lose Swin's
    windows.
    """
    _, folder, images, expected = exported_model
    program = next(file for file in folder.iterdir() if file.suffix in (".json", ".pdmodel"))
    settings = paddle.inference.Config(str(program), str(folder / "inference.pdiparams"))
    settings.disable_glog_info()
    settings.enable_mkldnn()
    if program.suffix == ".json":
        settings.enable_new_ir(True)
        settings.enable_new_executor(True)
    found = paddle.inference.create_predictor(settings).run([images])[0].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


def test_every_architecture_gives_the_eager_logits_in_onnx_and_openvino(exported_model, tmp_path):
    pytest.importorskip("onnx", reason="the extra export isn't installed")
    model, _, images, expected = exported_model
    graph = formats.simplify(formats.onnx_of(model, tmp_path, inputs_of(model), "logits"), tmp_path)
    sizes = [
        [s.dim_param or s.dim_value for s in v.type.tensor_type.shape.dim]
        for v in (graph.graph.input[0], graph.graph.output[0])
    ]
    assert sizes == [["batch", 3, *model.image_size], ["batch", expected.shape[1]]]
    assert [graph.graph.input[0].name, graph.graph.output[0].name] == ["images", "logits"]
    assert [(opset.domain, opset.version) for opset in graph.opset_import] == [("", 17)]
    formats.save_openvino(formats.openvino_of(graph, tmp_path), tmp_path / "model.xml", False)
    (tmp_path / "model.onnx").write_bytes(graph.SerializeToString())
    for runner in (OnnxRuntime, OpenVino):
        run = runner(tmp_path, "model", "float32")
        for count in (3, 1):
            np.testing.assert_allclose(
                run(images.numpy()[:count]),
                expected[:count],
                atol=1e-5 * np.ptp(expected),
                rtol=0,
            )
