"""Sharding rules: specs, parameters of Flax models, and the check of tensor parallelism."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.core import spmd as flax_spmd
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import xcoll
from xcoll.sharding import (
    Rules,
    data_parallel,
    expert_parallel,
    fsdp,
    fsdp_tensor,
    sequence_parallel,
    tensor_parallel,
)
from xcoll.topology import AxisLinks, Device, Level, Link, Topology

P = PartitionSpec


def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


PARAMETERS = {
    "mlp": ("embed", "mlp"),
    "query": ("embed", "heads", "head_dim"),
    "vocabulary": ("vocab", "embed"),
    "norm": ("norm",),
    "experts": ("expert", "embed", "mlp"),
}
ACTIVATIONS = {
    "residual": ("batch", "sequence", "activation_embed"),
    "hidden": ("batch", "inner_sequence", "activation_mlp"),
}
PRESETS = {
    data_parallel: {
        "mlp": P(None, None),
        "query": P(None, None, None),
        "vocabulary": P(None, None),
        "norm": P(None),
        "experts": P(None, None, None),
        "residual": P("data", None, None),
        "hidden": P("data", None, None),
    },
    fsdp: {
        "mlp": P("data", None),
        "query": P("data", None, None),
        "vocabulary": P(None, "data"),
        "norm": P(None),
        "experts": P(None, "data", None),
        "residual": P("data", None, None),
        "hidden": P("data", None, None),
    },
    tensor_parallel: {
        "mlp": P(None, "model"),
        "query": P(None, "model", None),
        "vocabulary": P("model", None),
        "norm": P(None),
        "experts": P(None, None, "model"),
        "residual": P("data", None, None),
        "hidden": P("data", None, "model"),
    },
    fsdp_tensor: {
        "mlp": P("data", "model"),
        "query": P("data", "model", None),
        "vocabulary": P("model", "data"),
        "norm": P(None),
        "experts": P(None, "data", "model"),
        "residual": P("data", None, None),
        "hidden": P("data", None, "model"),
    },
    sequence_parallel: {
        "mlp": P(None, "model"),
        "query": P(None, "model", None),
        "vocabulary": P("model", None),
        "norm": P(None),
        "experts": P(None, None, "model"),
        "residual": P("data", "model", None),
        "hidden": P("data", None, "model"),
    },
    expert_parallel: {
        "mlp": P(None, None),
        "query": P(None, None, None),
        "vocabulary": P(None, None),
        "norm": P(None),
        "experts": P("expert", None, None),
        "residual": P(("data", "expert"), None, None),
        "hidden": P(("data", "expert"), None, None),
    },
}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__name__)
def test_presets(preset):
    names = PARAMETERS | ACTIVATIONS
    assert {key: preset().spec(names[key]) for key in names} == PRESETS[preset]


def test_presets_take_mesh_axes():
    rules = fsdp(data=("dcn", "data")).extend({"embed": "data"})
    assert rules.spec(("batch", None)) == P(("dcn", "data"), None)
    assert rules.spec(("embed", "mlp")) == P("data", None)
    assert tensor_parallel(data=None, model="x").spec(("batch", "mlp")) == P(None, "x")
    assert expert_parallel(data=None).spec(("batch",)) == P("expert")


def test_rules_are_values():
    rules = Rules({"batch": ["data"], "embed": ()})
    assert rules == Rules((("batch", "data"), ("embed", None)))
    assert hash(rules) == hash(Rules({"batch": "data", "embed": None}))
    assert rules != rules.extend({"embed": "data"})
    assert rules.for_flax() == (("batch", "data"), ("embed", None))
    assert xcoll.sharding.Rules is Rules
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules.axes = ()


def test_spec_takes_what_is_not_split():
    spec = tensor_parallel().spec(P(None, "mlp", P.UNCONSTRAINED))
    assert spec == P(None, "model", P.UNCONSTRAINED)
    assert tensor_parallel().spec(()) == P()


@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        ("data", TypeError, r"Rules\('data'\): must be a mapping"),
        ({"batch": 3}, TypeError, r"Rules\(batch=3\): must be a mesh axis"),
        ({3: "data"}, TypeError, "must be a string"),
        ({"": "data"}, ValueError, "must not be empty"),
        ({"batch": ("data", "data")}, ValueError, "name each mesh axis once"),
        ((("batch", "a"), ("batch", "b")), ValueError, "'batch' is there twice"),
    ],
)
def test_bad_rules(axes, error, message):
    with pytest.raises(error, match=message):
        Rules(axes)


def test_bad_presets():
    with pytest.raises(ValueError, match=r"tensor_parallel\(data='x', model='x'\).*in both"):
        tensor_parallel(data="x", model="x")
    with pytest.raises(ValueError, match=r"expert_parallel.*'data' is in both"):
        expert_parallel(expert=("data", "expert"))


def test_bad_specs():
    with pytest.raises(TypeError, match=r"Rules\.spec: the names 'batch' must be a tuple"):
        fsdp().spec("batch")
    with pytest.raises(TypeError, match="each must be a logical name"):
        fsdp().spec((("batch", "embed"),))
    with pytest.raises(ValueError, match="unknown logical name 'emebd'.*Did you mean 'embed'"):
        fsdp().spec(("emebd",))
    with pytest.raises(ValueError, match=r"It is a mesh axis.*extend\(\{'data': 'data'\}\)"):
        fsdp().spec(("data",))
    twice = r"'data' twice, for dimension 0 \('batch'\) and dimension 1 \('embed'\).*name dimension"
    with pytest.raises(ValueError, match=f"{twice} 1 'activation_embed'"):
        fsdp().spec(("batch", "embed"))
    with pytest.raises(ValueError, match="'model' twice.*name dimension 1 'inner_sequence'"):
        sequence_parallel().spec(("batch", "sequence", "activation_mlp"))
    with pytest.raises(ValueError, match="'x' twice.*write None for one of them"):
        Rules({"a": "x"}).spec(("a", "a"))
    with pytest.raises(ExceptionGroup, match="2 things are wrong") as caught:
        fsdp().spec(("one", "two"))
    assert all(isinstance(error, ValueError) for error in caught.value.exceptions)


# Flax models, 8 features wide, 32 inside.


def annotated(names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        up, down = annotated(("embed", "mlp")), annotated(("mlp", "embed"))
        self.up = nnx.Linear(8, 32, kernel_init=up, rngs=rngs)
        self.down = nnx.Linear(32, 8, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def linen_annotated(names, **options):
    return linen.with_logical_partitioning(linen.initializers.lecun_normal(), names, **options)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(32, kernel_init=linen_annotated(("embed", "mlp")))(x)
        return linen.Dense(8, kernel_init=linen_annotated(("mlp", "embed")))(linen.relu(x))


def abstract_nnx(make=lambda: Nnx(nnx.Rngs(0))):
    with nnx.use_eager_sharding(False):
        return nnx.eval_shape(make)


def abstract_linen(model=None):
    return jax.eval_shape((model or Linen()).init, jax.random.key(0), jnp.zeros((1, 8)))


def test_an_nnx_model_is_made_and_run_sharded():
    graph, abstract = nnx.split(abstract_nnx())
    rules = fsdp_tensor()
    shardings = rules.shardings(abstract, mesh())
    assert shardings["up"]["kernel"].get_value() == NamedSharding(mesh(), P("data", "model"))
    assert shardings["down"]["kernel"].get_value() == NamedSharding(mesh(), P("model", "data"))
    assert shardings["up"]["bias"].get_value() == NamedSharding(mesh(), P())

    def make():
        with nnx.use_eager_sharding(False):
            return nnx.state(Nnx(nnx.Rngs(0)))

    plain = make()
    state = jax.jit(make, out_shardings=shardings)()
    kernel = state["up"]["kernel"].get_value()
    assert kernel.sharding.spec == P("data", "model")
    assert {s.data.shape for s in kernel.addressable_shards} == {(4, 8)}  # 8 over 2, 32 over 4
    x = np.arange(32, dtype=np.float32).reshape(4, 8) / 32
    batch = NamedSharding(mesh(), rules.spec(("batch", None)))
    apply = jax.jit(
        lambda state, x: nnx.merge(graph, state)(x),
        in_shardings=(shardings, batch),
        out_shardings=batch,
    )
    out = apply(state, jax.device_put(x, batch))
    assert out.sharding.spec == P("data", None)
    # The same sums of 8 and 32 products in another order: some roundoffs (6e-8 each) of values
    # of about one.
    np.testing.assert_allclose(out, nnx.merge(graph, plain)(x), rtol=1e-5, atol=1e-5)


def test_nnx_gives_the_same_by_its_own_means():
    state = nnx.state(abstract_nnx())
    ours = fsdp_tensor().shardings(state, mesh())
    with flax_spmd.logical_axis_rules(fsdp_tensor().for_flax()):
        specs = nnx.get_partition_spec(state)
        theirs = nnx.get_named_sharding(state, mesh())
    assert specs["up"]["kernel"].get_value() == P("data", "model")
    assert jax.tree.leaves(ours) == jax.tree.leaves(theirs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    # Without Flax's rules, the specs are of logical names, and ours to map.
    again = fsdp_tensor().shardings(state, mesh(), names=nnx.get_partition_spec(state))
    assert jax.tree.leaves(ours) == jax.tree.leaves(again)


def test_an_nnx_module_and_its_optimizer():
    model = abstract_nnx()
    assert fsdp_tensor().shardings(model, mesh()).up.kernel.get_value().spec == P("data", "model")
    make = lambda: nnx.Optimizer(Nnx(nnx.Rngs(0)), optax.adam(1e-3), wrt=nnx.Param)  # noqa: E731
    state = nnx.state(abstract_nnx(make))
    specs = [s.spec for s in jax.tree.leaves(fsdp_tensor().shardings(state, mesh()))]
    assert specs.count(P("data", "model")) == specs.count(P("model", "data")) == 2  # mu and nu


def test_a_linen_model_is_made_and_run_sharded():
    abstract, rules = abstract_linen(), fsdp_tensor()
    shardings = rules.shardings(abstract, mesh())
    expected = {
        "Dense_0": {"kernel": P("data", "model"), "bias": P()},
        "Dense_1": {"kernel": P("model", "data"), "bias": P()},
    }
    assert jax.tree.map(lambda s: s.spec, shardings) == {"params": expected}
    logical = linen.get_partition_spec(abstract)
    assert linen.logical_to_mesh_sharding(logical, mesh(), rules.for_flax()) == shardings
    assert rules.shardings(linen.unbox(abstract), mesh(), names=logical) == shardings

    init = jax.jit(Linen().init, out_shardings=shardings)
    x = np.arange(32, dtype=np.float32).reshape(4, 8) / 32
    variables = init(jax.random.key(0), x)
    kernel = linen.unbox(variables)["params"]["Dense_1"]["kernel"]
    assert {s.data.shape for s in kernel.addressable_shards} == {(8, 4)}  # 32 over 4, 8 over 2
    out = jax.jit(Linen().apply, in_shardings=(shardings, None))(variables, x)
    plain = Linen().apply(jax.device_get(linen.unbox(variables)), x)
    np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-5)  # as above

    optimizer = jax.eval_shape(optax.adam(1e-3).init, abstract)
    specs = [s.spec for s in jax.tree.leaves(rules.shardings(optimizer, mesh()))]
    assert specs.count(P("data", "model")) == specs.count(P("model", "data")) == 2  # mu and nu


def test_a_plain_tree_with_names():
    params = {"w": jnp.zeros((8, 32)), "b": jnp.zeros(32), "scalar": np.float32(1)}
    names = {"w": ("embed", "mlp"), "b": None, "scalar": ()}
    found = fsdp_tensor().shardings(params, AbstractMesh((2, 4), ("data", "model")), names=names)
    assert jax.tree.map(lambda s: s.spec, found) == {
        "w": P("data", "model"),
        "b": P(),
        "scalar": P(),
    }
    found = fsdp_tensor().shardings(jnp.zeros((8, 3)), mesh(), names=("embed",))
    assert found.spec == P("data")


def wrong(shape=(8, 32), names=("embed", "mlp"), rules=None, on=None):
    params = {"layer": {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}}
    return (rules or fsdp_tensor()).shardings(params, on or mesh(), names={"layer": {"w": names}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (8, 30)}, r"dimension 1 \('mlp'\) of shape \(8, 30\) does not divide: 30 over"),
        ({"shape": (8, 30)}, r"the 4 ranks of 'model'; make it 28 or 32, or map 'mlp' to None"),
        ({"shape": (1, 32)}, "1 over the 2 ranks of 'data'; make it 2, or"),
        ({"names": ("mlp", "heads")}, "'model' twice"),
        ({"names": ("embed", "mpl")}, "unknown logical name 'mpl'.*Did you mean 'mlp'"),
        ({"names": ("embed", "mlp", None)}, "3 names.*and 2 dimensions"),
        ({"rules": fsdp_tensor(model="modle")}, "unknown mesh axis 'modle'.*mean 'model'.*Make"),
    ],
)
def test_bad_parameters(options, message):
    with pytest.raises(ValueError, match=rf"Rules\.shardings: \['layer'\]\['w'\]: .*{message}"):
        wrong(**options)


def test_bad_parameters_together():
    params = {name: jnp.zeros((8, 30)) for name in "abcde"} | {"f": jnp.zeros((8, 8))}
    names = {name: ("embed", "mlp") for name in "abcde"} | {"f": ("embed", "hidden")}
    with pytest.raises(ExceptionGroup, match="2 things are wrong") as caught:
        fsdp_tensor().shardings(params, mesh(), names=names)
    first, second = map(str, caught.value.exceptions)
    assert first.startswith("Rules.shardings: ['a'], ['b'], ['c'] and 2 more: dimension 1 ('mlp')")
    assert second.startswith("Rules.shardings: ['f']: dimension 'hidden': unknown logical name")


def test_bad_flax_parameters():
    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 30, kernel_init=annotated(("embed", "mlp")), rngs=rngs)

    state = nnx.state(abstract_nnx(lambda: Odd(nnx.Rngs(0))))
    with pytest.raises(ValueError, match=r"\['up'\]\['kernel'\]: dimension 1 \('mlp'\) of shape"):
        fsdp_tensor().shardings(state, mesh())
    with pytest.raises(ValueError, match=r"\['params'\]\['kernel'\]: .*'data' twice"):
        init = linen_annotated(("batch", "embed"))
        fsdp().shardings(abstract_linen(linen.Dense(32, kernel_init=init)), mesh())


def test_rules_that_a_parameter_carries():
    def dense(rules):
        init = linen_annotated(("embed", "hidden"), rules=rules)
        return abstract_linen(linen.Dense(32, kernel_init=init))

    found = fsdp_tensor().shardings(dense((("hidden", "model"), ("embed", "data"))), mesh())
    assert found["params"]["kernel"].spec == P("data", "model")
    with pytest.raises(ValueError, match="its own sharding rules map 'embed' to None"):
        fsdp_tensor().shardings(dense((("hidden", "model"), ("embed", None))), mesh())


def test_an_nnx_variable_with_a_sharding_of_its_own():
    def make(on):
        with nnx.use_eager_sharding(False):
            sharding = NamedSharding(on, P("model"))
            return {"w": nnx.Param(jnp.zeros(8), out_sharding=sharding)}

    found = fsdp().shardings(make(mesh()), mesh())
    assert found["w"].get_value() == NamedSharding(mesh(), P("model"))
    with pytest.raises(ValueError, match=r"\['w'\]: it carries a NamedSharding on another mesh"):
        fsdp().shardings(make(jax.make_mesh((8,), ("model",))), mesh())


def test_bad_calls():
    with pytest.raises(TypeError, match=r"Rules\.shardings\(mesh='data'\)"):
        fsdp().shardings({}, "data")
    with pytest.raises(TypeError, match=r"\['w'\] is a str, not an array"):
        fsdp().shardings({"w": "x"}, mesh())
    with pytest.raises(TypeError, match=r"\['w'\]: the names 'embed' must be a tuple"):
        fsdp().shardings({"w": jnp.zeros(8)}, mesh(), names={"w": "embed"})
    with pytest.raises(ValueError, match=r"names=.*must have the structure of the parameters"):
        fsdp().shardings({"w": jnp.zeros(8)}, mesh(), names={"v": ("embed",)})


# The check of tensor parallelism.


def topology(text="2*v5e:4x4", **axes):
    return Topology.parse(text, axes=axes)


def test_fast_links_pass():
    (cost,) = tensor_parallel().check(topology(data=8, model=4))
    assert (cost.axes, cost.num_reductions, cost.slow_links) == (("model",), 4, ())
    assert (cost.shape, cost.dtype) == ((1, 2048, 4096), "bfloat16")
    # 16 MiB, of which an all-reduce over 4 ranks sends 2 * 3/4 each; a line's links of 45 GB/s
    # carry it both ways at best: 0.28 ms, four times.
    assert 4 * 0.27e9 < cost.time_ps < 4 * 2e9
    for preset in (fsdp_tensor, sequence_parallel):
        assert preset().check(topology("v5p:4x4x4", data=16, model=4))
        assert preset().check(topology("4*h100:8", data=4, model=8))
        assert preset().check(topology("cpu:8", data=2, model=4))


@pytest.mark.parametrize(
    ("text", "axes", "link"),
    [
        ("2*v5e:4x4", {"model": 2, "data": 16}, "dcn of 2"),
        ("2*v5e:4x4", {"data": 4, "model": 8}, None),
        ("2*v5e:4x4", {"model": 4, "data": 8}, "dcn of 2"),
        ("4*h100:8", {"data": 2, "model": 16}, "network of 2"),
        ("2*cpu:4@200Mbit", {"model": 2, "data": 4}, "network of 2"),
    ],
)
def test_slow_links_are_refused(text, axes, link):
    over = topology(text, **axes)
    if link is None:
        assert tensor_parallel().check(over)
        return
    with pytest.raises(ValueError, match=rf"axis 'model' crosses a slow link \({link}") as caught:
        tensor_parallel().check(over)
    assert "4 all-reduces of bfloat16[1,2048,4096] (16 MiB)" in str(caught.value)
    assert "per layer" in str(caught.value) and "force=True" in str(caught.value)
    (cost,) = tensor_parallel().check(over, force=True)
    assert len(cost.slow_links) == 1 and cost.slow_links[0].startswith(link)
    assert str(cost) in str(caught.value)


def test_the_cost_of_a_slow_link():
    (cost,) = tensor_parallel().check(topology(model=2, data=16), force=True)
    # An all-reduce over 2 ranks sends its 16 MiB once: 5.4 ms at 3.125 GB/s, four times a layer.
    assert 21.4e9 < cost.time_ps < 2 * 21.5e9
    options = {"batch": 32, "sequence": 1024, "embed": 1024, "dtype": "float32", "force": True}
    (cost,) = tensor_parallel().check(topology(model=2, data=16), **options)
    assert (cost.shape, cost.dtype) == ((2, 1024, 1024), "float32")
    assert cost.plan.request.num_bytes == 2**23


def test_slow_against_the_fastest_wire():
    def wires(rate):
        fast = Link(kind="backplane", network="switch", bandwidth_bytes_per_s=100e9)
        other = Link(kind="riser", network="switch", bandwidth_bytes_per_s=rate)
        levels = {"model": Level(size=4, link=other, dimension="riser")}
        levels["data"] = Level(size=4, link=fast, dimension="backplane")
        axes = tuple(AxisLinks(name=n, levels=(level,)) for n, level in levels.items())
        return Topology(axes=axes, device=Device.named("h100"))

    assert tensor_parallel().check(wires(25e9))  # a quarter
    with pytest.raises(ValueError, match=r"slow link \(riser of 4"):
        tensor_parallel().check(wires(24e9))


def test_groups_of_axes():
    rules = Rules({"batch": "data", "heads": "x", "mlp": ("x", "y")})
    over = topology("v5p:4x4x4", data=4, x=4, y=4)
    heads, mlp = rules.check(over)
    assert (heads.axes, heads.num_reductions) == (("x",), 2)
    assert (mlp.axes, mlp.num_reductions) == (("x", "y"), 2)
    (both,) = Rules({"mine": "y"}).check(over, tensor_axes="y")
    assert (both.axes, both.num_reductions) == (("y",), 4)
    context = rules.extend({"inner_sequence": "y", "mlp": "x"})
    (cost,) = context.check(over, batch=8, sequence=4096, embed=8)
    assert cost.shape == (2, 1024, 8)
    slow = topology("2*v5e:4x4", heads=2, data=4, mlp=4)
    split = Rules({"heads": "heads", "mlp": ("heads", "mlp")})
    with pytest.raises(ExceptionGroup, match="2 things"):
        split.check(slow)


@pytest.mark.parametrize("preset", [data_parallel, fsdp])
def test_nothing_is_tensor_parallel(preset):
    assert preset().check(topology(data=32)) == ()
    assert Rules({"mine": "data"}).check(topology(data=32), tensor_axes=()) == ()
    features = preset().extend({"mlp": "data"})  # parameters are gathered over the batch's axis
    assert features.check(topology(data=32)) == ()
    assert tensor_parallel().check(topology(model=1, data=32)) == ()


@pytest.mark.parametrize(
    ("rules", "options", "error", "message"),
    [
        (
            tensor_parallel(model="mdel"),
            {},
            ValueError,
            "mlp, heads, kv_heads and 5 more: .*'mdel'",
        ),
        (tensor_parallel(data="dta"), {}, ValueError, "batch: .*unknown mesh axis 'dta'.*'data'"),
        (tensor_parallel(), {"batch": 12}, ValueError, r"batch=12\): must divide.* 8 ranks.* 16"),
        (tensor_parallel(), {"sequence": 0}, ValueError, r"sequence=0\): must be at least 1"),
        (
            sequence_parallel(),
            {"sequence": 6},
            ValueError,
            r"sequence=6\): must divide.* 4 ranks.* 8",
        ),
        (tensor_parallel(), {"embed": "8"}, TypeError, r"embed='8'\)"),
        (tensor_parallel(), {"dtype": "flaot"}, TypeError, r"dtype='flaot'\): must be a dtype"),
        (tensor_parallel(), {"force": 1}, TypeError, r"force=1\): must be True or False"),
        (tensor_parallel(), {"tensor_axes": 1}, TypeError, r"Rules.check\(tensor_axes=1\)"),
        (tensor_parallel(), {"tensor_axes": "mdel"}, ValueError, "tensor_axes: .*'mdel'"),
        (Rules({"mine": "model"}), {}, ValueError, "neither 'heads' nor 'mlp'.*tensor_axes"),
    ],
)
def test_bad_checks(rules, options, error, message):
    with pytest.raises(error, match=message):
        rules.check(topology(data=8, model=4), **options)


def test_a_topology_is_needed():
    with pytest.raises(TypeError, match=r"must be an xcoll\.Topology"):
        tensor_parallel().check("v5p:4x4x4")
    unknown = Topology.unknown({"data": 2, "model": 4}, "no table")
    with pytest.raises(ValueError, match=r"axis 'model'.*unknown \(no table\)"):
        tensor_parallel().check(unknown, force=True)
    assert fsdp().check(unknown) == ()
