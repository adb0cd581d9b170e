"""Declares, merges, checks and explains the keys of a configuration; parses command lines."""
