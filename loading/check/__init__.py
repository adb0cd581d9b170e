"""Whether a dataset can be trained on: each image looked at, duplicates, labels, described in
words.
"""
