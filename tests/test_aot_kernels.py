"""The kernels compile for the TPUs and the GPU that they are for, each to one custom call."""

import functools

import jax
import jax.numpy as jnp
import pytest
import xcoll_kernels
from jax.sharding import PartitionSpec as P

from xcoll import aot

# jax says so wherever a Triton kernel is lowered; see `xcoll_kernels.gpu` for what would follow.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

NUM_RANKS = 8
TARGETS = {
    "v5e:2x4": ("tpu", 8, "tpu_custom_call"),
    "v5p:2x2x2": ("tpu", 8, "tpu_custom_call"),
    "v6e:2x4": ("tpu", 8, "tpu_custom_call"),
    "h100:8": ("cuda", 8, "xla.gpu.triton"),
}
"""Platform of the kernels, devices, and what a kernel is called in a compiled program."""

SIZES = {
    "tpu": ((8, 256, 20_011), (4, 64, 3), (4, 256, 391)),
    "cuda": ((8, 256, 20_011), (4, 64, 3), (8, 4096, 391)),
}
"""Code bits, block, number of blocks: several tiles with a ragged end, and fewer than a tile."""


def program(topology, op, bits, block, num_blocks, dtype, *, kernels=True, check_vma=True):
    """Compiles an operation on every device's own payload of ``num_blocks``."""
    platform, num_devices, _ = TARGETS[topology]
    total, code_bytes = num_devices * num_blocks, block * bits // 8
    ranks = (NUM_RANKS,) if op == "reduce_and_quantize" else ()
    values = jax.ShapeDtypeStruct((total, block), dtype)
    codes = jax.ShapeDtypeStruct((*ranks, total, code_bytes), jnp.int8)
    exponents = jax.ShapeDtypeStruct((*ranks, total), jnp.uint8)
    args = {"quantize": [values], "accumulate_and_quantize": [values, codes, exponents]}.get(
        op, [codes, exponents]
    )
    options = {"bits": bits, "platform": platform, "kernels": kernels}
    if op != "quantize":
        options["saturate"] = 3e38
    if op != "dequantize":
        options["limit"] = 3e38
    spec = P(None, "x") if ranks else P("x")
    return aot.compile(
        functools.partial(getattr(xcoll_kernels, op), **options),
        *args,
        mesh=aot.mesh(topology, (num_devices,), ("x",)),
        in_specs=tuple(spec for _ in args),
        out_specs=P("x"),
        check_vma=check_vma,
    ).as_text()


@pytest.mark.parametrize("op", xcoll_kernels.OPS)
@pytest.mark.parametrize("topology", TARGETS)
def test_a_kernel_is_in_the_program(topology, op):
    platform, _, name = TARGETS[topology]
    for index, (bits, block, num_blocks) in enumerate(SIZES[platform]):
        text = program(topology, op, bits, block, num_blocks, jnp.float32, check_vma=index % 2 == 0)
        assert text.count(name) == 1


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("op", ("quantize", "accumulate_and_quantize"))
@pytest.mark.parametrize("topology", ("v5e:2x4", "h100:8"))
def test_half_precision_payloads(topology, op, dtype):
    for bits, block in ((8, 256), (4, 64)):
        text = program(topology, op, bits, block, 391, dtype)
        assert text.count(TARGETS[topology][2]) == 1


@pytest.mark.parametrize("topology", ("v5e:2x4", "h100:8"))
def test_no_kernel_where_they_are_switched_off(topology):
    text = program(topology, "quantize", 8, 256, 64, jnp.float32, kernels=False)
    assert TARGETS[topology][2] not in text


@pytest.mark.parametrize(("block", "bits"), [(256, 8), (64, 4)])
def test_views_of_a_flat_payload_are_free_on_tpu(block, bits):
    """Between a flat payload and the kernel nothing is copied: one read, one write."""

    def flat(x):
        return xcoll_kernels.quantize(x.reshape(-1, block), bits=bits, limit=1.0, platform="tpu")

    text = aot.compile(
        lambda x: flat(x)[0].reshape(-1),
        jax.ShapeDtypeStruct((8 * 4096 * block,), jnp.float32),
        mesh=aot.mesh("v5e:2x4", (8,), ("x",)),
        in_specs=P("x"),
        out_specs=P("x"),
    ).as_text()
    entry = text[text.index("ENTRY") :]
    assert entry.count("tpu_custom_call") == 1
    assert " copy(" not in entry and " fusion(" not in entry and " reshape(" not in entry
