"""Rates and durations as people write them."""

from __future__ import annotations

import re

_BITS_PER_S = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
_MOST_BITS_PER_S = 10**12


def parse_rate(text: str) -> int:
    """Returns the bits per second of ``200mbit``, ``1.5gbit`` or ``64kbit``.

    Raises:
      ValueError: it is no rate, or not between 1 kbit and 1000 gbit.
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kmg]bit)", text.strip().lower(), re.ASCII)
    if not found:
        raise ValueError(f"{text!r} is no rate; write for example 200mbit, 1.5gbit or 64kbit")
    rate_bits_per_s = round(float(found[1]) * _BITS_PER_S[found[2]])
    if not 1000 <= rate_bits_per_s <= _MOST_BITS_PER_S:
        raise ValueError(f"{text!r}: a rate is between 1kbit and 1000gbit")
    return rate_bits_per_s


def parse_rates(text: str, num_hosts: int) -> tuple[int, ...]:
    """Returns the bits per second of each host: one rate for all, or one for each.

    Raises:
      ValueError: one is no rate, or there are neither 1 nor ``num_hosts``.
    """
    rates = tuple(parse_rate(part) for part in text.split(","))
    if len(rates) not in (1, num_hosts):
        raise ValueError(
            f"{text!r} has {len(rates)} rates; {num_hosts} hosts take 1 or {num_hosts}"
        )
    return rates * num_hosts if len(rates) == 1 else rates


def readable_rate(rate_bits_per_s: int) -> str:
    """Writes a rate as `parse_rate` reads it."""
    for unit in ("gbit", "mbit"):
        if rate_bits_per_s >= _BITS_PER_S[unit]:
            return f"{rate_bits_per_s / _BITS_PER_S[unit]:.12g}{unit}"
    return f"{rate_bits_per_s / 1000:.12g}kbit"


def parse_duration(text: str) -> float:
    """Returns the seconds of ``300s``, ``300``, ``5min`` or ``1h``.

    Raises:
      ValueError: it is no duration, or zero.
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|min|h|)", text.strip(), re.ASCII)
    duration_s = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not duration_s:
        raise ValueError(f"{text!r} is no duration; write for example 300s, 5min or 1h")
    return duration_s
