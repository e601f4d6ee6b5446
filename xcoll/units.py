"""Sizes and times as people read them."""

from __future__ import annotations

import re
from fractions import Fraction

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_MOST_BYTES = 2**50
_PICOSECONDS = {"s": 10**12, "ms": 10**9, "us": 10**6, "µs": 10**6, "ns": 10**3, "ps": 1}
_MOST_S = 10**6
# Python reads no integers of thousands of digits.
_MOST_DIGITS = 30


def in_digits(value: float, count: int = 3) -> str:
    """Reads a number that is not negative in so many digits, large ones as whole numbers.

    >>> in_digits(12.346), in_digits(0.5), in_digits(1234.5), in_digits(999.7)
    ('12.3', '0.5', '1234', '1000')
    """
    return f"{value:.{count}g}" if value < 10**count - 0.5 else f"{value:.0f}"


def counted(number: int, what: str) -> str:
    """Counts things, of which one is written without an s.

    >>> counted(1, "site"), counted(2, "site"), counted(0, "site")
    ('1 site', '2 sites', '0 sites')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def readable_bytes(num_bytes: int) -> str:
    """Reads bytes as people do.

    >>> readable_bytes(16777216), readable_bytes(500)
    ('16 MiB', '500 B')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{in_digits(num_bytes / scale, 4)} {unit}"
    return f"{num_bytes} B"


def readable_time(time_ps: int | None) -> str:
    """Reads picoseconds as people do; None, what is not known, as a dash.

    >>> readable_time(743_000_000_000), readable_time(12_500_000), readable_time(None)
    ('743 ms', '12.5 µs', '-')
    >>> readable_time(999_600_000), readable_time(5_000 * 10**12)
    ('1 ms', '5000 s')
    """
    if time_ps is None:
        return "-"
    for unit, scale in (("s", 10**12), ("ms", 10**9), ("µs", 10**6)):
        if time_ps >= 0.9995 * scale:  # 999.6 µs are 1 ms in three digits
            return f"{in_digits(time_ps / scale)} {unit}"
    return f"{in_digits(time_ps / 1000)} ns"


def readable_seconds(time_s: float | None) -> str:
    """Reads seconds as people do, to the picosecond; None, what is not known, as a dash.

    >>> readable_seconds(0.743), readable_seconds(12.5e-6), readable_seconds(None)
    ('743 ms', '12.5 µs', '-')
    """
    return readable_time(None if time_s is None else round(time_s * 10**12))


def readable_rate(bytes_per_s: int) -> str:
    """Reads bytes per second as people do.

    >>> readable_rate(90_000_000_000), readable_rate(23_900_000)
    ('90.0 GB/s', '23.9 MB/s')
    """
    if bytes_per_s >= 10**9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s"


def read_bytes(where: str, text: str) -> int:
    """Returns the number of bytes that people write; ``where`` starts the message of an error.

    Raises:
      ValueError: it is none, or more than 2^50.

    >>> read_bytes("--bytes", "16MiB"), read_bytes("--bytes", "1KB"), read_bytes("--bytes", "500")
    (16777216, 1000, 500)
    """
    match = re.fullmatch(r"([0-9]+)\s*([kmg]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _BYTES:
        raise ValueError(f"{where} {text}: no number of bytes; write it as 4096, 64KiB or 16MiB")
    number = int(match[1]) * _BYTES[match[2]] if len(match[1]) < _MOST_DIGITS else _MOST_BYTES + 1
    if number > _MOST_BYTES:
        raise ValueError(f"{where} {text}: too large; write at most {_MOST_BYTES // 2**30}GiB")
    return number


def read_time(where: str, text: str) -> int:
    """Returns the picoseconds of a time that people write; ``where`` starts an error's message.

    Less than a picosecond is dropped.

    Raises:
      ValueError: it is none, or more than 10^6 seconds.

    >>> read_time("exposed", "1.5ms"), read_time("exposed", "20 us"), read_time("exposed", "0s")
    (1500000000, 20000000, 0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zµ]+)", text.strip().lower())
    if match is None or match[2] not in _PICOSECONDS:
        raise ValueError(f"{where} {text}: no time; write it as 3ms, 1.5s or 200us")
    small = len(match[1]) < _MOST_DIGITS
    time_ps = int(Fraction(match[1]) * _PICOSECONDS[match[2]]) if small else -1
    if not 0 <= time_ps <= _MOST_S * 10**12:
        raise ValueError(f"{where} {text}: too large; write at most {_MOST_S} s")
    return time_ps
