"""The examples in the docstrings of every module, and those of the README."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import xcoll

README = Path(__file__).parent.parent / "README.md"
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = ["xcoll", *(m.name for m in pkgutil.walk_packages(xcoll.__path__, "xcoll."))]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=FLAGS).failed == 0


def test_readme():
    failed, tried = doctest.testfile(str(README), module_relative=False, optionflags=FLAGS)
    assert failed == 0 and tried > 0
