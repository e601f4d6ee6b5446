"""Audits of whole programs against figures worked out on paper, on CPU, TPU and GPU."""

import functools
import math
from collections import Counter
from fractions import Fraction

import pytest
from audit_programs import PROGRAMS, TARGETS, Sent
from plain_counts import plain_count, row_count

from xcoll import aot, hlo

every_program = pytest.mark.parametrize("name", PROGRAMS)
on_every_target = pytest.mark.parametrize("target", TARGETS)


@functools.cache
def compiled(name, target):
    mesh = PROGRAMS[name].mesh(target)
    fn, args = PROGRAMS[name].build(mesh)
    return mesh, aot.compile(fn, *args)


@every_program
@on_every_target
def test_rows_are_those_worked_out_on_paper(name, target):
    mesh, program = compiled(name, target)
    rows = hlo.collectives(program)
    found = Counter(Sent(r.kind, hlo.axes_of(r, mesh), r.operand_bytes, r.executions) for r in rows)
    assert found == PROGRAMS[name].expected(target)


@every_program
@on_every_target
def test_bytes_over_each_axis(name, target):
    mesh, program = compiled(name, target)
    sizes = PROGRAMS[name].axes
    expected = dict.fromkeys(sizes, Fraction(0))
    for row, count in PROGRAMS[name].expected(target).items():
        for axis in row.axes:
            expected[axis] += count * row.executions * sent_by_each(row, sizes)
    assert hlo.wire_bytes(program, mesh) == expected


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
    _, program = compiled(name, target)
    rows = hlo.collectives(program)
    assert row_count(program, rows) == plain_count(program) != {}
    assert len({row.name for row in rows}) == len(rows)
