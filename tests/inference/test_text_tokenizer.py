"""Tokenizers of texts against those of transformers, OpenCLIP and SentencePiece."""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from support.programs import ROOT

from errors import InputError
from inference.text import tokenizer as module
from inference.text.encoder import TextEncoder
from inference.text.tokenizer import TextTokenizer, find_tokenizer
from models import text_arguments
from models.text_arguments import text_arguments as read_arguments
from weights.formats import open_weights
from weights.names.text import layout_of

GOLDEN = ROOT / "tests" / "golden" / "text"
TEXTS = json.loads((GOLDEN / "strings.json").read_text(encoding="utf-8"))
# What big_vision cleans otherwise than transformers: _ is a space, and </s> is punctuation.
OF_BIG_VISION = ("_", "</s>", "<unk>", "<start_of_text>")


@pytest.fixture(scope="module")
def answers():
    return np.load(GOLDEN / "answers.npz")


@pytest.fixture(autouse=True)
def heads(monkeypatch):
    monkeypatch.setitem(text_arguments._HEADS, 32, 2)


def tokenizer_of(path):
    with open_weights(path) as stored:
        layout = layout_of(stored.arrays)
        return find_tokenizer(path, read_arguments(path, stored.arrays), layout)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["clip", "siglip", "siglip2", "openclip", "openclip_siglip"])
def test_a_thousand_texts_have_the_references_tokens(name, answers):
    expected = answers[f"{name}/tokens"]
    assert len(TEXTS) == len(expected) == 1000
    assert "" in TEXTS
    found = tokenizer_of(GOLDEN / name)(TEXTS)
    assert found.dtype == np.int64
    differing = [TEXTS[row] for row in np.flatnonzero((found != expected).any(axis=1))]
    assert differing == []


def test_the_tokens_of_big_vision_are_those_of_its_canonical_texts(answers):
    found = tokenizer_of(GOLDEN / "big_vision" / "siglip.npz")(TEXTS)
    expected = answers["siglip/tokens"]
    differing = [TEXTS[row] for row in np.flatnonzero((found != expected).any(axis=1))]
    assert all(any(mark in text for mark in OF_BIG_VISION) for text in differing)
    same = tokenizer_of(GOLDEN / "big_vision" / "siglip.npz")(["red_flower", "red flower"])
    assert (same[0] == same[1]).all()


def test_clips_older_files_give_the_same_tokens(tmp_path, answers):
    folder = shutil.copytree(GOLDEN / "clip", tmp_path / "clip")
    (folder / "tokenizer.json").unlink()
    tokenizer = tokenizer_of(folder)
    assert tokenizer.kind == "merges"
    assert (tokenizer(TEXTS) == answers["clip/tokens"]).all()


def test_a_text_that_is_cut_keeps_its_end(answers):
    tokens = tokenizer_of(GOLDEN / "clip")(["a " * 100, "a"])
    end = tokens[1, 2]
    assert tokens[0, -1] == end
    assert (tokens[0, :-1] != end).all()
    # CLIP of transformers pads with the end.
    assert (tokens[1, 2:] == end).all()
    assert (tokenizer_of(GOLDEN / "openclip")(["a"])[0, 3:] == 0).all()
    assert (tokenizer_of(GOLDEN / "siglip")(["a"])[0, 2:] == 1).all()
    assert (tokenizer_of(GOLDEN / "siglip2")(["a"])[0, 2:] == 0).all()


def test_no_text_has_no_tokens():
    assert tokenizer_of(GOLDEN / "clip")([]).shape == (0, 24)


def test_a_text_may_have_so_many_characters():
    tokenizer = tokenizer_of(GOLDEN / "siglip")
    assert tokenizer(["a" * module.LONGEST_TEXT]).shape == (1, 16)
    with pytest.raises(InputError, match="a text of 10001 characters was given, a.*expected 10000"):
        tokenizer(["a" * (module.LONGEST_TEXT + 1)])


@pytest.mark.parametrize(
    ("name", "file", "needed"),
    [
        ("clip", "tokenizer.json", "tokenizer.json or vocab.json and merges.txt"),
        ("siglip", "spiece.model", "spiece.model or tokenizer.json"),
        ("openclip", "bpe_simple_vocab_16e6.txt.gz", "bpe_simple_vocab_16e6.txt.gz or vocab.json"),
        ("openclip_siglip", "tokenizer.json", "copy tokenizer.json there"),
    ],
)
def test_weights_without_a_tokenizer_are_refused(tmp_path, name, file, needed):
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)
    (folder / file).unlink()
    for other in ("merges.txt", "vocab.json"):
        (folder / other).unlink(missing_ok=True)
    with pytest.raises(
        InputError, match=f"has no tokenizer next to its weights; copy .*{needed}|{needed}"
    ):
        tokenizer_of(folder)


# Files of tokenizers are others', and C++ and Rust read them.
@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"[" * 100_000),
        (
            "tokenizer.json",
            b'{"model": {"type": "BPE", "vocab": {"a": 99999999999}, "merges": []}}',
        ),
        ("sentencepiece", b""),
        ("sentencepiece", b"\x0a\xff\xff\xff\xff\x0f" * 100),
        ("sentencepiece", bytes(range(256)) * 50),
        ("bpe", b"\x1f\x8b" + b"\0" * 50),
        ("bpe", b"#version\na b c d\n"),
    ],
)
def test_hostile_files_are_one_line(tmp_path, kind, content):
    file = tmp_path / ("f.gz" if content[:2] == b"\x1f\x8b" else "file")
    file.write_bytes(content)
    read = "merges" if kind == "bpe" else kind
    tokenizer = TextTokenizer(read, {kind: str(file)}, "none", 8, eos=1)
    with pytest.raises(InputError, match="can't be read as a tokenizer") as caught:
        tokenizer(["a photo"])
    assert "\n" not in str(caught.value)


# The program with a reader that never ends; the second one leaves its limit of CPU time out.
ENDLESS = """
import runpy
names = runpy.run_path({program!r})
names["_main"].__globals__["_tokens"] = lambda request: exec("while True: pass")
{more}
names["_main"]()
"""


@pytest.mark.parametrize("more", ["", "names['_main'].__globals__['_limit'] = lambda *_: None"])
def test_a_tokenizer_that_takes_too_long_is_ended(tmp_path, monkeypatch, more):
    tokenizer = tokenizer_of(GOLDEN / "siglip")
    program = module.tokenizing_process.__file__
    (tmp_path / "endless.py").write_text(ENDLESS.format(program=program, more=more))
    monkeypatch.setattr(module.tokenizing_process, "__file__", str(tmp_path / "endless.py"))
    monkeypatch.setattr(module, "_SECONDS", 1)
    began = time.monotonic()
    with pytest.raises(InputError, match="can't be read as a tokenizer"):
        tokenizer(["a"])
    assert 0.5 < time.monotonic() - began < 60


def test_a_tokenizer_of_a_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MEMORY", 1 << 29)
    import gzip

    file = tmp_path / "bpe.gz"
    with gzip.open(file, "wb") as stream:
        for _ in range(256):
            stream.write(b"\0" * (1 << 20))
    tokenizer = TextTokenizer("merges", {"bpe": str(file)}, "none", 8)
    with pytest.raises(InputError, match="more than 134217728 bytes|too much memory"):
        tokenizer(["a"])


def folder_with(tmp_path, **settings):
    """A copy of CLIP whose tokenizer.json has other settings."""
    folder = shutil.copytree(GOLDEN / "clip", tmp_path / "clip")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | settings))
    return folder


def test_a_text_of_many_tokens_is_cut_where_they_are_made(tmp_path, monkeypatch):
    answers = []
    real = module.subprocess.run

    def kept(*given, **named):
        answers.append(real(*given, **named))
        return answers[-1]

    monkeypatch.setattr(module.subprocess, "run", kept)
    folder = folder_with(tmp_path, normalizer={
        "type": "Replace", "pattern": {"String": "a"}, "content": "c a " * 2000,
    })  # fmt: skip
    tokens, is_cut = tokenizer_of(folder).read(["a", "b"] * 100)
    assert is_cut.tolist() == [True, False] * 100
    assert tokens.shape == (200, 24)
    assert tokens[0, -1] == tokens[1, 2]
    assert len(answers[0].stdout) < 50_000


# A process of its own: this one may have had children that took more.
_PEAK = """
import resource, sys
from inference.text.encoder import TextEncoder
from errors import InputError
try:
    TextEncoder(sys.argv[1])(["a"])
except InputError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_a_small_file_takes_little_memory(tmp_path):
    # Seven steps each make 16 letters of one. The process may take 512 MiB.
    step = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 16}
    folder = folder_with(tmp_path, normalizer={"type": "Sequence", "normalizers": [step] * 7})
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    problem, peak = done.stdout.splitlines()[-2:]
    assert "can't be read as a tokenizer" in problem
    assert int(peak) < 700_000


def test_a_link_out_of_the_folder_isnt_quoted(tmp_path):
    folder = shutil.copytree(GOLDEN / "clip", tmp_path / "clip")
    (folder / "tokenizer.json").unlink()
    (folder / "merges.txt").unlink()
    (tmp_path / "secret").write_text("#version\nlogin hunter2\n")
    (folder / "merges.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(
        InputError, match="one of them is a link to a file outside its folder"
    ) as caught:
        tokenizer_of(folder)(["a"])
    assert "login" not in str(caught.value)
    # The user's own file is quoted, as it says what to repair.
    (folder / "merges.txt").unlink()
    (folder / "merges.txt").write_text("#version\nlogin hunter2\n")
    with pytest.raises(InputError, match="login"):
        tokenizer_of(folder)(["a"])


def test_without_the_packages_the_command_is_named(monkeypatch):
    real = module.subprocess.run

    def without(command, **named):
        blocked = "import sys; sys.modules['sentencepiece'] = None; import runpy;"
        run = f"{blocked} runpy.run_path({command[-1]!r}, run_name='__main__')"
        return real([*command[:-1], "-c", run], **named)

    monkeypatch.setattr(module.subprocess, "run", without)
    with pytest.raises(
        InputError, match=r"lacks sentencepiece, which text models need; pip install tok"
    ):
        tokenizer_of(GOLDEN / "siglip")(["a"])


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = shutil.copytree(GOLDEN / "clip", tmp_path / "clip")
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["id"] += 5000
    for name in ("<|startoftext|>", "<|endoftext|>"):
        content["model"]["vocab"][name] += 5000
    text = json.dumps(content).replace("1212", "6212").replace("1213", "6213")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match="its tokenizer has the token 6213, its text tower 1214"):
        TextEncoder(folder)(["a cat"])


def test_a_scale_out_of_all_proportion_is_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(GOLDEN / "clip", tmp_path / "clip")
    arrays = load_file(folder / "model.safetensors")
    arrays["logit_scale"] = np.array(1e9, np.float32)
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"its logit_scale is 1e\+09, the logarithm of a factor"):
        TextEncoder(folder)
