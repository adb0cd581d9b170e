"""Merges YAML files and options into one configuration, which knows where each value came from."""

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

from errors import InputError, printable
from settings import registry
from settings.architectures import all_keys, architecture, architectures
from settings.configuration import (
    COMMAND_LINE,
    CONFIG_DIR,
    WITH_VALUES,
    WRITTEN_OUT,
    Configuration,
    Given,
    Option,
    add_note,
    leaves,
    plain,
    value_sources,
)
from settings.documents import read_yaml
from settings.idle import all_needs, with_tasks
from settings.keys import Key, Section, declared
from settings.names import (
    TOOLKITS,
    WEIGHT_SUFFIXES,
    hub_weights,
    images_of,
    instead,
    matching_file,
    tags,
)
from settings.needs import Need
from settings.paddlevit import programs, reading, segmentation
from settings.paddlevit.absent import absent_task
from settings.suggestions import nearest_key
from settings.tasks import check_tasks
from settings.values import quoted

# The source that a run's file names for a value that nobody set.
DEFAULT = "the defaults"
# A number, or [height, width].
SIZE = "DATA.IMAGE_SIZE"
# Keys of earlier releases with their defaults. Runs wrote them into their config.yaml whether
# anybody had set them or not, so a file may still have them at these values.
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
_MODEL_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)?")
# The longest source of a value, in characters. A path has 4,096 at most.
_LONGEST = 5000
# The most files that one configuration may be read from.
_MOST_FILES = 100


def find_config(cfg_file: str | os.PathLike, by: str = "") -> Path:
    """Returns the path of a configuration.

    ``cfg_file`` is a path, a path relative to configs/, or a model's name here, in timm or in
    PaddleViT. A name without a folder and without .yaml means a model, even if the current folder
    has a file of that name.

    Args:
        by: what names the file; errors begin with it.

    Raises:
        InputError: there is no such file and no such model.
    """
    path = Path(cfg_file)
    places = [path, CONFIG_DIR / path, CONFIG_DIR / f"{path}.yaml"]
    # A bare name means a model, whatever the current folder holds.
    is_bare = path.name == os.fspath(cfg_file) and path.suffix not in (".yaml", ".yml")
    if is_bare:
        places.remove(path)
    for place in places:
        # Path.is_file would raise for a name that is too long.
        if os.path.isfile(place):
            return place
    name = path.name.removesuffix(".yaml")
    # PaddleViT keeps its files in configs/ itself: configs/NAME.yaml finds
    # configs/<family>/NAME.yaml here.
    is_name = path.parent.name in ("", "configs")
    # Looking for one name takes a tenth of the time that a list of all files takes.
    if is_name and (files := shipped_configs(glob.escape(name))):
        return files[-1]
    shipped = shipped_configs()
    if is_name and (file := matching_file(name, shipped)):
        return file
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
    """Returns the options that the tag in a name of timm's stands for: how images are prepared for
    these weights. A name without a tag has none.
    """
    values = images_of(Path(cfg_file).name)
    # Without a tag, as most names are, no file is looked for.
    if not values or find_config(cfg_file) == Path(cfg_file):
        return []
    return [Option(key, value, f"-cfg={cfg_file}") for key, value in values.items()]


def shipped_configs(name: str = "*") -> list[Path]:
    """Returns the files of models and recipes under configs/.

    Args:
        name: a shell pattern of their names without .yaml.
    """
    # Path.glob takes four times as long.
    files = sorted(glob.glob(f"*/{name}.yaml", root_dir=CONFIG_DIR))
    return [CONFIG_DIR / file for file in files if not file.startswith(f"{reading.FOLDER.name}/")]


def shipped_model(name: str) -> str | None:
    """Returns the name here of the model that ``name`` means here, in timm or in PaddleViT; None if
    there is no such model.
    """
    file = matching_file(name, model_files())
    return file and file.stem


def weights_of_model(path: str | Path) -> str:
    """Returns ``hf-hub:timm/NAME.TAG`` for the name of a model, with or without a tag of timm's.

    It is "" for anything else, such as the path of a file or folder.

    Raises:
        InputError: it is the name of a model of which timm has no weights.
    """
    name = str(path)
    if not _MODEL_NAME.fullmatch(name) or name.endswith(WEIGHT_SUFFIXES):
        return ""
    if any(os.path.lexists(f"{name}{ending}") for ending in ("", *WEIGHT_SUFFIXES)):
        return ""
    file = matching_file(name, model_files())
    return hub_weights(name, file) if file else ""


def model_files() -> list[Path]:
    """Returns the files of the models under configs/, sorted by name. The files of recipes/,
    pretrain/ and segmentation/ aren't among them: they train these models.
    """
    others = ("recipes", "pretrain", "segmentation")
    files = (file for file in shipped_configs() if file.parent.name not in others)
    return sorted(files, key=lambda file: file.stem)


def segmentation_files() -> list[Path]:
    """Returns the files of the segmentation models under configs/, sorted by name."""
    return [file for file in shipped_configs() if file.parent.name == "segmentation"]


def shipped_models() -> list[str]:
    """Returns the names of the models under configs/, sorted."""
    return [file.stem for file in model_files()]


class Keys:
    """All keys, and how a configuration gets values for them.

    Args:
        sections: the classes that declare the shared keys. The keys of the first class stand at the
            top of the tree, in no section.

    Attributes:
        shared: the keys that all architectures have, with those of components, by dotted key.
        sections: the dotted names of all sections.
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
        registry.check_keys(self.shared)
        check_tasks(self.shared)
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

    def needs_of(self, config: Configuration) -> dict[str, tuple[Need, ...]]:
        """Returns what each key of a configuration needs: of MODEL's, what its architecture says."""
        own = architecture(config.MODEL.TYPE).arguments
        return self.needs | with_tasks({name: key.needs for name, key in own.items()})

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
            keys = self.shared | architectures
            self._defaults = {name: key.default for name, key in keys.items()}
            self._needs = all_needs(keys)
        return self._defaults, self._needs

    def defaults_of(self, config: Configuration) -> dict[str, Any]:
        """Returns the defaults of the keys that a configuration has: the shared ones and those of
        its architecture.
        """
        own = architecture(config.MODEL.TYPE).arguments
        return {name: key.default for name, key in (self.shared | own).items()}

    def set(self, config: Configuration, key: str, value: Any, where: Given) -> None:
        """Sets one dotted key to the value in the key's type.

        Raises:
            InputError: there is no such key, or it takes no such value; the message begins with
                ``where.source``.
        """
        if where.source != COMMAND_LINE and key in self.sections:
            raise InputError(
                f"{where.source}: {key} is a section and needs keys; found {quoted(value)}"
            )
        # What an architecture's key takes depends on MODEL.TYPE, which may still change
        # (``keep_model_keys``).
        if key in all_keys():
            config.put(key, value, where)
            return
        if key not in self.shared:
            advice = nearest_key(key, self.defaults)
            if reading.has_key(key):
                advice = f"; {reading.PLACE}"
            raise InputError(f"{where.source}: unknown key {printable(key)}{advice}")
        value = self.shared[key].coerced(value, where.source)
        if key == SIZE and isinstance(value, list) and 0 < len(value) < 3 and len({*value}) == 1:
            # A square has one form, so that configurations can be compared.
            value = value[0]
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
        """Sets dotted keys to values that follow from others; they count as set by nobody."""
        for key, value in values.items():
            self.set(config, key, value, Given(WRITTEN_OUT, WITH_VALUES, why))

    def merge_options(self, config: Configuration, options: Iterable[Option]) -> None:
        """Sets the options of a command line."""
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
        """Sets the keys of a YAML file, and before them those of its BASE files.

        Args:
            including: the files whose BASE led here.
            read: all files so far, each as often as it was read.

        Raises:
            InputError: a file can't be read, or has a key or a value that isn't one.
        """
        given_path = path
        path = path.resolve()
        read = [] if read is None else read
        read.append(path)
        if len(read) > _MOST_FILES:
            raise InputError(
                f"{path}: BASE includes more than {_MOST_FILES} files; check for repeated ones,"
                " and name fewer"
            )
        if path in including:
            raise InputError(f"{path}: BASE includes this file itself; remove it from BASE")
        content = read_yaml(given_path)
        _check_names(content.pop("NAMES", {}), path)
        sources, level_of_others = self._take_given(content, path)
        _check_type(content, path)
        without = content.pop("WITHOUT", None)
        # An empty BASE counts: another file may have it beside a BASE of its own.
        if without is not None and "BASE" not in content:
            raise InputError(f"{path}: WITHOUT needs a BASE whose keys it removes; add one")
        may_be_paddlevits = reading.is_family(path, content) or "BASE" not in content
        if may_be_paddlevits and self._merge_paddlevits(config, path, content):
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
        self._drop_keys(config, without, path)
        first_level = _next_level(config)
        defaults = self.defaults
        values = self._values_in(content)
        # The file may be meant as PaddleViT's and have some of its keys. An unknown key is reported
        # first, because that is the one to correct.
        if any(key not in defaults for key, _ in values):
            values.sort(key=lambda item: reading.has_key(item[0]))
        for key, value in values:
            if level_of_others == WRITTEN_OUT and key in REMOVED and value == REMOVED[key]:
                continue
            if key not in defaults:
                key = reading.own_key(key, value)
            level, source = sources.get(key, (level_of_others, ""))
            if level != WRITTEN_OUT:
                level += first_level
            elif not source and value == defaults.get(key):
                source = DEFAULT
            self.set(config, key, value, Given(level, str(path), source))

    def _merge_paddlevits(self, config: Configuration, path: Path, content: dict[str, Any]) -> bool:
        """Sets the keys of a file of PaddleViT's, over its family's defaults.

        Returns:
            whether the file is one of PaddleViT's. If it isn't, nothing is set.
        """
        values = dict(self._values_in(content))
        file, note = reading.read(path, content, values, self.defaults)
        if note:
            add_note(config, note)
        if file is None:
            return False
        config.families.append(file.family)
        for key, value in file.values.items():
            source = ""
            if key in file.defaults:
                source = f"PaddleViT's defaults (configs/paddlevit/{file.family}.yaml)"
            self.set(config, key, value, Given(WRITTEN_OUT, str(path), source))
        return True

    def _take_given(
        self, content: dict[str, Any], path: Path
    ) -> tuple[dict[str, tuple[int, str]], int]:
        """Takes GIVEN out of the content of a file.

        A run's config.yaml has every key. GIVEN says which of them somebody had set, and where.
        Earlier releases wrote levels without sources, the first ones no GIVEN.

        Returns:
            The level and the source of each key that GIVEN names, and the level of the other keys.
        """
        given = content.pop("GIVEN", None)
        keys = dict(leaves(content))
        if given is None:
            # Nobody writes half of all keys by hand: the file is a run's.
            return {}, WRITTEN_OUT if 2 * len(keys) > len(self.defaults) else 0
        sources = {}
        if isinstance(given, dict):
            # Earlier releases wrote the level alone.
            sources = {
                key: entry if isinstance(entry, list) else [entry, ""]
                for key, entry in given.items()
            }
        if not isinstance(given, dict) or not all(map(_is_source, sources.values())):
            raise InputError(
                f"{path}: GIVEN is {quoted(given)}, expected the {{key: [level, source]}} that a "
                "run wrote; remove it"
            )
        for key in sources:
            if key not in keys:
                raise InputError(
                    f"{path}: GIVEN names {printable(key)}, for which the file has no value; "
                    "remove it there"
                )
        return {key: (level, source) for key, (level, source) in sources.items()}, WRITTEN_OUT

    def to_yaml(self, config: Configuration) -> str:
        """Returns the YAML of every key, and below it GIVEN: where the values came from that
        somebody set.
        """
        values = dict(leaves(config))
        defaults = self.defaults_of(config)
        sources = {
            key: [source.level, source.origin()]
            for key, source in value_sources(config).items()
            if source.level > WRITTEN_OUT or values[key] != defaults[key]
        }
        keys = yaml.safe_dump(plain(config), allow_unicode=True)
        given = yaml.safe_dump(
            {"GIVEN": sources}, allow_unicode=True, default_flow_style=None, width=2 * _LONGEST
        )
        return (
            f"{keys}# Where each value came from that isn't a default: [level, source]. Of two "
            f"levels, the higher was read later.\n{given}"
        )

    def _drop_keys(self, config: Configuration, without: Any, path: Path) -> None:
        """Gives the keys of WITHOUT their defaults again, as if nobody had set them.

        Args:
            without: a key or a section, a list of them, or None.
        """
        defaults = self.defaults
        names = [] if without is None else without
        for name in names if isinstance(names, list) else [names]:
            keys = [key for key in defaults if f"{key}.".startswith(f"{name}.") and key != "BASE"]
            if not keys:
                raise InputError(
                    f"{path}: WITHOUT names {quoted(name)}, expected keys or sections such as TRAIN"
                )
            for key in keys:
                self.set(config, key, defaults[key], Given(WRITTEN_OUT, str(path)))
                # Without an origin, an architecture's key gets the architecture's default in the
                # end (``keep_model_keys``).
                del config.origins[key]

    def _values_in(self, content: dict[str, Any]) -> list[tuple[str, Any]]:
        """Returns (dotted key, value) of a file's content. A section that is empty sets nothing."""

        def is_section(key: str) -> bool:
            if key in self.sections:
                return True
            # Reading PaddleViT's files takes time, so only an unknown key has them read.
            return key not in self.defaults and key in reading.sections()

        return [
            (key, value)
            for key, value in leaves(content)
            if value is not None or not is_section(key)
        ]


def _check_names(names: Any, path: Path) -> None:
    """Checks that NAMES is what ``settings.names`` reads in a shipped model's file.

    Raises:
        InputError: it isn't.
    """
    if not isinstance(names, dict) or not names.keys() <= set(TOOLKITS):
        expected = ", ".join(f"{toolkit}: NAME" for toolkit in TOOLKITS)
        raise InputError(f"{path}: NAMES is {quoted(names)}, expected {{{expected}}}; leave it out")


def _check_type(content: dict[str, Any], path: Path) -> None:
    """Checks that a file's architecture and task are supported. This comes before the check of its keys,
    because an error about one of them would be misleading.

    Raises:
        InputError: one isn't supported.
    """
    keys = dict(leaves(content))
    may_be_absent = "BASE" not in content and not segmentation.is_segmentation(keys)
    if may_be_absent and (line := absent_task(keys)):
        raise InputError(f"{path}: {line}")
    kind = keys.get("MODEL.TYPE")
    if not isinstance(kind, str) or kind.lower() in architectures():
        return
    # This comes last, because it reads all of PaddleViT's files.
    if not reading.families(kind):
        architecture(kind, f"{path}: ")


def _is_source(entry: list[Any]) -> bool:
    """Returns whether an entry of GIVEN is [level, source], as runs write it."""
    if len(entry) != 2 or type(entry[0]) is not int or not isinstance(entry[1], str):
        return False
    level, source = entry
    # A value that was only written out has a source, or it wouldn't be listed.
    lowest = WRITTEN_OUT if source else 0
    return lowest <= level < 1000 and source.isprintable() and len(source) <= _LONGEST


def _next_level(config: Configuration) -> int:
    """Returns a level above those of all values that the configuration was given."""
    levels = (source.level for source in value_sources(config).values())
    return 1 + max(levels, default=WRITTEN_OUT)
