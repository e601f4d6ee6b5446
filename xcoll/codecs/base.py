"""What every codec is: its interface, and the sum of encoded contributions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from xcoll_kernels import arithmetic

from xcoll.codecs.limits import DTYPES
from xcoll.codecs.packing import padded
from xcoll.codecs.rank_order import rank_sum

FLOOR = 2.0**-126
"""Absolute term of every law of error: subnormal float32 numbers count as zero."""


class Codec:
    """A stateless encoding of a payload on the wire.

    A payload is flat, and a *block* is ``block`` contiguous elements of it that share a scale. With
    ``m`` the largest magnitude of an element's block, and ``d = decode(encode(x))``,

        ``|d - x| <= max_error * m + FLOOR``

    for every finite ``x`` of the payload's dtype. A block that holds a value which is not finite
    in that dtype decodes to NaN everywhere, and touches no other block. The encoding of a payload
    is one *slot*: codes, then scales, then zeros up to `wire_items`. A slot of zeros decodes to
    zeros. Instances are frozen, hashable dataclasses, read back from
    ``dataclasses.asdict`` by `xcoll.codecs.from_dict`.
    """

    def __str__(self) -> str:
        """Reads like the call that makes it, options that are not the defaults included."""
        given = {f.name: f for f in dataclasses.fields(self) if f.init}  # type: ignore[arg-type]
        shown = [
            str(getattr(self, name)) if field.default is dataclasses.MISSING else f"{name}={value}"
            for name, field in given.items()
            if (value := getattr(self, name)) != field.default
        ]
        return f"{self.kind}({', '.join(shown)})" if shown else self.kind

    @property
    def kind(self) -> str:
        """Name of the family: ``"int8"``, ``"int4"``, ``"cast"`` or ``"fixed_point"``."""
        raise NotImplementedError

    @property
    def block(self) -> int:
        """Number of elements that share a scale: 1 without scales, 0 for the whole payload."""
        raise NotImplementedError

    @property
    def rounding(self) -> str:
        """``"nearest"`` (even on ties) or ``"stochastic"``."""
        raise NotImplementedError

    @property
    def max_error(self) -> float:
        """Bound on one rounding, over the largest magnitude of the block."""
        raise NotImplementedError

    @property
    def formula(self) -> str:
        """The law of error as text; ``m`` is the largest magnitude of the block."""
        raise NotImplementedError

    @property
    def wire_dtype(self) -> str:
        """Dtype of what is sent: one that every backend carries unchanged."""
        raise NotImplementedError

    @property
    def items_per_block(self) -> int:
        """Items on the wire of one block: its codes and its scale."""
        raise NotImplementedError

    @property
    def wire_itemsize(self) -> int:
        """Bytes of an item on the wire."""
        return jnp.dtype(self.wire_dtype).itemsize

    @property
    def integers(self) -> str | None:
        """Integer dtype in which payloads are summed by any algorithm; None for encoded slots."""
        return None

    @property
    def is_lossy(self) -> bool:
        """Whether values may change on the way."""
        return True

    def max_error_for(self, num_ranks: int) -> float:
        """Returns the bound on a sum over ranks, where the codec itself decides it (`integers`)."""
        raise NotImplementedError

    @property
    def has_kernels(self) -> bool:
        """Whether `xcoll_kernels` knows this codec."""
        return False

    def why_reference(self, slot_elements: int, num_ranks: int, platform: str) -> str | None:
        """Returns why no Pallas kernel carries the codec out, or None where one does.

        Args:
          slot_elements: elements of a slot.
          num_ranks: contributions that are summed.
          platform: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
        """
        return f"there is no kernel of {self}"

    @property
    def needs_key(self) -> bool:
        """Whether `encode` takes a key."""
        return self.rounding == "stochastic"

    @property
    def unbiased(self) -> bool:
        """Whether the decoded value, averaged over keys, is the value."""
        return self.rounding == "stochastic"

    @property
    def idempotent(self) -> bool:
        """Whether a decoded payload, encoded again, decodes to the same values.

        By chance, what was saturated may be rounded to another value.
        """
        return self.rounding == "nearest"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Payload dtypes that the codec takes."""
        return DTYPES

    def refuses(self, dtype: str) -> str | None:
        """Returns why payloads of ``dtype`` do not pass the codec; None where they do."""
        if dtype in self.dtypes:
            return None
        if dtype.startswith(("float", "bfloat")):
            return f"{self.kind} takes {', '.join(self.dtypes)}, not {dtype}"
        return f"{dtype} values are never sent through a lossy codec"

    def wire_items(self, elements: int) -> int:
        """Returns the items of ``wire_dtype`` that one slot of ``elements`` takes.

        Raises:
          ValueError: ``elements`` is not a whole number of blocks.
        """
        return padded(self.num_blocks(elements) * self.items_per_block)

    def wire_bytes(self, shape: Sequence[int], dtype: str) -> int:
        """Returns the bytes on the wire of one array, padded to whole blocks, as one slot.

        Raises:
          ValueError: the codec refuses ``dtype``.
        """
        self.check_dtype(dtype)
        block = max(self.block, 1)
        elements = -(-math.prod(shape) // block) * block
        return self.wire_items(elements) * self.wire_itemsize

    def encode(
        self,
        x: jax.Array,
        *,
        dtype: str,
        key: jax.Array | None = None,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Encodes payloads.

        Args:
          x: float32, or of the payload's dtype, of shape ``(..., elements)``; each leading index
            is a slot, ``elements`` a whole number of blocks.
          dtype: name of the payload's dtype.
          key: PRNG key of stochastic rounding; the same key gives the same bits.
          platform: where the program will run, ``"cpu"``, ``"tpu"`` or ``"gpu"``.
          kernels: whether Pallas kernels may be used; the bits are the same without.

        Returns:
          ``wire_dtype[..., wire_items(elements)]``.

        Raises:
          ValueError: the codec refuses ``dtype``, ``elements`` is not a whole number of blocks,
            or stochastic rounding has no key.
        """
        raise NotImplementedError

    def decode(
        self,
        wire: jax.Array,
        elements: int,
        *,
        dtype: str,
        platform: str = "cpu",
        kernels: bool = True,
    ) -> jax.Array:
        """Decodes slots.

        Args:
          wire: ``wire_dtype[..., wire_items(elements)]``.
          elements: number of elements of a slot.
          dtype: name of the payload's dtype.
          platform: as for `encode`.
          kernels: as for `encode`.

        Returns:
          ``float32[..., elements]``, saturated to the largest finite value of ``dtype``.

        Raises:
          ValueError: the codec refuses ``dtype``, or ``wire`` has another length.
        """
        raise NotImplementedError

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
        """Encodes the sum of encoded contributions.

        The sum is ``((d0 + d1) + d2) + ...`` in float32.

        Args:
          wire: ``wire_dtype[num_ranks, wire_items(elements)]``.
          elements: number of elements of a slot.
          dtype: name of the payload's dtype.
          key: as for `encode`.
          platform: as for `encode`.
          kernels: as for `encode`.

        Returns:
          ``wire_dtype[wire_items(elements)]``.
        """

        def decoded(slot: jax.Array) -> jax.Array:
            return self.decode(slot, elements, dtype=dtype, platform=platform, kernels=kernels)

        total = rank_sum(wire, decoded)
        return self.encode(total, dtype=dtype, key=key, platform=platform, kernels=kernels)

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
        """Encodes ``x + decode(wire)``: one hop of a ring that encodes again.

        Args:
          x: float32 of shape ``(..., elements)``.
          wire: ``wire_dtype[..., wire_items(elements)]``.
          elements: number of elements of a slot.
          dtype: name of the payload's dtype.
          key: as for `encode`.
          platform: as for `encode`.
          kernels: as for `encode`.

        Returns:
          ``wire_dtype[..., wire_items(elements)]``.
        """
        received = self.decode(wire, elements, dtype=dtype, platform=platform, kernels=kernels)
        total = arithmetic.flushed(x.astype(jnp.float32)) + received
        return self.encode(total, dtype=dtype, key=key, platform=platform, kernels=kernels)

    def num_blocks(self, elements: int) -> int:
        """Returns the number of blocks in a slot.

        Raises:
          ValueError: ``elements`` is not a whole number of blocks.
        """
        if elements < 0 or elements % self.block:
            raise ValueError(
                f"{self.kind}: a slot of {elements} elements is no whole number of blocks of"
                f" {self.block}; pad it with zeros"
            )
        return elements // self.block

    def check_dtype(self, dtype: str) -> None:
        """Raises ValueError where the codec refuses ``dtype``."""
        if (reason := self.refuses(dtype)) is not None:
            raise ValueError(f"{self.kind}: {reason}")

    def check_encode(self, dtype: str, key: jax.Array | None) -> None:
        """Raises ValueError where ``dtype`` is refused, or stochastic rounding has no key."""
        self.check_dtype(dtype)
        if self.needs_key and key is None:
            raise ValueError(
                f"{self.kind}(rounding='stochastic'): encoding needs a PRNG key and got none; pass"
                " key=jax.random.key(step), or use rounding='nearest'"
            )

    def check_decode(self, wire: jax.Array, elements: int, dtype: str) -> None:
        """Raises ValueError where ``dtype`` is refused, or ``wire`` encodes something else."""
        self.check_dtype(dtype)
        items = self.wire_items(elements)
        if wire.shape[-1:] != (items,) or wire.dtype != self.wire_dtype:
            raise ValueError(
                f"{self.kind}: a slot of {elements} elements is {self.wire_dtype}[..., {items}],"
                f" not {wire.dtype}{list(wire.shape)}"
            )
