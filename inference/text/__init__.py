"""Text towers of CLIP and SigLIP: tokens, prompts, and classifiers made from texts."""
