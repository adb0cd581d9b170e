"""The keys of the configuration, for tests that try each of them."""

from config import _KEYS, get_config
from settings.configuration import leaves

DEFAULTS = dict(leaves(get_config()))


def met(key, values):
    """Returns whether a key's needs are met, given the values of all keys."""
    return all(need.met(values) for need in _KEYS.needs[key])
