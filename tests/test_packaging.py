"""The wheel in a clean directory, and what importing the package does not do."""

import itertools
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(code: str, cwd: Path, path: str = "", **environment: str) -> str:
    """Runs Python code in a process of its own; returns what it prints."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTHON"))}
    env |= {"PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd, env=env, check=True, text=True, stdout=subprocess.PIPE, timeout=300,
    ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of what is in the repository."""
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT],
        check=True, stdout=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    (path,) = out.glob("*.whl")
    return path


def test_wheel_is_named_for_the_distribution_and_any_platform(wheel):
    assert wheel.name == "jax_xcoll-0.1.0-py3-none-any.whl"


def test_wheel_holds_every_module_the_data_and_the_type_markers(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(base).as_posix()
        for base, package in ((ROOT, "xcoll"), (ROOT / "kernels", "xcoll_kernels"))
        for path in (base / package).rglob("*")
        if path.suffix in (".py", ".json", ".typed")
    }
    assert {"xcoll/py.typed", "xcoll_kernels/py.typed"} <= sources
    assert any(name.startswith("xcoll/hardware/") and name.endswith(".json") for name in sources)
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_imports_in_a_clean_directory(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import xcoll, xcoll_kernels, importlib.metadata as m, json;"
        "e, = m.distribution('jax-xcoll').entry_points;"
        "print(json.dumps([xcoll.__file__, xcoll_kernels.__file__, m.version('jax-xcoll'),"
        " e.name, e.load().__module__]))"
    )
    (tmp_path / "empty").mkdir()
    printed = json.loads(run(code, tmp_path / "empty", str(tmp_path / "site")))
    assert all(Path(file).is_relative_to(tmp_path / "site") for file in printed[:2])
    assert printed[2:] == ["0.1.0", "xcoll", "xcoll.cli"]


def test_the_hardware_tables_are_readable_from_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import xcoll; print(xcoll.Topology.parse('v5e:4x4', axes={'data': 16}))"
    assert run(code, tmp_path, str(tmp_path), JAX_PLATFORMS="cpu").strip()


WATCHED = """
import os, sys, warnings
import flax.nnx, jax, optax, rich  # what the dependencies do on import is theirs

before = {name: value for name, value in jax.config.values.items()}
environment, read = dict(os.environ), []

class Watched(type(os.environ)):
    def __getitem__(self, key):
        read.append(key)
        return super().__getitem__(key)

os.environ.__class__ = Watched
streams, path = (sys.stdout, sys.stderr), list(sys.path)
filters = list(warnings.filters)
import xcoll, xcoll_kernels
import xcoll.cli, xcoll.hlo, xcoll.aot
os.environ.__class__ = Watched.__mro__[1]

from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a device was queried"
assert not read, f"environment variables were read: {read}"
assert dict(os.environ) == environment, "the environment was changed"
assert jax.config.values == before, "jax's configuration was changed"
assert (sys.stdout, sys.stderr) == streams and sys.path == path
assert warnings.filters == filters
print("pure")
"""


def test_importing_is_pure(tmp_path):
    assert run(WATCHED, tmp_path, os.pathsep.join([str(ROOT), str(ROOT / "kernels")])) == "pure\n"


def test_constraints_pin_every_requirement_exactly():
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    for requirement in (*project["dependencies"], *extras):
        assert requirement.partition(">=")[0] in pins


def test_xcoll_version_is_the_distributions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    code = "import xcoll; print(getattr(xcoll, '__version__', None))"
    assert run(code, ROOT).strip() in (project["version"], "None")
