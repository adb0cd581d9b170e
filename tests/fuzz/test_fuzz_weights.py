"""Weight files that a stranger wrote: damaged, or built of what the readers know, with sizes and
names that lie.
"""

import io
import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from golden.vit import CASES
from hypothesis import example, given
from hypothesis import strategies as st
from support.hostile_files import a_share, attempt, damaged
from support.weight_files import (
    MAGIC,
    ONE,
    WRITERS,
    Built,
    Call,
    Named,
    Outside,
    Raw,
    numpy_array,
    program,
    storage,
    tensor,
)

from models.transformers_arguments import described_model
from models.vit import VisionTransformer
from weights import file_arrays, load_weights
from weights.arrays import item_size
from weights.formats import SAFETENSORS_DTYPES, read_weights, write_weights
from weights.hub import read_config
from weights.transformers import HEADS
from weights.unpickle import ADMITTED

GOLDEN = Path(__file__).parent.parent / "golden"
SIZES = st.one_of(
    st.integers(0, 5),
    st.sampled_from([-1, 1 << 15, 1 << 24, 1 << 31, 1 << 40, (1 << 48) - 1, 1 << 63]),
)
SHAPES = st.lists(SIZES, max_size=4).map(tuple)


@pytest.mark.parametrize(
    "name", ["weights.pth", "weights_legacy.pth", "weights.safetensors", "checkpoint.pth"]
)
def test_a_damaged_weight_file_is_read_or_refused(name, tmp_path):
    whole = (GOLDEN / name).read_bytes()
    path = tmp_path / "file"
    path.write_bytes(whole)
    assert attempt(name, len(whole), lambda: read_weights(path)) == ""

    @a_share(6)
    @given(st.data())
    def try_one(data):
        path.write_bytes(data.draw(damaged(whole)))
        attempt(name, path.stat().st_size, lambda: read_weights(path))

    try_one()


# ------------------------------------------------------------ adapters


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.floats(),
    st.text(max_size=6),
    st.just("9" * 5000),
)
ODD |= st.lists(st.sampled_from(["qkv", "head", "blocks.0.attn.qkv", "", "x" * 300]), max_size=3)
ODD |= st.sampled_from(
    [r"blocks\.\d\.attn\.qkv", ".*", "(", "(a|a)*" * 20, "LORA", "all", "all-linear", {"a": 1}]
)
PEFT = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["qkv"], "modules_to_save": ["head"],
    "bias": "none", "use_rslora": False, "exclude_modules": None, "layers_to_transform": None, "layers_pattern": None,
    "init_lora_weights": True, "rank_pattern": {}, "x": None,
}  # fmt: skip


def test_an_adapter_is_whole_or_refused(tmp_path):
    model = VisionTransformer(
        image_size=32, patch_size=16, embed_dim=8, depth=2, num_heads=2, num_classes=3
    )
    base = file_arrays(model)
    write_weights(tmp_path / "base.safetensors", base)
    whole = {"head.weight": base["head.weight"] + 1, "head.bias": base["head.bias"] + 1}
    for block in range(2):
        whole[f"blocks.{block}.attn.qkv.lora_A.weight"] = np.ones((2, 8), np.float32)
        whole[f"blocks.{block}.attn.qkv.lora_B.weight"] = np.ones((24, 2), np.float32)

    def load(tensors, told):
        write_weights(
            tmp_path / "adapter_model.safetensors",
            {f"base_model.model.{n}": a for n, a in tensors.items()},
        )
        (tmp_path / "adapter_config.json").write_text(json.dumps(told))
        size = sum(file.stat().st_size for file in tmp_path.iterdir())
        return attempt(
            "adapters",
            size,
            lambda: load_weights(model, tmp_path / "base.safetensors", adapter=tmp_path),
        )

    assert load(whole, PEFT) == ""
    for name in whole:
        assert f"it lacks {name}" in load(
            {other: whole[other] for other in whole if other != name}, PEFT
        )

    @a_share(6)
    @given(st.dictionaries(st.sampled_from([*PEFT]), ODD, min_size=1, max_size=2))
    def try_settings(told):
        load(whole, PEFT | told)

    @a_share(6)
    @given(
        st.sampled_from([*whole]),
        st.lists(st.integers(0, 30), max_size=3),
        st.sampled_from(["<f4", "<f2", "<i8"]),
    )
    def try_tensors(name, shape, dtype):
        line = load(whole | {name: np.ones(shape, dtype)}, PEFT)
        assert bool(line) == (tuple(shape) != whole[name].shape)

    try_settings()
    try_tensors()


# ------------------------------------------------------------ pickles


def grown(inner):
    """Values of Python, calls of admitted names, arrays and tensors, of whatever ``inner`` gives."""
    some = st.lists(inner, max_size=4)
    named = st.sampled_from(sorted(ADMITTED)).map(lambda label: Named(*label.rpartition(".")[::2]))
    return st.one_of(
        some,
        some.map(tuple),
        st.dictionaries(
            st.sampled_from(["model", "state_dict", "a", "b", "module.a", "x" * 300]),
            inner,
            max_size=4,
        ),
        named,
        st.builds(lambda name, of: Call(name.module, name.name, of), named, some.map(tuple)),
        st.builds(Built, inner, inner),
        st.builds(Outside, inner),
        st.builds(
            numpy_array, st.one_of(SHAPES, inner), st.one_of(st.binary(max_size=64), inner), inner
        ),
        st.builds(lambda shape, data: numpy_array(shape, data), SHAPES, st.binary(max_size=64)),
        st.builds(
            tensor,
            st.one_of(storage_of(inner), inner),
            st.one_of(SHAPES, inner),
            st.one_of(SHAPES, inner),
            SIZES,
        ),
    )


def storage_of(inner):
    return st.builds(
        storage,
        st.one_of(st.sampled_from(["0", "1", "../data.pkl"]), inner),
        st.one_of(SIZES, inner),
    )


LEAVES = st.one_of(
    st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=8), st.binary(max_size=8),
    st.sampled_from(["f4", "O", "V8", "M8", "<", "little"]),
    st.binary(min_size=1, max_size=6).map(Raw),
    st.lists(st.sampled_from(list(b"()]}Nqhjr0123abcdestuQRX\x81\x85\x86\x87\x88\x8a\x8c\x8f\x90\x93\x94"))).map(
        lambda codes: Raw(bytes(codes))
    ),
)  # fmt: skip
VALUES = st.recursive(LEAVES, grown, max_leaves=12)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_pickle_built_of_what_is_admitted_is_read_or_refused(kind, tmp_path):
    path = tmp_path / "file"

    storages = {"0": bytes(16), "1": bytes(8)}

    def tried(value, protocol, count):
        WRITERS[kind](path, program(value, protocol), dict(list(storages.items())[:count]))
        return attempt(f"pickles, {kind}", path.stat().st_size, lambda: read_weights(path))

    @a_share(6)
    @given(
        VALUES,
        st.sampled_from([2, 3, 4, 5]),
        st.sampled_from(["weight", "other"]),
        st.integers(0, 2),
    )
    def try_one(value, protocol, name, count):
        tried({"weight": ONE, name: value}, protocol, count)

    assert tried({"weight": ONE}, 2, 0) == ""
    try_one()


# -------------------------------------------------------- safetensors

DTYPES = st.sampled_from([*SAFETENSORS_DTYPES])
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.text(max_size=5), SIZES, DTYPES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.one_of(DTYPES, JSON),
        "shape": st.one_of(SHAPES.map(list), JSON),
        "data_offsets": st.one_of(st.lists(SIZES, min_size=2, max_size=2), JSON),
    }
)


def test_a_safetensors_header_of_any_tree_is_read_or_refused(tmp_path):
    path = tmp_path / "file"

    names = st.one_of(st.text(max_size=9), st.just("__metadata__"))
    sound = st.dictionaries(
        st.text("abc.", min_size=1), st.tuples(DTYPES, st.lists(st.integers(0, 3), max_size=3))
    )

    @a_share(6)
    @given(
        sound, st.dictionaries(names, st.one_of(ENTRIES, JSON), max_size=2), SIZES, st.booleans()
    )
    def try_one(arrays, others, more, mixed):
        header = {}
        end = 0
        for name, (dtype, shape) in arrays.items():
            after = end + int(np.prod(shape)) * item_size(SAFETENSORS_DTYPES[dtype])
            header[name], end = (
                {"dtype": dtype, "shape": shape, "data_offsets": [end, after]},
                after,
            )
        text = json.dumps(header | (others if mixed else {})).encode()
        length = len(text) if more < 6 else more % (1 << 64)
        path.write_bytes(struct.pack("<Q", length) + text + bytes(end + (0 if more < 4 else 1)))
        attempt("safetensors headers", path.stat().st_size, lambda: read_weights(path))

    try_one()


def test_tensors_of_a_models_names_and_any_shapes_are_loaded_or_refused(tmp_path):
    model = VisionTransformer(
        image_size=CASES["vit"]["img_size"],
        **{k: v for k, v in CASES["vit"].items() if k != "img_size"},
    )
    own = file_arrays(model)
    path = tmp_path / "file.safetensors"
    more = [
        "reg_token",
        "register_tokens",
        "dist_token",
        "head.weight",
        "backbone.norm.bias",
        "blocks.0.attn.q.weight",
    ]
    more += [
        "patch_embedding.cls_token",
        "norm_pre.weight",
        "fc_norm.weight",
        "blocks.0.attn.q_norm.weight",
    ]
    side = st.sampled_from([0, 1, 2, 3, 5, 16, 17, 8, 1 << 10, 1 << 40])
    shapes = st.lists(side, max_size=4).filter(lambda shape: np.prod(shape, dtype=float) < 1 << 16)

    @a_share(6)
    @given(st.dictionaries(st.sampled_from([*own, *more]), shapes, max_size=4), st.booleans())
    def try_one(changed, strict):
        header = {}
        end = 0
        for name in own | changed:
            shape = list(changed[name]) if name in changed else list(own[name].shape)
            after = end + 4 * int(np.prod(shape, dtype=object))
            header[name], end = (
                {"dtype": "F32", "shape": shape, "data_offsets": [end, after]},
                after,
            )
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
        attempt(
            "tensors of a model",
            path.stat().st_size,
            lambda: load_weights(model, path, strict=strict),
        )

    try_one()


# ----------------------------------------------------------- archives

_MEMBERS = [
    "archive/data.pkl",
    "archive/data/0",
    "archive/byteorder",
    "a.npy",
    "b.npy",
    "data.pkl",
    "a\0b.npy",
    "x" * 300,
]
_FIELDS = [
    ("<H", 8),
    ("<H", 10),
    ("<I", 16),
    ("<I", 20),
    ("<I", 24),
    ("<H", 28),
    ("<H", 30),
    ("<H", 32),
    ("<I", 42),
]
DESCR = [
    "'<f4'",
    "'<f8'",
    "'|V2'",
    "'|O'",
    "'V8'",
    "[('x','<f4')]",
    "(" * 300,
    "'(9,)f4'",
    "'" + "f4," * 90 + "'",
    "-" * 900,
]


@st.composite
def npy(draw):
    shape = draw(
        st.one_of(
            SHAPES.map(str), st.sampled_from(["()", "(3L,)", "3", "(" * 200, "(" + "1," * 99 + ")"])
        )
    )
    descr = draw(st.sampled_from(DESCR))
    order = draw(st.sampled_from(["True", "False", "0"]))
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode() + b"\n"
    length = draw(st.one_of(st.just(len(text)), st.integers(0, 0xFFFF)))
    version = draw(st.sampled_from([b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00"]))
    size = struct.pack("<H", length) if version == b"\x01\x00" else struct.pack("<I", length)
    return b"\x93NUMPY" + version + size + text + draw(st.binary(max_size=64))


def saved(array):
    np.save(file := io.BytesIO(), array)
    return file.getvalue()


def lying(data, edits):
    """An archive's bytes, with numbers of its directory, and of the headers that it leads to,
    changed.
    """
    data = bytearray(data)
    starts = [place for place in range(len(data)) if data[place : place + 4] == b"PK\x01\x02"]
    for which, (form, place), value in edits:
        if starts:
            struct.pack_into(
                form,
                data,
                starts[which % len(starts)] + place,
                value % (1 << 8 * struct.calcsize(form)),
            )
    return bytes(data)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_whose_directory_lies_is_read_or_refused(tmp_path):
    path = tmp_path / "file"
    pickles = st.builds(lambda of: program({"weight": of}), VALUES)
    sound = st.builds(
        saved,
        st.sampled_from([np.ones(3, np.float32), np.zeros((2, 0)), np.arange(4).reshape(2, 2)]),
    )
    members = st.lists(
        st.tuples(st.sampled_from(["a.npy", "b.npy"]), sound), max_size=2
    ) | st.lists(
        st.tuples(st.sampled_from(_MEMBERS), st.one_of(npy(), pickles, st.binary(max_size=64))),
        max_size=4,
    )
    kinds = st.sampled_from(
        [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
    )
    edits = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(_FIELDS), SIZES), max_size=3)

    @a_share(6)
    @given(members, kinds, edits)
    @example([("a.npy", b"\x93NUMPY\x01\x00\x10\x00" + b"{" * 16)], zipfile.ZIP_STORED, [])
    def try_one(members, kind, edits):
        tried(members, kind, edits)

    def tried(members, kind, edits):
        with zipfile.ZipFile(file := io.BytesIO(), "w", kind) as archive:
            for name, content in members:
                archive.writestr(name, content)
        path.write_bytes(lying(file.getvalue(), edits))
        return attempt("archives", path.stat().st_size, lambda: read_weights(path))

    assert tried([("a.npy", saved(np.ones((2, 3), np.float16)))], zipfile.ZIP_DEFLATED, []) == ""
    try_one()


# -------------------------------------------------- config.json beside

SETTINGS = (
    "input_size",
    "mean",
    "std",
    "crop_pct",
    "interpolation",
    "label_names",
    "num_classes",
    "fixed_input_size",
)
MADE = ("img_size", "in_chans", "dynamic_img_size", "use_naflex")


def test_any_config_beside_weights_is_read_or_refused(tmp_path):
    keys = st.dictionaries(st.sampled_from(SETTINGS), JSON, max_size=4)
    trees = st.builds(
        lambda own, model, more, inner: {
            "architecture": "a",
            "model_args": model,
            **inner,
            **own,
            **more,
        },
        keys,
        st.one_of(st.dictionaries(st.sampled_from(MADE), JSON), JSON),
        st.dictionaries(st.sampled_from(["architecture", "x", "labels"]), JSON, max_size=2),
        st.one_of(
            st.just({}), st.builds(lambda value: {"pretrained_cfg": value}, st.one_of(keys, JSON))
        ),
    )

    @a_share(6)
    @given(trees, st.data())
    def try_one(tree, data):
        text = json.dumps(tree).encode()
        if data.draw(st.booleans()):
            text = data.draw(damaged(text))
        (tmp_path / "config.json").write_bytes(text)
        attempt("config.json", len(text), lambda: read_config(tmp_path))

    try_one()


def test_any_config_of_transformers_is_read_or_refused(tmp_path):
    kinds = json.loads((GOLDEN / "transformers_kinds.json").read_text())
    common = {
        "id2label",
        "num_labels",
        "problem_type",
        "architectures",
        "vision_config",
        "quantization_config",
    }

    def trees(kind):
        keys = st.sampled_from(sorted(common | kinds[kind]["keys"].keys()))
        named = {"model_type": kind, "architectures": [next(iter(HEADS[kind]))]}
        return st.dictionaries(keys, JSON, max_size=4).map(lambda own: named | own)

    @a_share(6)
    @given(st.sampled_from(sorted(kinds)).flatmap(trees), JSON, st.data())
    def try_one(tree, preprocessor, data):
        text = json.dumps(tree).encode()
        others = json.dumps(preprocessor).encode()
        if data.draw(st.booleans()):
            text = data.draw(damaged(text))
        (tmp_path / "config.json").write_bytes(text)
        (tmp_path / "preprocessor_config.json").write_bytes(others)
        attempt(
            "config.json of transformers",
            len(text) + len(others),
            lambda: described_model(tmp_path),
        )

    try_one()


def test_any_index_of_weights_is_read_or_refused(tmp_path):
    names = st.one_of(
        st.sampled_from(["a.safetensors", "b.bin", "..", "/etc/passwd", "\0.bin", "a/b.bin"]), JSON
    )
    maps = st.one_of(st.dictionaries(st.text(max_size=3), names, max_size=4), JSON)
    write_weights(tmp_path / "a.safetensors", {"a": np.ones(3, np.float32)})

    @a_share(6)
    @given(maps, st.data())
    def try_one(weight_map, data):
        text = json.dumps({"weight_map": weight_map}).encode()
        if data.draw(st.booleans()):
            text = data.draw(damaged(text))
        (tmp_path / "model.safetensors.index.json").write_bytes(text)
        attempt("index.json", len(text) + 200, lambda: read_weights(tmp_path))

    try_one()


def test_the_magic_number_alone_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(MAGIC)
    assert "it is truncated" in attempt(
        "bombs", len(MAGIC), lambda: read_weights(tmp_path / "file")
    )
