"""The command line: tables, JSON, and one line for what is wrong."""

import json
import os
import subprocess
import sys

import pytest

from xcoll.cli import main
from xcoll.plan import Plan
from xcoll.policy import Choice
from xcoll.typed import read_choice

HOSTS = ["--topology", "2*cpu:4@200Mbit", "--axes", "host=2,device=4"]
SIXTEEN = ["--bytes", "16MiB", "--dtype", "float32"]


def run(capsys, *arguments):
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_table_of_the_plan_and_of_what_it_beat(capsys):
    code, out, err = run(capsys, "plan", "all_reduce", *SIXTEEN, *HOSTS)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    (chosen,) = [line for line in lines if "> hierarchical(native, native)" in line]
    assert "faster than native" in chosen
    (native,) = [line for line in lines if line.startswith("│ native ")]
    assert "28 MiB" in native, "bytes over each axis"
    assert sum("halving_doubling" in line for line in lines) >= 1
    assert "network of 2" in out, "the topology is shown"
    assert "all_reduce over 2 ranks of host" in out, "the stages are shown"


def test_json_is_a_plan(capsys):
    code, out, _ = run(capsys, "plan", "all_reduce", *SIXTEEN, *HOSTS, "--json")
    assert code == 0
    made = Plan.from_json(out)
    assert made.name == "hierarchical(native, native)"
    assert made.request.num_bytes == 16 * 2**20
    for candidate in json.loads(out)["candidates"]:
        assert candidate["reason"]
        assert candidate["predicted_time_ps"] > 0
        assert {axis for axis, _ in candidate["wire_bytes"]} == {"host", "device"}


def test_a_codec_between_hosts(capsys):
    code, out, err = run(capsys, "plan", "psum", *SIXTEEN, *HOSTS, "--codec", "host=int8")
    assert (code, err) == (0, "")
    (chosen,) = [line for line in out.splitlines() if "> hierarchical" in line]
    assert "/int8" in chosen
    # One or two roundings of at most 1/127 of what the ranks put into a block.
    assert "|error| <= 0.00787 x" in out or "|error| <= 0.0158 x" in out


def test_an_error_budget(capsys):
    _, out, _ = run(capsys, "plan", "psum", *SIXTEEN, *HOSTS, "--max-error", "0.001", "--json")
    made = Plan.from_json(out)
    assert made.is_lossy and 0 < made.max_error <= 0.001


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--codec", "int9"), "unknown codec 'int9'"),
        (("--codec", "hots=int8"), "Did you mean 'host'?"),
        (("--max-error", "-1"), "must be positive"),
        (("--codec", "int8", "--max-error", "1e-6"), "the best, direct(shots=1)/int8"),
    ],
)
def test_codecs_that_cannot_be(capsys, arguments, says):
    code, out, err = run(capsys, "plan", "psum", *SIXTEEN, *HOSTS, *arguments)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "collective", "op"),
    [
        ("psum", "all_reduce", "sum"),
        ("pmax", "all_reduce", "max"),
        ("psum_scatter", "reduce_scatter", "sum"),
        ("all_gather", "all_gather", "none"),
        ("pbroadcast", "broadcast", "none"),
    ],
)
def test_names_of_jax(capsys, name, collective, op):
    _, out, _ = run(capsys, "plan", name, *SIXTEEN, *HOSTS, "--json")
    request = Plan.from_json(out).request
    assert (request.collective, request.op) == (collective, op)


def test_options(capsys):
    _, out, _ = run(
        capsys, "plan", "all_reduce", *SIXTEEN, *HOSTS, "--over", "host", "--op", "max", "--json"
    )
    request = Plan.from_json(out).request
    assert (request.axes, request.op) == (("host",), "max")
    _, out, _ = run(
        capsys, "plan", "psum", *SIXTEEN, *HOSTS, "--algorithm", "tree(radix=4)", "--json"
    )
    assert Plan.from_json(out).name == "tree(radix=4)"
    _, out, _ = run(capsys, "plan", "psum", *SIXTEEN, *HOSTS, "--deterministic", "--json")
    assert Plan.from_json(out).stages[0].choice.name == "direct"
    _, out, _ = run(capsys, "plan", "psum", "--bytes", "1KB", "--topology", "v5e:4x4", "--json")
    request = Plan.from_json(out).request
    assert (request.axes, request.num_bytes, request.platform) == (("x", "y"), 1000, "tpu")
    _, out, _ = run(capsys, "plan", "pmin", *SIXTEEN, *HOSTS, "--op", "min", "--json")
    assert Plan.from_json(out).request.op == "min", "it may be said twice"


@pytest.mark.parametrize(
    ("text", "name", "itemsize"),
    [("f4", "float32", 4), (">i2", "int16", 2), ("bool", "bool", 1), ("bfloat16", "bfloat16", 2)],
)
def test_dtypes_by_jax_s_names(capsys, text, name, itemsize):
    code, out, _ = run(
        capsys, "plan", "psum", "--bytes", "16MiB", "--dtype", text, *HOSTS, "--json"
    )
    assert code == 0
    request = Plan.from_json(out).request
    assert (request.dtype, request.itemsize) == (name, itemsize)


def test_the_largest_payload_over_the_most_devices(capsys):
    largest = ["--bytes", "1048576GiB", "--topology", "2147483648*cpu:2147483648@1bit"]
    for name in ("psum", "all_gather", "pbroadcast", "pgather"):
        code, out, err = run(capsys, "plan", name, *largest)
        assert (code, err) == (0, "")
        assert out


FULLWIDTH_EIGHT = "\uff18"
BAD = [
    ([], "COMMAND"),
    (["plam"], "plam"),
    (["plan", "all_reduce", *HOSTS], "--bytes"),
    (["plan", "all_reduce", *SIXTEEN], "--topology"),
    (["plan", "all_reduc", *SIXTEEN, *HOSTS], "Did you mean 'all_reduce'"),
    (["plan", "psum", "--bytes", "16Q", *HOSTS], "16Q"),
    (["plan", "psum", "--bytes", "-4", *HOSTS], "bytes"),
    (["plan", "psum", "--bytes", "7", *HOSTS], "multiple of 4 bytes"),
    (["plan", "psum_scatter", "--bytes", "4", *HOSTS], "multiple of 32 bytes"),
    (["plan", "psum", *SIXTEEN, "--dtype", "float33", *HOSTS], "float33"),
    (["plan", "psum", *SIXTEEN, "--topology", "cpu:8x"], "character 7"),
    (["plan", "psum", *SIXTEEN, "--topology", "abacus:8"], "unknown hardware 'abacus'"),
    (["plan", "psum", *SIXTEEN, "--topology", "cpu:8", "--axes", "a=3"], "8 devices"),
    (["plan", "psum", *SIXTEEN, "--topology", "cpu:8", "--axes", "a"], "name=size"),
    (["plan", "psum", *SIXTEEN, "--topology", "cpu:8", "--axes", "a=2,a=4"], "twice"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--over", "hosts"], "Did you mean 'host'"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--op", "plus"], "'sum', 'max', 'min', 'prod'"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--algorithm", "rng"], "Did you mean 'ring'"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--algorithm", "bruck"], "bruck has no all_reduce"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--algorithm", "tree(radix=1)"], "at least 2"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--algorithm", "tree(1+1)"], "tree(radix=4)"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--algorithm", "tree(radix=True)"], "tree(radix=4)"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--algorithm", "a(" * 300 + ")" * 300], "--algorithm"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--algorithm", "(" * 5000], "--algorithm"),
    *(
        (["plan", "psum", *SIXTEEN, *HOSTS, "--dtype", dtype], f"--dtype {dtype!r}")
        for dtype in ("str", "object", "S3", "f4,i4", "(2,", "float128", "datetime64[s]", "", "O8")
    ),
    (["plan", "psum", "--bytes", "999999999999GiB", *HOSTS], "at most 1048576GiB"),
    (["plan", "psum", "--bytes", "1048577GiB", *HOSTS], "at most 1048576GiB"),
    (["plan", "psum", "--bytes", "4" * 5000, *HOSTS], "at most 1048576GiB"),
    (["plan", "psum", "--bytes", FULLWIDTH_EIGHT, *HOSTS], "no number of bytes"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--over", "host,host"], "'host' is there twice"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--over", ""], "unknown axis ''"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--axes", "host=\u00b2,device=4"], "name=size"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--axes", f"a={FULLWIDTH_EIGHT}"], "name=size"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--axes", "a=" + "8" * 5000], "name=size"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--axes", "a=0,b=8"], "name=size"),
    (["plan", "psum", *SIXTEEN, "--topology", f"cpu:{FULLWIDTH_EIGHT}"], "character 5"),
    (["plan", "psum", *SIXTEEN, "--topology", "cpu:" + "8" * 5000], "too large"),
    (["plan", "pmax", *SIXTEEN, *HOSTS, "--op", "min"], "pmax is a max"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--op", "max"], "psum is a sum"),
    (["plan", "psum", *SIXTEEN, *HOSTS, "--op", ""], "unknown op ''"),
    (["plan", "all_gather", *SIXTEEN, *HOSTS, "--op", "sum"], "combines nothing"),
]


@pytest.mark.parametrize(
    ("arguments", "says"), BAD, ids=[" ".join(a)[:120] or "none" for a, _ in BAD]
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, says):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("xcoll: error: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--help"], ["audit", "--help"], ["--version"]]
)
def test_help(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out


@pytest.mark.parametrize(
    "choice",
    [
        Choice("ring"),
        Choice("tree", (("radix", 4),)),
        Choice("hierarchical", (), (Choice("native"), Choice("tree", (("radix", 2),)))),
        Choice("hierarchical", (("num_segments", 4),)),
    ],
)
def test_choices_are_read_as_they_print(choice):
    assert read_choice(str(choice)) == choice


@pytest.mark.parametrize(
    "text",
    ["", "1", "tree(radix=x)", "a.b()", "tree(**x)", "tree(radix=True)", "__import__('os')()"],
)
def test_choices_are_nothing_else(text):
    with pytest.raises(ValueError, match="--algorithm"):
        read_choice(text)


def test_no_device_is_touched():
    # With a platform that does not exist, the first touch of a device would fail.
    script = (
        "import sys; from xcoll.cli import main;"
        f"sys.exit(main(['plan', 'psum', '--json', *{SIXTEEN!r}, *{HOSTS!r}]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JAX_PLATFORMS": "none_such"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stderr
    assert Plan.from_json(out.stdout).name == "hierarchical(native, native)"
