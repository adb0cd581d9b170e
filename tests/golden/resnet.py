"""ResNets; run with torch and timm it records them: PYTHONPATH=tests python -m golden.resnet"""

CASES = {"resnet18": {"num_classes": 5}, "resnet50": {"num_classes": 5}}
SIZES = {"resnet18": (64, 64), "resnet50": (33, 40)}
# timm averages even sides alone
SIZES |= {"resnet_d": (75, 90), "resnet_blur": (75, 90), "resnet_rs": (64, 96)}
SIZES |= {"resnet_dilated": (33, 50), "resnet_dilated_basic": (40, 41)}
# Reduced models of the variants, by arguments of timm's ResNet.
VARIANTS = {
    "resnet_d": {"block": "Bottleneck", "stem_type": "deep_tiered", "stem_width": 16, "avg_down": True,
        "cardinality": 4, "base_width": 8, "block_args": {"attn_layer": "se"}},
    "resnet_blur": {"block": "BasicBlock", "aa_layer": "BlurPool2d", "block_args": {"attn_layer": "eca"}},
    "resnet_rs": {"block": "Bottleneck", "stem_type": "deep", "stem_width": 32, "avg_down": True, "base_width": 16,
        "replace_stem_pool": True, "aa_layer": "AvgPool2d"},
    "resnet_dilated": {"block": "Bottleneck", "stem_type": "deep", "stem_width": 64, "output_stride": 16,
        "base_width": 16, "layers": [2] * 4},
    "resnet_dilated_basic": {"block": "BasicBlock", "output_stride": 8, "layers": [2] * 4},
}  # fmt: skip
# Of resnet18: too many to keep all; the first depend on all that comes after them.
GRADIENTS = (
    "conv1.weight",
    "bn1.weight",
    "layer2.0.downsample.1.bias",
    "layer4.1.bn2.weight",
    "fc.bias",
)

if __name__ == "__main__":
    import timm
    import torch

    from golden.convolutions import array
    from golden.record import record, with_formula

    for name, sizes in CASES.items():
        model = timm.create_model(name, **sizes)
        extra = {}
        if name == "resnet18":
            logits = with_formula(model, array)(
                torch.from_numpy(array("images", (2, 3, *SIZES[name])))
            )
            (logits * torch.from_numpy(array("loss", (2, 5)))).sum().backward()
            extra = {f"gradient/{key}": model.get_parameter(key).grad for key in GRADIENTS}
        record(name, model, SIZES[name], extra=extra, array=array)
    for name, sizes in VARIANTS.items():
        layers = {"block": getattr(timm.models.resnet, sizes["block"])}
        if "aa_layer" in sizes:
            layers["aa_layer"] = getattr(timm.layers, sizes["aa_layer"], torch.nn.AvgPool2d)
        record(
            name,
            timm.models.resnet.ResNet(**{"layers": [1] * 4} | sizes | layers, num_classes=5),
            SIZES[name],
            array=array,
        )
