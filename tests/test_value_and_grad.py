"""`gradients.value_and_grad`: the gradients of the whole batch, beside axes of the partitioner."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

import xcoll
from xcoll import Policy, codecs, hlo
from xcoll.gradients import value_and_grad

P = jax.P
AXES = ("dcn", "data")
SPECS = {"up": P(None, "model"), "down": P("model"), "bias": P()}


def mesh_of(kind="Auto", shape=(2, 2, 2)):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, (*AXES, "model"), axis_types=(getattr(AxisType, kind),) * 3)


def integers(*shape, seed=0):
    """Of magnitude 2 at most: all sums below are of integers under 2^24, or these by 2^k: exact."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def params_on(mesh, specs=SPECS):
    values = {"up": integers(4, 8), "down": integers(8, 2, seed=1), "bias": integers(2, seed=2)}
    return jax.device_put(values, {k: jax.NamedSharding(mesh, specs[k]) for k in values})


def batch_on(mesh, rows=16):
    spec = jax.NamedSharding(mesh, P(AXES))
    return jax.device_put((integers(rows, 4, seed=3), integers(rows, 2, seed=4)), (spec, spec))


def loss(params, x, y):
    # The result's sharding is the rows' own, where types say shardings: out of a product over
    # a dimension that is divided it has to be said.
    typed = {}
    if jax.typeof(params["down"]).sharding.spec[:1] == ("model",):
        rows = jax.typeof(x).sharding.spec[:1] or (None,)
        typed = {"out_sharding": P(rows[0], None)}
    hidden = jax.nn.relu(jnp.dot(x, params["up"]))
    out = jnp.dot(hidden, params["down"], **typed) + params["bias"]
    return jnp.mean(jnp.square(out - y))


def plain(fun, *args, **options):
    """What jax makes of it on one device."""
    return jax.jit(jax.value_and_grad(fun, **options))(*jax.tree.map(np.asarray, args))


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def assert_replicas_alike(tree):
    for leaf in jax.tree.leaves(tree):
        seen = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert seen.setdefault(str(shard.index), bits) == bits


def gathers_over_model(program, mesh):
    rows = [row for row in hlo.collectives(program) if "model" in hlo.axes_of(row, mesh)]
    return sum(row.kind == "all-gather" for row in rows)


def kept(step):
    return [site.kept_reason for site in step.reports[-1].sites]


@pytest.mark.parametrize("how", ["jit", "eager"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_gradients_of_the_whole_batch(kind, how):
    mesh = mesh_of(kind)
    params, (x, y) = params_on(mesh), batch_on(mesh)
    ring = Policy(algorithm="ring")
    # Outside jit arrays show how they are divided; inside, types of Explicit axes do.
    specs = SPECS if (kind, how) == ("Auto", "jit") else None
    for policy in (None, ring) if kind == "Auto" else (ring,):
        step = value_and_grad(loss, mesh=mesh, policy=policy, param_specs=specs)
        got = (jax.jit(step) if how == "jit" else step)(params, x, y)
        assert_equal(got, plain(loss, params, x, y))
        assert_replicas_alike(got)
        assert len(step.reports) == 1 and len(step.reports[0].sites) == 3
        if policy is ring:
            assert kept(step) == [None] * 3
            for name, grad in got[1].items():
                assert grad.sharding.is_equivalent_to(params[name].sharding, grad.ndim)


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 1), (1, 1, 2), (8, 1, 1), (1, 1, 1)])
def test_axes_of_one_rank(shape):
    mesh = mesh_of(shape=shape)
    params, (x, y) = params_on(mesh), batch_on(mesh)
    step = value_and_grad(loss, mesh=mesh, param_specs=SPECS, policy=Policy(algorithm="direct"))
    assert_equal(jax.jit(step)(params, x, y), plain(loss, params, x, y))


def test_the_mesh_is_that_of_the_context_or_of_the_arguments():
    mesh = mesh_of()
    params, (x, y) = params_on(mesh), batch_on(mesh)
    want = plain(loss, params, x, y)
    step = value_and_grad(loss, param_specs=SPECS)
    assert_equal(jax.jit(step)(params, x, y), want)
    numpy = jax.tree.map(np.asarray, (params, x, y))
    with jax.set_mesh(mesh):
        assert_equal(jax.jit(step)(*numpy), want)
        assert_equal(step(*numpy), want)
    with pytest.raises(ValueError, match=r"there is no mesh.*pass value_and_grad\(..., mesh=mesh"):
        step(*numpy)


def test_types_of_explicit_axes_are_met():
    """A batch that lies otherwise is divided, where jax.shard_map alone would refuse it."""
    mesh = mesh_of("Explicit")
    x = batch_on(mesh)[0]
    elsewhere = jax.device_put(x, jax.NamedSharding(mesh, P("model", "data")))
    step = value_and_grad(lambda p, x: jnp.mean((x * p) ** 2), mesh=mesh)
    weights = jax.device_put(integers(4), jax.NamedSharding(mesh, P()))
    want = plain(lambda p, x: jnp.mean((x * p) ** 2), weights, x)
    assert_equal(jax.jit(step)(weights, elsewhere), want)
    with jax.set_mesh(mesh):
        assert_equal(jax.jit(step)(weights, np.asarray(x)), want)


def test_argnums_and_keywords():
    mesh = mesh_of()
    scale, x, w = {"a": jnp.float32(3)}, batch_on(mesh)[0], integers(4)

    def fun(x, w, scale, mode, *, offset):
        assert mode == "square"
        return jnp.mean(scale["a"] * (x @ w) ** 2 + offset)

    offset = integers(16, seed=5)
    for argnums in ((2, 1), [2]):
        in_axes = (0, None, None, None)  # Of [2], w is the same on all ranks too.
        step = value_and_grad(fun, argnums, mesh=mesh, in_axes=in_axes)
        want = jax.value_and_grad(fun, argnums)(np.asarray(x), w, scale, "square", offset=offset)
        assert_equal(step(x, w, scale, "square", offset=offset), want)
    step = value_and_grad(fun, (-2, -3), mesh=mesh, param_specs=(P(), P()))
    want = jax.value_and_grad(fun, (2, 1))(np.asarray(x), w, scale, "square", offset=offset)
    assert_equal(step(x, w, scale, "square", offset=offset), want)


AUX = {
    "loss": lambda x: jnp.mean(x),
    "rows": lambda x: 2 * x,
    "count": lambda x: jnp.sum(x > 0),
    "statistic": lambda x: jnp.mean(x, 0),
    "largest": lambda x: jnp.max(x),
    "least": lambda x: jnp.min(x),
    "any": lambda x: jnp.any(x > 1),
}
AUX_OPS = {
    "loss": None, "rows": "concatenate", "count": "sum", "statistic": "mean", "largest": "max",
    "least": "min", "any": "max",
}  # fmt: skip


def test_unused_and_scalar_parameters():
    mesh, x = mesh_of(), integers(16, 4)
    params = {"w": integers(4), "scale": np.float32(2), "unused": integers(3)}

    def fun(p, x):
        return jnp.mean(p["scale"] * (x @ p["w"]) ** 2)

    for policy in (None, Policy(algorithm="ring")):
        step = value_and_grad(fun, mesh=mesh, param_specs=P(), policy=policy)
        value, grads = jax.jit(step)(params, x)
        assert_equal((value, grads), plain(fun, params, x))
        assert not grads["unused"].any() and len(step.reports[0].sites) == 3


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 3),
    reason="beside axes of the partitioner XLA aborts on empty arrays",
)
def test_empty_parameters_and_aux():
    mesh, x = mesh_of(), integers(16, 4)
    params = {"w": integers(4), "empty": np.zeros((0, 4), np.float32)}

    def fun(p, x):
        return jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["empty"]), x[:0]

    for policy in (None, Policy(algorithm="ring")):
        options = {"mesh": mesh, "param_specs": P(), "policy": policy}
        step = value_and_grad(fun, has_aux=True, aux_op="mean", **options)
        (value, aux), grads = jax.jit(step)(params, x)
        assert_equal((value, grads), plain(lambda p, x: fun(p, x)[0], params, x))
        assert aux.shape == (0, 4)


def test_methods_can_be_decorated():
    class Model:
        power = 2

        @functools.partial(value_and_grad, argnums=1)
        def loss(self, w, x):
            return jnp.mean((x @ w) ** self.power)

    w, x = integers(4), integers(16, 4, seed=1)
    with jax.set_mesh(mesh_of()):
        assert_equal(Model().loss(w, x), plain(lambda w, x: jnp.mean((x @ w) ** 2), w, x))
    assert len(Model().loss.reports) == len(Model.loss.reports) == 1


def test_a_sum_over_examples_is_averaged_over_ranks():
    fun = lambda w, x: jnp.sum(x @ w)  # noqa: E731
    w, x = integers(4), integers(16, 4, seed=1)
    value, grads = jax.jit(value_and_grad(fun, mesh=mesh_of()))(w, x)
    assert value == (x @ w).sum() / 4
    np.testing.assert_array_equal(grads, x.sum(0) / 4)


@pytest.mark.parametrize("how", ["jit", "eager"])
def test_aux_is_the_whole_batchs(how):
    mesh = mesh_of()
    x = batch_on(mesh)[0]

    def fun(w, x):
        return jnp.mean((x @ w) ** 2), {"nothing": None} | {k: f(x) for k, f in AUX.items()}

    ops = AUX_OPS | {"nothing": None}
    step = value_and_grad(fun, has_aux=True, mesh=mesh, aux_op=ops)
    got = (jax.jit(step) if how == "jit" else step)(integers(4), x)
    # That each is what the same function gives of the whole batch is what the ops say.
    want = plain(fun, integers(4), x, has_aux=True)
    assert_equal(got, want)
    assert got[0][1]["any"].dtype == bool


def test_float_scalars_are_averaged_unasked():
    mesh = mesh_of()

    def fun(w, x):
        return jnp.mean(x @ w), (jnp.sum(x), 2.5)

    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    step = value_and_grad(fun, has_aux=True, mesh=mesh)
    (_, (total, constant)), _ = step(np.ones(4, np.float32), x)
    # A row a rank: sums of 6, 22, 38 and 54.
    assert (total, constant) == (30, 2.5)


AUX_ERRORS = {
    "rows": (None, r"aux\['rows'\] of dtype float32 and shape \(4, 4\) on each rank: only float"),
    "count": (None, r"aux\['count'\] of dtype int32 and shape \(\).*aux_op='concatenate'"),
    "any": (None, r"aux\['any'\] of dtype bool"),
    "key": ("max", r"aux\['key'\] of dtype key<fry>.* has no max; leave it out"),
    "count ": ("mean", "a mean of int32 is none; use 'sum'"),
    "loss": ("concatenate", "no dimension to concatenate along"),
    "loss ": ("avg", "unknown op 'avg'; valid: 'mean', 'sum', 'max', 'min', 'concatenate'"),
    "loss  ": ({"other": "mean"}, "or a pytree of them that is a prefix of aux"),
}


@pytest.mark.parametrize("name", AUX_ERRORS)
def test_aux_that_is_not_known_is_an_error(name):
    op, message = AUX_ERRORS[name]
    key, aux = name.strip(), AUX | {"key": lambda x: jax.random.key(0)}
    step = value_and_grad(
        lambda w, x: (jnp.mean(x @ w), {key: aux[key](x)}), has_aux=True, aux_op=op, mesh=mesh_of()
    )
    with pytest.raises(ValueError, match=message):
        step(integers(4), integers(16, 4))
    if key == "loss":
        step = value_and_grad(
            lambda w, x: (jnp.mean(x @ w), {"name": "x"}), has_aux=True, mesh=mesh_of()
        )
        with pytest.raises(TypeError, match=r"aux\['name'\] is a str, not an array"):
            step(integers(4), integers(16, 4))


def rows_by_scan(w, x):
    """A carry that starts as zeros, which types of varying axes refuse."""
    return lax.scan(lambda c, row: (c + (row @ w) ** 2, None), jnp.zeros(()), x)[0] / x.shape[0]


def rows_by_vmap(w, x):
    return jnp.mean(jax.vmap(lambda row: (row @ w) ** 2)(x))


def rows_by_remat(w, x):
    return jnp.mean(jax.checkpoint(lambda x: (x @ w) ** 2)(x))


def rows_by_loop(w, x):
    weights = lax.fori_loop(0, 2, lambda _, w: 2 * w, w)
    return lax.cond(weights[0] < 100, lambda: jnp.mean((x @ weights) ** 2), lambda: 0.0)


def rows_that_count(w, x):
    """Of rows that are not padding: their number is all ranks', where there are ranks."""
    is_real = x[:, 0] != 0
    count = jnp.sum(is_real.astype(jnp.float32))
    if xcoll._compat.bound_axes():
        count = lax.pmean(count, AXES)
    return jnp.sum(jnp.where(is_real, x @ w, 0)) / count


@pytest.mark.parametrize(
    "fun", [rows_by_scan, rows_by_vmap, rows_by_remat, rows_by_loop, rows_that_count]
)
def test_any_function_that_jit_takes(fun):
    mesh = mesh_of()
    w, x = integers(4), integers(16, 4, seed=3)
    x[2, 0], x[:4, 0] = 1, 0  # A rank without any real row but one.
    step = jax.jit(value_and_grad(fun, mesh=mesh, param_specs=P("model")))
    got, want = step(w, x), plain(fun, w, x)
    if fun is not rows_that_count:
        assert_equal(got, want)
    else:
        # A division by a count that is no power of two: 4 quotients, added and divided.
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=8 * 2.0**-24 * np.abs(x).sum())


def test_inside_a_loop_and_differentiated_from_outside():
    mesh = mesh_of()
    w, x = integers(4), integers(2, 16, 4, seed=3)
    step = value_and_grad(rows_by_vmap, mesh=mesh, param_specs=P("model"))

    @jax.jit
    def accumulated(w, x):
        return lax.scan(lambda c, part: (c + step(w, part)[1], None), jnp.zeros(4), x)[0]

    @jax.jit
    def penalised(w):
        return jnp.sum(step(w, x[0])[1] ** 2)

    def reference(w, x):
        return jax.grad(rows_by_vmap)(w, x)

    np.testing.assert_array_equal(accumulated(w, x), reference(w, x[0]) + reference(w, x[1]))
    want = jax.grad(lambda w: jnp.sum(reference(w, x[0]) ** 2))(w)
    np.testing.assert_array_equal(jax.grad(penalised)(w), want)


def test_narrow_parameters():
    mesh = mesh_of()
    x = integers(16, 4, seed=3)
    for dtype in (jnp.bfloat16, jnp.float16):
        w = jnp.asarray(integers(4), dtype)
        fun = lambda w, x: jnp.mean(x.astype(w.dtype) @ w)  # noqa: E731
        got = jax.jit(value_and_grad(fun, mesh=mesh))(w, x)
        # Means of 16 integers of magnitude 2 at most have 6 bits: exact.
        assert_equal(got, plain(fun, w, x))
    large = jnp.full(1, 6e4, jnp.float16)
    fun = lambda w, x: jnp.mean(w.astype(jnp.float32) * x)  # noqa: E731
    _, grad = value_and_grad(fun, mesh=mesh)(large, np.full(4, 6e4, np.float32))
    # The sum of 4 x 60000 is beyond float16, their mean is not.
    assert grad.dtype == jnp.float16 and grad[0] == 6e4


def test_a_nan_of_one_rank_shows():
    mesh = mesh_of()
    w, x = integers(4), integers(16, 4, seed=3)
    x[13, 2] = np.nan
    fun = lambda w, x: jnp.mean(x @ w)  # noqa: E731
    int8 = Policy(codec="int8", algorithm="direct", min_bytes=0)
    for policy in (Policy.native(), int8):
        step = jax.jit(value_and_grad(fun, mesh=mesh, policy=policy, param_specs=P()))
        value, grad = step(w, x)
        assert np.isnan(value) and np.isnan(grad[2])
        assert_replicas_alike(grad)


def test_keys_tables_and_in_axes():
    mesh = mesh_of()
    w, x, table = integers(4), integers(16, 4, seed=3), integers(8, seed=5)

    def fun(w, batch, key, scale):
        assert batch["x"].shape == ((4, 4) if xcoll._compat.bound_axes() else (16, 4))
        assert batch["table"].shape == (8,)
        noise = jax.random.randint(key, (4,), 0, 3).astype(jnp.float32)
        return jnp.mean((batch["x"] * noise) @ w) * batch["table"][7] * scale

    step = value_and_grad(fun, mesh=mesh, in_axes=(None, {"x": 0, "table": None}, None, 0))
    args = (w, {"x": x, "table": table}, jax.random.key(0), np.float32(2))
    want = jax.jit(jax.value_and_grad(fun))(*args)
    assert_equal(jax.jit(step)(*args), want)
    keyed = value_and_grad(lambda w, x, key: fun(w, {"x": x, "table": table}, key, 2.0), mesh=mesh)
    assert_equal(jax.jit(keyed)(w, x, jax.random.PRNGKey(0)), want)
    columns = value_and_grad(lambda w, x: jnp.mean(w @ x), mesh=mesh, in_axes=-1)
    assert_equal(columns(w, x.T), jax.value_and_grad(lambda w, x: jnp.mean(w @ x))(w, x.T))


def test_ranks_may_draw_for_themselves():
    def fun(w, x, key):
        own = jax.random.fold_in(key, lax.axis_index(AXES))
        return jnp.mean(w * jax.random.uniform(own, x.shape))

    args = (jnp.float32(1), np.ones(4, np.float32), jax.random.key(0))
    _, got = jax.jit(value_and_grad(fun, mesh=mesh_of()))(*args)
    keys = [jax.random.fold_in(jax.random.key(0), rank) for rank in range(4)]
    want = np.mean([jax.random.uniform(key, (1,)) for key in keys], dtype=np.float64)
    np.testing.assert_allclose(got, want, rtol=4 * 2.0**-24)


WIDE = {"up": P(None, "model"), "down": P("model")}


def wide_params(mesh):
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(128, 1024)), "down": rng.normal(size=(1024, 128))}
    return jax.device_put(
        jax.tree.map(np.float32, params), {k: jax.NamedSharding(mesh, s) for k, s in WIDE.items()}
    )


INT8 = Policy(codec={"dcn": codecs.int8()})


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_int8_over_the_slow_axis(kind):
    mesh = mesh_of(kind)
    params = wide_params(mesh)
    x = np.random.default_rng(1).normal(size=(16, 128)).astype(np.float32)
    x = jax.device_put(x, jax.NamedSharding(mesh, P(AXES)))

    def fun(p, x):
        hidden = jnp.tanh(x @ p["up"])
        return jnp.mean(hidden[:, :, None] * p["down"], axis=(0, 1, 2))

    step = value_and_grad(
        fun, mesh=mesh, policy=INT8, topology="2*cpu:4@200Mbit",
        param_specs=WIDE if kind == "Auto" else None,
    )  # fmt: skip
    program = jax.jit(step).lower(params, x).compile()
    (report,) = step.reports
    assert kept(step) == [None, None]
    assert all("dcn" in s.axes and s.plan.is_lossy and "/int8" in s.plan.name for s in report.sites)
    crossing = [row for row in hlo.collectives(program) if "dcn" in hlo.axes_of(row, mesh)]
    assert "s8" in {dtype for row in crossing for dtype in row.dtypes}
    exact = value_and_grad(fun, mesh=mesh, policy=Policy.native(), param_specs=WIDE)
    native = jax.jit(exact).lower(params, x).compile()
    assert gathers_over_model(program, mesh) == gathers_over_model(native, mesh) == 0
    assert hlo.wire_bytes(program, mesh)["model"] == hlo.wire_bytes(native, mesh)["model"]
    # Codes of 8 bits and a byte a block of 256, for 32.
    assert hlo.wire_bytes(program, mesh)["dcn"] <= 0.27 * hlo.wire_bytes(native, mesh)["dcn"]
    value, got = program(params, x)
    assert_replicas_alike(got)
    parts = np.asarray(x).reshape(4, 4, 128)
    ranks = [jax.grad(fun)(jax.tree.map(np.asarray, params), part) for part in parts]
    want = plain(fun, params, x)
    np.testing.assert_allclose(value, want[0], rtol=1e-4)
    for name, site in zip(sorted(got), report.sites, strict=True):
        bound = site.plan.max_error * sum(np.abs(g[name]).max() for g in ranks) / 4
        error = np.abs(np.asarray(got[name]) - want[1][name]).max()
        assert 0 < error <= bound


def test_where_the_cut_is_not_known_the_sum_is_exact_and_said():
    mesh = mesh_of()
    params, (x, y) = params_on(mesh), batch_on(mesh)
    policy = Policy(codec="int8", algorithm="direct", min_bytes=0)
    step = value_and_grad(loss, mesh=mesh, policy=policy)
    with pytest.warns(xcoll.XcollWarning, match="3 of 3 parameters .* over model .*param_specs="):
        got = jax.jit(step)(params, x, y)
    assert_equal(got, plain(loss, params, x, y))
    assert all("is not known" in reason for reason in kept(step))
    quiet = value_and_grad(loss, mesh=mesh, policy=Policy(algorithm="ring"))
    jax.jit(quiet).lower(params, x, y)
    assert all("is not known" in reason for reason in kept(quiet))


def test_parameters_divided_over_a_data_axis():
    """An error where all data axes are manual; by the partitioner where the axis is left to it."""
    mesh = mesh_of()
    specs = {"up": P("data", "model"), "down": P("model", "data"), "bias": P()}
    params, (x, y) = params_on(mesh, specs), batch_on(mesh)
    message = r"\['down'\] is divided over 'data' by .*axis_name=\('dcn',\), which shards"
    with pytest.raises(ValueError, match=message):
        value_and_grad(loss, mesh=mesh)(params, x, y)
    with pytest.raises(ValueError, match=message):
        jax.jit(value_and_grad(loss, mesh=mesh, param_specs=specs))(params, x, y)
    ring = Policy(algorithm="ring")
    step = value_and_grad(loss, mesh=mesh, axis_name="dcn", param_specs=specs, policy=ring)
    got = jax.jit(step)(params, x, y)
    assert_equal(got, plain(loss, params, x, y))
    assert kept(step) == [None] * 3
    for name, grad in got[1].items():
        assert grad.sharding.is_equivalent_to(params[name].sharding, grad.ndim)


def test_training_with_optax_and_donated_parameters():
    mesh = mesh_of()
    params, (x, y) = jax.tree.map(lambda a: a + 0, params_on(mesh)), batch_on(mesh)
    optimizer = optax.sgd(0.5)
    ours = value_and_grad(loss, mesh=mesh, param_specs=SPECS, policy=Policy(algorithm="ring"))

    def step(gradients, params, state, x, y):
        value, grads = gradients(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    # Of other arrays: what NumPy has looked at is not donated.
    host = jax.tree.map(np.array, (params_on(mesh), optimizer.init(params), x, y))
    want = jax.jit(step, static_argnums=0)(jax.value_and_grad(loss), *host)
    run = jax.jit(step, static_argnums=0, donate_argnums=1)
    assert_equal(run(ours, params, optimizer.init(params), x, y), want)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    (report,) = ours.reports
    # The line of the step that called it.
    assert report.sites[0].source.partition(":")[0] == __file__


class Model(nnx.Module):
    def __init__(self):
        init = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, "model"))
        self.inner = nnx.Linear(4, 8, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] = self.calls[...] + 1
        return self.inner(x)


def test_nnx_models_are_split():
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        model = Model()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(lambda _: jnp.asarray(integers(4, 8)), params)
    x = integers(16, 4, seed=3)

    def fun(params, x, rest):
        model = nnx.merge(graph, params, rest, copy=True)
        value = jnp.mean(model(x) ** 2)
        return value, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    step = value_and_grad(
        fun, has_aux=True, mesh=mesh, param_specs=nnx.get_partition_spec(params),
        policy=Policy(algorithm="ring"), in_axes=(None, 0, None),
    )  # fmt: skip
    got = jax.jit(step)(params, x, rest)
    assert_equal(got, jax.jit(jax.value_and_grad(fun, has_aux=True))(params, x, rest))
    assert isinstance(got[1], nnx.State) and got[0][1] == {"calls": 1}
    assert kept(step) == [None]
    with pytest.raises(xcoll.UnsupportedError, match=r"NNX module.*nnx\.split"):
        value_and_grad(lambda m, x: jnp.mean(m(x)), mesh=mesh)(model, x)


def test_switched_off_and_inside_optimize():
    mesh = mesh_of()
    w, x = integers(4), integers(16, 4, seed=3)
    step = value_and_grad(rows_by_vmap, mesh=mesh, param_specs=P(), policy=Policy(algorithm="ring"))
    want = plain(rows_by_vmap, w, x)
    with xcoll.disable():
        assert_equal(jax.jit(step)(w, x), want)
    assert step.reports == []
    outer = xcoll.optimize(lambda w, x: step(w, x))
    assert_equal(jax.jit(outer)(w, x), want)
    assert len(step.reports) == 1 and kept(step) == [None]
    reasons = [site.kept_reason for site in outer.reports[-1].sites]
    assert "an inner policy or optimize has planned it already" in reasons


OPTIONS = {
    "fun": (dict(fun=3), TypeError, r"value_and_grad\(fun=3\): must be a function"),
    "aux_op": (dict(aux_op="sum"), ValueError, "has_aux is False"),
    "mesh": (dict(mesh=(2, 2)), TypeError, r"mesh=\(2, 2\)\): must be a jax.sharding.Mesh"),
    "axis_name": (dict(axis_name=("data", "data")), ValueError, "must name each axis once"),
    "policy": (dict(policy="int8"), TypeError, r"value_and_grad\(policy='int8'"),
    "topology": (dict(topology=8), TypeError, r"value_and_grad\(topology=8\)"),
    "random": (
        dict(policy=Policy(codec=codecs.int8(rounding="stochastic"))),
        xcoll.UnsupportedError,
        "rounds at random, and there is no key",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_wrong(name):
    options, error, message = OPTIONS[name]
    with pytest.raises(error, match=message):
        value_and_grad(**{"fun": loss} | options)


W, X = np.ones(4, np.float32), np.ones((16, 4), np.float32)
# fmt: off
CALLS = {
    "rows": (
        {}, (W, X[:6]), ValueError,
        r"dimension 0 of argument 'x' of shape \(6, 4\) has 6 elements; it is divided over the 4"
        r" ranks of \('dcn', 'data'\) and must be a multiple of them: pad the batch",
    ),
    "leaf": ({}, (W, {"a": X[:6]}), ValueError, r"argument \"x\['a'\]\" of shape"),
    "axis": (dict(axis_name="dta"), (W, X), xcoll.UnknownAxisError, "Did you mean 'data'"),
    "argnums": (dict(argnums=2), (W, X), ValueError, "2 is out of range for 2 positional"),
    "argnums twice": (dict(argnums=(0, -2)), (W, X), ValueError, "must name each argument once"),
    "argnums name": (dict(argnums="w"), (W, X), TypeError, "must be an integer or a tuple"),
    "in_axes": (dict(in_axes="x"), (W, X), TypeError, "must be an integer, None, or a tuple"),
    "in_axes few": (dict(in_axes=(0,)), (W, X), ValueError, "1 entries for 2 positional"),
    "in_axes of w": (dict(in_axes=(0, 0)), (W, X), ValueError, "its entry must be None"),
    "in_axes large": (dict(in_axes=2), (W, X), ValueError, "out of range for argument 'x' of"),
    "in_axes tree": (dict(in_axes=(None, {"a": 0})), (W, X), ValueError, "no pytree prefix of"),
    "in_axes kind": (dict(in_axes=(None, "a")), (W, X), TypeError, "'a' for 'x': must be an int"),
    "specs": (dict(param_specs="model"), (W, X), TypeError, "is no jax.sharding.PartitionSpec"),
    "specs axis": (dict(param_specs=P("modle")), (W, X), ValueError, "Did you mean 'model'"),
    "specs long": (dict(param_specs=P(None, "model")), (W, X), ValueError, "has more entries"),
    "specs tree": (dict(param_specs={"a": P()}), (W, X), ValueError, "no pytree prefix of the"),
    "integers": ({}, (np.ones(4, np.int32), X), TypeError, "grad requires real"),
}
# fmt: on


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_are_wrong(name):
    options, args, error, message = CALLS[name]
    step = value_and_grad(lambda w, x: jnp.mean(x @ w), mesh=mesh_of(), **options)
    with pytest.raises(error, match=message):
        step(*args)


def test_inside_a_manual_computation():
    mesh = mesh_of()
    step = value_and_grad(lambda w, x: jnp.mean(x @ w), axis_name="data")

    def body(w, x):
        return step(w, x)[1][None]

    inside = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"axis 'data' is manual here already.*gradients\.sync"):
        inside(W, X)
    # Over another axis it may be: each slice has a batch and gradients of its own.
    beside = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("dcn")), out_specs=P("dcn"), axis_names={"dcn"},
        check_vma=False,
    )  # fmt: skip
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    want = np.stack([x[:8].mean(0), x[8:].mean(0)])
    np.testing.assert_array_equal(jax.jit(beside)(W, x), want)
