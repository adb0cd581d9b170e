"""Writes tests/golden/text/: small models of images and texts by other toolkits, with random weights.

Each folder is a model as its toolkit writes it, with a tokenizer of a small vocabulary:

    clip            transformers' CLIPModel; openai's is the same with an OpenAI-like end of text
    siglip          transformers' SiglipModel, whose tokenizer is SentencePiece's
    siglip2         the same class with Gemma's kind of tokenizer
    openclip        OpenCLIP's CLIP
    openclip_siglip OpenCLIP's SigLIP, whose image tower is timm's
    big_vision      SigLIP's .npz; the values are those of siglip

strings.json has the texts. answers.npz has, for each model, the tokens of all texts, and the
embeddings of an image and of the first 64 texts, and their logits. By torch 2.13.0, transformers
5.24.0, open_clip_torch 3.3.0, sentencepiece 0.2.3, timm 1.0.31:

    PYTHONPATH=. python tests/golden/make_text.py
"""

import gzip
import io
import json
import random
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import torch

for name in ("_meta_registrations", "_autograd_registrations"):
    sys.modules[f"torchvision.{name}"] = types.ModuleType(name)

import open_clip  # noqa: E402
import sentencepiece  # noqa: E402
import transformers  # noqa: E402
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer  # noqa: E402

FOLDER = Path(__file__).parent / "text"
ROOT = Path(__file__).parents[2]
MERGES = 700
LENGTHS = {"clip": 24, "siglip": 16, "siglip2": 16, "openclip": 24, "openclip_siglip": 16}
EMBEDDED = 64


def strings() -> list[str]:
    """Returns 1,000 texts: ordinary ones, and those that tokenizers disagree about."""
    chosen = [
        "", " ", "   ", "\n", "\t\n ", "a", "A", "1", "12345678901234567890", "a photo of a cat.",
        "a photo of a {}.", "A PHOTO OF A CAT", "cat's", "dogs'", "it's we've I'm you'll he'd they're",
        "IT'S", "red_flower", "__", "don't-stop", "e-mail@example.com", "#hashtag", "<b>bold</b>",
        "&lt;p&gt; &amp;amp; &eacute;", "<|startoftext|>", "a <|endoftext|> b", "</s>", "a</s>b",
        "<unk>", "<pad> x", "<eos>", "<bos>a", "<start_of_text> a <end_of_text>",
        "caf\u00e9", "cafe\u0301", "\u00c5ngstr\u00f6m", "A\u030angstro\u0308m", "na\u00efve", "\ufb01sh",
        "\uff21\uff22\uff23\uff0c\uff01", "\u201cquotes\u201d \u2018single\u2019 \u2014 dash\u2026",
        "stra\u00dfe STRASSE", "\u0130stanbul", "\u03a3\u03af\u03c3\u03c5\u03c6\u03bf\u03c2", "\u4e2d\u6587",
        "\u4e00\u53ea\u732b\u7684\u7167\u7247", "\u7ea2\u82b1\u3002", "\u65e5\u672c\u8a9e\u306e\u6587", "\ud55c\uad6d\uc5b4",
        "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "\u05e2\u05d1\u05e8\u05d9\u05ea", "\u0939\u093f\u0928\u094d\u0926\u0940",
        "\U0001f600", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f a cat \U0001f431",
        "\u200b", "a\u200bb", "\u00a0a\u00a0", "\u3000a\u3000b", "\u2581", "\u2581a \u2581b", "\u00ad", "\ufeffa", "\u0000a"[1:],
        "a\u0007b", "x\u0308\u0308\u0308", "\u00bd \u00b2 \u2163 \u0663", "\u20ac5 $5 5%", "C:\\path\\to", "a/b/c", "f(x)=y^2",
        "..." * 50, "ha" * 200, "a " * 300, "\u732b" * 100, "\U0001f431" * 60, "word" * 100, "Z" * 1000,
        "'" * 30, "''s'", "'S", "\u2019s cat\u2019s", "1st 2nd 3rd", "3.14", "1,000,000", "2026-11-28",
    ]  # fmt: skip
    words = []
    for name in ("README.md", "README_cn.md"):
        words += (ROOT / name).read_text(encoding="utf-8").split()
    rng = random.Random(0)
    marks = ["", "", "", ",", ".", "!", "?", "'s", "-", "_", "\u3002", " \U0001f600", "  ", "\n"]
    while len(chosen) < 1000:
        count = rng.choice([1, 2, 3, 5, 8, 13, 40])
        text = " ".join(rng.choice(words) + rng.choice(marks) for _ in range(count))
        chosen.append(rng.choice([str, str, str.upper, str.title])(text))
    return chosen


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in ("logit_scale", "logit_bias"):
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            is_factor = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_factor else 0.15 * noise)
    model.eval()


def image(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def corpus() -> list[str]:
    lines = []
    for name in (
        "README.md",
        "README_cn.md",
        "docs/start/quick_start.md",
        "docs/guides/evaluate.md",
    ):
        lines += (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip()]


def train_sentencepiece(path: Path, **options) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_writer=model, num_threads=1, **options
    )
    path.write_bytes(model.getvalue())


def clip_merges() -> list[str]:
    with gzip.open(open_clip.tokenizer.default_bpe()) as file:
        return file.read().decode().split("\n")[: MERGES + 1]


def clip_vocabulary(start: str, end: str) -> dict[str, int]:
    letters = list(open_clip.tokenizer.bytes_to_unicode().values())
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += ["".join(line.split()) for line in clip_merges()[1:]] + [start, end]
    return {word: number for number, word in enumerate(words)}


def make_clip(answers: dict) -> None:
    folder = FOLDER / "clip"
    folder.mkdir()
    vocab = clip_vocabulary("<|startoftext|>", "<|endoftext|>")
    tokenizer = transformers.CLIPTokenizer(
        vocab=vocab, merges=[tuple(line.split()) for line in clip_merges()[1:]]
    )
    tokenizer.save_pretrained(folder)
    # The older form of the same.
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *clip_merges()[1:], ""]))
    config = transformers.CLIPConfig(
        text_config={
            "vocab_size": len(vocab), "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2,
            "max_position_embeddings": LENGTHS["clip"], "eos_token_id": vocab["<|endoftext|>"],
        },
        vision_config={
            "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 3, "image_size": 32, "patch_size": 8,
        },
        projection_dim=24,
    )  # fmt: skip
    model = transformers.CLIPModel(config)
    randomise(model)
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "CLIPImageProcessor", "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711], "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32}, "do_center_crop": True, "resample": 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    store_transformers("clip", model, tokenizer, answers)


def store_transformers(name: str, model, tokenizer, answers: dict) -> None:
    texts = strings()
    tokens = tokenizer(
        texts, padding="max_length", truncation=True, max_length=LENGTHS[name], return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        output = model(input_ids=tokens[:EMBEDDED], pixel_values=image(32))
    store(name, tokens, output.text_embeds, output.image_embeds, output.logits_per_image, answers)


def store(name, tokens, texts, images, logits, answers) -> None:
    answers[f"{name}/tokens"] = tokens.numpy().astype(np.int32)
    answers[f"{name}/texts"] = texts.numpy()
    answers[f"{name}/images"] = images.numpy()
    answers[f"{name}/logits"] = logits.numpy()


def siglip_config(vocabulary: int, length: int) -> transformers.SiglipConfig:
    return transformers.SiglipConfig(
        text_config={
            "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": length,
            "projection_size": 48,
        },
        vision_config={
            "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 3, "image_size": 32, "patch_size": 8,
        },
    )  # fmt: skip


def make_siglip(answers: dict) -> None:
    folder = FOLDER / "siglip"
    folder.mkdir()
    train_sentencepiece(
        folder / "spiece.model", vocab_size=1000, model_type="unigram", pad_id=0, eos_id=1, unk_id=2,
        bos_id=-1, character_coverage=0.98,
    )  # fmt: skip
    tokenizer = transformers.SiglipTokenizer(str(folder / "spiece.model"))
    tokenizer.save_pretrained(folder)
    model = transformers.SiglipModel(siglip_config(1000, LENGTHS["siglip"]))
    randomise(model)
    model.logit_bias.data.fill_(-3.0)
    model.logit_scale.data.fill_(2.0)
    model.save_pretrained(folder)
    store_transformers("siglip", model, tokenizer, answers)
    make_big_vision(model)


def make_siglip2(answers: dict) -> None:
    folder = FOLDER / "siglip2"
    folder.mkdir()
    train_sentencepiece(
        folder / "gemma.model", vocab_size=1600, model_type="bpe", pad_id=0, eos_id=1, bos_id=2,
        unk_id=3, byte_fallback=True, add_dummy_prefix=False, remove_extra_whitespaces=False,
        normalization_rule_name="identity", character_coverage=0.98, split_digits=True,
        allow_whitespace_only_pieces=True, bos_piece="<bos>", eos_piece="<eos>",
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "gemma.model"))
    vocab = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
    merges = []
    for piece in vocab:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab and not piece.startswith("<"):
                merges.append((processor.piece_to_id(piece), left, right))
    merges = [(left, right) for _, left, right in sorted(merges)]
    (folder / "gemma.model").unlink()
    # Gemma's tokenizer of transformers ends texts by a template of its own.
    vocab["<mask>"] = len(vocab)
    tokenizer = transformers.Siglip2Tokenizer(
        vocab=vocab, merges=merges, padding_side="right", add_eos_token=True
    )
    from tokenizers.processors import TemplateProcessing

    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer.save_pretrained(folder)
    # As the published files have it: lower case isn't in them.
    tokenizer = transformers.Siglip2Tokenizer.from_pretrained(folder, padding_side="right")
    config = siglip_config(1601, LENGTHS["siglip2"])
    model = transformers.SiglipModel(config)
    randomise(model)
    model.save_pretrained(folder)
    store_transformers("siglip2", model, tokenizer, answers)


def make_openclip(answers: dict) -> None:
    folder = FOLDER / "openclip"
    folder.mkdir()
    bpe = folder / "bpe_simple_vocab_16e6.txt.gz"
    with gzip.GzipFile(bpe, "wb", mtime=0) as file:
        file.write("\n".join([*clip_merges(), ""]).encode())
    # The length of the reference's vocabulary is that of its file.
    source = Path(open_clip.tokenizer.__file__).read_text()
    assert "49152-256-2+1" in source
    tokenizer = SimpleTokenizer(bpe_path=str(bpe), context_length=LENGTHS["openclip"])
    vocabulary = clip_vocabulary("<start_of_text>", "<end_of_text>")
    # The file's last line is empty, and the reference takes it for a merge of nothing.
    order = {word: number for number, word in enumerate(vocabulary)}
    tokenizer.encoder = order
    tokenizer.sot_token_id = order["<start_of_text>"]
    tokenizer.eot_token_id = order["<end_of_text>"]
    config = {
        "embed_dim": 24,
        "vision_cfg": {
            "image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8,
        },
        "text_cfg": {
            "context_length": LENGTHS["openclip"], "vocab_size": len(vocabulary), "width": 32,
            "heads": 2, "layers": 2,
        },
    }  # fmt: skip
    model = open_clip.CLIP(**config)
    write_openclip(folder, "openclip", model, config, {}, tokenizer, answers)


def make_openclip_siglip(answers: dict) -> None:
    folder = FOLDER / "openclip_siglip"
    folder.mkdir()
    shutil.copy(FOLDER / "siglip2" / "tokenizer.json", folder)
    shutil.copy(FOLDER / "siglip2" / "tokenizer_config.json", folder)
    length = LENGTHS["openclip_siglip"]
    config = {
        "embed_dim": 192,
        "init_logit_bias": -10,
        "custom_text": True,
        "vision_cfg": {
            "image_size": 32, "timm_model_name": "vit_base_patch16_siglip_224",
            "timm_model_pretrained": False, "timm_pool": "map", "timm_proj": "none",
        },
        "text_cfg": {
            "context_length": length, "vocab_size": 1601, "hf_tokenizer_name": "timm/ViT-B-16-SigLIP2",
            "tokenizer_kwargs": {"clean": "canonicalize"}, "width": 32, "heads": 2, "layers": 2,
            "mlp_ratio": 3.7362, "no_causal_mask": True, "proj_bias": True, "pool_type": "last",
            "norm_kwargs": {"eps": 1e-6}, "act_kwargs": {"approximate": "tanh"},
        },
    }  # fmt: skip
    # Only its text tower is stored: timm's smallest SigLIP has 90 million parameters.
    text = open_clip.model._build_text_tower(192, config["text_cfg"])
    randomise(text)
    from safetensors.torch import save_file

    arrays = {f"text.{name}": value for name, value in text.state_dict().items()}
    arrays |= {"logit_scale": torch.tensor(2.0), "logit_bias": torch.tensor(-10.0)}
    save_file(arrays, folder / "open_clip_model.safetensors")
    stored = {
        "model_cfg": config,
        "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(stored, indent=1))
    tokenizer = HFTokenizer(
        str(folder), context_length=length, clean="canonicalize", padding_side="right"
    )
    tokens = tokenizer(strings())
    with torch.no_grad():
        texts = torch.nn.functional.normalize(text(tokens[:EMBEDDED]), dim=-1)
    answers["openclip_siglip/tokens"] = tokens.numpy().astype(np.int32)
    answers["openclip_siglip/texts"] = texts.numpy()


def write_openclip(folder, name, model, config, preprocess, tokenizer, answers) -> None:
    from safetensors.torch import save_file

    randomise(model)
    save_file(
        {
            key: value.contiguous()
            for key, value in model.state_dict().items()
            if key != "attn_mask"
        },
        folder / "open_clip_model.safetensors",
    )
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}, indent=1)
    )
    tokens = tokenizer(strings())
    with torch.no_grad():
        images, texts, scale = model(image(32), tokens[:EMBEDDED])[:3]
    store(name, tokens, texts, images, scale * images @ texts.T, answers)


def make_big_vision(model) -> None:
    """Writes SigLIP's values as big_vision has them."""
    folder = FOLDER / "big_vision"
    folder.mkdir()
    shutil.copy(FOLDER / "siglip" / "spiece.model", folder / "sentencepiece.model")
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    flax = {"params/t": state["logit_scale"], "params/b": state["logit_bias"]}

    def layer(target: str, source: str, heads: int = 0, out: bool = False) -> None:
        kernel = state[f"{source}.weight"].T
        bias = state[f"{source}.bias"]
        if heads and out:
            kernel = kernel.reshape(heads, -1, kernel.shape[1])
        elif heads:
            kernel = kernel.reshape(kernel.shape[0], heads, -1)
            bias = bias.reshape(heads, -1)
        flax[f"{target}/kernel"] = kernel
        flax[f"{target}/bias"] = bias

    def norm(target: str, source: str) -> None:
        flax[f"{target}/scale"] = state[f"{source}.weight"]
        flax[f"{target}/bias"] = state[f"{source}.bias"]

    def block(target: str, source: str, heads: int) -> None:
        norm(f"{target}/LayerNorm_0", f"{source}.layer_norm1")
        norm(f"{target}/LayerNorm_1", f"{source}.layer_norm2")
        attention = f"{target}/MultiHeadDotProductAttention_0"
        for role, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            layer(f"{attention}/{role}", f"{source}.self_attn.{letter}_proj", heads)
        layer(f"{attention}/out", f"{source}.self_attn.out_proj", heads, out=True)
        layer(f"{target}/MlpBlock_0/Dense_0", f"{source}.mlp.fc1")
        layer(f"{target}/MlpBlock_0/Dense_1", f"{source}.mlp.fc2")

    txt = "params/txt"
    embeddings = "text_model.embeddings"
    flax[f"{txt}/Embed_0/embedding"] = state[f"{embeddings}.token_embedding.weight"]
    flax[f"{txt}/pos_embedding"] = state[f"{embeddings}.position_embedding.weight"][None]
    for number in range(2):
        block(f"{txt}/Encoder_0/encoderblock_{number}", f"text_model.encoder.layers.{number}", 2)
    norm(f"{txt}/Encoder_0/encoder_norm", "text_model.final_layer_norm")
    layer(f"{txt}/head", "text_model.head")
    img = "params/img"
    kernel = state["vision_model.embeddings.patch_embedding.weight"]
    flax[f"{img}/embedding/kernel"] = kernel.transpose(2, 3, 1, 0)
    flax[f"{img}/embedding/bias"] = state["vision_model.embeddings.patch_embedding.bias"]
    flax[f"{img}/pos_embedding"] = state["vision_model.embeddings.position_embedding.weight"][None]
    for number in range(2):
        block(
            f"{img}/Transformer/encoderblock_{number}", f"vision_model.encoder.layers.{number}", 3
        )
    norm(f"{img}/Transformer/encoder_norm", "vision_model.post_layernorm")
    head = f"{img}/MAPHead_0"
    flax[f"{head}/probe"] = state["vision_model.head.probe"]
    qkv = state["vision_model.head.attention.in_proj_weight"]
    bias = state["vision_model.head.attention.in_proj_bias"]
    for role, weight, values in zip(
        ("query", "key", "value"), np.split(qkv, 3), np.split(bias, 3), strict=True
    ):
        flax[f"{head}/MultiHeadDotProductAttention_0/{role}/kernel"] = weight.T.reshape(48, 3, 16)
        flax[f"{head}/MultiHeadDotProductAttention_0/{role}/bias"] = values.reshape(3, 16)
    layer(
        f"{head}/MultiHeadDotProductAttention_0/out",
        "vision_model.head.attention.out_proj",
        3,
        out=True,
    )
    norm(f"{head}/LayerNorm_0", "vision_model.head.layernorm")
    layer(f"{head}/MlpBlock_0/Dense_0", "vision_model.head.mlp.fc1")
    layer(f"{head}/MlpBlock_0/Dense_1", "vision_model.head.mlp.fc2")
    np.savez_compressed(folder / "siglip.npz", **flax)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    (FOLDER / "strings.json").write_text(json.dumps(strings(), ensure_ascii=False, indent=0))
    answers: dict[str, np.ndarray] = {}
    make_clip(answers)
    make_siglip(answers)
    make_siglip2(answers)
    make_openclip(answers)
    make_openclip_siglip(answers)
    answers["image"] = image(32).numpy()
    np.savez_compressed(FOLDER / "answers.npz", **answers)


if __name__ == "__main__":
    main()
