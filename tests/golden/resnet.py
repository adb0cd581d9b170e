"""ResNets; run with torch and timm it records them: PYTHONPATH=tests python -m golden.resnet"""

CASES = {"resnet18": {"num_classes": 5}, "resnet50": {"num_classes": 5}}
SIZES = {"resnet18": (64, 64), "resnet50": (33, 40)}
# Of resnet18: too many to keep all; the first depend on all that comes after them.
GRADIENTS = ("conv1.weight", "bn1.weight", "layer2.0.downsample.1.bias", "layer4.1.bn2.weight", "fc.bias")

if __name__ == "__main__":
    import timm
    import torch

    from golden.convolutions import array
    from golden.record import record, with_formula

    for name, sizes in CASES.items():
        model, extra = timm.create_model(name, **sizes), {}
        if name == "resnet18":
            logits = with_formula(model, array)(torch.from_numpy(array("images", (2, 3, *SIZES[name]))))
            (logits * torch.from_numpy(array("loss", (2, 5)))).sum().backward()
            extra = {f"gradient/{key}": model.get_parameter(key).grad for key in GRADIENTS}
        record(name, model, SIZES[name], extra=extra, array=array)
