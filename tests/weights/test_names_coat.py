"""Names that other toolkits give CoaT's tensors, and the tensors that layers share: with their
weights our logits are theirs.

golden/names_coat.json was made by the authors' module (mlpc-ucsd/CoaT 220d31f, torch 2.13) and by
PaddleViT's (5ac7d89), reduced; kept are names, shapes and logits. The values are golden/coat.py's,
by timm's names.
"""

import json

import numpy as np
import paddle
import pytest
from conftest import ROOT
from golden.coat import CASES, array
from golden.make_names_vit import values
from support.small_models import small_coat

from errors import InputError
from weights import file_arrays, load_weights
from weights.formats import write_weights
from weights.names import coat, repeated_names, timm_names

GOLDEN = json.loads((ROOT / "tests" / "golden" / "names_coat.json").read_text())


def built(case):
    return small_coat(
        "coat" if "lite" in case else "coat_parallel", image_size=GOLDEN[case]["size"]
    )


def stored(case):
    """The file's arrays: a tensor has the value of its first name."""
    named = {name: name for name in GOLDEN[case]["shapes"]}
    if GOLDEN[case]["layout"] == "torch":
        return {name: array(name, tuple(shape)) for name, shape in GOLDEN[case]["shapes"].items()}
    first = {}
    for name in named:  # PaddleViT's: of two that come to one name the first counts
        [own] = timm_names(
            coat, {name: np.ones(1), "aggregate.weight": np.ones(1)}, "paddle", ()
        ).keys() - {"aggregate.weight"} or {name}
        first.setdefault(own, name)
        named[name] = first[own]
    return {
        name: values(named[name], tuple(shape)) for name, shape in GOLDEN[case]["shapes"].items()
    }


@pytest.mark.smoke
@pytest.mark.parametrize("case", GOLDEN)
def test_weights_of_other_toolkits_give_their_logits(tmp_path, case):
    golden = GOLDEN[case]
    model = built(case)
    expected = np.array(golden["logits"])
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-2 * np.ptp(expected)  # the images matter
    file = tmp_path / ("model.pdparams" if golden["layout"] == "paddle" else "model.safetensors")
    write_weights(file, stored(case))
    load_weights(model, file)
    model.eval()
    found = model(paddle.to_tensor(values("images", (2, 3, *golden["size"])))).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.ptp(expected), rtol=0)


@pytest.mark.parametrize("name", ["coat", "coat_parallel"])
def test_what_is_written_has_timms_names_and_loads_with_and_without_repetitions(tmp_path, name):
    case = "lite of the authors" if name == "coat" else "parallel of the authors"
    theirs = {
        key
        for key in GOLDEN[case]["shapes"]
        if not key.startswith(("norm1.", *(("norm2.", "norm3.") if name == "coat" else ())))
    }
    model = small_coat(name)
    arrays = file_arrays(model)
    assert arrays.keys() == theirs
    others = repeated_names(coat, model.state_dict())
    assert theirs - others.keys() == model.state_dict().keys()
    # each file has some name of each tensor
    for others_left in (others, {key for key in others if "2" in key}, ()):
        fresh = small_coat(name)
        write_weights(
            tmp_path / "some.safetensors", {k: v for k, v in arrays.items() if k not in others_left}
        )
        load_weights(fresh, tmp_path / "some.safetensors")
        assert all((value == arrays[key]).all() for key, value in file_arrays(fresh).items())
    # The repetitions alone, too: the model's own names may be what is left out.
    owned = {own for other, own in others.items()}
    write_weights(
        tmp_path / "other.safetensors", {k: v for k, v in arrays.items() if k not in owned}
    )
    load_weights(small_coat(name), tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("serial_blocks2.0.cpe.proj.bias", "cpe2.proj.bias"),
        ("parallel_blocks.1.factoratt_crpe3.crpe.conv_list.1.weight", "crpe3.conv_list.1.weight"),
        ("parallel_blocks.0.mlp4.fc1.weight", "parallel_blocks.0.mlp2.fc1.weight"),
    ],
)
def test_a_file_whose_shared_tensors_differ_is_refused(tmp_path, name, own):
    """PaddleViT's three MLPs of a parallel block do after training there."""
    arrays = file_arrays(small_coat("coat_parallel"))
    for other in (arrays[name] + 1, np.ones((3, 1), "float32")):
        write_weights(tmp_path / "a.safetensors", arrays | {name: other})
        with pytest.raises(InputError, match=f"{own} and {name} differ, but CoaT shares them"):
            load_weights(small_coat("coat_parallel"), tmp_path / "a.safetensors")


def test_parallel_blocks_are_told(tmp_path):
    write_weights(tmp_path / "lite.safetensors", file_arrays(small_coat()))
    with pytest.raises(
        InputError, match="according to the names of its tensors, set MODEL.PARALLEL_DEPTH 0"
    ):
        load_weights(
            small_coat(parallel_depth=1, embed_dims=(8, 16, 16, 16)), tmp_path / "lite.safetensors"
        )
    assert len(CASES) == 3
