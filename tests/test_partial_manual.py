"""Axes that the partitioner owns: where an operand's cut is known, plans run beside them."""

from __future__ import annotations

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from spmd import CHECK_VMA

import xcoll
from xcoll import _compat, aot, hlo

P = jax.P
RING = xcoll.Policy(algorithm="ring")
HIERARCHICAL = xcoll.Policy(algorithm=xcoll.algorithms.hierarchical("ring", "ring"))


def mesh_of(kind="Auto", dcn=1):
    """Of axes (dcn, data, model), the last of which the tests leave to the partitioner."""
    devices = np.array(jax.devices()).reshape(dcn, 4 // dcn, 2)
    return jax.sharding.Mesh(
        devices, ("dcn", "data", "model"), axis_types=(getattr(AxisType, kind),) * 3
    )


MANUAL = ("dcn", "data")
SPLIT = P(MANUAL)


def shard(body, mesh, out_specs=SPLIT, check_vma=True):
    """``body`` manual over all but the model axis, of an array cut over all axes."""
    return jax.shard_map(
        body, mesh=mesh, in_specs=SPLIT, out_specs=out_specs, axis_names=set(MANUAL),
        check_vma=check_vma,
    )  # fmt: skip


def operand(mesh, rows=32, columns=6):
    x = np.random.default_rng(0).integers(-9, 10, (4 * rows, columns)).astype(np.float32)
    return jax.device_put(x, jax.NamedSharding(mesh, P(MANUAL, "model")))


def cut(x, *spec):
    return lax.with_sharding_constraint(x, P(*spec))


def compiled(fn, *args, policy=RING, topology=None):
    """The report of the pass, and the compiled program."""
    ours = xcoll.optimize(fn, policy=policy, topology=topology)
    program = jax.jit(ours).lower(*args).compile()
    return ours.reports[-1], program


def kept(report):
    """Of each collective, why it is kept; None where it is rewritten."""
    return [site.kept_reason for site in report.sites]


def over_model(program, mesh):
    """The operations of a compiled program that communicate over the partitioner's axis."""
    return [row.kind for row in hlo.collectives(program) if "model" in hlo.axes_of(row, mesh)]


def nonzero(wire_bytes):
    """Bytes by axis, of the axes that any are sent over."""
    return {axis: num_bytes for axis, num_bytes in wire_bytes.items() if num_bytes}


COLLECTIVES = {
    # per-shard arrays of 32 x 6, cut over model in their second dimension
    "psum": lambda x: lax.psum(x, MANUAL),
    "pmax": lambda x: lax.pmax(x, MANUAL),
    "pmean": lambda x: lax.pmean(x, MANUAL),
    "psum_scatter": lambda x: lax.psum_scatter(x, MANUAL, tiled=True),
    "psum_scatter untiled": lambda x: lax.psum_scatter(x.reshape(4, 8, 6), MANUAL),
    "of the transposed": lambda x: lax.psum(x.T, MANUAL).T,
    "all_gather": lambda x: lax.all_gather(x, MANUAL),
    "all_gather axis 1": lambda x: lax.all_gather(x, MANUAL, axis=1),
    "all_gather last": lambda x: lax.all_gather(x, MANUAL, axis=2),
    "all_gather tiled": lambda x: lax.all_gather(x, MANUAL, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, MANUAL, 0, 0, tiled=True),
    "pprod": lambda x: xcoll.pprod(x, MANUAL),
    "pbroadcast": lambda x: xcoll.pbroadcast(x, MANUAL, 2),
    "preduce": lambda x: xcoll.preduce(x, MANUAL, 1),
    "pgather": lambda x: xcoll.pgather(x, MANUAL, 1),
    "pscatter": lambda x: xcoll.pscatter(x, MANUAL, 1, tiled=True),
}


def reference(name, x):
    """All ranks' results, from NumPy, of all ranks' arrays (4, 32, 6)."""
    total, one = x.sum(0), np.arange(4) == 1
    everywhere = lambda value: np.stack([value] * 4)  # noqa: E731
    on_one = lambda value: np.stack([value * is_root for is_root in one])  # noqa: E731
    return {
        "psum": lambda: everywhere(total),
        "of the transposed": lambda: everywhere(total),
        "pmax": lambda: everywhere(x.max(0)),
        "pmean": lambda: everywhere(total / 4),
        "psum_scatter": lambda: total.reshape(4, 8, 6),
        "psum_scatter untiled": lambda: total.reshape(4, 8, 6),
        "all_gather": lambda: everywhere(x),
        "all_gather axis 1": lambda: everywhere(np.moveaxis(x, 0, 1)),
        "all_gather last": lambda: everywhere(np.moveaxis(x, 0, 2)),
        "all_gather tiled": lambda: everywhere(x.reshape(128, 6)),
        "all_to_all": lambda: x.reshape(4, 4, 8, 6).swapaxes(0, 1).reshape(4, 32, 6),
        "pprod": lambda: everywhere(x.prod(0)),
        "pbroadcast": lambda: everywhere(x[2]),
        "preduce": lambda: on_one(total),
        "pgather": lambda: on_one(x),
        "pscatter": lambda: x[1].reshape(4, 8, 6),
    }[name]()


POLICIES = {
    "all_to_all": xcoll.Policy(algorithm="direct"),
    **dict.fromkeys(
        ["pbroadcast", "preduce", "pgather", "pscatter"], xcoll.Policy(algorithm="tree")
    ),
}


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_values_and_no_gather_over_the_partitioners_axis(name, check_vma):
    mesh = mesh_of()
    x = operand(mesh)

    def body(x):
        y = COLLECTIVES[name](cut(x, None, "model"))[None]
        if not check_vma:
            return y
        return lax.pcast(y, tuple(set(MANUAL) - _compat.varying_axes(jax.typeof(y))), to="varying")

    ours = shard(body, mesh, check_vma=check_vma)
    policy = POLICIES.get(name, RING)
    report, program = compiled(ours, x, policy=policy)
    assert kept(report) == [None]
    assert over_model(program, mesh) == []
    assert nonzero(report.wire_bytes()) == nonzero(hlo.wire_bytes(program, mesh))
    np.testing.assert_array_equal(program(x), reference(name, np.asarray(x).reshape(4, 32, 6)))


def rank():
    return lax.axis_index(MANUAL).astype(jnp.float32)


def several(x):
    """Three leaves in one group, in two cuts, and a gather of what a sum left."""
    x = cut(x, None, "model")
    a, b, c = lax.psum((x, cut(-x.T, "model"), rank()), MANUAL)
    d = lax.psum_scatter(x / 4, MANUAL, tiled=True)
    return a, b, c, lax.all_gather(jnp.tanh(d), MANUAL, tiled=True)


@pytest.mark.parametrize("check_vma", CHECK_VMA)
@pytest.mark.parametrize(
    ("policy", "topology"),
    [(RING, None), (HIERARCHICAL, None), (None, "2*cpu:4@200Mbit"), (xcoll.Policy.native(), None)],
)
def test_groups_over_slices(policy, topology, check_vma):
    mesh = mesh_of(dcn=2)
    x = operand(mesh, rows=8 << 10 if topology else 32)
    fn = shard(several, mesh, (P(), P(), P(), P(MANUAL)), check_vma)
    report, program = compiled(fn, x, policy=policy, topology=topology)
    names = {site.plan.name for site in report.sites}
    if policy == RING:
        # The gather has one axis more in it than the ring of the sum, and the group is one.
        assert kept(report) == [None] * 5 and over_model(program, mesh) == []
        assert [len(group) for group in report.groups()] == [3, 1, 1]
        assert nonzero(report.wire_bytes()) == nonzero(hlo.wire_bytes(program, mesh))
    elif policy == HIERARCHICAL:
        assert kept(report) == [None] * 5 and over_model(program, mesh) == []
        assert names == {"hierarchical(ring, ring)"}
    elif topology:
        assert "hierarchical(native, native)" in names
        planned = [s for s in report.sites if s.collective == "psum"]
        assert [s.kept_reason for s in planned] == [None] * 3
    else:
        assert names == {"native"}
    want = jax.jit(fn)(x)
    for got, expected in zip(program(x), want, strict=True):
        # Sums of small integers are exact in any order; the scattered one is of quarters.
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert got.shape == expected.shape and got.dtype == expected.dtype


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_explicit_axes_say_the_cut_in_the_type(check_vma):
    mesh = mesh_of("Explicit")
    x = operand(mesh)

    def body(x):
        return lax.psum(2 * x, MANUAL), lax.all_gather(x, MANUAL, tiled=True)

    fn = shard(body, mesh, (P(), P(MANUAL)), check_vma)
    report, program = compiled(fn, x)
    assert kept(report) == [None, None] and over_model(program, mesh) == []
    total, gathered = program(x)
    wide = np.asarray(x).reshape(4, 32, 6)
    np.testing.assert_array_equal(total, 2 * wide.sum(0))
    np.testing.assert_array_equal(gathered, np.tile(np.asarray(x), (4, 1)))
    shapes = [jax.eval_shape(f, x) for f in (fn, xcoll.optimize(fn, policy=RING))]
    assert shapes[0] == shapes[1]
    for plain, ours in zip(*shapes, strict=True):
        assert plain.sharding == ours.sharding


@pytest.mark.parametrize("check_vma", CHECK_VMA)
def test_gradients(check_vma):
    mesh = mesh_of()
    x = operand(mesh)

    def body(x):
        y = lax.psum(jnp.sin(cut(x, None, "model")), MANUAL)
        # The constraint on the result is one on its cotangent.
        return cut(lax.all_gather(y[:8] * y[:8], MANUAL).sum(0) * y[:8], None, "model")

    def loss(fn):
        return lambda x: (fn(x) ** 2).sum()

    plain = shard(body, mesh, check_vma=check_vma)
    ours = xcoll.optimize(plain, policy=RING)
    want = jax.jit(jax.value_and_grad(loss(plain)))(x)
    got = jax.jit(jax.value_and_grad(loss(ours)))(x)
    # A few roundings of each of some 10 terms of either sign, whose magnitudes sum below 100 |g|.
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(np.asarray(b)).max())
    assert all(None in kept(report) for report in ours.reports)
    inside = shard(lambda x: jax.grad(lambda x: body(x).sum())(x), mesh, check_vma=check_vma)
    got = jax.jit(xcoll.optimize(inside, policy=RING))(x)
    want = np.asarray(jax.jit(inside)(x))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_types_are_kept():
    mesh = mesh_of(dcn=2)
    x = operand(mesh)

    def body(fn):
        def run(x):
            # Under check_vma a wrong type is an error: the sum is the same on every rank.
            total = fn(lambda x: lax.psum(cut(x, None, "model"), MANUAL))(x)
            assert not _compat.varying_axes(jax.typeof(total))
            return total, lax.scan(lambda c, _: (c + total, None), total, None, length=2)[0]

        return run

    def ours(fn):
        return xcoll.optimize(fn, policy=RING)

    fns = [shard(body(f), mesh, (P(), P())) for f in (ours, lambda fn: fn)]
    for a, b in zip(*(jax.jit(f)(x) for f in fns), strict=True):
        np.testing.assert_array_equal(a, b)


def calls(x):
    """A constraint before a call whose own policy plans it, looked through element by element."""
    return xcoll.psum(-2 * cut(x, None, "model") + 1, MANUAL, policy=RING)


def in_jit(x):
    return jax.jit(lambda y: lax.psum(2 * y, MANUAL))(cut(x, None, "model"))


def from_jit(x):
    return lax.psum(jax.jit(lambda y: cut(y, None, "model"))(x) * rank(), MANUAL)


def in_remat(x):
    return jax.checkpoint(lambda y: lax.psum(2 * y, MANUAL))(cut(x, None, "model"))


def in_scan(x):
    def step(carry, _):
        return carry, lax.psum(cut(carry, None, "model"), MANUAL)

    return lax.scan(step, x, None, length=2)[1]


@pytest.mark.parametrize("body", [calls, in_jit, from_jit, in_remat, in_scan])
def test_constraints_are_followed(body):
    mesh = mesh_of()
    x = operand(mesh)
    fn = shard(body, mesh, P())
    report, program = compiled(fn, x)
    assert all(site.plan.name == "ring" for site in report.sites) and report.sites
    assert over_model(program, mesh) == []
    with xcoll.disable():
        want = jax.jit(lambda x: fn(x))(x)
    np.testing.assert_array_equal(program(x), want)


def test_a_constraint_outside_the_shard_map():
    mesh = mesh_of(dcn=2)
    x = operand(mesh)

    def fn(x):
        x = lax.with_sharding_constraint(x, jax.NamedSharding(mesh, P(MANUAL, "model")))
        return shard(lambda x: lax.psum(x, MANUAL), mesh, P())(x)

    report, program = compiled(fn, x)
    assert kept(report) == [None] and over_model(program, mesh) == []
    np.testing.assert_array_equal(program(x), np.asarray(x).reshape(4, 32, 6).sum(0))


def test_axes_of_one_device_need_no_constraint():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(1, 4, 1), ("dcn", "data", "model"))
    x = operand(mesh)
    report, program = compiled(shard(lambda x: lax.psum(x, MANUAL), mesh, P()), x)
    assert kept(report) == [None]
    np.testing.assert_array_equal(program(x), np.asarray(x).reshape(4, 32, 6).sum(0))


def after_another_way(x):
    """The same function, called with two cuts: neither is the cut of its operand."""
    f = jax.jit(lambda y: lax.psum(y, MANUAL))
    return f(cut(x, "model")) + f(cut(x, None, "model"))


KEPT = {
    "not known": (lambda x: lax.psum(x, MANUAL), "is not known; say it.*with_sharding_constraint"),
    "of unlike cuts": (
        lambda x: lax.psum(cut(x, "model") + cut(x, None, "model"), MANUAL),
        "is not known",
    ),
    "left open": (lambda x: lax.psum(cut(x, P.UNCONSTRAINED, "model"), MANUAL), "is not known"),
    "by a product": (lambda x: lax.psum(cut(x, None, "model") @ jnp.ones((6, 2)), MANUAL), "known"),
    "scattered": (
        lambda x: lax.psum_scatter(cut(x, "model"), MANUAL, tiled=True),
        r"dimension 0, which the partitioner divides over \('model',\); use another dimension",
    ),
    "exchanged": (
        lambda x: lax.all_to_all(cut(x, None, "model"), MANUAL, 0, 1, tiled=True),
        "dimension 1, which the partitioner divides over",
    ),
    "gathered": (
        lambda x: lax.all_gather(cut(x, None, "model"), MANUAL, axis=1, tiled=True),
        "dimension 1, which the partitioner divides over",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_with_the_reason(name):
    mesh = mesh_of()
    x = operand(mesh)
    body, reason = KEPT[name]
    fn = shard(body, mesh, check_vma=False)
    report, program = compiled(fn, x, policy=POLICIES["all_to_all"])
    (got,) = kept(report)
    assert got is not None and re.search(reason, got), got
    np.testing.assert_array_equal(program(x), jax.jit(fn)(x))


def test_one_function_with_two_cuts_is_kept():
    mesh = mesh_of()
    x = operand(mesh)
    fn = shard(after_another_way, mesh, P())
    report, program = compiled(fn, x)
    assert all("is not known" in reason for reason in kept(report))
    np.testing.assert_array_equal(program(x), jax.jit(fn)(x))


def test_what_does_not_divide_is_kept():
    mesh = mesh_of()
    x = jnp.ones((4 * 32, 5))
    fn = shard(lambda x: lax.psum(cut(x, None, "model"), MANUAL), mesh, P())
    report = xcoll.explain(fn, x, policy=RING)
    (reason,) = kept(report)
    assert "dimension 1 of shape (32, 5) does not divide evenly over the 2 ranks" in reason


def test_forced_by_name_what_is_not_known_is_an_error():
    mesh = mesh_of()
    fn = shard(lambda x: xcoll.psum(x, MANUAL, policy=RING), mesh, P())
    with pytest.raises(ValueError, match="ring was asked for.*with_sharding_constraint"):
        jax.jit(fn).lower(operand(mesh))


TARGETS = {
    "2*v5e:2x2": ("libtpu", HIERARCHICAL),
    "h100:8": ("jax_plugins.xla_cuda13", RING),
}


@pytest.mark.parametrize("topology", TARGETS)
def test_compiled_for_accelerators_nothing_is_gathered_over_model(topology):
    package, policy = TARGETS[topology]
    if importlib.util.find_spec(package.split(".")[0]) is None:
        pytest.skip(f"needs {package}, of the aot extra")
    mesh = aot.mesh(topology, (2, 2, 2), ("dcn", "data", "model"))

    def body(x):
        x = cut(x, None, "model")
        return lax.psum(x, MANUAL), lax.psum_scatter(2 * x, MANUAL, tiled=True)

    fn = shard(body, mesh, (P(), P(MANUAL)))
    sharding = jax.NamedSharding(mesh, P(MANUAL, "model"))
    x = jax.ShapeDtypeStruct((4 * 512, 512), jnp.float32, sharding=sharding)
    report, program = compiled(fn, x, policy=policy)
    assert kept(report) == [None, None]
    assert over_model(program, mesh) == []
    assert hlo.collectives(program), "and yet it communicates"


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codecs(rounding):
    mesh = mesh_of()
    x = 1.1 * operand(mesh, rows=512, columns=128)
    codec = xcoll.codecs.int8(rounding=rounding)

    def body(x):
        y = cut(x, None, "model")
        key = jax.random.key(0)
        return xcoll.psum(y, MANUAL, key=key), xcoll.all_gather(y, MANUAL, key=key, tiled=True)

    fn = shard(body, mesh, (P(), SPLIT))
    report, program = compiled(fn, x, policy=xcoll.Policy(codec=codec, algorithm="direct"))
    total, gathered = report.sites
    assert kept(report) == [None, None] and over_model(program, mesh) == []
    assert total.plan.is_lossy and gathered.plan.is_lossy
    assert nonzero(report.wire_bytes()) == nonzero(hlo.wire_bytes(program, mesh))
    ranks = np.asarray(x, np.float64).reshape(4, 512, 128)
    # Every element of the operand is below 10 in magnitude, so every block is.
    for got, want, bound in zip(
        program(x),
        (ranks.sum(0), np.tile(np.asarray(x), (4, 1))),
        (4 * 10 * total.plan.max_error, 10 * gathered.plan.max_error),
        strict=True,
    ):
        error = np.abs(np.asarray(got) - want)
        assert 0 < error.max() <= bound


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("topology", TARGETS)
def test_codecs_compile_for_accelerators(topology):
    package, _ = TARGETS[topology]
    if importlib.util.find_spec(package.split(".")[0]) is None:
        pytest.skip(f"needs {package}, of the aot extra")
    mesh = aot.mesh(topology, (2, 2, 2), ("dcn", "data", "model"))
    fn = shard(lambda x: lax.psum(cut(x, None, "model"), MANUAL), mesh, P())
    sharding = jax.NamedSharding(mesh, P(MANUAL, "model"))
    x = jax.ShapeDtypeStruct((4 * 1024, 1024), jnp.float32, sharding=sharding)
    report, program = compiled(fn, x, policy=xcoll.Policy(codec="int8", algorithm="direct"))
    (site,) = report.sites
    assert site.plan.is_lossy and site.plan.kernels == "Pallas"
    assert over_model(program, mesh) == []
    # Mosaic and Triton kernels both, which no partitioner can cut: they compiled.
    assert "custom-call" in program.as_text()
    kinds = {dtype for row in hlo.collectives(program) for dtype in row.dtypes}
    assert kinds == {"s8"}
