"""What the links alone take: the bytes that have to cross the busiest one, over its rate."""

from __future__ import annotations

from fractions import Fraction

from xcoll.codecs import Codec

COLLECTIVES = ("psum", "psum_scatter", "all_gather", "all_to_all")
"""jax.lax's names of what is measured."""

FRAME_BYTES, SEGMENT_BYTES = 1514, 1448
"""An Ethernet frame, and the payload of the TCP segment in it, with timestamps."""


def crossing(collective: str, hosts: int, devices: int) -> Fraction:
    """Returns the payloads that have to cross a host's link each way.

    A payload is what one device holds: the operand, or what an all-gather ends with. Devices of a
    host add up, or share, what they have before and after anything crosses.

    Args:
      collective: one of `COLLECTIVES`, over all devices.
      hosts: with a link each.
      devices: of each host.

    References:
      Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
      JPDC 69(2), 2009: 2 (n - 1) / n for an all-reduce.

    Example:
      >>> [str(crossing(name, 4, 2)) for name in COLLECTIVES]
      ['3/2', '3/4', '3/4', '3/2']
    """
    others = Fraction(hosts - 1, hosts)
    return {
        "psum": 2 * others,
        "psum_scatter": others,
        "all_gather": others,
        "all_to_all": devices * others,
    }[collective]


def shared_bytes(collective: str, payload_bytes: int, num_ranks: int) -> int:
    """Returns the payload of whole float32 numbers that comes next to so many bytes, at most them.

    All ranks have as many numbers of it, but for an all-reduce, and each at least one.

    Args:
      collective: one of `COLLECTIVES`.
      payload_bytes: asked for, of one device.
      num_ranks: devices of all hosts.

    Example:
      >>> [shared_bytes(name, 1000, 6) for name in COLLECTIVES]
      [1000, 984, 984, 984]
    """
    each = 4 if collective == "psum" else 4 * num_ranks
    return max(1, payload_bytes // each) * each


def encoded_bytes(payload_bytes: int, codec: Codec | None) -> int:
    """Returns the bytes of a float32 payload on the wire, scales included.

    Args:
      payload_bytes: of the float32 numbers.
      codec: how they travel; None for the numbers as they are.

    Example:
      >>> from xcoll import codecs
      >>> encoded_bytes(1 << 20, None), encoded_bytes(1 << 20, codecs.cast("bfloat16"))
      (1048576, 524288)
    """
    if codec is None:
        return payload_bytes
    return codec.wire_bytes((payload_bytes // 4,), "float32")


def bound_s(wire_bytes: Fraction | int, rate_bits_per_s: int) -> float:
    """Returns the seconds that a link takes for bytes, if it carried nothing but them.

    Example:
      >>> bound_s(25_000_000, 200_000_000)
      1.0
    """
    return float(8 * Fraction(wire_bytes) / rate_bits_per_s)


def goodput_bound_s(wire_bytes: Fraction | int, rate_bits_per_s: int) -> float:
    """Returns the same with the headers that TCP, IP and Ethernet add.

    Example:
      >>> round(goodput_bound_s(1 << 24, 200_000_000), 3)
      0.702
    """
    return bound_s(wire_bytes * Fraction(FRAME_BYTES, SEGMENT_BYTES), rate_bits_per_s)
