"""A layer as a file of another format: ONNX from its Paddle program, by paddle2onnx; from that
OpenVINO's IR.
"""

from pathlib import Path
from typing import Any

import paddle
from paddle import nn

from errors import InputError
from inference.backends import import_extra
from models.paddle_inference import program_in, quiet, refusing, save_program

OPSET = 17  # of ONNX: the first with LayerNormalization
_LARGEST = 2**31 - 1  # bytes of a protobuf file


def onnx_of(layer: nn.Layer, scratch: Path, inputs: paddle.static.InputSpec, output: str) -> Any:
    """Returns a layer as an ONNX ``ModelProto`` with names and free sizes that can be read.

    Args:
        scratch: a folder for the program that comes between.
        output: name of what it returns.

    Raises:
        InputError: the model can't be converted, or a package isn't installed.
    """
    onnx = import_extra("onnx")
    converter = import_extra("paddle2onnx")
    save_program(layer, scratch / "program", inputs)
    program = program_in(scratch, "program")
    parameters = scratch / "program.pdiparams"
    if parameters.is_file() and parameters.stat().st_size > _LARGEST:
        size = parameters.stat().st_size / 2**30
        raise InputError(
            f"the weights take {size:.1f} GiB, an ONNX file 2 at most; use -format paddle"
        )
    # Without a file to save, it doesn't fold constants by polygraphy, which would install packages
    # by pip.
    with refusing("converted to ONNX", "use -format paddle"), quiet():
        content = converter.export(
            str(program), str(parameters), None, opset_version=OPSET, verbose=False
        )
        model = onnx.load_model_from_string(content)
    _rename(model, output, {tensor.name: name for name, tensor in layer.state_dict().items()})
    _mend_epsilons(model, layer)
    with refusing("converted to ONNX", "use -format paddle"):
        onnx.checker.check_model(model)
    return model


def _rename(model: Any, output: str, weights: dict[str, str]) -> None:
    """Names the output, the weights as their files do, and what the first axes are free for.

    Paddle and the converter number them; of weights the numbers depend on what the process has
    built before.
    """
    graph = model.graph
    renamed = weights | {graph.output[0].name: output}
    for node in graph.node:
        node.output[:] = [renamed.get(name, name) for name in node.output]
        node.input[:] = [renamed.get(name, name) for name in node.input]
    # The weights come first, in the order of the names that they had.
    nodes = sorted(
        graph.node, key=lambda node: node.output[0] if node.op_type == "Constant" else "~"
    )
    del graph.node[:]
    graph.node.extend(nodes)
    graph.output[0].name = output
    del graph.value_info[:]  # they tell the sizes by the old names
    for value, names in (
        (graph.input[0], ("batch", "height", "width")),
        (graph.output[0], ("batch",)),
    ):
        free = iter(names)
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if axis == 0 or not size.dim_value:
                size.dim_param = next(free)


def _mend_epsilons(model: Any, layer: nn.Layer) -> None:
    """Gives each InstanceNormalization, as which group norm is written, the epsilon of the model's
    group norms.

    paddle2onnx 2.1.0 reads it wrong from a program of Paddle 3: -9.7e-07 for 1e-05.
    """
    nodes = [node for node in model.graph.node if node.op_type == "InstanceNormalization"]
    found = {norm._epsilon for norm in layer.sublayers() if isinstance(norm, nn.GroupNorm)}
    if nodes and len(found) != 1:
        raise InputError(
            f"the model's group norms have epsilons of {sorted(found)}: ONNX would get them wrong"
        )
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f = next(iter(found))


def simplify(model: Any, scratch: Path) -> Any:
    """Returns an ONNX model after ONNX Runtime's basic passes: constants are folded, identities
    left out.
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
    # ONNX Runtime lists its own; none is used
    for own in [entry for entry in simple.opset_import if entry.domain]:
        simple.opset_import.remove(own)
    return simple


def to_float16(model: Any) -> Any:
    """Returns an ONNX model whose weights are float16, and so are its products; what goes in and
    out is float32.
    """
    convert = import_extra("onnxruntime.transformers.float16").convert_float_to_float16
    with refusing("converted to float16", "use another -precision"), quiet():
        half = convert(model, keep_io_types=True)
    _sort(half.graph)
    return half


def _sort(graph: Any) -> None:
    """Puts nodes behind those whose outputs they take: the conversion appends its casts."""
    made_by = {name: node for node in graph.node for name in node.output}
    done: dict[int, Any] = {}
    waiting = list(reversed(graph.node))
    while waiting:
        node = waiting[-1]
        before = [
            made_by[name]
            for name in node.input
            if name in made_by and id(made_by[name]) not in done
        ]
        if before:
            waiting += before
        else:
            done.setdefault(id(waiting.pop()), node)
    found = list(done.values())
    del graph.node[:]
    graph.node.extend(found)


def join_models(preparation: Any, model: Any) -> Any:
    """Returns one ONNX model of two: pixels [B, H, W, C] uint8 -> logits."""
    onnx = import_extra("onnx")
    compose = import_extra("onnx.compose")
    with refusing("joined with its preprocessing", "use another -format"):
        preparation.ir_version = model.ir_version = max(preparation.ir_version, model.ir_version)
        both = compose.merge_models(
            preparation, model, io_map=[("prepared", "images")], prefix1="preparation/"
        )
    # merge_models lists the imports of both models. A domain that is listed twice stops
    # onnxruntime.quantization.
    imports = {entry.domain: entry.version for entry in both.opset_import}
    del both.opset_import[:]
    both.opset_import.extend(onnx.helper.make_opsetid(*entry) for entry in imports.items())
    taken = both.graph.input[0].name
    for node in both.graph.node:
        node.input[:] = ["pixels" if name == taken else name for name in node.input]
    both.graph.input[0].name = "pixels"
    return both


def openvino_of(model: Any, scratch: Path) -> Any:
    """Returns OpenVINO's ``Model`` of an ONNX one."""
    openvino = import_extra("openvino")
    onnx = import_extra("onnx")
    file = scratch / "for_openvino.onnx"
    onnx.save(model, str(file))
    with refusing("converted to OpenVINO", "use -format onnx"), quiet():
        return openvino.Core().read_model(file)


def save_openvino(model: Any, file: Path, half: bool) -> None:
    """Writes OpenVINO's IR: ``file`` (.xml) and its .bin; ``half``: with weights of float16."""
    import_extra("openvino").save_model(model, str(file), compress_to_fp16=half)
