"""Compressors: what was applied and what is left is what was contributed; replicas are alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradient_runs import (
    CASES,
    COMPRESSORS,
    SHAPES,
    SLOW_TO_COMPILE,
    conservation_bound,
    normal,
    residual_of,
    run_steps,
)
from spmd import mesh_of

from xcoll import codecs, gradients
from xcoll.gradients import error_feedback, powersgd, random_k, sign, sync, top_k

STEPS = 12


def check_conserved(steps, grads, ranks, power_rank=0, skip=()):
    """Fails unless applied + residual = contributed, and the residual is needed for it."""
    names = sorted(grads)
    left = residual_of(steps.state, names)
    assert left
    biggest = max(np.abs(np.float64(g)).max() for g in grads.values() if g.size) / ranks
    bound = conservation_bound(len(grads[names[0]]), ranks, biggest + steps.largest, power_rank)
    for name, kept in left.items():
        contributed = np.float64(grads[name]).sum((0, 1)) / ranks
        applied = np.float64(steps.applied[name][:, 0]).sum(0)
        assert np.abs(applied + kept - contributed).max() <= bound, name
    if ranks > 1:
        # Without the residual the law would not hold: something was compressed.
        assert max(np.abs(kept).max() for kept in left.values()) > 10 * bound


def check_replicas(applied):
    for name, values in applied.items():
        for rank in range(values.shape[1]):
            assert values[:, rank].tobytes() == values[:, 0].tobytes(), (name, rank)


@pytest.mark.parametrize(
    ("name", "ranks", "check_vma"),
    [
        (name, ranks, check_vma)
        for name in COMPRESSORS
        for ranks, check_vma in CASES
        if name not in SLOW_TO_COMPILE or ranks in (3, 5)
    ],
)
def test_applied_and_residual_are_what_was_contributed(name, ranks, check_vma):
    mesh = mesh_of(ranks)
    grads = normal(np.random.default_rng(ranks), STEPS, ranks, SHAPES)
    transformation = sync("i", compressor=COMPRESSORS[name], mesh=mesh)
    steps = run_steps(transformation, grads, mesh, check_vma=check_vma)
    check_conserved(steps, grads, ranks, power_rank=2 if name == "powersgd" else 0)
    check_replicas(steps.applied)
    assert {k: v.shape[2:] for k, v in steps.applied.items()} == SHAPES


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [*((name, True) for name in COMPRESSORS if name not in SLOW_TO_COMPILE), ("int8", False)],
)
def test_exact_around_compression(name, check_vma):
    # Exact over the inner axis: only a shard of each bucket is compressed, and has a residual.
    mesh = mesh_of(4, 2, names=("device", "host"))
    # With the long leaf a shard is sent as whole tiles.
    grads = normal(np.random.default_rng(1), STEPS, 8, {**SHAPES, "g": (8197,)})
    transformation = sync(
        ("device", "host"), compressor=COMPRESSORS[name], compress_axis="host", mesh=mesh
    )
    steps = run_steps(transformation, grads, mesh, check_vma=check_vma)
    check_conserved(steps, grads, 8, power_rank=2 if name == "powersgd" else 0)
    check_replicas(steps.applied)
    bucket = steps.state.buckets[0]
    elements = sum(int(np.prod(shape)) for shape in bucket.layout.shapes)
    assert bucket.layout.num_shards == 4
    if not bucket.layout.block:
        # By rows a matrix of 61 rows is padded to 64.
        padded = elements if name != "powersgd" else 16 * 24 + 64 * 7
        assert bucket.contributed.value.shape == (8, -(-padded // 4))
    else:
        share = bucket.reduced.value.shape[1]
        assert 8 * share >= elements and share % bucket.layout.block == 0
        assert 8 * (share - bucket.layout.block) < elements
        assert bucket.contributed.value.shape == (8, 2 * share)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in COMPRESSORS), ("int8", "float16"), ("top_k", "float16")],
)
def test_rounding_to_a_narrow_dtype_is_kept_too(name, dtype):
    mesh = mesh_of(5)
    shapes = {"b": (16, 24), "e": (61, 7)}
    grads = normal(np.random.default_rng(2), STEPS, 5, shapes, dtype)
    steps = run_steps(sync("i", compressor=COMPRESSORS[name], mesh=mesh), grads, mesh)
    # The same bound as for float32: a rounding of the result would be 2^16 times as large.
    check_conserved(steps, grads, 5, power_rank=2 if name == "powersgd" else 0)
    check_replicas(steps.applied)
    assert all(v.dtype == jnp.dtype(dtype) for v in steps.applied.values())


@pytest.mark.parametrize("name", COMPRESSORS)
def test_without_feedback_there_is_no_residual(name):
    compressor = COMPRESSORS[name]
    without = type(compressor)(**{**vars(compressor), "feedback": False})
    mesh = mesh_of(3)
    grads = normal(np.random.default_rng(3), 2, 3, {"b": (16, 24)})
    steps = run_steps(sync("i", compressor=without, mesh=mesh), grads, mesh)
    bucket = steps.state.buckets[0]
    assert bucket.contributed is None and bucket.reduced is None
    check_replicas(steps.applied)
    # The first step is the same as with feedback, random_k's scaling apart.
    first = run_steps(sync("i", compressor=compressor, mesh=mesh), grads, mesh)
    times = 10 if name == "random_k" else 1
    got, want = steps.applied["b"][0], first.applied["b"][0]
    drawn = want != 0
    # 384 elements in 39 parts: of ten or of nine.
    ratio = got[drawn] / want[drawn]
    assert ((ratio == 1) if times == 1 else (np.abs(ratio - 9.5) <= 0.5 + 1e-5)).all()


def power_of_two_int8(x):
    """Encodes and decodes blocks of 256 with the smallest power-of-two scale that fits 127."""
    blocks = x.reshape(-1, 256)
    largest = np.abs(blocks).max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        scale = np.where(largest > 0, np.exp2(np.ceil(np.log2(largest / 127))), 1)
    return (np.rint(blocks / scale) * scale).reshape(x.shape).astype(np.float32)


def test_int8_is_the_two_shot_plan_bit_for_bit():
    ranks, share = 4, 512
    mesh = mesh_of(ranks)
    # 1900 elements are eight blocks of 256, the last one padded: two blocks a rank.
    grads = normal(np.random.default_rng(4), 3, ranks, {"w": (1900,)})
    steps = run_steps(sync("i", compressor=error_feedback(codecs.int8()), mesh=mesh), grads, mesh)
    first = np.zeros((ranks, ranks * share), np.float32)
    second = np.zeros(ranks * share, np.float32)
    for step, x in enumerate(grads["w"]):
        v = np.pad(x / np.float32(ranks), ((0, 0), (0, 148))) + first
        sent = np.stack([power_of_two_int8(row) for row in v])
        first = v - sent
        total = sent[0]
        for row in sent[1:]:
            total = total + row
        total = total + second
        applied = power_of_two_int8(total)
        second = total - applied
        np.testing.assert_array_equal(steps.applied["w"][step, 0], applied[:1900])
    bucket = steps.state.buckets[0]
    np.testing.assert_array_equal(bucket.contributed.value, first)
    np.testing.assert_array_equal(bucket.reduced.value.reshape(-1), second)


def test_the_residual_of_int8_stays_small():
    # |r'| <= d |v| <= d (c + |r|) with d = 1 / 127, so |r1| <= d / (1 - d) c; a sum of n ranks'
    # decoded values is at most n c / (1 - d)^2, of which r2 keeps at most as large a part.
    mesh = mesh_of(4)
    grads = {"w": np.random.default_rng(5).uniform(-1, 1, (50, 4, 1024)).astype(np.float32)}
    steps = run_steps(sync("i", compressor=error_feedback(codecs.int8()), mesh=mesh), grads, mesh)
    d, c = 1 / 127, 1 / 4
    assert steps.largest <= 1.001 * max(1, 4 / (1 - d) ** 2) * c * d / (1 - d)


def test_top_k_sends_the_largest_of_each_rank():
    # Four ranks: dividing by a power of two is exact, however the compiler does it.
    ranks = 4
    mesh = mesh_of(ranks)
    grads = normal(np.random.default_rng(6), 1, ranks, {"w": (101,)})
    steps = run_steps(sync("i", compressor=top_k(0.1), mesh=mesh), grads, mesh)
    want = np.zeros(101, np.float32)
    left = []
    for x in grads["w"][0] / np.float32(ranks):
        chosen = np.argsort(-np.abs(x))[:11]  # ceil(10.1)
        want[chosen] += x[chosen]
        x[chosen] = 0
        left.append(x)
    np.testing.assert_array_equal(steps.applied["w"][0, 0], want)
    np.testing.assert_array_equal(steps.state.buckets[0].contributed.value, np.stack(left))


@pytest.mark.parametrize("elements", [1, 7, 97, 640])
def test_random_k_draws_the_same_on_all_ranks_and_everything_in_the_end(elements):
    ranks, steps = 3, 200
    mesh = mesh_of(ranks)
    grads = {"w": np.ones((steps, ranks, elements), np.float32)}
    run = run_steps(sync("i", compressor=random_k(0.1, feedback=False), mesh=mesh), grads, mesh)
    drawn = run.applied["w"][:, 0] != 0
    # Where all ranks draw alike, the sum of their thirds is the size of the part each time.
    count = -(-elements // 10)
    assert (drawn.sum(1) == count).all()
    sizes = run.applied["w"][:, 0][drawn]
    assert set(np.round(sizes).astype(int)) <= {elements // count, -(-elements // count)}
    # Missing a given element of a part of 10 in 200 draws has probability 0.9^200 = 7e-10.
    assert drawn.any(0).all()
    # Unbiased: the mean of 200 draws of (10 with probability 1/10) has deviation 3 / sqrt(200); six
    # of them.
    assert np.abs(run.applied["w"][:, 0].mean(0) - 1).max() < 6 * 3 / np.sqrt(steps)


def test_another_seed_draws_others():
    mesh = mesh_of(2)
    grads = {"w": np.ones((1, 2, 200), np.float32)}
    draws = [
        run_steps(sync("i", compressor=random_k(0.1), mesh=mesh, seed=seed), grads, mesh)
        for seed in (0, 0, 1)
    ]
    first, again, other = (d.applied["w"] for d in draws)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_powersgd_finds_a_matrix_of_its_rank():
    ranks = 3
    mesh = mesh_of(ranks)
    rng = np.random.default_rng(7)
    matrix = (rng.standard_normal((40, 2)) @ rng.standard_normal((2, 30))).astype(np.float32)
    grads = {"w": np.broadcast_to(matrix, (3, ranks, 40, 30)).copy()}
    steps = run_steps(sync("i", compressor=powersgd(2, feedback=False), mesh=mesh), grads, mesh)
    # Two columns span the matrix's whole range from the first step on. Its condition is below 100
    # here, and so is the loss of digits in the projection.
    singular = np.linalg.svd(matrix, compute_uv=False)
    assert singular[1] > singular[0] / 100
    error = np.abs(steps.applied["w"][:, 0] - matrix).max()
    assert error <= 100 * 40 * 2**-24 * np.abs(matrix).max()


def test_powersgd_warm_start_improves():
    mesh = mesh_of(2)
    rng = np.random.default_rng(8)
    matrix = rng.standard_normal((40, 30)) @ np.diag(np.geomspace(10, 0.1, 30))
    grads = {"w": np.broadcast_to(matrix.astype(np.float32), (20, 2, 40, 30)).copy()}
    steps = run_steps(sync("i", compressor=powersgd(3, feedback=False), mesh=mesh), grads, mesh)
    errors = np.linalg.norm(steps.applied["w"][:, 0] - matrix, axis=(1, 2))
    best = np.sqrt((np.linalg.svd(matrix, compute_uv=False)[3:] ** 2).sum())
    # Converges towards the best matrix of rank three, and is never better.
    assert best * (1 - 1e-5) <= errors[-1] < errors[0] and errors[-1] < 1.05 * best


def test_powersgd_starts_after_steps_without_gradient():
    # A factor of zeros would stay zero for ever.
    mesh = mesh_of(2)
    grads = {"w": np.zeros((3, 2, 20, 20), np.float32)}
    grads["w"][2] = 1e-30  # Its square is no float32.
    steps = run_steps(sync("i", compressor=powersgd(1), mesh=mesh), grads, mesh)
    np.testing.assert_array_equal(steps.applied["w"][:2], 0)
    np.testing.assert_allclose(steps.applied["w"][2], 1e-30, rtol=1e-5)


def test_powersgd_leaves_vectors_exact():
    mesh = mesh_of(4)
    grads = normal(np.random.default_rng(9), 1, 4, {"v": (64,), "small": (2, 2), "m": (32, 32)})
    steps = run_steps(sync("i", compressor=powersgd(2), mesh=mesh), grads, mesh)
    assert [b.layout.names for b in steps.state.buckets] == [("['m']",)]
    for name in ("v", "small"):
        want = np.float64(grads[name][0]).mean(0)
        # Three additions and a division, of at most the sum of magnitudes.
        bound = 4 * 2**-24 * np.abs(np.float64(grads[name][0])).sum(0)
        assert (np.abs(steps.applied[name][0, 0] - want) <= bound).all()


def test_sign_is_the_mean_magnitude_with_the_sign():
    mesh = mesh_of(1, 2, names=("one", "i"))
    x = np.random.default_rng(10).standard_normal(64).astype(np.float32)
    grads = {"w": np.stack([x, x])[None]}
    compressor = sign(block=32, feedback=False)
    steps = run_steps(sync(("one", "i"), compressor=compressor, mesh=mesh), grads, mesh)
    # Both ranks alike: the mean of the two is one rank's, encoded once more.
    scale = np.repeat(np.abs(np.float64(x)).reshape(2, 32).mean(1), 32)
    np.testing.assert_allclose(steps.applied["w"][0, 0], np.sign(x) * scale, rtol=32 * 2**-24)


WIRE = {
    "int8": ("all_to_all", "int8", 8 * 257),
    "int4": ("all_to_all", "int8", 8 * (128 + 4)),
    "sign": ("all_to_all", "uint8", 8 * (32 + 4)),
    "top_k": ("all_gather", "int32", 2 * 103),
}


@pytest.mark.parametrize("name", WIRE)
def test_what_is_on_the_wire(name):
    primitive, dtype, items = WIRE[name]
    mesh = mesh_of(8)
    transformation = sync("i", compressor=COMPRESSORS[name], mesh=mesh)
    params = jnp.zeros(2048)  # a block of 256 for each of the 8 ranks
    state = transformation.init(params)
    specs = gradients.state_specs(state)
    update = jax.shard_map(
        lambda g, s: transformation.update(g[0], s),
        mesh=mesh,
        in_specs=(jax.P("i"), specs),
        out_specs=(jax.P(), specs),
    )
    found = {}

    def collect(jaxpr):
        for eqn in jaxpr.eqns:
            aval = eqn.invars[0].aval if eqn.invars else None
            found.setdefault(eqn.primitive.name, []).append(aval)
            for value in eqn.params.values():
                if hasattr(value, "eqns"):
                    collect(value)

    collect(jax.make_jaxpr(update)(jnp.zeros((8, 2048)), state).jaxpr)
    sent = [a for k, avals in found.items() if k.startswith(primitive) for a in avals]
    assert [(str(a.dtype), a.size) for a in sent if a.size == items] == [(dtype, items)]
    assert not any("psum" in k and "invariant" in k for k in found)
