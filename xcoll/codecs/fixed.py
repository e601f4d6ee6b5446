"""Fixed point: sums that have the same bits in every order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from xcoll_kernels import arithmetic

from xcoll.codecs.base import Codec
from xcoll.codecs.checks import check_rounding
from xcoll.codecs.limits import LARGEST, LIMIT
from xcoll.codecs.rounding import rounded
from xcoll.codecs.scales import limit_bits, power_of_two
from xcoll.errors import UnsupportedError

BITS = (8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class FixedPoint(Codec):
    """Integers against one scale that all ranks share: see `fixed_point`."""

    kind: str = field(init=False, default="fixed_point")
    bits: int
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise ValueError(
                f"fixed_point(bits={self.bits!r}): sums are integers of"
                f" {', '.join(map(str, BITS))} bits"
            )
        check_rounding("fixed_point", self.rounding)

    @property
    def block(self) -> int:
        """0: the whole payload shares its scale."""
        return 0

    @property
    def max_error(self) -> float:
        """`max_error_for` one rank."""
        return self.max_error_for(1)

    @property
    def formula(self) -> str:
        """The law of error of a sum as text."""
        steps = "n" if self.rounding == "nearest" else "2 n"
        conversion = " + 2**-24" if self.bits == 32 else ""
        return (
            f"|error of a sum over n ranks| <= ({steps} / floor({2 ** (self.bits - 1) - 1} / n)"
            f"{conversion}) m + n 2**-126, m over all ranks"
        )

    @property
    def wire_dtype(self) -> str:
        """Integers that sums of all ranks fit."""
        return f"int{self.bits}"

    @property
    def integers(self) -> str:
        """The same: sums are those of integers, by any algorithm."""
        return self.wire_dtype

    @property
    def items_per_block(self) -> int:
        """One for each element; what is shared is agreed on before."""
        return 1

    def num_blocks(self, elements: int) -> int:
        """Returns ``elements``: any number of them is a whole payload."""
        return elements

    def largest(self, num_ranks: int) -> int:
        """Returns the largest integer that one of ``num_ranks`` ranks may contribute.

        Raises:
          ValueError: there are too many ranks.
        """
        if (reason := self.why_not(num_ranks)) is not None:
            raise ValueError(f"fixed_point(bits={self.bits}): {reason}")
        largest = (2 ** (self.bits - 1) - 1) // num_ranks
        # As many bits as a float32 has, so that the scale is found from its bits.
        spare = max(largest.bit_length() - 24, 0)
        return largest >> spare << spare

    def why_not(self, num_ranks: int) -> str | None:
        """Returns why sums over ``num_ranks`` ranks cannot be made; None where they can."""
        most = (2 ** (self.bits - 1) - 1) // 4
        if 1 <= num_ranks <= most:
            return None
        return f"sums over 1 to {most} ranks, not {num_ranks}; more bits take more ranks"

    def max_error_for(self, num_ranks: int) -> float:
        """Returns the bound on a sum's error, over the largest magnitude on all ranks.

        Each rank is off by half a step to nearest, by a step by chance, and a step is less than
        ``2 m / largest(num_ranks)``. Integers of 32 bits are rounded once more, to float32.

        Raises:
          ValueError: there are too many ranks.

        Example:
          >>> fixed_point(16).max_error_for(8) == 8 / 4095
          True
        """
        half_steps = num_ranks * (1 if self.rounding == "nearest" else 2)
        return half_steps / self.largest(num_ranks) + (num_ranks * 2.0**-24) * (self.bits == 32)

    def magnitude(self, x: jax.Array) -> jax.Array:
        """Returns a payload's largest magnitude, for ``lax.pmax`` over all ranks.

        As bits, which are ordered as magnitudes are, NaN above infinity: no backend loses a NaN.

        Args:
          x: float32, bfloat16 or float16 of any shape.

        Returns:
          An int32 scalar.
        """
        return jnp.max(arithmetic.magnitude_bits(x.astype(jnp.float32)), initial=0)

    def to_integers(
        self,
        x: jax.Array,
        num_ranks: int,
        amax: jax.Array,
        key: jax.Array | None = None,
        *,
        dtype: str = "float32",
    ) -> jax.Array:
        """Returns one rank's contribution to a sum.

        Args:
          x: float32, or of the payload's dtype, of any shape.
          num_ranks: number of contributions to the sum.
          amax: int32 scalar, the largest `magnitude` of all ranks.
          key: PRNG key of stochastic rounding.
          dtype: name of the payload's dtype.

        Returns:
          ``wire_dtype`` of the shape of ``x``. Sums of any of the ``num_ranks`` contributions, in
          any order, do not overflow. Zeros where ``amax`` is not finite in ``dtype``.

        Raises:
          ValueError: the codec refuses ``dtype`` or the number of ranks, or stochastic rounding
            has no key.
        """
        self.check_encode(dtype, key)
        limit = limit_bits(dtype)
        exponent = self._exponent(amax, num_ranks, limit)
        steps = arithmetic.flushed(x.astype(jnp.float32)) * arithmetic.inverse_scale(exponent)
        steps = jnp.where(amax > limit, 0.0, steps)
        return rounded(steps, self.rounding, key).astype(self.wire_dtype)

    def from_integers(
        self, total: jax.Array, num_ranks: int, amax: jax.Array, *, dtype: str = "float32"
    ) -> jax.Array:
        """Returns the value of a sum of contributions.

        Args:
          total: ``wire_dtype`` of any shape, the sum of the contributions.
          num_ranks: number of contributions.
          amax: int32 scalar, as for `to_integers`.
          dtype: name of the payload's dtype.

        Returns:
          float32 of the same shape: infinite where the exact sum must be so in ``dtype``, saturated
          where it may be finite, NaN everywhere where ``amax`` is not finite in ``dtype``.

        Raises:
          ValueError: the codec refuses ``dtype`` or the number of ranks.
        """
        self.check_dtype(dtype)
        limit = limit_bits(dtype)
        exponent = self._exponent(amax, num_ranks, limit)
        steps = total.astype(jnp.float32)
        largest = LARGEST[dtype]
        values = jnp.clip(steps * arithmetic.scale(exponent), -largest, largest)
        # In steps, since the value itself may be past the range of float32.
        slack = num_ranks + 2.0 ** (self.bits - 24)
        bound = jnp.float32(LIMIT[dtype]) * arithmetic.inverse_scale(exponent) + slack
        values = jnp.where(jnp.abs(steps) > bound, jnp.sign(steps) * math.inf, values)
        return jnp.where(amax > limit, jnp.nan, values)

    def encode(
        self,
        x: jax.Array,
        *,
        dtype: str,
        key: jax.Array | None = None,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Raises UnsupportedError: the scale needs all ranks, see `to_integers`."""
        raise UnsupportedError(_ONLY_SUMS)

    def decode(
        self,
        wire: jax.Array,
        elements: int,
        *,
        dtype: str,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Raises UnsupportedError: the scale needs all ranks, see `from_integers`."""
        raise UnsupportedError(_ONLY_SUMS)

    def _exponent(self, amax: jax.Array, num_ranks: int, limit: int) -> jax.Array:
        if amax.dtype != jnp.int32:
            raise ValueError(
                f"fixed_point(bits={self.bits}): amax is {amax.dtype}; pass the int32 bits that"
                " lax.pmax(codec.magnitude(x), axis_name) gives"
            )
        return power_of_two(jnp.minimum(amax, limit), self.largest(num_ranks))


_ONLY_SUMS = (
    "fixed_point: a codec for sums, whose ranks agree on one scale first; use to_integers and"
    " from_integers, or another codec for what is not summed"
)


def fixed_point(bits: int, *, rounding: str = "nearest") -> FixedPoint:
    """Returns the codec of integers against one scale, for sums.

    All ranks share one power-of-two scale, found from the largest magnitude on any of them, so
    that the integers of all ranks can be added without overflow. Integer sums are associative: the
    result has the same bits for any algorithm, any order and any shape of the mesh.

    Args:
      bits: 8, 16 or 32, of the integers that are summed.
      rounding: ``"nearest"`` (even on ties) or ``"stochastic"``, which needs a key and is unbiased.

    Returns:
      A codec. With ``n`` ranks and ``m`` the largest magnitude on all of them, a sum's error is at
      most ``n / floor((2**(bits - 1) - 1) / n) m``: a whole payload shares its scale, so that small
      values beside large ones are lost.

    Raises:
      ValueError: an option has no such value.

    Example:
      >>> codec = fixed_point(16)
      >>> x = jnp.array([[1.0, -0.5, 0.25], [3.0, 0.5, -0.125]])  # a row for each rank
      >>> amax = codec.magnitude(x)
      >>> integers = codec.to_integers(x, 2, amax)
      >>> codec.from_integers(integers[0] + integers[1], 2, amax).tolist()
      [4.0, 0.0, 0.125]
    """
    return FixedPoint(bits=bits, rounding=rounding)
