"""What the command line may say."""

from __future__ import annotations

from pathlib import Path

from bench.cluster.quantities import parse_duration, parse_rate
from bench.options import Parser, converted, file
from bench.regret.grid import COLLECTIVES, SIZES
from xcoll.units import read_bytes

_QUICK = {
    "meshes": [(2, 4), (4, 2)],
    "rates": [parse_rate("1gbit")],
    "sizes": [4096, 1 << 20, 4 << 20],
    "budget": 105.0,
    "tune_budget": 12.0,
    "fresh": True,
    "out": Path("runs/regret-quick"),
}
"""Two minutes of it: what `make bench` runs."""


SIZE_STEP = 4096
"""Sizes are multiples of so many bytes."""


def parser() -> Parser:
    """Returns what reads the command line."""
    words = Parser(
        _QUICK,
        prog="python -m bench.regret",
        description="Times every plan that the planner considers for a grid of collectives, sizes,"
        " meshes and rates, and says what its choices cost. Needs root and iproute2. What is"
        " measured is kept, and a later run goes on from there.",
    )
    add = words.add_argument
    add("--budget", type=converted(parse_duration), default=1200.0, metavar="TIME",
        help="all is done in about this time: 20min (the default), 90s; cases that it is too short"
        " for are left out and named")  # fmt: skip
    add("--mesh", dest="meshes", type=converted(_mesh), nargs="+", default=[(2, 4), (4, 2)],
        metavar="HOSTSxDEVICES", help="2x4 4x2")  # fmt: skip
    add("--rate", dest="rates", type=converted(parse_rate), nargs="+", metavar="RATE",
        default=[parse_rate(rate) for rate in ("50mbit", "200mbit", "1gbit")],
        help="50mbit 200mbit 1gbit")  # fmt: skip
    add("--collective", dest="collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES,
        metavar="NAME", help=" ".join(COLLECTIVES))  # fmt: skip
    add("--size", dest="sizes", type=converted(_size), nargs="+", default=SIZES, metavar="SIZE",
        help="of operand or result, the larger: 4KiB 64KiB 1MiB 4MiB 16MiB 64MiB")  # fmt: skip
    add("--congestion", default="reno", metavar="NAME", help="TCP's congestion control (reno)")
    add("--profile", type=file, metavar="FILE",
        help="plan from this; by default one is measured for each cluster")  # fmt: skip
    add("--tune-budget", type=converted(parse_duration), default=60.0, metavar="TIME",
        help="for measuring each profile (60s)")  # fmt: skip
    add("--out", type=Path, default=Path("runs/regret"), metavar="DIR",
        help="results, profiles and the picture (runs/regret, runs/regret-quick)")  # fmt: skip
    add("--fresh", action="store_true", help="forget what is there, profiles too")
    add("--report", action="store_true", help="measure nothing, report what is there")
    add("--quick", action="store_true", help="a part of the grid in about two minutes")
    add("--json", action="store_true", help="the figures as JSON")
    return words


def _mesh(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{text!r} is no mesh; write hosts x devices, for example 2x4")
    hosts, devices = map(int, parts)
    if hosts < 2 or devices < 1:
        raise ValueError(f"{text!r}: two hosts or more, with a device each or more")
    return hosts, devices


def _size(text: str) -> int:
    num_bytes = read_bytes("--size", text)
    if not num_bytes or num_bytes % SIZE_STEP:
        raise ValueError(f"{text!r}: sizes are multiples of 4 KiB, so that all ranks have as much")
    return num_bytes
