"""What the hierarchy is for: bytes between hosts, counted by the permutes of compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xcoll
from xcoll import Policy, aot, hlo
from xcoll.algorithms import hierarchical

ELEMENTS = 8 * 8 * 1024  # divides into whole slots for a ring of eight, of four and of two


def crossing(algorithm):
    """Bytes of the permutes' pairs between two hosts of four, for a sum over both axes."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "device"))
    program = aot.compile(
        lambda x: xcoll.psum(x, ("host", "device"), policy=Policy(algorithm=algorithm)),
        jax.ShapeDtypeStruct((ELEMENTS,), jnp.float32),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
    )
    total = 0
    for row in hlo.collectives(program):
        assert row.kind == "collective-permute"
        for source, destination in row.pairs:
            if source // 4 != destination // 4:
                total += row.operand_bytes * row.executions
    assert total == hlo.crossing_bytes(program, mesh, "host")
    return total


@pytest.mark.parametrize("outer", ["ring", "halving_doubling"])
def test_a_hierarchy_sends_four_sevenths_of_a_flat_ring_between_hosts(outer):
    payload = 4 * ELEMENTS
    flat, nested = crossing("ring"), crossing(hierarchical("ring", outer))
    # Flat: two of eight links lie between hosts, and 2 * 7/8 of the payload passes each.
    assert flat == 2 * 14 * payload // 8
    # Nested: each of eight devices exchanges its quarter with one other: 2 * 1/2 of it each.
    assert nested == 8 * payload // 4
    assert 7 * nested <= 4 * flat
