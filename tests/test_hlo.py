"""The reader of compiled programs against programs whose collectives are known by hand."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plain_counts import plain_count, row_count

from xcoll import aot, hlo

F32 = jnp.float32
MESHES = {
    "cpu": (2, 4),
    "v5e:4x4": (4, 4),
    "v5p:4x4x4": (8, 8),
    "tpu7x:2x2x1": (2, 4),
    "h100:8": (2, 4),
}


def mesh_of(name):
    """A mesh of eight virtual CPU devices, or of compile-only ones; axes a and b."""
    if name == "cpu":
        return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return aot.mesh(name, MESHES.get(name, (2, 4)), ("a", "b"))


def compiled(fn, mesh, shape=(8, 256, 128)):
    """``fn`` for a shard of ``shape`` on every device."""
    return aot.compile(
        fn,
        jax.ShapeDtypeStruct(shape, F32),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )


def one_of_each(x):
    """Every collective that jax.lax has, nested loops and all; the last two run 5 and 15 times."""
    n = lax.axis_size("a")
    both = lax.psum(x, ("a", "b"))
    mine = lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True)
    ours = lax.all_gather(mine, "b", axis=1, tiled=True)
    swapped = lax.all_to_all(x, "b", split_axis=1, concat_axis=1, tiled=True)
    moved = lax.ppermute(x, "a", [(i, (i + 1) % n) for i in range(n)])

    def outer(carry, _):
        m = lax.axis_size("b")
        carry = lax.ppermute(carry, "b", [(i, (i + 1) % m) for i in range(m)])
        inner = lambda c, _: (lax.psum(c, "a") * 0.5, None)  # noqa: E731
        return lax.scan(inner, carry, None, length=3)[0], None

    return both, mine, ours, swapped, moved, lax.scan(outer, x, None, length=5)[0]


@pytest.mark.parametrize("name", MESHES)
def test_every_kind_with_its_bytes_axes_and_executions(name):
    mesh = mesh_of(name)
    program = compiled(one_of_each, mesh)
    payload = 8 * 256 * 128 * 4
    rows = hlo.collectives(program)
    found = {(r.kind, r.dtypes, r.operand_bytes, hlo.axes_of(r, mesh), r.executions) for r in rows}
    assert found == {
        ("all-reduce", ("f32",), payload, ("a", "b"), 1),
        ("reduce-scatter", ("f32",), payload, ("b",), 1),
        ("all-gather", ("f32",), payload // mesh.shape["b"], ("b",), 1),
        ("all-to-all", ("f32",), payload, ("b",), 1),
        ("collective-permute", ("f32",), payload, ("a",), 1),
        ("collective-permute", ("f32",), payload, ("b",), 5),
        ("all-reduce", ("f32",), payload, ("a",), 15),
    }
    assert len(rows) == 7
    assert row_count(program, rows) == plain_count(program)
    assert not any(r.conditional for r in rows)
    # Device numbers are positions in the mesh: checked against the mesh's own layout.
    numbers = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    (along_b,) = (r for r in rows if r.kind == "reduce-scatter")
    assert set(along_b.groups) == {tuple(int(i) for i in row) for row in numbers}
    (along_a,) = (r for r in rows if r.kind == "collective-permute" and r.executions == 1)
    assert set(along_a.pairs) == {
        (int(s), int(d))
        for s, d in zip(numbers.flat, np.roll(numbers, -1, axis=0).flat, strict=True)
    }


@pytest.mark.parametrize("name", ["cpu", "v5e:4x4", "h100:8"])
def test_branches_and_loops_of_unknown_length(name):
    def fn(x):
        branch = lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "b"), lambda x: lax.pmax(x, "a"), x)
        loop = lax.while_loop(lambda c: c[0, 0] < 9, lambda c: lax.psum(c, ("a", "b")), x)
        return branch, loop

    mesh = mesh_of(name)
    program = compiled(fn, mesh, (16, 128))
    rows = hlo.collectives(program)
    found = {(hlo.axes_of(r, mesh), r.executions, r.conditional) for r in rows}
    assert found == {
        (("a",), 1, True),
        (("b",), 1, True),
        (("a", "b"), None, False),
    }
    assert row_count(program, rows) == plain_count(program) == {"all-reduce": 3}
    with pytest.raises(ValueError, match="loop of unknown trip count; say how often"):
        hlo.wire_bytes(program, mesh)
    n, b = mesh.devices.size, 16 * 128 * 4
    # The branches over a and over b, and the loop 10 times over both: rings of sizes a, b and n.
    ring = {k: 2 * (k - 1) * b // k for k in (*mesh.devices.shape, n)}
    expected = {k: ring[mesh.shape[k]] + 10 * ring[n] for k in ("a", "b")}
    assert hlo.wire_bytes(program, mesh, unknown_trips=10) == expected


@pytest.mark.parametrize("name", ["cpu", "v5e:4x4", "h100:8"])
def test_combined_operations_count_all_operands(name):
    def fn(x):
        return [lax.psum(x[i].astype(d), "b") for i, d in enumerate([F32] * 9 + [jnp.int32])]

    mesh = mesh_of(name)
    program = compiled(fn, mesh, (10, 8, 128))
    rows = hlo.collectives(program)
    assert row_count(program, rows) == plain_count(program)
    assert sum(r.operand_bytes for r in rows) == 10 * 8 * 128 * 4
    assert len(rows) < 10
    assert {d for r in rows for d in r.dtypes} == {"f32", "s32"}
    # CPU and TPU keep an operand for each sum; GPU lays them end to end.
    elements = Counter()
    for dtype, dims in (o for r in rows for o in r.operands):
        elements[dtype] += math.prod(dims)
    assert elements == {"f32": 9 * 1024, "s32": 1024}


def test_what_the_tpu_compiler_overlaps_is_counted_once():
    # A sharded training step of two layers: the compiler prints its asynchronous all-gathers
    # again at every step of the overlap, and all-reduces inside fusions that scatter them.
    mesh = mesh_of("v5e:4x4")

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x.astype(F32) ** 2).sum()

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = [array(1024, 1024, spec=P("b", "a"))] * 2
    step = jax.jit(jax.grad(loss), out_shardings=NamedSharding(mesh, P("b", "a")))
    program = step.lower(weights, array(8192, 1024, spec=P("a"))).compile()
    text = program.as_text()
    assert text.count(" all-gather(") > len(set(re.findall(r'chain_id="(\d+)"', text))) > 0
    assert "AllReduceScatterFusion" in text
    rows = hlo.collectives(program)
    assert row_count(program, rows) == plain_count(program)
    assert all(r.executions == 1 for r in rows)
    scattered = [r for r in rows if r.computation.startswith("all-reduce-scatter")]
    assert scattered and {r.kind for r in scattered} == {"reduce-scatter"}
    assert Counter(r.name for r in rows).most_common(1)[0][1] == 1


SLICES = {
    # what a program over two slices of four does: what its send carries out, and the bytes sent per
    # device over "dcn" and over "ici" for an operand of B bytes
    "psum dcn": (lambda x: lax.psum(x, "dcn"), "all-reduce", 1, 0),
    "psum_scatter dcn": (
        lambda x: lax.psum_scatter(x, "dcn", scatter_dimension=0, tiled=True),
        "reduce-scatter",
        1 / 2,
        0,
    ),
    "all_gather dcn": (lambda x: lax.all_gather(x, "dcn", tiled=True), "all-gather", 1, 0),
    "all_to_all dcn": (
        lambda x: lax.all_to_all(x, "dcn", 0, 0, tiled=True),
        "all-to-all",
        1 / 2,
        0,
    ),
    "ppermute dcn": (lambda x: lax.ppermute(x, "dcn", [(0, 1)]), "collective-permute", 1, 0),
    # reduce-scatter over ici (3/4), all-reduce of a quarter over dcn, all-gather over ici (3/4)
    "psum both": (lambda x: lax.psum(x, ("dcn", "ici")), "all-reduce", 1 / 4, 6 / 4),
    # one ring over all eight: a device sends all of its operand to the next
    "ring both": (
        lambda x: lax.ppermute(x, ("dcn", "ici"), [(i, (i + 1) % 8) for i in range(8)]),
        "collective-permute",
        1,
        1,
    ),
    # each device sends an eighth to each of four in the other slice (of those, three differ in
    # ici too), and to three in its own
    "all_to_all both": (
        lambda x: lax.all_to_all(x, ("dcn", "ici"), 0, 0, tiled=True),
        "all-to-all",
        4 / 8,
        6 / 8,
    ),
}


@pytest.mark.parametrize("case", SLICES)
def test_transfers_between_slices(case):
    fn, transfer, dcn, ici = SLICES[case]
    mesh = aot.mesh("2*v5e:2x2", (2, 4), ("dcn", "ici"))
    program = compiled(fn, mesh, (64, 256, 128))
    payload = 64 * 256 * 128 * 4
    rows = hlo.collectives(program)
    assert row_count(program, rows) == plain_count(program)
    sends = [r for r in rows if r.kind == "send"]
    assert [r.transfer for r in sends] == [transfer]
    assert [r.transfer for r in rows if r.kind == "recv"] == [transfer]
    assert sends[0].dtypes == ("f32",)
    assert "dcn" in hlo.axes_of(sends[0], mesh)
    assert {r.num_devices for r in rows} == {4}, "a program numbers the devices of one slice"
    assert hlo.wire_bytes(program, mesh) == {"dcn": dcn * payload, "ici": ici * payload}


def test_slices_that_do_different_things():
    def fn(x):
        return lax.ppermute(x, ("dcn", "ici"), [(0, 1), (1, 4), (5, 6)])

    mesh = aot.mesh("2*v5e:2x2", (2, 4), ("dcn", "ici"))
    program = compiled(fn, mesh, (64, 128))
    rows = hlo.collectives(program)
    inside = [r for r in rows if r.kind == "collective-permute"]
    # Each slice branches to its own permute: 0 to 1 in the first, 5 to 6 (1 to 2) in the second.
    assert {(r.slices, r.pairs, r.conditional) for r in inside} == {
        ((0,), ((0, 1),), False),
        ((1,), ((1, 2),), False),
    }
    assert [r.slices for r in rows if r not in inside] == [None, None]
    sent = [send for r in rows for send in hlo.sends(r, mesh)]
    assert sorted(sent) == [(0, 1, 32768), (1, 4, 32768), (5, 6, 32768)]


def test_int8_between_slices():
    def fn(x):
        mine = lax.psum_scatter(x, "ici", scatter_dimension=0, tiled=True)
        theirs = lax.ppermute(mine.astype(jnp.int8), "dcn", [(0, 1), (1, 0)])
        return lax.all_gather(mine + theirs, "ici", tiled=True)

    mesh = aot.mesh("2*v5e:2x2", (2, 4), ("dcn", "ici"))
    (send,) = (r for r in hlo.collectives(compiled(fn, mesh, (64, 256, 128))) if r.kind == "send")
    assert send.dtypes == ("s8",)
    assert send.operand_bytes == 64 * 256 * 128 // 4


def test_bytes_over_each_axis():
    mesh = mesh_of("cpu")
    b = 256 * 128 * 4

    def wire(fn):
        program = compiled(fn, mesh, (256, 128))
        return hlo.wire_bytes(program, mesh), hlo.crossing_bytes(program, mesh, "a")

    # A flat ring of eight, row-major: device 3 sends to device 4 in the other row, which differs in
    # both coordinates; two such links (3 to 4, 7 to 0), 14/8 of the operand over each.
    flat = b * 14 // 8
    assert wire(lambda x: lax.psum(x, ("a", "b"))) == ({"a": flat, "b": flat}, 2 * flat)

    def hierarchical(x):
        x = lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True)
        return lax.all_gather(lax.psum(x, "a"), "b", tiled=True)

    # Over a each device sends 2·1/2 of a quarter; over b 3/4, twice.
    quarter = b // 4
    assert wire(hierarchical) == ({"a": quarter, "b": 6 * quarter}, 8 * quarter)
    assert 8 * quarter * 7 == 2 * flat * 4, "4/7 of the flat ring's bytes cross"

    def ring(x):
        pairs = [(i, (i + 1) % 8) for i in range(8)]
        return lax.fori_loop(0, 7, lambda _, c: lax.ppermute(c, ("a", "b"), pairs) + x, x)

    assert wire(ring) == ({"a": 7 * b, "b": 7 * b}, 14 * b)

    # Only some send, and one of them to itself.
    def some(x):
        return lax.ppermute(x, ("a", "b"), [(0, 0), (1, 5), (2, 3)])

    assert wire(some) == ({"a": b, "b": b}, b)
    with pytest.raises(ValueError, match="no axis 'c'"):
        hlo.crossing_bytes(compiled(ring, mesh, (8,)), mesh, "c")


@pytest.mark.parametrize("name", ["cpu", "v5e:4x4", "h100:8"])
def test_canonical_text_of_equal_programs_is_equal(name):
    mesh = mesh_of(name)

    def first(x):
        def body(c, _):
            return lax.psum(c * 2, "a") + 1, None

        return lax.scan(body, x, None, length=4)[0]

    def second(renamed):
        def another(carry, nothing):
            with jax.named_scope("elsewhere"):
                doubled = carry * 2
                return lax.psum(doubled, "a") + 1, nothing

        return lax.scan(another, renamed, None, length=4)[0]

    def other(x):
        return lax.scan(lambda c, _: (lax.psum(c * 2, "b") + 1, None), x, None, length=4)[0]

    one, two, three = (compiled(f, mesh, (16, 128)) for f in (first, second, other))
    assert one.as_text() != two.as_text()
    text = hlo.canonical(one)
    assert text == hlo.canonical(two)
    assert text != hlo.canonical(three)
    assert text == hlo.canonical(text)
    for word in ("metadata={", "op_name", "stack_frame", "fingerprint", "test_hlo", "jit_first"):
        assert word not in text
    assert [(r.kind, r.executions) for r in hlo.collectives(text)] == [("all-reduce", 4)]


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (3, TypeError, "cannot read a int; pass a compiled program"),
        (jax.jit(lambda x: x).lower(1.0), TypeError, "cannot read a Lowered"),
        ("", ValueError, "no ENTRY computation"),
        ("def f(): pass", ValueError, "no ENTRY computation"),
    ],
)
def test_what_is_no_compiled_program_is_refused(program, error, message):
    for call in (hlo.collectives, hlo.canonical):
        with pytest.raises(error, match=message):
            call(program)


def test_the_wrong_mesh_is_refused():
    program = compiled(lambda x: lax.psum(x, "b"), mesh_of("cpu"), (8,))
    wrong = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    with pytest.raises(ValueError, match="numbers 8 devices, but the mesh has 4"):
        hlo.wire_bytes(program, wrong)
