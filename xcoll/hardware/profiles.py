"""Profiles: what was measured on a mesh, in a file, and whether it is of the mesh at hand."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from xcoll.files import prepare_file, write_text
from xcoll.records import is_version, read

FORMAT = 3
"""Version of the files. What is measured, and what it means, is part of it."""

PREFIX = "profile:"
"""What a topology's text begins with where it names a profile."""

FIX = "measure this mesh with `xcoll tune` (or xcoll.tune)"


@dataclass(frozen=True, kw_only=True)
class System:
    """What a profile is of. It serves a mesh that is alike in all of this.

    Attributes:
      platform: ``"cpu"``, ``"tpu"`` or ``"gpu"``.
      device_kind: as jax calls it.
      jax_version: of the jax that measured.
      axes: mesh axes, in the mesh's order.
      axis_sizes: their sizes.
      places: of each device, row-major over the axes: number of its process, and where it is
        (``coords``, ``core_on_chip`` and ``slice_index`` of a TPU, else its number in the process).
    """

    platform: str
    device_kind: str
    jax_version: str
    axes: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        axes, sizes = self.axes, self.axis_sizes
        if len(axes) != len(sizes) or len(self.places) != math.prod(sizes) or not all(self.places):
            raise ValueError(
                f"system: axes {axes} of sizes {sizes} and {len(self.places)} places of devices do"
                " not fit each other: each axis needs a size, and each device a place"
            )

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh) -> System:
        """Returns what a mesh is of."""
        devices = list(mesh.devices.flat)
        return cls(
            platform=str(devices[0].platform),
            device_kind=" and ".join(sorted({str(d.device_kind) for d in devices})),
            jax_version=jax.__version__,
            axes=tuple(map(str, mesh.axis_names)),
            axis_sizes=tuple(mesh.devices.shape),
            places=tuple(_places(devices)),
        )

    @property
    def num_processes(self) -> int:
        """Processes that have devices of the mesh."""
        return len({place[0] for place in self.places})

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits; equal where a profile of the one serves the other.

        The version of jax is not in it: a newer jax makes the profile anew in the same place.
        """
        values = {name: value for name, value in asdict(self).items() if name != "jax_version"}
        return _digest(values)

    def differences(self, other: System) -> Iterator[str]:
        """Yields what the other one, the mesh at hand, has otherwise."""
        if (self.platform, self.device_kind) != (other.platform, other.device_kind):
            yield (
                f"it is of {self.device_kind} ({self.platform}), the mesh of {other.device_kind}"
                f" ({other.platform})"
            )
        mine, theirs = _axes(self), _axes(other)
        if mine != theirs:
            yield f"it is of axes {mine}, the mesh has {theirs}"
        elif self.num_processes != other.num_processes:
            yield f"it is of {self.num_processes} processes, the mesh has {other.num_processes}"
        elif self.places != other.places:
            yield "its devices lie in other places, or in another order, than those of the mesh"
        if self.jax_version != other.jax_version:
            yield f"it was measured with jax {self.jax_version}, and this is {other.jax_version}"


def prepare(call: str, path: str | os.PathLike[str]) -> None:
    """Makes the directory of a profile, and sees that it can be written: measuring takes long.

    Raises:
      OSError: it can't.
    """
    try:
        prepare_file(path)
    except OSError as err:
        place = os.fspath(path)
        raise OSError(
            err.errno,
            f"{call}: the profile can't be written to {place!r}: {err.strerror}; say where with"
            " --out FILE (out=)",
        ) from None


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes the text of a profile, whole or not at all; makes its directory.

    Raises:
      OSError: it can't be written.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def encode(content: Mapping[str, Any]) -> str:
    """Returns the text of a profile, with its version and a checksum."""
    content = json.loads(json.dumps(content))
    whole = {"version": FORMAT, "checksum": _digest(content), **content}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def load(call: str, path: str | os.PathLike[str]) -> tuple[dict[str, Any], System]:
    """Returns what a profile's file holds, and what it is of.

    Raises:
      FileNotFoundError: there is none.
      OSError: it can't be read.
      ValueError: it is no profile, was changed or cut since it was written, or is of another
        version of the format.
    """
    where = f"{call}: {os.fspath(path)}"
    try:
        text = Path(path).read_text("utf-8")
    except FileNotFoundError as err:
        raise FileNotFoundError(err.errno, f"there is no such profile; {FIX}", str(path)) from None
    except OSError as err:
        why = f"{call}: can't be read: {err.strerror}; give the path of a profile's file, or {FIX}"
        raise OSError(err.errno, why, str(path)) from None
    except UnicodeDecodeError:
        raise ValueError(f"{where} is corrupt: it is no text; {FIX}") from None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ValueError(f"{where} is corrupt: no JSON ({err}); {FIX}") from None
    if not isinstance(content, dict) or not {"version", "checksum"} <= content.keys():
        expected = "an object with a 'version' and a 'checksum' is expected"
        raise ValueError(f"{where} is no profile: {expected}; {FIX}")
    version = content.pop("version")
    if not is_version(version, FORMAT):
        raise ValueError(
            f"{where} is of version {version!r} of the format, and this xcoll reads version"
            f" {FORMAT}; {FIX}"
        )
    checksum = content.pop("checksum")
    if checksum != _digest(content):
        raise ValueError(
            f"{where} is corrupt: it was changed or cut since it was written (its checksum does not"
            f" fit); {FIX}"
        )
    try:
        system = read(System, content["system"], "system")
    except (KeyError, ValueError) as err:
        raise ValueError(f"{where} is no profile: {err}; {FIX}") from None
    return content, system


def check(call: str, path: str | os.PathLike[str], system: System, mesh: jax.sharding.Mesh) -> None:
    """Checks that a profile is of a mesh.

    Raises:
      ValueError: it is of another, or was measured by another version of jax; the message says all
        that differs.
    """
    found = list(system.differences(System.of(mesh)))
    if found:
        raise ValueError(
            f"{call}: {os.fspath(path)} is not of this mesh: {'; '.join(found)}; {FIX}"
        )


def path_in(text: str) -> str | None:
    """Returns the path of a profile where a topology's text names one, else None.

    Example:
      >>> path_in("profile:two hosts"), path_in("runs/two.json"), path_in("2*cpu:4@200Mbit")
      ('two hosts', 'runs/two.json', None)
    """
    if text.startswith(PREFIX):
        return text.removeprefix(PREFIX)
    return text if text.endswith(".json") else None


def default_path(system: System) -> Path:
    """Returns where the profile of a system is kept: in the user's directory for caches."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = os.environ.get("XDG_CACHE_HOME") or "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "xcoll" / "profiles" / f"{system.fingerprint}.json"


def _places(devices: Iterable[Any]) -> Iterator[tuple[int, ...]]:
    devices = list(devices)
    own: dict[int, list[int]] = {}
    for device in devices:
        own.setdefault(device.process_index, []).append(device.id)
    for device in devices:
        process = int(device.process_index)
        coords = getattr(device, "coords", None)
        if device.platform == "tpu" and coords is not None:
            core, slice_ = getattr(device, "core_on_chip", 0), getattr(device, "slice_index", 0)
            yield (process, *map(int, coords), int(core or 0), int(slice_ or 0))
        else:
            yield process, sorted(own[process]).index(device.id)


def _axes(system: System) -> str:
    pairs = zip(system.axes, system.axis_sizes, strict=True)
    return ", ".join(f"{axis}={size}" for axis, size in pairs)


def _digest(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
