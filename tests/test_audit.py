"""`xcoll.audit`: what it takes, what it refuses, and that its totals are those of its rows."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audits import audit, row
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xcoll
from xcoll import aot, hlo

F32 = jnp.float32


def mesh_of(shape=(2, 4), names=("data", "model")):
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), names)


def struct(mesh, shape, *spec, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def mean(x):
    return x.mean()


def by_hand(mesh):
    """A psum of f32[8, 128] over all, then three of f32[16] over ``model`` in a loop."""

    def f(x):
        total = lax.psum(x, ("data", "model"))
        body = lambda c, _: (lax.psum(c, "model") * 0.5, None)  # noqa: E731
        return total, lax.scan(body, x[0, :16], None, length=3)[0]

    return jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)


def test_bytes_totals_and_executions_by_hand():
    mesh = mesh_of()
    found = xcoll.audit(by_hand(mesh), struct(mesh, (8, 128)), topology="2*cpu:4@200Mbit")
    rows = {(r.kind, r.axes, r.num_bytes, r.executions, r.num_ranks, r.made_by) for r in found.rows}
    assert rows == {
        ("all-reduce", ("data", "model"), 8 * 128 * 4, 1, 8, "user"),
        ("all-reduce", ("model",), 16 * 4, 3, 4, "user"),
    }
    # A ring of n sends 2 (n - 1) / n of its operand, from each rank to the next. In the ring over
    # all, row-major, every device's next is on another place of ``model``; those at the end of a
    # row go to the other row too.
    whole = 2 * 7 * 4096 // 8
    looped = 2 * 3 * 64 // 4
    assert found.wire_bytes == {"data": whole, "model": whole + 3 * looped}
    assert found.level_bytes == {"host": whole, "device": whole + 3 * looped}
    assert found.counts() == {"all-reduce": 2}
    assert found.is_complete
    assert found.axis_sizes == {"data": 2, "model": 4}
    assert found.topology.startswith("2*cpu:4@200Mbit")
    # XLA:CPU has nothing asynchronous: all of the communication is waited for.
    assert not any(row.is_async for row in found.rows)
    assert found.exposed_s == found.communication_s
    once, thrice = sorted(found.rows, key=lambda row: row.executions)
    assert found.communication_s == pytest.approx(once.time_s + 3 * thrice.time_s)
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_s)
    assert found.exposed_share == pytest.approx(found.exposed_s / found.step_s)
    # 4096 bytes from one host to the other and back, at 200 Mbit/s: never faster than that.
    assert once.time_s >= once.bound_s >= 4096 / (200e6 / 8)


def test_what_can_be_audited():
    mesh = mesh_of()
    x = struct(mesh, (8, 128), "data")
    values = jax.device_put(jnp.ones((8, 128)), x.sharding)
    lowered = jax.jit(mean).lower(x)
    compiled = lowered.compile()
    audits = [
        xcoll.audit(mean, x),
        xcoll.audit(mean, x=x),
        xcoll.audit(jax.jit(mean), x),
        xcoll.audit(mean, values),
        xcoll.audit(functools.partial(mean), x),
        xcoll.audit(lowered),
        xcoll.audit(compiled),
        xcoll.audit(compiled, mesh=mesh, topology=xcoll.Topology.from_mesh(mesh)),
    ]
    for found in audits:
        (row,) = found.rows
        assert (row.kind, row.axes, row.num_bytes) == ("all-reduce", ("data",), 4)
        assert row.made_by == "partitioner"
        assert found.memory == audits[0].memory
    by_text = xcoll.audit(compiled.as_text(), mesh=mesh)
    assert by_text.rows == audits[-1].rows and by_text.memory is None


def test_a_jitted_method_has_its_object():
    mesh = mesh_of()

    class Scaled:
        def __init__(self, by):
            self.by = by

        @functools.partial(jax.jit, static_argnums=0)
        def mean(self, x):
            return (x * self.by).mean()

    x = struct(mesh, (8, 128), "data")
    found = xcoll.audit(Scaled(2).mean, x)
    assert [(row.kind, row.axes) for row in found.rows] == [("all-reduce", ("data",))]
    assert aot.compile(Scaled(2).mean, x).memory.outputs == 4


def test_a_mesh_is_set_for_the_trace():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))

    def f(x):
        return jax.sharding.reshard(x, P("data")).sum()

    found = xcoll.audit(f, jax.ShapeDtypeStruct((16,), F32), mesh=mesh)
    assert [(row.kind, row.axes, row.num_bytes) for row in found.rows] == [
        ("all-reduce", ("data",), 4)
    ]


@pytest.mark.parametrize("topology", [None, "cpu:1"])
def test_one_device_sends_nothing(topology):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"))
    f = jax.shard_map(lambda x: lax.psum(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
    (row,) = xcoll.audit(f, struct(mesh, (8,), "a"), topology=topology).rows
    assert (row.kind, row.axes, row.num_bytes, row.num_ranks) == ("all-reduce", (), 32, 1)
    assert row.wire_bytes == {"a": 0, "b": 0} and row.level_bytes == {}
    assert row.time_s == row.bound_s == row.exposed_s == 0.0


def test_memory_is_that_of_xla():
    mesh = mesh_of((8,), ("data",))
    x = struct(mesh, (1024, 128), "data")
    found = xcoll.audit(jax.jit(lambda x: x * 2, donate_argnums=0), x)
    assert found.memory.arguments == found.memory.outputs == found.memory.aliased == 128 * 128 * 4
    assert found.rows == () and "no collective" in str(found)
    assert found.communication_s == found.exposed_s == 0.0


def test_where_the_topology_is_unknown_times_are_too():
    mesh = mesh_of()
    unknown = xcoll.Topology.unknown(dict(mesh.shape), "no one said")
    found = xcoll.audit(by_hand(mesh), struct(mesh, (8, 128)), topology=unknown)
    assert all(row.time_s is row.bound_s is row.exposed_s is None for row in found.rows)
    assert found.communication_s is found.step_s is found.exposed_share is None
    assert found.wire_bytes["data"] == 2 * 7 * 4096 // 8
    assert found.level_bytes == {}
    assert "no one said" in str(found)
    assert hlo.Audit.from_json(found.to_json()) == found


def test_what_was_not_read_is_a_row_that_says_so():
    mesh = mesh_of((8,), ("x",))
    text = """HloModule jit_f, is_scheduled=true, num_partitions=8
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"has_communication":true}}
  ROOT %r = f32[8]{0} all-reduce(%k), replica_groups=spiral(8), to_apply=%add
}"""  # noqa: E501
    found = xcoll.audit(text, mesh=mesh)
    kernel, reduction = found.rows
    assert (kernel.kind, kernel.axes, kernel.num_bytes) == ("custom-call", None, 32)
    assert (reduction.kind, reduction.axes, reduction.num_bytes) == ("all-reduce", None, 32)
    assert "spiral(8)" in reduction.unread
    assert not found.is_complete
    # What is not known is not counted as nothing.
    assert found.communication_s is found.exposed_s is found.step_s is None
    shown = str(found)
    assert "2 could not be read in full" in shown and "spiral(8)" in shown
    assert hlo.Audit.from_json(found.to_json()) == found


def test_json_gives_the_audit_back_and_totals_for_programs():
    mesh = aot.mesh("v5e:4x4", (4, 4), ("data", "model"))
    found = xcoll.audit(mean, struct(mesh, (512, 512), "data", "model"))
    again = hlo.Audit.from_json(found.to_json())
    assert again == found and type(again) is hlo.Audit
    assert str(again) == str(found)
    totals = json.loads(found.to_json())["totals"]
    assert totals["exposed_s"] == found.exposed_s and totals["counts"] == found.counts()
    assert all(math.isfinite(row.time_s) for row in found.rows)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not an audit written by to_json"),
        ("[]", "'version': 1"),
        ('{"version": 9}', "'version': 1"),
        ('{"version": 1}', "'rows' is missing"),
        ('{"version": 1, "rows": 3}', "'axis_sizes' is missing"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_other_json_is_refused(text, match):
    with pytest.raises(ValueError, match=match):
        hlo.Audit.from_json(text)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("topology", "", "a name is expected"),
        ("wire_bytes", {}, "over each axis are expected: dat"),
    ],
)
def test_json_that_was_edited_is_refused(field, value, match):
    data = json.loads(xcoll.audit(mean, struct(mesh_of(), (8, 8), "data")).to_json())
    with pytest.raises(ValueError, match=match):
        hlo.Audit.from_json(json.dumps(data | {field: value}))


def test_what_is_refused():
    mesh = mesh_of()
    x = struct(mesh, (8, 128), "data")
    compiled = jax.jit(mean).lower(x).compile()
    with pytest.raises(TypeError, match=r"audit\(fn_or_compiled=3\): must be a function"):
        xcoll.audit(3)
    with pytest.raises(TypeError, match="has its arguments; leave them out"):
        xcoll.audit(compiled, x)
    with pytest.raises(ValueError, match=r"pass mesh="):
        xcoll.audit(mean, jnp.ones(3))
    with pytest.raises(ValueError, match="has axes"):
        xcoll.audit(compiled, topology=xcoll.Topology.unknown({"data": 8}))
    with pytest.raises(ValueError, match="cpu:3"):
        xcoll.audit(compiled, topology="cpu:3")
    with pytest.raises(TypeError, match="topology=3"):
        xcoll.audit(compiled, topology=3)
    with pytest.raises(TypeError, match="mesh="):
        xcoll.audit(compiled, mesh="data")
    other = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    with pytest.raises(ValueError, match="8 devices"):
        xcoll.audit(compiled, mesh=other)


def test_rows_are_frozen_data():
    mesh = mesh_of()
    (row,) = xcoll.audit(mean, struct(mesh, (8, 128), "data")).rows
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.kind = "all-gather"


def test_a_long_name_does_not_break_the_table():
    mesh = mesh_of()
    found = xcoll.audit(by_hand(mesh), struct(mesh, (8, 128)), topology="2*cpu:4@200Mbit")
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 120
    assert "xcoll: 2 collectives in the compiled program, mesh (data=2, model=4)" in lines[0]
    assert any("all-reduce" in line and "data" in line for line in lines)


def test_names_that_are_too_long_fold_and_hide_nothing():
    axes = {f"a_mesh_axis_with_a_long_name_{i}": 2 for i in range(12)}
    name = "params['decoder']['layers_11']['attention']['query']['kernel']"
    sends = row(
        "p",
        kind="collective-permute",
        axes=tuple(axes),
        wire_bytes={axis: 10 for axis in axes},
        op_name=name,
        source="/home/me/models/a_long_name_of_a_module_with_a_transformer.py:1234",
        is_near=True,
        is_async=True,
        conditional=True,
        executions=100_000,
        made_by="differentiation",
    )
    hidden = row("k", axes=None, wire_bytes={}, unread="which devices: " + "not said " * 20)
    shown = str(audit(sends, hidden, axis_sizes=axes))
    assert max(map(len, shown.splitlines())) <= 100
    for part in ("100000", "in a branch", "4 µs", "async", "differentiation", "? not read"):
        assert part in shown
    assert shown.count("not said") == 20
    assert "1 run only if a branch is taken" in shown
