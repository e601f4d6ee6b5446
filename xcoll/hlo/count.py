"""Bytes that a compiled program sends, and over which mesh axes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax

from xcoll.hlo.reader import Collective, collectives
from xcoll.hlo.wires import Sent, Wires, busiest, carried, is_exchange, messages


def axes_of(collective: Collective, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Returns the mesh axes that a collective acts over, in the mesh's order.

    An axis counts if two devices of one group, or of one pair, differ in it.

    Args:
      collective: a row of `collectives`.
      mesh: the mesh that its program was compiled for.

    Example:
      >>> import jax
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
      >>> axes_of(collectives(PROGRAM)[0], mesh)  # doctest: +SKIP
      ('data',)
    """
    return Wires(mesh).axes_of(collective)


def sends(
    collective: Collective, mesh: jax.sharding.Mesh
) -> Iterator[tuple[int, int, int | Fraction]]:
    """Yields ``(source, destination, bytes)`` for one execution of a collective.

    For permutes these are the pairs of the program. Of other collectives each group is one ring by
    convention, as `xcoll.hlo.wires` has it, and of an all-to-all every pair: exact, as a fraction
    of bytes.

    Args:
      collective: a row of `collectives`.
      mesh: the mesh that its program was compiled for.
    """
    num_bytes, ends = collective.operand_bytes, Wires(mesh).sending(collective)
    if ends.pairs is not None:
        yield from ((int(a), int(b), num_bytes) for a, b in ends.pairs if a != b)
    for groups in ends.groups:
        num_ranks = groups.shape[1]
        if is_exchange(carried(collective)):
            share = Fraction(num_bytes, num_ranks)
            for group in groups.tolist():
                yield from ((a, b, share) for a in group for b in group if a != b)
        elif num_ranks > 1:
            sources, destinations, units = messages(carried(collective), groups)
            each = Fraction(units * num_bytes, num_ranks)
            for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
                yield source, destination, each


def wire_bytes(
    program: Any, mesh: jax.sharding.Mesh, *, unknown_trips: int | None = None
) -> dict[str, int]:
    """Counts the bytes that the busiest device sends over each axis in one execution.

    What goes to a device that differs in several axes counts on each of them. See `sends` for what
    is counted; a fraction of a byte is dropped from the sum.

    Args:
      program: a compiled program or its text.
      mesh: the mesh that it was compiled for.
      unknown_trips: trip count to take for a loop whose own the text does not show.

    Returns:
      Bytes for each axis of the mesh, in its order.

    Raises:
      ValueError: a collective runs an unknown number of times and ``unknown_trips`` is None, or it
        could not be read.
    """
    return busiest(mesh.axis_names, _sent("wire_bytes", program, mesh, unknown_trips))


def crossing_bytes(
    program: Any, mesh: jax.sharding.Mesh, axis: str, *, unknown_trips: int | None = None
) -> int:
    """Counts all bytes sent in one execution between devices that differ in ``axis``.

    Args:
      program: a compiled program or its text.
      mesh: the mesh that it was compiled for.
      axis: a mesh axis, for example the one over hosts.
      unknown_trips: as in `wire_bytes`.

    Returns:
      The sum over all devices.

    Raises:
      ValueError: as `wire_bytes`, or the mesh has no such axis.
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"crossing_bytes: the mesh has no axis {axis!r}, only {mesh.axis_names}")
    row = mesh.axis_names.index(axis)
    total = Fraction(0)
    for sent, num_bytes in _sent("crossing_bytes", program, mesh, unknown_trips):
        total += Fraction(int(sent.units[row].sum()) * num_bytes, sent.per_operand)
    return int(total)


def _sent(
    call: str, program: Any, mesh: jax.sharding.Mesh, unknown_trips: int | None
) -> Iterator[tuple[Sent, int]]:
    """Yields what each collective sends, and its operand's bytes times its executions."""
    wires = Wires(mesh)
    for collective in collectives(program):
        if collective.unread:
            raise ValueError(
                f"{call}: {collective.name} ({collective.kind}) could not be read:"
                f" {collective.unread}; xcoll.audit shows what is known of it"
            )
        times = collective.executions if collective.executions is not None else unknown_trips
        if times is None:
            raise ValueError(
                f"{call}: {collective.name} ({collective.kind}) runs in a loop of unknown trip"
                " count; say how often with unknown_trips="
            )
        yield wires.sent(collective), collective.operand_bytes * times
