"""The toolkit as an installed package, and what pyproject.toml and the files of the project's habits say."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import warm
import yaml
from conftest import ROOT
from packaging.requirements import Requirement
from test_house import ROOMS

import ops

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TOOLKIT = [name for name in ROOMS if name not in ("examples/", "launch/")]  # rooms with a dot in them are files


def tracked():
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]
