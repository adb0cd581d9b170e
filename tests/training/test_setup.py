"""What a training run is made of: precision, teachers."""

import numpy as np
import pytest
from conftest import without
from support.training_runs import records, train, weights

import utils
from config import get_config, with_values
from errors import InputError
from models import build_model
from training.setup import precision, precision_text, share_batch


def test_mixed_precision_on_a_cpu_without_bfloat16_is_float32_and_says_so(
    tmp_path, tiny, monkeypatch
):
    monkeypatch.setattr("ops.core.supports_bfloat16_fast_performance", lambda: False)
    monkeypatch.setattr("ops._loaded", True)
    config = get_config(None, ["AMP", "True", "AMP_EVAL", "True"])
    assert precision(config) == precision(config, evaluation=True) == "float32"
    monkeypatch.undo()
    monkeypatch.setattr("ops._loaded", False)
    train([*tiny, "DATA.BATCH_SIZE", "16", "AMP", "True"], tmp_path / "amp", 16)
    told = "float32 (-amp asks for bfloat16 products: bfloat16 on a CPU needs the compiled operators; run make ops)"
    assert told in (tmp_path / "amp" / "log.txt").read_text()
    train([*tiny, "DATA.BATCH_SIZE", "16"], tmp_path / "plain", 16)
    one, other = (weights(tmp_path / name)["head.weight"] for name in ("amp", "plain"))
    assert one.dtype == np.float32
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "AMP=True",
            "bfloat16 PRODUCTS, evaluations in float32 (-amp only affects training; set -o AMP_EVAL True for evaluations)",
        ),
        ("AMP=True AMP_EVAL=True", "bfloat16 PRODUCTS"),
        (
            "AMP=True EVAL=True",
            "float32 (-amp only affects training; set -o AMP_EVAL True for evaluations)",
        ),
        ("AMP=True EVAL=True AMP_EVAL=True", "bfloat16 PRODUCTS"),
        (
            "AMP=True TO_STATIC=True",
            "float32 (-amp asks for bfloat16 products: not available in a traced graph on a CPU (TO_STATIC))",
        ),
    ],
)
def test_what_a_cpu_computes_in_which_type_is_told(monkeypatch, words, told):
    monkeypatch.setattr("ops.core.supports_bfloat16_fast_performance", lambda: True)
    monkeypatch.setattr("ops._loaded", True)
    config = get_config(None, words.split())
    assert precision_text(config) == told.replace(
        "PRODUCTS", "products in linear, MLP and attention layers, the rest in float32"
    )
    assert precision(config, config.EVAL) == told.partition(" ")[0]


@pytest.mark.parametrize(
    ("words", "training", "evaluation", "told"),
    [
        ("AMP=False", "float32", "float32", "float32"),
        (
            "AMP=True",
            "bfloat16",
            "float32",
            "bfloat16, evaluations in float32 (-amp only affects training; set -o AMP_EVAL True for evaluations)",
        ),
        ("AMP=True AMP_EVAL=True", "bfloat16", "bfloat16", "bfloat16"),
        (
            "AMP=True EVAL=True",
            "bfloat16",
            "float32",
            "float32 (-amp only affects training; set -o AMP_EVAL True for evaluations)",
        ),
        ("AMP=True EVAL=True AMP_EVAL=True", "bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_on_a_gpu_evaluations_are_in_float32_as_paddlevits(
    monkeypatch, words, training, evaluation, told
):
    monkeypatch.setattr("training.setup.num_gpus", lambda: 1)
    monkeypatch.setattr("paddle.amp.is_bfloat16_supported", lambda: True)
    config = get_config(None, words.split())
    assert (precision(config), precision(config, evaluation=True)) == (training, evaluation)
    assert precision_text(config) == told
    monkeypatch.setattr("training.setup.float32_text", lambda: "float32 (convolutions by TF32)")
    assert precision_text(config) == told.replace("float32", "float32 (convolutions by TF32)")


@pytest.mark.parametrize("halved", [False, True])
def test_a_training_with_amp_evaluates_without_unless_asked(monkeypatch, tmp_path, tiny, halved):
    asked = {False: set(), True: set()}

    def asking(config, evaluation=False):
        asked[evaluation].add(precision(config, evaluation))
        return "float32"

    monkeypatch.setattr("training.setup.num_gpus", lambda: 1)
    monkeypatch.setattr("training.setup.precision", asking)
    monkeypatch.setattr("paddle.amp.is_bfloat16_supported", lambda: True)
    train([*tiny, "DATA.BATCH_SIZE=16", "AMP=True", f"AMP_EVAL={halved}"], tmp_path, 16)
    assert asked == {False: {"bfloat16"}, True: {"bfloat16" if halved else "float32"}}


@pytest.mark.smoke
def test_a_traced_model_trains_as_an_eager_one(tmp_path, tiny):
    """Drop path and the average included; under Paddle 3 a traced model would draw one mask for two
    layers.
    """
    options = [*tiny, "DATA.BATCH_SIZE", "16", "MODEL.DROPPATH", "0.5", "REPORT_FREQ", "1"]
    options += ["TRAIN.MODEL_EMA", "True"]
    for traced in ("False", "True"):
        train([*options, "TO_STATIC", traced], tmp_path / traced, 64)
    eager, graph = (records(tmp_path / traced) for traced in ("False", "True"))
    for own, other in zip(eager, graph, strict=True):
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-5)
    eager, graph = (weights(tmp_path / traced) for traced in ("False", "True"))
    assert eager.keys() == graph.keys()
    with pytest.raises(InputError, match="TO_STATIC is True, expected False with MODEL.RECOMPUTE"):
        train([*options, "TO_STATIC", "True", "MODEL.RECOMPUTE", "True"], tmp_path / "refused", 64)


def test_the_global_batch_is_kept_or_the_batch_per_device():
    kept = get_config(None, ["DATA.GLOBAL_BATCH", "96"])
    assert [share_batch(kept, ranks).DATA.BATCH_SIZE for ranks in (1, 2, 3)] == [96, 48, 32]
    assert share_batch(get_config(None, ["DATA.BATCH_SIZE", "96"]), 3).DATA.BATCH_SIZE == 96
    with pytest.raises(
        InputError,
        match="DATA.GLOBAL_BATCH is 96, expected a multiple of the number of processes, 5",
    ):
        share_batch(kept, 5)
    # An evaluation takes batches of another size.
    evaluated = with_values(kept, "a test", EVAL=True)
    assert share_batch(evaluated, 5) is evaluated


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["DATA.BATCH_SIZE", "16", "TRAIN.LINEAR_SCALED_LR", "8"],
            "global batch 16 x 1 = 16, accumulation 2, effective batch 32; learning rate 0.04, after warm-up 0.04,"
            " at the end 0; on another number of processes DATA.BATCH_SIZE is kept and the rates scale linearly from a"
            " batch of 8",
        ),
        (
            ["DATA.GLOBAL_BATCH", "4", "TRAIN.LINEAR_SCALED_LR", "2", "TRAIN.LR_SCALING", "sqrt"],
            "the tail dropped; global batch 4 x 1 = 4, accumulation 2, effective batch 8; learning rate 0.02, after"
            " warm-up 0.02, at the end 0; on another number of processes DATA.GLOBAL_BATCH is kept and the rates scale"
            " by the square root from a batch of 2",
        ),
        (
            ["TRAIN.LINEAR_SCALED_LR", "8", "TRAIN.LR_SCALED", "base", "DATA.BATCH_SIZE", "16"],
            "DATA.BATCH_SIZE is kept and BASE_LR scales linearly from a batch of 8",
        ),
        (["DATA.GLOBAL_BATCH", "8"], "DATA.GLOBAL_BATCH is kept and the rates stay"),
    ],
)
def test_a_run_tells_what_batch_and_rates_follow(tmp_path, tiny, options, told):
    train([*tiny, "TRAIN.BASE_LR", "0.01", "TRAIN.ACCUM_ITER", "2", *options], tmp_path, 34)
    assert told in (tmp_path / "log.txt").read_text()


def teach(options, output, teacher):
    more = [
        "TRAIN.TEACHER_MODEL",
        f"{teacher}/config.yaml",
        "TRAIN.TEACHER_PATH",
        f"{teacher}/checkpoints/last",
    ]
    return train([*options, *more], output, 64)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_student_learns_from_its_teacher_alone(tmp_path, tiny, kind):
    options = [*tiny, "DATA.BATCH_SIZE", "16"]
    train([*options, "TRAIN.BASE_LR", "0.003", "TRAIN.NUM_EPOCHS", "5"], tmp_path / "teacher", 160)
    student = [
        *options,
        "MODEL.DISTILLED",
        "True",
        "TRAIN.DISTILLATION_TYPE",
        kind,
        "TRAIN.DISTILLATION_ALPHA",
        "1.0",
    ]
    teach(
        [*student, "TRAIN.BASE_LR", "0.003", "TRAIN.NUM_EPOCHS", "2"],
        tmp_path / "student",
        tmp_path / "teacher",
    )
    utils.seed_everything(0)
    initial = build_model(get_config(None, [*tiny, "MODEL.DISTILLED", "True"])).state_dict()
    moved = {
        name: np.abs(
            weights(tmp_path / "student")[f"{name}.weight"].T - initial[f"{name}.weight"].numpy()
        ).max()
        for name in ("head", "head_dist")
    }
    assert moved["head_dist"] > 1e-3
    # AdamW's decay alone moves the class token's head: its gradient has a weight of 1 - ALPHA = 0
    assert moved["head"] < 1e-3
    assert "teacher vit_base_patch16_224: " in (tmp_path / "student" / "log.txt").read_text()


def test_wrong_teachers_are_named(tmp_path, tiny):
    options = [*tiny, "DATA.BATCH_SIZE", "16"]
    train(options, tmp_path / "teacher", 16)
    distilled = [*options, "TRAIN.DISTILLATION_TYPE", "soft"]
    with pytest.raises(InputError, match="DISTILLATION_TYPE is soft, but TEACHER_MODEL is None"):
        train(distilled, tmp_path / "a", 16)
    with pytest.raises(
        InputError, match="has MODEL.NUM_CLASSES 10, the student 12; make them equal"
    ):
        teach([*distilled, "MODEL.NUM_CLASSES", "12"], tmp_path / "b", tmp_path / "teacher")
    with pytest.raises(InputError, match="has DATA.IMAGE_SIZE 8, the student 12"):
        teach([*distilled, "DATA.IMAGE_SIZE", "12"], tmp_path / "c", tmp_path / "teacher")
    with pytest.raises(InputError, match="no weights at"):
        more = [
            "TRAIN.TEACHER_MODEL",
            f"{tmp_path}/teacher/config.yaml",
            "TRAIN.TEACHER_PATH",
            f"{tmp_path}/none",
        ]
        train([*distilled, *more], tmp_path / "d", 16)


def test_a_teacher_of_any_size_sees_the_students_images(tmp_path, tiny):
    options = [*without(tiny, "MODEL.NUM_HEADS"), "DATA.BATCH_SIZE", "16"]
    mixer = ["MODEL.TYPE", "ConvMixer", "MODEL.KERNEL_SIZE", "3"]
    train([*options, *mixer], tmp_path / "teacher", 16)
    distilled = [*tiny, *options[-2:], "TRAIN.DISTILLATION_TYPE", "soft", "DATA.IMAGE_SIZE", "12"]
    assert teach(distilled, tmp_path / "student", tmp_path / "teacher") > 0
