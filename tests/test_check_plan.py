"""`check_plan`: plans against compiled programs, and every kind of difference that it explains.

That for every plan the audited bytes are those predicted is tested in test_laws.py,
test_aot_native.py and test_aot_compressed.py.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from spmd import mesh_of

import xcoll
from xcoll import Policy, aot, codecs
from xcoll.algorithms import hierarchical, ring
from xcoll.hlo.auditing import audit
from xcoll.hlo.compared import Compared
from xcoll.hlo.planned import PlanCheck, against, check_plan
from xcoll.plan import Operation

P = jax.P
AXES = ("host", "device")


def mesh_for(target):
    """The mesh of two hosts (or slices) of four."""
    return mesh_of(2, 4, names=AXES) if target == "cpu" else aot.mesh(target, (2, 4), AXES)


def checked(target, body, shape=(2, 3), dtype="float32", **options):
    """Checks a per-shard function of one array, whose shards have a shape."""
    mesh = mesh_for(target)
    fn = jax.shard_map(body, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    sharding = jax.NamedSharding(mesh, P(AXES))
    x = jax.ShapeDtypeStruct((8 * shape[0], *shape[1:]), dtype, sharding=sharding)
    return check_plan(fn, x, **options)


def lines(check):
    """Kind, axes, bytes, planned, emitted and verdict of each line, sorted."""
    return sorted(
        (row.kind, row.axes, row.num_bytes, row.planned, row.emitted, row.verdict)
        for row in check.rows
    )


def assert_complete(check: PlanCheck):
    """Every row of the audit, and every site with a plan, is in one line."""
    names = [name for row in check.rows for name in row.rows]
    assert sorted(names) == sorted(row.name for row in check.audit.rows)
    planned = sum(
        o.count * (1 if group[0].count is None else group[0].count)
        for group in check.report.groups()
        for o in group[0].plan.operations
    )
    assert sum(row.planned for row in check.rows) >= planned


def many(x):
    """Collectives in loops, branches and groups, planned and kept."""

    def body(carry, _):
        return carry + lax.psum_scatter(lax.all_gather(carry, AXES), AXES), lax.pmax(carry, "host")

    y, stacked = lax.scan(body, x, None, length=2)
    y = y + lax.cond(lax.pmax(y[0, 0], AXES) > 0, lambda v: lax.psum(v, AXES), lambda v: 2 * v, y)
    groups = lax.psum(y, "device", axis_index_groups=[[0, 1], [2, 3]])
    moved = lax.ppermute(y, AXES, [(0, 1)])
    return xcoll.barrier(y + groups + stacked.sum(0) + moved + lax.pmean(y, AXES), "host")


# A shard is (8, 3) in float32: 96 bytes. By hand, executions planned and emitted.
MANY = [
    ("all-gather", AXES, 96, 2, 2, "equal"),  # in a loop of two
    ("all-reduce", ("device",), 96, 1, 1, "equal"),  # in groups of two
    ("all-reduce", ("host",), 4, 1, 1, "equal"),  # the barrier
    ("all-reduce", ("host",), 96, 2, 2, "equal"),  # pmax, in the loop
    ("all-reduce", AXES, 4, 1, 1, "equal"),  # pmax of one number
    ("all-reduce", AXES, 96, 2, 2, "equal"),  # in a branch, and pmean
    ("collective-permute", ("device",), 96, 1, 1, "equal"),
    ("reduce-scatter", AXES, 768, 2, 2, "equal"),
]


def test_kept_sites_are_compared_too():
    check = checked("cpu", many, (8, 3))
    assert lines(check) == MANY
    assert check.is_equal and check.is_explained
    assert_complete(check)
    assert len(check.report.sites) == 9
    assert all(found.verdict == "equal" for found in check.by_axis.values())


def test_a_rewritten_program_is_as_planned():
    # A ring of 8 ranks: 7 steps to reduce, 7 to gather, an eighth of 64 * 4 bytes each.
    check = checked("cpu", lambda x: lax.psum(x, AXES), (64,), policy=Policy(algorithm="ring"))
    assert lines(check) == [("collective-permute", AXES, 32, 14, 14, "equal")]
    # Rank 3 and rank 7 send to the other host: 14 * 32 bytes.
    assert {a: (b.planned, b.emitted) for a, b in check.by_axis.items()} == {
        "host": (448, 448),
        "device": (448, 448),
    }
    (source,) = {source for row in check.rows for source in row.sources}
    assert source.startswith(f"{__file__}:")


def both(x):
    return lax.psum(x, "device") + xcoll.psum(2 * x, "host", policy=Policy(algorithm="ring"))


@pytest.mark.parametrize("wrap", [lambda f: f, xcoll.optimize, jax.jit], ids=["", "own", "jit"])
def test_regions_with_a_policy_of_their_own_count_once(wrap):
    mesh = mesh_for("cpu")
    fn = wrap(jax.shard_map(both, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False))
    x = jax.device_put(jnp.ones((8 * 2,)), jax.NamedSharding(mesh, P(AXES)))
    for _ in range(2):  # what is compiled already is planned anew
        check = check_plan(fn, x)
        assert lines(check) == [
            ("all-reduce", ("device",), 8, 1, 1, "equal"),
            ("collective-permute", ("host",), 4, 2, 2, "equal"),
        ]
        assert check.is_equal


def test_an_optimized_functions_own_policy_holds():
    mesh = mesh_for("cpu")
    fn = jax.shard_map(
        lambda x: lax.psum(x, "host"), mesh=mesh, in_specs=P(AXES), out_specs=P("device")
    )
    x = jax.device_put(jnp.ones((16,)), jax.NamedSharding(mesh, P(AXES)))
    step = jax.jit(xcoll.optimize(fn, policy=Policy(algorithm=ring())), donate_argnums=0)
    check = check_plan(step, x, policy=Policy.native())
    assert lines(check) == [("collective-permute", ("host",), 4, 2, 2, "equal")]
    assert step.reports == []  # its own list is left alone


def test_what_xla_combines():
    def body(x):
        return x + sum(v.sum() for v in lax.psum([x, x[:2], x[:, :1]], "device"))

    check = checked("cpu", body, (8, 3))
    combined = [(96 + 24 + 32, 0, 1), (96, 1, 0), (24, 1, 0), (32, 1, 0)]
    assert lines(check) == sorted(
        ("all-reduce", ("device",), *numbers, "combined by XLA") for numbers in combined
    )
    assert check.is_explained and not check.is_equal
    assert check.by_axis["device"].planned == check.by_axis["device"].emitted == 152 * 2 * 3 // 4
    assert_complete(check)


def test_what_xla_cpu_carries_wider():
    def body(x):
        return lax.ppermute(x, "device", [(0, 1), (1, 2)])

    check = checked("cpu", body, (8, 3), "bfloat16")
    assert lines(check) == [
        ("collective-permute", ("device",), 48, 1, 0, "carried twice as wide by XLA:CPU"),
        ("collective-permute", ("device",), 96, 0, 1, "carried twice as wide by XLA:CPU"),
    ]
    assert check.by_axis["device"].verdict == "carried twice as wide by XLA:CPU"
    assert check.is_explained and not check.is_equal


def test_loops_of_unknown_length_count_once():
    def body(x):
        def turn(state):
            return state[0] + 1, lax.psum(state[1], "device")

        until = x[0].astype(int)
        _, y = lax.while_loop(lambda state: state[0] < until, turn, (0, x))
        # Its length is not in the equation, and XLA finds it.
        return lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, lax.pmax(s[1], "host")),
                              (0, y))[1]  # fmt: skip

    check = checked("cpu", body, (2,))
    why = "in a loop whose length only one side knows"
    assert lines(check) == [
        ("all-reduce", ("device",), 8, 1, 1, "equal"),
        ("all-reduce", ("host",), 8, 0, 5, why),
        ("all-reduce", ("host",), 8, 1, 0, why),
    ]
    assert [row.in_unknown_loop for row in check.rows].count(True) == 2
    assert check.is_explained and not check.is_equal


def test_a_group_of_one_sends_nothing_and_bytes_that_are_not_planned_are_said():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(8, 1), ("i", "one"))

    def body(x):
        rows = jax.vmap(lambda row: lax.psum(row, ("rows", "i")), axis_name="rows")(x)
        return lax.psum(x, "one") + rows

    fn = jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
    x = jax.ShapeDtypeStruct((16, 3), "float32", sharding=jax.NamedSharding(mesh, P("i")))
    check = check_plan(fn, x)
    # Two rows of three numbers are added up before they are sent.
    why = "kept; its bytes were not planned"
    assert lines(check) == [
        ("all-reduce", (), 24, 0, 1, "sends nothing"),
        ("all-reduce", ("i",), 12, 0, 1, why),
        ("all-reduce", ("i",), 24, 1, 0, why),
    ]
    assert check.by_axis["i"].verdict == why


def tensor_parallel(w1, w2, x):
    def local(w1, w2, x):
        def loss(w):
            return ((jnp.tanh(x @ w[0]) @ w[1]) ** 2).mean()

        return lax.pmean(jax.grad(loss)((w1, w2)), "data")

    return jax.shard_map(
        local, in_specs=(P(), P(), P("data")), out_specs=P(), axis_names={"data"}, check_vma=False
    )(w1, w2, x)


def partitioned():
    """Arguments of `tensor_parallel`, and their mesh."""
    mesh = mesh_of(2, 4, names=("data", "model"))

    def given(shape, *spec):
        sharding = jax.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    weights = given((16, 32), None, "model"), given((32, 16), "model")
    return mesh, (*weights, given((8, 16), "data"))


def test_what_the_partitioner_adds_and_cuts():
    mesh, arguments = partitioned()
    check = check_plan(tensor_parallel, *arguments, mesh=mesh)
    cut = "cut over axes that are the partitioner's"
    assert lines(check) == [
        # Each gradient has 16 * 32 numbers, of which a device has a quarter; XLA combines both.
        ("all-reduce", ("data",), 2 * 512, 0, 1, cut),
        ("all-reduce", ("data",), 2048, 2, 0, cut),
        # The activations of 4 rows of 16 numbers, summed over model.
        ("all-reduce", ("model",), 256, 0, 1, "added by the partitioner"),
    ]
    assert check.is_explained and not check.is_equal
    assert check.by_axis["model"].planned == 0


def test_only_the_partitioner_acts_where_nothing_was_planned():
    """libtpu keeps no names between slices: nothing then says who made a collective."""
    mesh, arguments = partitioned()
    fn = jax.jit(xcoll.optimize(tensor_parallel))
    with jax.set_mesh(mesh):
        lowered = fn.lower(*arguments)
    found = audit(lowered, mesh=mesh)
    rows = tuple(dataclasses.replace(row, made_by="unknown") for row in found.rows)
    nameless = dataclasses.replace(found, rows=rows)

    def verdicts(lowered):
        check = against(fn.reports[-1], nameless, "cpu", lowered)
        return {row.verdict for row in check.rows if row.axes == ("model",)}

    assert verdicts(lowered) == {"added by the partitioner"}
    # Of a program that nothing is known of, it could be anyone's.
    assert verdicts(None) == {"not explained"}


TPU = "2*v5e:2x2"


def test_what_the_tpu_compiler_cuts_and_pads():
    check = checked(TPU, lambda x: lax.psum(x, AXES), (256, 128), policy=Policy(algorithm="ring"))
    split = "split by the TPU compiler: between slices, and inside"
    slot = 256 * 128 * 4 // 8
    assert lines(check) == [
        ("collective-permute", ("device",), slot, 0, 14, split),
        ("collective-permute", AXES, slot, 14, 14, split),
        ("recv", AXES, slot, 0, 14, "the other end of a send"),
    ]
    assert check.is_explained and not check.is_equal
    assert_complete(check)

    padded = "padded by the TPU compiler to whole tiles"
    check = checked(TPU, lambda x: x + lax.psum(x[0, 0], "host"), (8, 128))
    assert lines(check) == [
        ("all-reduce", ("host",), 4, 1, 0, padded),
        ("all-reduce", ("host",), 512, 0, 1, padded),
        ("recv", ("host",), 512, 0, 1, "the other end of a send"),
    ]
    assert check.by_axis["host"].verdict == padded

    # 2048 rows over four: libtpu pads shares of 512 rows to 528, and moves them back.
    check = checked(TPU, lambda x: lax.psum(x, AXES), (2048, 2048), "bfloat16")
    row = 2048 * 2
    assert lines(check) == [
        ("all-gather", ("device",), 512 * row, 1, 1, "equal"),
        ("all-reduce", ("host",), 512 * row, 1, 1, "equal"),
        ("collective-permute", ("device",), 48 * row, 0, 1,
         "moves padded shares into place (the TPU compiler)"),
        ("recv", ("host",), 512 * row, 0, 1, "the other end of a send"),
        ("reduce-scatter", ("device",), 2048 * row, 1, 0, padded),
        ("reduce-scatter", ("device",), 4 * 528 * row, 0, 1, padded),
    ]  # fmt: skip
    assert check.is_explained


def test_a_reduce_scatter_that_the_tpu_compiler_undoes():
    mesh = aot.mesh("v5e:4x4", (4, 4), AXES)
    fn = jax.shard_map(
        lambda x: lax.psum_scatter(x, AXES, tiled=True),
        mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False,
    )  # fmt: skip
    sharding = jax.NamedSharding(mesh, P(AXES))
    check = check_plan(fn, jax.ShapeDtypeStruct((16 * 2048, 128), "float32", sharding=sharding))
    why = "a reduce-scatter, undone by the TPU compiler"
    assert lines(check) == [
        ("all-reduce", AXES, 2**20, 0, 1, why),
        ("reduce-scatter", AXES, 2**20, 1, 0, why),
    ]
    assert {found.verdict for found in check.by_axis.values()} == {why}


GATHERED = "an all-gather, carried out as an all-reduce by the TPU compiler"
WHOLE_TILES = "padded by the TPU compiler to whole tiles"
SCATTERED = "planned as an all-reduce: the TPU compiler scatters the shares"


def psum_both(x):
    return lax.psum(x, AXES)


# Body, shape of a shard, dtype, and by hand: operation, axes, bytes, planned, emitted, verdict.
TILES = {
    # One number of each of four devices: a tile of 128 words of 32 bits is the least.
    "gather": (lambda x: lax.all_gather(x, "device").sum(0), (1,), "float16", [
        ("all-gather", ("device",), 2, 1, 0, GATHERED),
        ("all-reduce", ("device",), 512, 0, 1, GATHERED),
    ]),
    # Two halves of 127 * 4 bytes of two hosts, in one array of 2032 bytes: four rows of 128 words.
    "complex gather": (lambda x: lax.all_gather(x, "host").sum(0), (127,), "complex64", [
        ("all-gather", ("host",), 508, 2, 0, GATHERED),
        ("all-reduce", ("host",), 2048, 0, 1, GATHERED),
        ("recv", ("host",), 2048, 0, 1, "the other end of a send"),
    ]),
    # Rows of 100 become 128: 16 of them, four to a word.
    "bytes": (lambda x: lax.psum(x, "device"), (100, 16), "int8", [
        ("all-reduce", ("device",), 1600, 1, 0, WHOLE_TILES),
        ("all-reduce", ("device",), 2048, 0, 1, WHOLE_TILES),
    ]),
    # Nothing divides by four: two all-reduces, of 24 rows of 128.
    "odd": (psum_both, (17, 127), "float32", [
        ("all-reduce", ("device",), 17 * 127 * 4, 1, 0, WHOLE_TILES),
        ("all-reduce", ("device",), 24 * 128 * 4, 0, 1, WHOLE_TILES),
        ("all-reduce", ("host",), 17 * 127 * 4, 1, 0, WHOLE_TILES),
        ("all-reduce", ("host",), 24 * 128 * 4, 0, 1, WHOLE_TILES),
        ("recv", ("host",), 24 * 128 * 4, 0, 1, "the other end of a send"),
    ]),
    # 75 rows a share become 80, of which three times five are moved back.
    "rows": (psum_both, (300, 127), "bfloat16", [
        ("all-gather", ("device",), 75 * 127 * 2, 1, 1, "equal"),
        ("all-reduce", ("device",), 300 * 127 * 2, 1, 0, SCATTERED),
        ("all-reduce", ("host",), 75 * 127 * 2, 1, 0, WHOLE_TILES),
        ("all-reduce", ("host",), 80 * 128 * 2, 0, 1, WHOLE_TILES),
        ("collective-permute", ("device",), 15 * 127 * 2, 0, 1,
         "moves padded shares into place (the TPU compiler)"),
        ("recv", ("host",), 80 * 128 * 2, 0, 1, "the other end of a send"),
        ("reduce-scatter", ("device",), 320 * 127 * 2, 0, 1, SCATTERED),
    ]),
    # 1000 rows of 1024 are 1000 tiles: 250 a share.
    "tiles": (psum_both, (999, 1001), "float32", [
        ("all-gather", ("device",), 4 * 250_000, 1, 0, WHOLE_TILES),
        ("all-gather", ("device",), 4 * 250 * 1024, 0, 1, WHOLE_TILES),
        ("all-reduce", ("device",), 4 * 999 * 1001, 1, 0, SCATTERED),
        ("all-reduce", ("host",), 4 * 250_000, 1, 0, WHOLE_TILES),
        ("all-reduce", ("host",), 4 * 250 * 1024, 0, 1, WHOLE_TILES),
        ("recv", ("host",), 4 * 250 * 1024, 0, 1, "the other end of a send"),
        ("reduce-scatter", ("device",), 4 * 1000 * 1024, 0, 1, SCATTERED),
    ]),
    # 129 rows a share become 144; 24 rows are moved.
    "scatter": (lambda x: lax.psum_scatter(jnp.stack([x * i for i in range(4)]), "device"),
                (129, 100), "float32", [
        ("all-reduce", ("device",), 4 * 129 * 100 * 4, 1, 0, SCATTERED),
        ("collective-permute", ("device",), 24 * 100 * 4, 0, 1,
         "moves padded shares into place (the TPU compiler)"),
        ("reduce-scatter", ("device",), 4 * 144 * 100 * 4, 0, 1, SCATTERED),
    ]),
    # A slot for each of two hosts: 300 numbers of 16 bits become 384, and one row a pair.
    "slots": (lambda x: lax.psum_scatter(jnp.concatenate([x, 2 * x]), "host", tiled=True),
              (300,), "float16", [
        ("recv", ("host",), 384 * 2 * 2, 0, 1, "the other end of a send"),
        ("reduce-scatter", ("host",), 2 * 300 * 2, 1, 0, WHOLE_TILES),
        ("reduce-scatter", ("host",), 2 * 384 * 2 * 2, 0, 1, WHOLE_TILES),
    ]),
    # Complex numbers go as two arrays.
    "complex permute": (lambda x: lax.ppermute(x, "device", [(0, 1), (1, 2)]), (129,), "complex64",
                        [("collective-permute", ("device",), 129 * 4, 2, 2, "equal")]),
}  # fmt: skip


@pytest.mark.parametrize("name", TILES)
def test_sizes_in_tiles(name):
    body, shape, dtype, expected = TILES[name]
    check = checked(TPU, body, shape, dtype)
    assert lines(check) == sorted(expected)
    assert check.is_explained
    assert_complete(check)


# What a report may say wrongly of an all-reduce of 2 * 3 int8 over host and device, all of which
# libtpu sends in 512 bytes; the plan is an all-reduce over each.
SMALL = {
    "less": ("device", dict(operand_bytes=5)),
    "half": ("host", dict(operand_bytes=3)),
    "more": ("host", dict(operand_bytes=7)),
    "twice": ("device", dict(count=2)),
    "kind": ("device", dict(kind="all-gather")),
    "scatter": ("device", dict(kind="reduce-scatter")),
    "axes": ("device", dict(axes=("host",))),
    "gone": ("host", None),
}


@pytest.mark.parametrize("wrong", SMALL)
def test_a_wrong_report_is_not_explained_by_tiles(wrong):
    mesh = mesh_for(TPU)
    fn = jax.shard_map(psum_both, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    step = jax.jit(xcoll.optimize(fn))
    sharding = jax.NamedSharding(mesh, P(AXES))
    lowered = step.lower(jax.ShapeDtypeStruct((16, 3), "int8", sharding=sharding))
    report, found = step.reports[-1], audit(lowered)
    assert against(report, found, "tpu", lowered).is_explained
    axis, change = SMALL[wrong]
    (site,) = report.sites
    changed = [
        dataclasses.replace(o, **(change or {})) if o.axes == (axis,) else o
        for o in site.plan.operations
        if o.axes != (axis,) or change is not None
    ]
    plan = dataclasses.replace(site.plan, operations=tuple(changed))
    report = dataclasses.replace(report, sites=(dataclasses.replace(site, plan=plan),))
    check = against(report, found, "tpu", lowered)
    assert not check.is_explained
    assert_complete(check)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_xla_cpu_carries_wider_and_merges(dtype):
    twice = jnp.dtype(dtype).itemsize * 2 * 8 * 3
    merged, carried = "merged with another, or removed, by XLA", "carried twice as wide by XLA:CPU"
    # The plan of a sum counts what is carried; a kept permute counts its operand.
    check = checked(
        "cpu", lambda x: lax.psum(x, "device") * lax.psum(x + 0, "device"), (8, 3), dtype
    )
    assert lines(check) == [("all-reduce", ("device",), twice, 2, 1, merged)]

    def moved(x):
        return lax.ppermute(x, "device", [(0, 1)])

    check = checked("cpu", lambda x: moved(x) * moved(x), (8, 3), dtype)
    why = f"{carried}; {merged}"
    assert lines(check) == [
        ("collective-permute", ("device",), twice // 2, 2, 0, why),
        ("collective-permute", ("device",), twice, 0, 1, why),
    ]


@pytest.mark.parametrize("target", [TPU, "h100:8"])
def test_what_xla_leaves_out_is_explained_by_the_program_it_was_given(target):
    check = checked(target, lambda x: lax.psum(x, "device") + lax.psum(x * x, "device"), (8, 128))
    why = "merged with another, or removed, by XLA"
    assert lines(check) == [("all-reduce", ("device",), 4096, 2, 1, why)]
    assert check.is_explained and not check.is_equal
    # Without that program it could as well be that the plan is wrong.
    again = against(check.report, check.audit, "tpu" if target == TPU else "gpu")
    assert lines(again) == [("all-reduce", ("device",), 4096, 2, 1, "not explained")]


@pytest.mark.parametrize("target", ["cpu", TPU, "h100:8"])
def test_a_codec_between_hosts_is_as_planned(target):
    policy = Policy(
        codec={"host": codecs.int8()}, algorithm=hierarchical("native", "direct"), min_bytes=0
    )
    check = checked(target, lambda x: lax.psum(x, AXES), (256, 128), policy=policy)
    verdicts = {row.verdict for row in check.rows}
    assert verdicts <= {"equal", "the other end of a send"} and check.is_equal
    assert_complete(check)
    over_host = [row for row in check.rows if row.axes == ("host",) and row.kind != "recv"]
    assert {row.kind for row in over_host} == {"all-to-all", "all-gather"}


# What a report may say wrongly of the all-reduce of 96 bytes over device.
WRONG = {
    "bytes": Operation("all-reduce", ("device",), 100, 1),
    "half": Operation("all-reduce", ("device",), 48, 1),  # not what CPUs carry twice as wide: f32
    "halves": Operation("all-reduce", ("device",), 48, 2),  # not combined: it has one operand
    "kind": Operation("all-gather", ("device",), 96, 1),
    "axes": Operation("all-reduce", ("host",), 96, 1),
    "fewer": None,
    "more": Operation("all-reduce", ("device",), 96, 2),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_report_is_not_explained(wrong):
    mesh = mesh_for("cpu")
    fn = jax.jit(
        xcoll.optimize(
            jax.shard_map(
                lambda x: lax.psum(x, "device"), mesh=mesh, in_specs=P(AXES), out_specs=P(AXES),
                check_vma=False,
            )
        )
    )  # fmt: skip
    sharding = jax.NamedSharding(mesh, P(AXES))
    lowered = fn.lower(jax.ShapeDtypeStruct((64, 3), "float32", sharding=sharding))
    report, found = fn.reports[-1], audit(lowered)
    assert against(report, found, "cpu", lowered).is_equal
    (site,) = report.sites
    operations = () if WRONG[wrong] is None else (WRONG[wrong],)
    # What a plan says it emits follows from its stages; here it is made to say something else.
    plan = dataclasses.replace(site.plan, operations=operations)
    report = dataclasses.replace(report, sites=(dataclasses.replace(site, plan=plan),))
    check = against(report, found, "cpu", lowered)
    assert not check.is_explained and not check.is_equal
    assert "not explained" in {row.verdict for row in check.rows}
    assert_complete(check)


def test_a_wrong_report_is_not_explained_by_the_tpu_compiler():
    mesh = aot.mesh(TPU, (2, 4), AXES)
    fn = jax.shard_map(
        lambda x: lax.psum(x, "device"), mesh=mesh, in_specs=P(AXES), out_specs=P(AXES),
        check_vma=False,
    )  # fmt: skip
    step = jax.jit(xcoll.optimize(fn))
    sharding = jax.NamedSharding(mesh, P(AXES))
    # Shards of 8 x 128 numbers are whole tiles.
    lowered = step.lower(jax.ShapeDtypeStruct((64, 128), "float32", sharding=sharding))
    found, (site,) = audit(lowered), step.reports[-1].sites
    assert against(step.reports[-1], found, "tpu", lowered).is_equal
    for kind, num_bytes in [("all-reduce", 2048), ("all-reduce", 4092), ("reduce-scatter", 4096)]:
        wrong = (Operation(kind, ("device",), num_bytes, 1),)
        plan = dataclasses.replace(site.plan, operations=wrong)
        sites = (dataclasses.replace(site, plan=plan),)
        report = dataclasses.replace(step.reports[-1], sites=sites)
        # The program given to XLA has the all-reduce of 4096 bytes: nothing was padded or undone.
        check = against(report, found, "tpu", lowered)
        assert {row.verdict for row in check.rows} == {"not explained"}


@pytest.mark.parametrize("count", [6, 10])
def test_a_wrong_number_of_turns_is_not_explained(count):
    def body(x):
        return lax.scan(lambda x, _: (lax.psum(jnp.sin(x), "device"), None), x, None, length=5)[0]

    mesh = mesh_for("cpu")
    fn = jax.shard_map(body, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    step = jax.jit(xcoll.optimize(fn))
    sharding = jax.NamedSharding(mesh, P(AXES))
    lowered = step.lower(jax.ShapeDtypeStruct((64, 3), "float32", sharding=sharding))
    (site,), found = step.reports[-1].sites, audit(lowered)
    assert site.count == 5
    report = dataclasses.replace(step.reports[-1], sites=(dataclasses.replace(site, count=count),))
    # The program given to XLA has one in a loop, and so has XLA's: none was merged or removed.
    check = against(report, found, "cpu", lowered)
    assert lines(check) == [("all-reduce", ("device",), 96, count, 5, "not explained")]


def test_a_site_that_is_not_in_the_report_is_not_the_partitioner_s():
    mesh = mesh_of(2, 4, names=("data", "model"))

    def fn(x, w):
        def local(x, w):
            return lax.psum(jnp.tanh(x @ w), "data")

        return jax.shard_map(
            local, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"}, check_vma=False
        )(x, w)

    def given(shape, *spec):
        sharding = jax.NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    step = jax.jit(xcoll.optimize(fn))
    with jax.set_mesh(mesh):
        lowered = step.lower(given((8, 16), "data"), given((16, 32), None, "model"))
    found = audit(lowered, mesh=mesh)
    assert [(row.axes, row.made_by) for row in found.rows] == [(("data",), "user")]
    report = dataclasses.replace(step.reports[-1], sites=())
    check = against(report, found, "cpu", lowered)
    # 4 rows of 32 numbers, of which a device has a quarter of the columns.
    assert lines(check) == [("all-reduce", ("data",), 128, 0, 1, "not explained")]


def test_wrong_bytes_over_an_axis_are_not_explained():
    check = checked("cpu", lambda x: lax.psum(x, "device"), (8, 3))
    found = dataclasses.replace(check.audit, wire_bytes={"host": 0, "device": 145})
    found = against(check.report, found, "cpu")
    assert {row.verdict for row in found.rows} == {"equal"}
    # 96 bytes over four: 2 * 3/4 of them.
    assert dataclasses.astuple(found.by_axis["device"]) == (144, 145, "not explained")
    assert not found.is_equal and not found.is_explained


def test_bytes_of_large_plans_are_an_upper_bound():
    check = checked("cpu", lambda x: lax.psum(x, "device"), (8, 3))
    (site,) = check.report.sites
    report = dataclasses.replace(check.report, sites=(dataclasses.replace(site, sent=None),))
    for emitted, verdict in [
        (143, "planned as an upper bound, for so many ranks"),
        (145, "not explained"),
    ]:
        found = dataclasses.replace(check.audit, wire_bytes={"host": 0, "device": emitted})
        assert against(report, found, "cpu").by_axis["device"].verdict == verdict


def test_what_cannot_be_read_is_not_explained():
    check = checked("cpu", lambda x: lax.psum(x, "device"), (8, 3))
    (row,) = check.audit.rows
    unread = dataclasses.replace(row, name="k", kind="custom-call", axes=None, unread="a kernel")
    found = dataclasses.replace(check.audit, rows=(row, unread))
    found = against(check.report, found, "cpu")
    assert {line.verdict for line in found.rows} == {
        "equal",
        "not explained: the program does not show what it sends",
    }
    assert not found.is_explained


def test_json_and_table():
    check = checked("cpu", many, (8, 3))
    data = json.loads(check.to_json())
    assert (data["is_equal"], data["is_explained"]) == (True, True)
    assert [Compared(**{**row, "axes": tuple(row["axes"]), "rows": tuple(row["rows"]),
                        "sources": tuple(row["sources"])})
            for row in data["rows"]] == list(check.rows)  # fmt: skip
    assert data["by_axis"]["host"]["verdict"] == "equal"
    text = str(check)
    assert text.startswith("xcoll: planned against emitted: equal\n")
    table = [line.split() for line in text.splitlines()]
    assert ["reduce-scatter", "host,", "device", "768", "B", "2", "2", "equal"] in table
    assert any(line.startswith("over device: planned ") for line in text.splitlines())


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"check_plan\(fn=3\): must be a function, not int"):
        check_plan(3)
    with pytest.raises(TypeError, match="check_plan"):
        check_plan(lambda x: x, jnp.ones(3), policy="ring")
    with xcoll.disable(), pytest.raises(ValueError, match="switched off"):
        check_plan(lambda x: 2 * x, jnp.ones(3))
    with pytest.raises(ValueError, match="pass mesh="):
        check_plan(lambda x: 2 * x, jnp.ones(3))
