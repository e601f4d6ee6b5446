"""The examples in the docstrings of every module, and those of the README."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import xcoll

README = Path(__file__).parent.parent / "README.md"
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = ["xcoll", *(m.name for m in pkgutil.walk_packages(xcoll.__path__, "xcoll."))]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=FLAGS).failed == 0


def test_the_python_of_the_readme_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 2
    exec(compile("\n".join(blocks), str(README), "exec"), {})
