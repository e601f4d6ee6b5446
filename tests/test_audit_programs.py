"""Audits of whole programs against figures worked out on paper, on CPU, TPU and GPU."""

import dataclasses
import functools
import math
from collections import Counter
from fractions import Fraction

import pytest
from audit_programs import PROGRAMS, TARGETS, Sent
from plain_counts import plain_count, row_count

import xcoll
from xcoll import aot
from xcoll.hlo.auditing import audit

every_program = pytest.mark.parametrize("name", PROGRAMS)
on_every_target = pytest.mark.parametrize("target", TARGETS)


@functools.cache
def audited(name, target):
    """The compiled program and its audit."""
    mesh = PROGRAMS[name].mesh(target)
    fn, args = PROGRAMS[name].build(mesh)
    program = aot.compile(fn, *args).compiled
    return program, audit(program)


@every_program
@on_every_target
def test_rows_are_those_worked_out_on_paper(name, target):
    rows = audited(name, target)[1].rows
    found = Counter(Sent(row.kind, row.axes, row.num_bytes, row.executions) for row in rows)
    assert found == PROGRAMS[name].expected(target)
    between_slices = [row for row in rows if row.transfer is not None]
    assert {row.transfer for row in between_slices} <= {"all-reduce"}
    assert {row.kind for row in between_slices} == {kind for kind, *_ in found} & {"send", "recv"}


@every_program
@on_every_target
def test_bytes_over_each_axis(name, target):
    found = audited(name, target)[1]
    sizes = PROGRAMS[name].axes
    expected = dict.fromkeys(sizes, Fraction(0))
    for row, count in PROGRAMS[name].expected(target).items():
        for axis in row.axes:
            expected[axis] += count * row.executions * sent_by_each(row, sizes)
    assert found.axis_sizes == sizes
    assert found.wire_bytes == expected


def sent_by_each(row, sizes):
    """What a device sends in one run; a ring over two axes has links that cross both."""
    n = math.prod(sizes[axis] for axis in row.axes)
    return (
        row.num_bytes
        * {
            "all-reduce": Fraction(2 * (n - 1), n),
            "reduce-scatter": Fraction(n - 1, n),
            "all-gather": n - 1,
            "all-to-all": Fraction(n - 1, n),
            "collective-permute": 1,
            "send": 1,
            "recv": 0,
        }[row.kind]
    )


@every_program
@on_every_target
def test_nothing_is_lost_and_nothing_twice(name, target):
    program, found = audited(name, target)
    assert row_count(program, found.rows) == plain_count(program) != {}
    assert len({row.name for row in found.rows}) == len(found.rows)
    assert found.is_complete


def test_a_mesh_is_ordered_by_what_was_audited():
    _, found = audited("multi_slice_fsdp", "tpu")
    devices = [device for piece in aot.devices("2*v5e:2x2") for device in piece]
    # More goes over "ici" than over "dcn", so it has the links inside slices, though it comes
    # first; and the other way round.
    mesh = xcoll.make_mesh((4, 2), ("ici", "dcn"), devices=devices, traffic=found)
    assert [[d.slice_index for d in row] for row in mesh.devices] == [[0, 1]] * 4
    other = dataclasses.replace(found, wire_bytes={"dcn": 10**9, "ici": 1})
    mesh = xcoll.make_mesh((4, 2), ("ici", "dcn"), devices=devices, traffic=other)
    assert [len({d.slice_index for d in row}) for row in mesh.devices] == [1] * 4
