"""Whether a dataset can be trained on: each image looked at, duplicates, labels, told in words."""
