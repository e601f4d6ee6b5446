"""Ring kernels over remote DMA, through the TPU compiler: 16 MiB a shard fit the VMEM of each."""

import re

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
        lambda x: fn(x + x, "x", **options) * 2,
        jax.ShapeDtypeStruct((8 * rows, 1024), dtype),
        mesh=mesh,
        in_specs=P(mesh.axis_names),
        out_specs=P(mesh.axis_names),
        check_vma=True,
    )


def calls(program):
    """The instructions that run a Mosaic kernel."""
    lines = map(str.strip, program.as_text().splitlines())
    return [line for line in lines if 'custom_call_target="tpu_custom_call"' in line]


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
    (call,) = calls(program)
    assert f"%{fn.__name__}{'_int8' if encoded else ''}." in call
    (row,) = hlo.collectives(program)
    assert row.kind == "custom-call" and "kernel that sends by itself" in row.unread
    # The kernel takes its operand and results in HBM; XLA would like to put small ones in VMEM.
    results, operands = re.match(r"(.*?) custom-call\((.*?)\),", call).groups()
    (made,) = re.findall(rf"{re.escape(operands)} = (\S+)", program.as_text())
    assert "S(1)" not in results and "S(1)" not in made


def test_two_rings_in_one_program():
    mesh = aot.mesh("v5e:2x4", (2, 4), ("outer", "x"))

    def both(x):
        return remote_dma.ring_all_reduce(remote_dma.ring_all_reduce(x, "x"), "outer")

    shape = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    program = aot.compile(both, shape, mesh=mesh, in_specs=P(), out_specs=P(("outer", "x")))
    assert len(calls(program)) == 2
