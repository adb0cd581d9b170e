"""YAML files, and what reads those of other toolkits: a package, so that no other of this name is
found first.
"""
