"""Traces training steps as graphs (PIR, Paddle 3), on a CPU with a GPU's autocast.

In a graph, ``paddle.amp.auto_cast`` doesn't ask for the device. Its lists and rules are those of
eager execution.
"""

import inspect
import warnings
from functools import cache
from typing import NamedTuple
from unittest import mock

import paddle
from paddle import _C_ops, nn
from paddle.nn.functional import sdpa

import ops
from config import get_config
from models import architecture, build_model, list_models
from training.losses import BinaryCrossEntropy, CrossEntropy, SoftTargetCrossEntropy, TrainingLoss

# Keys that change no operator: sizes, initial values, and rates, which are all above zero here.
SIZES = (
    "NUM_CLASSES", "DEPTH", "EMBED_DIM", "EMBED_DIMS", "NUM_HEADS", "PATCH_SIZE", "MLP_RATIO",
    "STAGE_DEPTHS", "WINDOW_SIZE", "WINDOW_SIZES", "SR_RATIO", "KERNEL_SIZE", "GROUP_WIDTH",
    "NORM_EPS", "WEIGHT_INIT", "HEAD_INIT_SCALE", "HEAD_INIT_BIAS", "DROPOUT", "ATTENTION_DROPOUT",
    "DROPPATH", "DROPPATH_SHAPE", "ZERO_INIT_LAST", "STRIDE", "BASE_DIMS", "STEM_HIDDEN_DIM",
    "PRETRAINED_WINDOW_SIZES", "NAME", "PRETRAINED", "PRETRAINED_ALLOW", "PRETRAINED_CLASSES",
    "PRETRAINED_ADAPTER", "RESUME",
)  # fmt: skip
RATES = {"dropout": 0.1, "attention_dropout": 0.1, "droppath": 0.1}
# Variants that no shipped model has.
EXTRAS = {
    "vit, QK_NORM": ("vit_base_patch16_384", {"qk_norm": True}),
    "vit, PRE_NORM": ("vit_base_patch16_384", {"pre_norm": True}),
    "vit, REG_TOKENS": ("vit_base_patch16_384", {"reg_tokens": 4}),
    "vit, POS_EMBED sincos2d": ("vit_base_patch16_384", {"pos_embed": "sincos2d"}),
    "vit, PATCH_DROP": ("vit_base_patch16_384", {"patch_drop": 0.5}),
    "vit, PROMPT_TOKENS": ("vit_base_patch16_384", {"prompt_tokens": 4, "prompt_deep": True}),
    "hiera, PATCH_DROP": ("hiera_base_224", {"patch_drop": 0.5}),
    "vit, HEAD_BATCH_NORM": ("vit_base_patch16_384", {"head_batch_norm": True}),
    "beit, USE_SHARED_REL_POS_BIAS": ("beit_base_patch16_224", {"use_shared_rel_pos_bias": True}),
    "swin, padded windows": ("swin_tiny_patch4_window7_224", {"image_size": 232}),
    "poolformer, FC_NORM": ("poolformer_s12", {"fc_norm": True}),
    "crossvit, CROP_SCALE": ("crossvit_9_224", {"crop_scale": True}),
    "resnet, SMALL_STEM": ("resnet18", {"small_stem": True}),
}


class Op(NamedTuple):
    """An operator of a graph.

    Attributes:
        inputs, outputs: the types of dense tensors; "?" for lists of them.
        data: whether each input depends on the images.
        backward: whether it belongs to the backward pass.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    data: tuple[bool, ...]
    backward: bool


class Graph(NamedTuple):
    """The graph of a training step.

    Attributes:
        logits, loss: their types.
        replaced: (name, types) of each operator that was replaced (``_stand_ins``).
    """

    operators: list[Op]
    logits: str
    loss: str
    replaced: list[tuple[str, ...]]


@cache
def variants():
    """Returns {name: (model, arguments)}: the first shipped model of each set of features, and then
    EXTRAS.
    """
    found = {}
    for name in list_models():
        model = get_config(name).MODEL
        features = {
            k: v if isinstance(v, bool | str) else bool(v)
            for k, v in model.items()
            if k not in SIZES
        }
        found.setdefault(tuple(sorted(features.items())), name)
    return {name: (name, {}) for name in found.values()} | EXTRAS


@cache
def graph(variant, flash=True):
    """Returns the graph of a training step of a small form of ``variant``, from images to all
    gradients.

    Autocast is to bfloat16, because a CPU build has no products of float16.

    Args:
        flash: whether the device has flash attention.
    """
    name, arguments = variants()[variant]
    config = get_config(name)
    taken = inspect.signature(architecture(config)).parameters
    stages = len(config.MODEL.get("STAGE_DEPTHS", [1] * 4))
    small = {"stage_depths": [2, 1, 1, 1][:stages], "embed_dims": [16, 32, 80, 128][:stages]}
    small |= {"group_width": 8, "num_classes": 10}
    if config.MODEL.get("PARALLEL_DEPTH"):  # its scales share an MLP
        small |= {"parallel_depth": 2, "embed_dims": [16, 32, 32, 32]}
    if config.MODEL.TYPE.lower() == "volo":  # all but the first stage have one width
        small |= {"embed_dims": [16, 32, 32, 32], "num_heads": [2, 4, 4, 4]}
    if config.MODEL.TYPE.lower() == "mobileformer":  # a number for each of its blocks
        small |= {"embed_dims": [16, 32], "hidden_dims": [32, 32], "strides": [1, 2]}
    if config.MODEL.TYPE.lower() == "vip":  # multiples of the places along a side
        small |= {"embed_dims": [32, 32, 48, 64]}
    if config.MODEL.TYPE.lower() == "topformer":  # a number for each of its five blocks
        small |= {"kernel_size": [3, 3, 3, 5, 3], "expand_ratio": [1, 4, 3, 3, 6]}
    if config.MODEL.TYPE.lower() == "repmlp":  # numbers that divide the widths above
        small |= {"sharesets_nums": [1, 4, 8, 16]}
    if config.MODEL.TYPE.lower() == "repmlp_resnet":  # of which an eighth is in groups
        small |= {"stage_depths": [1, 2, 2, 1], "embed_dims": [16, 32, 64, 128]}
    # a graph can't change parameters in place
    small |= {"head_init_scale": 1.0, "head_init_bias": 0.0}
    small |= {"depth": 18 if config.MODEL.TYPE.lower() == "resnet" else 2, **RATES}
    if config.MODEL.TYPE.lower() == "crossvit":  # two branches
        small |= {"embed_dims": [16, 32], "num_heads": [2, 4], "branch_depths": [1, 2]}
    if config.MODEL.TYPE.lower() == "shuffle":  # pairs of blocks
        small |= {"stage_depths": [2, 2, 2, 2]}
    if config.MODEL.TYPE.lower() == "cvt":  # divisors of the widths above
        small |= {"num_heads": [2, 4, 10]}
    if config.MODEL.TYPE.lower() in ("botnet", "halonet"):  # one block a stage
        small |= {"attention_every": [0, 1, 1, 1], "num_heads": [0, 2, 4, 4]}
    # of the stem, seven blocks and the last convolution
    if config.MODEL.TYPE.lower() == "mobilevit":
        small |= {"embed_dims": [16] * 9, "hidden_dims": [32] * 3}
    if config.MODEL.TYPE.lower() == "levit":
        small["key_dim"] = 16  # of which the widths above are multiples
    if config.MODEL.TYPE.lower() == "tinyvit":  # other architectures' heads fit the channels above
        small["num_heads"] = [1, 2, 4, 8]
    small = {key: value for key, value in small.items() if key in taken}
    replaced = []
    with (
        mock.patch.multiple(_C_ops, **_stand_ins(replaced)),
        mock.patch.object(ops, "_compute_capability", return_value=8 if flash else 0),
        mock.patch.object(sdpa, "select_sdp_for_sdpa", return_value="flash_attn"),
        mock.patch.object(nn.Layer, "register_buffer", _keep),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        paddle.enable_static()
        try:
            return _trace(lambda: build_model(config, **small | arguments), replaced)
        finally:
            paddle.disable_static()


def loss_graphs():
    """Yields the operators of each criterion, forward and backward, with labels, with distributions
    and with distillation.
    """
    paddle.enable_static()
    try:
        for base in (
            CrossEntropy(0.1),
            CrossEntropy(),
            SoftTargetCrossEntropy(),
            BinaryCrossEntropy(0.1),
        ):
            for kind in (None, "hard", "soft"):
                program = paddle.static.Program()
                with paddle.static.program_guard(program, paddle.static.Program()):
                    logits = paddle.static.data("logits", [4, 10], "bfloat16")
                    logits.stop_gradient = False
                    taught = paddle.static.data("taught", [4, 10], "bfloat16")
                    soft = isinstance(base, SoftTargetCrossEntropy)
                    targets = paddle.static.data(
                        "targets", [4, 10] if soft else [4], "float32" if soft else "int64"
                    )
                    with paddle.amp.auto_cast(dtype="bfloat16", level="O1"):
                        criterion = TrainingLoss(
                            base, kind and (lambda _, taught=taught: taught), kind, tau=2.0
                        )
                        loss = criterion(None, logits, targets)
                    forward = len(program.global_block().ops)
                    paddle.static.gradients([loss.sum()], [logits])
                    yield list(_operators(program.global_block().ops, 0, forward))
    finally:
        paddle.disable_static()


def _stand_ins(replaced):
    """Returns functions that replace operators for which a CPU build has no kernel in half
    precision, and which it refuses in a graph. Their calls are recorded in ``replaced``.
    """

    def flash_attn(q, k, v, *others):
        replaced.append(("flash_attn", _type(q), _type(k), _type(v)))
        return _C_ops.multiply(_C_ops.multiply(q, k), v), None, None, None

    def in_float32(name):
        real = getattr(_C_ops, name)

        def stand_in(x, *others, **named):
            replaced.append((name.strip("_"), _type(x)))
            if _type(x) == "float32":
                return real(x, *others, **named)
            out = real(paddle.cast(x, "float32"), *others, **named)
            first, *rest = out if isinstance(out, list | tuple) else [out]
            first = paddle.cast(first, x.dtype)
            return [first, *rest] if isinstance(out, list | tuple) else first

        return stand_in

    return {"flash_attn": flash_attn} | {
        name: in_float32(name) for name in ("batch_norm_", "roll", "silu")
    }


def _trace(build, replaced):
    program = paddle.static.Program()
    startup = paddle.static.Program()
    with paddle.static.program_guard(program, startup):
        model = build()
        model.train()
        first = len(program.global_block().ops)
        images = paddle.static.data("images", [4, model.in_channels, *model.image_size], "float32")
        targets = paddle.static.data("targets", [4, 10], "float32")
        with paddle.amp.auto_cast(dtype="bfloat16", level="O1"):
            logits = model(images)
            loss = SoftTargetCrossEntropy()(logits, targets)
        forward = len(program.global_block().ops)
        paddle.static.append_backward(loss.sum())
        names = [_type(logits), _type(loss)]
        return Graph(list(_operators(program.global_block().ops, first, forward)), *names, replaced)


def _operators(operators, first, forward):
    from_data = set()
    for index, op in enumerate(operators):
        # optional ones may be absent
        inputs = [value for value in op.operands_source() if value.initialized()]
        outputs = [value for value in op.results() if value.initialized()]
        data = tuple(value.id in from_data for value in inputs)
        if op.name() == "pd_op.data" or any(data):
            from_data.update(value.id for value in outputs)
        if index >= first and op.name().startswith("pd_op."):
            types = (tuple(map(_type, values)) for values in (inputs, outputs))
            yield Op(op.name().removeprefix("pd_op."), *types, data, index >= forward)


def _type(value):
    try:
        return str(value.dtype).rpartition(".")[2].lower()
    except ValueError:  # a list
        return "?"


def types_of(graph):
    """Returns the types in which a graph computes each kind of operation: half, float32 or both."""
    products = ("matmul", "conv2d", "matmul_grad", "conv2d_grad")
    found = {
        "products": [t for op in graph.operators if op.name in products for t in op.inputs],
        "depthwise": _types(graph, "depthwise_conv2d"),
        "flash attention": [
            t for name, *types in graph.replaced if name == "flash_attn" for t in types
        ],
        "softmax": _types(graph, "softmax"),
        "norms": _types(graph, "layer_norm", "group_norm"),
        "batch norms": [
            t for name, *types in graph.replaced if name == "batch_norm" for t in types
        ],
        "activations": _types(graph, "gelu", "relu", "sigmoid", "hardswish")
        + [t for name, *types in graph.replaced if name == "silu" for t in types],
        "residual sums": [
            op.inputs[0] for op in graph.operators if op.name == "add" and all(op.data)
        ],
        "logits": [graph.logits],
        "loss": [graph.loss],
    }
    half = {"bfloat16": "half"}
    return {
        key: " and ".join(sorted({half.get(t, t) for t in types} - {"?"}))
        for key, types in found.items()
        if types
    }


def half_operators():
    """Returns the names of all operators that some variant computes in half precision."""

    def half(operators):
        """Returns those with half inputs. If the inputs are a list, the output decides."""
        return {
            op.name
            for op in operators
            if "bfloat16" in (op.outputs if "?" in op.inputs else op.inputs)
        }

    found = set().union(*map(half, loss_graphs()))
    for one in [*map(graph, variants()), graph("vit, QK_NORM", flash=False)]:
        found |= half(one.operators)
        for name in {name for name, *types in one.replaced if "bfloat16" in types}:
            found |= {name, f"{name}_grad"}
    return sorted(found)


def _types(graph, *names):
    return [op.inputs[0] for op in graph.operators if op.name in names]


def _keep(layer, name, tensor, persistable=True):
    object.__setattr__(layer, name, tensor)  # a graph's tensors aren't taken as buffers
