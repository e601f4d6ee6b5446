"""The payload's own bits: narrow floats that are summed in float32 and rounded once."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from xcoll.codecs.base import Codec
from xcoll.codecs.checks import check_name
from xcoll.codecs.packing import padded_with_zeros

_UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True, kw_only=True)
class Plain(Codec):
    """A narrow float as it is: see `plain`."""

    kind: str = field(init=False, default="plain")
    dtype: str
    block: int = 1
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_name("plain", "dtype", self.dtype, tuple(_UNIT_ROUNDOFF))
        check_name("plain", "rounding", self.rounding, ("nearest",))
        if self.block != 1:
            raise ValueError(f"plain(block={self.block!r}): there are no scales; leave block out")

    @property
    def is_lossy(self) -> bool:
        """A payload is not changed on the way."""
        return False

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Its own dtype only."""
        return (self.dtype,)

    @property
    def max_error(self) -> float:
        """Half a unit in the last place, for what was summed in float32; inputs are not rounded."""
        return _UNIT_ROUNDOFF[self.dtype]

    @property
    def formula(self) -> str:
        """The law of error as text."""
        return f"|x| / {round(1 / self.max_error)}"

    @property
    def wire_dtype(self) -> str:
        """The bits as an integer: XLA:CPU carries bfloat16 as float32."""
        return "uint16"

    @property
    def items_per_block(self) -> int:
        """One."""
        return 1

    def encode(
        self,
        x: jax.Array,
        *,
        dtype: str,
        key: jax.Array | None = None,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Encodes payloads: see `Codec.encode`. Infinities and NaNs stay where they are."""
        self.check_dtype(dtype)
        return padded_with_zeros(lax.bitcast_convert_type(x.astype(self.dtype), jnp.uint16))

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
        self.check_decode(wire, elements, dtype)
        values = lax.bitcast_convert_type(wire[..., :elements], jnp.dtype(self.dtype))
        return values.astype(jnp.float32)


def plain(dtype: str) -> Plain:
    """Returns the codec of the payload's own bits.

    Sums through it are added up in float32 and rounded once, at the end.

    Args:
      dtype: ``"bfloat16"`` or ``"float16"``.

    Example:
      >>> plain("bfloat16").is_lossy
      False
    """
    return Plain(dtype=dtype)
