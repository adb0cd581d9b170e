"""Reduced PiTs; run with torch and timm it records them: PYTHONPATH=tests python -m golden.pit"""

SMALL = {
    "patch_size": 8, "stride": 4, "base_dims": (4, 4, 6), "depth": (1, 2, 1), "heads": (2, 2, 4), "num_classes": 5,
}  # fmt: skip
CASES = {
    "pit": SMALL,
    # another stride; each pooling rounds up rows or columns; two stages
    "pit_distilled": SMALL
    | {
        "stride": 3,
        "base_dims": (6, 4),
        "depth": (2, 1),
        "heads": (2, 3),
        "mlp_ratio": 2.5,
        "distilled": True,
    },
}
SIZES = {"pit": (44, 44), "pit_distilled": (23, 30)}

if __name__ == "__main__":
    import torch
    from timm.models.pit import PoolingVisionTransformer

    from golden.make_names_vit import values
    from golden.record import record, with_formula

    for name, sizes in CASES.items():
        model = PoolingVisionTransformer(img_size=SIZES[name], **sizes)
        extra = {}
        if name == "pit_distilled":
            with_formula(model, values).set_distilled_training()
            outputs = model.train()(torch.from_numpy(values("images", (2, 3, *SIZES[name]))))
            extra = dict(zip(("train_logits", "train_logits_dist"), outputs, strict=True))
            model.set_distilled_training(False)
        record(name, model, SIZES[name], gradients=True, extra=extra, array=values)
