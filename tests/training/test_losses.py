"""Losses per sample against torch's, timm's and DeiT's (golden/make_losses.py)."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from golden.formula import array
from paddle import nn

import ops
from config import get_config
from errors import InputError
from loading.label_sets import LabelSets
from loading.transforms import Normalize, smooth_one_hot
from training.losses import (
    Asymmetric,
    BinaryCrossEntropy,
    CrossEntropy,
    Focal,
    SoftTargetCrossEntropy,
    Teacher,
    TokenLabelCrossEntropy,
    TrainingLoss,
    binary_cross_entropy,
    build_criterion,
    class_weights,
    pos_weights,
)

COUNT = 6
CLASSES = 5
GOLDEN = np.load(Path(__file__).parent.with_name("golden") / "losses.npz")
LOGITS, STUDENT, TEACHER = (
    paddle.to_tensor(array(name, (COUNT, CLASSES)) * 20)
    for name in ("logits", "student", "teacher")
)
LABELS = paddle.arange(COUNT) * 3 % CLASSES
SOFT = nn.functional.softmax(paddle.to_tensor(array("targets", (COUNT, CLASSES)) * 10))
WEIGHTS = {"": None, "/weight": [0.5, 1.0, 1.5, 2.0, 2.5]}


@pytest.fixture(autouse=True, params=["compiled", "Paddle's"])
def operators(request):
    """Every test has the compiled operators, and Paddle's."""
    if request.param == "compiled":
        request.getfixturevalue("compiled_operators")
    ops.enable(request.param == "compiled")
    yield
    ops.enable(True)


def configured(*options):
    return get_config(None, ["MODEL.NUM_CLASSES", "5", *options])


def assert_golden(found, name):
    assert found.dtype == paddle.float32
    np.testing.assert_allclose(found.numpy(), GOLDEN[name], rtol=1e-6, atol=1e-6, err_msg=name)


class Fixed(nn.Layer):
    """A teacher that has made up its mind."""

    def forward(self, images):
        return TEACHER


@pytest.mark.smoke
@pytest.mark.parametrize("weight", WEIGHTS)
def test_cross_entropies_are_torchs(weight):
    for smoothing in (0.0, 0.1):
        criterion = CrossEntropy(smoothing, WEIGHTS[weight])
        assert_golden(criterion(LOGITS, LABELS), f"cross_entropy/{smoothing}{weight}")
        same = SoftTargetCrossEntropy(WEIGHTS[weight])(
            LOGITS, smooth_one_hot(LABELS, CLASSES, smoothing)
        )
        assert_golden(same, f"cross_entropy/{smoothing}{weight}")
    assert_golden(SoftTargetCrossEntropy(WEIGHTS[weight])(LOGITS, SOFT), f"soft_target{weight}")


@pytest.mark.smoke
@pytest.mark.parametrize("apart", [1e-3, 20.0, 64.0, 65.0, 300.0, 1e4])
def test_a_large_loss_and_a_small_one_are_what_they_are(apart):
    """Paddle's own softmax ends at a loss of 64 on a CPU."""
    logits = np.array([[apart, 0, -1.0], [0, 1.0, apart]])
    targets = np.array([[0, 1.0, 0], [0, 0, 1.0]])
    labels = paddle.to_tensor([1, 2])
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    for smoothing in (0.0, 0.1):
        wanted = (1 - smoothing) * targets + smoothing / 3
        for criterion, answer in (
            (CrossEntropy(smoothing), labels),
            (SoftTargetCrossEntropy(), paddle.to_tensor(wanted.astype("float32"))),
        ):
            found = paddle.to_tensor(logits.astype("float32"), stop_gradient=False)
            losses = criterion(found, answer)
            losses.sum().backward()
            np.testing.assert_allclose(
                losses.numpy(), -(wanted * logs).sum(axis=1), rtol=1e-6, atol=1e-7
            )
            np.testing.assert_allclose(found.grad.numpy(), np.exp(logs) - wanted, rtol=0, atol=2e-7)


def test_a_large_loss_is_found_beside_one_that_is_no_number_and_none_is_none():
    logits = paddle.to_tensor([[float("nan"), 0, 0], [300, 0, 0]])
    np.testing.assert_array_equal(
        CrossEntropy()(logits, paddle.to_tensor([1, 1])).numpy(), [np.nan, 300]
    )
    assert CrossEntropy()(paddle.zeros([0, 3]), paddle.zeros([0], "int64")).shape == [0]


@pytest.mark.smoke
@pytest.mark.parametrize("label", [-1, 5])
def test_a_label_that_is_no_class_is_an_error(label):
    with pytest.raises((IndexError, ValueError)):
        CrossEntropy()(LOGITS[:2], paddle.to_tensor([1, label]))


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("threshold", [None, 0.2])
def test_binary_cross_entropy_is_timms(threshold, sums, weight):
    for smoothing in (0.0, 0.1):
        criterion = BinaryCrossEntropy(smoothing, threshold, sums, WEIGHTS[weight])
        assert_golden(
            criterion(LOGITS, LABELS), f"bce/labels/{smoothing}/{threshold}/{sums}{weight}"
        )
        assert_golden(criterion(LOGITS, SOFT), f"bce/soft/{smoothing}/{threshold}/{sums}{weight}")


EDGES = [
    0.0,
    -0.0,
    1e-30,
    -1e-30,
    1e-7,
    -1e-7,
    0.5,
    -0.5,
    5,
    -5,
    20,
    -20,
    88,
    -88,
    100,
    -100,
    1e4,
    -1e4,
    1e30,
    -1e30,
]


def binary_entropy(logits, targets, pos_weight):
    """The loss of each logit and its gradient, in float64."""
    logits = np.float64(logits)
    targets = np.float64(targets)
    yes = pos_weight * targets
    no = 1 - targets
    gradient = no / (1 + np.exp(-logits.clip(-700))) - yes / (1 + np.exp(logits.clip(None, 700)))
    return yes * np.logaddexp(0, -logits) + no * np.logaddexp(0, logits), gradient


@pytest.mark.smoke
@pytest.mark.parametrize("pos_weight", [None, 0.5, 3.0])
@pytest.mark.parametrize("how", ["eager", "traced", "autocast"])
@pytest.mark.parametrize("target", [0.0, 1.0, 0.25, 0.5, 0.75, 0.92, 0.02])
def test_the_gradient_of_binary_cross_entropy_is_the_formulas(how, target, pos_weight):
    """Paddle 3.3.1's own gives 1 less at a logit of 0, where classifiers start that begin with
    zeros.
    """
    criterion = BinaryCrossEntropy(sum_classes=True, pos_weight=pos_weight and [pos_weight])
    criterion = paddle.jit.to_static(criterion) if how == "traced" else criterion
    half = how == "autocast"
    logits = paddle.to_tensor([EDGES], dtype="bfloat16" if half else "float32", stop_gradient=False)
    each = paddle.full([1, len(EDGES)], target)
    with paddle.amp.auto_cast(enable=half, dtype="bfloat16", level="O1"):
        loss = criterion(logits, each)
    loss.sum().backward()
    losses, gradient = binary_entropy(
        logits.astype("float32").numpy(), each.numpy(), pos_weight or 1.0
    )
    np.testing.assert_allclose(loss.numpy(), losses.sum(1), rtol=1e-6)
    found = logits.grad.astype("float32").numpy()
    np.testing.assert_allclose(found, gradient, rtol=1e-2 if half else 1e-6, atol=1e-7)


@pytest.mark.smoke
@pytest.mark.parametrize("target", [0.0, 1.0, 0.3])
def test_small_binary_cross_entropies_lose_no_digits_to_large_logits(target):
    logits = paddle.to_tensor(EDGES)
    losses, _ = binary_entropy(logits.numpy(), np.full(len(EDGES), target, np.float32), 1.0)
    found = binary_cross_entropy(logits, paddle.full_like(logits, target)).numpy()
    np.testing.assert_allclose(found, losses, rtol=1e-7, atol=1e-7)


@pytest.mark.smoke
@pytest.mark.parametrize("loss", ["bce", "focal", "asymmetric"])
def test_the_first_step_of_a_classifier_of_zeros_goes_the_right_way(loss):
    logits = paddle.zeros([2, 4])
    logits.stop_gradient = False
    targets = paddle.to_tensor([[0.0, 1, 0, 1], [1.0, 0, 0, 0]])
    build_criterion(configured("TRAIN.LOSS", loss))(None, logits, targets).sum().backward()
    assert (np.sign(logits.grad.numpy()) == 1 - 2 * targets.numpy()).all()


def test_a_target_at_the_threshold_is_0():
    found = BinaryCrossEntropy(0.0, 0.5, True)(
        paddle.to_tensor([[3.0, 2.0]]), paddle.to_tensor([[0.5, 0.75]])
    )
    np.testing.assert_allclose(
        found.numpy(), [np.log1p(np.exp(3)) + np.log1p(np.exp(-2))], rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_distillation_is_deits(kind, tau):
    golden = GOLDEN["hard" if kind == "hard" else f"soft/{tau}"]
    base = CrossEntropy(0.1)
    loss = TrainingLoss(base, Fixed(), kind, 0.3, tau)
    found = loss(None, (LOGITS, STUDENT), LABELS).numpy()
    np.testing.assert_allclose(
        found, 0.7 * GOLDEN["cross_entropy/0.1"] + 0.3 * golden, rtol=1e-6, atol=1e-6
    )
    plain = loss(None, STUDENT, LABELS).numpy()  # no distillation token: one classifier for both
    np.testing.assert_allclose(
        plain, 0.7 * base(STUDENT, LABELS).numpy() + 0.3 * golden, rtol=1e-6, atol=1e-6
    )
    alone = TrainingLoss(base, Fixed(), kind, 1.0, tau)(None, (LOGITS, STUDENT), LABELS).numpy()
    np.testing.assert_allclose(alone, golden, rtol=1e-6, atol=1e-6)


def test_half_precision_logits_are_lost_in_float32():
    low = (LOGITS / 5).astype("bfloat16")
    wide = low.astype("float32")
    criteria = [
        (CrossEntropy(0.1), LABELS),
        (SoftTargetCrossEntropy(), SOFT),
        (BinaryCrossEntropy(0.1), LABELS),
    ]
    for criterion, targets in criteria:
        found = criterion(low, targets)
        assert found.dtype == paddle.float32
        assert (found.numpy() == criterion(wide, targets).numpy()).all()
    for kind in ("hard", "soft"):
        loss = TrainingLoss(CrossEntropy(), Fixed(), kind, 1.0)
        assert loss(None, low, LABELS).dtype == paddle.float32
        assert (loss(None, low, LABELS).numpy() == loss(None, wide, LABELS).numpy()).all()


def test_a_teacher_sees_its_own_normalisation_in_eval_mode_without_gradient():
    pixels = paddle.to_tensor(np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), np.uint8))
    student = ([0.5], [0.5, 0.4, 0.6])
    own = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 3))
    images = Normalize(*student)(pixels)
    images.stop_gradient = False
    teacher = Teacher(model, *student, *own)
    loss = TrainingLoss(CrossEntropy(), teacher, "hard")
    loss.train()
    assert not model[1].training
    assert not loss.parameters()
    found = teacher(images)
    np.testing.assert_allclose(found.numpy(), model(Normalize(*own)(pixels)).numpy(), atol=1e-5)
    assert found.stop_gradient
    assert all(parameter.stop_gradient for parameter in model.parameters())
    assert (Teacher(model, *own, *own)(images).numpy() == model(images).numpy()).all()


def test_gradients_reach_the_student_by_both_classifiers():
    logits = paddle.zeros([COUNT, CLASSES])
    distilled = paddle.zeros([COUNT, CLASSES])
    logits.stop_gradient = distilled.stop_gradient = False
    TrainingLoss(CrossEntropy(), Fixed(), "hard", 0.25)(
        None, (logits, distilled), LABELS
    ).sum().backward()
    choice = np.eye(CLASSES)[TEACHER.numpy().argmax(1)]
    np.testing.assert_allclose(
        logits.grad.numpy(), 0.75 * (0.2 - np.eye(CLASSES)[LABELS.numpy()]), atol=1e-6
    )
    np.testing.assert_allclose(distilled.grad.numpy(), 0.25 * (0.2 - choice), atol=1e-6)


def test_class_weights_are_given_or_inverse_to_the_number_of_images():
    labels = np.array([0] * 6 + [1] * 2 + [3] * 1 + [4] * 1)
    automatic = class_weights(configured("TRAIN.CLASS_WEIGHTS", "auto"), labels)
    np.testing.assert_allclose(automatic, [10 / 24, 10 / 8, 0, 10 / 4, 10 / 4])
    np.testing.assert_allclose(np.array(automatic)[labels].mean(), 1)
    assert class_weights(configured("TRAIN.CLASS_WEIGHTS", "[1,2,3,4,0.5]"), None) == [
        1,
        2,
        3,
        4,
        0.5,
    ]
    assert class_weights(configured(), labels) is None
    with pytest.raises(
        InputError,
        match=r"CLASS_WEIGHTS has 2 values, expected 5, one per class of MODEL.NUM_CLASSES",
    ):
        class_weights(configured("TRAIN.CLASS_WEIGHTS", "[1,2]"), labels)
    for missing in (None, labels[:0]):
        with pytest.raises(
            InputError,
            match="CLASS_WEIGHTS is 'auto', but there are no training labels; set a factor",
        ):
            class_weights(configured("TRAIN.CLASS_WEIGHTS", "auto"), missing)


@pytest.mark.parametrize(
    ("options", "targets", "name"),
    [
        ([], LABELS, "cross_entropy/0.0"),
        (["TRAIN.SMOOTHING", "0.1"], LABELS, "cross_entropy/0.1"),
        (
            ["TRAIN.LOSS", "cross_entropy", "TRAIN.CLASS_WEIGHTS", "[0.5,1,1.5,2,2.5]"],
            LABELS,
            "cross_entropy/0.0/weight",
        ),
        (["TRAIN.LOSS", "soft_target"], SOFT, "soft_target"),
        (["TRAIN.MIXUP_ALPHA", "0.8", "TRAIN.SMOOTHING", "0.1"], SOFT, "soft_target"),
        (
            ["TRAIN.CUTMIX_ALPHA", "1", "TRAIN.CLASS_WEIGHTS", "[0.5,1,1.5,2,2.5]"],
            SOFT,
            "soft_target/weight",
        ),
        (["TRAIN.LOSS", "bce", "TRAIN.SMOOTHING", "0.1"], LABELS, "bce/labels/0.1/None/False"),
        (
            [
                "TRAIN.LOSS",
                "bce",
                "TRAIN.CUTMIX_MINMAX",
                "[0.2,0.8]",
                "TRAIN.BCE_TARGET_THRESH",
                "0.2",
                "TRAIN.BCE_SUM",
                "True",
                "TRAIN.CLASS_WEIGHTS",
                "[0.5,1,1.5,2,2.5]",
            ],
            SOFT,
            "bce/soft/0.0/0.2/True/weight",
        ),
    ],
)
def test_the_criterion_is_the_configurations(options, targets, name):
    assert_golden(build_criterion(configured(*options))(None, LOGITS, targets), name)


def test_the_criterion_distils_as_configured():
    options = [
        "TRAIN.DISTILLATION_TYPE",
        "soft",
        "TRAIN.DISTILLATION_ALPHA",
        "1.0",
        "TRAIN.DISTILLATION_TAU",
        "3.0",
    ]
    criterion = build_criterion(configured(*options), teacher=Fixed())
    assert_golden(criterion(None, (LOGITS, STUDENT), LABELS), "soft/3.0")
    weighted = configured("TRAIN.CLASS_WEIGHTS", "auto")
    found = build_criterion(weighted, labels=np.array([0, 0, 1, 2, 3, 4]))(
        None, LOGITS, LABELS
    ).numpy()
    factors = np.array([0.6, 1.2, 1.2, 1.2, 1.2])[LABELS.numpy()]
    np.testing.assert_allclose(found, GOLDEN["cross_entropy/0.0"] * factors, rtol=1e-6)


def test_what_does_not_fit_is_refused():
    hard = configured("TRAIN.DISTILLATION_TYPE", "hard")
    with pytest.raises(
        InputError,
        match="DISTILLATION_TYPE is 'hard' but there is no teacher; set TRAIN.TEACHER_MODEL",
    ):
        build_criterion(hard)
    with pytest.raises(
        InputError, match="DISTILLATION_TYPE is None but there is a teacher; set it to hard or soft"
    ):
        build_criterion(configured(), teacher=Fixed())
    criterion = build_criterion(hard, teacher=Fixed())
    with pytest.raises(InputError, match="the teacher has 5 classes, expected the student's 7"):
        criterion(None, paddle.zeros([COUNT, 7]), LABELS)


def test_token_labels_are_the_authors():
    """The formula of loss/cross_entropy.py of sail-sg/volo (TokenLabelCrossEntropy, targets [B,
    K]), in NumPy.
    """
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 5))
    dense = rng.normal(size=(4, 6, 5))
    labels = np.array([0, 3, 3, 1])
    mixed = 1 / 3
    smoothing = 0.1

    def entropy(scores, wanted):
        return -(wanted * (scores - np.log(np.exp(scores).sum(-1, keepdims=True)))).sum(-1)

    wanted = np.eye(5)[labels] * (1 - smoothing) + smoothing / 5
    whole = (1 - mixed) * wanted + mixed * wanted[::-1]
    expected = entropy(logits, whole) + 0.5 * entropy(dense, wanted[:, None]).mean(1)
    outputs = [
        paddle.to_tensor(value, dtype="float32") for value in (logits, dense, np.array(mixed))
    ]
    loss = TrainingLoss(TokenLabelCrossEntropy(smoothing))
    np.testing.assert_allclose(
        loss(None, outputs, paddle.to_tensor(labels)).numpy(), expected, rtol=1e-5
    )
    soft = paddle.to_tensor(wanted, dtype="float32")
    np.testing.assert_allclose(loss(None, outputs, soft).numpy(), expected, rtol=1e-5)


HOT = paddle.to_tensor((array("hot", (COUNT, CLASSES)) > 0).astype("float32"))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "targets"), [("hot", HOT), ("mixed", 0.7 * HOT + 0.3 * HOT.flip([0]))]
)
def test_losses_of_several_classes_are_torchs_torchvisions_and_timms(name, targets):
    weight = WEIGHTS["/weight"]
    weighted = BinaryCrossEntropy(weight=weight, pos_weight=[3 * factor for factor in weight])
    assert_golden(weighted(LOGITS, targets), f"bce/pos/{name}")
    for gamma, alpha in ((2.0, 0.25), (0.0, -1), (1.5, 0.6)):
        criterion = Focal(0.0, gamma, None if alpha < 0 else alpha)
        assert_golden(criterion(LOGITS, targets), f"focal/{name}/{gamma}/{alpha}")
    for settings in ((4, 1, 0.05), (2, 0, 0.0), (0, 0, 0.2)):
        assert_golden(Asymmetric(0.0, *settings)(LOGITS, targets), f"asymmetric/{name}/{settings}")


def test_losses_of_several_classes_have_finite_gradients_and_take_labels_and_weights():
    for kind in (Focal, Asymmetric):
        logits = paddle.to_tensor([[-200.0, 200.0, -200.0, 200.0, 0.0]])
        logits.stop_gradient = False
        for settings in ((0.0, 0.0), (0.5, 0.5)):
            kind(0.0, *settings)(logits, paddle.to_tensor([[1.0, 1, 0, 0, 1]])).sum().backward()
            assert np.isfinite(logits.grad.numpy()).all()
        one_hot = nn.functional.one_hot(LABELS, CLASSES)
        np.testing.assert_array_equal(
            kind()(LOGITS, LABELS).numpy(), kind()(LOGITS, one_hot).numpy()
        )
        np.testing.assert_allclose(
            kind(weight=[3.0] * 5)(LOGITS, HOT), 3 * kind()(LOGITS, HOT).numpy(), rtol=1e-6
        )


def test_weights_of_several_classes_an_image_count_its_labels():
    # 5 images, one of no class; classes 2 and 4 in none
    sets = LabelSets([0, 1, 0, 0, 1, 3], [0, 2, 3, 3, 4, 6])
    several = ["TASK", "multilabel"]
    found = class_weights(configured(*several, "TRAIN.CLASS_WEIGHTS", "auto"), sets)
    np.testing.assert_allclose(found, [6 / 9, 6 / 6, 6 / 3, 6 / 3, 6 / 3])
    np.testing.assert_allclose(
        pos_weights(configured(*several, "TRAIN.POS_WEIGHT", "auto"), sets), [2 / 3, 1.5, 1, 4, 1]
    )
    assert pos_weights(configured(*several, "TRAIN.POS_WEIGHT", "[2]"), None) == [2.0]
    assert pos_weights(configured(*several), sets) is None
    message = "TRAIN.POS_WEIGHT has 2 values, expected 1 or 5, one per class of MODEL.NUM_CLASSES"
    with pytest.raises(InputError, match=message):
        pos_weights(configured(*several, "TRAIN.POS_WEIGHT", "[2,3]"), sets)
    with pytest.raises(
        InputError, match="TRAIN.POS_WEIGHT is 'auto', but there are no training labels"
    ):
        pos_weights(configured(*several, "TRAIN.POS_WEIGHT", "auto"), None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], BinaryCrossEntropy()),
        (["TRAIN.POS_WEIGHT", "[3]"], BinaryCrossEntropy(pos_weight=[3.0])),
        (["TRAIN.LOSS", "bce", "TRAIN.BCE_SUM", "True"], BinaryCrossEntropy(sum_classes=True)),
        (
            ["TRAIN.LOSS", "focal", "TRAIN.FOCAL_GAMMA", "1", "TRAIN.FOCAL_ALPHA", "null"],
            Focal(0.0, 1.0, None),
        ),
        (["TRAIN.LOSS", "asymmetric", "TRAIN.ASL_CLIP", "0"], Asymmetric(0.0, 4.0, 1.0, 0.0)),
    ],
)
def test_the_criterion_of_several_classes_is_the_configurations(options, expected):
    found = build_criterion(configured("TASK", "multilabel", "TRAIN.SMOOTHING", "0.1", *options))
    np.testing.assert_allclose(
        found(None, LOGITS, HOT).numpy(), expected(LOGITS, HOT).numpy(), rtol=1e-6
    )
