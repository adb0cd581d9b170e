"""How YAML files and options become one configuration, which knows where each value came from."""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

from errors import InputError, printable
from settings import registry
from settings.architectures import all_keys, architecture
from settings.documents import read_yaml
from settings.idle import all_needs
from settings.keys import Key, Section, declared
from settings.names import TOOLKITS, images_of, instead, matching_file, tags
from settings.needs import Need
from settings.options import (
    COMMAND_LINE,
    CONFIG_DIR,
    WITH_VALUES,
    WRITTEN_OUT,
    Configuration,
    Given,
    Option,
    add_note,
    leaves,
    nearest_key,
    plain,
    value_sources,
)
from settings.paddlevit import programs, reading
from settings.paddlevit.absent import absent_task
from settings.values import quoted

DEFAULT = "the defaults"  # whom a run's file had a value from that nobody set
SIZE = "DATA.IMAGE_SIZE"  # a number, or [height, width]
# Removed keys with their defaults. Older runs wrote them into their config.yaml, whoever had set
# them.
REMOVED = {
    "DATA.FOLDS_SEED": 0,
    "DATA.FOLDS_GROUPS": None,
    "DATA.VAL_SPLIT_SEED": 0,
    "DATA.VAL_SPLIT_GROUPS": None,
    "DIST.STRATEGY.gradient_merge": False,
    "DIST.STRATEGY.gradient_merge_configs.k_steps": 1,
    "DIST.STRATEGY.recompute": False,
    "DIST.STRATEGY.amp": False,
    "DIST.STRATEGY.last_comm_group_size_MB": 1.0,
}
_LONGEST = 5000  # letters of a source: a path has 4,096 at most
_MOST_FILES = 100  # of one configuration


def find_config(cfg_file: str | os.PathLike, by: str = "") -> Path:
    """Returns the path of a configuration: a file, the name of a model's, or one relative to
    configs/.

    A name without a folder and without .yaml is that of a model, even if a file of the current
    folder is called so.

    Args:
        by: who names it, which begins the error.
    """
    path = Path(cfg_file)
    places = [path, CONFIG_DIR / path, CONFIG_DIR / f"{path}.yaml"]
    is_bare = path.name == os.fspath(cfg_file) and path.suffix not in (".yaml", ".yml")
    for place in places[is_bare:]:
        if os.path.isfile(place):  # Path.is_file raises for names that are too long
            return place
    name = path.name.removesuffix(".yaml")
    # PaddleViT keeps its files in configs/ itself: configs/NAME.yaml finds
    # configs/<family>/NAME.yaml here.
    is_name = path.parent.name in ("", "configs")
    # a list of all files takes ten times as long
    if is_name and (own := shipped_configs(glob.escape(name))):
        return own[-1]
    shipped = shipped_configs()
    if is_name and (found := matching_file(name, shipped)):
        return found
    if is_bare and os.path.isfile(path):
        return path
    plain, _, tag = path.name.partition(".")
    if tag not in ("", "yaml", "yml") and tags(plain) and not path.parent.name:
        raise InputError(
            f"{by}timm has no weights {printable(path.name)}; of {plain} it has {', '.join(tags(plain))}"
        )
    raise InputError(
        f"{by}no configuration file {printable(str(path))}{instead(path.name, shipped)}"
    )


def tag_options(cfg_file: str | os.PathLike) -> list[Option]:
    """Returns how images are prepared for the weights that a name of timm's has the tag of; none
    without a tag.
    """
    values = {} if find_config(cfg_file) == Path(cfg_file) else images_of(Path(cfg_file).name)
    return [Option(key, value, f"-cfg={cfg_file}") for key, value in values.items()]


def shipped_configs(name: str = "*") -> list[Path]:
    """Returns the files of models and recipes under configs/ whose name, without its ending,
    matches a pattern.
    """
    # Path.glob takes four times as long
    files = sorted(glob.glob(f"*/{name}.yaml", root_dir=CONFIG_DIR))
    return [CONFIG_DIR / file for file in files if not file.startswith(f"{reading.FOLDER.name}/")]


def shipped_model(name: str) -> str | None:
    """Returns what the model is called here that a name of ours, timm's or PaddleViT's means; None:
    there is none.
    """
    found = matching_file(name, model_files())
    return found and found.stem


def model_files() -> list[Path]:
    """Returns the files of the models under configs/, by name. Files of recipes/ train these; they
    are no others.
    """
    files = (file for file in shipped_configs() if file.parent.name != "recipes")
    return sorted(files, key=lambda file: file.stem)


def shipped_models() -> list[str]:
    """Returns the names of the models under configs/, sorted."""
    return [file.stem for file in model_files()]


class Keys:
    """All keys that there are, and how a configuration is given values for them.

    Args:
        sections: the classes that declare the shared keys. Those of the first stand in no section.
    """

    def __init__(self, sections: Sequence[type[Section]]) -> None:
        root, *others = sections
        keys = list(declared(root))
        for section in others:
            keys += declared(section, f"{section.__name__}.")
        self.shared = {key.name: key for key in keys}
        # What a key may choose is what is registered for it.
        for kind in registry.KINDS:
            chooser = self.shared[kind.key]
            self.shared[kind.key] = chooser._replace(choices=kind.names())
        registry.check_reads(self.shared)
        self.shared |= registry.component_keys()
        self._architectures: dict[str, Key] = {}
        self._defaults: dict[str, Any] = {}
        self._needs: dict[str, tuple[Need, ...]] = {}
        self.sections = {
            key[:dot] for key in self.shared for dot, letter in enumerate(key) if letter == "."
        }

    def tree(self) -> Configuration:
        """Returns the configuration of all defaults."""
        tree = Configuration()
        for name, key in self.shared.items():
            *above, last = name.split(".")
            node: CfgNode = tree
            for depth, part in enumerate(above):
                if part not in node:
                    node[part] = CfgNode() if depth else programs.Section(part)
                node = node[part]
            node[last] = key.default
        return tree

    @property
    def needs(self) -> dict[str, tuple[Need, ...]]:
        """Returns what each key needs to have an effect, by dotted key."""
        return self._of_all_keys()[1]

    @property
    def defaults(self) -> dict[str, Any]:
        """Returns every key's default; of a key that several architectures take, one's."""
        return self._of_all_keys()[0]

    def _of_all_keys(self) -> tuple[dict[str, Any], dict[str, tuple[Need, ...]]]:
        """Returns the defaults and the needs of the shared keys and of all architectures'."""
        architectures = all_keys()
        # It is another dictionary once a program has added an architecture.
        if self._architectures is not architectures:
            self._architectures = architectures
            keys = architectures | self.shared
            self._defaults = {name: key.default for name, key in keys.items()}
            self._needs = all_needs(keys)
        return self._defaults, self._needs

    def defaults_of(self, config: Configuration) -> dict[str, Any]:
        """Returns the defaults of the keys that a configuration has: its architecture's own among
        them.
        """
        own = architecture(config.MODEL.TYPE).arguments
        return {name: key.default for name, key in (self.shared | own).items()}

    def set(self, config: Configuration, key: str, value: Any, where: Given) -> None:
        """Sets one dotted key to the value, coerced to the key's type; errors name
        ``where.source``.
        """
        if where.source != COMMAND_LINE and key in self.sections:
            raise InputError(
                f"{where.source}: {key} is a section, which takes keys; found {quoted(value)}"
            )
        if key in all_keys():  # what it takes depends on the TYPE (settle)
            config.put(key, value, where)
            return
        if key not in self.shared:
            instead = (
                "; " + reading.PLACE if reading.has_key(key) else nearest_key(key, self.defaults)
            )
            raise InputError(f"{where.source}: unknown key {printable(key)}{instead}")
        value = self.shared[key].coerced(value, where.source)
        if key == SIZE and isinstance(value, list) and 0 < len(value) < 3 and len({*value}) == 1:
            value = value[0]  # a square is said in one way
        config.put(key, value, where)

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Checks that each key's value is one of its choices and in its range.

        Args:
            values: a configuration's, by dotted key.

        Raises:
            InputError: one isn't; the message names the key.
        """
        for name, key in self.shared.items():
            if expected := key.problem(values[name]):
                raise InputError(f"{name} is {quoted(values[name])}, expected {expected}")

    def write_out(self, config: Configuration, values: Mapping[str, Any], why: str) -> None:
        """Sets dotted keys to what follows from others, as if nobody had set them."""
        for key, value in values.items():
            self.set(config, key, value, Given(WRITTEN_OUT, WITH_VALUES, why))

    def merge_options(self, config: Configuration, options: Iterable[Option]) -> None:
        """Sets what the command line says."""
        level = _next_level(config)
        for key, value, by in options:
            self.set(config, key, value, Given(level, COMMAND_LINE, by))

    def merge_file(
        self,
        config: Configuration,
        path: Path,
        including: tuple[Path, ...] = (),
        read: list[Path] | None = None,
    ) -> None:
        """Sets what a YAML file says, and before it what its BASE files say.

        Args:
            including: the files whose BASE leads here.
            read: all files so far, each as often as it was read.
        """
        named = path
        path = path.resolve()
        read = [] if read is None else read
        read.append(path)
        if len(read) > _MOST_FILES:
            raise InputError(
                f"{path}: BASE leads to more than {_MOST_FILES} files, perhaps the same ones again and again;"
                " name fewer"
            )
        if path in including:
            raise InputError(f"{path}: BASE leads back to this file; take it out of BASE")
        content = read_yaml(named)
        _check_names(content.pop("NAMES", {}), path)
        kept, others = self._take_given(content, path)
        _check_type(content, path)
        without = content.pop("WITHOUT", None)
        # empty: another file has it beside its own BASE
        if without is not None and "BASE" not in content:
            raise InputError(
                f"{path}: WITHOUT removes keys that a BASE sets, but there is no BASE; add one"
            )
        if (reading.is_family(path, content) or "BASE" not in content) and self._merge_theirs(
            config, path, content
        ):
            return
        base = content.get("BASE") or []
        base = base if isinstance(base, list) else [base]
        if not all(isinstance(parent, str) for parent in base):
            raise InputError(f"{path}: BASE is {quoted(base)}, expected a file, or a list of files")
        for parent in base:
            if parent:
                beside = path.parent / parent
                file = beside if os.path.isfile(beside) else find_config(parent, f"{path}: BASE: ")
                self.merge_file(config, file, (*including, path), read)
        self._take_back(config, without, path)
        level = _next_level(config)
        default = self.defaults
        # A key of nobody's is named before one of PaddleViT's, which the file may have because it
        # is meant as theirs.
        values = self._set_in(content)
        if any(key not in default for key, _ in values):
            values.sort(key=lambda item: reading.has_key(item[0]))
        for key, value in values:
            if others == WRITTEN_OUT and key in REMOVED and value == REMOVED[key]:
                continue
            known = key if key in default else reading.own_key(key, value)
            own, first = kept.get(known, (others, ""))
            if own == WRITTEN_OUT:
                first = first or DEFAULT * (value == default.get(known))
            self.set(
                config,
                known,
                value,
                Given(own if own == WRITTEN_OUT else level + own, str(path), first),
            )

    def _merge_theirs(self, config: Configuration, path: Path, content: dict[str, Any]) -> bool:
        """Sets what a file of PaddleViT's says, and what its family's defaults are; returns whether
        it is one.
        """
        theirs, note = reading.read(path, content, dict(self._set_in(content)), self.defaults)
        if note:
            add_note(config, note)
        if theirs is None:
            return False
        config.families.append(theirs.family)
        family = f"PaddleViT's defaults (configs/paddlevit/{theirs.family}.yaml)"
        for key, value in theirs.values.items():
            self.set(
                config,
                key,
                value,
                Given(WRITTEN_OUT, str(path), family if key in theirs.defaults else ""),
            )
        return True

    def _take_given(
        self, content: dict[str, Any], path: Path
    ) -> tuple[dict[str, tuple[int, str]], int]:
        """Takes GIVEN out of a file: (the level and the source of the keys that it names, the other
        keys' level).

        A run's file has GIVEN, and every key; earlier releases wrote no sources into it, the first
        ones no GIVEN.
        """
        named = content.pop("GIVEN", None)
        keys = dict(leaves(content))
        if named is None:  # nobody writes half of the keys by hand
            return {}, WRITTEN_OUT if 2 * len(keys) > len(self.defaults) else 0
        found = (
            {k: v if isinstance(v, list) else [v, ""] for k, v in named.items()}
            if isinstance(named, dict)
            else {}
        )
        if isinstance(named, dict) and all(map(_is_source, found.values())):
            if absent := next((key for key in found if key not in keys), None):
                raise InputError(
                    f"{path}: GIVEN names {printable(absent)}, for which the file has no value; remove it there"
                )
            return {key: (level, first) for key, (level, first) in found.items()}, WRITTEN_OUT
        raise InputError(
            f"{path}: GIVEN is {quoted(named)}, expected the {{key: [level, source]}} that a run wrote; remove it"
        )

    def to_yaml(self, config: Configuration) -> str:
        """Returns the YAML of every key, and as GIVEN where the values came from, but for those
        that nobody set.
        """
        values = dict(leaves(config))
        default = self.defaults_of(config)
        sources = {
            key: [where.level, where.origin()]
            for key, where in value_sources(config).items()
            if where.level > WRITTEN_OUT or values[key] != default[key]
        }
        return (
            f"{yaml.safe_dump(plain(config), allow_unicode=True)}# Where each value came from that isn't a default:"
            " [level, source]. Of two levels, the higher was read later.\n"
            f"{yaml.safe_dump({'GIVEN': sources}, allow_unicode=True, default_flow_style=None, width=2 * _LONGEST)}"
        )

    def _take_back(self, config: Configuration, names: Any, path: Path) -> None:
        """Gives these keys, and those of these sections, their defaults again, as if nobody had set
        them.
        """
        names = [] if names is None else names
        default = self.defaults
        for name in names if isinstance(names, list) else [names]:
            keys = [key for key in default if f"{key}.".startswith(f"{name}.") and key != "BASE"]
            if not keys:
                raise InputError(
                    f"{path}: WITHOUT names {quoted(name)}, expected keys or sections such as TRAIN"
                )
            for key in keys:
                self.set(config, key, default[key], Given(WRITTEN_OUT, str(path)))
                # an architecture's gets its own default in the end (settle)
                del config.origins[key]

    def _set_in(self, content: dict[str, Any]) -> list[tuple[str, Any]]:
        """(dotted key, value) of a file's content; a section that is empty sets nothing."""

        # PaddleViT's are in 43 files: they are read for a key of nobody's alone
        def is_section(key: str) -> bool:
            return key in self.sections or (key not in self.defaults and key in reading.sections())

        return [
            (key, value)
            for key, value in leaves(content)
            if value is not None or not is_section(key)
        ]


def _check_names(found: Any, path: Path) -> None:
    """Raises InputError unless it is what ``settings.names`` reads in a shipped model's file."""
    if not isinstance(found, dict) or not found.keys() <= set(TOOLKITS):
        expected = ", ".join(f"{toolkit}: NAME" for toolkit in TOOLKITS)
        raise InputError(f"{path}: NAMES is {quoted(found)}, expected {{{expected}}}; leave it out")


def _check_type(content: dict[str, Any], path: Path) -> None:
    """Raises InputError where a file's MODEL.TYPE, or its task, isn't here.

    It comes before the check of the keys: an error about one of them would be misleading.
    """
    keys = dict(leaves(content))
    if "BASE" not in content and (line := absent_task(keys)):
        raise InputError(f"{path}: {line}")
    kind = keys.get("MODEL.TYPE")
    if isinstance(kind, str) and not reading.families(kind):
        architecture(kind, f"{path}: ")


def _is_source(found: list[Any]) -> bool:
    """Whether it is [level, source], as a run's file has it."""
    if len(found) != 2 or type(found[0]) is not int or not isinstance(found[1], str):
        return False
    level, first = found
    return (
        (WRITTEN_OUT if first else 0) <= level < 1000
        and first.isprintable()
        and len(first) <= _LONGEST
    )


def _next_level(config: Configuration) -> int:
    return 1 + max((where.level for where in value_sources(config).values()), default=WRITTEN_OUT)
