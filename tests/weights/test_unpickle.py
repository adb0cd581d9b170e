"""Pickles are read as data: no file runs code, holds memory out of proportion to its size, or keeps
the reader busy.
"""

import io
import pickle
from collections import OrderedDict

import numpy as np
import pytest
from support.weight_files import (
    FLOATS,
    WRITERS,
    Built,
    Call,
    LittleMemory,
    Named,
    Outside,
    Raw,
    numpy_array,
    opcodes,
    program,
    storage,
    tensor,
    write_legacy,
    write_pickle,
    write_zip,
)

from errors import InputError, Unreadable
from weights import unpickle
from weights.formats import read_weights

ARRAY = numpy_array((2,), np.float32([1, 2]).tobytes())
PLACES = {
    "alone": lambda bad: bad,
    "in a dictionary": lambda bad: {"weight": ARRAY, "other": bad},
    "as a key": lambda bad: {"weight": ARRAY, bad: 1},
    "in a list": lambda bad: {"weight": ARRAY, "other": [1, bad]},
    "in a tuple": lambda bad: {"weight": (bad, ARRAY)},
    "in an OrderedDict": lambda bad: Raw(
        program(Call("collections", "OrderedDict"))[2:-1]
        + program("weight")[2:-1]
        + program(bad)[2:-1]
        + b"s"
    ),
    "as an OrderedDict's attribute": lambda bad: Built(
        Call("collections", "OrderedDict"), {"_metadata": bad}
    ),
    "in a wrapper": lambda bad: {"model": {"weight": ARRAY}, "optimizer": {"state": {0: bad}}},
    "in a namespace": lambda bad: {
        "weight": ARRAY,
        "args": Built(Call("argparse", "Namespace"), {"lr": bad}),
    },
    "as an argument": lambda bad: {
        "weight": Call("torch._utils", "_rebuild_parameter", (ARRAY, True, bad))
    },
    "as a factory": lambda bad: {
        "weight": ARRAY,
        "more": Call("collections", "defaultdict", (bad,)),
    },
    "as an array's type": lambda bad: {"weight": numpy_array((2,), b"12345678", code=bad)},
    "as an array's shape": lambda bad: {"weight": numpy_array(bad, b"12345678")},
    "as an array's content": lambda bad: {"weight": numpy_array((2,), bad)},
    "as a persistent id": lambda bad: {"weight": Outside(bad)},
    "in a persistent id": lambda bad: {"weight": tensor(storage(bad, 2), (2,), (1,))},
    "as a kind of storage": lambda bad: {"weight": tensor(storage("0", 2, kind=bad), (2,), (1,))},
}


@pytest.mark.smoke
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", WRITERS)
def test_no_command_of_a_file_runs(tmp_path, kind, place):
    marker = tmp_path / "ran"
    bad = Call("os", "system", (f"touch {marker}",))
    file = WRITERS[kind](tmp_path / "weights.pth", program(PLACES[place](bad)))
    with pytest.raises(InputError, match=r"it asks to load os\.system; only arrays") as caught:
        read_weights(file)
    assert not marker.exists()
    assert str(caught.value).startswith(f"{file}: ")


def test_the_command_would_have_run(tmp_path):
    pickle.loads(program(Call("os", "system", (f"touch {tmp_path / 'ran'}",))))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("posix", "system"), ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"),
        ("__builtin__", "eval"), ("builtins", "__import__"), ("functools", "partial"), ("operator", "attrgetter"),
        ("operator", "methodcaller"), ("subprocess", "Popen"), ("importlib", "import_module"),
        ("copyreg", "_reconstructor"), ("types", "FunctionType"), ("torch", "load"),
        ("torch.storage", "_load_from_bytes"), ("numpy", "load"), ("numpy", "fromfile"),
        ("collections", "OrderedDict.__init__"), ("numpy", "dtype.__class__"), ("numpy.ndarray", "tofile"),
        ("timm.models.vision_transformer", "VisionTransformer"), ("weights.unpickle", "_blank"),
        ("os", "system\x1b[2J"), ("", ""), ("x" * 10_000, "y" * 10_000),
    ],
)  # fmt: skip
def test_every_other_name_is_refused_in_one_line(tmp_path, module, name):
    shown = f"{module}.{name}".replace("\x1b", r"\x1b")[:160]
    for stacked in (False, True):
        named = Raw(program((module, name))[3:-2] + b"\x93") if stacked else Named(module, name)
        for call in (
            named,
            Raw(program(named)[2:-1] + b")R"),
            Raw(program(named)[2:-1] + b")\x81"),
        ):
            file = write_pickle(tmp_path / "weights.pdparams", program({"weight": call}, 4))
            with pytest.raises(InputError) as caught:
                read_weights(file)
            assert f"it asks to load {shown}" in str(caught.value) or len(module) > 255
            assert len(str(caught.value)) < 400
            assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"\x82\x01", "opcode"),  # EXT1
        (b"\x83\x01\x00", "opcode"),  # EXT2
        (b"(ios\nsystem\n", "opcode"),  # INST
        (b"(cos\nsystem\no", r"os\.system"),  # OBJ
        (b"Pname\n", "opcode"),  # PERSID
        (b"\x8b\xff\xff\xff\x7f", "opcode"),  # LONG4
        (b"\x97", "opcode"),  # NEXT_BUFFER
        (b"K\x01)R", "calls an object that isn't an allowed name"),
        (b"cnumpy\nndarray\n)R", r"calls numpy\.ndarray, which isn't allowed"),
        (b"cnumpy\nndarray\n}b", "sets the state of an object without one"),
        (b"c_codecs\nencode\n}b", "sets the state of an object without one"),
        (b"]}b", "sets the state of an object without one"),
        (b"K\x01K\x02a", "appends to an object that isn't a list"),
        (b"](K\x01K\x02u", "sets items of an object that isn't a dictionary"),
        (b"K\x01K\x02\x93", "names a global by an object that isn't text"),
        (b"T\xff\xff\xff\xff", "it is truncated: expected 4294967295 more bytes"),
        (b"U\xff", "it is truncated"),
        (b"K\x01Q", "refers to an external object"),
        (b"ccollections\nOrderedDict\n]\x85R", "built from something else"),
        (opcodes(Call("_codecs", "encode", ("a", "utf-8"))), "an encoding other than Latin-1"),
        (b"h\x07", "KeyError"),
        (b"0", "IndexError"),
        (b"t", "IndexError"),
        (b"X\xff\xff\xff\xff", "it is truncated"),
        (b"B\xff\xff\xff\xff", r"it is truncated: expected 4294967295 more bytes, found \d{1,3}"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff", "it is truncated"),
        (b"\x96\x00\x00\x00\x00\x00\x00\x00\x10", "it is truncated"),
        (b"\x8d\x00\x00\x00\x00\x00\x00\x00\x10", "it is truncated"),
    ],
)
def test_what_no_weights_need_is_refused(tmp_path, bad, message):
    for write in WRITERS.values():
        file = write(tmp_path / "weights", b"\x80\x02" + bad + b".")
        with LittleMemory(), pytest.raises(InputError, match=message):
            read_weights(file)


def test_nothing_that_a_file_sets_outlives_it(tmp_path):
    admitted = dict(unpickle.ADMITTED)
    state = (None, {"load": 1, "ADMITTED": {}, "__class__": 2})
    blank = Built(Call("argparse", "Namespace"), state)
    content = {"weight": ARRAY, "a": blank, "b": Built(Call("collections", "OrderedDict"), state)}
    first = read_weights(write_pickle(tmp_path / "a", program(content)))
    assert first.notes == ["ignored, because they aren't arrays: a, b"]
    assert admitted == unpickle.ADMITTED
    assert not hasattr(unpickle._Blank(), "load")


def doubled(times, pair=b"h\x00h\x00\x86"):
    """Opcodes of a tuple of two tuples of two tuples ..., each level stored once."""
    return Raw(b")q\x00" + (b"0" + pair + b"q\x00") * times)


def test_nesting_that_would_explode_is_read_as_it_is_stored(tmp_path):
    lists = Raw(b"]q\x00" + b"0](h\x00h\x00eq\x00" * 40)
    dictionaries = Raw(b"}q\x00" + b"0}(X\x01\x00\x00\x00ah\x00X\x01\x00\x00\x00bh\x00uq\x00" * 40)
    content = {
        "weight": ARRAY,
        "a": lists,
        "b": doubled(40),
        "c": dictionaries,
        doubled(40): 1,
        7: 2,
    }
    for content_of in (content, {"model": content}):
        for write in (write_pickle, write_zip):
            read = read_weights(write(tmp_path / "weights", program(content_of)))
            np.testing.assert_array_equal(read.arrays["weight"], [1, 2])
            assert read.notes == ["ignored, because they aren't arrays: a, b, c"]


@pytest.mark.parametrize(
    "content",
    [
        {"weight": tensor(storage(doubled(40), 2), (2,), (1,))},
        {"weight": tensor(storage("0", doubled(40)), (2,), (1,))},
        {"weight": tensor(storage("0", 2), doubled(40), (1,))},
        {"weight": tensor(storage("0", 2), (2,), (1,), first=doubled(40))},
        {"weight": Outside(doubled(40))},
        {"weight": numpy_array(doubled(40), b"12345678")},
        {"weight": numpy_array((2,), doubled(40))},
        {"weight": numpy_array((2,), b"12345678", code=doubled(40))},
        {"weight": numpy_array((2,), b"12345678", order=doubled(40))},
        {"weight": Call("_codecs", "encode", (doubled(40), "latin1"))},
        {"weight": Call("_codecs", "encode", ("a", doubled(40)))},
        doubled(40),
    ],
)
def test_nesting_that_would_explode_is_never_hashed_compared_or_shown(tmp_path, content):
    for write in WRITERS.values():
        with pytest.raises(InputError) as caught:
            read_weights(write(tmp_path / "weights", program(content), {"0": b"12345678"}))
        assert len(str(caught.value)) < 400
    with pytest.raises(InputError, match="its storages don't match its tensors"):
        read_weights(
            write_legacy(
                tmp_path / "weights", program({"weight": ARRAY}), keys=[doubled(40), doubled(40)]
            )
        )


def test_deep_nesting_is_no_matter(tmp_path):
    for deep in (b"]" * 200_000 + b"a" * 199_999, b")" + b"\x85" * 200_000):
        read = read_weights(
            write_pickle(tmp_path / "a", program({"weight": ARRAY, "deep": Raw(deep)}))
        )
        np.testing.assert_array_equal(read.arrays["weight"], [1, 2])
    inner = 2000
    calls = b"(ctorch._tensor\n_rebuild_from_type_v2\nN" * inner + b"(t" + b"Nt" * inner
    calls = Raw(b"ctorch._tensor\n_rebuild_from_type_v2\n" + calls + b"R")
    with pytest.raises(InputError, match="RecursionError"):
        read_weights(write_pickle(tmp_path / "a", program({"weight": ARRAY, "deep": calls})))


def test_nothing_is_copied_again_and_again(tmp_path):
    long = program(list(range(5000)))[2:-1] + b"q\x05"
    for name in (
        b"cbuiltins\ntuple\n",
        b"cbuiltins\nset\n",
        b"cbuiltins\nbytes\n",
        b"cbuiltins\nbytearray\n",
    ):
        copies = Raw(long + b"0(" + (name + b"h\x05\x85R") * 20_000 + b"t")
        with LittleMemory():
            read = read_weights(
                write_pickle(tmp_path / "weights", program({"weight": ARRAY, "copies": copies}))
            )
        assert read.arrays["weight"].tolist() == [1, 2]
    text = program("x" * 60_000)[2:-1] + b"q\x05"
    copies = Raw(
        text + b"0(" + b"c_codecs\nencode\nh\x05X\x06\x00\x00\x00latin1\x86R" * 5000 + b"t"
    )
    with LittleMemory():
        read = read_weights(
            write_pickle(tmp_path / "weights", program({"weight": ARRAY, "copies": copies}))
        )
    assert read.arrays["weight"].tolist() == [1, 2]


def test_a_program_is_only_so_long(tmp_path, monkeypatch):
    monkeypatch.setattr(unpickle, "OPCODE", 1 << 16)  # of which 64 MiB are 1024
    read_weights(
        write_pickle(tmp_path / "weights", program({"weight": ARRAY, "a": Raw(b"N" + b"N0" * 450)}))
    )
    with pytest.raises(InputError, match="would take more than 64 MiB and more than three times"):
        read_weights(
            write_pickle(
                tmp_path / "weights", program({"weight": ARRAY, "a": Raw(b"N" + b"N0" * 520)})
            )
        )


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (numpy_array((3,), b"12345678"), r"shape \[3\] that reaches beyond"),
        (numpy_array((1,), b"12345678"), r"shape \[1\] with 8 bytes"),
        (numpy_array((2**40,), b"12345678"), "reaches beyond its storage"),
        (
            numpy_array((2**40,), "12345678"),
            "would take more than 64 MiB and more than three times",
        ),
        (numpy_array((3,), "12345678"), r"shape \[3\] with 8 bytes"),
        (numpy_array((2,), "1234567\u20ac"), "latin-1"),
        (numpy_array((-2,), b"12345678"), "aren't a tuple of sizes"),
        (numpy_array((True, 2), b"12345678"), "aren't a tuple of sizes"),
        (numpy_array((2.0,), b"12345678"), "aren't a tuple of sizes"),
        (numpy_array((2**100,), b"12345678"), "aren't a tuple of sizes"),
        (numpy_array((1,) * 33, b"12345678"), "aren't a tuple of sizes"),
        (numpy_array([2], b"12345678"), "aren't a tuple of sizes"),
        (numpy_array((2,), b"12345678", code="O8"), "dtype O8; expected numbers"),
        (numpy_array((2,), [None, None], code="O"), "dtype O; expected numbers"),
        (numpy_array((1,), b"12345678", code="M8"), "dtype M8; expected numbers"),
        (numpy_array((1,), b"12345678", code="c8"), "dtype c8; expected numbers"),
        (numpy_array((2,), b"12345678", code="U1"), "dtype U1; expected numbers"),
        (numpy_array((2,), b"12345678", order="f4,"), "without a byte order"),
        (numpy_array((2,), None), "without content"),
        (Built(ARRAY, (1, (2,), "f4", False, b"12345678")), "dtype unknown"),
        (Built(ARRAY, 3), "TypeError"),
        (Call("numpy.core.multiarray", "_reconstruct"), "TypeError|ValueError"),
    ],
)
def test_arrays_that_claim_what_is_not_there_are_refused(tmp_path, array, message):
    for write in WRITERS.values():
        with LittleMemory(), pytest.raises(InputError, match=message):
            read_weights(write(tmp_path / "weights", program({"weight": array})))


@pytest.mark.parametrize(
    "array",
    [
        np.array([print], object),
        np.array([(1, 2.0)], "i4,f4"),
        np.array(["a"]),
        np.array(["2026"], "M8[Y]"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_numpys_own_arrays_of_other_things_are_refused(tmp_path, array, protocol):
    file = write_pickle(tmp_path / "weights", pickle.dumps({"weight": array}, protocol))
    with pytest.raises(InputError, match="expected numbers|asks to load"):
        read_weights(file)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (tensor(storage("0", 4), (2, 3), (2, 1)), "reaches beyond its storage"),
        (tensor(storage("0", 4), (2,), (4,)), "reaches beyond its storage"),
        (tensor(storage("0", 4), (4,), (1,), first=1), "reaches beyond its storage"),
        (tensor(storage("0", 4), (2**40,), (1,)), "reaches beyond its storage"),
        (tensor(storage("0", 4), (2**30, 2**10), (0, 0)), "would take more than 64 MiB and more than three times"),
        (tensor(storage("0", 4), (4,), (-1,), first=3), "aren't a tuple of sizes"),
        (tensor(storage("0", 4), (4,), (1, 1)), "are inconsistent"),
        (tensor(storage("0", 4), (4,), (1,), first=-1), "are inconsistent"),
        (tensor(storage("0", 4), (2**47,) * 30, (0,) * 30), "would take more than 64 MiB and more than three times"),
        (tensor(storage("0", 2**62), (4,), (1,)), "refers to an external object"),
        (tensor(storage("0", -4), (4,), (1,)), "refers to an external object"),
        (tensor(storage("0", 5), (4,), (1,)), "instead of 20|another length"),
        (tensor(storage("0", 3), (3,), (1,)), "instead of 12|another length"),
        (tensor(storage("1", 4), (4,), (1,)), "KeyError|don't match"),
        (tensor(storage("../data.pkl", 4), (4,), (1,)), "KeyError|don't match"),
        (tensor(storage(0, 4), (4,), (1,)), "refers to an external object"),
        (tensor(storage("0", 4, Named("torch", "Size")), (4,), (1,)), "refers to an external object"),
        (tensor(Outside(("module", FLOATS, "0", "cpu", 4)), (4,), (1,)), "external"),
        (tensor(Outside(("storage", FLOATS, "0", "cpu", 4, ("a", 0, 2))), (4,), (1,)), "external"),
        (tensor(ARRAY, (4,), (1,)), "a tensor without a storage"),
        (Call("torch._utils", "_rebuild_tensor_v2"), "TypeError"),
        (Call("torch._utils", "_rebuild_tensor_v3", (storage("0", 4), 0, (4,), (1,), False, None, "f4")), "unsupported"),
    ],
)  # fmt: skip
def test_tensors_that_claim_what_is_not_there_are_refused(tmp_path, of, message):
    for write in (write_zip, write_legacy):
        with LittleMemory(), pytest.raises(InputError, match=message):
            read_weights(write(tmp_path / "weights", program({"weight": of}), {"0": bytes(16)}))
    with pytest.raises(InputError):
        read_weights(write_pickle(tmp_path / "weights", program({"weight": of})))


def test_a_file_of_a_big_endian_machine_or_an_unknown_torch_is_refused(tmp_path):
    content = write_legacy(tmp_path / "weights", program({"weight": ARRAY})).read_bytes()
    little, big = (opcodes({"little_endian": value}) for value in (True, False))
    for changed in (content.replace(little, big), content.replace(b"M\xe9\x03", b"M\xea\x03")):
        (tmp_path / "weights").write_bytes(changed)
        with pytest.raises(InputError, match="by an unknown torch, or on a big-endian machine"):
            read_weights(tmp_path / "weights")


def test_a_cut_in_what_is_not_taken_is_noticed(tmp_path):
    taken, other = ({"weight": tensor(storage(key, 2), (2,), (1,))} for key in "01")
    content = program({"model": taken, "optimizer": other})
    file = write_legacy(tmp_path / "weights", content, {"0": b"12345678", "1": b"12345678"})
    assert len(read_weights(file).arrays) == 1
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="it is truncated"):
        read_weights(file)


def test_a_tensor_is_the_part_of_its_storage_that_it_names(tmp_path):
    data = {"0": np.arange(12, dtype=np.float32).tobytes()}
    content = {
        "part": tensor(storage("0", 12), (2, 2), (6, 2), first=1),
        "same": tensor(storage("0", 12), (12,), (1,)),
    }
    for write in (write_zip, write_legacy):
        read = read_weights(write(tmp_path / "weights", program(content), data))
        np.testing.assert_array_equal(read.arrays["part"], [[1, 3], [7, 9]])
        np.testing.assert_array_equal(read.arrays["same"], np.arange(12))


def test_one_tensor_under_many_names_takes_no_more_than_its_share(tmp_path):
    of = tensor(storage("0", 1 << 18), (1 << 18,), (1,))
    data = {"0": bytes(1 << 20)}
    for count, fits in ((20, True), (100, False)):
        file = write_zip(
            tmp_path / "weights", program({f"weight{number}": of for number in range(count)}), data
        )
        if fits:
            assert len(read_weights(file).arrays) == count
            continue
        with (
            LittleMemory(),
            pytest.raises(
                InputError, match="would take more than 64 MiB and more than three times its"
            ),
        ):
            read_weights(file)


def test_containers_of_python_are_read(tmp_path):
    content = OrderedDict(
        weight=np.float32([3]),
        other={1, 2},
        more=frozenset("a"),
        kind=b"x",
        z=2.5,
        n=None,
        big=1 << 70,
    )
    for protocol in (2, 3, 4, 5):
        read = read_weights(write_pickle(tmp_path / "weights", pickle.dumps(content, protocol)))
        assert read.arrays == {"weight": np.float32([3])}
        assert read.notes == ["ignored, because they aren't arrays: other, more, kind, z, n, big"]


def test_a_member_of_an_enumeration_in_a_scripted_program_is_data():
    """TorchScript calls the class with the value itself, which is no tuple of arguments."""
    called = b"\x80\x02c__torch__.timm.layers.format\nFormat\nK\x01R."
    assert unpickle.DataUnpickler(io.BytesIO(called), len(called)).load() == {}
    other = called.replace(b"__torch__.timm.layers.format\nFormat", b"collections\nOrderedDict")
    with pytest.raises(Unreadable, match="its pickle calls an object that isn't an allowed name"):
        unpickle.DataUnpickler(io.BytesIO(other), len(other)).load()
