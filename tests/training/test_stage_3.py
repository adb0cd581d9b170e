"""Sharding's stage 3: each rank holds its share of the weights, and trains to the bits of one that
holds all.
"""

import numpy as np
import paddle
import pytest
from support.ranks import run_ranks
from support.sharding import STAGE_1
from support.training_runs import assert_close, assert_same_run, optimizer_state, train, weights

from config import get_config
from errors import InputError
from models import build_model
from models.memory import TrainingMemory, largest_share
from training import parallel
from training.checkpoint.saver import optimizer_state as own_state
from training.optim import build_optimizer

STAGE_3 = [*STAGE_1, "DIST.STRATEGY.sharding_configs.stage", "3"]
AGAIN = ["MODEL.RECOMPUTE", "True"]
RECIPE = [
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "2", "TRAIN.BASE_LR", "0.01", "TRAIN.OPTIMIZER.EPS", "1e-3",
    "TRAIN.GRAD_CLIP", "0.5", "MODEL.DROPOUT", "0.1", "MODEL.DROPPATH", "0.2", "SAVE_STEPS", "1", "KEEP_LAST", "99",
]  # fmt: skip
MIDDLE = "checkpoints/epoch_0001_sample_000000032"
EMBEDDING = ["TRAIN.FREEZE", "['patch_embed.*', 'pos_embed', 'cls_token']"]
WAYS = {
    "accumulated": ["TRAIN.ACCUM_ITER", "2"],
    "frozen before its blocks": EMBEDDING,
    "frozen blocks": ["TRAIN.FREEZE", "['blocks.1.*']"],
    "adaptive clipping": ["TRAIN.GRAD_CLIP_MODE", "agc", "TRAIN.GRAD_CLIP", "0.01"],
    "an adapter": [
        "TRAIN.ADAPTER.NAME",
        "lora",
        "MODEL.PRETRAINED",
        "accumulated, whole/checkpoints/last",
    ],
    "bfloat16": ["AMP", "True"],
}


def train_each(runs):
    for run in runs:
        train(*run)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of two ranks: one that holds all weights, one with stage 3, and each gone on with by the
    other.
    """
    from conftest import TINY

    output = tmp_path_factory.mktemp("runs")
    options = [*TINY, *RECIPE, *AGAIN, "MODEL.DEPTH", "4"]
    engines = {
        "whole": [],
        "shared": STAGE_3,
        "on": [*STAGE_3, "MODEL.RESUME", str(output / "whole" / MIDDLE)],
        "off": ["MODEL.RESUME", str(output / "shared" / MIDDLE)],
    }
    run_ranks(
        train_each, [([*options, *words], output / name, 64) for name, words in engines.items()]
    )
    return output


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["shared", "on", "off"])
def test_two_ranks_train_to_the_same_bits_and_go_on_from_each_other(trained, name):
    assert_same_run(trained / "whole", trained / name)


def test_its_file_of_weights_is_that_of_a_rank_which_holds_all(trained):
    """What evaluates, exports and serves it needs nothing else."""
    whole, shared = (
        trained / name / "checkpoints" / "last" / "model.safetensors"
        for name in ("whole", "shared")
    )
    assert whole.read_bytes() == shared.read_bytes()
    assert {file.name for file in shared.parent.iterdir()} >= {
        "optimizer-00002-of-00002.safetensors"
    }


@pytest.mark.slow
def test_whatever_else_trains_gives_the_same_weights(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [
        *tiny,
        *RECIPE,
        *AGAIN,
        "MODEL.DEPTH",
        "3",
        "TRAIN.NUM_EPOCHS",
        "1",
        "SAVE_STEPS",
        "0",
    ]
    runs = [
        ([*options, *words, *engine], tmp_path / f"{name}, {kind}", 64)
        for name, words in WAYS.items()
        for kind, engine in (("whole", []), ("shared", STAGE_3))
    ]
    run_ranks(train_each, runs)
    for name in WAYS:
        whole, shared = (tmp_path / f"{name}, {kind}" for kind in ("whole", "shared"))
        # An accumulated step's gradients are added to the sum of the ranks': the last bits may
        # differ.
        assert_close(weights(whole), weights(shared), atol=1e-6 if name == "accumulated" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_train_to_the_same_weights(tmp_path, tiny, ranks):
    options = [*tiny, *RECIPE, *AGAIN, "TRAIN.NUM_EPOCHS", "1", "SAVE_STEPS", "0"]
    runs = [
        ([*options, *engine], tmp_path / name, 96)
        for name, engine in (("whole", []), ("shared", STAGE_3))
    ]
    run_ranks(train_each, runs, ranks=ranks)
    assert_close(weights(tmp_path / "whole"), weights(tmp_path / "shared"), atol=1e-5)
    ends = [tmp_path / name / "checkpoints" / "last" for name in ("whole", "shared")]
    assert_close(*map(optimizer_state, ends), atol=1e-5)


# --------------------------------------------------------------------- memory


def held_between_updates(options):
    """Bytes of weights, gradients and moments that this rank holds once a step is done; whether all
    are there within ``gathered_weights``.
    """
    config = get_config("vit_digits", [*options, "TRAIN.OPTIMIZER.NAME", "AdamW"])
    parallel.init(config)
    paddle.seed(0)
    model = build_model(config)
    model.train()
    optimizer = parallel.wrap_optimizer(config, build_optimizer(config, model), model)
    before = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    parallel.free_unowned_weights(optimizer)

    model(paddle.ones([2, 1, 8, 8])).square().sum().backward()
    parallel.reduce_gradients(model, optimizer)
    gradients = sum(4 * p.size for p in model.parameters() if p.grad is not None)
    weights_held = sum(4 * p.size for p in model.parameters() if p._is_initialized())
    with parallel.gathered_weights(optimizer):
        same = all(np.array_equal(p.numpy(), before[name]) for name, p in model.named_parameters())
    optimizer.step()
    moments = sum(
        4 * t.size for key, t in own_state(model, optimizer).items() if "pow_acc" not in key
    )
    return weights_held, gradients, moments, same


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_its_share_of_the_weights(ranks):
    planned = TrainingMemory(get_config("vit_digits", AGAIN))
    memory = planned.per_process(3, ranks, 1)
    found = run_ranks(held_between_updates, [*STAGE_3, *AGAIN], ranks=ranks)
    held = [own[0] for own in found]
    everywhere = 4 * planned.unsharded
    assert sum(own - everywhere for own in held) == 4 * (planned.parameters - planned.unsharded)
    assert max(held) <= everywhere + 4 * largest_share(planned.sizes, ranks)
    assert max(own[1] for own in found) == memory.gradients
    assert max(own[2] for own in found) == memory.moments
    assert all(own[3] for own in found)


# -------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "MODEL.RECOMPUTE is False, expected True with DIST.STRATEGY.sharding_configs.stage 3"),
        (
            [*AGAIN, "TRAIN.MODEL_EMA", "True"],
            "TRAIN.MODEL_EMA is True, expected False with DIST.STRATEGY.sharding_configs.stage 3: each process would",
        ),
        (
            ["MODEL.TYPE", "LeNet"],
            "sharding_configs.stage is 3, expected 1 or 2 with LeNet, which doesn't support MODEL.RECOMPUTE",
        ),
        ([*AGAIN, "TO_STATIC", "True"], "TO_STATIC is True, expected False with MODEL.RECOMPUTE"),
    ],
)
def test_what_doesnt_go_with_stage_3_is_refused(options, message):
    with pytest.raises(InputError) as caught:
        get_config(None, [*STAGE_3, *options])
    assert message in str(caught.value)


def test_a_model_without_a_sequence_of_blocks_is_refused():
    with pytest.raises(
        InputError, match=r"stage is 3, but ResNet isn't one sequence of blocks; set it to 2"
    ):
        parallel._blocks(build_model(get_config("resnet18")))
