"""Who made a collective, and from which line: read off programs of every compiler."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xcoll
from xcoll import aot, gradients, hlo
from xcoll.hlo.frames import Frames
from xcoll.hlo.origins import Origins
from xcoll.hlo.text import parse
from xcoll.hlo.written import WrittenProgram

FILE = __file__
AXES = ("a", "b")


def mesh_of(name):
    """Two by four devices."""
    if name == "cpu":
        return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), AXES)
    return aot.mesh(name, (2, 4), AXES)


def by_hand(w, x):
    """Its collectives are the user's, differentiation's and xcoll's; the comments say whose."""

    def loss(w):
        full = lax.all_gather(w, "b", axis=0, tiled=True)  # user; transposed: differentiation
        y = lax.psum(x @ full, "a")  # user
        y = jax.checkpoint(lambda y: jnp.sin(lax.pmax(lax.stop_gradient(y), "b") + y))(y)  # user
        return jnp.sum(y**2)

    ring = xcoll.Policy(algorithm="ring")
    total = xcoll.psum(lax.pcast(w, "a", to="varying"), "a", policy=ring)  # xcoll
    return jax.grad(loss)(w), total


def line_of(text):
    """``file:line`` of the one line of this file's ``by_hand`` that has the text."""
    lines, first = inspect.getsourcelines(by_hand)
    (found,) = [i for i, line in enumerate(lines) if text in line]
    return f"{FILE}:{first + found}"


@functools.cache
def program(name):
    mesh = mesh_of(name)
    specs = (P("b"), P("a"))
    return aot.compile(
        by_hand,
        jax.ShapeDtypeStruct((1024, 512), jnp.float32),
        jax.ShapeDtypeStruct((64, 1024), jnp.float32),
        mesh=mesh,
        in_specs=specs,
        out_specs=(P("b"), P("b")),
    )


def origins(compiled):
    """Origins by collective, of all rows."""
    text = compiled.as_text()
    found = Origins(parse(text), Frames(text))
    return [(c, found.of(c)) for c in hlo.collectives(compiled)]


@pytest.mark.parametrize("name", ["cpu", "h100:8", "v5e:2x4"])
def test_made_by_hand_by_differentiation_and_by_xcoll(name):
    rows = origins(program(name))
    found = {(c.kind, o.made_by, o.source) for c, o in rows if o.op_name}
    assert ("all-gather", "user", line_of("lax.all_gather(")) in found
    assert ("all-reduce", "user", line_of("lax.psum(")) in found
    assert ("all-reduce", "user", line_of("lax.pmax(")) in found
    # A ring of two in one process; on all of them it is permutes, by the line that asks for it.
    assert {
        (o.made_by, o.source) for c, o in rows if c.kind == "collective-permute" and o.op_name
    } == {("xcoll", line_of("xcoll.psum("))}
    transposed = {o.source for c, o in rows if o.made_by == "differentiation"}
    if name == "v5e:2x4":  # libtpu may keep no name for a reduce-scatter that it pads
        assert transposed <= {line_of("lax.all_gather("), line_of("lax.psum(")}
    else:
        assert ("reduce-scatter", "differentiation", line_of("lax.all_gather(")) in found
    assert {o.made_by for c, o in rows if o.op_name} <= {"user", "differentiation", "xcoll"}
    assert all(not o.is_near for c, o in rows if o.op_name)


@pytest.mark.parametrize("name", ["cpu", "h100:8", "v5e:2x4"])
def test_what_no_one_wrote_is_the_partitioners(name):
    mesh = mesh_of(name)

    def f(w, x):
        return jnp.tanh(x @ w).sum()  # this line

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w, x = struct((1024, 512), "b"), struct((64, 1024), "a")
    compiled = jax.jit(f).lower(w, x).compile()
    lines, first = inspect.getsourcelines(f)
    rows = origins(compiled)
    assert rows
    assert {o.made_by for _, o in rows} == {"partitioner"}
    assert {o.source for _, o in rows} == {f"{FILE}:{first + 1}"}
    assert len(lines) == 2


def test_what_gradients_are_averaged_by_is_xcolls():
    mesh = mesh_of("cpu")

    def loss(w, x):
        return jnp.tanh(x @ w).mean()

    def f(w, x):
        return gradients.value_and_grad(loss, mesh=mesh, axis_name="a")(w, x)  # this line

    def by_sync(w, x):
        averages = gradients.sync("a")
        grads = jax.grad(loss)(lax.pcast(w, "a", to="varying"), x)
        return averages.update(grads, averages.init(w))[0]  # that line

    w = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=NamedSharding(mesh, P("a")))
    mapped = jax.shard_map(by_sync, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    for fn, text, outer in ((f, "# this line", f), (mapped, "# that line", by_sync)):
        lines, first = inspect.getsourcelines(outer)
        (at,) = [i for i, line in enumerate(lines) if text in line]
        rows = origins(jax.jit(fn).lower(w, x).compile())
        assert rows
        assert {o.made_by for _, o in rows} == {"xcoll"}
        assert f"{FILE}:{first + at}" in {o.source for _, o in rows}


def test_where_libtpu_keeps_no_names_the_program_before_compilation_says_it():
    mesh = aot.mesh("2*v5e:2x2", (2, 4), AXES)

    def f(x):
        total = lax.psum(x, AXES)  # this sum
        swapped = lax.all_to_all(x, "b", 0, 0, tiled=True)  # this exchange
        return total, swapped

    def audited(f):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=(P(), P("b")), check_vma=False)
        x = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=NamedSharding(mesh, P()))
        lowered = jax.jit(mapped).lower(x)
        text = lowered.compile().as_text()
        written = lambda: WrittenProgram(lowered, 2)  # noqa: E731
        with_it = Origins(parse(text), Frames(text), written)
        without = Origins(parse(text), Frames(text))
        rows = hlo.collectives(text)
        return [(c, with_it.of(c)) for c in rows], [(c, without.of(c)) for c in rows]

    lines, first = inspect.getsourcelines(f)
    line = {
        k: f"{FILE}:{first + i}"
        for i, text in enumerate(lines)
        for k in ("sum", "exchange")
        if f"# this {k}" in text
    }
    rows, blind = audited(f)
    assert all(o.op_name == "" for _, o in rows)
    assert {(c.kind, o.made_by, o.source) for c, o in rows} == {
        ("reduce-scatter", "user", line["sum"]),
        ("send", "user", line["sum"]),
        ("recv", "user", line["sum"]),
        ("all-gather", "user", line["sum"]),
        ("all-to-all", "user", line["exchange"]),
    }
    # From the compiled program alone nothing is certain here, and nothing is claimed.
    assert {(o.made_by, o.source) for _, o in blind} == {("unknown", None)}

    # Two sums alike: who made them is certain, which line is not.
    rows, _ = audited(lambda x: (lax.psum(x, AXES), lax.psum(x + 1, AXES)[:256]))
    assert {o.made_by for _, o in rows} == {"user"}


def test_frames_of_libraries_are_passed_over():
    text = f"""HloModule jit_f, num_partitions=2

FileNames
1 "/home/me/train.py"
2 "{xcoll.__file__}"

FunctionNames
1 "step"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}}
2 {{file_name_id=2 function_name_id=1 line=99 end_line=99 column=4 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=2 parent_frame_id=1}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %mine = f32[8]{{0}} all-reduce(%x), replica_groups={{}}, metadata={{op_name="psum" stack_frame_id=2}}
  %lost = f32[8]{{0}} negate(%mine), metadata={{op_name="neg" stack_frame_id=3}}
  ROOT %old = f32[8]{{0}} negate(%lost), metadata={{op_name="neg" source_file="/a/b.py" source_line=7}}
}}
"""  # noqa: E501
    instructions = parse(text).computations["main"].instructions
    frames = Frames(text)
    assert frames.source(instructions["mine"]) == "/home/me/train.py:12"
    assert frames.source(instructions["lost"]) is None
    assert frames.source(instructions["old"]) == "/a/b.py:7"
    assert frames.source(instructions["x"]) is None


@pytest.mark.parametrize("name", ["v5e:2x4", "tpu7x:2x2x1", "h100:8"])
def test_gathers_of_arguments_have_the_line_that_needs_them(name):
    """They are named by the argument, and stand apart: in fusions, or on the SparseCores."""
    mesh = aot.mesh(name, (8,), ("data",))

    def step(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)  # the layers
        return x

    def struct(shape):
        sharding = NamedSharding(mesh, P("data"))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    audit = xcoll.audit(step, [struct((2048, 2048))] * 3, struct((4096, 2048)))
    lines, first = inspect.getsourcelines(step)
    (line,) = [first + i for i, text in enumerate(lines) if "the layers" in text]
    assert {row.kind for row in audit.rows} == {"all-gather"}
    assert {row.source for row in audit.rows} == {f"{FILE}:{line}"}
    assert {row.made_by for row in audit.rows} == {"partitioner"}
    # 2048 / 8 rows of 2048 bfloat16 to each of 7 others, for three weights.
    assert audit.wire_bytes == {"data": 3 * 7 * 256 * 2048 * 2}
    assert "ws[" in str(audit) and ("tpu7x" not in name or all(r.is_async for r in audit.rows))


def test_callbacks_are_the_users_and_go_to_the_host():
    mesh = aot.mesh("v5e:2x2", (4,), ("data",))

    def step(x):
        jax.debug.print("{}", x[0, 0])
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P())) * 2

    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    audit = xcoll.audit(step, x)
    host = [row for row in audit.rows if row.kind in ("send", "recv")]
    assert host and all((row.made_by, row.axes, row.time_s) == ("user", (), None) for row in host)
    # Nothing is known of their time: there are no totals, but what is known is shown.
    assert audit.exposed_s is None and "exposed at least" in str(audit) and "host" in str(audit)


def test_what_starts_and_what_xla_gpu_leaves_nameless_is_the_users():
    mesh = aot.mesh("h100:4", (4,), ("data",))

    def scattered(x):
        return lax.psum_scatter_start(x, "data", tiled=True).done()

    def ragged(x):
        at, one = jnp.arange(4, dtype=jnp.int32), jnp.ones(4, jnp.int32)
        return lax.ragged_all_to_all(x, 0 * x, at, one, at, one, axis_name="data")

    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    for fn, kind in ((scattered, "reduce-scatter"), (ragged, "ragged-all-to-all")):
        compiled = aot.compile(
            fn, x, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
        )
        (row,) = xcoll.audit(compiled, mesh=mesh).rows
        assert (row.kind, row.made_by, row.axes) == (kind, "user", ("data",))
