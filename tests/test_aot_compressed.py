"""Plans with codecs compile as they say, and no rank goes on with what it has not encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from spmd import mesh_of

import xcoll
from xcoll import Policy, aot, codecs, hlo
from xcoll.algorithms import direct, hierarchical
from xcoll.codecs import Codec
from xcoll.hlo.auditing import audit
from xcoll.hlo.text import Module, parse
from xcoll.plan import Request
from xcoll.planner import plan
from xcoll.topology import Topology

AXES = ("a", "b")
INT8, INT4, BFLOAT16 = codecs.int8(), codecs.int4(), codecs.cast("bfloat16")
TARGETS = {"cpu": (2, 4), "v5e:4x4": (4, 4), "2*v5e:2x2": (2, 4), "h100:8": (2, 4)}
PLATFORMS = {"cpu": "cpu", "v5e:4x4": "tpu", "2*v5e:2x2": "tpu", "h100:8": "gpu"}

CALLS = {
    "all_reduce": lambda x, axes, **more: xcoll.psum(x, axes, **more),
    "reduce_scatter": lambda x, axes, **more: xcoll.psum_scatter(x, axes, tiled=True, **more),
    "all_gather": lambda x, axes, **more: xcoll.all_gather(x, axes, tiled=True, **more),
    "all_to_all": lambda x, axes, **more: xcoll.all_to_all(x, axes, 0, 0, tiled=True, **more),
}


def compiled(target, collective, policy, shape, dtype="float32"):
    """The plan, the program that the same call compiles to, and the mesh."""
    sizes = TARGETS[target]
    mesh = mesh_of(*sizes, names=AXES) if target == "cpu" else aot.mesh(target, sizes, AXES)
    op = "sum" if "reduce" in collective else "none"
    request = Request(
        collective, op, AXES, sizes, dtype, jnp.dtype(dtype).itemsize, (shape,),
        platform=PLATFORMS[target],
    )  # fmt: skip
    program = aot.compile(
        lambda x: CALLS[collective](x, AXES, policy=policy),
        jax.ShapeDtypeStruct(shape, dtype),
        mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    return plan(request, Topology.from_mesh(mesh), policy), program, mesh


def rows_of(program):
    return [r for r in hlo.collectives(program) if r.kind != "recv"]


def check(made, program, mesh):
    """Operations by kind, axes and operand bytes, and wire bytes by axis, as planned."""
    planned, found = Counter(), Counter()
    for o in made.operations:
        planned[o.kind, o.axes, o.operand_bytes] += o.count
    audited = audit(program, mesh=mesh)
    for r in audited.rows:
        if r.kind != "recv":
            found[r.transfer or r.kind, r.axes, r.num_bytes] += r.executions
    assert planned == found
    assert audited.wire_bytes == hlo.wire_bytes(program, mesh)
    assert {a: b for a, b in made.wire_bytes if b} == {
        a: b for a, b in hlo.wire_bytes(program, mesh).items() if b
    }


HIERARCHY = hierarchical("direct", "direct")
NATIVE_INSIDE = hierarchical("native", "direct")

# Collective, algorithm, codec, shape, and then the dtype.
ON_CPU = [
    ("all_reduce", "direct", INT8, (1031,)),
    ("all_reduce", direct(shots=1), INT4, (1031,)),
    ("all_reduce", "ring", INT8, (67, 31)),
    ("all_reduce", "bidirectional_ring", BFLOAT16, (67, 31)),
    ("all_reduce", "halving_doubling", codecs.cast("float8_e4m3fn"), (1031,)),
    ("all_reduce", "recursive_doubling", INT8, (1031,)),
    ("all_reduce", "torus", INT8, (1031,)),
    ("all_reduce", HIERARCHY, {"a": INT8, "b": INT4}, (5000,)),
    ("all_reduce", NATIVE_INSIDE, {"a": INT8}, (5000,)),
    ("all_reduce", "ring", codecs.fixed_point(8), (1031,)),
    ("all_reduce", NATIVE_INSIDE, codecs.fixed_point(16), (1031,)),
    ("reduce_scatter", "ring", INT8, (64, 31)),
    ("reduce_scatter", "direct", codecs.cast("float16"), (64, 31)),
    ("reduce_scatter", HIERARCHY, {"a": INT8}, (64, 31)),
    ("reduce_scatter", "halving_doubling", codecs.int8(scale="exact"), (64, 31)),
    ("all_gather", "ring", INT8, (67, 31)),
    ("all_gather", "recursive_doubling", INT4, (67, 31)),
    ("all_gather", HIERARCHY, {"a": INT8}, (67, 31)),
    ("all_to_all", "direct", INT8, (64, 31)),
    ("all_to_all", "bruck", INT4, (64, 31)),
    ("all_to_all", HIERARCHY, {"a": INT8}, (64, 31)),
]
ON_CPU = [(*case, "float32") for case in ON_CPU]
ON_CPU += [(*case, "bfloat16") for *case, _ in ON_CPU[::6]]


@pytest.mark.parametrize(("collective", "choice", "codec", "shape", "dtype"), ON_CPU, ids=str)
def test_on_cpu_operations_and_bytes_are_as_planned(collective, choice, codec, shape, dtype):
    policy = Policy(codec=codec, algorithm=choice, min_bytes=0)
    made, program, mesh = compiled("cpu", collective, policy, shape, dtype)
    assert made.is_lossy
    check(made, program, mesh)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_sums_in_float32_have_the_bytes_of_the_narrow_dtype(collective, dtype):
    policy = Policy(accumulate="float32")
    made, program, mesh = compiled("cpu", collective, policy, (64, 128), dtype)
    check(made, program, mesh)
    payload = 64 * 128 * 2
    assert {r.dtypes for r in rows_of(program)} == {("u16",)}
    assert {r.operand_bytes for r in rows_of(program)} <= {payload, payload // 8}


LOSSY = [
    ("all_reduce", "direct", INT8),
    ("all_reduce", HIERARCHY, {"a": INT8}),
    ("all_reduce", HIERARCHY, INT4),
    ("reduce_scatter", HIERARCHY, {"a": INT8}),
    ("all_gather", HIERARCHY, {"a": BFLOAT16}),
]
SHAPE = (1024, 256)


@pytest.mark.parametrize(("collective", "choice", "codec"), LOSSY, ids=str)
@pytest.mark.parametrize("target", [t for t in TARGETS if t != "cpu"])
def test_operations_and_bytes_are_as_planned(target, collective, choice, codec):
    policy = Policy(codec=codec, algorithm={collective: choice}, min_bytes=0)
    made, program, mesh = compiled(target, collective, policy, SHAPE)
    assert made.is_lossy
    check(made, program, mesh)
    if target.startswith("2*"):
        # What goes between the slices is as narrow as the codec: nothing crosses in float32.
        wire = "u16" if codec == {"a": BFLOAT16} else "s8"
        sends = [r for r in hlo.collectives(program) if r.kind == "send"]
        assert sends and {r.dtypes for r in sends} == {(wire,)}
    elif codec in (INT8, INT4):
        assert {r.dtypes for r in rows_of(program)} == {("s8",)}


@pytest.mark.parametrize(
    ("target", "choice"), [("v5e:4x4", "recursive_doubling"), ("h100:8", "ring")]
)
def test_permutes_carry_the_wire(target, choice):
    policy = Policy(codec=INT8, algorithm=choice, min_bytes=0)
    made, program, mesh = compiled(target, "all_reduce", policy, SHAPE)
    assert {r.dtypes for r in rows_of(program)} == {("s8",)}
    planned = {a: b for a, b in made.wire_bytes if b}
    assert planned == {a: b for a, b in hlo.wire_bytes(program, mesh).items() if b}
    by_bytes = sum(o.operand_bytes * o.count for o in made.operations)
    assert by_bytes == sum(r.operand_bytes * r.executions for r in rows_of(program))


NARROW = ("s8", "u8", "s16", "u16", "s4", "u4")


def bypasses(program) -> bool:
    """Whether a value of the result is made from the operand by wide numbers alone.

    Every path through the compiled program from its parameter to its root, into the bodies of
    fusions and calls, has to go through an instruction whose result is of the wire's type.
    """
    module = parse(program.as_text())
    users: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for source, target in edges(module):
        users.setdefault(source, []).append(target)
    entry = module.computations[module.entry]
    first = entry.parameter(0)
    assert first is not None
    frontier, seen = [(entry.name, first)], set[tuple[str, str]]()
    while frontier:
        place = frontier.pop()
        if place in seen or is_narrow(module.computations[place[0]].instructions[place[1]].type):
            continue
        seen.add(place)
        frontier += users.get(place, [])
    return (entry.name, root_of(module, entry.name)) in seen


def is_narrow(kind: str) -> bool:
    types = [t for t, _ in hlo.text.shapes(kind)]
    return bool(types) and all(t in NARROW for t in types)


def root_of(module: Module, name: str) -> str:
    return module.computations[name].root


def edges(module: Module) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yields what depends on what: operands, and parameters and roots of what is called."""
    for computation in module.computations.values():
        for i in computation.instructions.values():
            here = (computation.name, i.name)
            called = [c for key, c in i.calls() if key in ("calls", "to_apply", "body", "branch")]
            called = [c for c in called if c in module.computations]
            inlined = called if i.opcode in ("fusion", "call", "async-start") else []
            for number, operand in enumerate(i.operands):
                if not inlined:
                    yield (computation.name, operand), here
                for callee in inlined:
                    inner = module.computations[callee].parameter(number)
                    if inner is not None:
                        yield (computation.name, operand), (callee, inner)
            for callee in inlined:
                yield (callee, root_of(module, callee)), here


ENCODED_FORMS: list[tuple[str, str | object, Codec]] = [
    ("all_reduce", "direct", INT8),
    ("all_reduce", direct(shots=1), INT8),
    ("all_reduce", "recursive_doubling", INT8),
    ("all_reduce", "recursive_doubling", BFLOAT16),
    ("all_reduce", "direct", BFLOAT16),
    ("all_gather", "ring", BFLOAT16),
]


@pytest.mark.parametrize(("collective", "choice", "codec"), ENCODED_FORMS, ids=str)
@pytest.mark.parametrize("target", ["cpu", "v5e:4x4", "h100:8"])
def test_a_ranks_own_copy_is_decoded_too(target, collective, choice, codec):
    """Replicas can only be alike where a rank sees its own part as the others see it."""
    policy = Policy(codec=codec, algorithm={collective: choice}, min_bytes=0)
    _, program, _ = compiled(target, collective, policy, (256, 128))
    assert not bypasses(program)


@pytest.mark.parametrize("target", ["cpu", "v5e:4x4", "h100:8"])
def test_the_check_sees_what_is_exact(target):
    exact = Policy(algorithm={"all_reduce": "recursive_doubling"})
    _, program, _ = compiled(target, "all_reduce", exact, (256, 128))
    assert bypasses(program)


def test_the_check_sees_a_bypass():
    """A rank that adds its own values as they are to those that it has decoded."""

    def own_kept(x):
        bits = INT8.encode(x.reshape(1, -1), dtype="float32")
        other = jax.lax.ppermute(bits, AXES, [(r, r ^ 1) for r in range(8)])
        return x + INT8.decode(other, x.size, dtype="float32").reshape(x.shape)

    program = aot.compile(
        own_kept, jax.ShapeDtypeStruct((256, 128), "float32"), mesh=mesh_of(2, 4, names=AXES),
        in_specs=P(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    assert bypasses(program)
