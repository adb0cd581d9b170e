"""What the tests read again and again, parsed once."""

from configs import documents

LARGEST = 1 << 16  # letters of what is remembered


def remember_configurations():
    """Lets a text of YAML be parsed once: tests read some files of configs/ hundreds of times.

    The code under test makes the values of what was parsed, anew each time.
    """
    parse, nodes = documents._Reader.get_single_node, {}

    def remembered(reader):
        text = reader.buffer
        if text in nodes:
            return nodes[text]
        node = parse(reader)
        if len(text) <= LARGEST:
            nodes[text] = node
        return node

    documents._Reader.get_single_node = remembered
