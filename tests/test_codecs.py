"""Laws of the codecs: what they do to numbers, against float64 and the formulas in their docs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from codec_reference import (
    DTYPES,
    HARD,
    LARGEST,
    block_magnitudes,
    decoded,
    hard_block,
    is_finite_in,
)
from codec_table import BY_CHANCE, FIXED, NEAREST, TABLE
from hypothesis import given, settings
from hypothesis import strategies as st

from xcoll import codecs

FLOOR = 2.0**-126  # what is subnormal counts as zero
PAYLOADS = ("float32", "bfloat16", "float16")
NUM_BLOCKS = 3
BY_FORMULA = [row for row in NEAREST if getattr(row.codec, "scale", "") != "exact"]

all_codecs = pytest.mark.parametrize("row", TABLE, ids=str)
all_dtypes = pytest.mark.parametrize("dtype", PAYLOADS)
block_kinds = st.tuples(*[st.sampled_from(HARD)] * NUM_BLOCKS)
seeds = st.integers(0, 2**32 - 1)
examples = functools.partial(settings, deadline=None)


def key_for(codec, seed=0):
    return jax.random.key(seed) if codec.needs_key else None


@functools.cache
def round_trip(codec, dtype):
    """Encode and decode as one compiled program, where a compiler could leave both out."""

    @jax.jit
    def fn(x, key):
        wire = codec.encode(x, dtype=dtype, key=key)
        return codec.decode(wire, x.shape[-1], dtype=dtype)

    return fn


def payload(codec, kinds, dtype, seed):
    rng = np.random.default_rng(seed)
    return np.concatenate([hard_block(kind, codec.block, dtype, rng) for kind in kinds])


def assert_law(row, got, x, dtype):
    """The law of error: |got - x| <= max_error * m + 2**-126, computed in float64."""
    got, exact = np.asarray(got, np.float64), x.astype(np.float64)
    assert np.isfinite(got).all()
    assert (np.abs(got) <= LARGEST[dtype]).all()
    bound = float(row.max_error) * block_magnitudes(x, row.codec.block) + FLOOR
    # The bound itself is rounded in float64.
    assert (np.abs(got - exact) <= bound * (1 + 2.0**-50)).all()


# ---- what the codecs say about themselves ----


@all_codecs
def test_attributes_are_those_of_the_table(row):
    codec = row.codec
    assert codec.max_error == pytest.approx(float(row.max_error), rel=2.0**-50)
    assert codec.unbiased == codec.needs_key == (codec.rounding == "stochastic")
    assert codec.idempotent == (codec.rounding == "nearest")
    assert codec.dtypes == PAYLOADS
    assert "2**-126" in codec.formula and codec.formula.startswith("|error| <= ")
    # The formula is Python, with m the largest magnitude of the block.
    stated = eval(codec.formula.removeprefix("|error| <= ").replace("2 m", "2 * m"), {"m": 1.0})
    assert stated == pytest.approx(float(row.max_error), rel=2.0**-50)


@all_codecs
def test_hashable_frozen_and_read_back_from_json(row):
    codec = row.codec
    data = json.loads(json.dumps(dataclasses.asdict(codec)))
    assert codecs.from_dict(data) == codec
    assert hash(codecs.from_dict(data)) == hash(codec)
    assert [other.codec == codec for other in TABLE].count(True) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.rounding = "nearest"


@pytest.mark.parametrize("codec", FIXED, ids=str)
def test_fixed_point_is_read_back_from_json(codec):
    assert codecs.from_dict(json.loads(json.dumps(dataclasses.asdict(codec)))) == codec


@all_codecs
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (257,), (3, 1009), (67, 1021)], ids=str)
def test_wire_bytes(row, shape):
    """Whole blocks, then zeros up to the unit; and so many bytes are encoded."""
    codec = row.codec
    blocks = math.ceil(math.prod(shape) / codec.block)
    itemsize = np.dtype(codec.wire_dtype).itemsize
    items = blocks * row.block_bytes // itemsize
    unit = 1 if items < 4096 else 128 if items < 65536 else 4096
    expected = math.ceil(items / unit) * unit * itemsize
    assert codec.wire_bytes(shape, "float32") == expected
    assert codec.wire_items(blocks * codec.block) * itemsize == expected
    x = jax.ShapeDtypeStruct((2, blocks * codec.block), jnp.float32)
    wire = jax.eval_shape(lambda x: codec.encode(x, dtype="float32", key=key_for(codec)), x)
    assert wire.shape == (2, expected // itemsize)
    assert wire.dtype == codec.wire_dtype


def test_compression():
    """Of 64 MiB in float32, with the bytes of scales and padding."""
    ratio = {
        name: codecs.named(name).wire_bytes((1 << 24,), "float32") / (1 << 26)
        for name in codecs.CODECS
    }
    assert ratio == pytest.approx({
        "int8": 257 / 1024, "int4": 33 / 256, "bfloat16": 1 / 2, "float16": 257 / 512,
        "float8_e4m3fn": 257 / 1024, "float8_e5m2": 257 / 1024,
    }, rel=1e-3)  # fmt: skip


# ---- errors of rounding ----


@all_codecs
@all_dtypes
@examples(max_examples=8)
@given(kinds=block_kinds, seed=seeds)
def test_law_of_error(row, dtype, kinds, seed):
    x = payload(row.codec, kinds, dtype, seed)
    got = round_trip(row.codec, dtype)(x, key_for(row.codec, seed))
    assert_law(row, got, x, dtype)


@pytest.mark.parametrize("row", BY_FORMULA, ids=str)
@all_dtypes
@examples(max_examples=8)
@given(kinds=block_kinds, seed=seeds)
def test_values_are_those_of_the_formula(row, dtype, kinds, seed):
    """Bit for bit: with power-of-two scales there is one right answer."""
    x = payload(row.codec, kinds, dtype, seed)
    got = round_trip(row.codec, dtype)(x, None)
    np.testing.assert_array_equal(np.asarray(got, np.float64), decoded(row.codec, x, dtype))


@all_codecs
def test_blocks_of_one_magnitude_at_every_step_of_the_scale(row):
    """Where the next scale begins, one unit in the last place decides."""
    codec = row.codec
    edges = [float(c) for c in (7, 127, 448, 57344, 65504)]
    ulps = np.array([-2, -1, 0, 1, 2]) * 2.0**-23
    peaks = (np.outer(edges, 1 + ulps).ravel()[:, None] * 2.0 ** np.arange(-20, 21, 5)).ravel()
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (len(peaks), codec.block)) * peaks[:, None]
    x[:, 0] = peaks
    x = x.astype(np.float32).ravel()
    assert_law(row, round_trip(codec, "float32")(x, key_for(codec)), x, "float32")
    if row in BY_FORMULA:
        got = round_trip(codec, "float32")(x, None)
        np.testing.assert_array_equal(np.asarray(got, np.float64), decoded(codec, x, "float32"))


@all_codecs
@all_dtypes
def test_what_is_past_the_largest_value_is_saturated_until_it_rounds_to_infinity(row, dtype):
    """A float32 sum may be past a narrow dtype's largest value and yet round to it."""
    largest = np.float32(LARGEST[dtype])
    candidates = [largest, np.nextafter(largest, np.float32(0))]
    if dtype != "float32":
        # Half way to the next power of two, which rounds to infinity, and around it.
        tie = np.float32((LARGEST[dtype] + 2.0 ** math.ceil(math.log2(LARGEST[dtype]))) / 2)
        candidates += [np.nextafter(largest, np.float32(np.inf)), largest / 2 + tie / 2]
        candidates += [tie, *np.nextafter(tie, np.float32([0, np.inf])), tie * np.float32(1.001)]
    candidates = np.array(candidates, np.float32)
    finite = is_finite_in(candidates, dtype)
    assert list(finite) == (
        [True] * 2 if dtype == "float32" else [True] * 4 + [False, True] + [False] * 2
    )
    x = np.zeros((len(candidates), row.codec.block), np.float32)
    x[:, 0] = candidates
    got = round_trip(row.codec, dtype)(x.ravel(), key_for(row.codec)).reshape(x.shape)
    got = np.asarray(got, np.float64)
    np.testing.assert_array_equal(np.isfinite(got), np.broadcast_to(finite[:, None], got.shape))
    assert (got[finite, 1:] == 0).all()
    bound = float(row.max_error) * candidates[finite].astype(np.float64)
    # Saturation is the rounding to the payload's dtype: half a unit in its last place.
    bound += candidates[finite] - float(largest)
    assert (np.abs(got[finite, 0] - candidates[finite]) <= bound).all()
    assert (got[finite, 0] <= LARGEST[dtype]).all()


@all_codecs
def test_zeros_of_both_signs(row):
    for zero in (0.0, -0.0):
        x = jnp.full(2 * row.codec.block, zero)
        assert not np.any(round_trip(row.codec, "float32")(x, key_for(row.codec)))


@all_codecs
@all_dtypes
def test_a_slot_of_zeros_decodes_to_zeros(row, dtype):
    elements = NUM_BLOCKS * row.codec.block
    wire = jnp.zeros(row.codec.wire_items(elements), row.codec.wire_dtype)
    got = row.codec.decode(wire, elements, dtype=dtype)
    assert got.dtype == jnp.float32 and got.shape == (elements,)
    assert not np.any(got)


@all_codecs
def test_padding_to_whole_blocks(row):
    """Payloads are padded with zeros: the law holds for what is left, and zeros stay zeros."""
    for size in (0, 1, 7, 1009):
        x = np.random.default_rng(size).normal(size=size).astype(np.float32)
        x = np.pad(x, (0, -size % row.codec.block))
        got = round_trip(row.codec, "float32")(x, key_for(row.codec))
        assert got.shape == x.shape
        assert_law(row, got, x, "float32")
        assert not np.any(got[size:])


def test_a_cast_and_back_is_never_left_out():
    """XLA drops a pair of conversions where it may keep more precision; not these."""
    x = jnp.array([1 + 2.0**-9, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.0e38], jnp.float32)
    got = round_trip(codecs.cast("bfloat16"), "float32")(x, None)
    expected = [1.0, 1.0, 1 + 2.0**-6, float(np.float32(3.0e38).astype(DTYPES["bfloat16"]))]
    np.testing.assert_array_equal(got, np.float32(expected))


@pytest.mark.parametrize("row", NEAREST, ids=str)
@all_dtypes
@examples(max_examples=8)
@given(kinds=block_kinds, seed=seeds)
def test_idempotence(row, dtype, kinds, seed):
    x = payload(row.codec, kinds, dtype, seed)
    once = round_trip(row.codec, dtype)(x, None)
    np.testing.assert_array_equal(once, round_trip(row.codec, dtype)(np.asarray(once), None))


# ---- NaN and infinity ----


@all_codecs
@all_dtypes
@examples(max_examples=8)
@given(
    bad=st.sampled_from([math.nan, -math.nan, math.inf, -math.inf]),
    where=st.integers(0, 10**6),
    kinds=block_kinds,
    seed=seeds,
)
def test_what_is_not_finite_makes_its_block_nan_and_touches_no_other(
    row, dtype, bad, where, kinds, seed
):
    codec = row.codec
    x = payload(codec, kinds, dtype, seed)
    x[where % len(x)] = bad
    got = round_trip(codec, dtype)(x, key_for(codec, seed)).reshape(-1, codec.block)
    hit = (where % len(x)) // codec.block
    assert np.isnan(got[hit]).all()
    bits = np.asarray(got[hit]).view(np.int32)
    assert (bits & 0x7FFFFFFF == 0x7FC00000).all()
    rest = np.delete(x.reshape(-1, codec.block), hit, axis=0).ravel()
    assert_law(row, np.delete(np.asarray(got), hit, axis=0).ravel(), rest, dtype)


# ---- compiled or not, batched or not ----


@all_codecs
def test_jit_and_eager_give_the_same_bits(row):
    codec, key, dtype = row.codec, key_for(row.codec), "bfloat16"
    kinds = [kind for kind in HARD for _ in range(2)]
    x = jnp.asarray(payload(codec, kinds, dtype, 0)).reshape(2, -1)
    elements = x.shape[-1]

    def everything(x):
        wire = codec.encode(x, dtype=dtype, key=key)
        values = codec.decode(wire, elements, dtype=dtype)
        total = codec.reduce_and_encode(wire, elements, dtype=dtype, key=key)
        hop = codec.accumulate_and_encode(
            x.astype(jnp.float32), wire, elements, dtype=dtype, key=key
        )
        return wire, values, total, hop

    for eager, compiled in zip(everything(x), jax.jit(everything)(x), strict=True):
        assert np.asarray(eager).tobytes() == np.asarray(compiled).tobytes()


@all_codecs
def test_vmap(row):
    codec = row.codec
    x = jnp.asarray(payload(codec, HARD[:4], "float32", 0)).reshape(2, 2, -1)
    elements = x.shape[-1]
    keys = jax.random.split(jax.random.key(1), 2)

    @jax.jit
    def everything(x, key):
        key = key if codec.needs_key else None
        wire = codec.encode(x, dtype="float32", key=key)
        total = codec.reduce_and_encode(wire, elements, dtype="float32", key=key)
        hop = codec.accumulate_and_encode(x, wire, elements, dtype="float32", key=key)
        return wire, codec.decode(wire, elements, dtype="float32"), total, hop

    batched = jax.vmap(everything)(x, keys)
    for index in range(2):
        for one, of in zip(everything(x[index], keys[index]), batched, strict=True):
            np.testing.assert_array_equal(one, of[index])


@pytest.mark.parametrize("row", NEAREST, ids=str)
def test_slots_are_encoded_one_by_one(row):
    codec = row.codec
    x = jnp.asarray(payload(codec, HARD[:6], "float32", 0)).reshape(2, 3, -1)
    wire = codec.encode(x, dtype="float32")
    assert wire.shape[:2] == (2, 3)
    encode = jax.jit(lambda x: codec.encode(x, dtype="float32"))
    for index in np.ndindex(2, 3):
        np.testing.assert_array_equal(wire[index], encode(x[index]))


def test_the_wire_of_int8_is_codes_then_exponents():
    x = jnp.array([1.0, -2.0, 127.0, 0.0, 3.0, -254.0, 4.0, 5.0])
    wire = codecs.int8(block=4).encode(x, dtype="float32")
    # Scales 1 and 2: 3 / 2 and 5 / 2 are ties, to even.
    assert wire.tolist() == [1, -2, 127, 0, 2, -127, 2, 2, 127, -128]


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_the_wire_of_small_floats_is_their_bits_then_exponents(dtype):
    """The scale is 1 up to the format's largest value, and 2 beyond it."""
    largest = LARGEST[dtype]
    x = np.array([[largest, 1.0, -3.0, 2.0**-8], [largest * 1.125, 2.0, -largest, 0]], np.float32)
    codec = codecs.cast(dtype, block=4)
    wire = np.asarray(codec.encode(x.ravel(), dtype="float32"))
    expected = (x / np.float32([[1], [2]])).astype(DTYPES[dtype]).view(wire.dtype)
    np.testing.assert_array_equal(wire[:8].reshape(2, 4), expected)
    np.testing.assert_array_equal(wire[8:], np.array([127, 128], np.uint8).astype(wire.dtype))


EXACT = [row for row in TABLE if getattr(row.codec, "scale", "") == "exact"]


@pytest.mark.parametrize("row", EXACT, ids=str)
def test_exact_scales(row):
    """16 bits of m / largest; by chance they are rounded up, so that no code is cut off."""
    codec = row.codec
    largest = {"int8": 127, "int4": 7}[codec.kind]
    rng = np.random.default_rng(0)
    peaks = np.float32(rng.uniform(1, 2, 64) * 2.0 ** np.arange(-32, 32))
    # Just past those whose scale has 16 bits already.
    short = np.float32(rng.integers(1 << 15, 1 << 16, 1024) * largest)
    peaks = np.concatenate([peaks, np.nextafter(short, np.float32(np.inf))])
    x = np.zeros((len(peaks), codec.block), np.float32)
    x[:, 3] = peaks
    wire = codec.encode(x, dtype="float32", key=key_for(codec))
    codes = {"int8": codec.block, "int4": codec.block // 2}[codec.kind]
    scales = np.ascontiguousarray(wire[:, codes : codes + 4]).view(np.float32)[:, 0]
    assert (scales.view(np.int32) & 0xFF == 0).all()
    ratio = scales.astype(np.float64) * largest / peaks
    if codec.needs_key:
        # Up: by a unit of 16 bits, and by four units of float32 before that.
        assert (ratio >= 1).all() and (ratio <= (1 + 2.0**-15) * (1 + 2.0**-21)).all()
    else:
        assert (np.abs(ratio - 1) <= 2.0**-16 + 2.0**-22).all()


# ---- sums ----


@pytest.mark.parametrize("num_ranks", [2, 5, 40])
@pytest.mark.parametrize("row", BY_FORMULA, ids=str)
def test_reduce_and_encode(row, num_ranks):
    """The sum in float32 and rank order of what each contribution decodes to, encoded."""
    codec = row.codec
    x = np.stack([payload(codec, HARD[:3], "bfloat16", rank) for rank in range(num_ranks)])
    total = np.float32(0)
    for rank in range(num_ranks):
        with np.errstate(over="ignore"):
            total = total + decoded(codec, x[rank], "bfloat16").astype(np.float32)

    @jax.jit
    def two_shot(x):
        wire = codec.encode(x, dtype="bfloat16")
        total = codec.reduce_and_encode(wire, x.shape[1], dtype="bfloat16")
        return codec.decode(total, x.shape[1], dtype="bfloat16")

    got = two_shot(x)
    np.testing.assert_array_equal(np.asarray(got, np.float64), decoded(codec, total, "bfloat16"))


@pytest.mark.parametrize("row", BY_FORMULA, ids=str)
def test_accumulate_and_encode(row):
    codec = row.codec
    x = payload(codec, HARD[:3], "float32", 0)
    received = payload(codec, HARD[2::-1], "float32", 1)
    total = x + decoded(codec, received, "float32").astype(np.float32)

    @jax.jit
    def hop(x, received):
        wire = codec.encode(received, dtype="float32")
        wire = codec.accumulate_and_encode(x, wire, len(x), dtype="float32")
        return codec.decode(wire, len(x), dtype="float32")

    got = hop(x, received)
    np.testing.assert_array_equal(np.asarray(got, np.float64), decoded(codec, total, "float32"))


@all_codecs
def test_two_roundings_of_a_sum(row):
    """Each contribution is rounded once and the sum once, whatever the number of ranks."""
    codec, num_ranks = row.codec, 6
    x = np.random.default_rng(0).normal(size=(num_ranks, 2 * codec.block)).astype(np.float32)

    @jax.jit
    def two_shot(x):
        wire = codec.encode(x, dtype="float32", key=key_for(codec, 1))
        total = codec.reduce_and_encode(wire, x.shape[1], dtype="float32", key=key_for(codec, 2))
        return codec.decode(total, x.shape[1], dtype="float32")

    got = np.asarray(two_shot(x), np.float64)
    sum_of_peaks = sum(block_magnitudes(row, codec.block) for row in x)
    delta = float(row.max_error)
    # |sum| <= (1 + delta) sum_of_peaks before the second rounding; float32 additions are 2**-24
    # each of a partial sum no larger.
    bound = (2 * delta + delta**2 + num_ranks * 2.0**-24 * (1 + delta) ** 2) * sum_of_peaks
    assert (np.abs(got - x.astype(np.float64).sum(axis=0)) <= bound).all()


@pytest.mark.parametrize("row", NEAREST, ids=str)
def test_a_sum_that_overflows_is_nan_in_its_block_only(row):
    codec = row.codec
    x = np.ones((2, 2 * codec.block), np.float16)
    x[:, 0] = 60000.0

    @jax.jit
    def two_shot(x):
        wire = codec.encode(x, dtype="float16")
        total = codec.reduce_and_encode(wire, x.shape[1], dtype="float16")
        return codec.decode(total, x.shape[1], dtype="float16")

    got = np.asarray(two_shot(x))
    assert np.isnan(got[: codec.block]).all() and np.isfinite(got[codec.block :]).all()


# ---- rounding by chance ----


@functools.cache
def mean_over_keys(codec, num_keys):
    x = payload(codec, ("normal", "30 orders", "integers"), "float32", 3)
    keys = jax.random.split(jax.random.key(7), num_keys)

    @jax.jit
    def many(keys):
        def one(total, key):
            wire = codec.encode(jnp.asarray(x), dtype="float32", key=key)
            off = codec.decode(wire, len(x), dtype="float32") - x
            # Scaled by the block, so that a float32 sum of them loses nothing that matters.
            return total + off / jnp.asarray(peaks), None

        return jax.lax.scan(one, jnp.zeros(len(x)), keys)[0]

    peaks = block_magnitudes(x, codec.block).astype(np.float32)
    peaks = np.where(peaks == 0, 1, peaks)
    return np.asarray(many(keys), np.float64) / num_keys


@pytest.mark.parametrize("row", BY_CHANCE, ids=str)
def test_unbiased(row):
    """The mean error over keys is within six standard deviations of zero.

    A value between two neighbours a step apart has a standard deviation of half a step at most, and
    a step is at most max_error times the block's largest magnitude.
    """
    num_keys = 4096
    bound = 6 * float(row.max_error) / 2 / math.sqrt(num_keys)
    # A float32 sum of num_keys errors, each max_error at most.
    bound += float(row.max_error) * num_keys * 2.0**-24
    assert np.abs(mean_over_keys(row.codec, num_keys)).max() <= bound
    # To nearest, the same payload is off by more.
    nearest = dataclasses.replace(row.codec, rounding="nearest")
    assert np.abs(mean_over_keys(nearest, 1)).max() > bound


@pytest.mark.parametrize("row", BY_CHANCE, ids=str)
def test_the_same_key_gives_the_same_bits(row):
    x = jnp.asarray(payload(row.codec, ["normal"] * 64, "float32", 0))
    encode = jax.jit(lambda key: row.codec.encode(x, dtype="float32", key=key))
    wires = [np.asarray(encode(jax.random.key(seed))) for seed in (0, 0, 1)]
    assert (wires[0] == wires[1]).all()
    assert (wires[0] != wires[2]).any()


# ---- fixed point ----


def ranks_of(codec, num_ranks, dtype, seed, kinds=("normal", "zeros", "30 orders")):
    rng = np.random.default_rng(seed)
    return np.stack(
        [
            np.concatenate([hard_block(kind, 17, dtype, rng) for kind in kinds])
            for _ in range(num_ranks)
        ]
    )


@functools.cache
def contributions(codec, num_ranks, dtype):
    @jax.jit
    def fn(x, key):
        amax = jnp.max(jax.vmap(codec.magnitude)(x))
        one = functools.partial(codec.to_integers, dtype=dtype)
        keys = jax.random.split(key, num_ranks)
        return amax, jax.vmap(lambda x, key: one(x, num_ranks, amax, key))(x, keys)

    return fn


@functools.cache
def value_of(codec, num_ranks, dtype):
    return jax.jit(lambda total, amax: codec.from_integers(total, num_ranks, amax, dtype=dtype))


def integers_of(codec, x, dtype, seed=0):
    amax, integers = contributions(codec, len(x), dtype)(x, jax.random.key(seed))
    return amax, np.asarray(integers)


@pytest.mark.parametrize("codec", FIXED, ids=str)
@all_dtypes
@examples(max_examples=8)
@given(
    num_ranks=st.sampled_from([1, 3, 31]),
    kinds=st.tuples(*[st.sampled_from([k for k in HARD if "largest" not in k])] * 3),
    seed=seeds,
)
def test_fixed_point_sums(codec, dtype, num_ranks, kinds, seed):
    """The bound holds, no partial sum overflows, and every order has the same bits."""
    x = ranks_of(codec, num_ranks, dtype, seed, kinds)
    amax, integers = integers_of(codec, x, dtype, seed)
    assert integers.dtype == np.dtype(f"int{codec.bits}") == codec.wire_dtype
    # Whatever is added up, in whatever order.
    assert np.abs(integers.astype(np.int64)).sum(axis=0).max() <= 2 ** (codec.bits - 1) - 1
    order = np.random.default_rng(seed).permutation(num_ranks)
    totals = [
        functools.reduce(np.add, ranks, np.zeros_like(integers[0]))
        for ranks in (integers, integers[order], integers[::-1])
    ]
    got = [value_of(codec, num_ranks, dtype)(total, amax) for total in totals]
    assert got[0].dtype == jnp.float32
    assert np.asarray(got[0]).tobytes() == np.asarray(got[1]).tobytes()
    assert np.asarray(got[0]).tobytes() == np.asarray(got[2]).tobytes()
    exact = x.astype(np.float64).sum(axis=0)
    largest = (2 ** (codec.bits - 1) - 1) // num_ranks
    half_steps = num_ranks * (1 if codec.rounding == "nearest" else 2)
    # Of 32 bits, the largest integer has 24 that count (a factor of 1 + 2**-23), and a sum is
    # rounded to float32: half a unit of a sum of num_ranks terms.
    delta = half_steps / largest
    if codec.bits == 32:
        delta = delta * (1 + 2.0**-22) + num_ranks * 2.0**-24
    assert codec.max_error_for(num_ranks) <= delta
    peak = np.abs(x.astype(np.float64)).max()
    bound = codec.max_error_for(num_ranks) * peak + num_ranks * FLOOR
    limit = np.abs(np.asarray(got[0], np.float64))
    inside = np.abs(exact) < LARGEST[dtype]
    assert (limit[inside] <= LARGEST[dtype]).all()
    assert (np.abs(np.asarray(got[0], np.float64) - exact)[inside] <= bound).all()


@pytest.mark.parametrize("codec", FIXED, ids=str)
@all_dtypes
def test_fixed_point_at_the_end_of_the_range(codec, dtype):
    """Sums past the range are infinite, those that may not be are saturated."""
    largest = LARGEST[dtype]
    x = np.array(
        [[largest, largest, -largest, largest, -largest], [largest, 0, -largest, -largest, 0]],
        np.float64,
    ).astype(DTYPES[dtype])
    amax, integers = integers_of(codec, x, dtype)
    total = jnp.asarray(integers.sum(axis=0, dtype=integers.dtype))
    got = np.asarray(codec.from_integers(total, 2, amax, dtype=dtype), np.float64)
    assert got[0] == np.inf and got[2] == -np.inf
    bound = codec.max_error_for(2) * largest
    assert (np.abs(got[[1, 3, 4]] - [largest, 0, -largest]) <= bound).all()
    assert np.isfinite(got[[1, 3, 4]]).all()


@pytest.mark.parametrize("codec", FIXED, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@all_dtypes
def test_fixed_point_of_what_is_not_finite_is_nan(codec, bad, dtype):
    x = np.ones((2, 5)).astype(DTYPES[dtype])
    x[1, 3] = bad
    amax, integers = integers_of(codec, x, dtype)
    assert not integers.any()
    assert np.isnan(codec.from_integers(jnp.asarray(integers[0]), 2, amax, dtype=dtype)).all()


@pytest.mark.parametrize("codec", FIXED, ids=str)
def test_fixed_point_jit_and_wire(codec):
    x = ranks_of(codec, 2, "float32", 0)
    amax, integers = integers_of(codec, x, "float32")
    keys = jax.random.split(jax.random.key(0), 2)
    compiled = jax.jit(lambda x, amax, key: codec.to_integers(x, 2, amax, key))
    np.testing.assert_array_equal(compiled(x[1], amax, keys[1]), integers[1])
    assert codec.wire_bytes((3, 1009), "float32") == math.ceil(3 * 1009) * codec.bits // 8
    assert codec.wire_items(0) == 0 and codec.block == 0
    empty = codec.to_integers(jnp.zeros(0), 2, codec.magnitude(jnp.zeros(0)), keys[0])
    assert empty.shape == (0,)
    zero = codec.from_integers(jnp.zeros(3, codec.wire_dtype), 2, jnp.int32(0))
    assert not np.any(zero)


def test_fixed_point_by_chance_is_unbiased():
    """Six standard deviations, each half a step at most: see test_unbiased."""
    codec, num_keys = codecs.fixed_point(8, rounding="stochastic"), 4096
    x = np.random.default_rng(0).uniform(-1, 1, 64).astype(np.float32)
    x[0] = 1
    amax = codec.magnitude(jnp.asarray(x))
    integers = jax.vmap(lambda key: codec.to_integers(jnp.asarray(x), 8, amax, key))(
        jax.random.split(jax.random.key(0), num_keys)
    )
    # 127 // 8 = 15, so that the smallest power of two with 1 <= 15 * step is 1/8.
    step = 1 / 8
    mean = np.asarray(integers, np.float64).mean(axis=0) * step
    assert np.abs(mean - x).max() <= 6 * step / 2 / math.sqrt(num_keys)


# ---- bad input ----


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: codecs.int8(block=0), ValueError, "int8.block=0.*at least 1 "),
        (lambda: codecs.int8(block=-4), ValueError, "int8.block=-4.*at least 1 "),
        (lambda: codecs.int8(block=2.5), TypeError, "int8.block=2.5.*integer"),
        (lambda: codecs.int8(block=True), TypeError, "int8.block=True.*integer"),
        (lambda: codecs.int8(block=65537), ValueError, "block=65537.*at most 65536"),
        (lambda: codecs.int4(block=63), ValueError, "int4.block=63.*even.*block=64"),
        (lambda: codecs.int4(block=0), ValueError, "int4.block=0.*at least 2 "),
        (lambda: codecs.int8(scale="exat"), ValueError, "'power_of_two', 'exact'.*'exact'\\?"),
        (lambda: codecs.int4(rounding="up"), ValueError, "'nearest', 'stochastic'"),
        (lambda: codecs.cast("float32"), ValueError, "'bfloat16', 'float16'"),
        (lambda: codecs.cast("bfloat61"), ValueError, "Did you mean 'bfloat16'"),
        (lambda: codecs.cast("bfloat16", block=8), ValueError, "no scale.*leave block out"),
        (lambda: codecs.cast("float16", block=0), ValueError, "block=0"),
        (lambda: codecs.cast("float16", rounding="down"), ValueError, "rounding='down'"),
        (lambda: codecs.fixed_point(12), ValueError, "bits=12.*8, 16, 32"),
        (lambda: codecs.fixed_point(True), ValueError, "bits=True"),
        (lambda: codecs.fixed_point(8, rounding="odd"), ValueError, "rounding='odd'"),
        (lambda: codecs.named("int9"), ValueError, "'int8', 'int4', 'bfloat16'.*Did you mean"),
        (lambda: codecs.named(8), ValueError, "unknown codec 8"),
    ],
)
def test_bad_options(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([1], "must be a mapping"),
        ({}, "unknown kind None"),
        ({"kind": "int9"}, "unknown kind 'int9'.*'int8', 'int4', 'cast', 'fixed_point'"),
        ({"kind": "int8", "block": 8, "scale": "exact"}, "field 'rounding' is missing"),
        ({"kind": "fixed_point", "bits": 8, "roundin": "nearest"}, "unknown field 'roundin'"),
        ({"kind": "fixed_point", "bits": 9, "rounding": "nearest"}, "bits=9"),
        ({"kind": "int8", "block": "8", "scale": "exact", "rounding": "nearest"}, "block='8'"),
        ({"kind": "cast", "dtype": "int8", "block": 1, "rounding": "nearest"}, "dtype='int8'"),
        ({"kind": "cast", "dtype": [], "block": 1, "rounding": "nearest"}, "dtype="),
    ],
    ids=str,
)
def test_bad_data(data, message):
    with pytest.raises(ValueError, match=message):
        codecs.from_dict(data)


@pytest.mark.parametrize("codec", [row.codec for row in TABLE] + list(FIXED), ids=str)
def test_only_floats_pass(codec):
    for dtype in ("int32", "int8", "uint16", "bool", "complex64"):
        assert f"{dtype} values are never sent through a lossy codec" in codec.refuses(dtype)
    assert "float32, bfloat16, float16, not float64" in codec.refuses("float64")
    for dtype in PAYLOADS:
        assert codec.refuses(dtype) is None
    with pytest.raises(ValueError, match="int32 values are never"):
        codec.wire_bytes((8,), "int32")


@pytest.mark.parametrize("row", BY_CHANCE, ids=str)
def test_rounding_by_chance_without_a_key(row):
    x = jnp.zeros(row.codec.block)
    wire = jnp.zeros(row.codec.wire_items(x.size), row.codec.wire_dtype)
    for call in (
        lambda: row.codec.encode(x, dtype="float32"),
        lambda: row.codec.reduce_and_encode(wire[None], x.size, dtype="float32"),
        lambda: row.codec.accumulate_and_encode(x, wire, x.size, dtype="float32"),
    ):
        with pytest.raises(ValueError, match="needs a PRNG key.*rounding='nearest'"):
            call()


def test_fixed_point_by_chance_without_a_key():
    codec = codecs.fixed_point(16, rounding="stochastic")
    with pytest.raises(ValueError, match="needs a PRNG key"):
        codec.to_integers(jnp.zeros(3), 2, jnp.int32(0))


@all_codecs
def test_bad_slots(row):
    codec = row.codec
    x, key = jnp.zeros(2 * codec.block), key_for(row.codec)
    wire = jnp.zeros(codec.wire_items(x.size), codec.wire_dtype)
    with pytest.raises(ValueError, match="int16 values are never"):
        codec.encode(x, dtype="int16", key=key)
    with pytest.raises(ValueError, match="int16 values are never"):
        codec.decode(wire, x.size, dtype="int16")
    if codec.block > 1:
        with pytest.raises(ValueError, match="no whole number of blocks"):
            codec.encode(x[1:], dtype="float32", key=key)
    with pytest.raises(ValueError, match=f"slot of {x.size} elements is {codec.wire_dtype}"):
        codec.decode(wire[1:], x.size, dtype="float32")
    with pytest.raises(ValueError, match="not float32"):
        codec.decode(wire.astype(jnp.float32), x.size, dtype="float32")


def test_bad_fixed_point_calls():
    codec = codecs.fixed_point(8)
    assert codec.why_not(31) is None
    for num_ranks in (0, 32):
        assert "1 to 31 ranks" in codec.why_not(num_ranks)
        with pytest.raises(ValueError, match=f"fixed_point.bits=8.*1 to 31 ranks, not {num_ranks}"):
            codec.max_error_for(num_ranks)
    with pytest.raises(ValueError, match="amax is float32.*codec.magnitude"):
        codec.to_integers(jnp.ones(3), 2, jnp.float32(1))
    for call in (
        lambda: codec.encode(jnp.ones(3), dtype="float32"),
        lambda: codec.decode(jnp.ones(3, jnp.int8), 3, dtype="float32"),
    ):
        with pytest.raises(NotImplementedError, match="for sums.*to_integers"):
            call()
