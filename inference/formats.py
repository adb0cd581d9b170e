"""Converts a layer to ONNX with paddle2onnx, and the ONNX model to OpenVINO's IR."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

from errors import InputError
from inference.backends import import_extra
from models.layers.activations import TanhGELU
from models.paddle_inference import program_in, quiet, refusing, save_program

# The version of ONNX's operators: the first that has LayerNormalization.
OPSET = 17
# The bytes of a protobuf file.
_LARGEST = 2**31 - 1


def onnx_of(layer: nn.Layer, scratch: Path, inputs: paddle.static.InputSpec, output: str) -> Any:
    """Returns a layer as an ONNX ``ModelProto`` whose weights and free sizes have names.

    Args:
        scratch: a folder for temporary files.
        inputs: the shape, type and name of the layer's input.
        output: the name of its output.

    Raises:
        InputError: the model can't be converted, or a package isn't installed.
    """
    onnx = import_extra("onnx")
    converter = import_extra("paddle2onnx")
    with _gelu_of_sigmoid(layer):
        save_program(layer, scratch / "program", inputs)
    program = program_in(scratch, "program")
    parameters = scratch / "program.pdiparams"
    if parameters.is_file() and parameters.stat().st_size > _LARGEST:
        size = parameters.stat().st_size / 2**30
        raise InputError(
            f"the weights take {size:.1f} GiB, but an ONNX file can have 2 GiB at most; use"
            " -format paddle"
        )
    # The name of the file to write is None. With a file, paddle2onnx would fold constants by
    # polygraphy, which installs packages by pip.
    with refusing("converted to ONNX", "use -format paddle"), quiet():
        content = converter.export(
            str(program), str(parameters), None, opset_version=OPSET, verbose=False
        )
        model = onnx.load_model_from_string(content)
    _rename(model, output, {tensor.name: name for name, tensor in layer.state_dict().items()})
    _correct_epsilons(model, layer)
    with refusing("converted to ONNX", "use -format paddle"):
        onnx.checker.check_model(model)
    return model


@contextlib.contextmanager
def _gelu_of_sigmoid(layer: nn.Layer) -> Iterator[None]:
    """Makes a layer compute GELU's approximation by operators that are converted as they are."""
    changed = [each for each in layer.sublayers() if isinstance(each, TanhGELU)]
    try:
        for each in changed:
            each.of_sigmoid = True
        yield
    finally:
        for each in changed:
            each.of_sigmoid = False


def _rename(model: Any, output: str, weights: dict[str, str]) -> None:
    """Gives names to the output, the weights and the free sizes of a model.

    Paddle and the converter only number them. The numbers of weights depend on what the process has
    built before.

    Args:
        output: the name of the output.
        weights: the name of each weight in the layer's state, by its name in the model.
    """
    graph = model.graph
    new_names = weights | {graph.output[0].name: output}
    for node in graph.node:
        node.output[:] = [new_names.get(name, name) for name in node.output]
        node.input[:] = [new_names.get(name, name) for name in node.input]
    graph.output[0].name = output

    # The order of the weights depends on the numbers, too. They come first, sorted by their new
    # names. "~" comes after all names.
    nodes = sorted(
        graph.node, key=lambda node: node.output[0] if node.op_type == "Constant" else "~"
    )
    del graph.node[:]
    graph.node.extend(nodes)
    # These entries have the sizes by the old names.
    del graph.value_info[:]
    _name_free_sizes(graph.input[0], ["batch", "height", "width"])
    _name_free_sizes(graph.output[0], ["batch", "height", "width"])


def _name_free_sizes(value: Any, names: list[str]) -> None:
    """Names the first size of an input or output, and each further one that isn't fixed."""
    unused = iter(names)
    for axis, size in enumerate(value.type.tensor_type.shape.dim):
        if axis == 0 or not size.dim_value:
            size.dim_param = next(unused)


def _correct_epsilons(model: Any, layer: nn.Layer) -> None:
    """Sets the epsilon of each InstanceNormalization, as which the converter writes group norms.

    paddle2onnx 2.1.0 reads it wrong from a program of Paddle 3: -9.7e-07 for 1e-05.

    Raises:
        InputError: the model's group norms have different epsilons.
    """
    nodes = [node for node in model.graph.node if node.op_type == "InstanceNormalization"]
    if not nodes:
        return
    epsilons = {norm._epsilon for norm in layer.sublayers() if isinstance(norm, nn.GroupNorm)}
    if len(epsilons) != 1:
        raise InputError(
            f"the model's group norms have epsilons of {sorted(epsilons)}:"
            " the conversion to ONNX would be wrong"
        )
    [epsilon] = epsilons
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = epsilon


def simplify(model: Any, scratch: Path) -> Any:
    """Returns an ONNX model after ONNX Runtime's basic passes, which fold constants and remove
    identities.
    """
    onnx = import_extra("onnx")
    runtime = import_extra("onnxruntime")
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(scratch / "simple.onnx")
    options.log_severity_level = 4
    with refusing("converted to ONNX", "use -format paddle"), quiet():
        runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        simple = onnx.load(str(scratch / "simple.onnx"))
    # ONNX Runtime adds its own sets of operators, of which none is used.
    for entry in [entry for entry in simple.opset_import if entry.domain]:
        simple.opset_import.remove(entry)
    return simple


# The first set of operators with int4, and the first form of a file that can name it.
_INT4_OPSET = 21
_INT4_IR = 10


def with_int4(model: Any) -> Any:
    """Returns an ONNX model in a set of operators that has int4."""
    converter = import_extra("onnx.version_converter")
    with refusing("converted to opset 21", "use -format openvino"), quiet():
        model = converter.convert_version(model, _INT4_OPSET)
    model.ir_version = max(model.ir_version, _INT4_IR)
    return model


def to_float16(model: Any) -> Any:
    """Returns an ONNX model that computes in float16. Its input and output are still float32."""
    convert = import_extra("onnxruntime.transformers.float16").convert_float_to_float16
    with refusing("converted to float16", "use another -precision"), quiet():
        half = convert(model, keep_io_types=True)
    _sort(half.graph)
    return half


def _sort(graph: Any) -> None:
    """Sorts nodes so that each comes after those whose outputs it takes.

    The conversion to float16 appends its casts at the end.
    """
    producers = {name: node for node in graph.node for name in node.output}
    # Nodes can't be keys, so their ids are.
    done: dict[int, Any] = {}
    waiting = list(reversed(graph.node))
    while waiting:
        node = waiting[-1]
        inputs = [producers[name] for name in node.input if name in producers]
        missing = [producer for producer in inputs if id(producer) not in done]
        if missing:
            waiting += missing
        else:
            done.setdefault(id(waiting.pop()), node)
    nodes = list(done.values())
    del graph.node[:]
    graph.node.extend(nodes)


def join_models(preparation: Any, model: Any) -> Any:
    """Returns one ONNX model of the preparation and a model: pixels [B, H, W, C] -> logits."""
    onnx = import_extra("onnx")
    compose = import_extra("onnx.compose")
    with refusing("combined with its preprocessing", "use another -format"):
        if any(entry.version >= _INT4_OPSET for entry in model.opset_import):
            preparation = with_int4(preparation)
        preparation.ir_version = model.ir_version = max(preparation.ir_version, model.ir_version)
        joined = compose.merge_models(
            preparation, model, io_map=[("prepared", "images")], prefix1="preparation/"
        )
    # merge_models lists the imports of both models. A domain that is listed twice stops
    # onnxruntime.quantization.
    imports = {entry.domain: entry.version for entry in joined.opset_import}
    del joined.opset_import[:]
    joined.opset_import.extend(onnx.helper.make_opsetid(*entry) for entry in imports.items())
    # The prefix became part of the input's name, too.
    prefixed = joined.graph.input[0].name
    for node in joined.graph.node:
        node.input[:] = ["pixels" if name == prefixed else name for name in node.input]
    joined.graph.input[0].name = "pixels"
    return joined


def openvino_of(model: Any, scratch: Path) -> Any:
    """Converts an ONNX model to OpenVINO's ``Model``."""
    openvino = import_extra("openvino")
    onnx = import_extra("onnx")
    file = scratch / "for_openvino.onnx"
    onnx.save(model, str(file))
    with refusing("converted to OpenVINO", "use -format onnx"), quiet():
        return openvino.Core().read_model(file)


def save_openvino(model: Any, file: Path, half: bool) -> None:
    """Writes OpenVINO's IR.

    Args:
        file: the .xml file. A .bin file with the weights is written next to it.
        half: whether the weights are written in float16.
    """
    import_extra("openvino").save_model(model, str(file), compress_to_fp16=half)
