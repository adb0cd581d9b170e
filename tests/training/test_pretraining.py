"""All methods of pre-training: two processes train as one, and so does a graph (TO_STATIC)."""

import numpy as np
import pytest
from conftest import TINY, without
from safetensors.numpy import load_file
from support.ranks import run_ranks
from support.training_runs import records, refused, train, weights

import utils
from config import get_config
from datasets import get_dataloader, get_datasets
from settings.registry import tasks
from training.setup import _trace

# The last update of an epoch of 46 images is of two steps, of which the last one has 6 images.
# AdamW would make something of the gradients that are zero but for rounding.
SHARED = [
    *without(TINY, "DATA.IMAGE_SIZE", "MODEL.", "TRAIN.NUM_EPOCHS"), "TRAIN.NUM_EPOCHS", "2",
    "DATA.GLOBAL_BATCH", "8", "DATA.DROP_LAST", "False", "TRAIN.ACCUM_ITER", "4",
    "TRAIN.OPTIMIZER.NAME", "SGD", "TRAIN.BASE_LR", "0.1", "TRAIN.GRAD_CLIP", "1.0",
    "REPORT_FREQ", "1",
]  # fmt: skip
AVERAGE = [
    "TRAIN.MODEL_EMA", "True", "TRAIN.MODEL_EMA_DECAY", "0.5", "TRAIN.MODEL_EMA_WARMUP", "False",
]  # fmt: skip
VIT = [
    "DATA.IMAGE_SIZE", "8", "MODEL.PATCH_SIZE", "2", "MODEL.EMBED_DIM", "16", "MODEL.DEPTH", "2",
    "MODEL.NUM_HEADS", "2",
]  # fmt: skip
CONVNEXT = [
    "DATA.IMAGE_SIZE", "64", "MODEL.TYPE", "ConvNeXt", "MODEL.STAGE_DEPTHS", "[1,1,1,1]",
    "MODEL.EMBED_DIMS", "[4,4,8,8]", "MODEL.INIT_VALUES", "0", "MODEL.USE_GRN", "True",
]  # fmt: skip
HIERA = [
    "DATA.IMAGE_SIZE", "64", "MODEL.TYPE", "Hiera", "MODEL.STAGE_DEPTHS", "[1,1,1,1]",
    "MODEL.EMBED_DIM", "4", "MODEL.Q_POOL", "2",
]  # fmt: skip
DECODER = [
    "METHOD.DECODER_WIDTH", "16", "METHOD.DECODER_HEADS", "2", "METHOD.DECODER_DEPTH", "1",
]  # fmt: skip
DINO = [
    *VIT, "METHOD.PROTOTYPES", "12", "METHOD.HEAD_WIDTH", "16", "METHOD.HEAD_OUTPUTS", "8",
    "METHOD.LOCAL_VIEWS", "2", "METHOD.LOCAL_SIZE", "4", "METHOD.MOMENTUM", "0.9",
    "METHOD.PATCH_LOSS", "1.0", "METHOD.KOLEO", "0.1",
]  # fmt: skip
METHODS = {
    "tokenizer": [*VIT, *DECODER, "METHOD.CODE_DIM", "8", "METHOD.VOCABULARY", "12"],
    "beit": [*VIT, "METHOD.MIN_BLOCK", "2"],
    "mae": [*VIT, *DECODER],
    "mae of a Hiera": [*HIERA, *DECODER],
    "simmim": [*VIT, "METHOD.MASK_PATCH", "2"],
    "fcmae": CONVNEXT,
    "dino": DINO,
    # Fresh class tokens are almost equal for all images. The batch norms of this one and of MoCo
    # would magnify their rounding.
    "dino by Sinkhorn-Knopp": [
        *DINO, "METHOD.CENTERING", "sinkhorn_knopp", "METHOD.SEPARATE_HEAD", "True",
        "METHOD.HEAD_BATCH_NORM", "True", "METHOD.FREEZE_LAST_LAYER", "0", "TRAIN.BASE_LR", "0.02",
        "METHOD.TEACHER_TEMP", "0.1", "METHOD.KOLEO", "0", "MODEL.GLOBAL_POOL", "avg", "MODEL.FC_NORM", "False",
    ],
    "dino of a large teacher": [*DINO, "METHOD.FREEZE_LAST_LAYER", "0"],
    "moco": [
        *VIT, "METHOD.PROJECTOR_WIDTH", "24", "METHOD.PROJECTOR_OUTPUTS", "8", "MODEL.GLOBAL_POOL", "avg",
        "TRAIN.BASE_LR", "0.01",
    ],
}  # fmt: skip
# Their teacher is the average of the weights.
WITHOUT_AVERAGE = ("dino", "dino by Sinkhorn-Knopp", "moco")


def options_of(method, runs):
    """Returns the options of a method. BEiT's tokenizer and the large teacher are among ``runs``."""
    options = ["TASK", method.split()[0], *SHARED, *METHODS[method]]
    if method not in WITHOUT_AVERAGE:
        options += AVERAGE
    for network, key, source in (
        ("beit", "TOKENIZER", "tokenizer"),
        ("dino of a large teacher", "LARGE_TEACHER", "dino"),
    ):
        if method == network:
            options += [f"METHOD.{key}", f"{runs / source}/config.yaml"]
            options += [f"METHOD.{key}_PATH", f"{runs / source}/checkpoints/last"]
    return options


def train_all(folder, first):
    for method in METHODS:
        train(options_of(method, first), folder / method, 46)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of the runs on one process and on two, with a run for each method."""
    place = tmp_path_factory.mktemp("ranks")
    for ranks in (1, 2):
        run_ranks(train_all, place / str(ranks), place / "1", ranks=ranks)
    return place / "1", place / "2"


@pytest.mark.smoke
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_and_evaluate_as_one(runs, method):
    one, two = (folder / method for folder in runs)
    first = weights(one)
    second = weights(two)
    pairs = [(first, second)]
    has_average = method not in WITHOUT_AVERAGE
    if has_average:
        files = [run / "checkpoints" / "last" / "ema.safetensors" for run in (one, two)]
        pairs.append(tuple(map(load_file, files)))
    for expected, found in pairs:
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=2e-6, err_msg=name)
    assert not has_average or any((first[n] != average).any() for n, average in pairs[1][0].items())

    lines = [records(run) for run in (one, two)]
    # Six steps, and evaluations of the weights and of their average, in each of two epochs.
    expected_lines = 16 if has_average else 14
    assert [len(each) for each in lines] == [expected_lines, expected_lines]
    for expected, found in zip(*lines, strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            if isinstance(value, float):
                assert found[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name
            else:
                assert found[name] == value, name
    evaluated = [line for line in lines[1] if line["split"] != "train"]
    assert {line["num_samples"] for line in evaluated} == {91}


@pytest.mark.long
@pytest.mark.parametrize("method", [*METHODS, "beit with further blocks"])
def test_a_graph_has_the_loss_and_the_gradients_of_the_network(runs, method):
    options = options_of(method.removesuffix(" with further blocks"), runs[0])
    if "further" in method:
        options += ["METHOD.HEAD_LAYERS", "1", "METHOD.EARLY_LAYERS", "1"]
    config, data, _ = get_datasets(get_config(None, options))
    utils.seed_everything(0)
    task = tasks.choose(config)(config)
    network = task.build_network()
    task.prepare_data(data, "train")
    batch = next(iter(get_dataloader(config, data, "train")))

    def loss_and_gradients():
        loss = task.step(network, batch, epoch=1)["loss"]
        loss.sum().backward()
        found = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        network.clear_gradients()
        return loss.numpy(), {name: gradient.numpy() for name, gradient in found.items()}

    loss, gradients = loss_and_gradients()
    _trace(network)
    traced_loss, traced = loss_and_gradients()
    np.testing.assert_allclose(traced_loss, loss, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(traced[name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


def refuse_graphs(folder):
    message = "have batch norms over the images of all 2 processes, which a graph can't contain"
    for method in ("dino by Sinkhorn-Knopp", "moco"):
        refused(message, [*options_of(method, folder), "TO_STATIC", "True"], folder / method)


def test_a_graph_with_batch_norms_over_all_processes_is_refused(tmp_path):
    run_ranks(refuse_graphs, tmp_path)
    assert not list(tmp_path.iterdir())
