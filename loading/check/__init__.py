"""The check of a dataset: decodes each image, finds duplicates, and describes problems in words."""
