"""Reads topologies from text such as ``"2*v5e:16x16"`` and ``"2*cpu:4@200Mbit"``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from xcoll.errors import unknown
from xcoll.hardware.fields import LARGEST, axis_sizes
from xcoll.hardware.links import AxisLinks, Device
from xcoll.hardware.placement import (
    Dimension,
    cpu_dimensions,
    gpu_dimensions,
    place,
    tpu_dimensions,
)
from xcoll.hardware.tables import kinds, load

FORM = "[COUNT*]KIND:SIZE[xSIZE...][@RATE[,RATE...]]"
"""The form of a topology's text; see `xcoll.topology.Topology.parse`."""

# Not \d, which is every script's digits.
_NUMBER = re.compile(r"[0-9]+")
_COUNT = re.compile(r"([0-9]+)\*")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKMGT]?)(bit|B)(?:/s)?")
_DIGITS = 18
_MOST = 2**31
_SCALE = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Parsed:
    """A topology's text, taken apart."""

    kind: str
    count: int
    sizes: tuple[int, ...]
    rates_bytes_per_s: tuple[int, ...]


def read(text: str, axes: Mapping[str, int] | None) -> tuple[Device, tuple[AxisLinks, ...]]:
    """Returns the device and the axes that ``text`` describes.

    Raises:
      TypeError: see `xcoll.topology.Topology.parse`.
      ValueError: see `xcoll.topology.Topology.parse`.
    """
    if not isinstance(text, str):
        raise TypeError(f"Topology.parse({text!r}): must be text, such as 'v5e:4x4'")
    if axes is not None:
        axes = axis_sizes(f"Topology.parse({text!r})", axes)
    parsed = take_apart(text)
    platform = load(parsed.kind)["platform"]
    if platform == "tpu":
        dimensions = _tpu(text, parsed, axes)
    elif platform == "gpu":
        dimensions = gpu_dimensions(
            parsed.kind, parsed.sizes[0], parsed.count, parsed.rates_bytes_per_s
        )
    else:
        dimensions = cpu_dimensions(parsed.sizes[0], parsed.count, parsed.rates_bytes_per_s)
    if axes is None:
        axes = {d.name: d.size for d in dimensions}
    devices = math.prod(d.size for d in dimensions)
    if math.prod(axes.values()) != devices:
        raise ValueError(
            f"Topology.parse({text!r}, axes={axes}): the text describes {devices} devices,"
            f" the axes make {math.prod(axes.values())}; make the products equal"
        )
    try:
        placed = place(dimensions, axes)
    except ValueError as err:
        raise ValueError(f"Topology.parse({text!r}, axes={axes}): {err}") from None
    return Device.named(parsed.kind, parsed.count), placed


def take_apart(text: str) -> Parsed:
    """Returns the parts of ``text``, checked against the table of its hardware.

    Raises:
      ValueError: malformed text, with the place marked.
    """
    at = 0
    match = _COUNT.match(text)
    count = _number(text, 0, match[1]) if match else 1
    if match:
        at = match.end()
        if count < 1:
            raise _error(text, 0, "the count must be at least 1")
    match = _KIND.match(text, at)
    if not match:
        raise _error(text, at, f"the kind of hardware is expected here, one of {_kinds()}")
    kind = match[0].lower()
    if kind not in kinds():
        sentence = unknown(f"Topology.parse({text!r})", "hardware", match[0], kinds())
        raise ValueError(f"{sentence}\n  {text}\n  {' ' * at}^")
    at = match.end()
    if text[at : at + 1] != ":":
        raise _error(text, at, "':' and the sizes are expected here")
    sizes: list[int] = []
    starts: list[int] = []
    at += 1
    while True:
        match = _NUMBER.match(text, at)
        size = _number(text, at, match[0]) if match else 0
        if not match or size < 1:
            raise _error(text, at, "a size of at least 1 is expected here")
        sizes.append(size)
        starts.append(at)
        at = match.end()
        if text[at : at + 1] != "x":
            break
        at += 1
    _check_sizes(text, kind, sizes, starts)
    rates, at = _rates(text, at, count)
    if at != len(text):
        raise _error(text, at, "unexpected; the text should end here")
    if kind == "cpu" and count > 1 and not rates:
        raise _error(text, at, "the rate between CPU hosts is needed here, for example '@1Gbit'")
    return Parsed(kind, count, tuple(sizes), rates)


def _number(text: str, at: int, digits: str) -> int:
    if len(digits) > _DIGITS or int(digits) > _MOST:
        raise _error(text, at, f"too large, at most {_MOST}")
    return int(digits)


def _check_sizes(text: str, kind: str, sizes: list[int], starts: list[int]) -> None:
    table = load(kind)
    wanted = table["dimensions"]["value"] if "dimensions" in table else 1
    if len(sizes) != wanted:
        at = starts[min(len(starts), wanted + 1) - 1]
        sizes_of = "1 size" if wanted == 1 else f"{wanted} sizes"
        example = "x".join(["4"] * wanted)
        raise _error(text, at, f"{kind} takes {sizes_of}, for example '{kind}:{example}'")
    largest = table["largest"]["value"] if "largest" in table else None
    for size, at in zip(sizes, starts, strict=True):
        if largest is not None and size > largest:
            raise _error(
                text,
                at,
                f"at most {largest} for {kind}; write several as 'COUNT*{kind}:...'",
            )


def _rates(text: str, at: int, count: int) -> tuple[tuple[int, ...], int]:
    if text[at : at + 1] != "@":
        return (), at
    start = at
    rates: list[int] = []
    while text[at : at + 1] == ("," if rates else "@"):
        match = _RATE.match(text, at + 1)
        if not match or not match[1].strip("0."):
            raise _error(
                text, at + 1, "a rate is expected here, for example 200Mbit, 10Gbit or 5GB"
            )
        number, scale, unit = match.groups()
        if len(number) > _DIGITS:
            raise _error(text, at + 1, f"a rate of at most {_DIGITS} digits is expected here")
        whole, _, fraction = number.partition(".")
        # Integers throughout: a plan must not depend on how a processor rounds.
        scaled = int(whole + fraction) * _SCALE[scale] // 10 ** len(fraction)
        rates.append(max(1, scaled // 8 if unit == "bit" else scaled))
        if rates[-1] > LARGEST:
            raise _error(text, at + 1, f"a rate of at most {LARGEST} bytes/s is expected here")
        at = match.end()
    if count == 1:
        raise _error(text, start, "a rate is that between hosts or slices, and there is only one")
    if len(rates) not in (1, count):
        raise _error(text, start, f"give one rate, or one for each of the {count}")
    return tuple(rates), at


def _tpu(text: str, parsed: Parsed, axes: Mapping[str, int] | None) -> list[Dimension]:
    table = load(parsed.kind)
    choices = table["devices_per_chip"]["value"]
    chips = parsed.count * math.prod(parsed.sizes)
    devices = math.prod(axes.values()) if axes is not None else 0
    per_chip = next((c for c in choices if c * chips == devices), choices[0])
    if (
        parsed.count > 1
        and not parsed.rates_bytes_per_s
        and "dcn_bandwidth" not in table["figures"]
    ):
        raise _error(
            text, len(text), f"the rate between {parsed.kind} slices is not known; add '@RATE'"
        )
    return tpu_dimensions(
        parsed.kind, parsed.sizes, parsed.count, per_chip, parsed.rates_bytes_per_s
    )


def _kinds() -> str:
    return ", ".join(kinds())


def _error(text: str, at: int, what: str) -> ValueError:
    # The first line says everything by itself; the others show the place.
    return ValueError(
        f"Topology.parse({text!r}): malformed at character {at + 1}: {what}; the form is {FORM}"
        f"\n  {text}\n  {' ' * at}^"
    )
