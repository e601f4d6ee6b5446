"""What TPU and GPU compilers make of a compressed hierarchy."""

import jax
import jax.numpy as jnp
import pytest

from xcoll import aot, codecs, gradients, hlo
from xcoll.gradients import state_specs, sync

TARGETS = ("2*v5e:2x2", "h100:8")

ELEMENTS = 2048 * 1024
SHARD_BYTES = ELEMENTS // 4 * 4
"""Bytes of a float32 shard over the four devices of the inner axis."""

COMPRESSORS = {
    # Of a share, half a shard, the codes and a byte a block of 256, rounded up to 4096: one is sent
    # to the other rank, and one gathered from it.
    "int8": (gradients.error_feedback(codecs.int8()), 2 * 266240),
    # A bit an element and 4 bytes a block of 256: 32768 + 4096 bytes, twice.
    "sign": (gradients.sign(), 2 * 36864),
    # ceil(0.01 * 524288) values and indices of 4 bytes.
    "top_k": (gradients.top_k(0.01), 2 * 5243 * 4),
}


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_bytes_on_the_slow_axis(target, name):
    compressor, slow_bytes = COMPRESSORS[name]
    mesh = aot.mesh(target, (2, 4), ("dcn", "ici"))
    transformation = sync(
        ("dcn", "ici"), compressor=compressor, compress_axis="dcn", mesh=mesh.abstract_mesh
    )
    state = jax.eval_shape(transformation.init, jax.ShapeDtypeStruct((2048, 1024), jnp.float32))
    specs = state_specs(state)

    def placed(shapes, specs):
        return jax.tree.map(
            lambda a, spec: jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=jax.NamedSharding(mesh, spec)
            ),
            shapes,
            specs,
        )

    spec = jax.P(mesh.axis_names)
    update = jax.shard_map(
        lambda g, s: transformation.update(g[0], s),
        mesh=mesh,
        in_specs=(spec, specs),
        out_specs=(jax.P(), specs),
    )
    grads = placed(jax.ShapeDtypeStruct((8, 2048, 1024), jnp.float32), spec)
    compiled = jax.jit(update).lower(grads, placed(state, specs)).compile()
    # int8 has kernels: to encode and to decode, at each of the two sites.
    kernel = "tpu_custom_call" if "v5e" in target else "__gpu$xla.gpu.triton"
    assert (kernel in compiled.as_text()) == (name == "int8")
    sent = hlo.wire_bytes(compiled, mesh)
    assert sent["dcn"] == slow_bytes
    # An exact all-reduce of the shard over two ranks sends all of it; int8 a quarter.
    assert sent["dcn"] <= 0.27 * SHARD_BYTES
    # A true reduce-scatter and all-gather over four: three shards each.
    assert sent["ici"] == 2 * 3 * SHARD_BYTES
