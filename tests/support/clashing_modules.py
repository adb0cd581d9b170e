"""Modules of another program that have the names of the toolkit's."""

CLASHING_MODULES = {
    "utils.py": "import config\nNAME = config.NAME.replace('config', 'utils')\n",
    "config.py": "NAME = 'their config'\n",
    "errors.py": "NAME = 'their errors'\n",
    "datasets.py": "NAME = 'their datasets'\ndef late():\n    import ops, options\n    return ops.NAME, options.NAME\n",
    "options.py": "NAME = 'their options'\n",
    "ops.py": "NAME = 'their ops'\n",
    "models/__init__.py": "NAME = 'their models'\n",
    "models/vit.py": "NAME = 'their vit'\n",
}
