"""What benchmarks are asked for, and the one line that says what is wrong with it."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.options import Parser, output_file, parser, several, whole

ROOT = Path(__file__).parent.parent
SCRIPTS = ("audit", "convergence", "errors", "kernels", "overhead", "planner", "schedules")


def made() -> Parser:
    words = parser("What it is.\n\nMore.", rounds=7, fewest=2)
    words.add_argument("--elements", type=whole(8, 64, step=8), default=16, help="of each")
    words.add_argument("--ranks", type=several(whole(2)), default="2,3", help="several")
    words.add_argument("--file", type=output_file, help="to write")
    return words


def test_what_is_read():
    found = made().parse_args(["--elements", "24", "--ranks", "4,8", "--json"])
    assert (found.rounds, found.elements, found.ranks, found.json) == (7, 24, [4, 8], True)
    assert made().parse_args([]).ranks == [2, 3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rounds 1", "--rounds: must be a whole number of at least 2, not '1'"),
        ("--elements 12", "a whole number from 8 to 64, a multiple of 8, not '12'"),
        ("--elements 72", "a whole number from 8 to 64"),
        ("--elements -8", "a whole number from 8 to 64"),
        ("--elements ٨", "a whole number from 8 to 64"),
        ("--ranks 2,1", "a whole number of at least 2, not '1'"),
        ("--ranks ,", "nothing stands there"),
        ("--file /", "'/' is a directory"),
        ("--file /proc/none/x", "'/proc/none': No such file or directory"),
        ("--round 3", "unrecognized arguments"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        made().parse_args(words.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_file_to_be_written_has_its_directory_made(tmp_path):
    path = tmp_path / "new" / "figures.json"
    assert output_file(str(path)) == path and path.parent.is_dir() and not path.exists()


@pytest.mark.parametrize("words", [["--quick", "--size", "3"], ["--size", "3", "--quick"]])
def test_quick_changes_defaults_alone_wherever_it_stands(words):
    made = Parser({"size": 1, "steps": 2})
    for name in ("--size", "--steps"):
        made.add_argument(name, type=int, default=9)
    made.add_argument("--quick", action="store_true")
    found = made.parse_args(words)
    assert (found.size, found.steps) == (3, 2)
    assert made.parse_args(["--size", "4"]).size == 4


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_say_what_they_take_from_any_directory(script, tmp_path):
    command = [sys.executable, str(ROOT / "bench" / f"{script}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "the figures as JSON\n" in done.stdout
    assert not list(tmp_path.iterdir())
