"""Loads data: from files to batches on the device.

``sources``, ``multilabel``, ``unlabelled``, ``archives`` and ``shards`` read datasets, and
``cache`` keeps decoded images. ``samplers`` order the samples, ``transforms`` turn an image into
pixels, and ``workers`` and ``dali`` load batches of them. ``label_spaces`` maps the
classes of data to the outputs of a model.
"""
