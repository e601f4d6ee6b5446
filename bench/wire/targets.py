"""How fast the variants are to be."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
_SMALL_BYTES = range(64, (4 << 10) + 1)


@dataclass(frozen=True)
class Target:
    """A limit on a ratio.

    Attributes:
      ratio: the limit.
      of: ``"bound"``: at most so many times the bound; ``"lax"``: at least so many times as fast
        as jax.lax.
    """

    ratio: float
    of: str

    def is_met(self, over_bound: float | None, speedup: float) -> bool:
        """Whether measured ratios keep it."""
        if self.of == "bound":
            return over_bound is not None and over_bound <= self.ratio
        return speedup >= self.ratio

    def __str__(self) -> str:
        sign, of = ("≤", "bound") if self.of == "bound" else ("≥", "lax")
        return f"{sign} {self.ratio:g} x {of}"


def _targets(exact: float | None, int8: float, int4: float) -> dict[str, Target]:
    found = {"int8": Target(int8, "lax"), "int4": Target(int4, "lax")}
    return found | ({"exact": Target(exact, "bound")} if exact else {})


_OF_16_MIB = {
    (2, 4, 50_000_000): _targets(1.1, 6.5, 12.0),
    (2, 4, 200_000_000): _targets(1.1, 5.5, 9.0),
    (2, 4, 1_000_000_000): _targets(1.25, 3.5, 4.5),
    (4, 2, 200_000_000): _targets(None, 3.6, 6.0),
}
"""psum of 16 MiB a device, by hosts, devices of each and rate."""


def target(
    collective: str, payload_bytes: int, variant: str, cluster: tuple[int, int, int]
) -> Target | None:
    """Returns what a variant is to reach, None where there is no target.

    Args:
      collective: jax.lax's name.
      payload_bytes: of each device.
      variant: ``"exact"``, or a codec's name.
      cluster: hosts, devices of each, and rate in bits per second.

    Example:
      >>> print(target("psum", 16 * MIB, "int4", (2, 4, 200_000_000)))
      ≥ 9 x lax
    """
    if collective != "psum":
        return None
    if payload_bytes in _SMALL_BYTES and variant == "exact" and cluster[0] == 4:
        return Target(3.0, "lax")
    return _OF_16_MIB.get(cluster, {}).get(variant) if payload_bytes == 16 * MIB else None
