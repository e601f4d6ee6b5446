"""``xcoll audit``: the table, JSON, budgets, comparisons, and what goes wrong in users' files."""

import json
import os
import subprocess
import sys

import jax
import pytest
from audits import audit, row

from xcoll.cli import main
from xcoll.hlo.result import Audit

PROGRAM = """\
import dataclasses
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import beside

print("printed as it is imported")


@dataclasses.dataclass
class Config:
    rows: "int" = 8 * beside.RANKS


def step(mesh):
    print("printed as it is made")

    def sum_of_shards(x):
        return jax.lax.psum(x, "data")

    x = jax.ShapeDtypeStruct(
        (Config().rows, 128), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    return jax.shard_map(sum_of_shards, mesh=mesh, in_specs=P("data"), out_specs=P()), (x,)


def nothing(mesh):
    return None


def no_tuple(mesh):
    return jax.jit(lambda x: x), jax.ShapeDtypeStruct((8,), jnp.float32)


def two(mesh, other):
    return None


def fails(mesh):
    raise KeyError("a mistake of the user")


def fails_as_it_is_traced(mesh):
    def fn(x):
        return x @ x

    return fn, (jax.ShapeDtypeStruct((8, 3), jnp.float32),)


def too_many(mesh):
    return jax.jit(lambda x: x), (jnp.ones(8), jnp.ones(8))


def no_array(mesh):
    return jax.jit(lambda x: x), ("text",)


def exits(mesh):
    raise SystemExit(0)


def too_large(mesh):
    x = jax.ShapeDtypeStruct((2**18, 2**18), jnp.float32, sharding=NamedSharding(mesh, P()))
    return lambda x: x + 1, (x,)


small = 3

if __name__ == "__main__":
    raise AssertionError("it is not run as a script")
"""
PSUM_LINE = 1 + PROGRAM.splitlines().index('        return jax.lax.psum(x, "data")')


@pytest.fixture(autouse=True, scope="module")
def eight_devices():
    """The devices of this process are there before a command can ask for another number."""
    assert len(jax.devices()) == 8


EIGHT = ["--topology", "cpu:8", "--mesh", "data=8"]


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    yield
    sys.modules.pop("beside", None)


@pytest.fixture
def program(tmp_path):
    (tmp_path / "beside.py").write_text("RANKS = 8\n")
    path = tmp_path / "steps.py"
    path.write_text(PROGRAM)
    return str(path)


def run(capsys, *arguments):
    code = main(["audit", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


# Each of 8 ranks sums f32[8, 128]: 4096 bytes, of which a ring sends 2 x 7 / 8 = 7168.
def test_json_is_an_audit_and_nothing_else(capsys, program):
    code, out, err = run(capsys, f"{program}:step", *EIGHT, "--json")
    assert code == 0
    audited = Audit.from_json(out)
    (found,) = audited.rows
    assert (found.kind, found.axes, found.num_bytes) == ("all-reduce", ("data",), 4096)
    assert (audited.wire_bytes, audited.axis_sizes) == ({"data": 7168}, {"data": 8})
    assert (found.source, found.made_by) == (f"{program}:{PSUM_LINE}", "user")
    assert err == "printed as it is imported\nprinted as it is made\n"


def test_table(capsys, program):
    code, out, _ = run(capsys, f"{program}:step", *EIGHT)
    assert code == 0
    assert "all-reduce" in out and "7 KiB" in out and f"steps.py:{PSUM_LINE}" in out
    assert "printed" not in out
    assert all(line == line.rstrip() for line in out.splitlines()), "no blanks fill the lines"


def test_hardware_that_is_not_there(capsys, program):
    code, out, _ = run(
        capsys, f"{program}:step", "--topology", "v5e:2x4", "--mesh", "data=8", "--json"
    )
    assert code == 0
    audited = Audit.from_json(out)
    assert audited.topology.startswith("v5e:2x4")
    assert audited.wire_bytes == {"data": 7168}
    assert audited.exposed_s > 0
    assert audited.memory.arguments == 4096


def test_hosts_and_their_rate(capsys, program):
    _, out, _ = run(
        capsys,
        f"{program}:step",
        "--topology",
        "2*cpu:4@200Mbit",
        "--mesh",
        "data=8",
        "--json",
    )
    audited = Audit.from_json(out)
    # Each host has to send as much as its sum of 4096 B to the other, at 25 MB/s, however it does.
    assert audited.topology.startswith("2*cpu:4@200Mbit")
    assert audited.communication_s > 4096 / 25e6


def test_budget_kept(capsys, program, tmp_path):
    budget = tmp_path / "b.toml"
    budget.write_text('[wire_bytes]\ndata = "7KiB"\n[count]\nall-reduce = 1\nall-gather = 0\n')
    code, out, _ = run(capsys, f"{program}:step", *EIGHT, "--budget", str(budget))
    assert code == 0
    assert out.splitlines()[-1] == "b.toml: 3 limits kept"
    code, out, _ = run(capsys, f"{program}:step", *EIGHT, "--budget", str(budget), "--json")
    assert code == 0 and Audit.from_json(out).rows


def test_budget_broken(capsys, program, tmp_path):
    budget = tmp_path / "b.toml"
    budget.write_text('[wire_bytes]\ndata = "4KiB"\n[count]\ntotal = 0\nall-gather = 0\n')
    code, out, err = run(capsys, f"{program}:step", *EIGHT, "--budget", str(budget), "--json")
    assert code == 1
    assert Audit.from_json(out).rows, "the audit is printed all the same"
    assert err.splitlines()[2:] == [
        "xcoll: b.toml is broken",
        "wire_bytes.data: 7 KiB measured, 4 KiB allowed",
        f"    7 KiB (100%): {program}:{PSUM_LINE} all-reduce, made by user",
        "count.total: 1 measured, 0 allowed",
        f"    1 (100%): {program}:{PSUM_LINE} all-reduce, made by user",
    ]


def test_timeline(capsys, program, tmp_path):
    path = tmp_path / "out.json"
    code, _, _ = run(capsys, f"{program}:step", *EIGHT, "--timeline", str(path))
    assert code == 0
    assert json.loads(path.read_text())["traceEvents"]


def test_progress_is_shown_to_who_looks_on(capsys, program, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, err = run(capsys, f"{program}:step", *EIGHT, "--json")
    assert f"compiling {program}:step for cpu:8" in err.replace("\n", "")
    assert Audit.from_json(out).rows


def test_compare(capsys, tmp_path):
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    first, sent = audit(row("a")), {"data": 1537, "model": 0}
    second = audit(row("a"), row("g", "all-gather", source="[m].py:3"), wire_bytes=sent)
    for path, audited in zip(paths, (first, second), strict=True):
        with open(path, "w") as file:
            file.write(audited.to_json())
    code, out, err = run(capsys, "--compare", *paths)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "all-gather 0 1 +1" in lines
    (appeared,) = [line for line in lines if line.startswith("appeared")]
    assert "all-gather" in appeared and "[m].py:3" in appeared
    code, out, _ = run(capsys, "--compare", *paths, "--json")
    assert code == 0
    (site,) = [s for s in json.loads(out)["sites"] if s["what"] != "same"]
    assert (site["what"], site["kind"]) == ("appeared", "all-gather")


FILE = "PROGRAM"
BAD = [
    ([], "required: PATH.py:NAME, --topology, --mesh"),
    ([f"{FILE}:step"], "required: --topology, --mesh"),
    (["steps.py", *EIGHT], "write PATH.py:NAME"),
    (["none_such.py:step", *EIGHT], "there is no file"),
    ([f"{FILE}:stpe", *EIGHT], "steps.py: unknown function 'stpe'; valid: 'step', 'nothing'"),
    ([f"{FILE}:small", *EIGHT], "unknown function 'small'"),
    ([f"{FILE}:nothing", *EIGHT], "returned None; must return (fn, args)"),
    ([f"{FILE}:no_tuple", *EIGHT], "must return (fn, args), a function and the tuple of"),
    ([f"{FILE}:two", *EIGHT], "must take one argument, the mesh"),
    ([f"{FILE}:exits", *EIGHT], "called sys.exit(0)"),
    ([f"{FILE}:too_many", *EIGHT], ":too_many: "),
    ([f"{FILE}:step", "--topology", "cpu:8x", "--mesh", "data=8"], "character 7"),
    ([f"{FILE}:step", "--topology", "v5f:8", "--mesh", "data=8"], "unknown hardware 'v5f'"),
    ([f"{FILE}:step", "--topology", "cpu:8", "--mesh", "data=4"], "8 devices"),
    ([f"{FILE}:step", "--topology", "v5e:2x4", "--mesh", "data=4"], "make 4 devices, there are 8"),
    ([f"{FILE}:step", "--topology", "cpu:8", "--mesh", "data"], "--mesh data: 'data' is no name"),
    ([f"{FILE}:step", "--topology", "b200:8", "--mesh", "data=8"], "nothing here compiles for"),
    ([f"{FILE}:step", "--topology", "cpu:16", "--mesh", "data=16"], "needs 16 CPU devices"),
    ([f"{FILE}:step", "--topology", "cpu:99999", "--mesh", "data=99999"], "1024 at most"),
    ([f"{FILE}:step", *EIGHT, "--budget", "none_such.toml"], "none_such.toml: No such file"),
    ([f"{FILE}:step", *EIGHT, "--timeline", "none/such.json"], "there is no directory"),
    ([f"{FILE}:step", *EIGHT, "--timeline", "/"], "a file is expected"),
    (["--compare", "none_such.json", "b.json"], "none_such.json: No such file"),
    (["--compare", "a.json"], "expected 2 arguments"),
    (["--compare", "a", "b", "--mesh", "data=8"], "takes two audits, and not --mesh"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[says[:40] for _, says in BAD])
def test_bad_input_is_one_line_and_exit_code_2(capsys, program, arguments, says):
    code, out, err = run(capsys, *(a.replace(FILE, program) for a in arguments))
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("printed")]
    assert len(lines) == 1 and lines[0].startswith("xcoll: error: ") and says in lines[0]


def test_a_budget_that_is_wrong_is_said_before_anything_is_compiled(capsys, tmp_path):
    budget = tmp_path / "b.toml"
    for text, says in (
        ("[wire_bytes]\ndta = 1\n", "b.toml [wire_bytes]: unknown axis 'dta'; valid: 'data'"),
        ("[count]\nall-gathers = 1\n", "Did you mean 'all-gather'?"),
        ("[counts]\n", "unknown table 'counts'"),
    ):
        budget.write_text(text)
        code, out, err = run(capsys, "none_such.py:step", *EIGHT, "--budget", str(budget))
        assert (code, out, err.count("\n")) == (2, "", 1) and says in err


def test_json_that_is_no_audit(capsys, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{}")
    code, out, err = run(capsys, "--compare", str(path), str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"xcoll: error: {path}: Audit.from_json: not an audit")


@pytest.mark.parametrize(
    ("name", "says", "last"),
    [
        ("fails", "raise KeyError(", "KeyError: 'a mistake of the user'"),
        ("fails_as_it_is_traced", "return x @ x", "TypeError: dot_general requires"),
    ],
)
def test_failures_of_the_user_s_code_have_its_traceback(capsys, program, name, says, last):
    code, out, err = run(capsys, f"{program}:{name}", *EIGHT)
    assert (code, out) == (2, "")
    assert "Traceback (most recent call last)" in err and says in err
    assert f'File "{program}"' in err
    assert os.path.join("xcoll", "commands") not in err, "xcoll's own frames are left out"
    line = err.splitlines()[-1]
    assert line.startswith(f"xcoll: error: {program}:{name}: failed, as shown above: {last}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import none_such\n", "ModuleNotFoundError: No module named 'none_such'"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("\n\n1 / 0\n", "line 3, in <module>"),
    ],
)
def test_files_that_cannot_be_imported(capsys, tmp_path, text, says):
    path = tmp_path / "broken.py"
    path.write_text(text)
    code, out, err = run(capsys, f"{path}:step", *EIGHT)
    assert (code, out) == (2, "")
    assert says in err and str(path) in err
    assert "xcoll/commands" not in err and "frozen importlib" not in err
    assert err.splitlines()[-1].startswith(f"xcoll: error: {path}:step: failed, as shown above: ")


def test_an_argument_that_is_no_array(capsys, program):
    code, out, err = run(capsys, f"{program}:no_array", *EIGHT)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"xcoll: error: {program}:no_array: Error interpreting")


def test_a_file_that_exits(capsys, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("raise SystemExit(0)\n")
    code, out, err = run(capsys, f"{path}:step", *EIGHT)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert 'put what it runs as a script under if __name__ == "__main__":' in err


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_that_no_one_reads_changes_no_exit_code(tmp_path, as_json):
    path = tmp_path / "a.json"
    path.write_text(audit(row("a")).to_json())
    arguments = ["audit", "--compare", str(path), str(path), *as_json]
    with subprocess.Popen(
        [sys.executable, "-m", "xcoll.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=120)) == ("", 0)


def test_what_the_compiler_refuses(capsys, program):
    # f32[2^18, 2^18] takes 256 GiB; a v5e chip has 16.
    code, out, err = run(
        capsys, f"{program}:too_large", "--topology", "v5e:1x1", "--mesh", "data=1"
    )
    assert (code, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith(f"xcoll: error: {program}:too_large: the compiler refused it: ")
    assert "RESOURCE_EXHAUSTED" in line and "Ran out of memory" in line
    assert "Traceback" not in err


def test_in_a_shell_with_more_devices_than_there_are(program):
    # jax_num_cpu_devices is set before the first device is used, and no accelerator looked for.
    with open(os.path.join(os.path.dirname(program), "beside.py"), "w") as file:
        file.write("RANKS = 16\n")
    environment = {**os.environ, "JAX_PLATFORMS": "none_such"}
    environment.pop("XLA_FLAGS", None)
    arguments = [f"{program}:step", "--topology", "cpu:16", "--mesh", "data=16", "--json"]
    out = subprocess.run(
        [sys.executable, "-m", "xcoll.cli", "audit", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    # 2 x 15 / 16 x 4096
    assert Audit.from_json(out.stdout).wire_bytes == {"data": 7680}
