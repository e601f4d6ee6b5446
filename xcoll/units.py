"""Sizes and times as people read them."""

from __future__ import annotations


def readable_bytes(num_bytes: int) -> str:
    """Reads bytes as people do.

    >>> readable_bytes(16777216), readable_bytes(500)
    ('16 MiB', '500 B')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"


def readable_time(time_ps: int | None) -> str:
    """Reads picoseconds as people do; None, what is not known, as a dash.

    >>> readable_time(743_000_000_000), readable_time(12_500_000), readable_time(None)
    ('743 ms', '12.5 µs', '-')
    """
    if time_ps is None:
        return "-"
    for unit, scale in (("s", 10**12), ("ms", 10**9), ("µs", 10**6)):
        if time_ps >= scale:
            return f"{time_ps / scale:.3g} {unit}"
    return f"{time_ps / 1000:.3g} ns"


def readable_rate(bytes_per_s: int) -> str:
    """Reads bytes per second as people do.

    >>> readable_rate(90_000_000_000), readable_rate(23_900_000)
    ('90.0 GB/s', '23.9 MB/s')
    """
    if bytes_per_s >= 10**9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s"
