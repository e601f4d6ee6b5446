"""Ring kernels over remote DMA, through the TPU compiler: 16 MiB a shard fit the VMEM of each."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from xcoll_kernels.tpu import remote_dma

from xcoll import aot, hlo

SHARD_BYTES = 16 * 2**20
COLLECTIVES = [
    remote_dma.ring_all_gather,
    remote_dma.ring_reduce_scatter,
    remote_dma.ring_all_reduce,
]


def compiled(fn, topology, axis_shapes, dtype, **options):
    mesh = aot.mesh(topology, axis_shapes, ("outer", "x")[-len(axis_shapes) :])
    rows = SHARD_BYTES // 1024 // jnp.dtype(dtype).itemsize
    return aot.compile(
        functools.partial(fn, axis_name="x", **options),
        jax.ShapeDtypeStruct((8 * rows, 1024), dtype),
        mesh=mesh,
        in_specs=P(mesh.axis_names),
        out_specs=P(mesh.axis_names),
        check_vma=True,
    )


@pytest.mark.parametrize("encoded", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("fn", COLLECTIVES)
@pytest.mark.parametrize(
    ("topology", "axis_shapes", "dtype"),
    [
        ("v5e:2x4", (8,), jnp.float32),
        ("v5e:2x4", (2, 4), jnp.bfloat16),
        ("v5p:2x2x2", (2, 4), jnp.float32),
        ("v6e:2x4", (8,), jnp.float32),
    ],
)
def test_one_kernel_and_no_collective_of_xla(topology, axis_shapes, dtype, fn, encoded):
    program = compiled(fn, topology, axis_shapes, dtype, encoded=encoded)
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert f"{fn.__name__}_int8" in text if encoded else fn.__name__ in text
    assert not hlo.collectives(program)


def test_two_rings_in_one_program():
    mesh = aot.mesh("v5e:2x4", (2, 4), ("outer", "x"))

    def both(x):
        return remote_dma.ring_all_reduce(remote_dma.ring_all_reduce(x, "x"), "outer")

    shape = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    program = aot.compile(both, shape, mesh=mesh, in_specs=P(), out_specs=P(("outer", "x")))
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 2
