"""Reads YAML files that somebody else wrote: plain values, each key once, within limits.

Anchors may be used; what they stand for counts wherever it is used, so that a short file can't
become a long one.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.cyaml import CParser  # pyright: ignore[reportAttributeAccessIssue]  (its stubs lack it)
from yaml.resolver import Resolver

from errors import Allowance, InputError, Unreadable, leads_out, open_file, printable, reading
from settings.configuration import leaves
from settings.values import LONGEST_TEXT, quoted

# The configuration in a run's folder.
RUN_CONFIG = "config.yaml"
# The largest file that is read, in bytes.
MOST_BYTES = 1 << 20
# The most values in a file. CLASS_WEIGHTS may have one per class.
_MOST_VALUES = 50_000
_DEEPEST = 20
# The longest number, in characters.
_LONGEST_NUMBER = 100
_TAG = "tag:yaml.org,2002:"
_SCALARS = {f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "timestamp", "str")}


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises:
        InputError: the file can't be read, isn't YAML, isn't a mapping, or is more than a
            configuration can be.
    """
    # A run's folder may be a stranger's, and later errors quote a file's keys. Another file was
    # named by the user.
    if path.name == RUN_CONFIG and leads_out(path):
        raise InputError(f"{path}: it is a link to a file outside its folder; name that file")
    with reading(path, "a configuration"):
        try:
            content = _Reader(_text(path)).read()
        except yaml.YAMLError as error:
            raise Unreadable(
                f"not valid YAML ({printable(' '.join(str(error).split()), 240)})"
            ) from None
        except RecursionError:
            raise Unreadable("not valid YAML (it is nested too deeply)") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a mapping of keys, found {type(content).__name__}")
    # A key may be set twice in two spellings: "TRAIN.LOSS: a" and "TRAIN: {LOSS: b}".
    counts = Counter(key for key, _ in leaves(content))
    if twice := next((key for key, count in counts.items() if count > 1), None):
        raise InputError(f"{path}: the key {printable(twice)} occurs twice; remove one of the two")
    return content


def _text(path: Path) -> str:
    """Returns the file's text. Reads at most MOST_BYTES + 1 bytes."""
    with open_file(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise Unreadable(
            f"has more than {MOST_BYTES} bytes, too many for a configuration; name a YAML file"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"the byte {data[error.start]:#04x}"
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            found = "UTF-16"
        raise Unreadable(
            f"isn't valid UTF-8: found {found} at position {error.start}; save it as UTF-8"
        ) from None


class _Reader(Composer, CParser, SafeConstructor, Resolver):
    """One document: its nodes within a depth, then its values, which are counted. libyaml's parser
    takes a sixth of the time of PyYAML's own.
    """

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        for part in (Composer, SafeConstructor, Resolver):
            part.__init__(self)
        self.depth = 0
        self.left = _MOST_VALUES
        self.letters = 8 * MOST_BYTES
        self.allowance = Allowance(len(text))

    def read(self) -> Any:
        """Returns the content of the document."""
        try:
            node = self.get_single_node()
            return None if node is None else self._value(node, ())
        finally:
            self.dispose()

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Stops at a depth and at an age that no configuration has."""
        self.allowance.take(0)
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unreadable(f"not valid YAML ({_place(parent)}it is nested too deeply)")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _value(self, node: yaml.Node, above: tuple[yaml.Node, ...]) -> Any:
        self.left -= 1
        if self.left < 0 or node in above:
            raise Unreadable(f"has more than {_MOST_VALUES} values, or an alias refers to itself")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag == f"{_TAG}seq" and isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*above, node)) for item in node.value]
        if node.tag != f"{_TAG}map" or not isinstance(node, yaml.MappingNode):
            raise Unreadable(
                f"not valid YAML ({_place(node)}found the tag {node.tag}; write plain values)"
            )
        found: dict[str, Any] = {}
        for key, value in node.value:
            name = self._key(key)
            if name in found:
                raise Unreadable(f"{_place(key)}the key {name} occurs twice; remove one of the two")
            found[name] = self._value(value, (*above, node))
        return found

    def _key(self, node: yaml.Node) -> str:
        if node.tag == f"{_TAG}merge":
            raise Unreadable(
                f"{_place(node)}the merge key << isn't supported; write the keys, or use BASE"
            )
        name = self._scalar(node) if isinstance(node, yaml.ScalarNode) else node
        if not isinstance(name, str):
            shown = "a list or a mapping"
            if name is not node:
                shown = f"{quoted(name)} ({type(name).__name__})"
            raise Unreadable(f"{_place(node)}found the key {shown}, expected text")
        return name

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag not in _SCALARS:
            raise Unreadable(
                f"not valid YAML ({_place(node)}found the tag {node.tag}; write plain values)"
            )
        most = LONGEST_TEXT if node.tag == f"{_TAG}str" else _LONGEST_NUMBER
        self.letters -= len(node.value)
        if len(node.value) > most or self.letters < 0:
            raise Unreadable(
                f"{_place(node)}found {len(node.value)} letters, expected a value of at most {most}"
            )
        try:
            return self.construct_object(node)
        except (ValueError, LookupError, OverflowError, AttributeError) as error:
            # PyYAML raises these itself if a text doesn't fit its tag: !!int '', !!timestamp abc.
            shown = quoted(node.value)
            if isinstance(error, ValueError):
                shown += f": {error}"
            kind = node.tag.removeprefix(_TAG)
            raise Unreadable(f"not valid YAML ({_place(node)}found no {kind} in {shown})") from None


def _place(node: Any) -> str:
    return f"line {node.start_mark.line + 1}: " if node is not None else ""
