"""Which transfers run beside compute: each form that XLA prints, by hand, and real programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xcoll import aot
from xcoll.hardware import Device
from xcoll.hlo.loops import executions
from xcoll.hlo.overlap import overlaps
from xcoll.hlo.reader import collectives_of
from xcoll.hlo.spans import spans
from xcoll.hlo.text import parse
from xcoll.hlo.work import compute_of

X = "f32[1000]"
PASS_S = {"v5e": 8000 / 819e9, "tpu7x": 8000 / 3690e9, "h100": 8000 / 3350e9}
"""Time to negate 1000 float32: 4000 bytes read and as many written, at memory bandwidth."""


def found(*lines, called="", kind="v5e", scheduled=True, times_s=None):
    """(asynchronous, compute beside it in passes over X), by name."""
    header = "HloModule f, num_partitions=4" + ", is_scheduled=true" * scheduled
    body = "\n".join(f"  {line}" for line in lines)
    module = parse(f"{header}\n{called}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")
    compute = compute_of(module, executions(module), Device.named(kind), None)
    times_s = {name: passes * PASS_S[kind] for name, passes in (times_s or {}).items()}
    rows = collectives_of(module)
    result = overlaps(module, rows, spans(module, rows), compute, times_s)
    return {n: (o.is_async, pytest.approx(o.work_s / PASS_S[kind])) for n, o in result.items()}


def negate(name, operand="x"):
    return f"%{name} = {X} negate(%{operand})"


def permute(name, operand="x", pairs="{0,1}", more=""):
    return (
        f"%{name} = ({X}, {X}) collective-permute-start(%{operand}), channel_id=1,"
        f" source_target_pairs={{{pairs}}}{more}"
    )


def done(name, start, kind="collective-permute"):
    return f"%{name} = {X} {kind}-done(%{start})"


IN = f"%x = {X} parameter(0)"


def test_compute_between_start_and_done():
    lines = IN, negate("a"), permute("s"), negate("b"), negate("c"), done("d", "s"), negate("e")
    assert found(*lines) == {"s": (True, 2)}
    # Another collective, or what only names a value, is no compute.
    reduced = f"%r = {X} all-reduce(%x), channel_id=2, replica_groups={{}}, to_apply=%add"
    named = f"%n = {X} bitcast(%x)"
    lines = IN, permute("s"), reduced, named, negate("b"), done("d", "s")
    assert found(*lines) == {"s": (True, 1), "r": (False, 0)}
    # Nothing is known of a program that is not scheduled.
    assert found(*lines, scheduled=False) == {"s": (False, 0), "r": (False, 0)}
    # No time is capped by what is not given; a given time caps.
    lines = IN, permute("s"), negate("b"), negate("c"), done("d", "s")
    assert found(*lines, times_s={"s": 1.5}) == {"s": (True, 1.5)}


def test_gpu_starts_that_block_are_not_asynchronous():
    config = ', backend_config={"collective_backend_config":{"is_sync":%s,"backend":"DEFAULT"}}'
    for is_sync, expected in (("true", (False, 0)), ("false", (True, 1))):
        lines = IN, permute("s", more=config % is_sync), negate("b"), done("d", "s")
        assert found(*lines, kind="h100") == {"s": expected}


def test_a_done_finds_its_start_through_what_only_hands_it_on():
    lines = (
        IN,
        permute("s"),
        f"%t = (({X}, {X}), {X}) tuple(%s, %x)",
        f"%u = (({X}, {X}), {X}) opt-barrier(%t)",
        f"%g = ({X}, {X}) get-tuple-element(%u), index=0",
        negate("b"),
        done("d", "g"),
    )
    assert found(*lines) == {"s": (True, 1)}


def test_asynchronous_calls_of_a_collective():
    called = f"""
%wrapped (p: {X}) -> {X} {{
  %p = {X} parameter(0)
  ROOT %r = {X} all-reduce(%p), replica_groups={{}}, to_apply=%add
}}
%work (p: {X}) -> {X} {{
  %p = {X} parameter(0)
  ROOT %n = {X} negate(%p)
}}
"""
    lines = (
        IN,
        f"%s = (({X}), {X}) async-start(%x), calls=%wrapped",
        negate("a"),
        f"%u = (({X}), {X}) async-update(%s), calls=%wrapped",
        f"%w = {X} call(%x), to_apply=%work",
        f"%d = {X} async-done(%u), calls=%wrapped",
        negate("b"),
    )
    assert found(*lines, called=called) == {"r": (True, 2)}


def test_what_the_sparse_cores_carry_out_starts_where_it_is_handed_its_operand():
    called = f"""
%called (p: {X}) -> {X} {{
  %p = {X} parameter(0)
  ROOT %r = {X} all-reduce(%p), replica_groups={{}}, to_apply=%add
}}, execution_thread="sparsecore"
"""
    lines = (
        IN,
        '%s = ((), (), s32[8192]) custom-call-start(), async_execution_thread="sparsecore",'
        " called_computations={%called}",
        negate("a"),
        f"%u = (({X}), {X}, s32[8192]) custom-call-update(%s, %a)",
        negate("b"),
        negate("c"),
        f"%d = {X} custom-call-done(%u)",
        negate("e"),
    )
    assert found(*lines, called=called, kind="tpu7x") == {"r": (True, 2)}


def test_send_and_recv():
    lines = (
        IN,
        "%k = token[] after-all()",
        f"%r = ({X}, u32[], token[]) recv(%k), channel_id=1",
        negate("a"),
        f"%s = ({X}, u32[], token[]) send(%x, %k), channel_id=1",
        negate("b"),
        f"%rd = ({X}, token[]) recv-done(%r), channel_id=1",
        negate("c"),
        "%sd = token[] send-done(%s), channel_id=1",
    )
    # Both ways at once, on links of their own.
    assert found(*lines) == {"r": (True, 2), "s": (True, 2)}


def test_a_send_between_slices_lasts_until_its_recv_is_done():
    def slices(rendezvous):
        return (
            "is_host_transfer=true, frontend_attributes={"
            f'_xla_host_transfer_rendezvous="{rendezvous}"'
            ',_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"}'
        )

    lines = (
        IN,
        "%k = token[] after-all()",
        f"%s = ({X}, u32[], token[]) send(%x, %k), channel_id=2, {slices('all-gather.1_0')}",
        f"%r = ({X}, u32[], token[]) recv(%k), channel_id=1, {slices('all-gather.1_0')}",
        negate("a"),
        "%sd = token[] send-done(%s), channel_id=2, is_host_transfer=true",
        negate("b"),
        negate("c"),
        f"%rd = ({X}, token[]) recv-done(%r), channel_id=1, is_host_transfer=true",
    )
    assert found(*lines) == {"s": (True, 3), "r": (True, 3)}
    # A permute inside the slice beside it has links of its own, and the same compute.
    beside = (*lines[:5], permute("p"), *lines[5:8], done("q", "p"), *lines[8:])
    assert found(*beside) == {"s": (True, 3), "r": (True, 3), "p": (True, 2)}


STEPS = f"""
%begin (p: {X}) -> ({X}, {X}) {{
  %p.1 = {X} parameter(0)
  %ag.1 = {X} all-gather(%p.1), channel_id=4, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  ROOT %b.1 = ({X}, {X}) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}}
%beside (p: {X}, q: {X}, r: {X}) -> ({X}, {X}, {X}) {{
  %p.2 = {X} parameter(0)
  %q.2 = {X} parameter(1)
  %r.2 = {X} parameter(2)
  %n.2 = {X} negate(%r.2)
  %ag.2 = {X} all-gather(%p.2), channel_id=4, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  ROOT %t.2 = ({X}, {X}, {X}) tuple(%n.2, %q.2, %ag.2)
}}
%end (p: {X}, q: {X}) -> {X} {{
  %p.3 = {X} parameter(0)
  %q.3 = {X} parameter(1)
  %ag.3 = {X} all-gather(%p.3), channel_id=4, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  ROOT %d.3 = {X} custom-call(%p.3, %q.3, %ag.3), custom_call_target="AsyncCollectiveDone"
}}
"""  # noqa: E501


def test_tpu_collectives_fused_with_compute_step_by_step():
    lines = (
        IN,
        negate("a"),
        f"%s = ({X}, {X}) fusion(%x), kind=kCustom, calls=%begin",
        f"%p = {X} get-tuple-element(%s), index=0",
        f"%q = {X} get-tuple-element(%s), index=1",
        negate("b"),
        f"%f = ({X}, {X}, {X}) fusion(%p, %q, %x), kind=kOutput, calls=%beside",
        f"%p2 = {X} get-tuple-element(%f), index=1",
        f"%d = {X} fusion(%p2, %q), kind=kCustom, calls=%end",
        negate("c"),
    )
    # b, and the negation inside the fusion; the steps themselves take nothing.
    assert found(*lines, called=STEPS) == {"ag.1": (True, 2)}


def test_compute_hides_a_second_once_the_first_started_first():
    lines = (
        IN,
        permute("s"),
        negate("a"),
        permute("t", pairs="{0,1},{1,2}"),
        negate("b"),
        negate("c"),
        done("e", "t"),
        done("d", "s"),
    )
    assert found(*lines, times_s={"s": 1.5, "t": 9}) == {"s": (True, 1.5), "t": (True, 1.5)}
    assert found(*lines, times_s={"s": 9, "t": 9}) == {"s": (True, 3), "t": (True, 0)}
    assert found(*lines, times_s={"s": 0.5, "t": 1}) == {"s": (True, 0.5), "t": (True, 1)}


@pytest.mark.parametrize(
    ("pairs", "shared"),
    [("{1,0}", False), ("{0,2}", False), ("{2,3},{0,1}", True)],
)
def test_on_a_torus_other_directions_are_other_links(pairs, shared):
    lines = IN, permute("s"), permute("t", pairs=pairs), negate("a"), done("d", "s"), done("e", "t")
    assert found(*lines) == {"s": (True, 1), "t": (True, 0 if shared else 1)}
    # A GPU has one port.
    assert found(*lines, kind="h100") == {"s": (True, 1), "t": (True, 0)}


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ("{{0,1},{2,3}}", "{{0,2},{1,3}}", False),
        ("{{0,1},{2,3}}", "{{0,1},{2,3}}", True),
        ("{{0,1},{2,3}}", "{{0,1,2,3}}", True),
    ],
)
def test_on_a_torus_other_axes_are_other_links(one, other, shared):
    def start(name, groups):
        return (
            f"%{name} = ({X}, f32[2000]) all-gather-start(%x), channel_id=1,"
            f" replica_groups={groups}, dimensions={{0}}"
        )

    def end(name, of):
        return f"%{name} = f32[2000] all-gather-done(%{of})"

    lines = IN, start("s", one), start("t", other), negate("a"), end("d", "s"), end("e", "t")
    assert found(*lines) == {"s": (True, 1), "t": (True, 0 if shared else 1)}
    # A permute from 0 to 1 is on the links of the groups that hold both.
    lines = IN, start("s", one), permute("t"), negate("a"), end("d", "s"), done("e", "t")
    assert found(*lines) == {"s": (True, 1), "t": (True, 0)}
    lines = IN, start("s", one), permute("t", pairs="{0,2}"), negate("a"), end("d", "s")
    assert found(*lines, done("e", "t")) == {"s": (True, 1), "t": (True, 1)}


def loop(*body, root, state=f"(s32[], {X}, ({X}, {X}))"):
    lines = "\n".join(f"  {line}" for line in body)
    return f"""
%body (s: {state}) -> {state} {{
  %z = {state} parameter(0)
  %i = s32[] get-tuple-element(%z), index=0
  %x.1 = {X} get-tuple-element(%z), index=1
{lines}
  ROOT %t.1 = {state} tuple({root})
}}
%test (s: {state}) -> pred[] {{
  %z.2 = {state} parameter(0)
  ROOT %c.2 = pred[] constant(true)
}}
"""


def run(state=f"(s32[], {X}, ({X}, {X}))", trips=5):
    return (
        f"%w = {state} while(%t), condition=%test, body=%body,"
        f' backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    )


def test_a_transfer_beside_a_loop_has_what_the_loop_has_not_hidden():
    state = f"(s32[], {X})"
    body = permute("p", "x.1"), negate("a.1", "x.1"), done("q", "p"), negate("b.1", "x.1")
    lines = (
        IN,
        "%n = s32[] constant(0)",
        f"%t = {state} tuple(%n, %x)",
        permute("s"),
        run(state),
        done("d", "s"),
    )
    # Five times around: 5 passes hide p, one each, and 5 are left, which hide s.
    called = loop(*body, root="%i, %b.1", state=state)
    assert found(*lines, called=called) == {"p": (True, 1), "s": (True, 5)}
    assert found(*lines, called=called, times_s={"p": 0.25}) == {
        "p": (True, 0.25),
        "s": (True, 8.75),
    }


def test_started_in_one_iteration_and_done_in_the_next():
    called = loop(
        f"%g = ({X}, {X}) get-tuple-element(%z), index=2",
        negate("a.1", "x.1"),
        done("q", "g"),
        negate("b.1", "x.1"),
        permute("p", "b.1"),
        negate("c.1", "x.1"),
        negate("d.1", "x.1"),
        root="%i, %d.1, %p",
    )
    lines = (
        IN,
        "%n = s32[] constant(0)",
        permute("s"),
        negate("a"),
        f"%t = (s32[], {X}, ({X}, {X})) tuple(%n, %x, %s)",
        run(),
        f"%g.9 = ({X}, {X}) get-tuple-element(%w), index=2",
        done("d", "g.9"),
    )
    # p: c and d of its own iteration and a of the next. s, which the first iteration ends: a of
    # what stands before the loop.
    assert found(*lines, called=called) == {"s": (True, 1), "p": (True, 3)}


SIZE, RANKS = 2048, 4


def by_kind(module, kind):
    compute = compute_of(module, executions(module), Device.named(kind), None)
    rows = collectives_of(module)
    kinds = {row.name: row.kind for row in rows}
    result = overlaps(module, rows, spans(module, rows), compute)
    assert list(result) == list(kinds)
    return [(kinds[name], overlap) for name, overlap in result.items()]


def ring_matmul(topology):
    """Products with each shard of a weight, that goes round the ring meanwhile."""
    mesh = aot.mesh(topology, (RANKS,), ("d",))
    ring = [(n, (n + 1) % RANKS) for n in range(RANKS)]

    def per_shard(x, w):
        total = jnp.zeros((SIZE, SIZE), jnp.float32)
        for step in range(RANKS):
            following = jax.lax.ppermute(w, "d", ring) if step < RANKS - 1 else w
            total = total + jnp.dot(x[step], w, preferred_element_type=jnp.float32)
            w = following
        return total

    spec = PartitionSpec(None, "d")
    mapped = jax.shard_map(per_shard, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape in ((RANKS, SIZE * RANKS, SIZE), (SIZE, SIZE * RANKS))
    ]
    return parse(jax.jit(mapped).lower(*args).compile().as_text())


def test_a_ring_of_permutes_is_hidden_by_the_products_of_its_steps():
    result = by_kind(ring_matmul("v5e:2x2"), "v5e")
    assert [kind for kind, _ in result] == ["collective-permute"] * (RANKS - 1)
    # One product beside each: 2·2048³ flops at the peak rate, 87.2 us; at most the sum beside it is
    # a pass of its own, 3 arrays of float32 at 819 GB/s, and a copy of a shard.
    product_s = 2 * SIZE**3 / 197e12
    most_s = product_s + (3 * 4 + 2 * 2) * SIZE * SIZE / 819e9
    for _, overlap in result:
        assert overlap.is_async
        assert product_s <= overlap.work_s <= most_s


def gathered(topology, num_devices, layers, width):
    """FSDP: layers whose weights are gathered for use, one square one each; or two in a loop."""
    mesh = aot.mesh(topology, (num_devices,), ("d",))

    def split(*spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    def layer(x, w):
        for one in w:
            x = jax.lax.with_sharding_constraint(jax.nn.relu(x @ one), split("d"))
        return x, None

    def unrolled(x, ws):
        for n in range(layers):
            x, _ = layer(x, [w[n] for w in ws])
        return x

    def scanned(x, ws):
        return jax.lax.scan(layer, x, ws)[0]

    in_loop = width != SIZE
    shapes = [(layers, SIZE, width), *[(layers, width, SIZE)] * in_loop]
    ws = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=split(None, "d")) for s in shapes]
    x = jax.ShapeDtypeStruct((num_devices * SIZE, SIZE), jnp.bfloat16, sharding=split("d"))
    step = scanned if in_loop else unrolled
    return parse(jax.jit(step, out_shardings=split("d")).lower(x, ws).compile().as_text())


def test_gathers_fused_with_the_products_before_theirs():
    # On two slices each weight is received from the other slice, then gathered in its own: the
    # first alone, the others step by step inside the product of the layer before.
    product_s = 2 * SIZE**3 / 197e12
    gathers = [o for k, o in by_kind(gathered("2*v5e:2x2", 8, 3, SIZE), "v5e") if k == "all-gather"]
    assert [o.is_async for o in gathers] == [False, True, True]
    assert [o.work_s for o in gathers] == [0.0, *[pytest.approx(product_s)] * 2]


def test_gathers_of_a_gpu_run_beside_the_product_of_the_other_weight():
    found = by_kind(gathered("h100:4", 4, 3, 4 * SIZE), "h100")
    assert [(kind, o.is_async) for kind, o in found] == [("all-gather", True)] * 2
    # The second weight's is in flight during the first product, 2·2048²·8192 flops.
    product_s = 2 * SIZE * SIZE * 4 * SIZE / 989.5e12
    assert sorted(o.work_s for _, o in found) == [0.0, pytest.approx(product_s)]
