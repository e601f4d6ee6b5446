"""Advice on compiled programs: each kind where it is certain, and not on its near miss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xcoll
from xcoll import aot, hlo
from xcoll.hlo.advice import KINDS, advise
from xcoll.hlo.frames import Frames
from xcoll.hlo.origins import Origins
from xcoll.hlo.rows import Row
from xcoll.hlo.text import parse
from xcoll.plan import Request
from xcoll.planner import plan
from xcoll.policy import Policy
from xcoll.topology import AxisLinks, Device, Level, Link, Topology

constrain = jax.lax.with_sharding_constraint


@functools.cache
def mesh_of(target, shape, axes):
    if target == "cpu":
        devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
        return Mesh(devices, axes)
    return aot.mesh(target, shape, axes)


def four(target="cpu"):
    return mesh_of({"tpu": "v5e:2x2", "gpu": "h100:4"}.get(target, target), (4,), ("data",))


def two_by_four():
    return mesh_of("cpu", (2, 4), ("a", "b"))


def shaped(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def compiled(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


def read(text, axes=("data",), exposed_s=1.0, made_by=None, dcn=None):
    """The rows of a program, as an audit would have them: each waits for ``exposed_s``."""
    module, found = parse(text), hlo.collectives(text)
    origins = Origins(module, Frames(text))
    rows = []
    for c in found:
        origin = origins.of(c)
        rows.append(
            Row(
                name=c.name,
                kind=c.kind,
                dtypes=c.dtypes,
                num_bytes=c.operand_bytes,
                operands=c.operands,
                axes=axes,
                num_ranks=max(map(len, c.groups or ()), default=1),
                executions=c.executions,
                conditional=c.conditional,
                transfer=c.transfer,
                wire_bytes={},
                level_bytes={},
                time_s=exposed_s,
                bound_s=None,
                is_async=False,
                hidden_s=0.0,
                exposed_s=exposed_s,
                source=origin.source,
                is_near=origin.is_near,
                made_by=made_by or origin.made_by,
                computation=c.computation,
                op_name=origin.op_name,
                unread="",
            )
        )
    return module, tuple(rows), found


def advice_on(text, axes=("data",), topology=None, sizes=None, **kwargs):
    sizes = {"data": 4} if sizes is None else sizes
    topology = Topology.unknown(sizes, "a test") if topology is None else topology
    made = advise(*read(text, axes, **kwargs), topology, sizes)
    assert all(a.kind in KINDS for a in made)
    return made


# All-gathers in loops.


def scan_of_one_weight(params, x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ params["w1"]), None), x, None, length=5)[0]


@functools.cache
def gathers(target, what):
    mesh = four(target)
    w, x = shaped(mesh, (256, 256), "data"), shaped(mesh, (64, 256), "data")
    stack = shaped(mesh, (5, 256, 256), None, "data")

    def of_a_stack(ws, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]

    def before_the_loop(params, x):
        whole = constrain(params["w1"], NamedSharding(mesh, P()))
        return scan_of_one_weight({"w1": whole}, x)

    def of_a_layer(ws, x):
        return jax.lax.scan(lambda c, w: (scan_of_one_weight({"w1": w}, c), None), x, ws)[0]

    def written(w, x):
        def body(c, _):
            return jnp.tanh(c @ jax.lax.all_gather(w, "data", tiled=True)), None

        return jax.lax.scan(body, x, None, length=5)[0]

    if what == "written":
        mapped = jax.shard_map(written, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return compiled(mapped, w, x)
    return {
        "one": lambda: compiled(scan_of_one_weight, {"w1": w}, x),
        "stack": lambda: compiled(of_a_stack, stack, x),
        "before": lambda: compiled(before_the_loop, {"w1": w}, x),
        "layer": lambda: compiled(of_a_layer, stack, x),
    }[what]()


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_a_loop_that_gathers_one_parameter_anew(target):
    (advice,) = advice_on(gathers(target, "one"))
    assert advice.kind == "gather-in-loop"
    assert "gathers params['w1'] 5 times" in advice.text
    assert f"{__file__.rsplit('/', 1)[-1]}:" in advice.text
    # On TPU the weight is cast to bfloat16 before it is gathered: 256 * 256 elements.
    assert ("128 KiB" if target == "tpu" else "256 KiB") in advice.text
    assert advice.saves_s == 4.0  # once of five is needed, each waits 1 s


def test_a_loop_that_has_the_sparse_cores_gather_anew():
    mesh = aot.mesh("tpu7x:2x2x1", (8,), ("data",))
    w, x = (
        jax.ShapeDtypeStruct((n, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
        for n in (2048, 4096)
    )
    text = compiled(scan_of_one_weight, {"w1": w}, x)
    assert "custom-call-start" in text
    (advice,) = advice_on(text)
    assert "gathers params['w1'] 5 times" in advice.text
    assert "8 MiB" in advice.text  # 2048 * 2048 bfloat16


def test_a_gather_that_computation_hides():
    assert advice_on(gathers("gpu", "one"), exposed_s=0.0) == ()


def test_a_gather_that_its_author_wrote_in_the_loop():
    (advice,) = advice_on(gathers("gpu", "written"))
    assert (advice.kind, advice.saves_s) == ("gather-in-loop", 4.0)
    assert "gathers w 5 times" in advice.text


@pytest.mark.parametrize("target", ["tpu", "gpu"])
@pytest.mark.parametrize("what", ["stack", "before"])
def test_another_slice_in_each_iteration_and_a_gather_before_the_loop(target, what):
    text = gathers(target, what)
    assert "all-gather" in text
    assert advice_on(text) == ()


def test_a_loop_inside_one_over_layers_gathers_each_layer_anew():
    (advice,) = advice_on(gathers("gpu", "layer"))
    assert "gathers ws 5 times" in advice.text
    assert advice.saves_s == 20.0  # 25 gathers, of which each of the 5 layers needs one


WHILE = """HloModule f, num_partitions=4
%body (s: (s32[], f32[8], f32[32])) -> (s32[], f32[8], f32[32]) {{
  %s = (s32[], f32[8], f32[32]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %w = f32[8] get-tuple-element(%s), index=1
  %changed = f32[8] negate(%w)
  %scaled = f32[8] {work}
  %whole = f32[32] all-gather(%scaled), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
  ROOT %out = (s32[], f32[8], f32[32]) tuple(%next, {kept}, %whole)
}}
%until (s: (s32[], f32[8], f32[32])) -> pred[] {{
  %s = (s32[], f32[8], f32[32]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] {limit}
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}
ENTRY %main (w: f32[8], z: f32[32], n: s32[]) -> f32[32] {{
  %w = f32[8] parameter(0), metadata={{op_name="w"}}
  %z = f32[32] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8], f32[32]) tuple(%zero, {start}, %z)
  %loop = (s32[], f32[8], f32[32]) while(%start), condition=%until, body=%body
  ROOT %r = f32[32] get-tuple-element(%loop), index=2
}}"""


def loop(work="copy(%w)", kept="%w", limit="constant(6)", start="%w"):
    return WHILE.format(work=work, kept=kept, limit=limit, start=start)


def test_what_is_a_parameter_that_stays_the_same():
    (advice,) = advice_on(loop())
    assert "gathers w 6 times" in advice.text and advice.saves_s == 5.0
    # An element that changes, that is computed in the loop, or that starts as no argument.
    assert advice_on(loop(kept="%changed")) == ()
    assert advice_on(loop(work="sine(%w)")) == ()
    assert advice_on(loop().replace("%w = f32[8] parameter(0)", "%w = f32[8] rng()")) == ()
    assert advice_on(loop(limit="constant(1)"), exposed_s=None) == ()  # nothing is repeated


def test_a_loop_of_unknown_length():
    (advice,) = advice_on(loop(limit="parameter(1)"))
    assert "in every iteration" in advice.text and advice.saves_s is None


# Reshardings.


@functools.cache
def reshards(what, target="cpu"):
    mesh = four(target)

    def rows(x):
        return constrain(x, NamedSharding(mesh, P("data", None)))

    def columns(x):
        return constrain(x, NamedSharding(mesh, P(None, "data")))

    def whole(x):
        return constrain(x, NamedSharding(mesh, P()))

    fns = {
        "argument": lambda x, w: columns(jnp.sin(x)).T @ w,
        "added": lambda x, w: columns(rows(jnp.sin(x) + w @ w)).T @ w,
        "result": lambda x, w: columns(jnp.tanh(rows(x @ w))),
        "twice": lambda x, w: rows(jnp.cos(columns(jnp.sin(rows(x @ w))))) @ w,
        "between": lambda x, w: columns(jnp.sin(rows(x @ w))).T @ w,
        "gather": lambda x, w: whole(jnp.sin(x @ w)) * 2,
        "roll": lambda x, w: jnp.roll(x, 1, axis=0) * 2,
    }
    return compiled(fns[what], shaped(mesh, (64, 64), "data"), shaped(mesh, (64, 64)))


@pytest.mark.parametrize("target", ["cpu", "tpu"])
def test_an_argument_that_comes_in_another_sharding(target):
    (advice,) = advice_on(reshards("argument", target))
    assert (advice.kind, advice.saves_s) == ("resharding", 1.0)
    assert advice.text.startswith("The argument x is resharded before it is used (")


def test_a_result_that_goes_in_another_sharding():
    (advice,) = advice_on(reshards("result"))
    assert advice.text.startswith("A result is resharded when it is done (")


def test_a_value_that_is_resharded_there_and_back():
    (advice,) = advice_on(reshards("twice"))
    assert advice.kind == "resharding" and len(advice.rows) == 2
    assert "twice" in advice.text and advice.saves_s == 1.0


@pytest.mark.parametrize("what", ["added", "between", "gather", "roll"])
def test_reshardings_that_may_be_meant(what):
    text = reshards(what)
    assert hlo.collectives(text)
    assert advice_on(text) == ()


def moved(op_name):
    return f"""HloModule f, num_partitions=4
ENTRY %main (x: f32[8,8]) -> f32[4,4,4] {{
  %x = f32[8,8] parameter(0), metadata={{op_name="x"}}
  %y = f32[4,4,4] reshape(%x), metadata={{op_name="{op_name}"}}
  %z = f32[4,4,4] all-to-all(%y), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
  %q = f32[4,4,4] custom-call(%z), custom_call_target="q"
  ROOT %n = f32[4,4,4] negate(%q)
}}"""


def test_a_layout_that_the_program_asks_for_may_need_the_other_sharding():
    (advice,) = advice_on(moved(""), made_by="partitioner")  # the compiler's own
    assert "argument x" in advice.text
    assert advice_on(moved("jit(f)/reshape"), made_by="partitioner") == ()
    assert advice_on(moved(""), made_by="user") == ()


def test_two_reshardings_over_different_groups_are_one_in_two_steps():
    text = """HloModule f, num_partitions=4
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %p = f32[8,8] custom-call(%x), custom_call_target="p"
  %y = f32[8,8] all-to-all(%p), replica_groups={{0,1},{2,3}}, dimensions={0}
  %z = f32[8,8] negate(%y)
  %w = f32[8,8] all-to-all(%z), replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %q = f32[8,8] custom-call(%w), custom_call_target="q"
}"""
    (advice,) = advice_on(text, made_by="partitioner")
    assert advice.rows == ("y", "w")
    other = text.replace("(%z), replica_groups={{0,1},{2,3}}", "(%z), replica_groups={{0,2},{1,3}}")
    assert advice_on(other, made_by="partitioner") == ()


@functools.cache
def mixture():
    mesh = four()

    def step(x, gate, w1, w2):
        chosen = jax.nn.one_hot(jnp.argmax(x @ gate, -1), 8, dtype=x.dtype)
        sent = jnp.einsum("gse,gsm->egm", chosen, x)
        sent = constrain(sent, NamedSharding(mesh, P("data")))
        out = jnp.einsum("egh,ehm->egm", jnp.tanh(jnp.einsum("egm,emh->egh", sent, w1)), w2)
        out = constrain(out, NamedSharding(mesh, P("data")))
        out = constrain(out, NamedSharding(mesh, P(None, "data")))
        return constrain(jnp.einsum("gse,egm->gsm", chosen, out), NamedSharding(mesh, P("data")))

    shapes = ((8, 16, 32), "data"), ((32, 8),), ((8, 32, 64), "data"), ((8, 64, 32), "data")
    return compiled(step, *(shaped(mesh, *shape) for shape in shapes))


def test_the_exchange_around_experts_is_meant():
    assert "all-to-all" in mixture()
    assert advice_on(mixture()) == ()


@functools.cache
def cut(step):
    mesh = two_by_four()

    def fn(x, w):
        y = constrain(jnp.tanh(x @ w), NamedSharding(mesh, P("a", None)))
        if step:
            y = constrain(y, NamedSharding(mesh, P("a", "b")))
        return constrain(jnp.sin(y), NamedSharding(mesh, P(None, "b"))) @ w

    return compiled(fn, shaped(mesh, (64, 128), "a"), shaped(mesh, (128, 128)))


def test_a_value_that_is_gathered_to_be_cut(capfd):
    (advice,) = advice_on(cut(step=False), ("a",), sizes={"a": 2, "b": 4})
    assert "nvoluntary full rematerialization" in capfd.readouterr().err  # XLA sees the same
    assert advice.kind == "resharding" and "only for each device to cut out a part" in advice.text
    # What the advice says to do is of use.
    assert advice_on(cut(step=True), ("a",), sizes={"a": 2, "b": 4}) == ()


# Small reductions.


def sums(count, *, elements=256, chain=False, axes="{{0,1,2,3}}"):
    def one(number):
        operand = f"%r{number - 1}" if chain and number else f"%x{number}"
        return (
            f"  %r{number} = f32[{elements}] all-reduce(%h{number}),"
            f" replica_groups={axes}, to_apply=%add"
        ), f"  %h{number} = f32[{elements}] negate({operand})"

    lines = [line for n in range(count) for line in reversed(one(n))]
    parameters = [f"  %x{n} = f32[{elements}] parameter({n})" for n in range(count)]
    results = ", ".join(f"%r{n}" for n in range(count))
    body = "\n".join([*parameters, *lines])
    return f"""HloModule f, num_partitions=4
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}
ENTRY %main () -> f32[] {{
{body}
  ROOT %t = (f32[{elements}]) tuple({results})
}}"""


def plain_links():
    """One host whose all-reduce takes 1 µs and 1 ns a byte."""
    device = Device(
        kind="plain",
        platform="cpu",
        memory_bytes_per_s=10**9,
        copy_bytes_per_s=10**9,
        step_ps=10**6,
    )
    memory = Link(kind="memory", network="memory", bandwidth_bytes_per_s=10**9)
    level = Level(size=4, link=memory, dimension="device")
    return Topology(axes=(AxisLinks(name="data", levels=(level,)),), device=device)


def test_many_small_sums():
    (advice,) = advice_on(sums(9), topology=plain_links())
    assert advice.kind == "small-reductions" and len(advice.rows) == 9
    assert "9 small reductions over data, 9 KiB in all" in advice.text
    # 9 KiB at 1 ns a byte and 1 µs to start, in place of nine that wait 1 s each.
    assert advice.saves_s == pytest.approx(9 - (1e-6 + 9 * 1024e-9), rel=1e-12)


def test_no_small_sums():
    assert advice_on(sums(7)) == ()
    assert advice_on(sums(9, chain=True)) == ()
    assert advice_on(sums(9, elements=(64 << 10) // 4 + 1)) == ()
    assert advice_on(sums(9), made_by="xcoll") == ()
    others = sums(5, axes="{{0,1},{2,3}}").replace("%r", "%q").replace("%h", "%g")
    others = others[others.index("  %g0") : others.index("  ROOT %t")]
    both = sums(5).replace("  ROOT %t", f"{others}  ROOT %t")
    assert len(hlo.collectives(both)) == 10
    assert advice_on(both) == ()
    (advice,) = advice_on(sums(8))  # of which no time is known
    assert advice.saves_s is None


def test_small_sums_that_the_compiler_makes_one():
    mesh = four()
    args = [shaped(mesh, (8, n), "data") for n in range(1, 13)]
    fn = jax.shard_map(
        lambda *xs: [jax.lax.psum(x, "data") for x in xs],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
    )
    assert advice_on(compiled(fn, *args)) == ()


# Sums that a loop only adds up.


@functools.cache
def accumulation(what):
    mesh = four()

    def step(x):
        if what == "after":
            total = jax.lax.scan(lambda c, xi: (c + xi, None), jnp.zeros_like(x[0]), x)[0]
            return jax.lax.psum(total, "data")
        if what == "until":

            def more(state):
                return (state[0] < 4) & (jnp.sum(state[1]) < 100)

            def add(state):
                return state[0] + 1, state[1] + jax.lax.psum(x[state[0]], "data")

            return jax.lax.while_loop(more, add, (0, jnp.zeros_like(x[0])))[1]

        def body(c, xi):
            if what == "largest":
                return jnp.maximum(c, jax.lax.psum(xi, "data")), None
            seen = jnp.sum(c) if what == "seen" else None
            return c + jax.lax.psum(xi, "data"), seen

        return jax.lax.scan(body, jnp.zeros_like(x[0]), x)

    spec = P(None, "data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    return compiled(mapped, shaped(mesh, (4, 64, 32), *spec))


def test_sums_that_a_loop_only_adds_up():
    (advice,) = advice_on(accumulation("added"))
    assert advice.kind == "sum-in-loop" and "over data 4 times" in advice.text
    assert advice.saves_s == 3.0


@pytest.mark.parametrize("what", ["after", "until", "largest", "seen"])
def test_sums_in_loops_that_are_needed_there(what):
    assert advice_on(accumulation(what)) == ()


ADDED = """HloModule f, num_partitions=4
%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}
%body (s: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {{
  %s = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %total = f32[8] get-tuple-element(%s), index=1
  %x = f32[8] get-tuple-element(%s), index=2
  %r = f32[8] all-reduce(%x), replica_groups={{{{0,1,2,3}}}}, to_apply=%sum
  %new = f32[8] add({term}, %r)
  %seen = f32[8] negate({seen})
  ROOT %out = (s32[], f32[8], f32[8]) tuple(%next, %new, %seen)
}}
%until (s: (s32[], f32[8], f32[8])) -> pred[] {{
  %s = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] constant(6)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8], f32[8]) tuple(%zero, %x, %x)
  %loop = (s32[], f32[8], f32[8]) while(%start), condition=%until, body=%body
  ROOT %result = f32[8] get-tuple-element(%loop), index=1
}}"""


def test_what_only_adding_up_is():
    (advice,) = advice_on(ADDED.format(term="%total", seen="%x"))
    assert (advice.kind, advice.saves_s) == ("sum-in-loop", 5.0)
    # The running sum is looked at, so is the new one, or the sum; or it starts anew each time.
    for term, seen in (("%total", "%total"), ("%total", "%new"), ("%total", "%r"), ("%x", "%x")):
        assert advice_on(ADDED.format(term=term, seen=seen)) == ()


# Sums that are cast too late.


@functools.cache
def narrow_sum(target, what):
    mesh = four(target)

    def step(x):
        total = jax.lax.psum(x, "data")
        late = total.astype(jnp.float32) * 2
        return {"late": late, "never": total * 2, "both": (late, total)}[what]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())
    return compiled(mapped, shaped(mesh, (256, 128), "data", dtype=jnp.bfloat16))


@pytest.mark.parametrize("target", ["cpu", "tpu", "gpu"])
def test_bfloat16_summed_and_then_cast(target):
    (advice,) = advice_on(narrow_sum(target, "late"))
    assert (advice.kind, advice.saves_s) == ("late-cast", None)
    assert "over data of bfloat16 (" in advice.text and "accumulate" in advice.text


@pytest.mark.parametrize("target", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize("what", ["never", "both"])
def test_bfloat16_used_as_bfloat16(target, what):
    assert advice_on(narrow_sum(target, what)) == ()


# Plans over slow links.

HOSTS = {"host": 2, "device": 4}


@functools.cache
def hosts(text="2*cpu:4@200Mbit"):
    return Topology.parse(text, axes=HOSTS)


@functools.cache
def summed(dtype="float32", policy=None, partitioned=False):
    mesh = mesh_of("cpu", (2, 4), ("host", "device"))
    axes, args = ("host", "device"), []
    args = [shaped(mesh, (8 * 256, 256), axes, dtype=dtype)]
    if partitioned:
        return compiled(lambda x: x.reshape(8, 256, 256).sum(0), *args)

    def step(x):
        return jax.lax.psum(x, axes)

    fn = jax.shard_map(step, mesh=mesh, in_specs=P(axes), out_specs=P())
    if policy is not None:
        fn = xcoll.optimize(fn, policy=policy, topology=hosts())
    return compiled(fn, *args)


def on_hosts(text, topology=None, **kwargs):
    topology = hosts() if topology is None else topology
    return advice_on(text, ("host", "device"), topology, HOSTS, **kwargs)


def test_a_hierarchy_over_a_slow_link():
    (advice,) = on_hosts(summed())
    assert advice.kind == "hierarchy" and "crossing network" in advice.text
    request = Request(
        "all_reduce", "sum", ("host", "device"), (2, 4), "float32", 4, ((256, 256),), "cpu"
    )
    best = plan(request, hosts(), Policy())
    assert best.name in advice.text and "hierarchical" in best.name
    saved_ps = best.native_time_ps - best.predicted_time_ps
    assert advice.saves_s == pytest.approx(saved_ps * 1e-12)
    assert "xcoll.optimize(step)." in advice.text and "partitioner" not in advice.text


def test_what_computation_hides_is_not_saved():
    native = on_hosts(summed())[0].saves_s
    (advice,) = on_hosts(summed(), exposed_s=native * 0.9)
    assert advice.saves_s == pytest.approx(native * 0.9)
    assert on_hosts(summed(), exposed_s=0.0) == ()


def test_what_the_partitioner_made_has_to_be_written_first():
    (advice,) = on_hosts(summed(partitioned=True))
    assert advice.kind == "hierarchy" and "xcoll.gradients.value_and_grad" in advice.text


def test_only_sums_may_be_gradients():
    mesh = mesh_of("cpu", (2, 4), ("host", "device"))

    def step(x, w):  # the whole of x for every column of w
        return jax.lax.with_sharding_constraint(x, P()) @ w

    with jax.set_mesh(mesh):
        text = compiled(
            step,
            shaped(mesh, (2048, 256), ("host", "device")),
            shaped(mesh, (256, 8), None, ("host", "device")),
        )
    found = on_hosts(text)
    (advice,) = (advice for advice in found if "all-gather" in advice.text)
    assert advice.kind == "hierarchy" and "It is exact. How: the partitioner" in advice.text
    assert "value_and_grad" not in advice.text


def test_no_plan_for_what_xcoll_made_or_what_no_slow_link_carries():
    text = summed(policy=Policy(algorithm="hierarchical"))
    assert len(hlo.collectives(text)) > 1
    assert on_hosts(text) == ()
    assert on_hosts(summed(), topology=Topology.unknown(HOSTS, "a test")) == ()
    assert advice_on(summed(), ("device",), hosts(), HOSTS) == ()
    one_host = Topology.parse("cpu:8", axes=HOSTS)
    assert on_hosts(summed(), topology=one_host) == ()


@functools.cache
def across_slices(dtype):
    mesh = mesh_of("2*v5e:2x2", (2, 4), ("dcn", "data"))
    fn = jax.shard_map(
        lambda x: jax.lax.psum(x, "dcn"), mesh=mesh, in_specs=P("dcn"), out_specs=P()
    )
    return compiled(fn, shaped(mesh, (2 * 1024, 1024), "dcn", dtype=dtype))


def between_slices(dtype):
    sizes = {"dcn": 2, "data": 4}
    topology = Topology.from_mesh(mesh_of("2*v5e:2x2", (2, 4), ("dcn", "data")))
    return advice_on(across_slices(dtype), ("dcn",), topology, sizes)


def test_a_codec_over_the_slow_axis_alone():
    (advice,) = between_slices(jnp.float32)
    assert advice.kind == "codec" and "int8" in advice.text
    assert "codec={'dcn': 'int8'}" in advice.text and "It is lossy: |error| <= " in advice.text
    assert advice.saves_s > 0
    assert len(advice.rows) == 1  # the send; its recv is the other end


def test_no_codec_for_integers():
    assert between_slices(jnp.int32) == ()


def test_what_saves_most_comes_first():
    both = (
        sums(8)
        .replace("%main ()", "%main (y: f32[262144])")
        .replace(
            "  ROOT %t",
            "  %y = f32[262144] parameter(8)\n"
            "  %z = f32[262144] all-reduce(%y), replica_groups={{0,1,2,3}}, to_apply=%add\n"
            "  ROOT %t",
        )
    )
    topology = Topology.parse("2*cpu:2@1Mbit", axes={"data": 4})
    found = advice_on(both, topology=topology, exposed_s=100.0)
    assert [advice.kind for advice in found][:1] == ["small-reductions"]
    saved = [advice.saves_s for advice in found]
    assert len(saved) > 1 and saved == sorted(saved, reverse=True)
