"""Reduced networks of BEiT's pre-training: their losses and gradients, given masks and tokens.

With transformers (5.24.0; torch 2.13.0) this records its ``BeitForMaskedImageModeling``:

    PYTHONPATH=tests python -m golden.beit_pretraining

With the path of beit2/ of microsoft/unilm (MIT, at the commit in sources/beit.yaml; timm 1.0.31) it
records BEiT v2's:

    PYTHONPATH=tests python -m golden.beit_pretraining unilm/beit2
"""

import sys
import types
from pathlib import Path

import numpy as np

from golden.formula import array

VOCABULARY = 11
SIZE = 16
PATCH = 4
SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3}
# The arguments of BeitConfig that differ.
CASES = {
    "beit_pretraining": {"use_shared_relative_position_bias": True, "use_mean_pooling": True},
    "beit_pretraining_absolute": {
        "use_absolute_position_embeddings": True,
        "use_relative_position_bias": True,
        "layer_scale_init_value": 0.0,
    },
}
V2 = "beit_pretraining_v2"
EARLY_LAYERS = 2


def batch() -> dict[str, np.ndarray]:
    """Returns three images [3, 3, 16, 16], their masks of 6, 5 and 2 patches, and their tokens."""
    mask = np.zeros((3, 16), np.uint8)
    mask[0, [1, 2, 5, 6, 9, 10]] = 1
    mask[1, [0, 4, 8, 12, 15]] = 1
    mask[2, [7, 11]] = 1
    tokens = np.arange(48).reshape(3, 16) * 7 % VOCABULARY
    return {"images": 3 * array("images", (3, 3, SIZE, SIZE)), "mask": mask, "tokens": tokens}


def loss_of(forward):
    """Returns a loss on ``batch``, after its backward pass.

    Args:
        forward: the loss for images, boolean masks and the tokens of masked patches.
    """
    import torch

    values = batch()
    mask = torch.from_numpy(values["mask"]).bool()
    labels = torch.from_numpy(values["tokens"])[mask]
    loss = forward(torch.from_numpy(values["images"]), mask, labels)
    loss.backward()
    return loss.detach()


def write(name: str, loss, gradients) -> None:
    """Writes NAME.npz: the loss, and the gradients by the names in the reference's files."""
    arrays = {f"grad/{key}": value for key, value in gradients.items()}
    np.savez_compressed(Path(__file__).with_name(f"{name}.npz"), loss=loss.numpy(), **arrays)


def record_transformers() -> None:
    import tempfile

    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    for name, options in CASES.items():
        config = transformers.BeitConfig(
            **SMALL | options,
            intermediate_size=96,
            image_size=SIZE,
            patch_size=PATCH,
            vocab_size=VOCABULARY,
            use_mask_token=True,
            layer_norm_eps=1e-6,
            drop_path_rate=0.0,
        )
        model = transformers.BeitForMaskedImageModeling(config)
        with tempfile.TemporaryDirectory() as folder:
            # Its files have other names than its parameters.
            file = Path(folder) / "model.safetensors"
            model.save_pretrained(folder)
            tensors = {key: array(key, value.shape) for key, value in load_file(file).items()}
            save_file(tensors, file, {"format": "pt"})
            model = transformers.BeitForMaskedImageModeling.from_pretrained(folder).eval()
            loss = loss_of(lambda *inputs, model=model: model(*inputs).loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.grad)
            model.save_pretrained(folder)
            write(name, loss, load_file(file))


def record_authors(folder: str) -> None:
    from functools import partial

    import torch
    from torch.nn.functional import cross_entropy

    sys.path.insert(0, folder)
    from modeling_pretrain import VisionTransformerForMaskedImageModelingCLS

    model = VisionTransformerForMaskedImageModelingCLS(
        img_size=SIZE,
        patch_size=PATCH,
        vocab_size=VOCABULARY,
        embed_dim=24,
        depth=4,
        num_heads=3,
        qkv_bias=True,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
        init_values=0.1,
        use_abs_pos_emb=False,
        use_shared_rel_pos_bias=True,
        early_layers=EARLY_LAYERS,
        head_layers=2,
    )

    state = {
        key: torch.from_numpy(array(key, tuple(value.shape)))
        for key, value in model.named_parameters()
    }
    model.load_state_dict(state, strict=False)
    model.eval()

    def forward(images, mask, labels):
        return sum(cross_entropy(logits, labels) for logits in model(images, mask))

    loss = loss_of(forward)
    write(V2, loss, {key: value.grad.numpy() for key, value in model.named_parameters()})


if __name__ == "__main__":
    # torchvision's operators don't load beside a CPU torch.
    for name in ("_meta_registrations", "_autograd_registrations"):
        sys.modules[f"torchvision.{name}"] = types.ModuleType(name)
    if len(sys.argv) > 1:
        record_authors(sys.argv[1])
    else:
        record_transformers()
