"""Reads devices and the axes on them from decoded JSON."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from xcoll.errors import unknown
from xcoll.hardware.curves import CodecRate, Curve
from xcoll.hardware.fields import many
from xcoll.hardware.links import AxisLinks, Device, Level, Link
from xcoll.hardware.tables import kinds, load


def read_device(data: object) -> Device | None:
    """Returns the device that ``data`` describes; None for None.

    Raises:
      TypeError, ValueError: a field is missing, unknown, or has a wrong value; the figures are of
        another version of the hardware table.
    """
    if data is None:
        return None
    values = read_fields(Device, data)
    rates = many("Device", "codec_rates", values.get("codec_rates", ()))
    values["codec_rates"] = tuple(CodecRate(**read_fields(CodecRate, rate)) for rate in rates)
    device = Device(**values)
    table = load(device.kind)["version"] if device.kind in kinds() else device.version
    if device.version not in ("", table):
        raise ValueError(
            f"its figures are of version {device.version!r} of the table of {device.kind}, which"
            f" is at {table!r} here; make it anew with Topology.parse"
        )
    return device


def read_axes(data: object) -> tuple[AxisLinks, ...]:
    """Returns what each axis lies on.

    Raises:
      TypeError, ValueError: a field is missing, unknown, or has a wrong value.
    """
    return tuple(map(_axis, many("Topology", "axes", data)))


def read_curves(data: object) -> tuple[Curve, ...]:
    """Returns what was measured.

    Raises:
      TypeError, ValueError: a field is missing, unknown, or has a wrong value.
    """
    curves = many("Topology", "measured", data)
    return tuple(Curve(**read_fields(Curve, curve)) for curve in curves)


def read_fields(kind: type, data: object) -> dict[str, Any]:
    """Returns the fields of an object: all that the data class needs, and no others.

    Raises:
      TypeError: it is no object.
      ValueError: a field is missing or unknown.
    """
    name = kind.__name__
    if not isinstance(data, dict):
        raise TypeError(f"{name}: an object is expected, not {data!r}")
    known = {f.name: f for f in fields(kind)}
    for key in data:
        if key not in known:
            raise ValueError(unknown(name, "field", key, known))
    missing = [k for k, f in known.items() if k not in data and f.default is MISSING]
    if missing:
        raise ValueError(f"{name}: {missing[0]!r} is missing")
    return dict(data)


def _axis(data: object) -> AxisLinks:
    values = read_fields(AxisLinks, data)
    levels = [read_fields(Level, level) for level in many("AxisLinks", "levels", values["levels"])]
    for level in levels:
        level["link"] = Link(**read_fields(Link, level["link"]))
    return AxisLinks(name=values["name"], levels=tuple(Level(**level) for level in levels))
