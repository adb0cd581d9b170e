"""What the tests read again and again, parsed once."""

from configs import documents
from options import CONFIG_DIR


def remember_configurations():
    """Lets a YAML file of configs/ be parsed once: tests read some of them hundreds of times. Its values are made anew
    each time, by the code under test. What isn't in a file of configs/ is parsed each time.
    """
    parse = documents._Reader.get_single_node
    nodes = {f"{file.read_text(encoding='utf-8')}\0": None for file in CONFIG_DIR.rglob("*.yaml")}  # as PyYAML ends it

    def remembered(reader):
        text = reader.buffer
        if text not in nodes:
            return parse(reader)
        if nodes[text] is None:
            nodes[text] = parse(reader)
        return nodes[text]

    documents._Reader.get_single_node = remembered
