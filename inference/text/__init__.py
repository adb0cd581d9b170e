"""Text towers in use: tokens, prompts, and classifiers that are made of texts."""
