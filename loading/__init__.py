"""From a file to a batch: ``sources``, ``shards`` and ``cache`` read, ``samplers`` order,
``transforms`` make pixels of an image, ``workers`` and ``dali`` batches of them. ``label_spaces``
tells which output of a model is which class.
"""
