"""Options of runs under fleet, with and without sharding."""

FLEET = ["DIST.ENGINE", "fleet"]
STAGE_1 = [*FLEET, "DIST.STRATEGY.sharding", "True"]
STAGE_2 = [*STAGE_1, "DIST.STRATEGY.sharding_configs.stage", "2"]

# Adam divides by its own gradient: EPS keeps the rounding of gradients that are zero out of it.
RECIPE = [
    "DATA.BATCH_SIZE", "8", "TRAIN.NUM_EPOCHS", "2", "TRAIN.BASE_LR", "0.01", "TRAIN.OPTIMIZER.EPS", "1e-3",
    "TRAIN.GRAD_CLIP", "0.5", "TRAIN.LAYER_DECAY", "0.8", "TRAIN.FREEZE", "['patch_embed.*']", "SAVE_STEPS", "1",
    "TRAIN.MODEL_EMA", "True", "KEEP_LAST", "1000",
]  # fmt: skip
ACCUMULATED = ["TRAIN.ACCUM_ITER", "2", "MODEL.RECOMPUTE", "True"]

# A checkpoint in the middle of such a run.
MIDDLE = "checkpoints/epoch_0001_sample_000000032"
