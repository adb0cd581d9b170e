"""Turns texts into the tokens that a text tower was trained with.

The tokenizer's files come with the weights. Nothing is downloaded, unless the weights are.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import InputError, install, leads_out, printable
from inference.text import tokenizing_process
from models.text import TextArguments
from weights.hub import beside
from weights.openclip import json_beside, read_openclip

# In characters.
LONGEST_TEXT = 10_000
# Limits of the process, in seconds of CPU time and bytes of memory. Gemma's vocabulary takes 13 bytes
# for each byte of its tokenizer.json.
_SECONDS = 60
_SECONDS_PER_TEXT = 0.01
_MEMORY = 512 << 20
_MEMORY_PER_BYTE = 32
# The files of each kind, all of which have to be there.
_TOKENIZERS = ("tokenizer.json",)
_MERGES = ("vocab.json", "merges.txt")
_BPE = ("bpe_simple_vocab_16e6.txt.gz", "bpe_simple_vocab_16e6.txt")
_SENTENCEPIECE = ("spiece.model", "sentencepiece.model", "tokenizer.model")
# SigLIP's vocabulary. That of SigLIP 2 is Gemma's, with 256,000 tokens.
_SIGLIP_VOCABULARY = 32000
_SIGLIP_EOS = 1


class Tokens(NamedTuple):
    """The tokens of texts.

    Attributes:
        numbers: [n, context_length] int64, cut and padded.
        is_cut: whether each text has more tokens, which aren't there [n].
    """

    numbers: np.ndarray
    is_cut: np.ndarray


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer, and the rules of its model.

    Attributes:
        kind: of the files: "tokenizer.json", "merges" or "sentencepiece".
        files: their paths, by role.
        clean: how texts are cleaned (``tokenizing_process._cleaned``).
        context_length: number of tokens of a text.
        eos: number of the token that ends a text; None: the files say it.
        pad_token: the token that pads, as the files name it.
        pad: its number where the files don't name it.
    """

    kind: str
    files: dict[str, str]
    clean: str
    context_length: int
    eos: int | None = None
    pad_token: str = ""
    pad: int = 0

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the numbers of ``read``."""
        return self.read(texts).numbers

    def read(self, texts: Sequence[str]) -> Tokens:
        """Returns the tokens of texts. A text that is cut keeps the token that ends it.

        Raises:
            InputError: a text is too long, the files can't be read, or a package isn't installed.
        """
        for text in texts:
            if len(text) > LONGEST_TEXT:
                raise InputError(
                    f"a text of {len(text)} characters was given, {printable(text, 40)}; expected"
                    f" {LONGEST_TEXT} at most"
                )
        answer = self._asked(list(texts))
        pad = answer["pad"] if answer["pad"] is not None else self.pad
        tokens = np.full((len(texts), self.context_length), pad, np.int64)
        is_cut = np.array([len(ids) > self.context_length for ids in answer["tokens"]], np.bool_)
        for row, ids in zip(tokens, answer["tokens"], strict=True):
            row[: len(ids)] = ids[: self.context_length]
        if answer["end"] is not None:
            tokens[is_cut, -1] = answer["end"]
        return Tokens(tokens, is_cut)

    def _asked(self, texts: list[str]) -> dict[str, Any]:
        """Returns the answer of the process that reads the files."""
        seconds = int(_SECONDS + _SECONDS_PER_TEXT * len(texts))
        size = sum(os.path.getsize(file) for file in self.files.values())
        request = {
            "kind": self.kind,
            "files": self.files,
            "clean": self.clean,
            "eos": self.eos,
            "pad_token": self.pad_token,
            "texts": texts,
            "length": self.context_length,
            "seconds": seconds,
            "memory": _MEMORY + _MEMORY_PER_BYTE * size,
        }
        where = ", ".join(self.files.values())
        # -I: what stands in the current folder or in the environment isn't imported.
        command = [sys.executable, "-I", tokenizing_process.__file__]
        try:
            # Bytes that aren't UTF-8 became surrogates where they were read.
            done = subprocess.run(
                command,
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=3 * seconds,
                check=False,
            )
            answer = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            raise InputError(f"{where}: can't be read as a tokenizer (it takes too long)") from None
        except ValueError:
            reason = f"its process ended with status {done.returncode}"
            raise InputError(f"{where}: can't be read as a tokenizer ({reason})") from None
        if "missing" in answer:
            raise InputError(
                f"{sys.executable} lacks {printable(answer['missing'])}, which text models need;"
                f" {install('text')}"
            )
        if "error" in answer:
            reason = printable(answer["error"], 200)
            # The reason may quote the file, which may be a secret of the user.
            if any(map(leads_out, self.files.values())):
                reason = "one of them is a link to a file outside its folder"
            raise InputError(f"{where}: can't be read as a tokenizer ({reason})")
        return answer


def find_tokenizer(path: str | Path, arguments: TextArguments, layout: str) -> TextTokenizer:
    """Returns the tokenizer whose files are beside weights.

    Args:
        path: what ``find_weights`` takes.
        arguments: the text tower's.
        layout: in which the weights hold it (``weights.names.text.layout_of``).

    Raises:
        InputError: there is no tokenizer, or its settings can't be read.
    """
    if layout == "big_vision":
        return _of_big_vision(path, arguments)
    if layout == "openclip":
        return _of_openclip(path, arguments)
    return _of_transformers(path, arguments)


def _of_transformers(path: str | Path, arguments: TextArguments) -> TextTokenizer:
    config = json_beside(path, "tokenizer_config.json")
    pad_token = config.get("pad_token")
    if type(pad_token) is dict:
        pad_token = pad_token.get("content")
    length = arguments.context_length
    if arguments.causal:
        pad_token = str(pad_token or "<|endoftext|>")
        if file := _first(path, _TOKENIZERS):
            files = {"tokenizer.json": file}
            return TextTokenizer("tokenizer.json", files, "none", length, pad_token=pad_token)
        if files := _all(path, _MERGES):
            return TextTokenizer("merges", files, "none", length, pad_token=pad_token)
        raise _none(path, (*_TOKENIZERS, "vocab.json and merges.txt"))
    # transformers' tokenizer of SigLIP is SentencePiece's. That of SigLIP 2 has a tokenizer.json.
    if file := _first(path, ("spiece.model",)):
        return _sentencepiece(file, "siglip", length, pad=_SIGLIP_EOS)
    if file := _first(path, _TOKENIZERS):
        files = {"tokenizer.json": file}
        pad_token = str(pad_token or "<pad>")
        return TextTokenizer("tokenizer.json", files, "siglip", length, pad_token=pad_token)
    raise _none(path, ("spiece.model", *_TOKENIZERS))


def _of_openclip(path: str | Path, arguments: TextArguments) -> TextTokenizer:
    config = read_openclip(path)
    text = config["model_cfg"].get("text_cfg") or {} if config else {}
    length = arguments.context_length
    if text.get("hf_tokenizer_name"):
        kwargs = text.get("tokenizer_kwargs") or {}
        clean = kwargs.get("clean", "whitespace") if type(kwargs) is dict else ""
        known = ("canonicalize", "lower", "whitespace")
        if clean not in known:
            raise InputError(
                f"{path}: text_cfg.tokenizer_kwargs.clean is {printable(str(clean))}, expected one of"
                f" {', '.join(known)}"
            )
        pad_token = json_beside(path, "tokenizer_config.json").get("pad_token")
        if type(pad_token) is dict:
            pad_token = pad_token.get("content")
        if file := _first(path, _TOKENIZERS):
            files = {"tokenizer.json": file}
            return TextTokenizer(
                "tokenizer.json",
                files,
                f"openclip_{clean}",
                length,
                pad_token=str(pad_token or "<pad>"),
            )
        raise _none(path, _TOKENIZERS)
    # OpenCLIP pads with 0.
    if file := _first(path, _BPE):
        return TextTokenizer("merges", {"bpe": file}, "openclip_lower", length)
    if files := _all(path, _MERGES):
        return TextTokenizer("merges", files, "openclip_lower", length)
    if file := _first(path, _TOKENIZERS):
        return TextTokenizer("tokenizer.json", {"tokenizer.json": file}, "openclip_lower", length)
    raise _none(path, (_BPE[0], "vocab.json and merges.txt", *_TOKENIZERS))


def _of_big_vision(path: str | Path, arguments: TextArguments) -> TextTokenizer:
    file = _first(path, _SENTENCEPIECE)
    if file is None:
        raise _none(path, _SENTENCEPIECE)
    length = arguments.context_length
    if arguments.vocab_size <= _SIGLIP_VOCABULARY:
        return _sentencepiece(file, "canonicalize", length, pad=_SIGLIP_EOS)
    return _sentencepiece(file, "lower", length, pad=0)


def _sentencepiece(file: str, clean: str, length: int, pad: int) -> TextTokenizer:
    files = {"sentencepiece": file}
    return TextTokenizer("sentencepiece", files, clean, length, eos=_SIGLIP_EOS, pad=pad)


def _first(path: str | Path, names: Sequence[str]) -> str | None:
    """Returns the path of the first of some files that is beside weights, or None."""
    for name in names:
        file = beside(path, name)
        if file is not None and os.path.isfile(file):
            return str(file.absolute())
    return None


def _all(path: str | Path, names: Sequence[str]) -> dict[str, str]:
    """Returns the paths of files beside weights by name, or {} unless all are there."""
    files = {name: file for name in names if (file := _first(path, (name,)))}
    return files if len(files) == len(names) else {}


def _none(path: str | Path, names: Sequence[str]) -> InputError:
    return InputError(
        f"{printable(str(path))} has no tokenizer next to its weights; copy {' or '.join(names)}"
        " there"
    )
