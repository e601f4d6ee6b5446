"""The tables of this package: one JSON file a kind of hardware, a source beside each figure."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

_LIBRARIES = ("nccl",)


@functools.cache
def load(name: str) -> dict[str, Any]:
    """Returns the table of a kind of hardware, e.g. ``"v5e"``, or of a library, ``"nccl"``.

    The caller must not change it.

    >>> load("v5e")["figures"]["ici_bandwidth"]["value"]
    45000000000
    """
    text = resources.files("xcoll.hardware").joinpath(f"{name}.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


@functools.cache
def kinds() -> tuple[str, ...]:
    """Returns the names of the kinds of hardware there are tables for, sorted."""
    files = (entry.name for entry in resources.files("xcoll.hardware").iterdir())
    names = sorted(f.removesuffix(".json") for f in files if f.endswith(".json"))
    return tuple(n for n in names if n not in _LIBRARIES)


def figure(name: str, key: str) -> Any:
    """Returns one figure of a table, in the unit the table states.

    >>> figure("h100", "network_bandwidth")
    50000000000
    """
    return load(name)["figures"][key]["value"]


@functools.cache
def kind_of_device(device_kind: str) -> str | None:
    """Returns the table for what jax calls ``device.device_kind``, or None.

    >>> kind_of_device("TPU v5 lite"), kind_of_device("abacus")
    ('v5e', None)
    """
    wanted = device_kind.lower()
    best: tuple[int, str] | None = None
    for name in kinds():
        for kind in load(name)["device_kinds"]:
            # A longer name may follow ("NVIDIA H200 141GB"), but the longest match wins: a
            # "TPU v5 lite" is no "TPU v5".
            if wanted == kind.lower() or wanted.startswith(kind.lower() + " "):
                best = max(best or (0, ""), (len(kind), name))
    return best[1] if best else None
