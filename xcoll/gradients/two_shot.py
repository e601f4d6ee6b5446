"""Error feedback around a codec: encode, exchange, sum, encode, gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from xcoll.codecs import Codec
from xcoll.codecs.rank_order import rank_sum
from xcoll.gradients.by_platform import by_platform
from xcoll.gradients.channel import Channel
from xcoll.gradients.checks import check_feedback
from xcoll.gradients.compressor import Compressor, Reduced
from xcoll.gradients.layout import Layout


class Code(Protocol):
    """What the two-shot reduction needs of an encoding; every block codec has it."""

    @property
    def block(self) -> int:
        """Elements that share a scale."""

    @property
    def needs_key(self) -> bool:
        """Whether `encode` takes a key."""

    def encode(
        self, x: jax.Array, *, dtype: str, key: jax.Array | None = None, kernels: bool = True
    ) -> jax.Array:
        """Encodes float32 ``(..., elements)``; padding is zeros."""

    def decode(
        self, wire: jax.Array, elements: int, *, dtype: str, kernels: bool = True
    ) -> jax.Array:
        """Decodes to float32 ``(..., elements)``."""


@dataclass(frozen=True, kw_only=True)
class TwoShot(Compressor):
    """A reduction through a code, with a residual at each of its two encode sites.

    Attributes:
      code: the encoding.
    """

    code: Code

    @property
    def block(self) -> int:
        """Blocks of the code are never cut."""
        return self.code.block

    def reduce(
        self,
        x: jax.Array,
        carried: jax.Array | None,
        factors: tuple[jax.Array, ...],
        layout: Layout,
        channel: Channel,
    ) -> Reduced:
        """Sums over ranks with two roundings, whatever the number of ranks."""
        del factors
        share = layout.share
        places = jnp.arange(layout.padded).reshape(channel.num_ranks, share)
        wire = self._encode(
            x.reshape(channel.num_ranks, share), places < layout.width, channel, site=0
        )
        total = rank_sum(self._decode(channel.all_to_all(wire), share))
        is_real = channel.rank() * share + jnp.arange(share) < layout.width
        total = jnp.where(is_real, total, 0)
        if carried is not None:
            total = total + carried
        # One value, both sent and subtracted from.
        total = lax.optimization_barrier(total)
        summed = self._encode(total, is_real, channel, site=1)
        result = self._decode(channel.all_gather(summed), share).reshape(-1)
        if carried is None:
            return Reduced(result, self._decode(wire, share).reshape(-1))
        # Rounding to the result's dtype is part of what was not sent; what a code makes of the
        # padding is not, and would come back to grow the next step's scale.
        rest = jnp.where(is_real, total - channel.rounded(self._decode(summed, share)), 0)
        return Reduced(result, self._decode(wire, share).reshape(-1), rest)

    def _encode(self, x: jax.Array, is_real: jax.Array, channel: Channel, site: int) -> jax.Array:
        # The barrier keeps the rank's own copy from being decoded other than the bits that the
        # others get.
        key = channel.rank_key(site) if self.code.needs_key else None
        return lax.optimization_barrier(self.encode(x, is_real, key))

    def encode(self, x: jax.Array, is_real: jax.Array, key: jax.Array | None) -> jax.Array:
        """Encodes float32 ``(..., elements)``, of which those that are not real are padding."""
        del is_real  # Zeros change no scale that the largest magnitude makes.
        code = self.code
        if isinstance(code, Codec) and code.has_kernels:
            return by_platform(code.encode, x, dtype="float32")
        return code.encode(x, dtype="float32", key=key, kernels=False)

    def _decode(self, wire: jax.Array, share: int) -> jax.Array:
        code = self.code
        if isinstance(code, Codec):
            decoded = by_platform(
                code.decode, wire, kernels=code.has_kernels, elements=share, dtype="float32"
            )
        else:
            decoded = code.decode(wire, share, dtype="float32", kernels=False)
        return lax.optimization_barrier(decoded)


def error_feedback(codec: Codec, *, feedback: bool = True) -> Compressor:
    """Sends gradients through a codec and adds in the next step what the codec dropped.

    The plan is pinned: each rank encodes its contribution, the encoded shares are exchanged
    (all-to-all), the owner of a share sums it in float32 in rank order, encodes the sum, and all
    gather the encoded sums: two roundings, whatever the number of ranks. Each of the two has a
    residual of its own: ``r1`` of what a rank contributes and ``r2`` of the share that it sums::

        v = x + r1;   sent = decode(encode(v));      r1' = v - sent
        s = sum of sent over ranks + r2;   y = decode(encode(s));   r2' = s - y

    Under a hierarchy (``compress_axis`` of `xcoll.gradients.sync`) ``x`` is the exactly reduced
    shard, and only that has residuals. A block that holds a value which is not finite, on any rank,
    is NaN on all ranks, and its residuals stay as they were.

    Args:
      codec: how values are encoded; stochastic rounding draws its key from ``sync``'s seed, the
        step, the bucket and the rank.
      feedback: False keeps no residual: the codec's error is then made in every step anew.

    Returns:
      A compressor for `xcoll.gradients.sync`.

    Raises:
      TypeError: ``codec`` is no codec.
      ValueError: its scale is shared by the whole payload (``fixed_point``).

    Example:
      >>> from xcoll import codecs
      >>> error_feedback(codecs.int4()).feedback
      True

    References:
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      2019; Tang et al., "DoubleSqueeze", 2019, for residuals on both sides.
    """
    check_feedback("error_feedback", feedback)
    if not isinstance(codec, Codec):
        raise TypeError(
            f"error_feedback(codec={codec!r}): must be a codec, for example xcoll.codecs.int8(),"
            f" not {type(codec).__name__}"
        )
    if codec.block < 1:
        raise ValueError(
            f"error_feedback(codec={codec!r}): its scale belongs to the whole payload and its sums"
            " are of integers, without a second rounding; use sync(policy=Policy(codec=...)) for"
            " it, or a block codec here"
        )
    return TwoShot(code=codec, feedback=feedback)
