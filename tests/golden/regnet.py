"""Reduced RegNets; run with torch and timm it records them: PYTHONPATH=tests python -m
golden.regnet
"""

# The paper's parameters, of which timm makes four stages (tests/models/test_regnet.py tells which).
CASES = {
    "regnety": {"w0": 8, "wa": 8.0, "wm": 1.8, "depth": 5, "group_size": 8, "se_ratio": 0.25},
    "regnetx": {"w0": 8, "wa": 8.0, "wm": 1.8, "depth": 5, "group_size": 16, "se_ratio": 0.0},
}
SIZES = {"regnety": (64, 64), "regnetx": (37, 50)}  # the second is odd at each stage

if __name__ == "__main__":
    from timm.models.regnet import RegNet, RegNetCfg

    from golden.convolutions import array
    from golden.record import record

    for name, sizes in CASES.items():
        model = RegNet(RegNetCfg(**sizes), num_classes=5)
        record(name, model, SIZES[name], gradients=name == "regnety", array=array)
