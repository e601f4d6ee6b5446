"""What the integer codecs have in common: codes against one scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import xcoll_kernels
from jax import lax
from xcoll_kernels import arithmetic, reference

from xcoll.codecs.base import Codec
from xcoll.codecs.checks import check_block, check_name, check_rounding
from xcoll.codecs.limits import LARGEST, LIMIT
from xcoll.codecs.packing import joined, split
from xcoll.codecs.rounding import rounded
from xcoll.codecs.scales import block_magnitude, exact_scale, limit_bits

SCALES = ("power_of_two", "exact")


@dataclass(frozen=True, kw_only=True)
class BlockIntegers(Codec):
    """Integers of 8 or 4 bits, with one scale for each block of contiguous elements."""

    scale: str = "power_of_two"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_block(self.kind, self.block, multiple_of=8 // self.bits)
        check_name(self.kind, "scale", self.scale, SCALES)
        check_rounding(self.kind, self.rounding)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        raise NotImplementedError

    @property
    def largest(self) -> int:
        """The largest code; codes are symmetric around zero."""
        return arithmetic.QMAX[self.bits]

    @property
    def max_error(self) -> float:
        """Half a step to nearest, a step by chance.

        A step is ``m / largest``; as a power of two, less than twice that. Scales of 16 bits, and
        a rounded division, are covered by the last factor.
        """
        half_steps = 1 if self.rounding == "nearest" else 2
        if self.scale == "exact":
            return half_steps / (2 * self.largest) * (1 + 2.0**-12)
        return half_steps / self.largest

    @property
    def formula(self) -> str:
        """The law of error as text."""
        times = "m" if self.rounding == "nearest" else "2 m"
        if self.scale == "exact":
            return f"|error| <= {times} / {2 * self.largest} * (1 + 2**-12) + 2**-126"
        return f"|error| <= {times} / {self.largest} + 2**-126"

    @property
    def wire_dtype(self) -> str:
        """Codes and scales travel as int8."""
        return "int8"

    @property
    def code_items(self) -> int:
        """Bytes of one block's codes."""
        return self.block * self.bits // 8

    @property
    def scale_items(self) -> int:
        """Bytes of one block's scale: an exponent byte, or a float32."""
        return 1 if self.scale == "power_of_two" else 4

    @property
    def items_per_block(self) -> int:
        """Bytes of one block."""
        return self.code_items + self.scale_items

    @property
    def has_kernels(self) -> bool:
        """Whether `xcoll_kernels` knows this codec."""
        return self.scale == "power_of_two" and self.rounding == "nearest"

    def why_reference(self, slot_elements: int, num_ranks: int, platform: str) -> str | None:
        """Returns why no Pallas kernel carries the codec out: see `Codec.why_reference`."""
        if not self.has_kernels:
            return super().why_reference(slot_elements, num_ranks, platform)
        return xcoll_kernels.why_not(
            "quantize" if num_ranks == 1 else "reduce_and_quantize",
            num_blocks=self.num_blocks(slot_elements),
            block=self.block,
            bits=self.bits,
            num_ranks=num_ranks,
            platform=platform,
        )

    def encode(
        self,
        x: jax.Array,
        *,
        dtype: str,
        key: jax.Array | None = None,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Encodes payloads: see `Codec.encode`."""
        self.check_encode(dtype, key)
        blocks = self._blocks(x)
        if self.has_kernels:
            codes, exponents = xcoll_kernels.quantize(
                blocks.reshape(-1, self.block),
                bits=self.bits,
                limit=LIMIT[dtype],
                platform=platform,
                kernels=kernels,
            )
            return self._joined(codes, exponents, blocks.shape[:-1], platform)
        magnitude = block_magnitude(blocks := arithmetic.flushed(blocks.astype(jnp.float32)))
        limit = limit_bits(dtype)
        if self.scale == "exact":
            up = self.rounding == "stochastic"
            scale = exact_scale(jnp.minimum(magnitude, limit), self.largest, up=up)
            steps = blocks / scale
            scale = jnp.where(magnitude > limit, jnp.nan, scale)
            scales = lax.bitcast_convert_type(scale[..., 0], jnp.int8)
        else:
            exponent = arithmetic.finite_exponent(magnitude, bits=self.bits, limit_bits=limit)
            steps = blocks * arithmetic.inverse_scale(exponent)
            scales = arithmetic.marked_exponent(exponent, magnitude, limit_bits=limit)
        codes = rounded(jnp.where(magnitude > limit, 0.0, steps), self.rounding, key)
        codes = jnp.clip(codes, -self.largest, self.largest).astype(jnp.int32)
        return joined(reference.pack(codes, bits=self.bits), scales.astype(jnp.int8))

    def decode(
        self,
        wire: jax.Array,
        elements: int,
        *,
        dtype: str,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Decodes slots: see `Codec.decode`."""
        codes, scales = self._split(wire, elements, dtype)
        largest = LARGEST[dtype]
        if self.scale == "power_of_two":
            values = xcoll_kernels.dequantize(
                codes.reshape(-1, self.code_items),
                scales.reshape(-1).astype(jnp.uint8),
                bits=self.bits,
                saturate=largest,
                platform=platform,
                kernels=kernels,
            )
        else:
            scale = lax.bitcast_convert_type(scales, jnp.float32)[..., None]
            steps = reference.unpack(codes, bits=self.bits).astype(jnp.float32)
            values = jnp.clip(steps * scale, -largest, largest)
            values = jnp.where(jnp.isnan(scale), jnp.nan, values)
        return values.reshape(*wire.shape[:-1], elements)

    def reduce_and_encode(
        self,
        wire: jax.Array,
        elements: int,
        *,
        dtype: str,
        key: jax.Array | None = None,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Encodes the sum of encoded contributions: see `Codec.reduce_and_encode`."""
        if not self.has_kernels:
            return super().reduce_and_encode(
                wire, elements, dtype=dtype, key=key, platform=platform, kernels=kernels
            )
        codes, scales = self._split(wire, elements, dtype)
        encoded = xcoll_kernels.reduce_and_quantize(
            codes,
            scales[..., 0].astype(jnp.uint8),
            bits=self.bits,
            limit=LIMIT[dtype],
            saturate=LARGEST[dtype],
            platform=platform,
            kernels=kernels,
        )
        return self._joined(*encoded, codes.shape[1:-1], platform)

    def accumulate_and_encode(
        self,
        x: jax.Array,
        wire: jax.Array,
        elements: int,
        *,
        dtype: str,
        key: jax.Array | None = None,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Encodes ``x + decode(wire)``: see `Codec.accumulate_and_encode`."""
        if not self.has_kernels:
            return super().accumulate_and_encode(
                x, wire, elements, dtype=dtype, key=key, platform=platform, kernels=kernels
            )
        codes, scales = self._split(wire, elements, dtype)
        encoded = xcoll_kernels.accumulate_and_quantize(
            self._blocks(x).reshape(-1, self.block),
            codes.reshape(-1, self.code_items),
            scales.reshape(-1).astype(jnp.uint8),
            bits=self.bits,
            limit=LIMIT[dtype],
            saturate=LARGEST[dtype],
            platform=platform,
            kernels=kernels,
        )
        return self._joined(*encoded, codes.shape[:-1], platform)

    def _blocks(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.num_blocks(x.shape[-1]), self.block)

    def _split(self, wire: jax.Array, elements: int, dtype: str) -> tuple[jax.Array, jax.Array]:
        self.check_decode(wire, elements, dtype)
        return split(wire, self.num_blocks(elements), self.code_items, self.scale_items)

    def _joined(
        self, codes: jax.Array, exponents: jax.Array, blocks: tuple[int, ...], platform: str
    ) -> jax.Array:
        """Returns slots of what the kernels made; ``blocks`` is (slots, and blocks in each)."""
        scales = exponents.reshape(*blocks, 1).astype(jnp.int8)
        if platform == "cpu":  # XLA:CPU copies whole pieces only where nothing is fused in.
            scales = lax.optimization_barrier(scales)
        return joined(codes.reshape(*blocks, self.code_items), scales)
