"""Budgets: what a compiled program may send, wait for and hold at most."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from xcoll.errors import unknown
from xcoll.hlo.reader import KINDS
from xcoll.units import read_bytes, read_time

_KEYS: dict[str, tuple[str, ...] | None] = {
    "wire_bytes": None,
    "count": (*KINDS, "total"),
    "time": ("exposed", "share"),
    "memory": ("total", "arguments", "outputs", "temporaries", "code"),
}
"""The tables and their keys; None for the axes of the mesh."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One line of a budget.

    Attributes:
      table: one of ``"wire_bytes"``, ``"count"``, ``"time"`` and ``"memory"``.
      key: what of it.
      allowed: bytes, a number of operations, picoseconds (``time.exposed``), or a fraction of the
        step (``time.share``). As much is still within the budget.
    """

    table: str
    key: str
    allowed: int | float

    @property
    def name(self) -> str:
        """Table and key."""
        return f"{self.table}.{self.key}"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits that a program is held to; `read_budget` reads it.

    Attributes:
      limits: at least one.
      name: of its file, for messages.
    """

    limits: tuple[Limit, ...]
    name: str = "budget"

    def check_axes(self, axes: Collection[str]) -> None:
        """Checks that the mesh has the axes whose bytes are limited.

        Raises:
          ValueError: it has not.
        """
        for limit in self.limits:
            if limit.table == "wire_bytes" and limit.key not in axes:
                raise ValueError(unknown(f"{self.name} [wire_bytes]", "axis", limit.key, axes))


def read_budget(source: str | os.PathLike[str] | Mapping[str, Any] | Budget) -> Budget:
    """Reads a budget.

    All limits are for one device and one execution of the program, in which every branch counts
    as taken::

        [wire_bytes]          # that the busiest device sends over a mesh axis
        data = "64MiB"        # or 67108864
        [count]               # collective operations in the program, however often each runs;
                              # a send between TPU slices also counts as what it carries out
        all-gather = 4
        total = 10
        [time]
        exposed = "3ms"       # predicted time that a device waits for collectives
        share = 0.2           # the same as a fraction of the step
        [memory]              # total, arguments, outputs, temporaries, code
        total = "80GiB"

    Args:
      source: path of a TOML file, its tables as a mapping, or a budget, which is returned.

    Raises:
      OSError: the file cannot be read.
      TypeError: ``source`` is none of these.
      ValueError: no TOML, nothing limited, an unknown table or key, or a value that is no amount.

    Example:
      >>> read_budget({"wire_bytes": {"data": "64MiB"}}).limits
      (Limit(table='wire_bytes', key='data', allowed=67108864),)
    """
    if isinstance(source, Budget):
        return source
    if isinstance(source, Mapping):
        return _budget("budget", source)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"budget={source!r}: must be the path of a TOML file, a mapping of its tables, or a"
            " Budget"
        )
    name = os.path.basename(source)
    with open(source, "rb") as file:
        try:
            tables = tomllib.load(file)
        except ValueError as err:  # of TOML, or of UTF-8
            raise ValueError(f"{name}: no TOML: {err}") from err
        except RecursionError:
            raise ValueError(f"{name}: no TOML: it is nested too deeply") from None
    return _budget(name, tables)


def _budget(name: str, tables: Mapping[str, Any]) -> Budget:
    limits = []
    for table, values in tables.items():
        if table not in _KEYS:
            raise ValueError(unknown(name, "table", table, _KEYS))
        if not isinstance(values, Mapping):
            raise ValueError(f"{name}: {table} = {values!r}: a table is expected, [{table}]")
        keys = _KEYS[table]
        for key, value in values.items():
            if keys is not None and key not in keys:
                raise ValueError(unknown(f"{name} [{table}]", "key", key, keys))
            allowed = _amount(f"{name} [{table}] {key} =", table, key, value)
            limits.append(Limit(table=table, key=key, allowed=allowed))
    if not limits:
        raise ValueError(f"{name}: nothing is limited; tables: {', '.join(_KEYS)}")
    return Budget(limits=tuple(limits), name=name)


def _amount(where: str, table: str, key: str, value: object) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (table, key) == ("time", "share"):
        if isinstance(value, int | float) and is_number and 0 <= value <= 1:  # so no NaN
            return value
        raise ValueError(f"{where} {value!r}: a fraction of the step is expected, from 0 to 1")
    if (table, key) == ("time", "exposed"):
        if isinstance(value, str):
            return read_time(where, value)
        raise ValueError(f"{where} {value!r}: a time with its unit is expected, such as '3ms'")
    if isinstance(value, int) and is_number and value >= 0:
        return value
    if table == "count":
        raise ValueError(f"{where} {value!r}: a number of operations is expected, 0 or more")
    if isinstance(value, str):
        return read_bytes(where, value)
    raise ValueError(f"{where} {value!r}: bytes are expected, such as 4096 or '64MiB'")
