"""Batch norm's statistics."""

# Paddle's names; PyTorch's count of batches, which only an average over all of them needs.
BATCH_NORM = (
    (r"\._mean$", ".running_mean"),
    (r"\._variance$", ".running_var"),
    (r"\.num_batches_tracked$", None),
)
