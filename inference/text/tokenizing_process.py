"""The program of the process that turns texts into tokens (``inference.text.tokenizer``).

Tokenizers' files come from strangers, and libraries in C++ and Rust parse them. They do it here,
where CPU time and memory are limited and a crash harms nobody. The program is started by its path,
and imports only what it needs. It reads a request from stdin and writes the answer to stdout, both
JSON.
"""

import contextlib
import functools
import gzip
import html
import json
import os
import re
import resource
import string
import sys
from typing import Any

# Bytes of a vocabulary, unpacked. Gemma's, in JSON, has 34 million.
_LARGEST = 1 << 27
# CLIP's words: contractions, letters, single digits, and all else.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
# The number of CLIP's merges; OpenAI's file holds more lines, which its program doesn't read.
_CLIP_MERGES = 49152 - 256 - 2
_UNDERLINE = "\u2581"
# The texts whose tokens are held uncut at a time. A tokenizer can make a million of one letter.
_TEXTS = 64


def _main() -> None:
    request = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit(resource.RLIMIT_CPU, request["seconds"])
    _limit(resource.RLIMIT_AS, request["memory"])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Libraries print to the descriptors 1 and 2.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        answer = _tokens(request)
    except MemoryError:
        answer = {"error": "it takes too much memory"}
    except ModuleNotFoundError as error:
        answer = {"missing": error.name}
    # A panic in Rust isn't an Exception.
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    json.dump(answer, answers)
    answers.flush()


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    with contextlib.suppress(ValueError):
        resource.setrlimit(kind, (most, hard))


def _tokens(request: dict[str, Any]) -> dict[str, Any]:
    """Returns ``tokens``: those of each text, with those of its begin and end, unpadded, and one
    more than ``length`` of a text that has more; ``end``: the token that ends each text, or None;
    ``pad``: the number of the token that pads.
    """
    clean = request["clean"]
    if clean == "siglip" and request["kind"] == "tokenizer.json" and _is_gemmas(request):
        clean = "lower"
    texts = [_cleaned(text, clean) for text in request["texts"]]
    readers = {
        "tokenizer.json": _by_tokenizers,
        "merges": _by_merges,
        "sentencepiece": _by_sentencepiece,
    }
    return readers[request["kind"]](request, texts)


def _is_gemmas(request: dict[str, Any]) -> bool:
    """Returns whether a tokenizer.json has Gemma's kind of vocabulary, which SigLIP 2 has."""
    model = json.loads(_text(request["files"]["tokenizer.json"])).get("model") or {}
    return bool(model.get("byte_fallback"))


def _cleaned(text: str, kind: str) -> str:
    """Returns a text as the program that trained the model cleans it.

    Args:
        kind: "none"; "canonicalize": big_vision's, lower case without
            punctuation; "siglip": transformers' variant of it, which takes _ for punctuation;
            "lower": lower case; "openclip_lower", "openclip_whitespace" and
            "openclip_canonicalize": OpenCLIP's, which repair broken Unicode and HTML first.
    """
    if kind == "siglip":
        return _without_punctuation(text.lower())
    if kind == "lower":
        return text.lower()
    if kind == "canonicalize":
        return _without_punctuation(text.replace("_", " ")).lower()
    if kind.startswith("openclip"):
        import ftfy

        text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
        if kind == "openclip_canonicalize":
            return _without_punctuation(text.replace("_", " ")).lower()
        text = " ".join(text.split())
        return text.lower() if kind == "openclip_lower" else text
    return text


def _without_punctuation(text: str) -> str:
    text = text.translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\s+", " ", text).strip()


def _by_tokenizers(request: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(_text(request["files"]["tokenizer.json"]))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    empty = tokenizer.encode("").ids
    # Of an empty text, the tokens are those of its begin and end.
    ends = request["eos"] if request["eos"] is not None else (empty[-1] if empty else None)
    return {
        "tokens": _encoded(tokenizer, texts, request["length"]),
        "end": ends,
        "pad": tokenizer.token_to_id(request["pad_token"]),
    }


def _encoded(tokenizer: Any, texts: list[str], length: int) -> list[list[int]]:
    """Returns the tokens of each text, up to one more than ``length``."""
    tokens = []
    for first in range(0, len(texts), _TEXTS):
        for encoding in tokenizer.encode_batch(texts[first : first + _TEXTS]):
            tokens.append(encoding.ids[: length + 1])
    return tokens


def _by_merges(request: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """Tokenises by CLIP's merges of pairs of bytes."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    files = request["files"]
    if "vocab.json" in files:
        vocab = json.loads(_text(files["vocab.json"]))
        lines = _text(files["merges.txt"]).split("\n")
        lines = [line for line in lines if line and not line.startswith("#version")]
        start = "<|startoftext|>"
        end = "<|endoftext|>"
    else:
        # OpenAI's file holds the merges alone. The vocabulary begins with the bytes, alone and at
        # a word's end.
        lines = _text(files["bpe"]).split("\n")[1 : _CLIP_MERGES + 1]
        lines = [line for line in lines if line]
        letters = _byte_letters()
        words = [*letters, *(f"{letter}</w>" for letter in letters)]
        start = "<start_of_text>"
        end = "<end_of_text>"
        words += ["".join(line.split()) for line in lines] + [start, end]
        vocab = {word: number for number, word in enumerate(words)}
    merges: Any = [tuple(line.split()) for line in lines]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, end_of_word_suffix="</w>", unk_token=end))
    normalizer = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " ")]
    tokenizer.normalizer = normalizers.Sequence([*normalizer, normalizers.Lowercase()])
    words = Regex("|".join([re.escape(start), re.escape(end), _WORDS]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens([start, end])
    length = request["length"]
    return {
        "tokens": [
            [vocab[start], *ids, vocab[end]][: length + 1]
            for ids in _encoded(tokenizer, texts, length)
        ],
        "end": vocab[end],
        "pad": vocab.get(request["pad_token"]),
    }


def _byte_letters() -> list[str]:
    """Returns the 256 letters that stand for bytes, in the order of CLIP's vocabulary: those that
    can be printed, then the others, from the letter 256 on.
    """
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [256 + number for number in range(256 - len(printed))]
    return [chr(letter) for letter in [*printed, *others]]


def _by_sentencepiece(request: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    import sentencepiece

    with open(request["files"]["sentencepiece"], "rb") as file:
        model = file.read(_LARGEST)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    end = request["eos"]
    encode = processor.encode
    if request["clean"] == "siglip":
        encode = functools.partial(_with_special_tokens, processor)
        # Its special tokens are found before the text is cleaned.
        texts = request["texts"]
    tokens = []
    for text in texts:
        ids = encode(text)
        # A text may end in the token itself.
        ids = ids if ids[-1:] == [end] else [*ids, end]
        tokens.append(ids[: request["length"] + 1])
    return {"tokens": tokens, "end": end, "pad": None}


def _with_special_tokens(processor: Any, text: str) -> list[int]:
    """Returns the tokens of a text in which </s> and <unk> are tokens, as for transformers.

    Only a text's first part gets SentencePiece's space in front.
    """
    unknown = "<unk>"
    skipped = len(processor.encode(unknown))
    ids = []
    parts = re.split(r"\s*(</s>|<unk>)\s*", text.replace(_UNDERLINE, " "))
    for number, part in enumerate(parts):
        if number % 2:
            ids.append(processor.piece_to_id(part))
        elif number:
            ids += processor.encode(unknown + _cleaned(part, "siglip"))[skipped:]
        else:
            ids += processor.encode(_cleaned(part, "siglip"))
    return ids


def _text(path: str) -> str:
    opened = gzip.open(path) if path.endswith(".gz") else open(path, "rb")  # noqa: SIM115
    with opened as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} bytes")
    return data.decode("utf-8")


if __name__ == "__main__":
    _main()
