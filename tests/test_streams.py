"""Standard output is Python's alone."""

import subprocess
import sys

from xcoll.streams import python_alone

SCRIPT = """
import os, sys
from xcoll.streams import python_alone

print("before")
with python_alone():
    print("within, ", end="")
    os.write(1, b"not Python's\\n")  # as a library of C++ does
    print("é")
    assert not sys.stdout.isatty()
os.write(1, b"after\\n")
"""


def test_what_is_not_pythons_stays_off_standard_output():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    assert done.stdout.decode().split("\n") == ["before", "within, é", "after", ""]
    assert not done.stderr


def test_output_that_is_captured_already_stays_where_it_is(capsys):
    with python_alone():
        print("captured")
    assert capsys.readouterr().out == "captured\n"
