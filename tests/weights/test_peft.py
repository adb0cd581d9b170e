"""Folders that peft itself saved, read with the base that they were trained on: the logits that
peft computes.
"""

from pathlib import Path

import numpy as np
import paddle
import pytest
from safetensors.numpy import save_file

from errors import InputError
from models import create_model
from weights import load_weights

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "peft.npz")
KINDS = [name.partition("/")[0] for name in GOLDEN.files if name.endswith("/logits")]
REFUSED = {
    "refused: DoRA": "has use_dora True, which isn't supported",
    "refused: a rank by layer": "has rank_pattern a dictionary of 1, which isn't supported",
    "refused: a scale by layer": "has alpha_pattern a dictionary of 1, which isn't supported",
    "refused: a convolution": "it adapts patch_embed.proj, which isn't a Linear",
    "refused: a factor's bias": "has lora_bias True, which isn't supported",
    "refused: PiSSA": "init_lora_weights is 'pissa', expected true, false or one of gaussian, orthogonal, eva",
    "refused: OLoRA": "init_lora_weights is 'olora', expected true, false or one of gaussian, orthogonal, eva",
}


def part(of):
    return {name.removeprefix(of): GOLDEN[name] for name in GOLDEN.files if name.startswith(of)}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_pefts(kind, tmp_path):
    save_file(part("base/"), tmp_path / "base.safetensors")
    save_file(part(f"{kind}/tensors/"), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(str(GOLDEN[f"{kind}/config"]))
    sizes = {"depth": 2, "embed_dim": 24, "num_heads": 3, "image_size": 32, "num_classes": 5}
    model = create_model("vit_tiny_patch16_224", **sizes)
    if kind in REFUSED:
        with pytest.raises(InputError, match=REFUSED[kind]):
            load_weights(model, tmp_path / "base.safetensors", adapter=tmp_path)
        return
    model.eval()
    images = paddle.to_tensor(GOLDEN["images"])
    expected = GOLDEN[f"{kind}/logits"]
    load_weights(model, tmp_path / "base.safetensors", adapter=tmp_path)
    tolerance = 1e-4 if kind == "float16" else 2e-7
    np.testing.assert_allclose(model(images).numpy(), expected, atol=tolerance, rtol=0)
    load_weights(model, tmp_path / "base.safetensors")
    assert np.abs(model(images).numpy() - expected).max() > 1e-3
