"""ResNets; run with torch and timm it records them: PYTHONPATH=tests python -m golden.resnet"""

CASES = {"resnet18": {"num_classes": 5}, "resnet50": {"num_classes": 5}}
SIZES = {"resnet18": (64, 64), "resnet50": (33, 40)}

if __name__ == "__main__":
    import timm

    import golden.record
    from golden.convolutions import array

    golden.record.array = array
    for name, sizes in CASES.items():
        golden.record.record(name, timm.create_model(name, **sizes), SIZES[name])
