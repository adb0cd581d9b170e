"""Heads: a class for each pixel from the intermediates of an encoder.

``base`` has their base class, ``network`` the model of an encoder and a head. Every other file
registers heads, which HEAD.NAME chooses.
"""
