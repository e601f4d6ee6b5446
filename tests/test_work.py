"""How long a compiled program computes: by hand for small programs, then for real ones."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from xcoll import aot
from xcoll.hardware import Device, kinds
from xcoll.hlo.loops import executions
from xcoll.hlo.peaks import Peaks
from xcoll.hlo.products import Product, products
from xcoll.hlo.text import parse
from xcoll.hlo.work import compute_of

# Peak rates of the hardware tables, written again: operations and bytes a second.
V5E, V5E_INT8, V5E_MEMORY = 197e12, 393e12, 819e9
H100, H100_TF32, H100_F32, H100_MEMORY = 989.5e12, 494.5e12, 67e12, 3350e9
CPU, CPU_MEMORY = 50e9, 2 * 4_194_304_000


def compute(text, kind="v5e", optimal_s=None):
    module = parse(text)
    cost = None if optimal_s is None else {"optimal_seconds": optimal_s}
    device = None if kind is None else Device.named(kind)
    return compute_of(module, executions(module), device, cost)


def entry(*lines, called=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule f, is_scheduled=true\n{called}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


def time_s(*lines, kind="v5e", called=""):
    return compute(entry(*lines, called=called), kind).time_s


A, B = "%a = bf16[1024,2048] parameter(0)", "%b = bf16[2048,4096] parameter(1)"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
FLOPS = 2 * 1024 * 2048 * 4096


@pytest.mark.parametrize(
    ("kind", "dtype", "more", "rate"),
    [
        ("v5e", "bf16", "", V5E),
        ("v5e", "f32", "", V5E),
        ("v5e", "f32", ", operand_precision={high,high}", V5E / 3),
        ("v5e", "f32", ", operand_precision={highest,highest}", V5E / 6),
        ("v5e", "bf16", ", operand_precision={highest,highest}", V5E),
        ("v5e", "s8", "", V5E_INT8),
        ("v5e", "f8e4m3fn", "", V5E),  # has none of its own
        ("v6e", "bf16", "", 918e12),
        ("tpu7x", "f8e4m3fn", "", 4614e12 / 2),  # two devices a chip
        ("h100", "bf16", "", H100),
        ("h100", "f16", "", H100),
        ("h100", "f32", "", H100_TF32),
        ("h100", "f32", ", operand_precision={highest,highest}", H100_F32),
        ("h100", "f64", "", 67e12),
        ("cpu", "bf16", "", CPU),
    ],
)
def test_a_product_runs_at_the_peak_rate_of_its_dtype(kind, dtype, more, rate):
    a, b = A.replace("bf16", dtype), B.replace("bf16", dtype)
    # The result is scalar-sized for memory's sake only: the contraction bounds all of these.
    found = time_s(a, b, f"ROOT %d = bf16[1024,4096] dot(%a, %b), {DOT}{more}", kind=kind)
    assert found == pytest.approx(FLOPS / rate)


@pytest.mark.parametrize("kind", kinds())
def test_every_table_has_a_peak_rate(kind):
    # From a float32 product of one flop: TPUs take bfloat16 for it, GPUs TF32.
    peaks = Peaks.of(Device.named(kind))
    slowest = 1e9 if kind == "cpu" else 1e13
    assert slowest <= 1 / peaks.product_s(Product(dtype="f32", flops=1)) <= 1e16
    assert peaks.memory_bytes_per_s > 1e9


def test_memory_bounds_what_has_little_arithmetic():
    # A row times a matrix: 2·4096·4096 flops take 0.17 us on v5e, its 32 MiB take 41 us.
    found = time_s(
        "%a = bf16[1,4096] parameter(0)",
        "%b = bf16[4096,4096] parameter(1)",
        f"ROOT %d = bf16[1,4096] dot(%a, %b), {DOT}",
    )
    assert found == pytest.approx(2 * (4096 * 4096 + 2 * 4096) / V5E_MEMORY)
    add = "ROOT %s = f32[1000,7] add(%x, %y)"
    x, y = "%x = f32[1000,7] parameter(0)", "%y = f32[1000,7] parameter(1)"
    assert time_s(x, y, add) == pytest.approx(3 * 4 * 7000 / V5E_MEMORY)
    # Read once, although it is named twice.
    assert time_s(x, add.replace("%y", "%x")) == pytest.approx(2 * 4 * 7000 / V5E_MEMORY)


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "how", "flops"),
    [
        # A product as libtpu writes it.
        ("64,32", "32,16", "64,16", "dim_labels=bf_io->bf", 2 * 64 * 32 * 16),
        # The batch of a product as a dilated dimension: one of 8 kernel positions meets each.
        (
            "8,256,512",
            "8,512,128",
            "8,256,128",
            "window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf",
            2 * 8 * 256 * 512 * 128,
        ),
        # 3 taps over 4 elements with padding: 3·4 pairs, without the 2 at the ends.
        ("1,4,2", "3,2,5", "1,4,5", "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 200),
        # Every other output of that over 5: (2 + 3 + 2) taps.
        (
            "1,5,1",
            "3,1,1",
            "1,3,1",
            "window={size=3 stride=2 pad=1_1}, dim_labels=b0f_0io->b0f",
            14,
        ),
        # Taps two apart over 5: outputs 0…4 meet 2, 2, 3, 2, 2.
        (
            "1,5,1",
            "3,1,1",
            "1,5,1",
            "window={size=3 pad=2_2 rhs_dilate=2}, dim_labels=b0f_0io->b0f",
            2 * 11,
        ),
        # A kernel as long as the input, slid over padding: 1 + 2 + 3 + 2 + 1.
        ("1,3,1", "3,1,1", "1,5,1", "window={size=3 pad=2_2}, dim_labels=b0f_0io->b0f", 18),
        # And one longer than the output.
        ("1,6,1", "5,1,1", "1,2,1", "window={size=5}, dim_labels=b0f_0io->b0f", 2 * 10),
        # Two groups of features: each output feature reads 2 of the 4.
        ("7,4", "2,6", "7,6", "feature_group_count=2, dim_labels=bf_io->bf", 2 * 7 * 6 * 2),
    ],
)
def test_convolutions_count_what_is_not_padding(lhs, rhs, out, how, flops):
    module = parse(
        entry(
            f"%a = bf16[{lhs}] parameter(0)",
            f"%b = bf16[{rhs}] parameter(1)",
            f"ROOT %c = f32[{out}] convolution(%a, %b), {how}",
        )
    )
    (found,) = products(module, "main", module.computations["main"].instructions["c"])
    assert (found.flops, found.dtype) == (flops, "bf16")


def test_kernels_and_library_calls_count_what_they_state():
    cublas = (
        "ROOT %d = (bf16[1024,4096], s8[4194304]) custom-call(%a, %b), custom_call_target="
        '"__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]},'
        '"precision_config":{"operand_precision":["DEFAULT","DEFAULT"]}}}'
    )
    assert time_s(A, B, cublas, kind="h100") == pytest.approx(FLOPS / H100)
    kernel = (
        'ROOT %k = f32[8] custom-call(%a, %b), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"body":"","cost_estimate":{"flops":"197000000000",'
        '"transcendentals":"0","bytes_accessed":"5"}}}'
    )
    assert time_s(A, B, kernel) == pytest.approx(1e-3)


SLICED = """
%sliced (p: f32[64,1024], i: s32[]) -> bf16[1,1024] {
  %p = f32[64,1024] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %c = bf16[64,1024] convert(%p)
  ROOT %s = bf16[1,1024] dynamic-slice(%c, %i, %zero), dynamic_slice_sizes={1,1024}
}
%updated (p: f32[64,1024], u: f32[1,1024], i: s32[]) -> f32[64,1024] {
  %p = f32[64,1024] parameter(0)
  %u = f32[1,1024] parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %s = f32[64,1024] dynamic-update-slice(%p, %u, %i, %zero)
}
%both (p: f32[64,1024], i: s32[]) -> f32[64,1024] {
  %p = f32[64,1024] parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %s = f32[1,1024] dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,1024}
  %n = f32[64,1024] negate(%p)
  ROOT %r = f32[64,1024] dynamic-update-slice(%n, %s, %i, %zero)
}
"""
BUFFER = ("%x = f32[64,1024] parameter(0)", "%n = s32[] parameter(1)")


@pytest.mark.parametrize(
    ("lines", "num_bytes"),
    [
        # Reads a row of f32 and the index, writes a row of bf16.
        (["%f = bf16[1,1024] fusion(%x, %n), kind=kLoop, calls=%sliced"], 4096 + 4 + 2048),
        # Reads a row and the index, writes it in place.
        (
            [
                "%u = f32[1,1024] parameter(2)",
                "%f = f32[64,1024] fusion(%x, %u, %n), kind=kLoop, calls=%updated",
            ],
            4096 + 4 + 4096,
        ),
        # All of it is needed where something else reads it; one row is written.
        (["%f = f32[64,1024] fusion(%x, %n), kind=kLoop, calls=%both"], 65536 * 4 + 4 + 4096),
        # The same without a fusion.
        (["%s = f32[1,1024] dynamic-slice(%x, %n, %n), dynamic_slice_sizes={1,1024}"], 8196),
        (
            [
                "%u = f32[1,1024] parameter(2)",
                "%f = f32[64,1024] dynamic-update-slice(%x, %u, %n, %n)",
            ],
            8196,
        ),
        # Three rows by number: the numbers, and rows read and written.
        (
            ["%k = s32[3,1] parameter(2)", "%g = f32[3,1024] gather(%x, %k), slice_sizes={1,1024}"],
            12 + 2 * 3 * 4096,
        ),
        # Three rows added to: numbers, updates, and the rows read and written.
        (
            [
                "%k = s32[3,1] parameter(2)",
                "%u = f32[3,1024] parameter(3)",
                "%f = f32[64,1024] scatter(%x, %k, %u), to_apply=%add",
            ],
            12 + 3 * 3 * 4096,
        ),
    ],
)
def test_slices_of_a_large_array_count_as_slices(lines, num_bytes):
    assert time_s(*BUFFER, *lines, called=SLICED) == pytest.approx(num_bytes / V5E_MEMORY)


def test_what_moves_or_names_values_computes_nothing():
    nothing = """
%x = f32[1024,1024] parameter(0)
%t = (f32[1024,1024], f32[1024,1024]) tuple(%x, %x)
%g = f32[1024,1024] get-tuple-element(%t), index=1
%b = f32[1048576] bitcast(%g)
%k = token[] after-all()
%r = f32[1024,1024] all-reduce(%x), replica_groups={}, to_apply=%add
%s = (f32[1024,1024], f32[1024,1024]) collective-permute-start(%x), source_target_pairs={{0,1}}
%d = f32[1024,1024] collective-permute-done(%s)
%n = (f32[1024,1024], u32[], token[]) send(%x, %k), channel_id=1
%m = token[] send-done(%n), channel_id=1
%c = (f32[1024,1024]{1,0:S(1)}, f32[1024,1024], u32[]) copy-start(%x)
%e = f32[1024,1024]{1,0:S(1)} copy-done(%c)
%a = f32[1024,1024] custom-call(), custom_call_target="AllocateBuffer"
"""
    assert time_s(*nothing.strip().splitlines()) == 0.0


def test_the_sparse_cores_take_no_time_of_the_others():
    called = """
%called (p: f32[1000]) -> f32[1000] {
  %p = f32[1000] parameter(0)
  ROOT %n = f32[1000] negate(%p)
}, execution_thread="sparsecore"
"""
    lines = (
        "%x = f32[1000] parameter(0)",
        "%s = ((), (), s32[8192]) custom-call-start(), called_computations={%called}",
        "%u = ((f32[1000]), f32[1000], s32[8192]) custom-call-update(%s, %x)",
        "%d = f32[1000] custom-call-done(%u)",
    )
    assert time_s(*lines, called=called, kind="tpu7x") == 0.0


def test_arrays_on_chip_count_where_they_were_prefetched():
    chip = "f32[1024,1024]{1,0:T(8,128)S(1)}"
    size = 4 * 1024 * 1024
    prefetched = (
        "%x = f32[1024,1024] parameter(0)",
        f"%c = ({chip}, f32[1024,1024], u32[]) copy-start(%x)",
        f"%d = {chip} copy-done(%c)",
        f"%n = {chip} negate(%d)",
    )
    assert time_s(*prefetched) == pytest.approx(size / V5E_MEMORY)  # read; the result stays
    kept = "%m = f32[1024,1024] negate(%n)"
    assert time_s(*prefetched, kept) == pytest.approx(2 * size / V5E_MEMORY)  # written


LOOP = """
%body (s: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %s = (s32[], f32[1000]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1000] get-tuple-element(%s), index=1
  %y = f32[1000] negate(%x)
  ROOT %t = (s32[], f32[1000]) tuple(%i, %y)
}
%test (s: (s32[], f32[1000])) -> pred[] {
  %s = (s32[], f32[1000]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  ROOT %p = pred[] compare(%i, %i), direction=LT
}
%cheap (x: f32[1000]) -> f32[1000] {
  %x = f32[1000] parameter(0)
  ROOT %c = f32[1000] bitcast(%x)
}
%dear (x: f32[1000]) -> f32[1000] {
  %x = f32[1000] parameter(0)
  ROOT %d = f32[1000] negate(%x)
}
"""
WHILE = (
    "%t = (s32[], f32[1000]) parameter(0)",
    "%w = (s32[], f32[1000]) while(%t), condition=%test, body=%body, "
    'backend_config={"known_trip_count":{"n":"7"}}',
)
PASS_S, TEST_S = 8000 / V5E_MEMORY, 5 / V5E_MEMORY
"""Time to negate 1000 float32, and to compare a number of 4 bytes with itself."""


def test_loops_are_multiplied():
    found = compute(entry(*WHILE, called=LOOP))
    assert found.time_s == pytest.approx(7 * PASS_S + 8 * TEST_S)
    assert found.instruction_s("body", "y") == pytest.approx(PASS_S)
    assert "unknown trip count" not in found.source
    without = WHILE[1].split(", backend_config")[0]
    unknown = compute(entry(WHILE[0], without, called=LOOP))
    assert unknown.time_s == pytest.approx(PASS_S + 2 * TEST_S)
    assert unknown.source.endswith("; loops of unknown trip count counted once")


def test_the_most_expensive_branch_counts_and_calls_count_what_they_call():
    x = "%x = f32[1000] parameter(0)"
    p = "%p = pred[] parameter(1)"
    branches = "%c = f32[1000] conditional(%p, %x, %x), true_computation=%cheap, "
    branches += "false_computation=%dear"
    assert time_s(x, p, branches, called=LOOP) == pytest.approx(PASS_S)
    assert time_s(x, "%c = f32[1000] call(%x), to_apply=%dear", called=LOOP) == pytest.approx(
        PASS_S
    )
    started = "%c = ((f32[1000]), f32[1000], u32[]) async-start(%x), calls=%dear"
    done = "%d = f32[1000] async-done(%c), calls=%dear"
    assert time_s(x, started, done, called=LOOP) == pytest.approx(PASS_S)
    fused = started.replace("async-start", "fusion-start").replace("calls", "kind=kLoop, calls")
    assert time_s(x, fused, called=LOOP) == pytest.approx(PASS_S)


ONE_EACH = (
    "%x = f32[1000] parameter(1)",
    "%r = f32[1000] all-reduce(%x), replica_groups={}, to_apply=%add",
    "%n = f32[1000] negate(%r)",
)


def test_optimal_seconds_scales_all_times():
    # Once around: 8000 bytes negated in the loop and outside, two tests of 5 bytes, and 8000
    # bytes of the all-reduce, which count no further. XLA says half as much again: 43.97 ns.
    once_s = (8000 + 2 * 5 + 8000 + 8000) / V5E_MEMORY
    found = compute(entry(*WHILE, *ONE_EACH, called=LOOP), optimal_s=1.5 * once_s)
    assert found.source == (
        "optimal_seconds of the TPU compiler (44 ns), with loops multiplied and without"
        " the memory traffic of collectives and prefetches"
    )
    assert found.instruction_s("body", "y") == pytest.approx(1.5 * PASS_S)
    assert found.instruction_s("main", "r") == 0.0
    assert found.time_s == pytest.approx(1.5 * (8 * PASS_S + 8 * TEST_S))


@pytest.mark.parametrize("optimal_s", [None, 1.5 * 24010 / V5E_MEMORY])
def test_the_parts_add_up_to_the_whole(optimal_s):
    module = parse(entry(*WHILE, *ONE_EACH, called=LOOP))
    found = compute(entry(*WHILE, *ONE_EACH, called=LOOP), optimal_s=optimal_s)
    in_entry = [found.instruction_s("main", i) for i in module.computations["main"].instructions]
    assert math.fsum(in_entry) == pytest.approx(found.time_s)
    runs = {"main": 1, "body": 7, "test": 8}
    leaves = [
        runs[c] * found.instruction_s(c, i.name)
        for c in runs
        for i in module.computations[c].instructions.values()
        if i.opcode != "while"
    ]
    assert math.fsum(leaves) == pytest.approx(found.time_s)


@pytest.mark.parametrize(
    ("optimal_s", "says"),
    [
        (-2.995, "-3 s, is not positive: the compiler has no estimate of some instructions"),
        (math.nan, "nan s, is nan times a roofline that counts as it does"),
        # 8000 bytes take 9.768 ns; times are read in whole picoseconds.
        (100 * PASS_S, "977 ns, is 1e+02 times a roofline that counts as it does"),
        (PASS_S / 100, "0.098 ns, is 0.01 times a roofline that counts as it does"),
    ],
)
def test_an_impossible_optimal_seconds_is_not_used(optimal_s, says):
    lines = ("%x = f32[1000] parameter(0)", "%n = f32[1000] negate(%x)")
    found = compute(entry(*lines), optimal_s=optimal_s)
    assert found.time_s == pytest.approx(PASS_S)
    assert found.source.startswith("roofline of the compiled program at the peak rates of v5e")
    assert says in found.source
    assert "optimal_seconds" not in compute(entry(*lines), "h100", optimal_s=PASS_S).source


def test_an_unknown_device_has_no_times():
    found = compute(entry(*WHILE, called=LOOP), None)
    assert (found.time_s, found.source) == (None, "unknown: no device is known")
    assert found.instruction_s("body", "y") == 0.0
    mine = Device(
        kind="abacus", platform="cpu", memory_bytes_per_s=1, copy_bytes_per_s=1, step_ps=0
    )
    module = parse(entry(*WHILE, called=LOOP))
    found = compute_of(module, executions(module), mine, None)
    assert (found.time_s, found.source) == (None, "unknown: no peak rates for 'abacus'")


SIZE = 1024


def one(x, w):
    return jnp.tanh(x @ w)


def scanned(x, w):
    return jax.lax.scan(lambda x, w: (one(x, w), None), x, w)[0]


def unrolled(x, w):
    for n in range(w.shape[0]):
        x = one(x, w[n])
    return x


@functools.cache
def compiled(fn, topology, layers):
    mesh = None if topology == "cpu" else aot.mesh(topology, (4,), ("d",))
    sharding = mesh and jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    dtype = jnp.float32 if topology == "cpu" else jnp.bfloat16
    shapes = ((SIZE, SIZE), (layers, SIZE, SIZE))
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
    program = jax.jit(fn).lower(*args).compile()
    return parse(program.as_text()), program.cost_analysis()


@pytest.mark.parametrize("fn", [scanned, unrolled])
@pytest.mark.parametrize(
    ("topology", "kind", "flops_per_s", "bytes_per_s", "item"),
    [
        ("v5e:2x2", "v5e", V5E, V5E_MEMORY, 2),
        ("h100:4", "h100", H100, H100_MEMORY, 2),
        ("cpu", "cpu", CPU, CPU_MEMORY, 4),
    ],
)
def test_layers_in_a_loop_cost_their_number(fn, topology, kind, flops_per_s, bytes_per_s, item):
    layers = 6
    module, _ = compiled(fn, topology, layers)
    found = compute_of(module, executions(module), Device.named(kind), None)
    product_s = 2 * SIZE**3 / flops_per_s
    # Beside each product, tanh and the slice of a weight may each be a pass of their own, and x is
    # copied once: no more than 5 arrays read and written a layer.
    most_s = layers * (product_s + 2 * 5 * SIZE * SIZE * item / bytes_per_s)
    assert layers * product_s <= found.time_s <= most_s


def test_xla_counts_the_same_products():
    # One layer has 2·1024³ flops of product; XLA counts tanh by element as well.
    module, cost = compiled(unrolled, "v5e:2x2", 2)
    fused = {
        callee
        for c in module.computations.values()
        for i in c.instructions.values()
        if i.opcode == "fusion"
        for _, callee in i.calls()
    }
    flops = sum(
        product.flops
        for c in module.computations.values()
        if c.name not in fused
        for i in c.instructions.values()
        for product in products(module, c.name, i)
    )
    assert flops == 2 * 2 * SIZE**3
    assert 0 <= cost["flops"] - flops <= 20 * 2 * SIZE**2


@pytest.mark.parametrize(("fn", "layers"), [(unrolled, 2), (scanned, 2), (scanned, 6)])
def test_the_tpu_compilers_estimate_is_a_roofline_at_nearly_the_same_rates(fn, layers):
    # `optimal_seconds` takes 90 % of v5e's memory bandwidth and all of its arithmetic. It counts a
    # scan's body once, and prefetches by the bytes of their starts and dones.
    module, cost = compiled(fn, "v5e:2x2", layers)
    plain = compute_of(module, executions(module), Device.named("v5e"), None)
    found = compute_of(module, executions(module), Device.named("v5e"), cost)
    assert found.source.startswith("optimal_seconds of the TPU compiler")
    # A hundredth for small instructions that it counts otherwise.
    assert 0.99 <= found.time_s / plain.time_s <= 1.12
    assert found.time_s >= layers * 2 * SIZE**3 / V5E


def test_a_slice_replaced_through_fusions_in_a_fusion_counts_as_a_slice():
    """For tpu7x, XLA tiles a value anew in fusions of their own inside of the fusion."""
    called = """
%tile (p: f32[8,1000]) -> f32[8,1000] {
  %p = f32[8,1000] parameter(0)
  ROOT %c = f32[8,1000] copy(%p)
}
%tile.1 (p: f32[8,1000]) -> f32[8,1000] {
  %p = f32[8,1000] parameter(0)
  ROOT %c = f32[8,1000] copy(%p)
}
%replace (stack: f32[8,1000], at: s32[], new: f32[1,1000]) -> f32[8,1000] {
  %stack = f32[8,1000] parameter(0)
  %tiled = f32[8,1000] fusion(%stack), kind=kLoop, calls=%tile
  %at = s32[] parameter(1)
  %new = f32[1,1000] parameter(2)
  %zero = s32[] constant(0)
  %replaced = f32[8,1000] dynamic-update-slice(%tiled, %new, %at, %zero)
  ROOT %back = f32[8,1000] fusion(%replaced), kind=kLoop, calls=%tile.1
}
"""
    lines = (
        "%stack = f32[8,1000] parameter(0)",
        "%at = s32[] parameter(1)",
        "%new = f32[1,1000] parameter(2)",
        "%r = f32[8,1000] fusion(%stack, %at, %new), kind=kLoop, calls=%replace",
    )
    # The new slice is read and written, and where it goes is read.
    assert time_s(*lines, called=called) == pytest.approx((2 * 4000 + 4) / V5E_MEMORY)
