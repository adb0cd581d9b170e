"""The networks of pre-training without labels: an encoder, and what the training alone needs."""
