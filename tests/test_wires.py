"""What collectives send over each mesh axis: by hand, and against the definition in fractions."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networks_of_programs import collective, mesh

from xcoll import hlo
from xcoll.hlo.wires import Wires

MESH = mesh(a=2, b=4)
ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))
ALL = (tuple(range(8)),)
B = 4800

BY_HAND = {
    # 2 · 3/4 · B to the next in the row.
    "all-reduce b": (collective("all-reduce", B, ROWS), ("b",), 0, 7200),
    # 2 · 1/2 · B to the other in the column.
    "all-reduce a": (collective("all-reduce", B, COLUMNS), ("a",), 4800, 0),
    # A ring of eight: 2 · 7/8 · B, over a only from 3 to 4 and from 7 to 0.
    "all-reduce both": (collective("all-reduce", B, ALL), ("a", "b"), 8400, 8400),
    # The same in the other order, 0 4 1 5 …: each hop is over a, every second over b too.
    "all-reduce b, a": (
        collective("all-reduce", B, [(0, 4, 1, 5, 2, 6, 3, 7)]),
        ("a", "b"),
        8400,
        8400,
    ),
    "reduce-scatter b": (collective("reduce-scatter", B, ROWS), ("b",), 0, 3600),
    "all-gather b": (collective("all-gather", B, ROWS), ("b",), 0, 14400),
    # 1/8 · B to each of the 4 in the other row, and to each of the 6 in other columns.
    "all-to-all both": (collective("all-to-all", B, ALL), ("a", "b"), 2400, 3600),
    "ragged-all-to-all b": (collective("ragged-all-to-all", B, ROWS), ("b",), 0, 3600),
    "broadcast b": (collective("collective-broadcast", B, ROWS), ("b",), 0, B),
    # Only from one group, and what a device sends itself does not count.
    "permute": (collective("collective-permute", B, pairs=[(1, 1), (0, 5)]), ("a", "b"), B, B),
    "alone": (collective("all-reduce", B, [(i,) for i in range(8)]), (), 0, 0),
    "to the host": (collective("send", B, ()), (), 0, 0),
    # Groups of different sizes: 2 · 2/3 · B, and 2 · 1/2 · B.
    "uneven": (collective("all-reduce", B, [(0, 1, 2), (3, 7)]), ("a", "b"), 4800, 6400),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case):
    row, axes, a, b = BY_HAND[case]
    wires = Wires(MESH)
    assert wires.axes_of(row) == axes == hlo.axes_of(row, MESH)
    assert wires.wire_bytes(row) == {"a": a, "b": b}


def test_a_run_counts_executions_and_adds_fractions_before_it_drops_them():
    # A byte over groups of three: 4/3 bytes an execution, 5 of them 20/3; of unknown executions
    # one, 4/3: 8 bytes together, where the parts rounded down make 7.
    rows = [
        collective("all-reduce", 1, [(0, 1, 2)], executions=5),
        collective("all-reduce", 1, [(2, 1, 0)], executions=None),
    ]
    assert Wires(MESH).total_wire_bytes(rows) == {"a": 0, "b": 8}
    assert Wires(MESH).wire_bytes(rows[0]) == {"a": 0, "b": 1}
    assert Wires(MESH).total_wire_bytes([]) == {"a": 0, "b": 0}


def test_the_busiest_device_is_that_of_the_whole_run():
    # 0 sends B, then 1 sends B: no device sends 2 B.
    rows = [collective("collective-permute", B, pairs=[(i, i + 1)]) for i in range(2)]
    assert Wires(MESH).total_wire_bytes(rows) == {"a": 0, "b": B}


def test_more_bytes_than_64_bits_hold():
    row = collective("all-gather", 2**40, ROWS, executions=2**30)
    assert Wires(MESH).total_wire_bytes([row]) == {"a": 0, "b": 3 * 2**70}


SLICES = mesh(ids=[100_000 * (s + 1) + i for s in range(2) for i in range(4)], slice=2, chip=4)


def test_every_slice_runs_a_program_that_numbers_one():
    inside = collective("all-reduce", B, [(0, 1), (2, 3)], num_devices=4)
    assert [g.tolist() for g in Wires(SLICES).ends(inside).groups] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    ]
    one = collective("collective-permute", B, pairs=[(0, 1)], num_devices=4, slices=(1,))
    assert Wires(SLICES).ends(one).pairs.tolist() == [[4, 5]]
    assert list(hlo.sends(one, SLICES)) == [(4, 5, B)]


def test_transfers_between_slices_name_devices():
    ids = [(100_000 + i, 200_000 + i) for i in range(4)]
    send = collective("send", B, ids, num_devices=4, transfer="all-gather")
    recv = collective("recv", B, ids, num_devices=4, transfer="all-gather")
    wires = Wires(SLICES)
    assert wires.axes_of(send) == wires.axes_of(recv) == ("slice",)
    assert wires.wire_bytes(send) == {"slice": B, "chip": 0}
    assert wires.wire_bytes(recv) == {"slice": 0, "chip": 0}
    with pytest.raises(ValueError, match="names devices that are not in the mesh; pass the mesh"):
        wires.axes_of(collective("send", B, [(100_000, 300_000)], transfer="all-gather"))


def test_the_program_of_another_mesh():
    with pytest.raises(ValueError, match="numbers 16 devices, but the mesh has 8; pass the mesh"):
        Wires(MESH).axes_of(collective("all-reduce", B, ALL, num_devices=16))


def fractions_of(row, shape):
    """Bytes that each device sends over each axis, message by message: the convention itself."""
    sent = [[Fraction(0)] * int(np.prod(shape)) for _ in shape]

    def send(source, destination, num_bytes):
        ends = zip(*(np.unravel_index(end, shape) for end in (source, destination)), strict=True)
        for axis, (a, b) in enumerate(ends):
            if a != b:
                sent[axis][source] += num_bytes

    for a, b in row.pairs or ():
        send(a, b, row.operand_bytes)
    for group in row.groups or ():
        n, num_bytes = len(group), Fraction(row.operand_bytes)
        for i, rank in enumerate(group):
            after = group[(i + 1) % n]
            if row.kind == "all-to-all":
                for other in group:
                    send(rank, other, num_bytes / n)
            elif row.kind == "all-reduce":
                send(rank, after, 2 * num_bytes * (n - 1) / n)
            elif row.kind == "reduce-scatter":
                send(rank, after, num_bytes * (n - 1) / n)
            elif row.kind == "all-gather":
                send(rank, after, num_bytes * (n - 1))
            elif i < n - 1:
                send(rank, after, num_bytes)
    return sent


KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
)


@st.composite
def rows_of_programs(draw):
    shape = draw(st.sampled_from([(2, 4), (12,), (2, 3, 2), (5, 2)]))
    devices = int(np.prod(shape))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        order = draw(st.permutations(range(devices)))
        num_bytes = draw(st.integers(1, 10**6))
        kind = draw(st.sampled_from(KINDS))
        more = {"num_devices": devices, "executions": draw(st.integers(1, 5))}
        if kind == "collective-permute":
            targets = draw(st.permutations(range(devices)))
            pairs = list(zip(order, targets, strict=True))[: draw(st.integers(1, devices))]
            rows.append(collective(kind, num_bytes, pairs=pairs, **more))
            continue
        cuts = sorted(draw(st.sets(st.integers(1, devices - 1), max_size=3)))
        groups = [order[a:b] for a, b in zip([0, *cuts], [*cuts, devices], strict=True)]
        rows.append(collective(kind, num_bytes, groups, **more))
    return shape, rows


@settings(max_examples=100, deadline=None)
@given(rows_of_programs())
def test_any_groups_against_the_definition(program):
    shape, rows = program
    names = "abc"[: len(shape)]
    on = mesh(**dict(zip(names, shape, strict=True)))
    wires = Wires(on)
    total = [[Fraction(0)] * on.devices.size for _ in shape]
    for row in rows:
        sent = fractions_of(row, shape)
        expected = {n: int(max(each)) for n, each in zip(names, sent, strict=True)}
        assert wires.wire_bytes(row) == expected
        for whole, each in zip(total, sent, strict=True):
            whole[:] = [w + row.executions * e for w, e in zip(whole, each, strict=True)]
        # The messages that `sends` lists make the same.
        listed = [[Fraction(0)] * on.devices.size for _ in shape]
        for source, destination, num_bytes in hlo.sends(row, on):
            for axis in range(len(shape)):
                if wires.places[axis, source] != wires.places[axis, destination]:
                    listed[axis][source] += num_bytes
        assert listed == sent
    found = wires.total_wire_bytes(rows)
    assert found == {n: int(max(each)) for n, each in zip(names, total, strict=True)}
