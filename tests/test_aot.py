"""Compile-only meshes: every kind of topology compiles, and bad ones say what is wrong."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xcoll import aot, hlo, targets
from xcoll.hardware.tables import kind_of_device
from xcoll.memory import Memory, memory_of
from xcoll.topology import Topology

KINDS = [
    # topology, mesh axes, device kind, granules (slices or hosts)
    ("v5e:4x4", (4, 4), "TPU v5 lite", 1),
    ("v5p:4x4x4", (8, 8), "TPU v5", 1),
    ("2*v5e:2x2", (2, 4), "TPU v5 lite", 2),
    ("v6e:4x4", (2, 8), "TPU v6 lite", 1),
    ("tpu7x:2x2x1", (2, 4), "TPU7x", 1),
    ("h100:8", (2, 4), "NVIDIA H100 80GB HBM3", 1),
    ("4*h100:8", (4, 8), "NVIDIA H100 80GB HBM3", 4),
    ("h200:8", (2, 4), "NVIDIA H200 141GB HBM3e", 1),
    ("2*h200:4", (2, 4), "NVIDIA H200 141GB HBM3e", 2),
]


@pytest.mark.parametrize(("topology", "shape", "kind", "granules"), KINDS)
def test_a_mesh_of_every_kind_compiles_a_program(topology, shape, kind, granules):
    mesh = aot.mesh(topology, shape, ("outer", "inner"))
    assert mesh.axis_names == ("outer", "inner")
    assert mesh.devices.shape == shape
    assert {d.device_kind for d in mesh.devices.flat} == {kind}
    assert len(set(mesh.devices.flat)) == mesh.devices.size
    assert len(aot.devices(topology)) == granules

    def there_and_back(x):
        mine = lax.psum_scatter(x, "inner", scatter_dimension=0, tiled=True)
        return lax.all_gather(mine, "inner", axis=0, tiled=True)

    program = aot.compile(
        there_and_back,
        jax.ShapeDtypeStruct((512, 128), jnp.float32),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    rows = hlo.collectives(program)
    assert [(r.kind, r.dtypes, hlo.axes_of(r, mesh)) for r in rows] == [
        ("reduce-scatter", ("f32",), ("inner",)),
        ("all-gather", ("f32",), ("inner",)),
    ]
    assert [r.operand_bytes for r in rows] == [512 * 128 * 4, 512 * 128 * 4 // shape[1]]
    assert program.memory.arguments == 512 * 128 * 4
    # The hardware tables know it too.
    assert kind_of_device(kind) == topology.partition(":")[0].rpartition("*")[2]


def test_slices_and_hosts_lie_over_the_leading_axes():
    slices = aot.mesh("2*v5e:2x2", (2, 4), ("dcn", "ici")).devices
    assert [{d.slice_index for d in row} for row in slices] == [{0}, {1}]
    hosts = aot.mesh("4*h100:8", (2, 16), ("a", "b")).devices
    assert [[d.process_index for d in row] for row in hosts] == [
        [0] * 8 + [1] * 8,
        [2] * 8 + [3] * 8,
    ]
    # Where the leading axis cannot be divided over the hosts, the next one is.
    late = aot.mesh("2*h100:3", (3, 2), ("a", "b")).devices
    assert [[d.process_index for d in row] for row in late] == [[0, 1]] * 3


def test_devices_are_made_once():
    first = aot.mesh("v5e:4x4", (4, 4), ("a", "b"))
    second = aot.mesh("v5e:4x4", (16,), ("all",))
    assert set(first.devices.flat) == set(second.devices.flat)
    assert aot.mesh("v5e:4x4", (4, 4), ("a", "b")) == first


def test_two_devices_a_chip_where_the_hardware_has_them():
    assert aot.mesh("v4:2x2x1", (4, 2), ("chip", "core")).devices.shape == (4, 2)
    assert aot.mesh("tpu7x:2x2x1", (8,), ("all",)).devices.shape == (8,)


@pytest.mark.parametrize(
    ("topology", "shape", "message"),
    [
        ("v5e", (4,), r"aot.mesh\('v5e'\): malformed topology; write \[slices\*\]kind:layout"),
        ("v5e:banana", (4,), "malformed topology"),
        ("2*:4", (4,), "malformed topology"),
        ("", (4,), "malformed topology"),
        ("0*v5e:2x2", (4,), "sizes are at least 1"),
        ("v5e:0x4", (4,), "sizes are at least 1"),
        ("v9:2x2", (4,), "nothing here compiles for 'v9'; valid kinds: v3, v4, v5e, .*h100"),
        ("h100:2x4", (8,), "a GPU host has a number of devices, for example 'h100:8'"),
        ("v5e:3x5", (15,), "libtpu does not accept it: .*not divisible"),
        # libtpu would make 64 devices of it.
        ("v5e:4x4x4", (64,), "a slice of v5e has 2 dimensions"),
        ("h100:9", (9,), r"a host has at most 8; write several as 'COUNT\*h100:8'"),
        # Of 2 x 8, 4 x 4 and 8 x 2 the second is the nearest to 4 x 2, by a factor of two.
        ("v5e:4x4", (4, 2), r"make 8 devices, there are 16; the nearest .* fit: \(4, 4\)"),
        ("h100:8", (2, 4, 1), "3 sizes for 2 names"),
        ("h100:8", (-2, -4), r"aot.mesh\(axis_shapes=\(-2, -4\)\): every size must be at least 1"),
        ("h100:8", (2.0, 4), "must be a sequence of integers"),
        (8, (8,), r"aot.mesh\(8\): must be text"),
    ],
)
def test_bad_topologies_say_what_is_wrong(topology, shape, message):
    with pytest.raises((ValueError, TypeError), match=message):
        aot.mesh(topology, shape, ("a", "b")[: len(shape)])


# Devices that no other test has made: they are made once a process.
@pytest.mark.parametrize(
    ("topology", "module", "package"),
    [
        ("v5e:2x32", "libtpu", "libtpu"),
        ("h100:5", "jax_plugins.xla_cuda13", "jax-cuda13-plugin"),
    ],
)
@pytest.mark.parametrize("error", [False, True])
def test_a_missing_package_names_the_extra(monkeypatch, topology, module, package, error):
    find_spec = importlib.util.find_spec

    def without(name, *args):
        if name == module and error:  # what find_spec does where the parent is missing
            raise ModuleNotFoundError(name)
        return None if name == module else find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ImportError) as caught:
        aot.mesh(topology, (1,), ("a",))
    assert f"the package {package} is not installed" in str(caught.value)
    assert "pip install 'jax-xcoll[aot]'" in str(caught.value)


# Compiling functions of whole arrays.


def placed(mesh, *shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:8", "cpu"])
def test_a_step_with_donation_says_what_it_takes(topology):
    mesh = (
        jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        if topology == "cpu"
        else aot.mesh(topology, (8,), ("data",))
    )

    def step(params, batch, *, rate):
        loss = lambda p: jnp.mean((batch["x"] @ p["w"] - batch["y"]) ** 2)  # noqa: E731
        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params))

    program = aot.compile(
        jax.jit(step, donate_argnums=0),
        {"w": placed(mesh, 512, 256, spec=P())},
        {
            "x": placed(mesh, 1024, 512, spec=P("data")),
            "y": placed(mesh, 1024, 256, spec=P("data")),
        },
        rate=placed(mesh, spec=P()),
    )
    weight, x, y, rate = 512 * 256 * 4, 1024 * 512 * 4 // 8, 1024 * 256 * 4 // 8, 4
    memory = program.memory
    # A scalar takes a word, or up to a tile of 512 bytes of a TPU.
    assert 0 <= memory.arguments - (weight + x + y + rate) < 1024
    # The new weights lie over the old ones.
    assert memory.aliased == weight and memory.outputs >= weight
    assert memory.total == memory.arguments + memory.outputs - weight + memory.temporaries + (
        memory.code
    )
    assert memory == memory_of(program.compiled)
    (row,) = hlo.collectives(program)
    assert (row.kind, row.operand_bytes, hlo.axes_of(row, mesh)) == (
        "all-reduce",
        weight,
        ("data",),
    )


def test_a_function_that_names_specs_is_traced_with_the_mesh():
    mesh = aot.mesh("v5e:2x4", (2, 4), ("data", "model"))

    def fn(x):
        return lax.with_sharding_constraint(x * 2, P("data", "model")).sum(axis=0)

    x = jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
    (row,) = hlo.collectives(aot.compile(fn, x, mesh=mesh))
    # Each device has summed its own rows: of 1024 columns.
    assert (row.kind, row.operand_bytes, hlo.axes_of(row, mesh)) == ("all-reduce", 4096, ("data",))
    with pytest.raises(RuntimeError, match="mesh"):
        aot.compile(fn, x)


def test_a_function_per_shard_takes_trees():
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    specs = ({"w": P("a", "b"), "rest": P()}, P("a", "b"))
    program = aot.compile(
        lambda tree, y: lax.psum(tree["w"] + y, "a"),
        {"w": x, "rest": [x, x]},
        x,
        mesh=mesh,
        in_specs=specs,
        out_specs=P(None, "b"),
    )
    # Two of 2 x 4 elements; what is not used is not taken.
    assert program.memory.arguments == 2 * 2 * 4 * 4


def test_what_does_not_fit_a_tpu_is_said():
    mesh = aot.mesh("v5e:2x4", (8,), ("data",))
    x = placed(mesh, 2**20, 2**15, spec=P("data"))  # 16 GiB on each, of which a v5e has 15.75
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="Ran out of memory.*exceeds available HBM"
    ):
        aot.compile(lambda x: x + 1, x)


def test_memory_that_no_compiler_tells_is_none():
    class Silent:
        def memory_analysis(self):
            return None

    assert memory_of(Silent()) is None
    made = Memory(arguments=100, outputs=50, aliased=40, temporaries=30, code=2)
    assert made.total == 142


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_specs": P()}, "a function per shard needs each of mesh=, in_specs= and out_specs="),
        ({"out_specs": P()}, "needs each of mesh="),
        ({"out_specs": P(), "mesh": "cpu"}, "needs each of mesh=, in_specs="),
        ({"in_specs": P(), "out_specs": P()}, "needs each of mesh="),
        ({"in_specs": P(), "out_specs": P(), "mesh": "cpu", "y": 1}, r"arguments \(here \['y'\]\)"),
        ({"in_specs": (P(), P()), "out_specs": P(), "mesh": "cpu"}, "2 in_specs for 1 arguments"),
    ],
)
def test_half_of_what_a_function_per_shard_needs_is_refused(options, message):
    if "mesh" in options:
        options = options | {"mesh": jax.make_mesh((8,), ("a",))}
    with pytest.raises(ValueError, match=message):
        aot.compile(lambda x: x, jax.ShapeDtypeStruct((8,), jnp.float32), **options)


def test_a_second_process_that_the_user_forbids_is_explained(monkeypatch):
    def locked(**_):
        raise jax.errors.JaxRuntimeError(
            "ABORTED: Internal error when accessing libtpu multi-process lockfile. Run ..."
        )

    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "0")
    monkeypatch.setattr(targets.topologies, "get_topology_desc", locked)
    with pytest.raises(RuntimeError, match="LOAD='0' forbids a second; leave the variable unset"):
        aot.mesh("v5p:2x2x9", (4,), ("a",))


WORKER = """
import os
before = dict(os.environ)
import jax
after_jax = dict(os.environ)
from xcoll import aot
assert dict(os.environ) == after_jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
mesh = aot.mesh("v5e:2x2", (4,), ("a",))
assert "ALLOW_MULTIPLE_LIBTPU_LOAD" in before or "ALLOW_MULTIPLE_LIBTPU_LOAD" not in os.environ
x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
program = aot.compile(
    lambda x: lax.psum(x, "a"), x, mesh=mesh, in_specs=P("a"), out_specs=P()
)
print("COMPILED", program.as_text().count(" all-reduce("))
input()
"""


def test_two_processes_compile_at_once_and_leave_the_environment_alone():
    environment = {k: v for k, v in os.environ.items() if "TPU" not in k}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        # Neither ends before both have compiled: each holds libtpu while the other loads it.
        lines = [p.stdout.readline() for p in processes]
        outputs = [p.communicate("\n", timeout=60) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    assert lines == ["COMPILED 1\n"] * 2, outputs


def test_hosts_that_would_fit_into_one_are_hosts_of_their_own():
    """Two hosts of four GPUs are no host of eight: between them there is no NVLink."""
    mesh = aot.mesh("2*h100:4", (2, 4), ("dcn", "data"))
    assert Topology.from_mesh(mesh).name == "2*h100:4"


def test_a_plug_in_that_did_not_start_says_what_to_set(monkeypatch):
    def fail(*args):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(targets._compat, "compile_only_gpu_devices", fail)
    with pytest.raises(RuntimeError, match="JAX_PLATFORMS=cpu"):
        aot.devices("7*h100:8")  # of no other test: made once a process
