"""The reader on text: every form that compilers print, also those that are rare."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xcoll import hlo
from xcoll.hlo.groups import parse_groups, parse_transfer_target
from xcoll.hlo.text import num_bytes, shapes


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("[1,8]<=[2,2,2]T(2,1,0)", [[0, 4, 2, 6, 1, 5, 3, 7]]),
        ("mesh['data'=2,'model'=4] {'data'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'b','a'}", [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh[a=2,b=4] {a}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        # part of an axis: the outer two of b's four, then the inner two
        ("mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        # a mesh whose devices are in another order
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [[0, 2], [1, 3]]),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_every_form_of_replica_groups(text, groups):
    assert parse_groups(text, 8) == tuple(map(tuple, groups))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_iota_groups_are_a_transposed_count(data):
    dims = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(dims))))
    total = math.prod(dims)
    length = data.draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))

    # Without numpy: walk the transposed array in row-major order.
    weights = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    walked = [
        sum(place * weights[axis] for axis, place in zip(order, places, strict=True))
        for places in itertools.product(*(range(dims[axis]) for axis in order))
    ]
    text = f"[{total // length},{length}]<=[{','.join(map(str, dims))}]"
    text += f"T({','.join(map(str, order))})"
    expected = tuple(tuple(walked[i : i + length]) for i in range(0, total, length))
    assert parse_groups(text, total) == expected


def test_targets_of_transfers():
    assert parse_transfer_target('"{1,2}x{0:2}"') == (
        ((100000, 200000), (100001, 200001), (100002, 200002)),
        None,
    )
    assert parse_transfer_target("{{100000->200000},{200001->100001}}") == (
        None,
        ((100000, 200000), (200001, 100001)),
    )
    assert parse_transfer_target("{{100000,200000}}") == (((100000, 200000),), None)
    with pytest.raises(ValueError, match="unknown form"):
        parse_transfer_target("everyone")
    with pytest.raises(ValueError, match="unknown form"):
        parse_groups("[2,4]", 8)


SYNTHETIC = """HloModule f, replica_count=2, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%wrapped (p: bf16[4,8]) -> bf16[2,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %rs = bf16[2,8]{1,0} reduce-scatter(%p), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
}

%once (q: s8[64]) -> s8[64] {
  %q = s8[64]{0} parameter(0)
  ROOT %cb = s8[64]{0} collective-broadcast(%q), replica_groups={{1,0},{3,2}}
}

ENTRY %main (x: bf16[4,8], y: (f32[3], s4[5]), z: s8[64]) -> f32[3] {
  %x = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %y = (f32[3]{0}, s4[5]{0}) parameter(1)
  %z = s8[64]{0} parameter(2)
  %table = s32[2,2]{1,0} constant({
    { 0, 1 },
    { 2, 3 }
  })
  %y0 = f32[3]{0} get-tuple-element(%y), index=0
  %y1 = s4[5]{0} get-tuple-element(%y), index=1
  %start = ((bf16[4,8]{1,0}), bf16[2,8]{1,0}, s32[]) async-start(%x), calls=%wrapped
  %update = ((bf16[4,8]{1,0}), bf16[2,8]{1,0}, s32[]) async-update(%start), calls=%wrapped
  %done = bf16[2,8]{1,0} async-done(%update), calls=%wrapped
  %both = (f32[3]{0}, /*index=1*/s4[5]{0}) all-reduce(%y0, /*index=1*/%y1), replica_groups={}, to_apply=%add
  %first = s8[64]{0} call(%z), to_apply=%once
  %second = s8[64]{0} call(%first), to_apply=%once
  %in = s32[2]{0} constant({0, 0})
  %slice = s8[64]{0} collective-permute(%second, %z, %in, %in), source_target_pairs={{0,1},{1,0}}, slice_sizes={{16}}
  %ragged = s8[64]{0} ragged-all-to-all(%z, %z, %in, %in, %in, %in), replica_groups={{0,1,2,3}}
  %token = token[] after-all()
  %tohost = (f32[3]{0}, u32[], token[]) send(%y0, %token), channel_id=3, is_host_transfer=true
  %told = token[] send-done(%tohost), channel_id=3, is_host_transfer=true
  %p2p = (f32[3]{0}, u32[], token[]) send(%y0, %token), channel_id=4, frontend_attributes={_xla_send_recv_source_target_pairs={{0,2},{1,3}}}
  ROOT %out = f32[3]{0} get-tuple-element(%both), index=0
}
"""  # noqa: E501


def test_forms_that_are_rarely_printed():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    rows = {r.name: r for r in hlo.collectives(SYNTHETIC)}
    found = {n: (r.kind, r.dtypes, r.operand_bytes, r.executions) for n, r in rows.items()}
    assert found == {
        "rs": ("reduce-scatter", ("bf16",), 64, 1),
        "both": ("all-reduce", ("f32", "s4"), 12 + 3, 1),
        "cb": ("collective-broadcast", ("s8",), 64, 2),
        "slice": ("collective-permute", ("s8",), 16, 1),
        "ragged": ("ragged-all-to-all", ("s8",), 64, 1),
        "tohost": ("send", ("f32",), 12, 1),
        "p2p": ("send", ("f32",), 12, 1),
    }
    assert [r.name for r in hlo.collectives(SYNTHETIC)] == list(found), "in program order"
    assert rows["both"].groups == ((0, 1, 2, 3),)
    assert hlo.axes_of(rows["tohost"], mesh) == ()
    assert hlo.axes_of(rows["p2p"], mesh) == ("a",)
    assert list(hlo.sends(rows["cb"], mesh)) == [(1, 0, 64), (3, 2, 64)]
    assert list(hlo.sends(rows["tohost"], mesh)) == []
    assert list(hlo.sends(rows["p2p"], mesh)) == [(0, 2, 12), (1, 3, 12)]
    assert list(hlo.sends(rows["slice"], mesh)) == [(0, 1, 16), (1, 0, 16)]
    assert sum(b for _, _, b in hlo.sends(rows["ragged"], mesh)) == 4 * 3 * 16


LOOP = """HloModule f

%body (s: (s32[], s32[], f32[4])) -> (s32[], s32[], f32[4]) {
  %s = (s32[], s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %v = f32[4]{0} get-tuple-element(%s), index=2
  %step = s32[] constant(STEP)
  %next = s32[] add(%step, %i)
  %r = f32[4]{0} all-reduce(%v), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], s32[], f32[4]{0}) tuple(%next, LIMIT, %r)
}

%test (s2: (s32[], s32[], f32[4])) -> pred[] {
  %s2 = (s32[], s32[], f32[4]{0}) parameter(0)
  %i2 = s32[] get-tuple-element(%s2), index=0
  %n2 = s32[] get-tuple-element(%s2), index=1
  ROOT %c = pred[] compare(SIDES), direction=DIRECTION
}

ENTRY %main (v0: f32[4], k: s32[]) -> f32[4] {
  %v0 = f32[4]{0} parameter(0)
  %k = s32[] parameter(1)
  %zero = s32[] constant(START)
  %end = s32[] constant(END)
  %from = s32[] copy(%zero)
  %t0 = (s32[], s32[], f32[4]{0}) tuple(%from, TO, %v0)
  %w = (s32[], s32[], f32[4]{0}) while(%t0), condition=%test, body=%body
  ROOT %o = f32[4]{0} get-tuple-element(%w), index=2
}
"""


@pytest.mark.parametrize(
    ("start", "end", "step", "direction", "change", "trips"),
    [
        (0, 7, 1, "LT", {}, 7),
        (0, 7, 2, "LT", {}, 4),
        (1, 7, 2, "LE", {}, 4),
        (10, 0, -3, "GT", {}, 4),
        (10, 1, -3, "GE", {}, 4),
        (0, 6, 2, "NE", {}, 3),
        (0, 7, 2, "NE", {}, None),  # never equal, as far as the text shows
        (7, 7, 1, "LT", {}, 0),
        (0, 7, -1, "LT", {}, None),
        (0, 7, 1, "LT", {"%i2, %n2": "%n2, %i2"}, 0),  # 7 < 0
        (0, 7, 1, "GT", {"%i2, %n2": "%n2, %i2"}, 7),  # 7 > i
        (0, 7, 1, "LT", {"tuple(%from, %end": "tuple(%from, %k"}, None),  # limit is an argument
        (0, 7, 1, "LT", {"%next, %n,": "%next, %next,"}, None),  # limit moves
        (0, 7, 1, "LT", {"add(%step, %i)": "multiply(%step, %i)"}, None),
    ],
)
def test_trip_counts_that_are_not_printed(start, end, step, direction, change, trips):
    text = LOOP.replace("START", str(start)).replace("END", str(end)).replace("STEP", str(step))
    text = text.replace("DIRECTION", direction).replace("SIDES", "%i2, %n2")
    text = text.replace("LIMIT", "%n").replace("TO", "%end")
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    (row,) = hlo.collectives(text)
    assert row.executions == trips


def test_types():
    assert shapes("((f32[2,3]{1,0:T(8,128)S(1)}), /*index=1*/pred[], u32[]{:S(2)}, token[])") == (
        ("f32", (2, 3)),
        ("pred", ()),
        ("u32", ()),
    )
    sizes = {"pred": 1, "s8": 1, "u16": 2, "bf16": 2, "f16": 2, "f8e4m3fn": 1, "f64": 8, "c64": 8}
    assert {dtype: num_bytes(dtype, (1,)) for dtype in sizes} == sizes
    assert num_bytes("u4", (5,)) == 3
    assert num_bytes("f32", (0, 7)) == 0


def test_canonical_text_keeps_what_differs():
    base = """HloModule jit_f, num_partitions=4, frontend_attributes={fingerprint_before_lhs="6f"}

FileNames
1 "f.py"

%add.9 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x (a, {b})" stack_frame_id=2}
  ROOT %r = f32[8]{0} all-reduce(%x), channel_id=7, replica_groups=[2,2]<=[4], to_apply=%add.9
}
"""
    same = (
        base.replace("%r ", "%result.1 ")
        .replace("add.9", "sum")
        .replace("channel_id=7", "channel_id=1")
    )
    same = (
        same.replace('"6f"', '"77"')
        .replace("jit_f", "jit_g")
        .replace("stack_frame_id=2", "stack_frame_id=5")
    )
    assert hlo.canonical(base) == hlo.canonical(same)
    for old, new in [
        ("[2,2]<=[4]", "[2,2]<=[2,2]T(1,0)"),
        ("f32[8]", "f32[9]"),
        ("add(%a, %b)", "add(%b, %a)"),
        ("add(%a, %b)", "maximum(%a, %b)"),
        ("num_partitions=4", "num_partitions=8"),
    ]:
        assert old in base
        assert hlo.canonical(base.replace(old, new)) != hlo.canonical(base)


def test_a_kernel_that_sends_by_itself_is_a_row_and_ends_nothing():
    # Its metadata goes on over lines of which one starts with a brace, as libtpu prints it.
    text = """HloModule jit_f, num_partitions=8

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %ring.1 = f32[8,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"mesh_axes":"[\\"x\\"]"
}}, metadata={op_name="jit(f)/ring/pallas_call"}, backend_config={"custom_call_config":{"body":"","has_communication":true,"collective_id":"16"}}
  %local.1 = f32[8,128]{1,0} custom-call(%ring.1), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={}}, backend_config={"custom_call_config":{"body":""}}
  ROOT %r = f32[8,128]{1,0} all-reduce(%local.1), replica_groups={}, to_apply=%add
}
"""  # noqa: E501
    kernel, reduction = hlo.collectives(text)
    assert (kernel.name, kernel.kind, kernel.operand_bytes) == ("ring.1", "custom-call", 4096)
    assert kernel.groups is None and kernel.pairs is None
    assert "sends by itself" in kernel.unread
    assert (reduction.kind, reduction.unread) == ("all-reduce", "")
    with pytest.raises(ValueError, match="ring.1"):
        hlo.wire_bytes(text, jax.make_mesh((8,), ("x",)))


def test_groups_in_a_form_that_is_not_known_are_said():
    text = """HloModule jit_f, num_partitions=8
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %r = f32[8]{0} all-reduce(%x), replica_groups=spiral(8), to_apply=%add
}"""
    (row,) = hlo.collectives(text)
    assert (row.kind, row.operand_bytes, row.groups) == ("all-reduce", 32, None)
    assert "spiral(8)" in row.unread
    with pytest.raises(ValueError, match=r"spiral"):
        hlo.wire_bytes(text, jax.make_mesh((8,), ("x",)))
