"""Plans over all 64 chips of a v5p:4x4x4, compiled: loops, their trip counts, bytes by axis."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xcoll
from xcoll import aot, hlo
from xcoll.algorithms import hierarchical

P = jax.P
AXES = ("data", "model")

# Algorithm; permutes in the program; permutes executed, by the textbook.
EXPECTED = [
    ("ring", 2, 2 * 63),  # one loop to reduce-scatter and one to all-gather
    ("bidirectional_ring", 6, 2 * 63 + 2 * 31 + 2),  # both ways; n / 2 steps to gather
    ("recursive_doubling", 6, 6),  # log2 of 64
    ("halving_doubling", 12, 12),  # twice that
    ("tree", 12, 12),
    (hierarchical("ring", "ring"), 6 + 30, 6 + 30),  # 4 inside, 16 outside: written out
]


@pytest.mark.parametrize(("algorithm", "in_program", "executed"), EXPECTED, ids=str)
def test_sixty_four_ranks(algorithm, in_program, executed):
    mesh = aot.mesh("v5p:4x4x4", (16, 4), AXES)
    fn = jax.shard_map(
        lambda x: lax.psum(x, AXES), mesh=mesh, in_specs=P(AXES), out_specs=P()
    )  # the default check_vma=True
    ours = xcoll.optimize(fn, policy=xcoll.Policy(algorithm=algorithm))
    x = jax.ShapeDtypeStruct(
        (64 * 64, 1024), jnp.float32, sharding=jax.NamedSharding(mesh, P(AXES))
    )
    compiled = jax.jit(ours).lower(x).compile()
    rows = hlo.collectives(compiled)
    assert {row.kind for row in rows} == {"collective-permute"}
    assert len(rows) == in_program
    assert sum(row.executions for row in rows) == executed
    (site,) = ours.reports[-1].sites
    assert dict(site.wire_bytes) == hlo.wire_bytes(compiled, mesh)


def test_padding_does_not_blow_up_the_gpu_compiler():
    """A final slice of a padded buffer, fused with the whole chain before it, took minutes."""
    mesh = aot.mesh("h100:8", (2, 4), AXES)
    fn = jax.shard_map(lambda x: lax.psum(x, AXES), mesh=mesh, in_specs=P(AXES), out_specs=P())
    policy = xcoll.Policy(algorithm=hierarchical(num_segments=3))
    x = jax.ShapeDtypeStruct((8 * 65_543,), jnp.float32, sharding=jax.NamedSharding(mesh, P(AXES)))
    compiled = jax.jit(xcoll.optimize(fn, policy=policy)).lower(x).compile()
    assert {row.kind for row in hlo.collectives(compiled)} == {"collective-permute"}
