"""A reduced tokenizer of BEiT v2, and the codebook of its training: what the authors' code computes.

With the path of beit2/ of microsoft/unilm (MIT, at the commit in sources/beit.yaml; torch 2.13.0,
timm 1.0.31, einops 0.8.2) this records vqkd.npz:

    PYTHONPATH=tests python -m golden.vqkd unilm/beit2
"""

import sys
import types
import zlib
from pathlib import Path

import numpy as np

VOCABULARY = 12
CODE_DIM = 5
SIZE = 16
PATCH = 4
OUTPUTS = 7
SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3}
STEPS = 6
DECAY = 0.9


def random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns normally distributed numbers: the same for each name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.normal(size=shape).astype(np.float32)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a tensor of the authors' file. Codes have the length 1."""
    values = random(name, shape)
    if name == "quantize.embedding.weight":
        return values / np.linalg.norm(values, axis=-1, keepdims=True)
    is_norm = "norm" in name and name.endswith("weight")
    return values / 5 + (1 if is_norm else 0)


def images() -> np.ndarray:
    """Returns three images [3, 3, 16, 16] from 0 to 1."""
    return np.clip(random("images", (3, 3, SIZE, SIZE)) / 2 + 0.5, 0, 1)


def targets() -> np.ndarray:
    """Returns a teacher's features [3, 16, OUTPUTS]."""
    return random("targets", (3, 16, OUTPUTS))


def features(step: int) -> np.ndarray:
    """Returns the features of a step's patches, [2, 16, CODE_DIM]. Their lengths differ."""
    return random(f"features {step}", (2, 16, CODE_DIM))


def record(folder: str) -> None:
    import torch

    sys.path.insert(0, folder)
    # The teachers need further packages, and nothing of them is used.
    teachers = types.ModuleType("vqkd_teacher")
    teachers.clip = teachers.get_dino_vit_base = None
    sys.modules |= {"vqkd_teacher": teachers, "utils": types.ModuleType("utils")}
    import norm_ema_quantizer
    from modeling_vqkd import VQKD, get_model_default_params

    encoder = get_model_default_params() | SMALL | {"img_size": SIZE, "patch_size": PATCH}
    encoder |= {"num_classes": 0}
    decoder = encoder | {"img_size": SIZE // PATCH, "patch_size": 1, "in_chans": CODE_DIM}
    decoder |= {"depth": 1}
    model = VQKD(
        encoder,
        decoder,
        n_embed=VOCABULARY,
        embed_dim=CODE_DIM,
        teacher_model_type="None",
        decoder_out_dim=OUTPUTS,
    )
    state = model.state_dict()
    for name, tensor in state.items():
        if tensor.is_floating_point():
            tensor.copy_(torch.from_numpy(weight(name, tuple(tensor.shape))))
    state["quantize.embedding.initted"].fill_(1)
    model.eval()
    model.get_regress_target = lambda _: torch.from_numpy(targets())
    pixels = torch.from_numpy(images())
    loss, log = model(pixels)
    loss.backward()
    recorded = {
        "tokens": model.get_codebook_indices(pixels).numpy(),
        "loss": loss.item(),
        "quantisation": log["val/quant_loss"].item(),
    }
    recorded |= {f"shape/{name}": list(tensor.shape) for name, tensor in state.items()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            recorded[f"grad/{name}"] = parameter.grad.numpy()

    # The first features are the first means of k-means, which the authors draw at random.
    norm_ema_quantizer.sample_vectors = lambda samples, count: samples[:count]
    quantizer = norm_ema_quantizer.NormEMAVectorQuantizer(
        VOCABULARY, CODE_DIM, beta=1.0, decay=DECAY, kmeans_init=True
    ).train()
    for step in range(STEPS):
        maps = torch.from_numpy(features(step).reshape(2, 4, 4, CODE_DIM)).permute(0, 3, 1, 2)
        _, loss, tokens = quantizer(maps)
        recorded[f"step {step}/codes"] = quantizer.embedding.weight.numpy().copy()
        recorded[f"step {step}/tokens"] = tokens.numpy()
        recorded[f"step {step}/loss"] = loss.item()
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **recorded)


if __name__ == "__main__":
    # torchvision's operators don't load beside a CPU torch.
    for name in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
    record(sys.argv[1])
